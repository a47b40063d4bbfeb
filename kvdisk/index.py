"""Which chunks are on disk and where: key -> extent, in memory, with the prefix tree that says which are worth it.

Invariants:
- A key has at most one row, the one with the newest pack.
- `parent` links follow the prefix: a chunk whose parent is dropped can never be hit, so `drop` takes the descendants
  too. A chunk whose parent is not known (yet) waits for it, and is adopted when the parent is added.
- Links are what the chunks say. Bytes from a stranger may close a loop: whoever walks up stops where it has been.
Rows are columns of machine integers, so that ten million chunks fit: about 125 bytes a chunk, most of them the
dictionary's, beside the key itself. Pure: no file, no clock, no thread.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvdisk.layout import CODEC_NONE

_NONE = -1
_NOWHERE = (1 << 32) - 1  # no segment: of a row that only holds the children of a key that is not here
LIVE_BYTES_MAX = (1 << 32) - 1
GROUP_MAX = (1 << 16) - 1


class Extent(NamedTuple):
    """Where a chunk's payload lies and how to know it: segment, byte offset in it, live bytes, checksum, group.

    codec: of the payload. stored_bytes: of a payload with a codec; without one the chunk's parts say it.
    """

    segment: int
    offset: int
    live_bytes: int
    checksum: int
    group: int
    codec: int = CODEC_NONE
    stored_bytes: int = 0


class Rows(NamedTuple):
    """Chunks of one segment as columns, see Extent; `parents` are keys, b"" for none. No codecs: all have none."""

    segment: int
    keys: Sequence[bytes]
    parents: Sequence[bytes]
    offsets: Sequence[int]
    live_bytes: Sequence[int]
    checksums: Sequence[int]
    groups: Sequence[int]
    codecs: Sequence[int] = ()
    stored_bytes: Sequence[int] = ()


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
        self._packed = array("I")  # codec, and above it stored bytes in units of the alignment; 0: no codec
        self._parent = array("i")
        self._child = array("i")  # first child; siblings form a doubly linked list
        self._next = array("i")
        self._previous = array("i")
        self._free: list[int] = []
        self._missing: dict[bytes, int] = {}  # key that is not here but has children -> the row that holds them
        self._rows: dict[int, array[int]] = {}  # segment -> rows ever added to it; stale ones are skipped when read
        self.live_of_segment: dict[int, int] = {}  # segment -> live bytes of its chunks; others only read it

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._row_of

    def has_any(self, keys: Iterable[bytes]) -> bool:
        """Whether one of `keys` is here."""
        return not self._row_of.keys().isdisjoint(keys)

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
        parent = _NONE if row is None else self._parent[row]
        return None if parent == _NONE or self._segment[parent] == _NOWHERE else self._key[parent]

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
        """Add or replace `key`; `parent` is the key of its prefix, b"" for none. Its children stay, or are adopted."""
        row = self._row_of.get(key)
        if row is None:
            row = self._missing.pop(key, _NONE)
            if row == _NONE:
                row = self._new_row(key)
            self._row_of[key] = row
        else:
            self.live_of_segment[self._segment[row]] -= self._live[row]
            self._unlink(row)
        segment, offset, live_bytes, self._checksum[row], self._group[row], codec, stored_bytes = extent
        self._packed[row] = self._pack(codec, stored_bytes) if codec else 0
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

    def fill(self, rows: Iterable[Rows]) -> None:
        """As `add` for every chunk, but several times as fast. The index must be empty, and no key come twice.

        `rows` may look up here what it gave already.
        """
        assert not self._key
        parents: list[bytes] = []
        for segment, keys, parents_here, offsets, live_bytes, checksums, groups, codecs, stored_bytes in rows:
            first, end = len(self._key), len(self._key) + len(keys)
            self._key.extend(keys)
            self._row_of.update(zip(keys, range(first, end), strict=True))
            self._segment.extend(array("I", [segment]) * len(keys))
            self._offset.extend([offset // self._alignment for offset in offsets])
            self._live.extend(live_bytes)
            self._checksum.extend(checksums)
            self._group.extend(groups)
            self._packed.extend(map(self._pack, codecs, stored_bytes) if codecs else array("I", [0]) * len(keys))
            self._rows.setdefault(segment, array("i")).extend(range(first, end))
            self.live_of_segment[segment] = self.live_of_segment.get(segment, 0) + sum(live_bytes)
            parents.extend(parents_here)
        for links in (self._parent, self._child, self._next, self._previous):
            links.extend(array("i", [_NONE]) * len(parents))
        self._link_all(parents)

    def _link_all(self, parents: list[bytes]) -> None:
        """Link rows that have no links yet to their parents, runs of neighbours in a prefix at a time: most are."""
        parents_of_followers = zip(parents[1:], self._key, strict=False)
        heads = [0, *(row for row, (parent, key) in enumerate(parents_of_followers, 1) if parent != key), len(parents)]
        for first, end in pairwise(heads):
            if end - first > 1:
                self._parent[first + 1 : end] = array("i", range(first, end - 1))
                self._child[first : end - 1] = array("i", range(first + 1, end))
        for row in heads[:-1] if parents else ():
            parent = parents[row]
            if parent and parent != self._key[row]:
                self._link(row, parent)

    def drop(self, key: bytes) -> list[bytes]:
        """Remove `key` and all that depends on it; the keys removed, `key` first. Unknown keys remove nothing."""
        top = self._row_of.get(key)
        if top is None:
            return []
        self._unlink(top)  # also what ends the walk below if links form a loop
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
        while (row := self._missing.get(parent)) is not None:  # it goes with the last of them
            key = self._key[self._child[row]]
            assert key is not None
            dropped += self.drop(key)
        return dropped

    def drop_only(self, key: bytes) -> None:
        """Remove `key` alone: it is being replaced or lives on in memory, so what depends on it waits for it."""
        row = self._row_of.get(key)
        if row is None:
            return
        self._unlink(row)
        if self._child[row] == _NONE:
            self._release(row, key)
        else:
            self.live_of_segment[self._segment[row]] -= self._live[row]
            self._segment[row] = _NOWHERE
            self._missing[key] = self._row_of.pop(key)

    def clear(self) -> None:
        """Remove everything."""
        self.__init__(self._alignment)  # type: ignore[misc]

    # ---- rows

    def _extent(self, row: int) -> Extent:
        packed = self._packed[row]
        return Extent(
            self._segment[row],
            self._offset[row] * self._alignment,
            self._live[row],
            self._checksum[row],
            self._group[row],
            packed & 0xFF,
            (packed >> 8) * self._alignment,
        )

    def _pack(self, codec: int, stored_bytes: int) -> int:
        return stored_bytes // self._alignment << 8 | codec if codec else 0

    def _new_row(self, key: bytes) -> int:
        if self._free:
            row = self._free.pop()
            self._key[row] = key
        else:
            row = len(self._key)
            self._key.append(key)
            for column in (self._segment, self._offset, self._live, self._checksum, self._group, self._packed):
                column.append(0)
            for links in (self._parent, self._child, self._next, self._previous):
                links.append(_NONE)
        return row

    def _release(self, row: int, key: bytes) -> None:
        del self._row_of[key]
        self.live_of_segment[self._segment[row]] -= self._live[row]
        self._free_row(row)

    def _free_row(self, row: int) -> None:
        self._key[row] = None
        self._parent[row] = self._child[row] = self._next[row] = self._previous[row] = _NONE
        self._free.append(row)

    # ---- the prefix tree

    def _link(self, row: int, parent: bytes) -> None:
        parent_row = self._row_of.get(parent)
        if parent_row is None:
            parent_row = self._missing.get(parent)
        if parent_row is None:
            parent_row = self._missing[parent] = self._new_row(parent)
            self._segment[parent_row] = _NOWHERE
        self._attach(row, parent_row)

    def _attach(self, row: int, parent_row: int) -> None:
        first = self._child[parent_row]
        self._parent[row] = parent_row
        self._next[row] = first
        if first != _NONE:
            self._previous[first] = row
        self._child[parent_row] = row

    def _unlink(self, row: int) -> None:
        parent, following, previous = self._parent[row], self._next[row], self._previous[row]
        if parent == _NONE:
            return
        if previous != _NONE:
            self._next[previous] = following
        else:
            self._child[parent] = following
        if following != _NONE:
            self._previous[following] = previous
        self._parent[row] = self._next[row] = self._previous[row] = _NONE
        if self._segment[parent] == _NOWHERE and self._child[parent] == _NONE:
            key = self._key[parent]
            assert key is not None
            del self._missing[key]
            self._free_row(parent)
