"""A chunk that has a slot: its life from the first byte in the slot to the slot's reuse.

    FILLING -> DIRTY -> FLUSHING -> CLEAN -> (slot reused)
    LOADING ----------------------> CLEAN

FILLING: somebody is writing the slot. DIRTY: complete, a hit, waits to be flushed. FLUSHING: in a pack in flight.
LOADING: being read from disk, not yet verified. CLEAN: a hit whose slot may be given up unless pinned; it is on disk if
the index knows it, and otherwise (the disk refused it) lives in memory only.
"""

from enum import Enum, auto

from kvdisk.arena import Run
from kvdisk.segments import SegmentUse


class State(Enum):
    """See the module's docstring."""

    FILLING = auto()
    LOADING = auto()
    DIRTY = auto()
    FLUSHING = auto()
    CLEAN = auto()


FILLING, LOADING, DIRTY, FLUSHING, CLEAN = State
HITS = (CLEAN, DIRTY, FLUSHING)
"""See `Resident.is_hit`. By these names because each is looked at several times a chunk, and an Enum's attribute takes
a detour."""


class Resident:
    """One chunk in one slot.

    parts: live bytes on each rank; a rank may have none. live_bytes, stored_bytes: their sum, and what it takes on
    disk; the store sets both with the slot. position: end in tokens. parent: key of its prefix or b"".
    pins: reasons to keep the slot. holds: those of them that are requests which wait for it or load it.
    forgotten: no longer a hit for anyone; the slot is freed with the last pin or I/O. unflushed: counts against the
    bound on unflushed slots. replaces: where older bytes of this key may lie on disk.
    """

    __slots__ = (
        "forgotten",
        "group",
        "holds",
        "key",
        "live_bytes",
        "parent",
        "parts",
        "pins",
        "position",
        "replaces",
        "retries",
        "run",
        "state",
        "stored_bytes",
        "unflushed",
        "used",
    )

    def __init__(
        self, key: bytes, group: int, parts: tuple[int, ...], position: int, parent: bytes, state: State
    ) -> None:
        self.key = key
        self.group = group
        self.parts = parts
        self.position = position
        self.parent = parent
        self.state = state
        self.pins = 0
        self.holds = 0
        self.used = False
        self.forgotten = False
        self.retries = 0
        self.unflushed = False
        self.replaces: SegmentUse | None = None
        self.run: Run[Resident]
        self.live_bytes: int
        self.stored_bytes: int

    def can_evict(self) -> bool:
        """Whether the slot may be given up now."""
        return self.state is CLEAN and self.pins == 0

    @property
    def awaits_flush(self) -> bool:
        """Whether it is on its way to the disk, or waits for that."""
        return self.state in (DIRTY, FLUSHING)

    @property
    def is_hit(self) -> bool:
        """Whether the slot holds the chunk's whole and verified bytes."""
        return self.state in HITS
