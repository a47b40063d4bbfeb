"""One file a chunk with aiofiles: what a plain asyncio program does. Buffered (it has no aligned buffers), synced."""

import asyncio
import os

import aiofiles
from peer import Peer, serve, truncate_all

CONCURRENCY = 32


class AioFiles(Peer):
    """A coroutine a chunk; a store ends with fdatasync, and files leave the page cache before a load."""

    many_files = True

    def open(self) -> None:
        self._pass = 0

    def before(self, op: str) -> None:
        if op == "store":
            self._pass += 1
            os.makedirs(f"{self.directory}/{self._pass}")
            return
        for chunk in range(self.chunk_count):
            fd = os.open(self._path(chunk), os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def _path(self, chunk: int) -> str:
        return f"{self.directory}/{self._pass}/{chunk:08x}.bin"

    def move(self, op: str) -> None:
        asyncio.run(self._move(op))

    async def _move(self, op: str) -> None:
        room = asyncio.Semaphore(CONCURRENCY)

        async def one(chunk: int) -> None:
            async with room:
                await (self._store(chunk) if op == "store" else self._load(chunk))

        await asyncio.gather(*map(one, range(self.chunk_count)))

    async def _store(self, chunk: int) -> None:
        async with aiofiles.open(self._path(chunk), "wb", buffering=0) as file:
            assert await file.write(self.slot(chunk)) == self.bs
            await asyncio.to_thread(os.fdatasync, file.fileno())

    async def _load(self, chunk: int) -> None:
        async with aiofiles.open(self._path(chunk), "rb", buffering=0) as file:
            assert await file.readinto(self.slot(chunk)) == self.bs

    def close(self) -> None:
        truncate_all(self.directory)


serve(AioFiles())
