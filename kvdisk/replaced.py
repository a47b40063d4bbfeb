"""Where bytes of keys may lie on disk that are not known any more, so that newer bytes of these keys know of them.

Bounded: what was recycled since is dropped now and then, so there are at most twice as many as there are such chunks on
disk.
"""

from kvdisk.segments import SegmentTable, SegmentUse

REPLACED_MIN = 4096
"""Fewer remembered places are not worth a pass over them."""


class Replaced:
    """Keys -> the newest use of a segment in which their old bytes may lie."""

    def __init__(self, table: SegmentTable) -> None:
        self._table = table
        self._uses: dict[bytes, SegmentUse] = {}
        self._count_max = REPLACED_MIN

    def remember(self, key: bytes, use: SegmentUse) -> None:
        """Bytes of `key` lie in `use`, and newer ones may come."""
        self._uses[key] = use
        if len(self._uses) >= self._count_max:
            self._uses = {key: use for key, use in self._uses.items() if self._table.is_on_disk(use)}
            self._count_max = max(REPLACED_MIN, 2 * len(self._uses))

    def pop(self, key: bytes) -> SegmentUse | None:
        """Where old bytes of `key` may lie: whoever stores new ones knows it from now on."""
        return self._uses.pop(key, None)

    def clear(self) -> None:
        """All old bytes are stale: none can come back."""
        self._uses.clear()
