"""The io_uring engine: vectored reads and writes, completions by eventfd in the asyncio loop, registered buffers.

Invariants:
- Everything the kernel may touch (spans, vectors) is referenced by its `_Flight` until the completion was reaped; what
  is still in flight at `close` is kept for ever rather than freed under the device.
- At most `iodepth` entries are in the kernel, so neither queue can overflow; the rest waits in `_queue`, in order.
- A completion is matched by a token that is never used twice; an unknown one is counted and ignored.

What can fail: `start` (EngineUnavailableError, the posix engine then serves). An op ends in `done(-errno)`.
Registration is an optimisation: where it fails, now or later, I/O goes on without it and `info.detail` says why.
"""

import asyncio
import errno
import itertools
import logging
import mmap
import os
import resource
import select
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from typing import Final

from kvdisk.errors import EngineUnavailableError
from kvdisk.io.files import SYNC_FILE_RANGE_WRITE_AND_WAIT, FileCalls, join, writeback_failed
from kvdisk.io.protocol import Memory, Op, OpKind, Span, nobody
from kvdisk.io.ring import Ring, piece_index, pieces
from kvdisk.io.spans import addresses

log = logging.getLogger("kvdisk")

_SELF_TEST_S: Final = 5
_DISABLED: Final = "/proc/sys/kernel/io_uring_disabled"
_RETRY_S: Final = 0.001
_FIXED_FAILURES_MAX: Final = 3
_TRANSIENT: Final = (errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ENOMEM)
_WRITE: Final = OpKind.WRITE  # looked up for each op: an Enum's attribute takes a detour
# What kernels with faulty registered buffers answer for a request that is fine without them (axboe/liburing#994).
_FIXED_SUSPECT: Final = (-errno.EFAULT, -errno.EIO, -errno.EINVAL, -errno.EOPNOTSUPP)

# Ops in flight at close, never given back by the kernel: their memory must not be freed as long as the process lives.
_abandoned: list["_Flight"] = []


class _Flight:
    """An op on its way: its addresses, and what of it the kernel is doing."""

    __slots__ = ("buffer_index", "flat", "op", "result", "step", "suspect", "vector")

    IO, SYNC, DROP = range(3)  # `step`: buffered I/O is followed out of the page cache by two more requests

    def __init__(self, op: Op, flat: list[int], buffer_index: int) -> None:
        self.op = op
        self.flat = flat
        self.vector = array("Q", flat) if len(flat) > 2 else None
        self.buffer_index = buffer_index  # -1: not in a registered buffer
        self.step = self.IO
        self.result = 0
        self.suspect = False  # failed in a registered buffer, now tried without


