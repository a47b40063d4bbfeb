"""Recovery: what the segment files of an instance hold, found by reading headers and footers alone.

Nothing is trusted and nothing is fatal. A sealed segment costs two or three small reads; one that was still open is
walked pack by pack. Where a header is torn, packs behind it may still be whole (several are in flight at a time), so
the walk looks ahead as far as writes can have been in flight. Payloads are not read: they are verified when first used.
Time and memory are bounded, whatever the files say: of what only looks like headers no more is read than a segment has
bytes, and of large headers and footers one at a time.
"""

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvdisk import codec, layout
from kvdisk.commands import (
    Columns,
    FoundPack,
    FoundSegment,
    ScannedChunks,
    ScannedPack,
    ScannedSegment,
    SegmentFile,
)
from kvdisk.io.protocol import Memory, Span
from kvdisk.io.transfer import TransferLateError
from kvdisk.layout import Pack, SegmentHeader
from kvdisk.units import MIB, round_up
from kvdisk.writer import PACK_BYTES_MAX, PACKS_INFLIGHT

logger = logging.getLogger("kvdisk")

_AT_ONCE = 16
_HEADER_GUESS_BYTES = 64 << 10
_TAIL_GUESS_BYTES = 64 << 10
_SPARE_BYTES_MIN = 16 * MIB
_LARGE_BYTES = 32 * MIB
"""What is larger is read by itself: headers and footers of 200 MiB are possible."""

_KNOWN_CODECS = np.zeros(256, bool)
_KNOWN_CODECS[list(codec.KNOWN)] = True


Take = Callable[[FoundSegment], Awaitable[None]]


class Files(Protocol):
    """Open files; see OpenFiles."""

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
        """`find`, decoded."""
        return [decode_segment(found) for found in await self.find(paths)]

    async def find(self, paths: Sequence[tuple[SegmentFile, str]], take: Take | None = None) -> list[FoundSegment]:
        """One result a file, in order; a file that cannot be read counts as holding nothing.

        Args:
            paths: of the files.
            take: gets each result as soon as there is one; what it waits for keeps others from being read.
        """
        limit = asyncio.Semaphore(_AT_ONCE)

        async def one(file: SegmentFile, path: str) -> FoundSegment:
            async with limit:
                try:
                    found = await self._scan_file(file, path)
                except OSError as error:
                    logger.warning("%s cannot be read, its chunks are lost: %s", path, error)
                    found = FoundSegment(file, None, sealed=False, packs=[], damaged=1)
                if take is not None:
                    await take(found)
                return found

        return await asyncio.gather(*(one(file, path) for file, path in paths))

    async def _scan_file(self, file: SegmentFile, path: str) -> FoundSegment:
        async with self._files.use(file, path) as fd:
            raw = await self._read(fd, 0, self._alignment)
            header = layout.decode_segment_header(raw, self._fingerprint)
            if header is None or (header.segment_bytes, header.alignment) != (self._segment_bytes, self._alignment):
                return FoundSegment(file, None, sealed=False, packs=[])
            try:
                packs, damaged = await self._read_footer(fd, header)
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

    async def _read_footer(self, fd: int, header: SegmentHeader) -> tuple[list[Pack] | None, int]:
        """The packs a footer names, or None and whether a footer was there but damaged."""
        size = min(_TAIL_GUESS_BYTES, header.segment_bytes - header.alignment)
        tail = await self._read(fd, header.segment_bytes - size, size)
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
                ahead = await self._look_ahead(fd, offset, header, spare)
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

    async def _look_ahead(self, fd: int, offset: int, header: SegmentHeader, spare: "_Spare") -> int | None:
        """Where the next whole pack begins, within what can have been in flight; None if there is none."""
        pack_max = max(PACK_BYTES_MAX, header.segment_bytes // 4) + 2 * MIB
        end = min(header.segment_bytes, offset + PACKS_INFLIGHT * pack_max)
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
    packs = [_decode_pack(pack) for pack in found.packs]
    return ScannedSegment(found.file, found.header, found.sealed, packs, found.damaged)


def _decode_pack(pack: FoundPack) -> ScannedPack:
    entries = np.frombuffer(pack.entries, layout.ENTRY_DTYPE)
    codecs = entries["codec"]
    known = (_KNOWN_CODECS[codecs] & (entries["cipher"] == layout.CIPHER_NONE)).tolist()
    columns = Columns(
        layout.entry_keys(entries),
        layout.entry_keys(entries, "parent"),
        entries["group"].tolist(),
        entries["position"].tolist(),
        (entries["offset"] + pack.offset).tolist(),
        entries["stored_bytes"].tolist(),
        entries["live_bytes"].tolist(),
        entries["checksum"].tolist(),
        known,
        codecs.tolist(),
    )
    raw = pack.head + pack.entries if pack.head else b""
    return ScannedPack(pack.sequence, pack.offset, pack.pack_bytes, raw, ScannedChunks(columns))
