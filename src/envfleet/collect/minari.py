"""A dataset of ours as one of Minari's."""

from __future__ import annotations

import os
import shutil
import string
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from dm_env import specs

from envfleet.collect.columns import Column
from envfleet.collect.dataset import Dataset
from envfleet.collect.episodes import Episodes
from envfleet.environments.gymnasium import TextArray, space_from_spec
from envfleet.specs import bound

_METADATA = [
    "algorithm_name",
    "author",
    "author_email",
    "code_permalink",
    "description",
    "env_spec",
    "requirements",
]
_LONG = 1000
"""Characters that the space of a text allows, if none is longer."""


def export_minari(
    dataset: Dataset,
    dataset_id: str,
    *,
    directory: str | os.PathLike[str] | None = None,
    **metadata: Any,
) -> Any:
    """Writes a dataset as one of Minari's, in HDF5; one shard at a time is in memory.

    Every value is kept bit by bit, in its own dtype; images are not made JPEGs of. For what Minari
    has no field:

    - infos ``"discount"`` (by its columns' names) and ``"policy_version"``. As Minari has it, there
      is one more than there are steps, the first for the reset; it repeats that of the first step.
    - metadata of episodes (``storage.get_episode_metadata``): ``"episode_id"``, ``"env_id"``,
      ``"attempt"``, which is 0 for the episode's first seed, and ``"cut"`` where it was cut short.
      ``"seed"`` is Minari's own.

    Its spaces say less than the environment's: an integer with bounds is a `Discrete`, int64 in
    Minari whatever the values are; an array of integers or booleans is a `Box`; a text is a `Text`
    of printable ASCII and whatever other characters there are.

    Args:
      dataset_id: ``"(namespace/)name-v0"``.
      directory: where Minari keeps datasets; None is where ``MINARI_DATASETS_PATH`` says, which
        `minari.load_dataset` goes by.
      **metadata: ``author``, ``author_email``, ``algorithm_name``, ``code_permalink``,
        ``description`` and ``requirements`` as of `minari.create_dataset_from_buffers`, and
        ``env_spec``, of Gymnasium, for Minari's ``recover_environment``.

    Returns:
      The `minari.MinariDataset`.

    Raises:
      ModuleNotFoundError: Minari, h5py or Pillow are not installed.
      FileExistsError: there is a dataset of this id; it stays as it is.
      TypeError: metadata that Minari does not have.
      ValueError: no such id can be, or Minari cannot hold a column; says which and why.
      OSError: it could not be written. Where anything is raised, there is no dataset.
    """
    try:
        import h5py  # type: ignore[import-untyped,import-not-found,unused-ignore]  # noqa: F401
        import minari
        import PIL  # noqa: F401  # imported by Minari's HDF5, of which its extra knows nothing
        from minari.dataset.minari_storage import MinariStorage
        from minari.namespace import NAMESPACE_METADATA_FILENAME, namespace_hierarchy
        from minari.storage.datasets_root_dir import get_dataset_path
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"an export to Minari needs {missing.name}, which is not installed: "
            "pip install 'minari[hdf5]' pillow",
            name=missing.name,
        ) from missing
    unknown = sorted(metadata.keys() - {*_METADATA})
    if unknown:
        raise TypeError(
            f"Minari's metadata have no {', '.join(unknown)}, but {', '.join(_METADATA)}"
        )
    namespace = _namespace(dataset_id)
    _check(dataset.columns.leaves)
    root = get_dataset_path() if directory is None else Path(directory)
    target = root / dataset_id
    if target.exists():
        raise FileExistsError(f"{target} is there already: name another dataset_id or version")
    leaves = {leaf.name: _spec(leaf, dataset) for leaf in dataset.columns.leaves}
    env_spec = metadata.pop("env_spec", None)
    for name in metadata.keys() & {"author", "author_email"}:
        given = metadata[name]
        metadata[name] = {given} if isinstance(given, str) else {*given}
    root.mkdir(parents=True, exist_ok=True)
    # Hidden directories are none of Minari's datasets.
    staging = Path(tempfile.mkdtemp(prefix=".envfleet-", dir=root))
    try:
        (staging / "whole").mkdir()
        storage = MinariStorage.new(
            staging / "whole" / "data",
            *(
                space_from_spec(dataset.columns.structure(part, leaves), part)
                for part in ("observation", "action")
            ),
            env_spec,
            "hdf5",
            jpeg_encoding=False,
        )
        storage.update_metadata(
            {"dataset_id": dataset_id, "minari_version": minari.__version__, **metadata}
        )
        storage.update_episodes(_buffers(dataset))
        storage.update_episode_metadata(_known(dataset.episodes()))
        target.parent.mkdir(parents=True, exist_ok=True)
        for parent in namespace_hierarchy(namespace):
            described = root / parent / NAMESPACE_METADATA_FILENAME
            if not described.exists():
                described.write_text("{}")
        os.rename(staging / "whole", target)  # fails where another export was faster
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return minari.MinariDataset(target / "data")


