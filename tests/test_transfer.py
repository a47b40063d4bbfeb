"""Transfers are whole or failed, bounded and in time, whatever the engine reports."""

import asyncio
import errno
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdisk.io.errnos import Meaning, classify
from kvdisk.io.order import QUIET_S, Job, Order, Piece
from kvdisk.io.protocol import OpKind, Span
from kvdisk.io.sim import Fault, SimDisk, SimEngine, SimulatedCrashError
from kvdisk.io.spans import cut, merged, skip
from kvdisk.io.transfer import Transfer, TransferLateError
from kvdisk.memory import private_memory

PAGE = 4096
KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture(scope="module")
def memory():
    return private_memory(8 * MIB)


class Rig:
    """A simulated disk with one file of 4 MiB, and a transfer on it."""

    def __init__(self, memory, faults=(), *, seed=0, iodepth=64, reorder=False, disk=None, **options):
        self.disk = disk or SimDisk(seed)
        self.memory = memory
        self.engine = SimEngine(self.disk, faults=faults, iodepth=iodepth, reorder=reorder)
        self.ops = []
        self.inflight_bytes_seen = 0
        self.engine.start([memory])
        submit = self.engine.submit
        options = {"piece_bytes": 64 * KIB, "inflight_bytes_max": MIB, "timeout_s": 30.0} | options
        self.transfer = Transfer(self.engine, **options)

        def note(ops):
            self.ops += ops
            self.inflight_bytes_seen = max(self.inflight_bytes_seen, self.transfer.inflight_bytes)
            submit(ops)

        self.engine.submit = note
        self.fd = self.engine.create_file("f", 4 * MIB)

    def put(self, seed=1):
        """Random bytes in the file, and in memory something else; returns the file's."""
        content = random.Random(seed).randbytes(4 * MIB)
        self.disk.files["f"].data[:] = content
        self.memory.view[:] = b"\xaa" * self.memory.size
        return content

    def file(self):
        return bytes(self.disk.files["f"].data)

    def span(self, start, length):
        return Span(self.memory, start, length)


# --- cutting


spans_lists = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=60)


