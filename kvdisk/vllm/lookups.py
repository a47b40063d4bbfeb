"""Answers to vLLM's lookups: which chunks a request may count on, and in which order requests get slots.

vLLM scans the keys of every waiting request in every step, full-attention groups from the head until a miss, the others
from the tail until a window of hits. What must hold:

- A chunk that was called HIT or HIT_PENDING is pinned to the request until it loads it, ends, or is taken back.
- HIT_PENDING, not RETRY, is said of a chunk that is being loaded: RETRY does not count as a hit, and a sliding-window
  group would be scanned, and promoted, back to its first chunk. RETRY means "on disk, but no slot in this step".
- What requests wait for and load from is at most `Groups.held_max` in all, so that stores go on.
- A request that found no slot queues. Only the head of the queue gets slots; the others keep what they pinned, unless
  all that is pinned belongs to the queue: then the last gives its pins up, so that the head always gets on.
- Nobody queues longer than NO_SLOT_S_MAX: then what has no slot is a miss, and the request loads what it has.
- A scan that cannot change its outcome is cut short (3,600 keys cost vLLM 3.7 ms): the request is deferred as before.
  So is the scan of a request that vLLM itself delays, because another is loading what it would load.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, OffloadKey, ReqContext, TierFilter

from kvdisk.resident import HITS, Resident
from kvdisk.store import Store
from kvdisk.vllm.requests import NEVER, Groups, Request

NO_SLOT_S_MAX = 10.0
"""A request that finds no slot for a chunk on disk is told to come back for this long, then to recompute."""

# Looked up for each key: an Enum's attribute takes a detour.
_HIT, _HIT_PENDING, _MISS, _ALL = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS, TierFilter.ALL

IDLE_STEPS_MAX = 64
"""Steps without a lookup after which a request's pins are taken back: it was scheduled otherwise, or forgotten."""


def group_of(key: bytes) -> int:
    """The KV cache group id in an OffloadKey: its last 4 bytes, big-endian."""
    return int.from_bytes(key[-4:], "big")


