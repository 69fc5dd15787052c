"""Members: Gymnasium environments as one batch, for the faces that are vector environments.

Gymnasium's and Stable-Baselines3's vector environments differ in how they hand over infos and in
little else. This gives what both are made of: batched observations by the spaces, flags apart,
infos and final values by environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import dm_env
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, iterate

from envfleet.environments.gymnasium import by_parts
from envfleet.environments.gymnasium_member import Beside, Described, Member, has_spec
from envfleet.errors import EnvFailure, InvalidAction, ResetNeeded, SpecMismatch
from envfleet.parallel import ParallelPyEnvironment
from envfleet.single import as_constructor

Array = np.ndarray[Any, Any]

_NOTHING = Beside({}, None)

_OWN = ("reset", "step", "close")


class Outcome(NamedTuple):
    """What a reset or a step of all members gave.

    Attributes:
      observations: batched as Gymnasium does, by the observation space; fresh arrays.
      rewards: float64 of shape ``(num_envs,)``.
      terminated, truncated: bool of shape ``(num_envs,)``.
      beside: an info for each member, and its final observation and info where its episode has
        ended with SAME_STEP.
    """

    observations: Any
    rewards: Array
    terminated: Array
    truncated: Array
    beside: list[Beside]


class Members:
    """Gymnasium environments in actors.

    An environment that has failed and is restarted (``on_failure="restart"``) ends its episode by
    truncation, with the last observation that it gave, reward 0, and an info that has the failure
    in words under ``"env_failure"``.

    Args:
      env_fns: a constructor, or the id, of each environment; or one with ``num_envs`` in `options`.
      autoreset_mode: when an environment whose episode has ended is reset.
      options: arguments of `ParallelPyEnvironment`.

    Attributes:
      batch: the `ParallelPyEnvironment`.
      described: what the first member says of itself.

    Raises:
      SpecMismatch: the spaces differ; says whose.
      ValueError: environments of one process are one and the same object; says which.
      Exception: as `ParallelPyEnvironment`.
    """

    def __init__(
        self,
        env_fns: Callable[[], Any] | str | Sequence[Callable[[], Any] | str],
        autoreset_mode: AutoresetMode,
        options: Mapping[str, Any],
    ) -> None:
        self._mode = autoreset_mode
        if autoreset_mode is AutoresetMode.SAME_STEP and options.get("step_timeout") is not None:
            # Any step may reset, and has the time of one that does.
            step, reset = options["step_timeout"], options.get("reset_timeout")
            options = {**options, "step_timeout": max(step, reset or 0.0)}
        self.batch = ParallelPyEnvironment(_members(env_fns, autoreset_mode), **options)
        try:
            everyone = self.ask("describe")
            self.described: Described = everyone[0]
            _check_all(everyone)
        except BaseException:
            self.batch.close()
            raise
        self._batched = by_parts(self.described.observation_space, _batched)
        self._pack = _packer(self.described.action_space, self.num_envs, "actions")

    @property
    def num_envs(self) -> int:
        return self.batch.batch_size

    # -- stepping ----------------------------------------------------------------------------------

    def reset(
        self,
        env_ids: Sequence[int],
        seeds: Sequence[int | None],
        options: Sequence[Mapping[str, Any] | None],
    ) -> Outcome:
        """Resets some members, each with a seed and options of its own.

        What is given for those that are not reset, in lists of one for every member, is ignored.
        """
        seeded = {i: (int(seed),) for i in env_ids if (seed := seeds[i]) is not None}
        # One tuple for all that are told the same: it is pickled once.
        same = {id(given): (given,) for given in options}
        told = {i: same[id(given)] for i in env_ids if (given := options[i]) is not None}
        if seeded or told:
            try:
                self._prepare(seeded, told)
            except ResetNeeded:  # some have failed: they have to be there to be told
                self.batch.reset(env_ids)
                self._prepare(seeded, told)
        return self._outcome(self.batch.reset(env_ids), reset=env_ids)

    def _prepare(self, seeded: Mapping[int, Any], told: Mapping[int, Any]) -> None:
        if len(seeded) == self.num_envs:  # then restarts have seeds by these, too
            self.batch.seed([seed for (seed,) in seeded.values()])
        elif seeded:
            self.batch.operate_each("seed", seeded)
        if told:
            self.batch.operate_each("set_options", told)

    def post_step(self, actions: Any) -> Callable[[], Outcome]:
        """Steps every member; calling what it gives waits for the outcome, or raises.

        Args:
          actions: batched as Gymnasium does, by the action space.

        Raises:
          InvalidAction: they do not fit; no member has moved.
        """
        time_step = self.batch.post_step(self._pack(actions))
        return lambda: self._outcome(time_step())

    def _outcome(self, time_step: Any, reset: Sequence[int] | None = None) -> Outcome:
        seen = time_step.observation
        observations = self._batched(seen.observation)
        beside = [_NOTHING if given is None else given for given in seen.beside.tolist()]
        if reset is not None:
            nothing = np.zeros(self.num_envs, bool)
            chosen = set(reset)
            beside = [given if i in chosen else _NOTHING for i, given in enumerate(beside)]
            return Outcome(observations, time_step.reward, nothing, nothing.copy(), beside)
        terminated, truncated = seen.terminated, seen.truncated
        last = time_step.step_type == dm_env.StepType.LAST
        cut = last & [not given.awaits_reset for given in beside]
        if self._mode is AutoresetMode.NEXT_STEP:
            cut &= ~(terminated | truncated)
        if cut.any():
            terminated[cut], truncated[cut] = False, True
            failures = self.batch.stats().last_failure
            for i in np.flatnonzero(cut).tolist():
                beside[i] = Beside({"env_failure": _words(failures[i])}, None)
        if self._mode is AutoresetMode.SAME_STEP and last.any():
            observations = self._reset_last(np.flatnonzero(last).tolist(), observations, beside)
        return Outcome(observations, time_step.reward, terminated, truncated, beside)

    def _reset_last(self, env_ids: Sequence[int], observations: Any, beside: list[Beside]) -> Any:
        """With SAME_STEP: resets those that could not do it themselves, in the same step.

        Their environment has failed, in a step or in the reset after it. What they show is what
        their episode has ended with.
        """
        batched = batch_space(self.described.observation_space, self.num_envs)
        finals = list(iterate(batched, observations))
        after = self._outcome(self.batch.reset(env_ids), reset=env_ids)
        failures = self.batch.stats().last_failure
        for i in env_ids:
            info, ended = after.beside[i].info, beside[i]
            if ended.awaits_reset:
                info = {**info, "env_failure": _words(failures[i])}
            beside[i] = Beside(info, (finals[i], ended.info))
        return after.observations

    # -- between steps -----------------------------------------------------------------------------

    def ask(self, method: str, *args: Any, env_ids: Iterable[int] | None = None) -> list[Any]:
        """A method of each `GymnasiumMember`."""
        return self.batch.operate("ask", method, *args, env_ids=env_ids)


def check_callable(method: str, name: str) -> None:
    """Raises `ValueError` for a method that would change an episode behind the batch's back."""
    if name in _OWN:
        raise ValueError(f"{method}({name!r}) would bypass the vector environment: use {name}()")


