"""What the metadata plane asks of the data plane, and what it hears back: plain data, which may cross to a process.

They are msgspec's structs: cheap to make and to encode, and decoded with every type checked.

Every command gets exactly one `Completion` by its deadline. If that one is `late` (the kernel still holds the buffers),
a second one with `settled` follows when the kernel gave them back; until then slots and segment stay in use.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

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


Kind = tuple[int, int, int, int, bool]
kind_of = attrgetter("group", "live_bytes", "stored_bytes", "codec", "readable")


class ScannedChunks(NamedTuple):
    """Chunks as a column a field, see ScannedChunk: of a million only those are made into tuples that have something
    wrong.

    hash: of the keys, as Python hashes them. kinds: what decides whether a chunk is usable, see `kind_of`; few, mostly
    one, unless chunks are compressed. parent: by place; of a chunk that is not there it is the key before.
    """

    key: list[bytes]
    hash: npt.NDArray[np.int64]
    kinds: set[Kind]
    parent: dict[int, bytes]
    group: npt.NDArray[np.uint32]
    position: npt.NDArray[np.uint64]
    offset: npt.NDArray[np.uint64]
    stored_bytes: npt.NDArray[np.uint64]
    live_bytes: npt.NDArray[np.uint64]
    checksum: npt.NDArray[np.uint64]
    readable: npt.NDArray[np.bool_]
    codec: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, chunks: Sequence[ScannedChunk]) -> "ScannedChunks":
        """`chunks`, whose numbers must fit into the columns."""
        keys, parents, *numbers = zip(*chunks, strict=True) if chunks else [()] * len(ScannedChunk._fields)
        types = (np.uint32, *[np.uint64] * 5, np.bool_, np.uint8)
        columns: list[npt.NDArray[Any]] = [np.array(column, one) for column, one in zip(numbers, types, strict=True)]
        return cls(list(keys), hashes(keys), set(map(kind_of, chunks)), dict(enumerate(parents)), *columns)

    def rows(self, first: int, end: int) -> list[ScannedChunk]:
        """Those from `first` to before `end`."""
        parents = [self.parent[n] if n in self.parent else self.key[n - 1] for n in range(first, end)]
        numbers = [column[first:end].tolist() for column in self[4:]]
        return list(map(ScannedChunk, self.key[first:end], parents, *numbers))


def hashes(keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Of each key; Python keeps it with the key, so that the index need not hash it again."""
    return np.fromiter(map(hash, keys), np.int64, len(keys))


class ScannedPack(NamedTuple):
    """One pack found at recovery; its chunks are those of its segment from `first` to before `end`, and `raw` its
    unpadded header, kept where the segment is still open."""

    sequence: int
    offset: int
    pack_bytes: int
    raw: bytes
    first: int
    end: int


class ScannedSegment(NamedTuple):
    """One segment file found at recovery. header None: nothing in it is ours to keep, the file may be recycled."""

    file: SegmentFile
    header: SegmentHeader | None
    sealed: bool
    packs: list[ScannedPack]
    chunks: ScannedChunks
    damaged: int = 0  # headers that should have been readable and were not
