"""Recovery: what a scan found becomes the segment table and the index.

What must hold:
- The newest version of a key decides, also where it cannot be used: it has a codec or cipher of another version, or no
  slot of this store can hold it. Then the key is absent; an older version is never served in its place.
- A segment with a newer version knows those with older ones, so that it is not recycled before them.
- Linear, and for the most part whole segments at a time: a terabyte of 1 MiB chunks is indexed in about a second.
Pure. Numbers come from a stranger: `is_usable` decides which of them the store can live with.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvdisk.commands import Kind, ScannedChunk, ScannedChunks, ScannedPack, ScannedSegment, kind_of
from kvdisk.index import Index
from kvdisk.layout import SegmentHeader
from kvdisk.segments import Segment, SegmentState, SegmentTable, SegmentUse


class Recovery:
    """Fills an empty table and an empty index.

    Args:
        index, table: of the store.
        is_usable: of (group, live bytes, stored bytes, codec): whether the store can hold such a chunk.
    """

    def __init__(self, index: Index, table: SegmentTable, is_usable: Callable[[int, int, int, int], bool]) -> None:
        self.absent: dict[bytes, SegmentUse] = {}  # keys whose newest version cannot be used -> where it lies
        self.damaged = 0  # headers, and chunks that are not usable by their numbers
        self.next_sequence = 1  # of segments: above all that were found
        self.next_pack_sequence = 1
        self._index = index
        self._table = table
        self._is_usable = is_usable
        self._kinds: dict[Kind, bool] = {}  # whether they are usable
        self._behind: dict[bytes, Segment] = {}  # keys found more than once -> where the oldest version so far lies

    def take(self, scans: Iterable[ScannedSegment], epoch: int) -> None:
        """Take in the segments, and the newest version of each key; what is of another epoch is stale."""
        current: list[tuple[Segment, ScannedSegment]] = []
        for scan in sorted(scans, key=lambda s: s.header.sequence if s.header else 0):
            segment = Segment(scan.file, SegmentState.EMPTY)
            self._table.adopt(segment)
            self.damaged += scan.damaged
            if scan.header is not None:
                self.next_sequence = max(self.next_sequence, scan.header.sequence + 1)
                if scan.header.epoch == epoch:
                    self._take_segment(segment, scan, scan.header)
                    current.append((segment, scan))
        self.next_pack_sequence = 1 + max((pack.sequence for _, scan in current for pack in scan.packs), default=0)
        self._index.fill(self._found(current))

    def _take_segment(self, segment: Segment, scan: ScannedSegment, header: SegmentHeader) -> None:
        segment.header = header
        segment.on_disk = header.sequence
        segment.state = SegmentState.SEALED if scan.sealed else SegmentState.OPEN
        segment.tail = max((pack.offset + pack.pack_bytes for pack in scan.packs), default=header.alignment)
        segment.raw_header_bytes = sum([len(pack.raw) for pack in scan.packs])
        if not scan.sealed:
            segment.pack_headers = {pack.offset: pack.raw for pack in scan.packs}
        self._table.touch(segment.file.number)

    def _found(self, current: Sequence[tuple[Segment, ScannedSegment]]) -> Iterator[tuple[int, ScannedChunks]]:
        """The newest version of each key that is usable, by segment. A segment whose keys are in it once and nowhere
        else is taken whole; the packs of the others newest first."""
        twice = _found_twice([scan.chunks.hash for _, scan in current])
        packs: list[tuple[ScannedPack, Segment, ScannedChunks]] = []
        for segment, scan in current:
            if _any_in(scan.chunks.hash, twice):
                packs += [(pack, segment, scan.chunks) for pack in scan.packs]
            elif all(self._can_use(kind) for kind in scan.chunks.kinds):
                yield self._give(segment, scan.chunks)
            else:
                yield self._give_usable(segment, scan.chunks.rows(0, len(scan.chunks.key)))
        packs.sort(key=lambda one: one[0].sequence, reverse=True)
        for pack, segment, chunks in packs:
            yield self._give_usable(segment, self._newest(segment, chunks.rows(pack.first, pack.end)))

    def _give_usable(self, segment: Segment, chunks: Iterable[ScannedChunk]) -> tuple[int, ScannedChunks]:
        usable = []
        for chunk in chunks:
            if self._can_use(kind_of(chunk)):
                usable.append(chunk)
            else:
                self.absent[chunk.key] = segment.use
                self.damaged += chunk.readable
        return self._give(segment, ScannedChunks.of(usable))

    def _give(self, segment: Segment, chunks: ScannedChunks) -> tuple[int, ScannedChunks]:
        segment.payload_bytes += int(chunks.live_bytes.sum())
        return segment.file.number, chunks

    def _newest(self, segment: Segment, chunks: Iterable[ScannedChunk]) -> Iterable[ScannedChunk]:
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
        return newest.values()

    def _last_found(self, key: bytes) -> Segment | None:
        if key in self._behind:
            return self._behind[key]
        number = self.absent[key].number if key in self.absent else self._index.segment_of(key)
        return None if number is None else self._table[number]

    def _can_use(self, kind: Kind) -> bool:
        known = self._kinds.get(kind)
        if known is None:
            known = self._kinds[kind] = kind[4] and self._is_usable(*kind[:4])
        return known


def _found_twice(hashes: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Those that are there more than once, in order; two different keys may have one hash, which costs time only."""
    ordered = np.sort(np.concatenate([*hashes, np.empty(0, np.int64)]))
    twice: npt.NDArray[np.int64] = ordered[1:][ordered[1:] == ordered[:-1]]
    return twice


def _any_in(hashes: npt.NDArray[np.int64], ordered: npt.NDArray[np.int64]) -> bool:
    """Whether one of `hashes` is among `ordered`. Not `np.isin`: that would sort them all again for each segment."""
    if not len(ordered):
        return False
    places = np.minimum(np.searchsorted(ordered, hashes), len(ordered) - 1)
    return bool((ordered[places] == hashes).any())
