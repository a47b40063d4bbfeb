"""Processes by names that are never used twice: a pid returns, a pid with its start time in its namespace does not.

What may be said of a name that was read somewhere: that its process is surely dead. Everything else (alive, in another
pid namespace, damaged, of an older version) counts as alive, since somebody may depend on it.
"""

import os
from typing import NamedTuple


class ProcessName(NamedTuple):
    """start: in clock ticks since boot. namespace: inode of the pid namespace in which `pid` means something."""

    pid: int
    start: int
    namespace: int

    def __str__(self) -> str:
        return f"{self.pid} {self.start} {self.namespace}"

    @classmethod
    def parse(cls, text: str) -> "ProcessName | None":
        """The name in `text`, as `str` wrote it."""
        words = text.split()
        if len(words) != 3 or not all(word.isascii() and word.isdigit() and len(word) < 20 for word in words):
            return None
        return cls(*map(int, words))

    @property
    def is_dead(self) -> bool:
        """Whether it is surely gone; a zombie is."""
        return self.namespace == pid_namespace() and process_start(self.pid) != self.start


def this_process() -> ProcessName:
    """The calling process."""
    pid = os.getpid()
    return ProcessName(pid, process_start(pid) or 0, pid_namespace())


def pid_namespace() -> int:
    """Only within one's own can a pid be called dead."""
    return os.stat("/proc/self/ns/pid").st_ino


def process_start(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot: with the pid it names a process for good. None: gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name may hold spaces and parentheses; fields 3 onwards follow the last ')'.
            after_name = file.read().rpartition(b")")[2].split()
        return None if after_name[0] in (b"Z", b"X") else int(after_name[19])
    except (OSError, ValueError, IndexError):
        return None
