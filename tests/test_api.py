"""kvdisk.open on a real file system: round trips, restarts, damage, limits; always a miss or the exact bytes."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvdisk
from kvdisk import layout
from kvdisk.api import AsyncStore
from kvdisk.commands import Command, ReadChunks, WritePack
from kvdisk.errors import DirectoryInUseError, EngineUnavailableError, StoreClosedError
from kvdisk.store import Presence
from tests.machine import allows_io_uring
from tests.simstore import value

MIB = 1 << 20

Open = Callable[..., AsyncStore]


@pytest.fixture(params=["io_uring", "posix"])
async def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """`kvdisk.open` for the test's directory with small sizes, by one engine; skips where the engine does not work."""
    tmp_path.chmod(0o700)

    def open_it(**options: object) -> AsyncStore:
        small = {"capacity": 24 * MIB, "arena_bytes": 4 * MIB, "segment_bytes": MIB, "engine": request.param}
        return kvdisk.open(tmp_path, **{**small, **options})

    try:
        async with open_it():
            pass
    except EngineUnavailableError as error:
        if allows_io_uring():
            raise
        pytest.skip(str(error))
    return open_it


def segments(root: Path) -> list[Path]:
    return sorted(root.glob("ns-*/*/*.seg"))


def packs_of(path: Path) -> list[tuple[int, dict[bytes, tuple[int, int, int]]]]:
    """(offset, key -> (payload's offset in the file, stored bytes, live bytes)) of all packs in a segment."""
    raw = path.read_bytes()
    header = layout.decode_segment_header(raw)
    assert header is not None
    found = []
    for offset in range(header.alignment, header.segment_bytes, header.alignment):
        pack = layout.decode_pack(raw[offset:], offset, header)
        if pack is not None:
            keys = layout.entry_keys(pack.entries)
            places = zip(pack.entries["offset"], pack.entries["stored_bytes"], pack.entries["live_bytes"], strict=True)
            found.append(
                (offset, {k: (offset + int(o), int(s), int(n)) for k, (o, s, n) in zip(keys, places, strict=True)})
            )
    return found


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x40]))


async def fill(store: AsyncStore, count: int, size: int, version: int = 0) -> list[bytes]:
    keys = [b"key-%04d" % number for number in range(count)]
    for key in keys:
        assert await store.put(key, value(key, version, size))
    return keys


async def test_any_size_and_any_key_length_round_trips_from_memory_and_from_disk(open_store: Open) -> None:
    async with open_store() as store:
        sizes = [
            1,
            2,
            511,
            512,
            4095,
            4096,
            4097,
            36_864,
            83_968,
            99_999,
            store.chunk_bytes_max - 1,
            store.chunk_bytes_max,
        ]
        items = {bytes([65 + i]) * (1 + 5 * i): value(b"%d" % i, 0, size) for i, size in enumerate(sizes)}
        items[bytes(64)] = b"sixty-four zeros"
        items[bytes(63)] = b"sixty-three zeros"
        for key, data in items.items():
            assert await store.put(key, data)
            assert store.contains(key)
            assert await store.get(key) == data
        assert await store.flush()
    async with open_store() as store:
        for key, data in items.items():
            assert store.contains(key)
            assert await store.get(key) == data
        assert store.stats()["bytes_read"] > 0, "proof that they came from the disk"
        assert store.stats()["misses"] == 0
        assert await store.get(b"never stored") is None


async def test_every_buffer_type_is_taken_and_copied_at_once(open_store: Open) -> None:
    async with open_store() as store:
        data = bytearray(b"x" * 5000)
        assert await store.put(b"bytearray", data)
        data[:] = b"y" * 5000
        assert await store.get(b"bytearray") == b"x" * 5000
        assert await store.put(b"array", np.arange(1000, dtype=np.float32))
        assert await store.get(b"array") == np.arange(1000, dtype=np.float32).tobytes()


async def test_an_overwrite_replaces_also_across_a_restart_and_eviction(open_store: Open) -> None:
    async with open_store() as store:
        for version in range(6):
            await fill(store, 60, 50_000, version)  # 3 MB each: the old versions are evicted in the end
            assert await store.flush()
        assert await store.get(b"key-0003") == value(b"key-0003", 5, 50_000)
    async with open_store() as store:
        hits = 0
        for number in range(60):
            key = b"key-%04d" % number
            found = await store.get(key)
            assert found in (None, value(key, 5, 50_000))
            hits += found is not None
        assert hits == 60


