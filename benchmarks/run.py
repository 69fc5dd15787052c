"""Measures envfleet beside its peers, on the same environments, taking turns in one run.

    python benchmarks/run.py --tf-python .venv-tf/bin/python
    python benchmarks/run.py --only cartpole-8 cartpole-64 --contenders envfleet-auto loop

Every contender lives in a process of its own (serve.py), in the virtual environment of this program
or in TF-Agents', and is stopped while it is not its turn. Writes results.json and what report.py
makes of it.
"""

import argparse
import contextlib
import dataclasses
import datetime
import itertools
import os
import platform
import shlex
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import processes
import report
from contenders import CONTENDERS
from servers import Failed, Server
from workloads import WORKLOADS

ROOT = Path(__file__).parent.parent
MAKE_SECONDS, RUN_SECONDS = 400.0, 60.0
"""Deadlines."""
STARTS = 3
"""Starts take long: so many rounds of them are enough."""


@dataclass
class Entry:
    """A contender on a workload."""

    workload: str
    contender: str
    values: list[float] = field(default_factory=list)
    """One a round: steps of environments per second, or seconds of a start."""
    notes: list[str] = field(default_factory=list)
    error: str | None = None


class Servers:
    """A server for each contender, from when it is first needed, for workload after workload.

    Workloads that take turns need one each: `slot` tells them apart.
    """

    def __init__(
        self, pythons: dict[bool, str | None], directory: Path, reaper: processes.Reaper
    ) -> None:
        self._pythons = pythons
        self._directory = directory
        self._reaper = reaper
        self._servers: dict[tuple[int, str], Server] = {}

    def ask(self, slot: int, entry: Entry, deadline: float, **command: Any) -> dict[str, Any]:
        """As `Server.ask`; one that fails is ended."""
        key = slot, entry.contender
        try:
            if key not in self._servers:
                self._servers[key] = self._start(entry.contender)
            return self._servers[key].ask(deadline, **command)
        except Failed:
            self._end(key)
            raise

    def _start(self, contender: str) -> Server:
        python = self._pythons[CONTENDERS[contender].needs_tf]
        if python is None:
            raise Failed("no --tf-python was given")
        return Server(python, contender, self._directory, self._reaper)

    def _end(self, key: tuple[int, str]) -> None:
        if key in self._servers:
            self._servers.pop(key).end()

    def end_from(self, slot: int) -> None:
        for key in [key for key in self._servers if key[0] >= slot]:
            self._end(key)


def measure(
    entries: list[tuple[int, Entry]], servers: Servers, rounds: int, seconds: float
) -> dict[str, dict[str, str]]:
    """Has the entries take turns; returns the versions of what they run on.

    Args:
      entries: those of workloads that take turns, each with its slot.
    """
    versions = {}
    for slot, entry in entries:
        began = time.monotonic()
        try:
            answer = servers.ask(slot, entry, MAKE_SECONDS, do="make", workload=entry.workload)
            where = "TF-Agents" if CONTENDERS[entry.contender].needs_tf else "all others"
            versions[where] = answer["versions"]
            entry.notes = answer["notes"]
        except Failed as failure:
            entry.error = str(failure)
        outcome = entry.error or "; ".join(entry.notes[:1]) or "ready"
        say(f"{entry.workload}: {entry.contender}: {outcome} ({time.monotonic() - began:.1f} s)")
    workload = WORKLOADS[entries[0][1].workload]
    rounds = min(rounds, STARTS) if workload.is_start else rounds
    for i in range(rounds):
        began = time.monotonic()
        first = i * len(entries) // rounds
        for slot, entry in entries[first:] + entries[:first]:
            if entry.error is not None:
                continue
            longer = seconds * WORKLOADS[entry.workload].longer
            try:
                answer = servers.ask(slot, entry, RUN_SECONDS, do="run", seconds=longer)
                entry.values.append(answer["value"])
            except Failed as failure:
                entry.error, entry.values = str(failure), []
                say(f"{entry.workload}: {entry.contender}: {entry.error}")
        say(f"{workload.title}: round {i + 1} of {rounds} ({time.monotonic() - began:.1f} s)")
    for slot, entry in entries:
        if entry.error is None:
            with contextlib.suppress(Failed):  # it has been measured, and is ended
                servers.ask(slot, entry, RUN_SECONDS, do="close")
    servers.end_from(slot=1)  # no other workload needs them
    return versions


def machine() -> dict[str, Any]:
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 1),
    }


def say(words: str) -> None:
    print(words, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of each contender (5)")
    parser.add_argument("--seconds", type=float, default=0.4, help="of each in a round (0.4)")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=[*CONTENDERS])
    parser.add_argument("--tf-python", help="Python of the virtual environment with TF-Agents")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    options = parser.parse_args()
    if options.rounds < 1 or options.seconds <= 0:
        parser.error("--rounds is at least 1, --seconds above 0")
    if options.tf_python and not os.access(options.tf_python, os.X_OK):
        parser.error(f"--tf-python {options.tf_python}: there is no such program")
    return options


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    results = {
        "command": shlex.join(["python", "benchmarks/run.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "machine": machine(),
        "versions": {},
    }
    began = time.monotonic()
    chosen = [name for name in WORKLOADS if name in options.only]
    entries: list[Entry] = []
    with (
        tempfile.TemporaryDirectory(prefix="bench", ignore_cleanup_errors=True) as directory,
        processes.Reaper() as reaper,
    ):
        pythons = {False: sys.executable, True: options.tf_python}
        servers = Servers(pythons, Path(directory), reaper)
        for _, names in itertools.groupby(chosen, lambda name: WORKLOADS[name].title):
            together = [
                (slot, Entry(name, contender))
                for slot, name in enumerate(names)
                for contender in WORKLOADS[name].contenders
                if contender in options.contenders
            ]
            if together:
                results["versions"] |= measure(together, servers, options.rounds, options.seconds)
                entries += [entry for _, entry in together]
        servers.end_from(slot=0)
    results["minutes"] = round((time.monotonic() - began) / 60, 1)
    results["entries"] = [dataclasses.asdict(entry) for entry in entries]
    report.write(results, options.out)


if __name__ == "__main__":
    main()
