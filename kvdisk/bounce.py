"""Aligned scratch memory for headers, footers and scans: small, pooled, not given out while the kernel may use it.

Cut from slabs, for memory of one's own costs milliseconds (it is touched in, and its pages are looked up), and the
first slab is there before the first pack is. Of buffers larger than a slab only as much is kept as packs need that are
compressed on a few disks; what a scan or a footer needed once goes back to the system.
"""

from collections import defaultdict
from collections.abc import Callable

from kvdisk.io.protocol import Memory
from kvdisk.io.transfer import TransferLateError
from kvdisk.memory import private_memory
from kvdisk.units import round_up

_SMALLEST = 64 << 10
_SLAB_BYTES = 2 << 20
_KEPT_BYTES_MAX = 256 << 20
_KEPT_SIZE_MAX = 64 << 20


class BouncePool:
    """Buffers by power-of-two size, cut from memory of `allocate(size)`. Used on one event loop."""

    def __init__(self, allocate: Callable[[int], Memory] = private_memory) -> None:
        self._allocate = allocate
        self._free: dict[int, list[Memory]] = defaultdict(list)
        self._kept_bytes = 0  # of free buffers that are larger than a slab
        self._cut_slab(_SMALLEST)

    def take(self, size: int) -> "_Taken":
        """A buffer of at least `size` bytes; back in the pool at the end, or, after a late transfer, once settled."""
        if size > _SLAB_BYTES:
            return _Taken(self._take_large(size), self._keep_large)
        capacity = max(_SMALLEST, 1 << (size - 1).bit_length())
        free = self._free[capacity]
        if not free:
            self._cut_slab(capacity)
        return _Taken(free.pop(), free.append)

    def _cut_slab(self, capacity: int) -> None:
        slab = self._allocate(_SLAB_BYTES)
        self._free[capacity] += [
            Memory(slab.view[start : start + capacity], slab.address + start, slab.pages)
            for start in range(0, slab.size - capacity + 1, capacity)
        ]

    def _take_large(self, size: int) -> Memory:
        if size > _KEPT_SIZE_MAX:
            return self._allocate(round_up(size, _SLAB_BYTES))
        capacity = 1 << (size - 1).bit_length()
        free = self._free[capacity]
        if not free:
            return self._allocate(capacity)
        self._kept_bytes -= capacity
        return free.pop()

    def _keep_large(self, memory: Memory) -> None:
        if memory.size <= _KEPT_SIZE_MAX and self._kept_bytes + memory.size <= _KEPT_BYTES_MAX:
            self._kept_bytes += memory.size
            self._free[memory.size].append(memory)


class _Taken:
    """`with` a buffer that `give_back` takes; a class, for a generator costs several times as much."""

    __slots__ = ("_give_back", "_memory")

    def __init__(self, memory: Memory, give_back: Callable[[Memory], None]) -> None:
        self._give_back = give_back
        self._memory = memory

    def __enter__(self) -> Memory:
        return self._memory

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, TransferLateError):
            error.settled.add_done_callback(lambda _: self._give_back(self._memory))
        else:
            self._give_back(self._memory)
