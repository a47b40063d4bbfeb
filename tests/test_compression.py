"""A store that compresses: the same bytes, fewer of them on disk, whatever the disk does meanwhile.

Values are a mix of bytes that shrink and bytes that do not, and stores with and without compression take turns on one
disk, for the codec is a chunk's own and no part of the identity of the data.
"""

import asyncio
import importlib.util
import os
import random
import threading
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdisk
from kvdisk import codec, layout
from kvdisk.commands import PackChunk, ReadChunks, ReadItem, WritePack
from kvdisk.compression import Compression
from kvdisk.io.sim import Fault, SimDisk
from kvdisk.plan import footprint
from tests import planes, test_crash
from tests.simstore import ALIGNMENT, InlineExecutor, SimStore, _memory, run
from tests.test_codec import gaussian

zstandard = pytest.importorskip("zstandard", reason="the optional package is not installed")


def mixed(key: bytes, version: int, size: int) -> bytes:
    """The bytes of a version of a key, which no other version has: two of three shrink."""
    chance = random.Random(f"{key!r} {version}")
    kind = chance.randrange(3)
    if kind == 0 or size < 64:
        return chance.randbytes(size)
    head = chance.randbytes(32)
    return (head + (gaussian(size, "bf16", chance.randrange(1 << 30)) if kind == 1 else bytes(size)))[:size]


# ---- what is on the disk


def files_of(disk: SimDisk) -> list[bytes]:
    return [bytes(file.data) for file in disk.files.values()]


def entries_of(disk: SimDisk) -> "np.ndarray[Any, Any]":
    """All entries of all packs in open segments."""
    found = []
    for raw in files_of(disk):
        header = layout.decode_segment_header(raw)
        at = ALIGNMENT
        while header is not None and (pack := layout.decode_pack(raw[at:], at, header)) is not None:
            found.append(pack.entries)
            at += pack.pack_bytes
    return np.concatenate(found)


def test_chunks_that_shrink_take_less_of_the_disk_and_the_others_what_they_took() -> None:
    disk = SimDisk(1)
    values = {b"shrinks": gaussian(10_000, "bf16"), b"random": random.Random(1).randbytes(20_000)}

    async def main() -> None:
        sim = await SimStore.open(disk, compress=True)
        for key, data in values.items():
            assert await sim.put(key, data)
        await sim.flush()
        sim.store.drop_slots()
        for key, data in values.items():
            assert await sim.get(key) == data
        stats = sim.store.stats()
        assert (stats["chunks_compressed"], stats["chunks_flushed"], stats["bytes_flushed"]) == (1, 2, 40_000)
        (segment,) = [one for one in sim.store.table if one.tail > ALIGNMENT]
        assert stats["bytes_written"] == segment.tail - ALIGNMENT == 4096 + 16_384 + 20_480

    run(main())
    entries = entries_of(disk)
    assert entries["codec"].tolist() == [codec.ZSTD_PLANES_2, codec.NONE]
    assert entries["live_bytes"].tolist() == [20_000, 20_000]
    assert entries["stored_bytes"].tolist() == [16_384, 20_480]


def test_what_would_not_save_an_alignment_is_written_as_it_is() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        sim = await SimStore.open(disk, compress=True)
        assert await sim.put(b"one block", bytes(4096))
        assert await sim.put(b"just over", bytes(4097))
        await sim.flush()

    run(main())
    assert entries_of(disk)["codec"].tolist() == [codec.NONE, codec.ZSTD]


def test_without_compression_no_chunk_is_touched() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        sim = await SimStore.open(disk)
        assert await sim.put(b"k", bytes(30_000))
        await sim.flush()
        assert not any(one.compress for one in sim.commands if isinstance(one, WritePack))

    run(main())
    assert entries_of(disk)["codec"].tolist() == [codec.NONE]


@pytest.mark.parametrize("first, second", [(True, False), (False, True), (True, True)])
def test_each_kind_of_store_reads_what_the_other_wrote(first: bool, second: bool) -> None:
    disk = SimDisk(2, lose_completed=False)
    values = {b"%d" % n: mixed(b"%d" % n, 0, 9_000 + n) for n in range(20)}

    async def write() -> None:
        sim = await SimStore.open(disk, segments_max=(8,), compress=first)
        for key, data in values.items():
            assert await sim.put(key, data)
        await sim.flush()

    async def read() -> None:
        sim = await SimStore.open(disk.after_crash(), segments_max=(8,), compress=second)
        assert {key: await sim.get(key) for key in values} == values

    run(write())
    run(read())


