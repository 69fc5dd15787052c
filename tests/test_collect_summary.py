"""What a dataset is said to hold, in a terminal and on its page."""

from __future__ import annotations

import json
import re
import time

import dm_env
import numpy as np
import pytest
from dm_env import specs

pytest.importorskip("pyarrow")

from envfleet.collect.columns import Columns
from envfleet.collect.dataset import load
from envfleet.collect.episodes import Episodes
from envfleet.collect.report import render
from envfleet.collect.shards import ShardWriter, reasons
from envfleet.collect.summary import describe, report_of

CREATED = "2025-12-03T05:07:10+00:00"
BEGAN = 1764738430.0

OBSERVATION = {
    "arm": specs.BoundedArray((2,), np.float32, -1.5, 1.5),
    "text": specs.StringArray(()),
}


class Made:
    """A dataset, made by hand; what is given at the end is what ``dataset.json`` says."""

    def __init__(self, path, observation=None, action=None, **manifest):
        self.path = path
        path.mkdir(parents=True)
        step = dm_env.TimeStep(
            step_type=specs.Array((), np.int32),
            reward=specs.Array((), np.float64),
            discount=specs.BoundedArray((), np.float64, 0, 1),
            observation=OBSERVATION if observation is None else observation,
        )
        self.columns = Columns.of(step, action or specs.DiscreteArray(4))
        manifest = {"format": 1, "columns": self.columns.to_json(), "seed": 7, **manifest}
        (path / "dataset.json").write_text(json.dumps(manifest))

    def shard(self, ids, lengths, returns, ended, cut=(), worker=0, node="node-a"):
        """Writes a shard; all its rows are zeros."""
        lengths = np.asarray(lengths, np.int64)
        ids = np.asarray(ids, np.int64)
        returns, ended = np.asarray(returns, np.float64), np.asarray(ended, np.float64)
        episodes = Episodes(ids, ids % 4, lengths, returns, ended, dict(cut), {})
        leaves = {leaf.name: leaf for leaf in self.columns.leaves}
        rows = {}
        for field in self.columns.schema:
            if field.name in leaves:
                leaf = leaves[field.name]
                shape = (int((lengths + 1).sum()), *leaf.shape)
                rows[field.name] = np.full(shape, "" if leaf.dtype.hasobject else 0, leaf.dtype)
            elif field.name != "cut":
                rows[field.name] = np.zeros(int((lengths + 1).sum()), field.type.to_pandas_dtype())
        writer = ShardWriter(self.path, self.columns, worker, node)
        writer.write(self.columns.table(rows, reasons(episodes)), episodes)
        writer.close()
        return self

    def failed(self, *lines):
        (self.path / "failures.jsonl").write_text("".join(line + "\n" for line in lines))
        return self

    def text(self):
        text = describe(load(self.path))
        assert max(map(len, text.splitlines())) <= 100
        assert not re.search(r"[ \t]$", text, re.MULTILINE)
        return text


@pytest.fixture
def far_away(monkeypatch):
    """Where clocks show another time."""
    with monkeypatch.context() as context:
        context.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


def said(text, name):
    """What stands beside a name, words apart."""
    found = re.search(rf"^{re.escape(name)}  +(.*)$", text, re.MULTILINE)
    assert found, f"no {name} in\n{text}"
    return found[1].split()


def test_all_that_is_known_is_said(tmp_path, far_away):
    made = Made(
        tmp_path / "run-7",
        created=CREATED,
        environment=["CartPole-v1"] * 3 + ["Pong"],
        policy="random",
        run={"max_steps": 1000, "envs": 4, "max_seconds": None},
        versions={"envfleet": "0.3.0", "numpy": "2.4.0"},
    )
    made.shard([0, 1, 2], [5, 7, 8], [1.5, 2.5, 8], BEGAN + np.arange(3), {1: "failure"})
    made.shard([3, 7], [50, 130], [3, 1240], [BEGAN + 9, BEGAN + 245], {7: "max_steps"}, worker=1)
    made.failed('{"time": 1.5, "line": "env 1 failed in step: ValueError: no"}')
    text = re.sub(r"of .* kB, .* bytes a step", "of SIZE", made.text())
    assert text.startswith(f"{tmp_path}/run-7\n\n")
    assert text.partition("\n\n")[2] == (
        """\
episodes     5
steps        200
shards       2 of SIZE
collected    2025-12-03 05:07:10 to 05:11:15 UTC (4:05)
seed         7
environment  CartPole-v1 (3), Pong
policy       random
run          max_steps 1000, envs 4
versions     envfleet 0.3.0, numpy 2.4.0

        mean  std  min    max
return   251  495  1.5  1,240
length    40   48    5    130

                     episodes
ended by themselves         3  60.0%
cut by failure              1  20.0%
cut by max_steps            1  20.0%

                    steps         episodes
worker 1 on node-a    180  90.0%         2
worker 0 on node-a     20  10.0%         3

failures  1
          env 1 failed in step: ValueError: no

column            type     shape  bounds
episode_id        int64    ()
env_id            int32    ()
t                 int32    ()
step_type         int8     ()
observation.arm   float32  (2,)   -1.5 to 1.5
observation.text  str      ()
action            int32    ()     0 to 3
reward            float64  ()
discount          float64  ()     0 to 1
terminated        bool     ()
truncated         bool     ()
policy_version    int32    ()
cut               str      ()
"""
    )


