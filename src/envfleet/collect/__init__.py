"""Collecting: policies beside environments; chunks as they come, or a dataset on disk.

`Collector` hands rows over to a training loop; `collect` leaves a dataset, which `load` opens.
``python -m envfleet.collect`` is `collect` configured by gin.
"""

from typing import TYPE_CHECKING, Any

from envfleet.collect.collector import Collector, CollectStats
from envfleet.collect.driver import CollectResult, check_pyarrow, collect
from envfleet.collect.policies import RandomPolicy
from envfleet.collect.rollout import Chunk

if TYPE_CHECKING:
    from envfleet.collect.dataset import Dataset, Episode, load

__all__ = [
    "Chunk",
    "CollectResult",
    "CollectStats",
    "Collector",
    "Dataset",
    "Episode",
    "RandomPolicy",
    "collect",
    "load",
]


def __getattr__(name: str) -> Any:
    """What reads datasets is imported when it is asked for: it needs pyarrow."""
    if name not in ("Dataset", "Episode", "load"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_pyarrow()
    from envfleet.collect import dataset

    return getattr(dataset, name)
