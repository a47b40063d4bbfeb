"""Store jobs of a tier: from rows to slots, one after another; the store flushes them.

What must hold: of a request a prefix is stored. Where the disk does not keep up the tail is lost, and with it all that
follows, until the request's first lost chunk is here after all, or is offered again.
"""

from collections.abc import Sequence

from kvdisk.store import Presence
from kvdisk.vllm.tier_jobs import Job, Jobs
from kvdisk.vllm.tier_requests import Chunk, Request
from kvdisk.vllm.tier_rows import Batch, Move

STORE_WAIT_S_MAX = 2.0
"""What is offered faster than the disk takes it waits in vLLM's rows for this long, then its tail is not kept."""

STORE_WAIT_SHARE = 0.25
"""Of the primary tier's rows, that may wait so; they cannot be evicted meanwhile."""


class Stores(Jobs):
    """See the module's docstring."""

    is_load = False
    wait_s_max = STORE_WAIT_S_MAX

    def add(self, job_id: int, request: Request, chunks: Sequence[Chunk], lost: Sequence[bytes] = ()) -> None:
        """Take a job; `advance` begins it.

        Args:
            job_id: vLLM's.
            request: whose it is.
            chunks: parents first. What is here already is stored.
            lost: keys of the job that cannot be stored.
        """
        job = Job(job_id, request, lost=list(lost))
        cut = request.cut
        if cut and (not self._is_absent(cut.key) or any(chunk.key == cut.key for chunk in chunks)):
            request.cut = None
        new: dict[bytes, Chunk] = {}
        for chunk in chunks:
            if not self._is_absent(chunk.key):
                self._store.touch(chunk.key)
                job.good.append(chunk.key)
            elif request.is_cut_before(chunk):
                job.lost.append(chunk.key)
            else:
                new[chunk.key] = chunk
        job.waiting.extend(new.values())
        self._enter(job)

    def advance(self) -> None:
        """Begin what can be begun; give up what waited too long."""
        while self._queue:
            job = self._queue[0]
            self._begin(job)
            if job.waiting and not self._has_waited(job):
                return
            self._queue.popleft()
            for chunk in self._take_waiting(job):
                self._lose(job, chunk)
            self._end_if_done(job)

    def trim(self) -> None:
        """Lose the tails of the newest jobs, where more rows wait than may."""
        most = int(self._rows.count * STORE_WAIT_SHARE)
        while self._waiting > most:
            job = self._queue[-1]
            self._lose(job, job.waiting.pop())
            self._waiting -= 1
            if not job.waiting:
                self._queue.pop()
                self._end_if_done(job)

    def _is_absent(self, key: bytes) -> bool:
        return self._store.presence(key) is Presence.ABSENT

    def _lose(self, job: Job, chunk: Chunk) -> None:
        job.lost.append(chunk.key)
        job.request.lose(chunk.end, chunk.key)

    def _begin(self, job: Job) -> None:
        """Begin the first chunks of a job, as many as slots allow."""
        moves = []
        store = self._store
        while job.waiting:
            chunk = job.waiting[0]
            if not self._is_absent(chunk.key):  # of a job that came before
                job.good.append(chunk.key)
                self._next(job)
                continue
            if job.request.is_cut_before(chunk):
                job.lost.append(chunk.key)
                self._next(job)
                continue
            if job.was_refused and not (store.can_reserve(self._slot_units) and self._may_ask(job)):
                break
            # Without its parent it would be dropped as soon as it is written; the parent may yet come.
            parent = b"" if self._is_absent(chunk.parent) else chunk.parent
            resident = store.reserve(chunk.key, chunk.group, store.parts_of(chunk.group), chunk.position, parent)
            if resident is None:
                job.was_refused = True
                break
            moves.append(Move(chunk.row, resident))
            self._next(job)
        if moves:
            job.begun += len(moves)
            self._rows.start(job, moves, to_slots=True)

    def copied(self, batch: Batch[Job]) -> None:
        """The chunks are hits from now on."""
        job, residents = batch.owner, [move.resident for move in batch.moves]
        job.begun -= len(residents)
        if batch.ok:
            self._store.commit(residents)
            job.good += [resident.key for resident in residents]
            job.copied += len(residents)
        else:
            for resident in residents:
                self._store.abandon(resident)
                job.lost.append(resident.key)
                job.request.lose(resident.position, resident.key)
        self._end_if_done(job)

    def _note_end(self, job: Job) -> None:
        self._counters["stores_cut"] += len(job.lost)
