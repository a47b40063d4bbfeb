"""The threads in which a data plane hashes."""

import os
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import NamedTuple

_PACKS_NICE = 5
"""A third of another thread's share of a crowded core."""


class HashThreads(NamedTuple):
    """Where commands are hashed; none of these threads touches a disk.

    A queue each, as with transfers: what is read is waited for and does not queue behind packs, and a short one not
    behind somebody's thousand chunks. Nobody waits for a pack, so its threads let others have the cores first.
    """

    packs: Executor
    reads: Executor
    short: Executor

    @classmethod
    def start(cls) -> "HashThreads":
        """Idle threads cost nothing, so each kind has its own; two keep up with any disk but a fast array."""
        kinds = zip(cls._fields, (2, 2, 1), (_stand_back, None, None), strict=True)
        return cls(*(ThreadPoolExecutor(count, f"kvdisk-hash-{name}", begin) for name, count, begin in kinds))

    def close(self) -> None:
        """Let them end with what they have."""
        for threads in self:
            threads.shutdown(wait=False)


def _stand_back() -> None:
    """Lower this thread's priority; on Linux each thread has its own."""
    os.nice(_PACKS_NICE)
