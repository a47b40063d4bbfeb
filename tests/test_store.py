"""The metadata plane alone, driven by completions made by hand: no disk, no clock, no thread."""

import errno
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kvdisk import layout
from kvdisk.commands import (
    Command,
    Completion,
    OpenSegment,
    ReadChunks,
    ScannedChunk,
    ScannedChunks,
    ScannedPack,
    ScannedSegment,
    SealSegment,
    SegmentFile,
    WriteEpoch,
    WritePack,
)
from kvdisk.index import Extent, Index
from kvdisk.layout import SegmentHeader
from kvdisk.resident import Resident, State
from kvdisk.segments import FAILURES_MAX, FULL_INTERVAL_S, PROBE_INTERVAL_S, SegmentState
from kvdisk.store import Change, Presence, Store
from kvdisk.store_config import StoreConfig
from kvdisk.writer import PACKS_INFLIGHT

ALIGNMENT = 4096
SEGMENT_BYTES = 256 << 10
FINGERPRINT = bytes(32)


@dataclass
class Bench:
    """A store and its commands that are out; `answer` completes them as a disk would."""

    store: Store
    now: float = 0.0
    out: list[Command] = field(default_factory=list)
    seen: list[Command] = field(default_factory=list)

    def take(self) -> list[Command]:
        new = self.store.take_commands(self.now)
        self.out += new
        self.seen += new
        for resident in self.store.arena.owners():
            assert resident.run.takeable == resident.can_evict(), "the arena was not told"
        return new

    def answer(self, command: Command, error: int = 0, *, bad: tuple[int, ...] = ()) -> None:
        """The completion of a command, good unless told otherwise."""
        self.out.remove(command)
        completion = Completion(command.id, error)
        if not error and isinstance(command, WritePack):
            completion.checksums = [hash(chunk.key) & 0xFFFF for chunk in command.chunks]
            completion.pack_header = bytes(layout.PACK_HEADER_BYTES + layout.ENTRY_BYTES * len(command.chunks))
        if not error and isinstance(command, ReadChunks):
            completion.verified = [n not in bad for n in range(len(command.items))]
        self.store.complete(completion, self.now)

    def late(self, command: Command) -> None:
        self.store.complete(Completion(command.id, errno.ETIMEDOUT, late=True), self.now)

    def settle(self, command: Command) -> None:
        self.out.remove(command)
        self.store.complete(Completion(command.id, settled=True), self.now)

    def run(
        self, error: int = 0, kinds: tuple[type, ...] = (OpenSegment, WritePack, SealSegment), limit: int = 200
    ) -> int:
        """Answer everything until nothing is out; commands of `kinds` fail with `error`. How many were answered."""
        count = 0
        self.take()
        while self.out:
            command = self.out[0]
            self.answer(command, error if isinstance(command, kinds) else 0)
            self.take()
            count += 1
            assert count < limit, "a loop"
        return count

    def put(self, key: bytes, units: int = 1, *, parent: bytes = b"", position: int = 0) -> Resident | None:
        if not self.store.replace(key):
            return None
        resident = self.store.reserve(key, 0, (units * 4096 - 5,), position, parent)
        if resident is not None:
            self.store.commit([resident])
        return resident

    def on_disk(self, key: bytes) -> bool:
        return key in self.store.index


def bench(segments_max: tuple[int, ...] = (4,), unit_count: int = 128, seed: int = 0) -> Bench:
    config = StoreConfig(FINGERPRINT, SEGMENT_BYTES, ALIGNMENT, segments_max, unit_count)
    return Bench(Store(config, random.Random(seed)))


def packs(commands: list[Command]) -> list[WritePack]:
    return [command for command in commands if isinstance(command, WritePack)]


def evict_residents(b: Bench, keys: list[bytes]) -> None:
    """Take the slots of clean chunks away, as pressure would."""
    for key in keys:
        resident = b.store.resident(key)
        if resident is not None:
            assert resident.can_evict()
            b.store._slots._lose(resident)
            b.store.arena.release(resident.run)


# ---- storing


def test_a_committed_chunk_is_a_hit_before_any_io_and_on_disk_after_it() -> None:
    b = bench()
    resident = b.store.reserve(b"k", 0, (4091,), 0, b"")
    assert resident is not None
    assert b.store.presence(b"k") is Presence.PENDING
    b.store.commit([resident])
    assert b.store.presence(b"k") is Presence.READY
    assert not b.on_disk(b"k")
    assert b.run() == 2
    assert b.on_disk(b"k")
    assert not b.store.busy


def test_refusal_is_a_normal_result_and_passes() -> None:
    b = bench(unit_count=16)
    stored = [b.put(b"%d" % n, 2) for n in range(8)]
    assert sum(r is not None for r in stored) == 4, "half of the arena may be unflushed"
    assert b.store.counters["stores_refused_unflushed"] == 4
    b.run()
    assert b.put(b"again", 2) is not None
    filling = b.store.reserve(b"half", 0, (4096,), 0, b"")
    assert filling is not None
    b.store.abandon(filling)
    assert b.store.presence(b"half") is Presence.ABSENT
    b.run()
    assert b.store.arena.free_units + sum(r.units for r in _runs(b)) == 16


def _runs(b: Bench) -> list:  # type: ignore[type-arg]
    return [owner.run for owner in b.store.arena.owners()]