async def test_a_value_too_large_for_a_smaller_arena_does_not_bring_back_the_one_before(open_store: Open) -> None:
    sizes = {"segment_bytes": 24 * MIB, "capacity": 100 * MIB}
    large = value(b"key", 1, 5 * MIB)
    async with open_store(arena_bytes=24 * MIB, **sizes) as store:
        assert await store.put(b"key", b"first")
        assert await store.flush()
        assert await store.put(b"key", large)
    async with open_store(arena_bytes=4 * MIB, **sizes) as store:
        assert not store.contains(b"key")
        assert await store.get(b"key") is None
    async with open_store(arena_bytes=24 * MIB, **sizes) as store:
        assert await store.get(b"key") == large


async def test_the_same_bytes_again_are_not_written_again(open_store: Open) -> None:
    async with open_store() as store:
        keys = await fill(store, 20, 9000)
        assert await store.flush()
        written = store.stats()["bytes_written"]
        await fill(store, 20, 9000)
        assert await store.flush()
        assert store.stats()["bytes_written"] == written
    async with open_store() as store:
        await fill(store, 20, 9000)
        assert await store.flush()
        assert store.stats()["bytes_written"] == 0
        assert [await store.get(key) for key in keys] == [value(key, 0, 9000) for key in keys]


async def test_a_restart_finds_every_key_and_every_byte_also_in_sealed_segments(open_store: Open) -> None:
    async with open_store() as store:
        keys = await fill(store, 250, 40_000)  # 10 MB in segments of 1 MiB, an arena of 4 MiB
        assert await store.flush()
        before = store.stats()
    async with open_store() as store:
        assert store.stats()["chunks_on_disk"] == before["chunks_on_disk"] == 250
        assert store.stats()["disk_bytes"] == before["disk_bytes"]
        assert [await store.get(key) for key in keys] == [value(key, 0, 40_000) for key in keys]
        assert store.stats().get("headers_damaged", 0) == 0


async def test_two_hundred_tasks_at_once_all_get_right_bytes(open_store: Open) -> None:
    async with open_store() as store:
        refused = 0

        async def work(number: int) -> None:
            nonlocal refused
            for round_ in range(4):
                key = b"task-%d-%d" % (number, round_)
                if not await store.put(key, value(key, 0, 6000 + number)):
                    refused += 1
                shared = b"shared-%d" % (number % 7)
                await store.put(shared, value(shared, number, 20_000))
                assert await store.get(key) in (None, value(key, 0, 6000 + number))
                found = await store.get(shared)
                assert found is None or found in shared_values[number % 7]

        shared_values = [{value(b"shared-%d" % s, n, 20_000) for n in range(s, 200, 7)} for s in range(7)]
        await asyncio.gather(*(work(number) for number in range(200)))
        assert refused == 0
        assert await store.flush()
        hits = [await store.get(b"task-%d-3" % number) for number in range(200)]
        assert sum(found is not None for found in hits) == 200


async def test_reads_of_one_key_by_many_tasks_are_one_read(open_store: Open) -> None:
    async with open_store() as store:
        await fill(store, 3, 100_000)
        assert await store.flush()
    async with open_store() as store:
        found = await asyncio.gather(*(store.get(b"key-0001") for _ in range(50)))
        assert set(found) == {value(b"key-0001", 0, 100_000)}
        assert store.stats()["chunks_promoted"] == 1


