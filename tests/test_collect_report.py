"""The page about a run: what it says, that it is whole, and that odd runs get one, too."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from envfleet.collect.report import Report, render

VOID = {"meta", "br", "hr", "img", "link", "input"}
CHARTS = [
    "Return over time",
    "Episode length over time",
    "Returns",
    "Episode lengths",
    "Steps per second over time",
]


class Page(HTMLParser):
    """A page, read strictly: every tag that is opened is closed, in the right order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute of <{tag}> is given twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> was not opened"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append((self.open[-1] if self.open else "", data))

    def of(self, tag: str, kind: str | None = None) -> list[dict[str, str | None]]:
        """Attributes of the tags of a name, and of a class."""
        return [a for name, a in self.tags if name == tag and kind in (None, a.get("class"))]

    @property
    def charts(self) -> list[str | None]:
        return [attrs.get("aria-label") for attrs in self.of("svg")]

    @property
    def text(self) -> str:
        return "".join(data for tag, data in self.words if tag != "style")

    def inside(self, tag: str) -> str:
        return "".join(data for name, data in self.words if name == tag)


def run(count: int, **changes: Any) -> Report:
    random = np.random.default_rng(0)
    lengths = random.integers(50, 300, count)
    whole = Report(
        title="run-7",
        facts={"steps": f"{lengths.sum():,}", "stopped by": "steps"},
        ended=random.uniform(0.0, 100.0, count),
        returns=random.normal(20.0, 5.0, count),
        lengths=lengths,
        writers=[f"actor {k % 3}" for k in range(count)],
        cuts=[None] * count,
        failures=[],
        configuration="rollout.num_steps = 5\n",
    )
    return whole._replace(**changes)


def page(report: Report) -> Page:
    """The page, read; what must hold of any of them is checked."""
    text = render(report)
    assert text.encode("utf-8")
    assert "<script" not in text
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg\b)", text)
    assert not re.findall(r"@import|url\(|\bsrc=|\bhref=", text)
    read = Page(text)
    for tag, attrs in read.tags:
        for name in ("d", "x", "y", "width", "height", "viewBox", "style"):
            written = attrs.get(name) or ""
            if tag != "meta":
                assert not re.search("nan|inf", written), f"<{tag} {name}={written!r}>"
        if tag == "rect":
            assert float(attrs["width"] or "") > 0
            assert float(attrs["height"] or "") >= 0
    for attrs in read.of("svg"):
        assert attrs["role"] == "img"
    assert not re.search(r"\b(nan|inf)\b", read.inside("text"))
    return read


def points(read: Page) -> int:
    return sum((attrs["d"] or "").count("M") for attrs in read.of("path", "points"))


def places(attrs: dict[str, str | None]) -> list[tuple[float, float]]:
    """Where a path of points or a line has them."""
    found = re.findall(r"[ML](-?[\d.]+),(-?[\d.]+)", attrs["d"] or "")
    return [(float(x), float(y)) for x, y in found]


def tips(read: Page) -> list[str]:
    """What is said when a column is pointed at."""
    return [data for tag, data in read.words if tag == "title"][1:]


def test_it_says_what_it_was_given() -> None:
    read = page(run(3, lengths=np.array([100, 200, 1700]), facts={"steps": "2,000"}))
    assert read.charts == CHARTS
    for words in ("run-7", "2,000", "Mean 666.7, median 200, from 100 to 1,700", "No environment"):
        assert words in read.text
    assert read.inside("pre") == "\nrollout.num_steps = 5\n"
    assert read.inside("title").startswith("run-7")
    assert read.of("meta")[1]["name"] == "viewport"
    assert "prefers-color-scheme: dark" in read.inside("style")


def test_nothing_may_be_fetched() -> None:
    policy = [a["content"] for a in page(run(3)).of("meta") if "http-equiv" in a]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_axes_have_units_and_round_ticks() -> None:
    read = page(run(400, lengths=np.arange(400) * 10))
    labels = read.inside("text")
    assert labels.count("time since the run began (s)") == 3
    assert "steps/s" in labels
    assert "1,000" in labels
    written = "|".join(data for tag, data in read.words if tag == "text")
    assert "|0|1,000|2,000|3,000|4,000|0|20|40|60|80|steps|time since" in written