GOLDEN = Path(__file__).parent / "golden" / "segment_v1_codecs.seg"


def test_every_codec_of_the_golden_segment_is_unpacked_to_what_was_packed() -> None:
    spec = importlib.util.spec_from_file_location("make_segment", GOLDEN.with_name("make_segment_v1_codecs.py"))
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    raw = GOLDEN.read_bytes()
    header = layout.decode_segment_header(raw)
    assert header == maker.HEADER
    (pack,) = layout.decode_footer(raw, header) or ()
    found = {}
    for key, entry in zip(layout.entry_keys(pack.entries), pack.entries, strict=True):
        at = pack.offset + int(entry["offset"])
        stored = memoryview(raw)[at : at + int(entry["stored_bytes"])]
        assert layout.checksum(stored) == int(entry["checksum"])
        parts = [bytearray(len(part)) for part in maker.CONTENT[key][1]]
        assert sum(map(len, parts)) == int(entry["live_bytes"])
        assert codec.decompress(int(entry["codec"]), [stored], [memoryview(part) for part in parts])
        found[key] = (int(entry["codec"]), [bytes(part) for part in parts])
    assert found == maker.CONTENT


def test_compressed_neighbours_are_read_together() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        sim = await SimStore.open(disk, compress=True)
        residents = []
        for n in range(4):
            resident = sim.store.reserve(b"%d" % n, 0, (20_000,), n, b"")
            assert resident is not None
            sim.slot(resident)[:20_000] = gaussian(10_000, "bf16", n)
            residents.append(resident)
        sim.store.commit(residents)
        await sim.flush()
        sim.store.drop_slots()
        assert all(sim.store.promote(b"%d" % n) for n in range(4))
        await sim.flush()
        (read,) = [one for one in sim.commands if isinstance(one, ReadChunks)]
        assert [item.stored_bytes for item in read.items] == [16_384] * 4
        assert [await sim.get(b"%d" % n) for n in range(4)] == [gaussian(10_000, "bf16", n) for n in range(4)]

    run(main())


# ---- where the next pack begins


def test_the_next_pack_begins_where_the_compressed_one_ends_and_need_not_wait_for_its_write() -> None:
    """Several packs are in flight at a time, as ever: only the size has to be known."""
    disk = SimDisk(3)

    async def main() -> None:
        sim = await SimStore.open(disk, compress=True, segment_bytes=1 << 20, unit_count=256)
        assert await sim.put(b"first", gaussian(10_000, "bf16"))
        await sim.flush()
        sim.engine.faults = [Fault("write", nth=0, never=True)]
        for n in range(4):
            assert await sim.put(b"%d" % n, gaussian(10_000, "bf16", n))
        for _ in range(20):
            await asyncio.sleep(0)
            sim.pump()
        packs = [one for one in sim.commands if isinstance(one, WritePack)]
        assert len(packs) == 3, "one was done, and two are on their way"
        assert packs[0].offset == ALIGNMENT
        assert packs[1].offset == ALIGNMENT + 4096 + 16_384
        assert packs[2].offset == packs[1].offset + 4096 + 16_384

    run(main())


def test_room_that_compression_saves_is_used() -> None:
    disk = SimDisk(4)

    async def main() -> int:
        sim = await SimStore.open(disk, compress=True, segments_max=(3,), segment_bytes=256 << 10)
        for n in range(60):
            assert await sim.put(b"%d" % n, gaussian(10_000, "bf16", n))
            await sim.flush()
        return len(sim.store.index)

    fit = run(main())
    assert fit > 3 * 10, "three segments of 256 KiB hold ten packs of such a chunk each where it is not compressed"


# ---- damage


def flip(disk: SimDisk, entry: "np.ndarray[Any, Any]", pack_offset: int, at: int) -> None:
    for file in disk.files.values():
        file.data[pack_offset + int(entry["offset"]) + at] ^= 0x10


def test_damage_in_a_payload_is_a_miss_and_its_neighbours_are_hits() -> None:
    disk = SimDisk(5)
    values = {b"%d" % n: gaussian(10_000, "bf16", n) for n in range(3)}

    async def main() -> None:
        sim = await SimStore.open(disk, compress=True)
        residents = []
        for n, (key, data) in enumerate(values.items()):
            resident = sim.store.reserve(key, 0, (len(data),), n, b"")
            assert resident is not None
            sim.slot(resident)[: len(data)] = data
            residents.append(resident)
        sim.store.commit(residents)
        await sim.flush()
        sim.store.drop_slots()
        flip(disk, entries_of(disk)[1], ALIGNMENT, 5_000)
        assert [await sim.get(key) for key in values] == [values[b"0"], None, values[b"2"]]
        assert sim.store.counters["chunks_damaged"] == 1

    run(main())


