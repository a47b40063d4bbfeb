"""Segment files as bytes on a disk, for commands that look at them while no engine has them open.

Reads with ordinary buffered I/O and decodes with kvdisk.layout, so a file that is damaged or not ours yields what can
be trusted of it and nothing else. What can fail: OSError, where a file cannot be read.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvdisk import layout


class StoredChunk(NamedTuple):
    """One chunk's payload on disk: `length` bytes from `start` of `path`, without padding unless it is compressed.

    parent: b"" for the first of a prefix.
    """

    path: Path
    key: bytes
    parent: bytes
    group: int
    position: int
    start: int
    length: int


def files_of(root: Path) -> list[Path]:
    """Every regular file under `root`, in order of its name."""
    return sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


def chunks_of(path: Path) -> Iterator[StoredChunk]:
    """The chunks of one file in the order they were written; none, if it is no segment of this version."""
    with path.open("rb") as file:
        segment = layout.decode_segment_header(file.read(layout.SEGMENT_HEADER_BYTES))
        offset = segment.alignment if segment else 0
        while segment:
            file.seek(offset)
            head = file.read(layout.PACK_HEADER_BYTES)
            pack = layout.decode_pack(
                head + file.read(max(0, layout.pack_header_size(head) - len(head))), offset, segment
            )
            if pack is None:
                return
            keys, parents = layout.entry_keys(pack.entries), layout.entry_keys(pack.entries, "parent")
            for entry, key, parent in zip(pack.entries, keys, parents, strict=True):
                place = (int(entry["group"]), int(entry["position"]), offset + int(entry["offset"]))
                yield StoredChunk(path, key, parent, *place, int(min(entry["live_bytes"], entry["stored_bytes"])))
            offset += pack.pack_bytes


def flip_byte(path: Path, offset: int) -> None:
    """Invert one byte in place, durably, as a failing disk might."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0xFF]))
        file.flush()
        os.fsync(file.fileno())
