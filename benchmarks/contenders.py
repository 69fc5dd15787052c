"""What is measured: one class each, all of one form, in whatever package it comes from.

A contender resets environments whose episodes have ended, in its own way. A `step` says how many
steps of environments it was: a reset is none. Packages are imported by the contender that needs
them: no virtual environment has all.
"""

import functools
import logging
from typing import Any, ClassVar

import numpy as np
from bare import Bare, BareEnv
from workloads import Workload

ENVFLEET, PEER, REFERENCE = "envfleet", "peer", "reference"


class Contender:
    """So many environments under one roof.

    Args:
      workload: the environments.
    """

    title: ClassVar[str]
    kind: ClassVar[str]
    needs_tf: ClassVar[bool] = False
    """Whether it lives in the other virtual environment, TF-Agents'."""

    def __init__(self, workload: Workload) -> None:
        self.num_envs = workload.num_envs
        self.notes: list[str] = []
        """What it has to say about its settings."""

    def reset(self) -> Any:
        return self.env.reset()

    def step(self, actions: np.ndarray) -> int:
        """One action for each environment; returns how many steps of environments that made."""
        raise NotImplementedError

    def close(self) -> None:
        self.env.close()


def start_ray() -> Any:
    """Ray, as little of it as there can be; all contenders on Ray have the same."""
    import ray

    if not ray.is_initialized():
        ray.init(include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    return ray


# -- envfleet --------------------------------------------------------------------------------------


class EnvFleet(Contender):
    title = "envfleet, one per actor"
    kind = ENVFLEET
    backend = "ray"
    envs_per_actor: Any = 1
    num_actors: int | None = None
    """In place of `envs_per_actor`."""
    transport = "rpc"

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        import envfleet

        if self.backend == "ray":
            start_ray()
        self.env = envfleet.ParallelPyEnvironment(
            workload.constructors,
            backend=self.backend,
            transport=self.transport,
            envs_per_actor=(
                -(-workload.num_envs // self.num_actors) if self.num_actors else self.envs_per_actor
            ),
            start_timeout=None,
        )

    def step(self, actions: np.ndarray) -> int:
        return np.count_nonzero(self.env.step(actions).step_type)  # FIRST is 0


class EnvFleet4(EnvFleet):
    title = "envfleet, envs_per_actor=4"
    envs_per_actor = 4


class EnvFleetIn2(EnvFleet):
    title = "envfleet, 2 actors"
    num_actors = 2


class EnvFleetShared(EnvFleet):
    title = "envfleet, shared memory, one per actor"
    transport = "shared_memory"


class EnvFleetSharedIn2(EnvFleetShared):
    title = "envfleet, shared memory, 2 actors"
    num_actors = 2


class EnvFleetAuto(EnvFleet):
    title = 'envfleet, envs_per_actor="auto"'
    envs_per_actor = "auto"

    def __init__(self, workload: Workload) -> None:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        log = logging.getLogger("envfleet")
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        super().__init__(workload)
        log.removeHandler(handler)
        self.notes = [f"took envs_per_actor={self.env.envs_per_actor}"]
        self.notes += [words for words in said if "auto" in words]


class EnvFleetLocal(EnvFleet):
    title = 'envfleet, backend="local", envs_per_actor="auto"'
    backend = "local"
    envs_per_actor = "auto"


class EnvFleetFirstReady(EnvFleet):
    title = "envfleet, one per actor, recv(min_envs=half)"

    def reset(self) -> None:
        self.env.async_reset()

    def step(self, actions: np.ndarray) -> int:
        time_step, env_ids = self.env.recv(min_envs=self.num_envs // 2)
        self.env.send(actions[env_ids], env_ids)
        return np.count_nonzero(time_step.step_type)


# -- peers -----------------------------------------------------------------------------------------


class GymnasiumVector(Contender):
    kind = PEER

    def make(self, constructors: list) -> Any:
        raise NotImplementedError

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.env = self.make(workload.constructors)
        self.over = 0  # so many are reset by the next step

    def step(self, actions: np.ndarray) -> int:
        _, _, terminated, truncated, _ = self.env.step(actions)
        moved = self.num_envs - self.over
        self.over = np.count_nonzero(terminated | truncated)
        return moved


class GymnasiumAsync(GymnasiumVector):
    title = "Gymnasium AsyncVectorEnv"

    def make(self, constructors: list) -> Any:
        from gymnasium.vector import AsyncVectorEnv

        return AsyncVectorEnv(constructors, shared_memory=True)


class GymnasiumSync(GymnasiumVector):
    title = "Gymnasium SyncVectorEnv"

    def make(self, constructors: list) -> Any:
        from gymnasium.vector import SyncVectorEnv

        return SyncVectorEnv(constructors)


class StableBaselines3(Contender):
    title = "Stable-Baselines3 SubprocVecEnv"
    kind = PEER

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        from stable_baselines3.common.vec_env import SubprocVecEnv

        # Its default has every process import PyTorch anew: longer to start, as fast to step.
        self.env = SubprocVecEnv(workload.constructors, start_method="fork")

    def step(self, actions: np.ndarray) -> int:
        self.env.step(actions)
        return self.num_envs


class Tianshou(Contender):
    title = "tianshou SubprocVectorEnv"
    kind = PEER

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        from tianshou.env import SubprocVectorEnv

        self.env = SubprocVectorEnv(workload.constructors)

    def step(self, actions: np.ndarray) -> int:
        _, _, terminated, truncated, _ = self.env.step(actions)
        over = np.flatnonzero(terminated | truncated)
        if over.size:
            self.env.reset(over)
        return self.num_envs


class TianshouRay(Tianshou):
    title = "tianshou RayVectorEnv"

    def __init__(self, workload: Workload) -> None:
        Contender.__init__(self, workload)
        from tianshou.env import RayVectorEnv
        from tianshou.env.worker import ray as worker

        # By reference, every actor would import tianshou, and with it PyTorch: five seconds longer
        # to start, as fast to step.
        start_ray().cloudpickle.register_pickle_by_value(worker)
        self.env = RayVectorEnv(workload.constructors)


class TianshouFirstReady(Tianshou):
    """Of environments without end: it resets none."""

    title = "tianshou SubprocVectorEnv(wait_num=half)"

    def __init__(self, workload: Workload) -> None:
        Contender.__init__(self, workload)
        from tianshou.env import SubprocVectorEnv

        self.env = SubprocVectorEnv(workload.constructors, wait_num=workload.num_envs // 2)
        self.ready = np.arange(workload.num_envs)

    def step(self, actions: np.ndarray) -> int:
        *_, infos = self.env.step(actions[self.ready], self.ready)
        self.ready = np.array([info["env_id"] for info in infos])
        return len(self.ready)


class TfAgents(Contender):
    title = "TF-Agents ParallelPyEnvironment"
    kind = PEER
    needs_tf = True

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        from tf_agents.environments.parallel_py_environment import ParallelPyEnvironment
        from tf_agents.system.default import multiprocessing_core
        from tf_environment import TfEnvironment

        if not multiprocessing_core.initialized():
            multiprocessing_core.enable_interactive_mode()  # handle_main, without its main
        self.env = ParallelPyEnvironment(
            [functools.partial(TfEnvironment, make) for make in workload.constructors],
            start_serially=False,
        )

    def step(self, actions: np.ndarray) -> int:
        return np.count_nonzero(self.env.step(actions).step_type)


# -- what the others are held against --------------------------------------------------------------


class Loop(Contender):
    """One environment after another in one process, without a batch: their own rate."""

    title = "for loop, one process"
    kind = REFERENCE

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.envs = [make() for make in workload.constructors]

    def reset(self) -> None:
        for env in self.envs:
            env.reset()

    def step(self, actions: np.ndarray) -> int:
        for env, action in zip(self.envs, actions, strict=True):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        return self.num_envs

    def close(self) -> None:
        for env in self.envs:
            env.close()


class BareRay(Contender):
    """``ray.get([a.step.remote(x) for a in actors])``, with Ray's default options.

    No batch, no deadline, no capture of exceptions. The actors return what they are sent.
    """

    title = "bare Ray loop"
    kind = REFERENCE
    actor: type = Bare

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.ray = start_ray()
        self.actors = [self.start(make) for make in workload.constructors]

    def start(self, _constructor: Any) -> Any:
        return self.ray.remote(Bare).remote()

    def reset(self) -> Any:
        return self.ray.get([actor.reset.remote(None) for actor in self.actors])

    def step(self, actions: np.ndarray) -> int:
        self.ray.get([actor.step.remote(x) for actor, x in zip(self.actors, actions, strict=True)])
        return self.num_envs

    def close(self) -> None:
        for actor in self.actors:
            self.ray.kill(actor)


class LeanRay(BareRay):
    """Pays neither for Ray's task events nor for pickling arrays, which envfleet avoids, too."""

    title = "lean Ray loop: bytes, no task events"

    def start(self, _constructor: Any) -> Any:
        return self.ray.remote(Bare).options(enable_task_events=False).remote()

    def step(self, actions: np.ndarray) -> int:
        x = actions[0].tobytes()
        self.ray.get([actor.step.remote(x) for actor in self.actors])
        return self.num_envs


class BareRayEnvs(BareRay):
    title = "bare Ray loop, environments in the actors"

    def start(self, constructor: Any) -> Any:
        return self.ray.remote(BareEnv).remote(constructor)


CONTENDERS: dict[str, type[Contender]] = {
    "envfleet": EnvFleet,
    "envfleet-4": EnvFleet4,
    "envfleet-2": EnvFleetIn2,
    "envfleet-shared": EnvFleetShared,
    "envfleet-shared-2": EnvFleetSharedIn2,
    "envfleet-auto": EnvFleetAuto,
    "envfleet-local": EnvFleetLocal,
    "envfleet-first-ready": EnvFleetFirstReady,
    "gymnasium-async": GymnasiumAsync,
    "gymnasium-sync": GymnasiumSync,
    "sb3-subproc": StableBaselines3,
    "tianshou-subproc": Tianshou,
    "tianshou-first-ready": TianshouFirstReady,
    "tianshou-ray": TianshouRay,
    "tf-agents": TfAgents,
    "loop": Loop,
    "bare-ray": BareRay,
    "lean-ray": LeanRay,
    "bare-ray-envs": BareRayEnvs,
}
