"""Policies to collect with. A gin file imports them: ``import policies``.

Each is a class that an actor calls with the specs that it names, and that then acts for all of the
actor's environments at once (see `envfleet.collect.policies`). What gin binds are the rest of its
arguments::

    import policies
    Collector.policy = @LinearPolicy
    LinearPolicy.temperature = 0.1

`LinearPolicy` and `MlpPolicy` draw from the `seeds` that they are told. So their data are the same
however many environments share an actor, which those of `RecurrentPolicy` are not.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import gin
import numpy as np

from envfleet import seeding

# -- numpy -----------------------------------------------------------------------------------------


@gin.configurable
class LinearPolicy:
    """Chooses among numbered actions by a linear score of the observation. numpy only.

    Args:
      action_spec, time_step_spec: the environment's: a discrete action, a flat observation.
      weights: of shape ``(size of the observation, number of actions)``. Default: zeros, by which
        all actions are equally likely.
      temperature: actions are drawn from the softmax of scores over this; 0 for the best one.
    """

    def __init__(
        self,
        action_spec: Any,
        time_step_spec: Any,
        weights: Sequence[Sequence[float]] | None = None,
        temperature: float = 1.0,
    ) -> None:
        self._first = int(action_spec.minimum)
        self._num_actions = int(action_spec.maximum) - self._first + 1
        self._dtype = action_spec.dtype
        self._shape = (*time_step_spec.observation.shape, self._num_actions)
        self._temperature = temperature
        self.set_weights(np.zeros(self._shape) if weights is None else weights)

    def set_weights(self, weights: Any) -> None:
        """Takes an array of the shape that the constructor takes."""
        weights = np.asarray(weights, np.float64)
        if weights.shape != self._shape:
            raise ValueError(f"weights have shape {weights.shape}, expected {self._shape}")
        self._weights = weights

    def action(self, time_step: Any, seeds: np.ndarray) -> np.ndarray:
        """Actions of shape ``(batch_size,)``."""
        # Not `@`: the last bits of a matrix product depend on how many rows it has.
        scores = (time_step.observation[:, :, np.newaxis] * self._weights).sum(axis=1)
        if self._temperature:  # the best one with Gumbel noise is a draw from the softmax
            gumbel = -np.log(-np.log(uniform(seeds, self._num_actions)))
            scores = scores + self._temperature * gumbel
        return (self._first + scores.argmax(axis=1)).astype(self._dtype)


def uniform(seeds: np.ndarray, number: int) -> np.ndarray:
    """So many numbers above 0 and below 1 from each seed: shape ``(len(seeds), number)``."""
    return ((seeding.draws(seeds, number) >> np.uint64(12)) + 0.5) * 2.0**-52


def normal(seeds: np.ndarray, number: int) -> np.ndarray:
    """So many normally distributed numbers from each seed (Box and Muller)."""
    radius, angle = np.split(uniform(seeds, 2 * number), 2, axis=1)
    return np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)


# -- PyTorch ---------------------------------------------------------------------------------------


@gin.configurable
class MlpPolicy:
    """A small network of PyTorch's for continuous control, with Gaussian noise on its actions.

    `Collector.set_policy` takes the ``state_dict`` of `make_net`, with tensors or arrays.

    Args:
      action_spec, time_step_spec: the environment's: a flat action with bounds, a flat observation.
      hidden: sizes of the hidden layers.
      noise: standard deviation of the noise, where actions are from -1 to 1.
      init_seed: of the first weights: the same in every actor, which have each its own `seed`.
    """

    def __init__(
        self,
        action_spec: Any,
        time_step_spec: Any,
        hidden: Sequence[int] = (64, 64),
        noise: float = 0.3,
        init_seed: int = 0,
    ) -> None:
        import torch

        torch.set_num_threads(1)  # the actors share the cores already
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(init_seed)
            self.net = make_net(action_spec, time_step_spec, hidden)
        self._spec = action_spec
        self._noise = noise

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Takes the state of the network."""
        import torch

        self.net.load_state_dict({name: torch.as_tensor(one) for name, one in weights.items()})

    def action(self, time_step: Any, seeds: np.ndarray) -> np.ndarray:
        """Actions of shape ``(batch_size, size of the action)``."""
        import torch

        observation = np.asarray(time_step.observation, np.float32)
        num_rows = len(observation)
        # The last bits of a matrix product depend on how many rows it has: always a multiple of 8.
        padded = np.pad(observation, ((0, -num_rows % 8), (0, 0)))
        with torch.inference_mode():
            mean = self.net(torch.from_numpy(padded))[:num_rows].numpy()
        drawn = mean + self._noise * normal(seeds, mean.shape[1])
        low, high = self._spec.minimum, self._spec.maximum
        return (low + (high - low) * (np.clip(drawn, -1, 1) + 1) / 2).astype(self._spec.dtype)


