"""Environments that go wrong at random, for minutes on end.

    python tests/chaos.py --minutes 10
    python tests/chaos.py --minutes 1 --faults 0                       # without faults
    python tests/chaos.py --minutes 5 --mode first-ready --max-restarts 0    # failures are raised
    python tests/chaos.py --minutes 5 --nodes 3                        # on several nodes of Ray's
    python tests/chaos.py --minutes 5 --transport shared_memory

The batch is stepped in lockstep, first-ready, or by turns. Every row of every time step is held
against a model of the environments that knows nothing of envfleet: it must be the answer to what
its own slot was asked, the one that comes next, or the truncation that stands for a failure. Faults
are drawn by the environments themselves, and a thread of the driver kills their processes from
outside. With ``--nodes`` another one kills and freezes whole nodes, all but the driver's own, while
the driver adds others and has environments move there. Exits with 1 after a bad transition, another
error than the one that is due, or where something is left.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import gc
import hashlib
import itertools
import logging
import operator
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dm_env
import faults
import numpy as np
from dm_env import specs

# Ray and envfleet are imported by `run`, after `main` has set what Ray reads when it is imported.

Counts = collections.Counter[tuple[int, str, str]]
"""By environment, phase and what it was."""

FIRST, MID, LAST = 0, 1, 2
UNKNOWN = -1
RESET = None
"""What a slot was asked where that was no action."""

MODES = ("lockstep", "first-ready", "mixed")

RAY_INIT = {
    "address": "local",
    "num_cpus": 2,
    "include_dashboard": False,
    "logging_level": "ERROR",
    "log_to_driver": False,
    "object_store_memory": 100_000_000,
}
LIMITS = {
    "step_timeout": 1.0,
    "reset_timeout": 1.0,
    "start_timeout": 20.0,
    "call_timeout": 20.0,
}
MAX_RESTARTS = 50
"""In a row; with the chances below it is never spent."""


# -- the model -------------------------------------------------------------------------------------


class Header(NamedTuple):
    """Where an observation comes from."""

    env: int
    build: int
    """Which instance of the environment, from 1 on."""
    episode: int
    step: int
    action: int
    """The last one; -1 in a first time step."""
    pid: int
    seed: int

    @property
    def length(self) -> int:
        """How many steps the episode has."""
        return 3 + (7 * self.env + 5 * self.build + 11 * self.episode) % 38

    @property
    def reward(self) -> float:
        """A number of its own for every step of every instance, exact as a float."""
        return float(((self.env << 16 | self.build) << 20 | self.episode) << 6 | self.step)

    @property
    def image(self) -> bytes:
        """A pattern that no mixture of two observations has."""
        return hashlib.blake2b(repr(self).encode(), digest_size=64).digest()


class Row(NamedTuple):
    """One slot of a batched time step."""

    step_type: int
    reward: float
    discount: float
    header: Header
    image: bytes

    @property
    def is_cut(self) -> bool:
        """Whether a failure has ended the episode before its time."""
        return self.step_type == LAST and self.header.step < self.header.length

    def __str__(self) -> str:
        name = {FIRST: "FIRST", MID: "MID", LAST: "LAST"}.get(self.step_type, self.step_type)
        torn = "" if self.image == self.header.image else " with the image of another"
        return f"{name} reward={self.reward:.17g} discount={self.discount:g} {self.header}{torn}"


def first(header: Header) -> Row:
    """How an episode begins."""
    header = header._replace(step=0, action=-1)
    return Row(FIRST, 0.0, 1.0, header, header.image)


def following(header: Header, action: int) -> Row:
    """The next step of an episode; they end by turns in a termination and a truncation."""
    header = header._replace(step=header.step + 1, action=action)
    if header.step < header.length:
        return Row(MID, header.reward, 1.0, header, header.image)
    return Row(LAST, header.reward, float(header.episode % 2), header, header.image)


def cut(row: Row) -> Row:
    """What stands for a failure: a truncation where the caller has seen the environment last."""
    return row._replace(step_type=LAST, reward=0.0, discount=1.0)


def opening(
    slot: int, before: Row, found: Row, least_build: int = 0, num_resets: int = 1
) -> list[Row]:
    """What may follow an episode: the next one, or the first one of a new instance.

    Args:
      slot, before, found: where, what it has shown, and what it shows now.
      least_build: of the new instance; if it is not the old one's, there has to be a new one.
      num_resets: how often the old one was reset since.
    """
    old, new = before.header, found.header
    build = max(new.build, old.build + 1, least_build)
    seed = UNKNOWN if new.seed == old.seed else new.seed  # a new instance has another one
    rebuilt = first(Header(slot, build, 0, 0, -1, new.pid, seed))
    if not old.build:  # which the slot has never shown
        return [rebuilt, first(rebuilt.header._replace(episode=num_resets - 1))]
    if before.is_cut or least_build > old.build:
        return [rebuilt]
    return [first(old._replace(episode=old.episode + num_resets)), rebuilt]


def rows(time_step: dm_env.TimeStep) -> list[Row]:
    """A batched time step, slot by slot."""
    columns = (
        time_step.step_type.tolist(),
        time_step.reward.tolist(),
        time_step.discount.tolist(),
        time_step.observation["header"].tolist(),
        time_step.observation["image"],
    )
    return [
        Row(step_type, reward, discount, Header(*header), image.tobytes())
        for step_type, reward, discount, header, image in zip(*columns, strict=True)
    ]


class Checker:
    """Holds what a batch shows against the model, and writes down in words what does not fit.

    Args:
      num_envs: size of the batch.
      truncates: whether a failure shows as a truncation; if not, it is raised.

    Attributes:
      rows: what each slot has shown last.
      asked: the environments under way, and what they were asked: an action, or `RESET`.
      failed: environments whose failure was raised, until they show a time step again.
      calls, transitions: how many calls of the batch were seen, and how many rows.
      truncations: per slot, episodes that a failure has cut.
      dropped: per slot, answers that a reset of the batch has dropped.
      raised: per slot, failures that were raised.
      instances: per slot, how many instances have shown themselves.
      moves: per slot, how often it was moved to another node.
      num_bad, bad: how many rows did not fit, and the first of them in words.
    """

    def __init__(self, num_envs: int, truncates: bool = True) -> None:
        nobody = Header(UNKNOWN, 0, -1, -1, -1, UNKNOWN, UNKNOWN)
        self.rows = [cut(first(nobody._replace(env=slot))) for slot in range(num_envs)]
        self.asked: dict[int, int | None] = {}
        self.failed: set[int] = set()
        self.calls = self.transitions = self.num_bad = 0
        self.truncations = [0] * num_envs
        self.dropped = [0] * num_envs
        self.raised = [0] * num_envs
        self.instances = [0] * num_envs
        self.moves = [0] * num_envs
        self.bad: list[str] = []
        self._truncates = truncates
        self._least_builds = [0] * num_envs
        self._moving: set[int] = set()
        self._glimpses: dict[int, Row] = {}
        self._num_recvs = 0
        self._sent_before: dict[int, int] = {}
        self._doubts: dict[int, int] = {}

    @property
    def resting(self) -> list[int]:
        """Environments that can be sent."""
        return [i for i in range(len(self.rows)) if i not in self.asked and i not in self.failed]

    @property
    def broken(self) -> list[int]:
        """Environments that have failed, and were not reset since."""
        return sorted(self.failed - self.asked.keys())

    @property
    def unseen(self) -> list[int]:
        """Environments that have shown no time step yet."""
        return [i for i, row in enumerate(self.rows) if not row.header.build]

    # -- what the batch was asked, and what it gave

    def stepped(self, found: Sequence[Row], actions: Sequence[int]) -> None:
        """The batch was stepped with these actions."""
        self.sent(dict(enumerate(actions)))
        self.drained(found, range(len(found)))

    def was_reset(self, found: Sequence[Row], env_ids: Sequence[int]) -> None:
        """Some were reset; the others stand still, or are cut where they share a failing actor."""
        self.calls += 1
        for slot, (before, row) in enumerate(zip(self.rows, found, strict=True)):
            if slot in env_ids:
                self._take(slot, row, self._reset_again(slot, row))
            elif slot in self._doubts:
                goes_on = self._answers(slot, row)
                begins = self._reset_again(slot, row)
                self._take(slot, row, [*goes_on, *begins, *self._still(before)])
            else:
                self._take(slot, row, self._still(before))
        for slot in self.asked:
            self.dropped[slot] += slot in env_ids
        self.asked.clear()
        self._doubts.clear()

    def sent(self, asked: Mapping[int, int | None]) -> None:
        """These are under way from now on."""
        self.calls += 1
        self.asked |= asked
        self._sent_before |= dict.fromkeys(asked, self._num_recvs)

    def awaits(self, max_staleness: int | None) -> set[int]:
        """Those that the next `recv` has to bring."""
        self.calls += 1
        if max_staleness is None:
            return set()
        oldest = self._num_recvs + 1 - max_staleness
        return {i for i in self.asked if self._sent_before[i] <= oldest}

    def received(
        self,
        found: Sequence[Row],
        env_ids: Sequence[int],
        at_least: int = 0,
        among_them: Collection[int] = (),
    ) -> None:
        """These have arrived; there should be so many, and some of them should be among them."""
        self._num_recvs += 1  # (one that raises is not counted: the batch may count it or not)
        if [*env_ids] != sorted(set(env_ids)) or len(found) != len(env_ids):
            self._complain(None, f"{len(found)} rows of {env_ids}", ["ids in ascending order"])
        if len(env_ids) < at_least:
            self._complain(None, f"time steps of {env_ids}", [f"{at_least} of them"])
        for slot in sorted(set(among_them) - set(env_ids)):
            self._complain(slot, "no time step", [f"one, for {self.asked[slot]}"])
        for slot, row in zip(env_ids, found, strict=False):
            if slot not in self.asked:
                self._complain(slot, row, ["nothing: it is not under way"])
                continue
            answers = self._answers(slot, row)
            if slot in self._glimpses:
                answers = [self._glimpses[slot]]
            self._take(slot, row, answers)
            del self.asked[slot]

    def drained(self, found: Sequence[Row], env_ids: Sequence[int]) -> None:
        """All that were under way have arrived."""
        self.received(found, env_ids, among_them=[*self.asked])
        self.asked.clear()

    def gave_up(
        self, env_ids: Collection[int], lockstep: Mapping[int, int | None] | None = None
    ) -> None:
        """Failures were raised.

        `lockstep` is what a lockstep call has asked that raised them: it may have sent that or not,
        and shows nothing of the others until a reset does.
        """
        for slot in lockstep or ():
            self._doubts[slot] = self._doubts.get(slot, 0) + 1
        self.asked = {**(lockstep or {}), **self.asked}
        for slot in env_ids:
            if slot in self.failed and slot not in self.asked:
                self._complain(slot, "a failure", ["none: it has been raised before"])
            self.asked.pop(slot, None)
            self._glimpses.pop(slot, None)
            self._doubts.pop(slot, None)
            self.failed.add(slot)
            self.raised[slot] += 1

    def looked(self, found: Sequence[Row]) -> None:
        """The batch was asked where it is."""
        self.calls += 1
        for slot, (before, row) in enumerate(zip(self.rows, found, strict=True)):
            self.transitions += 1
            allowed = [self._glimpses.get(slot, before)]
            if slot in self.asked and slot not in self._glimpses:
                allowed += self._answers(slot, row)
            if row not in allowed:
                self._complain(slot, row, allowed)
            elif row != before:
                self._glimpses[slot] = row

    def answered(self, slot: int, answer: tuple[int, int]) -> None:
        """An environment was asked who it is."""
        before, (env, build) = self.rows[slot], answer
        least = before.header.build + before.is_cut
        if env != slot or build < max(least, self._least_builds[slot]):
            self._complain(slot, answer, [(slot, least)])
        elif slot not in self.asked:  # what is under way may have landed before it was rebuilt
            self._least_builds[slot] = build

    def moved(self, env_ids: Collection[int]) -> None:
        """These go to another node: their episodes end, and new instances begin."""
        self.calls += 1
        for slot in env_ids:
            if slot in self.asked or slot in self.failed:
                self._complain(slot, "a move", ["none: it is under way, or has failed"])
            build = self.rows[slot].header.build
            self._least_builds[slot] = max(self._least_builds[slot], build + 1)
            self._moving.add(slot)
            self.moves[slot] += 1

    # -- what may come

    def _answers(self, slot: int, row: Row) -> list[Row]:
        """What may come from one under way."""
        before, asked = self.rows[slot], self.asked[slot]
        least = self._least_build(slot)
        if asked is RESET or before.step_type == LAST:
            return opening(slot, before, row, least)
        goes_on = [following(before.header, asked)] if least <= before.header.build else []
        is_cut = self._truncates or slot in self._moving
        return [*goes_on, *([cut(before)] if is_cut else [])]

    def _reset_again(self, slot: int, row: Row) -> list[Row]:
        """What may come from one that was reset, whatever it was asked before."""
        before, least = self.rows[slot], self._least_build(slot)
        begins = slot in self.asked and (self.asked[slot] is RESET or before.step_type == LAST)
        doubts = self._doubts.get(slot, 0)
        fewest = 1 if doubts else 1 + begins
        return [
            allowed
            for num_resets in range(fewest, 2 + begins + doubts)
            for allowed in opening(slot, before, row, least, num_resets)
        ]

    def _still(self, before: Row) -> list[Row]:
        return (
            [before] if before.step_type == LAST or not self._truncates else [before, cut(before)]
        )

    def _least_build(self, slot: int) -> int:
        return max(self._least_builds[slot], (slot in self.failed) + self.rows[slot].header.build)

    def _take(self, slot: int, row: Row, allowed: Sequence[Row]) -> None:
        before, self.rows[slot] = self.rows[slot], row
        self.transitions += 1
        self.truncations[slot] += row.is_cut and before.step_type != LAST
        self.instances[slot] += row.header.build != before.header.build
        self._glimpses.pop(slot, None)
        if row != before:
            self.failed.discard(slot)
        if row.header.build >= self._least_builds[slot]:
            self._least_builds[slot] = 0
            self._moving.discard(slot)
        if row not in allowed:
            self._complain(slot, row, allowed)

    def refused(self, words: str, expected: str) -> None:
        """A call was refused in so many words."""
        if expected not in words:
            self._complain(None, f"refused with {words}", [expected])

    def _complain(self, slot: int | None, found: object, allowed: Sequence[object]) -> None:
        self.num_bad += 1
        if len(self.bad) < 10:
            expected = "\n    or ".join(map(str, allowed))
            where = "all slots" if slot is None else f"slot {slot}"
            self.bad.append(f"{where}, call {self.calls}: {found}\n    expected {expected}")


# -- can the checker fail? -------------------------------------------------------------------------


class Case(NamedTuple):
    """A slot that shows `before`, and then `found` after a step with `ACTION`."""

    before: Row
    found: Row
    call: Callable[[Checker, Row], None] = lambda checker, row: checker.stepped([row], [ACTION])


def _reset(checker: Checker, row: Row) -> None:
    checker.was_reset([row], [0])


def _reset_of_others(checker: Checker, row: Row) -> None:
    checker.was_reset([row], [])


def _look(checker: Checker, row: Row) -> None:
    checker.looked([row])


def _arrival(checker: Checker, row: Row) -> None:
    checker.sent({0: ACTION})
    checker.received([row], [0])


def _arrival_of_reset(checker: Checker, row: Row) -> None:
    checker.sent({0: RESET})
    checker.received([row], [0])


def _unasked_arrival(checker: Checker, row: Row) -> None:
    checker.received([row], [0])


def _second_arrival(checker: Checker, row: Row) -> None:
    _arrival(checker, _NEXT)
    checker.received([row], [0])


def _missing_arrival(checker: Checker, row: Row) -> None:
    checker.sent({0: ACTION})
    checker.drained([], [])


def _stale_arrival(checker: Checker, row: Row) -> None:
    checker.sent({0: ACTION})
    for _ in range(2):
        checker.received([], [], among_them=checker.awaits(max_staleness=2))


def _too_few(checker: Checker, row: Row) -> None:
    checker.sent({0: ACTION})
    checker.received([], [], at_least=1)


def _dropping_reset(checker: Checker, row: Row) -> None:
    checker.sent({0: ACTION})
    checker.was_reset([row], [0])


def _look_at_one_under_way(checker: Checker, row: Row) -> None:
    checker.sent({0: ACTION})
    checker.looked([row])


def _look_and_arrival(checker: Checker, row: Row) -> None:
    checker.sent({0: ACTION})
    checker.looked([_NEXT])
    checker.received([row], [0])


def _raised(checker: Checker, row: Row) -> None:
    checker.sent({0: ACTION})
    checker.gave_up([0])
    checker.sent({0: RESET})
    checker.received([row], [0])


def _raised_twice(checker: Checker, row: Row) -> None:
    checker.sent({0: ACTION})
    checker.gave_up([0])
    checker.gave_up([0])


def _asked_who_it_is(checker: Checker, row: Row) -> None:
    checker.answered(0, (row.header.env, row.header.build))


def _answer_of_new_instance(checker: Checker, row: Row) -> None:
    checker.answered(0, (0, _NEW_INSTANCE.header.build))
    _arrival(checker, row)


def _move(checker: Checker, row: Row) -> None:
    checker.moved([0])
    checker.stepped([row], [ACTION])


def _move_and_reset(checker: Checker, row: Row) -> None:
    checker.moved([0])
    checker.was_reset([row], [0])


def _move_and_look(checker: Checker, row: Row) -> None:
    checker.moved([0])
    checker.looked([row])


def _move_and_arrival(checker: Checker, row: Row) -> None:
    checker.moved([0])
    _arrival(checker, cut(_MID))
    _arrival(checker, row)


def _move_where_failures_are_raised(checker: Checker, row: Row) -> None:
    checker._truncates = False
    _move(checker, row)


def _cut_after_a_move_where_failures_are_raised(checker: Checker, row: Row) -> None:
    checker._truncates = False
    _move(checker, cut(_MID))
    checker.stepped([_NEW_INSTANCE], [ACTION])
    checker.stepped([row], [ACTION])


def _move_of_one_under_way(checker: Checker, row: Row) -> None:
    checker.sent({0: ACTION})
    checker.moved([0])
    checker.received([row], [0])


ACTION = 7
_HEADER = Header(env=0, build=3, episode=4, step=5, action=1, pid=10, seed=20)
_MID = following(_HEADER, 2)
_NEXT = following(_MID.header, ACTION)
_LAST = following(_HEADER._replace(step=_HEADER.length - 1), 2)
_NEW_EPISODE = first(_HEADER._replace(episode=5))
_NEW_INSTANCE = first(Header(env=0, build=4, episode=0, step=0, action=-1, pid=11, seed=21))

RIGHT_CASES = {
    "the next step": Case(_MID, _NEXT),
    "the next episode": Case(_LAST, _NEW_EPISODE),
    "a truncation for a failure": Case(_MID, cut(_MID)),
    "a truncation for a failure at once": Case(_NEW_EPISODE, cut(_NEW_EPISODE)),
    "a new instance after a truncation": Case(cut(_MID), _NEW_INSTANCE),
    "a new instance after an episode": Case(_LAST, _NEW_INSTANCE),
    "a reset": Case(_MID, _NEW_EPISODE, _reset),
    "a reset that rebuilds": Case(_MID, _NEW_INSTANCE, _reset),
    "a reset of others": Case(_MID, _MID, _reset_of_others),
    "a reset of others that fails": Case(_MID, cut(_MID), _reset_of_others),
    "a look": Case(_MID, _MID, _look),
    "an arrival": Case(_MID, _NEXT, _arrival),
    "an arrival of a failure": Case(_MID, cut(_MID), _arrival),
    "an arrival of the next episode": Case(_LAST, _NEW_EPISODE, _arrival),
    "an arrival of a reset": Case(_MID, _NEW_EPISODE, _arrival_of_reset),
    "a reset that drops a step": Case(_MID, _NEW_EPISODE, _dropping_reset),
    "a reset that drops an episode": Case(
        _LAST, first(_HEADER._replace(episode=6)), _dropping_reset
    ),
    "a look at one under way": Case(_MID, _MID, _look_at_one_under_way),
    "a look at one that has landed": Case(_MID, _NEXT, _look_at_one_under_way),
    "an arrival after a look": Case(_MID, _NEXT, _look_and_arrival),
    "a new instance after an error": Case(_MID, _NEW_INSTANCE, _raised),
    "a reset that drops the first one": Case(
        Checker(1).rows[0], first(_NEW_INSTANCE.header._replace(episode=1)), _dropping_reset
    ),
    "an answer": Case(_MID, _MID, _asked_who_it_is),
    "a failure after an answer": Case(_MID, cut(_MID), _answer_of_new_instance),
    "a move": Case(_MID, cut(_MID), _move),
    "a move after an episode": Case(_LAST, _NEW_INSTANCE, _move),
    "a move and a reset": Case(_MID, _NEW_INSTANCE, _move_and_reset),
    "a move and a look": Case(_MID, _MID, _move_and_look),
    "a move, first-ready": Case(_MID, _NEW_INSTANCE, _move_and_arrival),
    "a move where failures are raised": Case(_MID, cut(_MID), _move_where_failures_are_raised),
    "a move of one that was never reset": Case(Checker(1).rows[0], _NEW_INSTANCE, _move),
}
"""What the checker must accept."""

CHECKER_CASES = {
    "a doubled step": Case(_MID, following(_NEXT.header, ACTION)),
    "a lost step": Case(_MID, _MID),
    "a wrong action": Case(_MID, following(_MID.header, ACTION + 1)),
    "a row of another slot": Case(_MID, following(_MID.header._replace(env=1), ACTION)),
    "a row of another instance": Case(_MID, following(_MID.header._replace(build=2), ACTION)),
    "a row of another process": Case(_MID, following(_MID.header._replace(pid=11), ACTION)),
    "a reward of another step": Case(_MID, _NEXT._replace(reward=_MID.reward)),
    "a discount of another step": Case(_MID, _NEXT._replace(discount=0.0)),
    "a mixed observation": Case(_MID, _NEXT._replace(image=_MID.image)),
    "an episode that ends too early": Case(_MID, _NEXT._replace(step_type=LAST)),
    "an episode that ends too late": Case(
        following(_HEADER._replace(step=_HEADER.length - 2), 2),
        following(_HEADER._replace(step=_HEADER.length - 1), ACTION)._replace(step_type=MID),
    ),
    "FIRST in mid-episode": Case(_MID, _NEW_EPISODE),
    "a new instance in mid-episode": Case(_MID, _NEW_INSTANCE),
    "a truncation with the next observation": Case(_MID, cut(_NEXT)),
    "a truncation with a mixed observation": Case(_MID, cut(_MID)._replace(image=_NEXT.image)),
    "a truncation with a reward": Case(_MID, cut(_MID)._replace(reward=_MID.reward)),
    "a truncation that terminates": Case(_MID, cut(_MID)._replace(discount=0.0)),
    "a truncation after LAST": Case(_LAST, cut(_LAST)),
    "a second truncation": Case(cut(_MID), cut(_MID)),
    "an episode left out": Case(_LAST, first(_HEADER._replace(episode=6))),
    "an episode of the failed instance": Case(cut(_MID), _NEW_EPISODE),
    "a later episode of a new instance": Case(
        cut(_MID), first(_NEW_INSTANCE.header._replace(episode=1))
    ),
    "an earlier instance": Case(cut(_MID), first(_NEW_INSTANCE.header._replace(build=2))),
    "a new instance with the old seed": Case(
        cut(_MID), first(_NEW_INSTANCE.header._replace(seed=_HEADER.seed))
    ),
    "a step past the end": Case(_LAST, following(_LAST.header, ACTION)),
    "a reset that does not": Case(_MID, _MID, _reset),
    "a reset of others that steps": Case(_MID, _NEXT, _reset_of_others),
    "a look that moves": Case(_MID, _NEXT, _look),
    "an arrival of one at rest": Case(_MID, _NEXT, _unasked_arrival),
    "an arrival of a wrong action": Case(_MID, following(_MID.header, ACTION + 1), _arrival),
    "a second arrival": Case(_MID, following(_NEXT.header, ACTION), _second_arrival),
    "the same arrival again": Case(_MID, _NEXT, _second_arrival),
    "one that does not arrive": Case(_MID, _NEXT, _missing_arrival),
    "one that arrives too late": Case(_MID, _NEXT, _stale_arrival),
    "too few that arrive": Case(_MID, _NEXT, _too_few),
    "an arrival of a reset that steps": Case(_MID, _NEXT, _arrival_of_reset),
    "a reset that drops nothing": Case(_LAST, _NEW_EPISODE, _dropping_reset),
    "a reset that shows what it drops": Case(_MID, _NEXT, _dropping_reset),
    "a look that is taken back": Case(_MID, cut(_MID), _look_and_arrival),
    "an episode of an instance whose failure was raised": Case(_MID, _NEW_EPISODE, _raised),
    "an error that comes twice": Case(_MID, _MID, _raised_twice),
    "a second episode at the start": Case(
        Checker(1).rows[0], first(_NEW_INSTANCE.header._replace(episode=1)), _arrival_of_reset
    ),
    "an answer of another": Case(
        _MID, _MID._replace(header=_MID.header._replace(env=1)), _asked_who_it_is
    ),
    "an answer of an earlier instance": Case(
        _MID, _MID._replace(header=_MID.header._replace(build=2)), _asked_who_it_is
    ),
    "an answer of the failed instance": Case(cut(_MID), cut(_MID), _asked_who_it_is),
    "a step of an instance that was replaced": Case(_MID, _NEXT, _answer_of_new_instance),
    "a move that goes on": Case(_MID, _NEXT, _move),
    "a move without a truncation": Case(_MID, _NEW_INSTANCE, _move),
    "a move that truncates a later step": Case(_MID, cut(_NEXT), _move),
    "a move that truncates after LAST": Case(_LAST, cut(_LAST), _move),
    "a move that stays in its instance": Case(_LAST, _NEW_EPISODE, _move),
    "a reset after a move that stays": Case(_MID, _NEW_EPISODE, _move_and_reset),
    "a look that shows a move": Case(_MID, cut(_MID), _move_and_look),
    "a second truncation by a move": Case(_MID, cut(_MID), _move_and_arrival),
    "an old episode after a move": Case(_MID, _NEW_EPISODE, _move_and_arrival),
    "a later episode after a move": Case(
        _MID, first(_NEW_INSTANCE.header._replace(episode=1)), _move_and_arrival
    ),
    "a failure that shows after a move, where it is raised": Case(
        _MID, cut(_NEW_INSTANCE), _cut_after_a_move_where_failures_are_raised
    ),
    "a move of one under way": Case(_MID, cut(_MID), _move_of_one_under_way),
}
"""What the checker must report."""


def complaints(case: Case) -> list[str]:
    """What the checker has to say."""
    checker = Checker(1)
    checker.rows = [case.before]
    case.call(checker, case.found)
    return checker.bad


# -- faults ----------------------------------------------------------------------------------------


def hang_in_c() -> None:
    """Holds the GIL, so that no other thread of the process runs either."""
    ctypes.PyDLL(None).sleep(1000)


RAISING = (faults.key_error, faults.holds_a_lock)
ENDING = (faults.exit_at_once, faults.sigkill, faults.hang, hang_in_c)
CHANCES = {
    "construct": (2e-2, 1e-2, 1e-2, 1e-2, 5e-4, 5e-4),
    "reset": (1e-2, 5e-3, 1e-3, 1e-3, 5e-4, 5e-4),
    "step": (1e-3, 5e-4, 1e-4, 1e-4, 5e-5, 5e-5),
}
"""By phase, of each of the faults above. Those that raise are cheap; an end costs a new process."""

KILLS_PER_SECOND = 0.2
SECONDS_BETWEEN_NEWS = 30.0
LONGEST_POLL = 40.0
"""Seconds until something has to land: a hang and a rebuild on a busy machine, and more."""
SLACK = {"memory": 30.0, "open_files": 8, "processes": 4}
SLACK_OF_A_NODE = {"open_files": 4, "processes": 4}
"""Beside that: Ray's idle workers on a new node, and the caller's connections to them."""


@dataclasses.dataclass(frozen=True)
class Chaos:
    """What may go wrong, and the files that tell of it.

    A process that ends itself tells nobody afterwards, so everything is written down before.

    Attributes:
      folder: where the files are.
      seed: all is drawn from it.
      scale: a factor for all chances.
      in_processes: whether environments have a process of their own to end.
    """

    folder: Path
    seed: int
    scale: float
    in_processes: bool

    @property
    def kills_per_second(self) -> float:
        """From outside."""
        return self.scale * KILLS_PER_SECOND if self.in_processes else 0.0

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Within it things go wrong."""
        self._fuse.touch()
        try:
            yield
        finally:
            self._fuse.unlink()

    def strike(self, env_id: int, phase: str, source: random.Random) -> None:
        """Perhaps a fault."""
        if not self._fuse.exists():
            return
        kinds = RAISING + ENDING if self.in_processes else RAISING
        chances = [self.scale * chance for chance in CHANCES[phase][: len(kinds)]]
        (kind,) = source.choices([None, *kinds], [1 - sum(chances), *chances])
        if kind is not None:
            _append(self._journal, f"{env_id} {phase} {kind.__name__}\n")
            kind()

    def count_build(self, env_id: int) -> int:
        """The number of an instance that is being built, over all processes."""
        return _append(self.folder / f"builds of {env_id}", ".")

    def injected(self) -> Counts:
        """What was written down."""
        lines = self._journal.read_text().splitlines() if self._journal.exists() else []
        entries = map(str.split, lines)
        return collections.Counter((int(env_id), phase, kind) for env_id, phase, kind in entries)

    @property
    def _fuse(self) -> Path:
        return self.folder / "armed"

    @property
    def _journal(self) -> Path:
        return self.folder / "injected"