class Lookups:
    """See the module's docstring.

    Args:
        store: where the chunks are.
        pump: lets the store hear of the data plane; called once a request and step.
        groups: the KV cache groups.
        counters: the manager's.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        store: Store,
        pump: Callable[[], object],
        groups: Groups,
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self.store = store
        self._pump = pump
        self._groups = groups
        self._counters = counters
        self._clock = clock
        self._step = 0
        self._waiting: dict[str, Request] = {}  # those with pins or in the queue
        self._queue: OrderedDict[str, float] = OrderedDict()  # requests that found no slot -> since when
        self._hits = self._misses = 0  # of this step: a Counter costs as much as the rest of a miss
        self._held_units = 0  # of slots that requests wait for or load from
        self._loading: dict[bytes, int] = {}  # key -> ticket of the last load of it

    # ---- lookups

    def answer(self, key: OffloadKey, request: Request, req_context: ReqContext) -> LookupResult:
        """Whether the chunk can be loaded; starts its promotion if it is on disk."""
        if request.step != self._step:
            self._begin_scan(key, request, req_context)
        if request.cutting:
            return self._cut_scan(key, request, req_context)
        resident = request.pins.get(key)
        if resident is None:
            return self._first_answer(key, request, req_context)
        if resident.forgotten:
            self._unpin(key, request)
            return self._first_answer(key, request, req_context)
        return _HIT if resident.state in HITS else _HIT_PENDING

    def _begin_scan(self, key: OffloadKey, request: Request, req_context: ReqContext) -> None:
        """The first lookup of a request in a step: is there anything to be learned from it?"""
        if request.has_run:  # preempted: it goes over its prefix again, and so do its stores
            request.cut = None
            request.refusals = 0
        request.held_back = self._comes_back(key, request, req_context)
        request.step = self._step
        self._pump()
        queued = request.req_id in self._queue
        waits = not self._may_go_on(request) if queued else self._is_waiting(request) or self._is_delayed(key, request)
        request.cutting = waits or request.held_back
        if not request.cutting:
            request.scanned_during = self._loading.get(key)
        request.scanned.clear()
        self._counters["scans_cut"] += request.cutting

    def _comes_back(self, key: OffloadKey, request: Request, req_context: ReqContext) -> bool:
        """Whether the request may have run until just now: then it is held back for one step.

        vLLM 0.32 asserts that a request loads nothing in the step that reports it as preempted. Where a reset of the
        GPU's cache preempts the running requests, that is the step in which they come back. Nobody tells that a request
        resumed without a load; but with the GPU's cache gone, its scan begins at the head again.
        """
        was_at_head = request.at_head
        request.at_head = _position(key, req_context) <= self._groups.tokens_per_chunk[group_of(key)]
        not_asked_since = request.step < self._step - 1 and not request.held_back
        return request.has_run and (not_asked_since or (request.at_head and not was_at_head))

    def _is_waiting(self, request: Request) -> bool:
        """Whether a chunk it pinned is still on its way; lets go of those that failed before that one.

        Looking at each of 3,600 chunks would cost 32 such requests 19 ms a step.
        """
        ended = []
        for key, resident in request.waits.items():
            if not resident.is_hit and not resident.forgotten:
                break
            ended.append((key, resident))
        for key, resident in ended:
            if resident.forgotten:
                self._unpin(key, request)
            else:
                del request.waits[key]
        return bool(request.waits)

    def _is_delayed(self, key: bytes, request: Request) -> bool:
        """Whether vLLM waits for another request's load of this one's first chunk.

        For loads within a step (0.33), or without its prefix caching, it does not wait. So it has to have scanned the
        request in full during this load, and not scheduled it.
        """
        load = self._loading.get(key)
        return load is not None and load == request.scanned_during and key in request.pins

    def _cut_scan(self, key: bytes, request: Request, req_context: ReqContext) -> LookupResult:
        """Answers that end vLLM's scan of each group soon, and defer the request.

        A prefix scan ends at the first MISS, a window scan (from the tail) once a window is full of hits. The
        first key of a group is pending either way; the second tells by its position which scan it is.
        """
        position = _position(key, req_context)
        first = request.scanned.setdefault(group_of(key), position)
        return _MISS if position > first else _HIT_PENDING

    def _first_answer(self, key: OffloadKey, request: Request, req_context: ReqContext) -> LookupResult:
        """Of a key that the request has no pin for."""
        store, groups = self.store, self._groups
        resident = store.resident(key)
        if resident is None and key not in store.index:
            self._misses += 1
            return _MISS
        if req_context.load_tier_filter is not _ALL and not self._allowed(key, req_context.load_tier_filter):
            return _MISS
        group = group_of(key) if resident is None else resident.group
        units, budget, is_windowed = groups.limits[group]
        pinned = request.pinned_units.get(group, 0) + units
        if pinned > budget:
            if not is_windowed or not self._make_budget(group, _position(key, req_context), request):
                self._counters["misses_over_budget"] += 1
                return _MISS
            pinned = request.pinned_units.get(group, 0) + units
        if resident is None:
            resident = self._promote(key, _position(key, req_context), request)
        elif not resident.holds and self._held_units + resident.run.units > groups.held_max:
            resident = None
        if resident is None:
            return self._no_slot(request, units)
        resident.used = True
        store.pin(resident)  # `hold`, without the call that it costs
        if not resident.holds:
            self._held_units += resident.run.units
        resident.holds += 1
        request.pinned_units[group] = pinned
        if not request.pins:
            self._waiting[request.req_id] = request
        request.pins[key] = resident
        if is_windowed:
            request.window_pins.setdefault(group, {})[key] = resident
        if resident.state in HITS:
            self._hits += 1
            return _HIT
        request.waits[key] = resident
        return _HIT_PENDING

    def _allowed(self, key: bytes, wanted: TierFilter) -> bool:
        in_memory = self.store.resident(key) is not None and wanted.allows(Medium.CPU, Locality.LOCAL)
        return in_memory or (key in self.store.index and wanted.allows(Medium.STORAGE, Locality.LOCAL))

    def _promote(self, key: bytes, position: int, request: Request) -> Resident | None:
        """Start reading a chunk, unless there is no slot for it or others have waited longer for slots."""
        if self._queue and next(iter(self._queue)) != request.req_id:
            return None
        if self._held_units + self._groups.units[group_of(key)] > self._groups.held_max:
            return None
        resident = self.store.promote(key, position)
        if resident is not None:
            request.from_disk.add(key)
        return resident

    # ---- requests that wait for slots

    def _no_slot(self, request: Request, units: int) -> LookupResult:
        """RETRY, and no more of this scan; MISS if the request has waited long enough."""
        if request.gave_up:
            self._counters["misses_no_slot"] += 1
            return LookupResult.MISS
        self._queue.setdefault(request.req_id, self._clock())
        self._waiting[request.req_id] = request
        request.starved_step = self._step
        request.units_wanted = units
        # What follows in this scan cannot be had before this chunk, and a window scan would try the whole history.
        request.cutting = True
        self._counters["retries"] += 1
        if next(iter(self._queue)) == request.req_id:
            self._take_from_last()
        return LookupResult.RETRY

    def _may_go_on(self, request: Request) -> bool:
        """Whether a request in the queue is to be scanned: it is its turn, or it has waited long enough."""
        if self._clock() - self._queue[request.req_id] > NO_SLOT_S_MAX:
            del self._queue[request.req_id]
            request.gave_up = True
            return True
        if next(iter(self._queue)) != request.req_id:
            return False
        if self._held_units + request.units_wanted > self._groups.held_max:
            self._take_from_last()
        return self._held_units + request.units_wanted <= self._groups.held_max

    def _take_from_last(self) -> None:
        """If only the queue holds pins, nobody would ever let go: the last but the head does."""
        if any(request.pins for req_id, request in self._waiting.items() if req_id not in self._queue):
            return
        head = next(iter(self._queue))
        for req_id in reversed(self._queue):
            request = self._waiting[req_id]
            if req_id != head and request.pins:
                self._unpin_all(request)
                return

    # ---- pins

    def _make_budget(self, group: int, position: int, request: Request) -> bool:
        """Let go of pins of a window that ended elsewhere, which are of no use any more; whether that made room."""
        reach = self._groups.window_tokens(group)
        for key, resident in list(request.window_pins[group].items()):
            if abs(resident.position - position) >= reach:
                self._unpin(key, request)
        return request.pinned_units.get(group, 0) + self._groups.units[group] <= self._groups.budget[group]

    def hold(self, resident: Resident) -> None:
        """Keep a slot until `let_go`; it counts against what waiting requests may pin."""
        self.store.pin(resident)
        if not resident.holds:
            self._held_units += resident.run.units
        resident.holds += 1

    def let_go(self, resident: Resident) -> None:
        """Undo one `hold`."""
        assert resident.holds > 0
        resident.holds -= 1
        if not resident.holds:
            self._held_units -= resident.run.units
        self.store.unpin(resident)

    def begin_load(self, ticket: int, keys: Iterable[bytes]) -> None:
        """These chunks are being loaded until `end_load`."""
        self._loading.update(dict.fromkeys(keys, ticket))

    def end_load(self, ticket: int, keys: Iterable[bytes]) -> None:
        """They are not, or vLLM has forgotten it."""
        for key in keys:
            if self._loading.get(key) == ticket:
                del self._loading[key]

    def _unpin(self, key: bytes, request: Request) -> None:
        resident = request.pins.pop(key)
        group = resident.group
        request.pinned_units[group] -= self._groups.units[group]
        request.waits.pop(key, None)
        if group in self._groups.windows:
            del request.window_pins[group][key]
        self.let_go(resident)

    def _unpin_all(self, request: Request) -> None:
        for resident in request.pins.values():
            self.let_go(resident)
        request.pins.clear()
        request.window_pins.clear()
        request.waits.clear()
        request.pinned_units.clear()

    # ---- the end of waiting

    def release(self, request: Request) -> None:
        """Take back all pins of a request; if it comes again, it starts anew."""
        self._unpin_all(request)
        request.step = NEVER
        request.held_back = False
        request.gave_up = False
        self._waiting.pop(request.req_id, None)
        self._queue.pop(request.req_id, None)

    def end_step(self, scheduled: Iterable[Request]) -> None:
        """Once a step: take back pins that nobody will use.

        Args:
            scheduled: requests that run from now on; those that have pins left load nothing.
        """
        for request in scheduled:
            request.has_run = True
            self.release(request)
        if self._queue:
            head = self._waiting[next(iter(self._queue))]
            if head.step == self._step and head.starved_step != self._step and not head.cutting:
                del self._queue[head.req_id]  # its scan found a slot for everything
        self._counters["hits"] += self._hits
        self._counters["misses"] += self._misses
        self._hits = self._misses = 0
        self._step += 1
        for request in list(self._waiting.values()):
            if self._step - request.step > IDLE_STEPS_MAX:
                self.release(request)

    @property
    def step(self) -> int:
        """Steps that have ended."""
        return self._step

    @property
    def held_units(self) -> int:
        """Units of the slots that requests wait for or load from."""
        return self._held_units


def _position(key: bytes, req_context: ReqContext) -> int:
    """End of the chunk in tokens; vLLM notes it for every key it asks about."""
    return req_context.get_offload_key_position(OffloadKey(key)) or 0
