"""Rules of `kvdisk.vllm.rendezvous`, with real processes: who finds whose share, and who is not trusted."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvdisk.errors import RendezvousError
from kvdisk.geometry import Geometry, GroupGeometry, Page
from kvdisk.processes import pid_namespace, process_start
from kvdisk.vllm import rendezvous
from kvdisk.vllm.share import Share

ENGINE = "engine-0_dp1"
LONG_S, NOW_S = 60.0, 0.0


def geometry(rank=0, world_size=1, **facts):
    return Geometry(rank, world_size, 4, (GroupGeometry(0, 16, (Page(0, 64 + rank),)),), {"model": "m", **facts})


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    """A runtime directory of one's own, deeper than sun_path is long."""
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # read TMPDIR again
    yield deep / f"kvdisk-{os.geteuid()}"
    for (engine_id, _), share in list(rendezvous._shares.items()):
        rendezvous.withdraw(engine_id, share)
    assert not [t for t in threading.enumerate() if t.name == "kvdisk-rendezvous"]


@contextlib.contextmanager
def worker(rank=0, world_size=1, unit_count=2, mark=1, **facts):
    """A process that offers a share, its units filled with `mark`, and stays."""
    code = f"""
        import sys
        from tests.vllm.test_rendezvous import ENGINE, geometry
        from kvdisk.vllm import rendezvous
        from kvdisk.vllm.share import Share
        share = Share.create(geometry({rank}, {world_size}, **{facts!r}), {unit_count}, shared=True)
        share.units[:] = {mark}
        rendezvous.offer(ENGINE, share)
        print("offered", flush=True)
        sys.stdin.read()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"offered\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_in_one_process_a_private_share_is_the_very_object():
    share = Share.create(geometry(), 1, shared=False)
    rendezvous.offer(ENGINE, share)
    assert rendezvous.collect(ENGINE, 1, NOW_S) == [share]
    rendezvous.withdraw(ENGINE, share)
    with pytest.raises(RendezvousError, match="ranks 0 of 1"):
        rendezvous.collect(ENGINE, 1, NOW_S)


def test_engines_do_not_see_each_others_shares():
    rendezvous.offer("other", Share.create(geometry(), 1, shared=True))
    with pytest.raises(RendezvousError, match="ranks 0 of 1"):
        rendezvous.collect(ENGINE, 1, NOW_S)


def test_ranks_in_other_processes_are_collected_in_order(runtime):
    with worker(1, 2, mark=11), worker(0, 2, mark=10):
        shares = rendezvous.collect(ENGINE, 2, LONG_S)
        assert [share.rank for share in shares] == [0, 1]
        assert [int(share.units[0]) for share in shares] == [10, 11]
        assert runtime.stat().st_mode & 0o777 == 0o700
        again = rendezvous.find(ENGINE, 1, LONG_S)
        again.blocks_written[1] = 3
        assert shares[1].blocks_written[1] == 3


def test_a_share_outlives_the_worker_that_was_killed():
    with worker(mark=5) as process:
        share = rendezvous.collect(ENGINE, 1, LONG_S)[0]
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (share.units == 5).all()


def test_a_worker_killed_in_between_is_missing_and_its_successor_is_found():
    with worker(mark=5) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(RendezvousError, match=f"pid {process.pid}\\) died"):
            rendezvous.collect(ENGINE, 1, NOW_S)
    with worker(mark=6):
        assert int(rendezvous.collect(ENGINE, 1, LONG_S)[0].units[0]) == 6


def test_sockets_of_the_dead_are_removed_and_those_of_other_pid_namespaces_are_not(runtime):
    with worker() as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (stale,) = runtime.iterdir()
    foreign = runtime / (stale.name.rsplit("-", 1)[0] + "-1.sock")
    foreign.touch()
    unrelated = runtime / "unrelated.sock"
    unrelated.touch()
    rendezvous.offer(ENGINE, Share.create(geometry(), 0, shared=True))
    assert not stale.exists()
    assert foreign.exists()
    assert unrelated.exists()


def test_a_reused_pid_is_not_taken_for_the_dead_worker(runtime):
    """The name of a dead worker whose pid now belongs to a live process, this one."""
    runtime.mkdir(0o700)
    name = f"{rendezvous._hash(ENGINE)}-0-{os.getpid()}-1-{pid_namespace()}.sock"
    (runtime / name).touch()
    with pytest.raises(RendezvousError, match="died after it had offered"):
        rendezvous.collect(ENGINE, 1, NOW_S)


def test_a_later_offer_replaces_the_earlier_one():
    first, second = (Share.create(geometry(), 1, shared=True) for _ in range(2))
    first.units[:], second.units[:] = 1, 2
    rendezvous.offer(ENGINE, first)
    rendezvous.offer(ENGINE, second)
    assert rendezvous.collect(ENGINE, 1, NOW_S) == [second]
    rendezvous.withdraw(ENGINE, first)  # too late: it was replaced
    rendezvous._shares.clear()  # as another process sees it
    rendezvous._shares["", 0] = second
    assert int(rendezvous.collect(ENGINE, 1, LONG_S)[0].units[0]) == 2
    rendezvous._servers.pop((ENGINE, 0)).close()


def test_the_missing_ranks_are_named_with_possible_causes():
    with worker(1, 4), pytest.raises(RendezvousError, match=r"ranks 0, 2, 3 of 4.*another host"):
        rendezvous.collect(ENGINE, 4, NOW_S)


@pytest.mark.parametrize("facts", [{"model": "other"}, {"extra": 1}])
def test_ranks_that_disagree_are_both_named_with_the_field(facts):
    other = replace(geometry(1, 2), facts={**geometry().facts, **facts})
    rendezvous.offer(ENGINE, Share.create(geometry(0, 2), 0, shared=False))
    rendezvous.offer(ENGINE, Share.create(other, 0, shared=False))
    with pytest.raises(RendezvousError, match=f"ranks 0 and 1 disagree on fact '{next(iter(facts))}'"):
        rendezvous.collect(ENGINE, 2, NOW_S)


def test_a_world_of_another_size_is_an_error():
    rendezvous.offer(ENGINE, Share.create(geometry(0, 2), 0, shared=False))
    with pytest.raises(RendezvousError, match="world of 2, the scheduler's has 1"):
        rendezvous.collect(ENGINE, 1, NOW_S)


@pytest.mark.parametrize("kind", ["link", "mode"])
def test_an_unsafe_directory_is_refused(runtime, kind, tmp_path):
    if kind == "mode":
        runtime.mkdir()
        runtime.chmod(0o770)
    else:
        (tmp_path / "elsewhere").mkdir(0o700)
        runtime.symlink_to(tmp_path / "elsewhere")
        Path(tempfile.gettempdir(), runtime.name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RendezvousError, match=str(runtime)):
        rendezvous.offer(ENGINE, Share.create(geometry(), 0, shared=True))


def test_without_a_usable_runtime_directory_the_temp_directory_serves(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "absent"))
    assert not (tmp_path / "absent").exists()
    with worker(mark=3):
        assert int(rendezvous.collect(ENGINE, 1, LONG_S)[0].units[0]) == 3


@pytest.mark.parametrize("answer", [b"", b"kvdisk share 1\n", b"something else.\n"])
def test_a_peer_that_talks_nonsense_is_reported_not_trusted(runtime, answer):
    runtime.mkdir(0o700)
    name = f"{rendezvous._hash(ENGINE)}-0-{os.getpid()}-{process_start(os.getpid())}-1.sock"
    directory = os.open(runtime, os.O_RDONLY)
    server = socket.socket(socket.AF_UNIX)
    server.bind(rendezvous._reach(directory, name))
    server.listen()

    def serve():
        peer, _ = server.accept()
        with peer:
            peer.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(RendezvousError, match=r"cannot be taken: it answered"):
        rendezvous.collect(ENGINE, 1, NOW_S)
    thread.join()
    server.close()
    os.close(directory)


def test_a_forked_child_serves_nothing_of_its_parents():
    share = Share.create(geometry(), 1, shared=True)
    rendezvous.offer(ENGINE, share)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            assert not rendezvous._shares
            assert not rendezvous._servers
            assert rendezvous.find(ENGINE, 0, LONG_S).units.size  # the parent serves it, over its socket
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with worker(1, 1 + 1):
        assert rendezvous.find(ENGINE, 1, LONG_S).rank == 1
