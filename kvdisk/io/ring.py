"""One io_uring of the PyPI package `liburing`, behind the few calls an engine needs.

Invariants:
- Created, used and closed in one thread of one process. A forked child never touches it: the rings are shared memory.
- Never waits. The binding keeps the GIL in every waiting call; completions announce themselves on `eventfd`.
- Closed exactly once, never used afterwards: the binding would follow a stale pointer.

Rewriting vectors
-----------------
`readv` and `writev` take their addresses from an `Iovec`, and an `Iovec` can only be built from a list of buffers: each
one built from memoryviews keeps ~190 bytes for ever (a buffer export that is never released), and building one costs
more than the rest of the op. A server does thousands of ops a second for months, with ever new combinations of spans.
So `Vector` builds an `Iovec` once and rewrites it for each op:

    id(iovec) + 0    PyObject head: reference count, type
    id(iovec) + 16   size_t        number of entries   <- rewritten: what the op uses, 1 to capacity
    id(iovec) + 24   struct iovec* its C array, malloc'd at construction, freed with the object
    id(iovec) + 32   (the binding's own)

The array holds (address, length) pairs and is rewritten in place. This is somebody else's private layout, so
`_verify_layout` proves all of it on a live object before anything is written, looks the pointer up in the process's map
before following it, and refuses to run where anything differs; the posix engine then serves. That the number written is
the number used shows in `len(iovec)`, which is public. What keeps this safe in use: the kernel has copied the array
when the submission returns (IORING_FEAT_SUBMIT_STABLE), and a vector is not rewritten before its op has completed
anyway.
"""

import ctypes
import errno
import importlib
import os
import struct
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvdisk.errors import EngineUnavailableError
from kvdisk.io.spans import SPANS_MAX

_VERSION_MIN: Final = (2026, 3, 30)  # older releases raise on negative results and keep no references to paths
_SMALL_VECTOR: Final = 16
_HEAD_BYTES: Final = 16
_IOVEC_BYTES: Final = 40
_ENTRY_BYTES: Final = 16  # struct iovec: pointer and size_t
_one_entry = struct.Struct("2Q").pack_into
_PIECE_BYTES: Final = 1 << 30  # the kernel registers at most 1 GiB an entry

# os.eventfd_read gives up the GIL for a call that never blocks. Beside a thread that is busy in Python, getting it back
# takes a switch interval, 5 ms by default, for every batch of completions.
_keeps_gil = ctypes.PyDLL(None)


def load_binding() -> Any:
    """The `liburing` module, checked.

    Raises:
        EngineUnavailableError: not installed, too old, or laid out differently; the text says what to do.
    """
    try:
        lib: Any = importlib.import_module("liburing")
    except Exception as error:  # its import reads /proc and loads a shared object: anything can go wrong there
        raise EngineUnavailableError(
            f"the package 'liburing' cannot be imported ({error}): pip install 'kvdisk[uring]' (x86-64 wheels only)"
        ) from error
    version = getattr(lib, "__version__", "0")
    try:
        recent = tuple(int(part) for part in version.split(".")[:3]) >= _VERSION_MIN
    except ValueError:
        recent = False
    if not recent:
        wanted = ".".join(map(str, _VERSION_MIN))
        raise EngineUnavailableError(f"liburing {version} is too old: pip install 'liburing>={wanted}'")
    _verify_layout(lib)
    return lib


def _verify_layout(lib: Any) -> None:
    """Prove the layout that `Vector` relies on; see the module's text."""
    if ctypes.sizeof(ctypes.c_void_p) != 8 or object.__basicsize__ != _HEAD_BYTES:
        raise EngineUnavailableError("io_uring vectors need a 64-bit CPython with a 16-byte object head")
    if lib.Iovec.__basicsize__ != _IOVEC_BYTES or lib.Iovec.__itemsize__ != 0:
        raise _unexpected(lib, f"an Iovec of {lib.Iovec.__basicsize__} bytes instead of {_IOVEC_BYTES}")
    for count in (2, 5):
        buffers = [bytearray(16 + index) for index in range(count)]
        iovec = lib.Iovec(buffers)
        _, kind, length, pointer = struct.unpack("4Q", ctypes.string_at(id(iovec), 32))
        if kind != id(lib.Iovec) or length != count or len(iovec) != count:
            raise _unexpected(lib, f"no entry count of {count} at offset {_HEAD_BYTES} of an Iovec")
        if not _is_writable(pointer, count * _ENTRY_BYTES):
            raise _unexpected(lib, "no pointer to writable memory behind the entry count of an Iovec")
        entries = struct.unpack(f"{2 * count}Q", ctypes.string_at(pointer, count * _ENTRY_BYTES))
        if list(entries) != [word for buffer in buffers for word in (_address(buffer), len(buffer))]:
            raise _unexpected(lib, "other entries in an Iovec than it was built from")


