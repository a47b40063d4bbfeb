"""What crosses between an owner and its data plane's process: framed msgpack over a stream socket, typed at both ends.

A frame is its length (uint32, little-endian) and one message. The peer is our own code, started by us, but it may have
been killed in the middle of a frame or be out of its mind: a frame that is too long or does not decode is `WireError`,
and then the peer counts as dead. Nothing here blocks.
"""

import array
import os
import socket
import struct
from collections import deque
from typing import Final, NamedTuple, TypeVar

import msgspec

from kvdisk.commands import Command, Completion, FoundSegment
from kvdisk.errors import KVDiskError
from kvdisk.io.protocol import EngineInfo
from kvdisk.options import Options
from kvdisk.plane import Counts
from kvdisk.store_config import StoreConfig
from kvdisk.units import MIB

_LENGTH: Final = struct.Struct("<I")
_BUFFER_BYTES: Final = 256 << 10
_READS_MAX: Final = 16
_LOCKS_MAX: Final = 253  # SCM_MAX_FD of the kernel
FRAME_BYTES_MAX: Final = 64 * MIB
"""Without the one large thing that a command can hold: a footer, which is part of a segment."""


class WireError(KVDiskError):
    """The peer said something that cannot be, or nothing more."""


# ---- from the owner


class UnitsAt(NamedTuple):
    """One rank's units: the memfd (inherited by the process), its bytes, and where the first unit lies."""

    fd: int
    size: int
    start: int


class Claimed(NamedTuple):
    """A claimed instance, see Instance. Its lock comes beside the message, as a descriptor."""

    root: str
    namespace: str
    name: str
    cap_bytes: int


class Start(msgspec.Struct, array_like=True, tag=True):
    """Start the engine. Answered by Started or Refused."""

    options: Options
    units: list[UnitsAt]
    checksums: bool
    log_level: int


class Open(msgspec.Struct, array_like=True, tag=True):
    """Begin to work. scan: tell first what is there. Answered by Found, until all was told, and Opened; or Refused."""

    claimed: list[Claimed]
    config: StoreConfig
    scan: bool


class Do(msgspec.Struct, array_like=True, tag=True):
    """Carry these out."""

    commands: list[Command]


class Stop(msgspec.Struct, array_like=True, tag=True):
    """Finish what is in progress, in at most `timeout_s`, and end. Answered by Stopped."""

    timeout_s: float


Request = Start | Open | Do | Stop


# ---- from the data plane


class Started(msgspec.Struct, array_like=True, tag=True):
    """The engine works."""

    alignment: int
    info: EngineInfo


class Found(msgspec.Struct, array_like=True, tag=True):
    """Segments that are there."""

    segments: list[FoundSegment]


class Opened(msgspec.Struct, array_like=True, tag=True):
    """Commands are carried out from now on."""

    epoch: int


class Refused(msgspec.Struct, array_like=True, tag=True):
    """It cannot be: the name of the exception, its errno (0: none) and its text."""

    kind: str
    errno: int
    text: str


class Done(msgspec.Struct, array_like=True, tag=True):
    """Commands that ended; what was done in all; and what the engine is, where that changed."""

    completions: list[Completion]
    counts: Counts
    info: EngineInfo | None = None


class Log(msgspec.Struct, array_like=True, tag=True):
    """A log record."""

    level: int
    text: str


class Stopped(msgspec.Struct, array_like=True, tag=True):
    """The process ends now; whether nothing is in progress any more."""

    idle: bool


Event = Started | Found | Opened | Refused | Done | Log | Stopped

_encoder = msgspec.msgpack.Encoder()
_requests: "msgspec.msgpack.Decoder[Request]" = msgspec.msgpack.Decoder(Request)
_events: "msgspec.msgpack.Decoder[Event]" = msgspec.msgpack.Decoder(Event)

T = TypeVar("T")


def decode_request(payload: bytes) -> Request:
    """What an owner said.

    Raises:
        WireError: nothing that it can say.
    """
    return _decode(_requests, payload)


