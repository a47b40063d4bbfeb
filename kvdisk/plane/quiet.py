"""Whether the I/O of a killed process is over: until then the kernel may still fill its buffers, which here are slots.

A process that ran io_uring can be reaped while its last requests are with the device: the kernel tears down the ring
later. But each request holds its open file, and a file that anybody has open for writing gets no read lease. So a lease
that is granted says that nothing is on its way to or from the file. Only while nobody else opens it: a plane that is
started again must wait for this. Where nobody can tell (NFS has no such leases, and we may be out of descriptors) the
file is never quiet: a slot that stays unused is a smaller loss than wrong bytes in one that is a hit.
"""

import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterable
from typing import Final

_POLL_S_MIN: Final = 0.005
_POLL_S_MAX: Final = 1.0
_POLL_GROWTH: Final = 1.25
_GRACE_S: Final = 2.0
"""For files that were removed, of which no lease can be had: devices answer within milliseconds, or hang."""


class Quiet:
    """Waits, on a thread of its own since opening a file may block, until all of `paths` are quiet.

    Attributes:
        reached: whether they are. Where no thread can be started it stays False.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self.reached = False
        self._paths = set(paths)
        self._stopped = threading.Event()
        if not self._paths:
            self.reached = True
            return
        self._thread = threading.Thread(target=self._run, name="kvdisk-quiet", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads
            self._stopped.set()

    def stop(self) -> None:
        """Nobody wants to know any more. Does not wait."""
        self._stopped.set()

    def _run(self) -> None:
        grace_ends = time.monotonic() + _GRACE_S
        poll_s = _POLL_S_MIN
        while not self._stopped.is_set():
            for path in list(self._paths):
                quiet = is_quiet(path)
                if quiet or (quiet is None and time.monotonic() > grace_ends):
                    self._paths.discard(path)
            if not self._paths:
                self.reached = True
                return
            self._stopped.wait(poll_s)
            poll_s = min(poll_s * _POLL_GROWTH, _POLL_S_MAX)


def is_quiet(path: str) -> bool | None:
    """Whether surely nobody has the file open for writing; None if there is no file of that name (any more)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError:
        return False
    try:
        # Should somebody open the file in the instant in which we hold the lease, we are told by a signal, which by
        # default would be SIGIO, and fatal. SIGURG is ignored by default.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
