"""Rules of addresses: caches and arenas beyond 2^31 and 2^32 bytes, whose memory is only promised, not there."""

import ctypes
import mmap

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from kvdisk.geometry import Geometry, GroupGeometry, Page
from kvdisk.units import GIB, UNIT_BYTES
from kvdisk.vllm.mapping import GroupTransfer, MappingError
from kvdisk.vllm.share import UNIT_COUNT_MAX
from kvdisk.vllm.slots_spec import SlotsSpec
from kvdisk.vllm.worker import KVDiskWorker
from tests.vllm.test_worker_device import FakeDevice

PAGE, STRIDE = 5000, 3 << 20
NUM_BLOCKS = 2200  # of 3 MiB: 6.4 GiB
BLOCKS_PER_CHUNK = 2


def promised(size: int) -> np.ndarray:
    """`size` bytes of address space; only what is touched takes memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)


class WideShare:
    """A share of 6 GiB, as far as a worker looks at it."""

    def __init__(self) -> None:
        self.units = promised(6 * GIB)
        self.unit_count = len(self.units) // UNIT_BYTES
        self.units_address = self.units.ctypes.data
        self.blocks_written = promised(4 * self.unit_count).view(np.uint32)

    def mark_ended(self, ticket: int) -> None:
        pass


@pytest.fixture(params=["cpu", "device"])
def rig(request):
    """(worker, its cache as bytes, its share, a function that lets copies end)"""
    memory = promised(NUM_BLOCKS * STRIDE)
    view = torch.as_strided(torch.from_numpy(memory.view(np.int8)), (NUM_BLOCKS, PAGE), (STRIDE, 1), 100)
    geometry = Geometry(0, 1, BLOCKS_PER_CHUNK, (GroupGeometry(0, 16, (Page(0, PAGE),)),))
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(view, PAGE)], [[CanonicalKVCacheRef(0, PAGE)]])
    share, device = WideShare(), FakeDevice()
    worker = KVDiskWorker(share, geometry, caches, device=device if request.param == "device" else None)

    def settle() -> None:
        for stream in device.streams:
            stream.run()
        assert all(result.success for result in worker.get_finished())

    return worker, memory, share, settle


def place(block: int) -> slice:
    return slice(100 + block * STRIDE, 100 + block * STRIDE + PAGE)


@pytest.mark.parametrize("block", [0, (1 << 31) // STRIDE, (1 << 32) // STRIDE, NUM_BLOCKS - 2])
@pytest.mark.parametrize("offset", [0, 1 << 31, 1 << 32, 6 * GIB - 3 * UNIT_BYTES])
def test_blocks_and_slots_far_out_are_copied_to_their_own_places(rig, block, offset):
    worker, memory, share, settle = rig
    rng = np.random.default_rng(block)
    pages = [rng.integers(0, 256, PAGE, np.uint8) for _ in range(BLOCKS_PER_CHUNK)]
    for number, page in enumerate(pages):
        memory[place(block + number)] = page
    unit = offset // UNIT_BYTES
    worker.submit_store(1, GPULoadStoreSpec([block, block + 1], [BLOCKS_PER_CHUNK], [0]), SlotsSpec(1, [unit], [1]))
    settle()
    assert share.units[offset : offset + 2 * PAGE].tobytes() == b"".join(page.tobytes() for page in pages)
    assert share.blocks_written[unit] == BLOCKS_PER_CHUNK
    target = NUM_BLOCKS - 1 if block < NUM_BLOCKS - 2 else 1
    worker.submit_load(2, SlotsSpec(2, [unit], [1]), GPULoadStoreSpec([target], [1], [1]))
    settle()
    assert np.array_equal(memory[place(target)], pages[1])
    around = memory[place(target).start - 100 : place(target).stop + 100].copy()
    around[100:-100] = 0
    assert not around.any()


def test_places_in_the_largest_share_are_told_apart():
    """8 TiB: first bytes of slots up to 2^43, in 64 bits."""
    group = GroupGeometry(0, 16, (Page(0, 1 << 20),))
    units = np.array([UNIT_COUNT_MAX - 2048, 1 << 20, (1 << 20) + 1], np.int64)
    part = GroupTransfer(0, group, np.arange(11, dtype=np.int64), units, 1, certain=True)
    starts = part.block_starts(4).tolist()
    whole = [unit * UNIT_BYTES + position * (1 << 20) for unit in units.tolist() for position in range(4)]
    assert starts == whole[1:]


@pytest.mark.parametrize("block", [-1, -(1 << 31), NUM_BLOCKS, (1 << 31) - 1])
def test_ids_that_would_wrap_are_refused_and_nothing_is_copied(rig, block):
    worker, memory, share, settle = rig
    with pytest.raises(MappingError, match="outside"):
        worker.submit_store(1, GPULoadStoreSpec([0, block], [2], [0]), SlotsSpec(1, [0], [1]))
    for unit in (-1, share.unit_count - 2, 1 << 32, 1 << 62):
        with pytest.raises(MappingError, match="outside"):
            worker.submit_load(2, SlotsSpec(2, [unit], [1]), GPULoadStoreSpec([0, 1], [2], [0]))
    settle()
    assert not memory[place(0)].any()
    assert not share.units[: 3 * UNIT_BYTES].any()
    assert ctypes.c_uint8.from_address(share.units_address + 6 * GIB - 1).value == 0
