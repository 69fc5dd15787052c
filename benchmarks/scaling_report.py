"""What scaling.json says, for readers: the tables in docs/scaling.md, and figures."""

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scaling_costs import HELD_OUT, QUANTITIES, Checked, Fit, check
from scaling_scenarios import (
    CALLERS,
    CLUSTERS,
    MANY,
    OBSERVED,
    STEPS,
    TAIL,
    costs,
    simulated,
    validate,
)

UNITS = {
    "base": "each time",
    "calls": "a call",
    "under_way": "a call that is looked at",
    "envs": "an environment",
    "rows": "a row",
    "ticks": "a tick",
    "bytes": "a kB",
    "seconds": "a ms of waiting",
}


class Results(NamedTuple):
    """Measurements, and what is made of them."""

    raw: dict[str, Any]
    checked: dict[str, Checked]
    idle: float
    """Share of a core that an actor uses while nobody calls it."""
    validated: list[dict[str, Any]]
    simulated: list[dict[str, Any]]

    @classmethod
    def of(cls, raw: dict[str, Any]) -> "Results":
        rows, cores = raw["rows"], raw["machine"]["cores"]
        checked = {name: check(quantity, rows) for name, quantity in QUANTITIES.items()}
        fits = {name: one.fit for name, one in checked.items()}
        idle = statistics.median(
            row["idle"]["actor"] / row["actors"] for row in rows if row["way"] == "lockstep"
        )
        validated = list(validate(fits, rows, cores))
        return cls(raw, checked, idle, validated, list(simulated(fits)))

    @property
    def fits(self) -> dict[str, Fit]:
        return {name: one.fit for name, one in self.checked.items()}

    def rows(self, way: str, **known: Any) -> list[dict[str, Any]]:
        rows = [row for row in self.raw["rows"] if row["way"] == way]
        return [row for row in rows if all(row[key] == value for key, value in known.items())]

    def case(self, **known: Any) -> dict[str, Any]:
        """The one cluster that was simulated so."""
        (case,) = [
            case
            for case in self.simulated
            if all(case[key] == value for key, value in {"sigma": 0.0, **known}.items())
        ]
        return case

    def efficiency(self, **known: Any) -> float:
        case = self.case(**known)
        return case["rate"] / case["limit"]


# -- tables ----------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"


