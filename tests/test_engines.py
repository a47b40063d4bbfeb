"""One contract for all engines: each case runs against io_uring, posix threads and the simulated disk."""

import asyncio
import errno
import fcntl
import logging
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from kvdisk.errors import EngineUnavailableError
from kvdisk.io.posix import PosixEngine
from kvdisk.io.protocol import Op, OpKind, Span
from kvdisk.io.sim import SimDisk, SimEngine
from kvdisk.io.uring import UringEngine
from kvdisk.memory import private_memory
from tests.machine import allows_io_uring

PAGE = 4096
MIB = 1 << 20

MAKERS = {
    "io_uring": lambda depth: UringEngine(depth),
    "io_uring unregistered": lambda depth: UringEngine(depth, register=False),
    "posix": lambda depth: PosixEngine(depth),
    "sim": lambda depth: SimEngine(SimDisk(7), iodepth=depth, reorder=True),
}
REAL = [name for name in MAKERS if name != "sim"]


@pytest.fixture(scope="module")
def memory():
    """16 MiB, shared by the tests of this module: each fills what it uses."""
    return private_memory(16 * MIB)


@pytest.fixture
async def started():
    """Starts engines by name, and closes them; skips where the kernel refuses io_uring."""
    engines = []

    def start(name, memories=(), depth=32):
        engine = MAKERS[name](depth)
        try:
            engine.start(memories)
        except EngineUnavailableError as error:
            if allows_io_uring():
                raise
            pytest.skip(str(error))
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(params=MAKERS)
async def engine(request, started, memory):
    return started(request.param, [memory])


def fill(memory, seed):
    """Random bytes everywhere; returns a copy."""
    content = random.Random(seed).randbytes(memory.size)
    memory.view[:] = content
    return content


async def run(engine, ops):
    """Submit (kind, fd, offset, spans) at once; their results in that order."""
    results = [None] * len(ops)
    finished = asyncio.get_running_loop().create_future()
    left = len(ops)

    def done(index, result):
        nonlocal left
        assert results[index] is None, "done was called twice"
        results[index] = result
        left -= 1
        if not left:
            finished.set_result(None)

    engine.submit(
        [Op(*op[:3], tuple(op[3]), lambda result, index=index: done(index, result)) for index, op in enumerate(ops)]
    )
    await asyncio.wait_for(finished, 60)
    return results


# --- bytes


async def test_what_was_written_is_read_back(engine, memory, tmp_path):
    content = fill(memory, 1)
    fd = engine.create_file(str(tmp_path / "f"), 4 * MIB)
    assert await run(engine, [(OpKind.WRITE, fd, 0, [Span(memory, 0, 4 * MIB)])]) == [4 * MIB]
    assert await run(engine, [(OpKind.READ, fd, MIB, [Span(memory, 8 * MIB, 2 * MIB)])]) == [2 * MIB]
    assert bytes(memory.view[8 * MIB : 10 * MIB]) == content[MIB : 3 * MIB]
    engine.close_file(fd)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 17, 63, 1023, 1024])
