"""Building: what an actor needs to build environments, and whether they are what the batch has."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envfleet import errors, gin_state, specs
from envfleet.actor import Built
from envfleet.actors import Actors, Sent
from envfleet.environments import registrations
from envfleet.errors import EnvFailure, RemoteEnvError, SpecMismatch
from envfleet.layout import Layout
from envfleet.seeding import Seeds


class Builder:
    """The constructors of a batch, by env_id.

    Args:
      constructors: one callable per environment.
      seeds: the environments' seeds, or None to leave them as their constructors made them.
      in_process: whether the environments live in the caller's process.

    Attributes:
      time_step_layout, action_layout: the batch's, when the first environments were built.

    Raises:
      TypeError: a constructor does not pickle; says which and why.
    """

    def __init__(
        self, constructors: Sequence[Callable[[], Any]], seeds: Seeds | None, in_process: bool
    ) -> None:
        self.time_step_layout = Layout({}, "", timed=True)
        self.action_layout = Layout({}, "actions")
        self._in_process = in_process
        self._gin = gin_state.scope_only() if in_process else gin_state.capture()
        self._registered = {} if in_process else registrations.capture()
        self._constructors = [
            constructor if in_process else _pickled(env_id, constructor)
            for env_id, constructor in enumerate(constructors)
        ]
        self._specs: Any = None
        self.reseed(seeds)

    def reseed(self, seeds: Seeds | None) -> None:
        """From now on rebuilds have seeds of these."""
        self._seeds = seeds
        self._rebuilds = [0] * len(self._constructors)

    def send(
        self, actors: Actors, a: int, env_ids: Sequence[int], limit: float | None = None
    ) -> Sent:
        """Has an actor build environments."""
        return actors.send(
            a,
            env_ids,
            "start",
            "build",
            actors.rows(a, env_ids),
            [self._constructors[i] for i in env_ids],
            [self._seeds and self._seeds.of(i, self._rebuilds[i]) for i in env_ids],
            self._gin,
            self._registered,
            self._specs,
            limit=limit,
        )

    def count_rebuild(self, env_id: int) -> None:
        """The next build of an environment is another one than the last: it has its own seed."""
        self._rebuilds[env_id] += 1

    # -- what came of it ---------------------------------------------------------------------------

    def agree(self, built: Mapping[int, Built]) -> None:
        """The environments are there; the first one's specs are the batch's.

        Raises:
          SpecMismatch: others differ; says which, where, expected and found.
        """
        of_all = built[0].time_step_spec, built[0].action_spec
        self.time_step_layout = Layout(of_all[0], "", timed=True)
        self.action_layout = Layout(of_all[1], "actions")
        self._specs = of_all if self._in_process else gin_state.dumps(of_all)
        problems = [problem for i, one in built.items() for problem in self._compare(i, one)]
        if problems:
            raise SpecMismatch("\n".join(problems))

    def refused(self, env_id: int, result: Any) -> list[EnvFailure]:
        """Why a rebuilt environment cannot take its slot, if so."""
        if isinstance(result, EnvFailure):
            return [result]
        try:
            problems = self._compare(env_id, self.value(env_id, result))
        except RemoteEnvError as error:  # specs that cannot be loaded here
            return [errors.record(error, index=env_id, phase="construct")]
        if not problems:
            return []
        mismatch = SpecMismatch("\n".join(problems))
        return [errors.record(mismatch, index=env_id, phase="construct")]

    def _compare(self, env_id: int, built: Built) -> list[str]:
        """Every difference of an environment's specs from the batch's, in words."""
        pairs = [
            (self.time_step_layout, Layout(built.time_step_spec, "")),
            (self.action_layout, Layout(built.action_spec, "actions")),
        ]
        problems, other = [], "env 0's" if env_id else "what it was at the start"
        for expected, found in pairs:
            for path, words in specs.differences(expected.specs, found.specs):
                name, path = ("action", path) if expected.name else (str(path[0]), path[1:])
                at = f" at '{'/'.join(map(str, path))}'" if path else ""
                problems.append(f"env {env_id}'s {name}_spec differs from {other}{at}: {words}")
        return problems

    def value(self, env_id: int, result: Any) -> Any:
        """What an actor gave for an environment, loaded.

        Raises:
          RemoteEnvError: it cannot be loaded in the caller.
        """
        if self._in_process:
            return result.value
        try:
            return pickle.loads(result.value)
        except Exception as problem:
            error = RemoteEnvError(
                f"env {env_id} gave a value that cannot be loaded in the caller: "
                f"{type(problem).__name__}: {problem}"
            )
            errors.attach(error, [errors.record(problem, index=env_id, phase="call")])
            raise error from problem


def _pickled(env_id: int, constructor: Callable[[], Any]) -> bytes:
    try:
        return gin_state.dumps(constructor)
    except Exception as problem:
        raise TypeError(
            f"env_constructors[{env_id}] ({constructor!r}) does not pickle, so it cannot reach an "
            f"actor: {type(problem).__name__}: {problem}. Whatever it holds (open files, locks, "
            "connections, environments) has to be made inside it"
        ) from problem
