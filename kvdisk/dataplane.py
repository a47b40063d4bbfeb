"""The data plane: carries out commands. It decides nothing and reports each command's own result.

A pack is hashed (in threads that hold no GIL) and written as one transfer; a run of payloads is read as one transfer,
hashed and compared. Bytes that did not arrive or do not match are never called verified. One asyncio task a command,
all on one event loop; how many commands are out at a time is for the metadata plane to bound. What is special about
compressed chunks is in compression.py.
"""

import asyncio
import errno
import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvdisk import layout
from kvdisk.bounce import BouncePool
from kvdisk.calls import FileCall, call_in_thread
from kvdisk.commands import (
    Command,
    Completion,
    OpenSegment,
    PackChunk,
    ReadChunks,
    ReadItem,
    SealSegment,
    SegmentFile,
    WriteEpoch,
    WritePack,
)
from kvdisk.compression import Compression
from kvdisk.directory import segment_cost
from kvdisk.hash_threads import HashThreads
from kvdisk.instance import Instance
from kvdisk.io.protocol import Engine, Memory, Span
from kvdisk.io.transfer import Transfer, TransferLateError
from kvdisk.open_files import OpenFiles
from kvdisk.plan import PACK_BYTES_MAX, Footprint, footprint, pack_size
from kvdisk.units import UNIT_BYTES

logger = logging.getLogger("kvdisk")

Entries = npt.NDArray[np.void]

_HASH_HERE_BYTES = 1 << 20
"""A lone chunk up to this size is hashed on the loop: 70 us for 1 MiB, against 60 us for a thread's way and back, and
milliseconds where the threads that hash packs have the cores."""

_SHORT_BYTES, _SHORT_CHUNKS = 1 << 20, 64
"""The most that a command may have to be hashed beside long ones and not behind them."""

_HASH_BYTES_PER_S = 1e9
_GIL_WAIT_S = 1e-3
"""A hash this much later than at a slow machine's speed has waited for the GIL; see `DataPlane._hash`."""


class Units(NamedTuple):
    """One rank's units of the arena: its memory, and where in it the first unit lies."""

    memory: Memory
    start: int


