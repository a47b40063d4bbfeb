"""Host memory for transfers: private or shared, on the largest pages that can be had, touched in before first use.

Page size decides bandwidth and CPU cost more than anything else here: direct I/O pins and maps page by page, so 2 MiB
pages make 1 MiB reads almost twice as fast as 4 KiB pages (docs/architecture.md has the figures).

Invariants:
- The address is aligned to 2 MiB and the mapping stays until the last view of it is gone, then it is unmapped. At
  interpreter exit nothing is unmapped: the kernel, or a hung I/O thread, may still write there.
- Every page is present when a function returns, so no first I/O pays for faults and no later access can fail.
- Memory is not inherited by `fork` (private) and is not part of core dumps: prompts do not belong in them.

Fails with `MemoryError` (the text names the size and the remedy), or `OSError` where the system refuses the call.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from kvdisk.io.protocol import Memory

_HUGE_BYTES: Final = 2 << 20
_PREFAULT_PIECE_BYTES: Final = 256 << 20
_COLLAPSE_PIECE_BYTES: Final = 32 << 20
_PREFAULT_THREADS_MAX: Final = 8

# <linux/mman.h> and <asm-generic/mman-common.h>; Python's mmap module does not have these.
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def private_memory(size: int) -> Memory:
    """Anonymous memory of this process alone, in transparent huge pages where the system allows them.

    Args:
        size: bytes wanted; rounded up to a multiple of 2 MiB.

    Raises:
        ValueError: `size` is not positive.
        MemoryError: the system does not give that much.
    """
    size = _round_up(size)
    _check_available(size)
    memory = _map(size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    # After fork the parent's pages are copied on write. The copy of a page under I/O goes to whoever writes first, and
    # registered (pinned) pages are copied by fork itself: a child that never looks at the arena would double it.
    _advise(memory, mmap.MADV_DONTFORK)
    _advise(memory, mmap.MADV_HUGEPAGE)
    _prefault(memory)
    memory.pages = "huge (THP)" if _huge_bytes(memory) * 2 > size else "4 KiB"
    return memory


def shared_memory(size: int) -> tuple[Memory, int]:
    """Memory that other processes can map: a sealed memfd on the best pages there are, and its descriptor.

    In order of preference: a hugetlb pool with room; transparent huge pages, which the kernel gives by itself where
    `shmem_enabled` allows it and otherwise when it is told to collapse small pages (Linux 6.1); 4 KiB pages. `pages`
    says what most of it got.

    Args:
        size: bytes wanted; rounded up to a multiple of 2 MiB. The memfd has the rounded size and can neither shrink
            nor grow, so a process that maps it cannot be killed by SIGBUS.

    Returns:
        The memory, and the descriptor (close-on-exec, owned by the caller; the memory stays when it is closed).

    Raises:
        ValueError: `size` is not positive.
        MemoryError: the system does not give that much.
    """
    size = _round_up(size)
    try:
        return _shared(size, os.MFD_HUGETLB | os.MFD_HUGE_2MB, "huge (hugetlb)")
    except (MemoryError, OSError):
        pass  # no pool, no room in it, or a cgroup's limit on it: ordinary pages serve
    _check_available(size)
    memory, fd = _shared(size, 0, "shared 4 KiB")
    if _huge_bytes(memory) * 2 > size:
        memory.pages = "shared huge"
    return memory, fd


def map_shared_memory(fd: int, size: int) -> Memory:
    """Map the memfd of another process's `shared_memory`.

    Args:
        fd: its descriptor, received from the other process; may be closed after this returns.
        size: bytes it must have at least; all of it is mapped.

    Raises:
        ValueError: it is smaller than `size`, or its size could still change under us.
        MemoryError, OSError: it could not be mapped.
    """
    if size <= 0:
        raise ValueError(f"size must be positive, not {size}")
    held = os.fstat(fd).st_size
    if held < size or held % _HUGE_BYTES:
        raise ValueError(f"shared memory holds {held} bytes, expected {size} (rounded up to 2 MiB): another layout?")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ValueError(f"descriptor {fd} is not a memfd ({error.strerror}): use that of shared_memory()") from None
    if seals & _SEALS != _SEALS:
        raise ValueError("shared memory is not sealed against resizing: create it with shared_memory()")
    memory = _map(held, mmap.MAP_SHARED, fd)
    _advise(memory, mmap.MADV_HUGEPAGE)
    _prefault(memory, fresh=False)
    memory.pages = _shared_pages(memory)
    return memory


def shmem_huge_pages_allowed() -> bool:
    """Whether a memfd can have transparent huge pages here (sysfs `shmem_enabled`); for reports and remedies."""
    try:
        text = _SHMEM_ENABLED.read_text()
    except OSError:
        return False
    return any(f"[{mode}]" in text for mode in ("always", "within_size", "advise", "force"))


def available_bytes() -> int:
    """Memory that this process can take before the system, or a memory cgroup above it, runs out.

    Sources: MemAvailable of /proc/meminfo; limit less usage of each cgroup, page cache that it could drop not counted.
    """
    return min([_meminfo_available(), *_cgroups_available()])


def _check_available(size: int) -> None:
    """Refuse what is not there. The kernel would promise it, and then kill a process, perhaps another one, for it."""
    available = available_bytes()
    if size > available:
        raise MemoryError(
            f"cannot get {size} bytes ({size / (1 << 30):.2f} GiB) of memory: {available} bytes are available. "
            "Ask for less, or raise the memory limit of the container"
        )


def _meminfo_available() -> int:
    for line in _read_lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return sys.maxsize


def _cgroups_available() -> Iterator[int]:
    """What each memory cgroup of this process, of version 1 or 2, and each above it leave free."""
    for line in _read_lines("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage, cache = "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "
        elif "memory" in controllers.split(","):
            root, limit = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
            usage, cache = "memory.usage_in_bytes", "total_inactive_file "
        else:
            continue
        # Seen from inside a container, the path may be that of the host and not exist here; its root always does.
        place = Path(root + path)
        for directory in (place, *place.parents):
            texts = _read_lines(directory / limit), _read_lines(directory / usage)
            if all(text and text[0].isdigit() for text in texts):
                droppable = [row.split()[1] for row in _read_lines(directory / "memory.stat") if row.startswith(cache)]
                yield int(texts[0][0]) - int(texts[1][0]) + sum(map(int, droppable))
            if str(directory) == root:
                break


def _read_lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _round_up(size: int) -> int:
    if size <= 0:
        raise ValueError(f"size must be positive, not {size}")
    return -(-size // _HUGE_BYTES) * _HUGE_BYTES


def _shared(size: int, memfd_flags: int, pages: str) -> tuple[Memory, int]:
    """One attempt at a memfd of `size` bytes; leaves nothing behind when it fails."""
    fd = os.memfd_create("kvdisk-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | memfd_flags)
    try:
        os.ftruncate(fd, size)
        memory = _map(size, mmap.MAP_SHARED, fd)
        _advise(memory, mmap.MADV_HUGEPAGE)
        if not memfd_flags:
            _collapse(memory)
        _prefault(memory, must_populate=memfd_flags != 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    memory.pages = pages
    return memory, fd


def _map(size: int, flags: int, fd: int) -> Memory:
    """Map `size` bytes at an address aligned to 2 MiB.

    The kernel chooses addresses by 4 KiB, and only memory aligned to 2 MiB in both address and file offset gets huge
    pages. So address space is reserved with room to spare, mapped over in its aligned part, and trimmed.
    """
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    room = _mmap(None, size + _HUGE_BYTES, _PROT_NONE, anonymous, -1)
    address = -(-room // _HUGE_BYTES) * _HUGE_BYTES
    try:
        _mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, fd)
    except BaseException:
        _libc.munmap(room, size + _HUGE_BYTES)
        raise
    if address > room:
        _libc.munmap(room, address - room)
    if room + _HUGE_BYTES > address:
        _libc.munmap(address + size, room + _HUGE_BYTES - address)
    # Views keep the array alive; when the last is gone the finalizer unmaps. Never at exit: see the module's text.
    array = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(array, _unmap, os.getpid(), address, size).atexit = False
    memory = Memory(memoryview(array).cast("B"), address, "4 KiB")
    _advise(memory, mmap.MADV_DONTDUMP)
    return memory


def _unmap(pid: int, address: int, size: int) -> None:
    """Not in a forked child: private memory is not there, and the addresses may hold something else by now."""
    if os.getpid() == pid:
        _libc.munmap(address, size)


def _mmap(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(address, size, protection, flags, fd, 0)
    if mapped == _MAP_FAILED:
        _raise(ctypes.get_errno(), size)
    assert mapped is not None
    return int(mapped)


def _raise(code: int, size: int) -> None:
    if code in (errno.ENOMEM, errno.EFAULT, errno.EAGAIN):  # EFAULT: populating would have been SIGBUS (cgroup limit)
        raise MemoryError(
            f"cannot get {size} bytes ({size / (1 << 30):.2f} GiB) of memory: {os.strerror(code)}. Ask for less, or "
            "raise the limit of the container (memory cgroup) or of the process (ulimit -v)"
        )
    raise OSError(code, f"cannot map {size} bytes: {os.strerror(code)}")


def _advise(memory: Memory, advice: int) -> None:
    """Give advice; a kernel built without the feature refuses it, which costs only speed."""
    _libc.madvise(memory.address, memory.size, advice)


def _prefault(memory: Memory, *, fresh: bool = True, must_populate: bool = False) -> None:
    """Make every page present, several threads at a time: zeroing pages is bound by one core's memory bandwidth.

    Kernels before 5.14 cannot be asked to, so there pages are touched: `fresh` ones by writing; those of another
    process by reading, since writing back what was read could undo its store. `must_populate` refuses instead: a
    touch of hugetlb memory beyond a cgroup's limit is SIGBUS.
    """
    code = _populate(memory.address, min(_HUGE_BYTES, memory.size))
    if code == errno.EINVAL:
        if must_populate:
            raise OSError(code, "this kernel has no MADV_POPULATE_WRITE")
        pages = np.frombuffer(memory.view, np.uint8)[:: mmap.PAGESIZE]
        if fresh:
            pages[:] = 0
        else:
            pages.max()
        return
    if code == 0:
        code = next(filter(None, _in_threads(_populate, memory, _PREFAULT_PIECE_BYTES)), 0)
    if code:
        _raise(code, memory.size)


def _populate(address: int, size: int) -> int:
    """Make the pages of a range present; 0 or an errno. Retries what is only interrupted."""
    while _libc.madvise(address, size, _MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        if code not in (errno.EINTR, errno.EAGAIN):
            return code
    return 0


def _collapse(memory: Memory) -> None:
    """Ask for huge pages in fresh shared memory, without privilege and whatever `shmem_enabled` says (but "deny").

    The kernel collapses small pages into a huge one, so there must be one in every 2 MiB: it is touched in first. What
    cannot be collapsed (an older kernel, no free huge page, a cgroup's limit) is left as it is.
    """
    if _populate(memory.address, mmap.PAGESIZE):
        return  # no memory at all, which is for `_prefault` to say
    if _collapse_range(memory.address, _HUGE_BYTES) != errno.EINVAL:
        _in_threads(_collapse_range, memory, _COLLAPSE_PIECE_BYTES)


def _collapse_range(address: int, size: int) -> int:
    """One attempt at a range; 0 or an errno. After an error the kernel may have left the rest of the range alone."""
    for start in range(address, address + size, _HUGE_BYTES):
        code = _populate(start, mmap.PAGESIZE)
        if code:
            return code
    return ctypes.get_errno() if _libc.madvise(address, size, _MADV_COLLAPSE) else 0


def _in_threads(work: Callable[[int, int], int], memory: Memory, piece_bytes: int) -> list[int]:
    """`work(address, size)` on each piece of `memory`, several at a time; the results."""
    end = memory.address + memory.size
    pieces = [(start, min(piece_bytes, end - start)) for start in range(memory.address, end, piece_bytes)]
    threads = min(len(pieces), len(os.sched_getaffinity(0)), _PREFAULT_THREADS_MAX)
    if threads == 1:
        return [work(*piece) for piece in pieces]
    with ThreadPoolExecutor(threads, thread_name_prefix="kvdisk-prefault") as pool:
        return list(pool.map(work, *zip(*pieces, strict=True)))


def _shared_pages(memory: Memory) -> str:
    page_size, huge = _residency(memory)
    if page_size > mmap.PAGESIZE:
        return "huge (hugetlb)"
    return "shared huge" if huge * 2 > memory.size else "shared 4 KiB"


def _huge_bytes(memory: Memory) -> int:
    return _residency(memory)[1]


def _residency(memory: Memory) -> tuple[int, int]:
    """(largest page size by construction, bytes now in transparent huge pages), from /proc/self/smaps."""
    page_size, huge, overlap = mmap.PAGESIZE, 0, 0
    for line in _read_lines("/proc/self/smaps"):
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):  # "7f0000000000-7f0000200000 rw-p ...": the head of the next mapping
            low, high = (int(part, 16) for part in first.split("-"))
            overlap = min(high, memory.address + memory.size) - max(low, memory.address)
        elif overlap > 0 and first == "KernelPageSize:":
            page_size = max(page_size, int(rest.split()[0]) << 10)
        elif overlap > 0 and first in ("AnonHugePages:", "ShmemPmdMapped:"):
            huge += min(int(rest.split()[0]) << 10, overlap)
    return page_size, huge
