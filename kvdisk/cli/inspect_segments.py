"""One segment file as `kvdisk inspect` sees it: opened for reading only, decoded by the scanner that recovery uses.

What must hold:
- Nothing is written, locked or followed (links), and what is read at once, or in all of one file, is bounded: headers
  may claim anything, also under a valid checksum.
- A file that a running server writes to is looked at again before it is called damaged: a footer is written over some
  milliseconds, and a file may be recycled between two reads.

What can fail: nothing. A file that cannot be read is a finding like any other.
"""

import asyncio
import contextlib
import errno
import logging
import os
import stat
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

from kvdisk import layout
from kvdisk.commands import ScannedChunks, ScannedPack, ScannedSegment, SegmentFile
from kvdisk.io.protocol import Memory, Span
from kvdisk.layout import SegmentHeader
from kvdisk.options import SEGMENT_BYTES_MAX
from kvdisk.scan import Scanner
from kvdisk.units import GIB, MIB, format_size

ALIGNMENT_MAX = 1 << 20
"""Direct I/O wants 512 bytes to 64 KiB; more is nobody's file system."""

TRIES = 4
RETRIES_MAX = 40  # in all: a whole disk of damaged files is not to take minutes
PAUSE_S = 0.05
_PACK_HEADER_MAX = 4 * MIB  # packs of many chunks have at most 32 MiB, hence 8192 chunks
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO in a segment's place must not hang

SEALED, OPEN, EMPTY, OTHER, DAMAGED, UNREADABLE = STATES = (
    "sealed",
    "open",
    "empty",
    "other",
    "damaged",
    "unreadable",
)
"""other: whole, but of another namespace, so that its server recycles it. empty: no header was ever written."""


@dataclass
class SegmentReport:
    """One segment file. Sizes in bytes.

    Attributes:
        number: of its name.
        state: one of STATES.
        problem: why it is damaged or unreadable, else "".
        sequence: of this use of the file; 0 where there is no header.
        epoch: of the namespace when it was opened.
        file_bytes, allocated_bytes: its length, and what it takes by st_blocks.
        pack_count, chunk_count: that can be read.
        header_bytes: segment header, pack headers and footer, with their padding.
        stored_bytes, live_bytes: of all payloads, with and without padding.
        gap_bytes: between packs: a write that failed, or was torn.
        tail_bytes: behind the last pack, for packs to come or wasted.
        has_remains: an open one whose file was in use before: it was recycled.
    """

    number: int
    state: str
    problem: str = ""
    sequence: int = 0
    epoch: int = 0
    file_bytes: int = 0
    allocated_bytes: int = 0
    pack_count: int = 0
    chunk_count: int = 0
    header_bytes: int = 0
    stored_bytes: int = 0
    live_bytes: int = 0
    gap_bytes: int = 0
    tail_bytes: int = 0
    has_remains: bool = False


@dataclass
class Looked:
    """A segment's report, and what was found in it (not for JSON)."""

    report: SegmentReport
    scan: ScannedSegment
    header: SegmentHeader | None = None


@dataclass
class _Reading:
    """What the scanner needs of an engine, for one open descriptor: plain reads, of bounded size and sum.

    An honest file is read 9 times over at worst (64 KiB for each pack of 8 KiB), and has one thing that is large.
    """

    fd: int
    left_bytes: int
    footer_bytes_max: int
    trouble: str = field(default="", init=False)  # what the first read that failed said

    async def prepare(self, files: Sequence[tuple[SegmentFile, str]]) -> None:
        """It is open."""

    @contextlib.asynccontextmanager
    async def use(self, file: SegmentFile, path: str) -> AsyncIterator[int]:
        """The descriptor."""
        yield self.fd

    @contextlib.contextmanager
    def take(self, size: int) -> Iterator[Memory]:
        """Memory for one read."""
        if size > _PACK_HEADER_MAX:
            limit, self.footer_bytes_max = self.footer_bytes_max, 0
        else:
            limit = self.left_bytes
        if size > limit:
            self.trouble = self.trouble or f"its headers claim more than there can be ({format_size(size)} to be read)"
            raise OSError(errno.EFBIG, self.trouble)
        yield Memory(memoryview(bytearray(size)), 0, "")

    async def read(self, fd: int, offset: int, spans: Sequence[Span]) -> None:
        """Fill the spans, or OSError."""
        for memory, start, length in spans:
            self.left_bytes -= length
            try:
                count = os.preadv(fd, [memory.view[start : start + length]], offset)
            except OSError as error:
                self.trouble = self.trouble or f"{error.strerror} at offset {offset}"
                raise
            if count != length:
                raise OSError(errno.EIO, f"the file ends at {offset + count}")
            offset += length


