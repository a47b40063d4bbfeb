"""What the manager promises about lookups: budgets, promotion, waiting, pins. Asked through vLLM's own code."""

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext
from vllm.v1.outputs import KVConnectorOutput

from kvdisk.resident import Resident
from kvdisk.vllm.lookups import IDLE_STEPS_MAX, NO_SLOT_S_MAX
from kvdisk.vllm.requests import Groups
from tests.vllm.desk import Desk, finished
from tests.vllm.harness import Harness
from tests.vllm.models import full, layers, state, window

Engine = Callable[..., Harness]
CHUNK = 64  # tokens, with 4 blocks a chunk
FULL = layers(full(), full())  # 64 KiB a chunk: 64 slots in the arena of 4 MiB
FULL_AND_WINDOW = layers(full(), full(), window(8 * CHUNK), window(8 * CHUNK))
FULL_AND_STATE = layers(full(), full(), state(8192), state(8192))
WINDOW = layers(window(2 * CHUNK), window(2 * CHUNK))
SLOTS = 64


def prompt(chunks: float, seed: int = 0, chunk: int = CHUNK) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(int(chunks * chunk) + 1)]


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# ---- budgets


@pytest.mark.parametrize(
    ("specs", "blocks_per_chunk"),
    [(FULL, 4), (FULL_AND_WINDOW, 4), (FULL_AND_STATE, 1)],
    ids=["full", "window", "state"],
)
def test_a_prefix_of_twice_the_arena_loads_most_of_an_arena(engine: Engine, specs: Any, blocks_per_chunk: int) -> None:
    tokens = prompt(2 * SLOTS)
    first = engine(specs, {"blocks_per_chunk": blocks_per_chunk})
    for chunks in range(8, 2 * SLOTS + 1, 8):  # a real GPU takes its time, too
        first.serve([tokens[: chunks * CHUNK + 1]])
    first.close()
    second = engine(specs, {"blocks_per_chunk": blocks_per_chunk})
    (outcome,) = second.serve([tokens])
    assert outcome.pages_wrong == 0 < outcome.pages_right
    assert second.manager.counters["chunks_loaded"] >= 0.8 * SLOTS * 4 / blocks_per_chunk
    assert outcome.cached_tokens >= 0.7 * SLOTS * CHUNK


