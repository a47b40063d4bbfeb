"""The posix engine: daemon threads over `preadv` and `pwritev`. Works wherever Linux does, and is the oracle in tests.

Invariants:
- `done` is called on the event loop's thread only; one wake-up of the loop serves every completion that is there.
- Ops start in the order submitted. A thread that hangs in the kernel holds one op and nothing else: it blocks neither
  `close` nor the interpreter's exit, and the memory of its op stays referenced from its stack.

What can fail: an op ends in `done(-errno)`; `start` only where no thread can be had.
"""

import asyncio
import errno
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvdisk.errors import EngineUnavailableError
from kvdisk.io.files import FileCalls, drop_cached
from kvdisk.io.protocol import Memory, Op, OpKind, nobody
from kvdisk.io.spans import span_bytes

log = logging.getLogger("kvdisk")


class PosixEngine(FileCalls):
    """See `kvdisk.io.protocol.Engine`. `iodepth` is the number of threads."""

    def __init__(self, iodepth: int = 32) -> None:
        if not 1 <= iodepth <= 1024:
            raise ValueError(f"iodepth must be 1 to 1024, not {iodepth}")
        super().__init__("posix")
        self.iodepth = iodepth
        self.after_done: Callable[[], object] = nobody
        self._queue: queue.SimpleQueue[Op | None] = queue.SimpleQueue()
        self._completed: deque[tuple[Op, int]] = deque()
        self._waking = False
        self._threads = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()
        self._thread = 0

    def start(self, memories: Sequence[Memory]) -> None:
        """Start the threads; there is nothing to register. See `Engine.start`."""
        assert self._loop is None, "started twice"
        self._loop = asyncio.get_running_loop()
        self._pid, self._thread = os.getpid(), threading.get_ident()
        try:
            for index in range(self.iodepth):
                threading.Thread(target=self._work, name=f"kvdisk-io-{index}", daemon=True).start()
                self._threads += 1
        except RuntimeError as error:
            self.close()
            raise EngineUnavailableError(
                f"only {self._threads} of {self.iodepth} I/O threads could be started ({error}): raise the limit of "
                "processes (ulimit -u, pids cgroup) or lower iodepth"
            ) from error

    def submit(self, ops: Sequence[Op]) -> None:
        """Start `ops`; see `Engine.submit`."""
        if not self._threads:
            raise RuntimeError("engine is not started, or closed")
        if os.getpid() != self._pid:
            raise RuntimeError("I/O threads do not survive fork: open kvdisk in the process that uses it")
        if threading.get_ident() != self._thread:
            raise RuntimeError("an engine belongs to the thread that started it (the event loop's)")
        for op in ops:
            span_bytes(op)  # all are checked before the first is started
        for op in ops:
            self._queue.put(op)

    def close(self) -> None:
        """End the threads that are idle, and the others when their op returns. Idempotent."""
        threads, self._threads = self._threads, 0
        for _ in range(threads):
            self._queue.put(None)

    def _work(self) -> None:
        while (op := self._queue.get()) is not None:
            self._completed.append((op, self._transfer(op)))
            del op  # an idle thread must not keep the memory of its last op
            # Set before the append would be a lost wake-up; two threads that both see False only wake it twice.
            if not self._waking:
                self._waking = True
                assert self._loop is not None
                try:
                    self._loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:  # the loop is closed, nobody waits any more
                    return

    def _transfer(self, op: Op) -> int:
        """Do it; bytes, or a negative errno."""
        views = [memory.view[start : start + length] for memory, start, length in op.spans]
        write = op.kind is OpKind.WRITE
        try:
            count = os.pwritev(op.fd, views, op.offset) if write else os.preadv(op.fd, views, op.offset)
            if self.buffered and count:
                drop_cached(op.fd, op.kind, op.offset, count)
        except OSError as error:
            return -(error.errno or errno.EIO)
        except Exception:  # ours, not the disk's; the op must end all the same, and the thread must live
            log.exception("I/O thread")
            return -errno.EIO
        return count

    def _deliver(self) -> None:
        self._waking = False  # first: what completes from here on wakes again
        completed = self._completed
        while completed:
            op, result = completed.popleft()
            try:
                op.done(result)
            except Exception as error:  # a bug of one owner must not lose the completions of the others
                assert self._loop is not None
                self._loop.call_exception_handler({"message": "done() of an op failed", "exception": error})
        self.after_done()