def test_chunks_committed_together_lie_together_in_prefix_order() -> None:
    b = bench()
    residents = [b.store.reserve(b"%d" % n, 0, (4096,), n, b"") for n in (3, 1, 2, 0)]
    b.store.commit([r for r in residents if r is not None])
    b.run()
    (pack,) = packs(b.seen)
    assert [chunk.key for chunk in pack.chunks] == [b"0", b"1", b"2", b"3"]


def test_a_queued_chunk_that_is_replaced_leaves_the_queue_and_the_others_keep_their_order() -> None:
    b = bench()
    for n in range(6):
        b.put(b"%d" % n, position=n)
    for n in (4, 0, 3):
        b.put(b"%d" % n, position=10 + n)
    b.run()
    (pack,) = packs(b.seen)
    assert [chunk.position for chunk in pack.chunks] == [1, 2, 5, 14, 10, 13]
    assert b.store.writer.stats.chunks_flushed == 6


# ---- a disk that refuses space


def test_no_space_once_is_one_retry_and_the_chunk_lands() -> None:
    b = bench()
    b.put(b"k")
    b.take()
    b.answer(b.out[0])
    b.take()
    (pack,) = packs(b.out)
    b.answer(pack, errno.ENOSPC)
    b.run()
    assert b.on_disk(b"k")
    assert len(packs(b.seen)) == 2
    assert packs(b.seen)[1].file != pack.file or packs(b.seen)[1].header.sequence != pack.header.sequence


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("refused", [(OpenSegment,), (WritePack,), (OpenSegment, WritePack, SealSegment)])
def test_no_space_for_ever_is_no_loop_and_old_chunks_still_hit(code: int, refused: tuple[type, ...]) -> None:
    b = bench()
    for n in range(18):
        b.put(b"old%d" % n, 8)  # 600 KB: three of four segments
        b.run()
    evict_residents(b, [b"old%d" % n for n in range(18)])
    asked = 0
    for n in range(100):
        b.now += 0.01
        b.put(b"new%d" % n, 8)
        asked += b.run(code, refused)
        assert b.store.presence(b"new%d" % n) is Presence.READY, "it stays a hit in memory"
    assert asked < 12
    kept = [n for n in range(18) if b.store.presence(b"old%d" % n) is Presence.ON_DISK]
    assert len(kept) >= 6, "at most one or two segments were given up for it"
    b.now += 2 * FULL_INTERVAL_S
    b.put(b"last", 8)
    b.run()
    assert b.on_disk(b"last"), "space came back"


# ---- a disk that fails


def test_after_enough_failures_writes_stop_and_are_probed_once_an_interval() -> None:
    b = bench(segments_max=(6,))
    for n in range(20):
        b.put(b"old%d" % n, 8)
        b.run()
    evict_residents(b, [b"old%d" % n for n in range(20)])
    failed = 0
    for n in range(60):
        b.now += 0.01
        b.put(b"new%d" % n)
        failed += b.run(errno.EIO)
    assert failed <= 2 * FAILURES_MAX
    assert b.store.writer.stats.writes_failed >= FAILURES_MAX
    kept = [n for n in range(20) if b.store.presence(b"old%d" % n) is Presence.ON_DISK]
    assert len(kept) >= 12, "a disk that takes no writes must not lose what can be read"
    for _ in range(5):
        b.now += PROBE_INTERVAL_S + 1
        for n in range(10):
            b.put(b"probe%d" % n)
            failed = b.run(errno.EIO)
            assert failed <= (2 if n == 0 else 0)
    b.now += PROBE_INTERVAL_S + 1
    b.put(b"well again")
    b.run()
    assert b.on_disk(b"well again")
    for n in range(20):
        b.put(b"and on%d" % n, 8)
        b.run()
        assert b.on_disk(b"and on%d" % n)


def test_a_root_that_fails_leaves_the_work_to_the_other() -> None:
    b = bench(segments_max=(4, 4))
    landed = 0
    for n in range(60):
        key = b"%d" % n
        b.put(key, 2)
        b.take()
        while b.out:
            command = b.out[0]
            assert not isinstance(command, WriteEpoch)
            b.answer(command, errno.EIO if command.file.root == 0 else 0)
            b.take()
        landed += b.on_disk(key)
    assert landed >= 60 - FAILURES_MAX


def test_a_segment_of_a_failed_pack_after_a_reset_is_usable_again() -> None:
    b = bench(segments_max=(3,))
    b.put(b"k")
    b.take()
    b.answer(b.out[0])
    b.take()
    (pack,) = packs(b.out)
    b.store.reset()
    b.answer(pack, errno.EIO)
    b.run()
    for n in range(40):
        b.put(b"%d" % n, 8)
        b.run()
        assert b.on_disk(b"%d" % n), n


# ---- late