async def test_spans_are_moved_in_order_and_nothing_between_them_is_touched(engine, memory, tmp_path, count):
    content = fill(memory, count)
    chance = random.Random(count)
    pages = chance.sample(range(memory.size // PAGE), 2 * count)
    sources, targets = ([Span(memory, page * PAGE, PAGE) for page in part] for part in (pages[:count], pages[count:]))
    fd = engine.create_file(str(tmp_path / "f"), count * PAGE)
    assert await run(engine, [(OpKind.WRITE, fd, 0, sources)]) == [count * PAGE]
    assert await run(engine, [(OpKind.READ, fd, 0, targets)]) == [count * PAGE]
    expected = bytearray(content)
    for source, target in zip(sources, targets, strict=True):
        expected[target.start : target.start + PAGE] = content[source.start : source.start + PAGE]
    assert memory.view == expected
    engine.close_file(fd)


async def test_spans_of_different_lengths_and_memories_make_one_op(engine, memory, tmp_path):
    content = fill(memory, 3)
    other = private_memory(MIB)  # not registered
    lengths = [512, 8192, 4096, 1536, 65536, 1024]
    spans, start = [], 0
    for length in lengths:
        spans.append(Span(memory, start, length))
        start += length + PAGE
    total = sum(lengths)
    fd = engine.create_file(str(tmp_path / "f"), MIB)
    assert await run(engine, [(OpKind.WRITE, fd, 0, spans)]) == [total]
    # the last target starts behind what the first half fills
    spread = [Span(other, 0, PAGE), Span(memory, 8 * MIB, PAGE), Span(other, PAGE, total - 2 * PAGE)]
    assert await run(engine, [(OpKind.READ, fd, 0, spread)]) == [total]
    joined = b"".join(content[span.start : span.start + span.length] for span in spans)
    assert (
        bytes(other.view[:PAGE]) + bytes(memory.view[8 * MIB :][:PAGE]) + bytes(other.view[PAGE : total - PAGE])
        == joined
    )
    engine.close_file(fd)


@pytest.mark.parametrize("name", MAKERS)
async def test_ten_thousand_ops_go_through_a_depth_of_four(name, started, memory, tmp_path):
    engine = started(name, [memory], depth=4)
    pages = 256
    fill(memory, 4)
    words = np.frombuffer(memory.view, np.uint64).reshape(-1, PAGE // 8)
    fd = engine.create_file(str(tmp_path / "f"), pages * PAGE)
    await run(engine, [(OpKind.WRITE, fd, page * PAGE, [Span(memory, page * PAGE, PAGE)]) for page in range(pages)])
    wanted = words[:pages].copy()
    chance = random.Random(5)
    places = [(chance.randrange(pages), 256 + index % 3840) for index in range(10_000)]
    results = await run(
        engine, [(OpKind.READ, fd, page * PAGE, [Span(memory, slot * PAGE, PAGE)]) for page, slot in places]
    )
    assert results == [PAGE] * len(places)
    # a later read of the same slot may have overtaken an earlier one: any of the pages read into it is right
    allowed = {}
    for page, slot in places:
        allowed.setdefault(slot, []).append(page)
    assert all(any((words[slot] == wanted[page]).all() for page in choice) for slot, choice in allowed.items())
    engine.close_file(fd)


async def test_ops_submitted_inside_done_are_started(engine, memory, tmp_path):
    fd = engine.create_file(str(tmp_path / "f"), MIB)
    finished = asyncio.get_running_loop().create_future()
    results = []

    def step(result):
        results.append(result)
        if len(results) == 300:
            finished.set_result(None)
        else:
            engine.submit([Op(OpKind.WRITE, fd, 0, (Span(memory, 0, PAGE),), step)])

    engine.submit([Op(OpKind.WRITE, fd, 0, (Span(memory, 0, PAGE),), step)])
    await asyncio.wait_for(finished, 30)
    assert results == [PAGE] * 300
    engine.close_file(fd)


async def test_done_is_called_on_the_loops_thread_and_never_inside_submit(engine, memory, tmp_path):
    fd = engine.create_file(str(tmp_path / "f"), MIB)
    finished = asyncio.get_running_loop().create_future()

    def done(result):
        assert asyncio.get_running_loop() is finished.get_loop()
        finished.set_result(inside)

    inside = True
    engine.submit([Op(OpKind.READ, fd, 0, (Span(memory, 0, PAGE),), done)])
    inside = False
    assert await asyncio.wait_for(finished, 30) is False
    engine.close_file(fd)


async def test_a_done_that_raises_takes_no_other_completion_with_it(engine, memory, tmp_path):
    fd = engine.create_file(str(tmp_path / "f"), MIB)
    loop = asyncio.get_running_loop()
    reported, finished = [], loop.create_future()
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    count = 0

    def done(result):
        nonlocal count
        count += 1
        if count == 20:
            finished.set_result(None)
        raise KeyError(count)

    engine.submit([Op(OpKind.READ, fd, 0, (Span(memory, 0, PAGE),), done) for _ in range(20)])
    await asyncio.wait_for(finished, 30)
    await asyncio.sleep(0)
    assert [type(error) for error in reported] == [KeyError] * 20
    engine.close_file(fd)


# --- errors


async def test_errors_are_results_and_leave_other_ops_alone(engine, memory, tmp_path):
    fd = engine.create_file(str(tmp_path / "f"), MIB)
    closed = engine.create_file(str(tmp_path / "g"), MIB)
    engine.close_file(closed)
    good = (OpKind.READ, fd, 0, [Span(memory, 0, PAGE)])
    bad = (OpKind.READ, closed, 0, [Span(memory, PAGE, PAGE)])
    assert await run(engine, [good, bad, good, bad, good]) == [PAGE, -errno.EBADF, PAGE, -errno.EBADF, PAGE]
    engine.close_file(fd)


async def test_a_read_beyond_the_end_is_short_and_then_zero(engine, memory, tmp_path):
    fd = engine.create_file(str(tmp_path / "f"), 3 * PAGE)
    at = [(OpKind.READ, fd, offset, [Span(memory, 0, 2 * PAGE)]) for offset in (PAGE, 2 * PAGE, 3 * PAGE, 9 * PAGE)]
    assert [(await run(engine, [op]))[0] for op in at] == [2 * PAGE, PAGE, 0, 0]
    engine.close_file(fd)


async def test_the_simulated_disk_is_as_strict_about_alignment_as_the_strictest(memory):
    """ext4 quietly does some misaligned requests through the page cache, XFS answers EINVAL."""
    engine = SimEngine(SimDisk(1))
    engine.start([memory])
    fd = engine.create_file("f", MIB)
    before = fill(memory, 6)
    for offset, start, length in ((1, 0, PAGE), (0, 0, 100), (0, 8, PAGE)):
        op = (OpKind.READ, fd, offset, [Span(memory, start, length)])
        assert await run(engine, [op]) == [-errno.EINVAL]
    assert memory.view == before
    assert engine.use_buffered("a test")
    assert await run(engine, [(OpKind.READ, fd, 1, [Span(memory, 8, 100)])]) == [100]


@pytest.mark.parametrize(
    "start, length",
    [(-PAGE, PAGE), (0, 0), (0, -1), (16 * MIB, PAGE), (16 * MIB - PAGE, 2 * PAGE), (1 << 62, PAGE)],
)
async def test_a_span_outside_its_memory_never_reaches_the_kernel(engine, memory, tmp_path, start, length):
    fd = engine.create_file(str(tmp_path / "f"), MIB)
    called = []
    good = Op(OpKind.READ, fd, 0, (Span(memory, 0, PAGE),), called.append)
    bad = Op(OpKind.READ, fd, 0, (Span(memory, start, length),), called.append)
    with pytest.raises(ValueError, match="not inside its memory"):
        engine.submit([good, bad])
    assert await run(engine, [(OpKind.READ, fd, 0, [Span(memory, 0, PAGE)])]) == [PAGE]
    assert called == [], "an op of a refused submission was started"
    engine.close_file(fd)


@pytest.mark.parametrize("count", [0, 1025])
async def test_an_op_has_1_to_1024_spans(engine, memory, count):
    op = Op(OpKind.READ, 0, 0, (Span(memory, 0, PAGE),) * count, lambda result: None)
    with pytest.raises(ValueError, match=f"{count} spans"):
        engine.submit([op])


async def test_a_closed_engine_refuses_ops_and_closes_again(engine, memory):
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit([Op(OpKind.READ, 0, 0, (Span(memory, 0, PAGE),), lambda result: None)])


# --- files


async def test_a_created_file_has_its_size_and_its_blocks(engine, tmp_path):
    fd = engine.create_file(str(tmp_path / "f"), 4 * MIB)
    size, allocated = engine.file_bytes(fd)
    assert size == 4 * MIB
    assert 4 * MIB <= allocated < 5 * MIB
    engine.sync_file(fd)
    engine.close_file(fd)


async def test_a_file_is_created_only_once(engine, tmp_path):
    path = str(tmp_path / "f")
    engine.close_file(engine.create_file(path, PAGE))
    with pytest.raises(FileExistsError):
        engine.create_file(path, PAGE)
    fd = engine.open_file(path)
    assert engine.file_bytes(fd)[0] == PAGE, "the file that was there is untouched"
    engine.close_file(fd)


async def test_removing_a_file_that_is_gone_is_fine(engine, tmp_path):
    path = str(tmp_path / "f")
    engine.close_file(engine.create_file(path, PAGE))
    engine.remove_file(path)
    engine.remove_file(path)
    with pytest.raises(FileNotFoundError):
        engine.open_file(path)


@pytest.fixture(params=REAL)
async def real(request, started):
    """The engines that work on real files."""
    return started(request.param)


async def test_files_are_private_whatever_the_umask(real, tmp_path):
    old = os.umask(0)
    try:
        real.close_file(real.create_file(str(tmp_path / "f"), PAGE))
    finally:
        os.umask(old)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600


async def test_descriptors_are_direct_and_not_inherited(real, tmp_path):
    path = str(tmp_path / "f")
    for fd in (real.create_file(path, PAGE), real.open_file(path), real.create_unnamed_file(str(tmp_path), PAGE)):
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        assert flags & os.O_DIRECT
        assert not flags & os.O_NONBLOCK, "io_uring answers EAGAIN on such a descriptor"
        assert not os.get_inheritable(fd)
        real.close_file(fd)


async def test_only_our_regular_files_are_opened(real, tmp_path):
    (tmp_path / "target").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")
    before = os.listdir("/proc/self/fd")
    for name in ("link", "directory", "fifo"):
        with pytest.raises(OSError):
            real.open_file(str(tmp_path / name))
    with pytest.raises(FileExistsError):
        real.create_file(str(tmp_path / "link"), PAGE)
    assert os.listdir("/proc/self/fd") == before


async def test_somebody_elses_file_is_not_opened(real, tmp_path, monkeypatch):
    path = tmp_path / "f"
    path.write_bytes(b"x")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match=f"uid {path.stat().st_uid}.*12345"):
        real.open_file(str(path))


async def test_a_file_that_does_not_fit_leaves_nothing_behind(real, tmp_path):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError) as caught:
        real.create_file(str(tmp_path / "f"), 1 << 50)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert os.listdir(tmp_path) == []
    assert os.listdir("/proc/self/fd") == before


async def test_a_file_system_without_fallocate_gets_sparse_files_and_one_warning(real, tmp_path, monkeypatch, caplog):
    from kvdisk.io import files

    def refuse(*_):
        files.ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(files, "_libc", type("Libc", (), {"fallocate": staticmethod(refuse)}))
    for name in ("f", "g"):
        fd = real.create_file(str(tmp_path / name), 4 * MIB)
        assert real.file_bytes(fd) == (4 * MIB, 0)
        real.close_file(fd)
    assert len([row for row in caplog.records if "preallocation" in row.message]) == 1


async def test_direct_io_refused_at_open_means_buffered_from_then_on(real, tmp_path, memory, monkeypatch, caplog):
    opened = []
    plain_open = os.open

    def refuse_direct(path, flags, *rest, **names):
        opened.append(flags & os.O_DIRECT)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return plain_open(path, flags, *rest, **names)

    monkeypatch.setattr(os, "open", refuse_direct)
    fds = [real.create_file(str(tmp_path / name), PAGE) for name in "fgh"]
    assert sum(map(bool, opened)) == 1, "a refusal is remembered"
    assert not real.info.direct
    assert "O_DIRECT" in real.info.detail
    assert [row.levelno for row in caplog.records if "direct I/O refused" in row.message] == [logging.WARNING]
    content = fill(memory, 8)
    assert await run(real, [(OpKind.WRITE, fds[0], 0, [Span(memory, 0, 100)])]) == [100]
    assert (tmp_path / "f").read_bytes()[:100] == content[:100]
    for fd in fds:
        real.close_file(fd)


async def test_buffered_io_leaves_nothing_in_the_page_cache(real, tmp_path, memory):
    path = str(tmp_path / "f")
    fd = real.create_file(path, 4 * MIB)
    assert real.use_buffered("a test")
    assert not real.use_buffered("again"), "it happens once"
    content = fill(memory, 9)
    assert await run(real, [(OpKind.WRITE, fd, 0, [Span(memory, 0, 4 * MIB)])]) == [4 * MIB]
    assert resident_bytes(path) < MIB
    assert await run(real, [(OpKind.READ, fd, 0, [Span(memory, 8 * MIB, 4 * MIB)])]) == [4 * MIB]
    assert resident_bytes(path) < MIB
    assert bytes(memory.view[8 * MIB : 12 * MIB]) == content[: 4 * MIB]
    real.close_file(fd)


def resident_bytes(path):
    """How much of a file is in the page cache, by mincore(2)."""
    import ctypes
    import mmap

    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = len(mapped) // PAGE
        vector = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(mapped)
        address = ctypes.addressof(start)
        del start
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), vector) == 0
        return sum(byte & 1 for byte in vector) * PAGE


