"""What others in the process cost kvdisk, and what kvdisk costs them, with the data plane on a thread and in a process.

    python bench/interference.py --root DIR [--size 1GiB] [--rounds 5] [--planes thread,process]

1. A scheduler that holds the GIL. The thread that owns the store does Python work in steps and looks at the store
   between them, as an engine core does. Bandwidth is compared with that of an idle owner, and the owner's own speed
   with that of the same work without kvdisk; with Python's switch interval as it is (5 ms) and at 0.2 ms.
2. A third thread that spins in Python while the owner is idle otherwise: the worst case for a data plane in a thread.
3. Read latency of a lone 1 MiB chunk at a time, idle and while chunks are written at full rate.
4. 1,000 loads of one 128 KiB chunk, eight at a time: alone, and beside one load of 1 GiB.

Both planes take turns in every round, each over its own directory: the thread with private memory, the process with
shared memory, as kvdisk uses them. Prints each bar with its verdict and writes bench/results/interference.json.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvdisk.cli.bench_report import environment
from kvdisk.cli.bench_workload import Job, Result, Setup, Workload
from kvdisk.units import KIB, MIB, parse_size

Figure = tuple[str, float]

HERE = Path(__file__).parent
STEP_S = 0.005  # of a scheduler's work between two looks at the store
SWITCH_S = 0.0002
INTERVALS = (("5 ms", None), ("0.2 ms", SWITCH_S))
SMALL_LOADS, SMALL_DEPTH = 1000, 8
LONE_READS = 200


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


def busy_owner(workload: Workload) -> Iterator[Figure]:
    """Part 1: idle, busy, and busy at a short switch interval."""
    alone = Scheduler.alone()
    for op, move in moves(workload).items():
        idle = move(None).bytes_per_s
        yield f"{op} idle, MB/s", idle / 1e6
        workload.service.drain(30)
        for name, interval in INTERVALS:
            scheduler = Scheduler()
            with switch_interval(interval):
                speed = move(scheduler.step).bytes_per_s
            workload.service.drain(30)
            yield f"{op} bandwidth, busy owner, switch interval {name}", speed / idle
            yield f"{op} owner's speed, switch interval {name}", scheduler.speed / alone


def third_thread(workload: Workload) -> Iterator[Figure]:
    """Part 2."""
    with busy_thread() as work:
        time.sleep(0.5)
        alone = work[0] / 0.5
    for op, move in moves(workload).items():
        idle = move(None).bytes_per_s
        workload.service.drain(30)
        for name, interval in INTERVALS:
            with switch_interval(interval), busy_thread() as work:
                start = time.perf_counter()
                speed = move(None).bytes_per_s
                spun = work[0] / (time.perf_counter() - start)
            workload.service.drain(30)
            yield f"{op} bandwidth, busy thread, switch interval {name}", speed / idle
            yield f"{op} thread's speed, switch interval {name}", spun / alone


def latency_beside_writes(workload: Workload) -> Iterator[Figure]:
    """Part 3: p50 and p99 in ms, of as many reads as end while the writes last."""

    def reader() -> Job:
        # Before the writers: they must be chunks that the writers of this pass do not recycle.
        return workload.reader(workload.last_keys()[-LONE_READS:], 1, 1, "read")

    idle = workload.run([reader()])["read"]
    found = workload.run([reader(), *workload.writers()])
    beside, writes = found["read"], found["write"]
    workload.service.drain(30)
    for name, result in (("idle", idle), ("beside writes", beside)):
        for percent in (50, 99):
            yield f"p{percent} {name}, ms", result.percentile_ns(percent) / 1e6
    yield "p99 ratio", beside.percentile_ns(99) / idle.percentile_ns(99)
    yield "writes beside them, MB/s", writes.bytes_per_s / 1e6
    yield "share of the reads' time in which there were writes", min(1.0, writes.elapsed_ns / beside.elapsed_ns)


def small_beside_large(workload: Workload) -> Iterator[Figure]:
    """Part 4: p99 in ms of the small loads, and what is left to the large one."""

    def run(*labels: str) -> dict[str, Result]:
        keys = workload.last_keys()
        jobs = {
            "small": workload.reader(keys[-SMALL_LOADS:], SMALL_DEPTH, 1, "small"),
            "large": workload.reader(keys[:-SMALL_LOADS], 0, 0, "large"),
        }
        return workload.run([jobs[label] for label in labels])

    small, large, both = run("small")["small"], run("large")["large"], run("small", "large")
    yield "small p99 alone, ms", small.percentile_ns(99) / 1e6
    yield "small p99 beside 1 GiB, ms", both["small"].percentile_ns(99) / 1e6
    yield "large beside over alone", both["large"].bytes_per_s / large.bytes_per_s


Part = Callable[[Workload], Iterator[Figure]]
PARTS: dict[str, tuple[int, Part]] = {
    "busy owner, 128 KiB chunks": (128 * KIB, busy_owner),
    "busy third thread, 128 KiB chunks": (128 * KIB, third_thread),
    "1,000 small loads beside a large one, 128 KiB chunks": (128 * KIB, small_beside_large),
    "busy owner, 1024 KiB chunks": (MIB, busy_owner),
    "busy third thread, 1024 KiB chunks": (MIB, third_thread),
    "reads of one chunk beside full writes, 1024 KiB chunks": (MIB, latency_beside_writes),
}


def measure(part: Part, workloads: dict[str, Workload], rounds: int) -> dict[str, list[float]]:
    """The figures of `part` by plane and name, one a round; the planes take turns."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for plane, workload in workloads.items():
            for name, figure in part(workload):
                found.setdefault(f"{plane}: {name}", []).append(figure)
    return {name: found[name] for name in sorted(found)}


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
    parser.add_argument("--planes", default="thread,process", help="where the data plane is")
    parser.add_argument("--part", default="", help="only parts whose title has this in it")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    size = parse_size(arguments.size, "--size")
    report: dict[str, Any] = {"load average before": os.getloadavg()[0]}
    for bs in (128 * KIB, MIB):
        parts = {title: part for title, (size_of, part) in PARTS.items() if size_of == bs and arguments.part in title}
        if not parts:
            continue
        with ExitStack() as stack:
            workloads = {
                plane: stack.enter_context(Workload(arguments.root, Setup(bs, size, data_plane=plane)))
                for plane in arguments.planes.split(",")
            }
            if "environment" not in report:
                report["environment"] = environment(next(iter(workloads.values())))
                for name, value in report["environment"].items():
                    print(f"{name:>12}: {value}")
            for workload in workloads.values():
                workload.recycle_all()
            for title, part in parts.items():
                report[title] = measure(part, workloads, arguments.rounds)
                show(title, report[title])
    report["load average after"] = os.getloadavg()[0]
    arguments.results.mkdir(exist_ok=True)
    (arguments.results / "interference.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
