"""One rank's share of the arena: a header, tables and units, in memory that the scheduler's process maps too.

    header   64 bytes: magic, version, sizes, the creator's pid and start time
    geometry its JSON (geometry.py), `geometry_bytes` long
    ended    uint64[TICKETS]: `ended[ticket % TICKETS] == ticket + 1` once that job has left the slots for good
    written  uint32[unit_count]: per slot, at its first unit, how many of the chunk's blocks the worker wrote
    units    unit_count * UNIT_BYTES, from a 2 MiB boundary (huge pages). A slot is a run of units.

All little-endian; tables start on 4096-byte boundaries. Who writes what: the worker writes a slot's bytes, then its
count in `blocks_written`, then its job's ticket in `ended`, each after the copy is done; the manager resets a count to
0 when it hands the slot out for a store. Nothing else is shared, so there is no lock.

Every rank has a share, also one without units: where all ranks hold the same bytes (MLA under tensor parallelism) only
rank 0's share has units, and the others attach it for their loads.

What can fail: `attach` gets a descriptor from another process, which may be of another version or damaged: ValueError.
A worker may die at any time; its share stays mapped and readable here, and the tables keep what it last published.
"""

import contextlib
import os
import struct
import threading
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdisk.geometry import JSON_BYTES_MAX, Geometry
from kvdisk.io.protocol import Memory
from kvdisk.memory import map_shared_memory, private_memory, shared_memory
from kvdisk.processes import process_start
from kvdisk.units import UNIT_BYTES, round_up

TICKETS: Final = 65536  # far more jobs than vLLM keeps in flight; two live tickets must not be this far apart
POISONED: Final = 0xFFFF_FFFF  # in blocks_written: the transfer could not be mapped, the slot's bytes mean nothing
UNIT_COUNT_MAX: Final = 1 << 31  # 8 TiB a rank

_MAGIC: Final = b"KVDSHARE"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sIIQQIIQQ8x")
_HUGE_PAGE_BYTES: Final = 2 << 20


class _Plan:
    """Where the parts of a share lie; computed alike by creator and attacher."""

    def __init__(self, geometry_bytes: int, unit_count: int) -> None:
        self.ended = round_up(_HEADER.size + geometry_bytes, UNIT_BYTES)
        self.written = self.ended + TICKETS * 8
        tables_end = round_up(self.written + unit_count * 4, UNIT_BYTES)
        self.units = round_up(tables_end, _HUGE_PAGE_BYTES) if unit_count else tables_end
        self.size = self.units + unit_count * UNIT_BYTES


