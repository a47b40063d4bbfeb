"""Roots, instances, locks and the cap: who may take what, and whose files are never touched."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import kvdisk
from kvdisk import directory as directory_module
from kvdisk import instance as instance_module
from kvdisk import layout
from kvdisk.directory import OVERHEAD_BYTES, Claim, Directory, check_root, segment_cost
from kvdisk.errors import DirectoryInUseError
from kvdisk.instance import LEDGER

KIB, MIB = 1 << 10, 1 << 20
NAMES = ["ns-" + letter * 32 for letter in "abc"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


def claim(root: Path, *, namespace: str = NAMES[0], instances: tuple[str, ...] = ("main",), cap: int = 10 * MIB,
          share: int | None = None, needed: int = MIB, shared: bool = False) -> Claim:  # fmt: skip
    return Claim(str(root), namespace, {"model": "m"}, instances, cap, cap if share is None else share, needed, shared)


def write_file(size: int, byte: bytes = b"x"):  # type: ignore[no-untyped-def]
    def create(path: str) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(fd, byte * size)
        return fd

    return create


def add_segment(directory: Directory, number: int, size: int = MIB) -> None:
    os.close(directory.create_segment(number, segment_cost(size), write_file(size)))


# ---- roots that are refused


@pytest.mark.parametrize("kind, text", [("missing", "mkdir -m 700"), ("file", "not a directory"), ("foreign", "empty")])
def test_a_root_that_cannot_be_used_is_refused_with_the_remedy_and_left_alone(root: Path, kind: str, text: str) -> None:
    path = root / kind
    if kind == "file":
        path.write_text("mine")
    elif kind == "foreign":
        path.mkdir(mode=0o700)
        (path / "thesis.tex").write_text("mine")
    before = sorted(root.rglob("*"))
    with pytest.raises(ValueError, match=text) as caught:
        Directory(claim(path))
    assert str(path) in str(caught.value)
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_root_that_others_can_write_to_is_refused_unless_allowed(root: Path, mode: int) -> None:
    root.chmod(mode)
    with pytest.raises(ValueError, match="mkdir -m 700"):
        check_root(str(root), allow_shared_root=False)
    Directory(claim(root, shared=True)).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_root_of_another_user_is_refused_unless_allowed(root: Path) -> None:
    os.chown(root, 12345, 12345)
    with pytest.raises(ValueError, match="uid 12345"):
        check_root(str(root), allow_shared_root=False)
    Directory(claim(root, shared=True)).close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_root_that_is_not_writable_is_refused(root: Path) -> None:
    root.chmod(0o500)
    with pytest.raises(ValueError, match="not writable"):
        check_root(str(root), allow_shared_root=False)


def test_lost_and_found_and_our_own_files_are_not_foreign(root: Path) -> None:
    (root / "lost+found").mkdir()
    Directory(claim(root)).close()
    (root / "note").write_text("put here later")
    Directory(claim(root)).close()


@pytest.mark.parametrize("what", ["namespace", "instance", "lock", "ledger", "epoch"])
def test_a_planted_link_is_refused_and_what_it_points_to_is_untouched(root: Path, tmp_path: Path, what: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    target = outside / "precious"
    target.write_text("precious")
    (root / LEDGER).write_text("")
    namespace = root / NAMES[0]
    if what == "ledger":
        (root / LEDGER).unlink()
        (root / LEDGER).symlink_to(target)
        (root / NAMES[1]).mkdir()
    elif what == "namespace":
        namespace.symlink_to(outside)
    else:
        namespace.mkdir(mode=0o700)
        if what == "instance":
            (namespace / "main").symlink_to(outside)
        else:
            (namespace / "main").mkdir(mode=0o700)
            (namespace / ("epoch" if what == "epoch" else "main/lock")).symlink_to(target)
    with pytest.raises((ValueError, OSError)), contextlib.closing(Directory(claim(root))) as directory:
        directory.write_epoch(1)
    assert target.read_text() == "precious"
    assert os.listdir(outside) == ["precious"]
    assert outside.stat().st_mode & 0o777 == 0o755


def test_modes_are_private_under_any_umask(root: Path) -> None:
    before = os.umask(0)
    try:
        directory = Directory(claim(root))
        directory.write_epoch(3)
        directory.close()
    finally:
        os.umask(before)
    modes = {path.relative_to(root).as_posix(): path.stat().st_mode & 0o777 for path in root.rglob("*")}
    files = {LEDGER, *(f"{NAMES[0]}/{name}" for name in ("namespace.json", "epoch", "main/lock"))}
    assert {name for name, mode in modes.items() if mode == 0o600} == files
    assert {name for name, mode in modes.items() if mode == 0o700} == {NAMES[0], f"{NAMES[0]}/main"}
    assert len(modes) == 6


# ---- owners

HOLD = """
import sys
from kvdisk.directory import Claim, Directory
root, namespace, share = sys.argv[1], sys.argv[2], int(sys.argv[3])
directory = Directory(Claim(root, namespace, {}, ("main", "other"), 10 << 20, share, 1 << 20))
print(directory.instance, directory.granted_bytes, flush=True)
sys.stdin.read()
"""


def hold(root: Path, namespace: str = NAMES[0], share: int = 10 * MIB) -> "subprocess.Popen[str]":
    """Another process that owns an instance until its standard input ends or it is killed."""
    environment = {**os.environ, "PYTHONPATH": str(Path(kvdisk.__file__).parents[1])}
    command = [sys.executable, "-c", HOLD, str(root), namespace, str(share)]
    child = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.said = child.stdout.readline().split()  # type: ignore[attr-defined]
    return child


def end(child: "subprocess.Popen[str]", *, kill: bool = False) -> None:
    if kill:
        child.send_signal(signal.SIGKILL)
    child.communicate()


def test_an_instance_in_use_is_refused_with_the_pid_and_free_after_sigkill(root: Path) -> None:
    child = hold(root, share=4 * MIB)
    try:
        with pytest.raises(DirectoryInUseError, match=f"pid {child.pid}"):
            Directory(claim(root))
    finally:
        end(child, kill=True)
    directory = Directory(claim(root))
    assert directory.instance == "main", "a restart finds its own instance"
    assert directory.granted_bytes == 10 * MIB, "a dead owner's grant is void"
    directory.close()


LINGER = """
import os, sys
from kvdisk.directory import Claim, Directory
directory = Directory(Claim(sys.argv[1], sys.argv[2], {}, ("main", "other"), 10 << 20, 5 << 20, 1 << 20))
if os.fork() == 0:  # as a data plane that was lent the lock
    sys.stdin.read()
    os._exit(0)
