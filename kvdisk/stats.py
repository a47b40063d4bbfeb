"""What the write path counts: one object, to which the parts of the write path add."""

from dataclasses import dataclass


@dataclass(slots=True)
class WriterStats:
    """Counters since open; bytes are live bytes unless they say otherwise."""

    bytes_flushed: int = 0
    bytes_rewritten: int = 0
    bytes_written: int = 0  # packs, as sent to the disk
    chunks_flushed: int = 0
    chunks_compressed: int = 0  # of those
    chunks_not_flushed: int = 0
    chunks_evicted: int = 0
    segments_recycled: int = 0
    writes_failed: int = 0
    writes_no_space: int = 0
