"""One root directory: who owns what in it, and how many bytes kvdisk may take there.

    ROOT/                       named by the operator; must exist
      kvdisk.ledger             flock: serialises grants and reservations. JSON: who was granted how many bytes
      ns-<32 hex>/              a namespace: 0700
        namespace.json          what its name is a hash of, for people
        epoch                   two records of layout.encode_epoch, for all instances
        <instance>/             one writer at a time: 0700
          lock                  flock for the writer's life; holds its pid, or "closed" after a clean end
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
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from kvdisk import layout
from kvdisk.epoch import read_epoch, write_epoch
from kvdisk.errors import DirectoryInUseError
from kvdisk.private_files import (
    allocated_bytes,
    create_new,
    entries,
    is_locked,
    lock,
    make_private_directory,
    modified,
    rewrite,
)
from kvdisk.units import format_size

LEDGER = "kvdisk.ledger"
NAMESPACE_NAME = re.compile(r"ns-[0-9a-f]{32}")
INSTANCE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
SEGMENT_NAME = re.compile(r"(\d{8})\.seg")
OURS_IN_INSTANCE = re.compile(r"lock|\d{8}\.seg")
HARMLESS = {"lost+found", ".Trash-0"}
CLOSED = "closed"

OVERHEAD_BYTES = 96 << 10
"""Directories, ledger, lock and epoch files of one instance, generously: each takes a block or two of 4 KiB."""


def segment_cost(segment_bytes: int) -> int:
    """Bytes to reserve for a segment: the file, extent blocks of the file system, its directory entry."""
    return segment_bytes + (16 << 10) + segment_bytes // 4096


@dataclass(frozen=True)
class Claim:
    """What a store wants in a root.

    cap_bytes: for all of kvdisk under this root. share_bytes: what this instance may take at most. needed_bytes: below
    this it does not start. instances: names to try in order; the first that no live process owns is taken.
    """

    path: str
    namespace: str
    identity: dict[str, Any]
    instances: tuple[str, ...]
    cap_bytes: int
    share_bytes: int
    needed_bytes: int
    allow_shared_root: bool = False


class Directory:
    """A claimed root; `close` gives it back.

    Attributes:
        instance, instance_path, namespace_path: what was claimed.
        granted_bytes: what this instance may use.
        closed_cleanly: whether the last owner ended with nothing in flight. A killed process may have writes in the
            kernel that land after its locks are gone.
    """

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        check_root(claim.path, claim.allow_shared_root)
        self.namespace_path = os.path.join(claim.path, claim.namespace)
        assert NAMESPACE_NAME.fullmatch(claim.namespace)
        assert all(INSTANCE_NAME.fullmatch(name) for name in claim.instances)
        self._lock: IO[str] | None = None
        with self._ledger() as ledger:
            make_private_directory(self.namespace_path)
            self.instance, self._lock = self._lock_instance()
            self.instance_path = os.path.join(self.namespace_path, self.instance)
            try:
                self.granted_bytes = self._grant(ledger)
                self._describe()
            except BaseException:
                self._unlock(clean=self.closed_cleanly)
                raise

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
            excess = mine + self._used_bytes(skip_segments_of=self.instance_path) + cost_bytes - self._claim.cap_bytes
            if excess > 0:
                excess -= self._remove_dead(excess)
            if excess > 0:
                raise OSError(errno.ENOSPC, f"disk_bytes_to_use leaves no room in {self._claim.path}")
            return create(self.segment_path(number))

    def trim_to_cap(self) -> None:
        """Remove data of dead owners until the cap holds; it may have been lowered since they wrote it."""
        with self._ledger():
            excess = self._used_bytes() - self._claim.cap_bytes
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
        """Make the namespace's epoch durable, see `epoch.write_epoch`. Instances share it: under the ledger's lock."""
        with self._ledger():
            write_epoch(self._epoch_path, epoch, after_reset)

    def close(self, *, clean: bool = True) -> None:
        """Give back grant and lock; files stay. Idempotent, and never waits long: somebody may hang with the ledger.

        Args:
            clean: whether nothing is in flight any more.
        """
        if self._lock is None:
            return
        with contextlib.suppress(OSError), self._ledger(wait_s=0.5) as ledger:
            ledger.pop(self._grant_name(self.instance), None)
        self._unlock(clean=clean)

    def _unlock(self, *, clean: bool) -> None:
        lock, self._lock = self._lock, None
        assert lock is not None
        if clean:
            rewrite(lock, CLOSED)
        fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child may hold a duplicate, which closing does not unlock
        lock.close()

    # ---- the ledger

    @property
    def _epoch_path(self) -> str:
        return os.path.join(self.namespace_path, "epoch")

    def _grant_name(self, instance: str) -> str:
        return f"{self._claim.namespace}/{instance}"

    @contextlib.contextmanager
    def _ledger(self, wait_s: float | None = None) -> Iterator[dict[str, Any]]:
        """The grants, locked; what the caller changed is written back. TimeoutError after `wait_s`, if given."""
        path = os.path.join(self._claim.path, LEDGER)
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

    def _grant(self, ledger: dict[str, Any]) -> int:
        claim, mine = self._claim, self._grant_name(self.instance)
        for name in list(ledger):
            if name == mine or not self._is_alive(name):
                del ledger[name]
        taken = sum(grant["bytes"] for grant in ledger.values())
        granted: int = min(claim.share_bytes, claim.cap_bytes - taken)
        if granted < claim.needed_bytes:
            others = ", ".join(f"pid {g['pid']} has {format_size(g['bytes'])}" for g in ledger.values())
            left = format_size(max(0, claim.cap_bytes - taken))
            needed = format_size(claim.needed_bytes)
            message = f"{claim.path}: {left} of {format_size(claim.cap_bytes)} left, {needed} needed"
            if ledger:
                raise DirectoryInUseError(f"{message} ({others}); give each server its own share or its own root_dir")
            raise ValueError(f"{message}; raise disk_bytes_to_use or lower segment_bytes")
        ledger[mine] = {"bytes": granted, "pid": os.getpid()}
        return granted

    def _is_alive(self, grant_name: str) -> bool:
        """Whether a live process holds the instance's lock. Names come from a file, so they are checked."""
        namespace, _, instance = grant_name.partition("/")
        if not NAMESPACE_NAME.fullmatch(namespace) or not INSTANCE_NAME.fullmatch(instance):
            return False
        return is_locked(os.path.join(self._claim.path, namespace, instance, "lock"))

    def _lock_instance(self) -> tuple[str, IO[str]]:
        owners = []
        for name in self._claim.instances:
            path = os.path.join(self.namespace_path, name)
            make_private_directory(path)
            fd = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            file = os.fdopen(fd, "r+", encoding="utf-8", errors="replace")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                owners.append(f"{path} by pid {file.read(20).strip() or 'unknown'}")
                file.close()
                continue
            self.closed_cleanly = file.read(20) in ("", CLOSED)
            rewrite(file, str(os.getpid()))
            return name, file
        raise DirectoryInUseError(f"in use: {', '.join(owners)}; stop that process or name another root or namespace")

    def _describe(self) -> None:
        path = os.path.join(self.namespace_path, "namespace.json")
        if not os.path.lexists(path):
            with open(path, "w", opener=create_new) as file:
                json.dump(self._claim.identity, file, indent=1, sort_keys=True, default=str)

    # ---- bytes

    def _instances(self) -> Iterator[tuple[str, str]]:
        """(namespace path, instance path) of all of kvdisk's instances under the root."""
        for namespace in entries(self._claim.path):
            if NAMESPACE_NAME.fullmatch(namespace.name) and namespace.is_dir(follow_symlinks=False):
                for instance in entries(namespace.path):
                    if INSTANCE_NAME.fullmatch(instance.name) and instance.is_dir(follow_symlinks=False):
                        yield namespace.path, instance.path

    def _used_bytes(self, skip_segments_of: str = "") -> int:
        root = self._claim.path
        paths = {root, os.path.join(root, LEDGER)}
        for namespace, instance in self._instances():
            paths |= {namespace, os.path.join(namespace, "namespace.json"), os.path.join(namespace, "epoch"), instance}
            names = ["lock"] if instance == skip_segments_of else [entry.name for entry in entries(instance)]
            paths |= {os.path.join(instance, name) for name in names if OURS_IN_INSTANCE.fullmatch(name)}
        return sum(allocated_bytes(path) for path in paths)

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
            size = allocated_bytes(entry.path)
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
                freed += size
        return freed


