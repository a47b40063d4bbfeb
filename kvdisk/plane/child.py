"""The data plane's process: what runs in it. Started by remote.py, never by hand.

What must hold:
- It imports neither torch nor vLLM, and serves one owner over one socket.
- It ends when its owner does: at the end of the socket, or when the owner's pidfd says so (a forked child of the owner
  may keep the socket open). First it finishes what is in progress; the locks it was lent are free when it has ended.
- SIGINT, SIGTERM and SIGHUP, which a terminal or a supervisor sends to a whole group, are for the owner to act on.
- What it has to say goes through the socket, log records too. Its standard error is for the worst.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Final

from kvdisk.commands import Completion, FoundSegment
from kvdisk.dataplane import Units
from kvdisk.instance import Instance
from kvdisk.io.protocol import EngineInfo
from kvdisk.memory import map_shared_memory
from kvdisk.plane.backend import Backend
from kvdisk.plane.wire import (
    Do,
    Done,
    Event,
    Found,
    Log,
    Open,
    Opened,
    Receiver,
    Refused,
    Request,
    Sender,
    Start,
    Started,
    Stop,
    Stopped,
    WireError,
    decode_request,
)
from kvdisk.units import MIB

IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The owner starts us with these blocked, so that none can arrive before they are ignored."""

_LOG_BACKLOG_MAX: Final = MIB  # what an owner that does not listen may miss
_FOUND_BACKLOG_MAX: Final = 16 * MIB
_FOUND_BYTES: Final = 160 << 10  # fits into the socket, with the segment that goes beyond it
_ORPHAN_S: Final = 120.0  # an orphan's commands end by their own deadlines; this is for bugs
_OWNER_POLL_S: Final = 0.5

logger = logging.getLogger("kvdisk")