def test_a_late_write_keeps_slot_and_segment_until_it_settles() -> None:
    b = bench(segments_max=(3,), unit_count=32)
    resident = b.put(b"k", 4)
    assert resident is not None
    b.take()
    b.answer(b.out[0])
    b.take()
    (pack,) = packs(b.out)
    b.late(pack)
    assert b.store.presence(b"k") is Presence.READY
    assert not resident.can_evict()
    run = (resident.run.start, resident.run.units)
    segment = b.store.table[pack.file.number]
    b.out.remove(pack)
    for n in range(60):
        b.put(b"%d" % n, 4)
        b.run()
        assert not segment.idle
        assert all(c.file != pack.file for c in b.seen if isinstance(c, OpenSegment) and c.recycle)
        assert all(r is resident or not _overlap(run, r.run) for r in b.store.arena.owners())
    b.out.append(pack)
    b.settle(pack)
    b.run()
    assert resident.can_evict()
    for n in range(60):
        b.put(b"more%d" % n, 4)
        b.run()
    assert any(c.file == pack.file for c in b.seen if isinstance(c, OpenSegment) and c.recycle)


def _overlap(run: tuple[int, int], other) -> bool:  # type: ignore[no-untyped-def]
    return bool(run[0] < other.start + other.units and other.start < run[0] + run[1])


def test_a_late_read_is_a_miss_at_once_and_keeps_its_slot_until_it_settles() -> None:
    b = bench(unit_count=32)
    b.put(b"k", 4)
    b.run()
    evict_residents(b, [b"k"])
    resident = b.store.promote(b"k")
    assert resident is not None
    b.take()
    (read,) = b.out
    run = (resident.run.start, resident.run.units)
    b.late(read)
    assert b.store.presence(b"k") is Presence.ABSENT
    b.out.remove(read)
    for n in range(30):
        b.put(b"%d" % n, 4)
        b.run()
        assert not any(_overlap(run, r.run) for r in b.store.arena.owners() if r is not resident)
    assert b.put(b"k", 4) is not None, "it can be stored anew meanwhile"
    b.run()
    b.out.append(read)
    b.settle(read)
    assert b.store.presence(b"k") is Presence.READY
    assert resident not in list(b.store.arena.owners())


def test_a_late_opening_is_not_waited_for_and_its_file_is_used_when_it_settles() -> None:
    b = bench(segments_max=(3,))
    b.put(b"k")
    b.take()
    (opening,) = b.out
    b.late(opening)
    b.out.remove(opening)
    b.run()
    assert b.on_disk(b"k"), "through another segment"
    b.out.append(opening)
    b.settle(opening)
    for n in range(40):
        b.put(b"%d" % n, 8)
        b.run()
    assert any(c.file == opening.file for c in b.seen[1:] if isinstance(c, OpenSegment))


@pytest.mark.parametrize("hangs", [(OpenSegment,), (WritePack,), (WritePack, SealSegment), (SealSegment,)], ids=repr)
def test_a_disk_that_hangs_for_ever_is_given_up_and_nobody_waits_for_it(hangs: tuple[type, ...]) -> None:
    b = bench(segments_max=(3,), unit_count=1024)
    hung: list[Command] = []
    for n in range(60):
        assert b.put(b"%d" % n, 8) is not None
        b.take()
        while b.out:
            command = b.out[0]
            if isinstance(command, hangs):
                b.now += 30
                b.late(command)
                hung.append(command)
                b.out.remove(command)
            else:
                b.answer(command)
            b.take()
        assert not b.store.busy, n
        assert b.store.presence(b"%d" % n) is Presence.READY
    assert len(hung) >= 3, "as many as there are segments"
    for command in hung:
        b.out.append(command)
        b.settle(command)
    b.now += 2 * PROBE_INTERVAL_S
    b.put(b"well again")
    b.run()
    assert b.on_disk(b"well again")


def test_a_read_that_hangs_in_the_only_segment_left_is_no_hope_for_writes() -> None:
    b = bench(segments_max=(3,), unit_count=256)
    for n in range(18):
        b.put(b"%d" % n, 8)
        b.run()
    on_disk = [b"%d" % n for n in range(18) if b.on_disk(b"%d" % n)]
    evict_residents(b, on_disk)
    for key in on_disk:
        assert b.store.promote(key) is not None
    for command in b.take():
        b.late(command)
        b.out.remove(command)
    for n in range(30):
        b.put(b"new%d" % n)
        b.run()
        assert not b.store.busy


# ---- reset


def test_after_a_reset_with_everything_in_flight_nothing_stale_is_ever_a_hit() -> None:
    b = bench(segments_max=(4,), unit_count=128)
    keys = [b"old%d" % n for n in range(12)]
    for key in keys[:6]:
        b.put(key, 4)
        b.run()
    evict_residents(b, keys[:3])
    for key in keys[:3]:
        assert b.store.promote(key) is not None
    b.take()  # reads out
    filling = b.store.reserve(b"filling", 0, (4096,), 0, b"")
    pinned = b.store.resident(keys[4])
    assert filling is not None
    assert pinned is not None
    b.store.pin(pinned)
    for key in keys[6:]:
        b.put(key, 4)
    b.take()  # and a pack out
    busy = {id(r): (r.run.start, r.run.units) for r in b.store.arena.owners() if not r.can_evict()}
    stale = {id(r): r for r in b.store.arena.owners()}
    epoch = b.store.reset()
    assert epoch == 1
    assert all(b.store.presence(key) is Presence.ABSENT for key in [*keys, b"filling"])
    for n in range(30):  # what comes now must not get a slot that is still in use
        resident = b.put(b"new%d" % n, 4)
        if resident is not None:
            for identity, run in busy.items():
                assert stale[identity].run.owner is not stale[identity] or not _overlap(run, resident.run)
    for command in list(b.out):
        b.answer(command)
        assert all(b.store.presence(key) is Presence.ABSENT for key in keys)
    b.store.commit([filling])
    b.store.unpin(pinned)
    b.run()
    assert all(b.store.presence(key) is Presence.ABSENT for key in [*keys, b"filling"])
    assert not any(identity in stale for identity in map(id, b.store.arena.owners()))
    assert not any(key in b.store.index for key in keys)
    epochs = [c.header.epoch for c in b.seen if isinstance(c, OpenSegment)]
    assert set(epochs) <= {0, 1}
    written = next(n for n, c in enumerate(b.seen) if isinstance(c, WriteEpoch))
    assert all(c.header.epoch == 1 for c in b.seen[written:] if isinstance(c, OpenSegment))


