"""A data plane's process in trouble, and its owner: whoever is killed, there are no wrong bytes, no hangs, no leaks."""

import asyncio
import contextlib
import errno
import logging
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvdisk
from kvdisk import layout
from kvdisk.commands import Completion, PackChunk, ReadChunks, SegmentFile, WriteEpoch, WritePack
from kvdisk.dataplane import pack_entries
from kvdisk.layout import SegmentHeader
from kvdisk.plan import Footprint, pack_size
from kvdisk.plane import child, quiet, remote
from kvdisk.plane import process as process_module
from kvdisk.plane.remote import ProcessPlane
from kvdisk.plane.wire import Do, Done, Log, Receiver, Sender, Stop, WireError, decode_event, decode_request
from kvdisk.store import Presence
from tests.machine import has_leases
from tests.planes import Rig, keys_of, value

Start = Callable[..., Rig]
KEYS = keys_of(30)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def start(root: Path) -> Iterator[Start]:
    rigs: list[Rig] = []

    def start_one(**extra: Any) -> Rig:
        rigs.append(Rig(root, **extra))
        return rigs[-1]

    yield start_one
    for rig in rigs:
        rig.service.close()


def await_end(pid: int) -> None:
    """Until the process is gone; the test's timeout is the only one."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([pidfd], [], [])
    os.close(pidfd)


def kill(rig: Rig) -> int:
    pid = rig.pid
    os.kill(pid, signal.SIGKILL)
    await_end(pid)
    return pid


def replaced(rig: Rig, before: int) -> Callable[[], bool]:
    plane: Any = rig.service.plane
    return lambda: plane.pid not in (None, before) and not plane._is_dead


# ---- when the plane dies


def test_after_one_death_the_store_goes_on_where_it_was(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    rig = start()
    rig.put(KEYS)
    os.kill(rig.pid, signal.SIGSTOP)
    rig.store.promote(KEYS[0])  # lost on the way
    rig.service.pump()
    before = kill(rig)
    rig.pump_until(replaced(rig, before))
    rig.settle()
    assert rig.get(KEYS[0]) is None
    assert all(rig.get(key) == value(key, rig.size) for key in KEYS[1:])
    rig.put(keys_of(10, "later"))
    assert rig.get(b"later-3") == value(b"later-3", rig.size)
    warnings = [
        r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "data plane" in r.getMessage()
    ]
    assert len(warnings) == 2, "it is gone; it was started again"
    assert rig.close(), "everything was flushed"


def test_what_is_asked_of_a_plane_that_died_idle_is_not_lost(start: Start) -> None:
    """Its chunks, and all that follow from them, are intact on disk."""
    rig = start()
    rig.put(KEYS)
    before = kill(rig)
    for key in KEYS:
        rig.store.promote(key)
    rig.pump_until(replaced(rig, before))
    rig.settle()
    assert all(rig.get(key) == value(key, rig.size) for key in KEYS)


def test_after_a_second_death_only_what_is_in_memory_hits(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    rig = start()
    rig.put(KEYS)
    assert rig.get(KEYS[1]) is not None
    for key in (KEYS[0], KEYS[2]):
        before = kill(rig)
        rig.store.promote(key)
        rig.pump_until(lambda before=before: rig.service.plane.is_lost or replaced(rig, before)())  # type: ignore[misc]
        rig.settle()
    rig.pump_until(lambda: rig.service.plane._process is None)  # type: ignore[attr-defined]
    assert rig.service.plane.is_lost
    assert [key for key in KEYS if rig.store.presence(key) is not Presence.ABSENT] == KEYS[:2]
    assert rig.get(KEYS[1]) == value(KEYS[1], rig.size)
    assert rig.begin_put(b"new") is None, "refused at once"
    assert sum(r.levelno == logging.ERROR for r in caplog.records) == 1
    rig.settle()
    assert all(owner.pins == 0 for owner in rig.store.arena.owners())
    rig.store.reset()
    assert not rig.service.write_epoch_now(30), "nobody can make it durable"


def test_reads_that_were_not_begun_when_the_disk_was_lost_are_misses(start: Start) -> None:
    rig = start()
    rig.put(KEYS)
    rig.store.promote(KEYS[0])
    rig.store.lose_disk()
    assert rig.store.resident(KEYS[0]) is None
    assert rig.get(KEYS[0]) is None
    assert rig.store.arena.free_units == rig.store.arena.unit_count


@pytest.mark.parametrize("seed", range(8))
def test_killed_at_any_moment_there_is_no_wrong_byte_and_no_hang(start: Start, seed: int) -> None:
    """Stores and loads side by side, two kills, at any command and any completion; then all of it once more."""
    chance = random.Random(seed)
    rig = start(engine=chance.choice(["auto", "posix"]))
    old = keys_of(40, "old")
    rig.put(old)
    steps = 120
    kills = sorted(chance.sample(range(steps), 2))
    for step in range(steps):
        if step in kills and rig.service.plane.pid is not None:  # type: ignore[attr-defined]
            rig.service.plane._process.kill()  # type: ignore[attr-defined]
        rig.begin_put(f"new-{step}".encode())
        key = chance.choice(old)
        if rig.store.presence(key) is Presence.ON_DISK:
            rig.store.promote(key)
        rig.service.pump()
        if chance.random() < 0.3:
            rig.service.wait(0.02)
        for resident in list(rig.store.arena.owners()):
            if resident.is_hit and not resident.forgotten:
                assert bytes(rig.slot(resident)) == value(resident.key, rig.size)
        if chance.random() < 0.2:
            rig.store.drop_slots()
    rig.settle()
    rig.pump_until(lambda: not rig.service.plane._late)  # type: ignore[attr-defined]
    assert all(owner.pins == 0 for owner in rig.store.arena.owners())
    everything = [*old, *(f"new-{step}".encode() for step in range(steps))]
    assert all(rig.get(key) in (None, value(key, rig.size)) for key in everything)
    rig.close()
    again = start()
    found = [again.get(key) for key in everything]
    assert all(bytes_ in (None, value(key, rig.size)) for key, bytes_ in zip(everything, found, strict=True))
    assert sum(bytes_ is not None for bytes_ in found[:40]) > 0


def test_slots_are_not_reused_before_the_dead_planes_io_is_over(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = start()
    rig.put(KEYS)
    over = False
    monkeypatch.setattr(quiet, "is_quiet", lambda path: over)
    rig.store.promote(KEYS[0])
    os.kill(rig.pid, signal.SIGSTOP)
    rig.service.pump()
    kill(rig)
    plane: Any = rig.service.plane
    rig.pump_until(lambda: plane._quiet is not None)
    rig.service.pump()
    assert not rig.store.busy, "the read has failed"
    assert [owner.can_evict() for owner in rig.store.arena.owners()] == [False], "but its slot is not free"
    over = True
    rig.pump_until(lambda: not plane._is_dead)
    assert rig.store.arena.free_units == rig.store.arena.unit_count


def test_a_plane_whose_last_io_hangs_is_lost_and_keeps_its_slots(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = start()
    rig.put(KEYS)
    monkeypatch.setattr(quiet, "is_quiet", lambda path: False)
    monkeypatch.setattr(remote, "MOURNING_S_MAX", 0.0)
    rig.store.promote(KEYS[0])
    os.kill(rig.pid, signal.SIGSTOP)
    rig.service.pump()
    kill(rig)
    rig.pump_until(lambda: rig.service.plane.is_lost)
    rig.service.pump()
    assert [owner.can_evict() for owner in rig.store.arena.owners()] == [False]
    assert rig.store.presence(KEYS[1]) is Presence.ABSENT
    monkeypatch.undo()
    rig.pump_until(lambda: rig.service.plane._process is None)  # type: ignore[attr-defined]
    assert rig.store.arena.free_units == rig.store.arena.unit_count, "they come back when it is over"


def test_a_plane_that_cannot_be_started_again_is_lost(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = start()
    rig.put(KEYS)

    def refuse(*_: Any) -> Any:
        raise PermissionError(errno.EPERM, "no fork today")

    monkeypatch.setattr(process_module, "_spawn", refuse)
    kill(rig)
    rig.store.promote(KEYS[0])
    rig.pump_until(lambda: rig.service.plane.is_lost)
    rig.settle()
    assert rig.get(KEYS[1]) is None


@pytest.mark.parametrize("what", [
    WireError("nonsense"),
    Done([Completion(10**9)], (0,) * 6),  # type: ignore[arg-type]
    Stop(1.0),
], ids=["undecodable", "of an unknown command", "not an answer"])  # fmt: skip
def test_a_plane_that_talks_nonsense_is_killed_and_replaced(
    start: Start, monkeypatch: pytest.MonkeyPatch, what: Any
) -> None:
    rig = start()
    rig.put(KEYS)
    before, plane = rig.pid, rig.service.plane

    def nonsense() -> Any:
        if isinstance(what, Exception):
            raise what
        return [what]

    monkeypatch.setattr(plane._process, "events", nonsense)  # type: ignore[attr-defined]
    rig.store.promote(KEYS[0])
    rig.pump_until(replaced(rig, before))
    await_end(before)
    assert rig.get(KEYS[1]) == value(KEYS[1], rig.size)


def test_a_result_before_a_nonsensical_one_counts(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    plane: Any = start().service.plane
    monkeypatch.setattr(plane._process.sender, "send", lambda _: None)
    plane.send([WriteEpoch(10**6, 0)])
    said = [Done([Completion(10**6), Completion(99)], (0,) * 6)]  # type: ignore[arg-type]
    monkeypatch.setattr(plane._process, "events", lambda: said)
    assert plane.completions() == [Completion(10**6)], "every command ends, and once"
    assert plane._is_dead
    assert not plane._out
    assert not plane._late


def test_results_of_another_shape_than_asked_for_are_nonsense(start: Start) -> None:
    plane: Any = start().service.plane
    item: Any = (4096, (100,), 1, 0)
    read = ReadChunks(1, (0, 0), (item, item))  # type: ignore[arg-type]
    for result in (Completion(1, verified=[True]), Completion(1, verified=[True] * 2, errors=[0])):
        plane._out[1] = (0.0, read)
        with pytest.raises(WireError, match="not its own"):
            plane._check(result)
    plane._out[1] = (0.0, read)
    plane._check(Completion(1, verified=[True, False]))
    with pytest.raises(WireError, match="was not out"):
        plane._check(Completion(1, verified=[True, False]))


def compressing(alignment: int = 4096) -> tuple[WritePack, Completion, Completion]:
    """A command that compresses, and what is said of it: its size, and its end."""
    segment = SegmentHeader(alignment, 1 << 20, 5, 99, 0, bytes(32))
    chunks = tuple(PackChunk(unit, (4 * alignment,), b"%d" % unit, b"", 0, 0) for unit in (0, 4))
    command = WritePack(1, SegmentFile(0, 0), segment, alignment, 1, chunks, compress=True)
    takes = [Footprint(4 * alignment, 4 * alignment, 4)] * 2
    entries = pack_entries(chunks, takes, [7, 8], alignment)
    size = pack_size([4 * alignment] * 2, alignment)
    raw = layout.encode_pack(layout.Pack(alignment, alignment, size, 1, entries), segment)
    return command, Completion(1, packed_bytes=size), Completion(1, pack_header=raw, checksums=[7, 8])


def header_with(command: WritePack, raw: bytes, **changed: int) -> bytes:
    """A header as whole as that one, with other numbers in its first entry."""
    pack = layout.decode_pack(raw, command.offset, command.header)
    assert pack is not None
    entries = pack.entries.copy()
    for name, number in changed.items():
        entries[name][0] = number
    return layout.encode_pack(pack._replace(entries=entries), command.header)


def test_a_pack_whose_size_cannot_be_is_nonsense_and_its_command_stays_out(start: Start) -> None:
    plane: Any = start().service.plane
    command, sized, end = compressing()
    plane._out[1] = (0.0, command)
    planned = sized.packed_bytes
    for size in (planned + 4096, planned - 1, 2 * 4096, -4096):
        with pytest.raises(WireError, match="none of its chunks"):
            plane._check(Completion(1, packed_bytes=size))
    plane._check(sized)
    with pytest.raises(WireError, match="has a size"):
        plane._check(sized)
    plane._check(end)
    assert not plane._out


@pytest.mark.parametrize("spoil", [
    lambda command, raw: b"\0" * len(raw),
    lambda command, raw: raw[:-1],
    lambda command, raw: raw + bytes(layout.ENTRY_BYTES),
    lambda command, raw: header_with(command, raw, stored_bytes=4096),
    lambda command, raw: header_with(command, raw, codec=200),
    lambda command, raw: header_with(command, raw, codec=1),
], ids=["none", "cut off", "too long", "small without a codec", "unknown codec", "as large with one"])  # fmt: skip
def test_a_pack_header_that_is_not_its_commands_is_nonsense_and_the_command_stays_out(
    start: Start, spoil: Callable[[WritePack, bytes], bytes]
) -> None:
    plane: Any = start().service.plane
    command, sized, end = compressing()
    plane._out[1] = (0.0, command)
    plane._check(sized)
    with pytest.raises(WireError, match="not its own"):
        plane._check(Completion(1, pack_header=spoil(command, end.pack_header), checksums=[7, 8]))
    assert 1 in plane._out, "or nobody would ever hear that it ended"


@pytest.mark.parametrize("extra", [{}, {"error": errno.EIO, "settled": True}])
def test_late_without_an_error_or_already_settled_is_nonsense(start: Start, extra: dict[str, Any]) -> None:
    plane: Any = start().service.plane
    plane._out[1] = plane._late[1] = (0.0, compressing()[0])
    with pytest.raises(WireError, match="is late, but"):
        plane._check(Completion(1, late=True, **extra))
    plane._late.clear()


def test_what_came_before_the_nonsense_in_one_message_and_what_it_was_about_both_end(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = start()
    rig.put(KEYS)
    before, plane = rig.pid, rig.service.plane
    seen: list[Completion] = []
    real = rig.store.complete
    monkeypatch.setattr(rig.store, "complete", lambda one, now: (seen.append(one), real(one, now)))
    rig.store.promote(KEYS[0])
    rig.store.promote(KEYS[-1])
    rig.service.pump()
    numbers = list(plane._out)  # type: ignore[attr-defined]
    assert len(numbers) == 2
    said = [Completion(numbers[0], verified=[False]), Completion(numbers[1], verified=[True] * 5)]
    monkeypatch.setattr(plane._process, "events", lambda: [Done(said, (0,) * 6)])  # type: ignore[attr-defined, arg-type]
    rig.pump_until(replaced(rig, before))
    rig.settle()
    assert {one.id for one in seen} >= set(numbers)
    assert not rig.store.busy
    assert rig.get(KEYS[1]) == value(KEYS[1], rig.size)


def test_a_plane_without_a_word_for_long_is_dead(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = start()
    rig.put(KEYS)
    before = rig.pid
    os.kill(before, signal.SIGSTOP)
    rig.store.promote(KEYS[0])
    rig.service.pump()
    monkeypatch.setattr(remote, "_SILENCE_S", -1e9)
    rig.service.pump()
    monkeypatch.undo()
    rig.pump_until(replaced(rig, before))
    await_end(before)
    assert rig.get(KEYS[1]) == value(KEYS[1], rig.size)


def test_silence_is_what_was_listened_to(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Owner and plane may have been paused together, or the owner have been busy: its word may be on the way."""
    rig = start()
    rig.put(KEYS)
    plane: Any = rig.service.plane
    now = time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: now, sleep=time.sleep)
    monkeypatch.setattr(remote, "time", clock)
    os.kill(rig.pid, signal.SIGSTOP)
    rig.store.promote(KEYS[0])
    rig.service.pump()
    for _ in range(3):
        now += 1e6
        rig.service.pump()
        assert not plane._is_dead
    seconds = 0
    while not plane._is_dead:
        now += 1.0
        seconds += 1
        rig.service.pump()
    assert 120 < seconds < 140, "whoever listens all the time hears it in time"