class _Server:
    """One owner's data plane, on the running loop."""

    def __init__(self, sock: socket.socket, owner: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        self._owner = owner
        self._sender = Sender(sock)
        # An owner is trusted with the size of its messages: it has better ways to take our memory.
        self._receiver = Receiver(sock, frame_bytes_max=(1 << 32) - 1, with_fds=True)
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        self._over = asyncio.Event()
        self._flushed = asyncio.Event()
        self._stop_s = _ORPHAN_S
        self._backend: Backend | None = None
        self._is_open = False
        self._done: list[Completion] = []
        self._untold: list[FoundSegment] = []  # found, and not told to the owner
        self._untold_bytes = 0
        self._info: EngineInfo | None = None

    async def run(self) -> None:
        """Serve until the owner wants no more or is gone."""
        self._loop.add_reader(self._socket, self._readable)
        self._watch_owner()
        logging.getLogger().addHandler(_LogHandler(self._loop, self._log))
        opening = self._loop.create_task(self._serve_opening())
        await self._over.wait()
        idle = await self._end_opening(opening)
        if idle and self._backend is not None:
            idle = await self._backend.stop(self._stop_s)
        self._flush()
        self._send(Stopped(idle))
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._all_sent(), 1.0)

    # ---- starting and opening

    async def _end_opening(self, opening: "asyncio.Task[None]") -> bool:
        """Whether nothing of it is left. Its reads end when the kernel has ended them, which the engine must live to
        see: without it each would be waited for until its deadline, with the locks."""
        if opening.done():
            return True
        opening.cancel()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}  # also what it gathered, which may outlive it
        _, left = await asyncio.wait(tasks, timeout=self._stop_s)
        return not left

    async def _serve_opening(self) -> None:
        try:
            await self._start(await self._requests.get())
            await self._open(await self._requests.get())
        except asyncio.CancelledError:
            raise
        except OSError as error:
            self._send(Refused("OSError", error.errno or 0, _text(error)))
        except Exception as error:
            if not isinstance(error, (ValueError, MemoryError)) and type(error).__module__ != "kvdisk.errors":
                logger.exception("kvdisk: the data plane cannot be opened")
            self._send(Refused(type(error).__name__, 0, str(error)))

    async def _start(self, request: Request) -> None:
        if not isinstance(request, Start):
            raise WireError(f"{type(request).__name__} came before Start")
        logger.setLevel(request.log_level)
        units = []
        for fd, size, start in request.units:
            units.append(Units(map_shared_memory(fd, size), start))
            os.close(fd)
        self._backend = Backend(request.options, units, self._report, checksums=request.checksums, is_alone=True)
        alignment = await self._backend.start()
        self._info = self._backend.info
        self._send(Started(alignment, self._info))
        self._alignment = alignment

    async def _open(self, request: Request) -> None:
        if not isinstance(request, Open):
            raise WireError(f"{type(request).__name__} came before Open")
        backend, config = self._backend, request.config
        assert backend is not None
        if config.alignment != self._alignment:
            raise OSError(f"direct I/O wants {self._alignment} bytes now, and the store was laid out for others")
        if len(self._receiver.fds) != len(request.claimed):  # kept open: they are the locks
            raise WireError(f"{len(self._receiver.fds)} locks for {len(request.claimed)} instances")
        instances = [Instance(*claimed) for claimed in request.claimed]
        epoch = 0
        if request.scan:
            epoch = await backend.open(instances, config, self._found)
            await self._tell_found()
        else:
            backend.resume(instances, config)
        self._send(Opened(epoch))
        while not self._requests.empty():
            self._do(self._requests.get_nowait())
        self._is_open = True

    async def _found(self, segment: FoundSegment) -> None:
        self._untold.append(segment)
        self._untold_bytes += sum([len(pack.entries) for pack in segment.packs])
        if self._untold_bytes > _FOUND_BYTES:
            await self._tell_found()

    async def _tell_found(self) -> None:
        """Several segments a message: each wakes the owner, which costs as much as finding a segment."""
        segments, self._untold, self._untold_bytes = self._untold, [], 0
        self._send(Found(segments))
        if self._sender.backlog_bytes > _FOUND_BACKLOG_MAX:
            await self._all_sent()

    # ---- at work

    def _readable(self) -> None:
        try:
            for payload in self._receiver.receive():
                request = decode_request(payload)
                if isinstance(request, Stop):
                    self._stop_s = request.timeout_s
                    self._over.set()
                elif self._is_open:
                    self._do(request)
                else:
                    self._requests.put_nowait(request)
        except WireError as error:
            logger.error("kvdisk: the data plane's owner talks nonsense: %s", error)
            self._over.set()
        if self._receiver.ended:
            self._over.set()
        if self._over.is_set():
            self._loop.remove_reader(self._socket)

    def _do(self, request: Request) -> None:
        if not isinstance(request, Do):
            raise WireError(f"{type(request).__name__} came while at work")
        assert self._backend is not None
        self._backend.run(request.commands)

    def _report(self, completion: Completion) -> None:
        """What ends in one turn of the loop goes in one message."""
        if not self._done:
            self._loop.call_soon(self._flush)
        self._done.append(completion)

    def _flush(self) -> None:
        backend = self._backend
        if self._done and backend is not None:
            done, self._done = self._done, []
            news = None if backend.info is self._info else backend.info
            self._info = backend.info
            self._send(Done(done, backend.counts, news))

    def _send(self, event: Event) -> None:
        try:
            self._sender.send(event)
        except OSError:
            self._over.set()
            return
        if self._sender.backlog_bytes:
            self._flushed.clear()
            self._loop.add_writer(self._socket, self._writable)

    def _writable(self) -> None:
        try:
            sent = self._sender.flush()
        except OSError:
            self._over.set()
            sent = True
        if sent:
            self._loop.remove_writer(self._socket)
            self._flushed.set()

    async def _all_sent(self) -> None:
        if self._sender.backlog_bytes:
            await self._flushed.wait()

    def _log(self, level: int, text: str) -> None:
        if self._sender.backlog_bytes < _LOG_BACKLOG_MAX:
            self._send(Log(level, text))

    # ---- the owner's life

    def _watch_owner(self) -> None:
        try:
            pidfd = os.pidfd_open(self._owner)
        except (OSError, AttributeError):  # before Linux 5.3, a Python built without it, or forbidden
            self._poll_owner()
            return
        self._loop.add_reader(pidfd, self._owner_ended, pidfd)
        if os.getppid() != self._owner:  # it ended before we looked, and the pid may be another's
            self._over.set()

    def _owner_ended(self, pidfd: int) -> None:
        self._loop.remove_reader(pidfd)
        self._over.set()

    def _poll_owner(self) -> None:
        if os.getppid() != self._owner:
            self._over.set()
        else:
            self._loop.call_later(_OWNER_POLL_S, self._poll_owner)


def _text(error: OSError) -> str:
    """What `OSError(errno, text)` says the same with."""
    place = f" ({os.fsdecode(error.filename)})" if isinstance(error.filename, (str, bytes)) else ""
    return f"{error.strerror}{place}" if error.errno else str(error)


class _LogHandler(logging.Handler):
    """Hands records to `send(level, text)` on the loop, whichever thread they come from."""

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[int, str], None]) -> None:
        super().__init__()
        self._loop = loop
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record).encode(errors="replace").decode()
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._send, record.levelno, text)


def _name_process(name: bytes) -> None:
    """For `top`; PR_SET_NAME of <linux/prctl.h>."""
    ctypes.CDLL(None).prctl(15, name, 0, 0, 0)


async def _serve(fd: int, owner: int) -> None:
    with socket.socket(fileno=fd) as sock:
        sock.setblocking(False)
        await _Server(sock, owner).run()


def main(fd: int, owner: int) -> None:
    """Serve over the socket `fd` until process `owner` wants no more."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    _name_process(b"kvdisk-plane")
    asyncio.run(_serve(fd, owner))
    # A thread that hangs in a call must not keep the process, and with it the locks, any longer than the kernel does.
    sys.stderr.flush()
    os._exit(0)
