"""Aligned scratch memory for headers, footers and scans: small, pooled, not given out while the kernel may use it.

Cut from slabs, for memory of one's own costs milliseconds (it is touched in, and its pages are looked up), and the
first slab is there before the first pack is.
"""

from collections import defaultdict
from collections.abc import Callable

from kvdisk.io.protocol import Memory
from kvdisk.io.transfer import TransferLateError
from kvdisk.memory import private_memory

_SMALLEST = 64 << 10
_SLAB_BYTES = 2 << 20


class BouncePool:
    """Buffers by power-of-two size, cut from memory of `allocate(size)`. Used on one event loop."""

    def __init__(self, allocate: Callable[[int], Memory] = private_memory) -> None:
        self._allocate = allocate
        self._free: dict[int, list[Memory]] = defaultdict(list)
        self._cut_slab(_SMALLEST)

    def take(self, size: int) -> "_Taken":
        """A buffer of at least `size` bytes; back in the pool at the end, or, after a late transfer, once settled."""
        capacity = max(_SMALLEST, 1 << (size - 1).bit_length())
        free = self._free[capacity]
        if not free:
            self._cut_slab(capacity)
        return _Taken(free)

    def _cut_slab(self, capacity: int) -> None:
        slab = self._allocate(max(capacity, _SLAB_BYTES))
        self._free[capacity] += [
            Memory(slab.view[start : start + capacity], slab.address + start, slab.pages)
            for start in range(0, slab.size - capacity + 1, capacity)
        ]


class _Taken:
    """`with` one of the buffers of `free`; a class, for a generator costs several times as much."""

    __slots__ = ("_free", "_memory")

    def __init__(self, free: list[Memory]) -> None:
        self._free = free
        self._memory = free.pop()

    def __enter__(self) -> Memory:
        return self._memory

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, TransferLateError):
            error.settled.add_done_callback(lambda _: self._free.append(self._memory))
        else:
            self._free.append(self._memory)
