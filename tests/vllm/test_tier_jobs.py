"""Rules of a tier's jobs: nobody starves, what can be no hit is not written, and what is counted is what happened."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvdisk.vllm import tier_config
from kvdisk.vllm.requests import Groups
from kvdisk.vllm.tier_loads import TURN_ROWS
from kvdisk.vllm.tier_requests import Requests
from tests.vllm.tiering import ROW_BYTES, Start, Tiers, content, keys_of, offloading_config

READING_MAX = 57
"""Nine tenths of the arena's 64 slots."""


def written(tiers: Tiers, count: int, seed: int = 0) -> list[bytes]:
    """Keys of a prefix that is on disk alone."""
    keys = keys_of(count, seed)
    for first in range(0, count, 20):
        tiers.write(keys[first : first + 20], tiers.request(keys))
        tiers.settle()
    tiers.forget_host()
    return keys


def job_of(keys: Sequence[bytes], context: ReqContext, job_id: int = 77, *, is_load: bool = True) -> TransferJob:
    """A job between the first rows and these chunks, which vLLM's manager knows nothing of."""
    rows = np.arange(len(keys), dtype=np.int32)
    return TransferJob(job_id, [OffloadKey(key) for key in keys], rows, is_load, context)


def load(tiers: Tiers, keys: Sequence[bytes], job_id: int = 77) -> ReqContext:
    context = tiers.request(keys)
    tiers.tier.submit_load(job_of(keys, context, job_id))
    return context


def results(tiers: Tiers, *job_ids: int) -> list[JobResult]:
    """Of these jobs, in their order."""
    found: dict[int, JobResult] = {}
    for _ in range(1000):
        found.update({result.job_id: result for result in tiers.tier.get_finished_jobs()})
        if set(job_ids) <= found.keys():
            return [found[job_id] for job_id in job_ids]
        tiers.wait()
    raise AssertionError(f"of {job_ids} only {sorted(found)} ended")


def promotions(tiers: Tiers) -> list[bytes]:
    """The keys that are promoted from now on, in order."""
    seen: list[bytes] = []
    store = tiers.tier._service.store
    promote = store.promote

    def record(key: bytes, position: int = 0) -> Any:
        resident = promote(key, position)
        if resident is not None:
            seen.append(key)
        return resident

    store.promote = record
    return seen


def counts_are_exact(tiers: Tiers) -> bool:
    return all(
        jobs._waiting == sum(len(job.waiting) for job in jobs._queue)
        and set(jobs._queue) == {job for job in jobs.jobs if job.waiting}
        for jobs in (tiers.tier._loads, tiers.tier._stores)
    )


# ---- nobody starves


def test_stores_find_slots_while_a_prefix_larger_than_the_arena_is_read(start: Start) -> None:
    tiers = start(rows=256)
    keys = written(tiers, 100)
    release = tiers.hold_disk()
    load(tiers, keys)
    assert len(tiers.tier._loads._reading) == READING_MAX
    stored = tiers.tier.stats()["chunks_stored"]
    new = keys_of(5, seed=1)
    tiers.tier.submit_store(job_of(new, tiers.request(new), 78, is_load=False))
    (result,) = results(tiers, 78)
    assert result.success
    assert tiers.tier.stats()["chunks_stored"] == int(stored) + 5
    release()
    assert results(tiers, 77)[0].success
    assert not tiers.tier._loads._reading


def test_a_short_load_does_not_wait_for_all_of_a_long_one(start: Start) -> None:
    tiers = start(rows=256)
    short = written(tiers, 1, seed=1)
    long = written(tiers, 200)
    tiers.tier._service.store.drop_slots()
    seen = promotions(tiers)
    release = tiers.hold_disk()
    load(tiers, long)
    load(tiers, short, 78)
    assert counts_are_exact(tiers)
    release()
    results(tiers, 77, 78)
    assert seen.index(short[0]) <= READING_MAX + TURN_ROWS
    assert sorted(seen) == sorted([*long, *short])


def test_what_is_in_a_slot_is_loaded_while_others_wait_for_slots(start: Start) -> None:
    tiers = start(rows=256)
    tiers.tier._clock = lambda: 0.0  # nobody has waited long enough to be given up
    keys = written(tiers, 100)
    release = tiers.hold_disk()
    new = keys_of(1, seed=1)
    tiers.write(new)
    tiers.settle(flush=False)
    load(tiers, keys)
    load(tiers, new, 78)
    assert results(tiers, 78)[0].success
    release()
    results(tiers, 77)