@pytest.mark.parametrize(
    ("last", "unit", "label"), [(500.0, "s", "400"), (7200.0, "min", "100"), (90_000.0, "h", "20")]
)
def test_time_has_a_unit_that_suits_it(last: float, unit: str, label: str) -> None:
    read = page(run(5, ended=np.linspace(1.0, last, 5)))
    assert f"time since the run began ({unit})" in read.text
    assert ("text", label) in read.words


def test_points_are_where_their_episodes_are() -> None:
    """Unsorted as they come: later is further right, more is further up."""
    read = page(run(3, ended=np.array([30.0, 10.0, 20.0]), returns=np.array([9.0, 1.0, 5.0])))
    (x0, y0), (x1, y1), (x2, y2) = places(read.of("path", "points")[0])
    assert x0 < x1 < x2
    assert y0 > y1 > y2
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)


def test_the_line_is_a_mean_of_the_last_ten() -> None:
    """Returns 0 and 10 by turns: points at either, the line halfway between them."""
    returns = np.tile([0.0, 10.0], 100)
    read = page(run(200, ended=np.arange(200.0), returns=returns))
    heights = {y for _, y in places(read.of("path", "points")[0])}
    line = [y for _, y in places(read.of("path", "mean")[0])]
    assert len(heights) == 2
    assert len(line) > 100
    assert line[-50:] == pytest.approx([sum(heights) / 2] * 50, abs=0.1)


def test_few_episodes_are_points_and_many_are_bars() -> None:
    few = page(run(500))
    assert points(few) == 1000
    assert not few.of("path", "range")
    many = page(run(501))
    assert points(many) == 0
    for kind in ("range", "half"):
        paths = many.of("path", kind)
        assert len(paths) == 2
        assert all(100 < (attrs["d"] or "").count("M") <= 150 for attrs in paths)
    assert "thin from the lowest to the highest" in many.text


def test_bars_reach_from_the_lowest_to_the_highest() -> None:
    """Two moments, at each the numbers 0 to 400, so that quartiles are 100 and 300."""
    values = np.tile(np.arange(401.0), 2)
    read = page(run(802, ended=np.repeat([1.0, 2.0], 401), returns=values))
    height: dict[str, tuple[float, float]] = {}
    for kind in ("range", "half"):
        bars = re.findall(r"M[\d.]+,([\d.]+)V([\d.]+)", read.of("path", kind)[0]["d"] or "")
        assert len(bars) == 2
        assert bars[0] == bars[1]
        height[kind] = (float(bars[0][0]), float(bars[0][1]))
    bottom, top = height["range"]
    quarter = (bottom - top) / 4
    assert height["half"] == pytest.approx((bottom - quarter, top + quarter), abs=0.2)


@pytest.mark.parametrize("count", [1, 7, 400, 20_000])
def test_every_episode_is_in_the_histograms(count: int) -> None:
    read = page(run(count))
    counted = [re.fullmatch(r".*: ([\d,]+) episodes?", tip) for tip in tips(read)]
    total = sum(int(match[1].replace(",", "")) for match in counted if match)
    assert total == 2 * count
    assert len(read.of("rect", "column")) < 250


def test_whole_numbers_have_columns_of_their_own() -> None:
    returns = np.array([1.0, 1.0, 2.0, 4.0])
    said = tips(page(run(4, returns=returns, lengths=np.array([1, 1, 1, 5]))))
    for words in ("1: 2 episodes", "2: 1 episode", "4: 1 episode", "1: 3 episodes", "5: 1 episode"):
        assert words in said


def test_fractions_are_counted_on_the_right_side_of_an_edge() -> None:
    said = tips(page(run(5, returns=np.array([0.0, 0.1, 0.3, 0.3, 0.45]))))
    for words in ("0.0 to 0.1: 1 episode", "0.1 to 0.2: 1 episode", "0.3 to 0.4: 2 episodes"):
        assert words in said


