"""What others in the process cost kvdisk, and what kvdisk costs them.

    python bench/interference.py --root DIR [--size 1GiB] [--rounds 5]

1. A scheduler that holds the GIL. The thread that owns the store does Python work in steps and looks at the store
   between them, as an engine core does. Bandwidth is compared with that of an idle owner, and the owner's own speed
   with that of the same work without kvdisk; with Python's switch interval as it is (5 ms) and at 0.2 ms.
2. A third thread that spins in Python while the owner is idle otherwise: the worst case for a data plane in a thread.
3. Read latency of a lone 1 MiB chunk at a time, idle and while chunks are written at full rate.
4. 1,000 loads of one 128 KiB chunk, eight at a time: alone, and beside one load of 1 GiB.

Prints each bar with its verdict and writes bench/results/interference.json.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvdisk.cli.bench_report import environment
from kvdisk.cli.bench_workload import Result, Setup, Workload
from kvdisk.units import KIB, MIB, parse_size

HERE = Path(__file__).parent
STEP_S = 0.005  # of a scheduler's work between two looks at the store
SWITCH_S = 0.0002
SMALL_LOADS, SMALL_DEPTH = 1000, 8


def spin(count: int = 1000) -> int:
    """A bit of pure Python, which never gives up the GIL by itself."""
    total = 0
    for number in range(count):
        total += number & 7
    return total


class Scheduler:
    """Python work in steps of about STEP_S; its speed is work done a second of its own wall time."""

    def __init__(self) -> None:
        self.work = 0
        self.seconds = 0.0
        start = time.perf_counter()
        for _ in range(200):
            spin()
        self._step = max(1, round(STEP_S / ((time.perf_counter() - start) / 200)))

    def step(self) -> None:
        """One step: always the same work."""
        start = time.perf_counter()
        for _ in range(self._step):
            spin()
        self.seconds += time.perf_counter() - start
        self.work += self._step

    @property
    def speed(self) -> float:
        """Units of work a second."""
        return self.work / self.seconds

    @classmethod
    def alone(cls, seconds: float = 0.5) -> float:
        """The speed without anybody else."""
        one = cls()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            one.step()
        return one.speed


@contextmanager
def busy_thread() -> Iterator[list[int]]:
    """A thread that spins until the end; the list's only number is the work it has done."""
    done, stop = [0], threading.Event()

    def run() -> None:
        while not stop.is_set():
            spin()
            done[0] += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join()


@contextmanager
def switch_interval(seconds: float | None) -> Iterator[None]:
    """`sys.setswitchinterval`, and back."""
    before = sys.getswitchinterval()
    if seconds is not None:
        sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def moves(workload: Workload) -> dict[str, Callable[[Callable[[], None] | None], Result]]:
    """A pass in each direction; the argument is what the owner does between two looks."""
    return {
        "store": lambda between: workload.run(workload.writers(), between=between)["write"],
        "load": lambda between: workload.run(workload.readers(), between=between)["read"],
    }


