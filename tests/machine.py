"""What this machine can do, asked of the kernel and not of the code under test: a test may skip only for that."""

import ctypes
import fcntl
import os
import platform
import re
from pathlib import Path

_IO_URING_SETUP = 425  # on every architecture, <asm-generic/unistd.h>
_PARAMS_BYTES = 120  # struct io_uring_params, <linux/io_uring.h>

_libc = ctypes.CDLL(None, use_errno=True)


def allows_io_uring() -> bool:
    """Whether a ring can be set up."""
    fd = _libc.syscall(_IO_URING_SETUP, 2, ctypes.byref(ctypes.create_string_buffer(_PARAMS_BYTES)))
    if fd >= 0:
        os.close(fd)
    return bool(fd >= 0)


def has_avx512_bf16() -> bool:
    """Whether the processor has what vLLM's full CPU kernels need. On others it loads kernels that lack operations, and
    chooses other block sizes for some models."""
    cpu = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return cpu is not None and "avx512_bf16" in cpu[1].split()


def has_leases(path: Path) -> bool:
    """Whether the file system of `path`, an existing file, grants a read lease."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def collapses_shared_pages() -> bool:
    """Whether shared memory can be made huge after it was touched: MADV_COLLAPSE, Linux 6.1."""
    version = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    return version >= (6, 1) and Path("/sys/kernel/mm/transparent_hugepage").is_dir()