def test_a_reset_gives_old_segments_first_and_reports_removals() -> None:
    b = bench(segments_max=(3,))
    b.store.events = deque()
    for n in range(4):
        b.put(b"%d" % n, 8)
    b.run()
    b.store.reset()
    changes = (Change.STORED, Change.REMOVED, Change.GONE)
    assert list(b.store.events) == [(b"%d" % n, change) for change in changes for n in range(4)]
    b.put(b"new")
    b.run()
    assert sum(isinstance(c, OpenSegment) and not c.recycle for c in b.seen) == 1


# ---- reads


def test_a_bad_chunk_among_good_ones_is_the_only_miss() -> None:
    b = bench()
    keys = [b"%d" % n for n in range(6)]
    for n, key in enumerate(keys):
        resident = b.store.reserve(key, 0, (8192,), n, b"")
        assert resident is not None
        b.store.commit([resident])
    b.run()
    evict_residents(b, keys)
    for key in keys:
        b.store.promote(key)
    b.take()
    (read,) = b.out
    assert len(read.items) == 6, "neighbours on disk are one read"  # type: ignore[union-attr]
    b.answer(read, bad=(2,))
    assert [b.store.presence(k) is Presence.READY for k in keys] == [True, True, False, True, True, True]
    assert b.store.presence(keys[2]) is Presence.ABSENT
    assert b.store.counters["chunks_damaged"] == 1


def test_chunks_that_could_not_be_read_are_not_counted_as_damaged() -> None:
    b = bench()
    keys = [b"%d" % n for n in range(4)]
    for key in keys:
        b.put(key)
    b.run()
    evict_residents(b, keys)
    for key in keys[:3]:
        b.store.promote(key)
    (read,) = b.take()
    completion = Completion(read.id, verified=[True, False, False], errors=[0, errno.EIO, 0])
    b.out.remove(read)
    b.store.complete(completion, b.now)
    assert [b.store.presence(key) is Presence.READY for key in keys[:3]] == [True, False, False]
    counts = b.store.counters
    assert (counts["chunks_promoted"], counts["reads_failed"], counts["chunks_damaged"]) == (1, 1, 1)
    b.store.promote(keys[3])
    b.answer(b.take()[0], errno.EIO)
    assert (counts["reads_failed"], counts["chunks_damaged"]) == (2, 1)


def test_a_failed_read_takes_what_depends_on_it_along() -> None:
    b = bench()
    for n in range(4):
        b.put(b"%d" % n, 1, parent=b"%d" % (n - 1) if n else b"")
    b.run()
    evict_residents(b, [b"%d" % n for n in range(4)])
    b.store.promote(b"1")
    b.take()
    b.answer(b.out[0], errno.EIO)
    assert [b.on_disk(b"%d" % n) for n in range(4)] == [True, False, False, False]


def chunks_on_disk(b: Bench, count: int, units: int) -> list[bytes]:
    """Chunks that are on disk, in that order, and in no slot."""
    keys = [b"chunk%02d" % n for n in range(count)]
    for key in keys:
        assert b.put(key, units) is not None
        b.run()
    evict_residents(b, keys)
    return keys


def reads(commands: list[Command]) -> list[ReadChunks]:
    return [command for command in commands if isinstance(command, ReadChunks)]


def test_reads_go_out_first_come_first_served_and_no_more_than_a_slow_disk_can_read_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvdisk.reads.READ_BYTES_OUT_MAX", 16 * 4096)
    b = bench(segments_max=(8,), unit_count=128)
    keys = chunks_on_disk(b, 24, 4)[::-1]
    slots = {key: b.store.promote(key) for key in keys}
    came: list[bytes] = []
    while b.take() or b.out:
        out = [item.unit for read in reads(b.out) for item in read.items]
        assert len(out) <= 4, "16 units"
        first = [slots[key].run.start for key in keys if key not in came]  # type: ignore[union-attr]
        assert sorted(out) == sorted(first[: len(out)])
        b.answer(b.out[0])
        came += [key for key in keys if key not in came and b.store.presence(key) is Presence.READY]
    assert sorted(came) == sorted(keys)
    assert not b.store.busy


