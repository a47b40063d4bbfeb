"""Flushing: dirty chunks become packs, packs fill segments, full segments are sealed, old ones recycled.

What must hold:
- A chunk enters the index only when its pack was written without error, with the checksums of that write.
- Space is reserved before it is used: a pack and the footer its segment will need fit, or it is not issued.
- A disk that refuses space costs one retry in a recycled segment, and is left alone for an interval if that fails,
  too; so is a disk that fails `FAILURES_MAX` writes in a row. Chunks that could not be flushed stay hits as long as
  they have a slot, and what is on disk stays readable: a failing disk costs one segment an interval at most.
Pure: `pump` is told the time, commands go out and completions come back as data.
"""

import errno
from collections import OrderedDict
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from itertools import islice
from random import Random

from kvdisk import layout
from kvdisk.commands import Command, Completion, OpenSegment, PackChunk, SealSegment, WritePack
from kvdisk.index import Extent, Index
from kvdisk.layout import SegmentHeader
from kvdisk.plan import pack_length, pack_size
from kvdisk.resident import Resident, State
from kvdisk.segments import Root, Segment, SegmentState, SegmentTable

PACK_BYTES_MAX = 32 << 20
"""Chunks of one batch up to this size lie together; larger packs gain no bandwidth and lose more to a torn write."""

PACKS_INFLIGHT = 2
"""A root: one pack is being hashed while another is on its way; what waits meanwhile makes the next pack larger."""

FAILURES_MAX = 16
PROBE_INTERVAL_S = 30.0
FULL_INTERVAL_S = 30.0
REWRITE_FRACTION_MAX = 0.1
"""Heads written again may add this much to the bytes written: a write amplification of 1.1 at most."""

PREOPEN_SEGMENTS_MIN = 16
"""Roots with fewer segments hold none ready ahead: it would cost them too large a share of their capacity."""

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True)
class WriterConfig:
    """What every segment of this namespace instance has in common. Sizes in bytes."""

    alignment: int
    segment_bytes: int
    fingerprint: bytes


@dataclass(slots=True)
class WriterStats:
    """Counters since open; bytes are live bytes unless they say otherwise."""

    bytes_flushed: int = 0
    bytes_rewritten: int = 0
    bytes_written: int = 0  # packs, as sent to the disk
    chunks_flushed: int = 0
    chunks_not_flushed: int = 0
    chunks_evicted: int = 0
    segments_recycled: int = 0
    writes_failed: int = 0
    writes_no_space: int = 0


