"""Worker: an actor's environments and its policy, as an environment of the engine's.

Its action is an `Order`, its observation a `Report`: one remote call for many steps. So a worker is
started, restarted, timed out and closed as every environment is, by the one engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import dm_env
import numpy as np
from dm_env import specs

from envfleet import gin_state, seeding
from envfleet.collect.episodes import Episodes, NotWritten, Recording
from envfleet.collect.policies import BatchedPolicy
from envfleet.collect.rollout import Rollout
from envfleet.errors import EnvFailure
from envfleet.parallel import ParallelPyEnvironment

if TYPE_CHECKING:
    from envfleet.collect.recorder import Recorder


class Order(NamedTuple):
    """What a worker is to do next.

    Attributes:
      ticks: how many steps of its batch, at most; of a chunk, where it records.
      horizon, steps, begin, done, attempts: as for `Rollout.plan`.
      seconds: for how long it goes on where it records.
      flush: whether it then writes what it has of whole episodes.
      cut: episodes that are ended before that, and after how many steps; the rest of them is gone.
      reason: why.
    """

    ticks: int
    horizon: int | None
    steps: np.ndarray[Any, Any] | None
    begin: np.ndarray[Any, Any] | None = None
    done: Set[int] = frozenset()
    attempts: Mapping[int, int] = {}
    seconds: float = 0.0
    flush: bool = False
    cut: Mapping[int, int] = {}
    reason: str = ""


class Recorded(NamedTuple):
    """What a worker has recorded.

    Attributes:
      num_steps: since the last report.
      ended: episodes that ended since.
      written: episodes that are on disk since.
      running: episodes that go on, and how many steps each has.
      problem: why nothing more can be written; None where all is well.
    """

    num_steps: int
    ended: Episodes
    written: Episodes
    running: dict[int, int]
    problem: OSError | None


class Report(NamedTuple):
    """What a worker has done.

    Attributes:
      chunk: the rows, a `Chunk`; None where it records.
      failures: environments that failed, counted through the run.
      is_idle: whether nothing is left for it to do.
      recorded: where it records, a `Recorded`.
    """

    chunk: Any
    failures: list[EnvFailure]
    is_idle: bool
    recorded: Any = None


class Worker(dm_env.Environment):  # type: ignore[misc]
    """Environments and a policy, built where this is built.

    Args:
      env_constructors: of its environments.
      make_batch: makes the batch of them.
      policy: as for `BatchedPolicy`.
      seed: of the run.
      first_env: number of its first environment.
      num_envs: how many environments the run has in all.
      max_episode_steps, min_ready: as for `Rollout`.
    """

    def __init__(
        self,
        env_constructors: Sequence[Callable[[], Any]],
        make_batch: Callable[..., ParallelPyEnvironment],
        policy: Any,
        *,
        seed: int,
        first_env: int,
        num_envs: int,
        max_episode_steps: int | None,
        min_ready: int | None,
    ) -> None:
        self._batch = make_batch(env_constructors)
        self._first_env = first_env
        self._num_told = 0
        self._recorder: Recorder | None = None
        try:
            self._policy = BatchedPolicy(
                policy,
                time_step_spec=self._batch.time_step_spec(),
                action_spec=self._batch.action_spec(),
                batch_size=self._batch.batch_size,
                seed=seeding.of_episode(seed, first_env, _OF_POLICIES)[0],
            )
            self._rollout = Rollout(
                self._batch,
                self._policy,
                seed=seed,
                first_env=first_env,
                num_envs=num_envs,
                max_episode_steps=max_episode_steps,
                min_ready=min_ready,
            )
        except BaseException:
            self._batch.close()
            raise

    def reset(self) -> Any:
        return dm_env.restart(np.asarray(None, object))

    def step(self, action: Any) -> Any:
        order: Order = action
        self._rollout.plan(order.horizon, order.steps, order.begin, order.done, order.attempts)
        chunk = recorded = None
        if self._recorder is None:
            chunk = self._rollout.run(order.ticks)
        else:
            recorded = self._recorded(order, self._recorder)
        report = Report(chunk, self._news(), self._rollout.is_idle, recorded)
        return dm_env.transition(0.0, _boxed(report))

    def _recorded(self, order: Order, recorder: Recorder) -> Recorded:
        """Goes on, and keeps and writes what comes of it."""
        num_steps, ended, written = 0, [Episodes.joined([])], [Episodes.joined([])]
        problem = None
        recorder.attempts.update(order.attempts)
        until = time.monotonic() + order.seconds
        try:
            while True:
                chunk = self._rollout.run(order.ticks, until)
                num_steps += chunk.num_steps
                ended.append(recorder.add(chunk))
                if recorder.is_due:
                    written.append(recorder.flush())
                if self._rollout.is_idle or time.monotonic() >= until:
                    break
            if order.cut:
                ended.append(recorder.cut(order.cut, order.reason, self._rollout.observation))
            if order.flush:
                written.append(recorder.flush())
        except NotWritten as failed:
            problem = failed
        except Exception:
            with contextlib.suppress(OSError):  # what is raised here is the news
                recorder.flush()
            raise
        return Recorded(
            num_steps,
            Episodes.joined(ended),
            Episodes.joined(written),
            self._rollout.running,
            problem,
        )

    def record(self, recording: Recording) -> None:
        """From now on, writes whole episodes, and gives no chunks.

        Raises:
          TypeError, ValueError: a dataset cannot hold these environments' specs; says which leaf.
          OSError: the directory cannot be written to.
        """
        from envfleet.collect.recorder import Recorder  # which needs pyarrow

        self._recorder = Recorder(
            recording,
            time_step_spec=self._batch.time_step_spec(),
            action_spec=self._batch.action_spec(),
            worker=self._first_env // self._batch.batch_size,
            node=socket.gethostname(),
            first_env=self._first_env,
        )

    def flush(self) -> None:
        """Writes what it has of whole episodes."""
        if self._recorder is not None:
            self._recorder.flush()

    def operative(self) -> gin_state.Operative:
        """What gin configured of what was called in this process."""
        return gin_state.operative()

    def columns(self) -> list[dict[str, Any]]:
        """What a dataset of it has for columns, as ``dataset.json`` says it."""
        from envfleet.collect.columns import Columns

        batch = self._batch
        return Columns.of(batch.time_step_spec(), batch.action_spec()).to_json()

    def _news(self) -> list[EnvFailure]:
        """Failures since the last report, each told with the environment's number in the run."""
        told, self._num_told = self._num_told, sum(self._batch.num_failures)
        new = self._batch.failures[-(self._num_told - told) :] if self._num_told > told else ()
        return [dataclasses.replace(one, index=one.index + self._first_env) for one in new]

    def set_weights(self, weights: Any, version: int) -> None:
        """The weights of the policy from now on."""
        self._policy.set_weights(weights, version)

    def bytes_per_step(self) -> int:
        """Of one environment: what its time step and action take."""
        return self._batch.stats().bytes_per_step // self._batch.batch_size

    def observation_spec(self) -> Any:
        return specs.Array((), object, "report")

    def action_spec(self) -> Any:
        return specs.Array((), object, "order")

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
        self._batch.close()


_OF_POLICIES = 2**31
"""In the place of an attempt: seeds of policies are none of episodes."""


def _boxed(value: Any) -> np.ndarray[Any, Any]:
    box = np.empty((), object)
    box[()] = value
    return box
