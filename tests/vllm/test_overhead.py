"""Rules of the bytes that a chunk takes on disk: for chunks of 1 MiB and more at most 2 % above what lives in them."""

import pytest

from kvdisk.geometry import Geometry, GroupGeometry, Page
from kvdisk.units import KIB, MIB
from tests.vllm.overhead import bytes_on_disk_over_live

RATIO_MAX = 1.02


def one_group(block_bytes: int, blocks_per_chunk: int = 1, rank: int = 0, world_size: int = 1) -> Geometry:
    return Geometry(rank, world_size, blocks_per_chunk, (GroupGeometry(3, 16, (Page(0, block_bytes),)),))


@pytest.mark.parametrize("chunks_at_once", [None, 1, 5])
@pytest.mark.parametrize("chunk_bytes", [MIB, MIB + 1, 3 * MIB - 5, 20 * MIB, 80 * MIB])
def test_chunks_of_a_mebibyte_and_more_take_at_most_two_percent_more(chunk_bytes, chunks_at_once):
    figures = bytes_on_disk_over_live(one_group(chunk_bytes), chunks_at_once=chunks_at_once)[3]
    assert figures.chunk_bytes == chunk_bytes
    assert 1 < figures.ratio <= RATIO_MAX


def test_the_figures_are_those_of_the_format():
    """64 KiB chunks, each alone in its pack: one block of header for 16 of payload; the file holds 4096 such packs
    less those that header and footer displace."""
    figures = bytes_on_disk_over_live(one_group(64 * KIB), chunks_at_once=1)[3]
    assert figures.ratio == 17 / 16
    assert 1.0667 < figures.file_ratio < 1.07


def test_blocks_per_chunk_and_ranks_count():
    ranks = [one_group(1000, rank=rank, world_size=2) for rank in range(2)]
    figures = bytes_on_disk_over_live(ranks, 4, chunks_at_once=1)[3]
    assert figures.chunk_bytes == 8000
    assert figures.ratio == (4096 + 2 * 4096) / 8000