def test_a_load_of_little_does_not_wait_for_one_of_much_that_was_asked_for_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvdisk.reads.READ_BYTES_OUT_MAX", 16 * 4096)
    monkeypatch.setattr("kvdisk.reads.READ_BYTES_MAX", 8 * 4096)
    b = bench(segments_max=(8,), unit_count=128)
    *much, little = chunks_on_disk(b, 20, 4)
    for key in much:
        b.store.promote(key)
    b.take()
    assert sum(len(read.items) for read in reads(b.out)) == 4
    b.store.promote(little)
    while b.store.presence(little) is Presence.PENDING:
        b.answer(b.out[0])
        b.take()
    came = sum(b.store.presence(key) is Presence.READY for key in much)
    assert came <= 4 + 2, "what was asked of the disk already, and one turn"
    b.run()
    assert all(b.store.presence(key) is Presence.READY for key in much)


def test_a_slow_disk_costs_no_chunk_that_it_was_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdisk.reads.READ_BYTES_OUT_MAX", 16 * 4096)
    b = bench(segments_max=(8,), unit_count=128)
    keys = chunks_on_disk(b, 24, 4)
    for key in (*keys[::2], *keys[1::2]):  # no two are neighbours
        b.store.promote(key)
    assert len(b.take()) == 4
    b.answer(b.out[0])
    late = b.out[0]
    b.late(late)
    assert [b.on_disk(key) for key in keys[::2]] == [True, False] + [True] * 10
    assert len(b.take()) == 2, "a place for each that ended or is late"
    assert all(b.on_disk(key) for key in keys[1::2])
    b.out.remove(late)
    b.run()
    assert [b.store.presence(key) is Presence.READY for key in keys] == [key != keys[2] for key in keys]


def test_nobody_waits_longer_than_one_more_deadline_for_a_disk_that_reads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvdisk.reads.READ_BYTES_OUT_MAX", 16 * 4096)
    b = bench(segments_max=(8, 8), unit_count=256)
    keys = chunks_on_disk(b, 40, 4)
    for key in keys:
        b.store.promote(key)
    for _ in range(2):
        for command in b.take():
            b.late(command)
            b.out.remove(command)
    assert all(b.store.presence(key) is Presence.ABSENT for key in keys)
    assert not b.store.busy


def test_a_reset_gives_back_the_slots_of_reads_that_nobody_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdisk.reads.READ_BYTES_OUT_MAX", 16 * 4096)
    b = bench(segments_max=(8,), unit_count=128)
    for key in chunks_on_disk(b, 24, 4):
        b.store.promote(key)
    b.take()
    b.store.reset()
    assert b.store.arena.free_units == 128 - 16
    b.run()
    assert b.store.arena.free_units == 128
    assert all(segment.idle for segment in b.store.table)


# ---- eviction


@pytest.mark.parametrize("seed", range(12))
def test_no_kept_chunk_lacks_a_kept_parent_and_heads_are_rewritten_within_bounds(seed: int) -> None:
    """Random prefix trees with forks, several times the capacity."""
    chance = random.Random(seed)
    b = bench(segments_max=(chance.choice([3, 5, 8]),), unit_count=chance.choice([64, 256]), seed=seed)
    parents: dict[bytes, bytes] = {}
    roots = [b"root%d" % n for n in range(3)]
    stored: list[bytes] = []
    for n in range(400):
        alive = [key for key in stored[-60:] if b.store.presence(key) in (Presence.READY, Presence.ON_DISK)]
        parent = chance.choice([b"", *alive, *[r for r in roots if r in alive]]) if alive else b""
        key = roots[n] if n < 3 else b"%d" % n
        if n < 3:
            parent = b""
        resident = b.put(key, chance.randrange(1, 5), parent=parent, position=n)
        if resident is None:
            b.run()
            continue
        parents[key] = parent
        stored.append(key)
        for root in roots:
            b.store.touch(root)
        b.run()
        for kept in b.store.index:
            above = parents[kept]
            assert not above or b.on_disk(above) or b.store.resident(above) is not None, f"{kept!r} lacks {above!r}"
    stats = b.store.writer.stats
    assert stats.segments_recycled > 3
    assert stats.bytes_flushed <= 1.1 * (stats.bytes_flushed - stats.bytes_rewritten) + 1


def test_a_head_that_others_need_is_written_again_from_its_slot_and_never_beyond_a_tenth() -> None:
    b = bench(segments_max=(4,), unit_count=256)
    b.put(b"head", 2)
    b.run()
    rewritten = 0
    for n in range(200):
        b.put(b"%d" % n, 4, parent=b"head", position=n)
        resident = b.store.resident(b"head")
        assert resident is not None
        resident.used = True  # the slot; a use of the segment would keep that as well
        b.run()
        stats = b.store.writer.stats
        assert stats.bytes_rewritten <= 0.1 * (stats.bytes_flushed - stats.bytes_rewritten) + 8192
        rewritten = stats.bytes_rewritten
        assert b.on_disk(b"head"), n
    assert rewritten > 0


def test_what_a_segment_holds_for_others_is_found_in_one_walk_prefixes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full-attention chain in one segment, with a window group's chunk of another segment at every position."""
    b = bench()
    keys = [b"%d" % n for n in range(1_000)]
    for n, key in enumerate(keys):
        b.store.index.add(key, Extent(0, 0, 1, 0, 0), keys[n - 1] if n else b"")
        b.store.index.add(b"w" + key, Extent(1, 0, 1, 0, 1), key)
    steps = 0
    parent_of = b.store.index.parent_of

    def counted(key: bytes) -> bytes | None:
        nonlocal steps
        steps += 1
        return parent_of(key)

    monkeypatch.setattr(b.store.index, "parent_of", counted)
    assert b.store.writer._eviction._needed(0) == keys
    assert steps == len(keys)
    b.store.index.add(keys[0], Extent(0, 0, 1, 0, 0), keys[-1])  # a loop, as only a stranger's bytes can form
    assert sorted(b.store.writer._eviction._needed(0)) == sorted(keys)


