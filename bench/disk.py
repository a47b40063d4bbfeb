"""kvdisk against fio on one disk, in one run: bandwidth and CPU of stores (flush) and loads (promote).

    python bench/disk.py --root DIR [--size 1GiB] [--bs 128KiB,1MiB,8MiB] [--rounds 5] [--engine auto] [--json FILE]

What is measured is the store itself, through its metadata plane and data plane: chunks already in the arena are flushed
into packs, and read back, verified, into slots. fio moves the same number of bytes with its own io_uring engine,
O_DIRECT and the same block size, into preallocated files ("fresh") and over written ones ("recycled"); its buffers are registered, on 4 KiB pages. Both run in
alternating order, each `--rounds` times; the median and the spread are printed. Ratios within one run are the result;
absolute figures describe the machine.
"""

import argparse
import json
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvdisk.dataplane import Units
from kvdisk.memory import private_memory
from kvdisk.options import parse_options
from kvdisk.resident import Resident
from kvdisk.service import Service, Tenancy
from kvdisk.units import GIB, MIB, UNIT_BYTES, format_size, parse_size, round_up

ARENA_BYTES = 512 * MIB
SEGMENT_BYTES = 64 * MIB
FIO_IODEPTH = {128 << 10: 64, 1 << 20: 32, 8 << 20: 8}

Sample = tuple[float, float]  # MB/s, CPU seconds a GiB


