"""vLLM's jobs between its primary tier and a store: what stores (tier_stores.py) and loads (tier_loads.py) share.

    store   row -> slot, on a thread; then the chunk is a hit and is flushed. The job has ended with the copies, so that
            vLLM can reuse the rows: it does not wait for the disk.
    load    disk -> slot, verified, unless it is there already; slot -> row, on a thread.

What must hold:
- A load reports a chunk as loaded only after its verified bytes are in the row. Each chunk has its own fate; the others
  of the job are kept.
- A slot stays as it is, by a state (stores) or a pin (loads), while a thread copies from or to it.
- A job ends once: reads by the store's deadlines, copies by memory's speed, and what waits for a slot by the bounds
  here.
"""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvdisk.plan import footprint
from kvdisk.store import Store
from kvdisk.vllm.tier_requests import Chunk, Request
from kvdisk.vllm.tier_rows import Batch, Rows


@dataclass(slots=True, eq=False)
class Job:
    """A job under way, or its end.

    Attributes:
        started: when.
        waiting: chunks that are not begun, parents first. begun: how many are on their way.
        good: chunks that are stored or loaded. copied: how many of them were copied for it. lost: the others.
        dropped: those that were not begun because nobody wants them any more.
        was_refused: it has found no slot before; that counts once.
    """

    job_id: int
    request: Request
    started: float = 0.0
    waiting: deque[Chunk] = field(default_factory=deque)
    begun: int = 0
    copied: int = 0
    good: list[bytes] = field(default_factory=list)
    lost: list[bytes] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)
    was_refused: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """A job's end."""

    job: Job
    is_load: bool
    seconds: float


class Jobs(ABC):
    """A queue, and the ends of jobs.

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
        self._slot_units = footprint((rows.row_bytes,), store.config.alignment).units
        self._queue: deque[Job] = deque()  # jobs with chunks that are not begun
        self._waiting = 0  # those chunks
        self._moved_at = 0.0  # when one of them was begun last
        self.jobs: set[Job] = set()

    @abstractmethod
    def advance(self) -> None:
        """Begin what can be begun; give up what waited too long."""

    @abstractmethod
    def copied(self, batch: Batch[Job]) -> None:
        """A batch of a job's copies has ended."""

    def give_up_all(self) -> None:
        """After an error: all jobs end, and what they did not get so far is lost."""
        self._queue.clear()
        self._waiting = 0
        for job in self.jobs:
            self._ended.append(Ended(job, self.is_load, 0.0))
            job.good.clear()
        self.jobs.clear()

    def _enter(self, job: Job) -> None:
        """A new job."""
        job.started = self._clock()
        self.jobs.add(job)
        if job.waiting:
            self._queue.append(job)
            self._waiting += len(job.waiting)
        else:
            self._end_if_done(job)

    def _next(self, job: Job) -> Chunk:
        """Take the first chunk that waits."""
        self._waiting -= 1
        self._moved_at = self._clock()
        return job.waiting.popleft()

    def _take_waiting(self, job: Job) -> list[Chunk]:
        """Take all chunks that wait."""
        self._waiting -= len(job.waiting)
        chunks = list(job.waiting)
        job.waiting.clear()
        return chunks

    def _may_ask(self, job: Job) -> bool:
        """Whether to ask for a slot (again); the store counts every one that it refuses."""
        return not job.was_refused or self._store.arena.may_fit(self._slot_units)

    def _has_waited(self, job: Job) -> bool:
        """Whether the first job has waited in vain for long enough, or for nothing that could come."""
        if not self._store.busy and not self._rows.busy:
            return True
        return self._clock() - max(self._moved_at, job.started) > self.wait_s_max

    def _end_if_done(self, job: Job) -> None:
        if job.waiting or job.begun or job not in self.jobs:
            return
        self.jobs.discard(job)
        self._note_end(job)
        self._ended.append(Ended(job, self.is_load, self._clock() - job.started))

    @abstractmethod
    def _note_end(self, job: Job) -> None:
        """A job ends: count what it lost."""