@pytest.mark.parametrize("payload", [
    bytes(4096),
    zstandard.ZstdCompressor().compress(bytes(20_001)),
    zstandard.ZstdCompressor().compress(bytes(1 << 26)),
    zstandard.ZstdCompressor(write_content_size=False).compress(bytes(20_000)),
    b"\x28\xb5\x2f\xfd\xc0\x38" + (1 << 62).to_bytes(8, "little") + bytes(100),
], ids=["no frame", "another size", "64 MiB", "no size", "claims 2^62"])  # fmt: skip
def test_a_stranger_s_payload_under_a_right_checksum_is_a_damaged_chunk(payload: bytes) -> None:
    """XXH3 has no key: whoever can write to the disk can compute every checksum in a pack."""
    disk = SimDisk(6)

    async def main() -> None:
        sim = await SimStore.open(disk, compress=True)
        assert await sim.put(b"k", gaussian(10_000, "bf16"))
        await sim.flush()
        sim.store.drop_slots()
        ((file, raw),) = [(file, bytes(file.data)) for file in disk.files.values()]
        header = layout.decode_segment_header(raw)
        assert header is not None
        pack = layout.decode_pack(raw[ALIGNMENT:], ALIGNMENT, header)
        assert pack is not None
        entries = pack.entries.copy()
        at, size = ALIGNMENT + int(entries[0]["offset"]), int(entries[0]["stored_bytes"])
        file.data[at : at + size] = payload.ljust(size, b"\0")
        entries[0]["checksum"] = layout.checksum(payload.ljust(size, b"\0"))
        planted = layout.Pack(ALIGNMENT, pack.header_bytes, pack.pack_bytes, pack.sequence, entries)
        file.data[ALIGNMENT : ALIGNMENT + planted.raw_bytes] = layout.encode_pack(planted, header)
        again = await SimStore.open(disk, compress=True)
        assert b"k" in again.store.index
        assert await again.get(b"k") is None
        assert again.store.counters["chunks_damaged"] == 1
        assert await again.put(b"k", b"new"), "the slot is free again"

    run(main())


def test_a_slot_that_was_unpacked_into_has_zeros_behind_its_chunk() -> None:
    """It may be written again as it is, and what lay behind the chunk before must not get to the disk."""
    disk = SimDisk(7)

    async def main() -> None:
        sim = await SimStore.open(disk, compress=True)
        assert await sim.put(b"k", gaussian(10_001, "bf16"))
        await sim.flush()
        sim.store.drop_slots()
        sim.memory.view[:] = b"\xee" * sim.memory.size
        assert await sim.get(b"k") == gaussian(10_001, "bf16")
        resident = sim.store.resident(b"k")
        assert resident is not None
        assert not any(sim.slot(resident)[20_002:])

    run(main())


def test_what_is_read_does_not_wait_for_packs_to_be_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = _memory(64 * 4096)
    plane = Compression([(memory, 0)], 4096, checksums=True)
    begun, may_end = threading.Semaphore(0), threading.Event()

    def compress(*_: Any) -> None:
        begun.release()
        may_end.wait()

    monkeypatch.setattr(codec, "compress", compress)
    chunks = [PackChunk(unit, (4096,), b"%d" % unit, b"", 0, 0) for unit in range(2 * plane.thread_count)]
    item = ReadItem(0, (4096,), layout.checksum(bytes(4096)), 60)

    async def main() -> None:
        packing = asyncio.ensure_future(plane.pack(chunks, [footprint((4096,), 4096)] * len(chunks)))
        try:
            for _ in range(plane.thread_count):
                await asyncio.to_thread(begun.acquire)
            assert await asyncio.wait_for(plane.verify([item]), 20) == [True]
            assert not packing.done()
        finally:
            may_end.set()
            await packing
            plane.close()

    asyncio.run(main())


# ---- several ranks