def test_steps_per_second() -> None:
    """Four episodes of 100 steps in 8 seconds, all of them in the first half."""
    read = page(run(4, ended=np.array([8.0, 1.0, 2.0, 3.0]), lengths=np.array([0, 100, 200, 100])))
    assert "Mean 50 steps/s; a column is 4 s" in read.text
    assert "0 to 4 s: 100 steps/s" in tips(read)
    assert not any(tip.startswith("4 to 8 s") for tip in tips(read))


def test_columns_of_steps_per_second_hold_all_steps() -> None:
    report = run(30_000)
    rates = [re.fullmatch(r".* s: ([\d.,]+) steps/s", tip) for tip in tips(page(report))]
    found = [float(match[1].replace(",", "")) for match in rates if match]
    assert len(found) == 100
    assert sum(found) * report.ended.max() / 100 == pytest.approx(report.lengths.sum(), rel=1e-3)


def test_shares_of_actors_stand_as_numbers() -> None:
    writers = ["left", "left", "left", "right"]
    read = page(run(4, writers=writers, lengths=np.array([500, 250, 250, 3000])))
    text = read.text
    assert "1,000 (25.0%)3 (75.0%)" in text
    assert "3,000 (75.0%)1 (25.0%)" in text
    assert text.index("right") < text.index("left")  # the most steps come first
    widths = [a["style"] for a in read.of("span") if "style" in a]
    assert widths == ["width:75.0%", "width:25.0%", "width:25.0%", "width:75.0%"]


def test_of_many_actors_fifty_are_shown() -> None:
    lengths = np.full(70, 10)
    lengths[:20] = 3
    read = page(run(70, writers=[f"actor-{k:02}" for k in range(70)], lengths=lengths))
    assert len(re.findall(r"actor-\d\d", read.text)) == 50
    assert "actor-00" not in read.text
    assert "and 20 more actors, with 60 steps and 20 episodes." in read.text
    one_more = page(run(51, writers=[str(k) for k in range(51)], lengths=np.full(51, 1)))
    assert "and 1 more actor, with 1 step and 1 episode." in one_more.text
    assert "more actor" not in page(run(50, writers=[str(k) for k in range(50)])).text


def test_cut_episodes_are_counted_by_cause() -> None:
    cuts = [None, "failure", "max_steps", "max_steps", None, None, None, None, None, None]
    text = page(run(10, cuts=cuts)).text
    assert "3 of 10 episodes; 7 ended by themselves" in text
    assert text.index("max_steps2 (20.0%)") < text.index("failure1 (10.0%)")
    assert "None was cut short." in page(run(10)).text
    assert (
        "and 10 more causes, of 10 episodes." in page(run(60, cuts=list(map(str, range(60))))).text
    )


def test_two_hundred_lines_of_failures_are_shown() -> None:
    failures = [f"env {k}: it broke\n  at line {k}" for k in range(150)]
    read = page(run(3, failures=failures))
    assert "at line 99" in read.text
    assert "env 100" not in read.text
    assert "and 100 more lines." in read.text
    assert "more line" not in page(run(3, failures=failures[:100])).text
    assert len(render(run(3, failures=["<" * 1_000_000] * 1000))) < 500_000


def test_text_is_escaped() -> None:
    odd = "<b>&amp;\"'</b><script src=x>"
    text = render(
        run(
            1,
            title=f"title {odd}",
            facts={f"fact {odd}": f"value {odd}"},
            writers=[f"writer {odd}"],
            cuts=[f"cut {odd}"],
            failures=[f"failure {odd}"],
            configuration=f"gin {odd}",
        )
    )
    assert "<b>" not in text
    assert "<script" not in text
    read = Page(text)
    for name in ("title", "fact", "value", "writer", "cut", "failure", "gin"):
        assert f"{name} {odd}" in read.text


def test_what_utf8_and_html_cannot_hold_is_replaced() -> None:
    read = page(run(1, title="a\udcffb\x00c\x1b[0m", failures=["\ud800"], configuration="é 雪\n"))
    assert "a\ufffdb\ufffdc\ufffd[0m" in read.text
    assert "é 雪" in read.text


def test_no_episode() -> None:
    read = page(run(0, facts={}, configuration=""))
    assert read.charts == []
    assert read.text.count("No episode to show.") == 5
    assert read.text.count("No episode was collected.") == 2
    for title in CHARTS:
        assert title in read.text
    assert "None was kept." in read.text