def test_bytes_are_those_of_the_shards_on_disk(tmp_path):
    made = Made(tmp_path / "d").shard([0], [10], [0], [BEGAN])
    size = sum(path.stat().st_size for path in made.path.glob("data/*.parquet"))
    assert f"1 of {size / 1000:.3g} kB, {size / 10:,.1f} bytes a step" in made.text()


def test_a_dataset_without_episodes_is_described(tmp_path):
    made = Made(tmp_path / "d")
    text = made.text()
    assert said(text, "episodes") == ["0"]
    assert said(text, "shards") == ["0", "of", "0", "bytes"]
    assert said(text, "failures") == ["0"]
    assert not re.search("nan|collected|return|ended|worker", text)
    report = report_of(load(made.path), "")
    assert len(report.ended) == len(report.cuts) == 0
    assert "No episode was collected." in render(report)


@pytest.mark.parametrize(
    ("returns", "words"),
    [
        ([1.0, float("nan"), 3.0, float("-inf")], "2 1 1 3 2 not finite, left out"),
        ([float("nan"), float("inf")], "- - - - 2 not finite, left out"),
        ([1e308, 1e308], "1e+308 0 1e+308 1e+308"),
        ([1e308, -1e308], "0 1e+308 -1e+308 1e+308"),
        ([5e-324, 5e-324], "4.94e-324 0 4.94e-324 4.94e-324"),
    ],
)
def test_odd_returns_are_told_apart(tmp_path, returns, words):
    count = len(returns)
    made = Made(tmp_path / "d").shard(range(count), [2] * count, returns, [BEGAN] * count)
    assert " ".join(said(made.text(), "return")) == words
    render(report_of(load(made.path), ""))


def test_lines_are_short_whatever_they_say(tmp_path):
    made = Made(
        tmp_path / ("long-" * 40),
        observation={
            "n" * 130: specs.Array((2, 2), np.bool_),
            "deep": {"er": {"x" * 60: specs.BoundedArray((1,) * 20, np.float64, -1e300, 1e300)}},
        },
        environment=[f"some.package:Environment-v{k}" for k in range(1000)],
        policy="p" * 250,
        run={f"option_{k}": [k] * 10 for k in range(20)},
    )
    made.shard([0], [2], [1.0], [BEGAN], node="node-" * 30)
    made.failed(json.dumps({"line": "words of it " * 500}))
    text = made.text()
    assert "and 990 more" in text
    assert text.count("n" * 20) >= 3, "a long name is to be broken, not cropped"
    assert len(re.findall("p{20,}", text)) >= 3
    assert re.sub(r"\s", "", text.partition("\n\n")[0]).endswith("long-" * 40)


def test_failures_are_counted_and_the_latest_are_shown(tmp_path):
    made = Made(tmp_path / "d").failed(*[json.dumps({"line": f"failure {k}!"}) for k in range(12)])
    text = made.text()
    assert said(text, "failures") == ["12"]
    assert "failure 1!" not in text
    assert "failure 2!" in text
    assert "failure 11!" in text
    assert "and 2 more before these" in text


def test_a_failure_that_was_not_written_whole_is_shown_as_it_is(tmp_path):
    made = Made(tmp_path / "d").failed('{"line": "whole"}', "[1]", "", '{"line": "tor')
    with open(made.path / "failures.jsonl", "ab") as file:
        file.write(b"\xff\xfe")
    assert report_of(load(made.path), "").failures == [
        "whole",
        "[1]",
        '{"line": "tor',
        "\ufffd" * 2,
    ]
    assert said(made.text(), "failures") == ["4"]


