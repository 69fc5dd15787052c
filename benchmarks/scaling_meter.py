"""CPU time of a caller's threads and of its actors, as Linux has it in /proc."""

import contextlib
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import members

TICK = os.sysconf("SC_CLK_TCK")


def cpu_of(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def cpu_of_all() -> float:
    """Seconds of all processes, and of other machines that had the cores meanwhile."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    user, nice, system, _idle, _iowait, *interrupts_and_stolen = map(int, fields)
    return (user + nice + system + sum(interrupts_and_stolen)) / TICK


def ray_threads() -> dict[str, float]:
    """Seconds of each thread of this process but the main one; Ray's, all of them."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # ended in the meantime
            if task.name != str(os.getpid()):
                found[task.name] = cpu_of(task / "stat")
    return found


def actors() -> list[Path]:
    """The directories of this session's actors in /proc."""
    found = []
    for pid in members(os.getsid(0)):
        with contextlib.suppress(OSError):
            path = Path(f"/proc/{pid}")
            if (path / "comm").read_text().startswith("ray::RayEnvAct"):
                found.append(path)
    return found


def memory_mb(process: Path) -> dict[str, float]:
    """Resident, and its share of what is shared with other processes."""
    lines = (process / "smaps_rollup").read_text().splitlines()
    kb = {line.split(":")[0]: float(line.split()[1]) for line in lines[1:]}
    return {"rss": kb["Rss"] / 1e3, "pss": kb["Pss"] / 1e3}


class Meter:
    """CPU time of the caller's threads and of its actors.

    Attributes:
      actors: their directories in /proc.
      idle: shares of a core that Ray's threads here and all actors use while nobody calls.
    """

    def __init__(self, num_actors: int) -> None:
        self.actors = actors()
        if len(self.actors) != num_actors:
            raise RuntimeError(f"{len(self.actors)} actors in this session, expected {num_actors}")
        used = self.used(functools.partial(time.sleep, 1.5))
        self.idle = {key: used[key] / used["wall"] for key in ("ray", "actor")}

    def used(self, work: Callable[[], Any]) -> dict[str, float]:
        """Seconds that it takes; `main` of this thread, and `actor` of all actors.

        And how many cores everybody else used meanwhile, Ray's own processes among them.
        """
        threads, before = ray_threads(), sum(cpu_of(path / "stat") for path in self.actors)
        process, main, wall = time.process_time(), time.thread_time(), time.perf_counter()
        everyone = cpu_of_all()
        work()
        wall = time.perf_counter() - wall
        main, process = time.thread_time() - main, time.process_time() - process
        actor = sum(cpu_of(path / "stat") for path in self.actors) - before
        others = max(0.0, cpu_of_all() - everyone - process - actor)
        busiest = max(cpu - threads.get(tid, 0.0) for tid, cpu in ray_threads().items())
        return {
            "wall": wall,
            "main": main,
            "ray": process - main,
            "busiest": busiest,
            "actor": actor,
            "others": others / wall,
        }
