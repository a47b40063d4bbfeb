"""The ring itself: the kernel's constants, full and closed rings, older kernels, and which operation moves what."""

import errno
import os
import select
from array import array
from ctypes import addressof, c_char

import pytest

from kvdisk.io import ring as module
from kvdisk.io.ring import Ring
from kvdisk.io.uring import UringEngine
from tests.machine import allows_io_uring

needs_io_uring = pytest.mark.skipif(not allows_io_uring(), reason="the kernel refuses io_uring")

SIZE = 4096


@pytest.fixture
def ring():
    made = Ring(4)
    yield made
    made.close()


@pytest.fixture
def memory():
    """(a buffer, its address)"""
    buffer = bytearray(os.urandom(4 * SIZE))
    return buffer, addressof(c_char.from_buffer(buffer))


@pytest.fixture
def fd():
    made = os.memfd_create("test-ring", os.MFD_CLOEXEC)
    yield made
    os.close(made)


def one_result(ring):
    ring.submit()
    return results(ring, 1)[0]


def results(ring, count):
    poll = select.poll()
    poll.register(ring.eventfd, select.POLLIN)
    found = []
    while len(found) < count:
        assert poll.poll(5000), "no completion within 5 s"
        completions = ring.reap()
        while completions:
            found.append(completions.popleft())
    return found


def test_constants_are_the_kernels_as_liburing_has_them():
    liburing = pytest.importorskip("liburing")
    names = [name for name in dir(module) if name.startswith(("SETUP_", "FEAT_", "ENTER_", "OFF_"))]
    assert len(names) >= 9
    assert {name: getattr(module, name) for name in names} == {n: getattr(liburing, f"IORING_{n}") for n in names}


def test_structures_have_the_kernels_sizes():
    assert module._PARAMS.size == 120
    assert module._fill.__self__.size == module._SQE_BYTES == 64
    assert module._entry.__self__.size == module._CQE_BYTES == 16


@needs_io_uring
@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("runs", [1, 3])
def test_every_operation_moves_the_bytes_it_is_given(ring, memory, fd, registered, runs):
    buffer, address = memory
    if registered:
        ring.register([(address, len(buffer))])
    index = 0 if registered else -1
    part = SIZE // runs // 8 * 8
    for write, shift in ((True, 0), (False, 2 * SIZE)):
        flat = [word for run in range(runs) for word in (address + shift + run * part, part)]
        vector = array("Q", flat) if runs > 1 else None
        assert ring.prepare(7, write, fd, SIZE, flat, vector, index)
        assert one_result(ring) == (7, runs * part)
    assert buffer[2 * SIZE : 2 * SIZE + runs * part] == buffer[: runs * part]
    assert os.pread(fd, runs * part, SIZE) == buffer[: runs * part]


@needs_io_uring
def test_an_error_is_a_result(ring, memory):
    _, address = memory
    ring.prepare(1, False, 9999, 0, [address, SIZE], None, -1)
    assert one_result(ring) == (1, -errno.EBADF)


@needs_io_uring
def test_a_full_queue_takes_nothing_and_loses_nothing(ring, memory, fd):
    os.ftruncate(fd, SIZE)
    _, address = memory
    for lap in range(5):  # the indices go round
        tokens = [lap * 10 + n for n in range(5)]
        taken = [ring.prepare(token, False, fd, 0, [address, SIZE], None, -1) for token in tokens]
        assert taken == [True] * 4 + [False]
        assert ring.unsubmitted() == 4
        assert ring.submit() == ring.unsubmitted() == 0
        assert sorted(results(ring, 4)) == [(token, SIZE) for token in tokens[:4]]


@needs_io_uring
def test_a_closed_ring_raises_and_leaves_no_descriptor(memory):
    before = len(os.listdir("/proc/self/fd"))
    ring = Ring(8)
    assert len(os.listdir("/proc/self/fd")) > before
    ring.close()
    ring.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(RuntimeError, match="closed"):
        ring.check_owner()
    for use in (ring.submit, ring.unsubmitted, lambda: ring.prepare(1, False, 0, 0, [memory[1], 1], None, -1)):
        with pytest.raises(ValueError):
            use()


@needs_io_uring
def test_a_ring_that_nobody_closed_leaves_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    Ring(8)
    assert len(os.listdir("/proc/self/fd")) == before


def refusing(monkeypatch, refused, code=errno.EINVAL):
    """Set-ups with one of these flags fail, as on a kernel that does not know them; the list of what was asked for."""
    asked = []
    call = module._call

    def older(number, *arguments):
        if number == module._SETUP:
            flags = int.from_bytes(bytes(arguments[1])[8:12], "little")
            asked.append(flags)
            if flags & refused:
                raise OSError(code, os.strerror(code))
        return call(number, *arguments)

    monkeypatch.setattr(module, "_call", older)
    return asked


@needs_io_uring
@pytest.mark.parametrize("refused", [module.SETUP_DEFER_TASKRUN, module.SETUP_SUBMIT_ALL])
def test_an_older_kernel_is_asked_for_less(monkeypatch, memory, fd, refused):
    asked = refusing(monkeypatch, refused)
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    os.ftruncate(fd, SIZE)
    ring = Ring(4)
    assert not asked[-1] & refused
    ring.prepare(1, False, fd, 0, [memory[1], SIZE], None, -1)
    assert one_result(ring) == (1, SIZE)
    ring.close()


def test_processors_of_weak_order_are_served_only_where_completions_come_from_this_thread(monkeypatch):
    asked = refusing(monkeypatch, module.SETUP_DEFER_TASKRUN)
    monkeypatch.setattr(module.platform, "machine", lambda: "aarch64")
    with pytest.raises(OSError, match="Invalid argument"):
        Ring(4)
    assert len(asked) == 1


@needs_io_uring
def test_a_kernel_without_what_is_relied_on_is_refused_and_nothing_is_left(monkeypatch):
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(module, "_NEEDED", 1 << 31)
    with pytest.raises(OSError, match=r"older than Linux 5\.5"):
        Ring(4)
    assert len(os.listdir("/proc/self/fd")) == before


@needs_io_uring
def test_where_vectors_cannot_be_in_registered_buffers_they_are_plain(monkeypatch, ring, memory, fd):
    buffer, address = memory
    ring.register([(address, len(buffer))])
    monkeypatch.setattr(ring, "has_fixed_vectors", False)
    used = []
    push = ring._push
    monkeypatch.setattr(ring, "_push", lambda code, *rest: used.append(code) or push(code, *rest))
    flat = [address, 1000, address + 1000, 24]
    ring.prepare(1, True, fd, 0, flat, array("Q", flat), 0)
    assert one_result(ring) == (1, 1024)
    ring.prepare(2, True, fd, 0, [address, 1024], None, 0)
    assert one_result(ring) == (2, 1024)
    assert used == [module.OP_WRITEV, module.OP_WRITE_FIXED]
    assert os.pread(fd, 1024, 0) == buffer[:1024]


@needs_io_uring
async def test_no_binding_is_loaded_for_io_uring(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "liburing", None)
    engine = UringEngine(4)
    engine.start([])
    assert engine.info.name == "io_uring"
    engine.close()
