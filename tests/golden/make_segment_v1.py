"""Writes segment_v1.seg beside this file: version 1 of the format as it must stay readable. Run once, not again."""

from pathlib import Path

import numpy as np

from kvdisk import layout
from kvdisk.layout import Pack, SegmentHeader

PATH = Path(__file__).with_name("segment_v1.seg")
HEADER = SegmentHeader(4096, 64 << 10, 7, 0x1122334455667788, 3, bytes(range(32)))

# (pack sequence, [(key, parent, group, position, data)]) of each pack
CONTENT = [
    (42, [(b"first", b"", 2, 256, bytes(n % 251 for n in range(5000)))]),
    (43, [(b"k" * 64, b"first", 0, 512, b"\xff"), (b"\0", b"k" * 64, 65535, 1 << 40, bytes(4096))]),
]


def packs() -> list[tuple[Pack, bytes]]:
    """The packs and their payloads."""
    found, at = [], HEADER.alignment
    for sequence, chunks in CONTENT:
        entries = np.zeros(len(chunks), layout.ENTRY_DTYPE)
        header_bytes = layout.pack_header_bytes(len(chunks), HEADER.alignment)
        payload = b""
        for entry, (key, parent, group, position, data) in zip(entries, chunks, strict=True):
            stored = data.ljust(-(-len(data) // HEADER.alignment) * HEADER.alignment, b"\0")
            entry["key"], entry["parent"] = key.ljust(64, b"\0"), parent.ljust(64, b"\0")
            entry["key_bytes"], entry["parent_bytes"] = len(key), len(parent)
            entry["group"], entry["position"] = group, position
            entry["offset"], entry["stored_bytes"], entry["live_bytes"] = (
                header_bytes + len(payload),
                len(stored),
                len(data),
            )
            entry["checksum"] = layout.checksum(stored)
            payload += stored
        found.append((Pack(at, header_bytes, header_bytes + len(payload), sequence, entries), payload))
        at += header_bytes + len(payload)
    return found


def segment() -> bytes:
    """The whole file."""
    raw = bytearray(HEADER.segment_bytes)
    head = layout.encode_segment_header(HEADER)
    raw[: len(head)] = head
    for pack, payload in packs():
        encoded = layout.encode_pack(pack, HEADER)
        raw[pack.offset : pack.offset + len(encoded)] = encoded
        raw[pack.offset + pack.header_bytes : pack.offset + pack.pack_bytes] = payload
    footer = layout.encode_footer([layout.encode_pack(pack, HEADER) for pack, _ in packs()], HEADER)
    raw[-len(footer) :] = footer
    return bytes(raw)


if __name__ == "__main__":
    PATH.write_bytes(segment())
