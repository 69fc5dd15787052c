"""What results.json says, for readers: results.md and throughput.png.

python benchmarks/report.py docs/benchmarks
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from contenders import CONTENDERS, ENVFLEET, PEER, REFERENCE
from workloads import WORKLOADS


class Spread(NamedTuple):
    median: float
    least: float
    most: float


def spread(values: list[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


class Results:
    """What was measured, and ratios of it; those are formed within a round."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.entries = {(e["workload"], e["contender"]): e for e in raw["entries"]}
        self.workloads = [*dict.fromkeys(e["workload"] for e in raw["entries"])]
        self.cores = raw["machine"]["cores"]

    def contenders(self, workload: str, kind: str | None = None) -> list[str]:
        """Those on a workload, in the order of the table of all."""
        return [
            name
            for name, contender in CONTENDERS.items()
            if (workload, name) in self.entries and kind in (None, contender.kind)
        ]

    def values(self, workload: str, contender: str) -> list[float]:
        """One a round; empty if it failed or was not measured."""
        return self.entries.get((workload, contender), {"values": []})["values"]

    def ratio(self, ours: tuple[str, str], theirs: tuple[str, str]) -> Spread | None:
        pairs = zip(self.values(*ours), self.values(*theirs), strict=False)
        ratios = [mine / other for mine, other in pairs]
        return spread(ratios) if ratios else None

    def of_limit(self, workload: str, contender: str) -> Spread | None:
        """Share of what the cores could do: each of them the environments' own rate."""
        ratio = self.ratio((workload, contender), (workload, "loop"))
        return ratio and Spread(*(value / self.cores for value in ratio))

    def chosen(self, workload: str) -> str:
        """The setting that "auto" finds: what it takes, or what it says is fastest of all."""
        auto, local = "envfleet-auto", "envfleet-local"
        notes = self.entries.get((workload, auto), {"notes": []})["notes"]
        names_local = any('backend="local"' in note for note in notes)
        ratio = self.ratio((workload, local), (workload, auto))
        return local if names_local and ratio and ratio.median > 1 else auto


class Target(NamedTuple):
    words: str
    ratio: Spread | None
    bound: float
    is_most: bool = False

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "not measured"
        met = self.ratio.median <= self.bound if self.is_most else self.ratio.median >= self.bound
        return "met" if met else "**NOT met**"


def targets(results: Results) -> list[Target]:
    many, busy, heavy = "cartpole-64", "busy-16", "heavy-tailed-32"
    best = results.chosen(many)
    found = [
        Target(
            "no-op x 8, one per actor, against the bare Ray loop",
            results.ratio(("noop-8", "envfleet"), ("noop-8", "bare-ray")),
            0.90,
        )
    ]
    for peer, bound in {
        "gymnasium-async": 3.0,
        "sb3-subproc": 3.0,
        "tf-agents": 8.0,
        "tianshou-ray": 8.0,
    }.items():
        found.append(
            Target(
                f"CartPole x 64, best that auto finds ({CONTENDERS[best].title}), against "
                f"{CONTENDERS[peer].title}",
                results.ratio((many, best), (many, peer)),
                bound,
            )
        )
    auto = (busy, "envfleet-auto")
    found.append(Target("busy 1 ms x 16, auto, against the limit", results.of_limit(*auto), 0.80))
    for peer in results.contenders(busy, PEER):
        words = f"busy 1 ms x 16, auto, against {CONTENDERS[peer].title}"
        found.append(Target(words, results.ratio(auto, (busy, peer)), 1.0))
    found.append(
        Target(
            "heavy-tailed x 32, recv(min_envs=half) against lockstep, one per actor both",
            results.ratio((heavy, "envfleet-first-ready"), (heavy, "envfleet")),
            2.5,
        )
    )
    found += shared_memory_targets(results)
    for contender in ("envfleet", "envfleet-4"):
        # What a step costs is the inverse of the rate.
        ratio = results.ratio(("cartpole-8", contender), (many, contender))
        words = f"CartPole, {CONTENDERS[contender].title}: cost of an environment at 64 against 8"
        found.append(Target(words, ratio, 1.2, is_most=True))
    for contender, words in {
        "bare-ray-envs": "bare actors that make CartPole, too",
        "bare-ray": "bare actors that are empty",
    }.items():
        ratio = results.ratio(("start-8", "envfleet"), ("start-8", contender))
        words = f"CartPole x 8, one per actor, seconds of a start against {words}"
        found.append(Target(words, ratio, 1.2, is_most=True))
    return found


def shared_memory_targets(results: Results) -> list[Target]:
    one, two = "envfleet-shared", "envfleet-shared-2"
    found = []
    for workload, words, ours, theirs, bound in (
        ("cartpole-8", "CartPole x 8", one, "envfleet", 8.0),
        ("cartpole-8", "CartPole x 8", one, "gymnasium-async", 1.0),
        ("cartpole-8", "CartPole x 8", one, "sb3-subproc", 1.0),
        ("cartpole-64", "CartPole x 64", two, "envfleet-2", 2.0),
        ("cartpole-64", "CartPole x 64", two, "gymnasium-async", 6.0),
        ("images-210-8", "images 210x160x3 x 8", one, "gymnasium-async", 1.0),
    ):
        words = f"{words}, {CONTENDERS[ours].title}, against {CONTENDERS[theirs].title}"
        found.append(Target(words, results.ratio((workload, ours), (workload, theirs)), bound))
    limit = results.of_limit("busy-16", one)
    words = f"busy 1 ms x 16, {CONTENDERS[one].title}, against the limit"
    found.insert(-1, Target(words, limit, 0.85))
    return found


