"""A small store over an arena in shared memory, whose data plane is a thread or a process: what its tests share."""

import os
import random
from pathlib import Path
from typing import Any

from kvdisk.dataplane import Units
from kvdisk.memory import shared_memory
from kvdisk.options import parse_options
from kvdisk.resident import Resident
from kvdisk.service import Service, Tenancy
from kvdisk.store import Presence
from kvdisk.units import MIB, UNIT_BYTES

ARENA_BYTES = 16 * MIB
DRAIN_S = 60.0
KINDS = ("thread", "process")


def value(key: bytes, size: int) -> bytes:
    """What is stored under `key`."""
    return random.Random(key).randbytes(size)


class Rig:
    """See the module's docstring.

    Args:
        root: an existing directory, or several.
        kind: of the data plane.
        extra: further options.
    """

    size = 40_000

    def __init__(
        self, *root: Path, kind: str = "process", instances: tuple[str, ...] = ("dp0", "dp0-1"), **extra: Any
    ) -> None:
        self.kind = kind
        self.memory, self.memfd = shared_memory(ARENA_BYTES)
        values = {
            "root_dir": [str(path) for path in root],
            "disk_bytes_to_use": "64MiB",
            "cpu_bytes_to_use": ARENA_BYTES,
            "segment_bytes": "1MiB",
            "data_plane": kind,
            **extra,
        }
        try:
            self.service = Service(
                parse_options(values),
                Tenancy({"test": "planes"}, instances, share=2),
                [Units(self.memory, 0)],
                unit_count=ARENA_BYTES // UNIT_BYTES,
                memfds=[self.memfd],
            )
        except BaseException:
            os.close(self.memfd)
            raise

    @property
    def store(self) -> Any:
        return self.service.store

    @property
    def pid(self) -> int:
        """Of the data plane's process."""
        pid = self.service.plane.pid  # type: ignore[attr-defined]
        assert isinstance(pid, int)
        return pid

    def slot(self, resident: Resident) -> memoryview:
        start = resident.run.start * UNIT_BYTES
        return self.memory.view[start : start + resident.live_bytes]

    def begin_put(self, key: bytes) -> Resident | None:
        """Store the key's value; not flushed yet."""
        resident: Resident | None = self.store.reserve(key, 0, (self.size,), 0, b"")
        if resident is not None:
            self.slot(resident)[:] = value(key, self.size)
            self.store.commit([resident])
        return resident

    def put(self, keys: list[bytes]) -> None:
        """Have these on disk and nowhere else."""
        for key in keys:
            while self.begin_put(key) is None:
                self.settle()
        self.settle()
        self.store.drop_slots()

    def settle(self) -> None:
        """Until nothing is in progress any more, late or not."""
        assert self.service.drain(DRAIN_S)

    def get(self, key: bytes) -> bytes | None:
        """The bytes, or None for a miss. Reads from disk if need be."""
        presence = self.store.presence(key)
        if presence is Presence.ON_DISK:
            self.store.promote(key)
            self.settle()
        resident = self.store.resident(key)
        return bytes(self.slot(resident)) if resident is not None and resident.is_hit else None

    def pump_until(self, come_true: Any) -> None:
        """Pump until `come_true()`; the test's timeout is the only one."""
        while not come_true():
            self.service.pump()
            self.service.wait(0.05)

    def close(self) -> bool:
        flushed = self.service.close()
        os.close(self.memfd)
        return flushed


def keys_of(count: int, name: str = "k") -> list[bytes]:
    return [f"{name}-{number}".encode() for number in range(count)]