# ---- signals, sockets, sandboxes


def test_signals_to_the_group_are_the_owners_to_act_on(start: Start) -> None:
    rig = start()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(rig.pid, number)
    before = rig.pid
    rig.put(KEYS)
    assert all(rig.get(key) == value(key, rig.size) for key in KEYS)
    assert rig.pid == before


def test_signals_before_the_process_is_up_do_not_end_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = process_module._spawn

    def spawn_and_interrupt(*arguments: Any) -> Any:
        started = spawn(*arguments)
        for number in (signal.SIGINT, signal.SIGTERM):
            started.send_signal(number)
        return started

    monkeypatch.setattr(process_module, "_spawn", spawn_and_interrupt)
    rig = Rig(root)
    assert isinstance(rig.service.plane, ProcessPlane)
    rig.put(KEYS[:1])
    rig.close()


def test_a_full_socket_delays_commands_and_not_the_owner(start: Start) -> None:
    rig = start()
    rig.put(KEYS)
    plane: Any = rig.service.plane
    plane._process.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    os.kill(rig.pid, signal.SIGSTOP)
    many = [WriteEpoch(10**6 + number, 0) for number in range(5000)]
    for at in range(0, len(many), 10):
        plane.send(many[at : at + 10])
        plane._receive()
    assert plane._process.sender.backlog_bytes > 0
    os.kill(rig.pid, signal.SIGCONT)
    came: list[Completion] = []
    while len(came) < len(many):
        plane.wait(0.05)
        came += plane.completions()
    assert {completion.id for completion in came} == {command.id for command in many}
    assert not any(completion.error for completion in came)
    assert rig.get(KEYS[0]) == value(KEYS[0], rig.size)


