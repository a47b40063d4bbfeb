"""How many bytes a KV cache group's chunks take on disk for each live byte, through the store's own packing.

The real `Store` is driven with commands that "complete" at once and move nothing: which chunks go into which pack, what
the packs' headers, paddings and footers take, and where a segment ends are its decisions, not formulas of ours. Needs
neither vLLM nor a disk: a family's figures follow from its geometry alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count, islice
from random import Random
from typing import NamedTuple

from kvdisk.commands import Completion, SealSegment, WritePack
from kvdisk.geometry import Geometry
from kvdisk.options import SEGMENT_BYTES_DEFAULT
from kvdisk.plan import footprint, pack_size
from kvdisk.store import Store
from kvdisk.store_config import SEGMENTS_MIN, StoreConfig
from kvdisk.units import MIB, UNIT_BYTES, round_up

FIRST = 0  # number of the segment that is looked at


class Overhead(NamedTuple):
    """One group's figures.

    Attributes:
        group_id: vLLM's.
        chunk_bytes: live bytes of a chunk over all ranks that store; 0 if it has none.
        ratio: bytes of sealed packs over the live bytes in them.
        file_ratio: bytes of the whole segment file over them: with its header, footer and the rest that no chunk fits.
    """

    group_id: int
    chunk_bytes: int
    ratio: float
    file_ratio: float


def bytes_on_disk_over_live(
    geometries: Geometry | Sequence[Geometry],
    blocks_per_chunk: int | None = None,
    *,
    segment_bytes: int = SEGMENT_BYTES_DEFAULT,
    alignment: int = UNIT_BYTES,
    chunks_at_once: int | None = None,
) -> dict[int, Overhead]:
    """Fill a segment with chunks of each group; group id -> its figures.

    Args:
        geometries: of every rank that stores; one where the ranks hold the same bytes (replicated layouts).
        blocks_per_chunk: instead of the geometries' own.
        segment_bytes: made larger where a chunk needs it, as a user would have to.
        alignment: of direct I/O.
        chunks_at_once: chunks that are offered between two writes; None for as many as a busy server has. With 1 each
            pack holds one chunk, which is the worst there is.
    """
    ranks = [geometries] if isinstance(geometries, Geometry) else list(geometries)
    if blocks_per_chunk is not None:
        ranks = [replace(one, blocks_per_chunk=blocks_per_chunk) for one in ranks]
    figures = {}
    for index, group in enumerate(ranks[0].groups):
        parts = tuple(one.chunk_bytes(index) for one in ranks)
        live_bytes = sum(parts)
        ratios = _fill(parts, segment_bytes, alignment, chunks_at_once) if live_bytes else (1.0, 1.0)
        figures[group.group_id] = Overhead(group.group_id, live_bytes, *ratios)
    return figures


def _fill(
    parts: tuple[int, ...], segment_bytes: int, alignment: int, chunks_at_once: int | None
) -> tuple[float, float]:
    """(sealed packs, whole file) over live bytes, of the first segment."""
    takes = footprint(parts, alignment)
    segment_bytes = max(segment_bytes, round_up(4 * takes.stored_bytes, MIB))
    per_segment = segment_bytes // takes.stored_bytes + 1
    at_once = per_segment if chunks_at_once is None else chunks_at_once
    unit_count = 4 * (per_segment + at_once) * takes.units
    store = Store(StoreConfig(bytes(32), segment_bytes, alignment, (SEGMENTS_MIN,), unit_count, {0: parts}), Random(0))
    store.recover([], 0)
    pack_bytes = chunk_count = 0
    numbers = count()
    while True:
        for number in islice(numbers, at_once):
            slot = store.reserve(b"%d" % number, 0, parts, number, b"")
            assert slot is not None, "the arena is larger than all that is stored"
            store.commit([slot])
        while commands := store.take_commands(0.0):
            for command in commands:
                done = Completion(command.id)
                if isinstance(command, WritePack):
                    done.checksums = [0] * len(command.chunks)
                    if command.file.number == FIRST:
                        pack_bytes += pack_size([takes.stored_bytes] * len(command.chunks), alignment)
                        chunk_count += len(command.chunks)
                elif isinstance(command, SealSegment) and command.file.number == FIRST:
                    live_bytes = chunk_count * takes.live_bytes
                    return pack_bytes / live_bytes, segment_bytes / live_bytes
                store.complete(done, 0.0)
