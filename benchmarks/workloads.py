"""The environments that every contender steps, and in what numbers.

They are Gymnasium's, which all contenders take. In a module of its own, so that what crosses to
other processes is a reference to it.
"""

import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import gymnasium
import numpy as np
from gymnasium import spaces

Constructor = Callable[[], gymnasium.Env]


class Endless(gymnasium.Env):
    """An episode that does not end, and a small observation."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.observation = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed, options=options)
        return self.observe(), {}

    def step(self, _action):
        self.work()
        return self.observe(), 0.0, False, False, {}

    def work(self) -> None:
        pass

    def observe(self) -> np.ndarray:
        return self.observation


class Noop(Endless):
    """Does nothing, so that all there is to measure is the way there and back."""


class Busy(Endless):
    """Computes."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def work(self) -> None:
        compute(self.seconds)


def compute(seconds: float) -> None:
    """For a time of CPU and not of the clock: waiting for a core is no work done."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Sleeping(Endless):
    """Waits, as for a simulator elsewhere, and leaves its core to others."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def work(self) -> None:
        time.sleep(self.seconds)


class Paced(Endless):
    """As slow as it was told last, so that the same actors do for one workload after another.

    Observes so many floats. A no-op until it is told anything.
    """

    def __init__(self, index: int, floats: int = 4) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (floats,), np.float32)
        self.observation = np.zeros(floats, np.float32)
        self.index = index
        self.wait, self.seconds = time.sleep, itertools.repeat(0.0)

    def pace(self, is_busy: bool, mean: float, sigma: float) -> None:
        """Computes or sleeps at a step: lognormal seconds, of its own; constant without sigma."""
        rng = np.random.default_rng(self.index)
        seconds = mean * rng.lognormal(-(sigma**2) / 2, sigma, 1000)
        self.wait, self.seconds = compute if is_busy else time.sleep, itertools.cycle(seconds)

    def work(self) -> None:
        if seconds := next(self.seconds):
            self.wait(seconds)


class Images(Endless):
    """Shows a frame of its own at every step, as a renderer does."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        # Noise, so that nothing on the way can make it smaller.
        self.frames = np.random.default_rng(0).integers(0, 256, (4, *shape), np.uint8)
        self.shown = 0

    def observe(self) -> np.ndarray:
        self.shown = (self.shown + 1) % len(self.frames)
        return self.frames[self.shown].copy()


def heavy_tailed(index: int) -> Constructor:
    """One in sixteen takes ten times as long.

    They sleep: if they computed, cores would be short, and no way of waiting makes those more.
    They sleep so long that the calls of 32 actors in between are not what is measured either.
    """
    return functools.partial(Sleeping, 0.2 if index % 16 == 0 else 0.02)


def all_alike(constructor: Constructor) -> Callable[[int], Constructor]:
    return lambda _index: constructor


EVERYWHERE = (
    "envfleet",
    "envfleet-shared",
    "envfleet-auto",
    "envfleet-local",
    "gymnasium-async",
    "gymnasium-sync",
    "sb3-subproc",
    "tianshou-subproc",
    "tianshou-ray",
    "tf-agents",
    "loop",
)
# 32 Ray actors take half a minute to start, and tianshou's wait for all as those of others do.
WAITING = (
    *(name for name in EVERYWHERE if name not in ("envfleet-shared", "tianshou-ray")),
    *("envfleet-first-ready", "tianshou-first-ready"),
)
CHEAP = (*EVERYWHERE, "envfleet-4")
IN_TWO = "envfleet-2", "envfleet-shared-2"


@dataclass(frozen=True)
class Workload:
    """So many environments of a kind.

    Workloads of one title take turns in the same rounds, so that their ratios can be formed.
    """

    title: str
    constructor_of: Callable[[int], Constructor]
    num_envs: int
    contenders: tuple[str, ...] = EVERYWHERE
    """Who steps them, by their names in contenders.py."""
    longer: float = 1.0
    """How much longer than the others it is measured."""
    is_start: bool = False
    """Whether what is measured is seconds until a first batch, in place of steps per second."""

    @property
    def constructors(self) -> list[Constructor]:
        return [self.constructor_of(i) for i in range(self.num_envs)]


_cartpole = all_alike(functools.partial(gymnasium.make, "CartPole-v1"))
# What a step costs depends on where the cheetah is; short episodes show everybody much the same.
_cheetah = all_alike(functools.partial(gymnasium.make, "HalfCheetah-v5", max_episode_steps=50))
_busy = all_alike(functools.partial(Busy, 0.001))
_sleeping = all_alike(functools.partial(Sleeping, 0.01))
_small_images = all_alike(functools.partial(Images, (84, 84, 4)))
_large_images = all_alike(functools.partial(Images, (210, 160, 3)))

WORKLOADS = {
    "noop-8": Workload("no-op", all_alike(Noop), 8, (*CHEAP, "bare-ray", "lean-ray")),
    "cartpole-8": Workload("CartPole", _cartpole, 8, CHEAP),
    "cartpole-64": Workload("CartPole", _cartpole, 64, (*CHEAP, *IN_TWO)),
    "mujoco-16": Workload("MuJoCo HalfCheetah", _cheetah, 16),
    "busy-16": Workload("busy 1 ms", _busy, 16),
    "sleep-32": Workload("sleeping 10 ms", _sleeping, 32, WAITING),
    "images-84-8": Workload("images 84x84x4", _small_images, 8),
    "images-210-8": Workload("images 210x160x3", _large_images, 8),
    "heavy-tailed-32": Workload("heavy-tailed", heavy_tailed, 32, WAITING, longer=3.0),
    "start-8": Workload(
        "start of CartPole", _cartpole, 8, ("envfleet", "bare-ray", "bare-ray-envs"), is_start=True
    ),
}
