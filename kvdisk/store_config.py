"""What a store is laid out for; both planes are told the same."""

from dataclasses import dataclass

from kvdisk.index import LIVE_BYTES_MAX
from kvdisk.units import UNIT_BYTES

SEGMENTS_MIN = 3
"""Segments a root needs: one being filled, one to read from, one to recycle."""


@dataclass(frozen=True)
class StoreConfig:
    """Sizes of a store.

    segment_bytes, alignment: of all segments. segments_max: for each root. unit_count: of the arena, the same on every
    rank. group_parts: live bytes of a chunk on each rank, by group; None if chunks have one part of any size. compress:
    chunks that shrink enough are written so; what is read has been written either way.
    """

    fingerprint: bytes
    segment_bytes: int
    alignment: int
    segments_max: tuple[int, ...]
    unit_count: int
    group_parts: dict[int, tuple[int, ...]] | None = None
    compress: bool = False

    @property
    def chunk_bytes_max(self) -> int:
        """Largest chunk: a pack of one must fit into a segment, and its slot must leave room for others."""
        return min(self.segment_bytes // 4, self.unit_count * UNIT_BYTES // 4, LIVE_BYTES_MAX)
