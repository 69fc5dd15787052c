"""A dataset goes to Minari and comes back the same, to the last bit, or is refused and why."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from dm_env import specs

pytest.importorskip("pyarrow")
minari = pytest.importorskip("minari")
pytest.importorskip("h5py")
pytest.importorskip("PIL")

import gymnasium  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from gymnasium import spaces  # noqa: E402
from test_collect_readers import (  # noqa: E402
    CARTPOLE,
    NESTED,
    REWARD,
    SEED,
    TEXTS,
    bits,
    write_dataset,
)

from envfleet import seeding  # noqa: E402
from envfleet.collect.dataset import Dataset  # noqa: E402
from envfleet.collect.minari import export_minari  # noqa: E402

LIMITS = np.iinfo(np.int64)
DATASETS = {
    "CartPole": {"specs": CARTPOLE},
    "a nested dict": {"specs": NESTED},
    "tuples": {
        "specs": (
            (
                specs.Array((2,), np.float64),
                (specs.BoundedArray((), np.int32, -3, 3), specs.Array((), np.float16)),
            ),
            (specs.DiscreteArray(4), {"x": specs.BoundedArray((1, 2), np.float32, -1, 1)}),
        ),
    },
    "images": {
        "specs": (
            specs.BoundedArray((40, 36, 3), np.uint8, 0, 255),
            specs.BoundedArray((3,), np.int64, 0, [1, 2, 3]),
        ),
    },
    "a text": {"specs": (specs.StringArray(()), specs.StringArray(()))},
    "every integer": {
        "specs": (
            {
                "all": specs.BoundedArray((), np.int64, LIMITS.min, LIMITS.max),
                "wide": specs.BoundedArray((), np.int64, LIMITS.min, 0),
                "last": specs.BoundedArray((), np.int64, LIMITS.max - 1, LIMITS.max),
                "open": specs.Array((), np.uint64),
                "unsigned": specs.BoundedArray((), np.uint64, 0, 5),
                "byte": specs.BoundedArray((), np.uint8, 0, 255),
            },
            specs.BoundedArray((), np.int8, -128, 127),
        ),
    },
    "one shard": {"specs": CARTPOLE, "shards": [(1,)]},
    "many shards, cut and begun anew": {
        "specs": CARTPOLE,
        "shards": [(2, 1), (3,), (1, 1, 1), (70,)],
        "cut": {1: "failure", 6: "max_steps"},
        "attempts": {1: 1, 2: 3},
    },
    "other rewards and discounts": {
        "specs": CARTPOLE,
        "reward": specs.Array((), np.int32),
        "discount": {
            "a": specs.BoundedArray((), np.float32, 0, 1),
            "b": specs.BoundedArray((2,), np.float64, 0, 1),
        },
    },
}


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """Where Minari keeps datasets."""
    root = tmp_path / "minari"
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(root))
    return root


def at(structure, path):
    for key in path:
        structure = structure[key]
    return structure


def picked(space, stacked, i):
    """Element i of stacked values, in the structure of the space."""
    match space:
        case spaces.Dict():
            assert stacked.keys() == space.keys()
            return {key: picked(child, stacked[key], i) for key, child in space.items()}
        case spaces.Tuple():
            assert len(stacked) == len(space)
            return tuple(picked(child, part, i) for child, part in zip(space, stacked, strict=True))
        case spaces.Text():
            return stacked[i]
    return np.asarray(stacked[i])  # a Box warns of numpy's scalars


def check_valid(dataset):
    """What Minari checks its own datasets for, in its tests."""
    assert minari.list_local_datasets().keys() == {dataset.id}
    assert dataset.total_episodes == len(list(dataset))
    assert dataset.total_steps == sum(map(len, dataset))
    known = dataset.storage.get_episode_metadata(dataset.episode_indices)
    for i, (episode, metadata) in enumerate(zip(dataset, known, strict=True)):
        steps = len(episode)
        assert (episode.id, metadata["id"], metadata["total_steps"]) == (i, i, steps)
        assert steps == len(episode.terminations) == len(episode.truncations)
        for values, space, number in [
            (episode.observations, dataset.observation_space, steps + 1),
            (episode.actions, dataset.action_space, steps),
        ]:
            for k in range(number):
                assert picked(space, values, k) in space
            with pytest.raises(IndexError):
                picked(space, values, number)
        assert {len(of) for of in episode.infos.values()} == {steps + 1}


@pytest.mark.parametrize("made", DATASETS.values(), ids=DATASETS)
def test_every_value_comes_back_to_the_last_bit(tmp_path, made):
    options = {name: of for name, of in made.items() if name != "specs"}
    dataset, written = write_dataset(tmp_path / "data", *made["specs"], **options)
    export_minari(dataset, "ours/made/by-hand-v3")
    found = minari.load_dataset("ours/made/by-hand-v3")
    check_valid(found)
    episodes = iter(found)
    known = iter(found.storage.get_episode_metadata(range(len(found))))
    cut, attempts = options.get("cut", {}), options.get("attempts", {})
    for rows in written:
        last = np.flatnonzero(rows["step_type"] == 2)
        for first, end in zip([0, *(last[:-1] + 1)], last, strict=True):
            episode, number = next(episodes), int(rows["episode_id"][first])
            for leaf in dataset.columns.leaves:
                values = rows[leaf.name][first:end]
                match leaf.part:
                    case "observation":
                        back = at(episode.observations, leaf.path)
                        values = rows[leaf.name][first : end + 1]
                    case "action":
                        back = at(episode.actions, leaf.path)
                    case "reward":
                        back = episode.rewards
                    case "discount":
                        back = episode.infos[leaf.name][1:]
                if leaf.dtype.hasobject:
                    back = np.array(back, object)
                assert bits(back) == bits(values), leaf.name
            for name, back in [
                ("terminated", episode.terminations),
                ("truncated", episode.truncations),
                ("policy_version", episode.infos["policy_version"][1:]),
            ]:
                assert bits(back) == bits(rows[name][first:end]), name
            metadata = next(known)
            assert metadata["episode_id"] == number
            assert metadata["env_id"] == rows["env_id"][first]
            assert metadata["attempt"] == attempts.get(number, 0)
            assert metadata.get("cut") == cut.get(number)
            assert metadata["seed"] == seeding.of_episode(SEED, number, attempts.get(number, 0))[0]
    assert next(episodes, None) is None


def test_rewards_keep_what_is_no_common_number(tmp_path):
    odd = np.array([-0.0, np.nan, np.inf, 5e-324, 0.1, 0.0])
    dataset, written = write_dataset(tmp_path / "data", *CARTPOLE, shards=[(5,)])
    rows = {**written[0], "reward": odd, "cut": np.full(6, None)}
    table = dataset.columns.table(rows, [])
    column = table.schema.get_field_index("reward")
    (shard,) = dataset.shards
    footer = pq.read_metadata(shard.path).metadata[b"envfleet"]
    table = table.set_column(column, "reward", [odd]).replace_schema_metadata({"envfleet": footer})
    pq.write_table(table, shard.path)
    (episode,) = export_minari(Dataset(dataset.path), "odd-v0")
    assert bits(episode.rewards) == bits(odd[:5])


def test_spaces_are_made_from_the_columns(tmp_path):
    dataset, _ = write_dataset(tmp_path / "data", *NESTED)
    found = export_minari(dataset, "made-v0")
    arm = {
        "angle": spaces.Box(-3, 3, (), np.float64),
        "is_held": spaces.Box(np.zeros((), bool), np.ones((), bool), (), np.bool_),
        "touched": spaces.Box(np.zeros(3, bool), np.ones(3, bool), dtype=np.bool_),
    }
    text = found.observation_space["mission"]
    assert isinstance(text, spaces.Text)
    assert all(one in text for one in TEXTS)
    assert found.observation_space == spaces.Dict(
        {
            "arm": spaces.Dict(arm),
            "count": spaces.Discrete(11, start=-5),
            "grid": spaces.Box(0, 9, (2, 3), np.uint8),
            "mission": text,
        }
    )
    assert found.action_space == spaces.Dict(
        {"jump": spaces.Discrete(3), "move": spaces.Box(-1, 1, (2,))}
    )


def test_infinite_bounds_stay_infinite(tmp_path):
    dataset, _ = write_dataset(tmp_path / "data", *CARTPOLE)
    found = export_minari(dataset, "made-v0").observation_space
    observation, _ = CARTPOLE
    assert found == spaces.Box(observation.minimum, observation.maximum)


def test_a_dataset_without_its_cut_episodes_goes_without_them(tmp_path):
    dataset, _ = write_dataset(tmp_path / "data", *CARTPOLE, cut={1: "failure"})
    found = export_minari(Dataset(dataset.path, include_cut=False), "made-v0")
    known = found.storage.get_episode_metadata(found.episode_indices)
    assert [one["episode_id"] for one in known] == [0, 2, 3]


def test_an_empty_dataset_is_one_without_episodes(tmp_path):
    dataset, _ = write_dataset(tmp_path / "data", *CARTPOLE, shards=[])
    check_valid(export_minari(dataset, "made-v0"))


def test_metadata_are_minaris_and_its_environment_comes_back(tmp_path):
    dataset, _ = write_dataset(tmp_path / "data", *CARTPOLE)
    found = export_minari(
        dataset,
        "made-v0",
        author="me",
        author_email=["me@here", "me@there"],
        description="by hand",
        env_spec=gymnasium.spec("CartPole-v1"),
    )
    metadata = found.storage.metadata
    assert metadata["author"] == {"me"}
    assert metadata["author_email"] == {"me@here", "me@there"}
    assert metadata["description"] == "by hand"
    assert found.recover_environment().spec.id == "CartPole-v1"


def test_a_directory_is_where_the_dataset_goes(tmp_path, root, monkeypatch):
    dataset, _ = write_dataset(tmp_path / "data", *CARTPOLE)
    export_minari(dataset, "made-v0", directory=tmp_path / "else" / "where")
    assert not root.exists()
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "else" / "where"))
    check_valid(minari.load_dataset("made-v0"))


# -- what is refused -------------------------------------------------------------------------------

SCALAR = specs.Array((), np.float64)
REFUSED = {
    "two rewards": (
        {"reward": {"near": SCALAR, "far": SCALAR}},
        r"one number as the reward.*reward\.far of shape \(\), reward\.near of shape \(\)",
    ),
    "a vector of rewards": (
        {"reward": specs.Array((2,), np.float64)},
        r"one number as the reward.*reward of shape \(2,\)",
    ),
    "an array of size zero": (
        {"observation": {"x": SCALAR, "none": specs.Array((0,), np.float64)}},
        r"observation\.none is of shape \(0,\)",
    ),
    "a slash in a name": (
        {"observation": {"x": SCALAR, "a/b": SCALAR}},
        r"observation\.a/b has a part 'a/b'",
    ),
}


@pytest.mark.parametrize(("columns", "words"), REFUSED.values(), ids=REFUSED)
def test_a_column_that_minari_cannot_hold_is_named(tmp_path, root, columns, words):
    parts = {"observation": SCALAR, "action": specs.DiscreteArray(2), "reward": REWARD, **columns}
    dataset, _ = write_dataset(tmp_path / "data", **parts)
    with pytest.raises(ValueError, match=words):
        export_minari(dataset, "made-v0")
    assert not root.exists()


def test_a_null_in_a_text_is_refused(tmp_path, root, monkeypatch):
    monkeypatch.setattr("test_collect_readers.TEXTS", ["fine", "a\0b"])
    dataset, _ = write_dataset(tmp_path / "data", *NESTED)
    with pytest.raises(ValueError, match=r"observation\.mission holds 'a\\x00b'"):
        export_minari(dataset, "made-v0")
    assert minari.list_local_datasets() == {}


@pytest.mark.parametrize("dataset_id", ["made", "made-v", "../made-v0", "/made-v0", "a b-v0", ""])
def test_an_id_that_minari_does_not_take_is_refused(tmp_path, dataset_id):
    dataset, _ = write_dataset(tmp_path / "data", *CARTPOLE)
    with pytest.raises(ValueError, match=r"dataset_id is .*, expected '\(namespace/\)name-v0'"):
        export_minari(dataset, dataset_id)


def test_unknown_metadata_are_refused(tmp_path, root):
    dataset, _ = write_dataset(tmp_path / "data", *CARTPOLE)
    with pytest.raises(TypeError, match="no autor, but algorithm_name, author"):
        export_minari(dataset, "made-v0", autor="me")
    assert not root.exists()


def test_what_is_there_already_is_not_overwritten(tmp_path, root):
    dataset, _ = write_dataset(tmp_path / "data", *CARTPOLE)
    export_minari(dataset, "ours/made-v0")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    other, _ = write_dataset(tmp_path / "other", *NESTED)
    with pytest.raises(FileExistsError, match=r"ours/made-v0 is there already"):
        export_minari(other, "ours/made-v0")
    assert before == {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_nothing_is_left_of_an_export_that_fails_half_way(tmp_path, root):
    dataset, _ = write_dataset(tmp_path / "data", *CARTPOLE)
    dataset.shards[1].path.unlink()
    with pytest.raises(FileNotFoundError, match="shard-0001"):
        export_minari(dataset, "ours/made-v0")
    assert not [*root.iterdir()]


def test_a_missing_package_is_named_with_what_installs_it(tmp_path, monkeypatch):
    dataset, _ = write_dataset(tmp_path / "data", *CARTPOLE)
    for name in ("minari", "h5py", "PIL"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, name, None)
            with pytest.raises(
                ModuleNotFoundError, match=rf"{name}, .* pip install 'minari\[hdf5\]' pillow"
            ):
                export_minari(dataset, "made-v0")
