"""What calls cost: sums of terms, whose coefficients are fitted to what was measured."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Counts = Mapping[str, float]
"""How much of each term there was in a round: ``{"calls": 8, "envs": 64, "bytes": 5120}``."""


class Fit(NamedTuple):
    """Seconds of CPU time as a sum: ``base`` once, and each term as often as it is there."""

    seconds: dict[str, float]

    def of(self, counts: Counts) -> float:
        return sum(each * {"base": 1.0, **counts}[term] for term, each in self.seconds.items())


def fit(terms: Sequence[str], counts: Sequence[Counts], seconds: Sequence[float]) -> Fit:
    """Least squares in the relative error, with no coefficient below zero.

    Nothing has a negative cost. Of few terms every subset can be tried: the best one without a
    negative coefficient is the solution.
    """
    measured = np.asarray(seconds, float)
    table = np.array([[{"base": 1.0, **row}[term] for term in terms] for row in counts])
    relative = table / measured[:, None]
    scale = relative.max(axis=0, initial=1e-300)  # bytes and calls are of different sizes
    best, least = np.zeros(len(terms)), np.inf
    for number in range(1, len(terms) + 1):
        for chosen in map(list, itertools.combinations(range(len(terms)), number)):
            found = np.linalg.lstsq(relative[:, chosen] / scale[chosen], np.ones(len(measured)))[0]
            coefficients = np.zeros(len(terms))
            coefficients[chosen] = found / scale[chosen]
            error = float(np.sum((relative @ coefficients - 1) ** 2))
            if found.min() >= 0 and error < least * (1 - 1e-9):
                best, least = coefficients, error
    return Fit(dict(zip(terms, best.tolist(), strict=True)))


class Quantity(NamedTuple):
    """Something that is measured and fitted."""

    words: str
    way: str
    """Of which rounds: those of ``lockstep``, ``first-ready`` or ``chunks``."""
    key: str
    """What it is called in a measurement."""
    terms: tuple[str, ...]


QUANTITIES = {
    "send": Quantity("lockstep, sending", "lockstep", "send", ("base", "calls", "envs")),
    "receive": Quantity(
        "lockstep, receiving", "lockstep", "receive", ("base", "calls", "envs", "bytes")
    ),
    "ray": Quantity("lockstep, Ray's threads", "lockstep", "ray", ("base", "calls", "bytes")),
    "busiest": Quantity(
        "the busiest one of Ray's threads", "lockstep", "busiest", ("base", "calls", "bytes")
    ),
    "ready-send": Quantity(
        "first-ready, sending", "first-ready", "send", ("base", "calls", "envs")
    ),
    "ready-receive": Quantity(
        "first-ready, receiving", "first-ready", "receive", ("base", "calls", "under_way", "envs")
    ),
    # What its threads do by the clock, call or no call, goes into no term of a call.
    "actor": Quantity("an actor's call", "lockstep", "actor", ("base", "envs", "bytes", "seconds")),
    "chunk": Quantity("a chunk, in the caller", "chunks", "main", ("base", "rows")),
    "chunk-ray": Quantity("a chunk, Ray's threads", "chunks", "ray", ("base", "rows")),
    "chunk-actor": Quantity("a chunk, in its actor", "chunks", "actor", ("base", "ticks", "rows")),
}


def counts_of(quantity: Quantity, row: Mapping[str, Any]) -> Counts:
    """What a measurement counted; of one call, where it is an actor's."""
    if quantity.key != "actor" or quantity.way == "chunks":
        return row
    of_call = {term: row[term] / row["calls"] for term in ("envs", "bytes")}
    return {**of_call, "seconds": min(row["wall"])}


class Checked(NamedTuple):
    """A fit, and how far it is off: relative errors.

    Fitted is the least of a measurement's repetitions: what else the machine does only adds to it.
    """

    fit: Fit
    residuals: list[float]
    held_out: dict[str, list[float]]
    """By what the fit was not shown, its errors on that."""


HELD_OUT = {
    "128 actors": lambda row: row["actors"] > 64,
    "k = 8": lambda row: row["per_actor"] == 8,
}


def check(quantity: Quantity, rows: Sequence[Mapping[str, Any]]) -> Checked:
    """Fits a quantity to the measurements of its way; and to parts of them, to predict the rest."""
    rows = [row for row in rows if row["way"] == quantity.way]

    def fitted(known: Sequence[Mapping[str, Any]]) -> Fit:
        return fit(
            quantity.terms,
            [counts_of(quantity, row) for row in known],
            [min(row[quantity.key]) for row in known],
        )

    def errors(found: Fit, seen: Sequence[Mapping[str, Any]]) -> list[float]:
        return [found.of(counts_of(quantity, row)) / min(row[quantity.key]) - 1 for row in seen]

    held_out = {}
    if quantity.way == "lockstep":
        for words, is_out in HELD_OUT.items():
            out = [row for row in rows if is_out(row)]
            known = [row for row in rows if not is_out(row)]
            if out and len(known) > len(quantity.terms):
                held_out[words] = errors(fitted(known), out)
    whole = fitted(rows)
    return Checked(whole, errors(whole, rows), held_out)