def test_garbage_from_the_owner_ends_the_process(start: Start) -> None:
    rig = start()
    before = rig.pid
    rig.service.plane._process.socket.send(b"\x05\x00\x00\x00hello")  # type: ignore[attr-defined]
    await_end(before)
    rig.begin_put(b"key")
    rig.pump_until(replaced(rig, before))


def test_without_processes_there_is_a_thread_and_one_warning(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise PermissionError(errno.EPERM, "no fork today")

    monkeypatch.setattr(process_module, "_spawn", refuse)
    rig = Rig(root)
    rig.put(KEYS)
    assert rig.get(KEYS[0]) == value(KEYS[0], rig.size)
    assert sum("no fork today" in record.getMessage() for record in caplog.records) == 1
    rig.close()


def test_a_process_that_dies_at_its_start_is_replaced_by_a_thread(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_module, "_MAIN", "raise SystemExit(7)")
    rig = Rig(root)
    rig.put(KEYS[:1])
    assert "exit code 7" in caplog.text
    rig.close()


def test_the_process_imports_neither_torch_nor_vllm_and_runs_the_owners_kvdisk(start: Start, tmp_path: Path) -> None:
    mapped = {Path(line.split()[-1]).name for line in Path(f"/proc/{start().pid}/maps").read_text().splitlines()}
    # not their packages' directories: on CPUs vLLM puts the libgomp beside torch into its children's LD_PRELOAD
    assert not [name for name in mapped if name.startswith(("libtorch", "libc10", "_C."))]
    script = "import sys, kvdisk.plane.child; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(kvdisk.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    top = {name.partition(".")[0] for name in done.stdout.split()}
    assert not top & {"torch", "vllm", "click", "rich", "multiprocessing"}


def test_nothing_is_imported_from_the_current_directory(root: Path, tmp_path: Path, monkeypatch: Any) -> None:
    trap = tmp_path / "trap"
    trap.mkdir()
    for name in ("json", "kvdisk", "asyncio", "numpy"):
        (trap / f"{name}.py").write_text("raise SystemExit('a stranger was imported')")
    monkeypatch.chdir(trap)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".")])
    rig = Rig(root)
    assert isinstance(rig.service.plane, ProcessPlane)
    rig.close()


