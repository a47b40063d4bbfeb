"""The metadata plane: which chunks are hits, where they are, and what the data plane is to do about it.

Deterministic: no clock, no thread, no file, and its only randomness is the generator it was given. Time comes in as an
argument, commands go out and completions come back as data (commands.py), so a simulated disk and a seed can drive it.

A chunk is in a slot (a resident), on disk (in the index), or both. What must hold:
- A chunk is a hit only with its whole bytes in a slot: stored there, or read from disk and verified.
- A slot is reused only when nobody writes, reads, flushes or loads it.
- A failed read takes its chunk out of the index at once: it is a miss for everybody, and never tried again.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from itertools import count
from random import Random

from kvdisk.arena import Arena
from kvdisk.commands import (
    Command,
    Completion,
    ReadChunks,
    ReadItem,
    ScannedPack,
    ScannedSegment,
    SegmentFile,
    WriteEpoch,
)
from kvdisk.index import GROUP_MAX, LIVE_BYTES_MAX, Extent, Index
from kvdisk.layout import KEY_BYTES_MAX, SegmentHeader
from kvdisk.plan import Wanted, footprint, merge_reads
from kvdisk.recovery import Recovery
from kvdisk.resident import Resident, State
from kvdisk.segments import Segment, SegmentState, SegmentTable, SegmentUse
from kvdisk.units import UNIT_BYTES
from kvdisk.writer import Writer, WriterConfig

SEGMENTS_MIN = 3
"""Segments a root needs: one being filled, one to read from, one to recycle."""

EPOCH_RETRY_S = 5.0
"""Between attempts to make a reset durable on a disk that fails."""

READ_BYTES_OUT_MAX = 256 << 20
"""Bytes of a root's reads that the data plane has at a time. Their deadline runs from when it gets them, so it gets no
more than a slow disk reads by then (9 MB/s for 30 s), and enough for a fast one until the owner pumps again, which may
be a step of the scheduler away (7 GB/s for 35 ms)."""

REPLACED_MIN = 4096
"""Fewer remembered places of old bytes are not worth a pass over them."""


class Change(Enum):
    """What happened to a chunk, for those who keep a copy of the index."""

    STORED = auto()  # on disk from now on
    REMOVED = auto()  # not on disk any more
    GONE = auto()  # neither on disk nor in a slot


class Presence(Enum):
    """What a lookup finds."""

    ABSENT = auto()
    READY = auto()  # in a slot, a hit
    PENDING = auto()  # in a slot, being stored or loaded
    ON_DISK = auto()  # needs a promotion


@dataclass(frozen=True)
class StoreConfig:
    """Sizes of a store.

    segment_bytes, alignment: of all segments. segments_max: for each root. unit_count: of the arena, the same on every
    rank. group_parts: live bytes of a chunk on each rank, by group; None if chunks have one part of any size.
    """

    fingerprint: bytes
    segment_bytes: int
    alignment: int
    segments_max: tuple[int, ...]
    unit_count: int
    group_parts: dict[int, tuple[int, ...]] | None = None

    @property
    def chunk_bytes_max(self) -> int:
        """Largest chunk: a pack of one must fit into a segment, and its slot must leave room for others."""
        return min(self.segment_bytes // 4, self.unit_count * UNIT_BYTES // 4, LIVE_BYTES_MAX)


@dataclass(slots=True)
class _Reads:
    """The reads of one root, first come, first served."""

    wanted: deque[tuple[Resident, Extent]] = field(default_factory=deque)  # no command was issued for them yet
    out_bytes: int = 0  # of commands that are out and not late
    ended: int = 0  # commands that did not miss their deadline
    hangs: bool = False  # the last that was late saw none end: the disk does not read at all


class Store:
    """See the module's docstring. Not thread-safe: one thread owns it."""

    def __init__(self, config: StoreConfig, rng: Random) -> None:
        for root, segments in enumerate(config.segments_max):
            if segments < SEGMENTS_MIN:
                raise ValueError(
                    f"root {root} has room for {segments} segments of {config.segment_bytes} bytes and needs "
                    f"{SEGMENTS_MIN}; raise disk_bytes_to_use or lower segment_bytes"
                )
        self.config = config
        self.index = Index(config.alignment)
        self.table = SegmentTable(config.segments_max)
        self.arena: Arena[Resident] = Arena(config.unit_count, max(1, config.alignment // UNIT_BYTES))
        self.events: deque[tuple[bytes, Change]] | None = None  # None: nobody listens
        self.settled: list[bytes] | None = None  # keys whose slot came to rest or was lost; None: nobody listens
        self.counters: Counter[str] = Counter()
        ids = count(1)
        self._new_id = ids.__next__
        self._residents: dict[bytes, Resident] = {}
        self._roots = [_Reads() for _ in config.segments_max]
        self._reads: dict[int, tuple[ReadChunks, list[Resident], int]] = {}  # with `ended` when it was issued
        self._epochs: dict[int, int] = {}
        self._epoch_retry_at = math.inf
        self._late: set[int] = set()  # commands of all kinds that were late and have not settled
        self._out: list[Command] = []
        self._replaced: dict[bytes, SegmentUse] = {}  # keys that are not known any more -> where old bytes may lie
        self._replaced_max = REPLACED_MIN
        self._unflushed_units = 0  # of slots that were stored and not flushed yet
        self.writer = Writer(
            WriterConfig(config.alignment, config.segment_bytes, config.fingerprint),
            self.index,
            self.table,
            rng=rng,
            new_id=self._new_id,
            late=self._late,
            resident_of=self._residents.get,
            settle=self._settle,
            on_indexed=self._indexed,
            on_dropped=self._dropped,
        )

    # ---- lookups

    def presence(self, key: bytes) -> Presence:
        """Where `key` is. No side effect, no system call."""
        resident = self._residents.get(key)
        if resident is not None:
            return Presence.READY if resident.is_hit else Presence.PENDING
        return Presence.ON_DISK if key in self.index else Presence.ABSENT

    def resident(self, key: bytes) -> Resident | None:
        """The resident of `key`, whatever its state."""
        return self._residents.get(key)

    def touch(self, key: bytes) -> None:
        """Note a use, in the slot and in the segment."""
        resident = self._residents.get(key)
        if resident is not None:
            resident.used = True
        segment = self.index.segment_of(key)
        if segment is not None:
            self.table.touch(segment)

    # ---- storing

    def parts_of(self, group: int, live_bytes: int = 0) -> tuple[int, ...]:
        """Live bytes of a chunk on each rank."""
        return (live_bytes,) if self.config.group_parts is None else self.config.group_parts[group]

    def can_reserve(self, units: int) -> bool:
        """Whether slots of `units` in all may be stored into now, as far as bounds go."""
        return self._unflushed_units + units <= self.arena.unit_count // 2

    def could_reserve(self, units: int) -> bool:
        """Whether that will be so once what is unflushed has been flushed."""
        return units <= self.arena.unit_count // 2 and self.writer.busy

    def reserve(self, key: bytes, group: int, parts: tuple[int, ...], position: int, parent: bytes) -> Resident | None:
        """A slot to fill for a chunk that is not here, or None: no slot now, or too much is unflushed already.

        The caller fills it and then calls `commit` or `abandon`.
        """
        assert 0 < len(key) <= KEY_BYTES_MAX and key not in self._residents
        if not self.can_reserve(self._units(parts)):
            self.counters["stores_refused_unflushed"] += 1
            return None
        resident = self._place(Resident(key, group, parts, position, parent, State.FILLING))
        if resident is not None:
            resident.unflushed = True
            resident.replaces = self._replaced.pop(key, None)
            self._unflushed_units += resident.run.units
        return resident

    def commit(self, residents: Iterable[Resident]) -> None:
        """Filled slots become hits and are queued for flushing, neighbours in prefix order."""
        filled = sorted(residents, key=lambda r: (r.group, r.position))
        assert all(r.state is State.FILLING for r in filled)
        self.writer.add(r for r in filled if not r.forgotten)
        for resident in filled:
            if resident.forgotten:
                self.abandon(resident)
        self.counters["chunks_stored"] += len(filled)

    def abandon(self, resident: Resident) -> None:
        """Give back a FILLING slot whose bytes are not to be trusted."""
        self.disown(resident)
        resident.state = State.CLEAN
        self._settle(resident)

    def disown(self, resident: Resident) -> None:
        """What a FILLING slot will hold is nobody's any more: its key is free again, its slot only after `abandon`."""
        assert resident.state is State.FILLING
        if resident.replaces is not None and not resident.forgotten:
            self._remember(resident.key, resident.replaces)
        self._forget(resident)

    def replace(self, key: bytes) -> bool:
        """Forget the bytes under `key`, which is about to get new ones; False while a slot of it is in motion.

        The old bytes stay on disk until their segment is recycled, so `reserve` remembers where: a segment with newer
        bytes is never recycled before one with older bytes of the same key, or these would come back at recovery.
        """
        resident = self._residents.get(key)
        number = self.index.segment_of(key)
        older = None if number is None else self.table[number].use
        if resident is not None:
            if resident.state not in (State.DIRTY, State.CLEAN):
                return False
            older = older or resident.replaces
            self._forget(resident)
        if older is not None:
            self._remember(key, older)
        if number is not None:
            self.index.drop_only(key)
            self._dropped([key])
        return True

    # ---- loading

    def promote(self, key: bytes, position: int = 0) -> Resident | None:
        """Start reading a chunk on disk into a slot; None if no slot is free now. The result comes with `complete`."""
        extent = self.index.get(key)
        assert extent is not None and key not in self._residents
        parent = self.index.parent_of(key) or b""
        parts = self.parts_of(extent.group, extent.live_bytes)
        resident = self._place(Resident(key, extent.group, parts, position, parent, State.LOADING))
        if resident is not None:
            segment = self.table[extent.segment]
            self._roots[segment.file.root].wanted.append((resident, extent))
            segment.readers += 1
            self.table.touch(extent.segment)
        return resident

    def pin(self, resident: Resident) -> None:
        """Keep the slot until the matching `unpin`."""
        resident.pins += 1
        self.arena.note(resident.run)

    def unpin(self, resident: Resident) -> None:
        """Undo one `pin`."""
        assert resident.pins > 0
        resident.pins -= 1
        self._settle(resident)

    # ---- the data plane

    def take_commands(self, now: float) -> list[Command]:
        """What the data plane is to do next, reads first."""
        if now >= self._epoch_retry_at:
            self._write_epoch()
        for root in self._roots:
            if root.wanted:
                self._issue_reads(root)
        out, self._out = self._out, []
        return out + self.writer.pump(now)

    def complete(self, completion: Completion, now: float) -> None:
        """Take one completion."""
        if completion.late:
            self._late.add(completion.id)
        elif completion.settled:
            self._late.discard(completion.id)
        if completion.id in self._reads:
            self._read_done(completion)
        elif completion.id in self._epochs:
            self._epoch_done(completion, now)
        else:
            known = self.writer.complete(completion, now)
            assert known, f"completion of unknown command {completion.id}"

    @property
    def busy(self) -> bool:
        """Whether commands are out or waiting to go out, other than openings of spare segments.

        What is late has failed already and may hang for ever, so nobody needs to wait for it.
        """
        late = sum(1 for one in self._late if one in self._reads or one in self._epochs)
        wanted = any(root.wanted for root in self._roots)
        return wanted or len(self._reads) + len(self._epochs) > late or self.writer.busy

    def drop_slots(self) -> None:
        """Give up every slot that can be: what is on disk stays there. For measurements and tests."""
        for resident in list(self._residents.values()):
            if resident.can_evict() and resident.key in self.index:
                self._forget(resident)

    @property
    def epoch_pending(self) -> bool:
        """Whether the last reset is not durable yet."""
        return bool(self._epochs)

    def reset(self) -> int:
        """Every chunk is stale: all keys miss from now on, in memory and (once the epoch is written) after a restart.

        Slots in use by somebody are kept from reuse until they are unpinned, abandoned or completed. The new epoch.
        """
        self.writer.reset(self.writer.epoch + 1)
        for resident in list(self._residents.values()):
            self._forget(resident)
        for root in self._roots:
            for resident, extent in root.wanted:
                self.table[extent.segment].readers -= 1
                resident.state = State.CLEAN
                self._settle(resident)
            root.wanted.clear()
        self._dropped(list(self.index))
        self.index.clear()
        self._replaced.clear()
        self._write_epoch()
        self.counters["resets"] += 1
        return self.writer.epoch

    # ---- recovery

    def recover(self, scans: Sequence[ScannedSegment], epoch: int, *, resume: bool = True) -> None:
        """Take in what a scan of the directory found. Called once, before anything else.

        Args:
            scans: one a segment file.
            epoch: chunks of another one are stale.
            resume: whether open segments may be written to again: nobody else can still have writes on the way.
        """
        self.writer.epoch = epoch
        packs: list[tuple[Segment, ScannedPack]] = []
        for scan in sorted(scans, key=lambda s: s.header.sequence if s.header else 0):
            segment = Segment(scan.file, SegmentState.EMPTY)
            self.table.adopt(segment)
            self.counters["headers_damaged"] += scan.damaged
            if scan.header is not None:
                self.writer.next_sequence = max(self.writer.next_sequence, scan.header.sequence + 1)
                if scan.header.epoch == epoch:
                    self._recover_segment(segment, scan, scan.header)
                    packs += [(segment, pack) for pack in scan.packs]
        packs.sort(key=lambda one: one[1].sequence, reverse=True)
        recovery = Recovery(self.index, self.table, self._is_usable)
        recovery.fill(packs)
        for key, use in recovery.absent.items():
            self._remember(key, use)
        self.counters["headers_damaged"] += recovery.misfits
        if packs:
            self.writer.next_pack_sequence = packs[0][1].sequence + 1
        self._resume_open_segments(resume)

    def _recover_segment(self, segment: Segment, scan: ScannedSegment, header: SegmentHeader) -> None:
        segment.header = header
        segment.on_disk = header.sequence
        segment.state = SegmentState.SEALED if scan.sealed else SegmentState.OPEN
        segment.tail = max((pack.offset + pack.pack_bytes for pack in scan.packs), default=header.alignment)
        segment.raw_header_bytes = sum(len(pack.raw) for pack in scan.packs)
        if not scan.sealed:
            segment.pack_headers = {pack.offset: pack.raw for pack in scan.packs}
        self.table.touch(segment.file.number)

    def _is_usable(self, group: int, live_bytes: int, stored_bytes: int) -> bool:
        """Whether a chunk with these numbers, which come from a stranger, can be promoted."""
        config = self.config
        parts = (live_bytes,) if config.group_parts is None else config.group_parts.get(group, ())
        takes = footprint(parts, config.alignment)
        fits = 0 < takes.units <= self.arena.unit_count and live_bytes <= LIVE_BYTES_MAX and group <= GROUP_MAX
        return fits and takes.live_bytes == live_bytes and takes.stored_bytes == stored_bytes

    def _resume_open_segments(self, resume: bool) -> None:
        """Go on with the newest open segment of each root if allowed; close the others."""
        for root in self.table.roots:
            unsealed = [s for s in root.segments if s.state is SegmentState.OPEN and s.header is not None]
            if unsealed and resume:
                root.current = unsealed.pop()
            for segment in unsealed:
                self.writer.close_segment(segment)

    # ---- reads

    def _issue_reads(self, root: _Reads) -> None:
        """Hand over what was wanted first. Where the disk hangs that is all: it all waits in vain, but no longer."""
        wanted: list[Wanted] = []
        resident_at: dict[int, Resident] = {}  # by first unit
        while root.wanted and (root.out_bytes < READ_BYTES_OUT_MAX or root.hangs):
            resident, extent = root.wanted.popleft()
            unit = resident.run.start
            wanted.append(Wanted(extent.segment, ReadItem(extent.offset, resident.parts, extent.checksum, unit)))
            resident_at[unit] = resident
            root.out_bytes += resident.stored_bytes
        for run in merge_reads(wanted, self.config.alignment):
            file = self.table[run[0].segment].file
            command = ReadChunks(self._new_id(), file, tuple(chunk.item for chunk in run))
            self._reads[command.id] = (command, [resident_at[item.unit] for item in command.items], root.ended)
            self._out.append(command)

    def _read_done(self, completion: Completion) -> None:
        command, residents, ended = self._reads[completion.id]
        segment, count, root = self.table[command.file.number], len(residents), self._roots[command.file.root]
        segment.late += count if completion.late else -count if completion.settled else 0
        if not completion.settled:
            root.out_bytes -= sum(resident.stored_bytes for resident in residents)
        if completion.late:
            root.hangs = root.ended == ended
        else:
            root.ended += 1
            root.hangs = False
            del self._reads[completion.id]
            segment.readers -= count
        if completion.settled:
            for resident in residents:
                resident.state = State.CLEAN
                self._settle(resident)
            return
        verified = completion.verified if completion.error == 0 else [False] * count
        errors = completion.errors or [completion.error] * count
        self.counters["chunks_promoted"] += sum(verified)
        for resident, item, good, error in zip(residents, command.items, verified, errors, strict=True):
            if good:
                self.counters["bytes_promoted"] += resident.live_bytes
            else:
                why = "chunks_late" if completion.late else "reads_failed" if error else "chunks_damaged"
                self.counters[why] += 1
                self._read_failed(resident, item, command.file)
            if not completion.late:
                resident.state = State.CLEAN
                self._settle(resident)

    def _read_failed(self, resident: Resident, item: ReadItem, file: SegmentFile) -> None:
        extent = self.index.get(resident.key)
        if extent is not None and (extent.segment, extent.offset) == (file.number, item.offset):
            self._remember(resident.key, self.table[file.number].use)
            self._dropped(self.index.drop(resident.key))
        self._forget(resident)

    def _epoch_done(self, completion: Completion, now: float) -> None:
        """Until the epoch is durable, what it disowned would come back at a restart: it is tried again and again."""
        if not completion.late:
            del self._epochs[completion.id]
        if completion.error:
            self.counters["epochs_not_durable"] += 1
            self._epoch_retry_at = now + EPOCH_RETRY_S

    def _write_epoch(self) -> None:
        command = WriteEpoch(self._new_id(), self.writer.epoch)
        self._epochs[command.id] = command.epoch
        self._epoch_retry_at = math.inf
        self._out.append(command)

    # ---- slots

    def _units(self, parts: Sequence[int]) -> int:
        """Units of a slot: on every rank the same, so the largest part decides."""
        return footprint(parts, self.config.alignment).units

    def _place(self, resident: Resident) -> Resident | None:
        resident.live_bytes, resident.stored_bytes, units = footprint(resident.parts, self.config.alignment)
        evicted: list[Resident] = []
        run = self.arena.allocate(units, resident, evicted)
        for old in evicted:
            self._lost_slot(old)
        if run is None:
            self.counters["slots_refused"] += 1
            return None
        resident.run = run
        self._residents[resident.key] = resident
        return resident

    def _lost_slot(self, resident: Resident) -> None:
        del self._residents[resident.key]
        self.counters["slots_evicted"] += 1
        self._left(resident.key)
        if resident.key not in self.index:
            self._dropped(self.index.drop_waiting(resident.key))
            if resident.replaces is not None:
                self._remember(resident.key, resident.replaces)

    def _remember(self, key: bytes, use: SegmentUse) -> None:
        """Where bytes of `key` lie that newer ones will replace. What was recycled since is dropped now and then, so
        that there are at most twice as many as there are such chunks on disk."""
        self._replaced[key] = use
        if len(self._replaced) >= self._replaced_max:
            self._replaced = {key: use for key, use in self._replaced.items() if self.table.is_on_disk(use)}
            self._replaced_max = max(REPLACED_MIN, 2 * len(self._replaced))

    def _forget(self, resident: Resident) -> None:
        """No longer a hit for anyone; the slot goes when nobody uses it."""
        if not resident.forgotten:
            resident.forgotten = True
            del self._residents[resident.key]
            self._left(resident.key)
            if self.settled is not None:
                self.settled.append(resident.key)
            if resident.state is State.DIRTY:
                self.writer.discard(resident)
            elif resident.state is State.CLEAN:
                self._settle(resident)

    def _settle(self, resident: Resident) -> None:
        """Called whenever a slot may have become reusable, or may be so no more."""
        self.arena.note(resident.run)
        if resident.state is not State.CLEAN:
            return
        if self.settled is not None:
            self.settled.append(resident.key)
        if resident.unflushed:
            resident.unflushed = False
            self._unflushed_units -= resident.run.units
        if resident.pins == 0 and resident.forgotten and resident.run.owner is resident:
            self.arena.release(resident.run)

    def _indexed(self, keys: list[bytes]) -> None:
        if self.events is not None:
            self.events.extend((key, Change.STORED) for key in keys)

    def _dropped(self, keys: list[bytes]) -> None:
        if self.events is not None:
            self.events.extend((key, Change.REMOVED) for key in keys)
            for key in keys:
                self._left(key)

    def _left(self, key: bytes) -> None:
        """A place of `key` was lost; perhaps it was the last."""
        if self.events is not None and key not in self._residents and key not in self.index:
            self.events.append((key, Change.GONE))

    # ---- reports

    def stats(self) -> dict[str, int]:
        """Counters since open and sizes now; constant time."""
        sizes = {
            "chunks_on_disk": len(self.index),
            "chunks_resident": len(self._residents),
            "segments": len(self.table),
            "arena_units": self.arena.unit_count,
            "arena_units_free": self.arena.free_units,
            "epoch": self.writer.epoch,
        }
        return {**self.counters, **asdict(self.writer.stats), **sizes}
