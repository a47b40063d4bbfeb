"""Rules of `kvdisk.geometry`: offsets in a chunk, strict JSON, fingerprints, agreement of ranks, bounds of views."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdisk.errors import RendezvousError
from kvdisk.geometry import Geometry, GroupGeometry, Page, View, check_views

GLM = Geometry(
    rank=1,
    world_size=2,
    blocks_per_chunk=4,
    groups=(
        GroupGeometry(0, 64, (Page(0, 83_968), Page(1, 16_896))),
        GroupGeometry(3, 128, (Page(0, 1_001),)),
    ),
    facts={"model": "glm", "rank.layers": "0-3", "info.executor": "mp"},
)


def test_a_chunk_is_block_major_with_its_pages_in_order():
    group = GLM.groups[0]
    assert group.block_bytes == 83_968 + 16_896
    assert group.page_offsets == (0, 83_968)
    assert GLM.chunk_bytes(0) == 4 * (83_968 + 16_896)
    assert GLM.chunk_bytes(1) == 4 * 1_001


pages = st.lists(st.builds(Page, st.integers(0, 99), st.integers(1, 1 << 20)), max_size=4).map(tuple)
facts = st.dictionaries(
    st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)
)


@given(st.lists(st.tuples(st.integers(1, 4096), pages), min_size=1, max_size=4), st.integers(1, 64), facts)
def test_json_gives_back_an_equal_geometry(groups, blocks_per_chunk, some_facts):
    geometry = Geometry(
        0,
        3,
        blocks_per_chunk,
        tuple(GroupGeometry(2 * i, tokens, p) for i, (tokens, p) in enumerate(groups)),
        some_facts,
    )
    back = Geometry.from_json(geometry.to_json())
    assert back == geometry
    assert back.to_json() == geometry.to_json()
    assert back.fingerprint() == geometry.fingerprint()


def mutated(**changes):
    return json.dumps({**json.loads(GLM.to_json()), **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        b"\xff\xfe",
        "[" * 100_000,
        mutated(extra=1),
        mutated(rank=-1),
        mutated(rank=2),
        mutated(rank=True),
        mutated(rank="0"),
        mutated(world_size=0),
        mutated(blocks_per_chunk=0),
        mutated(blocks_per_chunk=1 << 48),
        mutated(blocks_per_chunk=1.0),
        mutated(groups=[]),
        mutated(groups={}),
        mutated(groups=[{"group_id": 0, "tokens_per_block": 16}]),
        mutated(groups=[{"group_id": 0, "tokens_per_block": 16, "pages": [[0]]}]),
        mutated(groups=[{"group_id": 0, "tokens_per_block": 16, "pages": [[0, 0]]}]),
        mutated(groups=[{"group_id": 0, "tokens_per_block": 16, "pages": [[0, "8"]]}]),
        mutated(groups=[{"group_id": 0, "tokens_per_block": 16, "pages": [[-1, 8]]}]),
        mutated(groups=[{"group_id": 0, "tokens_per_block": 16, "pages": [[0, 1 << 47]]}]),
        mutated(groups=2 * [{"group_id": 0, "tokens_per_block": 16, "pages": [[0, 8]]}]),
        mutated(facts=[]),
        mutated(facts={"a": [1]}),
        GLM.to_json().replace('"glm"', "NaN"),
    ],
)
def test_a_geometry_from_a_stranger_is_refused(text):
    with pytest.raises(ValueError):
        Geometry.from_json(text)


def test_the_fingerprint_covers_what_decides_the_bytes_and_nothing_else():
    same = [replace(GLM, rank=0), replace(GLM, facts={**GLM.facts, "info.executor": "uni"})]
    assert {g.fingerprint() for g in same} == {GLM.fingerprint()}
    first, second = GLM.groups
    other = [
        replace(GLM, world_size=4),
        replace(GLM, blocks_per_chunk=1),
        replace(GLM, groups=(first,)),
        replace(GLM, groups=(second, first)),
        # Equal total size, other order: sizes cannot tell these apart.
        replace(GLM, groups=(replace(first, pages=first.pages[::-1]), second)),
        replace(GLM, groups=(replace(first, tokens_per_block=32), second)),
        replace(GLM, facts={**GLM.facts, "model": "glm2"}),
        replace(GLM, facts={**GLM.facts, "rank.layers": "4-7"}),
        replace(GLM, facts={}),
    ]
    assert len({g.fingerprint() for g in [GLM, *other]}) == len(other) + 1


def test_ranks_may_differ_in_layers_but_not_in_groups_or_namespace():
    stage_2 = replace(
        GLM,
        rank=0,
        groups=tuple(replace(group, pages=(Page(0, 64),)) for group in GLM.groups),
        facts={"model": "glm", "rank.layers": "4-7", "info.executor": "uni"},
    )
    GLM.check_agrees(stage_2)
    for field, other in {
        "blocks_per_chunk": replace(stage_2, blocks_per_chunk=1),
        "world_size": replace(stage_2, world_size=3),
        "group ids": replace(stage_2, groups=stage_2.groups[:1]),
        "tokens_per_block": replace(
            stage_2, groups=(replace(stage_2.groups[0], tokens_per_block=1), stage_2.groups[1])
        ),
        "fact 'model'": replace(stage_2, facts={"model": "other"}),
    }.items():
        with pytest.raises(RendezvousError, match=f"ranks 1 and 0 disagree on {field}"):
            GLM.check_agrees(other)


VIEW = View(num_blocks=10, row_bytes=100, stride_bytes=256, offset_bytes=50, storage_bytes=50 + 9 * 256 + 90)
ONE = Geometry(0, 1, 1, (GroupGeometry(7, 16, (Page(0, 90),)),))


def test_a_view_that_ends_with_its_storage_is_accepted():
    check_views(ONE, [VIEW])
    check_views(ONE, [VIEW._replace(num_blocks=1, stride_bytes=0)])


@pytest.mark.parametrize(
    ("change", "numbers"),
    [
        ({"storage_bytes": VIEW.storage_bytes - 1}, "2444"),
        ({"stride_bytes": 257}, "257"),
        ({"num_blocks": 11}, "11 blocks"),
        ({"offset_bytes": 51}, "51"),
        ({"row_bytes": 89}, "90 bytes in rows of 89"),
        ({"stride_bytes": 99}, "99"),
        ({"num_blocks": 1 << 40}, "past"),  # 64-bit arithmetic
        ({"num_blocks": 0}, "empty"),
        ({"offset_bytes": -1}, "negative"),
    ],
)
def test_a_view_out_of_bounds_is_refused_by_group_layer_and_numbers(change, numbers):
    with pytest.raises(ValueError, match=f"group 7, layer model.0.attn, tensor 0.*{numbers}"):
        check_views(ONE, [VIEW._replace(**change)], [["model.0.attn"]])


def test_a_page_of_an_unregistered_tensor_is_refused():
    with pytest.raises(ValueError, match="group 7, tensor 0: only 0 tensors"):
        check_views(ONE, [])


def two_groups(*pages: tuple[int, int, int], stride: int, num_blocks: int = 4) -> tuple[Geometry, list[View]]:
    """Pages as (group, offset, bytes), all in one storage, `stride` apart."""
    views = [View(num_blocks, size, stride, offset, 1 << 20) for _, offset, size in pages]
    groups = tuple(
        GroupGeometry(g, 16, tuple(Page(t, size) for t, (group, _, size) in enumerate(pages) if group == g))
        for g in sorted({group for group, _, _ in pages})
    )
    return Geometry(0, 1, 1, groups), views


@pytest.mark.parametrize(
    "pages",
    [
        [(0, 0, 64), (0, 64, 36)],
        [(0, 0, 100), (1, 0, 60), (1, 60, 40)],  # groups share a block's bytes
        [(0, 0, 64), (0, 0, 64)],  # layers share a page
        [(0, 0, 30), (1, 230, 30)],  # interleaved with other blocks, without touching them
    ],
    ids=["side by side", "groups alias", "layers alias", "interleaved"],
)
def test_pages_that_share_only_a_block_of_their_own_are_accepted(pages):
    check_views(*two_groups(*pages, stride=100))


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([(0, 0, 64), (0, 63, 36)], "group 0, tensor 0: .*64 from offset 63|group 0, tensor 0: pages of 64 .*overlap"),
        ([(0, 0, 64), (0, 0, 60)], "overlap"),
        ([(0, 0, 100), (1, 10, 91)], "group 1|group 0"),  # reaches into the next block
        ([(0, 0, 64), (1, 100, 64)], "overlap"),  # a block late
    ],
    ids=["partly", "shorter alias", "into the next block", "one block late"],
)
def test_pages_of_different_blocks_or_layers_never_share_bytes(pages, message):
    geometry, views = two_groups(*pages, stride=100)
    with pytest.raises(ValueError, match=message):
        check_views(geometry, views)


def test_blocks_of_different_strides_over_the_same_bytes_are_refused():
    geometry, views = two_groups((0, 0, 64), (1, 0, 64), stride=100)
    with pytest.raises(ValueError, match=r"128 bytes apart share bytes with those of KV cache group 0.*100 apart"):
        check_views(geometry, [views[0], views[1]._replace(stride_bytes=128)])
    check_views(geometry, [views[0], views[1]._replace(stride_bytes=128, offset_bytes=364)])  # behind them
    check_views(geometry, [views[0], views[1]._replace(stride_bytes=128, storage=1)])  # elsewhere
    one_block = [view._replace(num_blocks=1) for view in views]
    check_views(geometry, [one_block[0], one_block[1]._replace(stride_bytes=128)])


def test_a_thousand_layers_beyond_32_bits_are_checked_in_time():
    size, stride = 1 << 20, 1 << 30  # a packed cache of 1 GiB blocks, 2,000 GiB in all
    pages = [(layer % 7, layer * size, size) for layer in range(1000)]
    geometry, views = two_groups(*pages, stride=stride, num_blocks=2000)
    views = [view._replace(storage_bytes=1 << 41) for view in views]
    check_views(geometry, views)
    views[999] = views[999]._replace(offset_bytes=stride - size + 1)  # one byte into the next block
    with pytest.raises(ValueError, match=f"offset {stride - size + 1}"):
        check_views(geometry, views)


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=4),
    st.integers(12, 20),
    st.integers(1, 4),
)
def test_overlaps_are_found_exactly_where_bytes_are_shared(pages, stride, num_blocks):
    owners: dict[int, set[tuple[int, int, int, int]]] = {}
    for group, offset, size in pages:
        for block in range(num_blocks):
            for byte in range(offset + block * stride, offset + block * stride + size):
                owners.setdefault(byte, set()).add((block, group, offset, size))
    wrong = any(
        a[0] != b[0] or (a[1] == b[1] and a[2:] != b[2:])
        for sharing in owners.values()
        for a in sharing
        for b in sharing
    )
    geometry, views = two_groups(*pages, stride=stride, num_blocks=num_blocks)
    if wrong:
        with pytest.raises(ValueError, match="overlap"):
            check_views(geometry, views)
    else:
        check_views(geometry, views)