def test_many_rounds_leave_neither_descriptors_nor_processes_nor_threads(root: Path) -> None:
    def state() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    Rig(root, engine="posix").close()
    before = state()
    pids = []
    for _ in range(50):
        rig = Rig(root, engine="posix")
        pids.append(rig.pid)
        assert rig.close()
    assert state() == before
    assert not any(Path(f"/proc/{pid}/task").exists() for pid in pids)
    assert not process_module._unburied


# ---- when the owner dies

OWNER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.planes import Rig, keys_of
rig = Rig(Path(sys.argv[2]))
rig.put(keys_of(30))
for number in range(200):  # these are on their way when the end comes
    rig.begin_put(b"late-%d" % number)
    rig.service.pump()
child = os.fork() if sys.argv[3] == "fork" else -1
if child == 0:  # keeps the socket, the locks and the arena open, as a worker that was forked later would
    os.close(1)
    sys.stdin.read()
    os._exit(0)
print(rig.pid, os.path.basename(rig.service.instance_paths[0]), flush=True)
sys.stdin.read()
"""


def own(root: Path, how: str = "") -> "tuple[subprocess.Popen[str], int]":
    """An owner in another process, and its plane's pid."""
    project = str(Path(__file__).parents[1])
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, project, str(root), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid, instance = owner.stdout.readline().split()
    assert instance == "dp0"
    return owner, int(pid)


