"""Rules of `kvdisk.vllm.worker` on CPU tensors: every byte of every page goes where it belongs, no other byte moves.

The reference is the obvious one: loops over chunks, blocks and pages, dictionaries of bytes.
"""

import itertools
import logging
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from kvdisk.geometry import Geometry, GroupGeometry, Page
from kvdisk.vllm.mapping import MappingError
from kvdisk.vllm.share import POISONED, UNIT_BYTES, Share
from kvdisk.vllm.slots_spec import SlotsSpec
from kvdisk.vllm.worker import KVDiskWorker

GUARD = 0xA5
FILL = 0xEE


class Tensor(NamedTuple):
    """A view to register: rows of `row` bytes, `stride` apart, from `offset` of storage number `storage`."""

    row: int
    stride: int
    offset: int = 0
    storage: int = 0


class Rig:
    """A worker over a share and tensors with random content, and what a transfer should do, spelled out."""

    def __init__(self, groups, tensors, *, blocks_per_chunk=4, num_blocks=12, slot_count=6, seed=0):
        rng = np.random.default_rng(seed)
        self.num_blocks = num_blocks
        sizes: dict[int, int] = {}
        for t in tensors:
            sizes[t.storage] = max(sizes.get(t.storage, 0), t.offset + (num_blocks - 1) * t.stride + t.row)
        self.storages = {s: torch.from_numpy(rng.integers(0, 256, n, np.uint8).view(np.int8)) for s, n in sizes.items()}
        self.tensors = [
            torch.as_strided(self.storages[t.storage], (num_blocks, t.row), (t.stride, 1), t.offset) for t in tensors
        ]
        self.geometry = Geometry(
            0,
            1,
            blocks_per_chunk,
            tuple(GroupGeometry(2 * i, 16, tuple(Page(*p) for p in pages)) for i, pages in enumerate(groups)),
        )
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(t, t.shape[1]) for t in self.tensors],
            [[CanonicalKVCacheRef(*p) for p in pages] for pages in groups],
        )
        self.slot_units = [max(1, -(-self.geometry.chunk_bytes(g) // UNIT_BYTES)) for g in range(len(groups))]
        self.unit_count = slot_count * sum(self.slot_units) + 2
        self.share = Share.create(self.geometry, self.unit_count, shared=False)
        self.share.units[:] = GUARD
        self.worker = KVDiskWorker(self.share, self.geometry, caches)
        self._job = itertools.count()
        self._unit = 1  # unit 0 and the last one are guards

    def slots(self, group_index, count):
        """First units of fresh slots, in an order that is not theirs in memory."""
        width = self.slot_units[group_index]
        first, self._unit = self._unit, self._unit + count * width
        return [first + width * i for i in reversed(range(count))]

    def page_bytes(self, group_index, block):
        """The bytes of one block, by the definition of a chunk."""
        return b"".join(
            self.tensors[p.tensor][block, : p.page_bytes].numpy().tobytes()
            for p in self.geometry.groups[group_index].pages
        )

    def store(self, parts):
        """parts: per group (blocks, first block's index, units)."""
        return self._transfer(self.worker.submit_store, parts, to_host=True)

    def load(self, parts):
        return self._transfer(self.worker.submit_load, parts, to_host=False)

    def _transfer(self, submit, parts, *, to_host):
        job = next(self._job)
        gpu = GPULoadStoreSpec(
            [b for blocks, _, _ in parts for b in blocks], [len(p[0]) for p in parts], [p[1] for p in parts]
        )
        slots = SlotsSpec(1000 + job, [u for _, _, units in parts for u in units], [len(p[2]) for p in parts])
        assert submit(job, *((gpu, slots) if to_host else (slots, gpu))) is True
        (result,) = self.worker.get_finished()
        assert (result.job_id, result.success) == (job, True)
        assert result.transfer_time >= 0
        assert self.share.has_ended(1000 + job)
        return result

    def slot(self, group_index, unit):
        return self.share.units[unit * UNIT_BYTES : (unit + self.slot_units[group_index]) * UNIT_BYTES].tobytes()

    def snapshot(self):
        return {s: t.clone() for s, t in self.storages.items()}


# (groups: pages as (tensor, bytes); tensors)
LAYOUTS = {
    "one": ([[(0, 4096)]], [Tensor(4096, 4096)]),
    "odd pages": ([[(0, 1001), (1, 3)]], [Tensor(1001, 1001), Tensor(3, 3, storage=1)]),
    "padded": ([[(0, 700)]], [Tensor(1024, 1024)]),
    "glm: two page sizes in one group": (
        [[(0, 83_968), (1, 16_896)]],
        [Tensor(83_968, 83_968), Tensor(16_896, 16_896, storage=1)],
    ),
    "unequal strides in one storage": (
        [[(0, 100), (1, 200)], [(2, 50)]],
        [Tensor(100, 640), Tensor(200, 640, offset=128), Tensor(50, 704, offset=12 * 640)],
    ),
    "aliased by groups": (
        [[(0, 512)], [(0, 512), (1, 96)], [(1, 128)]],
        [Tensor(512, 512), Tensor(128, 160, storage=1)],
    ),
    "seven groups": (
        [[(g, 64 + g), (7 + g, 32)] for g in range(7)],
        [Tensor(80, 96 + 7 * (s // 7), storage=s) for s in range(14)],
    ),
    "packed: every group is the whole stride": ([[(0, 5000)]] * 3, [Tensor(5000, 5000)]),
    "a group without layers here": ([[(0, 128)], []], [Tensor(128, 128)]),
}


@pytest.fixture(params=LAYOUTS, ids=str)
def rig(request):
    return Rig(*LAYOUTS[request.param])


def test_a_store_fills_slots_block_major_and_zeroes_their_tails(rig):
    for g in range(len(rig.geometry.groups)):
        blocks = [7, 3, 0, 11, 1, 2, 9, 4]
        units = rig.slots(g, 2)
        parts = [((), 0, ())] * len(rig.geometry.groups)
        parts[g] = (blocks, 8, units)
        result = rig.store(parts)
        assert result.transfer_size == 2 * rig.geometry.chunk_bytes(g)
        for i, unit in enumerate(units):
            live = b"".join(rig.page_bytes(g, b) for b in blocks[4 * i : 4 * i + 4])
            if live:
                assert rig.slot(g, unit) == live.ljust(rig.slot_units[g] * UNIT_BYTES, b"\0")
        assert rig.share.blocks_written[units].tolist() == [4, 4]


def test_a_round_trip_returns_every_page_and_touches_nothing_else(rig):
    groups = range(len(rig.geometry.groups))
    parts = [([1, 2, 3, 4], 4, rig.slots(g, 1)) for g in groups]
    rig.store(parts)
    saved = [[rig.page_bytes(g, b) for b in parts[g][0]] for g in groups]
    units = rig.share.units.copy()
    for storage in rig.storages.values():
        storage.fill_(FILL - 256)
    # Aliased groups share blocks' bytes: load one group at a time, each into blocks of its own.
    for g in groups:
        target = [(5, 6, 7, 8) if h == g else () for h in groups]
        rig.load([(target[h], 0, parts[h][2] if h == g else ()) for h in groups])
        assert [rig.page_bytes(g, b) for b in target[g]] == saved[g]
        for s, storage in rig.storages.items():
            mask = np.zeros(len(storage), bool)
            for page in rig.geometry.groups[g].pages:
                view = rig.tensors[page.tensor]
                if view.untyped_storage().data_ptr() != storage.untyped_storage().data_ptr():
                    continue
                for b in target[g]:
                    start = view.storage_offset() + b * view.stride(0)
                    mask[start : start + page.page_bytes] = True
            assert (storage.numpy().view(np.uint8)[~mask] == FILL).all(), f"bytes outside the pages, storage {s}"
            storage.fill_(FILL - 256)
    assert np.array_equal(units, rig.share.units), "a load does not write slots"


def test_nothing_outside_the_given_slots_is_written(rig):
    g = 0
    units = rig.slots(g, 3)[1:2]
    rig.store([(range(4), 0, units)] + [((), 0, ())] * (len(rig.geometry.groups) - 1))
    mine = np.zeros(rig.unit_count, bool)
    mine[units[0] : units[0] + rig.slot_units[g]] = True
    assert (rig.share.units.reshape(rig.unit_count, UNIT_BYTES)[~mine] == GUARD).all()
    assert not rig.share.blocks_written[np.arange(rig.unit_count) != units[0]].any()


@pytest.mark.parametrize("skip", [1, 3])
def test_a_first_chunk_entered_late_is_stored_with_zeros_and_its_count(rig, skip):
    blocks = list(range(8 - skip))
    units = rig.slots(0, 2)
    rig.store([(blocks, 4 + skip, units)] + [((), 0, ())] * (len(rig.geometry.groups) - 1))
    width = rig.slot_units[0] * UNIT_BYTES
    live = [bytes(len(rig.page_bytes(0, 0)))] * skip + [rig.page_bytes(0, b) for b in blocks]
    for i, unit in enumerate(units):
        assert rig.slot(0, unit) == b"".join(live[4 * i : 4 * i + 4]).ljust(width, b"\0")
    assert rig.share.blocks_written[units].tolist() == [4 - skip, 4]


@pytest.mark.parametrize(
    ("count", "index"),
    [(3, 0), (7, 0), (6, 1), (8, 1), (0, 0), (5, 2)],
    ids=["null at the end", "null in the middle", "one more null than reported", "one too many", "all null", "several"],
)
def test_a_store_that_cannot_be_mapped_poisons_all_slots_of_that_group_only(rig, count, index, caplog):
    others = len(rig.geometry.groups) - 1
    slots = 1 if count == 3 else 2
    units = rig.slots(0, slots)
    good = [rig.slots(g + 1, 1) for g in range(others)]
    with caplog.at_level(logging.WARNING, "kvdisk"):
        for _ in range(2):
            rig.store([(range(count), index, units)] + [([1, 2, 3, 4], 0, u) for u in good])
    assert (rig.share.blocks_written[units] == POISONED).all()
    for u in good:
        assert rig.share.blocks_written[u].tolist() == [4]
    for unit in units:
        assert set(rig.slot(0, unit)) == {GUARD}, "nothing is copied into a poisoned slot"
    assert rig.worker.counters["poisoned"] == 2 * slots
    assert len(caplog.records) == 1, "rate-limited"
    assert "group 0" in caplog.text


def test_a_sliding_window_is_loaded_from_the_middle_of_one_chunk_to_the_middle_of_another(rig):
    rest = [((), 0, ())] * (len(rig.geometry.groups) - 1)
    units = rig.slots(0, 3)
    source = list(range(12))
    rig.store([(source, 0, units), *rest])
    saved = [rig.page_bytes(0, b) for b in source]
    for storage in rig.storages.values():
        storage.fill_(FILL - 256)
    rig.load([([8, 2, 5, 11, 0, 7], 3, units), *rest])  # blocks 3..8: of three chunks, 1 + 4 + 1
    assert [rig.page_bytes(0, b) for b in (8, 2, 5, 11, 0, 7)] == saved[3:9]
    assert set(rig.page_bytes(0, 1)) <= {FILL}


@pytest.mark.parametrize(
    ("count", "index", "slots"), [(5, 0, 1), (4, 0, 2), (4, 1, 1), (3, 0, 0), (0, 0, 1), (1, 3, 2)]
)
def test_a_load_that_does_not_add_up_is_never_carried_out(rig, count, index, slots):
    before = rig.snapshot()
    with pytest.raises(MappingError, match="KV cache group 0"):
        rig.load([(range(count), index, rig.slots(0, slots))] + [((), 0, ())] * (len(rig.geometry.groups) - 1))
    assert all(torch.equal(before[s], storage) for s, storage in rig.storages.items())
    assert rig.worker.get_finished() == []


@pytest.mark.parametrize("block", [-1, 12, 1 << 30])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_block_id_out_of_range_is_refused_by_group(rig, direction, block):
    with pytest.raises(MappingError, match=rf"block id of KV cache group 0 {block} is outside \[0, 12\)"):
        getattr(rig, direction)([([0, 1, 2, block], 0, [1])] + [((), 0, ())] * (len(rig.geometry.groups) - 1))


@pytest.mark.parametrize("offset", [0, None])
def test_a_slot_out_of_range_is_refused_by_group(rig, offset):
    unit = -1 if offset is None else rig.unit_count - rig.slot_units[0] + 1
    with pytest.raises(MappingError, match=f"slot of KV cache group 0, first unit {unit} is outside"):
        rig.store([(range(4), 0, [unit])] + [((), 0, ())] * (len(rig.geometry.groups) - 1))


def test_the_last_slot_of_the_share_is_usable(rig):
    unit = rig.unit_count - rig.slot_units[0]
    rig.store([(range(4), 0, [unit])] + [((), 0, ())] * (len(rig.geometry.groups) - 1))
    assert rig.share.blocks_written[unit] == 4


def test_sides_that_contradict_each_other_are_refused():
    rig = Rig(*LAYOUTS["seven groups"])
    gpu = GPULoadStoreSpec([1, 2, 3, 4], [4, 0, 0, 0, 0, 0, 0], [0] * 7)
    for slots in (SlotsSpec(0, [1], [1]), SlotsSpec(0, [1], [2, 0, 0, 0, 0, 0, 0]), SlotsSpec(0, [], [0] * 7)):
        with pytest.raises(MappingError):
            rig.worker.submit_store(0, gpu, slots)
    short = GPULoadStoreSpec([1, 2, 3, 4], [4], [0])
    with pytest.raises(MappingError, match="1 groups"):
        rig.worker.submit_store(0, short, SlotsSpec(0, [1], [1]))


def test_views_past_their_storage_are_refused_at_registration():
    storage = torch.zeros(1000, dtype=torch.int8)
    share = Share.create(Geometry(0, 1, 1, (GroupGeometry(4, 16, (Page(0, 100),)),)), 1, shared=False)
    # as_strided on a storage refuses this only when asked directly; set_ with a wrong stride is how it happens.
    short = torch.as_strided(storage, (10, 100), (100, 1))
    small = storage.untyped_storage()
    small.resize_(950)
    with pytest.raises(ValueError, match=r"group 4, layer model\.attn, tensor 0.*1000.*950"):
        KVDiskWorker(
            share,
            share.geometry,
            CanonicalKVCaches([CanonicalKVCacheTensor(short, 100)], [[CanonicalKVCacheRef(0, 100)]]),
            layer_names=[["model.attn"]],
        )


@pytest.mark.parametrize(
    "tensor", [torch.zeros(4, 4), torch.zeros(16, dtype=torch.int8), torch.zeros(4, 8, dtype=torch.int8)[:, ::2]]
)
def test_tensors_that_are_not_byte_rows_are_refused(tensor):
    share = Share.create(Geometry(0, 1, 1, (GroupGeometry(0, 16, (Page(0, 1),)),)), 1, shared=False)
    with pytest.raises(ValueError, match="rows of contiguous int8"):
        KVDiskWorker(
            share, share.geometry, CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 4)], [[CanonicalKVCacheRef(0, 1)]])
        )


def test_replicated_layouts_load_from_another_ranks_units_and_publish_in_their_own_share():
    rig = Rig(*LAYOUTS["one"])
    rig.store([(range(4), 0, [1])])
    own = Share.create(rig.geometry, 0, shared=False)
    tensor = torch.zeros(12, 4096, dtype=torch.int8)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 4096)], [[CanonicalKVCacheRef(0, 4096)]])
    worker = KVDiskWorker(own, rig.geometry, caches, units=rig.share)
    worker.submit_load(0, SlotsSpec(77, [1], [1]), GPULoadStoreSpec([5, 6, 7, 8], [4], [0]))
    assert torch.equal(tensor[5:9], rig.tensors[0][0:4])
    assert own.has_ended(77)
    assert not rig.share.has_ended(77)