def busy_owner(workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Part 1: idle, busy, and busy at a short switch interval, one after another in each round."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        alone = Scheduler.alone()
        for op, move in moves(workload).items():
            idle = move(None).bytes_per_s
            workload.service.drain(30)
            for name, interval in (("5 ms", None), ("0.2 ms", SWITCH_S)):
                scheduler = Scheduler()
                with switch_interval(interval):
                    speed = move(scheduler.step).bytes_per_s
                workload.service.drain(30)
                found.setdefault(f"{op} bandwidth, busy owner, switch interval {name}", []).append(speed / idle)
                found.setdefault(f"{op} owner's speed, switch interval {name}", []).append(scheduler.speed / alone)
    return found


def third_thread(workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Part 2."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        with busy_thread() as work:
            time.sleep(0.5)
            alone = work[0] / 0.5
        for op, move in moves(workload).items():
            idle = move(None).bytes_per_s
            workload.service.drain(30)
            for name, interval in (("5 ms", None), ("0.2 ms", SWITCH_S)):
                with switch_interval(interval), busy_thread() as work:
                    start = time.perf_counter()
                    speed = move(None).bytes_per_s
                    spun = work[0] / (time.perf_counter() - start)
                workload.service.drain(30)
                found.setdefault(f"{op} bandwidth, busy thread, switch interval {name}", []).append(speed / idle)
                found.setdefault(f"{op} thread's speed, switch interval {name}", []).append(spun / alone)
    return found


def latency_beside_writes(workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Part 3: p50 and p99 in ms."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        idle = workload.run(workload.readers(1))["read"]
        # Readers first: they must have chunks that the writers of this pass do not recycle.
        beside = workload.run([*workload.readers(1), *workload.writers()])["read"]
        workload.service.drain(30)
        for name, result in (("idle", idle), ("beside writes", beside)):
            for percent in (50, 99):
                found.setdefault(f"p{percent} {name}, ms", []).append(result.percentile_ns(percent) / 1e6)
        found.setdefault("p99 ratio", []).append(beside.percentile_ns(99) / idle.percentile_ns(99))
    return found


def small_beside_large(workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Part 4: p99 in ms of the small loads, and what is left to the large one."""
    found: dict[str, list[float]] = {}

    def run(*labels: str) -> dict[str, Result]:
        keys = workload.last_keys()
        jobs = {
            "small": workload.reader(keys[-SMALL_LOADS:], SMALL_DEPTH, 1, "small"),
            "large": workload.reader(keys[:-SMALL_LOADS], 0, 0, "large"),
        }
        return workload.run([jobs[label] for label in labels])

    for _ in range(rounds):
        small, large, both = run("small")["small"], run("large")["large"], run("small", "large")
        found.setdefault("small p99 alone, ms", []).append(small.percentile_ns(99) / 1e6)
        found.setdefault("small p99 beside 1 GiB, ms", []).append(both["small"].percentile_ns(99) / 1e6)
        found.setdefault("large beside over alone", []).append(both["large"].bytes_per_s / large.bytes_per_s)
    return found


BARS = {
    "bandwidth, busy owner, switch interval 0.2 ms": (">=", 0.9),
    "bandwidth, busy owner, switch interval 5 ms": (">=", 0.9),
    "owner's speed, switch interval 0.2 ms": (">=", 0.95),
    "owner's speed, switch interval 5 ms": (">=", 0.95),
    "bandwidth, busy thread, switch interval 0.2 ms": (">=", 0.9),
    "bandwidth, busy thread, switch interval 5 ms": (">=", 0.9),
    "p99 ratio": ("<=", 1.5),
}
"""By the end of a figure's name; from docs/performance.md."""


def show(title: str, found: dict[str, list[float]]) -> None:
    """A line a figure: median, spread, and a verdict where there is a bar."""
    print(f"\n{title}")
    for name, values in found.items():
        median = statistics.median(values)
        verdict = ""
        for ending, (sense, bar) in BARS.items():
            if name.endswith(ending):
                met = median >= bar if sense == ">=" else median <= bar
                verdict = f"  {'met' if met else 'missed'} (bar {sense} {bar})"
        print(f"  {name:58} {median:7.2f} [{min(values):.2f}..{max(values):.2f}]{verdict}", flush=True)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="directory on the disk to measure")
    parser.add_argument("--size", default="1GiB", help="bytes a pass")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    size = parse_size(arguments.size, "--size")
    report: dict[str, Any] = {"load average before": os.getloadavg()[0]}
    for bs in (128 * KIB, MIB):
        with Workload(arguments.root, Setup(bs, size)) as workload:
            if not report.get("environment"):
                report["environment"] = environment(workload)
                for name, value in report["environment"].items():
                    print(f"{name:>12}: {value}")
            workload.recycle_all()
            parts = {"busy owner": busy_owner, "busy third thread": third_thread}
            if bs == MIB:
                parts["reads of one chunk beside full writes"] = latency_beside_writes
            else:
                parts["1,000 small loads beside a large one"] = small_beside_large
            for title, part in parts.items():
                found = part(workload, arguments.rounds)
                report[f"{title}, {bs >> 10} KiB chunks"] = found
                show(f"{title}, {bs >> 10} KiB chunks", found)
    report["load average after"] = os.getloadavg()[0]
    arguments.results.mkdir(exist_ok=True)
    (arguments.results / "interference.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