def test_a_killed_owner_takes_its_plane_along_and_the_next_gets_its_instance_and_data(root: Path, start: Start) -> None:
    owner, pid = own(root)
    owner.kill()
    owner.wait()
    rig = start()  # at once: the plane may still be finishing
    assert rig.service.instance_paths[0].endswith("dp0"), "its own, not a spare with an empty cache"
    assert all(rig.get(key) == value(key, rig.size) for key in KEYS)
    assert all(rig.get(key) in (None, value(key, rig.size)) for key in keys_of(200, "late"))
    await_end(pid)
    owner.communicate()


@pytest.fixture
def server() -> Iterator[child._Server]:
    """Of this process's parent, so that the owner lives as long as the test; not running yet."""
    loop = asyncio.new_event_loop()
    mine, theirs = socket.socketpair()
    handlers = list(logging.getLogger().handlers)

    async def make() -> child._Server:
        return child._Server(theirs, os.getppid())

    with mine, theirs:
        theirs.setblocking(False)
        yield loop.run_until_complete(make())
        logging.getLogger().handlers[:] = handlers
    loop.close()


def test_reads_of_an_opening_that_is_given_up_end_before_the_engine_does(server: child._Server) -> None:
    """Nobody would reap them then, and the process would keep its locks until their deadlines."""
    order: list[str] = []

    class Fake:
        async def stop(self, timeout_s: float) -> bool:
            order.append("engine closed")
            return True

    async def read(turns: int) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            for _ in range(turns):  # the kernel takes its time
                await asyncio.sleep(0)
            order.append(f"read {turns}")
            raise

    async def opening() -> None:
        server._backend = Fake()  # type: ignore[assignment]
        server._loop.call_soon(server._over.set)
        await asyncio.gather(read(3), read(30))

    server._serve_opening = opening  # type: ignore[method-assign]
    server._loop.run_until_complete(server.run())
    assert order == ["read 3", "read 30", "engine closed"]