def _unexpected(lib: Any, what: str) -> EngineUnavailableError:
    return EngineUnavailableError(
        f"liburing {lib.__version__} has {what}; kvdisk does not know this release: use engine 'posix', or "
        f"pip install 'liburing=={'.'.join(map(str, _VERSION_MIN))}'"
    )


def _address(buffer: bytearray) -> int:
    return ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))


def _is_writable(address: int, size: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, mode = line.split(" ", 2)[:2]
        low, high = (int(part, 16) for part in place.split("-"))
        if low <= address and address + size <= high:
            return mode.startswith("rw")
    return False


class Vector:
    """A rewritable `Iovec` of up to `capacity` entries; used by one op at a time."""

    __slots__ = ("_count", "_entries", "_words", "capacity", "iovec")

    def __init__(self, lib: Any, capacity: int) -> None:
        self.capacity = capacity
        self.iovec = lib.Iovec([b"\0" * 16] * capacity)  # bytes: a memoryview would be exported for ever
        self._count = ctypes.c_uint64.from_address(id(self.iovec) + _HEAD_BYTES)
        pointer = ctypes.c_uint64.from_address(id(self.iovec) + _HEAD_BYTES + 8).value
        assert self._count.value == capacity
        assert pointer
        self._entries = (ctypes.c_ubyte * (capacity * _ENTRY_BYTES)).from_address(pointer)
        self._words = 2 * capacity

    def fill(self, flat: Sequence[int]) -> None:
        """Point it at `flat`: address, length, address, length, ..."""
        words = len(flat)
        assert 0 < words <= 2 * self.capacity
        if words == 2:
            _one_entry(self._entries, 0, *flat)
        else:
            struct.pack_into(f"{words}Q", self._entries, 0, *flat)
        if words != self._words:
            self._words = words
            self._count.value = words >> 1


class Ring:
    """A submission and a completion queue for `iodepth` ops, and the vectors they use.

    Raises:
        OSError: the kernel refuses io_uring.
    """

    def __init__(self, lib: Any, iodepth: int) -> None:
        self._lib = lib
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._cqe = lib.Cqe()
        self._rings = ctypes.byref(ctypes.c_uint64())
        self._small: list[Vector] = []
        self._large: list[Vector] = []
        self._completions: deque[tuple[int, int]] = deque()
        self._open = False
        self._prepared = 0  # requests that the kernel has not taken
        self.eventfd = -1
        self._ring = self._set_up(iodepth)
        self._open = True
        try:
            self.eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            lib.io_uring_register_eventfd(self._ring, self.eventfd)
        except BaseException:
            self.close()
            raise

    def _set_up(self, iodepth: int) -> Any:
        lib = self._lib
        # DEFER_TASKRUN: completions wait until we ask, instead of interrupting Python for each. Kernel 6.1, 5.19, any.
        deferred = lib.IORING_SETUP_SINGLE_ISSUER | lib.IORING_SETUP_DEFER_TASKRUN | lib.IORING_SETUP_SUBMIT_ALL
        for flags in (deferred, lib.IORING_SETUP_COOP_TASKRUN | lib.IORING_SETUP_SUBMIT_ALL, 0):
            ring = lib.Ring()
            try:
                lib.io_uring_queue_init(iodepth, ring, flags)
            except OSError as error:
                if error.errno != errno.EINVAL or not flags:
                    raise
            else:
                return ring
        raise AssertionError("unreachable")

    @property
    def ours(self) -> bool:
        """Whether this process made it, rather than having been forked from the one that did."""
        return os.getpid() == self._pid

    def check_owner(self) -> None:
        """Refuse a forked child and other threads, before they touch shared memory."""
        if not self._open:
            raise RuntimeError("this io_uring is closed")
        if not self.ours:
            raise RuntimeError("an io_uring does not survive fork: open kvdisk in the process that uses it")
        if threading.get_ident() != self._thread:
            raise RuntimeError("an io_uring belongs to the thread that started it (the event loop's)")

    def vector(self, count: int) -> Vector:
        """A free vector for `count` entries; give it back with `release` when its op has completed."""
        free = self._small if count <= _SMALL_VECTOR else self._large
        return free.pop() if free else Vector(self._lib, _SMALL_VECTOR if count <= _SMALL_VECTOR else SPANS_MAX)

    def release(self, vector: Vector) -> None:
        """Take back a vector."""
        (self._small if vector.capacity == _SMALL_VECTOR else self._large).append(vector)

    def prepare(self, token: int, write: bool, fd: int, offset: int, vector: Vector, buffer_index: int) -> bool:
        """Queue a read or write; `buffer_index` < 0: not in a registered buffer. False: the queue is full."""
        lib = self._lib
        sqe = lib.io_uring_get_sqe(self._ring)
        if sqe is None:
            return False
        if buffer_index < 0:
            (lib.io_uring_prep_writev if write else lib.io_uring_prep_readv)(sqe, fd, vector.iovec, offset)
        elif write:
            lib.io_uring_prep_writev_fixed(sqe, fd, vector.iovec, buffer_index, offset)
        else:
            lib.io_uring_prep_readv_fixed(sqe, fd, vector.iovec, buffer_index, offset)
        sqe.user_data = token
        self._prepared += 1
        return True

    def prepare_sync_range(self, token: int, fd: int, offset: int, length: int, flags: int) -> bool:
        """Queue a sync_file_range(2)."""
        sqe = self._lib.io_uring_get_sqe(self._ring)
        if sqe is None:
            return False
        self._lib.io_uring_prep_sync_file_range(sqe, fd, length, offset, flags)
        sqe.user_data = token
        self._prepared += 1
        return True

    def prepare_drop(self, token: int, fd: int, offset: int, length: int) -> bool:
        """Queue a posix_fadvise(2) that lets the pages of a range go."""
        sqe = self._lib.io_uring_get_sqe(self._ring)
        if sqe is None:
            return False
        self._lib.io_uring_prep_fadvise(sqe, fd, length, os.POSIX_FADV_DONTNEED, offset)
        sqe.user_data = token
        self._prepared += 1
        return True

    def submit(self) -> int:
        """Hand what was prepared to the kernel; how many it has not taken yet (submit again later).

        Raises:
            OSError: the kernel takes nothing; EAGAIN, EBUSY, EINTR and ENOMEM pass, others do not.
        """
        while self._prepared:
            taken = self._lib.io_uring_submit(self._ring)
            self._prepared -= taken
            if not taken:  # a signal handler may have raised between a call and its count
                self._prepared = int(self._lib.io_uring_sq_ready(self._ring))
                break
        return self._prepared

    def unsubmitted(self) -> int:
        """How many prepared requests the kernel has not taken."""
        return self._prepared

    def reap(self) -> deque[tuple[int, int]]:
        """(token, result) of every completion so far; the caller pops them. Results are byte counts or -errno."""
        # Before looking: what completes from here on rings again. That nothing rang (EAGAIN) is fine.
        _keeps_gil.eventfd_read(self.eventfd, self._rings)
        lib = self._lib
        lib.io_uring_get_events(self._ring)
        # A signal handler may raise anywhere here: what was collected stays in the deque for the next call, and an
        # entry that was not counted yet comes again (its token is unknown by then).
        cqe, completions, count = self._cqe, self._completions, 0
        try:
            for _ in lib.CqeIter(self._ring, cqe):
                entry = cqe[0]
                try:
                    result = entry.res
                except OSError as error:  # how the binding reports a negative result
                    result = -(error.errno or errno.EIO)
                completions.append((entry.user_data, result))
                count += 1
        finally:
            if count:
                lib.io_uring_cq_advance(self._ring, count)
        return completions

    def register(self, runs: Sequence[tuple[int, int]]) -> None:
        """Register (address, length) runs of memory, 1 GiB each at most, as buffers 0, 1, ...

        Raises:
            OSError: ENOMEM or EPERM beyond RLIMIT_MEMLOCK, E2BIG or EINVAL for too many; nothing is registered.
        """
        if len(runs) > SPANS_MAX:
            raise OSError(errno.E2BIG, f"{len(runs)} buffers, at most {SPANS_MAX}")
        vector = self.vector(len(runs))
        try:
            vector.fill([word for run in runs for word in run])
            self._lib.io_uring_register_buffers(self._ring, vector.iovec)
        finally:
            self.release(vector)

    def close(self) -> None:
        """Release the ring. In a forked child it only forgets it. Idempotent."""
        if not self._open:
            return
        self._open = False
        if self.ours:
            self._lib.io_uring_queue_exit(self._ring)
            if self.eventfd >= 0:
                os.close(self.eventfd)

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()


def pieces(address: int, size: int) -> list[tuple[int, int]]:
    """Cut a run of memory into pieces that can be registered."""
    return [(address + start, min(_PIECE_BYTES, size - start)) for start in range(0, size, _PIECE_BYTES)]


def piece_index(start: int, length: int) -> int:
    """Which piece of its memory a span lies in; -1 if in more than one."""
    index = start // _PIECE_BYTES
    return index if (start + length - 1) // _PIECE_BYTES == index else -1