@given(spans_lists, st.integers(1, 16))
@settings(max_examples=200, deadline=None)
def test_pieces_cover_all_bytes_once_and_in_order(memory, runs, piece_pages):
    spans = [Span(memory, start * PAGE, length * PAGE) for start, length in runs]
    pieces = list(cut(merged(spans, PAGE), sum(s.length for s in spans), piece_pages * PAGE, PAGE))
    flat = [page for span in spans for page in range(span.start, span.start + span.length, PAGE)]
    assert [
        page for _, piece in pieces for span in piece for page in range(span.start, span.start + span.length, PAGE)
    ] == flat
    for size, piece in pieces:
        assert 0 < size <= piece_pages * PAGE
        assert size == sum(span.length for span in piece)
        assert len(piece) <= 1024
    assert len(pieces) == -(-len(flat) // piece_pages), "no more ops than the size of a piece demands"


def test_more_than_1024_scattered_spans_make_more_than_one_op(memory):
    spans = [Span(memory, 2 * page * PAGE, PAGE) for page in range(1000)] * 3
    assert [len(piece) for _, piece in cut(merged(spans, PAGE), 3000 * PAGE, 64 * MIB, PAGE)] == [1024, 1024, 952]


def test_neighbours_in_memory_become_one_span(memory):
    spans = [Span(memory, page * PAGE, PAGE) for page in (0, 1, 2, 5, 6, 4)]
    assert [(span.start // PAGE, span.length // PAGE) for span in merged(spans, PAGE)] == [(0, 3), (5, 2), (4, 1)]


@given(spans_lists, st.data())
@settings(max_examples=100, deadline=None)
def test_skipping_leaves_exactly_the_rest(memory, runs, data):
    spans = [Span(memory, start * PAGE, length * PAGE) for start, length in runs]
    flat = [page for span in spans for page in range(span.start, span.start + span.length, PAGE)]
    count = data.draw(st.integers(0, len(flat)))
    rest = skip(spans, count * PAGE)
    assert [page for span in rest for page in range(span.start, span.start + span.length, PAGE)] == flat[count:]


# --- bytes


@pytest.mark.parametrize("seed", range(5))
async def test_any_spans_round_trip_whatever_the_order_of_completions(memory, seed):
    chance = random.Random(seed)
    rig = Rig(memory, seed=seed, reorder=True, iodepth=8)
    content = rig.put(seed)
    pages = chance.sample(range(memory.size // PAGE), 900)
    await rig.transfer.read(rig.fd, 3 * PAGE, [rig.span(page * PAGE, PAGE) for page in pages])
    for index, page in enumerate(pages):
        assert memory.view[page * PAGE :][:PAGE] == content[(3 + index) * PAGE :][:PAGE]
    await rig.transfer.write(rig.fd, 0, [rig.span(page * PAGE, PAGE) for page in reversed(pages)])
    assert rig.file()[: 900 * PAGE] == b"".join(bytes(memory.view[page * PAGE :][:PAGE]) for page in reversed(pages))
    assert (rig.transfer.inflight_ops, rig.transfer.inflight_bytes, rig.transfer.write_queue_bytes) == (0, 0, 0)


async def test_nothing_to_move_is_no_op(memory):
    rig = Rig(memory)
    await rig.transfer.read(rig.fd, 0, [])
    assert rig.ops == []


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("short_by", [1, 511, 512, PAGE, PAGE + 1, 40 * KIB, 64 * KIB - 1, 64 * KIB - PAGE])
async def test_a_short_result_goes_on_from_the_last_aligned_boundary(memory, kind, short_by):
    rig = Rig(memory, [Fault(kind, nth=1, short_by=short_by)])
    content = rig.put()
    spans = [rig.span(0, 100 * KIB), rig.span(MIB, 156 * KIB)]
    if kind == "read":
        await rig.transfer.read(rig.fd, 0, spans)
        assert bytes(memory.view[: 100 * KIB]) + bytes(memory.view[MIB:][: 156 * KIB]) == content[: 256 * KIB]
    else:
        memory.view[: 2 * MIB] = content[: 2 * MIB]
        await rig.transfer.write(rig.fd, 2 * MIB, spans)
        assert rig.file()[2 * MIB :][: 256 * KIB] == content[: 100 * KIB] + content[MIB:][: 156 * KIB]
    assert rig.engine.hit
    assert rig.transfer.counts.short_results == 1
    assert all(op.offset % PAGE == 0 and all(s.length % PAGE == 0 for s in op.spans) for op in rig.ops)


async def test_a_file_shorter_than_expected_is_an_error_not_stale_memory(memory):
    rig = Rig(memory)
    del rig.disk.files["f"].data[2 * MIB + 5000 :]
    with pytest.raises(OSError, match="shorter than its index says") as caught:
        await rig.transfer.read(rig.fd, 2 * MIB, [rig.span(0, 128 * KIB)])
    assert caught.value.errno == errno.EIO
    with pytest.raises(OSError, match="shorter than its index says"):
        await rig.transfer.read(rig.fd, 3 * MIB, [rig.span(0, PAGE)])


async def test_a_write_that_never_gets_anywhere_ends(memory):
    rig = Rig(memory, [Fault("write", short_by=64 * KIB, count=1000)])
    with pytest.raises(OSError) as caught:
        await rig.transfer.write(rig.fd, 0, [rig.span(0, 64 * KIB)])
    assert caught.value.errno == errno.EIO
    assert len(rig.ops) < 20


@pytest.mark.parametrize(
    "offset, start, length", [(1, 0, PAGE), (512, 0, PAGE), (-PAGE, 0, PAGE), (0, 512, PAGE), (0, 0, PAGE + 512)]
)
async def test_misalignment_is_the_callers_mistake_and_submits_nothing(memory, offset, start, length):
    rig = Rig(memory)
    with pytest.raises(ValueError, match="4096"):
        await rig.transfer.read(rig.fd, offset, [rig.span(0, PAGE), rig.span(start, length)])
    assert rig.ops == []


async def test_a_span_outside_its_memory_submits_nothing(memory):
    rig = Rig(memory)
    with pytest.raises(ValueError, match="not inside its memory"):
        await rig.transfer.write(rig.fd, 0, [rig.span(0, PAGE), rig.span(memory.size, PAGE)])
    assert rig.ops == []
    assert rig.transfer.write_queue_bytes == 0


# --- errnos


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("code", sorted(errno.errorcode))
async def test_every_errno_ends_in_all_bytes_or_in_that_errno(memory, kind, code):
    rig = Rig(memory, [Fault(kind, nth=2, errno=code)])
    content = rig.put()
    memory.view[: 256 * KIB] = content[MIB:][: 256 * KIB]
    call = rig.transfer.read if kind == "read" else rig.transfer.write
    passes = classify(code) in (Meaning.RETRY, Meaning.UNSUPPORTED)
    if passes:
        await call(rig.fd, 0, [rig.span(0, 256 * KIB)])
        assert memory.view[: 256 * KIB] == rig.file()[: 256 * KIB]
        assert rig.transfer.counts.retries == 1
    else:
        with pytest.raises(OSError, match=rf"{kind} of 65536 bytes at offset 131072") as caught:
            await call(rig.fd, 0, [rig.span(0, 256 * KIB)])
        assert caught.value.errno == code
        assert rig.transfer.counts.errors == 1
    assert rig.engine.hit
    assert rig.engine.info.direct == (classify(code) is not Meaning.UNSUPPORTED)
    assert (rig.transfer.inflight_ops, rig.transfer.inflight_bytes, rig.transfer.write_queue_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    "code, meaning",
    [
        (errno.EAGAIN, Meaning.RETRY),
        (errno.EINTR, Meaning.RETRY),
        (errno.EBUSY, Meaning.RETRY),
        (errno.EINVAL, Meaning.UNSUPPORTED),
        (errno.EOPNOTSUPP, Meaning.UNSUPPORTED),
        (errno.ENOSPC, Meaning.NO_SPACE),
        (errno.EDQUOT, Meaning.NO_SPACE),
        (errno.EFBIG, Meaning.NO_SPACE),
        (errno.ESTALE, Meaning.GONE),
        (errno.ENODEV, Meaning.GONE),
        (errno.EIO, Meaning.BROKEN),
        (errno.EROFS, Meaning.BROKEN),
        (None, Meaning.BROKEN),
    ],
)
def test_what_an_errno_means(code, meaning):
    assert classify(code) is meaning


async def test_a_retry_that_never_helps_ends_in_its_errno(memory):
    rig = Rig(memory, [Fault("read", errno=errno.EAGAIN, count=1000)])
    with pytest.raises(OSError, match="8 times over") as caught:
        await rig.transfer.read(rig.fd, 0, [rig.span(0, PAGE)])
    assert caught.value.errno == errno.EAGAIN
    assert len(rig.ops) == 9


async def test_refused_direct_io_switches_once_and_every_byte_arrives(memory):
    rig = Rig(memory, [Fault("read", errno=errno.EINVAL, count=16)], iodepth=16)
    content = rig.put()
    switches = []
    use_buffered = rig.engine.use_buffered
    rig.engine.use_buffered = lambda reason: switches.append(use_buffered(reason))
    await rig.transfer.read(rig.fd, 0, [rig.span(0, 2 * MIB)])
    assert memory.view[: 2 * MIB] == content[: 2 * MIB]
    assert switches.count(True) == 1
    await rig.transfer.read(rig.fd, 0, [rig.span(0, 2 * MIB)])
    assert len(rig.engine.hit) == 16, "the refusal is not met again"


async def test_an_op_refused_also_in_buffered_mode_fails(memory):
    rig = Rig(memory, [Fault("write", errno=errno.EINVAL, count=1000)])
    with pytest.raises(OSError) as caught:
        await rig.transfer.write(rig.fd, 0, [rig.span(0, PAGE)])
    assert caught.value.errno == errno.EINVAL
    assert len(rig.ops) == 2


async def test_a_failed_transfer_ends_only_when_its_other_ops_have(memory):
    rig = Rig(memory, [Fault("read", nth=1, errno=errno.EIO), Fault("read", nth=3, never=True)])
    task = asyncio.ensure_future(rig.transfer.read(rig.fd, 0, [rig.span(0, 256 * KIB)]))
    await turns(50)
    assert rig.engine.held == 1
    assert not task.done(), "one op may still write into the memory"
    rig.engine.release()
    with pytest.raises(OSError):
        await task


async def test_a_failure_leaves_other_transfers_and_later_ones_alone(memory):
    rig = Rig(memory, [Fault("read", nth=5, errno=errno.EIO)], iodepth=4, reorder=True)
    content = rig.put()
    results = await asyncio.gather(
        *(rig.transfer.read(rig.fd, part * MIB // 2, [rig.span(part * MIB, MIB // 2)]) for part in range(8)),
        return_exceptions=True,
    )
    assert [type(result) for result in results].count(OSError) == 1
    for part, result in enumerate(results):
        if result is None:
            assert memory.view[part * MIB :][: MIB // 2] == content[part * MIB // 2 :][: MIB // 2]


async def test_a_closed_engine_fails_every_waiting_transfer(memory):
    rig = Rig(memory, [Fault("read", never=True, count=4)], iodepth=4)
    reads = [asyncio.ensure_future(rig.transfer.read(rig.fd, 0, [rig.span(0, 64 * KIB)])) for _ in range(2000)]
    await turns(10)
    rig.engine.release()
    rig.engine.submit = lambda ops: (_ for _ in ()).throw(RuntimeError("closed"))
    results = await asyncio.gather(*reads, return_exceptions=True)
    assert results.count(None) == 4
    assert all(isinstance(result, RuntimeError) for result in results if result is not None)


# --- late, cancelled


async def turns(count):
    """Let the loop run on; the simulated engine has no other clock."""
    for _ in range(count):
        await asyncio.sleep(0)


def expire(rig):
    """The deadline of everything under way is now."""
    for job in rig.transfer._unfinished:
        job.deadline = 0.0
    rig.transfer._on_timer()


async def test_a_late_transfer_says_when_its_memory_is_free(memory):
    rig = Rig(memory, [Fault("read", nth=1, never=True)])
    rig.put()
    task = asyncio.ensure_future(rig.transfer.read(rig.fd, 0, [rig.span(0, 256 * KIB)]))
    await turns(20)
    expire(rig)
    with pytest.raises(TransferLateError, match=r"read of 262144 bytes at offset 0.* 1 of its ops") as caught:
        await task
    assert isinstance(caught.value, TimeoutError)
    assert not caught.value.settled.done()
    assert rig.transfer.inflight_ops == 1
    rig.engine.release()
    await asyncio.wait_for(caught.value.settled, 10)
    assert (rig.transfer.inflight_ops, rig.transfer.inflight_bytes) == (0, 0)
    assert rig.transfer.counts.late == 1


async def test_a_transfer_late_in_the_queue_is_never_issued(memory):
    rig = Rig(memory, [Fault("write", never=True)], iodepth=1)
    first = asyncio.ensure_future(rig.transfer.write(rig.fd, 0, [rig.span(0, PAGE)]))
    second = asyncio.ensure_future(rig.transfer.write(rig.fd, MIB, [rig.span(MIB, PAGE)]))
    await turns(10)
    expire(rig)
    with pytest.raises(TransferLateError) as caught:
        await second
    assert caught.value.settled.done(), "the kernel never had it"
    with pytest.raises(TransferLateError) as caught:
        await first
    rig.engine.release()
    await caught.value.settled
    await turns(10)
    assert [op.offset for op in rig.ops] == [0]
    assert rig.transfer.write_queue_bytes == 0


async def test_late_completions_are_not_taken_for_those_of_the_next_transfer(memory):
    rig = Rig(memory, [Fault("read", nth=0, never=True)])
    content = rig.put()
    late = asyncio.ensure_future(rig.transfer.read(rig.fd, 0, [rig.span(0, 128 * KIB)]))
    await turns(20)
    expire(rig)
    with pytest.raises(TransferLateError):
        await late
    following = asyncio.ensure_future(rig.transfer.read(rig.fd, MIB, [rig.span(MIB, 256 * KIB)]))
    rig.engine.release()
    await following
    assert memory.view[MIB:][: 256 * KIB] == content[MIB:][: 256 * KIB]
    assert rig.transfer.inflight_ops == 0


async def test_the_deadline_also_ends_endless_retries(memory):
    rig = Rig(memory, [Fault("read", errno=errno.EAGAIN, count=1000)])
    task = asyncio.ensure_future(rig.transfer.read(rig.fd, 0, [rig.span(0, PAGE)]))
    await turns(5)
    expire(rig)
    with pytest.raises(TransferLateError) as caught:
        await task
    await asyncio.wait_for(caught.value.settled, 10)
    assert rig.transfer.inflight_ops == 0


async def test_a_cancelled_transfer_ends_when_the_kernel_is_done_with_its_memory(memory):
    rig = Rig(memory, [Fault("write", nth=1, never=True, count=2)], iodepth=2)
    task = asyncio.ensure_future(rig.transfer.write(rig.fd, 0, [rig.span(0, MIB)]))
    await turns(20)
    task.cancel()
    await turns(20)
    task.cancel()  # again: still not
    await turns(20)
    assert not task.done()
    rig.engine.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(rig.ops) == 3, "what was not issued when it was cancelled never is"
    assert (rig.transfer.inflight_ops, rig.transfer.write_queue_bytes) == (0, 0)


async def test_a_cancelled_transfer_that_hangs_ends_as_late(memory):
    rig = Rig(memory, [Fault("read", never=True)])
    task = asyncio.ensure_future(rig.transfer.read(rig.fd, 0, [rig.span(0, PAGE)]))
    await turns(5)
    task.cancel()
    await turns(5)
    expire(rig)
    with pytest.raises(TransferLateError) as caught:
        await task
    rig.engine.release()
    await asyncio.wait_for(caught.value.settled, 10)


# --- order and bounds


async def test_no_more_is_in_flight_than_allowed(memory):
    rig = Rig(memory, reorder=True, inflight_bytes_max=256 * KIB, iodepth=16)
    await asyncio.gather(*(rig.transfer.read(rig.fd, 0, [rig.span(n * MIB, MIB)]) for n in range(8)))
    assert rig.inflight_bytes_seen == 256 * KIB
    rig = Rig(memory, iodepth=3)
    seen = []
    submit = rig.engine.submit
    rig.engine.submit = lambda ops: (seen.append(rig.transfer.inflight_ops), submit(ops))
    await rig.transfer.read(rig.fd, 0, [rig.span(0, 2 * MIB)])
    assert max(seen) == 3


async def test_reads_overtake_queued_writes(memory):
    rig = Rig(memory, iodepth=2)
    writes = [asyncio.ensure_future(rig.transfer.write(rig.fd, 0, [rig.span(0, MIB)])) for _ in range(2)]
    await turns(3)
    issued = len(rig.ops)
    await rig.transfer.read(rig.fd, 0, [rig.span(2 * MIB, 256 * KIB)])
    kinds = [op.kind for op in rig.ops[issued:]]
    assert kinds[:4] == [OpKind.READ] * 4
    assert OpKind.WRITE in kinds or not all(task.done() for task in writes)
    await asyncio.gather(*writes)


async def test_writes_are_never_starved_by_reads(memory):
    rig = Rig(memory, iodepth=4)
    write = asyncio.ensure_future(rig.transfer.write(rig.fd, 0, [rig.span(0, 512 * KIB)]))
    reads = 0

    async def keep_reading():
        nonlocal reads
        while not write.done():
            await rig.transfer.read(rig.fd, MIB, [rig.span(2 * MIB, MIB)])
            reads += 1

    await asyncio.wait_for(asyncio.gather(keep_reading(), keep_reading(), write), 30)
    kinds = [op.kind for op in rig.ops]
    last = max(index for index, kind in enumerate(kinds) if kind is OpKind.WRITE)
    longest = max(len(run) for run in "".join("r" if kind is OpKind.READ else "w" for kind in kinds[:last]).split("w"))
    assert longest <= 17, "sixteen pieces of reads, then one of a write"
    assert reads


async def test_writes_have_two_pieces_in_flight_while_something_is_read_else_all(memory):
    rig = Rig(memory, [Fault("write", never=True, count=1000)], inflight_bytes_max=MIB)
    write = asyncio.ensure_future(rig.transfer.write(rig.fd, 0, [rig.span(0, 4 * MIB)]))
    await turns(10)
    assert rig.transfer.inflight_bytes == MIB, "all where there are none"
    read = asyncio.ensure_future(rig.transfer.read(rig.fd, 0, [rig.span(4 * MIB, 64 * KIB)]))
    await turns(1)
    rig.engine.release()
    await read
    for _ in range(3):
        rig.engine.faults = (Fault("write", never=True, count=1000),)
        rig.engine.release()
        await turns(5)
        assert rig.transfer.inflight_bytes == 2 * 64 * KIB, "for some megabytes after the last read, too"
    rig.engine.faults = ()
    rig.engine.release()
    await write


async def test_beside_much_that_is_read_writes_have_a_quarter_of_the_bytes_in_flight(memory):
    rig = Rig(memory, [Fault("read", never=True, count=1000)], inflight_bytes_max=MIB)
    read = asyncio.ensure_future(rig.transfer.read(rig.fd, 0, [rig.span(0, 768 * KIB)]))
    await turns(5)
    assert rig.transfer.inflight_bytes == 768 * KIB
    rig.engine.faults = (Fault("write", never=True, count=1000),)
    write = asyncio.ensure_future(rig.transfer.write(rig.fd, 0, [rig.span(MIB, MIB)]))
    await turns(5)
    assert rig.transfer.inflight_bytes == MIB
    rig.engine.faults = ()
    rig.engine.release()
    await asyncio.gather(read, write)


def order_of(rig, jobs):
    """Which of `jobs` (first byte of its file range -> name) each op belongs to, as a string."""
    return "".join(jobs[op.offset // MIB] for op in rig.ops)


@pytest.mark.parametrize("kind", ["read", "write"])
async def test_a_short_transfer_does_not_wait_for_a_long_one(memory, kind):
    rig = Rig(memory, iodepth=2)
    move = getattr(rig.transfer, kind)
    long = asyncio.ensure_future(move(rig.fd, 0, [rig.span(0, MIB)]))
    await turns(3)
    issued = len(rig.ops)
    await move(rig.fd, MIB, [rig.span(MIB, 16 * KIB)])
    assert not long.done()
    assert order_of(rig, "ls")[issued] == "s"
    await long


@pytest.mark.parametrize("kind", ["read", "write"])
async def test_a_long_transfer_gets_half_of_the_bytes_beside_any_number_of_short_ones(memory, kind):
    rig = Rig(memory, iodepth=2)
    move = getattr(rig.transfer, kind)
    long = asyncio.ensure_future(move(rig.fd, 0, [rig.span(0, MIB)]))
    await turns(1)
    shorts = [asyncio.ensure_future(move(rig.fd, MIB, [rig.span(MIB, 16 * KIB)])) for _ in range(400)]
    await long
    order = order_of(rig, "ls")
    between = [len(run) for run in order[: order.rindex("l")].strip("l").split("l")]
    assert between[0] <= 2 * 4 + 4, "two pieces' worth ahead, and"
    assert max(between[1:]) <= 4, "a piece's worth a piece from there on"
    await asyncio.gather(*shorts)


async def test_long_reads_have_eight_pieces_in_flight_while_there_are_short_ones_else_all(memory):
    rig = Rig(memory, [Fault("read", never=True, count=1000)], inflight_bytes_max=MIB)
    tasks = [asyncio.ensure_future(rig.transfer.read(rig.fd, 0, [rig.span(0, 4 * MIB)]))]
    await turns(5)
    assert rig.transfer.inflight_bytes == MIB, "all where there are none"
    tasks.append(asyncio.ensure_future(rig.transfer.read(rig.fd, 0, [rig.span(0, 16 * KIB)])))
    await turns(1)
    rig.engine.release()
    await turns(5)
    assert rig.transfer.inflight_bytes == 8 * 64 * KIB + 16 * KIB
    rig.engine.faults = ()
    rig.engine.release()
    await asyncio.gather(*tasks)


async def test_a_full_write_queue_refuses_and_counts_nothing_twice(memory):
    rig = Rig(memory, [Fault("write", never=True, count=4)], iodepth=1, write_queue_bytes_max=MIB)
    tasks = [asyncio.ensure_future(rig.transfer.write(rig.fd, 0, [rig.span(0, 512 * KIB)])) for _ in range(2)]
    await turns(5)
    waiting = rig.transfer.write_queue_bytes
    with pytest.raises(BlockingIOError, match=rf"{waiting} of {MIB} bytes"):
        await rig.transfer.write(rig.fd, 0, [rig.span(0, 512 * KIB)])
    assert rig.transfer.write_queue_bytes == waiting
    await rig.transfer.write(rig.fd, 0, [])
    rig.engine.faults = ()
    rig.engine.release()
    await asyncio.gather(*tasks)
    await rig.transfer.write(rig.fd, 0, [rig.span(0, 4 * MIB)])  # alone, it may be larger than the queue
    assert rig.transfer.write_queue_bytes == 0


@pytest.mark.parametrize(
    "options", [{"piece_bytes": 1000}, {"piece_bytes": 0}, {"inflight_bytes_max": 1}, {"timeout_s": 0}]
)
def test_impossible_limits_are_the_callers_mistake(options):
    with pytest.raises(ValueError):
        Transfer(SimEngine(SimDisk()), **options)


@pytest.mark.parametrize("seed", range(20))
async def test_any_mix_of_faults_gives_right_bytes_or_an_error(memory, seed):
    chance = random.Random(seed)
    faults = [
        Fault(
            chance.choice(["read", "write"]),
            nth=chance.randrange(120),
            **chance.choice(
                [
                    {"errno": chance.choice([errno.EAGAIN, errno.EINTR, errno.EIO, errno.ENOSPC])},
                    {"short_by": chance.choice([1, 512, PAGE, 10_000, 60_000])},
                    {"delay_turns": chance.randrange(1, 30)},
                    {"torn": True},
                ]
            ),
        )
        for _ in range(25)
    ]
    rig = Rig(memory, faults, seed=seed, reorder=True, iodepth=chance.choice([1, 3, 16]), inflight_bytes_max=512 * KIB)
    pages = {}  # what each page of the file must be, where that is certain

    async def write(first, count, slot):
        memory.view[slot * PAGE :][: count * PAGE] = content = chance.randbytes(count * PAGE)
        for page in range(first, first + count):
            pages.pop(page, None)
        try:
            await rig.transfer.write(rig.fd, first * PAGE, [rig.span(slot * PAGE, count * PAGE)])
        except OSError:
            return
        for page in range(count):
            pages[first + page] = content[page * PAGE :][:PAGE]

    async def read(first, count, slot):
        memory.view[slot * PAGE :][: count * PAGE] = b"\xaa" * (count * PAGE)
        try:
            await rig.transfer.read(rig.fd, first * PAGE, [rig.span(slot * PAGE, count * PAGE)])
        except OSError:
            return
        for page in range(count):
            if first + page in pages:
                assert memory.view[(slot + page) * PAGE :][:PAGE] == pages[first + page]

    for _ in range(8):
        await asyncio.gather(*(write(part * 128, chance.randrange(1, 100), part * 128) for part in range(8)))
        await asyncio.gather(*(read(part * 128, 100, 1024 + part * 100) for part in range(8)))
    assert (rig.transfer.inflight_ops, rig.transfer.inflight_bytes, rig.transfer.write_queue_bytes) == (0, 0, 0)


# --- the simulated disk itself


async def test_a_full_disk_is_enospc_and_space_comes_back(memory):
    rig = Rig(memory, disk=SimDisk(capacity_bytes=6 * MIB))
    with pytest.raises(OSError) as caught:
        rig.engine.create_file("g", 3 * MIB)
    assert caught.value.errno == errno.ENOSPC
    assert list(rig.disk.files) == ["f"]
    rig.engine.remove_file("f")
    rig.engine.create_file("g", 3 * MIB)


async def test_a_sparse_file_meets_enospc_when_it_is_written(memory):
    rig = Rig(memory, disk=SimDisk(capacity_bytes=MIB, preallocates=False))
    assert rig.engine.file_bytes(rig.fd) == (4 * MIB, 0)
    await rig.transfer.write(rig.fd, 0, [rig.span(0, MIB)])
    with pytest.raises(OSError) as caught:
        await rig.transfer.write(rig.fd, MIB, [rig.span(0, PAGE)])
    assert caught.value.errno == errno.ENOSPC
    assert rig.engine.file_bytes(rig.fd) == (4 * MIB, MIB)


@pytest.mark.parametrize("name", ["create_file", "open_file", "sync_file", "remove_file", "file_bytes", "close_file"])
async def test_each_file_call_can_be_made_to_fail(memory, name):
    rig = Rig(memory, [Fault(name, nth=name == "create_file", errno=errno.EIO)])
    arguments = {"create_file": ("g", PAGE), "open_file": ("f",), "remove_file": ("f",)}.get(name, (rig.fd,))
    with pytest.raises(OSError) as caught:
        getattr(rig.engine, name)(*arguments)
    assert caught.value.errno == errno.EIO
    getattr(rig.engine, name)(*arguments)


async def workload(rig):
    """Write, sync, write over, not synced; what is durable for certain: {page: content}."""
    certain = {}
    for page in range(8):
        rig.memory.view[:PAGE] = bytes([page + 1]) * PAGE
        await rig.transfer.write(rig.fd, page * PAGE, [rig.span(0, PAGE)])
        if page == 3:
            rig.engine.sync_file(rig.fd)
            certain = {old: bytes([old + 1]) * PAGE for old in range(4)}
    return certain


@pytest.mark.parametrize("seed", range(10))
async def test_what_was_synced_survives_a_crash_and_what_was_not_may_be_lost_or_torn(memory, seed):
    rig = Rig(memory, seed=seed)
    certain = await workload(rig)
    found = rig.disk.after_crash().files["f"].data
    for page, content in certain.items():
        assert found[page * PAGE :][:PAGE] == content
    for page in range(4, 8):
        sectors = {bytes(found[start:][:512]) for start in range(page * PAGE, (page + 1) * PAGE, 512)}
        assert sectors <= {bytes(512), bytes([page + 1]) * 512}


async def test_unsynced_writes_are_whole_lost_and_torn_over_the_seeds(memory):
    seen = set()
    for seed in range(30):
        rig = Rig(memory, seed=seed)
        await workload(rig)
        page = rig.disk.after_crash().files["f"].data[7 * PAGE :][:PAGE]
        seen.add({0: "lost", PAGE: "whole"}.get(page.count(8), "torn"))
    assert seen == {"whole", "lost", "torn"}


async def test_the_same_seed_crashes_the_same_way(memory):
    async def crash():
        rig = Rig(memory, seed=5, reorder=True, disk=SimDisk(5, crash_at=6))
        with pytest.raises((SimulatedCrashError, OSError)):
            await workload(rig)
        return rig.disk.after_crash().files

    first, second = await crash(), await crash()
    assert {path: file.data for path, file in first.items()} == {path: file.data for path, file in second.items()}


@pytest.mark.parametrize("crash_at", range(1, 10))
async def test_after_the_crash_nothing_changes_any_more(memory, crash_at):
    rig = Rig(memory, disk=SimDisk(3, crash_at=crash_at))
    with pytest.raises((SimulatedCrashError, OSError)):
        await workload(rig)
    assert rig.disk.crashed
    before = rig.file()
    with pytest.raises(OSError):
        await rig.transfer.write(rig.fd, 0, [rig.span(0, PAGE)])
    with pytest.raises(SimulatedCrashError):
        rig.engine.sync_file(rig.fd)
    assert rig.file() == before


async def test_completed_writes_survive_where_the_disk_promises_it(memory):
    rig = Rig(memory, disk=SimDisk(1, lose_completed=False))
    await workload(rig)
    assert rig.disk.after_crash().files["f"].data == rig.disk.files["f"].data


async def test_a_read_lands_only_when_it_completes(memory):
    rig = Rig(memory, [Fault("read", never=True)])
    content = rig.put()
    task = asyncio.ensure_future(rig.transfer.read(rig.fd, 0, [rig.span(0, PAGE)]))
    await turns(10)
    assert memory.view[:PAGE] == b"\xaa" * PAGE
    rig.engine.release()
    await task
    assert memory.view[:PAGE] == content[:PAGE]


async def test_what_a_late_write_still_holds_takes_nothing_of_what_others_may_have_in_flight(memory):
    """One disk that hangs must not keep packs of another from being written while that one is read."""
    rig = Rig(memory, [Fault("write", never=True, count=2)], inflight_bytes_max=MIB, timeout_s=0.05)
    with pytest.raises(TransferLateError):
        await rig.transfer.write(rig.fd, 0, [rig.span(0, 2 * 64 * KIB)])
    rig.engine.faults = ()
    done = asyncio.Event()

    async def read() -> None:
        while not done.is_set():
            await rig.transfer.read(rig.fd, 0, [rig.span(MIB, 64 * KIB)])

    reads = [asyncio.ensure_future(read()) for _ in range(2)]
    await turns(5)
    await asyncio.wait_for(rig.transfer.write(rig.fd, MIB, [rig.span(2 * MIB, 256 * KIB)]), 20)
    done.set()
    await asyncio.gather(*reads)
    rig.engine.release()


async def test_what_waits_for_a_time_without_reads_goes_when_it_comes_though_nothing_ends(memory):
    """One disk that hangs must not keep packs of another waiting until its deadline."""
    rig = Rig(memory, [Fault("write", never=True, count=2)])
    await rig.transfer.read(rig.fd, 0, [rig.span(0, 64 * KIB)])
    hung = asyncio.ensure_future(rig.transfer.write(rig.fd, 0, [rig.span(0, 2 * 64 * KIB)]))
    await turns(2)
    rig.engine.faults = ()
    await asyncio.wait_for(rig.transfer.write(rig.fd, MIB, [rig.span(2 * MIB, 256 * KIB)]), 20)
    assert not hung.done()
    rig.engine.release()
    await hung


def queue(order, kind, count):
    """Queue a transfer of `count` pieces of 64 KiB."""
    job = Job(kind, 0, count * 64 * KIB, None, 0.0, None)
    job.pieces.extend(Piece(job, 0, 0, 64 * KIB, ()) for _ in range(count))
    order.add(job)


def test_short_reads_owe_long_ones_two_pieces_at_most():
    """However many went while a long one had all that it may have in flight, and however long that is past."""
    order = Order(300, 64 * KIB, MIB)
    queue(order, OpKind.READ, 1)
    order.give_back(order.take(0.0)[0])
    queue(order, OpKind.READ, 400)
    held = order.take(0.0)
    assert len(held) == 8
    for _ in range(100):
        queue(order, OpKind.READ, 1)
        (piece,) = order.take(0.0)
        order.give_back(piece)
    for _ in range(80):  # the short ones are long past
        order.give_back(held.pop(0))
        held += order.take(0.0)
    queue(order, OpKind.READ, 1)
    issued: list[Piece] = []
    while not any(piece.job.short for piece in issued):
        order.give_back(held.pop(0))
        taken = order.take(0.0)
        held += taken
        issued += taken
    assert [piece.job.short for piece in issued].index(True) <= 2


@pytest.mark.parametrize(("kind", "fewest"), [(OpKind.WRITE, 2), (OpKind.READ, 8)])
def test_who_had_less_beside_short_reads_has_everything_again_some_time_after_the_last(kind, fewest):
    order = Order(64, 64 * KIB, MIB)
    queue(order, OpKind.READ, 1)
    order.give_back(order.take(10.0)[0])
    queue(order, kind, 100)
    held = order.take(10.0 + 0.9 * QUIET_S)
    assert len(held) == fewest
    held += order.take(10.0 + 1.1 * QUIET_S)
    assert len(held) == 16


def test_of_all_that_could_go_at_once_a_write_is_overtaken_by_sixteen_pieces_and_no_more():
    order = Order(64, 64 * KIB, 64 * MIB)
    queue(order, OpKind.READ, 40)
    queue(order, OpKind.WRITE, 40)
    kinds = [piece.job.kind.value for piece in order.take(0.0)]
    sixteen = ["read"] * 16
    assert kinds == [*sixteen, "write", *sixteen, "write", *["read"] * 8, *["write"] * (40 // 3 - 2)]