def test_an_opening_that_hangs_leaves_the_engine_open(server: child._Server) -> None:
    async def opening() -> None:
        server._backend = None
        server._loop.call_soon(server._over.set)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    server._serve_opening = opening  # type: ignore[method-assign]
    server._stop_s = 0.0
    sent: list[Any] = []
    server._send = sent.append  # type: ignore[method-assign]
    server._loop.run_until_complete(server.run())
    assert [event.idle for event in sent] == [False]
    for task in asyncio.all_tasks(server._loop):
        task.cancel()
    server._loop.run_until_complete(asyncio.sleep(0))


def test_without_pidfds_the_owner_is_watched_all_the_same(
    server: child._Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.setattr(os, "getppid", lambda: 1)
    server._watch_owner()
    assert server._over.is_set()


def test_a_forked_child_of_the_owner_does_not_keep_the_plane(root: Path) -> None:
    owner, pid = own(root, "fork")
    owner.kill()
    owner.wait()
    await_end(pid)
    owner.communicate()


def test_a_forked_child_that_ends_does_not_disturb_the_plane(start: Start) -> None:
    rig = start()
    rig.put(KEYS)
    child = os.fork()
    if child == 0:
        try:
            rig.service.close()
            rig.service.plane._process.socket.close()  # type: ignore[attr-defined]
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert all(rig.get(key) == value(key, rig.size) for key in KEYS)


# ---- what crosses


def test_a_message_that_is_too_long_is_not_waited_for() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.setblocking(False)
        theirs.send(b"\xff\xff\xff\x7f")
        with pytest.raises(WireError, match="a message of 2147483647 bytes"):
            Receiver(mine, frame_bytes_max=1 << 20).receive()


@pytest.mark.parametrize(
    "payload", [b"", b"\x00", b"\xc1", b"\x91\xa2Do", b"\x92\xa2Do\x91\x91\x01", bytes(range(128, 192))]
)
def test_what_does_not_decode_is_an_error_of_the_wire(payload: bytes) -> None:
    for decode in (decode_request, decode_event):
        with pytest.raises(WireError):
            decode(payload)


def test_messages_cross_whole_whatever_the_pieces() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        for one in (mine, theirs):
            one.setblocking(False)
        sender, receiver = Sender(mine), Receiver(theirs, frame_bytes_max=8 << 20)
        texts = ["x" * size for size in (0, 1, 300_000, 5_000_000, 7)]
        came: list[str] = []
        for text in texts:
            sender.send(Log(10, text))
        while len(came) < len(texts):
            sender.flush()
            came += [decode_event(payload).text for payload in receiver.receive()]  # type: ignore[union-attr]
        assert came == texts
        assert sender.backlog_bytes == 0
        mine.close()
        assert receiver.receive() == []
        assert receiver.ended


def test_a_file_is_quiet_when_nobody_can_write_to_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    if not has_leases(path):
        pytest.skip("no leases on this file system")
    assert quiet.is_quiet(str(path)) is True
    with path.open("r+b"):
        assert quiet.is_quiet(str(path)) is False
    assert quiet.is_quiet(str(path)) is True
    assert quiet.is_quiet(str(tmp_path / "missing")) is None


@pytest.mark.parametrize("call", ["open", "fcntl"])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EMFILE, errno.ENFILE, errno.ESTALE])
def test_a_file_of_which_nobody_can_tell_is_never_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """EINVAL: NFS has no leases. EMFILE: this process is out of descriptors."""
    path = tmp_path / "file"
    path.write_bytes(b"x")

    def refuse(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(*(quiet.os, "open") if call == "open" else (quiet.fcntl, "fcntl"), refuse)
    monkeypatch.setattr(quiet, "_GRACE_S", 0.0)
    assert quiet.is_quiet(str(path)) is False
    looks = [0]
    monkeypatch.setattr(quiet, "is_quiet", lambda path: looks.append(0) or False)
    monkeypatch.setattr(quiet, "_POLL_S_MAX", quiet._POLL_S_MIN)
    waiting = quiet.Quiet([str(path)])
    while len(looks) < 5:
        waiting._thread.join(0.01)
    assert not waiting.reached
    waiting.stop()
    waiting._thread.join()
    assert not waiting.reached, "whoever stops asking was not told yes"


def test_a_file_that_is_never_quiet_is_asked_about_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(quiet, "is_quiet", lambda path: False)
    waiting = quiet.Quiet([])
    waiting._paths = {"file"}

    def wait(timeout_s: float) -> bool:
        waits.append(timeout_s)
        if len(waits) == 100:
            waiting.stop()
        return True

    monkeypatch.setattr(waiting._stopped, "wait", wait)
    waiting._run()
    assert len(waits) == 100
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (0.005, 1.0)


def test_commands_survive_the_way() -> None:
    commands = [WriteEpoch(1, 2), ReadChunks(3, (0, 1), ())]  # type: ignore[arg-type]
    mine, theirs = socket.socketpair()
    with mine, theirs:
        Sender(mine).send(Do(commands))  # type: ignore[arg-type]
        (payload,) = Receiver(theirs, frame_bytes_max=1 << 20).receive()
    assert decode_request(payload) == Do(commands)  # type: ignore[arg-type]
