"""Which of the chunks that vLLM offers get a slot.

What must hold:
- Of an offer the longest prefix of positions is stored. A chunk left out is never offered again and orphans all behind
  it, so a request that was cut stays cut until it is preempted.
- None ("offer it again") is said only when it can help soon, and REFUSALS_MAX steps in a row at most.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvdisk.resident import Resident
from kvdisk.store import Presence, Store
from kvdisk.vllm.lookups import group_of
from kvdisk.vllm.requests import Groups, Request

REFUSALS_MAX = 16
"""Steps in a row that an offer is put off before the request is cut."""


class Admission:
    """See the module's docstring.

    Args:
        groups: the KV cache groups.
        counters: where it counts.
        store_threshold, max_tracker_size: see AdapterConfig.
    """

    def __init__(self, groups: Groups, counters: Counter[str], store_threshold: int, max_tracker_size: int) -> None:
        self._groups = groups
        self._counters = counters
        self._store_threshold = store_threshold
        self._max_tracker_size = max_tracker_size
        self.offers: OrderedDict[bytes, int] = OrderedDict()  # key -> requests that offered it, the last ones last

    def decide(
        self, keys: Collection[OffloadKey], request: Request, req_context: ReqContext, store: Store, step: int
    ) -> dict[bytes, Resident] | None:
        """Reserved slots by key, of none to all of `keys`; None: offer them again in another step."""
        new = self._new_chunks(keys, request, req_context, store)
        if not new:
            return {}
        already_counted = request.refused_step == step  # a step has many offers, of Mamba states one by one
        may_put_off = already_counted or request.refusals < REFUSALS_MAX
        cut_before = request.cut
        must_wait = may_put_off and self._fits_soon(new, store)
        accepted = {} if must_wait else self._reserve(new, request, store)
        if not accepted and may_put_off:
            request.refusals += not already_counted
            request.refused_step = step
            request.cut = cut_before
            self._counters["stores_put_off"] += 1
            return None
        request.refusals = 0
        return accepted

    def _new_chunks(
        self, keys: Iterable[OffloadKey], request: Request, req_context: ReqContext, store: Store
    ) -> list[tuple[int, bytes]]:
        """(position, key) of what is offered and neither here, nor cut off, nor offered too rarely; in prefix order."""
        new: list[tuple[int, bytes]] = []
        for key in dict.fromkeys(keys):
            if store.presence(key) is not Presence.ABSENT:
                store.touch(key)
                continue
            position = req_context.get_offload_key_position(key) or 0
            if request.cut is not None and position >= request.cut:
                self._counters["stores_cut"] += 1
            elif self._store_threshold < 2 or self._offered_often(key, request):
                new.append((position, key))
        new.sort(key=lambda chunk: chunk[0])
        return new

    def _offered_often(self, key: bytes, request: Request) -> bool:
        """Whether enough requests have offered it; one that is told to offer it again counts once."""
        count = self.offers.pop(key, 0) + (key not in request.counted)
        request.counted.add(key)
        self.offers[key] = count
        if len(self.offers) > self._max_tracker_size:
            self.offers.popitem(last=False)
        return count >= self._store_threshold

    def _fits_soon(self, new: list[tuple[int, bytes]], store: Store) -> bool:
        """Whether not all of it fits now, but will soon: waiting then cuts nothing."""
        units = sum(self._groups.units[group_of(key)] for _, key in new)
        return not store.can_reserve(units) and store.could_reserve(units)

    def _reserve(self, new: list[tuple[int, bytes]], request: Request, store: Store) -> dict[bytes, Resident]:
        accepted: dict[bytes, Resident] = {}
        for position, key in new:
            group = group_of(key)
            parent = self._groups.parent_of(key, group, position, request.chain)
            resident = store.reserve(key, group, store.parts_of(group), position, parent)
            if resident is None:
                request.cut = position
                break
            accepted[key] = resident
        if request.cut is not None:  # a position is stored whole or not at all
            for key in [key for key, resident in accepted.items() if resident.position >= request.cut]:
                store.abandon(accepted.pop(key))
            self._counters["stores_cut"] += len(new) - len(accepted)
        return accepted
