"""The data plane at work: an engine, an event loop and somewhere to run, behind one small interface.

    thread    local.py: an event loop on a daemon thread of this process. Shares the GIL with its owner
    process   remote.py here, child.py there: a process of its own, which waits for nobody's GIL; restarted once

Both run backend.py, and one contract test suite runs over both. The metadata plane is none of their business: they get
commands and answer with completions (commands.py).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvdisk.commands import Command, Completion, FoundSegment
from kvdisk.directory import Directory
from kvdisk.io.protocol import EngineInfo
from kvdisk.store_config import StoreConfig


class Counts(NamedTuple):
    """What a plane has done since it was started; `io_late` counts transfers, the others as their names in
    docs/configuration.md say."""

    bytes_read: int = 0
    io_ops: int = 0
    io_short_results: int = 0
    io_retries: int = 0
    io_errors: int = 0
    io_late: int = 0


class Plane(Protocol):
    """See the package's docstring. One thread owns it."""

    @property
    def info(self) -> EngineInfo:
        """What the engine is; it may give up direct I/O on the way."""

    @property
    def counts(self) -> Counts:
        """Constant time, and never blocks."""

    @property
    def is_lost(self) -> bool:
        """Whether nothing will be read or written any more: it died more often than it is restarted."""

    def start(self) -> int:
        """Start the engine and prove it in every root; the alignment of everything on disk.

        Raises:
            EngineUnavailableError: the engine asked for by name does not work here.
            PlaneUnavailableError: the plane itself could not be started.
            OSError: a root does not work.
        """

    def open(self, directories: Sequence[Directory], config: StoreConfig, take: Callable[[FoundSegment], None]) -> int:
        """Scan, see that the cap holds, begin to work; the epoch.

        Args:
            directories: claimed by the caller, and closed by it after `close`.
            config: with the alignment that `start` found.
            take: called with each segment that is there.
        """

    def send(self, commands: Sequence[Command]) -> None:
        """Begin `commands`, in order. Never blocks; each gets its completions, whatever happens to the plane."""

    def completions(self) -> list[Completion]:
        """Those that came since the last call. Never blocks, and makes no system call if none can come."""

    def wait(self, timeout_s: float) -> None:
        """Block until a completion may have come, or the time is over."""

    def close(self, timeout_s: float) -> bool:
        """Finish what is in progress, and end; False if something hangs. Then the locks must outlive the owner's use of
        them: what the kernel still has may land at any time. Idempotent."""
