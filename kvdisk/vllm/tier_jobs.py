"""vLLM's jobs between its primary tier and a store: stores in order, loads in order, one result each.

    store   row -> slot, on a thread; then the chunk is a hit and is flushed. The job has ended with the copies, so that
            vLLM can reuse the rows: it does not wait for the disk.
    load    disk -> slot, verified, unless it is there already; slot -> row, on a thread.

Each job's chunks are begun in its order, as slots allow, and jobs in theirs. What must hold:
- A load reports a chunk as loaded only after its verified bytes are in the row. Each chunk has its own fate; the others
  of the job are kept.
- A slot stays as it is, by a state (stores) or a pin (loads), while a thread copies from or to it.
- A job ends: reads by the store's deadlines, copies by memory's speed, and what waits for a slot by the bounds here.
"""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvdisk.resident import Resident
from kvdisk.store import Presence, Store
from kvdisk.vllm.tier_rows import Batch, Move, Rows

STORE_WAIT_S_MAX = 2.0
"""What is offered faster than the disk takes it waits in vLLM's rows for this long, then its tail is not kept."""

STORE_WAIT_SHARE = 0.25
"""Of the primary tier's rows, that may wait so; they cannot be evicted meanwhile."""

LOAD_WAIT_S_MAX = 10.0
"""A load that has found no slot for this long, with everything before it, misses what is left of it."""


class Chunk(NamedTuple):
    """One chunk of a job. position and parent: for stores, see Resident."""

    key: bytes
    row: int
    group: int = 0
    position: int = 0
    parent: bytes = b""


class Ended(NamedTuple):
    """A job's end. good: the chunks that were stored or loaded; lost: the others."""

    job_id: int
    request_id: str
    is_load: bool
    good: list[bytes]
    lost: list[bytes]
    seconds: float


@dataclass(slots=True, eq=False)
class Job:
    """A job under way. waiting: not begun. begun: how many are on their way."""

    job_id: int
    request_id: str
    started: float
    waiting: deque[Chunk]
    begun: int = 0
    good: list[bytes] = field(default_factory=list)
    lost: list[bytes] = field(default_factory=list)


