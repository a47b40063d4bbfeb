"""One io_uring, spoken to as <linux/io_uring.h> lays it out: system calls and shared memory.

Why not through a binding: the one on PyPI is built for processors with AVX-512, on others its first call kills the
process, and it has wheels for x86-64 only (docs/architecture.md). What is here is the kernel's interface to programs,
which never changes.

Invariants:
- Created, used and closed in one thread of one process. A forked child never touches it: the rings are shared memory.
- Never waits. Completions announce themselves on `eventfd`; system calls keep the GIL, for none of them blocks, and
  beside a thread that is busy in Python getting it back takes a switch interval.
- Both rings' indices are written by this thread alone, or by the kernel within a system call of this thread
  (DEFER_TASKRUN), so no memory barriers are needed. Older kernels complete from other processors, too: there x86-64's
  order of loads and stores serves, and other processors are refused.
- Closed exactly once; whoever uses it afterwards gets an exception, for the views of its memory are released.
"""

import ctypes
import errno
import mmap
import os
import platform
import struct
import threading
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Final

from kvdisk.io.spans import SPANS_MAX

# The same numbers on every architecture, <asm-generic/unistd.h>.
_SETUP, _ENTER, _REGISTER = 425, 426, 427

# <linux/io_uring.h>. tests/test_ring.py holds them against liburing's.
OP_READV: Final = 1
OP_WRITEV: Final = 2
OP_READ_FIXED: Final = 4
OP_WRITE_FIXED: Final = 5
OP_SYNC_FILE_RANGE: Final = 8
OP_READ: Final = 22
OP_WRITE: Final = 23
OP_FADVISE: Final = 24
OP_READV_FIXED: Final = 60
OP_WRITEV_FIXED: Final = 61
SETUP_SUBMIT_ALL: Final = 1 << 7
SETUP_COOP_TASKRUN: Final = 1 << 8
SETUP_SINGLE_ISSUER: Final = 1 << 12
SETUP_DEFER_TASKRUN: Final = 1 << 13
FEAT_SINGLE_MMAP: Final = 1 << 0
FEAT_NODROP: Final = 1 << 1
FEAT_SUBMIT_STABLE: Final = 1 << 2  # vectors are copied when an op is submitted
ENTER_GETEVENTS: Final = 1 << 0
REGISTER_BUFFERS: Final = 0
REGISTER_EVENTFD: Final = 4
REGISTER_PROBE: Final = 8
OFF_SQES: Final = 0x10000000
_OP_SUPPORTED: Final = 1 << 0
_NEEDED: Final = FEAT_SINGLE_MMAP | FEAT_NODROP | FEAT_SUBMIT_STABLE

_PARAMS: Final = struct.Struct("10I 8IQ 8IQ")  # struct io_uring_params: itself, offsets of submissions, of completions
_fill: Final = struct.Struct("BBHiQQIIQHHiQQ").pack_into  # struct io_uring_sqe
_entry: Final = struct.Struct("QiI").unpack_from  # struct io_uring_cqe: user_data, res, flags
_SQE_BYTES: Final = 64
_CQE_BYTES: Final = 16
_PROBE_OPS: Final = 256
_PIECE_BYTES: Final = 1 << 30  # the kernel registers at most 1 GiB an entry
_MASK: Final = 0xFFFFFFFF

_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the GIL
_LONG, _UINT, _POINTER = ctypes.c_long, ctypes.c_uint, ctypes.c_void_p
_syscall = _libc["syscall"]
_syscall.restype = _LONG
_enter_call = _libc["syscall"]  # another object: it converts its arguments in a fifth of the time
_enter_call.restype = _LONG
_enter_call.argtypes = [_LONG, _UINT, _UINT, _UINT, _UINT, _POINTER, ctypes.c_size_t]


