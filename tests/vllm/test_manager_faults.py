"""What the manager promises when disks fail: no wrong byte, no dead engine, and an engine that comes to rest."""

import errno
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.request import RequestStatus

from kvdisk.cli.segment_files import chunks_of, files_of, flip_byte
from kvdisk.io.protocol import OpKind
from kvdisk.vllm.opening import Opening
from tests.vllm.desk import Desk
from tests.vllm.harness import Harness
from tests.vllm.models import full, layers, state, window

Engine = Callable[..., Harness]
CHUNK = 64
FULL = layers(full(), full())  # 64 slots in the arena
FULL_AND_WINDOW = layers(full(), full(), window(8 * CHUNK), window(8 * CHUNK))


def prompt(chunks: float, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(int(chunks * CHUNK) + 1)]


def store_and_close(harness: Harness, tokens: list[int]) -> None:
    harness.serve([tokens])
    harness.close()


def segments(root: Path) -> list[Path]:
    return [path for path in files_of(root) if any(True for _ in chunks_of(path))]


def break_engine(harness: Harness, kind: OpKind, error: int | None) -> list[Any]:
    """Ops of this kind end with `error`, or (None) never; those that never end are returned."""
    service = harness.manager._service
    submit, loop, hung = service.engine.submit, service.plane.loop, []

    def broken(ops: Any) -> None:
        for op in ops:
            if op.kind is not kind:
                submit([op])
            elif error is None:
                hung.append(op)
            else:
                loop.call_soon(op.done, -error)

    service.engine.submit = broken
    return hung


def unreadable(harness: Harness) -> int:
    stats = harness.manager.stats()
    return int(stats.get("reads_failed", 0)) + int(stats.get("chunks_damaged", 0))


def assert_at_rest(harness: Harness) -> None:
    store = harness.manager._service.store
    assert not harness.manager.has_pending_work()
    assert [owner.key.hex() for owner in store.arena.owners() if owner.pins and not owner.forgotten] == []
    assert harness.manager._lookups.held_units == 0


# ---- what was stored is damaged


@pytest.mark.parametrize("specs", [FULL, FULL_AND_WINDOW], ids=["full", "window"])
def test_a_damaged_chunk_costs_what_follows_it_and_is_tried_once(engine: Engine, tmp_path: Path, specs: Any) -> None:
    store_and_close(engine(specs), prompt(8))
    (damaged,) = [
        chunk for path in segments(tmp_path) for chunk in chunks_of(path) if (chunk.group, chunk.position) == (0, 192)
    ]
    flip_byte(damaged.path, damaged.start + 1000)
    harness = engine(specs)
    asked: list[LookupResult] = []
    lookup = harness.manager.lookup

    def noted(key: bytes, req_context: Any) -> LookupResult:
        answer = lookup(key, req_context)
        if key == damaged.key:
            asked.append(answer)
        return answer

    harness.manager.lookup = noted
    outcomes = harness.serve([prompt(8)] * 2)
    assert outcomes[0].cached_tokens == 2 * CHUNK
    assert all(outcome.pages_wrong == 0 < outcome.pages_right for outcome in outcomes)
    counters = harness.manager.stats()
    assert counters["chunks_damaged"] == 1
    assert counters["chunks_promoted"] >= 7
    first_miss = asked.index(LookupResult.MISS)
    assert LookupResult.HIT not in asked[:first_miss]
    assert_at_rest(harness)
    harness.drop_gpu_cache()
    assert harness.serve([prompt(8)])[0] == (8 * CHUNK, outcomes[0].pages_right, 0), "computed and stored again"
    assert harness.manager.stats()["chunks_damaged"] == 1


def test_deleted_files_are_misses(engine: Engine, tmp_path: Path) -> None:
    store_and_close(engine(FULL), prompt(8))
    harness = engine(FULL)
    harness.serve([prompt(1, 9)])
    for path in segments(tmp_path):
        path.unlink()
    harness.manager._service.plane.backend.plane.files.close()  # as many files do that are not used for a while
    (outcome,) = harness.serve([prompt(8)])
    assert outcome.pages_wrong == 0 < outcome.pages_right
    assert outcome.cached_tokens == 0
    assert unreadable(harness) > 0
    assert_at_rest(harness)


def test_a_truncated_file_loses_what_was_cut_off(engine: Engine, tmp_path: Path) -> None:
    store_and_close(engine(FULL), prompt(8))
    harness = engine(FULL)
    harness.serve([prompt(1, 9)])
    fifth = next(c for path in segments(tmp_path) for c in chunks_of(path) if c.position == 5 * CHUNK)
    os.truncate(fifth.path, fifth.start + 4096)
    (outcome,) = harness.serve([prompt(8)])
    assert (outcome.cached_tokens, outcome.pages_wrong) == (4 * CHUNK, 0)
    assert_at_rest(harness)