def test_two_full_groups_share_by_bytes_a_token() -> None:
    """An MLA latent and an indexer's keys: the arena holds the same prefix of both."""
    groups = Groups({0: 64, 1: 64, 2: 128}, {0: 80, 1: 20, 2: 40}, {2: 2}, arena_units=4096)
    assert groups.full == (0, 1)
    assert groups.budget[2] == 4 * 40
    assert abs(groups.budget[0] // 80 - groups.budget[1] // 20) <= 1
    assert 0.89 * 4096 <= sum(groups.budget.values()) <= groups.held_max


def test_a_window_larger_than_the_arena_is_said_at_start(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine(layers(full(), full(), window(200 * CHUNK), window(200 * CHUNK)))
    assert "raise cpu_bytes_to_use" in caplog.text


# ---- promotion


def test_a_window_of_a_long_history_promotes_the_window_only(engine: Engine) -> None:
    desk = Desk(engine(layers(window(2 * 16), window(2 * 16)), {"blocks_per_chunk": 1}))
    tokens = prompt(1000, chunk=16)
    writer = desk.request(tokens)
    desk.put(writer, desk.keys(writer))
    request = desk.request(tokens)
    desk.answers.clear()
    assert desk.ask(request) is None
    assert desk.answers == {LookupResult.HIT_PENDING: 2}
    assert desk.resolve(request) == 16_000
    assert desk.store.counters["chunks_promoted"] == 2


def test_a_window_is_found_where_the_prefix_ends(engine: Engine) -> None:
    """Pins of the prompt's last window must not crowd out the window that is needed."""
    desk = Desk(engine(FULL_AND_WINDOW))
    tokens = prompt(300)
    writer = desk.request(tokens)
    desk.put(writer, desk.keys(writer, 0)[:20])
    desk.put(writer, desk.keys(writer, 1))
    request = desk.request(tokens)
    assert desk.resolve(request) == 20 * CHUNK
    assert len(desk.load(request, 20 * CHUNK)) == 28
    desk.end_step([finished(request)])
    assert desk.pinned() == 0


def test_fifty_requests_share_a_small_arena_in_order(engine: Engine) -> None:
    """Each chunk is read about once, a running request's stores go on, and everybody loads everything."""
    desk = Desk(engine(FULL))
    waiting = []
    for seed in range(50):
        request = desk.request(prompt(40, seed))
        desk.put(request, desk.keys(request))
        waiting.append(request)
    running = desk.request(prompt(2000, 99))
    fresh = iter(desk.keys(running))
    promoted, steps = desk.store.counters["chunks_promoted"], 0
    while waiting:
        steps += 1
        assert steps < 1000, "not getting on"
        done = []
        for request in waiting:
            hit = desk.ask(request)
            if hit is not None and len(done) < 2:
                assert hit == 40 * CHUNK
                desk.load(request, hit)
                done.append(finished(request))
        store_one(desk, running, [next(fresh)])
        desk.end_step(done)
        waiting = [request for request in waiting if request not in done]
        desk.settle()
    assert desk.store.counters["chunks_promoted"] - promoted <= 1.2 * 50 * 40
    assert desk.manager.counters["stores_put_off"] <= steps / 10
    assert desk.manager.counters["stores_cut"] == 0
    assert desk.pinned() == 0


def store_one(desk: Desk, request: Any, keys: Sequence[bytes]) -> list[bytes]:
    """Offer chunks and store at once what is taken."""
    context = desk.status(request).req_context
    output = desk.manager.prepare_store(keys, context)
    if output is None:
        return []
    for share in desk.manager._home:
        share.blocks_written[output.store_spec.units] = desk.manager._blocks_per_chunk
    desk.manager.complete_store(output.keys_to_store, context)
    return list(output.keys_to_store)


def test_waiting_requests_that_hold_all_slots_do_not_block_each_other(engine: Engine) -> None:
    """All hold pins in memory and want more from disk: the last gives way, at once."""
    desk = Desk(engine(FULL))
    requests = [desk.request(prompt(40, seed)) for seed in range(3)]
    for request in requests:
        desk.put(request, desk.keys(request)[:19], in_memory=True)
    assert [desk.ask(request) for request in requests] == [19 * CHUNK] * 3  # 57 slots: all that may be held
    for request in requests:
        desk.put(request, desk.keys(request)[19:])
    clock = Clock()
    desk.manager._lookups._clock = clock
    for _ in range(100):
        for request in list(requests):
            hit = desk.ask(request)
            if hit is not None:
                assert hit == 40 * CHUNK
                desk.load(request, hit)
                requests.remove(request)
        desk.end_step()
        desk.settle()
    assert requests == []
    assert clock.now == 0.0


def test_who_finds_no_slot_for_too_long_loads_what_it_has(engine: Engine) -> None:
    desk = Desk(engine(FULL))
    clock = Clock()
    desk.manager._lookups._clock = clock
    owner, request = desk.request(prompt(57, 1)), desk.request(prompt(20, 2))
    desk.put(owner, desk.keys(owner))
    desk.put(request, desk.keys(request)[5:])
    desk.put(request, desk.keys(request)[:5], in_memory=True)
    assert desk.resolve(owner) == 57 * CHUNK  # and never loads: it waits for GPU blocks
    assert desk.ask(request) is None
    desk.end_step()
    for _ in range(IDLE_STEPS_MAX // 2):
        assert (desk.ask(owner), desk.ask(request)) == (57 * CHUNK, None)
        desk.end_step()
    clock.now = NO_SLOT_S_MAX + 1
    assert desk.ask(owner) == 57 * CHUNK
    assert desk.resolve(request) == 0
    assert desk.manager.counters["misses_no_slot"] > 0


def test_slots_go_to_who_waited_longest_not_to_who_asks_first(engine: Engine) -> None:
    desk = Desk(engine(FULL))
    owner, first, second = (desk.request(prompt(57, seed)) for seed in range(3))
    for request in (owner, first, second):
        desk.put(request, desk.keys(request))
    assert desk.resolve(owner) == 57 * CHUNK
    assert (desk.ask(first), desk.ask(second)) == (None, None)
    desk.load(owner, 57 * CHUNK)
    desk.end_step()
    assert (desk.ask(second), desk.pinned()) == (None, 0)
    assert (desk.ask(first), desk.pinned()) == (None, 57)
    desk.end_step()
    desk.settle()


# ---- scans cut short


CUT_CASES = {
    "full": (FULL, 4),
    "full and window": (FULL_AND_WINDOW, 4),
    "window": (WINDOW, 4),
    "full and state": (FULL_AND_STATE, 1),
    "chunks of several sizes": (layers(full(), window(4 * CHUNK, head_size=32), window(4 * CHUNK, head_size=32)), 4),
}


@pytest.mark.parametrize("case", CUT_CASES)
@pytest.mark.parametrize("seed", range(4))
def test_a_cut_scan_changes_no_outcome(engine: Engine, case: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks at random, some of them missing: the same hit as when every step scans everything."""
    specs, blocks_per_chunk = CUT_CASES[case]
    desk = Desk(engine(specs, {"blocks_per_chunk": blocks_per_chunk}))
    rng = random.Random(seed)
    tokens = prompt(30)
    writer = desk.request(tokens)
    for group in desk.manager._groups.units:
        keys = desk.keys(writer, group)
        gaps = set(rng.sample(range(len(keys) // 3, len(keys)), len(keys) // 10))
        desk.put(writer, [key for i, key in enumerate(keys) if i not in gaps])
    request = desk.request(tokens)
    with desk.held_disk():
        undecided = [desk.ask(request) is None]
        desk.end_step()
        undecided.append(desk.ask(request) is None)
        assert desk.manager.counters["scans_cut"] == all(undecided)
    desk.settle()
    desk.end_step()
    cut = desk.resolve(request)
    assert cut > 0
    for request in list(desk.manager._requests.values()):
        desk.manager._lookups.release(request)
    desk.store.drop_slots()
    monkeypatch.setattr("kvdisk.vllm.lookups.Lookups._is_waiting", lambda *_: False)
    assert desk.resolve(desk.request(tokens)) == cut


def test_deferred_requests_cost_a_few_lookups_a_step(engine: Engine) -> None:
    desk = Desk(engine(layers(full()), {"blocks_per_chunk": 1, "cpu_bytes_to_use": "32MiB"}))
    tokens = prompt(3600, chunk=16)
    writer = desk.request(tokens)
    desk.put(writer, desk.keys(writer))
    requests = [desk.request(tokens) for _ in range(32)]
    with desk.held_disk():
        for step in range(3):
            desk.answers.clear()
            assert {desk.ask(request) for request in requests} == {None}
            desk.end_step()
            if step:
                assert desk.lookup_count <= 3 * len(requests)


def test_deferred_requests_look_at_a_few_of_their_chunks_a_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[Resident] = []
    state: Any = Resident.state
    look = property(
        lambda self: looked_at.append(self) or state.__get__(self), lambda self, value: state.__set__(self, value)
    )
    monkeypatch.setattr(Resident, "state", look)
    desk = Desk(engine(FULL))
    tokens = prompt(50)
    writer = desk.request(tokens)
    desk.put(writer, desk.keys(writer))
    requests = [desk.request(tokens) for _ in range(8)]
    with desk.held_disk():
        for step in range(3):
            looked_at.clear()
            assert {desk.ask(request) for request in requests} == {None}
            desk.end_step()
            assert (len(looked_at) <= 2 * len(requests)) == (step > 0)


def test_requests_without_a_slot_cost_a_few_lookups_a_step(engine: Engine) -> None:
    desk = Desk(engine(FULL))
    requests = [desk.request(prompt(50, seed)) for seed in range(6)]
    for request in requests:
        desk.put(request, desk.keys(request))
    with desk.held_disk():
        for step in range(4):
            desk.answers.clear()
            assert {desk.ask(request) for request in requests} == {None}
            desk.end_step()
            if step:
                assert desk.lookup_count <= 3 * len(requests)


def test_requests_delayed_by_a_load_cost_a_few_lookups_a_step(engine: Engine) -> None:
    """vLLM waits for the first request's load of the prefix that all share, and scans the others again and again."""
    desk = Desk(engine(layers(full()), {"blocks_per_chunk": 1, "cpu_bytes_to_use": "32MiB"}))
    first, others = sharing_a_prefix(desk, 3600, 32)
    desk.load(first, 3600 * 16)
    for step in range(4):
        desk.answers.clear()
        assert {desk.ask(request) for request in others} == {None}
        assert (desk.lookup_count <= 3 * len(others)) == (step > 0)  # vLLM itself delays it, to begin with
        desk.end_step(loads_end=False)
    loads_end(desk)
    assert desk.ask(others[0]) == 3600 * 16


def test_a_load_that_vllm_does_not_wait_for_defers_nobody(engine: Engine) -> None:
    """Without its prefix caching: requests that share a prefix load it at the same time."""
    desk = Desk(engine(layers(full()), {"blocks_per_chunk": 1}, enable_prefix_caching=False))
    first, others = sharing_a_prefix(desk, 30, 3)
    desk.load(first, 30 * 16)
    for request in others:
        assert desk.ask(request) == 30 * 16
        desk.load(request, 30 * 16)
        desk.end_step(loads_end=False)
    loads_end(desk)


def test_a_load_that_a_reset_ended_defers_nobody(engine: Engine) -> None:
    desk = Desk(engine(layers(full()), {"blocks_per_chunk": 1, "reset_keeps_disk": True}))
    first, (other, *_) = sharing_a_prefix(desk, 30, 1)
    desk.load(first, 30 * 16)
    for _ in range(2):
        assert desk.ask(other) is None
        desk.end_step(loads_end=False)
    desk.connector.reset_cache()
    for _ in range(2):  # it waits for GPU blocks
        assert desk.ask(other) == 30 * 16
        desk.end_step()


def sharing_a_prefix(desk: Desk, chunks: int, count: int) -> tuple[Any, list[Any]]:
    """A request, and others, that could all load the same chunks now."""
    tokens = prompt(chunks, chunk=16)
    first, *others = (desk.request(tokens) for _ in range(count + 1))
    desk.put(first, desk.keys(first))
    assert {desk.resolve(request) for request in (first, *others)} == {chunks * 16}
    desk.end_step()
    assert desk.ask(first) == chunks * 16
    return first, others


def loads_end(desk: Desk) -> None:
    done = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(desk.connector._jobs, 1))
    desk.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=done))


# ---- pins


def on_disk(desk: Desk, chunks: int, seed: int = 0) -> Any:
    """A request whose whole prefix is on disk and, after some steps, a hit."""
    request = desk.request(prompt(chunks, seed))
    desk.put(request, desk.keys(request))
    assert desk.resolve(request) == chunks * CHUNK
    return request


def test_a_hit_is_loadable_whatever_else_the_step_does(engine: Engine) -> None:
    desk = Desk(engine(FULL))
    request = on_disk(desk, 30)
    assert desk.ask(request) == 30 * CHUNK
    other = desk.request(prompt(60, 1))
    desk.put(other, desk.keys(other))  # fills the arena several times over
    desk.ask(other)
    while store_one(desk, other, desk.keys(desk.request(prompt(40, 2)))):
        pass
    assert len(desk.load(request, 30 * CHUNK)) == 30


def scheduled(desk: Desk, request: Any) -> None:
    desk.manager.on_schedule_end(ScheduleEndContext([request.request_id], ()))


def loaded(desk: Desk, request: Any) -> None:
    desk.load(request, 30 * CHUNK)
    desk.end_step()


def ended(desk: Desk, request: Any) -> None:
    desk.connector.request_finished(finished(request))
    desk.end_step([request])


def idle(desk: Desk, request: Any) -> None:
    for _ in range(IDLE_STEPS_MAX + 2):
        desk.end_step()


def reused_id(desk: Desk, request: Any) -> None:
    desk.connector.on_new_request(request)


@pytest.mark.parametrize("way", [scheduled, loaded, ended, idle, reused_id])
def test_pins_end_with_waiting(engine: Engine, way: Callable[[Desk, Any], None]) -> None:
    desk = Desk(engine(FULL))
    request = on_disk(desk, 30)
    assert desk.pinned() == 30
    way(desk, request)
    assert (desk.pinned(), desk.manager._lookups.held_units) == (0, 0)


def test_an_abort_while_chunks_are_read_frees_their_slots(engine: Engine) -> None:
    desk = Desk(engine(FULL))
    request = desk.request(prompt(30))
    desk.put(request, desk.keys(request))
    with desk.held_disk():
        assert desk.ask(request) is None
        ended(desk, request)
        assert desk.pinned() == 30  # the disk may still write them
    desk.settle()
    assert (desk.pinned(), desk.manager._lookups.held_units) == (0, 0)
    assert not desk.manager.has_pending_work()


# ---- cost


def test_a_lookup_makes_no_system_call_that_python_sees(engine: Engine) -> None:
    desk = Desk(engine(FULL))
    request = on_disk(desk, 30)
    seen: list[str] = []
    watching = False

    def hook(event: str, _: tuple[Any, ...]) -> None:
        if watching:
            seen.append(event)

    sys.addaudithook(hook)
    absent = desk.request(prompt(30, 1))
    watching = True
    assert desk.ask(request) == 30 * CHUNK
    assert desk.ask(absent) == 0
    watching = False
    assert [event for event in seen if event.startswith(("open", "os.", "socket", "subprocess", "mmap"))] == []