def test_trimming_looks_at_no_job_while_few_rows_wait(start: Start) -> None:
    """It is done with every store, and thousands of jobs may wait."""

    class Untouchable(deque[Any]):
        def __iter__(self) -> Any:
            raise AssertionError

        __getitem__ = __reversed__ = __iter__

    tiers = start(rows=1000)
    tiers.request()
    release = tiers.hold_disk()
    tiers.write(keys_of(60))
    stores = tiers.tier._stores
    assert len(stores._queue) == 1
    stores._queue = Untouchable(stores._queue)
    stores.trim()
    stores._queue = deque(job for job in stores.jobs if job.waiting)
    release()
    tiers.settle()


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_what_has_not_begun_is_dropped_with_its_request(start: Start, late: bool) -> None:
    """vLLM may submit a load before or after it says that the request has finished; it gets its result."""
    tiers = start(rows=256)
    keys = written(tiers, 100)
    release = tiers.hold_disk()
    context = tiers.request(keys)
    if late:
        tiers.manager.on_request_finished(context)
    tiers.tier.submit_load(job_of(keys, context))
    if not late:
        tiers.manager.on_request_finished(context)
    assert not tiers.tier._loads._queue
    assert counts_are_exact(tiers)
    release()
    (result,) = results(tiers, 77)
    assert not result.success
    assert sorted(result.successful_keys or ()) == sorted(keys[:READING_MAX])  # reads end in any order
    assert tiers.tier.stats()["loads_dropped"] == 100 - READING_MAX
    for row, key in enumerate(keys[:READING_MAX]):
        assert (tiers.region.rows[row] == content(key, ROW_BYTES)).all()
    assert tiers.read(keys) == [True] * 100


def test_a_stall_costs_only_those_that_waited_through_it(start: Start) -> None:
    tiers = start(rows=1000)
    now = 0.0
    tiers.tier._clock = lambda: now
    tiers.request()
    release = tiers.hold_disk()
    keys, others = keys_of(50), keys_of(3, seed=1)
    tiers.write(keys)
    now = 1.9
    tiers.write(others)
    now = 2.1
    tiers.end_step()
    assert [len(job.waiting) for job in tiers.tier._stores.jobs if job.waiting] == [3]
    release()
    tiers.forget_host()
    assert tiers.read(keys) == [True] * 32 + [False] * 18
    assert tiers.read(others) == [True] * 3


# ---- what can be no hit is not written


def test_what_follows_a_lost_chunk_is_not_written_until_that_is_here(start: Start) -> None:
    tiers = start(rows=200)
    tiers.request()
    release = tiers.hold_disk()
    keys = keys_of(120)
    context = tiers.request(keys)
    tiers.write(keys[:100], context)  # 32 slots may be unflushed, 50 rows may wait
    assert counts_are_exact(tiers)
    release()
    tiers.settle()
    tiers.write(keys[100:110], context)
    tiers.settle()
    assert tiers.tier.stats()["chunks_stored"] == 82
    assert tiers.tier.stats()["stores_cut"] == 28
    tiers.forget_host()
    tiers.write(keys[82:100], tiers.request(keys))
    tiers.settle()
    tiers.write(keys[100:], context)
    tiers.forget_host()
    assert tiers.read(keys) == [True] * 120


def test_queued_jobs_of_a_request_are_cut_with_the_first_that_is(start: Start) -> None:
    tiers = start(rows=1000)
    now = 0.0
    tiers.tier._clock = lambda: now
    tiers.request()
    release = tiers.hold_disk()
    keys, others = keys_of(65), keys_of(3, seed=1)
    context = tiers.request(keys)
    tiers.write(keys[:50], context)
    now = 1.9
    tiers.write(keys[50:60], context)
    now = 2.1
    tiers.end_step()
    assert not tiers.tier._stores._queue
    tiers.write(others)
    tiers.write(keys[60:], context)
    assert len(tiers.tier._stores._queue) == 1, "what is cut does not even wait"
    release()
    tiers.settle()
    assert tiers.tier.stats()["chunks_stored"] == 32 + 3
    assert tiers.tier.stats()["stores_cut"] == 33


