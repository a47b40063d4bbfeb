"""A peer in a process and an environment of its own, told by lines of JSON what to do. Standard library only.

    -> {"op": "prepare", "bs": 131072, "total": ..., "requests": 1, "pages": "huge", "fresh": false, "directory": "..."}
    -> {"op": "store"}   -> {"op": "load"}   -> {"op": "finish"}
    <- {"seconds": ..., "cpu": ...} or {"error": "..."} for each

Every peer moves the same number of bytes between the disk and the same kind of memory: private, anonymous, random, on
huge pages or kept from them. Only the calls between `clock` and its end are measured; CPU is that of the whole process,
all its threads included.
"""

import ctypes
import json
import mmap
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

MIB = 1 << 20
BUFFER_BYTES = 512 * MIB
_MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 14, 15


class Peer:
    """Base of the peers. A subclass defines `open`, `submit` and `wait`, or `move` as a whole.

    Attributes:
        bs, total, requests, fresh, directory: of the case at hand.
        view, address: the buffer, BUFFER_BYTES of it.
    """

    batch_bytes = 32 * MIB  # of one call, for a request alone
    depth = 4  # such calls outstanding
    many_files = False  # one a chunk: every store creates new ones

    def __init__(self) -> None:
        self._areas: dict[str, tuple[memoryview, int]] = {}

    # ---- what a peer defines

    def open(self) -> None:
        """Make ready for the case: files, handles."""

    def submit(self, op: str, chunks: Sequence[int]) -> Any:
        """Start a "store" or "load" of these chunks; what `wait` needs."""
        raise NotImplementedError

    def wait(self, handle: Any) -> None:
        """Wait for a `submit`; raise if anything in it failed."""
        raise NotImplementedError

    def before(self, op: str) -> None:
        """What has to be done before an operation and is not part of it."""

    def close(self) -> None:
        """End of the case."""

    # ---- what they share

    def prepare(self, case: dict[str, Any]) -> None:
        """Take a case and make ready for it."""
        self.bs, self.total, self.requests = case["bs"], case["total"] // case["bs"] * case["bs"], case["requests"]
        self.fresh, self.directory = case["fresh"], case["directory"]
        os.makedirs(self.directory, exist_ok=True)
        if case["pages"] not in self._areas:
            self._areas[case["pages"]] = _memory(BUFFER_BYTES, case["pages"])
        self.view, self.address = self._areas[case["pages"]]
        self.slot_count = BUFFER_BYTES // self.bs
        self.open()

    def slot(self, chunk: int) -> memoryview:
        """The buffer of a chunk."""
        at = chunk % self.slot_count * self.bs
        return self.view[at : at + self.bs]

    def batches(self) -> Iterator[range]:
        """The chunks of the case, in the groups in which they are asked for."""
        size = self.batch_bytes if self.requests == 1 else max(self.bs, 4 * MIB)
        count = max(1, size // self.bs)
        return (range(at, min(at + count, self.chunk_count)) for at in range(0, self.chunk_count, count))

    @property
    def chunk_count(self) -> int:
        """Chunks of the case."""
        return int(self.total // self.bs)

    def move(self, op: str) -> None:
        """Move everything once."""
        outstanding: deque[Any] = deque()
        depth = self.depth if self.requests == 1 else self.requests
        for chunks in self.batches():
            if len(outstanding) == depth:
                self.wait(outstanding.popleft())
            outstanding.append(self.submit(op, chunks))
        while outstanding:
            self.wait(outstanding.popleft())

    def measure(self, op: str) -> dict[str, float]:
        """Wall and CPU seconds of one pass."""
        self.before(op)
        used, start = self.cpu(), time.perf_counter()
        self.move(op)
        return {"seconds": time.perf_counter() - start, "cpu": self.cpu() - used}

    def cpu(self) -> float:
        """Seconds of CPU so far, of every process that works for this peer."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime


def raw_file(peer: Peer) -> str:
    """One file of the case's size, preallocated, and for a recycled case written once."""
    path = os.path.join(peer.directory, "raw.bin")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_TRUNC, 0o600)
    os.posix_fallocate(fd, 0, peer.total)
    if not peer.fresh:
        step = 8 * MIB
        for at in range(0, peer.total, step):
            os.pwrite(fd, peer.view[: min(step, peer.total - at)], at)
    os.fsync(fd)
    os.close(fd)
    return path


def truncate_all(directory: str) -> None:
    """Give back the space, not the files: this keeps journal-less ext4 from slowing down after many deletions."""
    for folder, _, names in os.walk(directory):
        for name in names:
            os.truncate(os.path.join(folder, name), 0)


def serve(peer: Peer) -> None:
    """Obey lines on standard input; whatever a library prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if command["op"] == "prepare":
                peer.prepare(command)
            elif command["op"] == "finish":
                peer.close()
            else:
                answer = peer.measure(command["op"])
        except Exception as error:  # told to the parent, which reports this peer as failed
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


def _memory(size: int, pages: str) -> tuple[memoryview, int]:
    huge = 2 * MIB
    area = mmap.mmap(-1, size + huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(_MADV_HUGEPAGE if pages == "huge" else _MADV_NOHUGEPAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    shift = -start % huge
    view = memoryview(area)[shift : shift + size]
    block = os.urandom(32 * MIB)
    for at in range(0, size, len(block)):
        view[at : at + len(block)] = block
    return view, start + shift