def test_a_state_that_is_damaged_costs_the_hit_but_no_wrong_byte(engine: Engine, tmp_path: Path) -> None:
    specs = layers(full(), full(), state(8192), state(8192))
    store_and_close(engine(specs, {"blocks_per_chunk": 1}), prompt(8))
    states = [chunk for path in segments(tmp_path) for chunk in chunks_of(path) if chunk.group != 0]
    for chunk in states:
        flip_byte(chunk.path, chunk.start)
    harness = engine(specs, {"blocks_per_chunk": 1})
    (outcome,) = harness.serve([prompt(8)])
    assert (outcome.cached_tokens, outcome.pages_wrong) == (0, 0)
    assert harness.manager.stats()["chunks_damaged"] == len(states)
    assert_at_rest(harness)


# ---- the disk fails


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS], ids=errno.errorcode.get)
def test_failing_writes_leave_hits_in_memory_and_an_engine_at_rest(engine: Engine, error: int) -> None:
    harness = engine(FULL)
    harness.serve([prompt(1, 9)])
    break_engine(harness, OpKind.WRITE, error)
    assert harness.serve([prompt(20)])[0].pages_wrong == 0
    assert_at_rest(harness)
    harness.drop_gpu_cache()
    assert harness.serve([prompt(20)])[0] == (20 * CHUNK, 160, 0)
    stats = harness.manager.stats()
    assert int(stats["writes_failed"]) + int(stats["writes_no_space"]) > 0
    assert int(stats["chunks_not_flushed"]) >= 20


def test_failing_reads_are_misses(engine: Engine) -> None:
    store_and_close(engine(FULL), prompt(20))
    harness = engine(FULL)
    harness.serve([prompt(1, 9)])
    break_engine(harness, OpKind.READ, errno.EIO)
    assert harness.serve([prompt(20)])[0][::2] == (0, 0)
    assert unreadable(harness) > 0
    assert_at_rest(harness)


@pytest.mark.parametrize("kind", [OpKind.READ, OpKind.WRITE], ids=["reads", "writes"])
def test_a_disk_that_never_answers_delays_nobody_for_ever(engine: Engine, kind: OpKind) -> None:
    store_and_close(engine(FULL), prompt(8))
    harness = engine(FULL, {"io_timeout_s": 0.3})
    harness.serve([prompt(1, 9)])
    hung = break_engine(harness, kind, None)
    outcomes = harness.serve([prompt(8), prompt(8, 1)])
    assert hung
    assert all(outcome.pages_wrong == 0 < outcome.pages_right for outcome in outcomes)
    assert outcomes[0].cached_tokens == (0 if kind is OpKind.READ else 8 * CHUNK)
    assert not harness.manager.has_pending_work()
    for op in hung:  # and if it answers after all, nobody is confused
        harness.manager._service.plane.loop.call_soon_threadsafe(op.done, -errno.EIO)
    harness.serve([prompt(2, 5)])
    assert_at_rest(harness)


def test_slots_of_reads_that_hang_are_not_reused(engine: Engine) -> None:
    desk = Desk(engine(FULL, {"io_timeout_s": 0.2}))
    request = desk.request(prompt(20))
    desk.put(request, desk.keys(request))
    hung = break_engine(desk.harness, OpKind.READ, None)
    assert desk.resolve(request) == 0
    assert desk.pinned() == 20
    other = desk.request(prompt(100, 1))
    for i in range(0, 100, 4):
        desk.put(other, desk.keys(other)[i : i + 4], in_memory=True)
    assert desk.pinned() == 20
    for op in hung:
        desk.manager._service.plane.loop.call_soon_threadsafe(op.done, -errno.EIO)
    desk.end_step()
    while desk.pinned():
        desk.manager._service.wait(1)
        desk.end_step()


def test_a_store_that_cannot_be_opened_turns_offloading_off(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    harness = engine(FULL)

    def refuse() -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/mnt/nvme")

    harness.manager._opening = Opening(refuse, time.monotonic)
    for _ in range(2):
        (outcome,) = harness.serve([prompt(8)])
        assert (outcome.cached_tokens, outcome.pages_wrong) == (0, 0)
        harness.drop_gpu_cache()
    assert len({record for record in caplog.records if "KV offloading is OFF until" in record.message}) == 1
    assert "Read-only file system" in caplog.text
    assert harness.scheduler.reset_prefix_cache(reset_connector=True)
    harness.manager.on_reset_flushed()
    assert harness.manager.get_stats() is None
    assert list(harness.manager.take_events()) == []


# ---- errors of ours


def fail(*_: Any, **__: Any) -> Any:
    raise AssertionError("a bug of ours")


def off_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "is OFF until the server is restarted" in record.message]