print(directory.instance, flush=True)
os.kill(os.getpid(), 9)
"""


def linger(root: Path) -> "subprocess.Popen[str]":
    """What is left of a killed owner: its lock, held until the standard input of this ends."""
    environment = {**os.environ, "PYTHONPATH": str(Path(kvdisk.__file__).parents[1])}
    command = [sys.executable, "-c", LINGER, str(root), NAMES[0]]
    child = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline().split() == ["main"]
    child.wait()
    return child


def test_a_lock_that_outlasts_its_owner_is_waited_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = linger(root)

    def look_again(seconds: float) -> None:
        child.communicate()  # the lingering one ends; its standard output, too

    monkeypatch.setattr(directory_module.time, "sleep", look_again)
    directory = Directory(claim(root, instances=("main", "other")))
    assert directory.instance == "main", "a restart finds its own instance"
    assert not directory.closed_cleanly
    directory.close()


def test_a_lock_that_outlasts_its_owner_for_long_is_passed_over(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = linger(root)
    monkeypatch.setattr(directory_module, "LINGER_S_MAX", 0.0)
    directory = Directory(claim(root, instances=("main", "other"), share=5 * MIB))
    assert directory.instance == "other"
    child.communicate()
    directory.close()


def test_a_lent_lock_keeps_others_out_after_its_owner_left(root: Path) -> None:
    directory = Directory(claim(root))
    lent = os.dup(directory.lock_fd)
    directory.leave()
    with pytest.raises(DirectoryInUseError):
        Directory(claim(root))
    os.close(lent)
    again = Directory(claim(root))
    assert not again.closed_cleanly
    again.close()


def test_a_second_engine_takes_the_next_instance_and_what_is_left(root: Path) -> None:
    child = hold(root, share=4 * MIB)
    try:
        directory = Directory(claim(root, instances=("main", "other")))
        assert (directory.instance, directory.granted_bytes) == ("other", 6 * MIB)
        with pytest.raises(DirectoryInUseError, match=f"0 B of 10 MiB left.*pid {child.pid} has 4 MiB"):
            Directory(claim(root, namespace=NAMES[1]))
        directory.close()
        Directory(claim(root, namespace=NAMES[1])).close()
    finally:
        end(child)


def test_a_cap_below_what_is_needed_is_the_callers_mistake(root: Path) -> None:
    with pytest.raises(ValueError, match="raise disk_bytes_to_use"):
        Directory(claim(root, cap=MIB, needed=2 * MIB))
    Directory(claim(root)).close()


def test_close_gives_back_lock_and_grant_and_is_idempotent(root: Path) -> None:
    first = Directory(claim(root))
    first.close()
    first.close()
    second = Directory(claim(root))
    assert list(json.loads((root / LEDGER).read_text())["grants"]) == [f"{NAMES[0]}/main"]
    second.close()
    assert json.loads((root / LEDGER).read_text())["grants"] == {}


@pytest.mark.parametrize("step", [
    lambda directory: Directory(claim(Path(directory.root), namespace=NAMES[1])),
    lambda directory: directory.trim_to_cap(),
    lambda directory: directory.write_epoch(1),
], ids=["claim", "trim", "epoch"])  # fmt: skip
def test_nobody_who_opens_a_store_waits_for_ever_for_a_process_that_hangs_with_the_ledger(
    root: Path, monkeypatch: pytest.MonkeyPatch, step: Callable[[Directory], object]
) -> None:
    """It would be an engine's scheduler that waits."""
    monkeypatch.setattr(directory_module, "LEDGER_S_MAX", 0.0)
    monkeypatch.setattr(instance_module, "LEDGER_S_MAX", 0.0)
    directory = Directory(claim(root))
    with open(root / LEDGER) as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="the ledger is locked"):
            step(directory)
    directory.close()


