"""Which chunks are on disk and where: key -> extent, in memory, with the prefix tree that says which are worth it.

Invariants:
- A key has at most one row, the one with the newest pack.
- `parent` links follow the prefix: a chunk whose parent is dropped can never be hit, so `drop` takes the descendants
  too. A chunk whose parent is not known (yet) is a root and is adopted when the parent is added.
Rows are columns of machine integers, about 45 bytes a chunk beside its key, so that ten million chunks fit; the
figure is in docs/performance.md. Pure: no file, no clock, no thread.
"""

from array import array
from collections.abc import Iterator
from typing import NamedTuple

_NONE = -1
LIVE_BYTES_MAX = (1 << 32) - 1
GROUP_MAX = (1 << 16) - 1


class Extent(NamedTuple):
    """Where a chunk's payload lies and how to know it: segment, byte offset in it, live bytes, checksum, group."""

    segment: int
    offset: int
    live_bytes: int
    checksum: int
    group: int


class Index:
    """Rows of chunks on disk. `alignment` is the unit in which offsets are kept."""

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self._row_of: dict[bytes, int] = {}
        self._key: list[bytes | None] = []
        self._segment = array("I")
        self._offset = array("I")
        self._live = array("I")
        self._checksum = array("Q")
        self._group = array("H")
        self._parent = array("i")
        self._child = array("i")  # first child; siblings form a doubly linked list
        self._next = array("i")
        self._previous = array("i")
        self._free: list[int] = []
        self._orphans: dict[bytes, list[int]] = {}  # parent key that is not here -> rows that wait for it
        self._orphan_parent: dict[int, bytes] = {}
        self._rows: dict[int, array[int]] = {}  # segment -> rows ever added to it; stale ones are skipped when read
        self.live_of_segment: dict[int, int] = {}  # segment -> live bytes of its chunks; others only read it

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._row_of

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._row_of)

    def get(self, key: bytes) -> Extent | None:
        """The extent of `key`, or None."""
        row = self._row_of.get(key)
        return None if row is None else self._extent(row)

    def segment_of(self, key: bytes) -> int | None:
        """The segment of `key`, or None; cheaper than `get`."""
        row = self._row_of.get(key)
        return None if row is None else self._segment[row]

    def parent_of(self, key: bytes) -> bytes | None:
        """The parent of `key` if both are here, else None."""
        row = self._row_of.get(key)
        if row is None or self._parent[row] == _NONE:
            return None
        return self._key[self._parent[row]]

    def keys_of_segment(self, segment: int) -> list[bytes]:
        """The chunks whose newest payload lies in `segment`, in the order they were added."""
        rows = dict.fromkeys(self._rows.get(segment, ()))  # a reused row may be listed twice
        return [key for row in rows if (key := self._key[row]) is not None and self._segment[row] == segment]

    def live_bytes_of_segment(self, segment: int) -> int:
        """Sum of the live bytes of those chunks."""
        return self.live_of_segment.get(segment, 0)

    def forget_segment(self, segment: int) -> None:
        """Free the bookkeeping of a segment that holds no chunk any more; it is about to be recycled."""
        assert not self.live_of_segment.pop(segment, 0)
        self._rows.pop(segment, None)

    def has_child_outside(self, key: bytes, segment: int) -> bool:
        """Whether a chunk in another segment needs `key` as its prefix."""
        row = self._row_of[key]
        child = self._child[row]
        while child != _NONE:
            if self._segment[child] != segment:
                return True
            child = self._next[child]
        return False

    def add(self, key: bytes, extent: Extent, parent: bytes) -> None:
        """Add or replace `key`; `parent` is the key of its prefix, b"" for none. Children of a replaced key stay."""
        row = self._row_of.get(key)
        if row is None:
            row = self._new_row(key)
        else:
            self.live_of_segment[self._segment[row]] -= self._live[row]
            self._unlink(row)
            self._forget_orphan(row)
        segment, offset, live_bytes, self._checksum[row], self._group[row] = extent
        self._segment[row] = segment
        self._offset[row] = offset // self._alignment
        self._live[row] = live_bytes
        rows = self._rows.get(segment)
        if rows is None:
            rows = self._rows[segment] = array("i")
        rows.append(row)
        self.live_of_segment[segment] = self.live_of_segment.get(segment, 0) + live_bytes
        if parent and parent != key:
            self._link(row, parent)
        if key in self._orphans:
            for orphan in self._orphans.pop(key):
                self._orphan_parent.pop(orphan, None)
                self._attach(orphan, row)

    def drop(self, key: bytes) -> list[bytes]:
        """Remove `key` and all that depends on it; the keys removed, `key` first. Unknown keys remove nothing."""
        top = self._row_of.get(key)
        if top is None:
            return []
        self._unlink(top)
        if self._child[top] == _NONE:  # most chunks, and always the last of a prefix
            self._release(top, key)
            return [key]
        dropped: list[bytes] = []
        stack = [top]
        while stack:
            row = stack.pop()
            child = self._child[row]
            while child != _NONE:
                stack.append(child)
                child = self._next[child]
            gone = self._key[row]
            assert gone is not None
            dropped.append(gone)
            self._release(row, gone)
        return dropped

    def drop_waiting(self, parent: bytes) -> list[bytes]:
        """Remove the chunks that wait for `parent`, which will not come (again), and all that depends on them."""
        dropped: list[bytes] = []
        for row in list(self._orphans.get(parent, ())):
            key = self._key[row]
            assert key is not None
            dropped += self.drop(key)
        return dropped

    def drop_only(self, key: bytes) -> None:
        """Remove `key` alone: it is being replaced or lives on in memory, so what depends on it waits for it."""
        row = self._row_of.get(key)
        if row is None:
            return
        self._unlink(row)
        child = self._child[row]
        while child != _NONE:
            following = self._next[child]
            self._parent[child] = self._next[child] = self._previous[child] = _NONE
            self._wait_for(child, key)
            child = following
        self._release(row, key)

    def clear(self) -> None:
        """Remove everything."""
        self.__init__(self._alignment)  # type: ignore[misc]

    # ---- rows

    def _extent(self, row: int) -> Extent:
        return Extent(
            self._segment[row],
            self._offset[row] * self._alignment,
            self._live[row],
            self._checksum[row],
            self._group[row],
        )

    def _new_row(self, key: bytes) -> int:
        if self._free:
            row = self._free.pop()
            self._key[row] = key
        else:
            row = len(self._key)
            self._key.append(key)
            for column in (self._segment, self._offset, self._live, self._checksum, self._group):
                column.append(0)
            for links in (self._parent, self._child, self._next, self._previous):
                links.append(_NONE)
        self._row_of[key] = row
        return row

    def _release(self, row: int, key: bytes) -> None:
        self._forget_orphan(row)
        del self._row_of[key]
        self._key[row] = None
        self.live_of_segment[self._segment[row]] -= self._live[row]
        self._parent[row] = self._child[row] = self._next[row] = self._previous[row] = _NONE
        self._free.append(row)

    # ---- the prefix tree

    def _link(self, row: int, parent: bytes) -> None:
        parent_row = self._row_of.get(parent)
        if parent_row is None:
            self._wait_for(row, parent)
        elif not self._is_ancestor(row, parent_row):
            self._attach(row, parent_row)

    def _is_ancestor(self, row: int, of: int) -> bool:
        """Whether `row` is above `of`: only bytes from a stranger can ask for such a loop, and it must not be made."""
        if self._child[row] == _NONE:
            return False
        while of != _NONE:
            if of == row:
                return True
            of = self._parent[of]
        return False

    def _attach(self, row: int, parent_row: int) -> None:
        if self._is_ancestor(row, parent_row):
            return
        first = self._child[parent_row]
        self._parent[row] = parent_row
        self._next[row] = first
        if first != _NONE:
            self._previous[first] = row
        self._child[parent_row] = row

    def _unlink(self, row: int) -> None:
        parent, following, previous = self._parent[row], self._next[row], self._previous[row]
        if previous != _NONE:
            self._next[previous] = following
        elif parent != _NONE:
            self._child[parent] = following
        if following != _NONE:
            self._previous[following] = previous
        self._parent[row] = self._next[row] = self._previous[row] = _NONE

    def _wait_for(self, row: int, parent: bytes) -> None:
        self._orphans.setdefault(parent, []).append(row)
        self._orphan_parent[row] = parent

    def _forget_orphan(self, row: int) -> None:
        parent = self._orphan_parent.pop(row, None)
        if parent is not None:
            waiting = self._orphans[parent]
            waiting.remove(row)
            if not waiting:
                del self._orphans[parent]