def _append(path: Path, text: str) -> int:
    """Adds to a file in one write, which other processes' do not tear; gives where it ends."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, text.encode())
        return os.lseek(file, 0, os.SEEK_CUR)
    finally:
        os.close(file)


class ChaosEnv(dm_env.Environment):
    """The model's environment, and what may go wrong in it."""

    def __init__(self, env_id: int, chaos: Chaos) -> None:
        self._chaos = chaos
        build = chaos.count_build(env_id)
        self._random = random.Random(f"{chaos.seed} {env_id} {build}")
        self._header = Header(env_id, build, -1, 0, -1, os.getpid(), UNKNOWN)
        self._strike("construct")

    def seed(self, seed: int) -> None:
        self._header = self._header._replace(seed=seed)

    def reset(self) -> dm_env.TimeStep:
        self._strike("reset")
        return self._show(first(self._header._replace(episode=self._header.episode + 1)))

    def step(self, action: Any) -> dm_env.TimeStep:
        time.sleep(self._random.uniform(0, 0.003))
        self._strike("step")
        return self._show(following(self._header, int(action)))

    def ping(self) -> tuple[int, int]:
        """Who answers."""
        return self._header.env, self._header.build

    def _strike(self, phase: str) -> None:
        self._chaos.strike(self._header.env, phase, self._random)

    def _show(self, row: Row) -> dm_env.TimeStep:
        self._header = row.header
        observation = {
            "header": np.array(row.header, np.int64),
            "image": np.frombuffer(row.image, np.uint8).reshape(8, 8),
        }
        step_type = dm_env.StepType(row.step_type)
        return dm_env.TimeStep(step_type, row.reward, row.discount, observation)

    def observation_spec(self) -> dict[str, specs.Array]:
        header = specs.Array((len(Header._fields),), np.int64, "header")
        return {"header": header, "image": specs.Array((8, 8), np.uint8, "image")}

    def action_spec(self) -> specs.BoundedArray:
        return specs.BoundedArray((), np.int64, 0, 10**9, "action")


