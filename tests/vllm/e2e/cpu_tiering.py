"""vLLM's own TieringOffloadingSpec on the CPU platform: all is vLLM's, except what copies between device and host.

vLLM's CPUOffloadingWorker takes accelerators only. This one copies the same bytes to the same places of the shared
region: tensor after tensor within a rank's part of a row, block after block within a tensor.
"""

import time
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Carries out each transfer within its submission."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: Any) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region
        self._refs = kv_caches.group_data_refs
        self._device = [tensor.tensor.numpy() for tensor in kv_caches.tensors]
        self._pages = [tensor.page_size_bytes for tensor in kv_caches.tensors]
        self._host = [region.create_next_worker_view(page * blocks_per_chunk).numpy() for page in self._pages]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def _copy(self, job_id: int, blocks: Any, chunks: Any, *, to_host: bool) -> bool:
        begin, total = time.perf_counter(), 0
        first_chunk = first_block = 0
        for refs, count, index in zip(self._refs, blocks.group_sizes, blocks.block_indices, strict=True):
            skip = index % self._blocks_per_chunk if count else 0
            for j in range(count):
                chunk, place = divmod(skip + j, self._blocks_per_chunk)
                row, block = int(chunks.block_ids[first_chunk + chunk]), int(blocks.block_ids[first_block + j])
                for ref in refs:
                    size, start = ref.page_size_bytes, place * self._pages[ref.tensor_idx]
                    device = self._device[ref.tensor_idx][block, :size]
                    host = self._host[ref.tensor_idx][row, start : start + size]
                    np.copyto(host, device) if to_host else np.copyto(device, host)
                    total += size
            first_chunk += -(-(skip + count) // self._blocks_per_chunk) if count else 0
            first_block += count
        self._finished.append(TransferResult(job_id, True, total, time.perf_counter() - begin))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """All have ended."""

    def shutdown(self) -> None:
        self._host.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """See the module's docstring."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
