"""Rules of `KVDiskTier` under vLLM's real TieringOffloadingManager: what comes back, and what if it cannot."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
from vllm.v1.kv_offload.base import LookupResult, OffloadKey
from vllm.v1.kv_offload.tiering.base import TransferJob

from kvdisk.cli.segment_files import chunks_of, files_of, flip_byte
from kvdisk.vllm import tier_stores
from tests.vllm.tiering import ROW_BYTES, Start, Tiers, content, keys_of

# ---- what is stored comes back


@pytest.mark.parametrize("data_plane", ["thread", "process"])
def test_what_was_cascaded_comes_back_from_disk_alone(start: Start, data_plane: str) -> None:
    tiers = start(data_plane=data_plane)
    keys = keys_of(10)
    tiers.write(keys)
    tiers.forget_host()
    assert tiers.read(keys) == [True] * 10
    assert tiers.tier.stats()["chunks_promoted"] == 10


@pytest.mark.parametrize("data_plane", ["thread", "process"])
def test_a_restart_finds_the_data(start: Start, data_plane: str) -> None:
    tiers = start(data_plane=data_plane)
    keys = keys_of(10)
    tiers.write(keys)
    tiers.settle()
    tiers.close()
    assert start(data_plane=data_plane).read(keys) == [True] * 10


def test_a_store_job_ends_with_the_copy_and_not_with_the_disk(start: Start) -> None:
    """vLLM's rows are free again as soon as memory allows; what is flushed is the slots."""
    tiers = start()
    tiers.request()
    service = tiers.tier._service
    begin, held = service.plane.backend.plane.start, []
    service.plane.backend.plane.start = held.extend
    keys = keys_of(8)
    tiers.write(keys)
    tiers.settle(flush=False)
    tiers.region.rows[:] = 0x55
    service.plane.backend.plane.start = begin
    service.plane.loop.call_soon_threadsafe(lambda: begin(held))
    tiers.forget_host()
    assert tiers.read(keys) == [True] * 8


def test_a_job_larger_than_the_arena_goes_through_it_in_turns(start: Start) -> None:
    tiers = start(rows=256)
    keys = keys_of(200)  # the arena has 64 slots
    for first in range(0, 200, 20):
        tiers.write(keys[first : first + 20], tiers.request(keys))
        tiers.settle()
    tiers.forget_host()
    assert tiers.read(keys) == [True] * 200


def test_rows_of_any_size_come_back(start: Start, tmp_path: Path) -> None:
    """vLLM's are whole pages; nothing here depends on it, and what pads a slot is not the slot's last prompt."""
    tiers = start(row_bytes=5000)
    tiers.request()
    tiers.tier._arena.view[:] = b"\xa5" * len(tiers.tier._arena.view)
    keys = keys_of(9)
    tiers.write(keys)
    tiers.forget_host()
    assert tiers.read(keys) == [True] * 9
    found = [chunk for path in files_of(tmp_path / "root") for chunk in chunks_of(path)]
    assert len(found) == 9
    for chunk in found:
        raw = chunk.path.read_bytes()[chunk.start : chunk.start + 8192]
        assert raw[5000:] == bytes(3192)


def test_groups_keep_apart_what_has_one_hash(start: Start) -> None:
    from tests.vllm.tiering import offloading_config

    tiers = start(offloading=offloading_config(groups=(0, 2)))
    keys = keys_of(5) + keys_of(5, group=2)
    tiers.write(keys)
    tiers.forget_host()
    assert tiers.read(keys) == [True] * 10


def test_a_group_that_the_configuration_does_not_have_is_never_a_hit(start: Start) -> None:
    tiers = start()
    keys = [*keys_of(3), *keys_of(3, group=7)]
    tiers.write(keys)
    tiers.forget_host()
    assert tiers.read(keys) == [True] * 3 + [False] * 3


def test_what_is_on_disk_is_not_written_again(start: Start) -> None:
    tiers = start()
    keys = keys_of(6)
    tiers.write(keys)
    tiers.forget_host()
    tiers.write(keys)
    tiers.settle()
    assert tiers.tier.stats()["chunks_stored"] == 6


# ---- what cannot be had


def test_a_damaged_chunk_is_a_miss_at_once_and_its_neighbours_are_kept(start: Start, tmp_path: Path) -> None:
    tiers = start()
    keys = keys_of(8)
    tiers.write(keys)
    tiers.settle()
    tiers.close()
    found = {chunk.key: chunk for path in files_of(tmp_path / "root") for chunk in chunks_of(path)}
    flip_byte(found[keys[3]].path, found[keys[3]].start + 100)
    again = start()
    jobs: list[TransferJob] = []
    submit = again.tier.submit_load
    again.tier.submit_load = lambda job: (jobs.append(job), submit(job))
    assert again.read(keys) == [True] * 3 + [False] + [True] * 4
    assert len(jobs) == 1, "one attempt"
    assert again.manager.lookup(OffloadKey(keys[3]), again.request(keys)) is LookupResult.MISS, "for everybody"
    assert again.tier.stats()["chunks_damaged"] == 1


