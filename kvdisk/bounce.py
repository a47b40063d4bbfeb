"""Aligned scratch memory for headers, footers and scans: small, pooled, not given out while the kernel may use it.

Cut from slabs, for memory of one's own costs milliseconds (it is touched in, and its pages are looked up), and the
first slab is there before the first pack is.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator

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

    @contextlib.contextmanager
    def take(self, size: int) -> Iterator[Memory]:
        """A buffer of at least `size` bytes; back in the pool at the end, or, after a late transfer, once settled."""
        capacity = max(_SMALLEST, 1 << (size - 1).bit_length())
        free = self._free[capacity]
        if not free:
            self._cut_slab(capacity)
        memory = free.pop()
        try:
            yield memory
        except TransferLateError as late:
            late.settled.add_done_callback(lambda _: free.append(memory))
            raise
        except BaseException:
            free.append(memory)
            raise
        else:
            free.append(memory)

    def _cut_slab(self, capacity: int) -> None:
        slab = self._allocate(max(capacity, _SLAB_BYTES))
        self._free[capacity] += [
            Memory(slab.view[start : start + capacity], slab.address + start, slab.pages)
            for start in range(0, slab.size - capacity + 1, capacity)
        ]
