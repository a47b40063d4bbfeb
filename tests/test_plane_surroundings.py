"""A data plane's process where things are unusual: no descriptors, another directory, a process that was stopped."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvdisk.plane import process as process_module
from kvdisk.plane import remote
from kvdisk.plane.local import ThreadPlane
from tests.planes import Rig, keys_of, value

KEYS = keys_of(10)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


def refuse(*_: Any) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def no_socket(patch: pytest.MonkeyPatch) -> None:
    """But the thread's event loop gets one."""
    patch.setattr(process_module, "socket", SimpleNamespace(socketpair=refuse))


def no_duplicate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(remote, "os", SimpleNamespace(dup=refuse, close=os.close))


@pytest.mark.parametrize("without", [no_socket, no_duplicate])
def test_without_descriptors_for_a_process_there_is_a_thread_and_one_warning(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    without: Callable[[pytest.MonkeyPatch], None],
) -> None:
    with monkeypatch.context() as patch:
        without(patch)
        rig = Rig(root)
    assert isinstance(rig.service.plane, ThreadPlane)
    assert sum("Too many open files" in record.getMessage() for record in caplog.records) == 1
    rig.put(KEYS[:1])
    assert rig.get(KEYS[0]) == value(KEYS[0], rig.size)
    rig.close()


def test_relative_import_paths_mean_what_they_meant_when_kvdisk_was_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = process_module._CWD
    monkeypatch.setattr(sys, "path", ["", "relative", str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    assert process_module._import_path() == [f"{before}/", f"{before}/relative", str(tmp_path)]


def test_a_stopped_plane_ends_when_it_is_closed_and_gives_back_its_locks(root: Path) -> None:
    rig = Rig(root, instances=("dp0",))
    rig.put(KEYS)
    os.kill(rig.pid, signal.SIGSTOP)
    assert rig.close()
    assert not process_module._unburied
    again = Rig(root, instances=("dp0",))
    assert again.service._directories[0].closed_cleanly
    assert again.get(KEYS[0]) == value(KEYS[0], rig.size)
    again.close()


def test_a_plane_says_the_same_of_its_end_again(root: Path) -> None:
    rig = Rig(root)
    plane: Any = rig.service.plane
    assert plane.close(10.0)
    assert plane.close(10.0), "idempotent"
    rig.service._closed = True
    for directory in rig.service._directories:
        directory.close()
    os.close(rig.memfd)
