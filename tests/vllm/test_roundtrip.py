"""Any layout, byte for byte, all the way: blocks -> slots -> packs -> files -> a new store -> slots -> other blocks.

Workers, shares, service, data plane, files and recovery are the real ones; only vLLM's planner and scheduler are left
out, so that layouts may be anything that passes certification. The reference is a copy of the memory and plain slices.
Every byte of every storage is compared, so what lies between and around the pages is guarded, too.
"""

import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from kvdisk.dataplane import Units
from kvdisk.geometry import Geometry, GroupGeometry, Page
from kvdisk.options import Options
from kvdisk.plan import footprint
from kvdisk.service import Service, Tenancy
from kvdisk.store import Presence
from kvdisk.units import MIB, UNIT_BYTES, round_up
from kvdisk.vllm.share import Share
from kvdisk.vllm.slots_spec import SlotsSpec
from kvdisk.vllm.worker import KVDiskWorker

GUARD = 0xA5
STALE = 0x5A  # in the slots, before: somebody else's bytes
DISK_S_MAX = 30.0


class Group(NamedTuple):
    """One KV cache group and what is stored and loaded of it.

    group_id, tokens_per_block: vLLM's. stored: GPU blocks, the first of them `skip` blocks into its chunk. loaded:
    (number of the block, counted from the start of the first chunk; where it goes).
    """

    group_id: int
    tokens_per_block: int
    chunks: int
    skip: int
    stored: list[int]
    loaded: list[tuple[int, int]]


class Rank(NamedTuple):
    """One worker's memory: bytes of each storage, views (storage, offset, row, stride), pages of each group."""

    storages: list[int]
    views: list[tuple[int, int, int, int]]
    pages: list[list[tuple[int, int]]]


class Case(NamedTuple):
    blocks_per_chunk: int
    num_blocks: int
    groups: list[Group]
    ranks: list[Rank]
    replicated: bool
    seed: int


def sized(draw, class_: str) -> int:
    """Bytes of a page."""
    limits = {"tiny": (1, 300), "small": (1, 9000), "large": (200_000, MIB)}
    return draw(st.integers(*limits[class_]))


@st.composite
def ranks(draw, class_: str, group_count: int, page_count_max: int, num_blocks: int, may_be_empty: bool) -> Rank:
    """Memory laid out in one of the ways vLLM has: each layer for itself, one behind the other, or packed in blocks."""
    counts = [draw(st.integers(0 if may_be_empty else 1, page_count_max)) for _ in range(group_count)]
    sizes = [[sized(draw, class_) for _ in range(count)] for count in counts]
    kind = draw(st.sampled_from(["apart", "behind", "packed"]))
    views: list[tuple[int, int, int, int]] = []
    pages: list[list[tuple[int, int]]] = []
    if kind == "packed":  # groups alias each other from the start of each block on
        places = []
        for group in sizes:
            at, row = 0, []
            for size in group:
                at += draw(st.integers(0, 40))
                row.append((at, size))
                at += size
            places.append(row)
        stride = max((at + size for row in places for at, size in row), default=1) + draw(st.integers(0, 500))
        offset = draw(st.integers(0, 64))
        for row in places:
            pages.append([(len(views) + i, size) for i, (_, size) in enumerate(row)])
            views += [(0, offset + at, size, stride) for at, size in row]
        return Rank([offset + num_blocks * stride + draw(st.integers(0, 64))], views, pages)
    # Layer number i of every group lies in the same place, padded to the largest.
    storages: list[int] = []
    end = 0
    for i in range(max(counts, default=0)):
        row = max(group[i] for group in sizes if i < len(group)) + draw(st.integers(0, 100))
        stride = row + draw(st.integers(0, 700) | st.just(0))
        offset = draw(st.integers(0, 64)) + (end if kind == "behind" else 0)
        end = offset + num_blocks * stride
        views.append((0 if kind == "behind" else i, offset, row, stride))
        storages.append(end)
    pages = [[(i, size) for i, size in enumerate(group)] for group in sizes]
    return Rank(storages[-1:] if kind == "behind" else storages, views, pages)


