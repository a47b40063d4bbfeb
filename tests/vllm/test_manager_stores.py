"""What the manager promises about stores: prefixes, refusals, thresholds; what is incomplete is never a hit."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.v1.kv_offload.base import ScheduleEndContext

from kvdisk.store import Presence
from kvdisk.vllm.admission import REFUSALS_MAX
from kvdisk.vllm.lookups import group_of
from kvdisk.vllm.share import POISONED
from tests.vllm.desk import Desk
from tests.vllm.harness import Harness
from tests.vllm.models import full, layers, state, window

Engine = Callable[..., Harness]
CHUNK = 64
FULL = layers(full(), full())  # 64 slots in the arena
FULL_AND_WINDOW = layers(full(), full(), window(8 * CHUNK), window(8 * CHUNK))
FULL_AND_STATE = layers(full(), full(), state(8192), state(8192))


def prompt(chunks: float, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(int(chunks * CHUNK) + 1)]


def offer(desk: Desk, request: Any, keys: Sequence[bytes]) -> list[bytes] | None:
    """The keys that the manager takes, or None; they stay in the middle of their stores."""
    output = desk.manager.prepare_store(keys, desk.status(request).req_context)
    return None if output is None else list(output.keys_to_store)


def end_store(desk: Desk, request: Any, keys: Sequence[bytes], blocks_written: int = 4) -> None:
    """What a worker and vLLM do after the copies."""
    for share in desk.manager._home:
        for key in keys:
            share.blocks_written[desk.store.resident(key).run.start] = blocks_written
    desk.manager.complete_store(list(keys), desk.status(request).req_context)


# ---- prefixes


def test_of_an_offer_the_longest_prefix_of_positions_is_taken_in_the_order_offered(engine: Engine) -> None:
    """All keys of a group come before the next group's: the tail of the batch is not the tail of the prefix."""
    desk = Desk(engine(FULL_AND_WINDOW))
    request = desk.request(prompt(50))
    offered = [*desk.keys(request, 0), *desk.keys(request, 1)]  # 100 chunks, room for 32
    taken = offer(desk, request, offered)
    assert taken == [key for key in offered if key in set(taken or [])]
    first, second = ([key for key in taken or [] if group_of(key) == group] for group in (0, 1))
    assert first == desk.keys(request, 0)[: len(first)]
    assert second == desk.keys(request, 1)[: len(second)]
    assert len(first) == len(second) == 16


def test_a_request_that_was_cut_stays_cut(engine: Engine) -> None:
    """What follows a gap can never be hit."""
    desk = Desk(engine(FULL))
    request = desk.request(prompt(60))
    keys = desk.keys(request)
    taken = offer(desk, request, keys[:50]) or []
    assert 0 < len(taken) < 50
    end_store(desk, request, taken)
    desk.settle()
    assert offer(desk, request, keys[50:]) == []
    assert desk.manager.counters["stores_cut"] == 60 - len(taken)
    other = desk.request(prompt(60))
    assert offer(desk, other, keys[:60]) == keys[len(taken) : 60], "another request fills the gap"


def test_a_request_that_was_cut_and_preempted_stores_again(engine: Engine) -> None:
    """vLLM begins at the head again, and then the slots may be there."""
    desk = Desk(engine(FULL))
    request = desk.request(prompt(60))
    keys = desk.keys(request)
    assert desk.ask(request) == 0
    desk.manager.on_schedule_end(ScheduleEndContext([request.request_id], ()))
    taken = offer(desk, request, keys[:50]) or []
    assert 0 < len(taken) < 50
    end_store(desk, request, taken)
    desk.settle()
    desk.ask(request)
    assert offer(desk, request, keys[:60]) == keys[len(taken) : 60]


def test_an_offer_that_fits_soon_is_put_off_and_then_taken_whole(engine: Engine) -> None:
    desk = Desk(engine(FULL))
    first, second = desk.request(prompt(25, 1)), desk.request(prompt(20, 2))
    with desk.held_disk():
        end_store(desk, first, offer(desk, first, desk.keys(first)) or [])
        assert offer(desk, second, desk.keys(second)) is None
    desk.settle()
    assert offer(desk, second, desk.keys(second)) == desk.keys(second)
    assert desk.manager.counters["stores_put_off"] == 1


def test_an_offer_is_put_off_in_a_bounded_number_of_steps(engine: Engine) -> None:
    """Of a model with Mamba states a step has many offers, so they are not what is counted."""
    desk = Desk(engine(FULL))
    first, second = desk.request(prompt(32, 1)), desk.request(prompt(20, 2))
    with desk.held_disk():
        end_store(desk, first, offer(desk, first, desk.keys(first)) or [])
        for _ in range(REFUSALS_MAX):
            assert [offer(desk, second, desk.keys(second)) for _ in range(3)] == [None] * 3
            desk.end_step()
        assert offer(desk, second, desk.keys(second)) == []
    desk.settle()


def test_an_offer_larger_than_may_ever_wait_is_not_put_off(engine: Engine) -> None:
    desk = Desk(engine(FULL))
    first, second = desk.request(prompt(20, 1)), desk.request(prompt(60, 2))
    with desk.held_disk():
        end_store(desk, first, offer(desk, first, desk.keys(first)) or [])
        assert offer(desk, second, desk.keys(second)) == desk.keys(second)[:12]
    desk.settle()


