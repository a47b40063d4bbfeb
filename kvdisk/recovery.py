"""Recovery: the packs that a scan found become rows of the index.

What must hold:
- The newest version of a key decides, also where it cannot be used: it has a codec or cipher of another version, or no
  slot of this store can hold it. Then the key is absent; an older version is never served in its place.
- A segment with a newer version knows those with older ones, so that it is not recycled before them.
- Linear, and for the most part whole packs at a time: a terabyte of 1 MiB chunks is indexed in about a second.
Pure. Numbers come from a stranger: `is_usable` decides which of them the store can live with.
"""

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from kvdisk.commands import ScannedChunk, ScannedPack
from kvdisk.index import Index, Rows
from kvdisk.segments import Segment, SegmentTable, SegmentUse

_key_of = attrgetter("key")
_kind_of = attrgetter("group", "live_bytes", "stored_bytes", "readable")


class Recovery:
    """Fills an empty index.

    Args:
        index, table: of the store; the segments are in the table.
        is_usable: of (group, live bytes, stored bytes): whether the store can hold such a chunk.
    """

    def __init__(self, index: Index, table: SegmentTable, is_usable: Callable[[int, int, int], bool]) -> None:
        self.absent: dict[bytes, SegmentUse] = {}  # keys whose newest version cannot be used -> where it lies
        self.misfits = 0  # chunks that are not usable by their numbers
        self._index = index
        self._table = table
        self._is_usable = is_usable
        self._behind: dict[bytes, Segment] = {}  # keys found more than once -> where the oldest version so far lies

    def fill(self, packs: Iterable[tuple[Segment, ScannedPack]]) -> None:
        """Enter the newest version of each key; `packs` come newest first."""
        self._index.fill(self._rows(packs))

    def _rows(self, packs: Iterable[tuple[Segment, ScannedPack]]) -> Iterator[Rows]:
        for segment, pack in packs:
            chunks = pack.chunks
            keys = set(map(_key_of, chunks))
            if len(keys) < len(chunks) or self._index.has_any(keys) or not self.absent.keys().isdisjoint(keys):
                chunks = self._newest(segment, chunks)
            chunks = self._usable(segment, chunks)
            if chunks:
                columns = zip(*chunks, strict=True)
                all_keys, parents, groups, _, offsets, _, live_bytes, checksums, _ = columns
                segment.payload_bytes += sum(live_bytes)
                yield Rows(segment.file.number, all_keys, parents, offsets, live_bytes, checksums, groups)

    def _newest(self, segment: Segment, chunks: list[ScannedChunk]) -> list[ScannedChunk]:
        """The chunks of which no newer version was found; the segments of those that were learn of the older here."""
        newest: dict[bytes, ScannedChunk] = {}
        for chunk in chunks:
            newer = self._last_found(chunk.key)
            if newer is None:
                newest[chunk.key] = chunk
                continue
            self._behind[chunk.key] = segment
            segment.payload_bytes += chunk.live_bytes  # dead, which ages the segment
            if newer is not segment:
                newer.older.add(segment.use)
        return list(newest.values())

    def _last_found(self, key: bytes) -> Segment | None:
        if key in self._behind:
            return self._behind[key]
        number = self.absent[key].number if key in self.absent else self._index.segment_of(key)
        return None if number is None else self._table[number]

    def _usable(self, segment: Segment, chunks: list[ScannedChunk]) -> list[ScannedChunk]:
        kinds = set(map(_kind_of, chunks))  # few, mostly one
        good = {kind for kind in kinds if kind[3] and self._is_usable(*kind[:3])}
        if len(good) == len(kinds):
            return chunks
        usable = []
        for chunk in chunks:
            if _kind_of(chunk) in good:
                usable.append(chunk)
            else:
                self.absent[chunk.key] = segment.use
                self.misfits += chunk.readable
        return usable
