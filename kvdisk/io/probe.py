"""Which engine can serve a directory: found out by using it there, before anything depends on it.

Everything that can be refused is tried: set-up (seccomp, sysctl), registration (RLIMIT_MEMLOCK), O_DIRECT at open and
at the first write (file systems differ in where they refuse), and whether what was written comes back. The probe file
has no name, so nothing is left behind even by SIGKILL.

Logs one INFO line that says what will be used. At most one WARNING says that it is threads instead of io_uring, with
the cause and the remedy; `FileCalls.use_buffered` has one of its own.
"""

import asyncio
import ctypes
import logging
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvdisk.errors import EngineUnavailableError
from kvdisk.io.posix import PosixEngine
from kvdisk.io.protocol import Engine, Memory, Span
from kvdisk.io.transfer import Transfer
from kvdisk.io.uring import UringEngine
from kvdisk.memory import private_memory

log = logging.getLogger("kvdisk")

ENGINES: Final = ("auto", "io_uring", "posix")

_PROBE_TIMEOUT_S: Final = 20.0
_ALIGNMENT_DEFAULT: Final = 4096
_ALIGNMENT_MAX: Final = 1 << 18

# <linux/stat.h>: the mask bit, and where struct statx has its fields. Python 3.10 has no os.statx.
_STATX_DIOALIGN: Final = 0x2000
_STATX_BYTES: Final = 256
_STATX_DIO_MEM_ALIGN: Final = 0x98
_AT_EMPTY_PATH: Final = 0x1000


class Alignment(NamedTuple):
    """What direct I/O on a file demands.

    Attributes:
        memory: of addresses, in bytes.
        offset: of file offsets and lengths, in bytes.
        direct: whether the file system says that I/O can bypass the page cache; tmpfs, for one, only pretends.
    """

    memory: int
    offset: int
    direct: bool

    @property
    def unit(self) -> int:
        """One alignment that satisfies both."""
        return max(self.memory, self.offset)


class Chosen(NamedTuple):
    """A started engine that works in the directory, and the alignment there."""

    engine: Engine
    alignment: Alignment


def file_alignment(fd: int) -> Alignment:
    """The direct-I/O alignment of an open file, by statx(2); 4096 and not direct where the system does not say."""
    unknown = Alignment(_ALIGNMENT_DEFAULT, _ALIGNMENT_DEFAULT, direct=False)
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "statx"):  # glibc before 2.28
        return unknown
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer):
        return unknown
    (mask,) = struct.unpack_from("=I", buffer, 0)
    memory, offset = struct.unpack_from("=II", buffer, _STATX_DIO_MEM_ALIGN)
    if not mask & _STATX_DIOALIGN or not memory or not offset:  # zeros: not on this file
        return unknown
    return Alignment(memory, offset, direct=True)


async def choose_engine(
    directory: str, requested: str = "auto", memories: Sequence[Memory] = (), *, iodepth: int | None = None
) -> Chosen:
    """Start the best engine that works in `directory`, for the running event loop.

    Args:
        directory: where the files will be; must exist and be writable.
        requested: "auto": io_uring, else posix. "io_uring" or "posix": this one or none.
        memories: worth registering.
        iodepth: ops in flight; None: the engine's default.

    Raises:
        ValueError: `requested` is none of `ENGINES`.
        EngineUnavailableError: what was requested does not work here; the text says why and what to do.
        OSError: the directory itself does not work (missing, read-only, full, ...).
    """
    if requested not in ENGINES:
        raise ValueError(f"engine {requested!r}: choose one of {', '.join(ENGINES)}")
    cause = ""
    if requested != "posix":
        try:
            return await _prove(UringEngine() if iodepth is None else UringEngine(iodepth), directory, memories)
        except EngineUnavailableError as error:
            if requested == "io_uring":
                raise
            cause = str(error)
    chosen = await _prove(PosixEngine() if iodepth is None else PosixEngine(iodepth), directory, memories)
    if cause:
        log.warning("I/O by threads (engine 'posix') instead of io_uring, at a higher CPU cost. %s", cause)
    return chosen


async def _prove(engine: UringEngine | PosixEngine, directory: str, memories: Sequence[Memory]) -> Chosen:
    """Start `engine` and let it write and read back random bytes in `directory`; closes it when it fails."""
    try:
        engine.start(memories)
        fd = await asyncio.to_thread(engine.create_unnamed_file, directory, 3 * _ALIGNMENT_MAX)
        try:
            alignment = file_alignment(fd)
            await _round_trip(engine, fd, min(max(alignment.unit, mmap.PAGESIZE), _ALIGNMENT_MAX))
        finally:
            await asyncio.to_thread(engine.close_file, fd)
    except BaseException:
        engine.close()
        raise
    info = engine.info
    if info.direct and not alignment.direct:
        engine.info = info = info._replace(direct=False)
        mode = "accepts O_DIRECT, but does not say that it is direct"
    else:
        mode = "direct" if info.direct else "buffered"
    log.info(
        "%s: engine %s, %s, alignment %d, iodepth %d, buffers %s%s",
        directory,
        info.name,
        mode,
        alignment.unit,
        engine.iodepth,
        "registered" if info.registered else "not registered",
        f" ({info.detail})" if info.detail else "",
    )
    return Chosen(engine, alignment)


async def _round_trip(engine: Engine, fd: int, unit: int) -> None:
    """Write three spans, make them durable, read them back elsewhere.

    Raises:
        EngineUnavailableError: an error, silence, or other bytes.
    """
    memory = private_memory(6 * unit)
    size = 3 * unit
    wanted = os.urandom(size)
    memory.view[:size] = wanted
    transfer = Transfer(engine, alignment=unit, piece_bytes=size, timeout_s=_PROBE_TIMEOUT_S)
    try:
        await transfer.write(fd, 0, [Span(memory, part * unit, unit) for part in (2, 0, 1)])
        await asyncio.to_thread(engine.sync_file, fd)
        await transfer.read(fd, 0, [Span(memory, size + part * unit, unit) for part in (2, 0, 1)])
    except OSError as error:  # TransferLateError is one, too
        raise EngineUnavailableError(f"{engine.info.name}: the trial write and read failed: {error}") from error
    if memory.view[size : 2 * size] != wanted:
        raise EngineUnavailableError(f"{engine.info.name}: the trial read brought other bytes than were written")


async def prove_directory(engine: Engine, directory: str) -> Alignment:
    """The alignment in a further directory of a started engine, after a write and read back of random bytes there.

    Raises:
        OSError: the directory does not work.
        EngineUnavailableError: what came back is not what was written.
    """
    assert isinstance(engine, (UringEngine, PosixEngine))
    fd = await asyncio.to_thread(engine.create_unnamed_file, directory, 3 * _ALIGNMENT_MAX)
    try:
        alignment = file_alignment(fd)
        await _round_trip(engine, fd, min(max(alignment.unit, mmap.PAGESIZE), _ALIGNMENT_MAX))
    finally:
        await asyncio.to_thread(engine.close_file, fd)
    return alignment
