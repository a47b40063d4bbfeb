"""Rotation: which segment of a root is being filled, which comes next, and how one is opened and sealed.

What must hold:
- Nothing is written to a segment before its header is on disk, and it is sealed only after its last write has ended.
- A segment that is opened for an epoch that ended meanwhile is empty, whatever the disk says.
- A segment whose opening failed or is late is nobody's until the kernel has given it back.
Pure: told the time, commands go out and completions come back as data.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass
from random import Random

from kvdisk import layout
from kvdisk.commands import Command, Completion, OpenSegment, SealSegment
from kvdisk.layout import SegmentHeader
from kvdisk.segments import NO_SPACE, Root, Segment, SegmentState, SegmentTable
from kvdisk.stats import WriterStats

PREOPEN_SEGMENTS_MIN = 16
"""Roots with fewer segments hold none ready ahead: it would cost them too large a share of their capacity."""


@dataclass(frozen=True)
class SegmentConfig:
    """What every segment of this namespace instance has in common. Sizes in bytes. compress: what is written to it."""

    alignment: int
    segment_bytes: int
    fingerprint: bytes
    compress: bool = False


class Rotation:
    """Owns what is being opened and sealed; sets `Root.current`.

    Args:
        config: of all segments.
        table: the segments.
        stats: where it counts.
        rng: source of the segments' nonces.
        new_id: gives command ids.
        late: ids of commands that were late and have not settled.
        issue: takes the commands.
        recycle: gives up a segment to make room in a root at a time, if one can be: see `Eviction.recycle`.
    """

    def __init__(
        self,
        config: SegmentConfig,
        table: SegmentTable,
        stats: WriterStats,
        *,
        rng: Random,
        new_id: Callable[[], int],
        late: Set[int],
        issue: Callable[[Command], None],
        recycle: Callable[[Root, float], Segment | None],
    ) -> None:
        self.epoch = 0
        self.next_sequence = 1
        self._config = config
        self._table = table
        self._stats = stats
        self._rng = rng
        self._new_id = new_id
        self._late = late
        self._issue = issue
        self._recycle = recycle
        self._ahead: dict[int, Segment] = {}  # root -> the segment opened before it is needed
        self._opening: dict[int, tuple[OpenSegment, Segment]] = {}
        self._sealing: dict[int, Segment] = {}

    @property
    def busy(self) -> bool:
        """Whether a footer is on its way; what is late has failed already."""
        return any(one not in self._late for one in self._sealing)

    def resume(self, epoch: int, next_sequence: int, *, reopen: bool) -> None:
        """Go on after a recovery: with the newest open segment of each root if `reopen`; the others are closed."""
        self.epoch = epoch
        self.next_sequence = next_sequence
        for root in self._table.roots:
            unsealed = [s for s in root.segments if s.state is SegmentState.OPEN and s.header is not None]
            if unsealed and reopen:
                root.current = unsealed.pop()
            for segment in unsealed:
                self.close(segment)

    def reset(self, epoch: int) -> None:
        """Start a new epoch: what the segments hold does not count any more."""
        self.epoch = epoch
        self._ahead.clear()
        for root in self._table.roots:
            root.current = None
        for segment in self._table:
            segment.on_disk = None  # of an epoch that has ended: recovery does not want it
            if segment.state in (SegmentState.OPEN, SegmentState.SEALED):
                segment.empty()

    def complete(self, completion: Completion, now: float) -> bool:
        """Take a completion if it is of a command from here; whether it was."""
        if completion.id in self._opening:
            self._open_done(completion, now)
        elif completion.id in self._sealing:
            self._seal_done(completion)
        else:
            return False
        return True

    # ---- opening

    def prepare(self, root: Root, now: float) -> None:
        """See that the root has an open segment, and the next one ready when this one is half full."""
        if now < root.broken_until:
            return
        if root.current is None:
            root.current = self._ahead.pop(root.index, None) or self._open(root, now)
        current = root.current
        wants_next = root.segments_max >= PREOPEN_SEGMENTS_MIN and root.index not in self._ahead
        half = self._config.segment_bytes // 2
        if wants_next and current is not None and current.state is SegmentState.OPEN and current.tail > half:
            following = self._open(root, now)
            if following is not None:
                self._ahead[root.index] = following

    def _open(self, root: Root, now: float) -> Segment | None:
        """Issue the opening of a segment: an empty file, else a new one, else the one that eviction gives up."""
        if root.awaits is not None and root.awaits.state is SegmentState.OPENING:
            return None
        segment = next((s for s in root.segments if s.state is SegmentState.EMPTY and s.idle), None)
        recycled = True
        if segment is None and len(root.segments) < root.segments_max and now >= root.full_until:
            segment, recycled = self._table.new_file(root), False
        elif segment is None:
            segment = self._recycle(root, now)
            if segment is None:
                return None
        self._issue_open(segment, recycled)
        if segment.file.root != root.index:
            root.awaits = segment
            return None
        return segment

    def _issue_open(self, segment: Segment, recycled: bool) -> None:
        config = self._config
        nonce = self._rng.getrandbits(64)
        segment.header = SegmentHeader(
            config.alignment, config.segment_bytes, self.next_sequence, nonce, self.epoch, config.fingerprint
        )
        self.next_sequence += 1
        segment.state = SegmentState.OPENING
        segment.tail = config.alignment
        segment.writers += 1
        command = OpenSegment(self._new_id(), segment.file, segment.header, recycled)
        self._opening[command.id] = (command, segment)
        self._issue(command)

    def _open_done(self, completion: Completion, now: float) -> None:
        command, segment = self._opening[completion.id]
        root = self._table.roots[segment.file.root]
        if not completion.late:
            del self._opening[completion.id]
        self.write_ended(segment, completion)
        if completion.settled:
            segment.empty()
            return
        if completion.error == 0:
            segment.on_disk = command.header.sequence
            if root.current is segment or self._ahead.get(root.index) is segment:
                segment.state = SegmentState.OPEN
                self._table.touch(segment.file.number)
            else:
                segment.empty()  # the epoch has ended meanwhile, or only its old content had to go
            return
        if root.current is segment:
            root.current = None
        if self._ahead.get(root.index) is segment:
            del self._ahead[root.index]
        if completion.error in NO_SPACE:
            self._stats.writes_no_space += 1
            root.refused_space(now, even_recycled=command.recycle)
        else:
            self._stats.writes_failed += 1
            root.write_failed(now)
        segment.state = SegmentState.LOST  # until it settles nobody may touch it
        if not completion.late:
            self._table.remove(segment)  # the data plane has removed the file

    # ---- sealing

    def retire(self, root: Root) -> None:
        """Close the root's segment; it has none until the next `prepare`."""
        segment, root.current = root.current, None
        assert segment is not None
        self.close(segment)

    def close(self, segment: Segment) -> None:
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
        command = SealSegment(self._new_id(), segment.file, self._config.segment_bytes - len(footer), footer)
        self._sealing[command.id] = segment
        self._issue(command)

    def write_ended(self, segment: Segment, completion: Completion) -> None:
        """A write into `segment` ended, or is late: then it may still land."""
        if completion.late:
            segment.late += 1
            return
        segment.late -= completion.settled
        segment.writers -= 1
        if segment.closing:
            self.close(segment)

    def _seal_done(self, completion: Completion) -> None:
        """A footer that could not be written costs recovery a scan, nothing else."""
        self._stats.writes_failed += int(completion.error != 0)
        self.write_ended(self._sealing[completion.id], completion)
        if not completion.late:
            del self._sealing[completion.id]
