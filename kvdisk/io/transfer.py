"""Complete transfers on top of an engine: whole or failed, bounded, in time.

An engine reports what the kernel said about one op: a count, perhaps short, or an errno. Here that becomes "all bytes
moved" or one exception. Invariants:

- A transfer that returns moved every byte, counted by the kernel; nothing is inferred from what was asked.
- When `read` or `write` ends, returned or raised, the kernel has given back all its memory. One exception, and it says
  so: `TransferLateError`, whose `settled` resolves when it has. Cancelling the awaiting task waits like that, too.
- At most `inflight_bytes_max` bytes and `engine.iodepth` ops are with the engine; queued writes are bounded in bytes.
- One future a transfer, none an op, and one timer for all: asyncio spends more on a future than the kernel on 1 MiB of
  huge pages.

Which piece goes when, `order.py` says.
"""

import asyncio
import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvdisk.io.errnos import Meaning, classify
from kvdisk.io.order import QUIET_S, Job, Order, Piece
from kvdisk.io.protocol import Engine, OpKind, Span
from kvdisk.io.spans import cut, merged, skip

PIECE_BYTES: Final = 1 << 20
"""Of an op. Larger ones cost a little less CPU and reach the disk as larger requests, which some take more slowly: a
virtio disk by 15 to 20 % at 4 MiB (docs/performance.md)."""

READ_PIECE_BYTES: Final = 512 << 10
"""Of a read, where that is less: 5 to 9 % faster there than 1 MiB, which writes are not."""

_TRIES_MAX: Final = 8
_BACK_OFF_S: Final = 0.001  # doubled at each try: a quarter of a second in all


class TransferLateError(TimeoutError):
    """A transfer missed its deadline. Its memory must not be reused before `settled` is done.

    Being a TimeoutError it is an OSError, too: catch it before those, after which memory is free.
    """

    def __init__(self, text: str, settled: "asyncio.Future[None]") -> None:
        super().__init__(text)
        self.settled = settled


@dataclass(slots=True)
class TransferCounts:
    """What went through, for reports."""

    ops: int = 0
    short_results: int = 0
    retries: int = 0
    errors: int = 0
    late: int = 0