# --- life


async def test_nothing_is_left_open_after_close(memory, tmp_path):
    before = sorted(os.listdir("/proc/self/fd"))
    for name in REAL:
        engine = MAKERS[name](8)
        try:
            engine.start([memory])
        except EngineUnavailableError:
            continue
        fd = engine.create_file(str(tmp_path / name), PAGE)
        await run(engine, [(OpKind.READ, fd, 0, [Span(memory, 0, PAGE)])])
        engine.close_file(fd)
        engine.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", REAL)
async def test_another_thread_may_not_submit(name, started, memory):
    engine = started(name)
    op = Op(OpKind.READ, 0, 0, (Span(memory, 0, PAGE),), lambda result: None)
    with pytest.raises(RuntimeError, match="thread"):
        await asyncio.to_thread(engine.submit, [op])


@pytest.mark.parametrize("name", ["UringEngine", "PosixEngine"])
def test_a_forked_child_is_refused_and_leaves_the_parents_engine_alone(name, tmp_path):
    module = {"UringEngine": "uring", "PosixEngine": "posix"}[name]
    code = f"""
import asyncio, os, sys
from kvdisk.errors import EngineUnavailableError
from kvdisk.io.protocol import Op, OpKind, Span
from kvdisk.io.{module} import {name}
from kvdisk.memory import private_memory

async def main():
    memory, engine = private_memory(1 << 20), {name}(4)
    try:
        engine.start([memory])
    except EngineUnavailableError:
        sys.exit(77)
    fd = engine.create_file(sys.argv[1], 4096)
    loop = asyncio.get_running_loop()
    async def read():
        future = loop.create_future()
        engine.submit([Op(OpKind.READ, fd, 0, (Span(memory, 0, 4096),), future.set_result)])
        return await asyncio.wait_for(future, 30)
    assert await read() == 4096
    if (child := os.fork()) == 0:
        try:
            engine.submit([Op(OpKind.READ, fd, 0, (Span(memory, 0, 4096),), print)])
        except RuntimeError as error:
            engine.close()
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(2)
    status = os.waitpid(child, 0)[1]
    assert status == 0, status
    assert await read() == 4096
    engine.close_file(fd)
    engine.close()

asyncio.run(main())
"""
    finished = subprocess.run([sys.executable, "-c", code, str(tmp_path / "f")], capture_output=True, check=False)
    if finished.returncode == 77 and not allows_io_uring():
        pytest.skip("the kernel refuses io_uring")
    assert finished.returncode == 0, finished.stderr.decode()