class Killer(threading.Thread):
    """Sends SIGKILL to processes from outside, now and then, whatever they are doing.

    Args:
      pids: gives those to choose from.
      per_second: how many on average.
      seed: of its choices.
    """

    def __init__(self, pids: Callable[[], Sequence[int]], per_second: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.kills = 0
        self._pids, self._per_second, self._random = pids, per_second, random.Random(seed)
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(self._pause()):
            pid = self._random.choice(self._pids())
            if is_host(pid):  # a process that has ended may have left its number to a stranger
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.kills += 1

    def _pause(self) -> float | None:
        return self._random.expovariate(self._per_second) if self._per_second else None

    def __enter__(self) -> Killer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()


# -- whole nodes -----------------------------------------------------------------------------------


class Wrecker(threading.Thread):
    """Kills and freezes whole nodes, at any moment: the workers of a cluster, not its head.

    What is frozen is thawed, or killed, at once or much later: before Ray holds it for dead (which
    takes a minute), or after.

    Args:
      nodes: the cluster (`nodes.Nodes`).
      seed: of its choices.

    Attributes:
      counts: nodes killed, frozen, thawed and added.
    """

    def __init__(self, nodes: Any, seed: int) -> None:
        super().__init__(daemon=True)
        self.counts: collections.Counter[str] = collections.Counter()
        self._nodes, self._random = nodes, random.Random(seed)
        self._done = threading.Event()
        self._fates: dict[Any, tuple[float, str]] = {}
        """Of frozen ones, when what becomes of them."""
        self._turn = itertools.cycle(self._random.sample(["kill", "freeze"], 2))
        self._add_at = 0.0

    def run(self) -> None:
        due = time.monotonic() + self._random.uniform(1, 3)
        while not self._done.wait(0.05):
            now = time.monotonic()
            for node, (at, fate) in [*self._fates.items()]:
                if at <= now:
                    self._do(fate, node)
            if due <= now:
                due = now + self._random.uniform(3, 15)
                how = next(self._turn)
                for node in self._random.sample(self._up, min(len(self._up), self._how_many())):
                    self._do(how, node)

    def _how_many(self) -> int:
        return self._random.choice([1, 1, 1, 2])

    @property
    def _up(self) -> list[Any]:
        return [node for node in self._nodes.workers if node not in self._fates]

    def _do(self, what: str, node: Any) -> None:
        self._fates.pop(node, None)
        self.counts[what] += 1
        if what == "freeze":
            seconds = self._random.uniform(*self._random.choice([(0.2, 3), (3, 30), (5, 90)]))
            fate = self._random.choice(["kill", "thaw"])
            self._fates[node] = time.monotonic() + seconds, fate
        getattr(self._nodes, what)(node)

    def add_if_due(self, wanted: int) -> None:
        """Some time after there were fewer workers than so many: another one.

        Here and not in the thread, where Ray starts no node, for the sake of a signal handler.
        """
        now = time.monotonic()
        if len(self._up) >= wanted or len(self._nodes.workers) > wanted + 1:
            self._add_at = 0.0
        elif not self._add_at:
            self._add_at = now + self._random.uniform(0, 5)
        elif self._add_at <= now:
            self._nodes.add()
            self.counts["add"] += 1
            self._add_at = 0.0

    def __enter__(self) -> Wrecker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """All is as it was at first: those that were frozen are thawed, and go on if they can."""
        self._done.set()
        self.join()
        for node in [*self._fates]:
            self._do("thaw", node)
        self._nodes.restore()


@contextlib.contextmanager
def cluster(num_nodes: int) -> Iterator[Any]:
    """A cluster of so many nodes, with this process as a driver on the head; None for none."""
    if not num_nodes:
        yield None
        return
    from nodes import Nodes, connected

    nodes = Nodes(workers=num_nodes - 1, num_cpus=2, head={"num_cpus": 2})
    try:
        with connected(nodes):
            yield nodes
    finally:
        nodes.stop()


# -- what is held ----------------------------------------------------------------------------------


class Footprint(NamedTuple):
    """What a run holds."""

    memory: float
    """Of the caller, in MB."""
    open_files: int
    processes: int
    """Below the caller, Ray's own included."""
    hosts: int
    """Processes of actors among them."""
    actors: int
    """Those that Ray does not hold for dead."""

    @classmethod
    def measured(cls) -> Footprint:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            memory=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            open_files=len(os.listdir("/proc/self/fd")),
            processes=len(descendants()),
            hosts=sum(map(is_host, descendants())),
            actors=live_actors(),
        )


