"""What a scan costs whatever the files say: bounded bytes, bounded memory, and nothing real lost to forgeries."""

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import pytest

from kvdisk import codec, layout, scan
from kvdisk.commands import FoundPack, FoundSegment, ScannedChunk, ScannedSegment, SegmentFile, kind_of
from kvdisk.io.protocol import Memory, Span
from kvdisk.layout import Pack, SegmentHeader
from kvdisk.scan import Scanner
from kvdisk.units import MIB
from tests.simstore import FINGERPRINT, _memory

ALIGN = 4096
HEADER = SegmentHeader(ALIGN, 32 * MIB, 7, 0x1234_5678_9ABC, 3, FINGERPRINT)


class Disk:
    """Segments in memory, and what was read of them: what a Scanner needs of files, transfer and scratch memory."""

    def __init__(self, *files: bytearray) -> None:
        self.files = files
        self.read_bytes = 0
        self.largest = 0
        self.taken: list[int] = []  # sizes of the large buffers that are out
        self.taken_max = 0

    async def prepare(self, files: Sequence[tuple[SegmentFile, str]]) -> None:
        pass

    @contextlib.asynccontextmanager
    async def use(self, file: SegmentFile, path: str) -> AsyncIterator[int]:
        yield file.number

    @contextlib.contextmanager
    def take(self, size: int) -> Iterator[Memory]:
        self.taken.append(size)
        self.taken_max = max(self.taken_max, sum(one > scan._LARGE_BYTES for one in self.taken))
        yield _memory(size)
        self.taken.remove(size)

    async def read(self, fd: int, offset: int, spans: Sequence[Span]) -> None:
        await asyncio.sleep(0)
        for memory, start, length in spans:
            memory.view[start : start + length] = self.files[fd][offset : offset + length]
            self.read_bytes += length
            self.largest = max(self.largest, length)

    def scan(self, header: SegmentHeader = HEADER) -> list[ScannedSegment]:
        scanner = Scanner(
            self, self, self, fingerprint=FINGERPRINT, segment_bytes=header.segment_bytes, alignment=ALIGN
        )
        return asyncio.run(scanner.scan([(SegmentFile(0, n), f"file{n}") for n in range(len(self.files))]))


def segment(header: SegmentHeader = HEADER) -> bytearray:
    raw = bytearray(header.segment_bytes)
    raw[:ALIGN] = layout.encode_segment_header(header)
    return raw


def real_pack(offset: int, header: SegmentHeader = HEADER) -> bytes:
    entries = np.zeros(1, layout.ENTRY_DTYPE)
    entries[0]["key"], entries[0]["key_bytes"] = b"k", 1
    entries[0]["offset"], entries[0]["stored_bytes"], entries[0]["live_bytes"] = ALIGN, ALIGN, ALIGN
    return layout.encode_pack(Pack(offset, ALIGN, 2 * ALIGN, 1, entries), header)


def forged_head(offset: int, header: SegmentHeader, count: int) -> bytes:
    """As large a header as there can be, by its first bytes."""
    header_bytes = layout.pack_header_bytes(count, ALIGN)
    fields = (b"KVDpack\n", 1, count, header_bytes, 0, header_bytes, 1, header.sequence, header.nonce, offset)
    return layout._PACK.pack(*fields, header.fingerprint, bytes(24), 99)


def test_remains_of_other_packs_cost_no_read_of_their_own() -> None:
    raw = segment()
    other = HEADER._replace(nonce=1)
    for offset in range(2 * ALIGN, HEADER.segment_bytes, ALIGN):
        raw[offset : offset + 128] = forged_head(offset, other, 1 << 20)
        struct.pack_into("<I", raw, offset + 12, 1 << 20)
    disk = Disk(raw)
    (found,) = disk.scan()
    assert (found.packs, found.damaged) == ([], 0)
    assert disk.read_bytes < HEADER.segment_bytes + MIB, "the walk and the look ahead, and no candidate"


