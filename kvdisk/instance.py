"""One writer's files under a root, and what kvdisk takes there: what a data plane works on, whoever claimed it.

    ROOT/                       named by the operator; must exist
      kvdisk.ledger             flock: serialises grants and reservations. JSON: who was granted how many bytes
      ns-<32 hex>/              a namespace: 0700
        namespace.json          what its name is a hash of, for people
        epoch                   two records of layout.encode_epoch, for all instances
        <instance>/             one writer at a time: 0700
          lock                  flock for the writer's life; holds its process's name, or "closed" after a clean end
          00000000.seg ...      segments

What must hold:
- All of kvdisk's bytes under the root, counted by st_blocks whoever wrote them, never exceed the cap: a new segment is
  reserved and created under the ledger's lock, and data of owners that are gone makes way first.
- Files that kvdisk did not name are never opened, counted or removed; links are not followed.
Everything blocks (microseconds to milliseconds); callers that serve a loop run it in a thread.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from kvdisk import layout
from kvdisk.epoch import read_epoch, write_epoch
from kvdisk.private_files import allocated_bytes, entries, is_locked, lock, modified, rewrite

LEDGER = "kvdisk.ledger"
NAMESPACE_NAME = re.compile(r"ns-[0-9a-f]{32}")
INSTANCE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
SEGMENT_NAME = re.compile(r"(\d{8})\.seg")
OURS_IN_INSTANCE = re.compile(r"lock|\d{8}\.seg")

LEDGER_S_MAX = 5.0
"""How long whoever opens a store waits for the ledger, which others have for milliseconds unless they were stopped."""


class Instance:
    """See the module's docstring.

    Args:
        root: the root's path.
        namespace, name: of the instance; they are made by whoever claims them.
        cap_bytes: for all of kvdisk under this root.
    """

    def __init__(self, root: str, namespace: str, name: str, cap_bytes: int) -> None:
        assert NAMESPACE_NAME.fullmatch(namespace) and INSTANCE_NAME.fullmatch(name)
        self.root = root
        self.namespace = namespace
        self.instance = name
        self.cap_bytes = cap_bytes
        self.namespace_path = os.path.join(root, namespace)
        self.instance_path = os.path.join(self.namespace_path, name)

    # ---- files of the instance

    def segment_path(self, number: int) -> str:
        """Path of segment `number`."""
        return os.path.join(self.instance_path, f"{number:08d}.seg")

    def segment_numbers(self) -> list[int]:
        """The segments there are, ascending."""
        names = os.listdir(self.instance_path)
        return sorted(int(match[1]) for name in names if (match := SEGMENT_NAME.fullmatch(name)))

    def segment_size(self, number: int) -> int:
        """Bytes of the segment's file, as its directory entry says."""
        return os.lstat(self.segment_path(number)).st_size

    def make_unique(self, taken: set[int]) -> list[int]:
        """The segments there are, after renaming those whose number another root of this store has already."""
        numbers = self.segment_numbers()
        free = max([*numbers, *taken], default=-1) + 1
        for position, number in enumerate(numbers):
            if number in taken:
                os.rename(self.segment_path(number), self.segment_path(free))
                numbers[position] = free
                free += 1
        return numbers

    def create_segment(self, number: int, cost_bytes: int, create: Callable[[str], int]) -> int:
        """Reserve `cost_bytes` and call `create(path)` under the ledger's lock; its result.

        Raises:
            OSError: ENOSPC when the cap leaves no room even without the data of dead owners, or what `create` raises.
        """
        with self._ledger():
            # Its own segments are not looked at one by one: there may be thousands, and each costs its full price.
            mine = len(self.segment_numbers()) * cost_bytes
            excess = mine + self._used_bytes(skip_segments_of=self.instance_path) + cost_bytes - self.cap_bytes
            if excess > 0:
                excess -= self._remove_dead(excess)
            if excess > 0:
                raise OSError(errno.ENOSPC, f"disk_bytes_to_use leaves no room in {self.root}")
            return create(self.segment_path(number))

    def trim_to_cap(self) -> None:
        """Remove data of dead owners until the cap holds; it may have been lowered since they wrote it.

        Raises:
            TimeoutError: somebody hangs with the ledger.
        """
        with self._ledger(LEDGER_S_MAX):
            excess = self._used_bytes() - self.cap_bytes
            if excess > 0:
                self._remove_dead(excess)

    def used_bytes(self) -> int:
        """Bytes of kvdisk's under the root, by st_blocks."""
        with self._ledger():
            return self._used_bytes()

    def read_epoch(self) -> layout.EpochRecord | None:
        """The namespace's epoch, see `epoch.read_epoch`."""
        return read_epoch(self._epoch_path)

    def write_epoch(self, epoch: int, *, after_reset: bool = True) -> None:
        """Make the namespace's epoch durable, see `epoch.write_epoch`. Instances share it: under the ledger's lock.

        Raises:
            OSError: it is not durable; TimeoutError: somebody hangs with the ledger.
        """
        with self._ledger(LEDGER_S_MAX):
            write_epoch(self._epoch_path, epoch, after_reset)

    # ---- the ledger

    @property
    def _epoch_path(self) -> str:
        return os.path.join(self.namespace_path, "epoch")

    @contextlib.contextmanager
    def _ledger(self, wait_s: float | None = None) -> Iterator[dict[str, Any]]:
        """The grants, locked; what the caller changed is written back. TimeoutError after `wait_s`, if given."""
        path = os.path.join(self.root, LEDGER)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "r+", encoding="utf-8", errors="replace") as file:
            lock(fd, wait_s)
            try:
                before = file.read(1 << 20)
                grants = parse_grants(before)
                yield grants
                after = json.dumps({"grants": grants}, indent=1, sort_keys=True)
                if after != before:
                    rewrite(file, after)
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # see _unlock

    # ---- bytes

    def _instances(self) -> Iterator[tuple[str, str]]:
        """(namespace path, instance path) of all of kvdisk's instances under the root."""
        for namespace in entries(self.root):
            if NAMESPACE_NAME.fullmatch(namespace.name) and namespace.is_dir(follow_symlinks=False):
                for instance in entries(namespace.path):
                    if INSTANCE_NAME.fullmatch(instance.name) and instance.is_dir(follow_symlinks=False):
                        yield namespace.path, instance.path

    def _used_bytes(self, skip_segments_of: str = "") -> int:
        root = self.root
        paths = {root, os.path.join(root, LEDGER)}
        for namespace, instance in self._instances():
            paths |= {namespace, os.path.join(namespace, "namespace.json"), os.path.join(namespace, "epoch"), instance}
            names = ["lock"] if instance == skip_segments_of else [entry.name for entry in entries(instance)]
            paths |= {os.path.join(instance, name) for name in names if OURS_IN_INSTANCE.fullmatch(name)}
        return sum(_cost(path) for path in paths)

    def _remove_dead(self, wanted_bytes: int) -> int:
        """Remove segments of instances that no live process owns, oldest first; bytes freed."""
        dead = []
        for _, instance in self._instances():
            if instance != self.instance_path and not is_locked(os.path.join(instance, "lock")):
                dead += [entry for entry in entries(instance) if SEGMENT_NAME.fullmatch(entry.name)]
        freed = 0
        for entry in sorted(dead, key=lambda e: modified(e.path)):
            if freed >= wanted_bytes:
                break
            size = _cost(entry.path)
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
                freed += size
        return freed


def _cost(path: str) -> int:
    """What a file takes; a segment counts whole even where it could not be preallocated, for it will be filled."""
    return allocated_bytes(path, filled=SEGMENT_NAME.fullmatch(os.path.basename(path)) is not None)


def parse_grants(raw: str) -> dict[str, Any]:
    """The ledger's grants; whatever is not as we write it counts for nothing (live owners still hold their locks)."""
    try:
        grants = json.loads(raw)["grants"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}
    if not isinstance(grants, dict):
        return {}
    return {
        name: {"bytes": grant["bytes"], "pid": grant["pid"]}
        for name, grant in grants.items()
        if isinstance(grant, dict)
        and all(isinstance(grant.get(field), int) and grant[field] >= 0 for field in ("bytes", "pid"))
    }
