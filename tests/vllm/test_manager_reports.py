"""What the manager tells others: where hits came from, KV events, metrics; and which tiers a request lets it use."""

import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.config import KVEventsConfig
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, TierFilter, TierMatcher
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvdisk.store import Presence
from kvdisk.vllm import KVDiskOffloadingSpec
from kvdisk.vllm.metrics import COUNTERS, GAUGES, PREFIX, StatsReporter
from tests.vllm.desk import Desk
from tests.vllm.harness import Harness
from tests.vllm.models import full, layers

Engine = Callable[..., Harness]
CHUNK = 64
FULL = layers(full(), full())  # 64 slots in the arena
NOT_METRICS = {"engine", "io_mode", "epoch"}
"""In the stats for people; a number that only identifies is no metric."""


def prompt(chunks: float, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(int(chunks * CHUNK) + 1)]


# ---- tiers

CPU, STORAGE = TierMatcher(medium=Medium.CPU), TierMatcher(medium=Medium.STORAGE)


@pytest.mark.parametrize(
    ("matchers", "in_memory", "on_disk"),
    [((CPU,), True, False), ((STORAGE,), True, True), ((CPU, STORAGE), True, True), ((), False, False)],
    ids=["CPU", "STORAGE", "both", "none"],
)
def test_a_request_gets_only_from_the_tiers_it_allows(
    engine: Engine, matchers: Any, in_memory: bool, on_disk: bool
) -> None:
    """STORAGE allows what is in memory, too, if the disk has it: it is the same chunk."""
    desk = Desk(engine(FULL))
    for seed, here in ((1, True), (2, False)):
        writer, request = desk.request(prompt(5, seed)), desk.request(prompt(5, seed))
        desk.put(writer, desk.keys(writer), in_memory=here)
        desk.status(request).req_context.load_tier_filter = TierFilter(matchers=tuple(matchers))
        promoted = desk.store.counters["chunks_promoted"]
        expected = in_memory if here else on_disk
        assert desk.resolve(request) == (5 * CHUNK if expected else 0)
        assert desk.store.counters["chunks_promoted"] - promoted == (5 if expected and not here else 0)


def test_a_remote_tier_is_not_ours(engine: Engine) -> None:
    desk = Desk(engine(FULL))
    writer, request = desk.request(prompt(5)), desk.request(prompt(5))
    desk.put(writer, desk.keys(writer))
    desk.status(request).req_context.load_tier_filter = TierFilter((TierMatcher(locality=Locality.REMOTE),))
    assert desk.resolve(request) == 0


def test_a_chunk_in_memory_only_is_not_storage(engine: Engine) -> None:
    desk = Desk(engine(FULL))
    request = desk.request(prompt(5))
    desk.put(request, desk.keys(request), in_memory=True)
    desk.store.index.clear()
    desk.status(request).req_context.load_tier_filter = TierFilter((STORAGE,))
    assert desk.resolve(request) == 0


def test_hits_say_where_they_came_from(engine: Engine) -> None:
    desk = Desk(engine(FULL))
    request = desk.request(prompt(10))
    desk.put(request, desk.keys(request)[6:])
    desk.put(request, desk.keys(request)[:6], in_memory=True)
    assert desk.resolve(request) == 10 * CHUNK
    context = desk.status(request).req_context
    sources = [desk.manager.get_load_source(key, context) for key in desk.keys(request)]
    assert sources == [CacheHitSource.HOST] * 6 + [CacheHitSource.DISK] * 4
    desk.load(request, 10 * CHUNK)
    expected = {CacheHitSource.HOST: 6 * CHUNK, CacheHitSource.DISK: 4 * CHUNK}
    assert desk.connector.get_external_cache_hit_sources(request, 10 * CHUNK) == expected


# ---- events


def replay(known: set[bytes], manager: Any) -> None:
    """Follow what is on disk; what leaves the CPU, for vLLM's own books, has to be nowhere else."""
    while events := manager.take_events():
        for event in events:
            assert event.locality == Locality.LOCAL
            if event.medium is Medium.CPU:
                assert event.removed
                assert known.isdisjoint(event.keys)
            else:
                known.difference_update(event.keys) if event.removed else known.update(event.keys)


@pytest.mark.parametrize("seed", range(3))
def test_events_replayed_are_the_index(engine: Engine, seed: int) -> None:
    """Stores, evictions, damage and a reset, at random."""
    rng = random.Random(seed)
    publish = {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}
    extra = {"disk_bytes_to_use": "4MiB", "segment_bytes": "1MiB"}
    known: set[bytes] = set()
    desk = Desk(engine(FULL, extra, **publish))
    for step in range(40):
        request = desk.request(prompt(rng.randrange(1, 12), rng.randrange(60)))
        store = desk.store
        absent = [key for key in desk.keys(request) if store.presence(key) is Presence.ABSENT]
        desk.put(request, absent, in_memory=rng.random() < 0.5)
        if step == 20:
            desk.connector.reset_cache()
            desk.settle()
        if rng.random() < 0.2 and len(store.index):
            store._dropped(store.index.drop(rng.choice(list(store.index))))
        replay(known, desk.manager)
        assert known == set(store.index)
    assert store.stats()["chunks_evicted"] > 0