def check_room(path: str, cap_bytes: int, share_bytes: int, needed_bytes: int, allow_shared_root: bool) -> None:
    """Refuse, before a claim, a root that `Directory` would refuse: unusable, too small a cap, or granted to others.

    Raises:
        ValueError, DirectoryInUseError: as `check_root` and `Directory`.
    """
    check_root(path, allow_shared_root)
    if min(cap_bytes, share_bytes) < needed_bytes:
        raise ValueError(
            f"disk_bytes_to_use gives this engine {format_size(share_bytes)} in {path} and it needs "
            f"{format_size(needed_bytes)}; raise disk_bytes_to_use or lower segment_bytes"
        )


def check_root(path: str, allow_shared_root: bool) -> None:
    """Refuse a root that is missing, not ours, not writable, or holds what is not kvdisk's.

    Raises:
        ValueError: with the path and the command that mends it.
    """
    try:
        info = os.stat(path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; on the disk kvdisk shall use: mkdir -m 700 {path}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be used: {error.strerror}") from None
    if not stat.S_ISDIR(info.st_mode):
        raise ValueError(f"{path} is not a directory; name one that kvdisk may fill")
    if not allow_shared_root and info.st_uid != os.geteuid():
        raise ValueError(
            f"{path} belongs to uid {info.st_uid}, not to {os.geteuid()}: others could plant data there; "
            f"chown it, or set allow_shared_root if you trust its owner"
        )
    if not allow_shared_root and info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"{path} is writable by others (mode {stat.S_IMODE(info.st_mode):o}): name a directory of your own in it, "
            f"mkdir -m 700 {os.path.join(path, 'kvdisk')}, or set allow_shared_root if you trust them"
        )
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise ValueError(f"{path} is on a file system that is mounted read-only")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"{path} is not writable by uid {os.geteuid()}; chmod or chown it")
    names = set(os.listdir(path))
    foreign = sorted(name for name in names - HARMLESS if name != LEDGER and not NAMESPACE_NAME.fullmatch(name))
    if foreign and LEDGER not in names:
        raise ValueError(
            f"{path} holds files that are not kvdisk's ({', '.join(foreign[:3])}); "
            f"name an empty directory: mkdir -m 700 {os.path.join(path, 'kvdisk')}"
        )


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
