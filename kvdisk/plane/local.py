"""The data plane on a thread of this process, with an event loop of its own.

Commands and completions cross by queues, so neither side waits for the other; but both wait for the GIL. The thread is
a daemon: an I/O that hangs for ever must not keep the process from ending. Memory that a hung I/O might still write to
is never freed.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError  # not the built-in one before Python 3.11
from typing import TypeVar

from kvdisk.commands import Command, Completion, FoundSegment
from kvdisk.dataplane import Units
from kvdisk.directory import Directory
from kvdisk.io.protocol import EngineInfo
from kvdisk.options import Options
from kvdisk.plane import Counts
from kvdisk.plane.backend import Backend
from kvdisk.store_config import StoreConfig

T = TypeVar("T")


class ThreadPlane:
    """See `Plane` and the module's docstring.

    Args:
        options, units, checksums: see Backend.
        on_ready: called on the plane's thread when completions wait; must not block.
    """

    is_lost = False

    def __init__(
        self,
        options: Options,
        units: Sequence[Units],
        *,
        checksums: bool = True,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        self.backend = Backend(options, units, self._report, checksums=checksums)
        self.loop = asyncio.new_event_loop()
        self._on_ready = on_ready
        self._completions: deque[Completion] = deque()
        self._arrived = threading.Event()
        self._thread = threading.Thread(target=self.loop.run_forever, name="kvdisk-data-plane", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        """See Plane."""
        return self.backend.info

    @property
    def counts(self) -> Counts:
        """See Plane."""
        return self.backend.counts

    def start(self) -> int:
        """See Plane."""
        return self._call(self.backend.start())

    def open(self, directories: Sequence[Directory], config: StoreConfig, take: Callable[[FoundSegment], None]) -> int:
        """See Plane."""
        found: list[FoundSegment] = []

        async def keep(one: FoundSegment) -> None:
            found.append(one)

        epoch = self._call(self.backend.open(directories, config, keep))
        while found:
            take(found.pop())
        return epoch

    def send(self, commands: Sequence[Command]) -> None:
        """See Plane."""
        self.loop.call_soon_threadsafe(self.backend.run, commands)

    def completions(self) -> list[Completion]:
        """See Plane."""
        came: list[Completion] = []
        while self._completions:
            came.append(self._completions.popleft())
        return came

    def wait(self, timeout_s: float) -> None:
        """See Plane."""
        self._arrived.wait(timeout_s)
        self._arrived.clear()

    def close(self, timeout_s: float) -> bool:
        """See Plane. What hangs is left to the end of the process."""
        if self.loop.is_closed():
            return True
        try:
            idle = self._call(self.backend.stop(timeout_s / 2), timeout_s)
        except TimeoutError:
            idle = False
        if idle:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout_s)
            if not self._thread.is_alive():
                self.loop.close()
        return idle

    def _report(self, completion: Completion) -> None:
        self._completions.append(completion)
        self._arrived.set()
        if self._on_ready is not None:
            self._on_ready()

    def _call(self, work: Awaitable[T], timeout_s: float | None = None) -> T:
        """The result of `work` on the plane's loop."""

        async def run() -> T:
            return await work

        future = asyncio.run_coroutine_threadsafe(run(), self.loop)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            if future.done():  # `work` raised it
                raise
            future.cancel()
            raise TimeoutError("the data plane does not answer") from None