def test_what_recovery_found_is_announced(engine: Engine) -> None:
    publish = {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}
    first = engine(FULL)
    first.serve([prompt(10)])
    first.close()
    second = Desk(engine(FULL, **publish))
    found: set[bytes] = set()
    replay(found, second.manager)
    assert found == set(second.store.index)
    assert len(found) == 10


def test_events_reach_vllm(engine: Engine) -> None:
    publish = {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}
    harness = engine(FULL, {"self_describing_kv_events": True}, **publish)
    connector = harness.scheduler.connector
    take_events, events = connector.take_events, []

    def noted() -> Any:  # vLLM's scheduler takes them in every step
        events.extend(take_events())
        return events[:0]

    connector.take_events = noted
    harness.serve([prompt(10)])
    noted()
    assert {event.medium for event in events} == {"STORAGE"}
    assert sum(len(event.block_hashes) for event in events) >= 10


def test_vllm_forgets_what_it_noted_of_chunks_that_are_nowhere(engine: Engine) -> None:
    publish = {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}
    harness = engine(FULL, {"self_describing_kv_events": True}, **publish)
    harness.serve([prompt(10)])
    connector = harness.scheduler.connector
    list(connector.take_events())
    tracker = connector.connector_scheduler._events_tracker
    noted = [value for name, value in vars(tracker).items() if isinstance(value, dict) and "group" not in name]
    assert sum(map(len, noted)) >= 10
    store = harness.manager._service.store
    store.drop_slots()
    for key in list(store.index):
        store._dropped(store.index.drop(key))
    list(connector.take_events())
    assert sum(map(len, noted)) == 0


def test_a_restart_hands_out_its_events_in_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdisk.vllm.events.EVENTS_A_STEP_MAX", 4)
    publish = {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}
    first = engine(FULL)
    first.serve([prompt(10)])
    first.close()
    second = Desk(engine(FULL, **publish))
    assert [sum(len(event.keys) for event in second.manager.take_events()) for _ in range(4)] == [4, 4, 2, 0]


def test_without_listeners_no_events_pile_up(engine: Engine) -> None:
    harness = engine(FULL)
    harness.serve([prompt(10)])
    assert harness.manager._service.store.events is None
    assert list(harness.manager.take_events()) == []


# ---- metrics


def test_everything_counted_has_a_metric_and_a_definition(engine: Engine) -> None:
    harness = engine(FULL)
    harness.serve([prompt(30, seed) for seed in range(4)])
    harness.drop_gpu_cache()
    harness.serve([prompt(30, seed) for seed in range(4)])
    harness.scheduler.reset_prefix_cache(reset_connector=True)
    names = set(harness.manager.stats()) - NOT_METRICS
    assert names - set(COUNTERS) - set(GAUGES) == set()
    definitions = KVDiskOffloadingSpec.build_metric_definitions({})
    assert set(definitions) == {PREFIX + name for name in [*COUNTERS, *GAUGES]}
    assert all(definition.documentation for definition in definitions.values())


def test_stats_are_increments_that_add_up(engine: Engine) -> None:
    harness = engine(FULL)
    total: dict[str, float] = {}
    get_stats = harness.manager.get_stats

    def noted() -> Any:  # vLLM asks in every step
        stats = get_stats()
        for name in COUNTERS if stats is not None else ():
            total[name] = total.get(name, 0) + sum(stats.data["data"].get(PREFIX + name, {}).values())
        return stats

    harness.manager.get_stats = noted
    for seed in range(4):
        harness.serve([prompt(5, seed % 2)])
        harness.drop_gpu_cache()
    harness.manager.get_stats()
    assert harness.manager.get_stats() is None, "nothing moved since"
    counted = harness.manager.stats()
    assert {name: value for name, value in total.items() if value} == {
        name: counted[name] for name in COUNTERS if counted.get(name)
    }
    assert total["chunks_loaded"] == 10


def test_counters_that_shrink_or_are_missing_never_raise() -> None:
    stats: dict[str, int | str] = {}
    reporter = StatsReporter(lambda: stats)
    assert reporter.report(0) is None
    for mark, (value, moved) in enumerate([(5, True), (3, False), (-1, False), (6, True)], start=1):
        stats.update(hits=value, engine="posix")
        assert (reporter.report(mark) is not None) == moved


def test_a_step_in_which_nothing_happened_builds_no_stats(engine: Engine) -> None:
    """vLLM asks in every step, and most are steps of decoding."""
    harness = engine(FULL)
    harness.serve([prompt(5)])
    harness.manager.get_stats()
    built: list[object] = []
    harness.manager._reporter._stats = lambda: built.append(1) or {}
    for _ in range(5):
        assert harness.manager.get_stats() is None
    assert not built


def test_lookups_of_requests_that_miss_are_counted(engine: Engine) -> None:
    desk = Desk(engine(FULL))
    desk.answers.clear()
    assert desk.ask(desk.request(prompt(5))) == 0
    assert desk.answers == {LookupResult.MISS: 1}
    desk.end_step()
    assert desk.manager.counters["misses"] == 1