class Transfer:
    """Reads and writes of any size and number of spans, through `engine`. One event loop's thread uses it.

    Args:
        engine: started; shared with nobody else, or its depth is shared as well.
        alignment: of offsets, and of starts and lengths of spans; see `probe.Alignment`.
        piece_bytes: largest op; a multiple of `alignment`.
        inflight_bytes_max: bytes with the engine at most.
        write_queue_bytes_max: bytes of writes waiting at most; see `write`.
        timeout_s: from the call to its end.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        alignment: int = 4096,
        piece_bytes: int = PIECE_BYTES,
        inflight_bytes_max: int = 64 << 20,
        write_queue_bytes_max: int = 1 << 30,
        timeout_s: float = 30.0,
    ) -> None:
        if alignment <= 0 or piece_bytes <= 0 or piece_bytes % alignment:
            raise ValueError(f"piece_bytes must be a positive multiple of {alignment}, not {piece_bytes}")
        if inflight_bytes_max < piece_bytes or write_queue_bytes_max < 0 or timeout_s <= 0:
            raise ValueError("inflight_bytes_max must hold one piece; write_queue_bytes_max and timeout_s be positive")
        self.counts = TransferCounts()
        self._engine = engine
        self._alignment = alignment
        self._piece_bytes = piece_bytes
        self._write_queue_bytes_max = write_queue_bytes_max
        self._timeout_s = timeout_s
        self._order = Order(engine.iodepth, piece_bytes, inflight_bytes_max)
        self._unfinished: dict[Job, None] = {}  # by deadline, for all have the same time
        self._timer: asyncio.TimerHandle | None = None
        self._quiet: asyncio.TimerHandle | None = None
        self._pumping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        engine.after_done = self._pump

    @property
    def inflight_ops(self) -> int:
        """Ops with the engine or about to be tried again."""
        return self._order.inflight_ops

    @property
    def inflight_bytes(self) -> int:
        """Bytes of these."""
        return self._order.inflight_bytes

    @property
    def write_queue_bytes(self) -> int:
        """Bytes of writes that wait to be issued."""
        return self._order.write_queue_bytes

    async def read(self, fd: int, offset: int, spans: Sequence[Span]) -> None:
        """Fill `spans`, in order, from the file at `offset`.

        Args:
            spans: borrowed until this ends; any number, each aligned.

        Raises:
            ValueError: misaligned or outside its memory; nothing was submitted.
            OSError: an error of the disk, see `errnos.classify`; EIO also where the file ends before the spans do.
            TransferLateError: not done in time.
        """
        await self._run(OpKind.READ, fd, offset, spans)

    async def write(self, fd: int, offset: int, spans: Sequence[Span]) -> None:
        """Empty `spans`, in order, into the file at `offset`. Done is not durable: that takes `Engine.sync_file`.

        Args:
            spans: borrowed until this ends, and not changed; any number, each aligned.

        Raises:
            BlockingIOError: writes of `write_queue_bytes_max` wait already; nothing was submitted.
            ValueError, OSError, TransferLateError: as for `read`.
        """
        await self._run(OpKind.WRITE, fd, offset, spans)

    async def _run(self, kind: OpKind, fd: int, offset: int, spans: Sequence[Span]) -> None:
        job = self._accept(kind, fd, offset, spans)
        if job is None:
            return
        self._pump()
        try:
            await job.future
        except asyncio.CancelledError:
            # The kernel cannot be cancelled: it writes into this memory until it is done.
            job.cancelled = job.over = True
            self._order.drop(job)
            while job.outstanding and not job.late:
                job.future = asyncio.get_running_loop().create_future()
                with contextlib.suppress(asyncio.CancelledError):
                    await job.future
            if job.outstanding:
                raise self._late_error(job) from None
            raise
        finally:
            self._unfinished.pop(job, None)

    def _accept(self, kind: OpKind, fd: int, offset: int, spans: Sequence[Span]) -> Job | None:
        """Check, cut and queue a transfer; None if there is nothing to move."""
        if offset < 0 or offset % self._alignment:
            raise ValueError(f"offset {offset}: direct I/O wants multiples of {self._alignment}")
        runs = merged(spans, self._alignment)
        total = sum([length for _, _, length in runs])
        if not total:
            return None
        waiting = self._order.write_queue_bytes
        if kind is OpKind.WRITE and waiting and waiting + total > self._write_queue_bytes_max:
            text = f"{waiting} of {self._write_queue_bytes_max} bytes of writes wait already"
            raise BlockingIOError(errno.EAGAIN, text)
        loop = self._loop = asyncio.get_running_loop()
        job = Job(kind, offset, total, loop.create_future(), loop.time() + self._timeout_s, self._on_result)
        most = self._piece_bytes if kind is OpKind.WRITE else min(self._piece_bytes, READ_PIECE_BYTES)
        for length, piece in cut(runs, total, most, self._alignment):
            job.pieces.append(Piece(job, fd, offset, length, piece))
            offset += length
        self._order.add(job)
        self._unfinished[job] = None
        if self._timer is None:
            self._timer = loop.call_at(job.deadline, self._on_timer)
        return job

    # --- issuing

    def _pump(self) -> None:
        """Issue what fits, in one call of the engine."""
        if self._pumping or self._loop is None:  # a refused submission ends pieces, which pumps: one level is enough
            return
        self._pumping = True
        try:
            while pieces := self._order.take(self._loop.time()):
                self._submit(pieces)
        finally:
            self._pumping = False
        if self._quiet is None and self._order.has_queued:
            self._quiet = self._loop.call_later(QUIET_S, self._on_quiet)

    def _on_quiet(self) -> None:
        """What waited may go by now, even if nothing has ended since: all that is in flight may hang."""
        self._quiet = None
        self._pump()

    def _submit(self, pieces: list[Piece]) -> None:
        self.counts.ops += len(pieces)
        try:
            self._engine.submit(pieces)
        except Exception as error:  # a closed engine, or one of another thread: it took none of them
            for piece in pieces:
                self._fail(piece, error)

    def _again(self, piece: Piece) -> None:
        """Submit a piece once more, which keeps its share of the budgets."""
        if piece.job.over:
            self._settle(piece)
        else:
            self._submit([piece])
        self._pump()

    # --- results

    def _on_result(self, piece: Piece, result: int) -> None:
        """An op ended. What may go next is issued when the engine has told of all that ended with it."""
        if result == piece.length or piece.job.over:
            self._settle(piece)
        elif result >= 0:
            self._short(piece, result)
        else:
            self._refused(piece, -result)

    def _short(self, piece: Piece, result: int) -> None:
        """Go on from where the kernel stopped, at the last aligned boundary: direct I/O takes no other."""
        self.counts.short_results += 1
        moved = result - result % self._alignment
        if moved:
            piece.offset += moved
            piece.length -= moved
            piece.spans = skip(piece.spans, moved)
            piece.tries = 0
            self._again(piece)
        elif piece.job.kind is OpKind.READ and (result == 0 or piece.tries):
            self._fail(piece, self._error(errno.EIO, piece, "the file is shorter than its index says"))
        else:
            self._back_off(piece, errno.EIO)

    def _refused(self, piece: Piece, code: int) -> None:
        meaning = classify(code)
        if meaning is Meaning.RETRY:
            self._back_off(piece, code)
        elif meaning is Meaning.UNSUPPORTED and not piece.refused:
            piece.refused = True
            self.counts.retries += 1
            kind = piece.job.kind.value
            self._engine.use_buffered(f"{os.strerror(code)} for an aligned {kind} of {piece.length} bytes")
            self._again(piece)
        else:
            self._fail(piece, self._error(code, piece, os.strerror(code)))

    def _back_off(self, piece: Piece, code: int) -> None:
        """Try again a little later, if it has not been tried too often."""
        piece.tries += 1
        if piece.tries > _TRIES_MAX:
            self._fail(piece, self._error(code, piece, f"{os.strerror(code)}, {_TRIES_MAX} times over"))
            return
        self.counts.retries += 1
        asyncio.get_running_loop().call_later(_BACK_OFF_S * 2 ** (piece.tries - 1), self._again, piece)

    def _error(self, code: int, piece: Piece, text: str) -> OSError:
        self.counts.errors += 1
        return OSError(code, f"{text}: {piece.job.kind.value} of {piece.length} bytes at offset {piece.offset}")

    def _fail(self, piece: Piece, error: Exception) -> None:
        """The transfer fails with its first error, once the kernel has given back its other pieces."""
        if not piece.job.over:
            piece.job.error = error
            piece.job.over = True
            self._order.drop(piece.job)
        self._settle(piece)

    # --- ends

    def _settle(self, piece: Piece) -> None:
        """The kernel has given back this piece."""
        job = piece.job
        self._order.give_back(piece)
        if not job.outstanding and not job.pieces:
            self._end(job)

    def _end(self, job: Job) -> None:
        if job.settled is not None:
            if not job.settled.done():
                job.settled.set_result(None)
        elif job.future.done():  # cancelled; the task has not run since
            return
        elif job.error is not None and not job.cancelled:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(None)

    def _on_timer(self) -> None:
        """Expire what is past its deadline, and come again for the next."""
        self._timer = None
        loop = asyncio.get_running_loop()
        for job in list(self._unfinished):
            if job.deadline > loop.time():
                self._timer = loop.call_at(job.deadline, self._on_timer)
                break
            del self._unfinished[job]
            self._expire(job)
        self._pump()  # what is late keeps nobody from a share any more

    def _expire(self, job: Job) -> None:
        """Past the deadline: what was not issued never will be, and what was is waited for by `settled`."""
        self.counts.late += 1
        self._order.expire(job)
        job.settled = asyncio.get_running_loop().create_future()
        if not job.outstanding:
            job.settled.set_result(None)
        if not job.future.done():
            job.future.set_exception(self._late_error(job))

    def _late_error(self, job: Job) -> TransferLateError:
        assert job.settled is not None
        text = f"{job} not done after {self._timeout_s} s; {job.outstanding} of its ops are still with the kernel"
        return TransferLateError(text, job.settled)
