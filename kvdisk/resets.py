"""Resets made durable: until the new epoch is on disk, what it disowned would come back at a restart.

An epoch that could not be written is tried again, for as long as it takes.
Pure: told the time, commands go out and completions come back as data.
"""

import math
from collections import Counter
from collections.abc import Callable, Set

from kvdisk.commands import Command, Completion, WriteEpoch

EPOCH_RETRY_S = 5.0
"""Between attempts to make a reset durable on a disk that fails."""


class Resets:
    """Owns the writes of epochs.

    Args:
        counters: where it counts.
        new_id: gives command ids.
        late: ids of commands that were late and have not settled.
    """

    def __init__(self, counters: Counter[str], *, new_id: Callable[[], int], late: Set[int]) -> None:
        self._counters = counters
        self._new_id = new_id
        self._late = late
        self._epoch = 0  # the last
        self._retry_at = math.inf
        self._writing: set[int] = set()
        self._out: list[Command] = []

    @property
    def busy(self) -> bool:
        """Whether a write is on its way; what is late has failed already."""
        return any(one not in self._late for one in self._writing)

    @property
    def pending(self) -> bool:
        """Whether a write is on its way, late or not."""
        return bool(self._writing)

    def write(self, epoch: int) -> None:
        """Make `epoch` durable."""
        self._epoch = epoch
        self._retry_at = math.inf
        command = WriteEpoch(self._new_id(), epoch)
        self._writing.add(command.id)
        self._out.append(command)

    def pump(self, now: float) -> list[Command]:
        """The commands that can be issued at `now`."""
        if now >= self._retry_at:
            self.write(self._epoch)
        out, self._out = self._out, []
        return out

    def complete(self, completion: Completion, now: float) -> bool:
        """Take a completion if it is of a command from here; whether it was."""
        if completion.id not in self._writing:
            return False
        if not completion.late:
            self._writing.remove(completion.id)
        if completion.error:
            self._counters["epochs_not_durable"] += 1
            self._retry_at = now + EPOCH_RETRY_S
        return True
