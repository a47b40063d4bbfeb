"""A store at work: the metadata plane on its owner's thread, the data plane on a thread or in a process of its own.

The owner calls `pump` wherever it likes (it never blocks): completions go into the store, commands go to the data
plane. After `close`, nothing of the store may be used; memory that a hung I/O might still write to is never freed.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import SystemRandom
from typing import Any

from kvdisk import layout
from kvdisk.commands import ScannedSegment
from kvdisk.dataplane import Units
from kvdisk.directory import OVERHEAD_BYTES, Claim, Directory, check_root, segment_cost
from kvdisk.errors import PlaneUnavailableError, StoreClosedError
from kvdisk.io.protocol import Engine, EngineInfo
from kvdisk.options import Options
from kvdisk.plane import Plane
from kvdisk.plane.local import ThreadPlane
from kvdisk.plane.remote import ProcessPlane
from kvdisk.scan import collector_paused, decode_segment
from kvdisk.store import Store
from kvdisk.store_config import SEGMENTS_MIN, StoreConfig
from kvdisk.units import format_size

logger = logging.getLogger("kvdisk")

CLOSE_S_MAX = 4.0
"""Bound on `close`: at most three quarters of it to flush, and the rest for the plane to end. vLLM kills an engine 5 s
after it was told to end (`timeout` of `shutdown` in vllm/v1/utils.py), of which its workers take some first
(`EngineCore.shutdown` in vllm/v1/engine/core.py); a container's grace period is longer (Kubernetes
terminationGracePeriodSeconds, 30 s)."""


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
    """A running store. It belongs to one thread at a time; see the module's docstring.

    Args:
        options: checked already.
        tenancy: whose data.
        units: one a rank that has slots.
        unit_count: units of the arena (the smallest rank's).
        group_parts: see StoreConfig.
        on_ready: called on the data plane's thread when completions wait; must not block. Not with a process.
        checksums: see DataPlane.
        memfds: one a unit. With them the data plane is a process of its own, unless the options want a thread or (with
            a warning) none can be started.

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
        memfds: Sequence[int] = (),
    ) -> None:
        for path in options.root_dir:
            check_root(path, options.allow_shared_root)
        self._options = options
        self._units = units
        self._memfds = memfds
        self._checksums = checksums
        self._on_ready = on_ready
        self._pid = os.getpid()
        self._closed = False
        self._directories: list[Directory] = []
        self.plane, alignment = self._start_plane()
        try:
            self.store = self._open(tenancy, alignment, unit_count, group_parts)
        except BaseException:
            self._shut(CLOSE_S_MAX / 4, opened=False)
            raise

    # ---- opening

    def _start_plane(self) -> tuple[Plane, int]:
        """The plane, started, and the alignment that it found."""
        plane: Plane
        if self._options.data_plane == "process" and self._memfds:
            try:
                plane = ProcessPlane(self._options, self._units, self._memfds, checksums=self._checksums)
                return plane, self._started(plane)
            except PlaneUnavailableError as error:
                logger.warning(
                    "kvdisk: the data plane runs on a thread, which waits for the GIL beside a busy scheduler: %s",
                    error,
                )
        plane = ThreadPlane(self._options, self._units, checksums=self._checksums, on_ready=self._on_ready)
        return plane, self._started(plane)

    @staticmethod
    def _started(plane: Plane) -> int:
        try:
            return plane.start()
        except BaseException:
            plane.close(CLOSE_S_MAX / 4)
            raise

    def _open(
        self, tenancy: Tenancy, alignment: int, unit_count: int, group_parts: dict[int, tuple[int, ...]] | None
    ) -> Store:
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
        self._recover(store)
        self._log_start(store)
        return store

    def _recover(self, store: Store) -> None:
        scans: list[ScannedSegment] = []
        with collector_paused():
            epoch = self.plane.open(self._directories, store.config, lambda found: scans.append(decode_segment(found)))
            # A killed owner's last writes may land after its locks are gone: it is not written on in what it had open.
            store.recover(scans, epoch, resume=all(directory.closed_cleanly for directory in self._directories))
        # Above that of every pack there may be, also in files that could not be read this time.
        store.writer.next_pack_sequence = max(store.writer.next_pack_sequence, time.time_ns())

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
        """The engine of a data plane on a thread, which stays this store's: for measurements that want it buffered."""
        assert isinstance(self.plane, ThreadPlane) and self.plane.backend.engine is not None
        return self.plane.backend.engine

    @property
    def engine_info(self) -> EngineInfo:
        """What the engine is."""
        return self.plane.info

    @property
    def instance_paths(self) -> list[str]:
        """Where this store's segments are, one directory a root."""
        return [directory.instance_path for directory in self._directories]

    def pump(self, now: float | None = None) -> bool:
        """Let both planes hear of each other; whether anything new came from the data plane. Never blocks."""
        self._check_open()
        now = time.monotonic() if now is None else now
        came = False
        for completion in self.plane.completions():
            self.store.complete(completion, now)
            came = True
        if self.plane.is_lost and not self.store.disk_is_lost:
            self.store.lose_disk()
        commands = self.store.take_commands(now)
        if commands:
            self.plane.send(commands)
        return came

    @property
    def arena_pages(self) -> str:
        """What backs the arena, see Memory.pages."""
        return ", ".join(sorted({unit.memory.pages for unit in self._units}))

    def wait(self, timeout_s: float) -> None:
        """Block until a completion arrives or the time is over; for callers without a loop of their own."""
        self.plane.wait(timeout_s)

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
        info = self.engine_info
        return {
            **self.store.stats(),
            **self.plane.counts._asdict(),
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

        In a forked child this does nothing: the data plane and the locks are the parent's.
        """
        if self._closed or os.getpid() != self._pid:
            return True
        ends_at = time.monotonic() + timeout_s
        try:
            flushed = self.drain(timeout_s * 0.75)
        finally:  # whatever goes wrong: the process and the locks are given back
            self._shut(max(ends_at - time.monotonic(), CLOSE_S_MAX / 4), opened=True)
        if not flushed:
            logger.warning("kvdisk closed with chunks unflushed; they will be recomputed")
        return flushed

    def _shut(self, timeout_s: float, *, opened: bool) -> None:
        """Stop the data plane. If something hangs the locks stay with who hangs: writes that the kernel still has may
        land at any time, and nobody else may write there before. Who never opened says nothing of the last owner."""
        self._closed = True
        idle = self.plane.close(timeout_s)
        for directory in self._directories:
            if idle:
                directory.close(clean=opened or directory.closed_cleanly)
            elif isinstance(self.plane, ProcessPlane):
                directory.leave()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed")
        assert os.getpid() == self._pid, "a store does not survive fork; open it in the process that uses it"
