"""Changes stored payloads and makes every checksum fit again, as no failing disk could.

The control of the end-to-end tests: if an output stays right after this, it never came from what was stored.
"""

from collections.abc import Container
from pathlib import Path

from kvdisk import layout
from kvdisk.cli.segment_files import files_of


def forge(root: Path, groups: Container[int]) -> int:
    """Zero the payload of every chunk of these KV cache groups under `root`, checksums and footers included.

    Returns:
        How many chunks.
    """
    return sum(_forge(path, groups) for path in files_of(root))


def _forge(path: Path, groups: Container[int]) -> int:
    raw = bytearray(path.read_bytes())
    segment = layout.decode_segment_header(raw)
    if segment is None:
        return 0
    count, headers, offset = 0, [], segment.alignment
    while pack := layout.decode_pack(memoryview(raw)[offset:], offset, segment):
        entries = pack.entries.copy()
        for entry in entries:
            if int(entry["group"]) not in groups:
                continue
            start, size = offset + int(entry["offset"]), int(entry["stored_bytes"])
            raw[start : start + size] = bytes(size)
            entry["checksum"] = layout.checksum(bytes(size))
            count += 1
        forged = layout.Pack(pack.offset, pack.header_bytes, pack.pack_bytes, pack.sequence, entries)
        headers.append(layout.encode_pack(forged, segment))
        raw[offset : offset + len(headers[-1])] = headers[-1]
        offset += pack.pack_bytes
    if layout.footer_size(raw, segment):
        footer = layout.encode_footer(headers, segment)
        raw[segment.segment_bytes - len(footer) : segment.segment_bytes] = footer
    path.write_bytes(raw)
    return count
