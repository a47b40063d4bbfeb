"""`KVDiskTier`: kvdisk's store as a secondary tier of vLLM's own `TieringOffloadingSpec`.

    "secondary_tiers": [{"type": "KVDiskTier", "module_path": "kvdisk.vllm",
                         "root_dir": "/mnt/nvme/kv", "disk_bytes_to_use": "800GiB"}]

vLLM's primary tier owns host memory, talks to the GPU and decides what is promoted; kvdisk keeps its rows on disk,
packed, verified and bounded. All of this runs in the scheduler's loop, so nothing here waits for a disk (except
`drain_jobs`, which has to, as long as the store's deadlines) and a lookup is a few dictionary accesses.

What must hold:
- Every job gets one result. A load's chunk counts as loaded only when its verified bytes are in the row.
- A chunk that could not be loaded is a miss at once: for everybody if the disk lost it, for its request if only a slot
  was missing. vLLM would ask for it again in every step, and wait.
- After a reset nothing is served that was stored before it, even if the store opens later; unless `reset_keeps_disk`.
- No exception leaves for the engine. What is wrong with the disk is a miss; what is wrong with this code switches the
  tier off: lookups miss, jobs fail, vLLM goes on without it.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvdisk.dataplane import Units
from kvdisk.directory import OVERHEAD_BYTES, check_room, segment_cost
from kvdisk.memory import private_memory, shared_memory
from kvdisk.service import Service
from kvdisk.store import Presence
from kvdisk.store_config import SEGMENTS_MIN
from kvdisk.units import UNIT_BYTES, format_size, round_up
from kvdisk.vllm import events
from kvdisk.vllm.metrics import StatsReporter, metric_definitions
from kvdisk.vllm.opening import Opening
from kvdisk.vllm.reset import declare_stale
from kvdisk.vllm.tier_config import describe_groups, parse_tier_config
from kvdisk.vllm.tier_identity import engines_of, tenancy_of
from kvdisk.vllm.tier_jobs import Ended, Job
from kvdisk.vllm.tier_loads import Loads
from kvdisk.vllm.tier_requests import Requests
from kvdisk.vllm.tier_rows import Rows, rows_of
from kvdisk.vllm.tier_stores import Stores

logger = logging.getLogger("kvdisk")

T = TypeVar("T")


class KVDiskTier(SecondaryTierManager):
    """See the module's docstring.

    Args:
        offloading_spec: vLLM's.
        primary_kv_view: the primary tier's memory, (rows, bytes of a row); borrowed until `shutdown`.
        tier_type: the name it was configured by.
        backpressure_detector: vLLM's.
        clock: seconds, monotonic.
        **config: the keys of docs/configuration.md.

    Raises:
        ValueError: a key that is unknown, missing or impossible, or a root that cannot be used.
        MemoryError: no memory for the arena.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Prometheus metrics, `vllm:kvdisk_*`."""
        return metric_definitions()

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        **config: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        row_count, row_bytes = rows_of(primary_kv_view).shape
        self._config = parse_tier_config(config, row_bytes)
        self.locality = self._config.locality
        self._row_bytes = row_bytes
        self._groups = describe_groups(offloading_spec.config, row_bytes, self._config.options)
        self._clock = clock
        self._check_roots()
        arena_bytes = self._config.options.cpu_bytes_to_use
        # A data plane in another process needs memory that both have.
        in_process = self._config.options.data_plane == "thread"
        self._arena, self._memfd = (private_memory(arena_bytes), -1) if in_process else shared_memory(arena_bytes)
        self._opening = Opening(self._open_service, clock)
        self._service: Service | None = None
        self._rows: Rows[Job]  # with the service, as what follows
        self._stores: Stores
        self._loads: Loads
        self._off = False
        self._stale_at_open = False
        self._requests = Requests(self._groups)
        self._ended: list[Ended] = []
        self._reporter = StatsReporter(self.stats)
        self._heard = 0  # pumps that brought news
        self.counters: Counter[str] = Counter()
        self._emit_events = self._config.enable_kv_events and self._events_enabled(offloading_spec)
        logger.info(
            "kvdisk tier: %d rows of %s in the primary tier, %s of arena (%s)",
            row_count,
            format_size(row_bytes),
            format_size(arena_bytes),
            self._arena.pages,
        )

    # ---- the store

    def _check_roots(self) -> None:
        options, config = self._config.options, self._offloading_spec.config
        cap = options.disk_bytes_to_use // len(options.root_dir)
        needed = OVERHEAD_BYTES + SEGMENTS_MIN * segment_cost(options.segment_bytes)
        for path in options.root_dir:
            check_room(path, cap, cap // engines_of(config, {}), needed, options.allow_shared_root)

    def _events_enabled(self, spec: Any) -> bool:
        if spec.kv_events_config.enable_kv_cache_events:
            return True
        logger.warning("kvdisk tier: enable_kv_events is set, but KV cache events are disabled globally")
        return False

    def _open_service(self) -> Service:
        options, groups = self._config.options, self._groups.tokens_per_chunk
        return Service(
            options,
            tenancy_of(self._offloading_spec, self._row_bytes, options.namespace),
            [Units(self._arena, 0)],
            unit_count=options.cpu_bytes_to_use // UNIT_BYTES,
            group_parts=dict.fromkeys(groups, (self._row_bytes,)),
            memfds=[self._memfd] if self._memfd >= 0 else [],
        )

    def _running(self) -> Service | None:
        """The store, opened when the first request is there; None: not (yet), or not any more."""
        if self._off:
            return None
        if self._service is None and self._opening.pending:
            service = self._opening.attempt()
            if service is not None:
                self._start(service)
        return self._service

    def _start(self, service: Service) -> None:
        store = service.store
        slot_bytes = round_up(self._row_bytes, store.config.alignment)
        self._rows = Rows(self._primary_kv_view, self._arena.view, slot_bytes)
        self._stores = Stores(store, self._rows, self.counters, self._ended, self._clock)
        self._loads = Loads(store, self._rows, self.counters, self._ended, self._clock)
        self._service = service
        if self._stale_at_open:
            declare_stale(service)
        store.settled = []
        if self._emit_events:
            events.listen(store)

    def _attempt(self, work: Callable[[Service], T], otherwise: T) -> T:
        """`work` on the running store; `otherwise` if there is none, or it fails for a reason of ours."""
        try:
            service = self._running()
            return work(service) if service is not None else otherwise
        except Exception:
            self._switch_off()
            return otherwise

    def _switch_off(self) -> None:
        """After an error of this code: end all jobs, once no thread touches a row any more, and do without."""
        logger.exception("kvdisk tier is OFF: please report this")
        self._off = True
        if self._service is None:
            return
        self._rows.close()
        self._loads.give_up_all()
        self._stores.give_up_all()

    # ---- requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Remember the request; the first one opens the store."""
        self._attempt(lambda service: None, None)
        self._requests.begin(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request; its jobs go on, but for loads that have not begun."""
        request = self._requests.end(req_context.req_id)
        if request is not None and self._service is not None:
            self._attempt(lambda service: self._loads.drop_of(request), None)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT for what is on disk or on its way there, whoever is reading it; never RETRY."""
        service = self._service
        if service is None or self._off:
            service = self._attempt(lambda running: running, None)
            if service is None:
                return LookupResult.MISS
        if service.store.presence(key) is Presence.ABSENT:
            return LookupResult.MISS
        is_refused = self._requests.is_refused(key, req_context.req_id)
        return LookupResult.MISS if is_refused else LookupResult.HIT

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """These chunks are in use."""

        def note(service: Service) -> None:
            for key in keys:
                service.store.touch(key)

        self._attempt(note, None)

    # ---- jobs

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Copy rows to slots, as slots allow, and flush them."""

        def submit(service: Service) -> bool:
            request = self._requests.of(job_metadata.req_context.req_id)
            chunks, lost = self._requests.chunks_of(job_metadata, request)
            self._stores.add(job_metadata.job_id, request, chunks, lost)
            self._advance(service)
            self._stores.trim()
            return True

        if not self._attempt(submit, False):
            self._refuse(job_metadata, is_load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Read chunks into slots, as slots allow, verify them, and copy them to rows."""

        def submit(service: Service) -> bool:
            request = self._requests.of(job_metadata.req_context.req_id)
            chunks, lost = self._requests.chunks_of(job_metadata, request)
            self._loads.add(job_metadata.job_id, request, chunks, lost)
            self._advance(service)
            if not request.is_running:  # vLLM may submit it later than that
                self._loads.drop_of(request)
            return True

        if not self._attempt(submit, False):
            self._refuse(job_metadata, is_load=True)

    def _refuse(self, job: TransferJob, *, is_load: bool) -> None:
        """A job that nobody took, unless `_switch_off` has ended it already."""
        if all(ended.job.job_id != job.job_id for ended in self._ended):
            request = self._requests.of(job.req_context.req_id)
            self._ended.append(Ended(Job(job.job_id, request, lost=list(job.keys)), is_load, 0.0))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The results since the last call."""
        self._attempt(self._advance, None)
        ended, self._ended[:] = list(self._ended), []
        return [self._result(job) for job in ended]

    def _result(self, ended: Ended) -> JobResult:
        job = ended.job
        success = not job.lost and not job.dropped and not self._off
        return JobResult(
            job_id=job.job_id,
            success=success,
            successful_keys=[OffloadKey(key) for key in job.good] if ended.is_load and not success else None,
            transfer_time=ended.seconds,
            transfer_bytes=job.copied * self._row_bytes,
        )

    def _advance(self, service: Service) -> None:
        """Let everybody hear of everybody. Never blocks."""
        self._heard += service.pump()
        self._take(service)
        self._loads.advance()  # first: a request waits for them, and nobody for a store
        self._stores.advance()
        self._heard += service.pump()

    def _take(self, service: Service) -> None:
        """What ended: reads, then copies."""
        store = service.store
        settled: Sequence[bytes] | None = store.settled
        store.settled = []
        self._loads.settled(settled or ())
        for batch in self._rows.take():
            if batch.owner in self._loads.jobs:
                self._loads.copied(batch)
            else:
                self._stores.copied(batch)
                self._loads.settled([move.resident.key for move in batch.moves])

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Once a step."""
        self._attempt(self._advance, None)

    def has_pending_work(self) -> bool:
        """Whether jobs or flushes are under way; every command has a deadline, so this ends."""
        if self._service is None or self._off:
            return bool(self._ended)
        self._attempt(self._advance, None)
        return bool(self._ended or self._loads.jobs or self._stores.jobs) or self._service.store.busy

    def drain_jobs(self) -> None:
        """Block until every job has ended; loads that have not begun are given up.

        vLLM calls it when it resets its caches. Unless `reset_keeps_disk` holds, what is on disk is stale then.
        """
        if not self._attempt(self._drain, False):
            self._stale_at_open = not self._config.reset_keeps_disk

    def _drain(self, service: Service) -> bool:
        self._loads.drop_all()
        self._advance(service)
        while self._loads.jobs or self._stores.jobs:
            if self._rows.busy:
                self._rows.wait(0.05)
            else:
                service.wait(0.05)
            self._advance(service)
        self._requests.forget_losses()
        if not self._config.reset_keeps_disk:
            declare_stale(service)
        return True

    # ---- reports and the end

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What entered and left the disk since the last call, or the first of it."""
        if self._service is None or not self._emit_events:
            return ()
        return list(events.take(self._service.store, self._config.locality, owner=self.tier_type, of_host=False))

    def stats(self) -> dict[str, int | str]:
        """Counters since the start and sizes now; constant time. Names as in docs/configuration.md."""
        mine: dict[str, int | str] = dict(self.counters)
        return {**(self._service.stats() if self._service is not None else {}), **mine}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What grew since the last call, as Prometheus increments."""
        store = self._service.store if self._service is not None else None
        moved = 0 if store is None else sum(store.counters.values()) + store.writer.stats.chunks_not_flushed
        return self._reporter.report((self._heard, moved, sum(self.counters.values())))

    def shutdown(self) -> None:
        """Let copies end, flush what can be flushed in time, and let go of the primary tier's memory. Idempotent."""
        self._off = True
        self._opening.give_up()
        service, self._service = self._service, None
        if service is not None:
            self._rows.close()
            for batch in self._rows.take():
                if batch.owner in self._stores.jobs:
                    self._stores.copied(batch)
            service.close()
        if self._memfd >= 0:
            os.close(self._memfd)
            self._memfd = -1
        self._primary_kv_view = memoryview(b"")