@pytest.mark.parametrize("where", ["complete", "take_commands", "presence", "reserve", "commit", "touch"])
def test_an_error_of_the_store_switches_kvdisk_off_and_the_engine_goes_on(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    harness = engine(FULL)
    harness.serve([prompt(10, 1)])
    harness.drop_gpu_cache()
    harness.expects_off = True
    monkeypatch.setattr(harness.manager._service.store, where, fail)
    for _ in range(2):
        outcomes = harness.serve([prompt(10, 1), prompt(12, 2), prompt(10, 3)])
        assert [outcome.pages_wrong for outcome in outcomes] == [0, 0, 0]
        harness.drop_gpu_cache()
    assert len(off_lines(caplog)) == 1
    assert not harness.manager.has_pending_work()
    assert harness.scheduler.reset_prefix_cache(reset_connector=True)


def test_what_was_called_a_hit_is_loaded_though_kvdisk_was_switched_off_meanwhile(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(engine(FULL))
    request, other = desk.request(prompt(20)), desk.request(prompt(5, 1))
    desk.put(request, desk.keys(request))
    tokens = desk.resolve(request)
    assert tokens == 20 * CHUNK
    desk.harness.expects_off = True
    monkeypatch.setattr(desk.store, "complete", fail)
    monkeypatch.setattr(desk.store, "take_commands", fail)
    assert desk.ask(other) == 0
    assert desk.manager.is_off
    units = {desk.store.resident(key).run.start for key in desk.keys(request)}
    assert desk.load(request, tokens) == desk.keys(request)
    desk.end_step()
    assert {desk.store.resident(key).run.start for key in desk.keys(request)} == units
    assert desk.ask(desk.request(prompt(20))) == 0


@pytest.mark.parametrize("broken", [("complete",), ("take_commands",), ("reset",)])
def test_a_reset_of_a_store_that_fails_is_durable_or_said_not_to_be(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, broken: tuple[str, ...]
) -> None:
    harness = engine(FULL)
    harness.serve([prompt(10, 1)])
    harness.drop_gpu_cache()
    harness.expects_off = True
    with monkeypatch.context() as patch:
        for name in broken:
            patch.setattr(harness.manager._service.store, name, fail)
        assert harness.scheduler.reset_prefix_cache(reset_connector=True)
        assert harness.serve([prompt(10, 1)])[0][::2] == (0, 0), "nothing of before the reset is a hit"
    assert "the reset is not durable" in caplog.text
    assert len(off_lines(caplog)) == 1


def test_a_reset_after_kvdisk_was_switched_off_is_durable(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = engine(FULL)
    harness.serve([prompt(10, 1)])
    harness.drop_gpu_cache()
    harness.expects_off = True
    with monkeypatch.context() as patch:
        patch.setattr(harness.manager._service.store, "resident", fail)
        harness.serve([prompt(10, 1)])
        assert harness.manager.is_off
    harness.drop_gpu_cache()
    assert harness.scheduler.reset_prefix_cache(reset_connector=True)
    harness.close()
    assert engine(FULL).serve([prompt(10, 1)])[0][::2] == (0, 0)


# ---- coming to rest


def test_everything_accepted_is_on_disk_when_nothing_is_pending(engine: Engine) -> None:
    harness = engine(FULL_AND_WINDOW)
    for seed in range(4):
        harness.serve([prompt(12, seed)])
    store = harness.manager._service.store
    assert_at_rest(harness)
    assert len(store.index) > 40
    assert all(owner.key in store.index for owner in store.arena.owners())
    assert len(store.index) == store.stats()["chunks_flushed"] == store.counters["chunks_stored"]


def test_aborts_at_any_step_leave_nothing_behind(engine: Engine) -> None:
    store_and_close(engine(FULL), prompt(40))
    harness = engine(FULL)
    rng = random.Random(3)
    for _ in range(12):
        requests = [harness.add(prompt(40) if rng.random() < 0.5 else prompt(12, rng.randrange(5))) for _ in range(3)]
        for _ in range(rng.randrange(1, 8)):
            harness.step()
        names = [request.request_id for request in requests]
        harness.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        harness.run([])
        assert_at_rest(harness)
    harness.drop_gpu_cache()
    assert harness.serve([prompt(40)])[0].pages_wrong == 0
    assert harness.manager._requests == {}


def test_preempted_requests_leave_nothing_behind(engine: Engine) -> None:
    """GPU blocks for one and a half requests: somebody is preempted again and again."""
    harness = engine(FULL, max_model_len=2048, memory_bytes=180 * 16384, max_num_batched_tokens=512)
    requests = [harness.add(prompt(20, seed), max_tokens=400) for seed in range(4)]
    outcomes = harness.run(requests)
    assert sum(outcome.pages_wrong for outcome in outcomes) == 0
    assert_at_rest(harness)
    assert harness.manager._requests == {}