def test_nothing_that_is_said_commands_the_terminal(tmp_path):
    made = Made(tmp_path / "d\x1b[2J", policy="red \x1b[31m", environment=["a\nb"])
    made.shard([0], [2], [1.0], [BEGAN], node="n\x07").failed(json.dumps({"line": "\x1b]0;x\x07"}))
    text = made.text()
    assert all(c.isprintable() or c == "\n" for c in text)
    assert said(text, "environment") == ["a", "b"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (specs.BoundedArray((84, 84, 3), np.uint8, 0, 255), "uint8 (84, 84, 3) 0 to 255"),
        (specs.BoundedArray((2,), np.float32, [-1, -2], 5), "float32 (2,) -2 to 5, varying"),
        (specs.BoundedArray((2,), np.float32, -np.inf, [0.1, 1e9]), "-inf to 1e+09, varying"),
        (specs.BoundedArray((), np.int64, -(2**62), 10**6), "int64 () -4.612e+18 to 1,000,000"),
        (specs.Array((3,), np.float16), "float16 (3,)"),
        (specs.Array((0, 2), np.float32), "float32 (0, 2) empty, not stored"),
    ],
)
def test_a_column_is_told_with_its_bounds(tmp_path, spec, words):
    text = Made(tmp_path / "d", observation={"leaf": spec}).text()
    assert " ".join(said(text, "observation.leaf")).endswith(words)


def test_bounds_of_one_side_are_told(tmp_path):
    made = Made(tmp_path / "d")
    manifest = json.loads((made.path / "dataset.json").read_text())
    below, above = (
        next(c for c in manifest["columns"] if c["column"] == n) for n in ("action", "discount")
    )
    below["maximum"] = above["minimum"] = None
    (made.path / "dataset.json").write_text(json.dumps(manifest))
    text = made.text()
    assert said(text, "action")[-2:] == ["from", "0"]
    assert said(text, "discount")[-3:] == ["up", "to", "1"]


def test_many_workers_are_told_in_short(tmp_path):
    made = Made(tmp_path / "d")
    for k in range(25):
        made.shard([k], [k + 1], [1.0], [BEGAN], worker=k, node="")
    text = made.text()
    assert said(text, "worker 24") == ["25", "7.7%", "1"]
    assert "worker 4 " not in text
    assert "and 5 more workers" in text


def test_a_view_without_cut_episodes_is_described_as_it_is(tmp_path):
    made = Made(tmp_path / "d").shard([0, 1], [5, 7], [1, 2], [BEGAN] * 2, {1: "failure"})
    made.shard([2], [4], [9], [BEGAN], {2: "failure"}, worker=1)
    dataset = load(made.path, include_cut=False)
    text = describe(dataset)
    assert said(text, "episodes") == ["1"]
    assert said(text, "worker 0 on node-a") == ["5", "100.0%", "1"]
    assert "worker 1" not in text
    assert "cut by" not in text
    report = report_of(dataset, "")
    assert report.writers == ["worker 0 on node-a"]
    render(report)


# -- the page --------------------------------------------------------------------------------------


def test_a_report_has_an_entry_for_every_episode(tmp_path):
    made = Made(tmp_path / "run-7", created=CREATED, policy="random")
    made.shard([4, 0], [5, 7], [1.5, float("nan")], [BEGAN + 3, BEGAN + 2], {0: "failure"})
    made.shard([1], [9], [2.5], [BEGAN + 245], worker=1, node="node-b").failed('{"line": "env 0"}')
    report = report_of(load(made.path), "x = 1")
    by_worker = [(e, n) for e, n in zip(report.ended.tolist(), report.writers, strict=True)]
    assert by_worker == [
        (3.0, "worker 0 on node-a"),
        (2.0, "worker 0 on node-a"),
        (245.0, "worker 1 on node-b"),
    ]
    assert report.title == "run-7"
    assert report.returns.tolist() == pytest.approx([1.5, np.nan, 2.5], nan_ok=True)
    assert report.lengths.tolist() == [5, 7, 9]
    assert report.cuts == [None, "failure", None]
    assert report.failures == ["env 0"]
    assert report.configuration == "x = 1"
    assert report.facts["policy"] == "random"
    assert report.facts["episodes"] == "3"
    page = render(report)
    assert "worker 1 on node-b" in page
    assert "05:07:10 to 05:11:15 UTC (4:05)" in page


@pytest.mark.parametrize("manifest", [{}, {"created": None}, {"created": "yesterday"}])
def test_times_are_counted_from_the_first_end_where_no_beginning_is_known(tmp_path, manifest):
    made = Made(tmp_path / "d", **manifest)
    made.shard([0, 1, 2], [5, 7, 9], [1, 2, 3], [BEGAN + 30, BEGAN + 10, np.nan])
    report = report_of(load(made.path), "")
    assert report.ended.tolist() == pytest.approx([20.0, 0.0, np.nan], nan_ok=True)
    assert "05:07:20 to 05:07:40 UTC (0:20)" in made.text()
    render(report)


def test_a_page_is_called_after_the_directory_wherever_one_stands(tmp_path, monkeypatch):
    made = Made(tmp_path / "run-7")
    monkeypatch.chdir(made.path)
    assert report_of(load("."), "").title == "run-7"
