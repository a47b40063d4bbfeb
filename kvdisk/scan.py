"""Recovery: what the segment files of an instance hold, found by reading headers and footers alone.

Nothing is trusted and nothing is fatal. A sealed segment costs two or three small reads; one that was still open is
walked pack by pack. Where a header is torn, packs behind it may still be whole (several are in flight at a time), so
the walk looks ahead as far as writes can have been in flight. Payloads are not read: they are verified when first used.
Time and memory are bounded, whatever the files say: of what only looks like headers no more is read than a segment has
bytes, and of large headers and footers one at a time.
"""

import asyncio
import contextlib
import errno
import gc
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvdisk import codec, layout
from kvdisk.commands import (
    FoundPack,
    FoundSegment,
    Kind,
    ScannedChunks,
    ScannedPack,
    ScannedSegment,
    SegmentFile,
    hashes,
)
from kvdisk.io.protocol import Memory, Span
from kvdisk.io.transfer import TransferLateError
from kvdisk.layout import Pack, SegmentHeader
from kvdisk.plan import PACK_BYTES_MAX, PACKS_INFLIGHT
from kvdisk.units import MIB, round_up

logger = logging.getLogger("kvdisk")

_BATCHES = 6
_BATCH_FILES = 32
"""Files that are opened together, in one thread's call, while those of other batches are being read: a thread for each
would cost more than all else that is done for it."""

_LANES = 8
"""Files of a batch that are read at a time."""

_HEADER_GUESS_BYTES = 64 << 10
_TAIL_GUESS_BYTES = 64 << 10
_SPARE_BYTES_MIN = 16 * MIB
_LARGE_BYTES = 32 * MIB
"""What is larger is read by itself: headers and footers of 200 MiB are possible."""

_COPIED = ("group", "position", "stored_bytes", "live_bytes", "checksum", "codec")
_KNOWN_CODECS = np.zeros(256, bool)
_KNOWN_CODECS[list(codec.KNOWN)] = True


Take = Callable[[FoundSegment], Awaitable[None]]


class Files(Protocol):
    """Open files; see OpenFiles."""

    async def prepare(self, files: Sequence[tuple[SegmentFile, str]]) -> None:
        """Open what is about to be used, as far as that works."""

    def use(self, file: SegmentFile, path: str) -> AbstractAsyncContextManager[int]:
        """The descriptor of `file`."""


class Reads(Protocol):
    """Reads; see Transfer."""

    async def read(self, fd: int, offset: int, spans: Sequence[Span]) -> None:
        """Fill `spans`."""


class Scratch(Protocol):
    """Memory to read into; see BouncePool."""

    def take(self, size: int) -> AbstractContextManager[Memory]:
        """At least `size` bytes."""


