"""Open segment files, a bounded number of them, whatever the number of segments."""

import asyncio
import resource
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvdisk.calls import FileCall, call_in_thread
from kvdisk.commands import SegmentFile
from kvdisk.io.protocol import Engine
from kvdisk.io.transfer import TransferLateError

OPEN_FILES_MAX = 256


@dataclass(slots=True, eq=False)
class _OpenFile:
    fd: int
    users: int = 0


class OpenFiles:
    """Descriptors by segment file, least recently used idle ones closed first. Used on one event loop.

    Args:
        engine: opens and closes them.
        timeout_s: after which an open that hangs is late.
        call: runs an open.
    """

    def __init__(self, engine: Engine, timeout_s: float, call: FileCall = call_in_thread) -> None:
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._limit = max(8, min(OPEN_FILES_MAX, soft_limit // 4))
        self._engine = engine
        self._timeout_s = timeout_s
        self._call = call
        self._files: OrderedDict[SegmentFile, _OpenFile] = OrderedDict()
        self._opening: dict[SegmentFile, asyncio.Future[None]] = {}
        self._preparing = 0  # files being opened by `prepare`

    def add(self, file: SegmentFile, fd: int) -> None:
        """Take over the descriptor of a file just created."""
        self._files[file] = _OpenFile(fd)
        self._close_idle()

    def use(self, file: SegmentFile, path: str) -> "_Use":
        """The descriptor of `file`, opened if need be; not closed meanwhile, nor while a late transfer uses it."""
        return _Use(self, file, path)

    async def prepare(self, files: Sequence[tuple[SegmentFile, str]]) -> None:
        """Open `files`, which are about to be used, with one call for all, as far as that works: what could not be
        opened, or not in time, `use` opens by itself, and tells the error."""
        wanted = [(file, path) for file, path in files if file not in self._files and file not in self._opening]
        self._close_idle(self._preparing + len(wanted))
        wanted = wanted[: max(0, self._limit - len(self._files) - self._preparing)]
        self._preparing += len(wanted)
        try:
            fds = await self._call(
                lambda: self._open_some(path for _, path in wanted), self._timeout_s, "open", discard=self._close_some
            )
        except TransferLateError:
            return
        finally:
            self._preparing -= len(wanted)
        for (file, _), fd in zip(wanted, fds, strict=True):
            if fd is not None and (file in self._files or file in self._opening):  # somebody used it meanwhile
                self._engine.close_file(fd)
            elif fd is not None:
                self._files[file] = _OpenFile(fd)
        self._close_idle()

    def _open_some(self, paths: Iterable[str]) -> list[int | None]:
        fds: list[int | None] = []
        for path in paths:
            try:
                fds.append(self._engine.open_file(path))
            except OSError:
                fds.append(None)
        return fds

    def _close_some(self, fds: Sequence[int | None]) -> None:
        for fd in fds:
            if fd is not None:
                self._engine.close_file(fd)

    async def _take(self, file: SegmentFile, path: str) -> _OpenFile:
        while (entry := self._files.get(file)) is None:
            await self._open(file, path)
        entry.users += 1
        self._files.move_to_end(file)
        self._close_idle()
        return entry

    def close_one(self, file: SegmentFile) -> None:
        """Close the descriptor of a file that is about to be removed."""
        entry = self._files.pop(file, None)
        if entry is not None:
            self._engine.close_file(entry.fd)

    def close(self) -> None:
        """Close all that nobody uses; one that a hung I/O still uses is left to the end of the process."""
        self._limit = 0
        self._close_idle()

    async def _open(self, file: SegmentFile, path: str) -> None:
        """See that `file` is open; several may ask at once, and share what comes of it."""
        opening = self._opening.get(file)
        if opening is not None:
            await asyncio.wait([opening])
            opening.result()
            return
        opening = self._opening[file] = asyncio.get_running_loop().create_future()
        opening.add_done_callback(lambda ended: ended.exception())  # nobody else waiting is fine
        try:
            fd = await self._call(
                lambda: self._engine.open_file(path), self._timeout_s, "open", discard=self._engine.close_file
            )
        except BaseException as error:
            opening.set_exception(error)
            raise
        else:
            self._files[file] = _OpenFile(fd)
            opening.set_result(None)
        finally:
            del self._opening[file]

    def _done(self, entry: _OpenFile) -> None:
        entry.users -= 1
        self._close_idle()

    def _close_idle(self, room: int = 0) -> None:
        """Close what nobody uses, until there are no more than may be open, and room for some."""
        spare = len(self._files) + room - self._limit
        if spare > 0:
            idle = (file for file, entry in self._files.items() if not entry.users)
            for file in list(islice(idle, spare)):
                self._engine.close_file(self._files.pop(file).fd)


class _Use:
    """`async with` a descriptor; a class, for a generator costs several times as much."""

    __slots__ = ("_entry", "_file", "_files", "_path")

    def __init__(self, files: OpenFiles, file: SegmentFile, path: str) -> None:
        self._files = files
        self._file = file
        self._path = path
        self._entry: _OpenFile

    async def __aenter__(self) -> int:
        self._entry = await self._files._take(self._file, self._path)
        return self._entry.fd

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, TransferLateError):
            error.settled.add_done_callback(lambda _: self._files._done(self._entry))
        else:
            self._files._done(self._entry)
