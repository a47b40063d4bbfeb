"""Claiming an instance under a root: who owns what, and how many bytes it was granted. See instance.py for the files.

A lock belongs to the open file and not to a process, so a data plane in a process of its own is lent the descriptor:
the instance is free when both processes are gone, and not before.
"""

import contextlib
import fcntl
import json
import os
import stat
import time
from dataclasses import dataclass
from typing import IO, Any

from kvdisk.errors import DirectoryInUseError
from kvdisk.instance import INSTANCE_NAME, LEDGER, LEDGER_S_MAX, NAMESPACE_NAME, Instance
from kvdisk.private_files import create_new, is_locked, make_private_directory, rewrite
from kvdisk.processes import ProcessName, this_process
from kvdisk.units import format_size

HARMLESS = {"lost+found", ".Trash-0"}
CLOSED = "closed"

OVERHEAD_BYTES = 96 << 10
"""Directories, ledger, lock and epoch files of one instance, generously: each takes a block or two of 4 KiB."""

LINGER_S_MAX = 5.0
"""How long a lock may outlast its owner, whose data plane ends when what it had in flight is done."""

_LINGER_POLL_S = 0.005
_HOLDER_BYTES = 64


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


class Directory(Instance):
    """A claimed instance; `close` gives it back.

    Attributes:
        granted_bytes: what this instance may use.
        closed_cleanly: whether the last owner ended with nothing in flight. A killed process may have writes in the
            kernel that land after its locks are gone.

    Raises:
        ValueError: the root cannot be used, or its cap is too small.
        DirectoryInUseError: others hold all instances, or were granted the bytes.
        TimeoutError: somebody hangs with the ledger.
    """

    def __init__(self, claim: Claim) -> None:
        super().__init__(claim.path, claim.namespace, claim.instances[0], claim.cap_bytes)
        assert all(INSTANCE_NAME.fullmatch(name) for name in claim.instances)
        self._claim = claim
        self._lock: IO[str] | None = None
        check_root(claim.path, claim.allow_shared_root)
        patient_until = time.monotonic() + LINGER_S_MAX
        while not self._take(patient=time.monotonic() < patient_until):
            time.sleep(_LINGER_POLL_S)

    def _take(self, *, patient: bool) -> bool:
        """Claim an instance; False if one to be had is only held by what is left of a dead owner."""
        with self._ledger(LEDGER_S_MAX) as ledger:
            make_private_directory(self.namespace_path)
            self._lock = self._lock_instance(patient)
            if self._lock is None:
                return False
            try:
                self.granted_bytes = self._grant(ledger)
                self._describe()
            except BaseException:
                self._unlock(clean=self.closed_cleanly)
                raise
        return True

    @property
    def lock_fd(self) -> int:
        """Descriptor of the lock, to be lent: whoever has a duplicate keeps others out, as long as it is open."""
        assert self._lock is not None
        return self._lock.fileno()

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

    def leave(self) -> None:
        """Close, but leave the lock to whoever else has a duplicate of it. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def _unlock(self, *, clean: bool) -> None:
        lock, self._lock = self._lock, None
        assert lock is not None
        if clean:
            rewrite(lock, CLOSED)
        fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child may hold a duplicate, which closing does not unlock
        lock.close()

    def _grant_name(self, instance: str) -> str:
        return f"{self.namespace}/{instance}"

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
        return is_locked(os.path.join(self.root, namespace, instance, "lock"))

    def _lock_instance(self, patient: bool) -> IO[str] | None:
        """The locked file of the first instance that no live process owns; None to try again while one lingers.

        Taking the next one meanwhile would cost a restarted engine its cache.
        """
        owners = []
        for name in self._claim.instances:
            path = os.path.join(self.namespace_path, name)
            make_private_directory(path)
            fd = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            file = os.fdopen(fd, "r+", encoding="utf-8", errors="replace")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                text = file.read(_HOLDER_BYTES)
                file.close()
                holder = ProcessName.parse(text)
                if patient and holder is not None and holder.is_dead:
                    return None
                owners.append(f"{path} by pid {text.partition(' ')[0] or 'unknown'}")
                continue
            self.closed_cleanly = file.read(_HOLDER_BYTES) in ("", CLOSED)
            rewrite(file, str(this_process()))
            self.instance, self.instance_path = name, path
            return file
        raise DirectoryInUseError(f"in use: {', '.join(owners)}; stop that process or name another root or namespace")

    def _describe(self) -> None:
        path = os.path.join(self.namespace_path, "namespace.json")
        if not os.path.lexists(path):
            with open(path, "w", opener=create_new) as file:
                json.dump(self._claim.identity, file, indent=1, sort_keys=True, default=str)


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
