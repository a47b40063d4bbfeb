"""Reads: chunks that are wanted from disk, the commands that fetch them, and what came of each.

What must hold:
- First come, first served, on each root; neighbours on disk are fetched together.
- A disk is asked for no more than it can read by the deadline, so a slow one costs no chunk that it was not asked for.
- A chunk becomes CLEAN when its read has ended; whether its bytes are to be trusted is told before that.
- A read that is late has failed, but its slot and its segment stay in use until the kernel gives them back.
Pure: commands go out and completions come back as data.
"""

from collections import Counter, deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from kvdisk.commands import Command, Completion, ReadChunks, ReadItem, SegmentFile
from kvdisk.index import Extent
from kvdisk.plan import Wanted, merge_reads
from kvdisk.resident import Resident, State
from kvdisk.segments import SegmentTable

READ_BYTES_OUT_MAX = 256 << 20
"""Bytes of a root's reads that the data plane has at a time. Their deadline runs from when it gets them, so it gets no
more than a slow disk reads by then (9 MB/s for 30 s), and enough for a fast one until the owner pumps again, which may
be a step of the scheduler away (7 GB/s for 35 ms)."""


@dataclass(slots=True)
class _Root:
    """The reads of one root."""

    wanted: deque[tuple[Resident, Extent]] = field(default_factory=deque)  # no command was issued for them yet
    out_bytes: int = 0  # of commands that are out and not late
    ended: int = 0  # commands that did not miss their deadline
    hangs: bool = False  # the last that was late saw none end: the disk does not read at all


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
        return any(root.wanted for root in self._roots) or any(one not in self._late for one in self._out)

    def want(self, resident: Resident, extent: Extent) -> None:
        """Queue the read of a LOADING resident."""
        segment = self._table[extent.segment]
        self._roots[segment.file.root].wanted.append((resident, extent))
        segment.readers += 1

    def pump(self) -> list[Command]:
        """The commands that can be issued now."""
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
            for resident, extent in root.wanted:
                self._table[extent.segment].readers -= 1
                self._end(resident)
            root.wanted.clear()

    def _issue(self, root: _Root) -> list[Command]:
        """Hand over what was wanted first. Where the disk hangs that is all: it all waits in vain, but no longer."""
        wanted: list[Wanted] = []
        resident_at: dict[int, Resident] = {}  # by first unit
        while root.wanted and (root.out_bytes < READ_BYTES_OUT_MAX or root.hangs):
            resident, extent = root.wanted.popleft()
            unit = resident.run.start
            number, offset, _, checksum, _, codec, stored_bytes = extent
            wanted.append(Wanted(number, ReadItem(offset, resident.parts, checksum, unit, codec, stored_bytes)))
            resident_at[unit] = resident
            root.out_bytes += resident.stored_bytes
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
        resident.state = State.CLEAN
        self._settle(resident)
