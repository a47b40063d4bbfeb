"""The worker's half: copies between GPU blocks and slots, and nothing else.

There is no I/O here, so nothing here fails for a reason of the disk, and vLLM's assertions that a transfer succeeded
hold. A transfer goes through these steps:

    submit  map blocks to places (mapping.py), zero what a stored slot will not get, start the copy (copiers.py)
    done    the copy's event completed (CPU tensors: at once)
    reap    publish `blocks_written` (stores), then the ticket in `ended`; report the result to vLLM

What must hold:
- A slot's count and the job's ticket are published only after its bytes are in place.
- The share, its pinning and the tensors stay until all jobs have ended, whatever `shutdown` meets.

What can fail: a store that cannot be mapped (null blocks within a chunk), or that the driver refuses, poisons its slots
and counts as done. A load that cannot be mapped raises `MappingError`: anything else would leave garbage in the KV
cache unnoticed.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvdisk.geometry import Geometry, View, check_views
from kvdisk.units import UNIT_BYTES, round_up
from kvdisk.vllm.copiers import CpuCopier, DeviceCopier, Job, strided
from kvdisk.vllm.device import Device, PlatformDevice
from kvdisk.vllm.mapping import GroupTransfer, map_load, map_store
from kvdisk.vllm.share import POISONED, Share
from kvdisk.vllm.slots_spec import SlotsSpec

logger = logging.getLogger("kvdisk")

_WARN_EVERY_S: Final = 60.0

# Workers whose device failed with copies under way: their memory must stay where a late copy expects it.
_abandoned: Final[list["KVDiskWorker"]] = []


class KVDiskWorker(OffloadingWorker):
    """See the module's docstring. One thread calls it, vLLM's worker loop.

    Args:
        share: this rank's own share; its `ended` is where tickets go.
        geometry: this rank's layout; its pages index `kv_caches.tensors`.
        kv_caches: int8 (num_blocks, row) views, all on one device; referenced for the worker's life.
        units: the share whose units are read and written, if not `share` (replicated layouts: rank 0's).
        device: a stand-in for the accelerator, for tests; by default chosen by the tensors' device.
        layer_names: for messages, the layer of each page, one sequence a group.
        on_shutdown: called once, when nothing touches the share any more (to withdraw its offer).

    Raises:
        ValueError: a view reaches past its storage, or is not what vLLM promises; it names group, layer and numbers.
    """

    def __init__(
        self,
        share: Share,
        geometry: Geometry,
        kv_caches: CanonicalKVCaches,
        *,
        units: Share | None = None,
        device: Device | None = None,
        layer_names: Sequence[Sequence[str]] = (),
        on_shutdown: Callable[[], None] | None = None,
    ) -> None:
        self._share = share
        self._home = share if units is None else units
        self._geometry = geometry
        self._tensors = [tensor.tensor for tensor in kv_caches.tensors]
        views = [view_of(tensor) for tensor in self._tensors]
        check_views(geometry, views, layer_names)
        self._num_blocks = min(view.num_blocks for view in views)
        self.counters: Counter[str] = Counter()
        self._finished: list[TransferResult] = []
        self._jobs: dict[int, Job] = {}
        self._closed = False
        self._on_shutdown = on_shutdown
        self._warned_at = -_WARN_EVERY_S
        on_cpu = device is None and self._tensors[0].device.type == "cpu"
        self._copier: CpuCopier | DeviceCopier = (
            CpuCopier(geometry, self._home, self._tensors)
            if on_cpu
            else DeviceCopier(geometry, self._home, self._tensors, device or PlatformDevice(self._tensors[0].device))
        )

    @property
    def pinned(self) -> bool:
        """Whether the arena is pinned for the accelerator; False on CPU tensors."""
        return self._copier.pinned

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Start copying GPU blocks into slots; always True.

        Raises:
            MappingError: an id out of range. A store that merely cannot be mapped poisons its slots instead.
        """
        assert isinstance(dst_spec, SlotsSpec), dst_spec
        parts = map_store(self._geometry, src_spec, dst_spec, self._num_blocks, self._home.unit_count)
        job = Job(job_id, dst_spec.ticket)
        certain = [part for part in parts if part.certain]
        for part in certain:
            self._zero_rest(part)
            counts = np.full(len(part.units), self._geometry.blocks_per_chunk, np.uint32)
            counts[0] -= part.skip
            job.counts.append((part.units, counts))
        for part in parts:
            if not part.certain:
                self._poison(job, part, "its null blocks leave no certain mapping")
        try:
            self._copier.start(job, certain, to_host=True)
        except RuntimeError as error:
            if job.begin is None:
                raise  # not even an event could be made: nothing was started, and nothing will work
            # The driver refused; some copies may have been started, so the job goes on, but its slots are worthless.
            job.counts.clear()
            for part in parts:
                self._poison(job, part, str(error))
        self.counters["stores"] += 1
        self._track(job)
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Start copying slots into GPU blocks; always True.

        Args:
            job_id: vLLM's.
            src_spec: the slots.
            dst_spec: the blocks.
            expedited: the step waits for it, so it goes on a stream of its own.

        Raises:
            MappingError: blocks and slots do not match, or an id is out of range.
            RuntimeError: the driver refused the copy.
        """
        assert isinstance(src_spec, SlotsSpec), src_spec
        parts = map_load(self._geometry, dst_spec, src_spec, self._num_blocks, self._home.unit_count)
        job = Job(job_id, src_spec.ticket)
        try:
            self._copier.start(job, parts, to_host=False, expedited=expedited)
        finally:
            if job.begin is not None:
                self._track(job)  # also when refused: what was started before that has to end
        self.counters["loads"] += 1
        return True

    def get_finished(self) -> list[TransferResult]:
        """Results of the jobs that ended since the last call; never blocks."""
        self._reap()
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return when these jobs have left the GPU blocks; ids long gone are fine.

        `get_finished` still reports them.
        """
        for job_id in job_ids:
            job = self._jobs.get(job_id)
            if job is not None:
                job.end.synchronize()
        self._reap()

    def shutdown(self) -> None:
        """Let running copies end, publish them, and let go of everything. Idempotent.

        If the device cannot say that they ended, memory stays pinned and referenced: a late copy must find it.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait(set(self._jobs))
        except RuntimeError:
            logger.exception("the device failed with %d transfers under way; their memory is kept", len(self._jobs))
            _abandoned.append(self)
            return
        self._finished.clear()
        self._copier.close()
        self._tensors.clear()
        if self._on_shutdown is not None:
            self._on_shutdown()

    def _track(self, job: Job) -> None:
        if job.end is None:  # CPU tensors: it has ended already
            self._end(job, time.perf_counter() - job.begin)
        else:
            self._jobs[job.job_id] = job

    def _reap(self) -> None:
        for job in self._copier.ended():
            del self._jobs[job.job_id]
            self._end(job, job.begin.elapsed_time(job.end) * 1e-3)
            self._copier.recycle(job)

    def _end(self, job: Job, seconds: float) -> None:
        for units, counts in job.counts:
            self._home.blocks_written[units] = counts
        self._share.mark_ended(job.ticket)
        self._finished.append(TransferResult(job.job_id, True, job.transfer_bytes, seconds))

    def _zero_rest(self, part: GroupTransfer) -> None:
        """Zero what a store leaves of its slots: the first chunk's missing blocks, and each tail up to a whole unit.

        Slots go to disk in whole units, and recycled slots hold somebody else's prompt.
        """
        units = self._home.units
        chunk_bytes = self._geometry.chunk_bytes(part.group_index)
        start = int(part.units[0]) * UNIT_BYTES
        units[start : start + part.skip * part.group.block_bytes] = 0
        tail_bytes = round_up(chunk_bytes, UNIT_BYTES) - chunk_bytes
        if tail_bytes:
            strided(units, chunk_bytes, tail_bytes)[part.units] = 0

    def _poison(self, job: Job, part: GroupTransfer, why: str) -> None:
        job.counts.append((part.units, np.full(len(part.units), POISONED, np.uint32)))
        self.counters["poisoned"] += len(part.units)
        loud = time.monotonic() - self._warned_at >= _WARN_EVERY_S
        if loud:
            self._warned_at = time.monotonic()
        logger.log(
            logging.WARNING if loud else logging.DEBUG,
            "store of %d chunks of KV cache group %d is not kept: %s (%d blocks, %d into the first chunk of %d; "
            "%d chunks so far)",
            len(part.units),
            part.group.group_id,
            why,
            len(part.blocks),
            part.skip,
            self._geometry.blocks_per_chunk,
            self.counters["poisoned"],
        )


def view_of(tensor: torch.Tensor) -> View:
    """`tensor`, an int8 (num_blocks, row) view, in bytes.

    Raises:
        ValueError: it has another type or shape.
    """
    if tensor.dtype != torch.int8 or tensor.ndim != 2 or tensor.stride(1) != 1:
        raise ValueError(
            f"KV cache tensor of {tensor.dtype}, shape {tuple(tensor.shape)}, strides {tensor.stride()}; expected rows "
            f"of contiguous int8"
        )
    num_blocks, row_bytes = tensor.shape
    storage = tensor.untyped_storage()
    return View(num_blocks, row_bytes, tensor.stride(0), tensor.storage_offset(), storage.nbytes(), storage.data_ptr())