def _members(
    env_fns: Callable[[], Any] | str | Iterable[Callable[[], Any] | str], mode: AutoresetMode
) -> Member | list[Member]:
    """Constructors of members."""
    if isinstance(env_fns, Iterable) and not isinstance(env_fns, str) and not callable(env_fns):
        return [
            Member(as_constructor(one, f"env_constructors[{i}]"), mode)
            for i, one in enumerate(env_fns)
        ]
    return Member(as_constructor(env_fns, "env_constructors"), mode)


def _check_all(everyone: Sequence[Described]) -> None:
    """Raises unless members have the same spaces, and each an environment of its own."""
    first = everyone[0]
    for i, one in enumerate(everyone):
        for name in ("observation_space", "action_space"):
            mine, theirs = getattr(one, name), getattr(first, name)
            if mine != theirs:
                raise SpecMismatch(f"env {i}'s {name} is {mine}, env 0's is {theirs}")
    identities = [one.identity for one in everyone]
    for i, identity in enumerate(identities):
        same = identities.index(identity)
        if same != i:
            raise ValueError(
                f"env {same} and env {i} are one and the same object: a constructor has to make a "
                "new environment whenever it is called"
            )


def _batched(part: spaces.Space[Any]) -> Callable[[Any], Any] | None:
    """What makes of a column what Gymnasium has for a batch of such a part."""
    if isinstance(part, spaces.Dict | spaces.Tuple):
        return None
    return lambda column: tuple(column.tolist()) if column.dtype.hasobject else column


def _packer(space: spaces.Space[Any], num_envs: int, where: str) -> Callable[[Any], Any]:
    """What makes of batched actions what the batch takes: no spec, one object for each member."""
    if has_spec(space):
        return lambda actions: actions
    match space:
        case spaces.Dict():
            packers = {
                key: _packer(child, num_envs, f"{where}[{key!r}]") for key, child in space.items()
            }

            def pack_dict(actions: Any) -> Any:
                if not isinstance(actions, Mapping) or actions.keys() != space.keys():
                    raise InvalidAction(f"{where} is {actions!r}, which is not like {space}")
                return {key: pack(actions[key]) for key, pack in packers.items()}

            return pack_dict
        case spaces.Tuple():
            parts = [_packer(child, num_envs, f"{where}[{n}]") for n, child in enumerate(space)]

            def pack_tuple(actions: Any) -> Any:
                if not isinstance(actions, Sequence) or len(actions) != len(parts):
                    raise InvalidAction(f"{where} is {actions!r}, which is not like {space}")
                return tuple(pack(part) for pack, part in zip(parts, actions, strict=True))

            return pack_tuple
    batched = batch_space(space, num_envs)

    def pack(actions: Any) -> Array:
        each = list(iterate(batched, actions))
        if len(each) != num_envs:
            raise InvalidAction(f"{where} has leading axis {len(each)}, expected {num_envs}")
        column = np.empty(num_envs, object)
        for i, action in enumerate(each):
            column[i] = action
        return column

    return pack


def _words(failure: EnvFailure | None) -> str:
    return "" if failure is None else failure.line()