def descendants() -> list[int]:
    """Processes below this one."""
    children = collections.defaultdict(list)
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]
            children[int(parent)].append(int(entry))
    found = [os.getpid()]
    for pid in found:
        found += children[pid]
    return found[1:]


def is_host(pid: int) -> bool:
    """Whether that is an actor's process, and below this one."""
    with contextlib.suppress(OSError):
        named_so = b"RayEnvActor" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return named_so and pid in descendants()
    return False


def live_actors() -> int:
    """Actors of envfleet that Ray does not hold for dead."""
    import ray

    if not ray.is_initialized():
        return 0
    return sum(
        actor["ActorClassName"] == "RayEnvActor" and actor["State"] != "DEAD"
        for actor in ray._private.state.actors().values()
    )


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Gives whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


# -- the run ---------------------------------------------------------------------------------------


class Driver:
    """Steps a batch, resets and asks it at random, and shows all that it gives to the checker.

    Args:
      batch: to be stepped.
      chaos: what may go wrong in it.
      mode: one of `MODES`.
      max_restarts, max_staleness: of the batch.
      log: takes a line now and then.
      nodes: the cluster whose nodes go wrong as well.

    Attributes:
      checker: what has seen it all.
      failures: the batch's records, counted by environment, phase and type.
      step_seconds, recv_seconds, other_seconds: how long each step took, each `recv` and `drain`,
        and each other call.
      overrun: by how many seconds a `recv` has passed its timeout at most.
      kills: how many processes were ended from outside.
      wrecked: how many nodes were killed, frozen, thawed and added.
    """

    def __init__(
        self,
        batch: Any,
        chaos: Chaos,
        mode: str,
        max_restarts: int,
        max_staleness: int | None,
        log: Callable[[str], object],
        nodes: Any = None,
    ) -> None:
        self.checker = Checker(batch.batch_size, truncates=max_restarts > 0)
        self.failures: Counts = collections.Counter()
        self.step_seconds, self.other_seconds = array.array("d"), array.array("d")
        self.recv_seconds = array.array("d")
        self.overrun = 0.0
        self.kills = 0
        self.wrecked: collections.Counter[str] = collections.Counter()
        self._batch, self._chaos, self._log, self._nodes = batch, chaos, log, nodes
        self._wrecker: Wrecker | None = None
        self._num_workers = len(nodes.workers) if nodes else 0
        self._mode, self._max_restarts, self._max_staleness = mode, max_restarts, max_staleness
        self._random = random.Random(chaos.seed)
        self._newest: object = None
        self._began = time.monotonic()
        self._news_due = SECONDS_BETWEEN_NEWS

    @property
    def seconds(self) -> float:
        """Since it is there."""
        return time.monotonic() - self._began

    def storm(self, until: float) -> None:
        """Steps among faults until so many seconds have passed; then until all is mended."""
        killer = Killer(self._pids, self._chaos.kills_per_second, self._random.randrange(2**31))
        with self._chaos.armed(), killer, self._wrecking():
            while self.seconds < until:
                end = min(until, self.seconds + self._random.uniform(0.5, 5.0))
                mode = self._mode
                if mode == "mixed":
                    mode = self._random.choice(["lockstep", "first-ready"])
                if mode == "lockstep":
                    while self.seconds < end:
                        self._step()
                        self._interlude()
                        self._tell()
                    self._bring_back()
                else:
                    while self.seconds < end:
                        self._turn()
                        self._tell()
                    self._land()
        self.kills += killer.kills
        for steps in range(1, 100):
            self._step()
            if steps >= 3 and not any(row.is_cut for row in self.checker.rows):
                break  # what was hit last has shown it, was rebuilt, and has stepped

    @contextlib.contextmanager
    def _wrecking(self) -> Iterator[None]:
        if self._nodes is None:
            yield
            return
        self._wrecker = Wrecker(self._nodes, self._random.randrange(2**31))
        with self._wrecker:
            yield
        self.wrecked += self._wrecker.counts

    def _tell(self) -> None:
        if self._wrecker is not None:
            self._wrecker.add_if_due(self._num_workers)
        if self.seconds < self._news_due:
            return
        self._news_due += SECONDS_BETWEEN_NEWS
        self._log(
            f"{self.seconds:5.0f} s: {self.checker.calls} calls, {self.failures.total()} failures, "
            f"{sum(self.checker.truncations)} truncations, {self.checker.num_bad} bad transitions"
        )

    def _pids(self) -> list[int]:
        return [row.header.pid for row in self.checker.rows]

    def _action(self) -> int:
        return self._random.randrange(10**9)

    def _some(self, env_ids: Sequence[int]) -> list[int]:
        """Some of these, at least one, in any order."""
        return self._random.sample(env_ids, self._random.randint(1, len(env_ids)))

    @property
    def _everyone(self) -> range:
        return range(self._batch.batch_size)

    # -- lockstep

    def _step(self) -> None:
        self._bring_back()
        actions = [self._action() for _ in self._everyone]
        with self._raising(dict(enumerate(actions))), _timed(self.step_seconds):
            time_step = self._batch.step(np.array(actions))
            self.checker.stepped(rows(time_step), actions)

    def _interlude(self) -> None:
        """Now and then something other than a step."""
        draw = self._random.random()
        if self.checker.failed:
            return
        if draw < 0.002:
            self._reset(None)
        elif draw < 0.01:
            self._reset(sorted(self._some(self._everyone)))
        elif draw < 0.02:
            self._ping()
        elif draw < 0.04:
            self._look()
        elif draw < 0.045 and self._nodes is not None:
            self._rebalance()

    def _bring_back(self) -> None:
        """Resets what has failed, until nothing has."""
        while self.checker.failed:
            wanted = sorted({*self.checker.failed, *self.checker.unseen})
            self._reset(self._random.choice([None, wanted]))

    def _reset(self, env_ids: Sequence[int] | None) -> None:
        chosen = self._everyone if env_ids is None else env_ids
        with self._raising(dict.fromkeys(chosen, RESET)), _timed(self.other_seconds):
            time_step = self._batch.reset(env_ids)
            self.checker.was_reset(rows(time_step), chosen)

    @contextlib.contextmanager
    def _raising(self, lockstep: Mapping[int, int | None] | None = None) -> Iterator[None]:
        """Around a call (what it asks, if in lockstep): only a spent budget may be raised."""
        try:
            yield
        except Exception as error:
            given_up = self._given_up(error)
            if not given_up:
                raise
            self.checker.gave_up(given_up, lockstep)
        finally:
            self._count_failures()

    def _given_up(self, error: Exception) -> set[int]:
        """Environments whose budget an error says to be spent: it has every attempt."""
        failures = getattr(error, "env_failures", ())
        attempts = collections.Counter(failure.index for failure in failures)
        if self._max_restarts >= MAX_RESTARTS:  # which is not to be spent
            return set()
        return {i for i, number in attempts.items() if number > self._max_restarts}

    # -- first-ready

    def _turn(self) -> None:
        """One call, at random, of those that first-ready stepping has."""
        checker = self.checker
        if checker.broken and self._random.random() < 0.1:
            self._async_reset(self._some(checker.broken))
        moves: list[tuple[float, bool, Callable[[], None]]] = [
            (40, bool(checker.resting), lambda: self._send(self._some(checker.resting))),
            (40, bool(checker.asked), self._recv),
            (2, bool(checker.asked), self._poll),
            (1, bool(checker.asked), self._drain),
            (1, bool(checker.resting), self._async_reset_some),
            (0.2, True, lambda: self._reset_at_any_time(None)),
            (0.4, True, self._reset_around),
            (1, bool(checker.resting or checker.asked), self._ping),
            (2, not checker.failed and not checker.unseen, self._look),
            (2, bool(checker.asked) and not checker.failed, self._misuse),
            (0.5, self._nodes is not None and not checker.failed, self._rebalance),
            (0.5, bool(checker.broken), self._send_to_broken),
            (0.5, bool(checker.broken), self._reset_without_broken),
        ]
        possible = [(weight, move) for weight, is_possible, move in moves if is_possible]
        weights, choices = zip(*possible, strict=True)
        self._random.choices(choices, weights)[0]()

    def _land(self) -> None:
        """Ends it, so that lockstep may go on."""
        while self.checker.asked:
            if self._random.random() < 0.5:
                self._drain()
            else:
                self._reset_at_any_time(None)

    def _send(self, env_ids: Sequence[int]) -> None:
        asked = {i: self._action() for i in env_ids}
        with self._raising(), _timed(self.other_seconds):
            self._batch.send(np.array([*asked.values()]), env_ids)
            self.checker.sent(asked)

    def _async_reset_some(self) -> None:
        self._async_reset(self._some([*self.checker.resting, *self.checker.broken]))

    def _async_reset(self, env_ids: Sequence[int]) -> None:
        with self._raising(), _timed(self.other_seconds):
            self._batch.async_reset(env_ids)
            self.checker.sent(dict.fromkeys(env_ids, RESET))
            return
        if self.checker.broken:  # it was refused, and has brought nothing back
            self._send_to_broken()

    def _recv(self) -> None:
        timeouts = [None, None, None, 0, self._random.uniform(0, 0.02), 10.0]
        self._receive(
            self._random.randint(1, len(self.checker.asked)), self._random.choice(timeouts)
        )

    def _receive(self, min_envs: int, timeout: float | None) -> None:
        stale = self.checker.awaits(self._max_staleness)
        began = time.monotonic()
        with self._raising(), _timed(self.recv_seconds):
            time_step, env_ids = self._batch.recv(min_envs, timeout)
            waited = time.monotonic() - began
            is_late = timeout is not None and waited >= timeout
            if is_late:
                self.overrun = max(self.overrun, waited - timeout)
            self.checker.received(
                rows(time_step),
                self._as_list(env_ids),
                0 if is_late else min_envs,
                () if is_late else stale,
            )

    def _poll(self) -> None:
        """Asks again and again what has landed, without ever waiting."""
        before, deadline = len(self.checker.asked), time.monotonic() + LONGEST_POLL
        while len(self.checker.asked) == before:
            if time.monotonic() > deadline:
                self.checker.received([], [], at_least=1)
                return
            self._receive(1, 0)
            time.sleep(0.002)

    def _drain(self) -> None:
        self.checker.awaits(self._max_staleness)
        with self._raising(), _timed(self.recv_seconds):
            time_step, env_ids = self._batch.drain()
            self.checker.drained(rows(time_step), self._as_list(env_ids))

    def _as_list(self, env_ids: np.ndarray[Any, Any]) -> list[int]:
        assert env_ids.dtype == np.int64, env_ids.dtype
        return env_ids.tolist()

    def _reset_around(self) -> None:
        """Resets at least those that are under way or broken, or have had no reset."""
        wanted = {*self.checker.asked, *self.checker.broken, *self.checker.unseen}
        self._reset_at_any_time(sorted(wanted | {*self._some(self._everyone)}))

    def _reset_at_any_time(self, env_ids: Sequence[int] | None) -> None:
        """Others show themselves again after an error; that may take several resets."""
        self._reset(env_ids)
        self._bring_back()
        if self.checker.asked:
            self._reset(None)

    def _misuse(self) -> None:
        """A call that has to be refused, and to move nothing."""
        from envfleet import EnvBusy

        batch, checker = self._batch, self.checker
        away = self._some([*checker.asked])
        mixed = [*away, *(self._some(checker.resting) if checker.resting else [])]
        self._random.shuffle(mixed)
        others = [i for i in self._everyone if i not in away]
        too_many = len(checker.asked) + 1
        calls: list[tuple[type[Exception], str, Callable[[], object]]] = [
            (EnvBusy, _named(away), lambda: batch.send(np.zeros(len(mixed), np.int64), mixed)),
            (EnvBusy, _named(away), lambda: batch.async_reset(mixed)),
            (EnvBusy, _named(checker.asked), lambda: batch.step(np.zeros(batch.batch_size, int))),
            (EnvBusy, _named(away), lambda: batch.reset(others)),
            (EnvBusy, _named(checker.asked), lambda: batch.set_state([0] * batch.batch_size)),
            (ValueError, f"min_envs={too_many}", lambda: batch.recv(too_many, 0)),
        ]
        if self._max_restarts < MAX_RESTARTS:
            # Some may be under way no longer, and nobody was told of it yet.
            calls = [(expected, "", call) for expected, _, call in [*calls[:3], *calls[4:]]]
        expected, words, call = self._random.choice(calls)
        checker.calls += 1
        with self._raising():
            try:
                call()
            except expected as error:
                checker.refused(str(error), words)
            else:
                checker.refused("nothing", f"{expected.__name__}: {words}")

    def _send_to_broken(self) -> None:
        env_ids = [*self._some(self.checker.broken)]
        env_ids += self._some(self.checker.resting) if self.checker.resting else []
        actions = np.zeros(len(env_ids), np.int64)
        self._has_to_be_brought_back(lambda: self._batch.send(actions, env_ids))

    def _reset_without_broken(self) -> None:
        left_out = self._some(self.checker.broken)
        env_ids = [i for i in self._everyone if i not in left_out]
        self._has_to_be_brought_back(lambda: self._batch.reset(env_ids))

    def _has_to_be_brought_back(self, call: Callable[[], object]) -> None:
        """A call that something broken is in the way of: it has to move nothing."""
        from envfleet import ResetNeeded

        self.checker.calls += 1
        with self._raising():
            try:
                call()
            except ResetNeeded:
                return
            self.checker.refused("nothing", "ResetNeeded")

    # -- either way

    def _look(self) -> None:
        with self._raising():
            self.checker.looked(rows(self._batch.current_time_step()))

    def _rebalance(self) -> None:
        with self._raising(), _timed(self.other_seconds):
            self.checker.moved(self._batch.rebalance())

    def _ping(self) -> None:
        from envfleet import ActorDied, EnvTimeout

        env_ids = self._some([*self.checker.resting, *self.checker.asked])
        try:
            with self._raising(), _timed(self.other_seconds):
                answers = self._batch.call("ping", env_ids=env_ids)
                for slot, answer in zip(env_ids, answers, strict=True):
                    self.checker.answered(slot, answer)
        except (ActorDied, EnvTimeout):
            pass  # it was killed just now: the next step shows it

    def _count_failures(self) -> None:
        records = list(self._batch.failures)
        for record in itertools.takewhile(lambda one: one is not self._newest, records[::-1]):
            self.failures[record.index, record.phase, record.type_name] += 1
        self._newest = records[-1] if records else None


