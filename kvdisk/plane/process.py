"""A data plane's process as its owner sees it: started, spoken to, and buried.

It is started by `subprocess`, not by multiprocessing: vLLM's workers are daemonic and may have no such children, and a
spawned child would import the owner's main module. Nothing here waits longer than it is told to.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from kvdisk import errors
from kvdisk.errors import KVDiskError, PlaneUnavailableError
from kvdisk.plane.child import IGNORED
from kvdisk.plane.wire import Event, Log, Receiver, Refused, Sender, WireError, decode_event

logger = logging.getLogger("kvdisk")

_MAIN: Final = (
    "import sys; sys.path[:] = sys.argv[1].split(chr(10)); "
    "from kvdisk.plane.child import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
"""Run with the owner's sys.path, and before anything is imported, so that both run the same kvdisk."""


def _current_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return os.sep


_CWD: Final = _current_directory()
"""Entries of sys.path may be relative, '' for example. They meant this directory when kvdisk was imported; a process
that has changed it since must not have its data plane, which may start much later, look somewhere else."""

_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""numpy's linear algebra, which a data plane does not use, would start a thread a core."""

_unburied: list["subprocess.Popen[bytes]"] = []  # still ending when their planes were closed; see `bury`


class PlaneProcess:
    """A process that runs child.py.

    Args:
        memfds: descriptors that it inherits, under the same numbers.
        frame_bytes_max: of what it may say.

    Raises:
        PlaneUnavailableError: no process can be started here.
    """

    def __init__(self, memfds: Sequence[int], frame_bytes_max: int) -> None:
        try:
            mine, theirs = socket.socketpair()
        except OSError as error:  # no descriptors left
            raise PlaneUnavailableError(f"there is no socket for the data plane's process: {error}") from error
        with theirs:
            try:
                self._process = _spawn(theirs.fileno(), memfds)
            except BaseException as error:
                mine.close()
                if isinstance(error, (OSError, subprocess.SubprocessError)):
                    raise PlaneUnavailableError(f"no process can be started: {error}") from error
                raise
        mine.setblocking(False)
        self.socket = mine
        self.sender = Sender(mine)
        self.receiver = Receiver(mine, frame_bytes_max=frame_bytes_max)
        self._waiting: deque[Event] = deque()
        try:
            self._pidfd: int | None = os.pidfd_open(self.pid)
        except (OSError, AttributeError):  # before Linux 5.3, a Python built without it, or forbidden
            self._pidfd = None

    @property
    def pid(self) -> int:
        """Its pid; somebody else's once `is_reaped`."""
        return self._process.pid

    @property
    def is_reaped(self) -> bool:
        """Whether it is gone for good. Never blocks; reaps it if it can be."""
        return self._process.poll() is not None

    @property
    def end(self) -> str:
        """How it ended, for messages."""
        code = self._process.returncode
        if code is None:
            return "its socket broke"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def events(self) -> list[Event]:
        """What it said since the last call, without log records: those are logged. Sends what waited to be sent.

        Raises:
            WireError: what cannot be, or its end of the socket is closed.
            OSError: the socket broke.
        """
        self.sender.flush()
        events = [decode_event(payload) for payload in self.receiver.receive()]
        if not events and self.receiver.ended:
            raise WireError("its end of the socket is closed")
        for event in events:
            if isinstance(event, Log):
                logger.log(event.level, "%s", event.text)
        return [event for event in events if not isinstance(event, Log)]

    def next_event(self, timeout_s: float | None) -> Event:
        """The next event, waited for; while it is being opened, when there is one after the other.

        Raises:
            PlaneUnavailableError: it ended, or said nothing in time.
            ValueError, OSError, MemoryError, KVDiskError: it refused with that.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._waiting:
            if deadline is not None and time.monotonic() > deadline:
                raise PlaneUnavailableError(f"the data plane's process did not answer in {timeout_s:g} s")
            self.wait(1.0)
            try:
                self._waiting += self.events()
            except (OSError, WireError) as error:
                self.await_end(1.0)
                raise PlaneUnavailableError(
                    f"the data plane's process ended at its start: {error}, {self.end}"
                ) from error
        event = self._waiting.popleft()
        if isinstance(event, Refused):
            raise _exception(event)
        return event

    def go_on(self) -> None:
        """Undo a SIGSTOP, or it could not end by itself."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    def wait(self, timeout_s: float, *, for_end: bool = False) -> None:
        """Block until it said something, took something that waited to be sent, or ended; at most for `timeout_s`.

        for_end: until it ended.
        """
        poll = select.poll()
        if not for_end:
            poll.register(self.socket, select.POLLIN | (select.POLLOUT if self.sender.backlog_bytes else 0))
        if self._pidfd is not None:
            poll.register(self._pidfd, select.POLLIN)
        elif for_end:
            timeout_s = min(timeout_s, 0.01)
        poll.poll(max(0.0, timeout_s) * 1000)

    def await_end(self, timeout_s: float) -> bool:
        """Whether it is reaped within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self.is_reaped:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.wait(left, for_end=True)
        return True

    def bury(self) -> None:
        """Close the descriptors. One that has not ended yet is reaped when the next is buried, or by init."""
        self.socket.close()
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            os.close(pidfd)
        _unburied[:] = [process for process in [*_unburied, self._process] if process.poll() is None]


def _exception(refused: Refused) -> Exception:
    if refused.kind == "OSError":
        return OSError(refused.errno, refused.text) if refused.errno else OSError(refused.text)
    kinds = {"ValueError": ValueError, "MemoryError": MemoryError, **vars(errors)}
    kind = kinds.get(refused.kind, KVDiskError)
    return kind(refused.text) if issubclass(kind, Exception) else KVDiskError(refused.text)


def _import_path() -> list[str]:
    return [os.path.join(_CWD, entry) for entry in sys.path]


def _spawn(fd: int, memfds: Sequence[int]) -> "subprocess.Popen[bytes]":
    if not sys.executable:
        raise PlaneUnavailableError("Python does not know its own executable")
    flags = ["-B"] if sys.dont_write_bytecode else []
    # What a signal to the group would do before the process ignores it: nothing, it inherits them blocked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        return subprocess.Popen(
            [sys.executable, *flags, "-c", _MAIN, "\n".join(_import_path()), str(fd), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[fd, *memfds],
            env={**os.environ, **_ONE_THREAD},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
