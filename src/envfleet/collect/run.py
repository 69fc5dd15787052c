"""Run: a crew collects into a dataset until what was asked for is on disk, and nothing else."""

from __future__ import annotations

import collections
import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import numpy as np

from envfleet.collect import shards
from envfleet.collect.columns import Columns
from envfleet.collect.crew import Crew
from envfleet.collect.dataset import FAILURES
from envfleet.collect.episodes import Recording
from envfleet.collect.ledger import End, Ledger
from envfleet.collect.progress import Snapshot
from envfleet.collect.worker import Order, Recorded
from envfleet.errors import EnvFailure

_BY_LIMIT = ("max_steps", "max_seconds")
"""Why an episode was cut that a later run takes from its beginning again."""


class Run:
    """One run, from what stands in the directory to its end.

    Args:
      crew: who collects; nobody has begun.
      recording: how, and where to.
      columns: of the dataset.
      ledger: knows what stands in the directory, and what was asked for; see `take_stock`.
      ticks: of a chunk.
      max_seconds: of this run.
      show: takes a `Snapshot` now and then.
    """

    def __init__(
        self,
        crew: Crew,
        recording: Recording,
        columns: Columns,
        ledger: Ledger,
        *,
        ticks: int,
        max_seconds: float | None,
        show: Callable[[Snapshot], None] | None,
    ) -> None:
        self._crew, self._recording, self._columns, self._ticks = crew, recording, columns, ticks
        self._directory = Path(recording.directory)
        self._max_seconds, self._show = max_seconds, show
        self._ledger = ledger
        self._sent: dict[int, Order] = {}
        self._sent_at: dict[int, float] = {}
        self._waiting_since: dict[int, float] = {}
        """Of workers with whole episodes that are not on disk: the first ended after this."""
        self._idle_by: dict[int, int | None] = {}
        """Workers with nothing to do up to a horizon."""
        self._fresh = set(range(len(crew)))  # who knows nothing of what is done
        self._signal: int | None = None
        self._returns: collections.deque[float] = collections.deque(maxlen=100)
        self._rates: collections.deque[tuple[float, int]] = collections.deque(maxlen=20)
        self.num_failures = self.num_steps = self.num_shards = self._crew_failures = 0
        self._began = time.monotonic()

    # -- the whole of it ---------------------------------------------------------------------------

    def go(self) -> str:
        """Collects; gives the rule that ended it, or the name of the signal that did.

        Raises:
          NotWritten: a shard could not be written; says what stands.
          Exception: what an environment or the policy raised.
        """
        try:
            with self._signals():
                ended_by = self._until_enough()
        except BaseException:
            self._save()
            raise
        shards.remove_staging(self._directory)
        return ended_by

    def _until_enough(self) -> str:
        self._began = time.monotonic()
        self._crew.tell("record", self._recording)
        while True:
            while (end := self._ledger.end()) is None and (stop := self._stopped()) is None:
                self._go_on()
                self._hear()
            self._finish(end, None if end else stop)
            if end is None:
                trim(self._directory, self._columns, self._ledger.end())
                return str(stop)
            end = self._ledger.end()  # a worker may have been lost meanwhile
            if end is not None and self._ledger.is_on_disk(end):
                trim(self._directory, self._columns, end)
                return end.rule

    def _stopped(self) -> str | None:
        if self._signal is not None:
            return signal.Signals(self._signal).name
        if self._max_seconds is not None and self.seconds >= self._max_seconds:
            return "max_seconds"
        return None

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    # -- orders and reports ------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Gives work to all who are free and have some left."""
        free = [w for w in range(len(self._crew)) if w not in self._crew.under_way]
        is_stuck = len(free) == len(self._crew) and len(self._idle_by) == len(free)
        horizon = self._ledger.horizon(self._crew.num_envs, is_stuck)
        orders = {}
        for worker in free:
            if self._idle_by.get(worker, -1) == horizon and not is_stuck:
                continue
            self._idle_by.pop(worker, None)
            orders[worker] = self._order(worker, horizon)
        self._send(orders)

    def _until_due(self) -> dict[int, float]:
        """Of those who do nothing, seconds until their episodes are to be written.

        Who does something sees to that by itself.
        """
        until = self._recording.shard_seconds - time.monotonic()
        under_way = self._crew.under_way
        return {w: s + until for w, s in self._waiting_since.items() if w not in under_way}

    def _write_due(self) -> None:
        """Has those who do nothing write what has waited for long enough."""
        due = [worker for worker, seconds in self._until_due().items() if seconds <= 0]
        self._send(
            {worker: self._write_order(worker, self._idle_by.get(worker, 0)) for worker in due}
        )
        self._waiting_since.update({worker: self._sent_at[worker] for worker in due})

    def _write_order(self, worker: int, horizon: int | None = 0) -> Order:
        """To do nothing else; who was idle stays so up to the same horizon."""
        nothing = np.zeros(self._crew.envs_per_worker, np.int64)
        return self._order(worker, horizon)._replace(steps=nothing, seconds=0.0, flush=True)

    def _order(self, worker: int, horizon: int | None) -> Order:
        own, limit = self._crew.envs(worker), self._max_seconds
        envs = range(own.start, own.stop)
        order = Order(
            ticks=self._ticks,
            horizon=horizon,
            steps=self._ledger.budgets(envs, self._crew.num_envs),
            seconds=_SECONDS if limit is None else min(_SECONDS, max(limit - self.seconds, 0.0)),
        )
        if worker not in self._fresh:
            return order
        begin, done = self._ledger.begin(self._crew.num_envs)
        return order._replace(
            begin=begin[own],
            done=frozenset(k for k in done if k % self._crew.num_envs in envs),
            attempts=self._ledger.attempts(),
        )

    def _send(self, orders: dict[int, Order]) -> None:
        self._sent.update(orders)
        self._sent_at.update(dict.fromkeys(orders, time.monotonic()))
        self._crew.send(orders)

    def _hear(self) -> None:
        """Takes what has come in, if a worker is under way; has written what is due meanwhile."""
        if not self._crew.under_way:
            return
        self._write_due()
        # Some may have become due meanwhile; and shard_seconds may be more than Ray waits for.
        heard = self._crew.hear(max(min([*self._until_due().values(), _LISTENING]), 0.0))
        for worker, report in heard.reports:
            self._fresh.discard(worker)
            self._note(report.failures)
            if report.is_idle:
                self._idle_by[worker] = self._sent[worker].horizon
            self._take(worker, report.recorded)
        for worker in heard.lost:
            self._lose(worker)
            self._send({worker: self._order(worker, 0)})  # has it built anew
        self._note(self._crew.failures_since(self._crew_failures))
        self._crew_failures = self._crew.num_failures
        for worker in heard.back:
            self._lose(worker)
            self._find(worker)
        self._tell()

    def _lose(self, worker: int) -> None:
        """It is gone, with what it had in memory."""
        self._ledger.lose(worker)
        self._fresh.add(worker)
        self._idle_by.pop(worker, None)
        self._waiting_since.pop(worker, None)

    def _take(self, worker: int, recorded: Recorded) -> None:
        ledger = self._ledger
        self.num_steps += recorded.num_steps
        ledger.add_ended(worker, recorded.ended)
        if len(recorded.written.length):
            self.num_shards += 1
            ledger.add_written(recorded.written, worker)
            self._waiting_since.pop(worker, None)
        if ledger.waiting[worker]:
            self._waiting_since.setdefault(worker, self._sent_at[worker])
        ledger.running[worker] = recorded.running
        self._returns.extend(recorded.ended.returns[-100:].tolist())
        if recorded.problem is not None:
            raise recorded.problem

    def _find(self, worker: int) -> None:
        """Finds what a worker that was lost had written and could not say any more."""
        for path in shards.paths(self._directory):
            if path.name.startswith(f"shard-{worker:04d}-"):
                self._ledger.add_written(shards.read(path).episodes)

    # -- beginning and end -------------------------------------------------------------------------

    def _finish(self, end: End | None, stop: str | None) -> None:
        """Has everything written that ended, and what goes on where it is cut."""
        self._quiesce()
        cut: dict[int, dict[int, int]] = {}
        running = self._ledger.running
        if stop == "max_seconds":
            cut = {w: {k: n for k, n in one.items() if n} for w, one in running.items()}
        elif end is not None and end.steps:
            cut = {w: {end.episode: end.steps} for w, one in running.items() if end.episode in one}
        self._send(
            {
                worker: self._write_order(worker)._replace(
                    cut=cut.get(worker, {}), reason=stop or "max_steps"
                )
                for worker in range(len(self._crew))
                if worker not in self._fresh or self._ledger.waiting[worker]
            }
        )
        self._quiesce()
        self._idle_by.clear()

    def _quiesce(self) -> None:
        """Waits for all who are under way."""
        while self._crew.under_way:
            self._hear()

    def _save(self) -> None:
        """After a failure: has those that still can write what ended."""
        for worker in range(len(self._crew)):
            with contextlib.suppress(Exception):
                self._crew.ask("flush", worker=worker)

    # -- what is said of it ------------------------------------------------------------------------

    def _note(self, failures: Sequence[EnvFailure]) -> None:
        self.num_failures += len(failures)
        if failures:
            with contextlib.suppress(OSError), open(self._directory / FAILURES, "a") as file:
                for failure in failures:
                    said = {"time": round(time.time(), 2), "line": failure.line()}
                    file.write(json.dumps(said) + "\n")

    def _tell(self) -> None:
        if self._show is not None:
            self._rates.append((self.seconds, self.num_steps))
            self._show(self.snapshot())

    def snapshot(self) -> Snapshot:
        """Where it stands."""
        now, ledger = self.seconds, self._ledger
        since, before = self._rates[0] if self._rates else (0.0, 0)
        asked = (
            (ledger.num_steps, ledger.max_steps),
            (ledger.num_ended, ledger.max_episodes),
            (now, self._max_seconds),
        )
        fraction = min(max(done / limit for done, limit in asked if limit), 1.0)
        return Snapshot(
            num_steps=ledger.num_steps,
            num_episodes=ledger.num_ended,
            seconds=now,
            steps_per_second=(self.num_steps - before) / (now - since) if now > since else 0.0,
            mean_return=float(np.mean(self._returns)) if self._returns else None,
            num_failures=self.num_failures,
            fraction=fraction,
            seconds_left=now * (1 / fraction - 1) if 0 < fraction < 1 else None,
            num_shards=self.num_shards,
        )

    # -- signals -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run in good order; the second of them at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _ENDING}

        def note(number: int, frame: FrameType | None) -> None:
            del frame
            if self._signal is not None:
                raise KeyboardInterrupt
            self._signal = number

        for number in _ENDING:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


