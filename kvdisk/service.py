"""A store at work: the metadata plane on its owner's thread, the data plane on a thread of its own.

The owner calls `pump` wherever it likes (it never blocks): completions go into the store, commands go to the data
plane. Both cross by queues, so neither waits for the other. The thread is a daemon: an I/O that hangs for ever must not
keep the process from ending. After `close`, nothing of the store may be used; memory that a hung I/O might still write
to is never freed.
"""

import asyncio
import hashlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError  # not the built-in one before Python 3.11
from dataclasses import dataclass
from random import SystemRandom
from typing import Any, TypeVar

from kvdisk import layout
from kvdisk.commands import Completion, ScannedSegment, SegmentFile
from kvdisk.dataplane import DataPlane, Units
from kvdisk.directory import OVERHEAD_BYTES, Claim, Directory, check_root, segment_cost
from kvdisk.errors import StoreClosedError
from kvdisk.io.probe import choose_engine, prove_directory
from kvdisk.io.protocol import Engine, EngineInfo
from kvdisk.io.transfer import Transfer
from kvdisk.options import Options
from kvdisk.scan import Scanner
from kvdisk.store import SEGMENTS_MIN, Store, StoreConfig
from kvdisk.units import format_size

logger = logging.getLogger("kvdisk")

T = TypeVar("T")

CLOSE_S_MAX = 8.0
"""Bound on `close`; a container's grace period is 30 s by default (Kubernetes terminationGracePeriodSeconds)."""


@dataclass(frozen=True)
class Tenancy:
    """Whose data it is.

    identity: everything that decides the bytes, JSON scalars and lists of them; its hash names the namespace.
    instances: names to try for this writer, see Claim. share: this writer's part of the cap, as 1/share.
    """

    identity: Mapping[str, Any]
    instances: tuple[str, ...]
    share: int = 1


