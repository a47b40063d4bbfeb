"""Eviction: what a segment that is recycled gives up.

What must hold:
- A segment's chunks leave the index before its file is opened anew.
- No chunk is kept whose prefix was evicted. Heads of prefixes are older than their tails, so those that chunks
  elsewhere need are written again from their slots, within a bound on write amplification. What depends on a head that
  cannot be saved is dropped too.
Pure: decides, touches no file.
"""

from collections.abc import Callable

from kvdisk.index import Index
from kvdisk.resident import CLEAN, Resident
from kvdisk.segments import Root, Segment, SegmentTable
from kvdisk.stats import WriterStats

REWRITE_FRACTION_MAX = 0.1
"""Heads written again may add this much to the bytes written: a write amplification of 1.1 at most."""


class Eviction:
    """Empties segments and the index of what lay in them.

    Args:
        index: where evicted chunks are dropped.
        table: the segments.
        stats: where it counts; it reads there what was flushed.
        resident_of: the resident of a key, if it has one and it is not forgotten.
        requeue: called with a CLEAN resident that is to be written again.
        on_dropped: called with keys that left the index because their segment was evicted.
    """

    def __init__(
        self,
        index: Index,
        table: SegmentTable,
        stats: WriterStats,
        *,
        resident_of: Callable[[bytes], Resident | None],
        requeue: Callable[[Resident], None],
        on_dropped: Callable[[list[bytes]], None],
    ) -> None:
        self._index = index
        self._table = table
        self._stats = stats
        self._resident_of = resident_of
        self._requeue = requeue
        self._on_dropped = on_dropped

    def recycle(self, root: Root, now: float) -> Segment | None:
        """A segment that was emptied to make room in `root`, or None if none can be now.

        It may be of another root: see `SegmentTable.victim`.
        """
        victim = self._table.victim(root, self._index.live_of_segment)
        if victim is None or now < self._table.roots[victim.file.root].broken_until:
            return None
        self._evict(victim)
        return victim

    def _evict(self, victim: Segment) -> None:
        """Empty the index of a segment's chunks; save the heads that others need, where that is allowed."""
        number = victim.file.number
        gone: list[bytes] = []
        for key in self._needed(number):
            if self._index.segment_of(key) == number and not self._rewrite(key):
                gone += self._index.drop(key)
        for key in self._index.keys_of_segment(number):
            gone += self._index.drop(key)
        self._index.forget_segment(number)
        victim.empty()
        self._stats.segments_recycled += 1
        self._stats.chunks_evicted += len(gone)
        self._on_dropped(gone)

    def _needed(self, number: int) -> list[bytes]:
        """The chunks here that chunks elsewhere need, and their prefixes here: each once, prefixes first."""
        index = self._index
        found: dict[bytes, None] = {}
        for key in index.keys_of_segment(number):
            if not index.has_child_outside(key, number):
                continue
            chain: dict[bytes, None] = {}
            up: bytes | None = key
            while up is not None and up not in found and up not in chain and index.segment_of(up) == number:
                chain[up] = None
                up = index.parent_of(up)
            found.update(dict.fromkeys(reversed(chain)))
        return list(found)

    def _rewrite(self, key: bytes) -> bool:
        """Queue a head again from its slot, if it has one and the write amplification allows; whether it is saved."""
        resident = self._resident_of(key)
        if resident is None or not resident.is_hit:
            return False
        if resident.state is CLEAN:
            size = resident.live_bytes
            stored = self._stats.bytes_flushed - self._stats.bytes_rewritten
            if self._stats.bytes_rewritten + size > REWRITE_FRACTION_MAX * stored:
                return False
            self._stats.bytes_rewritten += size
            self._requeue(resident)
        self._index.drop_only(key)
        return True
