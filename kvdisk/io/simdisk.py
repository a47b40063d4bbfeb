"""A simulated disk: files in memory, and what of them is left after a crash.

What a `SimDisk` promises, and no more: what was written before a `sync` that returned is there after a crash. Of
everything later each write may survive, vanish, or survive in some of its 512-byte sectors, whether it had completed or
not; a file may come back that was removed, or be gone that was created, until something was synced.
"""

import errno
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

SECTOR_BYTES: Final = 512
PAGE_BYTES: Final = 4096
_UNSYNCED_BYTES_MAX: Final = 64 << 20


Write = tuple["SimFile", int, bytes]  # file, offset, content


class SimulatedCrashError(Exception):
    """The process died here (`SimDisk.crash_at`): let it through, and go on with `SimDisk.after_crash()`."""


class SimFile:
    """One file: what its readers see, what is durable, and the writes between the two."""

    def __init__(self, content: bytes | bytearray, pages: Iterable[int] = (), *, created_durably: bool = False) -> None:
        self.data = bytearray(content)
        self.durable = bytearray(content)
        self.pages = set(pages)  # numbers of the pages with blocks behind them
        self.created_durably = created_durably
        self.unsynced: deque[tuple[int, bytes]] = deque()
        self._unsynced_bytes = 0

    def write(self, offset: int, content: bytes) -> None:
        """Write, not durably. What was written long ago reaches the disk by itself, which bounds the memory in use."""
        _patch(self.data, offset, content)
        self.pages.update(_pages(offset, offset + len(content)))
        self.unsynced.append((offset, content))
        self._unsynced_bytes += len(content)
        while self._unsynced_bytes > _UNSYNCED_BYTES_MAX:
            start, old = self.unsynced.popleft()
            _patch(self.durable, start, old)
            self._unsynced_bytes -= len(old)

    def sync(self) -> None:
        """Make everything durable."""
        for start, content in self.unsynced:
            _patch(self.durable, start, content)
        self.unsynced.clear()
        self._unsynced_bytes = 0


class SimDisk:
    """Files by path, and what of them survives.

    Args:
        seed: decides everything that is left to chance.
        capacity_bytes: more than this fails with ENOSPC; None: no limit.
        preallocates: False: `create_file` makes sparse files, and writes meet ENOSPC.
        crash_at: the process dies at this event (writes, syncs, creations and removals count, from 0); None: never.
        lose_completed: whether a completed write that was not synced can be lost in a crash; False: it survives.
        torn_writes: whether a write can survive in part.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        capacity_bytes: int | None = None,
        preallocates: bool = True,
        crash_at: int | None = None,
        lose_completed: bool = True,
        torn_writes: bool = True,
    ) -> None:
        self.seed = seed
        self.capacity_bytes = capacity_bytes
        self.preallocates = preallocates
        self.crash_at = crash_at
        self.lose_completed = lose_completed
        self.torn_writes = torn_writes
        self.files: dict[str, SimFile] = {}
        self.events = 0
        self.crashed = False
        self.engines: list[Callable[[], list[Write]]] = []  # each says which writes are in flight
        self._caught: list[Write] = []  # writes in flight at the crash
        self._removed: dict[str, SimFile] = {}  # removed, but the directory not synced

    def event(self) -> None:
        """Count something that changes the disk; the process dies at the one that was asked for."""
        if self.events == self.crash_at:
            self.crash()
        if self.crashed:
            raise SimulatedCrashError(f"crash at event {self.events}, seed {self.seed}")
        self.events += 1

    def crash(self) -> None:
        """The process dies now: from here on nothing changes and everything fails."""
        if not self.crashed:
            self.crashed = True
            self._caught = [caught for writes_in_flight in self.engines for caught in writes_in_flight()]

    def allocated_bytes(self) -> int:
        """Bytes of all blocks in use."""
        return sum(len(file.pages) for file in self.files.values()) * PAGE_BYTES

    def allocate(self, file: SimFile, start: int, end: int) -> None:
        """Put blocks behind a range.

        Raises:
            OSError: ENOSPC; nothing was allocated.
        """
        wanted = set(_pages(start, end)) - file.pages
        limit = self.capacity_bytes
        if wanted and limit is not None and self.allocated_bytes() + len(wanted) * PAGE_BYTES > limit:
            raise OSError(errno.ENOSPC, "simulated disk is full")
        file.pages |= wanted

    def create(self, path: str, size: int) -> SimFile:
        """See `Engine.create_file`."""
        self.event()
        if path in self.files:
            raise FileExistsError(errno.EEXIST, "exists", path)
        file = SimFile(bytes(size))
        if self.preallocates:
            self.allocate(file, 0, size)
        self.files[path] = file
        return file

    def remove(self, path: str) -> None:
        """See `Engine.remove_file`."""
        self.event()
        if path in self.files:
            self._removed[path] = self.files.pop(path)

    def sync(self, file: SimFile) -> None:
        """Make a file durable; the journal commits creations and removals with it, as ext4 and XFS do."""
        self.event()
        file.sync()
        self._removed.clear()
        for other in self.files.values():
            other.created_durably = True

    def after_crash(self) -> "SimDisk":
        """The disk as the next process finds it. Crashes now if it has not before."""
        self.crash()
        chance = random.Random(f"{self.seed}/{self.events}")
        found = SimDisk(self.seed + 1, capacity_bytes=self.capacity_bytes, preallocates=self.preallocates)
        back = {path: file for path, file in self._removed.items() if path not in self.files and chance.random() < 0.5}
        for path, file in {**self.files, **back}.items():
            if not file.created_durably and self.lose_completed and chance.random() < 0.25:
                continue
            left = SimFile(file.durable, file.pages, created_durably=True)
            for offset, content in file.unsynced:
                self._survive(chance, left, offset, content, certain=not self.lose_completed)
            for caught, offset, content in self._caught:
                if caught is file:
                    self._survive(chance, left, offset, content, certain=False)
            left.sync()
            found.files[path] = left
        return found

    def _survive(self, chance: random.Random, file: SimFile, offset: int, content: bytes, *, certain: bool) -> None:
        fates = ("whole", "lost", "torn") if self.torn_writes else ("whole", "lost")
        fate = "whole" if certain else chance.choice(fates)
        if fate == "whole":
            file.write(offset, content)
        elif fate == "torn":
            for start in some_sectors(chance, len(content)):
                file.write(offset + start, content[start : start + SECTOR_BYTES])


def some_sectors(chance: random.Random, size: int) -> list[int]:
    """Starts of about half the sectors of `size` bytes."""
    return [start for start in range(0, size, SECTOR_BYTES) if chance.random() < 0.5]


def _patch(data: bytearray, offset: int, content: bytes) -> None:
    end = offset + len(content)
    if end > len(data):
        data.extend(bytes(end - len(data)))
    data[offset:end] = content


def _pages(start: int, end: int) -> range:
    return range(start // PAGE_BYTES, -(-end // PAGE_BYTES))
