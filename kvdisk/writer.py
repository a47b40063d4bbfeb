"""Flushing: dirty chunks become packs, and packs fill segments.

What must hold:
- A chunk enters the index only when its pack was written without error, with the checksums of that write.
- Space is reserved before it is used: a pack and the footer its segment will need fit, or it is not issued. One whose
  chunks are compressed is planned by the size they have before; the next begins where it ends, once that is known.
- A disk that refuses space costs one retry in a recycled segment, and is left alone for an interval if that fails,
  too; so is a disk that fails `FAILURES_MAX` writes in a row. Chunks that could not be flushed stay hits as long as
  they have a slot, and what is on disk stays readable: a failing disk costs one segment an interval at most.
Pure: `pump` is told the time, commands go out and completions come back as data.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Set
from itertools import islice, repeat
from random import Random

from kvdisk import layout
from kvdisk.commands import Command, Completion, PackChunk, WritePack
from kvdisk.eviction import Eviction
from kvdisk.index import Extent, Index
from kvdisk.plan import PACK_BYTES_MAX, PACKS_INFLIGHT, pack_length, pack_size
from kvdisk.resident import CLEAN, DIRTY, FLUSHING, Resident
from kvdisk.rotation import Rotation, SegmentConfig
from kvdisk.segments import NO_SPACE, Root, Segment, SegmentState, SegmentTable
from kvdisk.stats import WriterStats


class Writer:
    """Owns the dirty queue and the packs on their way; fills the index.

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
        config: SegmentConfig,
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
        self.index = index
        self.table = table
        self.stats = WriterStats()
        self.next_pack_sequence = 1
        self._eviction = Eviction(
            index, table, self.stats, resident_of=resident_of, requeue=self._requeue, on_dropped=on_dropped
        )
        self._rotation = Rotation(
            config,
            table,
            self.stats,
            rng=rng,
            new_id=new_id,
            late=late,
            issue=self._issue,
            recycle=self._eviction.recycle,
        )
        self._alignment = config.alignment
        self._compress = config.compress
        self._new_id = new_id
        self._late = late
        self._resident_of = resident_of
        self._settle = settle
        self._on_indexed = on_indexed
        self._dirty: OrderedDict[Resident, None] = OrderedDict()
        self._packs: dict[int, tuple[WritePack, list[Resident], int]] = {}  # with the bytes of the pack
        self._out: list[Command] = []

    # ---- what the store calls

    @property
    def busy(self) -> bool:
        """Whether anything is unflushed or on its way; what is late has failed already."""
        return bool(self._dirty) or any(one not in self._late for one in self._packs) or self._rotation.busy

    @property
    def epoch(self) -> int:
        """Of the segments that are opened now."""
        return self._rotation.epoch

    def unflushed(self) -> list[Resident]:
        """What is on its way to the disk, or waits for that."""
        flying = [resident for _, residents, _ in self._packs.values() for resident in residents]
        return [resident for resident in (*flying, *self._dirty) if resident.awaits_flush]

    def add(self, residents: Iterable[Resident]) -> None:
        """Queue complete chunks; neighbours in this order become neighbours on disk."""
        for resident in residents:
            resident.state = DIRTY
            self._dirty[resident] = None

    def discard(self, resident: Resident) -> None:
        """Take a DIRTY chunk that nobody wants any more out of the queue."""
        del self._dirty[resident]
        self._keep_in_memory(resident)

    def pump(self, now: float) -> list[Command]:
        """The commands that can be issued at `now` (seconds, of any monotonic clock)."""
        if self._dirty:
            for root in self.table.roots:
                self._rotation.prepare(root, now)
            while self._dirty and (pack := self._next_pack(now)) is not None:
                root, batch = pack
                self._issue_pack(root, batch)
                self._rotation.prepare(root, now)
            if self._dirty and not any(self._is_hopeful(root, now) for root in self.table.roots):
                self._give_up()
        out, self._out = self._out, []
        return out

    def complete(self, completion: Completion, now: float) -> bool:
        """Take a completion if it is of a command from here; whether it was."""
        if completion.id in self._packs:
            if completion.packed_bytes:
                self._pack_sized(completion)
            else:
                self._pack_done(completion, now)
            return True
        return self._rotation.complete(completion, now)

    def resume(self, epoch: int, next_sequence: int, next_pack_sequence: int, *, reopen: bool) -> None:
        """Go on after a recovery.

        Args:
            epoch: of the segments that count.
            next_sequence: above that of every segment.
            next_pack_sequence: above that of every pack.
            reopen: whether open segments may be written to again.
        """
        self.next_pack_sequence = next_pack_sequence
        self._rotation.resume(epoch, next_sequence, reopen=reopen)

    def reset(self, epoch: int) -> None:
        """Start a new epoch: nothing written so far counts any more. The caller forgets residents and index."""
        self._give_up()
        self._rotation.reset(epoch)

    def _requeue(self, resident: Resident) -> None:
        """A CLEAN chunk is to be written again."""
        self.add((resident,))
        self._settle(resident)

    def _issue(self, command: Command) -> None:
        self._out.append(command)

    # ---- packs

    def _next_pack(self, now: float) -> tuple[Root, list[Resident]] | None:
        """The chunks of the next pack and their root: one that takes a pack now, fewest bytes in flight first."""
        ready = [
            (root, root.current)
            for root in sorted(self.table.roots, key=lambda root: root.inflight_bytes)
            if root.current is not None
            and root.current.state is SegmentState.OPEN
            and root.current.writers < PACKS_INFLIGHT
            and root.current.sizing is None
            and now >= root.broken_until
        ]
        for root, segment in ready:
            batch = self._next_batch(segment)
            if batch:
                return root, batch
        if ready and not self._will_take(next(iter(self._dirty)), now):
            # The segment with the version it replaces is newer than all that are open. One opened now is newer still.
            root, _ = max(ready, key=lambda one: one[1].tail)
            self._rotation.retire(root)
            self._rotation.prepare(root, now)
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
        """What waits stays in memory only, so that its slots can be used again."""
        while self._dirty:
            self._keep_in_memory(self._dirty.popitem(last=False)[0])

    def _keep_in_memory(self, resident: Resident) -> None:
        resident.state = CLEAN
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
        alignment = self._alignment
        sizes = [resident.stored_bytes for resident in batch]
        count = pack_length(sizes, segment.room(0), alignment)
        if count == 0:
            self._rotation.retire(root)
            return
        taken = batch[:count]
        for resident in taken:
            del self._dirty[resident]
        chunks = tuple([PackChunk(r.run.start, r.parts, r.key, r.parent, r.group, r.position) for r in taken])
        sequence = self.next_pack_sequence
        self.next_pack_sequence += 1
        command = WritePack(
            self._new_id(), segment.file, segment.header, segment.tail, sequence, chunks, self._compress
        )
        pack_bytes = pack_size(sizes[:count], alignment)
        segment.tail += pack_bytes
        segment.raw_header_bytes += layout.PACK_HEADER_BYTES + layout.ENTRY_BYTES * count
        segment.writers += 1
        segment.sizing = command.id if self._compress else None
        root.inflight_bytes += pack_bytes
        for resident in taken:
            resident.state = FLUSHING
            if resident.replaces is not None and resident.replaces != segment.use:
                segment.older.add(resident.replaces)
        self._packs[command.id] = (command, taken, pack_bytes)
        self._issue(command)

    def _pack_sized(self, completion: Completion) -> None:
        """A pack whose chunks were compressed is on its way; what it does not need of its room is free again."""
        command, residents, planned_bytes = self._packs[completion.id]
        segment = self.table[command.file.number]
        assert segment.sizing == completion.id and completion.packed_bytes <= planned_bytes
        segment.sizing = None
        segment.tail -= planned_bytes - completion.packed_bytes
        self.table.roots[command.file.root].inflight_bytes -= planned_bytes - completion.packed_bytes
        self._packs[completion.id] = (command, residents, completion.packed_bytes)

    def _pack_done(self, completion: Completion, now: float) -> None:
        command, residents, pack_bytes = self._packs[completion.id]
        segment = self.table[command.file.number]
        root = self.table.roots[command.file.root]
        if segment.sizing == completion.id:  # it failed before it had a size
            segment.sizing = None
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
        self._rotation.write_ended(segment, completion)
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
        offset = command.offset + layout.pack_header_bytes(len(residents), self._alignment)
        number, index = segment.file.number, self.index
        entered = []
        entered_bytes = 0
        packed = _packed(command, completion) if command.compress else repeat((layout.CODEC_NONE, 0), len(residents))
        for resident, check, (codec, stored_bytes) in zip(residents, completion.checksums, packed, strict=True):
            parent = resident.parent
            if not current or resident.forgotten:
                pass
            elif parent and parent not in index and self._resident_of(parent) is None:
                self.stats.chunks_evicted += 1
                resident.replaces = segment.use
            else:
                key, live_bytes = resident.key, resident.live_bytes
                extent = Extent(number, offset, live_bytes, check, resident.group, codec, stored_bytes)
                index.add(key, extent, parent)
                self.stats.chunks_compressed += codec != layout.CODEC_NONE
                entered_bytes += live_bytes
                resident.replaces = None
                entered.append(key)
            offset += stored_bytes or resident.stored_bytes
            resident.state = CLEAN
            self._settle(resident)
        segment.payload_bytes += entered_bytes
        self.stats.bytes_flushed += entered_bytes
        self.stats.chunks_flushed += len(entered)
        self._on_indexed(entered)

    def _pack_failed(
        self, residents: list[Resident], segment: Segment, root: Root, completion: Completion, now: float
    ) -> None:
        if root.current is segment:
            root.current = None
        self._rotation.close(segment)
        retry = []
        if completion.error in NO_SPACE and not completion.late:
            self.stats.writes_no_space += 1
            root.refused_space(now, even_recycled=any(r.retries for r in residents))
            retry = [r for r in residents if r.retries == 0 and not r.forgotten]
        else:
            self.stats.writes_failed += 1
            root.write_failed(now)
        if segment.header is not None and segment.on_disk == segment.header.sequence:
            for resident in residents:
                resident.replaces = segment.use  # the disk may have taken it all the same
        for resident in reversed(retry):
            resident.retries += 1
            resident.state = DIRTY
            self._dirty[resident] = None
            self._dirty.move_to_end(resident, last=False)
        for resident in residents:
            if resident.state is FLUSHING:
                resident.pins += int(completion.late)
                self._keep_in_memory(resident)


def _packed(command: WritePack, completion: Completion) -> list[tuple[int, int]]:
    """Codec and stored bytes of each chunk as the pack's header has them; the same decoder reads it at a recovery."""
    pack = layout.decode_pack(completion.pack_header, command.offset, command.header)
    assert pack is not None, "the data plane wrote a header that nobody will read"
    return list(zip(pack.entries["codec"].tolist(), pack.entries["stored_bytes"].tolist(), strict=True))