@pytest.mark.parametrize("parts", [(10_000, 10_000), (20_001, 0, 4_097), (4096, 12_288), (0, 30_000)])
@pytest.mark.parametrize("compressible", [True, False])
def test_parts_on_several_ranks_come_back_each_in_its_own_memory(parts: tuple[int, ...], compressible: bool) -> None:
    memories = [_memory(64 * 4096) for _ in parts]
    plane = Compression([(memory, 4096 * rank) for rank, memory in enumerate(memories)], 4096, checksums=True)
    plane.pack_threads = plane.verify_threads = InlineExecutor()
    data = gaussian(sum(parts), "bf16")[: sum(parts)] if compressible else random.Random(1).randbytes(sum(parts))
    pieces = np.split(np.frombuffer(data, np.uint8), np.cumsum(parts)[:-1])

    def place(unit: int, rank: int) -> memoryview:
        start = 4096 * rank + 4096 * unit
        return memories[rank].view[start : start + parts[rank]]

    for rank, piece in enumerate(pieces):
        place(3, rank)[:] = piece.tobytes()

    async def main() -> None:
        chunk = PackChunk(3, parts, b"k", b"", 0, 0)
        take = footprint(parts, 4096)
        packed = await plane.pack([chunk], [take])
        buffer = _memory(256 * 4096)
        spans, (check,) = await plane.lay_out(packed, buffer)
        stored = b"".join(span.memory.view[span.start : span.start + span.length] for span in spans)
        assert (packed.codecs[0] != codec.NONE) == compressible
        assert len(stored) == packed.takes[0].stored_bytes <= take.stored_bytes
        item = ReadItem(0, parts, check, 20, packed.codecs[0], len(stored) if packed.codecs[0] else 0)
        at = 0
        for memory, start, length in plane.stored_spans([item]):
            memory.view[start : start + length] = stored[at : at + length]
            at += length
        assert at == len(stored)
        assert await plane.verify([item]) == [True]
        for rank, piece in enumerate(pieces):
            assert place(20, rank) == piece.tobytes()
        assert await plane.verify([item._replace(checksum=check ^ 1)]) == [False]

    run(main())


# ---- whatever the disk does


