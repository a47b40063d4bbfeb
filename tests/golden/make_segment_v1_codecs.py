"""Writes segment_v1_codecs.seg beside this file: a chunk of each codec, as it must stay readable. Run once, not again.

Another release of zstandard may pack the same bytes otherwise; what it unpacks must stay the same.
"""

import random
import struct
from pathlib import Path

import numpy as np

from kvdisk import codec, layout
from kvdisk.layout import Pack, SegmentHeader

PATH = Path(__file__).with_name("segment_v1_codecs.seg")
HEADER = SegmentHeader(4096, 64 << 10, 8, 0x1122334455667788, 3, bytes(range(32)))
NOISE = random.Random(7).randbytes(40_000)

# key -> (codec, parts)
CONTENT: dict[bytes, tuple[int, list[bytes]]] = {
    b"text": (codec.ZSTD, [b"".join(b"%d and a %d, " % (n * n % 977, n) for n in range(900))]),
    b"bf16": (
        codec.ZSTD_PLANES_2,
        [
            struct.pack("<6000H", *(0x3E00 + (NOISE[20_000 + n] % 3 << 8) + NOISE[n] for n in range(6000))) + b"\x7f",
            struct.pack("<3000H", *(0xBE00 + (NOISE[30_000 + n] % 2 << 8) + NOISE[n] for n in range(3000))),
        ],
    ),
    b"fp32": (
        codec.ZSTD_PLANES_4,
        [
            b"".join(
                bytes((NOISE[n], NOISE[n + 9], NOISE[n + 20_000] % 4, 0x3D + NOISE[n + 30_000] % 2))
                for n in range(5000)
            )
            + b"abc"
        ],
    ),
}


def segment() -> bytes:
    """The whole file."""
    raw = bytearray(HEADER.segment_bytes)
    head = layout.encode_segment_header(HEADER)
    raw[: len(head)] = head
    entries = np.zeros(len(CONTENT), layout.ENTRY_DTYPE)
    at = layout.pack_header_bytes(len(CONTENT), HEADER.alignment)
    for entry, (key, (codec_id, parts)) in zip(entries, CONTENT.items(), strict=True):
        packed = codec.compress([memoryview(part) for part in parts], 1 << 20)
        assert packed is not None
        assert packed.codec == codec_id
        stored = packed.payload.ljust(-(-len(packed.payload) // HEADER.alignment) * HEADER.alignment, b"\0")
        entry["key"], entry["key_bytes"], entry["codec"] = key.ljust(64, b"\0"), len(key), codec_id
        entry["offset"], entry["stored_bytes"] = at, len(stored)
        entry["live_bytes"], entry["checksum"] = sum(map(len, parts)), layout.checksum(stored)
        raw[HEADER.alignment + at : HEADER.alignment + at + len(stored)] = stored
        at += len(stored)
    pack = Pack(HEADER.alignment, layout.pack_header_bytes(len(CONTENT), HEADER.alignment), at, 50, entries)
    encoded = layout.encode_pack(pack, HEADER)
    raw[pack.offset : pack.offset + len(encoded)] = encoded
    footer = layout.encode_footer([encoded], HEADER)
    raw[-len(footer) :] = footer
    return bytes(raw)


if __name__ == "__main__":
    PATH.write_bytes(segment())