class Scanner:
    """Reads the segments of one store. `fingerprint`: of the namespace; segments of another are not ours, nor are
    those of another size or alignment: all reads are aligned to ours."""

    def __init__(
        self,
        files: Files,
        transfer: Reads,
        bounce: Scratch,
        *,
        fingerprint: bytes,
        segment_bytes: int,
        alignment: int,
    ) -> None:
        self._files = files
        self._transfer = transfer
        self._bounce = bounce
        self._fingerprint = fingerprint
        self._segment_bytes = segment_bytes
        self._alignment = alignment
        self._one_large = asyncio.Lock()

    async def scan(self, paths: Sequence[tuple[SegmentFile, str]]) -> list[ScannedSegment]:
        """What `find` finds, decoded, one a file in order."""
        found: dict[SegmentFile, ScannedSegment] = {}

        async def take(one: FoundSegment) -> None:
            found[one.file] = decode_segment(one)

        await self.find(paths, take)
        return [found[file] for file, _ in paths]

    async def find(self, paths: Sequence[tuple[SegmentFile, str]], take: Take) -> None:
        """Give one result a file to `take`; a file that cannot be read counts as holding nothing.

        Args:
            paths: of the files.
            take: gets each result as soon as there is one; what it waits for keeps others from being read.
        """
        batches = iter(range(0, len(paths), _BATCH_FILES))

        async def lane(files: Iterator[tuple[SegmentFile, str]]) -> None:
            for file, path in files:  # shared: who waits for a file keeps no other lane from the rest of the batch
                await take(await self._find_one(file, path))

        async def work() -> None:
            for first in batches:  # shared: a disk that hangs for one batch keeps no other from the rest
                files = paths[first : first + _BATCH_FILES]
                await self._files.prepare(files)
                rest = iter(files)
                await asyncio.gather(*(lane(rest) for _ in range(_LANES)))

        await asyncio.gather(*(work() for _ in range(_BATCHES)))

    async def _find_one(self, file: SegmentFile, path: str) -> FoundSegment:
        try:
            return await self._scan_file(file, path)
        except OSError as error:
            logger.warning("%s cannot be read, its chunks are lost: %s", path, error)
            return FoundSegment(file, None, sealed=False, packs=[], damaged=1)

    async def _scan_file(self, file: SegmentFile, path: str) -> FoundSegment:
        async with self._files.use(file, path) as fd:
            guess = min(_TAIL_GUESS_BYTES, self._segment_bytes - self._alignment)
            with self._bounce.take(max(guess, self._alignment)) as memory:
                await self._transfer.read(fd, 0, [Span(memory, 0, self._alignment)])
                header = layout.decode_segment_header(memory.view[: self._alignment], self._fingerprint)
                if header is None or (header.segment_bytes, header.alignment) != (self._segment_bytes, self._alignment):
                    return FoundSegment(file, None, sealed=False, packs=[])
                try:
                    packs, damaged = await self._read_footer(fd, header, memory, guess)
                except TransferLateError:
                    raise
                except OSError as error:  # cut off, or a bad sector: the packs may be readable all the same
                    logger.warning("footer of %s cannot be read: %s", path, error)
                    packs, damaged = None, 1
            if packs is not None:
                return FoundSegment(file, header, sealed=True, packs=[_found(pack, b"") for pack in packs])
            spare = _Spare(max(header.segment_bytes, _SPARE_BYTES_MIN))
            walked = await self._walk(fd, header, spare)
            if spare.bytes <= 0:
                logger.warning("%s is full of headers of nothing, chunks behind them are lost", path)
                damaged += 1
            return FoundSegment(file, header, sealed=False, packs=walked, damaged=damaged)

    async def _read_footer(
        self, fd: int, header: SegmentHeader, memory: Memory, size: int
    ) -> tuple[list[Pack] | None, int]:
        """The packs a footer names, or None and whether a footer was there but damaged.

        memory: to read into what most footers fit in. size: of that.
        """
        await self._transfer.read(fd, header.segment_bytes - size, [Span(memory, 0, size)])
        tail: layout.Buffer = memory.view[:size]
        needed = layout.footer_size(tail, header)
        if needed == 0:
            return None, 0
        if needed > layout.footer_bytes_max(header):
            raise OSError(errno.EFBIG, f"it claims to have {needed} bytes")
        if needed > size:
            tail = await self._read(fd, header.segment_bytes - needed, needed)
        packs = layout.decode_footer(tail, header)
        return packs, int(packs is None)

    async def _walk(self, fd: int, header: SegmentHeader, spare: "_Spare") -> list[FoundPack]:
        packs: list[FoundPack] = []
        offset = header.alignment
        while offset < header.segment_bytes:
            found = await self._pack_at(fd, offset, header, spare)
            if found is None:
                largest = max([PACK_BYTES_MAX, *(pack.pack_bytes for pack in packs)])
                ahead = await self._look_ahead(fd, offset, header, largest, spare)
                if ahead is None:
                    break
                offset = ahead
                continue
            packs.append(found)
            offset += found.pack_bytes
        return packs

    async def _pack_at(self, fd: int, offset: int, header: SegmentHeader, spare: "_Spare") -> FoundPack | None:
        raw = await self._try_read(fd, offset, min(_HEADER_GUESS_BYTES, header.segment_bytes - offset))
        if not raw:  # a bad sector, or the end of a file that was cut off, near a header that may be whole
            raw = await self._try_read(fd, offset, header.alignment)
        needed = round_up(layout.pack_header_size_at(raw, offset, header), header.alignment)
        if needed > len(raw) and offset + needed <= header.segment_bytes:
            raw = await self._try_read(fd, offset, needed)
        pack = layout.decode_pack(raw, offset, header)
        if pack is None:
            if needed:
                spare.bytes -= max(needed, _HEADER_GUESS_BYTES)
            return None
        return _found(pack, raw[: layout.PACK_HEADER_BYTES])

    async def _look_ahead(
        self, fd: int, offset: int, header: SegmentHeader, largest: int, spare: "_Spare"
    ) -> int | None:
        """Where the next whole pack begins, within what can have been in flight; None if there is none.

        largest: bytes of a pack, as far as is known. One chunk may be more, where nothing before it is whole.
        """
        end = min(header.segment_bytes, offset + PACKS_INFLIGHT * (largest + 2 * MIB))
        at = offset
        while at < end:
            size = min(MIB, end - at)
            raw = await self._try_read(fd, at, size)
            for start in range(0, len(raw), header.alignment):
                candidate, head = at + start, raw[start : start + layout.PACK_HEADER_BYTES]
                if candidate == offset or not layout.pack_header_size_at(head, candidate, header):
                    continue
                if await self._pack_at(fd, candidate, header, spare) is not None:
                    return candidate
                if spare.bytes <= 0:
                    return None
            at += size
        return None

    async def _try_read(self, fd: int, offset: int, size: int) -> bytes:
        """`_read`, or nothing where the disk fails; a disk that does not answer is not asked again."""
        try:
            return await self._read(fd, offset, size)
        except TransferLateError:
            raise
        except OSError:
            return b""

    async def _read(self, fd: int, offset: int, size: int) -> bytes:
        if size > _LARGE_BYTES:
            async with self._one_large:
                return await self._read_now(fd, offset, size)
        return await self._read_now(fd, offset, size)

    async def _read_now(self, fd: int, offset: int, size: int) -> bytes:
        with self._bounce.take(size) as memory:
            await self._transfer.read(fd, offset, [Span(memory, 0, size)])
            return bytes(memory.view[:size])


