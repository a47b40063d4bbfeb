"""The epoch of a namespace, durable: what was written in an earlier one is stale. One file with two records.

Written in place, over the older record: that needs no space on a full disk, and a torn write leaves the other record.
A record that is damaged means that the epoch is unknown, and then nothing on disk may be served.
"""

import errno
import os

from kvdisk import layout
from kvdisk.private_files import no_follow


def read_epoch(path: str) -> layout.EpochRecord | None:
    """The record in force; epoch 0 where there is no file; None if a record is damaged.

    Also where the other record is whole. Whether the damaged one was the older or the newer nobody can tell, and a
    record is only torn while an epoch is being written, that is, while everything older is being disowned.
    """
    try:
        with open(path, "rb", opener=no_follow) as file:
            raw = file.read(2 * layout.ALIGNMENT_MIN)
    except FileNotFoundError:
        return layout.EpochRecord(0, 0)
    slots = _slots(raw)
    records = [layout.decode_epoch(slot) for slot in slots if slot]
    known = [record for record in records if record is not None]
    if not known or len(known) < len(records):
        return None
    return max(known, key=lambda record: (record.epoch, record.counter))


def write_epoch(path: str, epoch: int, after_reset: bool) -> None:
    """Make `epoch` durable; a lower one never replaces a higher, nor a settled one the note of a reset.

    Args:
        path: of the file, made if it is missing; the caller sees that nobody else writes it.
        epoch: the new one.
        after_reset: whether it begins with a reset of a running server.

    Raises:
        OSError: it may not be durable.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        slots = _slots(os.pread(fd, 2 * layout.ALIGNMENT_MIN, 0))
        records = [layout.decode_epoch(slot) for slot in slots]
        damaged = [number for number in (0, 1) if slots[number] and records[number] is None]
        known = max((r for r in records if r), key=lambda r: (r.epoch, r.counter), default=None)
        if known is not None and not damaged:
            new = epoch > known.epoch or (epoch == known.epoch and after_reset and not known.after_reset)
            if not new:
                return
        counters = [record.counter if record else -1 for record in records]
        raw = layout.encode_epoch(layout.EpochRecord(epoch, max(counters) + 1, after_reset))
        for number in damaged or [counters.index(min(counters))]:
            written = os.pwrite(fd, raw, number * layout.ALIGNMENT_MIN)
            if written != len(raw):
                raise OSError(errno.EIO, f"{path}: {written} of {len(raw)} bytes written")
        os.fsync(fd)
    finally:
        os.close(fd)


def _slots(raw: bytes) -> tuple[bytes, bytes]:
    return raw[: layout.ALIGNMENT_MIN], raw[layout.ALIGNMENT_MIN :]
