"""What the metadata plane asks of the data plane, and what it hears back: plain data, which may cross to a process.

They are msgspec's structs: cheap to make and to encode, and decoded with every type checked.

Every command gets exactly one `Completion` by its deadline. If that one is `late` (the kernel still holds the buffers),
a second one with `settled` follows when the kernel gave them back; until then slots and segment stay in use.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvdisk.layout import CODEC_NONE, SegmentHeader


class SegmentFile(NamedTuple):
    """Which file: `root` indexes the store's roots, `number` names the file in it and is unique over all roots."""

    root: int
    number: int


class OpenSegment(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Make a file ready for packs: create and preallocate it, or recycle it in place; then write its header."""

    id: int
    file: SegmentFile
    header: SegmentHeader
    recycle: bool


class PackChunk(NamedTuple):
    """A chunk to be written: its slot's first unit, the live bytes of each part, and what its header entry says."""

    unit: int
    parts: tuple[int, ...]
    key: bytes
    parent: bytes
    group: int
    position: int


class WritePack(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Checksum the chunks' slots and write them at `offset` as one pack.

    compress: chunks that shrink enough are written so. Then a completion that only has `packed_bytes` comes before the
    command's own one.
    """

    id: int
    file: SegmentFile
    header: SegmentHeader
    offset: int
    sequence: int
    chunks: tuple[PackChunk, ...]
    compress: bool = False


class ReadItem(NamedTuple):
    """A chunk to be read: where its payload starts, its parts, what it must hash to, and its slot's first unit.

    codec: of the payload. stored_bytes: of a payload with a codec; without one the parts say it.
    """

    offset: int
    parts: tuple[int, ...]
    checksum: int
    unit: int
    codec: int = CODEC_NONE
    stored_bytes: int = 0


class ReadChunks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read neighbouring payloads of one segment into slots and verify each."""

    id: int
    file: SegmentFile
    items: tuple[ReadItem, ...]


class SealSegment(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write the footer (it ends where the segment ends)."""

    id: int
    file: SegmentFile
    offset: int
    footer: bytes


class WriteEpoch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Make the namespace's new epoch durable on every root."""

    id: int
    epoch: int


Command = OpenSegment | WritePack | ReadChunks | SealSegment | WriteEpoch


class Completion(msgspec.Struct, array_like=True):
    """The result of command `id`.

    error: 0, or the errno that ended it. late: the deadline passed, buffers are still in use. settled: they are free
    now; the command's own completion came before. verified: one bool an item of ReadChunks; True only where the bytes
    arrived and matched. errors: one errno an item, 0 where it was read, matching or not; empty if all shared one read
    and `error`. pack_header: of WritePack, the unpadded header as written. checksums: of its chunks. packed_bytes: of a
    WritePack that compresses, the size of the pack that is now being written; the result is yet to come.
    """

    id: int
    error: int = 0
    late: bool = False
    settled: bool = False
    verified: list[bool] = []
    errors: list[int] = []
    pack_header: bytes = b""
    checksums: list[int] = []
    packed_bytes: int = 0


class FoundPack(NamedTuple):
    """One verified pack header as a scan leaves it: `entries` are its ENTRY_DTYPE records, `head` the bytes before
    them, kept where the segment is still open."""

    sequence: int
    offset: int
    pack_bytes: int
    head: bytes
    entries: bytes


class FoundSegment(NamedTuple):
    """One segment file as a scan leaves it: few objects and many bytes, so that it can cross to another process."""

    file: SegmentFile
    header: SegmentHeader | None
    sealed: bool
    packs: list[FoundPack]
    damaged: int = 0


class ScannedChunk(NamedTuple):
    """One chunk found at recovery; see ENTRY_DTYPE for the fields."""

    key: bytes
    parent: bytes
    group: int
    position: int
    offset: int  # in the segment
    stored_bytes: int
    live_bytes: int
    checksum: int
    readable: bool = True  # False: its codec or cipher is of another version
    codec: int = CODEC_NONE


class Columns(NamedTuple):
    """Chunks as a column a field, see ScannedChunk."""

    key: Sequence[bytes]
    parent: Sequence[bytes]
    group: Sequence[int]
    position: Sequence[int]
    offset: Sequence[int]
    stored_bytes: Sequence[int]
    live_bytes: Sequence[int]
    checksum: Sequence[int]
    readable: Sequence[bool]
    codec: Sequence[int]


class ScannedChunks(Collection[ScannedChunk]):
    """The chunks of a pack, kept as columns: of a million only those are made into tuples that have something wrong."""

    __slots__ = ("columns",)

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns.key)

    def __iter__(self) -> Iterator[ScannedChunk]:
        return map(ScannedChunk._make, zip(*self.columns, strict=True))

    def __contains__(self, chunk: object) -> bool:
        return any(chunk == one for one in self)


@dataclass(slots=True)
class ScannedPack:
    """One pack found at recovery; `raw` is its unpadded header, kept where the segment is still open."""

    sequence: int
    offset: int
    pack_bytes: int
    raw: bytes
    chunks: Collection[ScannedChunk]


@dataclass(slots=True)
class ScannedSegment:
    """One segment file found at recovery. header None: nothing in it is ours to keep, the file may be recycled."""

    file: SegmentFile
    header: SegmentHeader | None
    sealed: bool
    packs: list[ScannedPack]
    damaged: int = 0  # headers that should have been readable and were not
