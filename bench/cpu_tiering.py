"""vLLM's TieringOffloadingSpec on CPU tensors: everything is in-tree but the copies between blocks and host memory.

For bench/vllm_ttft.py, and for the tests of a tier end to end (tests/vllm/e2e/test_tier.py).

The in-tree worker copies with a device's streams and refuses the CPU platform. Here a copy is a memory copy, run by
whole runs of a page where blocks and places in the chunk allow it, as kvdisk's own CPU copies are.
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies at once, in the caller's thread."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: Any) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region
        self._refs = kv_caches.group_data_refs
        self._device = [tensor.tensor.numpy() for tensor in kv_caches.tensors]
        self._host = []
        for tensor in kv_caches.tensors:
            view = region.create_next_worker_view(tensor.page_size_bytes * blocks_per_chunk).numpy()
            self._host.append(view.reshape(len(view), blocks_per_chunk, tensor.page_size_bytes))
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        self._host.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, blocks: Any, chunks: Any, *, to_host: bool) -> bool:
        start, moved = time.perf_counter(), 0
        for group, block_ids, chunk_ids, places in self._groups(blocks, chunks):
            for ref in self._refs[group]:
                size = ref.page_size_bytes
                device, host = self._device[ref.tensor_idx], self._host[ref.tensor_idx]
                if to_host:
                    host[chunk_ids, places, :size] = device[block_ids, :size]
                else:
                    device[block_ids, :size] = host[chunk_ids, places, :size]
                moved += size * len(block_ids)
        self._done.append(TransferResult(job_id, True, moved, time.perf_counter() - start))
        return True

    def _groups(self, blocks: Any, chunks: Any) -> Iterator[tuple[int, Any, Any, Any]]:
        """(group, block ids, the chunk of each, its place in it)."""
        block_ids, chunk_ids = np.asarray(blocks.block_ids), np.asarray(chunks.block_ids)
        for group, (count, first) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
            if not count:
                continue
            places = first % self._blocks_per_chunk + np.arange(count)
            used = places // self._blocks_per_chunk
            yield group, block_ids[:count], chunk_ids[used], places % self._blocks_per_chunk
            block_ids, chunk_ids = block_ids[count:], chunk_ids[used[-1] + 1 :]


class CpuTieringSpec(TieringOffloadingSpec):
    """See the module's docstring."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
