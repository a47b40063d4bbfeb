"""The scheduler's side: answers lookups, hands out slots, and keeps store and data plane going.

vLLM calls it from the scheduler's loop, so nothing here waits for a disk and a lookup is a few dictionary accesses.
What must hold (each rule was read in vLLM's sources, or tried on its classes):

- HIT is said only of verified bytes in a pinned slot. A worker cannot report a failure (vLLM asserts success), so
  whatever can fail has failed before HIT.
- After a reset, slots of transfers that vLLM has forgotten are not reused before every rank says that they ended.
- An error of ours ends no engine: offloading is off from then on, nothing is looked up or stored any more, and no slot
  is reused, so that what was called HIT before can still be loaded.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvdisk.resident import Resident
from kvdisk.service import Service
from kvdisk.vllm import events
from kvdisk.vllm.admission import Admission
from kvdisk.vllm.guard import guarded, nothing
from kvdisk.vllm.lookups import Lookups, group_of
from kvdisk.vllm.metrics import StatsReporter
from kvdisk.vllm.opening import Opening
from kvdisk.vllm.requests import Groups, Request
from kvdisk.vllm.reset import Quarantine, declare_stale
from kvdisk.vllm.share import Share
from kvdisk.vllm.slots_spec import SlotsSpec

logger = logging.getLogger("kvdisk")


class KVDiskManager(OffloadingManager):
    """See the module's docstring.

    Args:
        open_service: opens the store; called once, at the first request (the root of the block hashes exists only
            then). If it raises, offloading is off and every lookup misses.
        groups: the KV cache groups.
        group_ids: in the order of vLLM's config.
        shares: of all ranks; `home` are those with units.
        blocks_per_chunk: of every group.
        store_threshold, max_tracker_size, reset_keeps_disk: see AdapterConfig.
        emit_events: whether vLLM drains `take_events`.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        open_service: Callable[[], Service],
        groups: Groups,
        group_ids: tuple[int, ...],
        shares: Sequence[Share],
        home: Sequence[Share],
        blocks_per_chunk: int,
        *,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        reset_keeps_disk: bool = False,
        emit_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._opening = Opening(open_service, clock)
        self._reset_at_open = False
        self._service: Service | None = None
        self.is_off = False
        self._groups = groups
        self._group_ids = group_ids
        self._home = home
        self._blocks_per_chunk = blocks_per_chunk
        self._reset_keeps_disk = reset_keeps_disk
        self._emit_events = emit_events
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._lookups: Lookups | None = None  # with the service
        self._ticket = 0
        self._storing: dict[bytes, tuple[int, Resident]] = {}
        self._loading: dict[str, list[tuple[int, set[bytes], list[Resident]]]] = {}
        self._quarantine = Quarantine(shares, home, self._abandon, self._let_go)
        self._reporter = StatsReporter(self.stats)
        self._heard = 0  # pumps that brought news
        self.counters: Counter[str] = Counter()
        self._admission = Admission(groups, self.counters, store_threshold, max_tracker_size)

    # ---- requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Remember the request; the first one opens the store."""
        if self._opening.pending and (service := self._opening.attempt()) is not None:
            self._start(service)
        self.on_request_finished(req_context)  # an id that is used again starts anew
        self._requests[req_context.req_id] = Request(req_context.req_id)
        return RequestOffloadingContext()

    @guarded(nothing)
    def _start(self, service: Service) -> None:
        self._service = service
        self._lookups = Lookups(service.store, self._pump, self._groups, self.counters, self._clock)
        if self._emit_events:
            events.listen(service.store)
        if self._reset_at_open:
            declare_stale(service)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Take back its pins; transfers under way go on."""
        request = self._requests.pop(req_context.req_id, None)
        if request is not None:
            self._release(request)

    @guarded(nothing)
    def _release(self, request: Request) -> None:
        if self._lookups is not None:
            self._lookups.release(request)

    @guarded(nothing)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Once a step: let the planes hear of each other and take back pins that nobody will use."""
        if self._lookups is None:
            return
        # Who was scheduled without `prepare_load` loads nothing.
        self._lookups.end_step([self._requests[r] for r in context.new_req_ids if r in self._requests])
        if self._quarantine:
            self._quarantine.release()
        self._pump()

    # ---- lookups

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether the chunk can be loaded; starts its promotion if it is on disk."""
        if self._lookups is None or self.is_off:
            return LookupResult.MISS
        try:  # `guarded`, without the call that it costs: there are thousands of lookups in a step
            return self._lookups.answer(key, self._requests[req_context.req_id], req_context)
        except Exception:
            self.switch_off()
            return LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """DISK for chunks that were read for this request, else HOST."""
        request = self._requests.get(req_context.req_id)
        return CacheHitSource.DISK if request is not None and key in request.from_disk else CacheHitSource.HOST

    # ---- loads

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """The slots of chunks that were hits in this step; kept until `complete_load`."""
        lookups, request = self._lookups, self._requests[req_context.req_id]
        assert lookups is not None
        residents = []
        for key in keys:
            resident = lookups.store.resident(key)
            assert resident is not None, f"load of {key.hex()}, which is not here"
            assert resident.is_hit, f"load of {key.hex()}, which is not complete"
            lookups.hold(resident)
            residents.append(resident)
        self._remember(keys, request, req_context)
        self._release(request)
        ticket = self._next_ticket()
        lookups.begin_load(ticket, keys)
        self._loading.setdefault(req_context.req_id, []).append((ticket, set(keys), residents))
        self.counters["chunks_loaded"] += len(residents)
        return self._spec(ticket, residents)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """The slots are no longer read."""
        jobs = self._loading.get(req_context.req_id, [])
        wanted = set(keys)
        job = next((job for job in jobs if job[1] == wanted), None)
        assert job is not None, f"load of {req_context.req_id} ended, but was never begun"
        jobs.remove(job)
        if not jobs:
            del self._loading[req_context.req_id]
        self._end_load(*job)

    @guarded(nothing)
    def _end_load(self, ticket: int, keys: set[bytes], residents: list[Resident]) -> None:
        lookups = self._lookups
        assert lookups is not None
        lookups.end_load(ticket, keys)
        for resident in residents:
            lookups.store.touch(resident.key)
            lookups.let_go(resident)

    # ---- stores

    @guarded(lambda self: self._output(()))
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Slots for the longest prefix of positions that fits; None: none now, offer them again."""
        service, lookups = self._service, self._lookups
        if service is None or lookups is None or service.store.disk_is_lost:
            return self._output(())
        self._pump()
        request = self._requests[req_context.req_id]
        self._remember(keys, request, req_context)
        accepted = self._admission.decide(keys, request, req_context, service.store, lookups.step)
        if accepted is None:
            return None
        if not accepted:
            return self._output(())
        ticket = self._next_ticket()
        for resident in accepted.values():
            for share in self._home:
                share.blocks_written[resident.run.start] = 0
            self._storing[resident.key] = (ticket, resident)
        return self._output([accepted[key] for key in keys if key in accepted], ticket)

    def _remember(self, keys: Iterable[OffloadKey], request: Request, req_context: ReqContext) -> None:
        for key in keys:
            position = req_context.get_offload_key_position(key)
            if position is not None:
                request.chain[group_of(key), position] = key

    @guarded(nothing)
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Chunks whose blocks were all written become hits and are flushed."""
        service = self._service
        assert service is not None
        whole = []
        for key in keys:
            _, resident = self._storing.pop(key)
            if success and all(self._is_whole(share, resident) for share in self._home):
                whole.append(resident)
            else:
                self.counters["chunks_partial"] += 1
                service.store.abandon(resident)
        service.store.commit(whole)
        self._pump()

    def _is_whole(self, share: Share, resident: Resident) -> bool:
        return int(share.blocks_written[resident.run.start]) == self._blocks_per_chunk

    # ---- transfers

    def _next_ticket(self) -> int:
        self._ticket += 1
        return self._ticket

    def _spec(self, ticket: int, residents: Sequence[Resident]) -> SlotsSpec:
        counts = Counter(resident.group for resident in residents)
        return SlotsSpec(ticket, [r.run.start for r in residents], [counts[group] for group in self._group_ids])

    def _output(self, residents: Sequence[Resident], ticket: int = 0) -> PrepareStoreOutput:
        keys = [OffloadKey(resident.key) for resident in residents]
        return PrepareStoreOutput(keys, self._spec(ticket, residents), [])

    # ---- the store at work

    def _pump(self) -> None:
        if self._service is not None:
            self._heard += self._service.pump()

    @guarded(lambda _: False)
    def has_pending_work(self) -> bool:
        """Whether chunks are unflushed or in flight; every command has a deadline, so this ends."""
        self._pump()
        return self._service is not None and self._service.store.busy

    @guarded(lambda _: ())
    def take_events(self) -> Iterable[OffloadingEvent]:
        """What entered and left the disk since the last call, or the first of it."""
        return list(events.take(self._service.store)) if self._service is not None else ()

    # ---- reset

    def reset_cache(self) -> None:
        """What was stored is stale (new weights, sleep): forget it, now and after a restart.

        With `reset_keeps_disk` only transfers under way are given up.
        """
        if self._service is None:
            self._reset_at_open = not self._reset_keeps_disk
            return
        self._forget()
        if not self._reset_keeps_disk:
            try:  # also when it is off: after a restart it is on again
                declare_stale(self._service)
            except Exception:
                self.switch_off()

    @guarded(nothing)
    def _forget(self) -> None:
        if self._lookups is None:
            return
        for request in self._requests.values():
            self._lookups.release(request)
            request.chain.clear()
            request.cut = None
        self._pump()
        self._enter_quarantine(self._lookups)

    def _enter_quarantine(self, lookups: Lookups) -> None:
        """vLLM will not report the transfers under way, but its workers still carry them out."""
        stores: dict[int, list[Resident]] = {}
        for ticket, resident in self._storing.values():
            lookups.store.disown(resident)  # or requests would wait for it
            stores.setdefault(ticket, []).append(resident)
        self._storing.clear()
        for ticket, residents in stores.items():
            self._quarantine.put(ticket, stored=residents)
        for jobs in self._loading.values():
            for ticket, keys, residents in jobs:
                lookups.end_load(ticket, keys)
                self._quarantine.put(ticket, loaded=residents)
        self._loading.clear()

    def _abandon(self, resident: Resident) -> None:
        if self._lookups is not None:
            self._lookups.store.abandon(resident)

    def _let_go(self, resident: Resident) -> None:
        if self._lookups is not None:
            self._lookups.let_go(resident)

    @guarded(nothing)
    def on_reset_flushed(self) -> None:
        """0.33: all workers have ended what was in flight at the reset."""
        self._quarantine.release(flushed=True)

    # ---- reports and the end

    def stats(self) -> dict[str, int | str]:
        """Counters since the start and sizes now; constant time. Names as in docs/configuration.md."""
        mine: dict[str, int | str] = dict(self.counters)
        return {**mine, **(self._service.stats() if self._service is not None else {})}

    @guarded(nothing)
    def get_stats(self) -> OffloadingConnectorStats | None:
        """What grew since the last call, as Prometheus increments. Called every step, so built only after changes."""
        store = self._service.store if self._service is not None else None
        moved = 0 if store is None else sum(store.counters.values()) + store.writer.stats.chunks_not_flushed
        return self._reporter.report((self._heard, moved, sum(self.counters.values())))

    def shutdown(self) -> None:
        """Flush what can be flushed in time. Idempotent."""
        service, self._service, self._lookups = self._service, None, None
        self._opening.give_up()
        if service is not None:
            try:
                service.close()
            except Exception:
                logger.exception("kvdisk could not flush what it had in memory")

    def switch_off(self) -> None:
        """After an error of this code, which is being handled: do without the store until the server is restarted."""
        if not self.is_off:
            logger.exception("KV offloading to disk is OFF until the server is restarted: please report this")
        self.is_off = True