@dataclass(slots=True)
class _Spare:
    """Bytes that may still be read of one segment's headers that turn out to be none."""

    bytes: int


def _found(pack: Pack, head: bytes) -> FoundPack:
    return FoundPack(pack.sequence, pack.offset, pack.pack_bytes, head, pack.entries.tobytes())


def decode_segment(found: FoundSegment) -> ScannedSegment:
    """What `Scanner.find` found as plain data. It was verified when it was read."""
    entries = np.frombuffer(b"".join([pack.entries for pack in found.packs]), layout.ENTRY_DTYPE)
    ends = list(accumulate(len(pack.entries) // layout.ENTRY_BYTES for pack in found.packs))
    packs = [
        ScannedPack(pack.sequence, pack.offset, pack.pack_bytes, pack.head and pack.head + pack.entries, first, end)
        for pack, first, end in zip(found.packs, [0, *ends], ends, strict=False)
    ]
    chunks = _decode_entries(
        entries,
        np.repeat(np.array([pack.offset for pack in packs], np.uint64), [pack.end - pack.first for pack in packs]),
    )
    return ScannedSegment(found.file, found.header, found.sealed, packs, chunks, found.damaged)


def _decode_entries(entries: npt.NDArray[np.void], pack_offsets: npt.NDArray[np.uint64]) -> ScannedChunks:
    keys = layout.entry_keys(entries)
    parents, lengths = entries["parent"], entries["parent_bytes"]
    follows = (parents[1:] == entries["key"][:-1]) & (lengths[1:] == entries["key_bytes"][:-1])
    heads = [0, *(np.flatnonzero(~follows) + 1).tolist()] if keys else []
    group, position, stored, live, checksum, codec = (entries[name].copy() for name in _COPIED)
    readable = _KNOWN_CODECS[codec] & (entries["cipher"] == layout.CIPHER_NONE)
    return ScannedChunks(
        keys,
        hashes(keys),
        _kinds(group, live, stored, codec, readable),
        dict(zip(heads, layout.entry_keys(entries[heads], "parent"), strict=True)),
        group,
        position,
        entries["offset"] + pack_offsets,
        stored,
        live,
        checksum,
        readable,
        codec,
    )


def _kinds(*columns: npt.NDArray[Any]) -> set[Kind]:
    if len(columns[0]) and all((column == column[0]).all() for column in columns):
        columns = tuple(column[:1] for column in columns)
    return set(zip(*(column.tolist() for column in columns), strict=True))


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Without the cyclic collector: what a scan makes lives to its end, and looking at all of it again and again took a
    third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
