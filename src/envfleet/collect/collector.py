"""Collector: policies beside environments, in many actors, and what they collect as it comes."""

from __future__ import annotations

import collections
import contextlib
import numbers
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from envfleet import gin_state, seeding
from envfleet.collect.crew import Crew
from envfleet.collect.rollout import Chunk
from envfleet.collect.worker import Order, Report
from envfleet.errors import EnvFailure
from envfleet.layout import map_leaves
from envfleet.time_steps import LAST

Array = np.ndarray[Any, Any]


class CollectStats(NamedTuple):
    """What a collector has done so far.

    Attributes:
      num_steps: steps of environments that were handed over.
      seconds: since the first chunk was asked for, the caller's own time included.
      steps_per_second: by these.
      policy_version: of the last weights that were set; 0 for none.
      dropped_steps: steps in chunks that were dropped, as their policy was too old.
      failures: of environments, and of whole actors, after which they were restarted: the last
        1000 of either.
      stopped_by: the rule that ended the last `collect`; None before, or if it did not end by one.
    """

    num_steps: int
    seconds: float
    steps_per_second: float
    policy_version: int
    dropped_steps: int
    failures: list[EnvFailure]
    stopped_by: str | None


@gin_state.configurable
class Collector(contextlib.AbstractContextManager["Collector"]):
    """A policy over many environments, which acts where they are.

    Each actor hosts a copy of the policy and some environments, and steps them by itself: a remote
    call carries many steps. With ``inference="central"`` the policy stays with the caller, and the
    actors step environments only.

    Episode k belongs to environment k mod N and has seeds of its own, so that it is the same
    episode whatever N is, and however many actors there are; provided that the environment and the
    policy are determined by their seeds (see `envfleet.collect.policies`).

    Args:
      env_constructor: as for `ParallelPyEnvironment`: a callable or a name, or a list of them, one
        for each environment in turn.
      policy: a constructor of a policy, or a policy that pickles, as
        `envfleet.collect.policies` has them. Default: random within the action spec.
      num_actors: how many actors.
      envs_per_actor: how many environments in each.
      inference: where the policy is: ``"actors"`` or ``"central"``.
      min_ready: with a central policy, how many environments have to be ready for it to act again;
        the others' rows come in later ticks, and count as every environment's do. None: all,
        in lockstep.
      chunk_length: ticks of a chunk; the last one of a run may have less.
      seed: of the run; None draws one.
      max_policy_lag: how many calls of `set_policy` a chunk may be behind when it comes. 0: the
        actors wait for each other, their rows come as one chunk, and none of them goes on before
        the next chunk is asked for. More: chunks that are older are dropped, and their steps taken
        again. None: for no limit.
      max_episode_steps: after so many an episode is truncated; None for no limit.
      on_failure, max_restarts: of environments and of actors, as for `ParallelPyEnvironment`.
      step_timeout, reset_timeout: seconds that a step or a reset of an environment may take.
      start_timeout, actor_options, placement, ray_init, backend: as for `ParallelPyEnvironment`.
      transport: likewise; of a central policy's environments, since other actors step their own.

    Raises:
      ValueError: an argument that contradicts another; says which.
      Exception: as `ParallelPyEnvironment`.
    """

    def __init__(
        self,
        env_constructor: Callable[[], Any] | str | Sequence[Callable[[], Any] | str],
        policy: Any = None,
        num_actors: int = 1,
        envs_per_actor: int = 1,
        *,
        inference: Literal["actors", "central"] = "actors",
        min_ready: int | None = None,
        chunk_length: int = 128,
        seed: int | None = None,
        max_policy_lag: int | None = None,
        max_episode_steps: int | None = None,
        on_failure: str = "raise",
        max_restarts: int = 5,
        step_timeout: float | None = None,
        reset_timeout: float | None = None,
        start_timeout: float | None = 120.0,
        actor_options: Mapping[str, Any] | None = None,
        placement: Any = None,
        transport: str = "rpc",
        ray_init: Mapping[str, Any] | None = None,
        backend: str = "ray",
    ) -> None:
        if inference not in ("actors", "central"):
            raise ValueError(f"inference is {inference!r}, expected 'actors' or 'central'")
        for name, value in (
            ("num_actors", num_actors),
            ("envs_per_actor", envs_per_actor),
            ("chunk_length", chunk_length),
            ("max_episode_steps", 1 if max_episode_steps is None else max_episode_steps),
        ):
            if not isinstance(value, numbers.Integral):
                raise TypeError(f"{name} is {value!r}, expected an int")
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        if min_ready is not None and (
            inference != "central" or not 1 <= min_ready <= num_actors * envs_per_actor
        ):
            raise ValueError(
                f"min_ready is {min_ready}, expected 1 to {num_actors * envs_per_actor}, which are "
                "all environments, and inference='central'"
            )
        if max_policy_lag is not None and max_policy_lag < 0:
            raise ValueError(f"max_policy_lag is {max_policy_lag}, expected at least 0, or None")
        if policy is not None and not (callable(policy) or hasattr(policy, "action")):
            raise TypeError(
                f"policy is a {type(policy).__qualname__}, expected its constructor or one itself"
            )
        self.seed = seeding.root(seed)
        self._max_policy_lag = max_policy_lag
        self.chunk_length = chunk_length
        self.crew = self._hire(
            env_constructor=env_constructor,
            policy=policy,
            num_actors=num_actors,
            envs_per_actor=envs_per_actor,
            seed=self.seed,
            inference=inference,
            chunk_length=chunk_length,
            max_episode_steps=max_episode_steps,
            min_ready=min_ready,
            on_failure=on_failure,
            max_restarts=max_restarts,
            step_timeout=step_timeout,
            reset_timeout=reset_timeout,
            start_timeout=start_timeout,
            actor_options=actor_options,
            placement=placement,
            transport=transport,
            ray_init=ray_init,
            backend=backend,
        )
        self.num_envs = self.crew.num_envs
        self._version = 0
        self._next_episodes = np.arange(self.num_envs)  # of each environment, as handed over
        self._anew: set[int] = set()  # workers that were lost, and know nothing of what is done
        self._began: float | None = None
        self._num_steps = self._dropped = 0
        self._failures: collections.deque[EnvFailure] = collections.deque(maxlen=1000)
        self._stopped_by: str | None = None
        self._is_collecting = False

    def _hire(self, **arguments: Any) -> Crew:
        return Crew(**arguments)

    def __repr__(self) -> str:
        return f"<Collector of {self.num_envs} environments in {len(self.crew)} workers>"

    # -- collecting --------------------------------------------------------------------------------

    def collect(
        self,
        max_steps: int | None = None,
        max_episodes: int | None = None,
        max_seconds: float | None = None,
    ) -> Iterator[Chunk]:
        """Chunks as they come, until a rule ends it; the next call goes on from there.

        Every step that an environment takes is handed over, and each takes its share: that of
        environment i is ``max_steps // N`` steps, and one more if ``i < max_steps % N``; and of the
        first `max_episodes` episodes those with ``k % N == i``. So a slow environment's data are
        not left out.

        Args:
          max_steps: steps of environments, those of all chunks together: exactly so many.
          max_episodes: episodes of the run, counted from the collector's first; none is begun
            beyond, and each is handed over to its end.
          max_seconds: no more work is given out after so many seconds; what is on its way still
            comes.

        Raises:
          ValueError: none was given; or `max_episodes` together with dropping (`max_policy_lag`).
          Exception: what an environment or the policy raised.
        """
        check_limits(max_steps=max_steps, max_episodes=max_episodes, max_seconds=max_seconds)
        if max_episodes is not None and self._max_policy_lag:
            raise ValueError(
                "max_episodes together with max_policy_lag > 0: a dropped chunk would leave a hole "
                "in an episode"
            )
        if self._is_collecting:
            raise RuntimeError("collect() while another one is not finished: close() that one")
        return self._collect(max_steps, max_episodes, max_seconds)

    def _collect(
        self, max_steps: int | None, max_episodes: int | None, max_seconds: float | None
    ) -> Iterator[Chunk]:
        self._is_collecting, self._stopped_by = True, None
        began = time.monotonic()
        self._began = self._began or began
        shares = None if max_steps is None else _shares(max_steps, self.num_envs)
        idle: set[int] = set()

        def send(workers: Sequence[int]) -> None:
            """Gives more work to those that have some left, unless time is up."""
            if max_seconds is not None and time.monotonic() - began >= max_seconds:
                return
            wanted = [worker for worker in workers if worker not in idle]
            self._send(wanted, max_episodes, shares)

        try:
            send(range(len(self.crew)))
            while self.crew.under_way:
                landed, lost = self._received()
                self._send(lost, max_episodes, shares)
                if self._is_together and self.crew.under_way:
                    landed += self._received_all(max_episodes, shares)
                chunks = []
                for worker, report in landed:
                    chunk, own = report.chunk, self.crew.envs(worker)
                    self._failures.extend(report.failures)
                    if self._is_stale(chunk):
                        self._dropped += chunk.num_steps
                        send([worker])
                        continue
                    self._hand_over(chunk, own)
                    if shares is not None:
                        shares[own] -= _steps_of_each(chunk)
                    if report.is_idle or (shares is not None and not shares[own].any()):
                        idle.add(worker)
                    if self._is_together:
                        chunks.append(chunk)
                        continue
                    send([worker])  # it goes on while this one is used
                    if len(chunk.mask):
                        yield chunk
                if chunks:
                    yield _joined(chunks)
                if self._is_together:
                    send(range(len(self.crew)))
            if len(idle) < len(self.crew):
                self._stopped_by = "max_seconds"
            else:
                self._stopped_by = "max_episodes" if shares is None or shares.any() else "max_steps"
        except GeneratorExit:
            for _, report in self._received_all(max_episodes, shares):
                self._dropped += report.chunk.num_steps
            raise
        except BaseException:
            with contextlib.suppress(Exception):  # what is raised here is the news
                self.close()
            raise
        finally:
            self._is_collecting = False

    @property
    def _is_together(self) -> bool:
        return self._max_policy_lag == 0

    def _is_stale(self, chunk: Chunk) -> bool:
        lag = self._version - chunk.policy_version
        return self._max_policy_lag is not None and lag > self._max_policy_lag

    def _send(self, workers: Sequence[int], horizon: int | None, shares: Array | None) -> None:
        orders = {}
        for worker in workers:
            own = self.crew.envs(worker)
            orders[worker] = Order(
                ticks=self.chunk_length,
                horizon=horizon,
                steps=None if shares is None else shares[own].copy(),
                begin=self._next_episodes[own].copy() if worker in self._anew else None,
            )
        self.crew.send(orders)

    def _received(self) -> tuple[list[tuple[int, Report]], list[int]]:
        """Reports of workers, and which workers were lost and have to be told again."""
        heard = self.crew.hear()
        self._anew.difference_update(worker for worker, _ in heard.reports)
        self._anew.update(heard.lost, heard.back)
        return heard.reports, heard.lost + heard.back

    def _received_all(self, horizon: int | None, shares: Array | None) -> list[tuple[int, Report]]:
        reports: list[tuple[int, Report]] = []
        while self.crew.under_way:
            landed, lost = self._received()
            reports += landed
            self._send(lost, horizon, shares)
        return reports

    def _hand_over(self, chunk: Chunk, own: slice) -> None:
        """Keeps count of a chunk that the caller gets."""
        self._num_steps += chunk.num_steps
        newest = np.where(chunk.mask, chunk.episode, -1).max(axis=0, initial=-1)
        after = np.where(newest >= 0, newest + self.num_envs, 0)
        self._next_episodes[own] = np.maximum(self._next_episodes[own], after)

    # -- the policy --------------------------------------------------------------------------------

    def set_policy(self, weights: Any) -> int:
        """Gives every copy of the policy its weights, by its ``set_weights(weights)``.

        They are in force from the next chunk that an actor begins. Does not wait for that, but for
        the weights before these to have arrived.

        Args:
          weights: what pickles; put into Ray's store once.

        Returns:
          The version, 1 for the first ones; chunks say by which they were collected.

        Raises:
          TypeError: the policy takes no weights.
        """
        self.crew.settle()
        self._version += 1
        self.crew.tell("set_weights", weights, self._version)
        return self._version

    # -- the rest ----------------------------------------------------------------------------------

    def stats(self) -> CollectStats:
        """What was done so far."""
        seconds = 0.0 if self._began is None else time.monotonic() - self._began
        return CollectStats(
            num_steps=self._num_steps,
            seconds=seconds,
            steps_per_second=self._num_steps / seconds if seconds else 0.0,
            policy_version=self._version,
            dropped_steps=self._dropped,
            failures=[*self._failures, *self.crew.failures],
            stopped_by=self._stopped_by,
        )

    def close(self) -> None:
        """Closes the environments, then ends the actors. Twice is fine."""
        self.crew.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def check_limits(**limits: float | None) -> None:
    """Raises where there is none, or one of them makes no sense; says which."""
    if all(limit is None for limit in limits.values()):
        raise ValueError(f"collect() needs one of {', '.join(limits)}")
    for name, limit in limits.items():
        if limit is None:
            continue
        counted = name != "max_seconds"
        if not isinstance(limit, numbers.Integral if counted else numbers.Real):
            kind = "an int" if counted else "a number"
            raise TypeError(f"{name} is {limit!r}, expected {kind}")
        if not limit > 0:
            raise ValueError(f"{name} is {limit}, expected more than 0")