def _named(env_ids: Collection[int]) -> str:
    """How an error names environments."""
    names = ", ".join(map(str, sorted(env_ids)))
    return f"env {names} of" if len(env_ids) == 1 else f"envs {names} of"


@contextlib.contextmanager
def _timed(seconds: array.array[float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - began)


@dataclasses.dataclass
class Report:
    """What a run saw, and what was wrong with it."""

    seed: int
    batch: str
    """Its mode and its arguments, in words."""
    seconds: float
    driver: Driver
    injected: Counts
    restarts: int
    footprints: Sequence[Footprint]
    """After warming up, and at the end."""
    problems: Sequence[str]
    """What is wrong besides bad transitions, in words."""

    @property
    def ok(self) -> bool:
        return not self.driver.checker.num_bad and not self.problems

    def __str__(self) -> str:
        checker, failures = self.driver.checker, self.driver.failures
        table = {
            "seed": self.seed,
            "batch": self.batch,
            "calls checked": f"{checker.calls}, {checker.transitions} rows, "
            f"in {self.seconds:.0f} s",
            "time of a step": _times(self.driver.step_seconds),
            "of a recv": _times(self.driver.recv_seconds),
            "past its timeout": f"{self.driver.overrun:.2f} s at most",
            "of another call": _times(self.driver.other_seconds),
            "killed from outside": self.driver.kills,
            "faults injected": _by_phase(self.injected),
            "failures seen": _by_phase(failures),
            "failures a second": f"{failures.total() / self.seconds:.2f}",
            "restarts": self.restarts,
            "truncations": sum(checker.truncations),
            "raised": sum(checker.raised),
            "dropped by a reset": sum(checker.dropped),
            "environments moved": sum(checker.moves),
            "nodes killed": self.driver.wrecked["kill"],
            "nodes frozen": self.driver.wrecked["freeze"],
            "nodes thawed": self.driver.wrecked["thaw"],
            "nodes added": self.driver.wrecked["add"],
            "bad transitions": checker.num_bad,
            "held": "after warming up -> at the end",
        }
        for name in Footprint._fields:
            held = [getattr(footprint, name) for footprint in self.footprints]
            table[f"  {name}"] = " -> ".join(f"{value:.5g}" for value in held) or "not measured"
        lines = [f"{name:20}  {value}" for name, value in table.items()]
        return "\n".join([*lines, *checker.bad, *self.problems, "ok" if self.ok else "NOT ok"])


def _times(seconds: Sequence[float]) -> str:
    if not seconds:
        return "none"
    median = 1e3 * statistics.median(seconds)
    return f"{len(seconds)}, median {median:.1f} ms, worst {max(seconds):.2f} s"


def _by_phase(counts: Counts) -> str:
    """A line for each phase and kind, with a sum above."""
    sums: collections.Counter[tuple[str, str]] = collections.Counter()
    for (_, phase, kind), count in counts.items():
        sums[phase, kind] += count
    lines = [f"  {phase:9}  {kind:25} {count:6}" for (phase, kind), count in sorted(sums.items())]
    return "\n".join([str(counts.total()), *lines])


def contradictions(driver: Driver, injected: Counts, stats: Any) -> Iterator[str]:
    """Where what was injected, what the batch counted and what it showed do not go together.

    They need not be equal: an environment fails along with others of its process, and a slow
    machine makes timeouts that nobody injected.
    """
    for i, (truncations, moves, hidden, instances, failures, restarts) in enumerate(
        zip(
            driver.checker.truncations,
            driver.checker.moves,
            # Of these a failure may have been the answer.
            map(operator.add, driver.checker.dropped, driver.checker.raised),
            driver.checker.instances,
            stats.failures,
            stats.restarts,
            strict=True,
        )
    ):
        faulty = sum(n for (env_id, *_), n in injected.items() if env_id == i)
        faulty_steps = sum(n for key, n in injected.items() if key[:2] == (i, "step"))
        records = sum(n for (env_id, *_), n in driver.failures.items() if env_id == i)
        for few, of_these, many, of_those in (
            (truncations, "truncations", failures + moves, "failures and moves"),
            (
                faulty_steps,
                "faults in steps",
                truncations + hidden,
                "truncations, errors and drops",
            ),
            (faulty, "faults", failures, "failures"),
            (records, "records", failures, "failures"),
            (failures, "failures", records, "records"),
            (instances - 1, "new instances", restarts, "restarts"),
        ):
            if few > many:
                yield f"env {i}: {few} {of_these}, but {many} {of_those}"


def grown(start: Footprint, end: Footprint, nodes: int = 0) -> Iterator[str]:
    """What there is more of at the end than at the start, beyond what comes and goes."""
    for name, slack in SLACK.items():
        slack += nodes * SLACK_OF_A_NODE.get(name, 0)
        before, after = getattr(start, name), getattr(end, name)
        if after > before + slack:
            yield f"{name} grew from {before:.5g} to {after:.5g}"


def run(
    *,
    minutes: float = 10.0,
    mode: str = "mixed",
    envs: int = 16,
    envs_per_actor: int = 2,
    max_restarts: int = MAX_RESTARTS,
    max_staleness: int | None = None,
    seed: int | None = None,
    backend: str = "ray",
    transport: str = "rpc",
    scale: float = 1.0,
    nodes: int = 0,
    log: Callable[[str], object] = print,
) -> Report:
    """Steps a batch among faults, and tells what came of it.

    Args:
      minutes: how long; what is held is measured after the first tenth and at the end.
      mode: one of `MODES`; ``"mixed"`` takes turns of some seconds.
      envs, envs_per_actor, backend, transport: of the batch. On ``"local"`` environments only
        raise.
      max_restarts: of the batch; a budget that is spent is an error only where it is
        `MAX_RESTARTS`. With 0 failures are raised.
      max_staleness: of the batch; drawn by the seed where it is None.
      seed: of faults and actions; drawn and told where it is None.
      scale: a factor for the chances of faults; 0 for none.
      nodes: of a cluster, the driver's own among them, that is started for it; 0 for a local Ray.
      log: takes a line now and then.
    """
    import ray

    from envfleet import ParallelPyEnvironment

    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    log(f"Ray {ray.__version__}, Python {platform.python_version()}, seed {seed}")
    if max_staleness is None:
        max_staleness = random.Random(f"{seed} staleness").choice([None, None, None, 3, 10])
    words = f"{mode}, {max_restarts} restarts in a row, max_staleness {max_staleness}"
    if nodes:
        words += f", on {nodes} nodes"
    if transport != "rpc":
        words += f", by {transport}"
    in_processes, ray_was_there = backend == "ray", ray.is_initialized()
    num_actors = -(-envs // envs_per_actor) if in_processes else 0
    restarts, footprints, problems = 0, [], []

    def expect(hosts: int) -> Footprint:
        """What is held, once ended actors have had time to go."""
        wait_until(lambda: Footprint.measured()[3:] == (hosts, hosts))
        held = Footprint.measured()
        if held[3:] != (hosts, hosts):
            problems.append(f"expected {hosts} actors, found {held}")
        return held

    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        chaos = Chaos(Path(folder), seed, scale, in_processes)
        with cluster(nodes) as started:
            with ParallelPyEnvironment(
                [functools.partial(ChaosEnv, i, chaos) for i in range(envs)],
                envs_per_actor=envs_per_actor,
                on_failure="restart" if max_restarts else "raise",
                max_restarts=max_restarts,
                max_staleness=max_staleness,
                backend=backend,
                transport=transport,
                seed=seed,
                ray_init=RAY_INIT,
                **LIMITS,
            ) as batch:
                driver = Driver(batch, chaos, mode, max_restarts, max_staleness, log, started)
                try:
                    for until in (6 * minutes, 60 * minutes):
                        driver.storm(until)
                        footprints.append(expect(num_actors))
                    stats = batch.stats()
                    restarts = sum(stats.restarts)
                    problems += contradictions(driver, chaos.injected(), stats)
                    problems += grown(*footprints, nodes)
                except Exception:  # one that was not due
                    problems.append(traceback.format_exc())
                seconds = driver.seconds
            expect(0)
        if not ray_was_there and not wait_until(lambda: not descendants()):
            problems.append(f"{len(descendants())} processes have outlived Ray")
        injected = chaos.injected()
    return Report(seed, words, seconds, driver, injected, restarts, footprints, problems)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="(10)")
    parser.add_argument("--mode", choices=MODES, default="mixed", help="(mixed)")
    parser.add_argument("--envs", type=int, default=16, help="(16)")
    parser.add_argument("--envs-per-actor", type=int, default=2, help="(2)")
    parser.add_argument(
        "--max-restarts", type=int, default=MAX_RESTARTS, help=f"0: raise ({MAX_RESTARTS})"
    )
    parser.add_argument("--max-staleness", type=int, help="(drawn by the seed, mostly none)")
    parser.add_argument("--seed", type=int, help="of faults and actions (drawn)")
    parser.add_argument("--backend", choices=("ray", "local"), default="ray", help="(ray)")
    parser.add_argument(
        "--transport", choices=("rpc", "shared_memory"), default="rpc", help="(rpc)"
    )
    parser.add_argument(
        "--nodes", type=int, default=0, help="of a cluster that is started; 0: a local Ray (0)"
    )
    parser.add_argument("--faults", dest="scale", type=float, default=1.0, help="how many (1)")
    arguments = parser.parse_args()
    # Before Ray is imported: no token file in the home directory; and actors find this module.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    logging.getLogger("envfleet").setLevel(logging.ERROR)  # it has a line for every failure
    faulthandler.dump_traceback_later(60 * arguments.minutes + 300, exit=True)
    say = functools.partial(print, file=sys.stdout, flush=True)
    # Ray prints a paragraph about every process that dies, whatever log_to_driver says.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        report = run(**vars(arguments), log=say)
    say(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    import chaos  # so that environments travel by reference, to a module that actors can import

    sys.exit(chaos.main())
