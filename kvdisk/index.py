"""Which chunks are on disk and where: key -> extent, in memory, with the prefix tree that says which are worth it.

Invariants:
- A key has at most one row, the one with the newest pack.
- `parent` links follow the prefix: a chunk whose parent is dropped can never be hit, so `drop` takes the descendants
  too. A chunk whose parent is not known (yet) waits for it, and is adopted when the parent is added.
- Links are what the chunks say. Bytes from a stranger may close a loop: whoever walks up stops where it has been.
Rows are columns of machine integers, so that ten million chunks fit: about 115 bytes a chunk, most of them the
dictionary's, beside the key itself. Pure: no file, no clock, no thread.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvdisk.columns import grown, new_column
from kvdisk.commands import ScannedChunks
from kvdisk.forest import NONE, Forest
from kvdisk.layout import CODEC_NONE

_NOWHERE = (1 << 32) - 1  # no segment: of a row that only holds the children of a key that is not here
LIVE_BYTES_MAX = (1 << 32) - 1
GROUP_MAX = (1 << 16) - 1
_ROOM_MIN = 4096


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


class Index:
    """Rows of chunks on disk. `alignment` is the unit in which offsets are kept."""

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self._row_of: dict[bytes, int] = {}
        self._key: list[bytes | None] = []
        self._room = _ROOM_MIN  # rows that the columns have
        self._segment = new_column("I", _ROOM_MIN)
        self._offset = new_column("I", _ROOM_MIN)
        self._live = new_column("I", _ROOM_MIN)
        self._checksum = new_column("Q", _ROOM_MIN)
        self._group = new_column("H", _ROOM_MIN)
        self._packed = array("I")  # codec, and above it stored bytes in units of the alignment; 0, or shorter: no codec
        self._tree = Forest(_ROOM_MIN)
        self._free: deque[int] = deque()  # the oldest first, so that neighbours stay neighbours
        self._missing: dict[bytes, int] = {}  # key that is not here but has children -> the row that holds them
        self._rows: dict[int, array[int]] = {}  # segment -> rows ever added, as starts and ends; some are stale
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
        parent = NONE if row is None else self._tree.parent(row)
        return None if parent == NONE or self._segment[parent] == _NOWHERE else self._key[parent]

    def keys_of_segment(self, segment: int) -> list[bytes]:
        """The chunks whose newest payload lies in `segment`, in the order they were added."""
        runs = self._rows.get(segment, ())
        rows = dict.fromkeys(chain.from_iterable(map(range, runs[::2], runs[1::2])))  # a reused row may be there twice
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
        child = self._tree.child[self._row_of[key]]
        while child != NONE:
            if self._segment[child] != segment:
                return True
            child = self._tree.next(child)
        return False

    def add(self, key: bytes, extent: Extent, parent: bytes) -> None:
        """Add or replace `key`; `parent` is the key of its prefix, b"" for none. Its children stay, or are adopted."""
        row = self._row_of.get(key)
        if row is None:
            row = self._missing.pop(key, NONE)
            if row == NONE:
                row = self._new_row(key)
            self._row_of[key] = row
        else:
            self.live_of_segment[self._segment[row]] -= self._live[row]
            self._unlink(row)
        segment, offset, live_bytes, self._checksum[row], self._group[row], codec, stored_bytes = extent
        if codec:
            self._packed.extend(array("I", [0]) * (row + 1 - len(self._packed)))
            self._packed[row] = stored_bytes // self._alignment << 8 | codec
        elif row < len(self._packed):
            self._packed[row] = 0
        self._segment[row] = segment
        self._offset[row] = offset // self._alignment
        self._live[row] = live_bytes
        runs = self._rows.get(segment)
        if runs is None:
            self._rows[segment] = array("i", (row, row + 1))
        elif runs[-1] == row:
            runs[-1] = row + 1
        else:
            runs.extend((row, row + 1))
        self.live_of_segment[segment] = self.live_of_segment.get(segment, 0) + live_bytes
        if parent and parent != key:
            self._link(row, parent)

    def fill(self, found: Iterable[tuple[int, ScannedChunks]]) -> None:
        """As `add` for every chunk, but many times as fast. The index must be empty, and no key come twice.

        Args:
            found: chunks by segment, as often as wanted. It may look up here what it gave already.
        """
        assert not self._key
        parent_of: dict[int, bytes] = {}
        given: list[ScannedChunks] = []
        for segment, chunks in found:
            first, end = len(self._key), len(self._key) + len(chunks.key)
            self._key.extend(chunks.key)
            self._row_of.update(zip(chunks.key, range(first, end), strict=True))
            self._make_room(end)
            self._segment[first:end] = array("I", [segment]) * (end - first)
            self._rows.setdefault(segment, array("i")).extend((first, end))
            self.live_of_segment[segment] = self.live_of_segment.get(segment, 0) + int(chunks.live_bytes.sum())
            parent_of.update(zip([first + place for place in chunks.parent], chunks.parent.values(), strict=True))
            given.append(chunks)
        if given:
            self._fill_columns(given)
            self._tree.chain(len(self._key))
            for row in parent_of:
                self._tree.detach(row)
            for row, parent in parent_of.items():
                if parent and parent != self._key[row]:
                    self._link(row, parent)

    def _fill_columns(self, given: list[ScannedChunks]) -> None:
        for column, name, unit in (
            (self._offset, "offset", self._alignment),
            (self._live, "live_bytes", 1),
            (self._checksum, "checksum", 1),
            (self._group, "group", 1),
        ):
            np.asarray(column)[: len(self._key)] = _joined(given, name) // unit
        codec = _joined(given, "codec")
        if codec.any():
            packed = (_joined(given, "stored_bytes") // self._alignment) << 8 | codec
            self._packed.frombytes(np.where(codec == CODEC_NONE, 0, packed).astype(np.uint32).tobytes())

    def drop(self, key: bytes) -> list[bytes]:
        """Remove `key` and all that depends on it; the keys removed, `key` first. Unknown keys remove nothing."""
        top = self._row_of.get(key)
        if top is None:
            return []
        self._unlink(top)  # also what ends the walk below if links form a loop
        if self._tree.child[top] == NONE:  # most chunks, and always the last of a prefix
            self._release(top, key)
            return [key]
        dropped: list[bytes] = []
        stack = [top]
        while stack:
            row = stack.pop()
            child = self._tree.child[row]
            while child != NONE:
                stack.append(child)
                child = self._tree.next(child)
            gone = self._key[row]
            assert gone is not None
            dropped.append(gone)
            self._release(row, gone)
        return dropped

    def drop_waiting(self, parent: bytes) -> list[bytes]:
        """Remove the chunks that wait for `parent`, which will not come (again), and all that depends on them."""
        dropped: list[bytes] = []
        while (row := self._missing.get(parent)) is not None:  # it goes with the last of them
            key = self._key[self._tree.child[row]]
            assert key is not None
            dropped += self.drop(key)
        return dropped

    def drop_only(self, key: bytes) -> None:
        """Remove `key` alone: it is being replaced or lives on in memory, so what depends on it waits for it."""
        row = self._row_of.get(key)
        if row is None:
            return
        self._unlink(row)
        if self._tree.child[row] == NONE:
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
        packed = self._packed[row] if row < len(self._packed) else 0
        return Extent(
            self._segment[row],
            self._offset[row] * self._alignment,
            self._live[row],
            self._checksum[row],
            self._group[row],
            packed & 0xFF,
            (packed >> 8) * self._alignment,
        )

    def _new_row(self, key: bytes) -> int:
        if self._free:
            row = self._free.popleft()
            self._key[row] = key
        else:
            row = len(self._key)
            self._make_room(row + 1)
            self._key.append(key)
            self._tree.add(row)
        return row

    def _make_room(self, rows: int) -> None:
        if rows <= self._room:
            return
        wanted = max(rows, self._room + self._room // 2)  # what is not used yet takes no memory
        self._segment = grown(self._segment, wanted)
        self._offset = grown(self._offset, wanted)
        self._live = grown(self._live, wanted)
        self._checksum = grown(self._checksum, wanted)
        self._group = grown(self._group, wanted)
        columns = (self._segment, self._offset, self._live, self._checksum, self._group)
        self._room = min(self._tree.grow(wanted), *map(len, columns))
        if self._room < rows:
            raise MemoryError(f"the index has {len(self._key)} chunks, and the system no memory for more")

    def _release(self, row: int, key: bytes) -> None:
        del self._row_of[key]
        self.live_of_segment[self._segment[row]] -= self._live[row]
        self._free_row(row)

    def _free_row(self, row: int) -> None:
        self._key[row] = None
        self._tree.forget(row)
        self._free.append(row)

    # ---- the prefix tree

    def _link(self, row: int, parent: bytes) -> None:
        parent_row = self._row_of.get(parent)
        if parent_row is None:
            parent_row = self._missing.get(parent)
        if parent_row is None:
            parent_row = self._missing[parent] = self._new_row(parent)
            self._segment[parent_row] = _NOWHERE
        self._tree.attach(row, parent_row)

    def _unlink(self, row: int) -> None:
        parent = self._tree.detach(row)
        if parent != NONE and self._segment[parent] == _NOWHERE and self._tree.child[parent] == NONE:
            key = self._key[parent]
            assert key is not None
            del self._missing[key]
            self._free_row(parent)


def _joined(given: list[ScannedChunks], column: str) -> npt.NDArray[Any]:
    return np.concatenate([getattr(chunks, column) for chunks in given])