@st.composite
def cases(draw) -> Case:
    class_ = draw(st.sampled_from(["tiny", "tiny", "small", "small", "large"]))
    group_max, rank_max, chunk_max, bpc_max, page_max = {
        "tiny": (7, 8, 3, 8, 4),
        "small": (4, 3, 3, 5, 4),
        "large": (2, 2, 2, 2, 2),
    }[class_]
    blocks_per_chunk = draw(st.integers(1, bpc_max))
    group_count = draw(st.integers(1, group_max))
    ids = sorted(draw(st.sets(st.integers(0, 200), min_size=group_count, max_size=group_count)))
    plans, needed = [], 0
    for group_id in ids:
        chunks = draw(st.integers(0, chunk_max))
        skip = draw(st.integers(0, blocks_per_chunk - 1)) if chunks else 0
        first_whole = blocks_per_chunk if skip else 0
        first = draw(st.integers(first_whole, chunks * blocks_per_chunk))
        end = draw(st.integers(first, chunks * blocks_per_chunk))
        plans.append((group_id, draw(st.integers(1, 4096)), chunks, skip, first, end))
        needed = max(needed + end - first, chunks * blocks_per_chunk)
    num_blocks = needed + draw(st.integers(1, 3))
    targets = draw(st.permutations(range(num_blocks)))
    groups = []
    for group_id, tokens, chunks, skip, first, end in plans:
        stored = draw(st.permutations(range(num_blocks)))[: chunks * blocks_per_chunk - skip]
        loaded, targets = list(zip(range(first, end), targets, strict=False)), targets[end - first :]
        groups.append(Group(group_id, tokens, chunks, skip, stored, loaded))
    world_size = draw(st.integers(1, rank_max))
    replicated = world_size > 1 and draw(st.booleans())
    one = ranks(class_, group_count, page_max, num_blocks, may_be_empty=False)
    others = ranks(class_, group_count, page_max, num_blocks, may_be_empty=True)
    layouts = [draw(one)]
    layouts += [layouts[0] if replicated else draw(others) for _ in range(world_size - 1)]
    return Case(blocks_per_chunk, num_blocks, groups, layouts, replicated, draw(st.integers(0, 999)))