async def test_tasks_that_wait_are_woken_for_their_own_key_only(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store() as store:
        keys = await fill(store, 400, 4000)
    async with open_store() as store:
        inner = store._running.store
        calls = 0
        presence = inner.presence

        def counted(key: bytes) -> Presence:
            nonlocal calls
            calls += 1
            return presence(key)

        monkeypatch.setattr(inner, "presence", counted)
        found = await asyncio.gather(*(store.get(key) for key in keys))
        assert found == [value(key, 0, 4000) for key in keys]
        assert calls == 2 * len(keys), "once before the read and once after it"


async def test_many_more_reads_at_once_than_there_are_slots_all_hit_and_read_each_chunk_once(open_store: Open) -> None:
    async with open_store() as store:
        keys = await fill(store, 3000, 4000)  # the arena holds 1024
    async with open_store() as store:
        found = await asyncio.gather(*(store.get(key) for key in keys))
        assert found == [value(key, 0, 4000) for key in keys]
        stats = store.stats()
        assert stats["chunks_promoted"] == 3000
        assert int(stats["slots_refused"]) <= 2 * 3000, "who waits for a slot tries again when it is his turn"


async def test_tasks_that_are_cancelled_while_they_wait_pass_their_turn_on(open_store: Open) -> None:
    async with open_store() as store:
        keys = await fill(store, 3000, 4000)
    async with open_store() as store:
        tasks = [asyncio.create_task(store.get(key)) for key in keys]
        for turn in range(40):
            await asyncio.sleep(0)
            for task in tasks[turn::80]:
                task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        kept = [(key, data) for key, data in zip(keys, found, strict=True) if not isinstance(data, BaseException)]
        assert len(kept) >= 1500
        assert all(data == value(key, 0, 4000) for key, data in kept)
        assert all(resident.pins == 0 for resident in store._running.store.arena.owners())


async def test_flush_waits_for_what_was_put_before_and_for_nothing_else(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store() as store:
        await fill(store, 1, 9000)
    async with open_store() as store:
        assert await store.put(b"first", b"opens a segment")
        assert await store.flush()
        service = store._running
        plane, held = service.plane.backend.plane, list[Command]()
        assert plane is not None
        start = plane.start

        def start_some(commands: list[Command]) -> None:
            keys = [chunk.key for command in commands if isinstance(command, WritePack) for chunk in command.chunks]
            hold = [c for c in commands if isinstance(c, ReadChunks) or (isinstance(c, WritePack) and b"later" in keys)]
            held.extend(hold)
            start([command for command in commands if command not in hold])

        monkeypatch.setattr(plane, "start", start_some)
        reading = asyncio.create_task(store.get(b"key-0000"))
        assert await store.put(b"before", b"data")
        flushing = asyncio.create_task(store.flush())
        await asyncio.sleep(0)  # it has begun
        assert await store.put(b"later", b"data")
        assert await flushing
        assert b"before" in service.store.index
        assert b"later" not in service.store.index
        assert not reading.done()
        service.plane.loop.call_soon_threadsafe(start, held)
        assert await reading == value(b"key-0000", 0, 9000)
        assert await store.flush()
        assert b"later" in service.store.index


async def test_what_the_disk_refused_is_lost_by_a_clean_close_and_said(
    open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with open_store() as store:
        assert await store.put(b"key", b"old")
        assert await store.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # nothing behind the header
        try:
            assert await store.put(b"key", b"new")
            assert await store.get(b"key") == b"new"
            assert not await store.flush()
            assert await store.put(b"other", b"new")
            await store.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = [record.message for record in caplog.records if "since the last flush" in record.message]
    assert said == ["the disk did not take 1 of the values put since the last flush; they are gone"]
    caplog.clear()
    async with open_store() as store:
        assert await store.get(b"key") in (b"old", None)
        assert await store.get(b"other") is None
    assert not [record for record in caplog.records if "since the last flush" in record.message]


async def test_impossible_keys_and_data_are_value_errors(open_store: Open) -> None:
    async with open_store() as store:
        for key in (b"", bytes(65), "text", None, 7):
            with pytest.raises(ValueError, match="1 to 64"):
                await store.put(key, b"data")  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="1 to 64"):
                await store.get(key)  # type: ignore[arg-type]
        for data in (b"", bytes(store.chunk_bytes_max + 1)):
            with pytest.raises(ValueError, match=str(store.chunk_bytes_max)):
                await store.put(b"key", data)
        assert not store.contains(b"key")


async def test_after_close_everything_says_closed_and_close_is_idempotent(open_store: Open) -> None:
    store = open_store()
    with pytest.raises(StoreClosedError):
        await store.get(b"key")  # not entered yet
    async with store:
        await store.put(b"key", b"data")
    await store.close()
    await store.close()
    for call in (store.put(b"key", b"data"), store.get(b"key"), store.flush()):
        with pytest.raises(StoreClosedError):
            await call
    for method in (lambda: store.contains(b"key"), store.stats, lambda: store.chunk_bytes_max):
        with pytest.raises(StoreClosedError):
            method()


async def test_close_ends_waiting_tasks_and_keeps_what_was_put(open_store: Open) -> None:
    store = open_store()
    await store.__aenter__()
    keys = await fill(store, 40, 40_000)
    waiting = [asyncio.create_task(store.put(b"more-%d" % n, value(b"more", n, 200_000))) for n in range(40)]
    await asyncio.sleep(0)
    await store.close()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(result is True or isinstance(result, StoreClosedError) for result in results)
    async with open_store() as again:
        assert [await again.get(key) for key in keys] == [value(key, 0, 40_000) for key in keys]
        for number, result in enumerate(results):
            found = await again.get(b"more-%d" % number)
            assert found == value(b"more", number, 200_000) if result is True else found is None


@pytest.mark.parametrize(
    "where", ["magic", "header", "key", "entry checksum", "payload first", "payload last", "padding"]
)
async def test_a_flipped_byte_costs_what_it_covers_and_nothing_else(
    open_store: Open, tmp_path: Path, where: str
) -> None:
    async with open_store() as store:
        keys = [b"key-%d" % number for number in range(8)]
        for key in keys:
            assert await store.put(key, value(key, 0, 9_001))
            assert await store.flush()  # a pack each
    (path,) = segments(tmp_path)
    packs = packs_of(path)
    assert [set(places) for _, places in packs] == [{key} for key in keys]
    offset, places = packs[3]
    payload, stored, live = places[keys[3]]
    entry = offset + layout.PACK_HEADER_BYTES
    checksum = entry + layout.ENTRY_DTYPE.fields["checksum"][1]  # type: ignore[index]
    target = {
        "magic": offset,
        "header": offset + 20,
        "key": entry + 2,
        "entry checksum": checksum,
        "payload first": payload,
        "payload last": payload + live - 1,
        "padding": payload + stored - 1,
    }[where]
    flip(path, target)
    async with open_store() as store:
        assert [await store.get(key) for key in keys] == [value(k, 0, 9_001) if k != keys[3] else None for k in keys]
        assert not store.contains(keys[3])
        damaged = store.stats().get("chunks_damaged", 0)
        assert damaged == (1 if where in ("payload first", "payload last", "padding") else 0)
        assert await store.put(keys[3], value(keys[3], 1, 9_001)), "a damaged chunk can be stored anew"
        assert await store.flush()
        assert await store.get(keys[3]) == value(keys[3], 1, 9_001)


async def test_swapped_payloads_miss_and_their_neighbours_hit(open_store: Open, tmp_path: Path) -> None:
    async with open_store() as store:
        keys = await fill(store, 6, 8192)
        assert await store.flush()
    (path,) = segments(tmp_path)
    places = {key: place for _, pack in packs_of(path) for key, place in pack.items()}
    raw = bytearray(path.read_bytes())
    (a, size, _), (b, _, _) = places[keys[1]], places[keys[4]]
    raw[a : a + size], raw[b : b + size] = raw[b : b + size], raw[a : a + size]
    path.write_bytes(raw)
    async with open_store() as store:
        found = [await store.get(key) for key in keys]
        assert found == [None if n in (1, 4) else value(key, 0, 8192) for n, key in enumerate(keys)]
        assert store.stats()["chunks_damaged"] == 2


async def test_zeros_where_data_should_be_are_a_miss(open_store: Open, tmp_path: Path) -> None:
    """What a write that never reached the disk looks like."""
    async with open_store() as store:
        keys = await fill(store, 6, 8192)
        assert await store.flush()
    (path,) = segments(tmp_path)
    places = {key: place for _, pack in packs_of(path) for key, place in pack.items()}
    raw = bytearray(path.read_bytes())
    offset, size, _ = places[keys[2]]
    raw[offset + 4096 : offset + size] = bytes(size - 4096)
    path.write_bytes(raw)
    async with open_store() as store:
        assert await store.get(keys[2]) is None
        assert await store.get(keys[3]) == value(keys[3], 0, 8192)


@pytest.mark.parametrize("keep", [0, 1, 100, 4096, 5000, 300_000, MIB - 4096, MIB - 1])
async def test_a_segment_cut_off_anywhere_costs_what_is_gone_at_most(
    open_store: Open, tmp_path: Path, keep: int
) -> None:
    async with open_store() as store:
        for number in range(12):
            key = b"key-%04d" % number
            assert await store.put(key, value(key, 0, 40_000))
            assert await store.flush()
    path, *others = segments(tmp_path)
    assert not any(packs_of(other) for other in others), "they are opened ahead"
    whole = [key for offset, pack in packs_of(path) for key, (at, size, _) in pack.items() if at + size <= keep]
    os.truncate(path, keep)
    async with open_store() as store:
        for number in range(12):
            key = b"key-%04d" % number
            found = await store.get(key)
            assert found in ((value(key, 0, 40_000),) if key in whole else (None,))
        await fill(store, 60, 40_000, 1)
        assert await store.flush(), "the store goes on with other segments"


async def test_a_segment_deleted_or_replaced_under_a_running_store_yields_no_wrong_bytes(
    open_store: Open, tmp_path: Path
) -> None:
    async with open_store() as store:
        keys = await fill(store, 150, 40_000)
        assert await store.flush()
        for path in segments(tmp_path)[:3]:
            path.unlink()
        replaced = segments(tmp_path)[0]
        replaced.unlink()
        replaced.write_bytes(bytes(MIB))
        for key in keys:
            assert await store.get(key) in (None, value(key, 0, 40_000))
        for version in (1, 2, 3):  # over the whole capacity, so that every segment is recycled
            await fill(store, 250, 40_000, version)
        assert await store.flush()
        assert await store.get(b"key-0249") == value(b"key-0249", 3, 40_000)
    async with open_store() as store:
        for number in range(250):
            key = b"key-%04d" % number
            found = await store.get(key)  # whoever deletes files may bring back what the bytes in them had replaced
            assert found is None or found in [value(key, version, 40_000) for version in range(4)]


async def test_the_directory_never_grows_beyond_the_cap(open_store: Open, tmp_path: Path) -> None:
    cap = 8 * MIB

    def used() -> int:
        paths = [tmp_path, *tmp_path.rglob("*")]
        return sum(path.lstat().st_blocks * 512 for path in paths)

    async with open_store(capacity=cap) as store:
        for number in range(400):  # 80 MB, ten times the cap
            key = b"%d" % number
            assert await store.put(key, value(key, 0, 200_000))
            if number % 4 == 0:
                assert used() <= cap
        assert await store.flush()
        assert used() <= cap
        assert used() > cap * 0.6, "most of what was granted is used"
        assert store.stats()["segments_recycled"] > 10
        hits = sum([(await store.get(b"%d" % n)) is not None for n in range(380, 400)])
        assert hits == 20


async def test_bad_options_are_refused_before_anything_is_touched(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for options, text in [
        ({"capacitty": "1GiB"}, "did you mean capacity"),
        ({"capacity": "1GiB", "queue_depth": 4}, "valid ones: .*segment_bytes"),
        ({}, "capacity is required"),
        ({"capacity": "lots"}, "capacity='lots'.*8GiB"),
        ({"capacity": -1}, "capacity=-1"),
        ({"capacity": "1GiB", "engine": "aio"}, "auto, io_uring, posix"),
        ({"capacity": "1GiB", "arena_bytes": 1}, "too small"),
        ({"capacity": "1GiB", "segment_bytes": 10}, "between"),
        ({"capacity": "1GiB", "io_timeout_s": 0}, "positive"),
        ({"capacity": "1GiB", "namespace": "../up"}, "path"),
        ({"capacity": "1GiB", "namespace": "/abs"}, "path"),
        ({"capacity": "1GiB", "allow_shared_root": "maybe"}, "true or false"),
    ]:
        with pytest.raises(ValueError, match=text):
            kvdisk.open(missing, **options)
    with pytest.raises(ValueError, match="mkdir"):
        async with kvdisk.open(missing, capacity="1GiB"):
            pass
    assert list(tmp_path.iterdir()) == []


async def test_a_capacity_too_small_for_the_segments_is_refused_with_the_remedy(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(ValueError, match=r"raise disk_bytes_to_use|raise capacity"):
        async with kvdisk.open(tmp_path, capacity=2 * MIB, segment_bytes=MIB, arena_bytes=4 * MIB, engine="posix"):
            pass


async def test_a_second_store_in_the_same_namespace_is_refused_and_another_namespace_is_not(open_store: Open) -> None:
    async with open_store(capacity=12 * MIB) as store:
        await store.put(b"key", b"first")
        with pytest.raises(DirectoryInUseError, match=str(os.getpid())):
            async with open_store(capacity=12 * MIB):
                pass
        with pytest.raises(DirectoryInUseError, match="0 B of"):  # the first was granted all of it
            async with open_store(capacity=12 * MIB, namespace="other"):
                pass
    async with open_store(capacity=12 * MIB, namespace="other") as store:
        assert await store.get(b"key") is None
    async with open_store(capacity=12 * MIB) as store:
        assert await store.get(b"key") == b"first"


async def test_no_space_by_file_size_limit_is_a_refused_flush_and_no_more(open_store: Open) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with open_store() as store:
        keys = await fill(store, 10, 40_000)
        assert await store.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, hard))
        try:
            for number in range(60):
                await store.put(b"over-%d" % number, value(b"over", number, 40_000))
            assert not await store.flush()
            for number in range(60):
                assert await store.get(b"over-%d" % number) in (None, value(b"over", number, 40_000))
            assert [await store.get(key) for key in keys] == [value(key, 0, 40_000) for key in keys]
            assert store.stats()["writes_no_space"] > 0
            assert store.stats()["io_ops"] < 100, "not asked in a loop"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run_python(code: str, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-W", "error", "-c", textwrap.dedent(code), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(kvdisk.__file__).parents[1])}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


TINY_DISK = """
    import asyncio, os, sys, kvdisk
    root = sys.argv[1]
    options = dict(capacity="16MiB", arena_bytes="4MiB", segment_bytes="1MiB", engine="posix")

    async def main():
        async with kvdisk.open(root, **options) as store:
            data = {b"%d" % n: os.urandom(90_000) for n in range(120)}
            for key, bytes_ in data.items():
                await store.put(key, bytes_)
            await store.flush()
            for key, bytes_ in data.items():
                assert await store.get(key) in (None, bytes_), key
            print(store.stats()["writes_no_space"], store.stats()["segments"], store.stats()["segments_recycled"])
            assert await store.get(b"119") == data[b"119"]
        async with kvdisk.open(root, **options) as store:
            found = {key: await store.get(key) for key in data}
            assert all(found[key] in (None, data[key]) for key in data)
            print(sum(value is not None for value in found.values()))
    asyncio.run(main())
"""


def test_a_disk_that_is_full_before_the_cap_evicts_and_goes_on(tmp_path: Path) -> None:
    script = f'mount -t tmpfs -o size=6m tmpfs {tmp_path} && chmod 700 {tmp_path} && exec "$@"'
    prefix = ("unshare", "-rm", "sh", "-c", script, "sh")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here")
    done = run_python(TINY_DISK, str(tmp_path), prefix=prefix)
    assert done.returncode == 0, done.stderr
    refused, count, recycled, hits = map(int, done.stdout.split())
    assert refused >= 1
    assert count <= 6
    assert recycled > 0
    assert hits >= 40


def test_a_read_only_root_is_named_as_such(tmp_path: Path) -> None:
    script = f'mount -t tmpfs -o ro,mode=700 tmpfs {tmp_path} && exec "$@"'
    prefix = ("unshare", "-rm", "sh", "-c", script, "sh")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here")
    done = run_python(TINY_DISK, str(tmp_path), prefix=prefix)
    assert "ValueError" in done.stderr
    assert "read-only" in done.stderr


def test_where_io_uring_is_forbidden_threads_serve_with_one_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    code = """
        import asyncio, logging, sys, kvdisk
        logging.basicConfig(level=logging.WARNING)
        from tests.no_io_uring import forbid

        forbid()

        async def main():
            async with kvdisk.open(sys.argv[1], capacity="16MiB", arena_bytes="4MiB", segment_bytes="1MiB") as store:
                for n in range(50):
                    await store.put(b"%d" % n, bytes([n]) * 50_000)
                await store.flush()
                found = [await store.get(b"%d" % n) == bytes([n]) * 50_000 for n in range(50)]
                print(store.stats()["engine"], sum(found))
        asyncio.run(main())
    """
    done = run_python(code, str(tmp_path))
    assert done.stdout.split() == ["posix", "50"], done.stderr
    assert done.stderr.count("WARNING") == 1
    assert "seccomp" in done.stderr