_ENDING = (signal.SIGINT, signal.SIGTERM)

_SECONDS = 0.5
"""For how long a worker goes on by itself."""

_LISTENING = 60.0
"""Seconds after which it is looked again whether there is something else to do."""


# -- what stands in a directory --------------------------------------------------------------------


def take_stock(
    directory: Path, columns: Columns, max_steps: int | None, max_episodes: int | None
) -> Ledger:
    """What stands there, of runs that have ended; what they cut short at their end is taken away.

    Not where it is just what is asked for.
    """
    shards.fence(directory)
    found = [shards.read(path) for path in shards.paths(directory)]
    everything, whole = Ledger(max_steps, max_episodes), Ledger(max_steps, max_episodes)
    for shard in found:
        everything.add_written(shard.episodes)
    end = everything.end()
    is_exact = end is not None and end.rule == "max_steps" and not end.steps
    last = end.episode - 1 if end is not None and is_exact else None
    cut = {k: why for shard in found for k, why in shard.episodes.cut.items() if why in _BY_LIMIT}
    if not cut or cut == {last: "max_steps"}:
        return everything
    for shard in found:
        kept = ~np.isin(shard.episodes.episode_id, [*cut])
        if not kept.all():
            shards.rewrite(shard, columns, kept, {}, "")
        whole.add_written(shard.episodes.selected(kept))
    return whole


def trim(directory: Path, columns: Columns, end: End | None) -> None:
    """Takes away what is beyond the end: those that were faster had gone on."""
    if end is None:
        return
    for path in shards.paths(directory):
        shard = shards.read(path)
        ids, lengths = shard.episodes.episode_id, shard.episodes.length
        is_last = (ids == end.episode) & (end.steps > 0)
        kept = (ids < end.episode) | is_last
        steps = {end.episode: end.steps} if (is_last & (lengths > end.steps)).any() else {}
        if steps or not kept.all():
            shards.rewrite(shard, columns, kept, steps, "max_steps")