class Share:
    """See the module's docstring.

    Attributes:
        geometry: what the creating rank stores.
        unit_count: units of `UNIT_BYTES` in `units`.
        units: uint8[unit_count * UNIT_BYTES], writable.
        blocks_written: uint32[unit_count], indexed by a slot's first unit. 0: not written (yet). `blocks_per_chunk`:
            the whole chunk. Between: only its last so many blocks. `POISONED`: nothing in the slot can be trusted.
        ended: uint64[TICKETS]; ask `has_ended`.
        creator_pid, creator_start: the process that created it (start in clock ticks since boot).
        fd: the memfd, to hand over; None for a private share.
    """

    def __init__(
        self, memory: Memory, plan: _Plan, geometry: Geometry, unit_count: int, creator: tuple[int, int]
    ) -> None:
        self.geometry = geometry
        self.unit_count = unit_count
        self.creator_pid, self.creator_start = creator
        self.fd: int | None = None
        self._memory = memory
        self._units_start = plan.units
        self._fence = threading.Lock()
        whole = np.frombuffer(memory.view, np.uint8)
        self.ended: npt.NDArray[np.uint64] = whole[plan.ended : plan.written].view(np.uint64)
        self.blocks_written: npt.NDArray[np.uint32] = whole[plan.written : plan.written + unit_count * 4].view(
            np.uint32
        )
        self.units: npt.NDArray[np.uint8] = whole[plan.units : plan.size]

    @classmethod
    def create(cls, geometry: Geometry, unit_count: int, *, shared: bool) -> "Share":
        """A new share of this process.

        Args:
            geometry: this rank's layout.
            unit_count: 0 for a rank that reads another rank's units.
            shared: in a memfd that other processes can map, else private memory.

        Raises:
            ValueError: unit_count out of range.
            OSError, MemoryError: no such memory; the message names size and remedy.
        """
        if not 0 <= unit_count <= UNIT_COUNT_MAX:
            raise ValueError(f"unit_count is {unit_count}; expected 0 to {UNIT_COUNT_MAX}")
        text = geometry.to_json().encode()
        if len(text) > JSON_BYTES_MAX:
            raise ValueError(f"geometry of {len(text)} bytes; at most {JSON_BYTES_MAX}")
        plan = _Plan(len(text), unit_count)
        memory, fd = shared_memory(plan.size) if shared else (private_memory(plan.size), None)
        creator = os.getpid(), process_start(os.getpid()) or 0
        view = memory.view
        view[_HEADER.size : _HEADER.size + len(text)] = text
        view[: _HEADER.size] = _HEADER.pack(_MAGIC, _VERSION, 0, len(text), unit_count, TICKETS, UNIT_BYTES, *creator)
        share = cls(memory, plan, geometry, unit_count, creator)
        share.fd = fd
        return share

    @classmethod
    def attach(cls, fd: int) -> "Share":
        """Map a share that another process created. `fd` stays the caller's and may be closed afterwards.

        Raises:
            ValueError: not a share of this version, or one whose sizes contradict each other.
            OSError: it cannot be mapped.
        """
        size = os.fstat(fd).st_size
        if size < _HEADER.size:
            raise ValueError(f"share of {size} bytes: shorter than its header")
        memory = map_shared_memory(fd, size)
        magic, version, _, geometry_bytes, unit_count, tickets, unit_bytes, *creator = _HEADER.unpack_from(memory.view)
        if magic != _MAGIC:
            raise ValueError(f"not a share of kvdisk: it begins with {magic!r}")
        if (version, tickets, unit_bytes) != (_VERSION, TICKETS, UNIT_BYTES):
            raise ValueError(
                f"share of version {version} with {tickets} tickets and units of {unit_bytes} bytes; this kvdisk has "
                f"{_VERSION}, {TICKETS}, {UNIT_BYTES}: worker and scheduler must run the same kvdisk"
            )
        if geometry_bytes > JSON_BYTES_MAX or unit_count > UNIT_COUNT_MAX:
            raise ValueError(f"share says {geometry_bytes} bytes of geometry and {unit_count} units")
        plan = _Plan(geometry_bytes, unit_count)
        if plan.size > size:
            raise ValueError(f"share of {size} bytes, its header needs {plan.size}")
        geometry = Geometry.from_json(bytes(memory.view[_HEADER.size : _HEADER.size + geometry_bytes]))
        share = cls(memory, plan, geometry, unit_count, (creator[0], creator[1]))
        share.fd = os.dup(fd)
        return share

    @property
    def rank(self) -> int:
        """The rank that created it."""
        return self.geometry.rank

    @property
    def pages(self) -> str:
        """What backs it, for reports (see Memory.pages)."""
        return self._memory.pages

    @property
    def memory_units(self) -> tuple[Memory, int]:
        """The memory, and the byte offset of unit 0 in it (a multiple of 2 MiB)."""
        return self._memory, self._units_start

    @property
    def units_address(self) -> int:
        """Address of unit 0 in this process."""
        return self._memory.address + self._units_start

    def mark_ended(self, ticket: int) -> None:
        """Worker: the job with this ticket will not touch a slot again. Its bytes and counts are in place."""
        # Passing a lock orders what was written before against the ticket, also on CPUs that reorder stores (Arm).
        with self._fence:
            pass
        self.ended[ticket % TICKETS] = ticket + 1

    def has_ended(self, ticket: int) -> bool:
        """Manager: whether the job with this ticket has left the slots. Live tickets are less than `TICKETS` apart."""
        return int(self.ended[ticket % TICKETS]) > ticket

    def close(self) -> None:
        """Close the descriptor. The memory itself goes when the last array over it does: copies may still run."""
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # half-built, or at interpreter exit
            self.close()
