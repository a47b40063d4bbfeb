"""Copies between rows of vLLM's primary tier and slots of kvdisk's arena, on threads that hold no GIL meanwhile.

The primary tier's memory is vLLM's: its rows are handed out anew the moment a job's result is reported, and nobody
can take a row back from a disk that is late. So the disk never touches rows. It reads into slots, where bytes are
verified, and a row is written by these threads alone, in time that only memory decides (docs/architecture.md has what
the copy costs).

What must hold: a row is touched only between `start` and the batch's return by `take`; slots are kept by their owner.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvdisk.resident import Resident
from kvdisk.units import UNIT_BYTES

logger = logging.getLogger("kvdisk")

BATCH_BYTES = 16 << 20
"""Of one task of a thread, so that two of them share a large job, and its first chunks are ready soon."""

THREADS = 2

OwnerT = TypeVar("OwnerT")
Bytes = npt.NDArray[np.uint8]


class Move(NamedTuple):
    """One chunk: its row in the primary tier, and the slot."""

    row: int
    resident: Resident


class Batch(NamedTuple, Generic[OwnerT]):
    """Moves that have ended. ok: False if they could not be carried out; what was copied then is not to be used."""

    owner: OwnerT
    moves: Sequence[Move]
    ok: bool


class Rows(Generic[OwnerT]):
    """The primary tier's rows and the arena's slots.

    Args:
        view: the primary tier's memory, (rows, bytes of a row), writable; borrowed until `close`.
        units: the arena, writable.
        slot_bytes: of one chunk in it: the row, rounded up to what the disk wants.

    Attributes:
        count, row_bytes: the view's shape.
    """

    def __init__(self, view: memoryview, units: memoryview, slot_bytes: int) -> None:
        self._rows: Bytes = rows_of(view)
        self.count, self.row_bytes = self._rows.shape
        self._units: Bytes = np.frombuffer(units, np.uint8)
        self._slot_bytes = slot_bytes
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvdisk-rows")
        self._ended: deque[Batch[OwnerT]] = deque()
        self._event = threading.Event()
        self._out = 0  # batches started and not taken

    @property
    def busy(self) -> bool:
        """Whether batches were started that nobody has taken yet."""
        return self._out > 0

    def start(self, owner: OwnerT, moves: Sequence[Move], *, to_slots: bool) -> None:
        """Copy rows to slots, or slots to rows; `take` returns the moves, in one batch or several."""
        assert all(0 <= move.row < self.count for move in moves), f"a row beyond {self.count}: {moves}"
        ordered = sorted(moves, key=lambda move: move.resident.run.start)
        size = max(1, BATCH_BYTES // self._slot_bytes)
        for first in range(0, len(ordered), size):
            self._out += 1
            self._threads.submit(self._carry_out, owner, ordered[first : first + size], to_slots)

    def take(self) -> Iterator[Batch[OwnerT]]:
        """The batches that have ended since the last call."""
        while self._ended:
            self._out -= 1
            yield self._ended.popleft()

    def wait(self, timeout_s: float) -> None:
        """Block until a batch ends, or the time is over."""
        if not self._ended:
            self._event.wait(timeout_s)
        self._event.clear()

    def close(self) -> None:
        """Let running copies end, and let go of the primary tier's memory."""
        self._threads.shutdown(wait=True)
        self._rows = np.zeros((0, 0), np.uint8)

    def _carry_out(self, owner: OwnerT, moves: Sequence[Move], to_slots: bool) -> None:
        """On a thread. Slots that touch are one copy: who gives up the GIL for each chunk gets it back late."""
        ok = False
        try:
            for run in _runs(moves, self._slot_bytes // UNIT_BYTES):
                start = run[0].resident.run.start * UNIT_BYTES
                slots = self._units[start : start + len(run) * self._slot_bytes].reshape(len(run), self._slot_bytes)
                rows = np.array([move.row for move in run], np.intp)
                if to_slots:
                    np.take(self._rows, rows, axis=0, out=slots[:, : self.row_bytes], mode="clip")
                    slots[:, self.row_bytes :] = 0  # of a recycled slot, that is somebody else's prompt
                else:
                    self._rows[rows] = slots[:, : self.row_bytes]
            ok = True
        except Exception:
            logger.exception("copying %d chunks failed", len(moves))
        finally:
            self._ended.append(Batch(owner, moves, ok))
            self._event.set()


def rows_of(view: memoryview) -> Bytes:
    """`view` as uint8 (rows, bytes of a row), without a copy.

    Raises:
        ValueError: it has another shape, is read-only, or its rows are not contiguous.
    """
    array = np.asarray(view)
    if array.ndim != 2 or array.itemsize != 1 or not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError(
            f"the primary tier's memory has shape {array.shape}, strides {array.strides}, items of {array.itemsize} "
            "bytes; expected writable, contiguous rows of bytes"
        )
    return array.view(np.uint8)


def _runs(moves: Sequence[Move], slot_units: int) -> Iterator[Sequence[Move]]:
    """`moves`, ordered by slot, cut where neighbours do not touch."""
    first = 0
    for i in range(1, len(moves) + 1):
        if i == len(moves) or moves[i].resident.run.start != moves[i - 1].resident.run.start + slot_units:
            yield moves[first:i]
            first = i
