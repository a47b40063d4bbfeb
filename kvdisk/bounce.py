"""Aligned scratch memory for headers, footers and scans: small, pooled, not given out while the kernel may use it."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator

from kvdisk.io.protocol import Memory
from kvdisk.io.transfer import TransferLateError
from kvdisk.memory import private_memory

_SMALLEST = 64 << 10


class BouncePool:
    """Buffers by power-of-two size, each from `allocate(size)`. Used on one event loop."""

    def __init__(self, allocate: Callable[[int], Memory] = private_memory) -> None:
        self._allocate = allocate
        self._free: dict[int, list[Memory]] = defaultdict(list)

    @contextlib.contextmanager
    def take(self, size: int) -> Iterator[Memory]:
        """A buffer of at least `size` bytes; back in the pool at the end, or, after a late transfer, once settled."""
        capacity = max(_SMALLEST, 1 << (size - 1).bit_length())
        free = self._free[capacity]
        memory = free.pop() if free else self._allocate(capacity)
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
