"""The metadata plane at a size, measured in a process of its own: memory, lookups, stores, evictions, promotions.

    python bench/scale_planes.py index CHUNKS        memory of the index, time of a lookup
    python bench/scale_planes.py store CHUNKS SLOTS  CPU a chunk of storing, storing with eviction, and promoting

Prints one line of JSON. The store is the real one; the disk is not there: every command is answered at once, so no byte
moves and what is left is the metadata plane's own cost. Chunks are 1 MiB, segments 256 MiB, prefixes 96 chunks long.
"""

import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvdisk import layout
from kvdisk.commands import Command, Completion, ReadChunks, WritePack
from kvdisk.index import Extent
from kvdisk.plan import pack_size
from kvdisk.store import Presence, Store
from kvdisk.store_config import StoreConfig
from kvdisk.units import MIB, UNIT_BYTES

CHUNK_BYTES = MIB
SEGMENT_BYTES = 256 * MIB
ALIGNMENT = 4096
PREFIX = 96
BATCH = 16  # chunks of one request that a scheduler's step brings
LOOKUPS = 10_000  # a round
ROUNDS = 7
MEASURED_CHUNKS = 20_000


def key_of(number: int) -> bytes:
    """A chunk's key, as vLLM's: a hash of 32 bytes and a group. Equal numbers give equal keys in new objects."""
    return blake2b(number.to_bytes(8, "little"), digest_size=32).digest() + b"\0\0\0\0"


def parent_of(number: int) -> bytes:
    """The key of the chunk before, b"" at the start of a prefix."""
    return key_of(number - 1) if number % PREFIX else b""


