"""TF-Agents environments: their own time steps and specs, kept. Imports nothing of TF-Agents."""

from __future__ import annotations

from typing import Any

from envfleet.environments.dm_env import DmEnvironment


class TfAgentsEnvironment(DmEnvironment):
    """A TF-Agents `PyEnvironment`; it speaks dm_env but for its types and its seeding."""

    def __init__(self, env: Any) -> None:
        if env.batched:
            raise TypeError(
                f"{type(env).__qualname__} is batched (batch_size {env.batch_size}), expected an "
                "environment that gives one time step at a time"
            )
        super().__init__(env)

    def time_step_spec(self) -> Any:
        return self.env.time_step_spec()

    def seed(self, seed: int) -> None:
        self.env.seed(seed)

    def render(self) -> Any:
        return self.env.render(mode="rgb_array")