class UringEngine(FileCalls):
    """See `kvdisk.io.protocol.Engine`. Works on the thread whose running event loop calls `start`."""

    def __init__(self, iodepth: int = 64, *, register: bool = True) -> None:
        if not 1 <= iodepth <= 4096:
            raise ValueError(f"iodepth must be 1 to 4096, not {iodepth}")
        super().__init__("io_uring")
        self.iodepth = iodepth
        self.after_done: Callable[[], object] = nobody
        self.fixed_failures = 0  # ops that failed in a registered buffer and went through without
        self.strays = 0  # completions of no known op
        self._register = register
        self._queue: deque[_Flight] = deque()
        self._inflight: dict[int, _Flight] = {}
        self._tokens = itertools.count(1)
        self._first_buffer: dict[Memory, int] = {}
        self._ring: Ring | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._corked = False
        self._broken = 0  # errno: the kernel takes no more submissions
        self._scratch: mmap.mmap | None = None

    # --- life

    def start(self, memories: Sequence[Memory]) -> None:
        """Set up the ring, prove it with real I/O, register `memories`. See `Engine.start`."""
        assert self._ring is None, "started twice"
        self._loop = asyncio.get_running_loop()
        try:
            self._ring = Ring(self.iodepth)
            self._scratch = mmap.mmap(-1, 2 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._self_test(buffer_index=-1)
        except OSError as error:
            self.close()
            raise EngineUnavailableError(f"io_uring: {error.strerror}: {_remedy(error.errno)}") from error
        if self._register and memories:
            self._register_memories(memories)
        self._loop.add_reader(self._ring.eventfd, self._on_ready)

    def close(self) -> None:
        """Release the ring; see `Engine.close`. Idempotent."""
        ring, self._ring = self._ring, None
        if ring is None:
            return
        # A forked child shares the parent's epoll: taking the reader off there would deafen the parent.
        if ring.ours and self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(ring.eventfd)
        if self._retry is not None:
            self._retry.cancel()
        _abandoned.extend(self._inflight.values())
        ring.close()

    def _register_memories(self, memories: Sequence[Memory]) -> None:
        """Register all of `memories`, or none and say why in `info.detail`. Buffer 0 is the scratch page."""
        assert self._ring is not None
        assert self._scratch is not None
        runs = [(addressof(c_char.from_buffer(self._scratch)), len(self._scratch))]
        first: dict[Memory, int] = {}
        for memory in memories:
            first[memory] = len(runs)
            runs += pieces(memory.address, memory.size)
        try:
            self._ring.register(runs)
            self._self_test(buffer_index=0)
        except OSError as error:
            self._note(f"buffers not registered: {_why_unregistered(error, sum(size for _, size in runs))}")
            return
        self._first_buffer = first
        self.info = self.info._replace(registered=True)

    def _self_test(self, buffer_index: int) -> None:
        """Write and read back three spans through the ring, waiting outside it.

        Raises:
            OSError: whatever the kernel answers; EIO if it answers with other bytes.
        """
        ring, scratch = self._ring, self._scratch
        assert ring is not None
        assert scratch is not None
        half = mmap.PAGESIZE
        base = addressof(c_char.from_buffer(scratch))
        fd = os.memfd_create("kvdisk-self-test", os.MFD_CLOEXEC)
        try:
            for parts in (((0, half),), ((0, 1000), (1000, 8), (1008, half - 1008))):  # as one run, and as a vector
                scratch[:half] = os.urandom(half)
                for write, shift in ((True, 0), (False, half)):
                    flat = [word for start, length in parts for word in (base + shift + start, length)]
                    vector = array("Q", flat) if len(parts) > 1 else None
                    ring.prepare(0, write, fd, 0, flat, vector, buffer_index)
                    ring.submit()
                    result = _wait_one(ring)
                    if result != half:
                        code = -result if result < 0 else errno.EIO
                        raise OSError(code, os.strerror(code))
                if scratch[:half] != scratch[half:]:
                    raise OSError(errno.EIO, "it read other bytes than it had written")
        finally:
            os.close(fd)

    # --- submission

    def submit(self, ops: Sequence[Op]) -> None:
        """Start `ops`, as many as fit; inside a `done`, after all of the batch of completions."""
        ring = self._ring
        if ring is None:
            raise RuntimeError("engine is not started, or closed")
        ring.check_owner()
        self._queue.extend([self._flight(op) for op in ops])
        if not self._corked:
            self._flush()

    def _flight(self, op: Op) -> _Flight:
        flat = addresses(op)
        index = -1
        if self._first_buffer:
            memory, start, length = op.spans[0]
            first = self._first_buffer.get(memory)
            if first is not None and (piece := piece_index(start, length)) >= 0:
                index = first + piece
                if len(op.spans) > 1 and not _in_piece(op.spans, memory, piece):
                    index = -1
        return _Flight(op, flat, index)

    def _flush(self) -> None:
        """Submit queued flights up to the depth, each by itself: what is submitted together the kernel merges where it
        touches on the disk, and some disks take the larger requests more slowly."""
        ring, queue, inflight = self._ring, self._queue, self._inflight
        if ring is None:
            return
        waiting = 0
        try:
            if not self._broken:
                waiting = ring.submit()  # what was not taken last time
            while queue and not waiting and len(inflight) < self.iodepth and not self._broken:
                token = next(self._tokens)
                if not self._prepare(ring, token, queue[0]):
                    waiting = 1
                    break
                inflight[token] = queue.popleft()
                waiting = ring.submit()
        except OSError as error:
            if error.errno not in _TRANSIENT:
                self._give_up(error)
            waiting = 1
        if self._broken:
            self._fail_queue()
        elif waiting:
            self._retry_soon()

    def _retry_soon(self) -> None:
        """The kernel is out of something for the moment: look again, whether or not a completion comes first."""
        if self._retry is None:
            assert self._loop is not None
            self._retry = self._loop.call_later(_RETRY_S, self._on_retry)

    def _on_retry(self) -> None:
        self._retry = None
        self._on_ready()
        self._flush()

    def _prepare(self, ring: Ring, token: int, flight: _Flight) -> bool:
        op = flight.op
        if flight.step == flight.SYNC:
            return ring.prepare_sync_range(token, op.fd, op.offset, flight.result, SYNC_FILE_RANGE_WRITE_AND_WAIT)
        if flight.step == flight.DROP:
            return ring.prepare_drop(token, op.fd, op.offset, flight.result)
        index = flight.buffer_index if self.info.registered else -1
        return ring.prepare(token, op.kind is _WRITE, op.fd, op.offset, flight.flat, flight.vector, index)

    def _give_up(self, error: OSError) -> None:
        """The kernel takes no more submissions. What it has will still complete; what it never saw ends here."""
        assert self._ring is not None
        self._broken = error.errno or errno.EIO
        log.error("io_uring takes no more requests (%s): reads will miss and nothing more is stored", error.strerror)
        # It takes entries in order, so those it did not take are the youngest.
        unseen = sorted(self._inflight)[len(self._inflight) - self._ring.unsubmitted() :]
        self._queue.extendleft(self._inflight.pop(token) for token in reversed(unseen))

    def _fail_queue(self) -> None:
        assert self._loop is not None
        failed, self._queue = self._queue, deque()
        for flight in failed:
            self._loop.call_soon(self._done, flight.op, -self._broken)
        if failed:
            self._loop.call_soon(self.after_done)

    # --- completion

    def _on_ready(self) -> None:
        """Reap, tell the owners, and submit what they and the queue have next."""
        ring = self._ring
        if ring is None:
            return
        try:
            completions = ring.reap()
        except OSError as error:
            if error.errno not in _TRANSIENT:
                self._give_up(error)
            self._retry_soon()
            return
        self._corked = True
        try:
            while completions and self._ring is ring:  # a `done` may close the engine
                self._complete(*completions.popleft())
            self.after_done()
        finally:
            self._corked = False
        if self._queue:
            self._flush()

    def _complete(self, token: int, result: int) -> None:
        flight = self._inflight.pop(token, None)
        if flight is None:
            self.strays += 1
            return
        if flight.step != flight.IO:
            self._left_cache(flight, result)
            return
        if flight.buffer_index >= 0 and result in _FIXED_SUSPECT and self.info.registered:
            flight.buffer_index, flight.suspect = -1, True
            self._queue.appendleft(flight)
            return
        if flight.suspect and result > 0:
            self._count_fixed_failure()
        if result > 0 and self.buffered:
            flight.result = result
            flight.step = flight.SYNC if flight.op.kind is _WRITE else flight.DROP
            self._queue.appendleft(flight)
            return
        self._done(flight.op, result)

    def _left_cache(self, flight: _Flight, result: int) -> None:
        """One step of taking a buffered transfer out of the page cache is over; see `files.drop_cached`."""
        if flight.step == flight.SYNC and not writeback_failed(-result):
            flight.step = flight.DROP
            self._queue.appendleft(flight)
            return
        self._done(flight.op, result if flight.step == flight.SYNC else flight.result)

    def _done(self, op: Op, result: int) -> None:
        try:
            op.done(result)
        except Exception as error:  # a bug of one owner must not lose the completions of the others
            assert self._loop is not None
            self._loop.call_exception_handler({"message": "done() of an op failed", "exception": error})

    def _count_fixed_failure(self) -> None:
        self.fixed_failures += 1
        if self.fixed_failures == _FIXED_FAILURES_MAX:
            self.info = self.info._replace(registered=False)
            self._note(f"registered buffers turned off: {self.fixed_failures} requests failed in them only")
            log.warning("io_uring: %s; this costs some CPU. A newer kernel may mend it", self.info.detail)

    def _note(self, text: str) -> None:
        self.info = self.info._replace(detail=join(self.info.detail, text))


def _in_piece(spans: Sequence[Span], memory: Memory, piece: int) -> bool:
    """Whether all of `spans` lie in one piece of `memory`."""
    return all(other is memory and piece_index(start, length) == piece for other, start, length in spans)


def _wait_one(ring: Ring) -> int:
    """The result of the only request in flight. Waits on the eventfd, where other threads can run."""
    poll = select.poll()
    poll.register(ring.eventfd, select.POLLIN)
    for _ in range(_SELF_TEST_S * 10):
        poll.poll(100)
        if completions := ring.reap():
            return completions.popleft()[1]
    raise OSError(errno.ETIMEDOUT, f"no completion within {_SELF_TEST_S} s")


def _why_unregistered(error: OSError, need: int) -> str:
    if error.errno in (errno.ENOMEM, errno.EPERM):
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        return (
            f"they need {need} bytes of locked memory and the limit is {shown}: raise it with 'ulimit -l unlimited', "
            "LimitMEMLOCK=infinity (systemd) or --ulimit memlock=-1 (Docker)"
        )
    return error.strerror or str(error)


def _remedy(code: int | None) -> str:
    """What to do about an io_uring that cannot be set up."""
    if code == errno.EPERM:
        try:
            with open(_DISABLED) as file:
                disabled = file.read().strip()
        except OSError:
            disabled = "0"
        if disabled not in ("", "0"):
            return f"the sysctl kernel.io_uring_disabled is {disabled}: sysctl kernel.io_uring_disabled=0"
        return (
            "a seccomp profile (Docker's and Kubernetes' default) forbids it: allow io_uring_setup, io_uring_enter and "
            "io_uring_register in it"
        )
    if code == errno.ENOSYS:
        return "this kernel has no io_uring (Linux 5.6 or newer has, unless built or sandboxed without)"
    if code == errno.ENOMEM:
        return "not enough locked memory for its queues: ulimit -l unlimited"
    return "it does not work on this system"
