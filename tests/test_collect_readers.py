"""A dataset as others read it: pyarrow, pandas, polars and Ray Data, which know nothing of us."""

from __future__ import annotations

import json

import dm_env
import numpy as np
import pytest
from dm_env import specs

from envfleet.specs import bound, sample

pa = pytest.importorskip("pyarrow")

import pyarrow.dataset  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from envfleet.collect.columns import Columns  # noqa: E402
from envfleet.collect.dataset import Dataset  # noqa: E402
from envfleet.collect.episodes import Episodes  # noqa: E402
from envfleet.collect.shards import ShardWriter, end_at, reasons, sums  # noqa: E402

SEED = 7
REWARD = specs.Array((), np.float64)
DISCOUNT = specs.BoundedArray((), np.float64, 0.0, 1.0)
BOOLEANS = "observation.arm.touched"
TEXTS = ["", "plain", "größer\n", "a 'quoted' one", "日本語"]

CARTPOLE = (
    specs.BoundedArray((4,), np.float32, [-4.8, -np.inf, -0.42, -np.inf], [4.8, np.inf, 0.42, 9]),
    specs.DiscreteArray(2, np.int64),
)
NESTED = (
    {
        "arm": {
            "angle": specs.BoundedArray((), np.float64, -3.0, 3.0),
            "is_held": specs.Array((), np.bool_),
            "touched": specs.Array((3,), np.bool_),
        },
        "count": specs.BoundedArray((), np.int16, -5, 5),
        "grid": specs.BoundedArray((2, 3), np.uint8, 0, 9),
        "mission": specs.StringArray(()),
    },
    {"move": specs.BoundedArray((2,), np.float32, -1, 1), "jump": specs.DiscreteArray(3)},
)


def write_dataset(
    directory,
    observation,
    action,
    *,
    shards=((3, 5), (1, 4)),
    cut=None,
    attempts=None,
    reward=REWARD,
    discount=DISCOUNT,
):
    """A dataset of random values, and the rows that were written, of each shard.

    Args:
      shards: of each the lengths of its episodes, which are numbered through.
      cut, attempts: as of `Episodes`.
    """
    columns = Columns.of(dm_env.TimeStep(None, reward, discount, observation), action)
    random = np.random.default_rng(0)
    written, first = [], 0
    for lengths in shards:
        ids = np.arange(first, first + len(lengths))
        first += len(lengths)
        size = np.asarray(lengths) + 1
        ends = np.cumsum(size) - 1
        rows = {
            "episode_id": np.repeat(ids, size),
            "env_id": np.repeat(ids % 2, size).astype(np.int32),
            "t": np.concatenate([np.arange(n, dtype=np.int32) for n in size]),
            "step_type": np.ones(sum(size), np.int8),
            "terminated": np.zeros(sum(size), bool),
            "truncated": np.zeros(sum(size), bool),
            "policy_version": np.repeat(ids, size).astype(np.int32) + 3,
        }
        rows["step_type"][ends - size + 1] = 0
        for leaf in columns.leaves:
            rows[leaf.name] = _random_values(leaf, random, sum(size))
        for end, number in zip(ends.tolist(), ids.tolist(), strict=True):
            end_at(rows, end, columns)
            if number not in (cut or {}):
                rows["terminated"][end - 1], rows["truncated"][end - 1] = number % 2, not number % 2
        written.append(rows)
    return write_rows(directory, columns, written, cut, attempts), written


def write_rows(directory, columns, shards, cut=None, attempts=None):
    """A dataset of these rows, by column, of each shard."""
    directory.mkdir()
    manifest = {"format": 1, "seed": SEED, "columns": columns.to_json()}
    (directory / "dataset.json").write_text(json.dumps(manifest))
    for worker, rows in enumerate(shards):
        last = np.flatnonzero(rows["step_type"] == 2)
        ids = rows["episode_id"][last]
        episodes = Episodes(
            ids,
            rows["env_id"][last].astype(np.int64),
            rows["t"][last].astype(np.int64),
            sums(rows, [0, *(last[:-1] + 1)], columns),
            np.full(len(ids), 1e9),
            {k: reason for k, reason in (cut or {}).items() if k in ids},
            {k: attempt for k, attempt in (attempts or {}).items() if k in ids},
        )
        writer = ShardWriter(directory, columns, worker, "node")
        writer.write(columns.table(rows, reasons(episodes)), episodes)
        writer.close()
    return Dataset(directory)


