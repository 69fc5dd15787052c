"""Environments and policies that the tests of `envfleet.collect` collect with."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import dm_env
import gin
import numpy as np
from dm_env import specs


@gin.register
class SeededEnv(dm_env.Environment):
    """Everything that it shows follows from the seed that it was given for the episode.

    An episode has 2 to 9 steps; it ends by termination where its seed is even. The reward of a step
    is its action.
    """

    def __init__(self, seconds=0.0):
        self.next_seed = -1
        self.seconds = seconds

    def seed(self, seed):
        self.next_seed = seed

    def reset(self):
        self.episode_seed, self.next_seed, self.t = self.next_seed, -1, 0
        return dm_env.restart(self.shown())

    def step(self, action):
        if self.seconds:
            time.sleep(self.seconds)
        self.t += 1
        if self.t < 2 + self.episode_seed % 8:
            return dm_env.transition(float(action), self.shown())
        end = dm_env.truncation if self.episode_seed % 2 else dm_env.termination
        return end(float(action), self.shown())

    def shown(self):
        return {"seed": np.int64(self.episode_seed), "t": np.int64(self.t)}

    def observation_spec(self):
        return {name: specs.Array((), np.int64, name) for name in ("seed", "t")}

    def action_spec(self):
        return specs.DiscreteArray(100)


class FailsOnce(SeededEnv):
    """A `SeededEnv` that runs a fault in the step after so many, once for a path."""

    def __init__(self, fault, path, after=3):
        super().__init__()
        self.fault, self.path, self.after = fault, path, after

    def step(self, action):
        self.come_to_it()
        return super().step(action)

    def come_to_it(self):
        self.after -= 1
        if self.after < 0:
            try:
                with open(self.path, "x"):
                    pass
            except FileExistsError:
                pass
            else:
                self.fault()


class FailsInReset(FailsOnce):
    """The same in a reset."""

    def reset(self):
        self.come_to_it()
        return super().reset()

    def step(self, action):
        return SeededEnv.step(self, action)


def constant(time_step):
    """A policy that is a function."""
    return np.full(len(time_step.step_type), 7)


class Weighted:
    """A policy whose every action is its weights."""

    def __init__(self):
        self.weights = np.zeros(1, np.int64)

    def action(self, time_step):
        return np.full(len(time_step.step_type), self.weights[0])

    def set_weights(self, weights):
        self.weights = weights


class Counting:
    """A recurrent policy: its action is how often it has acted in the episode."""

    def initial_state(self, batch_size):
        return {"count": np.zeros(batch_size, np.int64)}

    def action(self, time_step, state):
        return state["count"].copy(), {"count": state["count"] + 1}


class Told:
    """What its constructor was told is what it does."""

    def __init__(self, action_spec, batch_size, seed):
        assert action_spec.num_values == 100
        self.batch_size = batch_size
        self.seed = seed

    def action(self, time_step):
        assert len(time_step.step_type) == self.batch_size
        return np.full(self.batch_size, self.seed % 100)


class Endless(SeededEnv):
    """Its episodes do not end."""

    def step(self, action):
        self.t += 1
        return dm_env.transition(0.0, self.shown())

    def action_spec(self):
        return specs.DiscreteArray(2)


class WaitsForShards(SeededEnv):
    """Its first step takes until there is a file of some name, and fails where none comes."""

    def __init__(self, directory, pattern):
        super().__init__()
        self.directory, self.pattern = Path(directory), pattern

    def step(self, action):
        end = time.monotonic() + 60
        while not any(self.directory.glob(self.pattern)):
            if time.monotonic() > end:
                raise TimeoutError(f"nobody has written {self.pattern}")
            time.sleep(0.01)
        return super().step(action)


class Slow(SeededEnv):
    """A step takes 10 ms."""

    def __init__(self):
        super().__init__(0.01)


@gin.register
class Noted(SeededEnv):
    """What it shows is how long its note is."""

    def __init__(self, note="-"):
        super().__init__()
        self.note = note

    def shown(self):
        return {"seed": np.int64(0), "t": np.int64(len(self.note))}


class Structured(dm_env.Environment):
    """Nested observations and actions, with a text and an array of size zero; 3 steps."""

    def reset(self):
        self.t = 0
        return dm_env.restart(self.shown("begin"))

    def step(self, action):
        self.t += 1
        if self.t == 3:
            return dm_env.termination(1.0, self.shown("end"))
        return dm_env.transition(1.0, self.shown("go"))

    def shown(self, word):
        image = np.full((2, 3), self.t, np.uint8)
        return {"words": word, "arm": {"image": image}, "nothing": np.zeros(0, np.float32)}

    def observation_spec(self):
        return {
            "words": specs.StringArray((), name="words"),
            "arm": {"image": specs.BoundedArray((2, 3), np.uint8, 0, 255)},
            "nothing": specs.Array((0,), np.float32),
        }

    def action_spec(self):
        return specs.DiscreteArray(3), specs.BoundedArray((2,), np.float32, -1, 1)


def failing_once(fault, path, after=3):
    """A constructor of `FailsOnce`."""
    return functools.partial(FailsOnce, fault, str(path), after)


class Talking(dm_env.Environment):
    """Its actions are texts; 2 steps."""

    def reset(self):
        self.t = 0
        return dm_env.restart(np.float32(0))

    def step(self, action):
        assert action == "left"
        self.t += 1
        end = dm_env.termination if self.t == 2 else dm_env.transition
        return end(1.0, np.float32(self.t))

    def observation_spec(self):
        return specs.Array((), np.float32)

    def action_spec(self):
        return specs.StringArray((), name="word")


def speak(time_step):
    """A policy with one word."""
    return np.full(len(time_step.step_type), "left", object)


@gin.register
class Complex(SeededEnv):
    """Shows what no dataset holds."""

    def shown(self):
        return np.complex64(1)

    def observation_spec(self):
        return specs.Array((), np.complex64)
