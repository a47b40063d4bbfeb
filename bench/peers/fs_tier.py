"""vLLM's in-tree `fs` tier: its thread pool (16 + 16) and its C extension, one file a chunk, O_DIRECT."""

import functools
import os

from peer import Peer, serve, truncate_all
from vllm.v1.kv_offload.tiering.fs import io as fsio
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool


class FsTier(Peer):
    """Jobs of up to 32 chunks, fewer where that would leave threads idle."""

    many_files = True

    def open(self) -> None:
        assert fsio._HAS_FSIO_C, "vLLM's C extension fs_io_C is missing"
        self._pool = DualQueueThreadPool(16, 16)
        self._pass = 0
        self._jobs = 0

    def before(self, op: str) -> None:
        if op == "store":
            self._pass += 1

    def move(self, op: str) -> None:
        work, enqueue = (
            (fsio.batch_store_block, self._pool.enqueue_store)
            if op == "store"
            else (fsio.batch_load_block, self._pool.enqueue_load)
        )
        keys = max(1, min(32, self.chunk_count // 64))
        root = f"{self.directory}/{self._pass}"
        for at in range(0, self.chunk_count, keys):
            chunks = range(at, min(at + keys, self.chunk_count))
            paths = [f"{root}/{chunk % 256:02x}/{chunk:08x}.bin" for chunk in chunks]
            offsets = [chunk % self.slot_count * self.bs for chunk in chunks]
            self._jobs += 1
            enqueue(self._jobs, 1, [functools.partial(work, paths, self.view, offsets, self.bs, True)])
        self._pool.wait_idle()
        assert all(success for _, success, _ in self._pool.get_finished()), f"a {op} failed"

    def close(self) -> None:
        self._pool.shutdown()
        truncate_all(self.directory)


os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
serve(FsTier())
