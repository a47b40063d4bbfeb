"""LMCache's raw-block package on one preallocated file. Argument: posix (8 threads) or io_uring (fixed buffers)."""

import sys
import threading
from collections.abc import Sequence
from typing import Any

from lmcache_rust_raw_block_io import RawBlockDevice
from peer import Peer, raw_file, serve

THREADS = 8
ENGINE = sys.argv[1]


class Raw(Peer):
    """Both engines, as LMCache calls them."""

    depth = 2

    def open(self) -> None:
        path = raw_file(self)
        more = {"iouring_queue_depth": 64} if ENGINE == "io_uring" else {}
        self._device = RawBlockDevice(path, True, use_odirect=True, alignment=4096, io_engine=ENGINE, **more)
        if ENGINE == "io_uring":
            self._device.register_fixed_buffers([self.address], [len(self.view)])

    def before(self, op: str) -> None:
        if op == "store" and self.fresh:  # over blocks that were never written, each time
            self.close()
            self.open()

    def submit(self, op: str, chunks: Sequence[int]) -> Any:
        call = self._device.batched_write if op == "store" else self._device.batched_read
        slots = [self.slot(chunk) for chunk in chunks]
        return call([chunk * self.bs for chunk in chunks], slots, [self.bs] * len(chunks))

    def wait(self, handle: Any) -> None:
        _, errors = self._device.wait_iouring(handle)
        assert not errors, errors[:2]

    def move(self, op: str) -> None:
        if ENGINE == "io_uring":
            super().move(op)
            return
        call = self._device.pwrite_from_buffer if op == "store" else self._device.pread_into
        numbers, lock, failed = iter(range(self.chunk_count)), threading.Lock(), []

        def work() -> None:
            while True:
                with lock:
                    chunk = next(numbers, None)
                if chunk is None:
                    return
                try:
                    call(chunk * self.bs, self.slot(chunk), self.bs, self.bs)
                except Exception as error:  # a thread's errors would be lost
                    failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed[0]

    def close(self) -> None:
        self._device.close()


serve(Raw())