def test_copied_heads_cost_no_more_than_the_segment_once_more() -> None:
    raw = segment()
    for offset in range(2 * ALIGN, HEADER.segment_bytes, ALIGN):
        count = min(1 << 20, (HEADER.segment_bytes - offset - 128) // layout.ENTRY_BYTES)
        count -= layout.pack_header_bytes(count, ALIGN) > HEADER.segment_bytes - offset
        raw[offset : offset + 128] = forged_head(offset, HEADER, count)
    disk = Disk(raw)
    (found,) = disk.scan()
    assert (found.packs, found.damaged) == ([], 1)
    assert disk.read_bytes < 4 * HEADER.segment_bytes


def test_a_real_pack_behind_forged_ones_is_found() -> None:
    raw = segment()
    for number in range(1, 9):
        raw[number * ALIGN : number * ALIGN + 128] = forged_head(number * ALIGN, HEADER, 1000)
    place = 100 * ALIGN
    pack = real_pack(place)
    raw[place : place + len(pack)] = pack
    (found,) = Disk(raw).scan()
    assert [one.offset for one in found.packs] == [place]
    assert found.damaged == 0


def test_no_footer_is_read_that_is_larger_than_its_segment_s_chunks_allow() -> None:
    raw = segment()
    size = HEADER.segment_bytes // 2
    raw[-48:] = layout._FOOTER.pack(b"KVDfoot\n", 1, 1, size, HEADER.sequence, HEADER.nonce, 0)
    disk = Disk(raw)
    disk.scan()
    assert disk.largest <= MIB


def test_large_headers_are_read_one_at_a_time() -> None:
    header = HEADER._replace(segment_bytes=48 * MIB)
    count = scan._LARGE_BYTES // layout.ENTRY_BYTES + 1000
    files = []
    for _ in range(3):
        raw = segment(header)
        raw[ALIGN : ALIGN + 128] = forged_head(ALIGN, header, count)
        files.append(raw)
    disk = Disk(*files)
    disk.scan(header)
    assert disk.largest > scan._LARGE_BYTES
    assert disk.taken_max == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_scanned_segment_says_of_each_chunk_what_its_header_says(seed: int) -> None:
    chance = random.Random(seed)
    lengths = [36] if seed % 2 else range(1, 65)
    packs, expected, key = [], [], b""
    for number in range(3):
        entries = np.zeros(chance.randrange(1, 6), layout.ENTRY_DTYPE)
        place = (number + 1) * MIB
        for entry in entries:
            parent, key = chance.choice([key, key, b"", b"other"]), chance.randbytes(chance.choice(lengths))
            entry["key"], entry["key_bytes"] = key.ljust(64, b"\xff"), len(key)  # what is behind a key does not count
            entry["parent"], entry["parent_bytes"] = parent.ljust(64, b"\0"), len(parent)
            numbers = [chance.randrange(1 << bits) for bits in (32, 63, 62, 63, 63, 64)]
            for name, value in zip(ScannedChunk._fields[2:], numbers, strict=False):
                entry[name] = value
            entry["codec"], entry["cipher"] = chance.choice([0, 0, 1, 255]), chance.choice([0, 0, 0, 1])
            readable = bool(entry["codec"] in codec.KNOWN and not entry["cipher"])
            numbers[2] += place
            expected.append(ScannedChunk(key, parent, *numbers, readable, int(entry["codec"])))
        packs.append(FoundPack(number, place, MIB, b"", entries.tobytes()))
    found = scan.decode_segment(FoundSegment(SegmentFile(0, 0), HEADER, sealed=True, packs=packs))
    assert found.chunks.rows(0, len(expected)) == expected
    assert found.chunks.kinds == set(map(kind_of, expected))
    counts = [len(pack.entries) // layout.ENTRY_BYTES for pack in packs]
    assert [(pack.first, pack.end) for pack in found.packs] == list(pairwise(accumulate(counts, initial=0)))
