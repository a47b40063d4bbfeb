"""Reads: chunks that are wanted from disk, the commands that fetch them, and what came of each.

What must hold:
- What was wanted between two pumps is a batch; on each root batches take turns of READ_BYTES_MAX, so a request that
  wants little does not wait for one that wants much. Within a batch: first come, first served. Neighbours on disk are
  fetched together.
- A disk is asked for no more than it can read by the deadline, so a slow one costs no chunk that it was not asked for.
- A chunk becomes CLEAN when its read has ended; whether its bytes are to be trusted is told before that.
- A read that is late has failed, but its slot and its segment stay in use until the kernel gives them back.
Pure: commands go out and completions come back as data.
"""

from collections import Counter, deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from itertools import chain

from kvdisk.commands import Command, Completion, ReadChunks, ReadItem, SegmentFile
from kvdisk.index import Extent
from kvdisk.plan import READ_BYTES_MAX, Wanted, merge_reads
from kvdisk.resident import CLEAN, Resident
from kvdisk.segments import SegmentTable

READ_BYTES_OUT_MAX = 256 << 20
"""Bytes of a root's reads that the data plane has at a time. Their deadline runs from when it gets them, so it gets no
more than a slow disk reads by then (9 MB/s for 30 s), and enough for a fast one until the owner pumps again, which may
be a step of the scheduler away (7 GB/s for 35 ms)."""


_Want = tuple[Resident, Extent]


@dataclass(slots=True)
class _Root:
    """The reads of one root."""

    arriving: "deque[_Want]" = field(default_factory=deque)  # since the last pump
    wanted: "deque[deque[_Want]]" = field(default_factory=deque)  # batches; no command was issued for them yet
    turn_bytes: int = 0  # of the first batch's turn, so far
    out_bytes: int = 0  # of commands that are out and not late
    ended: int = 0  # commands that did not miss their deadline
    hangs: bool = False  # the last that was late saw none end: the disk does not read at all

    def next(self) -> "list[_Want]":
        """The chunks that have their turn, as far as there is room."""
        batch, taken = self.wanted[0], []
        while batch and self.turn_bytes < READ_BYTES_MAX and (self.out_bytes < READ_BYTES_OUT_MAX or self.hangs):
            taken.append(batch.popleft())
            size = taken[-1][0].stored_bytes
            self.turn_bytes += size
            self.out_bytes += size
        if not batch or self.turn_bytes >= READ_BYTES_MAX:
            self.turn_bytes = 0
            self.wanted.popleft()
            if batch:
                self.wanted.append(batch)
        return taken


class Reads:
    """Owns LOADING residents until their read has ended.

    Args:
        table: the segments; a chunk that is wanted counts as a reader of its own.
        alignment: of all segments.
        counters: where it counts.
        new_id: gives command ids.
        late: ids of commands that were late and have not settled.
        settle: called with a resident whose read ended or was cancelled, after its state was set.
        on_failed: called with a resident whose read failed, before that, and where it was read from.
    """

    def __init__(
        self,
        table: SegmentTable,
        alignment: int,
        counters: Counter[str],
        *,
        new_id: Callable[[], int],
        late: Set[int],
        settle: Callable[[Resident], None],
        on_failed: Callable[[Resident, SegmentFile, ReadItem], None],
    ) -> None:
        self._table = table
        self._alignment = alignment
        self._counters = counters
        self._new_id = new_id
        self._late = late
        self._settle = settle
        self._on_failed = on_failed
        self._roots = [_Root() for _ in table.roots]
        self._out: dict[int, tuple[ReadChunks, list[Resident], int]] = {}  # with `ended` when it was issued

    @property
    def busy(self) -> bool:
        """Whether anything is wanted or on its way; what is late has failed already."""
        return any(root.arriving or root.wanted for root in self._roots) or any(
            one not in self._late for one in self._out
        )

    def want(self, resident: Resident, extent: Extent) -> None:
        """Queue the read of a LOADING resident."""
        segment = self._table[extent.segment]
        self._roots[segment.file.root].arriving.append((resident, extent))
        segment.readers += 1

    def pump(self) -> list[Command]:
        """The commands that can be issued now."""
        for root in self._roots:
            if root.arriving:
                root.wanted.append(root.arriving)
                root.arriving = deque()
        return [command for root in self._roots if root.wanted for command in self._issue(root)]

    def complete(self, completion: Completion) -> bool:
        """Take a completion if it is of a command from here; whether it was."""
        if completion.id not in self._out:
            return False
        self._read_done(completion)
        return True

    def cancel(self) -> None:
        """Give up what is wanted and not issued yet."""
        for root in self._roots:
            for resident, extent in chain(*root.wanted, root.arriving):
                self._table[extent.segment].readers -= 1
                self._end(resident)
            root.wanted.clear()
            root.arriving.clear()
            root.turn_bytes = 0

    def _issue(self, root: _Root) -> list[Command]:
        """Hand over what was wanted first. Where the disk hangs that is all: it all waits in vain, but no longer."""
        wanted: list[Wanted] = []
        resident_at: dict[int, Resident] = {}  # by first unit
        while root.wanted and (root.out_bytes < READ_BYTES_OUT_MAX or root.hangs):
            for resident, (number, offset, _, checksum, _, codec, stored_bytes) in root.next():
                unit = resident.run.start
                wanted.append(Wanted(number, ReadItem(offset, resident.parts, checksum, unit, codec, stored_bytes)))
                resident_at[unit] = resident
        issued: list[Command] = []
        for run in merge_reads(wanted, self._alignment):
            file = self._table[run[0].segment].file
            command = ReadChunks(self._new_id(), file, tuple(chunk.item for chunk in run))
            self._out[command.id] = (command, [resident_at[item.unit] for item in command.items], root.ended)
            issued.append(command)
        return issued

    def _read_done(self, completion: Completion) -> None:
        command, residents, ended = self._out[completion.id]
        segment, count, root = self._table[command.file.number], len(residents), self._roots[command.file.root]
        segment.late += count if completion.late else -count if completion.settled else 0
        if not completion.settled:
            root.out_bytes -= sum(resident.stored_bytes for resident in residents)
        if completion.late:
            root.hangs = root.ended == ended
        else:
            root.ended += 1
            root.hangs = False
            del self._out[completion.id]
            segment.readers -= count
        if completion.settled:
            for resident in residents:
                self._end(resident)
        else:
            self._judge(command, residents, completion)

    def _judge(self, command: ReadChunks, residents: list[Resident], completion: Completion) -> None:
        """Each chunk of a read by its own result; those of one that is late are misses and end when it settles."""
        verified = completion.verified if completion.error == 0 else [False] * len(residents)
        errors = completion.errors or [completion.error] * len(residents)
        self._counters["chunks_promoted"] += sum(verified)
        if not completion.late and all(verified):  # almost always
            self._counters["bytes_promoted"] += sum([resident.live_bytes for resident in residents])
            for resident in residents:
                resident.state = CLEAN
                self._settle(resident)
            return
        for resident, item, good, error in zip(residents, command.items, verified, errors, strict=True):
            if good:
                self._counters["bytes_promoted"] += resident.live_bytes
            else:
                why = "chunks_late" if completion.late else "reads_failed" if error else "chunks_damaged"
                self._counters[why] += 1
                self._on_failed(resident, command.file, item)
            if not completion.late:
                self._end(resident)

    def _end(self, resident: Resident) -> None:
        resident.state = CLEAN
        self._settle(resident)
