"""What a reply costs by its size, with the answer or through Ray's object store.

    python benchmarks/replies.py

Two actors return so many bytes each, in one `ray.get`, and the caller copies them. The limit up to
which a reply comes with the answer is read by Ray's processes when they start, so each is measured
in a process of its own; they take turns.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

LIMITS = {"Ray's default, 100 KiB": 100 * 1024, "all with the answer (10 MiB)": 10 * 1024**2}
SIZES = [80_000, 110_000, 225_000, 450_000, 806_000, 1_600_000, 3_200_000]
NUM_ACTORS = 2


def measure(repeats: int) -> list[float]:
    """Median seconds for each size."""
    import numpy as np
    import ray

    class Replies:
        def of(self, size: int) -> np.ndarray:
            return np.zeros(size, np.uint8)

    ray.init(address="local", include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    actors = [ray.remote(Replies).remote() for _ in range(NUM_ACTORS)]
    medians = []
    for size in SIZES:
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            for reply in ray.get([actor.of.remote(size) for actor in actors]):
                reply.copy()
            seconds.append(time.perf_counter() - began)
        medians.append(statistics.median(seconds))
    ray.shutdown()
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of each limit (3)")
    parser.add_argument("--repeats", type=int, default=100, help="of each size in a round (100)")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(*measure(options.repeats))
        return
    rounds: dict[str, list[list[float]]] = {words: [] for words in LIMITS}
    command = [sys.executable, __file__, "--one", "--repeats", str(options.repeats)]
    for _ in range(options.rounds):
        for words, limit in LIMITS.items():
            environment = {
                **os.environ,
                "RAY_max_direct_call_object_size": str(limit),
                "RAY_AUTH_MODE": "disabled",  # or it leaves a token in the home directory
            }
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            rounds[words].append([float(word) for word in done.stdout.splitlines()[-1].split()])
    print(f"| bytes of each | {' | '.join(f'{size:,}' for size in SIZES)} |")
    print(f"|---|{'---:|' * len(SIZES)}")
    for words, measured in rounds.items():
        medians = [statistics.median(column) for column in zip(*measured, strict=True)]
        print(f"| {words} | {' | '.join(f'{1e3 * seconds:.1f}' for seconds in medians)} |")


if __name__ == "__main__":
    main()