# --- io_uring alone


@pytest.fixture
async def uring(started, memory):
    return started("io_uring", [memory])


async def test_many_ops_cost_no_memory(uring, memory, tmp_path):
    """Vectors are made anew for each op."""
    fd = uring.create_file(str(tmp_path / "f"), 64 * PAGE)
    ops = [(OpKind.READ, fd, 0, [Span(memory, page * PAGE, PAGE) for page in range(1 + n % 20)]) for n in range(2000)]

    def rss():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * PAGE

    for _ in range(3):
        await run(uring, ops)
    before = rss()
    for _ in range(10):
        await run(uring, ops)
    assert rss() - before < 20_000 * 50
    uring.close_file(fd)


async def test_registered_buffers_give_the_same_bytes(started, memory, tmp_path):
    registered, plain = started("io_uring", [memory]), started("io_uring unregistered", [memory])
    if not registered.info.registered:
        pytest.skip(registered.info.detail)
    assert not plain.info.registered
    content = fill(memory, 10)
    fd = registered.create_file(str(tmp_path / "f"), MIB)
    assert await run(registered, [(OpKind.WRITE, fd, 0, [Span(memory, 0, MIB)])]) == [MIB]
    for index, engine in enumerate((registered, plain), 1):
        assert await run(engine, [(OpKind.READ, fd, 0, [Span(memory, index * MIB, MIB)])]) == [MIB]
        assert bytes(memory.view[index * MIB : (index + 1) * MIB]) == content[:MIB]
    registered.close_file(fd)


