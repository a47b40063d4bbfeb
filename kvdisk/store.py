"""The metadata plane: which chunks are hits, where they are, and what the data plane is to do about it.

Deterministic: no clock, no thread, no file, and its only randomness is the generator it was given. Time comes in as an
argument, commands go out and completions come back as data (commands.py), so a simulated disk and a seed can drive it.

A chunk is in a slot (a resident), on disk (in the index), or both. What must hold:
- A chunk is a hit only with its whole bytes in a slot: stored there, or read from disk and verified.
- A slot is reused only when nobody writes, reads, flushes or loads it (slots.py).
- A failed read takes its chunk out of the index at once: it is a miss for everybody, and never tried again.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from enum import Enum, auto
from itertools import count
from operator import attrgetter
from random import Random

from kvdisk.arena import Arena
from kvdisk.commands import Command, Completion, ReadItem, ScannedSegment, SegmentFile
from kvdisk.index import GROUP_MAX, LIVE_BYTES_MAX, Index
from kvdisk.layout import KEY_BYTES_MAX
from kvdisk.plan import footprint
from kvdisk.reads import Reads
from kvdisk.recovery import Recovery
from kvdisk.replaced import Replaced
from kvdisk.resets import Resets
from kvdisk.resident import CLEAN, DIRTY, FILLING, LOADING, Resident
from kvdisk.rotation import SegmentConfig
from kvdisk.segments import SegmentTable
from kvdisk.slots import Slots
from kvdisk.store_config import SEGMENTS_MIN, StoreConfig
from kvdisk.units import UNIT_BYTES
from kvdisk.writer import Writer

_PREFIX_ORDER = attrgetter("group", "position")


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


class Store:
    """See the module's docstring. Not thread-safe: one thread owns it.

    Attributes that are calls, bound once because each runs for every key of every lookup:
        resident: of a key, whatever its state; None if it has none.
        pin, unpin: keep the slot of a resident, until the matching `unpin`.
    """

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
        self.disk_is_lost = False
        self._unflushed_units = 0  # of slots that were stored and not flushed yet
        self._late: set[int] = set()  # commands of all kinds that were late and have not settled
        self._replaced = Replaced(self.table)
        self._slots = Slots(
            self.arena, config.alignment, self.counters, on_evicted=self._lost_slot, on_rest=self._at_rest
        )
        self.resident: Callable[[bytes], Resident | None] = self._slots.by_key.get
        self.pin: Callable[[Resident], None] = self._slots.pin
        self.unpin: Callable[[Resident], None] = self._slots.unpin
        ids = count(1)
        self._resets = Resets(self.counters, new_id=ids.__next__, late=self._late)
        self._reads = Reads(
            self.table,
            config.alignment,
            self.counters,
            new_id=ids.__next__,
            late=self._late,
            settle=self._slots.settle,
            on_failed=self._read_failed,
        )
        self.writer = Writer(
            SegmentConfig(config.alignment, config.segment_bytes, config.fingerprint, config.compress),
            self.index,
            self.table,
            rng=rng,
            new_id=ids.__next__,
            late=self._late,
            resident_of=self._slots.by_key.get,
            settle=self._slots.settle,
            on_indexed=self._indexed,
            on_dropped=self._dropped,
        )

    # ---- lookups

    def presence(self, key: bytes) -> Presence:
        """Where `key` is. No side effect, no system call."""
        resident = self._slots.by_key.get(key)
        if resident is not None:
            return Presence.READY if resident.is_hit else Presence.PENDING
        return Presence.ON_DISK if key in self.index else Presence.ABSENT

    def touch(self, key: bytes) -> None:
        """Note a use, in the slot and in the segment."""
        resident = self._slots.by_key.get(key)
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
        return self._unflushed_units + units <= self.arena.unit_count // 2 and not self.disk_is_lost

    def could_reserve(self, units: int) -> bool:
        """Whether that will be so once what is unflushed has been flushed."""
        return units <= self.arena.unit_count // 2 and self.writer.busy

    def reserve(self, key: bytes, group: int, parts: tuple[int, ...], position: int, parent: bytes) -> Resident | None:
        """A slot to fill for a chunk that is not here, or None: no slot now, or too much is unflushed already.

        The caller fills it and then calls `commit` or `abandon`.
        """
        assert 0 < len(key) <= KEY_BYTES_MAX and key not in self._slots.by_key
        if not self.can_reserve(footprint(parts, self.config.alignment).units):
            self.counters["stores_refused_unflushed"] += 1
            return None
        resident = Resident(key, group, parts, position, parent, FILLING)
        if not self._slots.place(resident):
            return None
        resident.unflushed = True
        resident.replaces = self._replaced.pop(key)
        self._unflushed_units += resident.run.units
        return resident

    def commit(self, residents: Iterable[Resident]) -> None:
        """Filled slots become hits and are queued for flushing, neighbours in prefix order."""
        filled = sorted(residents, key=_PREFIX_ORDER)
        assert all(r.state is FILLING for r in filled)
        self.writer.add([r for r in filled if not r.forgotten])
        for resident in filled:
            if resident.forgotten:
                self.abandon(resident)
        self.counters["chunks_stored"] += len(filled)

    def abandon(self, resident: Resident) -> None:
        """Give back a FILLING slot whose bytes are not to be trusted."""
        self.disown(resident)
        resident.state = CLEAN
        self._slots.settle(resident)

    def disown(self, resident: Resident) -> None:
        """What a FILLING slot will hold is nobody's any more: its key is free again, its slot only after `abandon`."""
        assert resident.state is FILLING
        if resident.replaces is not None and not resident.forgotten:
            self._replaced.remember(resident.key, resident.replaces)
        self._forget(resident)

    def replace(self, key: bytes) -> bool:
        """Forget the bytes under `key`, which is about to get new ones; False while a slot of it is in motion.

        The old bytes stay on disk until their segment is recycled, so `reserve` remembers where: a segment with newer
        bytes is never recycled before one with older bytes of the same key, or these would come back at recovery.
        """
        resident = self._slots.by_key.get(key)
        number = self.index.segment_of(key)
        older = None if number is None else self.table[number].use
        if resident is not None:
            if resident.state not in (DIRTY, CLEAN):
                return False
            older = older or resident.replaces
            self._forget(resident)
        if older is not None:
            self._replaced.remember(key, older)
        if number is not None:
            self.index.drop_only(key)
            self._dropped([key])
        return True

    # ---- loading

    def promote(self, key: bytes, position: int = 0) -> Resident | None:
        """Start reading a chunk on disk into a slot; None if no slot is free now. The result comes with `complete`."""
        extent = self.index.get(key)
        assert extent is not None and key not in self._slots.by_key
        parent = self.index.parent_of(key) or b""
        parts = self.parts_of(extent.group, extent.live_bytes)
        resident = Resident(key, extent.group, parts, position, parent, LOADING)
        if not self._slots.place(resident):
            return None
        self._reads.want(resident, extent)
        self.table.touch(extent.segment)
        return resident

    # ---- the data plane

    def take_commands(self, now: float) -> list[Command]:
        """What the data plane is to do next, reads first."""
        return [*self._resets.pump(now), *self._reads.pump(), *self.writer.pump(now)]

    def complete(self, completion: Completion, now: float) -> None:
        """Take one completion."""
        if completion.late:
            self._late.add(completion.id)
        elif completion.settled:
            self._late.discard(completion.id)
        known = (
            self._reads.complete(completion)
            or self._resets.complete(completion, now)
            or self.writer.complete(completion, now)
        )
        assert known, f"completion of unknown command {completion.id}"

    @property
    def busy(self) -> bool:
        """Whether commands are out or waiting to go out, other than openings of spare segments.

        What is late has failed already and may hang for ever, so nobody needs to wait for it.
        """
        return self._reads.busy or self._resets.busy or self.writer.busy

    def drop_slots(self) -> None:
        """Give up every slot that can be: what is on disk stays there. For measurements and tests."""
        for resident in list(self._slots.by_key.values()):
            if resident.can_evict() and resident.key in self.index:
                self._forget(resident)

    @property
    def epoch_pending(self) -> bool:
        """Whether the last reset is not durable yet."""
        return self._resets.pending

    def reset(self) -> int:
        """Every chunk is stale: all keys miss from now on, in memory and (once the epoch is written) after a restart.

        Slots in use by somebody are kept from reuse until they are unpinned, abandoned or completed. The new epoch.
        """
        self.writer.reset(self.writer.epoch + 1)
        for resident in list(self._slots.by_key.values()):
            self._forget(resident)
        self._reads.cancel()
        self._drop_all()
        self._resets.write(self.writer.epoch)
        self.counters["resets"] += 1
        return self.writer.epoch

    def lose_disk(self) -> None:
        """Nothing is read or written any more: chunks in slots stay hits, others are misses, and stores are refused."""
        self.disk_is_lost = True
        for resident in list(self._slots.by_key.values()):
            if resident.state is LOADING:
                self._forget(resident)
        self._reads.cancel()
        self._drop_all()

    # ---- recovery

    def recover(self, scans: Sequence[ScannedSegment], epoch: int, *, resume: bool = True) -> None:
        """Take in what a scan of the directory found. Called once, before anything else.

        Args:
            scans: one a segment file.
            epoch: chunks of another one are stale.
            resume: whether open segments may be written to again: nobody else can still have writes on the way.
        """
        recovery = Recovery(self.index, self.table, self._is_usable)
        recovery.take(scans, epoch)
        for key, use in recovery.absent.items():
            self._replaced.remember(key, use)
        self.counters["headers_damaged"] += recovery.damaged
        self.writer.resume(epoch, recovery.next_sequence, recovery.next_pack_sequence, reopen=resume)

    def _is_usable(self, group: int, live_bytes: int, stored_bytes: int, codec: int) -> bool:
        """Whether a chunk with these numbers, which come from a stranger, can be promoted."""
        config = self.config
        parts = (live_bytes,) if config.group_parts is None else config.group_parts.get(group, ())
        takes = footprint(parts, config.alignment)
        fits = 0 < takes.units <= self.arena.unit_count and live_bytes <= LIVE_BYTES_MAX and group <= GROUP_MAX
        # A payload with a codec is read into the slot before it is unpacked there, so it must be the smaller.
        stored_fits = stored_bytes < takes.stored_bytes if codec else stored_bytes == takes.stored_bytes
        return fits and takes.live_bytes == live_bytes and stored_fits

    # ---- what the parts report

    def _read_failed(self, resident: Resident, file: SegmentFile, item: ReadItem) -> None:
        extent = self.index.get(resident.key)
        if extent is not None and (extent.segment, extent.offset) == (file.number, item.offset):
            self._replaced.remember(resident.key, self.table[file.number].use)
            self._dropped(self.index.drop(resident.key))
        self._forget(resident)

    def _lost_slot(self, resident: Resident) -> None:
        self._left(resident.key)
        if resident.key not in self.index:
            self._dropped(self.index.drop_waiting(resident.key))
            if resident.replaces is not None:
                self._replaced.remember(resident.key, resident.replaces)

    def _forget(self, resident: Resident) -> None:
        """No longer a hit for anyone; the slot goes when nobody uses it."""
        if resident.forgotten:
            return
        self._slots.forget(resident)
        self._left(resident.key)
        if self.settled is not None:
            self.settled.append(resident.key)
        if resident.state is DIRTY:
            self.writer.discard(resident)
        elif resident.state is CLEAN:
            self._slots.settle(resident)

    def _at_rest(self, resident: Resident) -> None:
        if self.settled is not None:
            self.settled.append(resident.key)
        if resident.unflushed:
            resident.unflushed = False
            self._unflushed_units -= resident.run.units

    def _indexed(self, keys: list[bytes]) -> None:
        if self.events is not None:
            self.events.extend((key, Change.STORED) for key in keys)

    def _dropped(self, keys: list[bytes]) -> None:
        if self.events is not None:
            self.events.extend((key, Change.REMOVED) for key in keys)
            for key in keys:
                self._left(key)

    def _drop_all(self) -> None:
        keys = list(self.index)
        self.index.clear()  # first, or each key would still seem to have a place
        self._replaced.clear()
        self._dropped(keys)

    def _left(self, key: bytes) -> None:
        """A place of `key` was lost; perhaps it was the last."""
        if self.events is not None and key not in self._slots.by_key and key not in self.index:
            self.events.append((key, Change.GONE))

    # ---- reports

    def stats(self) -> dict[str, int]:
        """Counters since open and sizes now; constant time."""
        sizes = {
            "chunks_on_disk": len(self.index),
            "chunks_resident": len(self._slots.by_key),
            "segments": len(self.table),
            "arena_units": self.arena.unit_count,
            "arena_units_free": self.arena.free_units,
            "epoch": self.writer.epoch,
        }
        return {**self.counters, **asdict(self.writer.stats), **sizes}
