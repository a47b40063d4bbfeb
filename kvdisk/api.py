"""kvdisk without vLLM: a small asyncio store of bytes by key.

    async with kvdisk.open("/mnt/nvme/kv", capacity="10GiB") as store:
        await store.put(b"key", data)        # True: a hit from now on. False: refused, nothing was stored
        await store.get(b"key")              # the bytes, or None: never stored, evicted, or damaged
        store.contains(b"key")

It is a cache: what was put may be gone, what is returned is exactly what was put last. Bytes reach the disk soon after
`put`, at the latest by `flush` or the end of the `async with`. Those that did not, since the process was killed or the
disk refused them (`flush` returns False, `close` logs a warning), are gone at the next start: an overwritten key then
has an older value, or none.
"""

import asyncio
import logging
import time
from collections import deque
from types import TracebackType
from typing import Any

from kvdisk.dataplane import Units
from kvdisk.errors import StoreClosedError
from kvdisk.io.protocol import Memory
from kvdisk.layout import CODEC_NONE, KEY_BYTES_MAX, Buffer, checksum
from kvdisk.memory import private_memory
from kvdisk.options import Options, parse_options, reject_unknown
from kvdisk.resident import Resident
from kvdisk.service import Service, Tenancy
from kvdisk.store import Presence
from kvdisk.units import MIB, UNIT_BYTES, parse_size, round_up

logger = logging.getLogger("kvdisk")

ARENA_BYTES_DEFAULT = 256 * MIB

Waiters = deque["asyncio.Future[None]"]

_NAMES = {"root": "root_dir", "capacity": "disk_bytes_to_use", "arena_bytes": "cpu_bytes_to_use"}
_OPTIONS = [
    "capacity", "arena_bytes", "segment_bytes", "engine", "io_timeout_s", "namespace", "allow_shared_root",
    "compression",
]  # fmt: skip


def open(root: Any, **options: Any) -> "AsyncStore":
    """A store in the directory `root` (or a list of directories, one a disk), which must exist.

    Args:
        root: empty, or used by kvdisk before; no other live process may use the same namespace in it.
        **options: capacity (required): most bytes on disk, "10GiB" or a number. arena_bytes: host memory, 256 MiB
            unless given; chunks may be a quarter of it. segment_bytes, engine ("auto", "io_uring", "posix"),
            io_timeout_s, namespace, allow_shared_root, compression ("none", "zstd"): see docs/configuration.md.

    Returns:
        To be entered by `async with`; nothing is touched before.

    Raises:
        ValueError: an option that is unknown, missing or impossible.
    """
    reject_unknown(options, _OPTIONS)
    if options.get("capacity") is None:
        raise ValueError("capacity is required: the most bytes kvdisk may take on disk, such as '10GiB'")
    values = {"root": root, "arena_bytes": ARENA_BYTES_DEFAULT, **options}
    for name in ("capacity", "arena_bytes"):
        parse_size(values[name], name)
    return AsyncStore(parse_options({_NAMES.get(name, name): value for name, value in values.items()}))


