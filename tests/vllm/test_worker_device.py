"""Rules of the worker on an accelerator, by a recording stand-in: what comes after what, and what is published when.

The stand-in copies host memory by address when an event is completed by hand, in the order of the stream.
"""

import ctypes
import functools
import itertools
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from kvdisk.geometry import Geometry, GroupGeometry, Page
from kvdisk.vllm import copiers as copiers_module
from kvdisk.vllm import device as device_module
from kvdisk.vllm import worker as worker_module
from kvdisk.vllm.copiers import split_at_pieces
from kvdisk.vllm.device import Pinning
from kvdisk.vllm.share import POISONED, UNIT_BYTES, Share
from kvdisk.vllm.slots_spec import SlotsSpec
from kvdisk.vllm.worker import KVDiskWorker

PAGES = (300, 5000)
ROWS = (512, 5000)
NUM_BLOCKS = 8


class FakeEvent:
    def __init__(self):
        self.done = True  # as a real one that was never recorded
        self.synchronized = 0
        self.stream = None

    def record(self, stream):
        self.done = False
        self.stream = stream
        stream.queue.append(self)
        stream.device.log.append(("record", stream.name))

    def query(self):
        return self.done

    def synchronize(self):
        self.synchronized += 1
        self.stream.run_until(self)

    def elapsed_time(self, later):
        assert self.done
        assert later.done
        return 250.0


class FakeStream:
    def __init__(self, device, name):
        self.device, self.name, self.queue = device, name, []

    def wait_stream(self, other):
        self.device.log.append(("wait", self.name, other))

    def run_until(self, event):
        """Do what is queued, up to and including `event`."""
        while not event.done:
            item = self.queue.pop(0)
            if isinstance(item, FakeEvent):
                item.done = True
            else:
                for source, target, size in zip(*item, strict=True):
                    ctypes.memmove(int(target), int(source), int(size))

    def run(self):
        while self.queue:
            event = next((item for item in self.queue if isinstance(item, FakeEvent)), None)
            assert event is not None
            self.run_until(event)


class FakeDevice:
    def __init__(self, pin=True, refuse=False):
        self.log, self.streams, self.pin, self.refuse = [], [], pin, refuse
        self.registered = {}

    def stream(self, *, urgent):
        name = f"{'urgent' if urgent else 'low'} {len(self.streams)}"
        self.streams.append(FakeStream(self, name))
        return self.streams[-1]

    def current_stream(self):
        return "compute"

    def event(self):
        return FakeEvent()

    def copy(self, stream, source, target, sizes, *, any_order):
        self.log.append(("copy", stream.name, any_order))
        stream.queue.append((source.copy(), target.copy(), sizes.copy()))
        if self.refuse:
            raise RuntimeError("CUDA error: invalid argument")
        return ["descriptors"]

    def register(self, address, size):
        if self.pin:
            self.registered[address] = size
        return self.pin

    def unregister(self, address):
        del self.registered[address]


class Rig:
    def __init__(self, **device):
        rng = np.random.default_rng(5)
        self.geometry = Geometry(0, 1, 2, (GroupGeometry(0, 16, tuple(Page(i, n) for i, n in enumerate(PAGES))),))
        self.tensors = [torch.from_numpy(rng.integers(-128, 128, (NUM_BLOCKS, row), np.int8)) for row in ROWS]
        self.share = Share.create(self.geometry, 64, shared=False)
        self.share.units[:] = 0xA5
        self.device = FakeDevice(**device)
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(t, t.shape[1]) for t in self.tensors],
            [[CanonicalKVCacheRef(i, n) for i, n in enumerate(PAGES)]],
        )
        self.closed = []
        self.worker = KVDiskWorker(
            self.share, self.geometry, caches, device=self.device, on_shutdown=lambda: self.closed.append(True)
        )
        self.store_stream, self.load_stream, self.expedited_stream = self.device.streams
        self._tickets = itertools.count(1)

    def gpu(self, blocks):
        return GPULoadStoreSpec(blocks, [len(blocks)], [0])

    def store(self, job, blocks, units):
        ticket = next(self._tickets)
        assert self.worker.submit_store(job, self.gpu(blocks), SlotsSpec(ticket, units, [len(units)])) is True
        return ticket

    def load(self, job, units, blocks, expedited=False):
        ticket = next(self._tickets)
        spec = SlotsSpec(ticket, units, [len(units)])
        assert self.worker.submit_load(job, spec, self.gpu(blocks), expedited=expedited) is True
        return ticket

    def block(self, index):
        return b"".join(t[index, :n].numpy().tobytes() for t, n in zip(self.tensors, PAGES, strict=True))


