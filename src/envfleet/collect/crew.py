"""Crew: the workers of a run, told what to do and heard of what they did; those lost come back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envfleet.collect.worker import Order, Report, Worker
from envfleet.errors import ActorDied, EnvFailure, EnvTimeout
from envfleet.parallel import ParallelPyEnvironment
from envfleet.single import as_constructor
from envfleet.time_steps import FIRST, MID


class Heard(NamedTuple):
    """What came in.

    Attributes:
      reports: (worker, report) of those that have done what they were told.
      lost: workers that were lost with what they were doing: the next `Order` has them built anew.
      back: workers that were built anew and know nothing: what they were told last is not done.
    """

    reports: list[tuple[int, Report]]
    lost: list[int]
    back: list[int]


class Crew:
    """Workers in their actors, or, with ``inference="central"``, one in this process.

    Args:
      seed: of the run.
      others: as for `Collector`.
    """

    def __init__(
        self,
        env_constructor: Callable[[], Any] | str | Sequence[Callable[[], Any] | str],
        policy: Any,
        num_actors: int,
        envs_per_actor: int,
        *,
        seed: int,
        inference: str,
        chunk_length: int,
        max_episode_steps: int | None,
        min_ready: int | None,
        on_failure: str,
        max_restarts: int,
        step_timeout: float | None,
        reset_timeout: float | None,
        start_timeout: float | None,
        actor_options: Mapping[str, Any] | None,
        placement: Any,
        transport: str,
        ray_init: Mapping[str, Any] | None,
        backend: str,
    ) -> None:
        self.num_envs = num_actors * envs_per_actor
        self.policy = policy
        several = isinstance(env_constructor, Sequence) and not isinstance(env_constructor, str)
        self.env_constructors: list[Any] = [*env_constructor] if several else [env_constructor]  # type: ignore[misc]
        constructors = _constructors(self.env_constructors, self.num_envs)
        of_envs = functools.partial(
            ParallelPyEnvironment,
            on_failure=on_failure,
            max_restarts=max_restarts,
            step_timeout=step_timeout,
            reset_timeout=reset_timeout,
            start_timeout=start_timeout,
            envs_per_actor=envs_per_actor,
        )
        of_workers = functools.partial(ParallelPyEnvironment, start_timeout=start_timeout)
        on_ray = {
            "backend": backend,
            "actor_options": actor_options,
            "placement": placement,
            "ray_init": ray_init,
        }
        in_chunk = chunk_length * envs_per_actor
        if inference == "central":
            self.envs_per_worker = self.num_envs
            of_envs = functools.partial(of_envs, **on_ray, transport=transport)
            of_workers = functools.partial(of_workers, backend="local")
        else:
            self.envs_per_worker = envs_per_actor
            of_envs = functools.partial(of_envs, backend="local")
            of_workers = functools.partial(
                of_workers,
                **on_ray,
                on_failure=on_failure,
                max_restarts=max_restarts,
                step_timeout=_of_a_chunk(step_timeout, reset_timeout, in_chunk),
            )
        self._workers = of_workers(
            [
                functools.partial(
                    Worker,
                    constructors[first : first + self.envs_per_worker],
                    of_envs,
                    policy,
                    seed=seed,
                    first_env=first,
                    num_envs=self.num_envs,
                    max_episode_steps=max_episode_steps,
                    min_ready=min_ready,
                )
                for first in range(0, self.num_envs, self.envs_per_worker)
            ]
        )
        self._workers.reset()
        self._restarts = on_failure == "restart"
        self._told: dict[str, tuple[Any, ...]] = {}
        self._telling: Callable[[], Any] | None = None

    def __len__(self) -> int:
        return self._workers.batch_size

    def envs(self, worker: int) -> slice:
        """The numbers of a worker's environments."""
        return slice(worker * self.envs_per_worker, (worker + 1) * self.envs_per_worker)

    @property
    def under_way(self) -> frozenset[int]:
        """The workers that have been told to do something and were not heard of since."""
        return frozenset(self._workers.under_way)

    @property
    def failures(self) -> tuple[EnvFailure, ...]:
        """Of workers, the last ones; a failure of an environment is in its worker's report."""
        return self._workers.failures

    @property
    def num_failures(self) -> int:
        """How often workers failed."""
        return sum(self._workers.num_failures)

    def failures_since(self, number: int) -> tuple[EnvFailure, ...]:
        """Those after the first so many."""
        new = self.num_failures - number
        return self._workers.failures[-new:] if new else ()

    # -- work --------------------------------------------------------------------------------------

    def send(self, orders: Mapping[int, Order]) -> None:
        """Tells workers what to do; none of them is under way. Does not wait for it."""
        if not orders:
            return
        boxed = np.empty(len(orders), object)
        for n, order in enumerate(orders.values()):
            boxed[n] = order
        self._workers.send(boxed, [*orders])

    def hear(self, timeout: float | None = None) -> Heard:
        """Waits until one worker at least is heard of.

        Args:
          timeout: seconds after which it gives up; what it gives is empty then.

        Raises:
          Exception: what an environment or the policy raised, without ``on_failure="restart"``.
        """
        heard = Heard([], [], [])
        time_step, workers = self._workers.recv(1, timeout)
        for worker, step_type, report in zip(
            workers.tolist(), time_step.step_type.tolist(), time_step.observation, strict=True
        ):
            if step_type == MID:
                heard.reports.append((worker, report))
            elif step_type == FIRST:
                heard.back.append(worker)
                with self._without_the_lost():
                    for name, args in self._told.items():
                        self._workers.call(name, *args, env_ids=[worker])
            else:
                heard.lost.append(worker)
        return heard

    # -- what all know -----------------------------------------------------------------------------

    def tell(self, name: str, *args: Any) -> None:
        """Calls a method of every worker, and of those that are built anew later.

        Does not wait for those that are under way, but for what was told before.
        """
        self.settle()
        self._told[name] = args
        self._telling = self._workers.post_call(name, *args)
        if not self._workers.under_way:
            self.settle()

    def settle(self) -> None:
        """Waits for what was told.

        Raises:
          Exception: what a worker raised about it.
        """
        telling, self._telling = self._telling, None
        if telling is not None:
            with self._without_the_lost():
                telling()

    def _without_the_lost(self) -> contextlib.AbstractContextManager[None]:
        """Where what is lost is built anew: it is told when it is back."""
        return contextlib.suppress(*((ActorDied, EnvTimeout) if self._restarts else ()))

    def ask(self, name: str, *args: Any, worker: int | None = None) -> list[Any]:
        """Calls a method of every worker, or of one, and gives what they return."""
        return self._workers.call(name, *args, env_ids=None if worker is None else [worker])

    def close(self) -> None:
        """Closes the environments, then ends the actors. Twice is fine."""
        self._workers.close()


def _constructors(
    given: Sequence[Callable[[], Any] | str], num_envs: int
) -> list[Callable[[], Any]]:
    """One constructor for each environment."""
    kinds = [
        as_constructor(one, f"env_constructor[{i}]" if len(given) > 1 else "env_constructor")
        for i, one in enumerate(given)
    ]
    if not kinds or num_envs % len(kinds):
        raise ValueError(
            f"env_constructor has {len(kinds)} constructors, which do not share {num_envs} "
            "environments evenly"
        )
    return kinds * (num_envs // len(kinds))


def _of_a_chunk(step: float | None, reset: float | None, steps: int) -> float | None:
    """Seconds that a worker may take for so many steps, each of which may be a reset."""
    return None if step is None else steps * max(step, reset or 0.0) + _SPARE


_SPARE = 30.0
"""Seconds of a worker's own, for its policy, its rows and what it writes."""
