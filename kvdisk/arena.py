"""Slots: which units of the arena hold which chunk.

The arena is a ring of fixed units, cut into runs that are free or hold one chunk's slot. A hand sweeps it: to place a
chunk it joins neighbouring runs that are free, or may be given up and were not used since the hand passed (CLOCK, the
approximation of LRU in every page cache), until the chunk fits. So chunks of any size share one arena without
fragmenting it for good, and chunks placed one after another are neighbours, which makes their I/O one large request.

Knows only units and owners: what may be given up, the owner says, and whoever changes that tells the arena (`note`).
So it knows how much could be had, and a request that cannot be met is refused at once: under pressure there are many,
each would pass all runs, and take away the second chance of every chunk. The same run is the same slot on every rank.
"""

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Owner(Protocol):
    """What a slot holds."""

    used: bool  # since the hand last passed; the arena clears it

    def can_evict(self) -> bool:
        """Whether the slot may be given up now."""


OwnerT = TypeVar("OwnerT", bound=Owner)


class Run(Generic[OwnerT]):
    """A run of units: free (`owner` is None) or one slot. Runs form a ring in address order.

    takeable: whether it is free or its owner may be evicted, as far as the arena was told.
    """

    __slots__ = ("next", "owner", "previous", "start", "takeable", "units")

    def __init__(self, start: int, units: int) -> None:
        self.start = start
        self.units = units
        self.owner: OwnerT | None = None
        self.takeable = True
        self.next: Run[OwnerT] = self
        self.previous: Run[OwnerT] = self


class Arena(Generic[OwnerT]):
    """`unit_count` units; slots start and end at multiples of `granule` units (the direct-I/O alignment)."""

    def __init__(self, unit_count: int, granule: int = 1) -> None:
        if unit_count < granule:
            raise ValueError(f"an arena of {unit_count} units holds no slot of {granule}; give it more bytes")
        self.unit_count = unit_count - unit_count % granule
        self.free_units = self.unit_count
        self._takeable_units = self.unit_count
        self._no_run_of = self.unit_count + 1  # the smallest size that is known to fit nowhere
        self._granule = granule
        self._hand: Run[OwnerT] = Run(0, self.unit_count)
        self._run_count = 1

    def allocate(self, units: int, owner: OwnerT, evicted: list[OwnerT]) -> Run[OwnerT] | None:
        """Place `owner` in `units` units, or None if no run can be made free.

        Owners that lost their slot for it are appended to `evicted`. A request that fails changes nothing.
        """
        assert units > 0
        units = -(-units // self._granule) * self._granule
        run, last = self._hand, self._hand.owner
        if last is not None and run.takeable and not last.used and run.units == units:  # what a sweep would find first
            evicted.append(last)
            self.free_units += units
        elif last is not None or run.units < units:  # else the rest of a run that was cut before
            if not self.may_fit(units):
                return None
            if not self._fits(units):
                self._no_run_of = units
                return None
            window = self._sweep(units)
            run = window[0]
            for taken in window:
                if taken.owner is not None:
                    evicted.append(taken.owner)
                    self._set_free(taken)
            for taken in window[1:]:
                self._absorb(run, taken)
        if run.units > units:
            self._split(run, units)
        run.owner = owner
        self.free_units -= units
        if not owner.can_evict():  # what `note` would find: the run was free until now
            run.takeable = False
            self._takeable_units -= units
        self._hand = run.next
        return run

    def may_fit(self, units: int) -> bool:
        """Whether `allocate` may find room for so many units; if not, it will not. Constant time, changes nothing."""
        return units <= self._takeable_units and units < self._no_run_of

    def note(self, run: Run[OwnerT]) -> None:
        """To be called whenever what the owner's `can_evict` says has changed, or may have."""
        takeable = run.owner is None or run.owner.can_evict()
        if takeable == run.takeable:
            return
        if not takeable:
            self.keep(run)
            return
        run.takeable = True
        self._takeable_units += run.units
        if self._no_run_of <= self.unit_count and self._units_around(run, self._no_run_of) >= self._no_run_of:
            self._no_run_of = self.unit_count + 1

    def keep(self, run: Run[OwnerT]) -> None:
        """To be called when a run that may be taken may no more: `note`, for the commonest case."""
        assert run.takeable and run.owner is not None
        run.takeable = False
        self._takeable_units -= run.units

    def release(self, run: Run[OwnerT]) -> None:
        """Free a slot; joined with free neighbours, so that the sweep stays short."""
        assert run.owner is not None
        self._set_free(run)
        following, previous = run.next, run.previous
        if following is not run and following.owner is None and following.start > run.start:
            self._absorb(run, following)
        if previous is not run and previous.owner is None and previous.start < run.start:
            self._absorb(previous, run)

    def owners(self) -> Iterator[OwnerT]:
        """Every owner, in ring order from the hand."""
        run = self._hand
        for _ in range(self._run_count):
            if run.owner is not None:
                yield run.owner
            run = run.next

    def _fits(self, units: int) -> bool:
        """Whether neighbouring runs that may be taken hold `units`, second chances or not."""
        total = 0
        run = self._hand
        for _ in range(2 * self._run_count):  # twice: a window may lie across the hand
            if run.start == 0:  # the ring closes: memory is not contiguous here
                total = 0
            total = total + run.units if run.takeable else 0
            if total >= units:
                return True
            run = run.next
        return False

    def _units_around(self, run: Run[OwnerT], enough: int) -> int:
        """Units of `run` and its neighbours that may be taken; counts no further than to `enough`."""
        total, first, last = run.units, run, run
        while total < enough and first.start > 0 and first.previous.takeable:
            first = first.previous
            total += first.units
        while total < enough and last.next.start > last.start and last.next.takeable:
            last = last.next
            total += last.units
        return total

    def _sweep(self, units: int) -> list[Run[OwnerT]]:
        """Neighbouring runs from the hand on that may be taken and hold `units`; they `_fits`.

        At most three rounds: one takes away second chances, and a window may lie across the place where the hand was,
        which only a pass from the lowest address to the highest sees whole.
        """
        window: list[Run[OwnerT]] = []
        total = 0
        run = self._hand
        while total < units:
            if run.start == 0:
                window, total = [], 0
            owner = run.owner
            if owner is not None and (owner.used or not run.takeable):
                owner.used = False
                window, total = [], 0
            else:
                window.append(run)
                total += run.units
            run = run.next
        return window

    def _set_free(self, run: Run[OwnerT]) -> None:
        run.owner = None
        self.free_units += run.units
        if not run.takeable:
            self.note(run)

    def _absorb(self, run: Run[OwnerT], following: Run[OwnerT]) -> None:
        assert run.next is following
        assert run.start + run.units == following.start
        run.units += following.units
        run.next = following.next
        following.next.previous = run
        self._run_count -= 1
        if self._hand is following:
            self._hand = run

    def _split(self, run: Run[OwnerT], units: int) -> None:
        rest: Run[OwnerT] = Run(run.start + units, run.units - units)
        run.units = units
        rest.next, rest.previous = run.next, run
        run.next.previous = rest
        run.next = rest
        self._run_count += 1