class Writer:
    """Owns the dirty queue and the segments; fills the index.

    Args:
        config: of all segments.
        index: where flushed chunks are entered and evicted ones dropped.
        table: the segments.
        rng: source of the segments' nonces.
        new_id: gives command ids.
        late: ids of commands that were late and have not settled; the store's.
        resident_of: the resident of a key, if it has one and it is not forgotten.
        settle: called with a resident whose pack ended (or that was dropped unflushed, or queued again) after its
            state was set.
        on_indexed: called with keys that entered the index.
        on_dropped: called with keys that left the index because their segment was evicted.
    """

    def __init__(
        self,
        config: WriterConfig,
        index: Index,
        table: SegmentTable,
        *,
        rng: Random,
        new_id: Callable[[], int],
        late: Set[int],
        resident_of: Callable[[bytes], Resident | None],
        settle: Callable[[Resident], None],
        on_indexed: Callable[[list[bytes]], None],
        on_dropped: Callable[[list[bytes]], None],
    ) -> None:
        self.config = config
        self.index = index
        self.table = table
        self.stats = WriterStats()
        self.epoch = 0
        self.next_sequence = 1  # of segments
        self.next_pack_sequence = 1
        self._rng = rng
        self._new_id = new_id
        self._late = late
        self._resident_of = resident_of
        self._settle = settle
        self._on_indexed = on_indexed
        self._on_dropped = on_dropped
        self._dirty: OrderedDict[Resident, None] = OrderedDict()
        self._ahead: dict[int, Segment] = {}  # root -> the segment opened before it is needed
        self._packs: dict[int, tuple[WritePack, list[Resident], int]] = {}  # with the bytes of the pack
        self._opening: dict[int, tuple[OpenSegment, Segment]] = {}
        self._sealing: dict[int, Segment] = {}
        self._out: list[Command] = []

    # ---- what the store calls

    @property
    def busy(self) -> bool:
        """Whether anything is unflushed or on its way; what is late has failed already."""
        late = sum(1 for one in self._late if one in self._packs or one in self._sealing)
        return bool(self._dirty) or len(self._packs) + len(self._sealing) > late

    def unflushed(self) -> list[Resident]:
        """What is on its way to the disk, or waits for that."""
        flying = [resident for _, residents, _ in self._packs.values() for resident in residents]
        return [resident for resident in (*flying, *self._dirty) if resident.awaits_flush]

    def add(self, residents: Iterable[Resident]) -> None:
        """Queue complete chunks; neighbours in this order become neighbours on disk."""
        for resident in residents:
            resident.state = State.DIRTY
            self._dirty[resident] = None

    def discard(self, resident: Resident) -> None:
        """Take a DIRTY chunk that nobody wants any more out of the queue."""
        del self._dirty[resident]
        self._keep_in_memory(resident)

    def pump(self, now: float) -> list[Command]:
        """The commands that can be issued at `now` (seconds, of any monotonic clock)."""
        if self._dirty:
            for root in self.table.roots:
                self._prepare(root, now)
            while self._dirty and (pack := self._next_pack(now)) is not None:
                root, batch = pack
                self._issue_pack(root, batch)
                self._prepare(root, now)
            if self._dirty and not any(self._is_hopeful(root, now) for root in self.table.roots):
                self._give_up()
        out, self._out = self._out, []
        return out

    def complete(self, completion: Completion, now: float) -> bool:
        """Take a completion if it is of a command from here; whether it was."""
        if completion.id in self._packs:
            self._pack_done(completion, now)
        elif completion.id in self._opening:
            self._open_done(completion, now)
        elif completion.id in self._sealing:
            self._seal_done(completion)
        else:
            return False
        return True

    def reset(self, epoch: int) -> None:
        """Start a new epoch: nothing written so far counts any more. The caller forgets residents and index."""
        self.epoch = epoch
        while self._dirty:
            self._keep_in_memory(self._dirty.popitem(last=False)[0])
        self._ahead.clear()
        for root in self.table.roots:
            root.current = None
        for segment in self.table:
            segment.on_disk = None  # of an epoch that has ended: recovery does not want it
            if segment.state in (SegmentState.OPEN, SegmentState.SEALED):
                _empty(segment)

    # ---- segments

    def _prepare(self, root: Root, now: float) -> None:
        """See that the root has an open segment, and the next one ready when this one is half full."""
        if now < root.broken_until:
            return
        if root.current is None:
            root.current = self._ahead.pop(root.index, None) or self._open(root, now)
        current = root.current
        wants_next = root.segments_max >= PREOPEN_SEGMENTS_MIN and root.index not in self._ahead
        half = self.config.segment_bytes // 2
        if wants_next and current is not None and current.state is SegmentState.OPEN and current.tail > half:
            following = self._open(root, now)
            if following is not None:
                self._ahead[root.index] = following

    def _open(self, root: Root, now: float) -> Segment | None:
        """Issue the opening of a segment: an empty file, else a new one, else the one that eviction gives up."""
        if root.awaits is not None and root.awaits.state is SegmentState.OPENING:
            return None
        segment = next((s for s in root.segments if s.state is SegmentState.EMPTY and s.idle), None)
        recycle = True
        if segment is None and len(root.segments) < root.segments_max and now >= root.full_until:
            segment, recycle = self.table.new_file(root), False
        elif segment is None:
            segment = self.table.victim(root, self.index.live_of_segment)
            if segment is None or now < self.table.roots[segment.file.root].broken_until:
                return None
            self._evict(segment)
        self._issue_open(segment, recycle)
        if segment.file.root != root.index:
            root.awaits = segment
            return None
        return segment

    def _issue_open(self, segment: Segment, recycle: bool) -> None:
        config = self.config
        nonce = self._rng.getrandbits(64)
        segment.header = SegmentHeader(
            config.alignment, config.segment_bytes, self.next_sequence, nonce, self.epoch, config.fingerprint
        )
        self.next_sequence += 1
        segment.state = SegmentState.OPENING
        segment.tail = config.alignment
        segment.writers += 1
        command = OpenSegment(self._new_id(), segment.file, segment.header, recycle)
        self._opening[command.id] = (command, segment)
        self._out.append(command)

    def _open_done(self, completion: Completion, now: float) -> None:
        command, segment = self._opening[completion.id]
        root = self.table.roots[segment.file.root]
        if not completion.late:
            del self._opening[completion.id]
        self._writer_left(segment, completion)
        if completion.settled:
            _empty(segment)
            return
        if completion.error == 0:
            segment.on_disk = command.header.sequence
            if root.current is segment or self._ahead.get(root.index) is segment:
                segment.state = SegmentState.OPEN
                self.table.touch(segment.file.number)
            else:
                _empty(segment)  # the epoch has ended meanwhile, or only its old content had to go
            return
        if root.current is segment:
            root.current = None
        if self._ahead.get(root.index) is segment:
            del self._ahead[root.index]
        if completion.error in _NO_SPACE:
            self.stats.writes_no_space += 1
            root.full_until = now + FULL_INTERVAL_S
            if command.recycle:
                root.broken_until = now + FULL_INTERVAL_S
        else:
            self._count_failure(root, now)
        segment.state = SegmentState.LOST  # until it settles nobody may touch it
        if not completion.late:
            self.table.remove(segment)  # the data plane has removed the file

    def _evict(self, victim: Segment) -> None:
        """Empty the index of a segment's chunks; save the heads that others need, where that is allowed."""
        number = victim.file.number
        gone: list[bytes] = []
        for key in self._needed(number):
            if self.index.segment_of(key) == number and not self._rewrite(key):
                gone += self.index.drop(key)
        for key in self.index.keys_of_segment(number):
            gone += self.index.drop(key)
        self.index.forget_segment(number)
        _empty(victim)
        self.stats.segments_recycled += 1
        self.stats.chunks_evicted += len(gone)
        self._on_dropped(gone)

    def _needed(self, number: int) -> list[bytes]:
        """The chunks here that chunks elsewhere need, and their prefixes here: each once, prefixes first."""
        index = self.index
        found: dict[bytes, None] = {}
        for key in index.keys_of_segment(number):
            if not index.has_child_outside(key, number):
                continue
            chain: dict[bytes, None] = {}
            up: bytes | None = key
            while up is not None and up not in found and up not in chain and index.segment_of(up) == number:
                chain[up] = None
                up = index.parent_of(up)
            found.update(dict.fromkeys(reversed(chain)))
        return list(found)

    def _rewrite(self, key: bytes) -> bool:
        """Queue a head again from its slot, if it has one and the write amplification allows; whether it is saved."""
        resident = self._resident_of(key)
        if resident is None or not resident.is_hit:
            return False
        if resident.state is State.CLEAN:
            size = resident.live_bytes
            stored = self.stats.bytes_flushed - self.stats.bytes_rewritten
            if self.stats.bytes_rewritten + size > REWRITE_FRACTION_MAX * stored:
                return False
            self.stats.bytes_rewritten += size
            self.add((resident,))
            self._settle(resident)
        self.index.drop_only(key)
        return True

    # ---- packs

    def _next_pack(self, now: float) -> tuple[Root, list[Resident]] | None:
        """The chunks of the next pack and their root: one that takes a pack now, fewest bytes in flight first."""
        ready = [
            (root, root.current)
            for root in sorted(self.table.roots, key=lambda root: root.inflight_bytes)
            if root.current is not None
            and root.current.state is SegmentState.OPEN
            and root.current.writers < PACKS_INFLIGHT
            and now >= root.broken_until
        ]
        for root, segment in ready:
            batch = self._next_batch(segment)
            if batch:
                return root, batch
        if ready and not self._will_take(next(iter(self._dirty)), now):
            # The segment with the version it replaces is newer than all that are open. One opened now is newer still.
            root, _ = max(ready, key=lambda one: one[1].tail)
            self._retire_current(root)
            self._prepare(root, now)
        return None

    def _will_take(self, resident: Resident, now: float) -> bool:
        """Whether some root has a segment in which `resident` may lie, or will open one."""
        return any(
            root.current is None or self.table.may_replace(root.current, resident.replaces)
            for root in self.table.roots
            if self._is_hopeful(root, now)
        )

    def _is_hopeful(self, root: Root, now: float) -> bool:
        """Whether the root takes packs now or soon: it has a segment for them, or one becomes idle. What is late is no
        hope, it may hang for ever."""
        return now >= root.broken_until and (root.current is not None or any(s.moves for s in root.segments))

    def _give_up(self) -> None:
        """No root takes writes: what waits stays in memory only, so that its slots can be used again."""
        while self._dirty:
            self._keep_in_memory(self._dirty.popitem(last=False)[0])

    def _keep_in_memory(self, resident: Resident) -> None:
        resident.state = State.CLEAN
        self.stats.chunks_not_flushed += not resident.forgotten
        self._settle(resident)

    def _next_batch(self, segment: Segment) -> list[Resident]:
        """Of the first dirty chunks, at most a pack's worth, those that may lie in `segment`; they stay queued."""
        batch: list[Resident] = []
        size = 0
        for resident in islice(self._dirty, layout.ENTRY_COUNT_MAX):
            size += resident.stored_bytes
            if size > max(PACK_BYTES_MAX, resident.stored_bytes):
                break
            if resident.replaces is None or self.table.may_replace(segment, resident.replaces):
                batch.append(resident)
        return batch

    def _issue_pack(self, root: Root, batch: list[Resident]) -> None:
        segment = root.current
        assert segment is not None
        assert segment.header is not None
        alignment = self.config.alignment
        sizes = [resident.stored_bytes for resident in batch]
        count = pack_length(sizes, segment.room(0), alignment)
        if count == 0:
            self._retire_current(root)
            return
        taken = batch[:count]
        for resident in taken:
            del self._dirty[resident]
        chunks = tuple(PackChunk(r.run.start, r.parts, r.key, r.parent, r.group, r.position) for r in taken)
        sequence = self.next_pack_sequence
        self.next_pack_sequence += 1
        command = WritePack(self._new_id(), segment.file, segment.header, segment.tail, sequence, chunks)
        pack_bytes = pack_size(sizes[:count], alignment)
        segment.tail += pack_bytes
        segment.raw_header_bytes += layout.PACK_HEADER_BYTES + layout.ENTRY_BYTES * count
        segment.writers += 1
        root.inflight_bytes += pack_bytes
        for resident in taken:
            resident.state = State.FLUSHING
            if resident.replaces is not None and resident.replaces != segment.use:
                segment.older.add(resident.replaces)
        self._packs[command.id] = (command, taken, pack_bytes)
        self._out.append(command)

    def _retire_current(self, root: Root) -> None:
        segment, root.current = root.current, None
        assert segment is not None
        self.close_segment(segment)

    def _pack_done(self, completion: Completion, now: float) -> None:
        command, residents, pack_bytes = self._packs[completion.id]
        segment = self.table[command.file.number]
        root = self.table.roots[command.file.root]
        if not completion.settled:
            root.inflight_bytes -= pack_bytes
            if completion.error == 0:
                root.failures = 0
                self.stats.bytes_written += pack_bytes
                self._index_pack(command, residents, completion, segment)
            else:
                self._pack_failed(residents, segment, root, completion, now)
        if not completion.late:
            del self._packs[completion.id]
        self._writer_left(segment, completion)
        if completion.settled:
            for resident in residents:
                resident.pins -= 1
                self._settle(resident)

    def _index_pack(
        self, command: WritePack, residents: list[Resident], completion: Completion, segment: Segment
    ) -> None:
        """Enter a written pack's chunks, unless the epoch ended, or a chunk or its whole prefix was lost meanwhile."""
        current = segment.header is command.header and segment.state in (SegmentState.OPEN, SegmentState.SEALED)
        if current:
            segment.pack_headers[command.offset] = completion.pack_header
            self.table.touch(segment.file.number)
        offset = command.offset + layout.pack_header_bytes(len(residents), self.config.alignment)
        number = segment.file.number
        entered = []
        entered_bytes = 0
        for resident, check in zip(residents, completion.checksums, strict=True):
            if current and not resident.forgotten and not self._is_reachable(resident):
                self.stats.chunks_evicted += 1
                resident.replaces = segment.use
            elif current and not resident.forgotten:
                key, live_bytes = resident.key, resident.live_bytes
                self.index.add(key, Extent(number, offset, live_bytes, check, resident.group), resident.parent)
                entered_bytes += live_bytes
                resident.replaces = None
                entered.append(key)
            offset += resident.stored_bytes
            resident.state = State.CLEAN
            self._settle(resident)
        segment.payload_bytes += entered_bytes
        self.stats.bytes_flushed += entered_bytes
        self.stats.chunks_flushed += len(entered)
        self._on_indexed(entered)

    def _is_reachable(self, resident: Resident) -> bool:
        parent = resident.parent
        return not parent or parent in self.index or self._resident_of(parent) is not None

    def _pack_failed(
        self, residents: list[Resident], segment: Segment, root: Root, completion: Completion, now: float
    ) -> None:
        if root.current is segment:
            root.current = None
        self.close_segment(segment)
        retry = []
        if completion.error in _NO_SPACE and not completion.late:
            self.stats.writes_no_space += 1
            root.full_until = now + FULL_INTERVAL_S
            if any(r.retries for r in residents):
                root.broken_until = now + FULL_INTERVAL_S
            retry = [r for r in residents if r.retries == 0 and not r.forgotten]
        else:
            self._count_failure(root, now)
        if segment.header is not None and segment.on_disk == segment.header.sequence:
            for resident in residents:
                resident.replaces = segment.use  # the disk may have taken it all the same
        for resident in reversed(retry):
            resident.retries += 1
            resident.state = State.DIRTY
            self._dirty[resident] = None
            self._dirty.move_to_end(resident, last=False)
        for resident in residents:
            if resident.state is State.FLUSHING:
                resident.pins += int(completion.late)
                self._keep_in_memory(resident)

    def _count_failure(self, root: Root, now: float) -> None:
        self.stats.writes_failed += 1
        root.failures += 1
        if root.failures >= FAILURES_MAX:
            root.broken_until = now + PROBE_INTERVAL_S

    def _writer_left(self, segment: Segment, completion: Completion) -> None:
        """A write ended, or is late: then it may still land."""
        if completion.late:
            segment.late += 1
            return
        segment.late -= completion.settled
        segment.writers -= 1
        if segment.closing:
            self.close_segment(segment)

    def close_segment(self, segment: Segment) -> None:
        """No more packs for this segment; seal it when its last write has ended."""
        if segment.state is not SegmentState.OPEN:
            return
        segment.closing = True
        if segment.writers:
            return
        assert segment.header is not None
        headers = [raw for _, raw in sorted(segment.pack_headers.items())]
        footer = layout.encode_footer(headers, segment.header)
        segment.state = SegmentState.SEALED
        segment.pack_headers.clear()
        segment.writers += 1
        command = SealSegment(self._new_id(), segment.file, self.config.segment_bytes - len(footer), footer)
        self._sealing[command.id] = segment
        self._out.append(command)

    def _seal_done(self, completion: Completion) -> None:
        """A footer that could not be written costs recovery a scan, nothing else."""
        self.stats.writes_failed += int(completion.error != 0)
        self._writer_left(self._sealing[completion.id], completion)
        if not completion.late:
            del self._sealing[completion.id]


def _empty(segment: Segment) -> None:
    """Nothing in the file counts any more; it is the first to be recycled."""
    segment.state = SegmentState.EMPTY
    segment.closing = False
    segment.pack_headers.clear()
    segment.raw_header_bytes = segment.payload_bytes = 0
    segment.older.clear()
