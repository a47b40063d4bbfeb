"""KV events: what the store's index gained and lost, as vLLM publishes it to routers.

The store notes every change in `Store.events` once somebody listens; here a bounded part of it is handed over a step.
"""

from collections import deque
from collections.abc import Iterator
from itertools import groupby

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey

from kvdisk.store import Change, Store
from kvdisk.vllm.version import quiet_event

EVENTS_A_STEP_MAX = 2000
"""Of the KV events that one step hands out: each costs the scheduler some 16 us, and a restart finds millions."""


def listen(store: Store) -> None:
    """Note changes from now on; what was found on disk is news to whoever listens."""
    store.events = deque((key, Change.STORED) for key in store.index)


def take(
    store: Store, locality: Locality = Locality.LOCAL, *, owner: str | None = None, of_host: bool = True
) -> Iterator[OffloadingEvent]:
    """What entered and left the disk since the last call, or the first of it.

    vLLM keeps what it says of a chunk until the chunk left the CPU, whoever owns it, so a chunk that is nowhere any
    more leaves the CPU, too.

    Args:
        store: which.
        locality: of its disk.
        owner: the tier's type, where the store is one of several tiers.
        of_host: whether the CPU's events are the caller's as well.
    """
    events = store.events
    if not events:
        return
    taken = [events.popleft() for _ in range(min(EVENTS_A_STEP_MAX, len(events)))]
    for change, run in groupby(taken, key=lambda event: event[1]):
        keys = [OffloadKey(key) for key, _ in run]
        if change is not Change.GONE:
            removed = change is Change.REMOVED
            yield OffloadingEvent(keys, Medium.STORAGE, removed=removed, locality=locality, ownership=owner)
        elif of_host:
            yield OffloadingEvent(keys, Medium.CPU, removed=True, locality=locality, **quiet_event())