def test_waiting_works_for_jobs_long_gone_and_shutdown_twice():
    rig = Rig(*LAYOUTS["one"])
    rig.store([(range(4), 0, [1])])
    rig.worker.wait({0, 1, 99})
    rig.worker.shutdown()
    rig.worker.shutdown()
    assert rig.share.blocks_written[1] == 4


@st.composite
def transfers(draw):
    """A layout, a store with leading nulls, and a load of part of it."""
    blocks_per_chunk = draw(st.integers(1, 5))
    tensors, groups = [], []
    for s in range(draw(st.integers(1, 3))):
        row = draw(st.integers(1, 3000))
        tensors.append(Tensor(row, row + draw(st.integers(0, 600)), draw(st.integers(0, 100)), s))
    for _ in range(draw(st.integers(1, 4))):
        picks = draw(st.lists(st.integers(0, len(tensors) - 1), min_size=1, max_size=4, unique=True))
        groups.append([(t, draw(st.integers(1, tensors[t].row))) for t in picks])
    stores, loads = [], []
    for _ in groups:
        chunks = draw(st.integers(0, 3))
        skip = draw(st.integers(0, blocks_per_chunk - 1)) if chunks else 0
        n = chunks * blocks_per_chunk - skip
        stores.append((draw(st.permutations(range(16)))[:n], skip, chunks))
        first = draw(st.integers(skip, chunks * blocks_per_chunk - 1)) if n else 0
        end = draw(st.integers(first + 1, chunks * blocks_per_chunk)) if n else 0
        loads.append((draw(st.permutations(range(16)))[: end - first], first))
    return groups, tensors, blocks_per_chunk, stores, loads


