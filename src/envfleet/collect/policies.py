"""Policies: what chooses actions, beside the environments.

A policy is given by a constructor, which is called where the policy acts. The constructor takes
those of ``action_spec``, ``time_step_spec``, ``batch_size`` and ``seed`` that it names. What it
returns is a callable or an object with a method ``action``, of a batch of time steps:

======================================  ============================================================
``action(time_step)``                   actions, leaves of shape ``(batch_size, *shape)``
``action(time_step, state)``            actions and the next state, if it has ``initial_state(
                                        batch_size)`` or TF-Agents' ``get_initial_state``
``action(time_step, ..., seeds=)``      told a uint64 for each row, of shape ``(batch_size,)``
``set_weights(weights)``                takes what `Collector.set_policy` was given
======================================  ============================================================

A named tuple with fields ``action`` and ``state``, as of TF-Agents, may be returned instead. The
rows of a state are set to its initial ones where an episode begins. `seeds` depend on the run's
seed, on the episode and on the step: what a policy draws from them does not depend on which
environments share its batch, which a generator of its own does. (What a network computes may: the
last bits of a matrix product depend on how many rows it has; ``examples/policies.py`` pads them.)
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from envfleet import gin_state, seeding, specs
from envfleet.layout import Layout, map_leaves
from envfleet.time_steps import FIRST

_KNOWN = ("action_spec", "time_step_spec", "batch_size", "seed")


@functools.partial(gin_state.configurable, module=__name__)
class RandomPolicy:
    """Uniform within the bounds of the action spec; from -1 to 1 where it has none.

    Args:
      action_spec: a structure of specs of numbers.

    Raises:
      TypeError: an action has a leaf of another kind; says where.
    """

    def __init__(self, action_spec: Any) -> None:
        self._layout = Layout(action_spec, "actions")
        for leaf in self._layout.leaves:
            if leaf.dtype.kind not in "iufb":
                raise TypeError(
                    f"{leaf.path} is of {leaf.dtype}, which a random policy cannot draw: "
                    "give a policy of your own"
                )
        self._ranges = [specs.sampled_range(spec) for spec in self._layout.specs.values()]
        self._sizes = [math.prod(leaf.shape) for leaf in self._layout.leaves]

    def action(self, time_step: Any, seeds: np.ndarray[Any, Any]) -> Any:
        """Actions drawn from `seeds` alone."""
        del time_step
        bits = seeding.draws(seeds, sum(self._sizes))
        columns, start = [], 0
        for leaf, (low, high), size in zip(
            self._layout.leaves, self._ranges, self._sizes, strict=True
        ):
            drawn = bits[:, start : start + size].reshape(len(seeds), *leaf.shape)
            start += size
            if leaf.dtype.kind == "f":
                columns.append((low + (high - low) * (drawn >> _11) * 2.0**-53).astype(leaf.dtype))
            else:
                span = (high - low).astype(np.uint64) + np.uint64(1)
                columns.append((low + (drawn % span).astype(np.int64)).astype(leaf.dtype))
        return self._layout.unflatten(columns)


_11 = np.uint64(11)


class BatchedPolicy:
    """A policy over the environments of one batch, with its state and its version.

    Args:
      policy: a constructor of a policy, or a policy that pickles; None for `RandomPolicy`.
      time_step_spec, action_spec: of the environments, without the batch axis.
      batch_size: how many there are.
      seed: of this batch, for the constructor.

    Attributes:
      version: of the weights: 0, and then as `set_weights` was told.
      takes_seeds: whether it wants a seed for each action.

    Raises:
      TypeError: what the constructor returned is no policy; says what it is.
    """

    def __init__(
        self, policy: Any, *, time_step_spec: Any, action_spec: Any, batch_size: int, seed: int
    ) -> None:
        self._batch_size = batch_size
        self.version = 0
        self.made = _made(
            RandomPolicy if policy is None else policy,
            action_spec=action_spec,
            time_step_spec=time_step_spec,
            batch_size=batch_size,
            seed=seed,
        )
        action = getattr(self.made, "action", self.made)
        if not callable(action):
            raise TypeError(
                f"the policy is a {type(self.made).__qualname__}, expected a callable of a time "
                "step or an object with a method action(time_step)"
            )
        self._action: Callable[..., Any] = action
        self.takes_seeds = "seeds" in _parameters(action)
        initial = getattr(self.made, "initial_state", None)
        initial = initial or getattr(self.made, "get_initial_state", None)
        self._initial = None if initial is None else initial(batch_size)
        self._state = self._initial
        self._is_recurrent = self._initial is not None and not _is_empty(self._initial)

    def actions(
        self,
        time_step: Any,
        seeds: np.ndarray[Any, Any] | None,
        acting: np.ndarray[Any, Any] | None = None,
    ) -> Any:
        """Actions for every environment; leaves have shape ``(batch_size, *shape)``.

        Where only some act, the state of the others stays as it is: bool of shape
        ``(batch_size,)``, None for all.
        """
        told = {"seeds": seeds} if self.takes_seeds else {}
        if not self._is_recurrent:
            given = self._action(time_step, **told)
            return given.action if _is_step(given) else given
        is_first = np.asarray(time_step.step_type) == FIRST
        if acting is not None:
            is_first &= acting
        if is_first.any():
            self._state = map_leaves(
                functools.partial(_where, is_first), self._initial, self._state
            )
        given = self._action(time_step, self._state, **told)
        action, state = (given.action, given.state) if _is_step(given) else given
        if acting is not None:
            state = map_leaves(functools.partial(_where, acting), state, self._state)
        self._state = state
        return action

    def set_weights(self, weights: Any, version: int) -> None:
        """Gives the policy its weights.

        Raises:
          TypeError: it has no ``set_weights``, and is no module of PyTorch's.
        """
        takes = getattr(self.made, "set_weights", None) or getattr(
            self.made, "load_state_dict", None
        )
        if takes is None:
            raise TypeError(
                f"{type(self.made).__qualname__} has no method set_weights(weights): give the "
                "policy one that puts them in force"
            )
        takes(weights)
        self.version = version


def _made(policy: Any, **known: Any) -> Any:
    """The policy that a constructor makes, or what was given where it is one already."""
    if not isinstance(policy, type) and hasattr(policy, "action"):
        return policy
    parameters = _parameters(policy)
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and name not in _KNOWN
    ]
    if missing and not isinstance(policy, type):
        return policy  # a function of a time step
    return policy(**{name: known[name] for name in _KNOWN if name in parameters})


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # written in C
        return {}


def _is_step(given: Any) -> bool:
    return hasattr(given, "action") and hasattr(given, "state")


def _is_empty(state: Any) -> bool:
    return isinstance(state, tuple | list | dict) and not state


def _where(chosen: np.ndarray[Any, Any], ours: Any, others: Any) -> Any:
    """Rows of one leaf of a state where chosen, of the other elsewhere."""
    mixed = others.clone() if hasattr(others, "clone") else np.array(others)  # of PyTorch's
    mixed[chosen] = ours[chosen]
    return mixed
