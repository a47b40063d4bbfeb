"""Choosing an engine: by use, in the directory, with one warning, and nothing left behind."""

import errno
import logging
import os
import subprocess
import sys

import pytest

from kvdisk.errors import EngineUnavailableError
from kvdisk.io import probe
from kvdisk.io.posix import PosixEngine
from kvdisk.io.probe import Alignment, choose_engine, file_alignment
from kvdisk.io.ring import Ring
from kvdisk.io.uring import UringEngine
from kvdisk.memory import private_memory
from tests.machine import allows_io_uring


@pytest.fixture(scope="module")
def memory():
    return private_memory(2 << 20)


@pytest.fixture
async def choose():
    """`choose_engine`, whose engines are closed at the end."""
    engines = []

    async def call(*arguments, **names):
        chosen = await choose_engine(*arguments, **names)
        engines.append(chosen.engine)
        return chosen

    yield call
    for engine in engines:
        engine.close()


def warnings(caplog):
    return [row.getMessage() for row in caplog.records if row.levelno >= logging.WARNING]


async def test_auto_takes_io_uring_where_it_works_and_warns_of_nothing(choose, memory, tmp_path, caplog):
    if not allows_io_uring():
        pytest.skip("the kernel refuses io_uring")
    caplog.set_level(logging.INFO, "kvdisk")
    chosen = await choose(str(tmp_path), memories=[memory])
    assert chosen.engine.info.name == "io_uring"
    assert warnings(caplog) == []
    (line,) = [row.getMessage() for row in caplog.records]
    assert str(tmp_path) in line
    assert "engine io_uring" in line
    assert f"alignment {chosen.alignment.unit}" in line


@pytest.mark.parametrize(
    "code, disabled, remedy",
    [
        (errno.EPERM, "0", "seccomp profile"),
        (errno.EPERM, "2", "sysctl kernel.io_uring_disabled=0"),
        (errno.ENOSYS, "0", "kernel has no io_uring"),
        (errno.ENOMEM, "0", "ulimit -l"),
        (errno.EIO, "0", "does not work"),
    ],
)
async def test_a_refused_ring_falls_back_with_one_warning_that_names_cause_and_remedy(
    choose, memory, tmp_path, caplog, monkeypatch, code, disabled, remedy
):
    from kvdisk.io import uring

    def refuse(self, iodepth):
        raise OSError(code, os.strerror(code))

    sysctl = tmp_path / "io_uring_disabled"
    sysctl.write_text(disabled)
    monkeypatch.setattr(Ring, "_set_up", refuse)
    monkeypatch.setattr(uring, "_DISABLED", str(sysctl))
    chosen = await choose(str(tmp_path), memories=[memory])
    assert chosen.engine.info.name == "posix"
    (warning,) = warnings(caplog)
    assert os.strerror(code) in warning
    assert remedy in warning


async def test_io_uring_on_request_fails_rather_than_falls_back(tmp_path, monkeypatch):
    def refuse(self, iodepth):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Ring, "_set_up", refuse)
    with pytest.raises(EngineUnavailableError, match="seccomp"):
        await choose_engine(str(tmp_path), "io_uring")


async def test_posix_on_request_never_touches_io_uring(choose, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(UringEngine, "start", lambda *_: pytest.fail("started"))
    chosen = await choose(str(tmp_path), "posix", iodepth=3)
    assert chosen.engine.info.name == "posix"
    assert chosen.engine.iodepth == 3
    assert warnings(caplog) == []


async def test_an_unknown_engine_lists_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"'libaio'.*auto, io_uring, posix"):
        await choose_engine(str(tmp_path), "libaio")


async def test_an_engine_that_reads_back_other_bytes_is_not_used(tmp_path, monkeypatch):
    transfer = PosixEngine._transfer

    def corrupt(self, op):
        result = transfer(self, op)
        memory, start, _ = op.spans[0]
        memory.view[start] ^= 1
        return result

    monkeypatch.setattr(PosixEngine, "_transfer", corrupt)
    with pytest.raises(EngineUnavailableError, match="other bytes than were written"):
        await choose_engine(str(tmp_path), "posix")


async def test_a_disk_that_fails_the_trial_names_the_errno(tmp_path, monkeypatch):
    monkeypatch.setattr(PosixEngine, "_transfer", lambda self, op: -errno.EIO)
    with pytest.raises(EngineUnavailableError, match="Input/output error"):
        await choose_engine(str(tmp_path), "posix")