class Looker:
    """Looks at segment files, one after another; `close` it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()  # the scanner is asynchronous; reads here are not
        self._retries_left = RETRIES_MAX

    def close(self) -> None:
        """Release the loop."""
        self._loop.close()

    def look_at(self, path: str, number: int, fingerprint_start: str, *, is_owned: bool) -> Looked:
        """Read one segment file.

        Args:
            path: of the file.
            number: what its name says.
            fingerprint_start: hex digits that its namespace's fingerprint begins with.
            is_owned: whether a server may be writing to it.
        """
        looked = self._look_once(path, number, fingerprint_start)
        for _ in range(TRIES - 1 if is_owned else 0):
            if looked.report.state not in (DAMAGED, UNREADABLE) or not self._retries_left:
                break
            self._retries_left -= 1
            time.sleep(PAUSE_S)
            looked = self._look_once(path, number, fingerprint_start)
        return looked

    def _look_once(self, path: str, number: int, fingerprint_start: str) -> Looked:
        report = SegmentReport(number, UNREADABLE)
        looked = Looked(report, ScannedSegment(SegmentFile(0, number), None, False, [], ScannedChunks.of([])))
        try:
            fd = os.open(path, _OPEN_FLAGS)
        except OSError as error:
            report.problem = error.strerror or str(error)
            return looked
        try:
            info = os.fstat(fd)
            report.file_bytes, report.allocated_bytes = info.st_size, info.st_blocks * 512
            if stat.S_ISREG(info.st_mode):
                self._decode(fd, path, looked, fingerprint_start)
            else:
                report.problem = "not a regular file"
        except OSError as error:
            report.state, report.problem = UNREADABLE, error.strerror or str(error)
        finally:
            with contextlib.suppress(OSError):  # servers read past the page cache; leave nothing behind in it
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        return looked

    def _decode(self, fd: int, path: str, looked: Looked, fingerprint_start: str) -> None:
        report = looked.report
        raw = os.pread(fd, layout.ALIGNMENT_MIN, 0)
        header = layout.decode_segment_header(raw)
        if header is None:
            report.state = DAMAGED if any(raw) else EMPTY
            report.problem = "no valid segment header" if any(raw) else ""
            return
        report.sequence, report.epoch = header.sequence, header.epoch
        if header.alignment > ALIGNMENT_MAX or header.segment_bytes > SEGMENT_BYTES_MAX:
            report.state = DAMAGED
            report.problem = f"impossible sizes: segment of {header.segment_bytes}, alignment {header.alignment}"
            return
        if not header.fingerprint.hex().startswith(fingerprint_start):
            report.state = OTHER
            return
        size = header.segment_bytes
        reading = _Reading(fd, min(10 * size, 2 * size + 4 * GIB), footer_bytes_max=size // 16)
        looked.scan, said = self._scan(reading, looked.scan.file, path, header)
        looked.header = looked.scan.header or header  # it may have been recycled between two reads
        _fill(report, looked.scan, looked.header)
        if report.file_bytes < header.segment_bytes:
            said = f"cut off at {report.file_bytes} of {header.segment_bytes} bytes"
        elif not said and not reading.trouble:
            if report.state == OPEN:
                behind = os.pread(fd, layout.PACK_HEADER_BYTES, header.segment_bytes - report.tail_bytes)
                report.has_remains = layout.pack_header_size(behind) > 0
            return
        report.state = UNREADABLE if looked.scan.header is None else DAMAGED
        report.problem = said or reading.trouble

    def _scan(
        self, reading: _Reading, file: SegmentFile, path: str, header: SegmentHeader
    ) -> tuple[ScannedSegment, str]:
        """What recovery's scanner finds, and what is wrong."""
        scanner = Scanner(
            reading,
            reading,
            reading,
            fingerprint=header.fingerprint,
            segment_bytes=header.segment_bytes,
            alignment=header.alignment,
        )
        with _heard() as said:
            (scan,) = self._loop.run_until_complete(scanner.scan([(file, path)]))
        if scan.damaged and not said:
            said.append("the footer does not match its checksum")
        return scan, said[0].replace(f" of {path}", "").replace(path, "it") if said else ""


@contextlib.contextmanager
def _heard() -> Iterator[list[str]]:
    """Warnings of kvdisk's logger as a list instead of on the terminal."""
    said: list[str] = []
    logger = logging.getLogger("kvdisk")

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    ear, before = Ear(), logger.propagate
    logger.addHandler(ear)
    logger.propagate = False
    try:
        yield said
    finally:
        logger.propagate = before
        logger.removeHandler(ear)


def _fill(report: SegmentReport, scan: ScannedSegment, header: SegmentHeader) -> None:
    """Where the file's bytes go: header + stored + gaps + tail is all of it."""
    raw_headers = 0
    end = header.alignment
    report.sequence, report.epoch = header.sequence, header.epoch
    report.state = SEALED if scan.sealed else OPEN
    for pack in scan.packs:
        report.gap_bytes += pack.offset - end
        end = pack.offset + pack.pack_bytes
        stored = int(scan.chunks.stored_bytes[pack.first : pack.end].sum())
        report.stored_bytes += stored
        report.live_bytes += sum(scan.chunks.live_bytes[pack.first : pack.end].tolist())  # of strangers: may be any
        report.header_bytes += pack.pack_bytes - stored
        report.chunk_count += pack.end - pack.first
        raw_headers += _raw_bytes(pack)
    footer = layout.footer_bytes(raw_headers, header.alignment) if scan.sealed else 0
    report.pack_count = len(scan.packs)
    report.header_bytes += header.alignment + footer
    report.tail_bytes = max(0, header.segment_bytes - footer - end)


def _raw_bytes(pack: ScannedPack) -> int:
    return layout.PACK_HEADER_BYTES + layout.ENTRY_BYTES * (pack.end - pack.first)