def test_every_copy_waits_for_the_models_stream_first_in_both_directions():
    rig = Rig()
    rig.store(0, [1, 2], [0])
    rig.load(1, [0], [3, 4])
    for stream, any_order in ((rig.store_stream, False), (rig.load_stream, True)):
        mine = [entry for entry in rig.device.log if entry[1] == stream.name]
        # begin and end events are recorded around the copy, after the wait
        assert mine == [
            ("wait", stream.name, "compute"),
            ("record", stream.name),
            ("copy", stream.name, any_order),
            ("record", stream.name),
        ]


def test_live_kv_is_never_read_out_of_stream_order():
    rig = Rig()
    rig.store(0, [1, 2], [0])
    assert ("copy", rig.store_stream.name, False) in rig.device.log


def test_loads_do_not_queue_behind_stores_nor_expedited_ones_behind_loads():
    rig = Rig()
    rig.store(0, [1, 2], [0])
    rig.load(1, [8], [3, 4])
    rig.load(2, [8], [5, 6], expedited=True)
    rig.expedited_stream.run()
    assert [r.job_id for r in rig.worker.get_finished()] == [2]
    rig.load_stream.run()
    assert [r.job_id for r in rig.worker.get_finished()] == [1]
    rig.store_stream.run()
    assert [r.job_id for r in rig.worker.get_finished()] == [0]
    assert rig.expedited_stream.name.startswith("urgent")


def test_counts_and_tickets_are_published_only_after_the_copy():
    rig = Rig()
    ticket = rig.store(0, [1, 2, 3, 4], [0, 8])
    assert rig.worker.get_finished() == []
    assert rig.share.blocks_written[[0, 8]].tolist() == [0, 0]
    assert not rig.share.has_ended(ticket)
    rig.store_stream.run()
    assert not rig.share.has_ended(ticket), "nobody looked yet"
    (result,) = rig.worker.get_finished()
    assert (result.success, result.transfer_size, result.transfer_time) == (True, 4 * sum(PAGES), 0.25)
    assert rig.share.blocks_written[[0, 8]].tolist() == [2, 2]
    assert rig.share.has_ended(ticket)
    assert rig.worker.get_finished() == []


def test_a_round_trip_by_addresses_moves_exactly_the_pages():
    rig = Rig()
    rig.store(0, [1, 6, 3, 4], [8, 0])
    rig.store_stream.run()
    chunk = sum(PAGES) * 2
    for unit, blocks in ((8, (1, 6)), (0, (3, 4))):
        slot = rig.share.units[unit * UNIT_BYTES :][: 3 * UNIT_BYTES].tobytes()
        assert slot == b"".join(map(rig.block, blocks)).ljust(3 * UNIT_BYTES, b"\0")
    assert 2 * UNIT_BYTES < chunk < 3 * UNIT_BYTES
    assert (rig.share.units[3 * UNIT_BYTES : 8 * UNIT_BYTES] == 0xA5).all()
    saved = [rig.block(b) for b in (6, 3)]
    before = [t.clone() for t in rig.tensors]
    rig.load(1, [8, 0], [0, 7, 2])  # a last chunk that is left early
    rig.load_stream.run()
    assert rig.block(7) == saved[0]
    assert rig.block(2) == saved[1]
    for tensor, old in zip(rig.tensors, before, strict=True):
        assert torch.equal(tensor[[1, 3, 4, 5, 6]], old[[1, 3, 4, 5, 6]])
    assert torch.equal(rig.tensors[0][:, PAGES[0] :], before[0][:, PAGES[0] :]), "padding"


def test_waiting_blocks_on_the_jobs_asked_for_and_ignores_those_long_gone():
    rig = Rig()
    rig.store(0, [1, 2], [0])
    rig.store(1, [3, 4], [8])
    rig.load(2, [0], [5, 6])
    rig.worker.wait({0, 77})
    assert rig.share.blocks_written[[0, 8]].tolist() == [2, 0]
    rig.worker.wait({2})  # just submitted
    assert sorted(r.job_id for r in rig.worker.get_finished()) == [0, 2]
    rig.worker.wait({0, 2})
    assert rig.worker.get_finished() == []


