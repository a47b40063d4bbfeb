"""Files that are opened many at a time, and those that cannot be."""

import asyncio
import errno
import itertools
import threading
from collections.abc import Callable, Sequence

import pytest

from kvdisk import open_files
from kvdisk.commands import SegmentFile
from kvdisk.io.transfer import TransferLateError
from kvdisk.open_files import OpenFiles


class Engine:
    """Opens numbers; `hung` hangs until `answer`, `bad` cannot be opened."""

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.opened: list[str] = []
        self.open: set[int] = set()
        self.threads: set[int] = set()
        self._numbers = itertools.count()

    def open_file(self, path: str) -> int:
        self.threads.add(threading.get_ident())
        self.opened.append(path)
        if path == "bad":
            raise OSError(errno.EIO, "bad", path)
        if path == "hung":
            self.answer.wait(10)
        fd = next(self._numbers)
        self.open.add(fd)
        return fd

    def close_file(self, fd: int) -> None:
        self.open.remove(fd)


def named(*paths: str) -> list[tuple[SegmentFile, str]]:
    return [(SegmentFile(0, number), path) for number, path in enumerate(paths)]


def run(work: Callable[[OpenFiles, Engine], object], timeout_s: float = 10.0) -> Engine:
    engine = Engine()

    async def main() -> None:
        files = OpenFiles(engine, timeout_s)  # type: ignore[arg-type]
        await work(files, engine)  # type: ignore[misc]
        files.close()

    asyncio.run(main())
    return engine


def test_what_was_prepared_is_opened_once_and_by_one_thread() -> None:
    wanted = named("a", "b", "c")

    async def work(files: OpenFiles, engine: Engine) -> None:
        await files.prepare(wanted)
        await files.prepare(wanted)
        for file, path in wanted:
            async with files.use(file, path) as fd:
                assert fd in engine.open
        assert engine.opened == ["a", "b", "c"]
        assert len(engine.threads) == 1

    assert not run(work).open


def test_what_cannot_be_prepared_fails_where_it_is_used_and_keeps_nothing_else() -> None:
    wanted = named("a", "bad", "c")

    async def work(files: OpenFiles, engine: Engine) -> None:
        await files.prepare(wanted)
        async with files.use(*wanted[2]):
            pass
        with pytest.raises(OSError, match="bad"):
            async with files.use(*wanted[1]):
                pass
        assert engine.opened == ["a", "bad", "c", "bad"]

    assert not run(work).open


def test_an_open_that_hangs_takes_no_other_with_it_and_leaves_no_descriptor() -> None:
    wanted = named("a", "hung", "c")

    async def use(files: OpenFiles, one: tuple[SegmentFile, str]) -> int:
        async with files.use(*one) as fd:
            return fd

    async def work(files: OpenFiles, engine: Engine) -> None:
        await files.prepare(wanted)
        for one in (wanted[0], wanted[2]):
            assert await use(files, one) in engine.open
        with pytest.raises(TransferLateError) as late:
            await use(files, wanted[1])
        engine.answer.set()
        await late.value.settled
        while len(engine.open) > 2:  # what the first thread opened comes late, too
            await asyncio.sleep(0)

    assert not run(work, timeout_s=0.2).open


def test_no_more_files_stay_open_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "OPEN_FILES_MAX", 8)
    wanted: Sequence[tuple[SegmentFile, str]] = named(*map(str, range(20)))

    async def work(files: OpenFiles, engine: Engine) -> None:
        await files.prepare(wanted)
        assert len(engine.open) == 8
        for one in wanted:
            async with files.use(*one) as fd:
                assert fd in engine.open
                assert len(engine.open) <= 8

    assert not run(work).open
