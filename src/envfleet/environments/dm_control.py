"""dm_control's suite by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from envfleet import gin_state
from envfleet.errors import unknown


@functools.partial(gin_state.configurable, module=__name__)
def load(
    environment_name: str,
    task_kwargs: Mapping[str, Any] | None = None,
    environment_kwargs: Mapping[str, Any] | None = None,
    visualize_reward: bool = False,
) -> Any:
    """An environment of dm_control's suite; it needs no display as long as nothing is rendered.

    Args:
      environment_name: domain and task, as ``"cartpole/swingup"``.
      task_kwargs, environment_kwargs, visualize_reward: as for `dm_control.suite.load`.

    Returns:
      A `dm_env.Environment`.

    Raises:
      ModuleNotFoundError: dm_control is not installed.
      ImportError: the MuJoCo that is installed is not one that dm_control works with.
      ValueError: there is no such domain or task; says which there are.
    """
    return make(
        environment_name,
        task_kwargs=task_kwargs and dict(task_kwargs),
        environment_kwargs=environment_kwargs and dict(environment_kwargs),
        visualize_reward=visualize_reward,
    )


def make(environment_name: str, **kwargs: Any) -> Any:
    """`dm_control.suite.load` by one name, which says what is wrong with it; without gin."""
    try:
        from dm_control import suite
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "dm_control":
            raise
        problem = ModuleNotFoundError(
            f"'dm_control:{environment_name}' needs dm_control, which is not installed: "
            f"pip install {_PACKAGES}",
            name="dm_control",
        )
        raise unknown(problem, environment_name) from missing
    domain, _, task = environment_name.partition("/")
    tasks = suite.TASKS_BY_DOMAIN
    if domain not in tasks:
        said = f"dm_control has no domain {domain!r} ({environment_name!r}), but {', '.join(tasks)}"
        raise unknown(ValueError(said), environment_name)
    if task not in tasks[domain]:
        said = (
            f"dm_control's domain {domain!r} has no task {task!r} ({environment_name!r}), but "
            f"{', '.join(tasks[domain])}"
        )
        raise unknown(ValueError(said), environment_name)
    try:
        return suite.load(domain, task, **kwargs)
    except AttributeError as problem:
        if "MjModel" not in str(problem):
            raise
        raise ImportError(
            f"dm_control does not work with the MuJoCo that is installed ({problem}): "
            f"pip install {_PACKAGES}"
        ) from problem


_PACKAGES = "dm-control 'mujoco>=3.17,<4'"
"""dm_control 1.0.50 asks for any MuJoCo from 3.17 on, but fails with 4.0."""
