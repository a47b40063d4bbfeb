"""How chunks become few large I/Os: which chunks one pack carries, and which neighbours one read fetches. Pure."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from kvdisk import layout
from kvdisk.commands import ReadItem
from kvdisk.units import UNIT_BYTES, round_up

PACK_BYTES_MAX = 16 << 20
"""Chunks of one batch up to this size lie together; larger packs gain no bandwidth and lose more to a torn write."""

PACKS_INFLIGHT = 6
"""A root: some are on their way while others are hashed for the time after, and the two planes take a while to hear of
each other. With few or large ones the disk had nothing to do for a fifth of the time (docs/performance.md); what waits
meanwhile makes the next pack larger."""

READ_BYTES_MAX = 16 << 20
"""Bytes of one read command. Large enough that its cost does not count, small enough that a long prefix arrives in
steps: chunks of the first command are hits while the last is still being read."""


def stored_bytes(parts: Sequence[int], alignment: int) -> int:
    """Bytes of a chunk on disk: each rank's part padded to the alignment, so each can be read into its own slot."""
    return sum(round_up(part, alignment) for part in parts)


class Footprint(NamedTuple):
    """What a chunk takes: live bytes over all ranks, bytes on disk, and units of its slot (on every rank the same)."""

    live_bytes: int
    stored_bytes: int
    units: int


@lru_cache(maxsize=4096)
def footprint(parts: tuple[int, ...], alignment: int) -> Footprint:
    """Of a chunk with these parts; the largest decides its units. Kept, because a group's chunks all have the same."""
    units = round_up(max(parts, default=0), alignment) // UNIT_BYTES
    return Footprint(sum(parts), stored_bytes(parts, alignment), units)


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
    header = layout.pack_header_bytes(len(chunk_bytes), alignment)
    if 2 * header + sum(chunk_bytes) <= room:  # almost always
        return len(chunk_bytes)
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
    run: list[Wanted] = []
    for chunk in sorted(wanted):  # by segment and offset: they come first in Wanted and ReadItem
        segment, item = chunk
        size = item.stored_bytes or footprint(item.parts, alignment).stored_bytes
        if segment != end_segment or item.offset != end_offset or run_bytes + size > bytes_max:
            run = []
            runs.append(run)
            run_bytes = 0
        run.append(chunk)
        run_bytes += size
        end_segment, end_offset = segment, item.offset + size
    return runs