class AsyncStore:
    """See the module's docstring. Used on the event loop that entered it."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._service: Service | None = None
        self._memory: Memory
        self._loop: asyncio.AbstractEventLoop
        self._hits = self._misses = self._refused = 0
        self._not_flushed = 0  # chunks that the last `flush` knew not to be on disk
        self._key_waiters: dict[bytes, Waiters] = {}
        self._slot_waiters: Waiters = deque()  # one is woken at a time: if it gets a slot, it wakes the next
        self._flush_waiters: Waiters = deque()

    async def __aenter__(self) -> "AsyncStore":
        self._loop = asyncio.get_running_loop()
        await self._loop.run_in_executor(None, self._start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _start(self) -> None:
        options = self._options
        self._memory = private_memory(options.cpu_bytes_to_use)
        self._service = Service(
            options,
            Tenancy({"api": "library", "namespace": options.namespace, "roots": len(options.root_dir)}, ("main",)),
            [Units(self._memory, 0)],
            unit_count=options.cpu_bytes_to_use // UNIT_BYTES,
            on_ready=self._on_ready,
        )
        self._service.store.settled = []

    # ---- what users call

    @property
    def chunk_bytes_max(self) -> int:
        """Largest payload `put` takes."""
        return self._running.store.config.chunk_bytes_max

    async def put(self, key: bytes, data: Buffer) -> bool:
        """Store `data` under `key`, in place of what was there.

        Args:
            key: 1 to 64 bytes.
            data: contiguous bytes-like, 1 to `chunk_bytes_max` bytes; copied before this returns.

        Returns:
            True: a hit at once. False: refused (no memory became free in time); the key has no bytes now.

        Raises:
            ValueError: key or data of an impossible size.
            StoreClosedError: after `close`.
        """
        _check_key(key)
        view = memoryview(data).cast("B")
        if not 1 <= len(view) <= self.chunk_bytes_max:
            raise ValueError(f"data of {len(view)} bytes; 1 to {self.chunk_bytes_max} can be stored in this store")
        if self._has_already(key, view):
            return True
        deadline = time.monotonic() + self._options.io_timeout_s
        queued = False
        while not self._try_put(key, view):
            if self._running.store.resident(key) is not None:
                came = await self._wait(self._key_waiters.setdefault(key, deque()), deadline)
            else:
                came, queued = await self._wait_for_slot(deadline, queued), True
            if not came:
                self._refused += 1
                return False
        self._offer_slot()
        self._pump()
        return True

    async def get(self, key: bytes) -> bytes | None:
        """The bytes last put under `key`, verified, or None.

        Raises:
            ValueError: a key of an impossible size.
            StoreClosedError: after `close`.
        """
        _check_key(key)
        store = self._running.store
        deadline = time.monotonic() + 2 * self._options.io_timeout_s
        queued = False
        while (presence := store.presence(key)) is not Presence.ABSENT:
            resident = store.resident(key)
            if presence is Presence.READY:
                assert resident is not None
                self._hits += 1
                store.touch(key)
                return bytes(self._view(resident)[: resident.live_bytes])
            if presence is Presence.ON_DISK:
                resident = store.promote(key)
                self._pump()
            if resident is None:
                came, queued = await self._wait_for_slot(deadline, queued), True
            else:
                self._offer_slot()
                came = await self._wait_for_read(resident, deadline)
            if not came:
                break
            store = self._running.store
        self._misses += 1
        return None

    def contains(self, key: bytes) -> bool:
        """Whether `key` was put and is still known; no system call. Damage shows only when it is read."""
        _check_key(key)
        return self._running.store.presence(key) is not Presence.ABSENT

    async def flush(self) -> bool:
        """Wait until all that was put before is on disk; False if the disk did not take all since the last `flush`."""
        service = self._running
        before = self._not_flushed
        self._pump()
        unflushed = service.store.writer.unflushed()
        while unflushed:
            if unflushed[-1].awaits_flush:
                await self._wait(self._flush_waiters, time.monotonic() + 1.0)
                service = self._running
                self._pump()
            else:
                unflushed.pop()
        self._not_flushed = service.store.writer.stats.chunks_not_flushed
        return self._not_flushed == before

    def stats(self) -> dict[str, int | str]:
        """Counters since the store was opened; their meaning is in docs/configuration.md."""
        mine = {"hits": self._hits, "misses": self._misses, "puts_refused": self._refused}
        return {**self._running.stats(), **mine}

    async def close(self) -> None:
        """Flush and give everything back. Idempotent; what still waits ends with StoreClosedError.

        Logs a warning if the disk did not take all that was put since the last `flush`; that is not an error.
        """
        service, self._service = self._service, None
        if service is not None:
            for waiters in (*self._key_waiters.values(), self._slot_waiters, self._flush_waiters):
                _wake(waiters)
            await self._loop.run_in_executor(None, service.close)
            lost = service.store.writer.stats.chunks_not_flushed - self._not_flushed
            if lost:
                logger.warning("the disk did not take %d of the values put since the last flush; they are gone", lost)

    # ---- inside

    @property
    def _running(self) -> Service:
        if self._service is None:
            raise StoreClosedError("the store is closed, or was not entered by `async with`")
        return self._service

    def _has_already(self, key: bytes, view: memoryview) -> bool:
        """Whether exactly these bytes are stored: then there is nothing to write."""
        store = self._running.store
        resident = store.resident(key)
        if resident is not None:
            return resident.is_hit and resident.live_bytes == len(view) and self._view(resident)[: len(view)] == view
        extent = store.index.get(key)
        if extent is None or extent.live_bytes != len(view) or extent.codec != CODEC_NONE:
            return False  # of a compressed chunk the checksum says nothing about these bytes
        padding = bytes(round_up(len(view), store.config.alignment) - len(view))
        return checksum(view, padding) == extent.checksum

    def _try_put(self, key: bytes, view: memoryview) -> bool:
        store = self._running.store
        resident = store.reserve(key, 0, (len(view),), 0, b"") if store.replace(key) else None
        if resident is None:
            return False
        self._fill(resident, view)
        store.commit([resident])
        return True

    def _fill(self, resident: Resident, view: memoryview) -> None:
        slot = self._view(resident)
        slot[: len(view)] = view
        slot[len(view) :] = bytes(len(slot) - len(view))

    def _view(self, resident: Resident) -> memoryview:
        start = resident.run.start * UNIT_BYTES
        size = round_up(resident.live_bytes, self._running.store.config.alignment)
        return self._memory.view[start : start + size]

    async def _wait_for_slot(self, deadline: float, queued: bool) -> bool:
        """Wait until it is this caller's turn to try again; False at the deadline. Who was `queued` keeps his place."""
        came = False
        try:
            came = await self._wait(self._slot_waiters, deadline, first=queued)
        finally:
            if not came:
                self._offer_slot()
        return came

    async def _wait_for_read(self, resident: Resident, deadline: float) -> bool:
        """Wait until a chunk was read, and keep its slot until the caller goes on; False at the deadline."""
        store = self._running.store
        store.pin(resident)
        try:
            return await self._wait(self._key_waiters.setdefault(resident.key, deque()), deadline)
        finally:
            store.unpin(resident)
            self._offer_slot()

    def _offer_slot(self) -> None:
        """A slot may have become free: the first who waits for one may try."""
        while self._slot_waiters:
            future = self._slot_waiters.popleft()
            if not future.done():
                future.set_result(None)
                return

    async def _wait(self, waiters: Waiters, deadline: float, first: bool = False) -> bool:
        """Wait for a change; False at the deadline."""
        future = self._loop.create_future()
        if first:
            waiters.appendleft(future)
        else:
            waiters.append(future)
        try:
            await asyncio.wait_for(future, max(0.0, deadline - time.monotonic()))
        except asyncio.TimeoutError:
            return False
        return True

    def _on_ready(self) -> None:
        """On the data plane's thread."""
        try:
            self._loop.call_soon_threadsafe(self._pump)
        except RuntimeError:  # the loop was closed before the store
            pass

    def _pump(self) -> None:
        service = self._service
        if service is None:
            return
        came = service.pump()
        settled, service.store.settled = service.store.settled, []
        for key in settled or ():
            if key in self._key_waiters:
                _wake(self._key_waiters.pop(key))
        if came:
            _wake(self._flush_waiters)
            self._offer_slot()


def _wake(waiters: Waiters) -> None:
    for future in waiters:
        if not future.done():
            future.set_result(None)
    waiters.clear()


def _check_key(key: object) -> None:
    if not isinstance(key, bytes) or not 1 <= len(key) <= KEY_BYTES_MAX:
        raise ValueError(f"key {key!r} is not 1 to {KEY_BYTES_MAX} bytes")
