"""Memory to measure with: full of random bytes, in huge pages or kept from them."""

import ctypes
import fcntl
import mmap
import os

import numpy as np

from kvdisk.io.protocol import Memory
from kvdisk.memory import private_memory, shared_memory
from kvdisk.units import MIB, round_up

_MADV_NOHUGEPAGE = 15  # <asm-generic/mman-common.h>; the mmap module lacks it before Python 3.13


def random_memory(size: int, pages: str = "huge") -> Memory:
    """Private memory full of random bytes, in transparent huge pages, or ("4k") kept from them for comparison."""
    memory = private_memory(size) if pages == "huge" else _small_pages(size)
    _fill(memory)
    return memory


def random_shared_memory(size: int, pages: str = "huge") -> tuple[Memory, int]:
    """As `random_memory`, shared, and its descriptor, which is the caller's."""
    memory, fd = shared_memory(size) if pages == "huge" else _small_shared_pages(size)
    _fill(memory)
    return memory, fd


def _fill(memory: Memory) -> None:
    words = np.frombuffer(memory.view, np.uint64)
    rng = np.random.default_rng(0)
    step = 32 * MIB // 8
    for start in range(0, len(words), step):
        part = words[start : start + step]
        part[:] = rng.integers(0, 1 << 63, len(part), np.uint64)


def _small_pages(size: int) -> Memory:
    return _mapped(-1, round_up(size, 2 * MIB), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _small_shared_pages(size: int) -> tuple[Memory, int]:
    size = round_up(size, 2 * MIB)
    fd = os.memfd_create("kvdisk-bench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return _mapped(fd, size, mmap.MAP_SHARED), fd


def _mapped(fd: int, size: int, flags: int) -> Memory:
    area = mmap.mmap(fd, size, flags=flags)
    area.madvise(_MADV_NOHUGEPAGE)
    view = memoryview(area)
    return Memory(view, ctypes.addressof(ctypes.c_char.from_buffer(area)), "4 KiB")