def test_a_chunk_that_is_stored_before_its_parent_is_found(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mamba state is offered alone, a step before the full-attention chunk that ends with it."""
    monkeypatch.setattr(tier_config, "windows_in_chunks", lambda config: {1: 1})
    tiers = start(offloading=offloading_config(groups=(0, 1)))
    full, state = keys_of(3), keys_of(3, group=1)
    context = tiers.request([*full, *state])
    tiers.write(full[:2], context)
    tiers.settle()
    tiers.write(state[2:], context)
    tiers.settle()
    tiers.write(full[2:], context)
    tiers.forget_host()
    assert tiers.read([*full, state[2]], context) == [True] * 4
    assert tiers.tier.stats().get("chunks_evicted", 0) == 0


def test_parents_come_before_what_needs_them() -> None:
    """Chunks of a window are shorter than the full-attention chunk that covers them, and may be offered first."""
    requests = Requests(Groups({0: 64, 1: 16}, {0: 1, 1: 1}, {1: 2}, 64))
    requests.begin("r")
    context = ReqContext("r")
    offered = [(1, 48), (1, 80), (0, 64), (1, 64), (0, 128)]
    for group, position in offered:
        context.set_offload_key_position(OffloadKey(key_at(group, position)), position)
    job = job_of([key_at(group, position) for group, position in offered], context)
    chunks, _ = requests.chunks_of(job, requests.of("r"))
    order = [(chunk.group, chunk.position) for chunk in chunks]
    assert order == [(0, 64), (1, 48), (1, 64), (0, 128), (1, 80)]
    first, second = key_at(0, 64), key_at(0, 128)
    assert [chunk.parent for chunk in chunks] == [b"", first, first, first, second]


def key_at(group: int, position: int) -> bytes:
    return position.to_bytes(32, "big") + group.to_bytes(4, "big")


# ---- what is counted


def test_bytes_of_a_job_are_those_that_were_copied(start: Start) -> None:
    tiers = start()
    keys = keys_of(6)
    context = tiers.request(keys)
    tiers.tier.submit_store(job_of(keys[:4], context, 1, is_load=False))
    assert results(tiers, 1)[0].transfer_bytes == 4 * ROW_BYTES
    tiers.tier.submit_store(job_of(keys, context, 2, is_load=False))
    (result,) = results(tiers, 2)
    assert (result.success, result.transfer_bytes) == (True, 2 * ROW_BYTES)
    tiers.tier.submit_store(job_of(keys, context, 3, is_load=False))
    assert results(tiers, 3)[0].transfer_bytes == 0


def test_a_job_that_waits_for_slots_is_refused_once(start: Start) -> None:
    tiers = start(rows=256)
    keys = written(tiers, 100)
    before = tiers.tier.stats()
    release = tiers.hold_disk()
    tiers.write(keys_of(50, seed=1))
    load(tiers, keys)
    for _ in range(20):
        tiers.end_step()
    after = tiers.tier.stats()
    for name in ("slots_refused", "stores_refused_unflushed"):
        assert int(after.get(name, 0)) - int(before.get(name, 0)) == 1, name
    release()
    assert results(tiers, 77)[0].success


# ---- resets


@pytest.mark.parametrize("keeps", [True, False])
def test_a_reset_before_the_store_opens_counts_when_it_does(start: Start, keeps: bool) -> None:
    """Its predecessor still holds it, say; the weights change meanwhile."""
    first = start()
    keys = keys_of(6)
    first.write(keys)
    first.settle()
    first.close()
    tiers = start(reset_keeps_disk=keeps)
    opening = tiers.tier._opening
    open_service = opening._open_service

    def fail() -> Any:
        raise OSError("held")

    opening._open_service = fail
    tiers.request()
    assert tiers.tier._service is None
    tiers.manager.reset_cache()
    if hasattr(tiers.manager, "on_reset_flushed"):
        tiers.manager.on_reset_flushed()
    opening._open_service, opening._at = open_service, -math.inf
    tiers.request()
    if opening._running is not None:  # on a thread
        opening._running.join()
    assert tiers.read(keys) == [keeps] * 6
    tiers.close()
    assert start(reset_keeps_disk=keeps).read(keys) == [keeps] * 6


def test_a_reset_that_keeps_the_disk_refuses_running_requests_nothing(start: Start) -> None:
    tiers = start(rows=256, reset_keeps_disk=True)
    keys = written(tiers, 100)
    context = load(tiers, keys)
    tiers.tier.drain_jobs()
    (result,) = results(tiers, 77)
    assert not result.success
    stats = tiers.tier.stats()
    assert (stats["loads_dropped"], stats.get("misses_no_slot", 0)) == (100 - READING_MAX, 0)
    assert all(tiers.tier.lookup(OffloadKey(key), context) is LookupResult.HIT for key in keys)


def test_what_a_request_lost_before_a_reset_it_may_have_after(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = start(reset_keeps_disk=True)
    keys = written(tiers, 4)
    context = tiers.request(keys)
    with monkeypatch.context() as patched:
        patched.setattr(tiers.tier._service.store, "promote", lambda key, position=0: None)
        assert tiers.read(keys, context) == [False] * 4
    tiers.manager.reset_cache()
    if hasattr(tiers.manager, "on_reset_flushed"):
        tiers.manager.on_reset_flushed()
    assert tiers.read(keys, context) == [True] * 4
