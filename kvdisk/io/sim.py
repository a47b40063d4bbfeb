"""The simulated engine: the real protocol in memory, with faults as data and a seed for the rest.

Deterministic: the same seed, faults and calls give the same results in the same order. Time is counted in turns of the
engine, never in seconds. Memory is read and written when an op *completes*, as late as a device may: a slot that is
reused too early shows. The disk, and its crashes, are in `simdisk`.
"""

import asyncio
import errno
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvdisk.io.protocol import EngineInfo, Memory, Op, OpKind, nobody
from kvdisk.io.simdisk import PAGE_BYTES, SECTOR_BYTES, SimDisk, SimFile, SimulatedCrashError, Write, some_sectors
from kvdisk.io.spans import addresses

__all__ = ["Fault", "SimDisk", "SimEngine", "SimulatedCrashError"]


@dataclass(frozen=True)
class Fault:
    """What happens to the `nth` (from 0) call or op called `what`: "read", "write", or the name of a file call.

    Exactly one of the others says how; for a file call only `errno` does.

    Attributes:
        errno: it fails with this, nothing having moved.
        short_by: it moves this many bytes less.
        delay_turns: it completes this many turns of the engine late, so later ones overtake it.
        never: it does not complete until `SimEngine.release()`.
        torn: it fails with EIO, having moved a random part of its sectors.
        count: it happens to this many in a row.
    """

    what: str
    nth: int = 0
    errno: int = 0
    short_by: int = 0
    delay_turns: int = 0
    never: bool = False
    torn: bool = False
    count: int = 1


class _Flight:
    """An op under way, and how it will end."""

    __slots__ = ("fault", "op", "turns")

    def __init__(self, op: Op, fault: Fault | None, turns: int) -> None:
        self.op = op
        self.fault = fault
        self.turns = turns


