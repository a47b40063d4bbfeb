"""Which piece of which transfer goes to the engine next: order, and what may be in flight. Pure.

- At most `inflight_bytes_max` bytes and `iodepth` ops are in flight.
- Reads go before writes: a request waits for a read, nobody waits for a write. Writes never starve: after
  `_READ_PIECES_A_WRITE` pieces' worth of reads have overtaken a waiting write, one piece of a write goes.
- Within a direction, short transfers, of a piece's bytes, go before long ones: a request that wants one chunk does not
  wait for another's thousand, nor a segment's header for packs. They never starve the long: once they are
  `_LEAD_PIECES` ahead, each gets half of the bytes.
- Otherwise transfers go in the order they came.

A read's latency is made of what it meets in the device. So while there are reads, writes have two pieces in flight, or
where more is being read a quarter of all, else everything: files that were never written before need it
(docs/performance.md), and only the first read after a while meets it. And while there are short reads, long ones have
eight pieces in flight, which keep a disk busy, else everything. "While" is until `QUIET_S` after the last was issued.
A piece is here `piece_bytes`, whatever ops a transfer is cut into.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Final

from kvdisk.io.protocol import Op, OpKind, Span

_WRITE: Final = OpKind.WRITE  # looked up for each piece: an Enum's attribute takes a detour
_LEAD_PIECES: Final = 2
_READ_PIECES_A_WRITE: Final = 16
_WRITE_PIECES_BESIDE_READS: Final = 2
_LONG_PIECES_BESIDE_SHORT: Final = 8

QUIET_S: Final = 0.1
"""Some steps of a scheduler: reads that come closer together than that are one load."""


class Job:
    """One transfer: pieces not issued yet, and how many are with the engine (or wait to be tried again)."""

    __slots__ = (
        "cancelled",
        "deadline",
        "error",
        "future",
        "held_bytes",
        "kind",
        "late",
        "offset",
        "on_result",
        "outstanding",
        "over",
        "pieces",
        "settled",
        "short",
        "total",
    )

    def __init__(
        self,
        kind: OpKind,
        offset: int,
        total: int,
        future: "asyncio.Future[None]",
        deadline: float,
        on_result: "Callable[[Piece, int], None]",
    ) -> None:
        self.kind = kind
        self.offset = offset
        self.total = total
        self.future = future
        self.deadline = deadline
        self.on_result = on_result
        self.pieces: deque[Piece] = deque()
        self.outstanding = 0
        self.held_bytes = 0  # of pieces that are outstanding
        self.error: Exception | None = None
        self.cancelled = False
        self.late = False
        self.over = False  # cancelled, late or failed: its end is decided, and only what the kernel holds is waited for
        self.settled: asyncio.Future[None] | None = None
        self.short = False

    def __str__(self) -> str:
        return f"{self.kind.value} of {self.total} bytes at offset {self.offset}"


class Piece(Op):
    """What one op moves; a short or refused op is submitted again from the same piece."""

    __slots__ = ("held_bytes", "job", "length", "refused", "tries")

    def __init__(self, job: Job, fd: int, offset: int, length: int, spans: tuple[Span, ...]) -> None:
        self.kind = job.kind
        self.fd = fd
        self.offset = offset
        self.spans = spans
        self.job = job
        self.length = length
        self.held_bytes = length  # of the bytes in flight, until the whole piece is done
        self.tries = 0  # without progress
        self.refused = False

    def done(self, result: int) -> None:
        """See `Op.done`."""
        self.job.on_result(self, result)


class _Lanes:
    """The transfers of one direction that have something to issue, short ones and long ones. Sizes in bytes."""

    __slots__ = ("_lead", "_lead_max", "long", "short")

    def __init__(self, lead_max: int) -> None:
        self.short: deque[Job] = deque()
        self.long: deque[Job] = deque()
        self._lead = 0  # that short ones had more than long ones that were waiting
        self._lead_max = lead_max

    def first(self, long_room: int) -> tuple[Job | None, int]:
        """Whose piece is next, and how much of it may go before this is asked again: at least that piece.

        long_room: what a long one may take.
        """
        short = _first(self.short) if self.short else None
        long = _first(self.long) if self.long else None
        if long is None or long.pieces[0].length > long_room:
            return short, 0
        if short is None:
            return long, long_room
        return (long if self._lead >= self._lead_max else short), 0

    def taken(self, job: Job, length: int) -> None:
        """Pieces of `job` were issued."""
        if not job.short:
            self._lead = max(0, self._lead - length)
        elif self.long:
            self._lead = min(self._lead_max, self._lead + length)  # or paying it off would keep short ones waiting


class Order:
    """Queues of transfers. Sizes in bytes, times in seconds of one clock.

    Args:
        iodepth, inflight_bytes_max: bounds of what is in flight.
        piece_bytes: of the largest piece; what the rules above count in.
    """

    def __init__(self, iodepth: int, piece_bytes: int, inflight_bytes_max: int) -> None:
        self.inflight_ops = 0  # pieces with the engine or about to be tried again
        self.inflight_bytes = 0
        self.write_queue_bytes = 0
        self._iodepth = iodepth
        self._inflight_bytes_max = inflight_bytes_max
        self._piece_bytes = piece_bytes
        self._reads_a_write_bytes = _READ_PIECES_A_WRITE * piece_bytes
        self._writes_beside_reads_bytes = min(inflight_bytes_max, _WRITE_PIECES_BESIDE_READS * piece_bytes)
        self._long_beside_short_bytes = min(inflight_bytes_max, _LONG_PIECES_BESIDE_SHORT * piece_bytes)
        self._reads = _Lanes(_LEAD_PIECES * piece_bytes)
        self._writes = _Lanes(_LEAD_PIECES * piece_bytes)
        self._write_inflight_bytes = 0
        self._long_read_inflight_bytes = 0
        self._overtaken_bytes = 0  # reads issued since a write has been waiting
        self._read_at = self._short_read_at = -inf  # when the last of them was issued

    def add(self, job: Job) -> None:
        """Queue a transfer whose pieces are cut."""
        lanes = self._reads
        if job.kind is _WRITE:
            self.write_queue_bytes += job.total
            lanes = self._writes
        job.short = job.total <= self._piece_bytes
        (lanes.short if job.short else lanes.long).append(job)

    @property
    def has_queued(self) -> bool:
        """Whether something may wait to be issued."""
        return bool(self.write_queue_bytes or self._reads.short or self._reads.long)

    def take(self, now: float) -> list[Piece]:
        """The pieces that may go now, which count as in flight from now on."""
        taken: list[Piece] = []
        while self.inflight_ops < self._iodepth:
            job, room = self._next(now)
            if job is None:
                break
            pieces = job.pieces
            size = pieces[0].length
            if self.inflight_ops and self.inflight_bytes + size > self._inflight_bytes_max:
                break
            room = min(room, self._inflight_bytes_max - self.inflight_bytes)
            most = len(taken) + self._iodepth - self.inflight_ops
            before = len(taken)
            taken.append(pieces.popleft())
            while pieces and len(taken) < most and size + pieces[0].length <= room:
                size += pieces[0].length
                taken.append(pieces.popleft())
            self._issue(job, len(taken) - before, size, now)
        return taken

    def give_back(self, piece: Piece) -> None:
        """The kernel is done with a piece for good."""
        job, size = piece.job, piece.held_bytes
        job.outstanding -= 1
        job.held_bytes -= size
        self.inflight_ops -= 1
        self.inflight_bytes -= size
        if job.late:
            return
        if job.kind is _WRITE:
            self._write_inflight_bytes -= size
        elif not job.short:
            self._long_read_inflight_bytes -= size

    def expire(self, job: Job) -> None:
        """A transfer is late: forget what was not issued. What was may never be given back, and must not keep others
        from their shares of what is in flight."""
        self.drop(job)
        if job.kind is _WRITE:
            self._write_inflight_bytes -= job.held_bytes
        elif not job.short:
            self._long_read_inflight_bytes -= job.held_bytes
        job.late = job.over = True

    def drop(self, job: Job) -> None:
        """Forget what of a transfer was not issued yet."""
        if job.kind is _WRITE:
            self.write_queue_bytes -= sum(piece.length for piece in job.pieces)
        job.pieces.clear()

    def _next(self, now: float) -> tuple[Job | None, int]:
        """As of `_Lanes.first`."""
        room = self._inflight_bytes_max
        if now - self._short_read_at < QUIET_S:
            room = self._long_beside_short_bytes
        read, read_room = self._reads.first(room - self._long_read_inflight_bytes)
        if not self.write_queue_bytes:
            return read, read_room
        room = self._inflight_bytes_max
        if now - self._read_at < QUIET_S:
            reading = self.inflight_bytes - self._write_inflight_bytes
            room = min(room, max(self._writes_beside_reads_bytes, reading // 3))
        room -= self._write_inflight_bytes
        write, write_room = self._writes.first(room)
        if write is not None and write.pieces[0].length > room:
            write = None
        if read is None:
            return write, write_room
        overtake = self._reads_a_write_bytes - self._overtaken_bytes
        if write is not None and overtake <= 0:
            return write, 0
        return read, min(
            read_room, max(0, overtake)
        )  # also of a write without room: what is taken now may give it some

    def _issue(self, job: Job, count: int, size: int, now: float) -> None:
        """Count pieces of `job` as in flight."""
        job.outstanding += count
        job.held_bytes += size
        self.inflight_ops += count
        self.inflight_bytes += size
        if job.kind is _WRITE:
            self._overtaken_bytes = 0
            self.write_queue_bytes -= size
            self._write_inflight_bytes += size
            self._writes.taken(job, size)
            return
        self._read_at = now
        if job.short:
            self._short_read_at = now
        else:
            self._long_read_inflight_bytes += size
        if self.write_queue_bytes:
            self._overtaken_bytes += size
        self._reads.taken(job, size)


def _first(jobs: deque[Job]) -> Job | None:
    """The first transfer with something to issue; those without are done with here."""
    while jobs and not jobs[0].pieces:
        jobs.popleft()
    return jobs[0] if jobs else None