async def test_too_little_lockable_memory_means_unregistered_with_need_and_limit(memory, monkeypatch, tmp_path):
    from kvdisk.io import ring

    def refuse(self, runs):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(ring.Ring, "register", refuse)
    engine = UringEngine(4)
    try:
        engine.start([memory])
    except EngineUnavailableError as error:
        pytest.skip(str(error))
    assert not engine.info.registered
    assert str(memory.size + 2 * PAGE) in engine.info.detail
    assert "ulimit -l" in engine.info.detail
    fd = engine.create_file(str(tmp_path / "f"), PAGE)
    assert await run(engine, [(OpKind.READ, fd, 0, [Span(memory, 0, PAGE)])]) == [PAGE]
    engine.close_file(fd)
    engine.close()


@pytest.mark.parametrize("code", [errno.EFAULT, errno.EIO, errno.EINVAL, errno.EOPNOTSUPP])
async def test_an_error_in_a_registered_buffer_is_tried_once_without(
    uring, memory, tmp_path, monkeypatch, caplog, code
):
    if not uring.info.registered:
        pytest.skip(uring.info.detail)
    ring = uring._ring
    fixed = set()
    prepare, reap = ring.prepare, ring.reap

    def note(token, write, fd, offset, flat, vector, buffer):
        if buffer >= 0:
            fixed.add(token)
        return prepare(token, write, fd, offset, flat, vector, buffer)

    def fail_fixed():
        completions = reap()
        for index, (token, _) in enumerate(completions):
            if token in fixed:
                completions[index] = (token, -code)
        return completions

    monkeypatch.setattr(ring, "prepare", note)
    monkeypatch.setattr(ring, "reap", fail_fixed)
    fd = uring.create_file(str(tmp_path / "f"), MIB)
    content = fill(memory, 11)
    spans = [Span(memory, 0, MIB)]
    for _ in range(5):
        assert await run(uring, [(OpKind.WRITE, fd, 0, spans)]) == [MIB]
    assert uring.fixed_failures == 3
    assert len(fixed) == 3, "after the third it is off"
    assert not uring.info.registered
    assert [row.levelno for row in caplog.records if "registered buffers" in row.message] == [logging.WARNING]
    assert (tmp_path / "f").read_bytes() == content[:MIB]
    uring.close_file(fd)


