"""What the manager promises about resets: nothing stale is ever a hit, and late copies meet nobody else's chunk."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.v1.kv_offload.base import OffloadingManager, ScheduleEndContext

from tests.vllm.desk import Desk, finished
from tests.vllm.harness import POISON, Harness
from tests.vllm.models import full, layers, window

reports_are_awaited = pytest.mark.skipif(
    hasattr(OffloadingManager, "on_reset_flushed"),
    reason="0.33 keeps stepping until the workers have reported what the reset flushed; these hold the reports back",
)
Engine = Callable[..., Harness]
CHUNK = 64
FULL = layers(full(), full())  # 64 slots in the arena
FULL_AND_WINDOW = layers(full(), full(), window(8 * CHUNK), window(8 * CHUNK))


def prompt(chunks: float, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(int(chunks * CHUNK) + 1)]


@contextmanager
def held_stores(harness: Harness) -> Iterator[dict[int, Callable[[], Any]]]:
    """Stores submitted in this block are copied only when the caller runs them, however long vLLM waits for them.

    Yields: copies by the first unit of their first slot.
    """
    worker = harness.connector.connector_worker.worker
    submit, wait, held = worker.submit_store, worker.wait, {}

    def later(job_id: int, blocks: Any, slots: Any) -> bool:
        held[slots.units[0]] = lambda: submit(job_id, blocks, slots)
        return True

    worker.submit_store, worker.wait = later, lambda jobs: None
    try:
        yield held
    finally:
        worker.submit_store, worker.wait = submit, wait


def reset(harness: Harness) -> None:
    assert harness.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def slots_under_way(harness: Harness) -> set[int]:
    return {resident.run.start for held in harness.manager._quarantine._transfers for resident in held.stored}


def step_until_stores_are_held(harness: Harness, held: dict[int, Any]) -> None:
    for _ in range(50):
        harness.step()
        if held:
            return
    raise AssertionError("no store was submitted")


@reports_are_awaited
@pytest.mark.parametrize("specs", [FULL, FULL_AND_WINDOW], ids=["full", "window"])
def test_late_copies_after_a_reset_meet_nobody_elses_chunk(engine: Engine, specs: Any) -> None:
    harness = engine(specs)
    request = harness.add(prompt(16, 1))
    with held_stores(harness) as held:
        step_until_stores_are_held(harness, held)
        reset(harness)
        assert slots_under_way(harness)
    harness.run([request])
    others = [prompt(12, seed) for seed in range(2, 10)]  # more than the arena
    for tokens in others:
        harness.serve([tokens])
    quarantined = slots_under_way(harness)
    assert quarantined >= held.keys(), "given back while a copy was still to come"
    in_use = {owner.run.start for owner in harness.manager._service.store.arena.owners() if not owner.forgotten}
    assert not in_use & quarantined
    harness.drop_gpu_cache()
    for copy in held.values():  # out of GPU blocks that hold poison now
        copy()
    for tokens in others:
        assert harness.serve([tokens])[0][::2] == (12 * CHUNK, 0)
    assert slots_under_way(harness) == set()
    assert harness.manager._service.store.arena.free_units >= 0
    assert all(owner.pins == 0 for owner in harness.manager._service.store.arena.owners())


def test_nothing_stored_before_a_reset_is_a_hit_also_after_a_restart(engine: Engine) -> None:
    """Nor, after the restart, what was stored since: the server may have had other weights than its files."""
    first = engine(FULL)
    first.serve([prompt(10, 1)])
    request = first.add(prompt(10, 2))
    with held_stores(first) as held:
        step_until_stores_are_held(first, held)
        reset(first)
    for copy in held.values():
        copy()
    first.run([request])  # computed again: of the new epoch
    first.drop_gpu_cache()
    assert first.serve([prompt(10, 1)[:330]])[0].cached_tokens == 0
    first.close()
    second = engine(FULL)
    assert [outcome[::2] for outcome in second.serve([prompt(10, 1), prompt(10, 2)])] == [(0, 0), (0, 0)]


def test_a_reset_while_the_disk_writes_and_reads_leaves_nothing_stale(engine: Engine) -> None:
    desk = Desk(engine(FULL))
    stored, reader = desk.request(prompt(20, 1)), desk.request(prompt(20, 2))
    desk.put(reader, desk.keys(reader))
    with desk.held_disk():
        context = desk.status(stored).req_context
        output = desk.manager.prepare_store(desk.keys(stored), context)
        for share in desk.manager._home:
            share.blocks_written[output.store_spec.units] = 4
        desk.manager.complete_store(output.keys_to_store, context)
        assert desk.ask(reader) is None
        plane_start = desk.manager._service.plane.backend.plane.start
        desk.manager._service.write_epoch_now = lambda timeout_s: True  # it is held, too
        desk.connector.reset_cache()
        assert desk.manager._service.plane.backend.plane.start is plane_start
        assert desk.ask(reader) == 0
        assert desk.ask(desk.request(prompt(20, 1))) == 0
    desk.settle()
    assert desk.ask(reader) == 0
    assert desk.resolve(desk.request(prompt(20, 1))) == 0
    assert desk.pinned() == 0
    assert desk.store.arena.free_units == desk.store.arena.unit_count


@pytest.mark.parametrize("told", ["by the share", "by vLLM 0.33"])
def test_slots_of_loads_under_way_are_kept_until_they_ended(engine: Engine, told: str) -> None:
    desk = Desk(engine(FULL))
    request = desk.request(prompt(20))
    desk.put(request, desk.keys(request))
    assert desk.resolve(request) == 20 * CHUNK
    desk.load(request, 20 * CHUNK)
    desk.end_step(loads_end=False)
    slots = {desk.store.resident(key).run.start for key in desk.keys(request)}
    ticket = desk.manager._ticket
    desk.connector.reset_cache()
    other = desk.request(prompt(200, 1))
    for i in range(0, 160, 8):
        desk.put(other, desk.keys(other)[i : i + 8], in_memory=True)
        desk.end_step()
        assert not {desk.store.resident(key).run.start for key in desk.keys(other)[i : i + 8]} & slots
    assert desk.pinned() == 20
    if told == "by vLLM 0.33":
        desk.manager.on_reset_flushed()
    else:
        for share in desk.manager._quarantine._shares:
            share.mark_ended(ticket)
        desk.end_step()
    assert (desk.pinned(), desk.manager._lookups.held_units) == (0, 0)
    assert not desk.manager._quarantine


def test_a_reset_that_keeps_the_disk_keeps_hits(engine: Engine) -> None:
    extra = {"reset_keeps_disk": True}
    first = engine(FULL, extra)
    first.serve([prompt(10)])
    reset(first)
    for pages in first.pages.values():
        pages[:] = POISON
    assert first.serve([prompt(10)])[0] == (10 * CHUNK, 80, 0)
    first.close()
    assert engine(FULL, extra).serve([prompt(10)])[0].cached_tokens == 10 * CHUNK


@reports_are_awaited
def test_a_reset_that_keeps_the_disk_gives_up_what_was_under_way(engine: Engine) -> None:
    """Its GPU blocks may be somebody else's by the time they are copied."""
    harness = engine(FULL, {"reset_keeps_disk": True})
    request = harness.add(prompt(10))
    with held_stores(harness) as held:
        step_until_stores_are_held(harness, held)
        reset(harness)
    harness.run([request])
    harness.drop_gpu_cache()
    for copy in held.values():
        copy()
    outcomes = [harness.serve([prompt(10)])[0] for _ in range(2)]
    assert all(outcome.pages_wrong == 0 for outcome in outcomes)
    assert all(owner.pins == 0 for owner in harness.manager._service.store.arena.owners())


