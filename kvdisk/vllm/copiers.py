"""How a transfer's bytes move: indexed numpy copies for CPU tensors, batched driver copies on streams for a GPU's.

Both know a `Job` only as something to fill in: bytes, events, references. Publishing what they did is the worker's.

What must hold on a device:
- The copy waits for the model's stream first, in both directions: a store reads KV that kernels may still be writing, a
  load may hit blocks that are still being zeroed or read.
- Three streams: loads never queue behind stores, nor loads that a step waits for behind other loads. Jobs on one stream
  end in the order they were started.
- What a job's copies point to stays referenced until it was `recycle`d, pinning and tensors until `close`.

Addresses are computed in 64 bits from ids that mapping.py has checked and views that geometry.py has.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvdisk.geometry import Geometry
from kvdisk.units import UNIT_BYTES
from kvdisk.vllm.device import PIECE_BYTES, Device, Pinning
from kvdisk.vllm.mapping import GroupTransfer, Int64s
from kvdisk.vllm.share import Share


@dataclass(slots=True)
class Job:
    """One transfer under way."""

    job_id: int
    ticket: int
    transfer_bytes: int = 0
    # What to publish when it is done: first units of slots, and a count each.
    counts: list[tuple[Int64s, npt.NDArray[np.uint32]]] = field(default_factory=list)
    begin: Any = None
    end: Any = None
    held: list[Any] = field(default_factory=list)


class CpuCopier:
    """Copies CPU tensors, within `start`: one indexed copy for each page and block position, none for each block."""

    pinned = False

    def __init__(self, geometry: Geometry, home: Share, tensors: Sequence[torch.Tensor]) -> None:
        self._blocks_per_chunk = geometry.blocks_per_chunk
        self._rows = [tensor.numpy().view(np.uint8) for tensor in tensors]
        self._units = home.units

    def start(self, job: Job, parts: Sequence[GroupTransfer], *, to_host: bool, expedited: bool = False) -> None:
        job.begin = time.perf_counter()
        for part in parts:
            for position in range(self._blocks_per_chunk):
                # The blocks at this position, one a chunk; the first chunk may begin after it, the last end before it.
                first_slot = 1 if position < part.skip else 0
                blocks = part.blocks[
                    first_slot * self._blocks_per_chunk + position - part.skip :: self._blocks_per_chunk
                ]
                units = part.units[first_slot : first_slot + len(blocks)]
                if len(blocks):
                    self._copy_pages(part, position, blocks, units, to_host)
            job.transfer_bytes += len(part.blocks) * part.group.block_bytes

    def _copy_pages(self, part: GroupTransfer, position: int, blocks: Int64s, units: Int64s, to_host: bool) -> None:
        for page, offset in zip(part.group.pages, part.group.page_offsets, strict=True):
            rows = self._rows[page.tensor][:, : page.page_bytes]
            places = strided(self._units, position * part.group.block_bytes + offset, page.page_bytes)
            if to_host:
                places[units] = rows[blocks]
            else:
                rows[blocks] = places[units]

    def ended(self) -> list[Job]:
        return []

    def recycle(self, job: Job) -> None:
        raise AssertionError("copies on the CPU end within start")

    def close(self) -> None:
        self._rows.clear()


class DeviceCopier:
    """Copies between device and pinned host memory, on streams; ends are known by events."""

    def __init__(self, geometry: Geometry, home: Share, tensors: Sequence[torch.Tensor], device: Device) -> None:
        self._blocks_per_chunk = geometry.blocks_per_chunk
        self._device = device
        self._home = home  # keeps the mapping
        self._pages = [
            (
                np.array([tensors[page.tensor].data_ptr() for page in group.pages], np.int64),
                np.array([tensors[page.tensor].stride(0) for page in group.pages], np.int64),
                np.array(group.page_offsets, np.int64),
                np.array([page.page_bytes for page in group.pages], np.int64),
            )
            for group in geometry.groups
        ]
        self._held: list[Any] = list(tensors)
        # Before anything else touches the arena, so that all copies see the same kind of memory.
        self._pinning = Pinning(device, home.units_address, home.unit_count * UNIT_BYTES)
        self._store = device.stream(urgent=False), deque[Job]()
        self._load = device.stream(urgent=False), deque[Job]()
        self._expedited = device.stream(urgent=True), deque[Job]()
        self._events: list[Any] = []

    @property
    def pinned(self) -> bool:
        return self._pinning.pinned

    def start(self, job: Job, parts: Sequence[GroupTransfer], *, to_host: bool, expedited: bool = False) -> None:
        source, target, sizes = self._describe(parts, to_host)
        job.transfer_bytes = int(sizes.sum())
        job.begin, job.end = self._event(), self._event()
        stream, queue = self._store if to_host else self._expedited if expedited else self._load
        stream.wait_stream(self._device.current_stream())
        job.begin.record(stream)
        job.held = [source, target, sizes]
        queue.append(job)
        try:
            if len(sizes):
                # A slot being loaded was completed before this job existed. Live KV is read in stream order only.
                job.held += self._device.copy(stream, source, target, sizes, any_order=not to_host)
        finally:
            job.end.record(stream)  # also after a refusal: what was started before it must have ended

    def _describe(self, parts: Sequence[GroupTransfer], to_host: bool) -> tuple[Int64s, Int64s, Int64s]:
        """Addresses and sizes of all page copies: (source, target, size), int64[n] each."""
        gpu, host, sizes = [], [], []
        for part in parts:
            base, stride, offset, size = self._pages[part.group_index]
            starts = self._home.units_address + part.block_starts(self._blocks_per_chunk)
            gpu.append((base + part.blocks[:, None] * stride).ravel())
            host.append((starts[:, None] + offset).ravel())
            sizes.append(np.tile(size, len(part.blocks)))
        if not parts:
            gpu = host = sizes = [np.zeros(0, np.int64)]
        copies = np.concatenate(gpu), np.concatenate(host), np.concatenate(sizes)
        device, memory, lengths = split_at_pieces(*copies, self._home.units_address)
        return (device, memory, lengths) if to_host else (memory, device, lengths)

    def ended(self) -> list[Job]:
        jobs = []
        for _, queue in (self._store, self._load, self._expedited):
            while queue and queue[0].end.query():
                jobs.append(queue.popleft())
        return jobs

    def recycle(self, job: Job) -> None:
        self._events += job.begin, job.end
        job.held.clear()

    def close(self) -> None:
        self._pinning.release()
        self._held.clear()
        self._events.clear()

    def _event(self) -> Any:
        return self._events.pop() if self._events else self._device.event()


def split_at_pieces(
    gpu: Int64s, host: Int64s, sizes: Int64s, units_address: int, piece_bytes: int = PIECE_BYTES
) -> tuple[Int64s, Int64s, Int64s]:
    """Cut copies in two where their host side crosses from one registered piece into the next: drivers refuse those."""
    room = piece_bytes - (host - units_address) % piece_bytes
    cross = room < sizes
    if not cross.any():
        return gpu, host, sizes
    gpu = np.concatenate([gpu, gpu[cross] + room[cross]])
    host = np.concatenate([host, host[cross] + room[cross]])
    return gpu, host, np.concatenate([np.minimum(sizes, room), (sizes - room)[cross]])


def strided(units: npt.NDArray[np.uint8], offset: int, width: int) -> npt.NDArray[np.uint8]:
    """Rows of `width` bytes, row u at `u * UNIT_BYTES + offset` of `units`; a view, and wide rows overlap."""
    rows = (len(units) - offset - width) // UNIT_BYTES + 1
    return np.ndarray((max(rows, 0), width), np.uint8, units, offset, (UNIT_BYTES, 1))
