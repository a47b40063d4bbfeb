"""What every engine offers: files by descriptor, and reads and writes of spans of memory.

An engine moves bytes and reports raw results; it retries nothing and interprets nothing. `io/transfer.py` stands on
top of it and turns raw results into complete transfers. Two halves:

- `submit` starts reads and writes. It never blocks on the disk, and each `Op` ends in exactly one call of its
  `done(result)` on the event loop's thread: a byte count (possibly short), or a negative errno.
- The file calls block and raise `OSError`; the caller runs them in a worker thread.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol


class Memory:
    """A run of host memory that engines read into and write from: one region of the arena, or a bounce buffer.

    Attributes:
        view: writable uint8 view over all of it; exported for the memory's whole life.
        address: address of its first byte, aligned to at least 4096.
        size: bytes.
        pages: what backs it, for reports: "huge (THP)", "huge (hugetlb)", "shared huge", "4 KiB", "shared 4 KiB".
    """

    __slots__ = ("address", "pages", "size", "view")

    def __init__(self, view: memoryview, address: int, pages: str) -> None:
        self.view = view
        self.address = address
        self.size = len(view)
        self.pages = pages


class Span(NamedTuple):
    """`length` bytes of `memory` from `start`."""

    memory: Memory
    start: int
    length: int


class OpKind(Enum):
    """Direction of an `Op`, seen from memory: READ fills spans from the file, WRITE empties them into it."""

    READ = "read"
    WRITE = "write"


class Op:
    """One read or write of `spans`, in order, at `offset` of the open file `fd`.

    The spans stay borrowed until `done` was called. At most 1024 spans (IOV_MAX) and less than 2 GiB in all.
    """

    __slots__ = ("_done", "fd", "kind", "offset", "spans")

    def __init__(
        self, kind: OpKind, fd: int, offset: int, spans: tuple[Span, ...], done: Callable[[int], object]
    ) -> None:
        self.kind = kind
        self.fd = fd
        self.offset = offset
        self.spans = spans
        self._done = done

    def done(self, result: int) -> None:
        """Called once, by the engine."""
        self._done(result)


def nobody() -> None:
    """Whom an engine tells of ended batches as long as nobody wants to know."""


class EngineInfo(NamedTuple):
    """What an engine turned out to be, for one INFO line and the reports."""

    name: str  # "io_uring", "posix", "sim"
    direct: bool  # O_DIRECT, and the file system honours it
    registered: bool  # buffers registered with the kernel
    detail: str  # one line: why not better, or ""


class Engine(Protocol):
    """Reads, writes and files. One event loop thread submits; see the module's docstring."""

    info: EngineInfo
    iodepth: int  # ops in flight at most; what is submitted beyond it waits inside, in order
    after_done: Callable[[], object]  # called after each batch of `done`s, so that whoever submits does it once a batch

    def use_buffered(self, reason: str) -> bool:
        """Give up direct I/O for good, on every file of this engine; False when that has happened before."""

    def start(self, memories: Sequence[Memory]) -> None:
        """Set up on the running event loop's thread; `memories` are worth registering.

        Raises:
            EngineUnavailableError: it cannot run here; the text names the cause and the remedy.
        """

    def submit(self, ops: Sequence[Op]) -> None:
        """Start `ops`. More than the engine's depth is queued inside, in order."""

    def close(self) -> None:
        """Release rings and threads. Only when no op is in flight, or the process is about to end."""

    def create_file(self, path: str, size: int) -> int:
        """Create `path` (O_EXCL, O_NOFOLLOW, 0600) with `size` bytes preallocated; its descriptor.

        Raises:
            OSError: EEXIST, ENOSPC, EDQUOT, EFBIG, ...; nothing is left behind.
        """

    def open_file(self, path: str) -> int:
        """Open an existing regular file for reading and writing (O_NOFOLLOW); its descriptor."""

    def close_file(self, fd: int) -> None:
        """Close a descriptor of this engine."""

    def remove_file(self, path: str) -> None:
        """Remove `path`; a file that is already gone is fine."""

    def sync_file(self, fd: int) -> None:
        """Make what was written to `fd` durable (fdatasync)."""

    def file_bytes(self, fd: int) -> tuple[int, int]:
        """(size, allocated bytes by st_blocks) of an open file."""
