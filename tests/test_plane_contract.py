"""The contract of a data plane, the same for a thread and for a process."""

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdisk.cli.segment_files import chunks_of, files_of, flip_byte
from kvdisk.directory import CLOSED
from kvdisk.errors import DirectoryInUseError, StoreClosedError
from kvdisk.store import Presence
from tests.planes import KINDS, Rig, keys_of, value

Start = Callable[..., Rig]
KEYS = keys_of(30)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(params=KINDS)
def start(request: Any, root: Path) -> Iterator[Start]:
    rigs: list[Rig] = []

    def start_one(*more: Path, **extra: Any) -> Rig:
        rigs.append(Rig(root, *more, kind=request.param, **extra))
        return rigs[-1]

    yield start_one
    for rig in rigs:
        rig.service.close()


def test_what_was_stored_is_loaded_byte_for_byte(start: Start) -> None:
    rig = start()
    rig.put(KEYS)
    assert [rig.store.presence(key) for key in KEYS] == [Presence.ON_DISK] * len(KEYS)
    assert all(rig.get(key) == value(key, rig.size) for key in KEYS)
    stats = rig.service.stats()
    assert stats["chunks_flushed"] == stats["chunks_promoted"] == len(KEYS)
    assert int(stats["bytes_read"]) >= len(KEYS) * rig.size
    assert int(stats["io_ops"]) > 0


def test_the_next_one_finds_what_the_last_one_stored(start: Start) -> None:
    rig = start()
    rig.put(KEYS)
    assert rig.close()
    again = start()
    assert len(again.store.index) == len(KEYS)
    assert all(again.get(key) == value(key, again.size) for key in KEYS)


@pytest.mark.parametrize("writer, reader", [("thread", "process"), ("process", "thread")])
def test_both_kinds_read_what_the_other_wrote(root: Path, writer: str, reader: str) -> None:
    first = Rig(root, kind=writer)
    first.put(KEYS)
    first.close()
    second = Rig(root, kind=reader)
    assert all(second.get(key) == value(key, second.size) for key in KEYS)
    second.close()


def test_several_roots_are_served(start: Start, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    rig = start(other)
    rig.put(keys_of(60))
    rig.close()
    again = start(other)
    assert {segment.file.root for segment in again.store.table if segment.payload_bytes} == {0, 1}
    assert all(again.get(key) == value(key, again.size) for key in keys_of(60))


def test_a_damaged_chunk_is_a_miss_and_its_neighbours_are_hits(start: Start, root: Path) -> None:
    rig = start()
    rig.put(KEYS)
    damaged = next(chunk for path in files_of(root) for chunk in chunks_of(path) if chunk.key == KEYS[7])
    flip_byte(damaged.path, damaged.start + 100)
    assert [rig.get(key) == value(key, rig.size) for key in KEYS] == [key != KEYS[7] for key in KEYS]
    assert rig.store.presence(KEYS[7]) is Presence.ABSENT
    assert rig.service.stats()["chunks_damaged"] == 1


def test_a_reset_is_durable(start: Start) -> None:
    rig = start()
    rig.put(KEYS)
    rig.store.reset()
    assert rig.service.write_epoch_now(30)
    assert rig.store.presence(KEYS[0]) is Presence.ABSENT
    rig.close()
    assert len(start().store.index) == 0


def test_a_lowered_cap_holds_from_the_start(start: Start) -> None:
    rig = start()
    rig.put(keys_of(400))
    rig.close()
    smaller = start(disk_bytes_to_use="12MiB")
    assert 0 < len(smaller.store.index) < 400
    assert all(smaller.get(key) == value(key, smaller.size) for key in list(smaller.store.index)[:20])


def test_an_engine_asked_for_by_name_is_the_one_that_serves(start: Start) -> None:
    rig = start(engine="posix")
    rig.put(KEYS[:3])
    assert rig.get(KEYS[0]) == value(KEYS[0], rig.size)
    assert rig.service.engine_info.name == rig.service.stats()["engine"] == "posix"


def test_a_second_owner_of_the_only_instance_is_refused_by_pid(start: Start) -> None:
    rig = start(instances=("dp0",))
    with pytest.raises(DirectoryInUseError, match=f"pid {os.getpid()}"):
        start(instances=("dp0",))
    rig.put(KEYS[:1])
    assert rig.get(KEYS[0]) == value(KEYS[0], rig.size)


def test_an_attempt_that_fails_does_not_say_that_a_killed_owner_had_ended_cleanly(
    start: Start, root: Path, tmp_path: Path
) -> None:
    """It had open segments to which its last writes may still come."""
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    start(other, instances=("dp0",)).close()
    (lock,) = root.glob("ns-*/dp0/lock")
    assert lock.read_text() == CLOSED
    lock.write_text("4711 1 1")  # what a killed process leaves
    (held,) = other.glob("ns-*/dp0/lock")
    with held.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DirectoryInUseError):
            start(other, instances=("dp0",))
    assert lock.read_text() != CLOSED
    assert not start(other, instances=("dp0",)).service._directories[0].closed_cleanly


def test_close_is_idempotent_and_final(start: Start) -> None:
    rig = start()
    rig.begin_put(b"unflushed")
    assert rig.service.close()
    assert rig.service.close()
    with pytest.raises(StoreClosedError):
        rig.service.pump()
    assert start().get(b"unflushed") == value(b"unflushed", Rig.size), "close flushes"


def test_a_plane_has_what_flushing_left_of_the_time_to_end(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long with much memory; where it does not end in time, its last segments are not written on."""
    rig = start()
    times: list[float] = []
    close = rig.service.plane.close
    monkeypatch.setattr(rig.service.plane, "close", lambda timeout_s: times.append(timeout_s) or close(timeout_s))
    rig.service.close(100.0)
    assert 50.0 < times[0] <= 100.0


def test_what_the_engine_has_to_say_reaches_the_owners_log(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvdisk"):
        start(engine="posix")
    assert any("engine posix" in record.getMessage() and "iodepth" in record.getMessage() for record in caplog.records)


def test_a_file_cut_off_is_a_miss_and_a_warning(start: Start, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = start()
    rig.put(KEYS)
    rig.close()
    again = start()
    for path in files_of(root):
        os.truncate(path, 4096)
    assert again.get(KEYS[0]) is None
    again.put([b"so that it listens"])
    assert "failed" in caplog.text


def test_waiting_ends_with_a_completion_or_the_time(start: Start) -> None:
    rig = start()
    rig.service.wait(0.001)
    rig.begin_put(b"key")
    rig.service.pump()
    rig.pump_until(lambda: not rig.store.busy)
    assert b"key" in rig.store.index


def test_the_process_has_no_thread_for_its_owner(root: Path) -> None:
    before = threading.active_count()
    rig = Rig(root)
    rig.put(KEYS)
    assert threading.active_count() == before
    rig.close()


def test_a_store_that_fails_gives_its_instance_back_all_the_same(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = start()

    def fail(now: float) -> None:
        raise AssertionError("a bug of ours")

    monkeypatch.setattr(rig.store, "take_commands", fail)
    with pytest.raises(AssertionError, match="of ours"):
        rig.service.close()
    first = rig.service.instance_paths
    assert start().service.instance_paths == first