def _namespace(dataset_id: str) -> str | None:
    from minari.dataset.minari_dataset import parse_dataset_id

    try:
        namespace: str | None = parse_dataset_id(dataset_id)[0]
    except (TypeError, ValueError):  # without a version it is a TypeError
        raise ValueError(
            f"dataset_id is {dataset_id!r}, expected '(namespace/)name-v0' of letters, digits, "
            "'-' and '_'"
        ) from None
    return namespace


def _check(leaves: list[Column]) -> None:
    rewards = [leaf for leaf in leaves if leaf.part == "reward"]
    if [(leaf.name, leaf.shape) for leaf in rewards] != [("reward", ())]:
        found = ", ".join(f"{leaf.name} of shape {leaf.shape}" for leaf in rewards) or "none"
        raise ValueError(
            f"Minari holds one number as the reward of a step, and the dataset has {found}"
        )
    for leaf in leaves:
        if not leaf.is_stored:
            raise ValueError(
                f"{leaf.name} is of shape {leaf.shape}: Minari's HDF5 holds no arrays of size zero"
            )
        for key in leaf.path:
            if "/" in str(key) or key == "":
                raise ValueError(f"{leaf.name} has a part {key!r}, which is no name in HDF5")


def _spec(leaf: Column, dataset: Dataset) -> Any:
    """The spec whose space a leaf has."""
    if leaf.dtype.hasobject:
        longest, characters = _text(leaf.name, dataset)
        return TextArray(0, max(longest, _LONG), "".join(sorted(characters)))
    low, high = bound(leaf, "minimum"), bound(leaf, "maximum")
    is_bounded = leaf.minimum is not None and leaf.maximum is not None
    is_integer = leaf.dtype.kind in "iu" and np.can_cast(leaf.dtype, np.int64)
    if is_integer and is_bounded and not leaf.shape:
        highest = np.iinfo(np.int64).max  # of its size, and before Gymnasium 1.4 of start + size
        if max(int(high) - int(low), int(high)) < highest:
            return specs.BoundedArray((), np.int64, low, high, "Discrete")
    return specs.BoundedArray(leaf.shape, leaf.dtype, low, high)


def _text(name: str, dataset: Dataset) -> tuple[int, set[str]]:
    """How long a text column's longest one is, and the characters of all."""
    longest, characters = 0, {*string.printable}
    for shard in dataset.shards:
        for text in shard.table([name]).column(name).unique().to_pylist():
            if "\0" in text:
                raise ValueError(f"{name} holds {text!r}: a text in HDF5 ends at a null")
            longest = max(longest, len(text))
            characters.update(text)
    return longest, characters


def _buffers(dataset: Dataset) -> Iterator[Any]:
    from minari.data_collector import EpisodeBuffer

    discounts = [leaf for leaf in dataset.columns.leaves if leaf.part == "discount"]
    for episode in dataset:
        steps = {"policy_version": episode.policy_version}
        for leaf in discounts:
            value = episode.discount
            for key in leaf.path:
                value = value[key]
            steps[leaf.name] = value
        ended = np.zeros((2, len(episode.policy_version)), bool)
        ended[:, -1] = episode.terminated, episode.truncated
        yield EpisodeBuffer(
            seed=episode.seed,
            observations=episode.observation,
            actions=episode.action,
            rewards=episode.reward,
            terminations=ended[0],
            truncations=ended[1],
            infos={name: np.concatenate([of[:1], of]) for name, of in steps.items()},
        )


def _known(episodes: Episodes) -> Iterator[dict[str, Any]]:
    """Metadata of each episode."""
    for number, env_id in zip(episodes.episode_id.tolist(), episodes.env_id.tolist(), strict=True):
        attempt = episodes.attempts.get(number, 0)
        known = {"episode_id": number, "env_id": env_id, "attempt": attempt}
        yield {**known, "cut": episodes.cut[number]} if number in episodes.cut else known