@pytest.mark.parametrize("garbage", [
    b"", b"\xff\xfe\x00garbage\x80", b"null", b"[]", b'{"grants": 3}', b'{"grants": {"x": 1}}', b"[" * 100_000,
    b'{"grants": {"../../etc/passwd": {"bytes": 1, "pid": 1}}}', b'{"grants": {"a": {"bytes": -5, "pid": 1}}}',
    b'{"grants": {"ns-' + b"a" * 32 + b'/main": {"bytes": 1e400, "pid": "x"}}}', b"{" + b" " * (2 << 20), b"9" * 10_000,
], ids=lambda raw: repr(raw[:20]))  # fmt: skip
def test_any_ledger_is_tolerated_and_live_owners_keep_their_locks(root: Path, garbage: bytes) -> None:
    child = hold(root, share=4 * MIB)
    try:
        (root / LEDGER).write_bytes(garbage)
        with pytest.raises(DirectoryInUseError):
            Directory(claim(root))
        directory = Directory(claim(root, namespace=NAMES[1], share=MIB))
        add_segment(directory, 0, 256 * KIB)
        directory.close()
        json.loads((root / LEDGER).read_text())
    finally:
        end(child)


def test_a_lock_file_full_of_garbage_is_still_a_lock_file(root: Path) -> None:
    Directory(claim(root)).close()
    (root / NAMES[0] / "main" / "lock").write_bytes(b"\xff" * 100)
    Directory(claim(root)).close()


# ---- bytes


def test_two_namespaces_under_one_cap_never_exceed_it_together(root: Path) -> None:
    first, second = Directory(claim(root, share=5 * MIB)), Directory(claim(root, namespace=NAMES[1], share=5 * MIB))
    refused = 0
    for number in range(8):
        for directory in (first, second):
            try:
                add_segment(directory, number)
            except OSError:
                refused += 1
            assert first.used_bytes() <= 10 * MIB
    assert refused >= 6
    assert len(first.segment_numbers()) + len(second.segment_numbers()) == 16 - refused
    first.close()
    second.close()


def test_dead_owners_data_makes_way_oldest_first_and_live_owners_does_not(root: Path) -> None:
    dead, live = Directory(claim(root, share=4 * MIB)), Directory(claim(root, namespace=NAMES[1], share=3 * MIB))
    for number in range(4):
        add_segment(dead, number)
        os.utime(dead.segment_path(number), (1000 - number, 1000 - number))  # the highest number is the oldest
    add_segment(live, 0)
    add_segment(live, 1)
    os.utime(live.segment_path(0), (1, 1))
    dead.close()
    new = Directory(claim(root, namespace=NAMES[2], share=3 * MIB, cap=8 * MIB))
    add_segment(new, 0)
    assert dead.segment_numbers() == [0, 1, 2, 3]
    add_segment(new, 1)
    assert dead.segment_numbers() == [0, 1, 2]
    add_segment(new, 2)
    assert dead.segment_numbers() == [0, 1]
    assert live.segment_numbers() == [0, 1]
    assert new.used_bytes() <= 8 * MIB
    live.close()
    new.close()


