"""What `kvdisk bench` and the scripts in bench/ measure: a real store, driven as a serving engine drives it.

A write is a chunk that is in a slot already (as after a copy from the GPU) and gets flushed; its latency is from
`commit` to "clean", on disk. A read is a chunk on disk that gets promoted; its latency is from `promote` to "a hit",
arrived and verified. The whole path is measured: metadata plane on the caller's thread, data plane on its own,
packing, checksums, recycling.

What must hold: a chunk that did not get where it should is an error in the result, never a sample; nothing that is
read was in memory before. Prints nothing.
"""

import os
import resource
import shutil
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np

from kvdisk.cli.bench_memory import random_memory, random_shared_memory
from kvdisk.dataplane import Units
from kvdisk.options import default_segment_bytes, parse_options
from kvdisk.plane.remote import ProcessPlane
from kvdisk.resident import Resident
from kvdisk.service import Service, Tenancy
from kvdisk.units import GIB, MIB, UNIT_BYTES, round_up

ARENA_BYTES_DEFAULT = 1 << 30
BATCH_BYTES = 16 * MIB
"""Chunks are committed, and promoted, in groups of about this size, as a request's chunks are in a scheduler step."""

STALL_S_MAX = 60.0
SAMPLE_S = 0.1


@dataclass(frozen=True)
class Setup:
    """What is measured.

    bs: bytes of a chunk. size: bytes a job moves in a pass. pages: of the arena, "huge" or "4k". data_plane: "thread",
    over private memory, or "process", over shared memory, as vLLM has it. Other names are those of `kvdisk bench`.

    Raises:
        ValueError: sizes that do not go together.
    """

    bs: int
    size: int
    numjobs: int = 1
    engine: str = "auto"
    direct: bool = True
    checksums: bool = True
    pages: str = "huge"
    arena_bytes: int = ARENA_BYTES_DEFAULT
    segment_bytes: int = 0  # 0: chosen
    data_plane: str = "thread"

    def __post_init__(self) -> None:
        if self.bs <= 0 or self.bs % UNIT_BYTES:
            raise ValueError(f"bs={self.bs} is not a multiple of {UNIT_BYTES}: give whole blocks, such as 128KiB")
        if self.size < self.bs:
            raise ValueError(f"size={self.size} is less than one chunk of bs={self.bs}; raise size")
        if self.bs * 8 > self.arena_bytes:
            raise ValueError(f"arena_bytes={self.arena_bytes} holds less than 8 chunks of bs={self.bs}; raise it")
        if self.segment_bytes and self.segment_bytes < 4 * self.bs:
            raise ValueError(f"segment_bytes={self.segment_bytes} is less than 4 chunks of bs={self.bs}; raise it")

    @property
    def chunk_count(self) -> int:
        """Chunks of all jobs in one pass."""
        return self.size // self.bs * self.numjobs

    @property
    def iodepth(self) -> int:
        """Chunks in flight a job, unless told otherwise: 128 MiB over all jobs, and at least one chunk each."""
        return max(1, min(128 * MIB, self.arena_bytes // 4) // self.bs // self.numjobs)

    def capacity(self) -> tuple[int, int]:
        """(bytes on disk, bytes of a segment): room for two passes, so that what is read is still there."""
        total = self.chunk_count * self.bs
        segment = self.segment_bytes or max(default_segment_bytes(2 * total), round_up(8 * self.bs, MIB))
        return 2 * total + total // 8 + 8 * segment, segment


@dataclass
class Result:
    """One direction's figures over all jobs. Times in ns. `samples`: (seconds since the start, bytes so far)."""

    direction: str  # "read" or "write"
    setup: Setup
    iodepth: int
    bytes: int = 0
    errors: int = 0
    elapsed_ns: int = 0
    cpu_s: tuple[float, float] = (0.0, 0.0)  # user, system, of the whole process
    clat_ns: "array[int]" = field(default_factory=lambda: array("q"))
    slat_ns: "array[int]" = field(default_factory=lambda: array("q"))
    samples: list[tuple[float, int]] = field(default_factory=list)

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth."""
        return self.bytes / max(1, self.elapsed_ns) * 1e9

    @property
    def cpu_s_per_gib(self) -> float:
        """CPU seconds a GiB moved, of all threads, the kernel's work for them included."""
        return sum(self.cpu_s) * GIB / max(1, self.bytes)

    def add(self, more: "Result") -> None:
        """Append a later pass of the same direction."""
        self.samples += [(at + self.elapsed_ns / 1e9, size + self.bytes) for at, size in more.samples]
        self.bytes += more.bytes
        self.errors += more.errors
        self.elapsed_ns += more.elapsed_ns
        self.cpu_s = (self.cpu_s[0] + more.cpu_s[0], self.cpu_s[1] + more.cpu_s[1])
        self.clat_ns += more.clat_ns
        self.slat_ns += more.slat_ns

    def percentile_ns(self, percent: float) -> int:
        """The completion latency that `percent` of the chunks did not exceed."""
        if not self.clat_ns:
            return 0
        return int(np.percentile(np.frombuffer(self.clat_ns, np.int64), percent, method="higher"))


class Job:
    """A stream of chunks in one direction, at most `iodepth` of them in flight.

    Attributes:
        in_flight: how many chunks.
        label: jobs with one label have one result; the direction unless given.
    """

    def __init__(self, direction: str, keys: Iterable[bytes], iodepth: int, batch: int, label: str = "") -> None:
        self.direction = direction
        self.label = label or direction
        self.iodepth = iodepth
        self.batch = max(1, min(batch, iodepth))
        self.in_flight = 0
        self._keys = deque(keys)

    @property
    def finished(self) -> bool:
        """Everything was asked for and has ended."""
        return not self._keys and not self.in_flight

    def stop(self) -> None:
        """Ask for nothing more."""
        self._keys.clear()

    def issue(self, workload: "Workload", result: Result) -> bool:
        """Ask for the next batch if there is room for one; whether anything was asked for."""
        room = self.iodepth - self.in_flight
        if not self._keys or room < min(self.batch, len(self._keys)):
            return False
        store, keys = workload.service.store, self._keys
        started: list[Resident] = []
        began = time.monotonic_ns()
        if self.direction == "write":
            parts = (workload.setup.bs,)
            while keys and len(started) < self.batch:
                resident = store.reserve(keys[0], 0, parts, workload.position, b"")
                if resident is None:
                    break
                keys.popleft()
                workload.position += 1
                started.append(resident)
            store.commit(started)
        else:
            while keys and len(started) < self.batch:
                if keys[0] not in store.index:  # lost on the way here
                    keys.popleft()
                    result.errors += 1
                    continue
                resident = store.promote(keys[0])
                if resident is None:
                    break
                keys.popleft()
                started.append(resident)
        now = time.monotonic_ns()
        if started:
            result.slat_ns.append((now - began) // len(started))
            workload.in_flight.update([(resident.key, (self, resident, now)) for resident in started])
            self.in_flight += len(started)
        return bool(started)


class Workload:
    """A store in a directory of its own under `root`, removed by `close`.

    Args:
        root: an existing directory on the disk to measure.
        setup: what to measure.

    Raises:
        ValueError, OSError, MemoryError: as the store's.
    """

    def __init__(self, root: Path, setup: Setup) -> None:
        self.setup = setup
        self.root = root / f"kvdisk-bench-{time.time_ns():x}"
        self.root.mkdir(mode=0o700)
        self.position = 0
        self.written = 0  # chunks named so far
        self.in_flight: dict[bytes, tuple[Job, Resident, int]] = {}  # key -> whose, what, when asked for in ns
        try:
            if setup.data_plane == "thread":
                self.memory, memfds = random_memory(setup.arena_bytes, setup.pages), []
            else:
                self.memory, memfd = random_shared_memory(setup.arena_bytes, setup.pages)
                memfds = [memfd]
            capacity, segment = setup.capacity()
            options = parse_options(
                {
                    "root_dir": str(self.root),
                    "disk_bytes_to_use": capacity,
                    "cpu_bytes_to_use": setup.arena_bytes,
                    "segment_bytes": segment,
                    "engine": setup.engine,
                    "data_plane": setup.data_plane,
                }
            )
            try:
                self.service = Service(
                    options,
                    Tenancy({"bench": setup.bs}, ("bench",)),
                    [Units(self.memory, 0)],
                    unit_count=setup.arena_bytes // UNIT_BYTES,
                    checksums=setup.checksums,
                    memfds=memfds,
                )
            finally:
                for fd in memfds:
                    os.close(fd)
            if not setup.direct:
                self.service.engine.use_buffered("asked for")
        except BaseException:
            shutil.rmtree(self.root, ignore_errors=True)
            raise

    def close(self) -> None:
        """Close the store and remove its directory."""
        self.service.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def __enter__(self) -> "Workload":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- jobs

    def writers(self, iodepth: int = 0, batch: int = 0) -> list[Job]:
        """Jobs that store one pass of new chunks."""
        count = self.setup.chunk_count // self.setup.numjobs
        jobs = []
        for _ in range(self.setup.numjobs):
            keys = [number.to_bytes(8, "little") for number in range(self.written, self.written + count)]
            self.written += count
            jobs.append(self._job("write", keys, iodepth, batch))
        return jobs

    def readers(self, iodepth: int = 0, batch: int = 0, *, shuffle: Random | None = None) -> list[Job]:
        """Jobs that load the chunks written last, none of which is in memory then; each its own part of them."""
        keys = self.last_keys()
        if shuffle is not None:
            shuffle.shuffle(keys)
        count = self.setup.chunk_count // self.setup.numjobs
        return [self._job("read", keys[at : at + count], iodepth, batch) for at in range(0, len(keys), count)]

    def reader(self, keys: Sequence[bytes], iodepth: int, batch: int, label: str) -> Job:
        """A job that loads some of `last_keys`, with a result of its own under `label`."""
        return self._job("read", keys, iodepth, batch, label)

    def last_keys(self) -> list[bytes]:
        """The chunks written last, a pass of them; none has a slot after this."""
        self.service.store.drop_slots()
        first = max(0, self.written - self.setup.chunk_count)
        return [number.to_bytes(8, "little") for number in range(first, self.written)]

    def _job(self, direction: str, keys: Sequence[bytes], iodepth: int, batch: int, label: str = "") -> Job:
        depth = iodepth or self.setup.iodepth
        return Job(direction, keys, depth, batch or max(1, min(BATCH_BYTES // self.setup.bs, depth // 2)), label)

    # ---- running

    def run(
        self,
        jobs: Sequence[Job],
        *,
        until: float = float("inf"),
        on_sample: Callable[[dict[str, Result]], None] | None = None,
        between: Callable[[], None] | None = None,
    ) -> dict[str, Result]:
        """Run `jobs` side by side to their end; the results by label, which is the direction unless one was given.

        Args:
            until: after this time (of `time.monotonic`) nothing more is asked for.
            on_sample: called about every SAMPLE_S with the results so far.
            between: called between two looks at the store, instead of waiting: a scheduler's own work.

        Raises:
            TimeoutError: nothing moved for STALL_S_MAX.
        """
        results: dict[str, Result] = {}
        for job in jobs:
            result = results.setdefault(job.label, Result(job.direction, self.setup, 0))
            result.iodepth += job.iodepth
        self.service.store.settled = []
        plane_pid = self.plane_pid
        before, start = cpu_of(plane_pid), time.monotonic_ns()
        moved, moved_at, sampled_at = 0, start, start
        running = list(jobs)
        while running:
            now = time.monotonic_ns()
            if now / 1e9 > until:
                for job in running:
                    job.stop()
            issued = [job.issue(self, results[job.label]) for job in running]
            self.service.pump()
            ended = self._collect(results)
            for label in {job.label for job in running if job.finished}:
                results[label].elapsed_ns = time.monotonic_ns() - start
            running = [job for job in running if not job.finished]
            total = sum(result.bytes + result.errors for result in results.values())
            if total > moved:
                moved, moved_at = total, now
            elif now - moved_at > STALL_S_MAX * 1e9:
                raise TimeoutError(f"nothing moved for {STALL_S_MAX:.0f} s; {total} bytes had")
            if now - sampled_at > SAMPLE_S * 1e9:
                sampled_at = now
                for job in running:
                    results[job.label].elapsed_ns = now - start
                for result in results.values():
                    result.samples.append(((now - start) / 1e9, result.bytes))
                if on_sample is not None:
                    on_sample(results)
            if between is not None:
                between()
            elif running and not ended and not any(issued):
                self.service.wait(0.01)
        after = cpu_of(plane_pid)
        self.service.store.settled = None
        for result in results.values():
            result.cpu_s = (after[0] - before[0], after[1] - before[1])
            result.samples.append((result.elapsed_ns / 1e9, result.bytes))
        return results

    def _collect(self, results: dict[str, Result]) -> bool:
        """Take what has ended; whether anything had."""
        store = self.service.store
        settled, store.settled = store.settled or (), []
        now = time.monotonic_ns()
        for key in settled:
            if key not in self.in_flight:
                continue
            job, resident, asked = self.in_flight.pop(key)
            job.in_flight -= 1
            result = results[job.label]
            if resident.forgotten or key not in store.index:
                result.errors += 1
            else:
                result.clat_ns.append(now - asked)
                result.bytes += resident.live_bytes
        return bool(settled)

    @property
    def plane_pid(self) -> int | None:
        """Of the data plane, where that is a process of its own."""
        return self.service.plane.pid if isinstance(self.service.plane, ProcessPlane) else None

    def write_all(self) -> Result:
        """One pass of writes."""
        result = self.run(self.writers())["write"]
        self.service.drain(STALL_S_MAX)
        return result

    def recycle_all(self) -> None:
        """Write until every segment was written once, so that each further write goes over written blocks."""
        while not self.service.store.writer.stats.segments_recycled:
            self.write_all()


def cpu_of(plane_pid: int | None) -> tuple[float, float]:
    """Seconds of this process in user mode and in the kernel; the plane's own process, undivided, counts as user."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    # The kernel's number of a process's CPU clock: MAKE_PROCESS_CPUCLOCK in <linux/posix-timers.h>, as glibc has it.
    plane = 0.0 if plane_pid is None else time.clock_gettime((~plane_pid << 3) | 2)
    return used.ru_utime + plane, used.ru_stime