def _shares(max_steps: int, num_envs: int) -> Array:
    """How many of the steps are each environment's."""
    return max_steps // num_envs + (np.arange(num_envs) < max_steps % num_envs)


def _steps_of_each(chunk: Chunk) -> Array:
    is_step = chunk.mask & (chunk.step_type != LAST)
    return np.asarray(np.count_nonzero(is_step, axis=0))


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    """Chunks of one round side by side; a shorter one is filled up with rows that mean nothing."""
    ticks = max(len(chunk.mask) for chunk in chunks)

    def beside(*parts: Array) -> Array:
        return np.concatenate([_filled(part, ticks) for part in parts], axis=1)

    fields = [
        map_leaves(beside, *(getattr(chunk, name) for chunk in chunks)) for name in _TIME_MAJOR
    ]
    return Chunk(
        **dict(zip(_TIME_MAJOR, fields, strict=True)),
        env_ids=np.concatenate([chunk.env_ids for chunk in chunks]),
        next_time_step=map_leaves(
            lambda *parts: np.concatenate(parts), *(chunk.next_time_step for chunk in chunks)
        ),
        policy_version=min(chunk.policy_version for chunk in chunks),
        num_steps=sum(chunk.num_steps for chunk in chunks),
    )


_TIME_MAJOR = (
    "step_type",
    "observation",
    "action",
    "reward",
    "discount",
    "terminated",
    "truncated",
    "failed",
    "episode",
    "t",
    "mask",
)


def _filled(part: Array, ticks: int) -> Array:
    missing = np.zeros((ticks - len(part), *part.shape[1:]), part.dtype)
    return np.concatenate([part, missing]) if len(missing) else part