def _random_values(leaf, random, number):
    shape = (number, *leaf.shape)
    if leaf.dtype.hasobject:
        return random.choice(np.array(TEXTS, object), shape)
    if leaf.dtype.kind in "iu":
        low, high = bound(leaf, "minimum"), bound(leaf, "maximum")
        return random.integers(low, high, shape, leaf.dtype, endpoint=True)
    if leaf.minimum is None:
        return sample(specs.Array(leaf.shape, leaf.dtype), random, (number,))
    return sample(leaf, random, (number,))


def bits(array):
    """What two arrays that are the same to the last bit have in common."""
    array = np.asarray(array)
    values = array.tolist() if array.dtype.hasobject else np.ascontiguousarray(array).tobytes()
    return array.dtype, array.shape, values


@pytest.fixture
def found(tmp_path):
    """A dataset with what a writer that was killed leaves, and what was written to it."""
    dataset, written = write_dataset(tmp_path / "data", *NESTED, cut={1: "max_steps"})
    left = dataset.path / "_staging" / "0001-abc"
    left.mkdir(parents=True)
    (left / "shard-0001-abc-000003.parquet").write_bytes(b"PAR1 half a shard")
    (dataset.path / "report.html").write_text("<html>")
    rows = {name: np.concatenate([rows[name] for rows in written]) for name in written[0]}
    return dataset, rows


def stored(values):
    """What is in the file: an array of booleans is one of uint8."""
    return values.astype(np.uint8) if values.ndim > 1 and values.dtype == bool else values


def check_table(table, rows):
    """Whether an Arrow table, in any order of shards, has the rows."""
    assert table.column("cut").to_pylist().count("max_steps") == 1
    for name, expected in rows.items():
        column = table.column(name)
        if expected.ndim > 1:
            assert isinstance(column.type, pa.FixedShapeTensorType), name
            assert tuple(column.type.shape) == expected.shape[1:], name
            values = column.combine_chunks().to_numpy_ndarray()
            assert bits(values) == bits(stored(expected)), name
        else:
            assert bits(column.to_numpy()) == bits(expected), name


def test_pyarrow_reads_the_directory_as_one_dataset(found):
    dataset, rows = found
    assert len(pyarrow.dataset.dataset(dataset.path / "data").files) == 2
    check_table(pq.read_table(dataset.path / "data"), rows)


def test_pyarrow_parquet_reads_every_shard(found):
    dataset, rows = found
    tables = [pq.read_table(path) for path in sorted(dataset.path.glob("data/*.parquet"))]
    check_table(pa.concat_tables(tables), rows)


def test_pandas_reads_the_directory_with_tensors_flat(found):
    pandas = pytest.importorskip("pandas")
    dataset, rows = found
    frame = pandas.read_parquet(dataset.path / "data")
    assert [*frame.columns] == dataset.columns.schema.names
    for name, expected in rows.items():
        values = frame[name].tolist()
        if expected.ndim > 1:
            assert bits(np.stack(values)) == bits(stored(expected).reshape(len(expected), -1)), name
        else:
            assert values == expected.tolist(), name


def test_polars_reads_the_directory(found):
    polars = pytest.importorskip("polars")
    dataset, rows = found
    frame = polars.read_parquet(dataset.path / "data")
    assert frame.columns == dataset.columns.schema.names
    for name, expected in rows.items():
        values = np.array(frame[name].to_list(), expected.dtype).reshape(expected.shape)
        assert bits(values) == bits(expected), name


def test_ray_data_reads_the_directory_with_tensors_in_shape(found, session_ray):
    ray_data = pytest.importorskip("ray.data")
    dataset, rows = found
    names = [name for name in rows if name != BOOLEANS]
    batch = ray_data.read_parquet(str(dataset.path / "data")).select_columns(names).take_batch(100)
    order = np.lexsort([batch["t"], batch["episode_id"]])
    for name in names:
        assert bits(batch[name][order]) == bits(rows[name]), name


def test_ray_data_reads_arrays_of_booleans(found, session_ray):
    ray_data = pytest.importorskip("ray.data")
    dataset, rows = found
    batch = (
        ray_data.read_parquet(str(dataset.path / "data")).select_columns([BOOLEANS]).take_batch(100)
    )
    assert batch[BOOLEANS].sum() == rows[BOOLEANS].sum()
