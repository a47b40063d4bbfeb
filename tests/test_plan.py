"""Packs that fit, and reads that touch."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvdisk import layout
from kvdisk.commands import ReadItem
from kvdisk.plan import Wanted, merge_reads, pack_length, pack_size, stored_bytes


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=8), st.sampled_from([4096, 16384]))
def test_each_part_is_padded_by_itself(parts: list[int], alignment: int) -> None:
    size = stored_bytes(parts, alignment)
    assert size % alignment == 0
    assert sum(parts) <= size < sum(parts) + alignment * len(parts)


@given(st.lists(st.integers(1, 50).map(lambda n: n * 4096), max_size=60), st.integers(0, 1 << 20))
def test_a_pack_and_its_part_of_the_footer_fit_and_no_chunk_more_would(sizes: list[int], room: int) -> None:
    count = pack_length(sizes, room, 4096)
    if count:
        grown = layout.footer_bytes(layout.PACK_HEADER_BYTES + layout.ENTRY_BYTES * count, 4096) - layout.footer_bytes(
            0, 4096
        )
        assert pack_size(sizes[:count], 4096) + grown <= room
    if count < len(sizes):
        raw = layout.PACK_HEADER_BYTES + layout.ENTRY_BYTES * (count + 1)
        assert pack_size(sizes[: count + 1], 4096) + -(-raw // 4096) * 4096 > room


chunks = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), unique=True, max_size=60)


@given(chunks, st.integers(1, 12))
def test_runs_hold_every_chunk_once_in_touching_order_and_within_the_bound(
    places: list[tuple[int, int]], most: int
) -> None:
    wanted = [Wanted(segment, ReadItem(at * 4096, (4096,), 0, 0)) for segment, at in places]
    runs = merge_reads(wanted, 4096, most * 4096)
    assert sorted(chunk for run in runs for chunk in run) == sorted(wanted)
    for run in runs:
        assert 0 < len(run) <= most
        offsets = [chunk.item.offset for chunk in run]
        assert offsets == list(range(offsets[0], offsets[0] + 4096 * len(run), 4096))
        assert len({chunk.segment for chunk in run}) == 1
    for before, after in pairwise(runs):
        touch = before[-1].segment == after[0].segment and before[-1].item.offset + 4096 == after[0].item.offset
        assert not touch or len(before) == most, "neighbours are one read"


def test_a_chunk_larger_than_the_bound_is_a_read_of_its_own() -> None:
    wanted = [Wanted(0, ReadItem(0, (1 << 20,), 0, 0)), Wanted(0, ReadItem(1 << 20, (4096,), 0, 0))]
    assert [len(run) for run in merge_reads(wanted, 4096, 4096)] == [1, 1]