class SimEngine:
    """See `kvdisk.io.protocol.Engine`; file calls do not block.

    Args:
        disk: shared by the engines of one simulated machine, one after the other.
        faults: what goes wrong; `hit` says which did.
        reorder: ops complete in an order drawn from the seed instead of that of submission.
        alignment: direct ops that are not aligned to it fail with EINVAL, as on a real disk.
    """

    def __init__(
        self,
        disk: SimDisk,
        *,
        faults: Sequence[Fault] = (),
        iodepth: int = 64,
        reorder: bool = False,
        alignment: int = 512,
    ) -> None:
        self.info = EngineInfo("sim", direct=True, registered=False, detail="")
        self.disk = disk
        self.iodepth = iodepth
        self.after_done: Callable[[], object] = nobody
        self.faults = tuple(faults)
        self.hit: list[Fault] = []
        self._alignment = alignment
        self._reorder = reorder
        self._chance = random.Random(disk.seed)
        self._calls: Counter[str] = Counter()
        self._queue: deque[Op] = deque()
        self._flights: list[_Flight] = []
        self._ripe: deque[_Flight] = deque()  # those that complete in this turn
        self._held: list[_Flight] = []  # of `never` faults
        self._fds: dict[int, SimFile] = {}
        self._next_fd = 1000
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turning = False

    def start(self, memories: Sequence[Memory]) -> None:
        """See `Engine.start`."""
        assert self._loop is None, "started twice"
        self._loop = asyncio.get_running_loop()
        self.disk.engines.append(self.writes_in_flight)

    def submit(self, ops: Sequence[Op]) -> None:
        """Start `ops`; see `Engine.submit`."""
        if self._loop is None:
            raise RuntimeError("engine is not started, or closed")
        for op in ops:
            addresses(op)
        self._queue.extend(ops)
        self._turn_soon()

    def release(self) -> None:
        """Let the ops of `never` faults complete."""
        for flight in self._held:
            flight.fault, flight.turns = None, 0
        self._flights += self._held
        self._held.clear()
        self._turn_soon()

    @property
    def held(self) -> int:
        """How many ops will not complete until `release`."""
        return len(self._held)

    def writes_in_flight(self) -> list[Write]:
        """What was on its way to the disk: (file, offset, content)."""
        writes = [flight.op for flight in (*self._ripe, *self._flights, *self._held) if flight.op.kind is OpKind.WRITE]
        return [(self._fds[op.fd], op.offset, _gather(op)) for op in writes if op.fd in self._fds]

    def close(self) -> None:
        """See `Engine.close`."""
        self._loop = None

    # --- files

    def create_file(self, path: str, size: int) -> int:
        """See `Engine.create_file`."""
        self._file_call("create_file", path)
        return self._open(self.disk.create(path, size))

    def open_file(self, path: str) -> int:
        """See `Engine.open_file`."""
        self._file_call("open_file", path)
        if path not in self.disk.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return self._open(self.disk.files[path])

    def close_file(self, fd: int) -> None:
        """See `Engine.close_file`."""
        self._file_call("close_file", str(fd))
        self._file(fd)
        del self._fds[fd]

    def remove_file(self, path: str) -> None:
        """See `Engine.remove_file`."""
        self._file_call("remove_file", path)
        self.disk.remove(path)

    def sync_file(self, fd: int) -> None:
        """See `Engine.sync_file`."""
        self._file_call("sync_file", str(fd))
        self.disk.sync(self._file(fd))

    def file_bytes(self, fd: int) -> tuple[int, int]:
        """See `Engine.file_bytes`."""
        self._file_call("file_bytes", str(fd))
        file = self._file(fd)
        return len(file.data), len(file.pages) * PAGE_BYTES

    def use_buffered(self, reason: str) -> bool:
        """See `Engine.use_buffered`."""
        if not self.info.direct:
            return False
        self.info = self.info._replace(direct=False, detail=f"buffered I/O: {reason}")
        return True

    def _file_call(self, name: str, what: str) -> None:
        if self.disk.crashed:
            raise SimulatedCrashError(f"{name} after the crash, seed {self.disk.seed}")
        fault = self._fault(name)
        if fault is not None:
            raise OSError(fault.errno, f"simulated {errno.errorcode.get(fault.errno)} of {name}", what)

    def _open(self, file: SimFile) -> int:
        fd, self._next_fd = self._next_fd, self._next_fd + 1  # never used twice: a stale descriptor is EBADF
        self._fds[fd] = file
        return fd

    def _file(self, fd: int) -> SimFile:
        if fd not in self._fds:
            raise OSError(errno.EBADF, f"descriptor {fd} is not open")
        return self._fds[fd]

    def _fault(self, what: str) -> Fault | None:
        """The fault for this call or op, which is counted."""
        nth = self._calls[what]
        self._calls[what] += 1
        for fault in self.faults:
            if fault.what == what and fault.nth <= nth < fault.nth + fault.count:
                self.hit.append(fault)
                return fault
        return None

    # --- turns: one starts what fits and completes what is ripe

    def _turn_soon(self) -> None:
        if not self._turning and self._loop is not None and (self._queue or self._flights):
            self._turning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turning = False
        while self._queue and len(self._flights) + len(self._held) < self.iodepth:
            self._start(self._queue.popleft())
        ripe = [flight for flight in self._flights if flight.turns <= 0]
        self._flights = [flight for flight in self._flights if flight.turns > 0]
        for flight in self._flights:
            flight.turns -= 1
        if self._reorder:
            self._chance.shuffle(ripe)
        self._ripe.extend(ripe)
        while self._ripe:
            result = self._perform(self._ripe[0])  # still in the deque: it is on its way if the process dies at it
            op = self._ripe.popleft().op
            try:
                op.done(result)
            except Exception as error:  # a bug of one owner must not lose the completions of the others
                asyncio.get_running_loop().call_exception_handler({"message": "done() failed", "exception": error})
        self.after_done()
        self._turn_soon()

    def _start(self, op: Op) -> None:
        fault = self._fault(op.kind.value)
        turns = fault.delay_turns if fault else 0
        if self._reorder:
            turns += self._chance.randrange(4)
        flight = _Flight(op, fault, turns)
        (self._held if fault and fault.never else self._flights).append(flight)

    def _perform(self, flight: _Flight) -> int:
        """Do it now; bytes or a negative errno."""
        op, fault = flight.op, flight.fault
        if self.disk.crashed:
            return -errno.EIO
        file = self._fds.get(op.fd)
        if file is None:
            return -errno.EBADF
        flat = addresses(op)
        if self.info.direct and any(word % self._alignment for word in (op.offset, *flat)):
            return -errno.EINVAL
        if fault and fault.errno:
            return -fault.errno
        total = max(0, sum(flat[1::2]) - (fault.short_by if fault else 0))
        torn = bool(fault and fault.torn)
        try:
            return self._write(op, file, total, torn) if op.kind is OpKind.WRITE else self._read(op, file, total, torn)
        except SimulatedCrashError:
            return -errno.EIO
        except OSError as error:
            return -(error.errno or errno.EIO)

    def _read(self, op: Op, file: SimFile, total: int, torn: bool) -> int:
        content = bytes(file.data[op.offset : op.offset + total])
        if torn:
            mixed = bytearray(_gather(op))
            for start in some_sectors(self._chance, len(content)):
                sector = content[start : start + SECTOR_BYTES]
                mixed[start : start + len(sector)] = sector
            _scatter(op, mixed)
            return -errno.EIO
        _scatter(op, content)
        return len(content)

    def _write(self, op: Op, file: SimFile, total: int, torn: bool) -> int:
        self.disk.event()
        content = _gather(op)[:total]
        self.disk.allocate(file, op.offset, op.offset + total)
        if torn:
            for start in some_sectors(self._chance, total):
                file.write(op.offset + start, content[start : start + SECTOR_BYTES])
            return -errno.EIO
        file.write(op.offset, content)
        return total


def _gather(op: Op) -> bytes:
    return b"".join(memory.view[start : start + length] for memory, start, length in op.spans)


def _scatter(op: Op, content: bytes | bytearray) -> None:
    """Put `content` into the spans of `op`, as far as it goes."""
    position = 0
    for memory, start, length in op.spans:
        part = content[position : position + length]
        memory.view[start : start + len(part)] = part
        position += length