def test_foreign_files_are_neither_counted_nor_removed(root: Path) -> None:
    dead = Directory(claim(root))
    for number in range(3):
        add_segment(dead, number)
    dead.close()
    foreign = [root / "x.seg", dead.namespace_path + "/00000009.seg", dead.instance_path + "/backup.tar",
               dead.instance_path + "/1.seg", dead.instance_path + "/000000001.seg"]  # fmt: skip
    for path in foreign:
        Path(path).write_bytes(bytes(MIB))
    directory = Directory(claim(root, namespace=NAMES[1], cap=4 * MIB, needed=0))
    assert directory.used_bytes() < 3 * MIB + OVERHEAD_BYTES * 2
    add_segment(directory, 0)
    add_segment(directory, 1)
    assert len(dead.segment_numbers()) < 3
    assert all(Path(path).stat().st_size == MIB for path in foreign)
    directory.close()


def test_a_lowered_cap_is_reached_by_trimming_the_dead(root: Path) -> None:
    dead = Directory(claim(root))
    for number in range(6):
        add_segment(dead, number)
    dead.close()
    directory = Directory(claim(root, namespace=NAMES[1], cap=3 * MIB))
    directory.trim_to_cap()
    assert directory.used_bytes() <= 3 * MIB
    assert len(dead.segment_numbers()) == 2
    directory.close()


def test_a_failed_creation_is_passed_on_and_takes_nothing(root: Path) -> None:
    directory = Directory(claim(root))

    def fail(path: str) -> int:
        raise OSError(5, "no", path)

    before = directory.used_bytes()
    with pytest.raises(OSError, match="no"):
        directory.create_segment(0, MIB, fail)
    assert directory.used_bytes() == before
    directory.close()


async def test_a_cap_lowered_between_runs_holds_after_the_start_and_keeps_the_newest(root: Path) -> None:
    options = {"arena_bytes": 4 * MIB, "segment_bytes": MIB, "engine": "posix"}
    async with kvdisk.open(root, capacity=12 * MIB, **options) as store:
        for number in range(50):
            await store.put(b"%d" % number, bytes([number]) * 180_000)
        assert await store.flush()
    async with kvdisk.open(root, capacity=5 * MIB, **options) as store:
        assert sum(path.lstat().st_blocks * 512 for path in [root, *root.rglob("*")]) <= 5 * MIB
        hits = [number for number in range(50) if await store.get(b"%d" % number) == bytes([number]) * 180_000]
        assert len(hits) >= 10
        assert hits[-1] == 49
        assert hits == list(range(hits[0], 50)), "the oldest went"


def test_numbers_taken_by_another_root_are_renamed(root: Path) -> None:
    directory = Directory(claim(root))
    for number in (0, 1, 5):
        add_segment(directory, number, 64 * KIB)
    assert sorted(directory.make_unique({1, 7})) == [0, 5, 8]
    assert directory.segment_numbers() == [0, 5, 8]
    directory.close()


# ---- the epoch


def epoch_of(directory: Directory) -> int | None:
    record = directory.read_epoch()
    return None if record is None else record.epoch


def test_instances_of_a_namespace_share_its_epoch(root: Path) -> None:
    first = Directory(claim(root, instances=("dp0", "dp0-1"), share=5 * MIB))
    second = Directory(claim(root, instances=("dp0", "dp0-1"), share=5 * MIB))
    assert (first.instance, second.instance) == ("dp0", "dp0-1")
    second.write_epoch(1)
    assert epoch_of(first) == 1
    first.close()
    second.close()


def test_the_end_of_a_reset_is_noted_once_and_not_by_settling(root: Path) -> None:
    directory = Directory(claim(root))
    directory.write_epoch(4)
    assert directory.read_epoch() == (4, 0, True)
    directory.write_epoch(5, after_reset=False)
    directory.write_epoch(5, after_reset=False)
    assert directory.read_epoch() == (5, 1, False)
    directory.close()