@pytest.mark.parametrize("reset_connector", [False, True])
def test_running_requests_survive_a_reset_of_the_gpu_cache(engine: Engine, reset_connector: bool) -> None:
    """Their chunks are hits still: vLLM 0.32 asserts if they are loaded in the step that reports the preemption."""
    harness = engine(FULL_AND_WINDOW, {"reset_keeps_disk": True})
    harness.serve([prompt(10)])
    requests = [harness.add(prompt(10), max_tokens=40), harness.add(prompt(6, 1), max_tokens=40)]
    for _ in range(12):
        harness.step()
    assert {request.status.name for request in requests} == {"RUNNING"}
    assert harness.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=reset_connector)
    for pages in harness.pages.values():
        pages[:] = POISON
    outcomes = harness.run(requests)
    assert [outcome.pages_wrong for outcome in outcomes] == [0, 0]
    assert harness.manager.counters["chunks_loaded"] >= 8


def test_a_request_survives_a_reset_in_the_step_after_its_first(engine: Engine) -> None:
    harness = engine(FULL, {"reset_keeps_disk": True})
    harness.serve([prompt(4)])
    request = harness.add(prompt(4)[:-1] + prompt(10, 1))
    harness.step()
    assert (request.status.name, harness.cached_tokens[request.request_id]) == ("RUNNING", 4 * CHUNK)
    assert harness.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert harness.run([request])[0].pages_wrong == 0
    assert harness.manager.counters["chunks_loaded"] >= 4


def test_a_request_survives_a_reset_in_the_step_after_it_resumed(engine: Engine) -> None:
    """It resumes with what is left in the GPU's cache, so without a load: nobody tells the manager."""
    half_a_chunk = {"max_num_batched_tokens": CHUNK // 2}  # a step without a store, which vLLM would wait for
    harness = engine(FULL, {"reset_keeps_disk": True}, **half_a_chunk)
    harness.serve([prompt(4)])
    request = harness.add(prompt(4)[:-1] + prompt(10, 1))
    for _ in range(2):
        harness.step()
    harness.scheduler.running.remove(request)
    harness.scheduler._preempt_request(request, 0.0)
    while request.status.name != "RUNNING":
        harness.step()
    assert harness.manager.counters["chunks_loaded"] == 0
    assert harness.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert harness.run([request])[0].pages_wrong == 0
    assert harness.manager.counters["chunks_loaded"] >= 4


def test_a_request_loads_nothing_in_the_step_after_it_was_scheduled(engine: Engine) -> None:
    """What it missed may be a hit by then."""
    desk = Desk(engine(FULL))
    request = desk.request(prompt(4))
    assert desk.ask(request) == 0
    desk.manager.on_schedule_end(ScheduleEndContext([request.request_id], ()))
    desk.put(request, desk.keys(request), in_memory=True)
    assert desk.ask(request) is None
    desk.end_step()
    assert desk.ask(request) == 4 * CHUNK


def test_resets_before_the_first_request_and_in_a_row_are_harmless(engine: Engine) -> None:
    harness = engine(FULL)
    reset(harness)
    reset(harness)
    harness.manager.on_reset_flushed()
    harness.serve([prompt(4)])
    reset(harness)
    reset(harness)
    assert harness.serve([prompt(4)])[0].cached_tokens == 0
    harness.drop_gpu_cache()
    assert harness.serve([prompt(4)])[0].cached_tokens == 4 * CHUNK


def test_a_waiting_request_survives_a_reset(engine: Engine) -> None:
    desk = Desk(engine(FULL))
    request = desk.request(prompt(20))
    desk.put(request, desk.keys(request))
    assert desk.ask(request) is None
    desk.connector.reset_cache()
    assert desk.resolve(request) == 0
    desk.end_step([finished(request)])
    desk.settle()
    assert desk.pinned() == 0