class Bench:
    """One store in `root`, filled with chunks of one size."""

    def __init__(self, root: Path, chunk_bytes: int, total_bytes: int, engine: str, *, checksums: bool) -> None:
        capacity = 2 * total_bytes + 8 * SEGMENT_BYTES
        options = parse_options(
            {
                "root_dir": str(root),
                "disk_bytes_to_use": capacity,
                "cpu_bytes_to_use": ARENA_BYTES,
                "segment_bytes": SEGMENT_BYTES,
                "engine": engine,
            }
        )
        self.memory = private_memory(ARENA_BYTES)
        self.memory.view[: 16 * MIB] = os.urandom(16 * MIB)
        for start in range(16 * MIB, ARENA_BYTES, 16 * MIB):
            self.memory.view[start : start + 16 * MIB] = self.memory.view[: 16 * MIB]
        self.chunk_bytes = chunk_bytes
        self.count = total_bytes // chunk_bytes
        self.service = Service(
            options,
            Tenancy({"bench": chunk_bytes}, ("bench",)),
            [Units(self.memory, 0)],
            unit_count=ARENA_BYTES // UNIT_BYTES,
            checksums=checksums,
        )
        self._written = 0

    def store(self) -> None:
        """Flush `count` new chunks; their bytes are in the slots already, as after a GPU copy."""
        store = self.service.store
        parts, done = (self.chunk_bytes,), 0
        batch = max(1, 16 * MIB // self.chunk_bytes)
        while done < self.count:
            residents: list[Resident] = []
            while len(residents) < batch and done < self.count:
                key = self._written.to_bytes(8, "little")
                resident = store.reserve(key, 0, parts, done, b"")
                if resident is None:
                    break
                residents.append(resident)
                self._written += 1
                done += 1
            store.commit(residents)
            self.service.pump()
            if not residents:
                self.service.wait(0.01)
        assert self.service.drain(60)

    def load(self) -> None:
        """Promote the last `count` chunks, none of which is in a slot, in prefix order."""
        store = self.service.store
        waiting: list[Resident] = []
        for number in range(self._written - self.count, self._written):
            key = number.to_bytes(8, "little")
            while (resident := store.promote(key)) is None:
                self.service.pump()
                self.service.wait(0.01)
            waiting.append(resident)
            if len(waiting) % 64 == 0:
                self.service.pump()
        assert self.service.drain(60)
        failed = self.service.store.counters["chunks_damaged"] + self.service.store.counters["reads_failed"]
        assert not failed, f"{failed} chunks failed"

    def forget_slots(self) -> None:
        """Make every chunk leave memory, so that a load has to read the disk."""
        self.service.store.drop_slots()


def measure(work: Callable[[], None], total_bytes: int) -> Sample:
    """Bandwidth and CPU of `work`, over all threads and children of this process."""
    before, start = _cpu(), time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    return total_bytes / seconds / 1e6, (_cpu() - before) / (total_bytes / GIB)


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def fio(root: Path, rw: str, bs: int, total_bytes: int, *, fresh: bool) -> Sample:
    """fio's bandwidth over the same bytes; CPU is its job's own."""
    name = root / "fio.bin"
    if fresh and name.exists():
        name.unlink()
    command = [
        "fio", "--name=peer", f"--filename={name}", f"--rw={rw}", f"--bs={bs}", f"--size={total_bytes}",
        "--ioengine=io_uring", "--fixedbufs=1", "--direct=1", "--fallocate=posix", f"--iodepth={FIO_IODEPTH.get(bs, 16)}",
        "--refill_buffers=0", "--randrepeat=0", "--invalidate=1", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout)["jobs"][0]
    side = job["write" if rw == "write" else "read"]
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * side["runtime"] / 1e3
    return side["bw_bytes"] / 1e6, cpu / (total_bytes / GIB)


def environment(root: Path, service: Service) -> dict[str, str]:
    """What a figure depends on."""
    info = service.engine_info
    mount = subprocess.run(["df", "--output=fstype,avail", "-B1", root], capture_output=True, text=True, check=False)
    file_system, free = mount.stdout.split()[-2:]
    return {
        "kernel": platform.release(),
        "cpus": str(os.cpu_count()),
        "file system": f"{file_system}, {format_size(int(free))} free",
        "engine": f"{info.name}, {'direct' if info.direct else 'buffered'}, registered {info.registered}",
        "arena": service.arena_pages,
        "python": platform.python_version(),
    }


def summary(samples: list[Sample]) -> str:
    """Median bandwidth, its spread, and median CPU."""
    speeds = sorted(speed for speed, _ in samples)
    cpu = statistics.median(cpu for _, cpu in samples)
    return f"{statistics.median(speeds):6.0f} MB/s [{speeds[0]:.0f}..{speeds[-1]:.0f}] {cpu:5.3f} CPU s/GiB"


def run_size(root: Path, bs: int, arguments: argparse.Namespace, results: list[dict[str, object]]) -> None:
    """All rounds at one chunk size."""
    have_fio = shutil.which("fio") is not None
    total = parse_size(arguments.size) // bs * bs
    samples: dict[str, list[Sample]] = {}
    for fresh in (True, False):
        words = ("fresh", "recycled")[not fresh]
        bench = None
        for round_ in range(arguments.rounds):
            if bench is None or fresh:
                shutil.rmtree(root / "kv", ignore_errors=True)
                (root / "kv").mkdir(mode=0o700)
                bench = Bench(root / "kv", bs, total, arguments.engine, checksums=not arguments.no_checksums)
                if not results and not samples:
                    for name, value in environment(root, bench.service).items():
                        print(f"{name}: {value}")
                if not fresh:
                    for _ in range(3):  # until every segment was written once
                        bench.store()
            for name, work in _order(round_, bench, root, bs, total, fresh=fresh, have_fio=have_fio):
                samples.setdefault(f"{name} {words}", []).append(work())
            if fresh:
                bench.service.close()
        if bench is not None and not fresh:
            bench.service.close()
    for name, found in samples.items():
        print(f"{format_size(bs):>8}  {name:22} {summary(found)}")
        results.append({"bs": bs, "what": name, "samples": found})
    for side in ("store", "load"):
        for words in ("fresh", "recycled"):
            if f"fio {side} {words}" in samples:
                mine, peer = samples[f"kvdisk {side} {words}"], samples[f"fio {side} {words}"]
                ratios = sorted(a[0] / b[0] for a, b in zip(mine, peer, strict=True))
                print(f"{format_size(bs):>8}  {side} {words}: {statistics.median(ratios):.2f} x fio "
                      f"[{ratios[0]:.2f}..{ratios[-1]:.2f}]")  # fmt: skip


def _order(
    round_: int, bench: Bench, root: Path, bs: int, total: int, *, fresh: bool, have_fio: bool
) -> list[tuple[str, Callable[[], Sample]]]:
    def load() -> Sample:
        bench.forget_slots()
        return measure(bench.load, total)

    ours: list[tuple[str, Callable[[], Sample]]] = [
        ("kvdisk store", lambda: measure(bench.store, total)),
        ("kvdisk load", load),
    ]
    theirs: list[tuple[str, Callable[[], Sample]]] = [
        ("fio store", lambda: fio(root, "write", bs, total, fresh=fresh)),
        ("fio load", lambda: fio(root, "read", bs, total, fresh=False)),
    ]
    if not have_fio:
        return ours
    return ours + theirs if round_ % 2 == 0 else theirs + ours


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=None, help="directory on the disk to measure")
    parser.add_argument("--size", default="1GiB", help="bytes a pass")
    parser.add_argument("--bs", default="128KiB,1MiB,8MiB", help="chunk sizes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", default="auto", choices=("auto", "io_uring", "posix"))
    parser.add_argument("--no-checksums", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    random.seed(0)
    root = Path(tempfile.mkdtemp(prefix="kvdisk-bench-", dir=arguments.root or Path.cwd()))
    results: list[dict[str, object]] = []
    if shutil.which("fio") is None:
        print("fio is not installed: no comparison (apt-get install fio)", file=sys.stderr)
    try:
        for bs in arguments.bs.split(","):
            run_size(root, round_up(parse_size(bs), UNIT_BYTES), arguments, results)
    finally:
        shutil.rmtree(root)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