def test_an_epoch_is_found_again_and_never_goes_back(root: Path) -> None:
    directory = Directory(claim(root))
    assert epoch_of(directory) == 0
    for epoch in (1, 2, 5, 3, 6):
        directory.write_epoch(epoch)
        assert epoch_of(directory) == max(epoch, 5 if epoch == 3 else 0)
    threads = [threading.Thread(target=directory.write_epoch, args=(epoch,)) for epoch in range(40, 6, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert epoch_of(directory) == 40
    directory.close()


@pytest.mark.parametrize("writes, slot", [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (4, 1)])
def test_a_damaged_epoch_record_is_never_taken_for_an_older_epoch(root: Path, writes: int, slot: int) -> None:
    directory = Directory(claim(root))
    for epoch in range(1, writes + 1):
        directory.write_epoch(epoch)
    path = Path(directory.namespace_path) / "epoch"
    raw = bytearray(path.read_bytes())
    raw[slot * layout.ALIGNMENT_MIN + 24] ^= 1
    path.write_bytes(raw)
    assert directory.read_epoch() is None
    directory.write_epoch(writes + 1)
    assert epoch_of(directory) == writes + 1, "writing mends it"
    directory.close()


@pytest.mark.parametrize("length", [0, 1, 39, 4096 + 1, 4096 + 39])
def test_a_torn_first_or_second_epoch_record_means_unknown(root: Path, length: int) -> None:
    directory = Directory(claim(root))
    directory.write_epoch(1)
    directory.write_epoch(2)
    path = Path(directory.namespace_path) / "epoch"
    os.truncate(path, length)
    with open(path, "r+b") as file:
        file.seek(max(0, length - 30))
        file.write(bytes(30))
    assert directory.read_epoch() is None
    directory.close()


async def test_what_a_reset_disowned_stays_disowned_whatever_became_of_its_record(root: Path) -> None:
    options = {"capacity": 12 * MIB, "arena_bytes": 4 * MIB, "segment_bytes": MIB, "engine": "posix"}
    async with kvdisk.open(root, **options) as store:
        await store.put(b"old", b"old weights")
        await store.flush()
        service = store._running
        service.store.reset()
        await store.put(b"new", b"weights that the server got while it ran")
        assert await store.flush()
        assert await store.get(b"new") is not None
    (epoch,) = root.glob("ns-*/epoch")
    epoch.unlink()  # as if the machine had died before the record was durable
    async with kvdisk.open(root, **options) as store:
        assert await store.get(b"old") is None
        await store.put(b"newer", b"newer weights")
    assert epoch.exists()
    async with kvdisk.open(root, **options) as store:
        assert await store.get(b"newer") == b"newer weights"
    epoch.write_bytes(b"damage" * 1000)
    async with kvdisk.open(root, **options) as store:
        assert await store.get(b"newer") is None
        await store.put(b"newest", b"newest weights")
    async with kvdisk.open(root, **options) as store:
        assert await store.get(b"newest") == b"newest weights"
        assert await store.get(b"newer") is None


async def test_what_was_stored_after_a_reset_ends_with_the_process(root: Path) -> None:
    """The weights may have been updated; a restart loads the model's files again, under the same name."""
    options = {"capacity": 12 * MIB, "arena_bytes": 4 * MIB, "segment_bytes": MIB, "engine": "posix"}
    async with kvdisk.open(root, **options) as store:
        store._running.store.reset()
        await store.put(b"key", b"of the updated weights")
        assert await store.get(b"key") == b"of the updated weights"
    for value in (None, b"of the files"):
        async with kvdisk.open(root, **options) as store:
            assert await store.get(b"key") == value
            await store.put(b"key", b"of the files")


async def test_segments_of_another_size_make_way_and_the_rest_of_the_namespace_stays(root: Path) -> None:
    options = {"capacity": 40 * MIB, "arena_bytes": 4 * MIB, "engine": "posix"}
    async with kvdisk.open(root, segment_bytes=MIB, **options) as store:
        await store.put(b"key", b"one")
    async with kvdisk.open(root, segment_bytes=2 * MIB, **options) as store:
        assert await store.get(b"key") is None
        await store.put(b"key", b"two")
    async with kvdisk.open(root, segment_bytes=MIB, **options) as store:
        assert await store.get(b"key") is None, "never the older value"
    assert len(list(root.glob("ns-*"))) == 1


async def test_open_segments_of_a_killed_owner_are_not_written_to_again(root: Path) -> None:
    options = {"capacity": 40 * MIB, "arena_bytes": 4 * MIB, "segment_bytes": MIB, "engine": "posix"}
    segments = []
    for clean in (True, True, False):
        async with kvdisk.open(root, **options) as store:
            await store.put(os.urandom(8), b"value")
            await store.flush()
            segments.append(len(store._running.store.table))
        if not clean:
            (lock,) = root.glob("ns-*/main/lock")
            lock.write_text("4711")  # what a killed process leaves
    async with kvdisk.open(root, **options) as store:
        await store.put(b"last", b"value")
        await store.flush()
        segments.append(len(store._running.store.table))
    assert segments == [1, 1, 1, 2]