async def test_direct_io_refused_at_the_first_write_is_buffered_with_one_warning(choose, tmp_path, monkeypatch, caplog):
    transfer = PosixEngine._transfer
    monkeypatch.setattr(
        PosixEngine, "_transfer", lambda self, op: transfer(self, op) if self.buffered else -errno.EINVAL
    )
    chosen = await choose(str(tmp_path), "posix")
    assert not chosen.engine.info.direct
    (warning,) = warnings(caplog)
    assert "direct I/O refused" in warning


async def test_direct_io_refused_at_open_is_buffered_with_one_warning(choose, tmp_path, monkeypatch, caplog):
    plain_open = os.open

    def refuse_direct(path, flags, *rest, **names):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return plain_open(path, flags, *rest, **names)

    monkeypatch.setattr(os, "open", refuse_direct)
    chosen = await choose(str(tmp_path), "posix")
    assert not chosen.engine.info.direct
    assert len(warnings(caplog)) == 1
    assert os.listdir(tmp_path) == []


async def test_a_file_system_that_does_not_say_it_is_direct_is_used_but_not_called_direct(
    choose, tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, "kvdisk")
    unknown = Alignment(4096, 4096, direct=False)
    monkeypatch.setattr(probe, "file_alignment", lambda fd: unknown)
    chosen = await choose(str(tmp_path), "posix")
    assert chosen.alignment == unknown
    assert not chosen.engine.info.direct
    assert "does not say that it is direct" in caplog.text
    assert warnings(caplog) == []


@pytest.mark.parametrize("requested", ["auto", "posix"])
@pytest.mark.parametrize("without_tmpfile", [False, True])
async def test_nothing_is_left_in_the_directory(choose, tmp_path, monkeypatch, requested, without_tmpfile):
    plain_open = os.open

    def refuse_tmpfile(path, flags, *rest, **names):
        if without_tmpfile and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported", path)
        return plain_open(path, flags, *rest, **names)

    monkeypatch.setattr(os, "open", refuse_tmpfile)
    await choose(str(tmp_path), requested)
    assert os.listdir(tmp_path) == []


async def test_a_failed_probe_leaves_nothing_open(tmp_path, monkeypatch):
    before = sorted(os.listdir("/proc/self/fd"))
    for where in (tmp_path / "missing", "/proc/self"):
        with pytest.raises(OSError):
            await choose_engine(str(where), "auto")
    monkeypatch.setattr(PosixEngine, "_transfer", lambda self, op: -errno.EIO)
    with pytest.raises(EngineUnavailableError):
        await choose_engine(str(tmp_path), "posix")
    assert sorted(os.listdir("/proc/self/fd")) == before


async def test_a_missing_directory_is_named(tmp_path, caplog):
    with pytest.raises(FileNotFoundError) as caught:
        await choose_engine(str(tmp_path / "missing"))
    assert caught.value.filename == str(tmp_path / "missing")
    assert warnings(caplog) == []


async def test_the_alignment_is_a_power_of_two_that_the_file_system_accepts(choose, tmp_path):
    engine = (await choose(str(tmp_path), "posix")).engine
    fd = engine.create_file(str(tmp_path / "f"), 1 << 20)
    alignment = file_alignment(fd)
    for value in (alignment.memory, alignment.offset):
        assert value > 0
        assert value & (value - 1) == 0
    memory = private_memory(1 << 20)
    assert os.preadv(fd, [memory.view[alignment.unit :][: alignment.unit]], alignment.unit) == alignment.unit
    engine.close_file(fd)


def test_a_descriptor_without_an_answer_has_the_default_alignment():
    reader, writer = os.pipe()
    assert file_alignment(reader) == Alignment(4096, 4096, direct=False)
    os.close(reader)
    os.close(writer)


def test_under_a_seccomp_profile_without_io_uring_threads_serve(tmp_path):
    """The real thing: the system calls answer EPERM, as under Docker's default profile."""
    code = """
import asyncio, ctypes, errno, logging, struct, sys
# load the number; 425 to 427 (io_uring_*, on every architecture) answer EPERM, the rest is allowed
program = b"".join(struct.pack("HBBI", *step) for step in [
    (0x20, 0, 0, 0), (0x35, 0, 2, 425), (0x25, 1, 0, 427), (6, 0, 0, 0x50000 | errno.EPERM), (6, 0, 0, 0x7fff0000)])
buffer = ctypes.create_string_buffer(program, len(program))
fprog = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 5, ctypes.addressof(buffer)), 16)
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, fprog) == 0
from kvdisk.io.probe import choose_engine
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
async def main():
    chosen = await choose_engine(sys.argv[1])
    print(chosen.engine.info.name)
    chosen.engine.close()
asyncio.run(main())
"""
    finished = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    lines = finished.stdout.splitlines()
    assert lines[-1] == "posix"
    (warning,) = [line for line in lines if line.startswith("WARNING")]
    assert "seccomp" in warning