def decode_event(payload: bytes) -> Event:
    """What a data plane said.

    Raises:
        WireError: nothing that it can say.
    """
    return _decode(_events, payload)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(f"a message of {len(payload)} bytes does not decode: {error}") from None


class Sender:
    """Sends frames over a non-blocking socket; what does not fit in it waits here, in order."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._backlog: deque[memoryview] = deque()
        self.backlog_bytes = 0

    def send(self, message: Request | Event) -> None:
        """Send, or queue, one message.

        Raises:
            OSError: the peer is gone.
        """
        payload = _encoder.encode(message)
        self._queue(_LENGTH.pack(len(payload)))
        self._queue(payload)
        self.flush()

    def send_with_fds(self, message: Request, fds: list[int]) -> None:
        """The same with descriptors beside it; nothing may be waiting."""
        assert not self._backlog
        payload = _encoder.encode(message)
        frame = _LENGTH.pack(len(payload)) + payload
        sent = socket.send_fds(self._socket, [frame], fds, socket.MSG_NOSIGNAL)
        self._queue(frame[sent:])
        self.flush()

    def flush(self) -> bool:
        """Send what waits; whether nothing does any more.

        Raises:
            OSError: the peer is gone.
        """
        while self._backlog:
            pieces = [self._backlog[i] for i in range(min(len(self._backlog), 64))]
            try:
                sent = self._socket.sendmsg(pieces, [], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            self.backlog_bytes -= sent
            while sent:
                first = self._backlog.popleft()
                if sent < len(first):
                    self._backlog.appendleft(first[sent:])
                    break
                sent -= len(first)
        return True

    def _queue(self, data: bytes) -> None:
        if data:
            self._backlog.append(memoryview(data))
            self.backlog_bytes += len(data)


class Receiver:
    """Receives frames, and descriptors beside them, from a non-blocking socket.

    Attributes:
        ended: the peer closed its end, or is gone.
        fds: descriptors that came; the caller's from then on.
    """

    def __init__(self, sock: socket.socket, *, frame_bytes_max: int, with_fds: bool = False) -> None:
        self._socket = sock
        self._frame_bytes_max = frame_bytes_max
        self._with_fds = with_fds
        self._buffer = bytearray(_BUFFER_BYTES)
        self._have = 0
        self.ended = False
        self.fds: list[int] = []

    def receive(self) -> list[bytes]:
        """The messages that have come whole, as many as fill the buffer a few times.

        Raises:
            WireError: a frame longer than any can be.
        """
        frames: list[bytes] = []
        for _ in range(_READS_MAX):
            room = len(self._buffer) - self._have
            try:
                count = self._read(memoryview(self._buffer)[self._have :])
            except BlockingIOError:
                break
            except ConnectionError:
                count = 0
            self.ended = count == 0
            self._have += count
            frames += self._frames()
            if count < room:
                break
        return frames

    def _read(self, into: memoryview) -> int:
        if not self._with_fds:
            return self._socket.recv_into(into)
        count, ancillary, _, _ = self._socket.recvmsg_into([into], socket.CMSG_SPACE(4 * _LOCKS_MAX))
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i", data[: len(data) - len(data) % 4])
                for fd in fds:
                    os.set_inheritable(fd, False)
                self.fds += fds
        return count

    def _frames(self) -> list[bytes]:
        frames, at, needed = [], 0, 0
        with memoryview(self._buffer) as view:
            while self._have - at >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(view, at)
                if size > self._frame_bytes_max:
                    raise WireError(f"a message of {size} bytes; none has more than {self._frame_bytes_max}")
                needed = _LENGTH.size + size
                if at + needed > self._have:
                    break
                frames.append(bytes(view[at + _LENGTH.size : at + needed]))
                at += needed
            if at:
                view[: self._have - at] = bytes(view[at : self._have])
                self._have -= at
        if needed > len(self._buffer):
            self._buffer.extend(bytes(needed - len(self._buffer)))
        return frames
