"""Slots in use: which resident a key has, and when a slot may be reused.

What must hold:
- A slot is reused only when nobody writes, reads, flushes or loads it: its resident is CLEAN and has no pins.
- A key has one resident at most. One that was forgotten is no longer its key's, and keeps its slot only until it rests.
"""

from collections import Counter
from collections.abc import Callable

from kvdisk.arena import Arena
from kvdisk.plan import footprint
from kvdisk.resident import CLEAN, Resident


class Slots:
    """Residents by key.

    Args:
        arena: where they lie.
        alignment: of all segments, and so of the parts in a slot.
        counters: where it counts.
        on_evicted: called with a resident that has just lost its slot to another.
        on_rest: called with a resident whenever it is CLEAN and something about it changed.
    """

    def __init__(
        self,
        arena: Arena[Resident],
        alignment: int,
        counters: Counter[str],
        *,
        on_evicted: Callable[[Resident], None],
        on_rest: Callable[[Resident], None],
    ) -> None:
        self.by_key: dict[bytes, Resident] = {}  # others only read it
        self._arena = arena
        self._alignment = alignment
        self._counters = counters
        self._on_evicted = on_evicted
        self._on_rest = on_rest

    def place(self, resident: Resident) -> bool:
        """Give a new resident its slot and the sizes that go with it; False if there is none now."""
        resident.live_bytes, resident.stored_bytes, units = footprint(resident.parts, self._alignment)
        evicted: list[Resident] = []
        run = self._arena.allocate(units, resident, evicted)
        if evicted:
            self._counters["slots_evicted"] += len(evicted)
            for old in evicted:
                self._lose(old)
        if run is None:
            self._counters["slots_refused"] += 1
            return False
        resident.run = run
        self.by_key[resident.key] = resident
        return True

    def forget(self, resident: Resident) -> None:
        """No longer its key's: a hit for nobody."""
        assert not resident.forgotten
        resident.forgotten = True
        del self.by_key[resident.key]

    def settle(self, resident: Resident) -> None:
        """Called whenever a slot may have become reusable, or may be so no more."""
        run = resident.run
        is_clean = resident.state is CLEAN
        if run.takeable is not (is_clean and resident.pins == 0):
            self._arena.note(run)
        if not is_clean:
            return
        self._on_rest(resident)
        if resident.forgotten and resident.pins == 0 and run.owner is resident:
            self._arena.release(run)

    def pin(self, resident: Resident) -> None:
        """Keep the slot until the matching `unpin`."""
        resident.pins += 1
        run = resident.run
        if run.takeable:
            self._arena.keep(run)

    def unpin(self, resident: Resident) -> None:
        """Undo one `pin`."""
        assert resident.pins > 0
        resident.pins -= 1
        self.settle(resident)

    def _lose(self, resident: Resident) -> None:
        del self.by_key[resident.key]
        self._on_evicted(resident)
