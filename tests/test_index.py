"""The index against a dictionary and a tree that are too slow to be wrong."""

import random
import tracemalloc
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvdisk.commands import ScannedChunk, ScannedChunks, ScannedPack, ScannedSegment, SegmentFile
from kvdisk.index import Extent, Index
from kvdisk.layout import SegmentHeader
from kvdisk.recovery import Recovery
from kvdisk.segments import SegmentTable

ALIGNMENT = 4096
KEYS = [b"%c" % letter for letter in range(97, 113)]


class IndexAgainstModel(RuleBasedStateMachine):
    """`parent` is what was asked for; a link exists when both ends do, also when it closes a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(ALIGNMENT)
        self.extents: dict[bytes, Extent] = {}
        self.parent: dict[bytes, bytes] = {}  # links
        self.waits: dict[bytes, bytes] = {}  # for a parent that is not there

    keys = Bundle("keys")

    @rule(target=keys, key=st.sampled_from(KEYS))
    def name(self, key: bytes) -> bytes:
        return key

    def is_above(self, key: bytes, of: bytes) -> bool:
        seen = set()
        while of not in seen:
            if of == key:
                return True
            if of not in self.parent:
                return False
            seen.add(of)
            of = self.parent[of]
        return False

    @rule(key=keys, parent=st.sampled_from([b"", *KEYS]), segment=st.integers(0, 3), size=st.integers(1, 9999))
    def add(self, key: bytes, parent: bytes, segment: int, size: int) -> None:
        packed = (size % 4, size * ALIGNMENT) if size % 4 else ()
        extent = Extent(segment, size * ALIGNMENT, size, size << 40, size % 7, *packed)
        self.index.add(key, extent, parent)
        self.extents[key] = extent
        self.parent.pop(key, None)
        self.waits.pop(key, None)
        if parent and parent != key:
            if parent not in self.extents:
                self.waits[key] = parent
            else:
                self.parent[key] = parent
        for orphan in [orphan for orphan, missing in self.waits.items() if missing == key]:
            self.parent[orphan] = self.waits.pop(orphan)

    def remove(self, key: bytes) -> set[bytes]:
        gone = {other for other in self.extents if self.is_above(key, other)}
        for other in gone:
            del self.extents[other]
            self.parent.pop(other, None)
            self.waits.pop(other, None)
        return gone

    @rule(key=keys)
    def drop(self, key: bytes) -> None:
        expected = self.remove(key) if key in self.extents else set()
        dropped = self.index.drop(key)
        assert sorted(dropped) == sorted(expected)
        assert not dropped or dropped[0] == key

    @rule(key=keys)
    def drop_only(self, key: bytes) -> None:
        self.index.drop_only(key)
        if key in self.extents:
            del self.extents[key]
            self.parent.pop(key, None)
            self.waits.pop(key, None)
            for child in [child for child, parent in self.parent.items() if parent == key]:
                del self.parent[child]
                self.waits[child] = key

    @rule(key=keys)
    def drop_waiting(self, key: bytes) -> None:
        expected: set[bytes] = set()
        for orphan in [orphan for orphan, missing in self.waits.items() if missing == key]:
            expected |= self.remove(orphan)
        assert sorted(self.index.drop_waiting(key)) == sorted(expected)

    @rule(segment=st.integers(0, 3))
    def evict_segment(self, segment: int) -> None:
        for key in self.index.keys_of_segment(segment):
            if key in self.extents:
                self.remove(key)
            self.index.drop(key)
        assert self.index.keys_of_segment(segment) == []
        self.index.forget_segment(segment)

    @rule()
    def clear(self) -> None:
        if len(self.extents) > 12:
            self.index.clear()
            self.extents.clear()
            self.parent.clear()
            self.waits.clear()

    @invariant()
    def rows_are_the_models(self) -> None:
        assert len(self.index) == len(self.extents)
        assert set(self.index) == set(self.extents)
        for key in KEYS:
            assert self.index.get(key) == self.extents.get(key)
            assert (key in self.index) == (key in self.extents)
            assert self.index.parent_of(key) == self.parent.get(key)
            extent = self.extents.get(key)
            assert self.index.segment_of(key) == (extent.segment if extent else None)

    @invariant()
    def segments_are_the_models(self) -> None:
        for segment in range(4):
            keys = [key for key, extent in self.extents.items() if extent.segment == segment]
            assert sorted(self.index.keys_of_segment(segment)) == sorted(keys)
            assert self.index.live_bytes_of_segment(segment) == sum(self.extents[key].live_bytes for key in keys)
            for key in keys:
                outside = any(p == key and self.extents[c].segment != segment for c, p in self.parent.items())
                assert self.index.has_child_outside(key, segment) == outside

    @invariant()
    def rows_without_a_chunk_hold_somebodys_children(self) -> None:
        assert set(self.index._missing) == set(self.waits.values())
        assert len(self.index._key) == len(self.extents) + len(set(self.waits.values())) + len(self.index._free)


TestIndexAgainstModel = IndexAgainstModel.TestCase
TestIndexAgainstModel.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_a_loop_of_parents_goes_whole_and_leaves_nothing_behind() -> None:
    """Only bytes from a stranger form one."""
    for seed in range(50):
        chance = random.Random(seed)
        index = Index(ALIGNMENT)
        links = [(KEYS[n], KEYS[(n + 1) % 6]) for n in range(6)] * 2
        chance.shuffle(links)
        for key, parent in links:
            index.add(key, Extent(0, 0, 1, 0, 0), parent)
        assert sorted(index.drop(KEYS[seed % 6])) == KEYS[:6]
        assert len(index) == 0
        assert index.live_bytes_of_segment(0) == 0
        assert index._missing == {}


class Walks(list[int]):
    """A column that counts how often it is read: the cost of an operation, whatever the machine."""

    def __init__(self, column: Iterable[int]) -> None:
        super().__init__(column)
        self.reads = 0

    def __getitem__(self, row):  # type: ignore[no-untyped-def]
        self.reads += 1
        return super().__getitem__(row)


def test_a_long_chain_added_again_costs_no_walk_up_for_each_chunk() -> None:
    """At a recovery a prefix may be found twice: it was stored again, or its head was written again."""
    index = Index(ALIGNMENT)
    keys = [b"%d" % number for number in range(2_000)]
    for segment in range(2):
        index._tree._parent = walks = Walks(index._tree._parent)  # type: ignore[assignment]
        for number, key in enumerate(keys):
            index.add(key, Extent(segment, 0, 1, 0, 0), keys[number - 1] if number else b"")
        assert walks.reads <= 2 * len(keys)
    assert index.keys_of_segment(1) == keys


def test_a_chunk_leaves_thousands_that_wait_for_the_same_parent_without_passing_them() -> None:
    index = Index(ALIGNMENT)
    keys = [b"%d" % number for number in range(2_000)]
    for key in keys:
        index.add(key, Extent(0, 0, 1, 0, 0), b"gone")
    index._tree._next_at = walks = Walks(index._tree._next_at)  # type: ignore[assignment]
    for key in keys[::2]:
        index.drop(key)
    assert walks.reads <= 2 * len(keys)
    assert sorted(index.drop_waiting(b"gone")) == sorted(keys[1::2])


def test_a_chain_added_tail_first_is_linked_in_linear_time() -> None:
    index = Index(ALIGNMENT)
    for number in range(20_000, 0, -1):
        index.add(b"%d" % number, Extent(0, 0, 1, 0, 0), b"%d" % (number - 1))
    assert index.parent_of(b"20000") == b"19999"
    assert len(index.drop(b"1")) == 20_000


LARGEST = Extent((1 << 32) - 2, 4096 * ((1 << 32) - 1), (1 << 32) - 1, (1 << 64) - 1, 65535)


@pytest.mark.parametrize("extent", [LARGEST, LARGEST._replace(codec=255, stored_bytes=4096 * ((1 << 24) - 1))])
def test_the_largest_numbers_fit(extent: Extent) -> None:
    index = Index(ALIGNMENT)
    index.add(b"k", extent, b"")
    assert index.get(b"k") == extent


def test_a_chunk_takes_at_most_200_bytes_with_a_key_of_36() -> None:
    count = 125_000  # fills the dictionary's table as 1,000,000 or 8,000,000 do
    tracemalloc.start()
    try:
        index = Index(ALIGNMENT)
        for number in range(count):
            key, parent = b"%036d" % number, b"%036d" % (number - 1) if number % 100 else b""
            index.add(key, Extent(number >> 8, 0, 1, number, 0), parent)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    columns = [one for part in (index, index._tree) for one in vars(part).values() if isinstance(one, memoryview)]
    assert len(columns) == 7
    taken += count * sum(column.itemsize for column in columns)  # of the system's, which is not traced
    assert taken / count <= 200


def test_filling_is_adding_one_by_one() -> None:
    """More than the columns have room for at first, by segments of several prefixes, some of which wait for others."""
    keys = [b"%05d" % n for n in range(10_000)]
    parents = [
        b"" if n % 1000 == 0 else keys[n - 1] if n % 7 else keys[(n * 31) % 12_000 % 9_999] for n in range(10_000)
    ]
    filled, added = Index(ALIGNMENT), Index(ALIGNMENT)
    chunks = []
    for n, (key, parent) in enumerate(zip(keys, parents, strict=True)):
        codec, stored = (n % 3, ALIGNMENT * (n % 5 + 1)) if n > 5000 and n % 3 else (0, ALIGNMENT)
        chunks.append(ScannedChunk(key, parent, n % 9, n, n * ALIGNMENT, stored, n + 1, n << 40, codec=codec))
        extent = Extent(n // 2500, n * ALIGNMENT, n + 1, n << 40, n % 9, codec, stored if codec else 0)
        added.add(key, extent, parent)
    filled.fill((n // 2500, ScannedChunks.of(chunks[n : n + 500])) for n in range(0, 10_000, 500))
    for key in keys:
        assert (filled.get(key), filled.parent_of(key)) == (added.get(key), added.parent_of(key))
    for segment in range(4):
        assert filled.keys_of_segment(segment) == added.keys_of_segment(segment)
        assert filled.live_bytes_of_segment(segment) == added.live_bytes_of_segment(segment)
    assert sorted(filled.drop(keys[1])) == sorted(added.drop(keys[1]))


def test_siblings_that_come_and_go_leave_nothing_behind() -> None:
    index = Index(ALIGNMENT)
    index.add(b"up", Extent(0, 0, 1, 0, 0), b"")
    for number in range(1000):
        index.add(b"%d" % number, Extent(0, 0, 1, 0, 0), b"up")
        index.drop(b"%d" % (number - 5))
    assert len(index._tree._parent_at) <= 10
    assert len(index.drop(b"up")) == 6
    assert sorted(index._tree._free) == list(range(len(index._tree._parent_at)))


# ---- recovery of many segments


def scanned(number: int, names: Sequence[bytes]) -> ScannedSegment:
    """A sealed segment with one pack of chunks of a page each, in pack order."""
    header = SegmentHeader(ALIGNMENT, ALIGNMENT * (len(names) + 10), number + 1, 1, 0, bytes(32))
    chunks = [
        ScannedChunk(name, b"", 0, n, ALIGNMENT * (n + 2), ALIGNMENT, ALIGNMENT, number, True)
        for n, name in enumerate(names)
    ]
    pack = ScannedPack(number + 1, ALIGNMENT, ALIGNMENT * (len(names) + 1), b"", 0, len(names))
    return ScannedSegment(SegmentFile(0, number), header, True, [pack], ScannedChunks.of(chunks))


@pytest.mark.parametrize("collide", [False, True], ids=["hashes differ", "all keys have one hash"])
def test_recovery_tells_keys_apart_by_their_bytes_whatever_their_hashes(collide: bool) -> None:
    scans = [scanned(0, [b"a", b"b", b"c"]), scanned(1, [b"d", b"e"]), scanned(2, [b"b", b"f"])]
    if collide:
        scans = [scan._replace(chunks=scan.chunks._replace(hash=scan.chunks.hash * 0)) for scan in scans]
    index = Index(ALIGNMENT)
    Recovery(index, SegmentTable((3,)), lambda *_: True).take(scans, 0)
    found = {key: index.get(key).segment for key in index}
    assert found == {b"a": 0, b"b": 2, b"c": 0, b"d": 1, b"e": 1, b"f": 2}
    assert index.get(b"b").checksum == 2


def test_an_index_that_cannot_grow_goes_on_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(ALIGNMENT)
    monkeypatch.setattr("kvdisk.index._ROOM_MIN", 4)
    index.clear()
    extent = Extent(0, ALIGNMENT, ALIGNMENT, 1, 0)
    for n in range(4):
        index.add(b"%d" % n, extent, b"")

    def full(column: "memoryview[int]", rows: int) -> "memoryview[int]":
        return column

    with monkeypatch.context() as patch:
        patch.setattr("kvdisk.index.grown", full)
        with pytest.raises(MemoryError, match="4 chunks"):
            index.add(b"more", extent, b"")
    assert list(index) == [b"0", b"1", b"2", b"3"]
    assert index.get(b"3") == extent
    index.add(b"more", extent, b"3")
    assert index.parent_of(b"more") == b"3"