class Service:
    """A running store. `store` belongs to the thread that opened the service; see the module's docstring.

    Args:
        options: checked already.
        tenancy: whose data.
        units: one a rank that has slots.
        unit_count: units of the arena (the smallest rank's).
        group_parts: see StoreConfig.
        on_ready: called on the data plane's thread when completions wait; must not block.
        checksums: see DataPlane.

    Raises:
        ValueError: a root that cannot be used; nothing was changed.
        DirectoryInUseError: somebody else holds the root or the instance.
        EngineUnavailableError: the engine asked for by name does not work here.
    """

    def __init__(
        self,
        options: Options,
        tenancy: Tenancy,
        units: Sequence[Units],
        *,
        unit_count: int,
        group_parts: dict[int, tuple[int, ...]] | None = None,
        on_ready: Callable[[], None] | None = None,
        checksums: bool = True,
    ) -> None:
        for path in options.root_dir:
            check_root(path, options.allow_shared_root)
        self._options = options
        self._units = units
        self._checksums = checksums
        self._on_ready = on_ready
        self._completions: deque[Completion] = deque()
        self._arrived = threading.Event()
        self._pid = os.getpid()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._directories: list[Directory] = []
        self._engine: Engine | None = None
        self._plane: DataPlane | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvdisk-data-plane", daemon=True)
        self._thread.start()
        try:
            self.store = self._open(tenancy, unit_count, group_parts)
        except BaseException:
            self._shut()
            raise

    # ---- opening

    def _open(self, tenancy: Tenancy, unit_count: int, group_parts: dict[int, tuple[int, ...]] | None) -> Store:
        alignment = self._call(self._start_engine())
        options = self._options
        identity = {
            **tenancy.identity,
            "format_version": layout.VERSION,
            "alignment": alignment,
        }
        fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).digest()
        cap = options.disk_bytes_to_use // len(options.root_dir)
        cost = segment_cost(options.segment_bytes)
        for path in options.root_dir:
            claim = Claim(
                path=path,
                namespace=f"ns-{fingerprint.hex()[:32]}",
                identity=identity,
                instances=tenancy.instances,
                cap_bytes=cap,
                share_bytes=cap // tenancy.share,
                needed_bytes=OVERHEAD_BYTES + SEGMENTS_MIN * cost,
                allow_shared_root=options.allow_shared_root,
            )
            self._directories.append(Directory(claim))
        segments_max = tuple((d.granted_bytes - OVERHEAD_BYTES) // cost for d in self._directories)
        config = StoreConfig(
            fingerprint,
            options.segment_bytes,
            alignment,
            segments_max,
            unit_count,
            group_parts,
            compress=options.compression != "none",
        )
        store = Store(config, SystemRandom())
        scans, epoch = self._call(self._scan(config))
        # A killed owner's last writes may land after its locks are gone: its open segments are not written to again.
        store.recover(scans, epoch, resume=all(directory.closed_cleanly for directory in self._directories))
        # Above that of every pack there may be, also in files that could not be read this time.
        store.writer.next_pack_sequence = max(store.writer.next_pack_sequence, time.time_ns())
        self._log_start(store)
        return store

    async def _start_engine(self) -> int:
        options = self._options
        memories = [unit.memory for unit in self._units]
        first, *others = options.root_dir
        self._engine, found = await choose_engine(first, options.engine, memories)
        alignments = [found, *[await prove_directory(self._engine, path) for path in others]]
        alignment = max(layout.ALIGNMENT_MIN, *(a.unit for a in alignments))
        self._transfer = Transfer(self._engine, alignment=alignment, timeout_s=options.io_timeout_s)
        return alignment

    async def _scan(self, config: StoreConfig) -> tuple[list[ScannedSegment], int]:
        """What the directories hold, at most as many segments as each may have; and the epoch."""
        assert self._engine is not None
        self._plane = plane = DataPlane(
            self._directories,
            self._units,
            config.alignment,
            self._engine,
            self._transfer,
            self._report,
            timeout_s=self._options.io_timeout_s,
            checksums=self._checksums,
        )
        scanner = Scanner(
            plane.files,
            self._transfer,
            plane.bounce,
            fingerprint=config.fingerprint,
            segment_bytes=config.segment_bytes,
            alignment=config.alignment,
        )
        records = [directory.read_epoch() for directory in self._directories]
        known = [record for record in records if record is not None]
        kept: list[ScannedSegment] = []
        numbers: set[int] = set()
        for root, directory in enumerate(self._directories):
            files = [SegmentFile(root, number) for number in directory.make_unique(numbers)]
            numbers.update(file.number for file in files)
            scans = await scanner.scan([(file, directory.segment_path(file.number)) for file in files])
            scans.sort(key=lambda scan: scan.header.sequence if scan.header else 0, reverse=True)
            misfits = [  # segment_bytes was changed: there is nothing in them, and they cannot be recycled
                scan
                for scan in scans
                if scan.header is None and directory.segment_size(scan.file.number) != config.segment_bytes
            ]
            scans = [scan for scan in scans if scan not in misfits]
            for scan in misfits + scans[config.segments_max[root] :]:  # the cap was lowered: the oldest go
                plane.files.close_one(scan.file)
                self._engine.remove_file(directory.segment_path(scan.file.number))
            kept += scans[: config.segments_max[root]]
            directory.trim_to_cap()
        # A segment of a later epoch proves a reset whose record did not reach the disk; what is older is stale.
        epochs = [record.epoch for record in known]
        epoch = max([0, *epochs, *(scan.header.epoch for scan in kept if scan.header)])
        if len(known) < len(records):  # a damaged record: what is on disk may be stale, so none of it counts
            logger.warning("epoch of %s is damaged; its chunks are not used", self._directories[0].namespace_path)
            epoch += 1
        elif any(record.after_reset for record in known) or epoch > max(epochs):
            # Since that reset the server may have had other weights than the model's files, which name the namespace.
            logger.info("kvdisk: the cache was reset while the server ran; what it stored since is not used")
            epoch += 1
        for directory in self._directories:
            directory.write_epoch(epoch, after_reset=False)
        return kept, epoch

    def _log_start(self, store: Store) -> None:
        info = self.engine_info
        logger.info(
            "kvdisk: %s, engine %s (%s%s)%s, alignment %d, arena %s (%s), %d segments of %s at most, %d chunks found",
            ", ".join(directory.instance_path for directory in self._directories),
            info.name,
            "direct" if info.direct else "buffered",
            ", registered" if info.registered else "",
            f": {info.detail}" if info.detail else "",
            store.config.alignment,
            format_size(sum(unit.memory.size for unit in self._units)),
            self._units[0].memory.pages if self._units else "none",
            sum(store.config.segments_max),
            format_size(store.config.segment_bytes),
            len(store.index),
        )

    # ---- at work

    @property
    def engine(self) -> Engine:
        """The engine, which stays this store's: for measurements that want it buffered."""
        assert self._engine is not None
        return self._engine

    @property
    def engine_info(self) -> EngineInfo:
        """What the engine is."""
        assert self._engine is not None
        return self._engine.info

    @property
    def instance_paths(self) -> list[str]:
        """Where this store's segments are, one directory a root."""
        return [directory.instance_path for directory in self._directories]

    def pump(self, now: float | None = None) -> bool:
        """Let both planes hear of each other; whether anything new came from the data plane. Never blocks."""
        self._check_open()
        now = time.monotonic() if now is None else now
        came = False
        while self._completions:
            self.store.complete(self._completions.popleft(), now)
            came = True
        commands = self.store.take_commands(now)
        if commands:
            plane = self._plane
            assert plane is not None
            self._loop.call_soon_threadsafe(plane.start, commands)
        return came

    @property
    def arena_pages(self) -> str:
        """What backs the arena, see Memory.pages."""
        return ", ".join(sorted({unit.memory.pages for unit in self._units}))

    def wait(self, timeout_s: float) -> None:
        """Block until a completion arrives or the time is over; for callers without a loop of their own."""
        self._arrived.wait(timeout_s)
        self._arrived.clear()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is unflushed or in flight; whether that came true in time. Blocks the caller."""
        deadline = time.monotonic() + timeout_s
        self.pump()
        while self.store.busy:
            if time.monotonic() > deadline:
                return False
            self.wait(min(0.05, timeout_s))
            self.pump()
        return True

    def stats(self) -> dict[str, int | str]:
        """The store's and the data plane's counters, and what the engine is. Constant time."""
        info, plane, counts = self.engine_info, self._plane, self._transfer.counts
        assert plane is not None
        return {
            **self.store.stats(),
            "bytes_read": plane.bytes_read,
            "io_ops": counts.ops,
            "io_short_results": counts.short_results,
            "io_retries": counts.retries,
            "io_errors": counts.errors,
            "io_late": counts.late,
            "disk_bytes": len(self.store.table) * segment_cost(self.store.config.segment_bytes),
            "engine": info.name,
            "io_mode": "direct" if info.direct else "buffered",
        }

    def write_epoch_now(self, timeout_s: float) -> bool:
        """Wait until the epoch of the last `reset` is durable; whether it is."""
        before = self.store.counters["epochs_not_durable"]
        deadline = time.monotonic() + timeout_s
        self.pump()
        while self.store.epoch_pending and time.monotonic() < deadline:
            self.wait(0.01)
            self.pump()
        return not self.store.epoch_pending and self.store.counters["epochs_not_durable"] == before

    # ---- the end

    def close(self, timeout_s: float = CLOSE_S_MAX) -> bool:
        """Flush what can be flushed in time, then give everything back; whether all was flushed. Idempotent.

        In a forked child this does nothing: the thread and the locks are the parent's.
        """
        if self._closed or os.getpid() != self._pid:
            return True
        flushed = self.drain(timeout_s * 0.75)
        self._closed = True
        self._shut()
        if not flushed:
            logger.warning("kvdisk closed with chunks unflushed; they will be recomputed")
        return flushed

    def _shut(self, *, clean: bool = True) -> None:
        """Stop thread and engine. What hangs is left to the end of the process, and so are the locks: writes that the
        kernel still has may land at any time, and nobody else may write there before."""
        self._closed = True
        try:
            idle = self._call(self._stop_plane(), timeout_s=CLOSE_S_MAX / 4)
        except TimeoutError:
            idle = False
        if idle:
            for directory in self._directories:
                directory.close(clean=clean)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_S_MAX / 4)
            if not self._thread.is_alive():
                self._loop.close()

    async def _stop_plane(self) -> bool:
        """Whether everything could be closed."""
        if self._plane is not None:
            idle = await self._plane.stop(CLOSE_S_MAX / 8)
            if not idle:
                return False
        if self._engine is not None:
            self._engine.close()
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed")
        assert os.getpid() == self._pid, "a store does not survive fork; open it in the process that uses it"

    def _report(self, completion: Completion) -> None:
        self._completions.append(completion)
        self._arrived.set()
        if self._on_ready is not None:
            self._on_ready()

    def _call(self, work: Awaitable[T], timeout_s: float | None = None) -> T:
        """The result of `work` on the data plane's loop."""

        async def run() -> T:
            return await work

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            future.cancel()
            raise TimeoutError("the data plane does not answer") from None
