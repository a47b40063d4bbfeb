"""Load jobs of a tier: from disk or slots to rows, in turns.

What must hold:
- No job waits for all of another: each gets slots for a turn, and what is in a slot already is begun at once.
- Reads hold a share of the arena at most, or stores would find no slot while a prefix larger than it is read.
- What is on disk and was lost for want of a slot is a miss to its request from then on.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence

from kvdisk.resident import Resident
from kvdisk.store import Presence, Store
from kvdisk.vllm.requests import ARENA_SHARE
from kvdisk.vllm.tier_jobs import Ended, Job, Jobs
from kvdisk.vllm.tier_requests import Chunk, Request
from kvdisk.vllm.tier_rows import Batch, Move, Rows

LOAD_WAIT_S_MAX = 10.0
"""A load that has found no slot for this long, and nobody else has, misses what is left of it."""

TURN_ROWS = 16
"""Begun for a job before the next has its turn: neighbours on disk are read together, and a short job waits little."""


class Loads(Jobs):
    """See the module's docstring. Args as for Jobs."""

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
        self._reading: set[Resident] = set()  # promoted from here, until they are copied or lost
        self._reading_max = max(1, int(store.arena.unit_count // self._slot_units * ARENA_SHARE))
        self._turn = TURN_ROWS  # what is left of it to the first job

    def add(self, job_id: int, request: Request, chunks: Sequence[Chunk], lost: Sequence[bytes] = ()) -> None:
        """Take a job and begin what is in a slot already; `advance` begins the rest.

        Args:
            job_id: vLLM's.
            request: whose it is.
            chunks: in the order in which they are wanted.
            lost: keys of the job that cannot be loaded.
        """
        job = Job(job_id, request, lost=list(lost))
        ready: list[Move] = []
        for chunk in chunks:
            resident = self._store.resident(chunk.key)
            if resident is None:
                job.waiting.append(chunk)
            else:
                self._counters["hits"] += 1
                self._take(job, chunk, resident, ready)
        if ready:
            self._rows.start(job, ready, to_slots=False)
        self._enter(job)

    def advance(self) -> None:
        """Begin what can be begun, in turns; give up what waited too long."""
        while self._queue:
            job = self._queue[0]
            self._begin(job)
            if job.waiting and self._turn == 0:
                self._queue.rotate(-1)
            elif job.waiting and not self._has_waited(job):
                return
            else:
                self._queue.popleft()
                job.lost += [chunk.key for chunk in self._take_waiting(job)]
                self._end_if_done(job)
            self._turn = TURN_ROWS

    def drop_of(self, request: Request) -> None:
        """What is not begun of a request's jobs is wanted by nobody."""
        self._drop([job for job in self._queue if job.request is request])

    def drop_all(self) -> None:
        """What is not begun of any job is wanted by nobody."""
        self._drop(list(self._queue))

    def _drop(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        for job in jobs:
            job.dropped += [chunk.key for chunk in self._take_waiting(job)]
            self._end_if_done(job)
        self._queue = deque(job for job in self._queue if job.waiting)
        self._turn = TURN_ROWS

    def _begin(self, job: Job) -> None:
        """Begin the first chunks of a job, as many as slots and its turn allow."""
        ready: list[Move] = []
        while job.waiting and self._turn > 0:
            chunk = job.waiting[0]
            resident = self._store.resident(chunk.key)
            if resident is None:
                if chunk.key not in self._store.index:
                    job.lost.append(self._next(job).key)
                    self._counters["misses"] += 1
                    continue
                resident = self._promote(job, chunk)
                if resident is None:
                    break
            else:
                self._counters["hits"] += 1
            self._turn -= 1
            self._take(job, self._next(job), resident, ready)
        if ready:
            self._rows.start(job, ready, to_slots=False)

    def _promote(self, job: Job, chunk: Chunk) -> Resident | None:
        if len(self._reading) >= self._reading_max or not self._may_ask(job):
            return None
        resident = self._store.promote(chunk.key, chunk.position)
        if resident is None:
            job.was_refused = True
        else:
            self._reading.add(resident)
        return resident

    def _take(self, job: Job, chunk: Chunk, resident: Resident, ready: list[Move]) -> None:
        """Copy a slot to the chunk's row: at once, with those in `ready`, or when its bytes are there."""
        job.begun += 1
        self._store.pin(resident)
        if resident.is_hit:
            ready.append(Move(chunk.row, resident))
        elif resident in self._arriving:
            self._arriving[resident].append((job, chunk.row))
        else:
            self._arriving[resident] = [(job, chunk.row)]
            self._by_key.setdefault(chunk.key, []).append(resident)

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
                        job.begun -= 1
                        job.lost.append(resident.key)
                        self._let_go(resident)
                        self._end_if_done(job)
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
            self._let_go(resident)
        if batch.ok:
            job.copied += len(batch.moves)
            self._counters["chunks_loaded"] += len(batch.moves)
        self._end_if_done(job)

    def _let_go(self, resident: Resident) -> None:
        self._reading.discard(resident)
        self._store.unpin(resident)

    def _note_end(self, job: Job) -> None:
        self._counters["loads_dropped"] += len(job.dropped)
        if job.request.is_running:
            kept = [key for key in job.lost if self._store.presence(key) is not Presence.ABSENT]
            self._counters["misses_no_slot"] += len(kept)
            job.request.refused.update(kept)
