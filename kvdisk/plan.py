"""How chunks become few large I/Os: which chunks one pack carries, and which neighbours one read fetches. Pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvdisk import layout
from kvdisk.commands import ReadItem
from kvdisk.units import round_up

READ_BYTES_MAX = 16 << 20
"""Bytes of one read command. Large enough that its cost does not count, small enough that a long prefix arrives in
steps: chunks of the first command are hits while the last is still being read."""


def stored_bytes(parts: Sequence[int], alignment: int) -> int:
    """Bytes of a chunk on disk: each rank's part padded to the alignment, so each can be read into its own slot."""
    return sum(round_up(part, alignment) for part in parts)


def pack_size(chunk_bytes: Sequence[int], alignment: int) -> int:
    """Bytes of a pack of chunks that take `chunk_bytes` on disk."""
    return layout.pack_header_bytes(len(chunk_bytes), alignment) + sum(chunk_bytes)


def pack_length(chunk_bytes: Sequence[int], room: int, alignment: int) -> int:
    """How many of the first chunks fit into one pack.

    Args:
        chunk_bytes: bytes on disk of each candidate, in order.
        room: bytes left for pack and footer growth in the segment.
        alignment: of the segment.
    """
    total, count = 0, 0
    for size in chunk_bytes:
        header = layout.pack_header_bytes(count + 1, alignment)
        growth = round_up(layout.PACK_HEADER_BYTES + layout.ENTRY_BYTES * (count + 1), alignment)
        if header + total + size + growth > room:
            break
        total += size
        count += 1
    return count


class Wanted(NamedTuple):
    """A chunk to promote: its segment and what a read command needs to know."""

    segment: int
    item: ReadItem


def merge_reads(wanted: Iterable[Wanted], alignment: int, bytes_max: int = READ_BYTES_MAX) -> list[list[Wanted]]:
    """`wanted` cut into runs of payloads that touch on disk, each at most `bytes_max` (but at least one chunk)."""
    runs: list[list[Wanted]] = []
    end_segment, end_offset, run_bytes = -1, -1, 0
    for chunk in sorted(wanted, key=lambda w: (w.segment, w.item.offset)):
        size = stored_bytes(chunk.item.parts, alignment)
        touches = chunk.segment == end_segment and chunk.item.offset == end_offset
        if not touches or run_bytes + size > bytes_max:
            runs.append([])
            run_bytes = 0
        runs[-1].append(chunk)
        run_bytes += size
        end_segment, end_offset = chunk.segment, chunk.item.offset + size
    return runs