def test_events_are_reused_and_jobs_let_go_of_what_they_held():
    rig = Rig()
    seen = set()
    for job in range(10):
        rig.store(job, [1, 2], [0])
        seen |= {id(event) for event in rig.store_stream.queue if isinstance(event, FakeEvent)}
        rig.store_stream.run()
        rig.worker.get_finished()
    assert len(seen) == 2


def test_a_job_without_copies_still_ends_in_order():
    rig = Rig()
    rig.store(0, [1, 2], [0])
    ticket = rig.load(1, [], [])
    assert not rig.share.has_ended(ticket)
    rig.load_stream.run()
    rig.worker.get_finished()
    assert rig.share.has_ended(ticket)


def test_a_store_the_driver_refuses_is_poisoned_and_ends(caplog):
    rig = Rig(refuse=True)
    with caplog.at_level(logging.WARNING, "kvdisk"):
        ticket = rig.store(0, [1, 2], [0])
    assert "invalid argument" in caplog.text
    assert rig.share.blocks_written[0] == 0, "some copies may be running"
    rig.store_stream.run()
    (result,) = rig.worker.get_finished()
    assert result.success
    assert rig.share.blocks_written[0] == POISONED
    assert rig.share.has_ended(ticket)


def test_a_load_the_driver_refuses_is_raised_and_waited_for():
    rig = Rig(refuse=True)
    with pytest.raises(RuntimeError, match="invalid argument"):
        rig.load(0, [0], [1, 2])
    rig.worker.shutdown()
    assert rig.load_stream.queue == []


def test_shutdown_waits_for_running_copies_before_it_unpins_and_says_so_once():
    rig = Rig()
    ticket = rig.store(0, [1, 2], [0])
    assert rig.device.registered
    rig.worker.shutdown()
    assert rig.share.has_ended(ticket)
    assert rig.share.blocks_written[0] == 2
    assert not rig.device.registered
    rig.worker.shutdown()
    assert rig.closed == [True]