class _Jobs(ABC):
    """What stores and loads have in common: a queue, and the ends of jobs.

    Args:
        store: where the chunks are.
        rows: the primary tier's.
        counters: where it counts.
        ended: where ends go.
        clock: seconds, monotonic.
    """

    is_load: bool
    wait_s_max: float

    def __init__(
        self,
        store: Store,
        rows: Rows[Job],
        counters: Counter[str],
        ended: list[Ended],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._rows = rows
        self._counters = counters
        self._ended = ended
        self._clock = clock
        self._queue: deque[Job] = deque()  # jobs with chunks that are not begun
        self.jobs: set[Job] = set()
        self._moved_at = 0.0  # when the queue last got on

    def add(
        self,
        job_id: int,
        request_id: str,
        chunks: Sequence[Chunk],
        *,
        good: Sequence[bytes] = (),
        lost: Sequence[bytes] = (),
    ) -> None:
        """Take a job; `advance` begins it. good, lost: chunks of it that need nothing, or cannot be had."""
        now = self._clock()
        job = Job(job_id, request_id, now, deque(chunks), good=list(good), lost=list(lost))
        self.jobs.add(job)
        if job.waiting:
            if not self._queue:
                self._moved_at = now
            self._queue.append(job)
        else:
            self._end_if_done(job)

    def advance(self) -> None:
        """Begin what can be begun; give up what waited too long."""
        while self._queue:
            job = self._queue[0]
            before = len(job.waiting)
            self._begin(job)
            if len(job.waiting) < before:
                self._moved_at = self._clock()
            if job.waiting:
                if self._clock() - self._moved_at <= self.wait_s_max and not self._is_hopeless():
                    return
                self.give_up(job)
                continue
            self._queue.popleft()
            self._end_if_done(job)

    def give_up(self, job: Job) -> None:
        """What is not begun of a job is lost."""
        job.lost += [chunk.key for chunk in job.waiting]
        job.waiting.clear()
        if job in self._queue:
            self._queue.remove(job)
        self._end_if_done(job)

    def give_up_all(self) -> None:
        """What is not begun of any job is lost."""
        for job in list(self._queue):
            self.give_up(job)

    @abstractmethod
    def _begin(self, job: Job) -> None:
        """Begin the first chunks of a job, as many as slots allow."""

    @abstractmethod
    def copied(self, batch: Batch[Job]) -> None:
        """A batch of a job's copies has ended."""

    def _is_hopeless(self) -> bool:
        """Whether nothing is on its way that could make room."""
        return not self._store.busy and not self._rows.busy

    def _end_if_done(self, job: Job) -> None:
        if job.waiting or job.begun:
            return
        self.jobs.discard(job)
        self._ended.append(
            Ended(job.job_id, job.request_id, self.is_load, job.good, job.lost, self._clock() - job.started)
        )


class Stores(_Jobs):
    """From rows to slots; the store flushes them."""

    is_load = False
    wait_s_max = STORE_WAIT_S_MAX

    def add(
        self,
        job_id: int,
        request_id: str,
        chunks: Sequence[Chunk],
        *,
        good: Sequence[bytes] = (),
        lost: Sequence[bytes] = (),
    ) -> None:
        """Take a job. What is here already is stored; the rest goes by position, so that a tail is what may be lost."""
        new: dict[bytes, Chunk] = {}
        there = list(good)
        for chunk in chunks:
            if self._store.presence(chunk.key) is Presence.ABSENT:
                new[chunk.key] = chunk
            else:
                self._store.touch(chunk.key)
                there.append(chunk.key)
        super().add(job_id, request_id, sorted(new.values(), key=lambda chunk: chunk.position), good=there, lost=lost)

    def trim(self) -> None:
        """Lose the tails of the newest jobs, where more rows wait than may."""
        excess = sum(len(job.waiting) for job in self._queue) - int(self._rows.count * STORE_WAIT_SHARE)
        for job in reversed(list(self._queue)):
            while excess > 0 and job.waiting:
                job.lost.append(job.waiting.pop().key)
                excess -= 1
            if not job.waiting:
                self.give_up(job)

    def _begin(self, job: Job) -> None:
        moves = []
        while job.waiting:
            chunk = job.waiting[0]
            if self._store.presence(chunk.key) is not Presence.ABSENT:  # of a job that came before
                job.good.append(chunk.key)
                job.waiting.popleft()
                continue
            parts = self._store.parts_of(chunk.group)
            resident = self._store.reserve(chunk.key, chunk.group, parts, chunk.position, chunk.parent)
            if resident is None:
                break
            moves.append(Move(chunk.row, resident))
            job.waiting.popleft()
        if moves:
            job.begun += len(moves)
            self._rows.start(job, moves, to_slots=True)

    def _end_if_done(self, job: Job) -> None:
        if not job.waiting and not job.begun and job in self.jobs:
            self._counters["stores_cut"] += len(job.lost)
        super()._end_if_done(job)

    def copied(self, batch: Batch[Job]) -> None:
        """The chunks are hits from now on."""
        job, residents = batch.owner, [move.resident for move in batch.moves]
        job.begun -= len(residents)
        keys = [resident.key for resident in residents]
        if batch.ok:
            self._store.commit(residents)
            job.good += keys
        else:
            for resident in residents:
                self._store.abandon(resident)
            job.lost += keys
        self._end_if_done(job)


class Loads(_Jobs):
    """From disk or slots to rows."""

    is_load = True
    wait_s_max = LOAD_WAIT_S_MAX

    def __init__(
        self,
        store: Store,
        rows: Rows[Job],
        counters: Counter[str],
        ended: list[Ended],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(store, rows, counters, ended, clock)
        self._arriving: dict[Resident, list[tuple[Job, int]]] = {}  # pinned, not hits yet -> which rows want them
        self._by_key: dict[bytes, list[Resident]] = {}  # those, by key

    def _begin(self, job: Job) -> None:
        ready = []
        while job.waiting:
            chunk = job.waiting[0]
            resident = self._store.resident(chunk.key)
            if resident is None:
                if chunk.key not in self._store.index:
                    job.lost.append(job.waiting.popleft().key)
                    self._counters["misses"] += 1
                    continue
                resident = self._store.promote(chunk.key, chunk.position)
                if resident is None:
                    break
            else:
                self._counters["hits"] += 1
            job.waiting.popleft()
            job.begun += 1
            self._store.pin(resident)
            if resident.is_hit:
                ready.append(Move(chunk.row, resident))
            elif resident in self._arriving:
                self._arriving[resident].append((job, chunk.row))
            else:
                self._arriving[resident] = [(job, chunk.row)]
                self._by_key.setdefault(chunk.key, []).append(resident)
        if ready:
            self._rows.start(job, ready, to_slots=False)

    def settled(self, keys: Sequence[bytes]) -> None:
        """Slots of these keys came to rest, or were lost: chunks that wait for them are copied, or lost, too."""
        ready: dict[Job, list[Move]] = {}
        for key in keys:
            for resident in self._by_key.pop(key, ()):
                if not resident.forgotten and not resident.is_hit:
                    self._by_key.setdefault(key, []).append(resident)
                    continue
                for job, row in self._arriving.pop(resident):
                    if resident.is_hit and not resident.forgotten:
                        ready.setdefault(job, []).append(Move(row, resident))
                    else:
                        self._lose(job, resident)
        for job, moves in ready.items():
            self._rows.start(job, moves, to_slots=False)

    def copied(self, batch: Batch[Job]) -> None:
        """The rows are loaded."""
        job = batch.owner
        job.begun -= len(batch.moves)
        for _, resident in batch.moves:
            (job.good if batch.ok else job.lost).append(resident.key)
            # vLLM has it in its own memory from now on, so its slot is the first to be given up.
            resident.used = False
            self._store.unpin(resident)
        self._counters["chunks_loaded"] += len(batch.moves) * batch.ok
        self._end_if_done(job)

    def _lose(self, job: Job, resident: Resident) -> None:
        job.begun -= 1
        job.lost.append(resident.key)
        self._store.unpin(resident)
        self._end_if_done(job)