@pytest.fixture
def every_other_store_compresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of tests/test_crash.py, on values that shrink or do not, by stores that compress or do not."""
    opened = [0]
    open_store = SimStore.open

    async def open_mixed(*args: Any, **options: Any) -> SimStore:
        opened[0] += 1
        return await open_store(*args, **options, compress=opened[0] % 3 > 0)

    monkeypatch.setattr(SimStore, "open", open_mixed)
    monkeypatch.setattr(test_crash, "value", mixed)


@pytest.mark.usefixtures("every_other_store_compresses")
class TestWhateverTheDiskDoes:
    @pytest.mark.parametrize("completed_writes_survive", [True, False], ids=["killed", "power lost"])
    def test_a_crash_at_any_write_yields_no_wrong_bytes(self, completed_writes_survive: bool) -> None:
        test_crash.test_a_crash_at_any_write_yields_no_wrong_bytes((4,), completed_writes_survive)

    @pytest.mark.parametrize("seed", range(30))
    def test_crashes_of_random_workloads_yield_no_wrong_bytes(self, seed: int) -> None:
        test_crash.test_crashes_of_random_workloads_yield_no_wrong_bytes(seed)

    @pytest.mark.parametrize("what", ["read", "write", "create_file"])
    @pytest.mark.parametrize("code", test_crash.ERRNOS[:6], ids=os.strerror)
    def test_no_errno_yields_wrong_bytes_or_stops_the_store(self, what: str, code: int) -> None:
        test_crash.test_no_errno_of_any_operation_yields_wrong_bytes_or_stops_the_store(what, code)

    @pytest.mark.parametrize("fault", [
        Fault("write", nth=2, torn=True, count=3),
        Fault("write", nth=1, short_by=4096, count=4),
        Fault("read", nth=0, short_by=4096, count=4),
        Fault("write", nth=2, delay_turns=60, count=4),
        Fault("write", nth=3, never=True, count=2),
        Fault("read", nth=1, never=True, count=3),
    ], ids=repr)  # fmt: skip
    def test_torn_short_delayed_and_lost_operations_yield_no_wrong_bytes(self, fault: Fault) -> None:
        test_crash.test_torn_short_delayed_and_lost_operations_yield_no_wrong_bytes(fault, 1)


# ---- against a dictionary


ACTION = st.tuples(
    st.sampled_from(["put", "put", "get", "flush", "drop", "reopen"]), st.integers(0, 9), st.integers(1, 30_000)
)


@given(st.lists(ACTION, max_size=60), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_store_with_mixed_chunks_is_a_dictionary_that_forgets(actions: list[tuple[str, int, int]], seed: int) -> None:
    disk = SimDisk(seed)
    model: dict[bytes, bytes] = {}

    async def main() -> None:
        sim = await SimStore.open(disk, compress=True)
        for turn, (what, number, size) in enumerate(actions):
            key = b"%d" % number
            if what == "put":
                data = mixed(key, turn, size)
                if await sim.put(key, data):
                    model[key] = data
                else:
                    model.pop(key, None)
            elif what == "get":
                assert await sim.get(key) in (None, model.get(key))
            elif what == "flush":
                await sim.flush()
            elif what == "drop":
                sim.store.drop_slots()
            else:
                await sim.flush()
                sim = await SimStore.open(disk, compress=turn % 2 == 0, seed=turn)
        await sim.flush()
        sim.store.drop_slots()
        for key in model:
            found = await sim.get(key)
            assert found in (None, model[key])
        assert not sim.store.counters["chunks_damaged"]

    run(main())


# ---- threads that fail


class Threads(Executor):
    """Whose calls end when the test says so; of `most` at once."""

    def __init__(self, most: int = 100) -> None:
        self.calls: list[Future[Any]] = []
        self._most = most

    def submit(self, *_: Any, **__: Any) -> Any:
        if len(self.calls) == self._most:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self.calls.append(Future())
        return self.calls[-1]


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_work_that_fails_on_one_thread_is_over_when_it_has_ended_on_all() -> None:
    """The slots and buffers that the others write to are used again then."""
    plane = Compression([(_memory(1 << 20), 0)], ALIGNMENT, checksums=True)
    plane.thread_count, threads = 2, Threads()
    spreading = asyncio.ensure_future(plane._spread(threads, abs, [1, 2]))
    await turns()
    first, second = threads.calls
    first.set_exception(MemoryError("no scratch memory"))
    await turns()
    assert not spreading.done()
    second.set_result([2])
    with pytest.raises(MemoryError, match="no scratch memory"):
        await spreading
    plane.close()


async def test_work_that_cannot_be_begun_on_one_thread_is_over_when_it_has_ended_on_the_others() -> None:
    plane = Compression([(_memory(1 << 20), 0)], ALIGNMENT, checksums=True)
    plane.thread_count, threads = 2, Threads(most=1)
    spreading = asyncio.ensure_future(plane._spread(threads, abs, [1, 2]))
    await turns()
    assert not spreading.done()
    threads.calls[0].set_result([1])
    with pytest.raises(RuntimeError, match="after shutdown"):
        await spreading
    plane.close()


# ---- on a real file system


async def test_the_library_compresses_and_a_store_without_it_reads_that(tmp_path: Any) -> None:
    values = {b"%d" % n: mixed(b"%d" % n, 1, 50_000 + 1000 * n) for n in range(40)}
    async with kvdisk.open(tmp_path, capacity="64MiB", arena_bytes="16MiB", compression="zstd") as store:
        for key, data in values.items():
            assert await store.put(key, data)
        assert await store.flush()
        stats = store.stats()
        assert 0 < int(stats["chunks_compressed"]) < 40
        assert int(stats["bytes_written"]) < 0.9 * int(stats["bytes_flushed"])
    async with kvdisk.open(tmp_path, capacity="64MiB", arena_bytes="16MiB") as store:
        for key, data in values.items():
            assert await store.get(key) == data
        assert not store.stats().get("chunks_damaged")


def test_compression_without_the_package_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdisk.options.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"compression='zstd' needs .* pip install 'kvdisk\[zstd\]'"):
        kvdisk.open("/tmp", capacity="1GiB", compression="zstd")
    kvdisk.open("/tmp", capacity="1GiB", compression="none")


@pytest.mark.parametrize("kind", planes.KINDS)
def test_the_data_plane_compresses_wherever_it_runs(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        planes, "value", lambda key, size: gaussian(size // 2, "bf16", int.from_bytes(key, "big") % 2**30)
    )
    (tmp_path / "root").mkdir(mode=0o700)
    rig = planes.Rig(tmp_path / "root", kind=kind, compression="zstd")
    keys = planes.keys_of(40)
    rig.put(keys)
    stats = rig.service.stats()
    assert stats["chunks_compressed"] == stats["chunks_flushed"] == len(keys)
    assert int(stats["bytes_written"]) < 0.85 * int(stats["bytes_flushed"])
    rig.memory.view[:] = bytes(rig.memory.size)
    assert all(rig.get(key) == planes.value(key, rig.size) for key in keys)
    rig.close()