def test_a_segment_being_read_is_not_recycled() -> None:
    b = bench(segments_max=(3,), unit_count=128)
    b.put(b"k", 4)
    b.run()
    evict_residents(b, [b"k"])
    b.store.promote(b"k")
    b.take()
    (read,) = b.out
    b.out.remove(read)
    for n in range(60):
        b.put(b"%d" % n, 8)
        b.run()
    assert b.on_disk(b"k")
    b.out.append(read)
    b.answer(read)
    assert b.store.presence(b"k") is Presence.READY


# ---- overwriting


def scan_of(b: Bench) -> list[ScannedSegment]:
    """What a recovery would find if every completed write reached the disk."""
    headers: dict[SegmentFile, SegmentHeader] = {}
    packs: dict[SegmentFile, list[WritePack]] = {}
    sealed: set[SegmentFile] = set()
    for command in (c for c in b.seen if c not in b.out):
        if isinstance(command, OpenSegment):
            headers[command.file], packs[command.file] = command.header, []
            sealed.discard(command.file)
        elif isinstance(command, WritePack):
            packs[command.file].append(command)
        elif isinstance(command, SealSegment):
            sealed.add(command.file)
    return [
        segment_of(file, header, [_written(pack) for pack in packs[file]], sealed=file in sealed)
        for file, header in headers.items()
    ]