def signed(error: float) -> str:
    return f"{100 * error:+.0f} %"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def middle_and_worst(errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"{percent(statistics.median(sizes))}, {percent(max(sizes))}" if sizes else ""


def provenance(results: Results) -> str:
    of = results.raw["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in results.raw["versions"].items())
    return (
        f"Measured {results.raw['date']} by `{results.raw['command']}`, {results.raw['minutes']} "
        f"minutes: {of['cpu']}, {of['cores']} cores, {of['memory_gib']} GiB, {of['system']}, load "
        f"average {of['load_before']} before; Python {of['python']}, {versions}."
    )


def measured(results: Results) -> str:
    """Least of the repetitions, and the middle one where they differ."""

    def cell(values: list[float]) -> str:
        return f"{milliseconds(min(values))} ({milliseconds(statistics.median(values))})"

    keys = ("send", "receive", "ray", "busiest", "actor", "wall")
    return table(
        [
            "actors x environments",
            *keys[:2],
            "Ray's threads",
            "busiest",
            "an actor",
            "by the clock",
        ],
        (
            [f"{row['actors']} x {row['per_actor']}{large(row)}", *(cell(row[key]) for key in keys)]
            for row in results.rows("lockstep")
        ),
    )


def large(row: dict[str, Any]) -> str:
    each = row["bytes"] / row["envs"]
    return f", {each / 1e3:.0f} kB each" if each > 200 else ""


def fitted(results: Results) -> str:
    rows = []
    for name, (fit, residuals, held_out) in results.checked.items():
        terms = " + ".join(
            f"{1e6 * seconds * {'bytes': 1e3, 'seconds': 1e-3}.get(term, 1):.3g} {UNITS[term]}"
            for term, seconds in fit.seconds.items()
            if seconds
        )
        out = [middle_and_worst(held_out.get(words, [])) for words in HELD_OUT]
        rows.append([QUANTITIES[name].words, terms, middle_and_worst(residuals), *out])
    head = ["µs of CPU", "=", "off by (middle, worst)", *(f"predicting {w}" for w in HELD_OUT)]
    return table(head, rows)


def others(results: Results) -> str:
    """Sentences on what else was measured."""
    warm, cold = (row for row in results.rows("alone"))
    one, several = results.rows("nodes")

    def caller(row: dict[str, Any]) -> float:
        return min(row["send"]) + min(row["receive"])

    def ms(seconds: float) -> str:
        return f"{milliseconds(seconds)} ms"

    rows = results.rows("lockstep")
    most = max(rows, key=lambda row: row["actors"])
    starts = [row["started"] / row["actors"] for row in rows]
    return "\n".join(
        [
            f"- **Nodes.** With {one['calls']} actors on one raylet a step costs the caller's main "
            f"thread {ms(caller(one))} and Ray's {ms(min(one['ray']))}; on {several['nodes']} "
            f"raylets {ms(caller(several))} and {ms(min(several['ray']))}.",
            f"- **Alone.** A single actor, call after call, uses {ms(min(warm['actor']))} a call, "
            f"and its caller {ms(caller(warm))}. With 10 ms of sleep in each step these are "
            f"{ms(min(cold['actor']))} and {ms(caller(cold))}: others use the caches meanwhile.",
            f"- **Idle.** An actor that nobody calls uses {percent(results.idle)} of a core: Ray's "
            "threads, by the clock.",
            f"- **Memory.** Of {most['actors']} actors each takes {most['pss']} MB as its share "
            f"(PSS; {most['rss']} MB are resident, much of it in common), and what your own code "
            "adds.",
            f"- **Start.** {statistics.median(starts):.2f} s an actor, with "
            f"{results.raw['machine']['cores']} cores busy.",
        ]
    )


def validation(results: Results) -> str:
    def words(row: dict[str, Any]) -> str:
        is_busy, mean, sigma = row["pace"]
        if not mean:
            return "no-op"
        kind = f"{'computes' if is_busy else 'sleeps'} {1e3 * mean:g} ms"
        return kind + (", heavy tail" if sigma else "")

    rows, errors = [], {"no-op": [], "others": []}
    for row in results.validated:
        error = row["simulated"] / row["measured"] - 1
        errors["others" if row["pace"][1] else "no-op"].append(error)
        if row["pace"][1] or row["actors"] in (4, 8, 32, 128):
            rows.append(
                [
                    f"{row['actors']} x {row['per_actor']}, {words(row)}"
                    + (f", {row['bytes'] / 1e3:.0f} kB a call" if row["bytes"] > 2e4 else "")
                    + (f", {row['ticks']} ticks" if row["ticks"] > 1 else ""),
                    row["way"].removeprefix("paced "),
                    f"{row['others']:.2f}",
                    f"{row['measured']:,.0f}",
                    f"{row['simulated']:,.0f}",
                    signed(error),
                ]
            )
    head = [
        "actors x environments",
        "way",
        "others' cores",
        "measured, steps/s",
        "simulated",
        "off by",
    ]
    summary = (
        f"Off by, in the middle and at worst: steps that take time "
        f"{middle_and_worst(errors['others'])} ({len(errors['others'])} cases); no-ops "
        f"{middle_and_worst(errors['no-op'])} ({len(errors['no-op'])})."
    )
    return (
        f"{summary}\n\n<details><summary>The cases</summary>\n\n{table(head, rows)}\n\n</details>"
    )


def one_caller(results: Results) -> str:
    """Share of the limit by step time and environments per actor; the caller's utilisation."""
    parts = []
    for cluster in CLUSTERS:
        rows = []
        for step in STEPS:
            cells = []
            for per_actor in cluster.per_actor:
                case = results.case(
                    envs=cluster.num_envs,
                    way="lockstep",
                    per_actor=per_actor,
                    step=step,
                    callers=1,
                )
                share = case["rate"] / case["limit"]
                cells.append(f"{percent(share)} ({percent(case['main'])})")
            rows.append([f"{1e3 * step:g} ms", f"{case['limit']:,.0f}", *cells])
        head = ["a step", "limit, steps/s", *(f"k = {k}" for k in cluster.per_actor)]
        parts.append(f"{described(cluster)}\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def described(cluster: Any) -> str:
    return (
        f"**{cluster.num_envs:,} environments** on {cluster.num_nodes} nodes of {cluster.cores} "
        f"cores ({cluster.num_nodes * cluster.cores:,} cores):"
    )


def many_callers(results: Results) -> str:
    parts = []
    for cluster in CLUSTERS:
        of = {"envs": cluster.num_envs, "per_actor": cluster.per_core}
        rows = []
        for step in STEPS:
            shares = [
                results.efficiency(**of, way="lockstep", step=step, callers=number)
                for number in CALLERS
            ]
            shares += [
                results.efficiency(**of, way=way, step=step, callers=1)
                for way in ("first-ready", "chunks")
            ]
            more = {"envs": cluster.with_more(MANY).num_envs, "per_actor": MANY}
            shares.append(results.efficiency(**more, way="chunks", step=step, callers=1))
            rows.append([f"{1e3 * step:g} ms", *map(percent, shares)])
        head = ["a step", *(f"{n} caller{'s' * (n > 1)}" for n in CALLERS)]
        head += ["1, first-ready", "1, in-actor policies", f"the same, k = {MANY}"]
        parts.append(
            f"{described(cluster)} an actor a core, k = {cluster.per_core}.\n\n{table(head, rows)}"
        )
    return "\n\n".join(parts)


def advice(results: Results) -> str:
    """The simplest way that reaches a share of the limit, of the ways of the table above."""
    wanted = 0.5

    def found(cluster: Any, step: float) -> str:
        of = {"envs": cluster.num_envs, "per_actor": cluster.per_core, "step": step}
        more = {"envs": cluster.with_more(MANY).num_envs, "per_actor": MANY, "step": step}
        ways = {f"{n} in lockstep": {**of, "way": "lockstep", "callers": n} for n in CALLERS}
        ways["1, policies in the actors"] = {**of, "way": "chunks", "callers": 1}
        ways[f"1, policies in the actors, k = {MANY}"] = {**more, "way": "chunks", "callers": 1}
        reached = (words for words, known in ways.items() if results.efficiency(**known) >= wanted)
        return next(reached, "none of these")

    head = ["a step", *(f"{cluster.num_nodes * cluster.cores:,} cores" for cluster in CLUSTERS)]
    rows = [[f"{1e3 * step:g} ms", *(found(c, step) for c in CLUSTERS)] for step in STEPS]
    sentence = f"Callers that reach {percent(wanted)} of what the cores could do, simulated:"
    return f"{sentence}\n\n{table(head, rows)}"


def heavy_tail(results: Results) -> str:
    parts = []
    for cluster in CLUSTERS:
        of = {"envs": cluster.num_envs, "per_actor": cluster.per_core, "sigma": TAIL}
        ways = [(way, n) for n in (1, CALLERS[-1]) for way in ("lockstep", "first-ready", "chunks")]
        rows = [
            [
                f"{1e3 * step:g} ms",
                *(
                    percent(results.efficiency(**of, step=step, way=way, callers=number))
                    for way, number in ways
                ),
            ]
            for step in STEPS
        ]
        words = {"chunks": "in-actor policies"}
        head = ["a step, in the mean", *(f"{n}, {words.get(way, way)}" for way, n in ways)]
        parts.append(f"{described(cluster)}\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def feeds(results: Results) -> str:
    """How many cores one caller keeps busy, by the formula."""
    choices = (1, 4, 16, 64)
    rows = []
    for step in STEPS:
        cells = []
        for k in choices:
            cost = costs(results.fits, "lockstep", k, 1, OBSERVED * k, is_cluster=True)
            call = max(cost.send + cost.receive, cost.ray)
            cells.append(f"{(cost.actor + k * (cost.step + step)) / call:,.0f}")
        rows.append([f"{1e3 * step:g} ms", *cells])
    one = costs(results.fits, "lockstep", 1, 1, OBSERVED, is_cluster=True)
    more = costs(results.fits, "lockstep", 2, 1, 2 * OBSERVED, is_cluster=True)
    each = more.send + more.receive - one.send - one.receive
    calls = 1 / max(one.send + one.receive, one.ray)
    sentence = (
        f"Here c = {milliseconds(one.send + one.receive - each)} ms, e = {1e6 * each:.1f} µs, "
        f"o = {milliseconds(one.actor)} ms and x = {1e6 * one.step:.0f} µs. So one caller sends at "
        f"most {calls:,.0f} calls a second. The busiest of Ray's threads takes "
        f"{milliseconds(one.ray)} ms a call."
    )
    return f"{sentence}\n\n{table(['a step', *(f'k = {k}' for k in choices)], rows)}"


BLOCKS = {
    "provenance": provenance,
    "measured": measured,
    "fitted": fitted,
    "others": others,
    "validation": validation,
    "feeds": feeds,
    "advice": advice,
    "one-caller": one_caller,
    "many-callers": many_callers,
    "heavy-tail": heavy_tail,
}


def filled(text: str, results: Results) -> str:
    """The page with each block between its marks written anew."""
    for name, block in BLOCKS.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        new = f"{begin}\n{block(results)}\n{end}"
        text, number = re.subn(pattern, lambda _, new=new: new, text, flags=re.S)
        if number != 1:
            raise ValueError(f"{number} times {begin} ... {end}, expected once")
    return text


# -- figures ---------------------------------------------------------------------------------------


def plot(results: Results, directory: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    # The same bytes each time, and text as text.
    matplotlib.rcParams.update({"svg.hashsalt": "envfleet", "svg.fonttype": "none"})
    from matplotlib import pyplot

    def save(figure: Any, name: str) -> None:
        figure.savefig(directory / f"scaling-{name}.svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)

    figure, axis = pyplot.subplots(figsize=(6, 4), layout="constrained")
    send, receive = results.fits["send"], results.fits["receive"]
    small = [row for row in results.rows("lockstep") if not large(row)]
    for color, k in zip(
        ("C0", "C1", "C2"), sorted({row["per_actor"] for row in small}), strict=True
    ):
        rows = [row for row in small if row["per_actor"] == k]
        numbers = [row["actors"] for row in rows]
        seen = [1e3 * (min(row["send"]) + min(row["receive"])) for row in rows]
        line = [1e3 * (send.of(row) + receive.of(row)) for row in rows]
        axis.plot(numbers, seen, "o", color=color, label=f"k = {k}")
        axis.plot(numbers, line, color=color, linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="actors", ylabel="caller's main thread, ms a step")
    axis.set_xticks(numbers, [str(number) for number in numbers])
    ticks = [tick for tick in (2, 5, 10, 20, 40) if min(seen) < tick < max(seen)]
    axis.set_yticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.legend(title="measured, and fitted")
    save(figure, "fit")

    figure, axis = pyplot.subplots(figsize=(5, 4.5), layout="constrained")
    kinds = {
        "no-op": lambda row: not row["pace"][1],
        "computes": lambda row: row["pace"][1] and row["pace"][0],
        "sleeps": lambda row: row["pace"][1] and not row["pace"][0],
    }
    for words, is_kind in kinds.items():
        rows = [row for row in results.validated if is_kind(row)]
        axis.plot(
            [row["measured"] for row in rows],
            [row["simulated"] for row in rows],
            "o",
            label=words,
            markersize=4,
        )
    ends = [f(row["measured"] for row in results.validated) for f in (min, max)]
    axis.plot(ends, ends, color="#404040", linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="measured, steps/s", ylabel="simulated, steps/s")
    axis.minorticks_off()
    axis.legend()
    save(figure, "validation")

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, cluster in zip(axes, CLUSTERS, strict=True):
        k = cluster.per_core
        for words, known in {
            "1 caller, k = 1": {"way": "lockstep", "per_actor": 1, "callers": 1},
            f"1 caller, k = {k}": {"way": "lockstep", "per_actor": k, "callers": 1},
            f"8 callers, k = {k}": {"way": "lockstep", "per_actor": k, "callers": 8},
            f"in-actor policies, k = {k}": {"way": "chunks", "per_actor": k, "callers": 1},
        }.items():
            shares = [results.efficiency(envs=cluster.num_envs, step=s, **known) for s in STEPS]
            axis.plot([1e3 * step for step in STEPS], shares, "o-", label=words, markersize=4)
        cores = cluster.num_nodes * cluster.cores
        axis.set(xscale="log", xlabel="a step, ms", ylim=(0, 1.02))
        axis.minorticks_off()
        axis.set_title(f"{cluster.num_envs:,} environments, {cores:,} cores", fontsize=10)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("share of the limit")
    save(figure, "clusters")


def write(raw: dict[str, Any], directory: Path) -> None:
    """Fits and simulates, and writes what comes of it beside the measurements and into the page."""
    results = Results.of(raw)
    raw["results"] = {
        "fits": {name: fit.seconds for name, fit in results.fits.items()},
        "idle": results.idle,
        "validated": results.validated,
        "simulated": results.simulated,
    }
    where = directory / "benchmarks"
    (where / "scaling.json").write_text(json.dumps(raw, indent=1) + "\n")
    page = directory / "scaling.md"
    page.write_text(filled(page.read_text(), results))
    try:
        plot(results, where)
    except ImportError as error:
        print(f"no figures: {error}")