class World:
    """All ranks of an engine and its store, over one directory."""

    def __init__(self, case: Case, root: Path, memory: list[list[np.ndarray]]) -> None:
        self.case = case
        self.memory = memory
        self.geometries = [
            Geometry(
                number,
                len(case.ranks),
                case.blocks_per_chunk,
                tuple(
                    GroupGeometry(group.group_id, group.tokens_per_block, tuple(Page(*page) for page in pages))
                    for group, pages in zip(case.groups, rank.pages, strict=True)
                ),
            )
            for number, rank in enumerate(case.ranks)
        ]
        homes = self.geometries[:1] if case.replicated else self.geometries
        self.parts = [tuple(g.chunk_bytes(index) for g in homes) for index in range(len(case.groups))]
        takes = [footprint(parts, UNIT_BYTES) for parts in self.parts]
        chunks = sum(group.chunks for group in case.groups)
        units = 4 * sum(group.chunks * one.units for group, one in zip(case.groups, takes, strict=True))
        unit_count = max([units, 64, *(4 * one.units for one in takes)])
        segment_bytes = round_up(max([MIB, *(4 * one.stored_bytes for one in takes)]), 16 * UNIT_BYTES)
        data = sum(group.chunks * one.stored_bytes for group, one in zip(case.groups, takes, strict=True))
        cap = (4 + 2 * -(-(data + chunks * UNIT_BYTES) // segment_bytes)) * (segment_bytes + MIB) + 2 * MIB
        self.shares = [
            Share.create(geometry, unit_count if geometry in homes else 0, shared=False) for geometry in self.geometries
        ]
        self.homes = self.shares[: len(homes)]
        for share in self.homes:
            share.units[:] = STALE
        self.workers = [self._worker(number) for number in range(len(case.ranks))]
        self.service = Service(
            Options((str(root),), cap, 0, segment_bytes, engine="posix"),
            Tenancy({"ranks": [geometry.fingerprint() for geometry in self.geometries]}, ("dp0",)),
            [Units(*share.memory_units) for share in self.homes],
            unit_count=unit_count,
            group_parts={group.group_id: parts for group, parts in zip(case.groups, self.parts, strict=True)},
        )
        self.store = self.service.store
        self._job = 0

    def _worker(self, number: int) -> KVDiskWorker:
        rank = self.case.ranks[number]
        tensors = []
        for storage, offset, row, stride in rank.views:
            raw = torch.from_numpy(self.memory[number][storage].view(np.int8))
            tensors.append(torch.as_strided(raw, (self.case.num_blocks, row), (stride, 1), offset))
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in tensors],
            [[CanonicalKVCacheRef(*page) for page in pages] for pages in rank.pages],
        )
        if not tensors:  # a rank without layers has no worker in vLLM
            return None
        units = self.homes[0] if self.case.replicated and number else None
        return KVDiskWorker(self.shares[number], self.geometries[number], caches, units=units)

    def key(self, group: Group, chunk: int) -> bytes:
        return b"%032d" % chunk + group.group_id.to_bytes(4, "big")

    def put_all(self) -> int:
        """Store every group's blocks in one job; the number of chunks kept."""
        case = self.case
        residents = []
        for index, group in enumerate(case.groups):
            for chunk in range(group.chunks):
                parent = self.key(group, chunk - 1) if chunk > (1 if group.skip else 0) else b""
                position = (chunk + 1) * case.blocks_per_chunk * group.tokens_per_block
                resident = self.store.reserve(
                    self.key(group, chunk), group.group_id, self.parts[index], position, parent
                )
                assert resident is not None
                residents.append(resident)
                for share in self.homes:
                    share.blocks_written[resident.run.start] = 0
        gpu = GPULoadStoreSpec(
            [block for group in case.groups for block in group.stored],
            [len(group.stored) for group in case.groups],
            [5 * case.blocks_per_chunk + group.skip for group in case.groups],
        )
        counts = [group.chunks for group in case.groups]
        self._submit("submit_store", gpu, [r.run.start for r in residents], counts, self.workers[: len(self.homes)])
        homes = [share for share, worker in zip(self.homes, self.workers, strict=False) if worker is not None]
        whole = [
            r for r in residents if all(share.blocks_written[r.run.start] == case.blocks_per_chunk for share in homes)
        ]
        for resident in residents:
            if resident not in whole:
                self.store.abandon(resident)
        self.store.commit(whole)
        assert self.service.drain(DISK_S_MAX)
        return len(whole)

    def load_all(self) -> None:
        """Load what is to be loaded of every group in one job, from the disk if it is not in a slot."""
        case = self.case
        units, counts = [], []
        for group in case.groups:
            numbers = sorted({block // case.blocks_per_chunk for block, _ in group.loaded})
            for chunk in numbers:
                key = self.key(group, chunk)
                if self.store.presence(key) is Presence.ON_DISK:
                    assert self.store.promote(key) is not None
            assert self.service.drain(DISK_S_MAX)
            for chunk in numbers:
                assert self.store.presence(self.key(group, chunk)) is Presence.READY
                units.append(self.store.resident(self.key(group, chunk)).run.start)
            counts.append(len(numbers))
        gpu = GPULoadStoreSpec(
            [target for group in case.groups for _, target in group.loaded],
            [len(group.loaded) for group in case.groups],
            [3 * case.blocks_per_chunk + (group.loaded[0][0] if group.loaded else 0) for group in case.groups],
        )
        self._submit("submit_load", gpu, units, counts, self.workers)

    def _submit(self, method: str, gpu, units: list[int], counts: list[int], workers) -> None:
        self._job += 1
        slots = SlotsSpec(self._job, units, counts)
        for worker in workers:
            if worker is not None:
                ends = (gpu, slots) if method == "submit_store" else (slots, gpu)
                assert getattr(worker, method)(self._job, *ends)
                (result,) = worker.get_finished()
                assert result.success

    def close(self) -> None:
        for worker in self.workers:
            if worker is not None:
                worker.shutdown()
        assert self.service.close()


def filled(case: Case, value: int) -> list[list[np.ndarray]]:
    return [[np.full(size, value, np.uint8) for size in rank.storages] for rank in case.ranks]


def expected(case: Case, source: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """What all memory must hold after the loads, spelled out."""
    memory = filled(case, GUARD)
    for rank, before, after in zip(case.ranks, source, memory, strict=True):
        for group, pages in zip(case.groups, rank.pages, strict=True):
            for block, target in group.loaded:
                origin = group.stored[block - group.skip]
                for view, size in pages:
                    storage, offset, _, stride = rank.views[view]
                    at, to = offset + origin * stride, offset + target * stride
                    after[storage][to : to + size] = before[storage][at : at + size]
    return memory


def assert_same(case: Case, memory: list[list[np.ndarray]], wanted: list[list[np.ndarray]]) -> None:
    for number, (got, want) in enumerate(zip(memory, wanted, strict=True)):
        for storage, (a, b) in enumerate(zip(got, want, strict=True)):
            assert np.array_equal(a, b), f"rank {number}, storage {storage}, byte {int(np.argmax(a != b))} of {case}"


def round_trip(case: Case, root: Path) -> None:
    rng = np.random.default_rng(case.seed)
    first = [rng.integers(0, 256, size, np.uint8) for size in case.ranks[0].storages]
    source = [
        [one.copy() for one in first]
        if case.replicated
        else [rng.integers(0, 256, size, np.uint8) for size in rank.storages]
        for rank in case.ranks
    ]
    wanted = expected(case, source)
    world = World(case, root, [[one.copy() for one in rank] for rank in source])
    kept = world.put_all()
    assert kept == sum(group.chunks - bool(group.skip) for group in case.groups)
    assert_same(case, world.memory, source)  # storing changes nothing
    for storages in world.memory:
        for storage in storages:
            storage[:] = GUARD
    world.load_all()  # from the slots
    assert_same(case, world.memory, wanted)
    world.close()

    again = World(case, root, filled(case, GUARD))
    assert len(again.store.index) == kept
    again.load_all()  # from the disk
    assert_same(case, again.memory, wanted)
    assert again.store.counters["chunks_damaged"] == 0
    again.close()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_every_layout_comes_back_byte_for_byte_and_nothing_else_moves(tmp_path, case):
    with tempfile.TemporaryDirectory(dir=tmp_path) as root:
        round_trip(case, Path(root))


@pytest.mark.parametrize("class_", ["seven groups", "eight ranks", "replicated", "mebibytes", "one byte"])
def test_the_corners_are_among_them(tmp_path, class_):
    """Layouts that a random search may miss, by name."""
    page = {"mebibytes": MIB - 1, "one byte": 1}.get(class_, 700)
    group_count, world_size = (7 if class_ == "seven groups" else 2), (8 if class_ == "eight ranks" else 2)
    bpc, num_blocks = (2, 9) if class_ == "mebibytes" else (8, 40)
    size = page + 13
    rank = Rank(
        [num_blocks * size, num_blocks * (size + 5)],
        [(0, 0, size, size), (1, 0, size, size + 5)],
        [[(0, page), (1, page)] for _ in range(group_count)],
    )
    groups, free = [], list(range(num_blocks))
    for index in range(group_count):
        targets, free = free[:4], free[4:]
        stored = [(11 * index + 3 * j) % num_blocks for j in range(2 * bpc)]
        first = bpc - 2 if bpc > 2 else 0
        groups.append(Group(3 * index, 16, 2, 0, stored, [(first + j, t) for j, t in enumerate(targets)]))
    round_trip(Case(bpc, num_blocks, groups, [rank] * world_size, class_ == "replicated", 1), tmp_path)


def test_packs_of_more_pieces_than_one_call_takes_come_back(tmp_path):
    """200 chunks with a part on each of eight ranks: 1,600 buffers in one pack, and IOV_MAX is 1,024."""
    chunks, page = 200, 100
    rank = Rank([chunks * page], [(0, 0, page, page)], [[(0, page)]])
    blocks = list(range(chunks))
    group = Group(0, 16, chunks, 0, blocks[::-1], list(zip(blocks, blocks, strict=True)))
    round_trip(Case(1, chunks, [group], [rank] * 8, False, 1), tmp_path)