def test_one_episode() -> None:
    read = page(run(1, ended=np.array([4.0]), returns=np.array([2.5]), lengths=np.array([80])))
    assert read.charts == CHARTS
    assert points(read) == 2
    assert not read.of("path", "mean")
    assert {"2.5: 1 episode", "80: 1 episode", "0 to 4 s: 20 steps/s"} <= set(tips(read))


@pytest.mark.parametrize("count", [2, 800])
@pytest.mark.parametrize("value", [0.0, -3.25, 1e15, 1e-300, 1e299])
def test_all_equal(count: int, value: float) -> None:
    read = page(
        run(
            count,
            ended=np.full(count, 7.0),
            returns=np.full(count, value),
            lengths=np.full(count, 9),
        )
    )
    assert read.charts == CHARTS
    assert f"9: {count} episodes" in tips(read)
    assert len(read.of("rect", "column")) == 3
    assert len(read.of("path", "mean")) == 2


def test_nearly_equal_returns_are_one_column() -> None:
    said = tips(page(run(2, returns=np.array([0.7, np.nextafter(0.7, 1.0)]))))
    assert "about 0.7: 2 episodes" in said


def test_all_steps_zero_and_all_times_zero() -> None:
    read = page(run(3, ended=np.zeros(3), lengths=np.zeros(3, np.int64)))
    assert "All episodes ended as the run began." in read.text
    assert len(read.charts) == 4
    assert "0 (0.0%)" in read.text
    no_steps = page(run(3, returns=np.arange(3.0), lengths=np.zeros(3, np.int64)))
    assert no_steps.charts == CHARTS
    assert not any(data.startswith("-") for tag, data in no_steps.words if tag == "text")


def test_returns_that_are_not_finite_are_left_out_and_said_to_be() -> None:
    returns = np.array([1.0, np.nan, np.inf, -np.inf, 2.0])
    read = page(run(5, returns=returns))
    said = "3 episodes are left out, whose return is not finite or too large to draw"
    assert read.text.count(said) == 2
    assert "Mean 1.5, median 1.5, from 1 to 2" in read.text
    assert points(read) == 2 + 5
    none = page(run(2, returns=np.full(2, np.nan)))
    assert none.text.count("No episode to show.") == 2
    assert len(none.charts) == 3


def test_episodes_whose_end_is_not_known() -> None:
    ended = np.array([1.0, np.nan, 3.0])
    read = page(run(3, ended=ended, returns=np.array([1.0, 2.0, 3.0])))
    assert read.text.count("1 episode is left out, whose end is not known") == 3
    assert points(read) == 4
    assert "2: 1 episode" in tips(read)  # the histogram has them all
    none = page(run(3, ended=np.full(3, np.nan)))
    assert none.charts == ["Returns", "Episode lengths"]


def test_numbers_of_any_size() -> None:
    sizes = np.array([-1e299, 1e-300, 0.0, 3.0, 1e299, 1e308, -1e308])
    read = page(run(7, returns=sizes))
    assert read.charts == CHARTS
    assert points(read) == 5 + 7
    for scale in (1e-9, 1e-3, 1.0, 1e6, 1e12):
        random = np.random.default_rng(1).normal(0.0, scale, 300)
        read = page(run(300, returns=random))
        for label in (data for tag, data in read.words if tag == "text"):
            assert len(label) < 12 or "time" in label


def test_a_million_episodes() -> None:
    count = 1_000_000
    report = run(
        count,
        writers=[f"actor {k % 1000}" for k in range(count)],
        cuts=["failure" if k % 3 == 0 else None for k in range(count)],
    )
    started = time.monotonic()
    text = render(report)
    assert time.monotonic() - started < 30  # about one second, where nothing else runs
    assert len(text.encode()) < 500_000
    read = page(report)
    assert "333,334 (33.3%)" in read.text
    assert "and 950 more actors" in read.text


def test_sizes_must_agree() -> None:
    with pytest.raises(ValueError, match="'writers': 2"):
        render(run(3, writers=["a", "b"]))
