"""What opening a store costs that holds many chunks: real segment files whose payloads are holes.

A file has its header and, at its end, its footer, so everything that recovery does is done: directories are read, files
opened, headers and footers read from the disk and decoded, the index is filled. The rest of a file was never written,
which makes a terabyte of segments a quarter of a gigabyte on the disk. The data plane is a process, as in vLLM, and its
start is part of an opening.
"""

import itertools
import os
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvdisk import layout
from kvdisk.dataplane import Units
from kvdisk.layout import SegmentHeader
from kvdisk.memory import shared_memory
from kvdisk.options import parse_options
from kvdisk.service import Service, Tenancy
from kvdisk.units import MIB, UNIT_BYTES

KEY_BYTES = 36
PACK_BYTES = 30 * MIB
ARENA_BYTES = 16 * MIB


class Opening(NamedTuple):
    """One opening: what there was, wall and CPU seconds (of this process and of the data plane's)."""

    chunk_count: int
    segment_count: int
    seconds: float
    cpu_s: float


@contextmanager
def segments_on(root: Path, chunk_count: int, chunk_bytes: int, segment_bytes: int) -> Iterator["Site"]:
    """A directory with that many chunks; removed at the end."""
    directory = root / f"kvdisk-scale-{os.getpid()}"
    directory.mkdir(mode=0o700)
    try:
        site = Site(directory, chunk_count, chunk_bytes, segment_bytes)
        try:
            yield site
        finally:
            site.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Site:
    """A root with a closed store in it. The first opening makes the namespace, the segments are written by hand."""

    def __init__(self, directory: Path, chunk_count: int, chunk_bytes: int, segment_bytes: int) -> None:
        per_segment = segment_bytes // chunk_bytes - 1  # room for header, packs' headers and footer
        while not self._fits(per_segment, chunk_bytes, segment_bytes):
            per_segment -= 1
        self.segment_count = -(-chunk_count // per_segment)
        self._options = parse_options(
            {
                "root_dir": str(directory),
                "disk_bytes_to_use": (self.segment_count + 8) * (segment_bytes + MIB),
                "cpu_bytes_to_use": ARENA_BYTES,
                "segment_bytes": segment_bytes,
            }
        )
        memory, self._memfd = shared_memory(ARENA_BYTES)
        self._units = Units(memory, 0)
        service = self._open()
        config, folder = service.store.config, Path(service.instance_paths[0])
        service.close()
        rng = np.random.default_rng(0)
        left = chunk_count
        for number in range(self.segment_count):
            header = SegmentHeader(config.alignment, segment_bytes, number + 1, number, 0, config.fingerprint)
            self._write(folder / f"{number:08d}.seg", header, min(left, per_segment), chunk_bytes, rng)
            left -= per_segment

    def open_once(self) -> Opening:
        """Open the store, look how many chunks it found, close it."""
        before, start = _cpu(), time.perf_counter()
        service = self._open()
        seconds = time.perf_counter() - start
        found = len(service.store.index)
        service.close()
        return Opening(found, self.segment_count, seconds, _cpu() - before)

    def close(self) -> None:
        """Give the arena back."""
        os.close(self._memfd)

    def _open(self) -> Service:
        tenancy = Tenancy({"bench": "scale"}, ("bench",))
        units, count = [self._units], ARENA_BYTES // UNIT_BYTES
        return Service(self._options, tenancy, units, unit_count=count, memfds=[self._memfd])

    @staticmethod
    def _fits(count: int, chunk_bytes: int, segment_bytes: int) -> bool:
        raw = _pack_count(count, chunk_bytes) * layout.PACK_HEADER_BYTES + count * layout.ENTRY_BYTES
        padded = raw + _pack_count(count, chunk_bytes) * 2 * layout.ALIGNMENT_MIN
        return layout.ALIGNMENT_MIN + count * chunk_bytes + 2 * padded + layout.FOOTER_BYTES <= segment_bytes

    @staticmethod
    def _write(path: Path, header: SegmentHeader, count: int, chunk_bytes: int, rng: np.random.Generator) -> None:
        """A sealed segment of `count` chunks that are one prefix."""
        keys = rng.bytes(count * KEY_BYTES)
        words = [keys[at : at + KEY_BYTES].ljust(64, b"\0") for at in range(0, len(keys), KEY_BYTES)]
        entries = np.zeros(count, layout.ENTRY_DTYPE)
        entries["key"] = np.frombuffer(b"".join(words), "V64")
        entries["key_bytes"] = KEY_BYTES
        entries["parent"][1:] = entries["key"][:-1]
        entries["parent_bytes"][1:] = KEY_BYTES
        entries["position"] = np.arange(1, count + 1)
        entries["stored_bytes"] = entries["live_bytes"] = chunk_bytes
        entries["checksum"] = np.arange(count)
        raws, offset = [], header.alignment
        step = max(1, PACK_BYTES // chunk_bytes)
        for pack_number, first in enumerate(range(0, count, step)):
            part = entries[first : first + step]
            header_bytes = layout.pack_header_bytes(len(part), header.alignment)
            part["offset"] = header_bytes + np.arange(len(part)) * chunk_bytes
            pack_bytes = header_bytes + len(part) * chunk_bytes
            sequence = header.sequence * 10_000 + pack_number
            raws.append(layout.encode_pack(layout.Pack(offset, header_bytes, pack_bytes, sequence, part), header))
            offset += pack_bytes
        footer = layout.encode_footer(raws, header)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(fd, header.segment_bytes)
            os.pwrite(fd, layout.encode_segment_header(header), 0)
            os.pwrite(fd, footer, header.segment_bytes - len(footer))
        finally:
            os.close(fd)


def _pack_count(count: int, chunk_bytes: int) -> int:
    return -(-count // max(1, PACK_BYTES // chunk_bytes))


def _cpu() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(itertools.chain.from_iterable((used.ru_utime, used.ru_stime) for used in both))


def openings(root: Path, chunk_count: int, chunk_bytes: int, segment_bytes: int, rounds: int) -> list[Opening]:
    """The same store opened several times, from the disk each time: reads are direct."""
    with segments_on(root, chunk_count, chunk_bytes, segment_bytes) as site:
        os.sync()
        return [site.open_once() for _ in range(rounds)]