def test_a_deleted_segment_is_a_miss_and_nobody_raises(start: Start, tmp_path: Path) -> None:
    tiers = start()
    keys = keys_of(8)
    tiers.write(keys)
    tiers.forget_host()
    tiers.tier._service.plane.backend.plane.files.close()
    for path in files_of(tmp_path / "root"):
        path.unlink()
    assert tiers.read(keys) == [False] * 8


def test_a_disk_that_is_full_keeps_no_more_and_reads_on(start: Start) -> None:
    """The cap is reached: whole segments go, oldest first, and what is left still comes back."""
    tiers = start(rows=64, disk_bytes_to_use="10MiB")
    prefixes = [keys_of(16, seed) for seed in range(20)]  # 20 MiB
    for keys in prefixes:
        tiers.write(keys)
        tiers.settle()
    tiers.forget_host()
    hits = [tiers.read(keys) for keys in prefixes]
    assert hits[-1] == [True] * 16
    assert not any(hits[0])
    assert sum(map(sum, hits)) * ROW_BYTES > 4 << 20


def test_a_chunk_evicted_between_lookup_and_load_is_a_failed_key(start: Start) -> None:
    tiers = start()
    keys = keys_of(4)
    tiers.write(keys)
    tiers.forget_host()
    context = tiers.request(keys)
    for key in keys:
        assert tiers.manager.lookup(OffloadKey(key), context) is LookupResult.HIT_PENDING
    tiers.tier._service.store.index.drop_only(keys[2])
    assert tiers.resolve(keys, context) == [
        LookupResult.HIT,
        LookupResult.HIT,
        LookupResult.MISS,
        LookupResult.HIT,
    ]


