"""Small files and directories that nobody else may have a hand in: private modes, no links, flock, allocated bytes."""

import errno
import fcntl
import os
import stat
import time
from typing import IO


def make_private_directory(path: str) -> None:
    """`path` as a 0700 directory of ours; an existing one must be that already (a link is not).

    Raises:
        ValueError: it is something else.
    """
    try:
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)  # whatever the umask
    except FileExistsError:
        info = os.lstat(path)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            raise ValueError(f"{path} is not a directory of uid {os.geteuid()}; remove it") from None
        if info.st_mode & 0o077:
            os.chmod(path, 0o700)


def is_locked(path: str) -> bool:
    """Whether a live process holds the flock on `path`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def entries(path: str) -> list[os.DirEntry[str]]:
    """What a directory holds; nothing if it cannot be read."""
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []


def allocated_bytes(path: str, *, filled: bool = False) -> int:
    """By st_blocks; `filled`: as if it had no holes. 0 if it is gone."""
    try:
        info = os.lstat(path)
    except OSError:
        return 0
    return max(info.st_blocks * 512, info.st_size if filled else 0)


def lock(fd: int, wait_s: float | None) -> None:
    """flock `fd`, for ever or until TimeoutError."""
    if wait_s is None:
        fcntl.flock(fd, fcntl.LOCK_EX)
        return
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "the ledger is locked") from None
            time.sleep(0.01)


def rewrite(file: IO[str], text: str) -> None:
    """Replace all that is in `file`, which stays open and locked."""
    file.seek(0)
    file.truncate()
    file.write(text)
    file.flush()


def modified(path: str) -> float:
    """When it was last written, in seconds since the epoch; 0 if it is gone."""
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0


def no_follow(path: str, flags: int) -> int:
    """For `open(opener=)`: a link in the file's place is an error."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def create_new(path: str, flags: int) -> int:
    """For `open(opener=)`: a file of our own, readable by nobody else, or an error."""
    return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
