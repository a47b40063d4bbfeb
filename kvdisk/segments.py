"""Segments: which files exist, where the next pack goes, and which segment is given up when space is needed.

Invariants:
- A segment is written front to back and never before its header is on disk; packs and footer never overlap.
- A segment is recycled only when it has no reader and no writer, and only after its chunks left the index.
- A segment that may hold the newer version of an overwritten key is never recycled before the older one is off the
  disk: otherwise the older bytes would come back at the next recovery. "May": a write that failed can have landed all
  the same. "Off the disk": the header that makes them readable was overwritten, not merely about to be.
Pure: decides, touches no file.
"""

import errno
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from kvdisk import layout
from kvdisk.commands import SegmentFile
from kvdisk.layout import SegmentHeader

FAILURES_MAX = 16
"""Writes that fail in a row before a root is left alone."""

PROBE_INTERVAL_S = 30.0
"""For that long; then one write is tried."""

FULL_INTERVAL_S = 30.0
"""No new file for that long on a disk that refused space."""

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that refuse space; all others are failures."""


RANKED_PART = 16
"""A sixteenth of a root's segments are ranked at a time for recycling: ranking them all for each one recycled took a
third of what storing cost with 400 segments, and more than half with 4,000."""


class SegmentState(Enum):
    """OPENING -> OPEN -> SEALED -> (recycled) OPENING; EMPTY: nothing in it to keep; LOST: the kernel has it."""

    OPENING = auto()
    OPEN = auto()
    SEALED = auto()
    EMPTY = auto()
    LOST = auto()


class SegmentUse(NamedTuple):
    """One use of a file: recycling gives it another sequence."""

    number: int
    sequence: int


@dataclass(eq=False, slots=True)
class Segment:
    """One file and its current use."""

    file: SegmentFile
    state: SegmentState
    header: SegmentHeader | None = None
    tail: int = 0  # where the next pack goes
    pack_headers: dict[int, bytes] = field(default_factory=dict)  # offset -> unpadded header, while open
    raw_header_bytes: int = 0  # of all packs, in flight ones included: what the footer must hold
    payload_bytes: int = 0  # live bytes ever written into this use of the file
    readers: int = 0
    writers: int = 0
    late: int = 0  # of both: those that missed their deadline, and may never end
    last_used: int = 0
    closing: bool = False  # no further packs; sealed when the last writer is done
    sizing: int | None = None  # command that writes the last pack here, while nobody knows where that will end
    on_disk: int | None = None  # sequence of the use that a recovery would find here
    older: set[SegmentUse] = field(default_factory=set)  # what holds older versions of keys in this one

    @property
    def use(self) -> SegmentUse:
        """The current use."""
        assert self.header is not None
        return SegmentUse(self.file.number, self.header.sequence)

    @property
    def idle(self) -> bool:
        """No I/O in flight that could touch it."""
        return self.readers == 0 and self.writers == 0

    @property
    def takeable(self) -> bool:
        """Whether it may be recycled."""
        return self.idle and (self.state is SegmentState.SEALED or self.state is SegmentState.EMPTY)

    @property
    def moves(self) -> bool:
        """Whether I/O is in flight that ends by its deadline."""
        return self.readers + self.writers > self.late

    def room(self, pack_raw_bytes: int) -> int:
        """Bytes a pack may take here if its unpadded header has `pack_raw_bytes`."""
        assert self.header is not None
        footer = layout.footer_bytes(self.raw_header_bytes + pack_raw_bytes, self.header.alignment)
        return self.header.segment_bytes - footer - self.tail

    def empty(self) -> None:
        """Nothing in the file counts any more; it is the first to be recycled."""
        self.state = SegmentState.EMPTY
        self.closing = False
        self.pack_headers.clear()
        self.raw_header_bytes = self.payload_bytes = 0
        self.older.clear()


@dataclass(eq=False, slots=True)
class Root:
    """One directory (disk): its segments and whether it takes new ones."""

    index: int
    segments_max: int
    segments: list[Segment] = field(default_factory=list)
    current: Segment | None = None
    full_until: float = 0.0  # the disk refused space; no new file before this time
    broken_until: float = 0.0  # writes keep failing; no write before this time
    failures: int = 0  # writes that failed since the last that did not
    inflight_bytes: int = 0
    awaits: Segment | None = None  # of another root: what must be off the disk before something here can be recycled

    def write_failed(self, now: float) -> None:
        """A write failed, not for want of space; after many in a row the disk is left alone for an interval."""
        self.failures += 1
        if self.failures >= FAILURES_MAX:
            self.broken_until = now + PROBE_INTERVAL_S

    def refused_space(self, now: float, *, even_recycled: bool) -> None:
        """No new file for an interval; no write at all where the disk refuses space even to a recycled segment."""
        self.full_until = now + FULL_INTERVAL_S
        if even_recycled:
            self.broken_until = now + FULL_INTERVAL_S


class SegmentTable:
    """All segments over all roots."""

    def __init__(self, segments_max: tuple[int, ...]) -> None:
        self.roots = [Root(index, count) for index, count in enumerate(segments_max)]
        self._by_index: dict[int, Segment] = {}
        self._next_index = 0
        self._clock = 0  # counts uses, not time
        self._ranked: dict[int, deque[tuple[Segment, int]]] = {}  # root -> to be recycled next, and when last used

    def __getitem__(self, index: int) -> Segment:
        return self._by_index[index]

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._by_index.values())

    def __len__(self) -> int:
        return len(self._by_index)

    def adopt(self, segment: Segment) -> None:
        """Take in a segment found at recovery."""
        self._by_index[segment.file.number] = segment
        self.roots[segment.file.root].segments.append(segment)
        self._next_index = max(self._next_index, segment.file.number + 1)

    def new_file(self, root: Root) -> Segment:
        """A segment in a file that is yet to be created."""
        segment = Segment(SegmentFile(root.index, self._next_index), SegmentState.EMPTY)
        self.adopt(segment)
        return segment

    def remove(self, segment: Segment) -> None:
        """Forget a file that is not there any more, or never was."""
        del self._by_index[segment.file.number]
        self.roots[segment.file.root].segments.remove(segment)

    def touch(self, segment_index: int) -> None:
        """Note a use."""
        self._clock += 1
        self._by_index[segment_index].last_used = self._clock

    def victim(self, root: Root, live_bytes: dict[int, int]) -> Segment | None:
        """The segment to recycle: an empty one, else the least recently used, where dead bytes age a segment.

        It is in another root where that holds the older version of something here: recycle that one, then ask again.
        With many segments several are ranked at a time; one that was used since is passed over.

        Args:
            root: where space is needed.
            live_bytes: segment index -> bytes of chunks still indexed there.
        """
        ranked = self._ranked.get(root.index)
        while ranked:
            segment, last_used = ranked.popleft()
            if segment.takeable and segment.last_used == last_used:
                first = self._oldest_version(segment)
                if first.takeable:
                    if first is not segment:
                        ranked.appendleft((segment, last_used))
                    return first
        order = self._by_age(root, live_bytes)
        for place, segment in enumerate(order):
            first = self._oldest_version(segment)
            if first.takeable:
                rest = order[place + (first is segment) :][: len(order) // RANKED_PART]
                self._ranked[root.index] = deque((following, following.last_used) for following in rest)
                return first
        return None

    def _by_age(self, root: Root, live_bytes: dict[int, int]) -> list[Segment]:
        """What may be recycled, in the order in which it should be."""

        def age(segment: Segment) -> tuple[bool, float]:
            live = live_bytes.get(segment.file.number, 0)
            if segment.state is SegmentState.EMPTY or live == 0:
                return (False, segment.last_used)
            dead = 1 - live / max(live, segment.payload_bytes)
            return (True, segment.last_used - dead * (self._clock - segment.last_used))

        return sorted((segment for segment in root.segments if segment.takeable), key=age)

    def is_on_disk(self, use: SegmentUse) -> bool:
        """Whether a recovery might find that use."""
        segment = self._by_index.get(use.number)
        return segment is not None and segment.on_disk == use.sequence

    def may_replace(self, segment: Segment, use: SegmentUse | None) -> bool:
        """Whether newer versions of what lies in `use` may be written to `segment`.

        Only from a higher sequence to a lower one may one segment have to wait for another's recycling: then no two
        can wait for each other, over however many others.
        """
        return use is None or use.sequence <= segment.use.sequence or not self.is_on_disk(use)

    def _oldest_version(self, segment: Segment) -> Segment:
        """`segment`, or the one that must go before it because it holds older versions of its keys."""
        seen = {segment.file.number}
        while older := [self[u.number] for u in segment.older if u.number not in seen and self.is_on_disk(u)]:
            segment = min(older, key=lambda s: s.last_used)
            seen.add(segment.file.number)
        return segment
