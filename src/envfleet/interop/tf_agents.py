"""The batch as a `PyEnvironment` of TF-Agents. Importing this imports TF-Agents and TensorFlow.

In a script, the import is all that changes, and nothing has to be called to handle ``main``::

    from envfleet.interop import tf_agents as parallel_py_environment

    env = parallel_py_environment.ParallelPyEnvironment([lambda: suite_gym.load("CartPole-v1")] * 8)
    tf_env = tf_py_environment.TFPyEnvironment(env)

What an environment returns need not be a `PyEnvironment`: of a `gymnasium.Env` or a
`dm_env.Environment` the time steps and specs come out as TF-Agents', and its actor then has no need
of TensorFlow. Specs become `ArraySpec` and `BoundedArraySpec`; rewards and discounts float32.

gin: ``ParallelPyEnvironment.blocking = True`` is about the class here. TF-Agents registers its own
whenever it is imported, so that one has to be written with its module, ``tf_agents.environments.
parallel_py_environment.ParallelPyEnvironment.blocking``. What is bound to
``envfleet.ParallelPyEnvironment`` holds here, too, unless it is bound by the bare name as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tf_agents.environments.py_environment import PyEnvironment
from tf_agents.specs import array_spec
from tf_agents.trajectories import time_step as ts

from envfleet import gin_state, parallel, single
from envfleet.errors import InvalidAction
from envfleet.single import EnvHandle, Promise, Specs

__all__ = ["ParallelPyEnvironment", "ProcessPyEnvironment"]


class _TfAgentsSpecs(Specs):
    """Specs as TF-Agents has them, whatever the environments speak."""

    def time_step_spec(self) -> Any:
        spec = super().time_step_spec()
        if isinstance(spec, ts.TimeStep):
            return spec
        return ts.TimeStep(
            step_type=array_spec.ArraySpec((), np.int32, "step_type"),
            reward=tf.nest.map_structure(_float_spec, spec.reward),
            discount=tf.nest.map_structure(_float_spec, spec.discount),
            observation=tf.nest.map_structure(_array_spec, spec.observation),
        )

    def action_spec(self) -> Any:
        return tf.nest.map_structure(_array_spec, super().action_spec())


class _Handle(_TfAgentsSpecs, EnvHandle):
    """One environment of a batch, which steps it: attributes, methods and specs."""


@functools.partial(gin_state.configurable, module=None)
class ParallelPyEnvironment(_TfAgentsSpecs, parallel.ParallelPyEnvironment):
    """Environments in Ray actors as one batched `PyEnvironment`.

    Takes the place of TF-Agents' class of that name, with its arguments in their order
    (`env_constructors`, `start_serially`, `blocking`, `flatten`), and has all that
    `envfleet.ParallelPyEnvironment` has: see there for the others.

    The default of `start_serially` is False here, and True in TF-Agents. An actor takes seconds to
    start where it imports TensorFlow, and all of them together have `start_timeout`: one after
    another, some dozens would not make it. Constructors that must not run at the same time, since
    they download a file or take a port, need ``start_serially=True``.
    """

    @property
    def envs(self) -> tuple[EnvHandle, ...]:
        """A handle on each environment: its attributes, methods and specs."""
        return tuple(_Handle(self._fleet, i) for i in range(self.batch_size))

    @property
    def _envs(self) -> tuple[EnvHandle, ...]:
        return self.envs

    def should_reset(self, current_time_step: Any) -> bool:
        """False: each environment is reset by itself, when its own episode has ended."""
        del current_time_step
        return False

    # With the names that TF-Agents' arguments have.

    def step(self, action: Any) -> Any:
        """Steps every environment, as `envfleet.ParallelPyEnvironment.step`."""
        return super().step(action)

    def seed(self, seeds: int | Sequence[int] | None = None) -> list[int]:
        """Seeds every environment, as `envfleet.ParallelPyEnvironment.seed`."""
        return super().seed(seeds)

    def _time_step(self, columns: Sequence[np.ndarray[Any, Any]]) -> Any:
        return _time_step(super()._time_step(columns))

    def _unstack_actions(self, batched_actions: Any) -> list[Any]:
        """A batch of actions, of any structure, as a list with one for each environment."""
        leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(batched_actions)]
        for leaf in leaves:
            if leaf.shape[:1] != (self.batch_size,):
                raise InvalidAction(
                    f"actions have a leaf of shape {leaf.shape}, expected batch_size "
                    f"{self.batch_size} in front"
                )
        return [
            tf.nest.pack_sequence_as(batched_actions, [leaf[i] for leaf in leaves])
            for i in range(self.batch_size)
        ]


class ProcessPyEnvironment(_TfAgentsSpecs, single.ActorPyEnvironment):
    """One environment in a Ray actor, as a `PyEnvironment` without a batch axis.

    Takes the place of TF-Agents' class of that name, and has all that `ActorPyEnvironment` has.
    With `flatten`, too, actions and time steps have their structure here.
    """

    @property
    def batched(self) -> bool:
        """False: time steps and actions have no batch axis."""
        return False

    @property
    def batch_size(self) -> None:
        """None, as TF-Agents has it where there is no batch."""
        return None

    def should_reset(self, current_time_step: Any) -> bool:
        """False: the environment is reset in its actor, when its episode has ended."""
        del current_time_step
        return False

    def seed(self, seed: int | Sequence[int] | None = None) -> int:
        """Seeds the environment, from its next reset on, with exactly the given int."""
        return super().seed([seed] if isinstance(seed, int | np.integer) else seed)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Promise[Any]:
        """Calls a method of the environment; gives a promise of its result."""
        if name in ("reset", "step"):
            advance: Callable[..., Promise[Any]] = getattr(self, name)
            return advance(*args, **kwargs, blocking=False)
        if name == "seed":
            return Promise(lambda: self.seed(*args, **kwargs))
        return super().call(name, *args, **kwargs)

    def _time_step(self, columns: list[Any]) -> Any:
        return _time_step(super()._time_step(columns))


def _time_step(time_step: Any) -> Any:
    """A time step in TF-Agents' type."""
    if isinstance(time_step, ts.TimeStep):
        return time_step
    return ts.TimeStep(
        step_type=time_step.step_type,
        reward=tf.nest.map_structure(np.float32, time_step.reward),
        discount=tf.nest.map_structure(np.float32, time_step.discount),
        observation=time_step.observation,
    )


def _array_spec(spec: Any) -> Any:
    """TF-Agents' spec for one of dm_env's; its own as they are."""
    if isinstance(spec, array_spec.ArraySpec):
        return spec
    if np.dtype(spec.dtype).hasobject:
        raise TypeError(f"{spec} is of strings, for which TF-Agents has no spec")
    if not hasattr(spec, "minimum"):
        return array_spec.ArraySpec(spec.shape, spec.dtype, spec.name)
    return array_spec.BoundedArraySpec(
        spec.shape, spec.dtype, spec.minimum, spec.maximum, spec.name
    )


def _float_spec(spec: Any) -> Any:
    return _array_spec(spec.replace(dtype=np.float32))


# A virtual subclass: what asks by `isinstance` (TFPyEnvironment, Actor, get_tf_env) takes them.
PyEnvironment.register(ParallelPyEnvironment)
PyEnvironment.register(ProcessPyEnvironment)
