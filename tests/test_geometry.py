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