def test_a_chunk_without_a_slot_is_a_miss_for_its_request_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would look it up, and promote it, in every step again."""
    tiers = start()
    keys = keys_of(4)
    tiers.write(keys)
    tiers.forget_host()
    store = tiers.tier._service.store
    with monkeypatch.context() as patched:
        patched.setattr(store, "promote", lambda key, position=0: None)
        context = tiers.request(keys)
        assert tiers.read(keys, context) == [False] * 4
        assert tiers.tier.stats()["misses_no_slot"] == 4
    assert tiers.read(keys, context) == [False] * 4
    assert tiers.read(keys) == [True] * 4
    tiers.manager.on_request_finished(context)
    assert not tiers.tier._requests.is_refused(keys[0], context.req_id)


def test_the_tail_is_what_is_not_kept_when_the_disk_does_not_keep_up(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_stores, "STORE_WAIT_SHARE", 0.1)
    tiers = start(rows=100)
    tiers.request()
    service = tiers.tier._service
    begin, held = service.plane.backend.plane.start, []
    service.plane.backend.plane.start = held.extend
    keys = keys_of(60)  # 32 slots may be unflushed
    tiers.write(keys)
    assert [len(job.waiting) for job in tiers.tier._stores.jobs] == [10]
    service.plane.backend.plane.start = begin
    service.plane.loop.call_soon_threadsafe(lambda: begin(held))
    tiers.forget_host()
    assert tiers.read(keys) == [True] * 42 + [False] * 18
    assert tiers.tier.stats()["stores_cut"] == 18


def test_a_store_that_waits_in_vain_ends(start: Start) -> None:
    """Nothing is on its way that could make room."""
    tiers = start(rows=64)
    tiers.request()
    store = tiers.tier._service.store
    store.reserve = lambda *_: None
    tiers.write(keys_of(5))
    tiers.settle()
    assert tiers.tier.stats()["stores_cut"] == 5


# ---- reset, late I/O, the end


@pytest.mark.parametrize("keeps", [True, False])
def test_after_a_reset_with_jobs_in_flight_no_row_changes(start: Start, keeps: bool) -> None:
    tiers = start(rows=64, reset_keeps_disk=keeps)
    keys = keys_of(16)
    tiers.write(keys)
    tiers.forget_host()
    context = tiers.request(keys)
    for key in keys[:8]:
        tiers.manager.lookup(OffloadKey(key), context)
    tiers.end_step()  # loads are on their way
    new = keys_of(8, seed=1)
    tiers.write(new)
    assert tiers.manager._jobs
    tiers.manager.reset_cache()
    assert not tiers.manager._jobs
    before = tiers.region.rows.copy()
    if hasattr(tiers.manager, "on_reset_flushed"):
        tiers.manager.on_reset_flushed()
    tiers.settle()
    assert np.array_equal(tiers.region.rows, before)
    assert tiers.read(keys) == [keeps] * 16
    assert tiers.read(new) == [keeps] * 8
    tiers.close()
    again = start(rows=64, reset_keeps_disk=keeps)
    assert again.read(keys) == [keeps] * 16


def test_a_late_read_is_a_miss_at_the_deadline_and_never_touches_the_row(start: Start) -> None:
    """vLLM hands the row out anew at once; the disk may still write to the slot."""
    tiers = start(io_timeout_s=0.2)
    keys = keys_of(4)
    tiers.write(keys)
    tiers.forget_host()
    plane = tiers.tier._service.plane.backend.plane
    release = threading.Event()
    read = plane._transfer._engine.submit
    waiting: list[Any] = []

    def hang(ops: Any) -> None:
        waiting.extend(ops)

    plane._transfer._engine.submit = hang
    assert tiers.read(keys) == [False] * 4
    assert tiers.tier.stats()["chunks_late"] == 4
    tiers.region.rows[:] = 0x33
    plane._transfer._engine.submit = read
    tiers.tier._service.plane.loop.call_soon_threadsafe(lambda: (read(waiting), release.set()))
    assert release.wait(5)
    tiers.settle()
    assert (tiers.region.rows == 0x33).all()
    assert tiers.read(keys) == [False] * 4


def test_drained_jobs_have_a_result_each(start: Start) -> None:
    tiers = start(rows=200)
    keys = keys_of(90)
    for first in range(0, 90, 30):
        tiers.write(keys[first : first + 30], tiers.request(keys))
        tiers.settle()
    tiers.forget_host()
    rows = np.arange(90, dtype=np.int32)
    tiers.tier.submit_load(TransferJob(77, [OffloadKey(key) for key in keys], rows, True, tiers.request(keys)))
    tiers.tier.submit_store(TransferJob(78, [OffloadKey(keys[0])], rows[:1], False, tiers.request(keys)))
    tiers.tier.drain_jobs()
    results = {result.job_id: result for result in tiers.tier.get_finished_jobs()}
    assert sorted(results) == [77, 78]
    assert results[78].success
    assert not results[77].success, "64 slots: what had not begun was given up"
    loaded = results[77].successful_keys
    assert 30 < len(loaded) < 90
    for key in loaded:
        assert (tiers.region.rows[keys.index(key)] == content(key, ROW_BYTES)).all()


def test_shutdown_lets_go_of_the_primary_tiers_memory_and_may_come_twice(start: Start) -> None:
    tiers = start()
    tiers.write(keys_of(5))
    view = tiers.primary.get_kv_memoryview()
    tiers.manager.shutdown()
    with pytest.raises(ValueError, match="released"):
        view.tobytes()
    tiers.tier.shutdown()
    assert tiers.tier.lookup(OffloadKey(keys_of(1)[0]), tiers_context(tiers)) is LookupResult.MISS


def tiers_context(tiers: Tiers) -> Any:
    from vllm.v1.kv_offload.base import ReqContext

    return ReqContext("another")


def test_a_bug_of_ours_ends_jobs_and_not_the_engine(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = start()
    keys = keys_of(4)
    tiers.write(keys)
    tiers.forget_host()
    context = tiers.request(keys)
    for key in keys:
        tiers.manager.lookup(OffloadKey(key), context)

    def fail(*_: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(tiers.tier._loads, "advance", fail)
    tiers.end_step()
    assert tiers.resolve(keys, context) == [LookupResult.MISS] * 4
    tiers.write(keys_of(3, seed=2))
    tiers.settle()
    assert not tiers.manager.has_pending_work()
    tiers.close()


def test_pending_work_ends(start: Start) -> None:
    tiers = start()
    context = tiers.write(keys_of(6))
    assert tiers.manager.has_pending_work()
    tiers.settle()
    tiers.manager.on_request_finished(context)
    assert not tiers.manager.has_pending_work()
    assert not tiers.tier._requests


def test_a_load_may_come_after_its_request_has_finished(start: Start) -> None:
    tiers = start()
    keys = keys_of(4)
    tiers.write(keys)
    tiers.forget_host()
    context = tiers.request(keys)
    for key in keys:
        tiers.manager.lookup(OffloadKey(key), context)
    tiers.manager.on_request_finished(context)
    tiers.settle()
    assert tiers.read(keys) == [True] * 4