class DataPlane:
    """Executes commands against the directories of one store.

    Args:
        directories: one a root, claimed.
        units: one a rank that has slots of its own, in rank order: `parts[i]` of a chunk lies in `units[i]`.
        alignment: of every offset and length on disk.
        engine, transfer: started on this loop.
        report: called on the loop with every completion.
        timeout_s: after which a call on a file (open, create, remove, the epoch) is late.
        call: runs such a call.
        checksums: False turns hashing off, for measurements only: nothing would be verified.
        is_alone: whether the process does nothing else, so that nobody keeps the GIL from who gives it up.
    """

    def __init__(
        self,
        directories: Sequence[Instance],
        units: Sequence[Units],
        alignment: int,
        engine: Engine,
        transfer: Transfer,
        report: Callable[[Completion], None],
        *,
        timeout_s: float = 30.0,
        call: FileCall = call_in_thread,
        checksums: bool = True,
        is_alone: bool = False,
    ) -> None:
        self._directories = directories
        self._units = units
        self._alignment = alignment
        self._engine = engine
        self._transfer = transfer
        self._report = report
        self._timeout_s = timeout_s
        self._call = call
        self._checksums = checksums
        self._is_alone = is_alone
        self.bounce = BouncePool()
        self.threads = HashThreads.start()
        places = [(one.memory, one.start) for one in units]
        self.compression = Compression(places, alignment, checksums=checksums)
        self.files = OpenFiles(engine, timeout_s, call)
        self._tasks: set[asyncio.Task[None]] = set()
        self.bytes_read = 0

    def start(self, commands: Sequence[Command]) -> None:
        """Begin `commands`, in order; their completions are reported later."""
        loop = asyncio.get_running_loop()
        for command in commands:
            task = loop.create_task(self._run(command))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self, timeout_s: float) -> bool:
        """Wait for what is in progress and close files and threads; False if something still hangs."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        self.files.close()
        self.threads.close()
        self.compression.close()
        return not self._tasks

    async def _run(self, command: Command) -> None:
        """Exactly one completion, and a second when a late command settled."""
        completion = Completion(command.id)
        try:
            if isinstance(command, WritePack):
                await self._write_pack(command, completion)
            elif isinstance(command, ReadChunks):
                await self._read_chunks(command, completion)
            elif isinstance(command, OpenSegment):
                await self._open_segment(command)
            elif isinstance(command, SealSegment):
                await self._write_block(command.file, command.offset, command.footer)
            else:
                await self._write_epoch(command)
        except TransferLateError as late:
            logger.warning("%s of %s is late; its buffers stay reserved", type(command).__name__, _place(command))
            self._report(Completion(command.id, error=errno.ETIMEDOUT, late=True))
            await late.settled
            completion = Completion(command.id, settled=True)
        except OSError as error:
            logger.warning("%s of %s failed: %s", type(command).__name__, _place(command), error)
            completion.error = error.errno or errno.EIO
        except Exception:
            logger.exception("%s of %s failed", type(command).__name__, _place(command))
            completion.error = errno.EIO
        self._report(completion)

    # ---- packs

    async def _write_pack(self, command: WritePack, completion: Completion) -> None:
        takes = [footprint(chunk.parts, self._alignment) for chunk in command.chunks]
        pack_bytes = pack_size([take.stored_bytes for take in takes], self._alignment)
        header_bytes = layout.pack_header_bytes(len(takes), self._alignment)
        if command.compress:
            await self._write_compressed(command, takes, completion)
            return
        checksums = await self._checksums_of(command.chunks, self.threads.packs)
        entries = pack_entries(command.chunks, takes, checksums, header_bytes)
        await self._send_pack(command, pack_bytes, entries, self._spans(command.chunks), completion)
        completion.checksums = checksums

    async def _write_compressed(self, command: WritePack, takes: Sequence[Footprint], completion: Completion) -> None:
        """A pack whose chunks are compressed first. How large it became is said at once, for the next begins there."""
        packed = await self.compression.pack(command.chunks, takes)
        pack_bytes = pack_size([take.stored_bytes for take in packed.takes], self._alignment)
        header_bytes = layout.pack_header_bytes(len(takes), self._alignment)
        self._report(Completion(command.id, packed_bytes=pack_bytes))
        wanted = max(packed.buffer_bytes, PACK_BYTES_MAX) if packed.buffer_bytes else 1  # one size: the pool keeps few
        with self.bounce.take(wanted) as buffer:
            spans, completion.checksums = await self.compression.lay_out(packed, buffer)
            entries = pack_entries(command.chunks, packed.takes, completion.checksums, header_bytes)
            entries["codec"] = packed.codecs
            await self._send_pack(command, pack_bytes, entries, spans, completion)

    async def _send_pack(
        self, command: WritePack, pack_bytes: int, entries: Entries, payload: list[Span], completion: Completion
    ) -> None:
        header_bytes = layout.pack_header_bytes(len(entries), self._alignment)
        pack = layout.Pack(command.offset, header_bytes, pack_bytes, command.sequence, entries)
        raw = layout.encode_pack(pack, command.header)
        with self.bounce.take(header_bytes) as memory:
            memory.view[:header_bytes] = raw.ljust(header_bytes, b"\0")
            spans = [Span(memory, 0, header_bytes), *payload]
            async with self.files.use(command.file, self._path(command.file)) as fd:
                await self._transfer.write(fd, command.offset, spans)
        completion.pack_header = raw

    async def _read_chunks(self, command: ReadChunks, completion: Completion) -> None:
        try:
            completion.verified = await self._read_and_verify(command.file, command.items)
        except TransferLateError:
            raise
        except OSError:
            if len(command.items) == 1:
                raise
            # One bad sector must not cost its neighbours: each chunk on its own.
            await self._read_each(command, completion)

    async def _read_each(self, command: ReadChunks, completion: Completion) -> None:
        """Read the chunks of `command` one by one, at the same time; each has its own result."""
        reads = (self._read_and_verify(command.file, (item,)) for item in command.items)
        results = await asyncio.gather(*reads, return_exceptions=True)
        late = [result for result in results if isinstance(result, TransferLateError)]
        if late:
            raise TransferLateError("reads are late", asyncio.ensure_future(_all_settled(late)))
        for result in results:
            if isinstance(result, OSError):
                logger.warning("read of %s failed: %s", self._path(command.file), result)
            elif isinstance(result, BaseException):
                raise result
            completion.verified.append(not isinstance(result, OSError) and result[0])
            completion.errors.append((result.errno or errno.EIO) if isinstance(result, OSError) else 0)

    async def _read_and_verify(self, file: SegmentFile, items: tuple[ReadItem, ...]) -> list[bool]:
        has_codecs = any(item.codec for item in items)
        spans = self.compression.stored_spans(items) if has_codecs else self._spans(items)
        async with self.files.use(file, self._path(file)) as fd:
            await self._transfer.read(fd, items[0].offset, spans)
        self.bytes_read += sum([length for _, _, length in spans])
        if has_codecs:
            return await self.compression.verify(items)
        if not self._checksums:
            return [True] * len(items)
        found = await self._checksums_of(items, self.threads.reads)
        return [check == item.checksum for check, item in zip(found, items, strict=True)]

    def _spans(self, chunks: Sequence[PackChunk | ReadItem]) -> list[Span]:
        """Where the parts of `chunks` lie, padded to the alignment; neighbours are one span."""
        spans: list[Span] = []
        alignment = self._alignment
        memory, start, end = None, 0, 0
        for chunk in chunks:
            first = chunk.unit * UNIT_BYTES
            for units, part in zip(self._units, chunk.parts, strict=True):
                if not part:
                    continue
                begin = units.start + first
                if begin != end or units.memory is not memory:
                    if memory is not None:
                        spans.append(Span(memory, start, end - start))
                    memory, start = units.memory, begin
                end = begin - (-part // alignment) * alignment  # rounded up; no call, for this runs for every chunk
        if memory is not None:
            spans.append(Span(memory, start, end - start))
        return spans

    async def _checksums_of(self, chunks: Sequence[PackChunk | ReadItem], threads: Executor) -> list[int]:
        """Of the padded parts of each chunk, computed in a thread unless that costs more; zeros without checksums."""
        if not self._checksums:
            return [0] * len(chunks)
        if len(chunks) == 1 and sum(chunks[0].parts) <= _HASH_HERE_BYTES:
            return [layout.checksum_keeping_gil(*self._views(chunks[0]))]
        if len(chunks) <= _SHORT_CHUNKS and sum([sum(chunk.parts) for chunk in chunks]) <= _SHORT_BYTES:
            threads = self.threads.short
        return await asyncio.get_running_loop().run_in_executor(threads, self._hash, chunks)

    def _hash(self, chunks: Sequence[PackChunk | ReadItem]) -> list[int]:
        """In a thread. Gives up the GIL for each chunk, unless others hold it for long when it wants it back.

        Beside a thread that is busy in Python that takes a switch interval, 5 ms, a chunk: 128 KiB chunks would be
        hashed at 0.1 GB/s. What is left of the command is then hashed in one go, at memory's speed; the other thread
        gets its turn after a switch interval all the same.
        """
        found = []
        late = False
        for chunk in chunks:
            views = self._views(chunk)
            if late:
                found.append(layout.checksum_keeping_gil(*views))
                continue
            if self._is_alone:  # or the loop, which does not preempt this thread, waits 3 ms for a core and more
                os.sched_yield()
            start = time.perf_counter()
            found.append(layout.checksum(*views))
            late = time.perf_counter() - start > _GIL_WAIT_S + sum(map(len, views)) / _HASH_BYTES_PER_S
        return found

    def _views(self, chunk: PackChunk | ReadItem) -> list[memoryview]:
        """The padded parts of a chunk."""
        views = []
        for (memory, base), part in zip(self._units, chunk.parts, strict=True):
            if part:
                start = base + chunk.unit * UNIT_BYTES
                views.append(memory.view[start : start - (-part // self._alignment) * self._alignment])
        return views

    # ---- segments

    async def _open_segment(self, command: OpenSegment) -> None:
        file, size = command.file, command.header.segment_bytes
        if not command.recycle:
            await self._create(file, size)
        try:
            if command.recycle:
                await self._call(lambda: self._check_size(file, size), self._timeout_s, "open")
            await self._write_block(file, 0, layout.encode_segment_header(command.header))
        except TransferLateError:
            raise  # the kernel may still write to it
        except OSError:
            # What was in it is given up already, and what is in it now nobody knows.
            self.files.close_one(file)
            await self._call(lambda: self._engine.remove_file(self._path(file)), self._timeout_s, "remove")
            raise

    async def _create(self, file: SegmentFile, size: int) -> None:
        directory = self._directories[file.root]
        fd = await self._call(
            lambda: directory.create_segment(
                file.number, segment_cost(size), lambda path: self._engine.create_file(path, size)
            ),
            self._timeout_s,
            "create",
            discard=self._engine.close_file,
        )
        self.files.add(file, fd)

    def _check_size(self, file: SegmentFile, size: int) -> None:
        """A recycled file must still be the whole file it was: somebody may have cut or replaced it."""
        fd = self._engine.open_file(self._path(file))
        try:
            found, _ = self._engine.file_bytes(fd)
        finally:
            self._engine.close_file(fd)
        if found != size:
            raise OSError(errno.EIO, f"{self._path(file)} has {found} bytes instead of {size}")

    async def _write_block(self, file: SegmentFile, offset: int, data: bytes) -> None:
        with self.bounce.take(len(data)) as memory:
            memory.view[: len(data)] = data
            async with self.files.use(file, self._path(file)) as fd:
                await self._transfer.write(fd, offset, [Span(memory, 0, len(data))])

    async def _write_epoch(self, command: WriteEpoch) -> None:
        """On every root, whatever happens on the others: the highest that is found counts."""
        writes = (
            self._call(functools.partial(directory.write_epoch, command.epoch), self._timeout_s, "epoch")
            for directory in self._directories
        )
        failed = [r for r in await asyncio.gather(*writes, return_exceptions=True) if isinstance(r, BaseException)]
        late = [error for error in failed if isinstance(error, TransferLateError)]
        if late:
            raise TransferLateError("the epoch is late", asyncio.ensure_future(_all_settled(late)))
        if failed:
            raise failed[0]

    def _path(self, file: SegmentFile) -> str:
        return self._directories[file.root].segment_path(file.number)


def pack_entries(
    chunks: Sequence[PackChunk], takes: Sequence[Footprint], checksums: Sequence[int], header_bytes: int
) -> Entries:
    """The ENTRY_DTYPE records of a pack's chunks, whose payloads follow each other from `header_bytes` on; writable."""
    raw = bytearray(layout.ENTRY_BYTES * len(chunks))
    put, codec, cipher, entry_bytes = layout.put_entry, layout.CODEC_NONE, layout.CIPHER_NONE, layout.ENTRY_BYTES
    place, offset = 0, header_bytes
    for (_, _, key, parent, group, position), (live, stored, _), check in zip(chunks, takes, checksums, strict=True):
        sizes = len(key), len(parent)
        put(raw, place, key, parent, *sizes, codec, cipher, group, position, offset, stored, live, check, b"", b"")
        place += entry_bytes
        offset += stored
    return np.frombuffer(raw, layout.ENTRY_DTYPE)


async def _all_settled(late: Sequence[TransferLateError]) -> None:
    await asyncio.gather(*(error.settled for error in late))


def _place(command: Command) -> str:
    return f"segment {command.file.number}" if not isinstance(command, WriteEpoch) else f"epoch {command.epoch}"