def _call(number: int, *arguments: object) -> int:
    """A system call.

    Raises:
        OSError: its errno.
    """
    result = int(_syscall(_LONG(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


class Ring:
    """A submission and a completion queue for `iodepth` ops.

    Raises:
        OSError: the kernel refuses io_uring.
    """

    def __init__(self, iodepth: int) -> None:
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._rings = ctypes.byref(ctypes.c_uint64())
        self._completions: deque[tuple[int, int]] = deque()
        self._is_open = False
        self.eventfd = -1
        self._fd, params = self._set_up(iodepth)
        try:
            self._map(params)
            self.eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._register(REGISTER_EVENTFD, ctypes.byref(ctypes.c_int(self.eventfd)), 1)
            self.has_fixed_vectors = self._supports(OP_READV_FIXED) and self._supports(OP_WRITEV_FIXED)
        except BaseException:
            self.close()
            raise

    def _set_up(self, iodepth: int) -> tuple[int, tuple[int, ...]]:
        """The descriptor of a new ring, and its `_PARAMS`."""
        # DEFER_TASKRUN: completions wait until we ask, instead of interrupting Python for each. Kernel 6.1, 5.19, any.
        deferred = SETUP_SINGLE_ISSUER | SETUP_DEFER_TASKRUN | SETUP_SUBMIT_ALL
        choices = [deferred]
        if platform.machine() == "x86_64":
            choices += [SETUP_COOP_TASKRUN | SETUP_SUBMIT_ALL, 0]
        for flags in choices:
            buffer = bytearray(_PARAMS.pack(0, 0, flags, *[0] * 25))
            try:
                fd = _call(_SETUP, _UINT(iodepth), (ctypes.c_char * len(buffer)).from_buffer(buffer))
            except OSError as error:
                if error.errno != errno.EINVAL or flags == choices[-1]:
                    raise
                continue
            params = _PARAMS.unpack(buffer)
            if params[5] & _NEEDED != _NEEDED:
                os.close(fd)
                raise OSError(errno.ENOSYS, "the kernel's io_uring is older than Linux 5.5")
            self._is_open = True
            return fd, params
        raise AssertionError("unreachable")

    def _map(self, params: tuple[int, ...]) -> None:
        """Map the rings and the entries; note where in the rings' words the indices are."""
        sq_entries, cq_entries = params[0], params[1]
        sq_head, sq_tail, _, _, _, _, sq_array, _, _ = params[10:19]
        cq_head, cq_tail, _, _, _, cqes, _, _, _ = params[19:28]
        self._sq_entries, self._sq_mask, self._cq_mask = sq_entries, sq_entries - 1, cq_entries - 1
        self._sq_head, self._sq_tail = sq_head // 4, sq_tail // 4
        self._cq_head, self._cq_tail = cq_head // 4, cq_tail // 4
        self._cqes = cqes
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        size = max(sq_array + 4 * sq_entries, cqes + _CQE_BYTES * cq_entries)
        self._area = mmap.mmap(self._fd, (size + 3) // 4 * 4, flags=flags)
        self._sqes = mmap.mmap(self._fd, _SQE_BYTES * sq_entries, flags=flags, offset=OFF_SQES)
        self._words = memoryview(self._area).cast("I")
        for index in range(sq_entries):
            self._words[sq_array // 4 + index] = index

    @property
    def ours(self) -> bool:
        """Whether this process made it, rather than having been forked from the one that did."""
        return os.getpid() == self._pid

    def check_owner(self) -> None:
        """Refuse a forked child and other threads, before they touch shared memory."""
        if not self._is_open:
            raise RuntimeError("this io_uring is closed")
        if not self.ours:
            raise RuntimeError("an io_uring does not survive fork: open kvdisk in the process that uses it")
        if threading.get_ident() != self._thread:
            raise RuntimeError("an io_uring belongs to the thread that started it (the event loop's)")

    # --- submission

    def prepare(
        self,
        token: int,
        write: bool,
        fd: int,
        offset: int,
        flat: Sequence[int],
        vector: "array[int] | None",
        buffer: int,
    ) -> bool:
        """Queue a read or write.

        Args:
            token: comes back with the completion.
            flat: address, length, address, length, ... of the memory.
            vector: the same, where that is more than one run; unchanged until the completion.
            buffer: the registered one that all of it lies in; negative: in none.

        Returns:
            False, and nothing queued, if the queue is full.
        """
        if vector is None:
            address, length = flat
            if buffer < 0:
                return self._push(OP_WRITE if write else OP_READ, fd, offset, address, length, token)
            return self._push(OP_WRITE_FIXED if write else OP_READ_FIXED, fd, offset, address, length, token, 0, buffer)
        address, words = vector.buffer_info()
        if buffer < 0 or not self.has_fixed_vectors:
            return self._push(OP_WRITEV if write else OP_READV, fd, offset, address, words >> 1, token)
        return self._push(
            OP_WRITEV_FIXED if write else OP_READV_FIXED, fd, offset, address, words >> 1, token, 0, buffer
        )

    def prepare_sync_range(self, token: int, fd: int, offset: int, length: int, flags: int) -> bool:
        """Queue a sync_file_range(2)."""
        return self._push(OP_SYNC_FILE_RANGE, fd, offset, 0, length, token, flags)

    def prepare_drop(self, token: int, fd: int, offset: int, length: int) -> bool:
        """Queue a posix_fadvise(2) that lets the pages of a range go."""
        return self._push(OP_FADVISE, fd, offset, 0, length, token, os.POSIX_FADV_DONTNEED)

    def _push(
        self, code: int, fd: int, offset: int, address: int, length: int, token: int, flags: int = 0, buffer: int = 0
    ) -> bool:
        if self.unsubmitted() >= self._sq_entries:
            return False
        tail = self._words[self._sq_tail]
        at = (tail & self._sq_mask) * _SQE_BYTES
        _fill(self._sqes, at, code, 0, 0, fd, offset, address, length, flags, token, buffer, 0, 0, 0, 0)
        self._words[self._sq_tail] = (tail + 1) & _MASK
        return True

    def submit(self) -> int:
        """Hand what was prepared to the kernel; how many it has not taken yet (submit again later).

        Raises:
            OSError: the kernel takes nothing; EAGAIN, EBUSY, EINTR and ENOMEM pass, others do not.
        """
        waiting = self.unsubmitted()
        while waiting and self._enter(waiting, 0):
            waiting = self.unsubmitted()
        return waiting

    def unsubmitted(self) -> int:
        """How many prepared requests the kernel has not taken."""
        words = self._words
        return (words[self._sq_tail] - words[self._sq_head]) & _MASK

    def _enter(self, submit: int, flags: int) -> int:
        result = int(_enter_call(_ENTER, self._fd, submit, 0, flags, None, 0))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result

    # --- completion

    def reap(self) -> deque[tuple[int, int]]:
        """(token, result) of every completion so far; the caller pops them. Results are byte counts or -errno.

        Raises:
            OSError: as for `submit`.
        """
        # Before looking: what completes from here on rings again. That nothing rang (EAGAIN) is fine.
        _libc.eventfd_read(self.eventfd, self._rings)
        self._enter(0, ENTER_GETEVENTS)
        # A signal handler may raise anywhere here: what was collected stays in the deque for the next call, and an
        # entry that was not counted yet comes again (its token is unknown by then).
        words, area, completions = self._words, self._area, self._completions
        head, tail = words[self._cq_head], words[self._cq_tail]
        while head != tail:
            token, result, _ = _entry(area, self._cqes + (head & self._cq_mask) * _CQE_BYTES)
            completions.append((token, result))
            head = (head + 1) & _MASK
            words[self._cq_head] = head
        return completions

    # --- registration

    def register(self, runs: Sequence[tuple[int, int]]) -> None:
        """Register (address, length) runs of memory, 1 GiB each at most, as buffers 0, 1, ...

        Raises:
            OSError: ENOMEM or EPERM beyond RLIMIT_MEMLOCK, E2BIG or EINVAL for too many; nothing is registered.
        """
        if len(runs) > SPANS_MAX:
            raise OSError(errno.E2BIG, f"{len(runs)} buffers, at most {SPANS_MAX}")
        vector = array("Q", [word for run in runs for word in run])
        self._register(REGISTER_BUFFERS, _POINTER(vector.buffer_info()[0]), len(runs))

    def _supports(self, code: int) -> bool:
        """Whether the kernel knows an operation; False where it cannot be asked."""
        probe = bytearray(16 + 8 * _PROBE_OPS)  # struct io_uring_probe
        try:
            self._register(REGISTER_PROBE, (ctypes.c_char * len(probe)).from_buffer(probe), _PROBE_OPS)
        except OSError:
            return False
        (flags,) = struct.unpack_from("H", probe, 16 + 8 * code + 2)
        return bool(flags & _OP_SUPPORTED)

    def _register(self, code: int, pointer: object, count: int) -> None:
        _call(_REGISTER, _UINT(self._fd), _UINT(code), pointer, _UINT(count))

    def close(self) -> None:
        """Release the ring. In a forked child it only forgets it. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        if not self.ours:
            return
        for name in ("_words", "_area", "_sqes"):
            part = getattr(self, name, None)
            if part is not None:
                part.release() if isinstance(part, memoryview) else part.close()
        os.close(self._fd)
        if self.eventfd >= 0:
            os.close(self.eventfd)

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            self.close()


def pieces(address: int, size: int) -> list[tuple[int, int]]:
    """Cut a run of memory into pieces that can be registered."""
    return [(address + start, min(_PIECE_BYTES, size - start)) for start in range(0, size, _PIECE_BYTES)]


def piece_index(start: int, length: int) -> int:
    """Which piece of its memory a span lies in; -1 if in more than one."""
    index = start // _PIECE_BYTES
    return index if (start + length - 1) // _PIECE_BYTES == index else -1