def setting(results: Results, workload: str) -> str:
    """The contender of envfleet's that the others are held against."""
    special = {
        "noop-8": "envfleet",
        "heavy-tailed-32": "envfleet-first-ready",
        "start-8": "envfleet",
    }
    return special.get(workload) or results.chosen(workload)


def markdown(results: Results) -> str:
    raw = results.raw
    machine = raw["machine"]
    lines = [
        "# Results",
        "",
        "What is measured, and how to read it: [README.md](README.md). Written by",
        "",
        f"    {raw['command']}",
        "",
        f"{raw['date']}, {raw['minutes']} minutes: {raw['rounds']} rounds of {raw['seconds']} s. "
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}, load average {machine['load_before']} before. "
        f"Python {machine['python']}.",
        "",
    ]
    for where, versions in raw["versions"].items():
        words = ", ".join(f"{package} {version}" for package, version in versions.items())
        lines += [f"- {where}: {words}"]
    lines += [
        "",
        "## Targets",
        "",
        "Ratios are formed within a round. What is to be at most something is a cost.",
        "",
        "| target | bound | median | min | max | |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for target in targets(results):
        bound = f"{'<=' if target.is_most else '>='} {target.bound:.2f}"
        cells = [target.words, bound, *ratio_cells(target.ratio), target.verdict]
        lines.append(f"| {' | '.join(cells)} |")
    for workload in results.workloads:
        lines += ["", *table(results, workload)]
    return "\n".join([*lines, "", "![steps per second](throughput.png)", ""])


def table(results: Results, workload: str) -> list[str]:
    of = WORKLOADS[workload]
    ours = setting(results, workload)
    columns = ["", "seconds" if of.is_start else "steps/s", "min", "max"]
    columns += [f"{CONTENDERS[ours].title} / it"] + (["of the limit"] if not of.is_start else [])
    lines = [
        f"## {of.title} x {of.num_envs}",
        "",
        f"| {' | '.join(columns)} |",
        f"|---|{'---:|' * (len(columns) - 1)}",
    ]
    notes = []
    for name in results.contenders(workload):
        title, entry = CONTENDERS[name].title, results.entries[workload, name]
        values = entry["values"]
        if values:
            cells = [title, *map(number, spread(values))]
            ratios = [results.ratio((workload, ours), (workload, name))]
            ratios += [results.of_limit(workload, name)] if not of.is_start else []
            cells += [number(ratio.median) if ratio else "" for ratio in ratios]
        else:
            cells = [title, f"failed: {entry['error']}", *[""] * (len(columns) - 2)]
        lines.append(f"| {' | '.join(cells)} |")
        if entry["notes"]:
            notes += ["", f"{title}: {'; '.join(entry['notes'])}"]
    return lines + notes


def ratio_cells(ratio: Spread | None) -> list[str]:
    return [f"{value:.2f}" for value in ratio] if ratio else ["", "", ""]


def number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.1g}"


COLORS = {ENVFLEET: "#1f77b4", PEER: "#b0b0b0", REFERENCE: "#e0a458"}


def plot(results: Results, path: Path) -> None:
    """A panel for each workload, a bar for each contender, and a line at the limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 2
    rows = -(-len(results.workloads) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(14, 3.4 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(results.workloads) :]:
        axis.set_visible(False)
    for axis, workload in zip(axes.flat, results.workloads, strict=False):
        of = WORKLOADS[workload]
        names = results.contenders(workload)[::-1]
        spreads = [spread(results.values(workload, name) or [0.0]) for name in names]
        medians = [values.median for values in spreads]
        bars = axis.barh(
            [CONTENDERS[name].title for name in names],
            medians,
            xerr=[
                [values.median - values.least for values in spreads],
                [values.most - values.median for values in spreads],
            ],
            color=[COLORS[CONTENDERS[name].kind] for name in names],
            ecolor="#404040",
        )
        words = [number(median) if median else "failed" for median in medians]
        axis.bar_label(bars, words, padding=4, fontsize=8)
        axis.tick_params(labelsize=8)
        axis.set_title(f"{of.title} x {of.num_envs}", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.15)
        axis.set_xlabel("seconds" if of.is_start else "steps/s", fontsize=8)
        if max(medians) > 10 * min(filter(None, medians), default=1.0):
            axis.set_xscale("log")
        own = results.values(workload, "loop")
        if own:
            limit = results.cores * statistics.median(own)
            axis.axvline(limit, color="#404040", linestyle=":", linewidth=1)
    figure.savefig(path, dpi=110)


def write(raw: dict[str, Any], directory: Path) -> None:
    """Writes the results and what is made of them, and prints the targets."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_text(json.dumps(raw, indent=1) + "\n")
    results = Results(raw)
    text = markdown(results)
    (directory / "results.md").write_text(text)
    print(text)
    try:
        plot(results, directory / "throughput.png")
    except ImportError as error:
        print(f"no throughput.png: {error}")


if __name__ == "__main__":
    written = Path(sys.argv[1])
    write(json.loads((written / "results.json").read_text()), written)
