"""Peers as a comparison sees them: a process that takes commands, or fio, behind the same four calls."""

import contextlib
import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from environments import AbsentError
from talk import Talker, TalkError

MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """What is compared. requests: at once. pages: "huge" or "4k". fresh: into new files, else over written ones."""

    bs: int
    total: int
    requests: int = 1
    pages: str = "huge"
    fresh: bool = False

    def __str__(self) -> str:
        size = f"{self.bs // MIB} MiB" if self.bs >= MIB else f"{self.bs >> 10} KiB"
        asked = "1 request" if self.requests == 1 else f"{self.requests} requests"
        return f"{size}, {asked}, {'fresh' if self.fresh else 'recycled'}, {self.pages} pages"


@dataclass(frozen=True)
class Sample:
    """One pass: MB/s and CPU seconds a GiB."""

    mb_per_s: float
    cpu_s_per_gib: float


class Contestant(Protocol):
    """What takes part. Each call raises RuntimeError where the peer fails."""

    name: str

    def prepare(self, case: Case, directory: Path) -> None: ...

    def measure(self, op: str) -> Sample: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


class ProcessContestant:
    """A script of bench/peers/ in its own environment, started once for a whole comparison."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self._case: Case
        self._talker = Talker(name, command, log)
        try:
            self._talker.wait_until_ready()
        except TalkError as error:
            raise AbsentError(str(error)) from None

    def prepare(self, case: Case, directory: Path) -> None:
        """Make files and handles."""
        self._case = case
        self._talker.ask(op="prepare", directory=str(directory), **asdict(case))

    def measure(self, op: str) -> Sample:
        """One pass of "store" or "load"."""
        found = self._talker.ask(op=op)
        total = self._case.total // self._case.bs * self._case.bs
        return Sample(total / found["seconds"] / 1e6, found["cpu"] * 2**30 / total)

    def finish(self) -> None:
        """End of the case."""
        self._talker.ask(op="finish")

    def close(self) -> None:
        """End of the peer."""
        self._talker.close()


class Fio:
    """fio at its best here: engine, fixed buffers, memory and depth are tried for each chunk size and direction.

    Args:
        buffer_bytes: 0, or as much memory as this, all of it in flight. fio needs no more than what is in flight, a
            few megabytes that stay in a processor's caches where the disk is one that copies; whoever keeps what was
            read, needs all of it. So there is a second fio, with as much memory as everybody else.
    """

    def __init__(self, name: str, buffer_bytes: int = 0) -> None:
        self.name = name
        self._buffer_bytes = buffer_bytes
        if shutil.which("fio") is None:
            raise AbsentError("not installed (apt-get install fio)")
        self._best: dict[tuple[int, str, str], tuple[str, ...]] = {}
        self._case: Case
        self._file: Path

    def prepare(self, case: Case, directory: Path) -> None:
        """Lay out the file, and find the best settings for this chunk size, pages and direction."""
        directory.mkdir(parents=True, exist_ok=True)
        self._case, self._file = case, directory / "fio.bin"
        self._run("write", ("--ioengine=libaio", "--iodepth=16"))
        for rw in ("write", "read"):
            if (case.bs, case.pages, rw) not in self._best:
                self._choose(rw)

    def measure(self, op: str) -> Sample:
        """One pass at the best settings."""
        rw = "write" if op == "store" else "read"
        if op == "store" and self._case.fresh:
            self._file.unlink(missing_ok=True)
        key = (self._case.bs, self._case.pages, rw)
        try:
            return self._run(rw, self._best[key])
        except RuntimeError:  # the pool of huge pages is the whole machine's: somebody else may have taken it
            if "--mem=mmaphuge" not in self._best[key]:
                raise
            self._choose(rw)
            return self._run(rw, self._best[key])

    def _choose(self, rw: str) -> None:
        """The fastest of those settings that work."""
        case, tried, why = self._case, {}, ""
        for settings in self._settings(case):
            try:
                tried[settings] = self._run(rw, settings).mb_per_s
            except RuntimeError as error:
                why = str(error)
        if not tried:
            raise RuntimeError(why)
        self._best[case.bs, case.pages, rw] = max(tried, key=lambda settings: tried[settings])

    def finish(self) -> None:
        """Remove the file."""
        self._file.unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing runs between passes."""

    def settings(self) -> dict[str, str]:
        """What was found best, for the report."""
        return {f"{rw} {bs >> 10} KiB, {pages} pages": " ".join(s) for (bs, pages, rw), s in self._best.items()}

    def _settings(self, case: Case) -> Iterator[tuple[str, ...]]:
        depths: tuple[int, ...]
        engines = (("--ioengine=io_uring", "--fixedbufs=0"), ("--ioengine=io_uring", "--fixedbufs=1"),
                   ("--ioengine=libaio",))  # fmt: skip
        memory = ["--mem=malloc"]
        if case.pages == "huge" and _free_huge_bytes():
            memory.append("--mem=mmaphuge")
        depths = (32, 64) if case.bs < MIB else (8, 32)
        if self._buffer_bytes:
            depths = (self._buffer_bytes // case.bs,)
        for engine, mem, depth in itertools.product(engines, memory, depths):
            if mem == "--mem=malloc" or _free_huge_bytes() >= depth * case.bs:
                yield (*engine, mem, f"--iodepth={depth}")

    def _run(self, rw: str, settings: tuple[str, ...]) -> Sample:
        case = self._case
        command = [
            "fio", "--name=fio", f"--filename={self._file}", f"--rw={rw}", f"--bs={case.bs}", f"--size={case.total}",
            "--direct=1", "--fallocate=native", "--scramble_buffers=0", "--randrepeat=0", "--gtod_reduce=1",
            "--output-format=json", *settings,
        ]  # fmt: skip
        if "--mem=malloc" in settings:
            command.append("--iomem_align=4096")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"fio: {done.stderr.strip() or done.stdout.strip()}"[:300])
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        side = job[rw]
        cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        return Sample(side["bw_bytes"] / 1e6, cpu * 2**30 / side["io_bytes"])


def _free_huge_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("HugePages_Free:"):
            return int(line.split()[1]) * 2 * MIB
    return 0


@contextlib.contextmanager
def huge_page_pool(size: int) -> Iterator[str]:
    """A hugetlb pool for fio while this runs, where we may make one (root); says what it is.

    fio cannot ask for transparent huge pages: without a pool it is measured on 4 KiB pages, and the comparison says so.
    """
    control = Path("/proc/sys/vm/nr_hugepages")
    before = control.read_text().strip()
    wanted = max(int(before), size // (2 * MIB))
    try:
        control.write_text(str(wanted))
    except OSError:
        pass
    try:
        free = _free_huge_bytes()
        yield f"{free // MIB} MiB of hugetlb pages for fio" if free else "none: fio has 4 KiB pages only"
    finally:
        with contextlib.suppress(OSError):
            control.write_text(before)