def test_memory_stays_where_it_is_when_the_device_fails_at_shutdown(caplog, monkeypatch):
    rig = Rig()
    monkeypatch.setattr(worker_module, "_abandoned", abandoned := [])
    rig.store(0, [1, 2], [0])

    def fail(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(FakeEvent, "synchronize", fail)
    rig.worker.shutdown()
    assert "memory is kept" in caplog.text
    assert abandoned == [rig.worker]
    assert rig.device.registered
    assert rig.closed == []


def test_pinning_is_all_or_nothing_and_in_pieces(monkeypatch, caplog):
    monkeypatch.setattr(device_module, "PIECE_BYTES", 100)
    device = FakeDevice()
    pinning = Pinning(device, 1000, 250)
    assert device.registered == {1000: 100, 1100: 100, 1200: 50}
    assert pinning.pinned
    pinning.release()
    pinning.release()
    assert not device.registered
    assert not pinning.pinned

    class Third(FakeDevice):
        def register(self, address, size):
            return address < 1200 and super().register(address, size)

    device = Third()
    assert not Pinning(device, 1000, 250).pinned
    assert not device.registered
    assert "could not pin" in caplog.text


def test_without_pinning_copies_go_on():
    rig = Rig(pin=False)
    assert not rig.worker.pinned
    rig.store(0, [1, 2], [0])
    rig.store_stream.run()
    assert rig.worker.get_finished()[0].success


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 64)), min_size=1, max_size=20))
def test_no_copy_crosses_from_one_registered_piece_into_the_next(copies):
    base, piece = 10_000, 64
    host = np.array([base + start for start, _ in copies], np.int64)
    sizes = np.array([size for _, size in copies], np.int64)
    gpu = host * 3
    new_gpu, new_host, new_sizes = split_at_pieces(gpu, host, sizes, base, piece)
    first, last = (new_host - base) // piece, (new_host + new_sizes - 1 - base) // piece
    assert (first == last).all()
    assert (new_sizes > 0).all()

    def bytes_of(*arrays):
        return sorted((int(g) + i, int(h) + i) for g, h, n in zip(*arrays, strict=True) for i in range(n))

    assert bytes_of(new_gpu, new_host, new_sizes) == bytes_of(gpu, host, sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_round_trips_on_a_real_device_are_exact_and_ordered_after_compute():
    bpc, page, num_blocks = 4, 5000, 4096
    geometry = Geometry(0, 1, bpc, (GroupGeometry(0, 16, (Page(0, page), Page(1, 1001))),))
    tensors = [torch.zeros(num_blocks, row, dtype=torch.int8, device="cuda") for row in (5120, 1001)]
    share = Share.create(geometry, 8192, shared=True)
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(t, t.shape[1]) for t in tensors],
        [[CanonicalKVCacheRef(0, page), CanonicalKVCacheRef(1, 1001)]],
    )
    worker = KVDiskWorker(share, geometry, caches)
    assert worker.pinned
    source, target = list(range(1, 1025)), list(range(2000, 3024))
    units = [i * 6 for i in range(256)]
    content = [torch.randint(-128, 128, t.shape, dtype=torch.int8, device="cuda") for t in tensors]
    torch.cuda._sleep(200_000_000)  # the copy must wait for this and for what follows it on the model's stream
    for tensor, new in zip(tensors, content, strict=True):
        tensor.copy_(new)
    worker.submit_store(0, GPULoadStoreSpec(source, [1024], [0]), SlotsSpec(1, units, [256]))
    worker.wait({0})
    assert share.has_ended(1)
    torch.cuda._sleep(200_000_000)
    for tensor in tensors:
        tensor[2000:3024].zero_()
    worker.submit_load(1, SlotsSpec(2, units, [256]), GPULoadStoreSpec(target, [1024], [0]), expedited=True)
    worker.wait({1})
    for tensor, new, size in zip(tensors, content, (page, 1001), strict=True):
        assert torch.equal(tensor[2000:3024, :size], new[1:1025, :size])
    assert not tensors[0][2000:3024, page:].any(), "padding is left alone"
    assert all(result.transfer_time > 0 for result in worker.get_finished())
    worker.shutdown()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_random_blocks_come_back_on_a_real_device_whose_memory_is_pinned_in_pieces(monkeypatch):
    """And blocks are free for others as soon as `wait` returns."""
    piece, blocks_per_chunk, num_blocks, chunks = 1 << 20, 2, 1024, 40
    monkeypatch.setattr(device_module, "PIECE_BYTES", piece)
    monkeypatch.setattr(copiers_module, "split_at_pieces", functools.partial(split_at_pieces, piece_bytes=piece))
    geometry = Geometry(0, 1, blocks_per_chunk, (GroupGeometry(0, 16, tuple(Page(i, n) for i, n in enumerate(PAGES))),))
    tensors = [torch.zeros(num_blocks, row, dtype=torch.int8, device="cuda") for row in ROWS]
    share = Share.create(geometry, 3 * 400, shared=True)
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(t, t.shape[1]) for t in tensors],
        [[CanonicalKVCacheRef(i, n) for i, n in enumerate(PAGES)]],
    )
    worker = KVDiskWorker(share, geometry, caches)
    assert worker.pinned
    assert len(worker._copier._pinning._pieces) == -(-3 * 400 * UNIT_BYTES // piece)
    rng = np.random.default_rng(7)
    for turn in range(20):
        blocks = rng.permutation(num_blocks)
        source, target = blocks[: 2 * chunks].tolist(), blocks[2 * chunks : 4 * chunks].tolist()
        units = (rng.permutation(400)[:chunks] * 3).tolist()
        for tensor in tensors:
            tensor.copy_(torch.randint(-128, 128, tensor.shape, dtype=torch.int8, device="cuda"))
        wanted = [tensor[source].clone() for tensor in tensors]
        untouched = [tensor.clone() for tensor in tensors]
        worker.submit_store(2 * turn, GPULoadStoreSpec(source, [2 * chunks], [0]), SlotsSpec(turn * 2, units, [chunks]))
        worker.wait({2 * turn})
        for tensor in tensors:
            tensor[source] = 0  # somebody else's from now on
        load = GPULoadStoreSpec(target, [2 * chunks], [0])
        worker.submit_load(2 * turn + 1, SlotsSpec(turn * 2 + 1, units, [chunks]), load)
        worker.wait({2 * turn + 1})
        assert len(worker.get_finished()) == 2
        rest = sorted(set(range(num_blocks)) - {*source, *target})
        for tensor, right, old, size in zip(tensors, wanted, untouched, PAGES, strict=True):
            assert torch.equal(tensor[target, :size], right[:, :size])
            assert torch.equal(tensor[target, size:], old[target, size:]), "padding is left alone"
            assert torch.equal(tensor[rest], old[rest])
    worker.shutdown()