def _written(command: WritePack) -> tuple[int, int, int, list[ScannedChunk]]:
    at = command.offset + layout.pack_header_bytes(len(command.chunks), ALIGNMENT)
    chunks = []
    for chunk in command.chunks:
        size = -(-chunk.parts[0] // ALIGNMENT) * ALIGNMENT
        check = chunk.position  # the test's version of the key
        chunks.append(ScannedChunk(chunk.key, chunk.parent, 0, chunk.position, at, size, chunk.parts[0], check))
        at += size
    return command.sequence, command.offset, at - command.offset, chunks


def segment_of(
    file: SegmentFile,
    header: SegmentHeader | None,
    packs: Sequence[tuple[int, int, int, list[ScannedChunk]]] = (),
    *,
    sealed: bool = True,
) -> ScannedSegment:
    """Of packs as (sequence, offset, bytes, chunks), as the scanner would say it."""
    found, first = [], 0
    for sequence, offset, size, chunks in packs:
        raw = b"" if sealed else bytes(layout.PACK_HEADER_BYTES + layout.ENTRY_BYTES * len(chunks))
        found.append(ScannedPack(sequence, offset, size, raw, first, first + len(chunks)))
        first += len(chunks)
    return ScannedSegment(file, header, sealed, found, as_read([one for *_, chunks in packs for one in chunks]))


def as_read(chunks: Sequence[ScannedChunk]) -> ScannedChunks:
    """The columns as the scanner makes them: no parents where the key before says the same."""
    columns = ScannedChunks.of(chunks)
    said = {n: up for n, up in columns.parent.items() if not n or up != columns.key[n - 1]}
    return columns._replace(parent=said)


@pytest.mark.parametrize("segments_max", [(3,), (6,), (3, 3), (16,), (4, 3, 3)], ids=repr)
@pytest.mark.parametrize("seed", range(8))
def test_overwritten_keys_never_come_back_at_a_recovery(segments_max: tuple[int, ...], seed: int) -> None:
    chance = random.Random(seed)
    b = bench(segments_max=segments_max, unit_count=256, seed=seed)
    newest: dict[bytes, int] = {}
    for version in range(1, 300):
        key = b"%d" % chance.randrange(20)
        if b.put(key, chance.randrange(1, 6), position=version) is not None:
            newest[key] = version
        b.take()
        while b.out and chance.random() < 0.8:
            command = chance.choice(b.out)
            error = errno.EIO if chance.random() < 0.03 and isinstance(command, WritePack) else 0
            b.answer(command, error)  # a failed write is taken to have landed all the same, see scan_of
            b.take()
        if version % 10 == 0:
            b.run(limit=2000)
            again = Store(b.store.config, random.Random(seed))
            again.recover(scan_of(b), 0)
            for found in again.index:
                extent = again.index.get(found)
                assert extent is not None
                assert extent.checksum == newest[found], f"version {extent.checksum} of {found!r}, seed {seed}"
    assert b.store.writer.stats.segments_recycled > 2


def two_roots_with(b: Bench, key: bytes) -> None:
    """Root 0 has the older open segment; `key` is in root 1's, which has as many packs on the way as it takes."""
    b.put(b"first")
    for command in b.take():
        b.answer(command)
    b.take()
    b.put(key)
    b.run()
    assert b.store.table[b.store.index.segment_of(key) or 0].file.root == 1
    b.put(b"large", 4 * PACKS_INFLIGHT)
    b.take()
    for n in range(PACKS_INFLIGHT):
        b.put(b"small%d" % n)
        b.take()
    assert [pack.file.root for pack in packs(b.out)] == [0, *[1] * PACKS_INFLIGHT]


def test_a_new_version_waits_for_its_busy_root_and_others_pass_it() -> None:
    b = bench(segments_max=(4, 4))
    two_roots_with(b, b"k")
    b.put(b"k", position=2)
    b.put(b"other")
    (pack,) = b.take()
    assert isinstance(pack, WritePack)
    assert (pack.file.root, [chunk.key for chunk in pack.chunks]) == (0, [b"other"])
    b.answer(next(pack for pack in packs(b.out) if pack.file.root == 1))
    (pack,) = b.take()
    assert isinstance(pack, WritePack)
    assert (pack.file.root, [chunk.key for chunk in pack.chunks]) == (1, [b"k"])
    b.run()
    assert not any(isinstance(command, SealSegment) for command in b.seen), "nothing was closed before it was full"
    assert all(not segment.older for segment in b.store.table)


def test_a_new_version_goes_to_a_newer_segment_elsewhere_if_its_root_is_broken() -> None:
    b = bench(segments_max=(4, 4))
    two_roots_with(b, b"k")
    b.store.table.roots[1].broken_until = 100.0
    b.put(b"k", position=2)
    b.run()
    newest = b.store.table[b.store.index.segment_of(b"k") or 0]
    assert newest.file.root == 0
    (older,) = newest.older
    assert older.sequence < newest.use.sequence
    assert b.store.table[older.number].file.root == 1


def test_places_of_old_bytes_are_forgotten_once_their_segments_were_recycled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes no packs: each of them may have landed, so each segment holds what may come back."""
    monkeypatch.setattr("kvdisk.replaced.REPLACED_MIN", 8)
    b = bench(segments_max=(3,), unit_count=32)
    for n in range(400):
        b.put(b"%d" % n, 2)
        b.run(errno.EIO, (WritePack,))
        b.now += PROBE_INTERVAL_S
    known = b.store._replaced._uses
    assert len(known) <= max(8, 2 * sum(b.store.table.is_on_disk(use) for use in known.values()) + 1)
    assert len(known) < 50


# ---- recovery


def scanned(number: int, sequence: int, epoch: int = 0, *chunks: ScannedChunk, pack: int = 1) -> ScannedSegment:
    header = SegmentHeader(ALIGNMENT, SEGMENT_BYTES, sequence, 1, epoch, FINGERPRINT)
    return segment_of(SegmentFile(0, number), header, [(pack, ALIGNMENT, 64 << 10, list(chunks))] if chunks else [])


def chunk(
    key: bytes,
    live: int = 4000,
    stored: int = 4096,
    group: int = 0,
    check: int = 1,
    parent: bytes = b"",
    *,
    readable: bool = True,
    codec: int = 0,
) -> ScannedChunk:
    return ScannedChunk(key, parent, group, 0, 8192, stored, live, check, readable, codec)


def test_recovery_keeps_the_newest_pack_of_a_key_and_only_the_current_epoch() -> None:
    b = bench(segments_max=(8,))
    b.store.recover(
        [
            scanned(0, 5, 2, chunk(b"k", check=11), pack=9),
            scanned(1, 6, 2, chunk(b"k", check=22), pack=7),
            scanned(2, 7, 1, chunk(b"stale"), pack=20),
            segment_of(SegmentFile(0, 3), None, sealed=False),
        ],
        epoch=2,
    )
    extent = b.store.index.get(b"k")
    assert extent is not None
    assert extent.checksum == 11
    assert list(b.store.index) == [b"k"]
    assert b.store.writer._rotation.next_sequence == 8
    assert b.store.writer.next_pack_sequence == 10
    assert {s.file.number for s in b.store.table if s.state is SegmentState.EMPTY} == {2, 3}


@pytest.mark.parametrize("hostile", [
    chunk(b"x", live=1 << 33, stored=1 << 33), chunk(b"x", group=1 << 20), chunk(b"x", live=4000, stored=8192),
    chunk(b"x", live=1 << 60, stored=1 << 60), chunk(b"x", live=600 * 4096, stored=600 * 4096),
    chunk(b"x", codec=1), chunk(b"x", live=9000, stored=4 * 4096, codec=1), chunk(b"x", live=1 << 33, codec=1),
], ids=lambda c: f"{c.live_bytes}-{c.stored_bytes}-{c.group}-{c.codec}")  # fmt: skip
def test_impossible_numbers_from_a_disk_cost_their_chunk_only(hostile: ScannedChunk) -> None:
    b = bench()
    b.store.recover([scanned(0, 1, 0, chunk(b"good"), hostile)], epoch=0)
    assert list(b.store.index) == [b"good"]
    assert b.store.counters["headers_damaged"] == 1


@pytest.mark.parametrize("newest", [
    chunk(b"k", readable=False), chunk(b"k", live=600 * 4096, stored=600 * 4096),
], ids=["of another version", "larger than the arena"])  # fmt: skip
def test_an_older_version_is_not_served_in_place_of_one_that_cannot_be(newest: ScannedChunk) -> None:
    b = bench(segments_max=(8,))
    b.store.recover(
        [
            scanned(0, 1, 0, chunk(b"k"), pack=1),
            scanned(1, 2, 0, newest, chunk(b"child", parent=b"k"), pack=2),
            scanned(2, 3, 0, chunk(b"other"), pack=3),
        ],
        epoch=0,
    )
    assert b.store.presence(b"k") is Presence.ABSENT
    assert sorted(b.store.index) == [b"child", b"other"]
    table = b.store.table
    assert table[1].older == {table[0].use}, "or it would be served once the newest is recycled"
    b.put(b"k")
    b.run()
    number = b.store.index.segment_of(b"k")
    assert number is not None
    assert table[number].older == {table[1].use}, "or that would be served by a store that can"
    assert b.store.index.parent_of(b"child") == b"k"


def test_each_version_of_a_key_waits_for_the_one_before() -> None:
    b = bench(segments_max=(8,))
    b.store.recover([scanned(n, n + 1, 0, chunk(b"k", check=n), pack=n + 1) for n in (2, 0, 3, 1)], epoch=0)
    extent = b.store.index.get(b"k")
    assert extent is not None
    assert extent.checksum == 3
    table = b.store.table
    assert [table[n].older for n in range(4)] == [set(), {table[0].use}, {table[1].use}, {table[2].use}]


@pytest.mark.parametrize("seed", range(20))
def test_recovery_finds_what_adding_one_by_one_would(seed: int) -> None:
    chance = random.Random(seed)
    keys = [b"%d" % n for n in range(12)]
    found = []
    for n in range(8):
        packs_ = []
        for _ in range(chance.randrange(3)):
            mine = keys if chance.random() < 0.5 else [b"%d of %d" % (i, n * 100 + len(packs_)) for i in range(9)]
            drawn = [(chance.choice(mine), chance.choice([b"", *mine])) for _ in range(chance.randrange(6))]
            if chance.random() < 0.5:
                drawn = [(key, mine[i - 1] if i else b"") for i, key in enumerate(mine)]
            rows = [
                chunk(key, parent=up, check=chance.randrange(99), readable=chance.random() < 0.9)
                if chance.random() < 0.7
                else chunk(key, 9000, 8192, parent=up, check=chance.randrange(99), codec=chance.randrange(1, 4))
                for key, up in drawn
            ]
            unique = list({r.key: r for r in rows}.values())
            packs_.append((chance.randrange(1 << 30), ALIGNMENT, 64 << 10, unique))
        header = SegmentHeader(ALIGNMENT, SEGMENT_BYTES, n + 1, 1, 0, FINGERPRINT)
        found.append((n, packs_, segment_of(SegmentFile(0, n), header, packs_)))
    b = bench(segments_max=(8,))
    b.store.recover([segment for *_, segment in found], epoch=0)
    model = Index(ALIGNMENT)
    newest = {
        row.key: (n, row)
        for _, n, rows in sorted((sequence, n, rows) for n, packs_, _ in found for sequence, _, _, rows in packs_)
        for row in rows
    }
    keys = list(newest)
    for n, row in newest.values():
        if row.readable:
            packed = (row.codec, row.stored_bytes) if row.codec else ()
            model.add(row.key, Extent(n, row.offset, row.live_bytes, row.checksum, row.group, *packed), row.parent)
    index = b.store.index
    assert {key: (index.get(key), index.parent_of(key)) for key in keys} == {
        key: (model.get(key), model.parent_of(key)) for key in keys
    }
    for n in range(8):
        assert sorted(index.keys_of_segment(n)) == sorted(model.keys_of_segment(n))
        assert index.live_bytes_of_segment(n) == model.live_bytes_of_segment(n)
    assert index._missing.keys() == model._missing.keys()


def test_a_store_too_small_for_three_segments_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="raise disk_bytes_to_use"):
        bench(segments_max=(2,))


def test_states_of_residents_are_what_the_module_says() -> None:
    b = bench()
    resident = b.store.reserve(b"k", 0, (4096,), 0, b"")
    assert resident is not None
    assert resident.state is State.FILLING
    b.store.commit([resident])
    assert resident.state is State.DIRTY
    b.take()
    b.answer(b.out[0])
    b.take()
    assert resident.state is State.FLUSHING
    assert not b.store.replace(b"k"), "not while it is being written"
    b.run()
    assert resident.state is State.CLEAN
    assert b.store.replace(b"k")
    assert b.store.presence(b"k") is Presence.ABSENT


def test_a_chunk_is_gone_when_its_last_place_is_lost_and_not_before() -> None:
    b = bench(segments_max=(3,))
    b.store.events = deque()
    b.put(b"key", 8)
    b.run()
    b.store.drop_slots()
    assert (b"key", Change.GONE) not in b.store.events, "it is on disk"
    b.store._dropped(b.store.index.drop(b"key"))
    assert list(b.store.events)[-2:] == [(b"key", Change.REMOVED), (b"key", Change.GONE)]


def test_when_the_disk_is_lost_what_is_in_no_slot_is_gone() -> None:
    b = bench(segments_max=(3,))
    b.store.events = deque()
    for key in (b"on disk", b"in a slot"):
        b.put(key, 8)
    b.run()
    evict_residents(b, [b"on disk"])
    b.store.events.clear()
    b.store.lose_disk()
    removed = [(key, Change.REMOVED) for key in (b"on disk", b"in a slot")]
    assert list(b.store.events) == [*removed, (b"on disk", Change.GONE)]