def make_net(action_spec: Any, time_step_spec: Any, hidden: Sequence[int] = (64, 64)) -> Any:
    """The network of `MlpPolicy`, for its trainer too: observations to actions from -1 to 1."""
    from torch import nn

    sizes = [*time_step_spec.observation.shape, *hidden, *action_spec.shape]
    layers: list[nn.Module] = []
    for size, next_size in itertools.pairwise(sizes):
        layers += [nn.Linear(size, next_size), nn.Tanh()]
    return nn.Sequential(*layers)


# -- TF-Agents -------------------------------------------------------------------------------------


@gin.configurable
class RecurrentPolicy:
    """An actor policy of TF-Agents', with an LSTM whose state is kept for each environment.

    `Collector.set_policy` takes a list of arrays, as `get_weights` gives them. It draws from
    TensorFlow's generator: which actions come out depends on who shares the actor.

    Args:
      action_spec, time_step_spec: the environment's.
      seed: of the actor, for what it draws.
      layers: sizes of the dense layers in front of the LSTM.
      lstm_size: of the LSTM.
      init_seed: of the first weights: the same in every actor.
    """

    def __init__(
        self,
        action_spec: Any,
        time_step_spec: Any,
        seed: int,
        layers: Sequence[int] = (32,),
        lstm_size: int = 16,
        init_seed: int = 0,
    ) -> None:
        import tensorflow as tf
        from tf_agents.networks import actor_distribution_rnn_network
        from tf_agents.policies import actor_policy, py_tf_eager_policy
        from tf_agents.specs import tensor_spec
        from tf_agents.trajectories import time_step as ts

        observation_spec = tf.nest.map_structure(_as_tf_agents, time_step_spec.observation)
        step_spec = tensor_spec.from_spec(ts.time_step_spec(observation_spec))
        spec = tensor_spec.from_spec(tf.nest.map_structure(_as_tf_agents, action_spec))
        tf.keras.utils.set_random_seed(init_seed)
        network = actor_distribution_rnn_network.ActorDistributionRnnNetwork(
            step_spec.observation,
            spec,
            input_fc_layer_params=tuple(layers),
            lstm_size=(lstm_size,),
            output_fc_layer_params=None,
        )
        network.create_variables()
        self._tf_policy = actor_policy.ActorPolicy(step_spec, spec, network)
        self._policy = py_tf_eager_policy.PyTFEagerPolicy(
            self._tf_policy, use_tf_function=True, batch_time_steps=False
        )
        self._time_step = ts.TimeStep
        tf.random.set_seed(seed)

    def get_initial_state(self, batch_size: int) -> Any:
        """The LSTM's state before an episode."""
        return self._policy.get_initial_state(batch_size)

    def get_weights(self) -> list[np.ndarray]:
        """As `set_weights` takes them."""
        return [variable.numpy() for variable in self._tf_policy.variables()]

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Takes a value for each of the policy's variables, in their order."""
        for variable, value in zip(self._tf_policy.variables(), weights, strict=True):
            variable.assign(value)

    def action(self, time_step: Any, state: Any) -> Any:
        """A `PolicyStep`: actions, and the state after them."""
        reward, discount = np.float32(time_step.reward), np.float32(time_step.discount)
        return self._policy.action(
            self._time_step(time_step.step_type, reward, discount, time_step.observation), state
        )


def _as_tf_agents(spec: Any) -> Any:
    """TF-Agents' spec for one of dm_env's."""
    from tf_agents.specs import array_spec

    if not hasattr(spec, "minimum"):
        return array_spec.ArraySpec(spec.shape, spec.dtype, spec.name)
    return array_spec.BoundedArraySpec(
        spec.shape, spec.dtype, spec.minimum, spec.maximum, spec.name
    )
