"""Whether the I/O of a killed process is over: until then the kernel may still fill its buffers, which here are slots.

A process that ran io_uring can be reaped while its last requests are with the device: the kernel tears down the ring
later. But each request holds its open file, and a file that anybody has open for writing gets no read lease. So a lease
that is granted says that nothing is on its way to or from the file. Only while nobody else opens it: a plane that is
started again must wait for this.
"""

import errno
import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterable
from typing import Final

_POLL_S: Final = 0.005
_GRACE_S: Final = 2.0
"""For files on which there are no leases: devices answer within milliseconds, or hang, which nobody can tell."""


class Quiet:
    """Waits, on a thread of its own since opening a file may block, until all of `paths` are quiet.

    Attributes:
        reached: whether they are.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self.reached = False
        self._paths = set(paths)
        if not self._paths:
            self.reached = True
            return
        threading.Thread(target=self._run, name="kvdisk-quiet", daemon=True).start()

    def _run(self) -> None:
        grace_ends = time.monotonic() + _GRACE_S
        while self._paths:
            for path in list(self._paths):
                quiet = is_quiet(path)
                if quiet or (quiet is None and time.monotonic() > grace_ends):
                    self._paths.discard(path)
            if self._paths:
                time.sleep(_POLL_S)
        self.reached = True


def is_quiet(path: str) -> bool | None:
    """Whether nobody has the file open for writing; None where that cannot be told."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        # Should somebody open the file in the instant in which we hold the lease, we are told by a signal, which by
        # default would be SIGIO, and fatal. SIGURG is ignored by default.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return False if error.errno in (errno.EAGAIN, errno.EBUSY) else None
    finally:
        os.close(fd)
    return True