@settings(max_examples=80, deadline=None)
@given(transfers(), st.integers(0, 999))
def test_any_layout_any_window_agrees_with_the_obvious_loops(case, seed):
    groups, tensors, bpc, stores, loads = case
    rig = Rig(groups, tensors, blocks_per_chunk=bpc, num_blocks=16, slot_count=3, seed=seed)
    units = [rig.slots(g, chunks) for g, (_, _, chunks) in enumerate(stores)]
    rig.store([(blocks, bpc * 7 + skip, u) for (blocks, skip, _), u in zip(stores, units, strict=True)])
    held = []  # per group: index of the block -> bytes
    for g, (blocks, skip, chunks) in enumerate(stores):
        content = {skip + j: rig.page_bytes(g, b) for j, b in enumerate(blocks)}
        held.append(content)
        size = rig.geometry.groups[g].block_bytes
        for c in range(chunks):
            live = b"".join(content.get(c * bpc + p, bytes(size)) for p in range(bpc))
            assert rig.slot(g, units[g][c]) == live.ljust(rig.slot_units[g] * UNIT_BYTES, b"\0")
    for storage in rig.storages.values():
        storage.fill_(FILL - 256)
    for g, (blocks, first) in enumerate(loads):
        chosen = range(first // bpc, -(-(first + len(blocks)) // bpc)) if blocks else ()
        parts = [((), 0, ())] * len(groups)
        parts[g] = (blocks, bpc * 5 + first, [units[g][c] for c in chosen])
        rig.load(parts)
        expected = {s: np.full(len(t), FILL, np.uint8) for s, t in rig.storages.items()}
        for j, b in enumerate(blocks):
            offset = 0
            for page in rig.geometry.groups[g].pages:
                t = tensors[page.tensor]
                at = t.offset + b * t.stride
                data = held[g][first + j][offset : offset + page.page_bytes]
                expected[t.storage][at : at + page.page_bytes] = np.frombuffer(data, np.uint8)
                offset += page.page_bytes
        for s, storage in rig.storages.items():
            assert np.array_equal(storage.numpy().view(np.uint8), expected[s])
            storage.fill_(FILL - 256)
