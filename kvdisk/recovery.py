"""Recovery: what a scan found becomes the segment table and the index.

What must hold:
- The newest version of a key decides, also where it cannot be used: it has a codec or cipher of another version, or no
  slot of this store can hold it. Then the key is absent; an older version is never served in its place.
- A segment with a newer version knows those with older ones, so that it is not recycled before them.
- Linear, and for the most part whole packs at a time: a terabyte of 1 MiB chunks is indexed in about a second.
Pure. Numbers come from a stranger: `is_usable` decides which of them the store can live with.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from operator import attrgetter

from kvdisk.commands import Columns, ScannedChunk, ScannedChunks, ScannedPack, ScannedSegment
from kvdisk.index import Index, Rows
from kvdisk.layout import SegmentHeader
from kvdisk.segments import Segment, SegmentState, SegmentTable, SegmentUse

_kind_of = attrgetter("group", "live_bytes", "stored_bytes", "codec", "readable")


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
        self._behind: dict[bytes, Segment] = {}  # keys found more than once -> where the oldest version so far lies

    def take(self, scans: Iterable[ScannedSegment], epoch: int) -> None:
        """Take in the segments, and the newest version of each key; what is of another epoch is stale."""
        packs: list[tuple[Segment, ScannedPack]] = []
        for scan in sorted(scans, key=lambda s: s.header.sequence if s.header else 0):
            segment = Segment(scan.file, SegmentState.EMPTY)
            self._table.adopt(segment)
            self.damaged += scan.damaged
            if scan.header is not None:
                self.next_sequence = max(self.next_sequence, scan.header.sequence + 1)
                if scan.header.epoch == epoch:
                    self._take_segment(segment, scan, scan.header)
                    packs += [(segment, pack) for pack in scan.packs]
        packs.sort(key=lambda one: one[1].sequence, reverse=True)
        if packs:
            self.next_pack_sequence = packs[0][1].sequence + 1
        self._index.fill(self._rows(packs))

    def _take_segment(self, segment: Segment, scan: ScannedSegment, header: SegmentHeader) -> None:
        segment.header = header
        segment.on_disk = header.sequence
        segment.state = SegmentState.SEALED if scan.sealed else SegmentState.OPEN
        segment.tail = max((pack.offset + pack.pack_bytes for pack in scan.packs), default=header.alignment)
        segment.raw_header_bytes = sum(len(pack.raw) for pack in scan.packs)
        if not scan.sealed:
            segment.pack_headers = {pack.offset: pack.raw for pack in scan.packs}
        self._table.touch(segment.file.number)

    def _rows(self, packs: Iterable[tuple[Segment, ScannedPack]]) -> Iterator[Rows]:
        """The newest version of each key that is usable; `packs` come newest first."""
        for segment, pack in packs:
            chunks = pack.chunks
            keys = set(_columns(chunks).key)
            if len(keys) < len(chunks) or self._index.has_any(keys) or not self.absent.keys().isdisjoint(keys):
                chunks = self._newest(segment, chunks)
            chunks = self._usable(segment, chunks)
            if chunks:
                found = _columns(chunks)
                segment.payload_bytes += sum(found.live_bytes)
                packed = (found.codec, found.stored_bytes) if any(found.codec) else ()
                yield Rows(segment.file.number, found.key, found.parent, found.offset, found.live_bytes,
                           found.checksum, found.group, *packed)  # fmt: skip

    def _newest(self, segment: Segment, chunks: Collection[ScannedChunk]) -> Collection[ScannedChunk]:
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

    def _usable(self, segment: Segment, chunks: Collection[ScannedChunk]) -> Collection[ScannedChunk]:
        kinds = _kinds(_columns(chunks))  # few, mostly one, unless the chunks are compressed
        good = {kind for kind in kinds if kind[4] and self._is_usable(*kind[:4])}
        if len(good) == len(kinds):
            return chunks
        usable = []
        for chunk in chunks:
            if _kind_of(chunk) in good:
                usable.append(chunk)
            else:
                self.absent[chunk.key] = segment.use
                self.damaged += chunk.readable
        return usable


def _columns(chunks: Collection[ScannedChunk]) -> Columns:
    if isinstance(chunks, ScannedChunks):
        return chunks.columns
    return Columns(*zip(*chunks, strict=True)) if chunks else Columns(*((),) * len(Columns._fields))


def _kinds(columns: Columns) -> set[tuple[int, int, int, int, bool]]:
    """What decides whether a chunk is usable, see `_kind_of`."""
    return set(
        zip(columns.group, columns.live_bytes, columns.stored_bytes, columns.codec, columns.readable, strict=True)
    )
