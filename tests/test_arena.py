"""Slots: no overlap, nothing lost, nothing given up that is in use; second chance; neighbours."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvdisk.arena import Arena, Run


class Chunk:
    """An owner."""

    def __init__(self) -> None:
        self.used = False
        self.evictable = True
        self.run: Run[Chunk]

    def can_evict(self) -> bool:
        return self.evictable


class ArenaMachine(RuleBasedStateMachine):
    @initialize(units=st.integers(4, 40), granule=st.sampled_from([1, 2, 4]))
    def start(self, units: int, granule: int) -> None:
        self.granule = granule
        self.arena: Arena[Chunk] = Arena(units, granule)
        self.chunks: set[Chunk] = set()

    @rule(units=st.integers(1, 50))
    def allocate(self, units: int) -> None:
        new, evicted = Chunk(), list[Chunk]()
        keep = {chunk for chunk in self.chunks if not chunk.evictable}
        used = {chunk for chunk in self.chunks if chunk.used}
        fits = self.could_fit(-(-units // self.granule) * self.granule)
        before = {chunk: (chunk.run.start, chunk.run.units) for chunk in self.chunks}
        may_fit = self.arena.may_fit(units)
        run = self.arena.allocate(units, new, evicted)
        assert may_fit or run is None
        assert set(evicted) <= self.chunks - keep
        assert len(set(evicted)) == len(evicted)
        assert (run is not None) == fits
        if run is None:
            assert not evicted, "nothing is given up in vain"
            assert {chunk for chunk in self.chunks if chunk.used} == used, "nor second chances"
            return
        assert run.units == -(-units // self.granule) * self.granule
        assert run.start % self.granule == 0
        for chunk in self.chunks - set(evicted):
            assert (chunk.run.start, chunk.run.units) == before[chunk], "a slot never moves"
        if any(chunk in used for chunk in evicted):
            assert not any(c.used for c in self.chunks - set(evicted) if c.evictable) or len(evicted) > 0
        self.chunks -= set(evicted)
        new.run = run
        self.chunks.add(new)

    def could_fit(self, units: int) -> bool:
        """Whether neighbouring units that are free or may be given up hold `units`."""
        blocked = {n for c in self.chunks if not c.evictable for n in range(c.run.start, c.run.start + c.run.units)}
        longest = length = 0
        for unit in range(self.arena.unit_count):
            length = 0 if unit in blocked else length + 1
            longest = max(longest, length)
        return longest >= units

    @precondition(lambda self: self.chunks)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(sorted(self.chunks, key=lambda c: c.run.start)))
        self.arena.release(chunk.run)
        self.chunks.remove(chunk)

    @precondition(lambda self: self.chunks)
    @rule(data=st.data(), used=st.booleans(), evictable=st.booleans())
    def change(self, data: st.DataObject, used: bool, evictable: bool) -> None:
        chunk = data.draw(st.sampled_from(sorted(self.chunks, key=lambda c: c.run.start)))
        chunk.used, chunk.evictable = used, evictable
        self.arena.note(chunk.run)

    @invariant()
    def slots_do_not_overlap_and_units_are_constant(self) -> None:
        if not hasattr(self, "arena"):
            return
        owners = list(self.arena.owners())
        assert len(owners) == len(set(owners))
        assert set(owners) == self.chunks
        taken = [n for c in self.chunks for n in range(c.run.start, c.run.start + c.run.units)]
        assert len(taken) == len(set(taken))
        assert all(0 <= n < self.arena.unit_count for n in taken)
        assert self.arena.free_units == self.arena.unit_count - len(taken)
        assert all(chunk.run.owner is chunk for chunk in self.chunks)


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def place(arena: Arena[Chunk], units: int) -> tuple[Chunk, list[Chunk]]:
    chunk, evicted = Chunk(), list[Chunk]()
    run = arena.allocate(units, chunk, evicted)
    assert run is not None
    chunk.run = run
    return chunk, evicted


def test_chunks_placed_one_after_another_are_neighbours() -> None:
    arena: Arena[Chunk] = Arena(100)
    starts = [place(arena, 7)[0].run.start for _ in range(14)]
    assert starts == list(range(0, 98, 7))


def test_a_used_chunk_gets_a_second_chance_and_only_one() -> None:
    arena: Arena[Chunk] = Arena(4)
    a, b, c, d = (place(arena, 1)[0] for _ in range(4))
    a.used = c.used = True
    assert place(arena, 1)[1] == [b]
    assert not a.used
    assert place(arena, 1)[1] == [d]
    assert place(arena, 1)[1] == [a]


def test_a_chunk_larger_than_the_arena_is_refused_and_costs_nobody_anything() -> None:
    arena: Arena[Chunk] = Arena(10)
    evicted: list[Chunk] = []
    assert arena.allocate(11, Chunk(), evicted) is None
    assert arena.allocate(15, Chunk(), evicted) is None
    for _ in range(3):
        place(arena, 3)
    assert arena.allocate(20, Chunk(), evicted) is None
    assert evicted == []


def test_a_large_chunk_displaces_neighbours_only() -> None:
    arena: Arena[Chunk] = Arena(12)
    chunks = [place(arena, 2)[0] for _ in range(6)]
    keep(arena, chunks[1])
    _, evicted = place(arena, 6)
    assert evicted == chunks[2:5]


def keep(arena: Arena[Chunk], chunk: Chunk, evictable: bool = False) -> None:
    chunk.evictable = evictable
    arena.note(chunk.run)


class Passes(Arena[Chunk]):
    """Counts the passes over all runs."""

    passes = 0

    def _fits(self, units: int) -> bool:
        self.passes += 1
        return super()._fits(units)


def test_what_cannot_be_had_is_refused_without_a_pass_over_the_slots() -> None:
    arena = Passes(1000)
    chunks = [place(arena, 1)[0] for _ in range(1000)]
    arena.passes = 0
    for chunk in chunks[:997]:
        keep(arena, chunk)
    for _ in range(50):
        assert arena.allocate(4, Chunk(), []) is None
    assert arena.passes == 0
    keep(arena, chunks[996], evictable=True)
    assert place(arena, 4)[1] == chunks[996:]


def test_what_fits_nowhere_is_not_looked_for_again_until_it_may_fit() -> None:
    arena = Passes(1000)
    chunks = [place(arena, 1)[0] for _ in range(1000)]
    arena.passes = 0
    for chunk in chunks[::2]:
        keep(arena, chunk)
    for _ in range(50):
        assert arena.allocate(3, Chunk(), []) is None
        assert arena.allocate(300, Chunk(), []) is None
    assert arena.passes == 1
    arena.release(chunks[1].run)  # no nearer to three in a row
    keep(arena, chunks[0], evictable=True)
    assert arena.allocate(3, Chunk(), []) is None
    assert arena.passes == 1
    keep(arena, chunks[2], evictable=True)
    assert place(arena, 3)[0].run.start <= 1
    assert place(arena, 1)[1], "and what does fit was never refused"


def test_an_arena_without_a_single_slot_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="more bytes"):
        Arena(3, granule=4)


def test_a_window_across_the_hand_is_found_although_everything_was_used() -> None:
    arena: Arena[Chunk] = Arena(4)
    chunks = [place(arena, 1)[0] for _ in range(4)]
    place(arena, 2)  # the hand stands in the middle now
    for chunk in arena.owners():
        chunk.used = True
    chunks[3].used = True
    assert len(place(arena, 4)[1]) == 3