def test_refusals_at_random_harm_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of all slots are refused: no exception, no wrong byte, and what is kept are heads."""
    harness = engine(FULL_AND_WINDOW)
    rng = random.Random(1)
    harness.serve([prompt(1, 100)])
    store = harness.manager._service.store
    reserve = store.reserve
    monkeypatch.setattr(store, "reserve", lambda *args: None if rng.random() < 0.5 else reserve(*args))
    prompts = [prompt(12, seed) for seed in range(12)]
    for _ in range(4):
        outcomes = harness.serve(prompts)
        assert all(outcome.pages_wrong == 0 < outcome.pages_right for outcome in outcomes)
        harness.drop_gpu_cache()
    full_group = harness.manager._groups.full[0]
    for request_keys in keys_of(harness, prompts, full_group):
        kept = [store.presence(key) is not Presence.ABSENT for key in request_keys]
        assert kept == sorted(kept, reverse=True), "a gap in a prefix"
    assert harness.manager.counters["stores_cut"] > 0


def keys_of(harness: Harness, prompts: Sequence[Sequence[int]], group: int) -> list[list[bytes]]:
    desk = Desk(harness)
    return [desk.keys(desk.request(tokens), group) for tokens in prompts]


# ---- what costs nothing


def test_offers_of_chunks_that_are_here_take_no_slot(engine: Engine) -> None:
    desk = Desk(engine(FULL))
    request = desk.request(prompt(20))
    desk.put(request, desk.keys(request)[:10])
    desk.put(request, desk.keys(request)[10:], in_memory=True)
    free = desk.store.arena.free_units
    assert offer(desk, desk.request(prompt(20)), desk.keys(request)) == []
    assert desk.store.arena.free_units == free


def test_a_chunk_is_stored_once_enough_requests_offered_it(engine: Engine) -> None:
    harness = engine(FULL, {"store_threshold": 2})
    for _ in range(2):
        assert harness.serve([prompt(10)])[0].cached_tokens == 0
        harness.drop_gpu_cache()
    (outcome,) = harness.serve([prompt(10)])
    assert (outcome.cached_tokens, outcome.pages_wrong) == (10 * CHUNK, 0)


def test_an_offer_that_was_put_off_counts_once(engine: Engine) -> None:
    desk = Desk(engine(FULL, {"store_threshold": 2}))
    desk.request(prompt(1))
    first, second = desk.request(prompt(25, 1)), desk.request(prompt(20, 2))
    warm = desk.request(prompt(20, 2))
    assert offer(desk, warm, desk.keys(second)) == []
    assert offer(desk, warm, desk.keys(second)) == []
    desk.put(first, desk.keys(first))
    with desk.held_disk():
        third = desk.request(prompt(25, 3))
        offer(desk, third, desk.keys(third))
        end_store(desk, third, offer(desk, desk.request(prompt(25, 3)), desk.keys(third)) or [])
        assert offer(desk, second, desk.keys(second)) is None
    desk.settle()
    assert offer(desk, second, desk.keys(second)) == desk.keys(second)


def test_the_memory_for_offers_is_bounded(engine: Engine) -> None:
    desk = Desk(engine(FULL, {"store_threshold": 3, "max_tracker_size": 10}))
    request = desk.request(prompt(50))
    assert offer(desk, request, desk.keys(request)) == []
    assert len(desk.manager._admission.offers) == 10


# ---- what is incomplete


@pytest.mark.parametrize("blocks_written", [0, 3, 5, POISONED])
def test_a_chunk_with_unwritten_blocks_is_never_a_hit(engine: Engine, blocks_written: int) -> None:
    desk = Desk(engine(FULL))
    request = desk.request(prompt(3))
    keys = offer(desk, request, desk.keys(request)) or []
    end_store(desk, request, keys[:1], blocks_written)
    end_store(desk, request, keys[1:])
    desk.settle()
    assert desk.resolve(desk.request(prompt(3))) == 0
    assert desk.manager.counters["chunks_partial"] == 1
    assert desk.store.presence(keys[0]) is Presence.ABSENT


def test_a_store_that_failed_is_never_a_hit(engine: Engine) -> None:
    desk = Desk(engine(FULL))
    request = desk.request(prompt(2))
    keys = offer(desk, request, desk.keys(request)) or []
    desk.manager.complete_store(keys, desk.status(request).req_context, success=False)
    assert {desk.store.presence(key) for key in keys} == {Presence.ABSENT}
    assert desk.pinned() == 0


def test_a_chunk_that_is_being_stored_is_waited_for_not_missed(engine: Engine) -> None:
    desk = Desk(engine(FULL))
    writer, reader = desk.request(prompt(5)), desk.request(prompt(5))
    keys = offer(desk, writer, desk.keys(writer)) or []
    assert desk.ask(reader) is None
    desk.end_step()
    end_store(desk, writer, keys[:3])
    end_store(desk, writer, keys[3:], blocks_written=1)
    assert desk.ask(reader) == 3 * CHUNK


def test_states_are_offered_one_by_one_and_come_back(engine: Engine) -> None:
    harness = engine(FULL_AND_STATE, {"blocks_per_chunk": 1})
    offers: list[list[int]] = []
    prepare = harness.manager.prepare_store

    def noted(keys: Any, req_context: Any) -> Any:
        offers.append([group_of(key) for key in keys])
        return prepare(keys, req_context)

    harness.manager.prepare_store = noted
    harness.serve([prompt(16)])
    states = {group for group in harness.manager._groups.units if group in harness.manager._groups.windows}
    assert any(set(groups) <= states and len(groups) == 1 for groups in offers), offers
    harness.drop_gpu_cache()
    (outcome,) = harness.serve([prompt(16)])
    assert outcome.cached_tokens > 0
    assert outcome.pages_wrong == 0 < outcome.pages_right
