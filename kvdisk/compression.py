"""The data plane's part of compression: chunks of a pack become payloads, payloads become chunks again in their slots.

What must hold:
- A payload is hashed as it lies on disk, and what does not match is never unpacked.
- It is read into the slot it will be unpacked in (it is the smaller), so reads need no memory of their own: only each
  thread's scratch memory, as large as a chunk. A pack's payloads go out from one buffer; chunks that did not shrink go
  out from their slots.
- What does not unpack to exactly the chunk is not verified. Behind it the slot is whatever was there.
- A read never waits for a pack to be compressed: a request waits for the read, and nobody for the pack. So what is
  read has threads of its own, of which the kernel gives each its turn.
Everything costly runs in threads that give up the GIL; the commands of one loop share them.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from kvdisk import codec, layout
from kvdisk.codec import Packed
from kvdisk.commands import PackChunk, ReadItem
from kvdisk.io.protocol import Memory, Span
from kvdisk.plan import Footprint
from kvdisk.units import UNIT_BYTES, round_up

T = TypeVar("T")
R = TypeVar("R")

_THREADS_MAX = 8
_THREADS_SHARE = 4  # of the cores: the others compute


def _thread_count() -> int:
    return max(2, min(_THREADS_MAX, len(os.sched_getaffinity(0)) // _THREADS_SHARE))


@dataclass(frozen=True, slots=True)
class PackedChunks:
    """The chunks of a pack, compressed where that is worth it.

    payloads: None where the chunk goes as it is. takes: with the stored bytes that follow from that. buffer_bytes: of
    all payloads with their padding.
    """

    chunks: Sequence[PackChunk]
    payloads: Sequence[Packed | None]
    takes: Sequence[Footprint]
    buffer_bytes: int

    @property
    def codecs(self) -> list[int]:
        """One a chunk."""
        return [codec.NONE if payload is None else payload.codec for payload in self.payloads]


class Compression:
    """See the module's docstring. Used on one event loop.

    Args:
        units: each rank's memory, and where in it the arena's first unit lies.
        alignment: of every payload.
        checksums: False turns hashing off, for measurements only.
    """

    def __init__(self, units: Sequence[tuple[Memory, int]], alignment: int, *, checksums: bool) -> None:
        self._units = units
        self._alignment = alignment
        self._checksums = checksums
        self.thread_count = _thread_count()
        self.pack_threads: Executor = ThreadPoolExecutor(self.thread_count, thread_name_prefix="kvdisk-pack")
        self.verify_threads: Executor = ThreadPoolExecutor(self.thread_count, thread_name_prefix="kvdisk-unpack")

    def close(self) -> None:
        """Begin nothing more; what is in progress goes on."""
        self.pack_threads.shutdown(wait=False)
        self.verify_threads.shutdown(wait=False)

    # ---- writing

    async def pack(self, chunks: Sequence[PackChunk], takes: Sequence[Footprint]) -> PackedChunks:
        """Compress `chunks`, which take `takes` as they are."""

        def work(one: tuple[PackChunk, Footprint]) -> Packed | None:
            chunk, take = one
            return codec.compress(self._live_views(chunk), take.stored_bytes - self._alignment)

        payloads = await self._spread(self.pack_threads, work, list(zip(chunks, takes, strict=True)))
        sizes = [0 if payload is None else round_up(len(payload.payload), self._alignment) for payload in payloads]
        takes = [take._replace(stored_bytes=size) if size else take for take, size in zip(takes, sizes, strict=True)]
        return PackedChunks(chunks, payloads, takes, sum(sizes))

    async def lay_out(self, packed: PackedChunks, buffer: Memory) -> tuple[list[Span], list[int]]:
        """Copy the payloads to `buffer`; the spans of the pack behind its header, in order, and a checksum a chunk."""
        places: list[list[Span]] = []
        at = 0
        for chunk, payload, take in zip(packed.chunks, packed.payloads, packed.takes, strict=True):
            if payload is None:
                places.append(self._part_spans(chunk))
            else:
                places.append([Span(buffer, at, take.stored_bytes)])
                at += take.stored_bytes
        assert at == packed.buffer_bytes <= buffer.size

        def work(one: tuple[Packed | None, list[Span]]) -> int:
            payload, spans = one
            views = _views(spans)
            if payload is not None:
                size = len(payload.payload)
                views[0][:size] = payload.payload
                views[0][size:] = bytes(len(views[0]) - size)
            return layout.checksum(*views) if self._checksums else 0

        checksums = await self._spread(self.pack_threads, work, list(zip(packed.payloads, places, strict=True)))
        return [span for spans in places for span in spans], checksums

    # ---- reading

    def stored_spans(self, items: Sequence[ReadItem]) -> list[Span]:
        """Where the stored bytes of `items` are read to: their slots, of which a payload with a codec fills a part."""
        return [span for item in items for span in self._stored_spans(item)]

    async def verify(self, items: Sequence[ReadItem]) -> list[bool]:
        """Compare what was read with its checksums, and unpack what has a codec; one result an item, in order."""
        return await self._spread(self.verify_threads, self._verify, items)

    def _verify(self, item: ReadItem) -> bool:
        stored = _views(self._stored_spans(item))
        if self._checksums and layout.checksum(*stored) != item.checksum:
            return False
        if item.codec == codec.NONE:
            return True
        parts = self._live_views(item)
        if not codec.decompress(item.codec, stored, parts):
            return False
        for span, live in zip(self._part_spans(item), parts, strict=True):
            view = span.memory.view[span.start + len(live) : span.start + span.length]
            view[:] = bytes(len(view))  # as in a slot that was stored into: it may be written again, with its padding
        return True

    # ---- places

    def _stored_spans(self, item: ReadItem) -> list[Span]:
        spans = self._part_spans(item)
        if item.codec == codec.NONE:
            return spans
        left = item.stored_bytes
        taken: list[Span] = []
        for memory, start, length in spans:
            if left:
                taken.append(Span(memory, start, min(length, left)))
                left -= taken[-1].length
        assert left == 0, "recovery and the writer let in only what is smaller than the slot"
        return taken

    def _part_spans(self, chunk: PackChunk | ReadItem) -> list[Span]:
        """The parts of a chunk with their padding, one a rank that has one."""
        first = chunk.unit * UNIT_BYTES
        return [
            Span(memory, start + first, round_up(part, self._alignment))
            for (memory, start), part in zip(self._units, chunk.parts, strict=True)
            if part
        ]

    def _live_views(self, chunk: PackChunk | ReadItem) -> list[memoryview]:
        parts = filter(None, chunk.parts)
        spans = self._part_spans(chunk)
        return [span.memory.view[span.start : span.start + part] for span, part in zip(spans, parts, strict=True)]

    # ---- threads

    async def _spread(self, threads: Executor, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """`work` of every item, in order, over as many threads as there are. Raises what the first of them raised, but
        only when all have ended: what they write to is given to others then."""
        loop = asyncio.get_running_loop()
        size = -(-len(items) // self.thread_count)
        slices = [items[start : start + size] for start in range(0, len(items), size)]
        running: list[asyncio.Future[list[R]]] = []
        try:
            running.extend(loop.run_in_executor(threads, _each, work, part) for part in slices)
        finally:
            await asyncio.gather(*running, return_exceptions=True)
        return [one for future in running for one in future.result()]


def _each(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    return [work(item) for item in items]


def _views(spans: Sequence[Span]) -> list[memoryview]:
    return [memory.view[start : start + length] for memory, start, length in spans]