class BlindStore:
    """A store over a disk that is not there. written, live: bytes of the packs, and of the chunks in them."""

    def __init__(self, chunk_count: int, slots: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.chunk_bytes = chunk_bytes
        self.written = self.live = 0
        segments = chunk_count // (SEGMENT_BYTES // chunk_bytes - 2) + 4
        units = slots * -(-chunk_bytes // UNIT_BYTES)
        self.store = Store(StoreConfig(bytes(32), SEGMENT_BYTES, ALIGNMENT, (segments,), units), random.Random(0))
        self.store.recover([], 0)

    def put(self, first: int, keys: Sequence[bytes], parents: Sequence[bytes]) -> None:
        """Store chunks, neighbours in a prefix."""
        store, parts = self.store, (self.chunk_bytes,)
        slots = []
        for position, (key, parent) in enumerate(zip(keys, parents, strict=True), first):
            resident = store.reserve(key, 0, parts, position, parent)
            assert resident is not None, "the arena is full of what was flushed"
            slots.append(resident)
        store.commit(slots)
        self.pump()

    def load(self, keys: Sequence[bytes]) -> None:
        """Promote chunks that are on disk."""
        for key in keys:
            assert self.store.promote(key) is not None
        self.pump()

    def pump(self) -> None:
        """Answer commands until there are no more."""
        while commands := self.store.take_commands(0.0):
            for command in commands:
                self.store.complete(self._answer(command), 0.0)

    def _answer(self, command: Command) -> Completion:
        if isinstance(command, ReadChunks):
            return Completion(command.id, verified=[True] * len(command.items))
        if not isinstance(command, WritePack):
            return Completion(command.id)
        count = len(command.chunks)
        live = [sum(chunk.parts) for chunk in command.chunks]
        self.live += sum(live)
        self.written += pack_size([-(-size // ALIGNMENT) * ALIGNMENT for size in live], ALIGNMENT)
        header = bytes(layout.PACK_HEADER_BYTES + layout.ENTRY_BYTES * count)  # nobody looks into it
        return Completion(command.id, pack_header=header, checksums=[0] * count)


def resident_bytes() -> int:
    """Of this process, by the kernel."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def index_figures(chunk_count: int) -> dict[str, Any]:
    """Memory and lookups of an index that was filled chunk by chunk, as stores fill it."""
    blind = BlindStore(3 * 254, 64)
    index = blind.store.index
    gc.collect()
    before = resident_bytes()
    seconds = longest = 0.0
    for first in range(0, chunk_count, PREFIX):
        numbers = range(first, min(first + PREFIX, chunk_count))
        keys = list(map(key_of, numbers))
        start = time.thread_time()
        parent = b""
        for number, key in zip(numbers, keys, strict=True):
            segment, place = divmod(number, SEGMENT_BYTES // CHUNK_BYTES)
            index.add(key, Extent(segment, place * CHUNK_BYTES, CHUNK_BYTES, number << 20, 0), parent)
            parent = key
        took = time.thread_time() - start
        seconds += took
        longest = max(longest, took)
    del keys, parent
    gc.collect()
    grown = resident_bytes() - before
    return {
        "bytes a chunk": grown / chunk_count,
        "bytes a chunk, key": allocated(key_of(0)),
        "add, us": seconds / chunk_count * 1e6,
        "longest pause, ms": longest * 1e3,
        **lookup_figures(blind.store, chunk_count),
    }


def allocated(key: bytes) -> int:
    """What Python's allocator gives a key: multiples of 16 bytes."""
    return -(-sys.getsizeof(key) // 16) * 16


def lookup_figures(store: Store, chunk_count: int) -> dict[str, list[float]]:
    """us a lookup by round: along prefixes, as requests ask, and of keys anywhere, of which nothing is in a CPU cache.

    The keys are new objects in each round.
    """
    rng = random.Random(1)
    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        starts = [rng.randrange(chunk_count // PREFIX) * PREFIX for _ in range(LOOKUPS // PREFIX)]
        cases = (
            ("hit, us", [key_of(start + i) for start in starts for i in range(PREFIX)], Presence.ON_DISK),
            ("miss, us", [key_of(rng.randrange(chunk_count, 1 << 60)) for _ in range(LOOKUPS)], Presence.ABSENT),
            ("hit anywhere, us", [key_of(rng.randrange(chunk_count)) for _ in range(LOOKUPS)], Presence.ON_DISK),
        )
        presence = store.presence
        for name, keys, expected in cases:
            start = time.thread_time()
            for key in keys:
                presence(key)
            found.setdefault(name, []).append((time.thread_time() - start) / len(keys) * 1e6)
            assert presence(keys[0]) is expected
    return found


def store_figures(chunk_count: int, slots: int) -> dict[str, Any]:
    """CPU us a chunk, by tenths of what is measured."""
    blind = BlindStore(chunk_count, slots)
    numbers = iter(range(1 << 60))
    filling = timed(blind, numbers, chunk_count)
    recycled = []
    while not blind.store.writer.stats.segments_recycled:
        timed(blind, numbers, SEGMENT_BYTES // CHUNK_BYTES)
    recycled = timed(blind, numbers, MEASURED_CHUNKS)
    blind.store.drop_slots()
    return {
        "store, us": filling[-10:],
        "store and evict, us": recycled,
        "promote, us": promote_figures(blind, next(numbers)),
        "written over live": blind.written / blind.live,
        "segments": len(blind.store.table),
    }


def timed(blind: BlindStore, numbers: Iterator[int], count: int) -> list[float]:
    """Store `count` chunks; us a chunk of each tenth. Keys are made beforehand: vLLM has them."""
    tenths = []
    for _ in range(10):
        wanted = max(BATCH, count // 10)
        batches = []
        for _ in range(wanted // BATCH):
            part = [next(numbers) for _ in range(BATCH)]
            batches.append((part[0], list(map(key_of, part)), list(map(parent_of, part))))
        tenths.append(_measure(lambda batches=batches: [blind.put(*batch) for batch in batches]) / wanted)
    return tenths


def promote_figures(blind: BlindStore, end: int) -> list[float]:
    """us a chunk of promotions of runs of neighbours, anywhere among what is on disk."""
    store, rng = blind.store, random.Random(2)
    oldest = max(0, end - len(store.index))
    tenths = []
    for _ in range(10):
        batches: list[list[bytes]] = []
        taken: set[bytes] = set()
        for _ in range(MEASURED_CHUNKS // 10 // BATCH):
            first = rng.randrange(oldest, end - BATCH)
            keys = [key_of(number) for number in range(first, first + BATCH)]
            wanted = [key for key in keys if store.presence(key) is Presence.ON_DISK and key not in taken]
            taken.update(wanted)
            batches.append(wanted)
        count = sum(map(len, batches))
        if count:
            tenths.append(_measure(lambda batches=batches: [blind.load(batch) for batch in batches]) / count)
        store.drop_slots()
    return tenths


def overhead_figures() -> dict[str, float]:
    """Bytes of packs over live bytes of their chunks, by the size of the chunks."""
    found = {}
    for size in (64 << 10, 128 << 10, 512 << 10, 1000_000, MIB, 4 * MIB, 16 * MIB):
        blind = BlindStore(2000, 256, size)
        numbers = iter(range(1 << 60))
        timed(blind, numbers, 1600)
        found[str(size)] = blind.written / blind.live
    return found


def _measure(work: Callable[[], object]) -> float:
    """CPU us of this thread, without the cyclic collector's rounds over everything that a benchmark holds."""
    gc.collect()
    gc.freeze()
    start = time.thread_time()
    work()
    return (time.thread_time() - start) * 1e6


def main() -> None:
    """See the module's docstring."""
    what, *numbers = sys.argv[1], *map(int, sys.argv[2:])
    work = {"index": index_figures, "store": store_figures, "overhead": overhead_figures}[what]
    found = work(*numbers)
    gc.unfreeze()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
