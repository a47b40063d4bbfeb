"""The file half of an engine: create, open, size, sync, remove; and whether I/O is direct or buffered.

Invariants:
- A file that could not be created whole is not there afterwards.
- Only regular files that belong to our user are opened, never through a symbolic link.
- Direct I/O once refused stays refused: every open descriptor and every later one is buffered, with one warning.
  Trying again for each request would fail each request first.

Every call may block (run it in a worker thread) and raises `OSError`; the calls are safe from several threads.
"""

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import stat
import threading

from kvdisk.io.protocol import EngineInfo, OpKind

log = logging.getLogger("kvdisk")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)

# <linux/fs.h>, for sync_file_range(2): start the write-back of a range, having waited for an earlier one, and wait.
SYNC_FILE_RANGE_WRITE_AND_WAIT = 1 | 2 | 4

_OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class FileCalls:
    """Files by descriptor; base class of the engines that work on real ones."""

    info: EngineInfo

    def __init__(self, name: str) -> None:
        self.info = EngineInfo(name, direct=True, registered=False, detail="")
        self.buffered = False  # I/O goes through the page cache and has to be taken out of it again
        self._fds: set[int] = set()
        self._fds_lock = threading.Lock()  # an fd must not be closed, and its number reused, while F_SETFL runs on it
        self._warned_sparse = False

    def create_file(self, path: str, size: int) -> int:
        """Create `path` with `size` bytes preallocated; its descriptor. See `Engine.create_file`."""
        if size < 0:
            raise ValueError(f"size must not be negative, not {size}")
        fd = os.open(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            return self._adopt(fd, path, size)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise

    def create_unnamed_file(self, directory: str, size: int) -> int:
        """A file in `directory` that is gone with its descriptor, even after SIGKILL where the system has O_TMPFILE."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE
        try:
            try:
                fd = os.open(directory, flags | (0 if self.buffered else os.O_DIRECT), 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                fd = os.open(directory, flags, 0o600)
                self.use_buffered(f"opening a file in {directory} with O_DIRECT: {error.strerror}")
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            path = os.path.join(directory, f".kvdisk-probe-{os.getpid()}-{os.urandom(8).hex()}")
            fd = self.create_file(path, size)
            os.unlink(path)
            return fd
        return self._adopt(fd, directory, size, reopen=False)

    def open_file(self, path: str) -> int:
        """Open an existing regular file of ours for reading and writing; its descriptor."""
        # O_NONBLOCK: opening a FIFO or a device planted in place of our file must not hang. On regular files it makes
        # io_uring answer EAGAIN, hence it is taken off again.
        fd = os.open(path, _OPEN_FLAGS | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EPERM, "not a regular file", path)
            if status.st_uid != os.geteuid():
                raise OSError(errno.EPERM, f"belongs to uid {status.st_uid}, not to ours ({os.geteuid()})", path)
            _clear_flag(fd, os.O_NONBLOCK)
        except BaseException:
            os.close(fd)
            raise
        return self._adopt(fd, path)

    def close_file(self, fd: int) -> None:
        """Close a descriptor of this engine."""
        with self._fds_lock:
            self._fds.discard(fd)
            os.close(fd)

    def remove_file(self, path: str) -> None:
        """Remove `path`; a file that is already gone is fine."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def sync_file(self, fd: int) -> None:
        """Make what was written to `fd` durable (fdatasync)."""
        os.fdatasync(fd)

    def file_bytes(self, fd: int) -> tuple[int, int]:
        """(size, allocated bytes by st_blocks) of an open file."""
        status = os.fstat(fd)
        return status.st_size, status.st_blocks * 512

    def use_buffered(self, reason: str) -> bool:
        """Give up direct I/O for good, on every file of this engine; False when that has happened before.

        Does not block, so the event loop's thread may call it.
        """
        with self._fds_lock:
            if self.buffered:
                return False
            self.buffered = True
            self.info = self.info._replace(direct=False, detail=join(self.info.detail, f"buffered I/O: {reason}"))
            for fd in self._fds:
                _clear_flag(fd, os.O_DIRECT)
        log.warning(
            "direct I/O refused (%s): using buffered I/O, which costs more CPU and memory. Put the directory on a "
            "local ext4 or XFS file system to get direct I/O",
            reason,
        )
        return True

    def _allocate(self, fd: int, size: int, path: str) -> None:
        """Reserve `size` bytes. Without support, the file is as long but sparse, and a later write can meet ENOSPC.

        Not `os.posix_fallocate`: glibc imitates a missing fallocate by writing into block after block.
        """
        while size and _libc.fallocate(fd, 0, 0, size):
            code = ctypes.get_errno()
            if code == errno.EINTR:
                continue
            if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(code, f"{os.strerror(code)} (preallocating {size} bytes)", path)
            os.ftruncate(fd, size)
            if not self._warned_sparse:
                self._warned_sparse = True
                log.warning("%s: preallocation is not supported; space is not reserved, a full disk shows late", path)
            return

    def _adopt(self, fd: int, path: str, size: int = 0, *, reopen: bool = True) -> int:
        """Reserve `size` bytes, and take charge of `fd` or of a direct descriptor of the same file in its place.

        Closes `fd` when it fails. O_DIRECT comes with a second open, not with O_CREAT: where a file system refuses it,
        the first open would answer EINVAL *after* having created the file.
        """
        direct = -1
        try:
            self._allocate(fd, size, path)
            if reopen and not self.buffered:
                try:
                    direct = os.open(path, _OPEN_FLAGS | os.O_DIRECT)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self.use_buffered(f"opening {path} with O_DIRECT: {error.strerror}")
            if direct >= 0 and not os.path.samestat(os.fstat(fd), os.fstat(direct)):
                os.close(direct)
                raise OSError(errno.ESTALE, "replaced by another file while it was opened", path)
        except BaseException:
            os.close(fd)
            raise
        if direct >= 0:
            os.close(fd)
            fd = direct
        with self._fds_lock:
            self._fds.add(fd)
            if self.buffered:  # another thread gave up direct I/O in the meantime
                _clear_flag(fd, os.O_DIRECT)
        return fd


def drop_cached(fd: int, kind: OpKind, offset: int, length: int) -> None:
    """Keep a buffered transfer out of the page cache: write it back, then let the pages go. May block.

    KV data is seldom read again soon, and its pages would count as the container's memory and evict better ones.

    Raises:
        OSError: the write-back failed, so the write did, though the kernel had accepted it.
    """
    if kind is OpKind.WRITE:
        code = 0
        if _libc.sync_file_range(fd, offset, length, SYNC_FILE_RANGE_WRITE_AND_WAIT):
            code = ctypes.get_errno()
        if writeback_failed(code):
            raise OSError(code, os.strerror(code))
    with contextlib.suppress(OSError):  # only advice
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def writeback_failed(code: int) -> bool:
    """Whether an errno of sync_file_range says that data was lost, rather than that the call is not supported."""
    return code in (errno.EIO, errno.ENOSPC, errno.EDQUOT)


def _clear_flag(fd: int, flag: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~flag)


def join(*parts: str) -> str:
    """One line for `EngineInfo.detail`."""
    return "; ".join(filter(None, parts))