async def test_a_completion_of_an_unknown_op_is_ignored(uring, memory, tmp_path, monkeypatch):
    reap = uring._ring.reap

    def with_stray():
        completions = reap()
        completions.appendleft((1 << 40, 4096))
        return completions

    monkeypatch.setattr(uring._ring, "reap", with_stray)
    fd = uring.create_file(str(tmp_path / "f"), PAGE)
    assert await run(uring, [(OpKind.READ, fd, 0, [Span(memory, 0, PAGE)])]) == [PAGE]
    assert uring.strays
    uring.close_file(fd)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBUSY, errno.EINTR])
async def test_a_kernel_short_of_something_gets_the_ops_a_little_later(uring, memory, tmp_path, monkeypatch, code):
    submit = uring._ring.submit
    refusals = iter([True] * 3)

    def refuse_first():
        if next(refusals, False):
            raise OSError(code, os.strerror(code))
        return submit()

    monkeypatch.setattr(uring._ring, "submit", refuse_first)
    fd = uring.create_file(str(tmp_path / "f"), PAGE)
    assert await run(uring, [(OpKind.READ, fd, 0, [Span(memory, 0, PAGE)])] * 100) == [PAGE] * 100
    uring.close_file(fd)


async def test_a_kernel_that_takes_no_more_ends_every_op(uring, memory, tmp_path, monkeypatch):
    fd = uring.create_file(str(tmp_path / "f"), PAGE)
    assert await run(uring, [(OpKind.READ, fd, 0, [Span(memory, 0, PAGE)])]) == [PAGE]

    def refuse():
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(uring._ring, "submit", refuse)
    read = (OpKind.READ, fd, 0, [Span(memory, 0, PAGE)])
    assert await run(uring, [read] * 100) == [-errno.EPERM] * 100
    assert await run(uring, [read] * 3) == [-errno.EPERM] * 3
    uring.close_file(fd)


async def test_ops_in_flight_at_close_keep_their_memory(uring, tmp_path):
    from kvdisk.io import uring as module

    reader, writer = os.pipe()
    module._abandoned.clear()
    lost = private_memory(MIB)
    uring.submit([Op(OpKind.READ, reader, 0, (Span(lost, 0, PAGE),), lambda result: None)])
    uring.close()
    assert [flight.op.spans[0].memory for flight in module._abandoned] == [lost]
    os.close(reader)
    os.close(writer)
    module._abandoned.clear()
