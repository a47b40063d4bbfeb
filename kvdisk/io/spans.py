"""Arithmetic on spans: what an engine may be asked, and how a transfer is cut into ops. Pure.

Checked for every op, not only in tests: io_uring takes raw addresses, and one wrong length would let the disk write
over somebody else's memory.
"""

from collections.abc import Iterator, Sequence

from kvdisk.io.protocol import Op, Span

SPANS_MAX = 1024  # IOV_MAX of Linux, <linux/uio.h>
OP_BYTES_MAX = 0x7FFFF000  # MAX_RW_COUNT of Linux, <linux/fs.h>


def span_bytes(op: Op) -> int:
    """Bytes of all spans of `op`.

    Raises:
        ValueError: no spans, too many, or one that is empty or not inside its memory.
    """
    return sum(addresses(op)[1::2])


def addresses(op: Op) -> list[int]:
    """The spans of `op` as [address, length, address, length, ...], the entries of its `struct iovec`s.

    Raises:
        ValueError: no spans, too many, too many bytes, or a span that is empty or not inside its memory.
    """
    spans = op.spans
    if not 0 < len(spans) <= SPANS_MAX:
        raise ValueError(f"an op has {len(spans)} spans: 1 to {SPANS_MAX} are allowed")
    if op.offset < 0:
        raise ValueError(f"offset must not be negative, not {op.offset}")
    flat: list[int] = []
    total = 0
    for memory, start, length in spans:
        if start < 0 or length <= 0 or start + length > memory.size:
            raise ValueError(f"span of {length} bytes from {start} is not inside its memory of {memory.size} bytes")
        flat += (memory.address + start, length)
        total += length
    if total > OP_BYTES_MAX:
        raise ValueError(f"an op moves {total} bytes: at most {OP_BYTES_MAX} are allowed")
    return flat


def merged(spans: Sequence[Span], alignment: int) -> list[Span]:
    """`spans` in order, neighbours in memory joined.

    Raises:
        ValueError: a span that is empty, not inside its memory, or not aligned.
    """
    joined: list[Span] = []
    for span in spans:
        memory, start, length = span
        if start < 0 or length <= 0 or start + length > memory.size:
            raise ValueError(f"span of {length} bytes from {start} is not inside its memory of {memory.size} bytes")
        if (start | length) % alignment:
            raise ValueError(f"span of {length} bytes from {start}: direct I/O wants multiples of {alignment}")
        if joined:
            last = joined[-1]
            if last.memory is memory and last.start + last.length == start:
                joined[-1] = Span(memory, last.start, last.length + length)
                continue
        joined.append(span)
    return joined


def cut(spans: Sequence[Span], total: int, piece_bytes: int, alignment: int) -> Iterator[tuple[int, tuple[Span, ...]]]:
    """Cut one contiguous run of the file, of `total` bytes, into pieces of about equal size: (bytes, spans) each.

    At most `piece_bytes` (a multiple of `alignment`) and `SPANS_MAX` spans a piece. Equal, because a full piece
    followed by a small rest costs the device a request of its own for little.
    """
    if total <= piece_bytes and len(spans) <= SPANS_MAX:  # most reads
        yield total, tuple(spans)
        return
    count = -(-total // piece_bytes)
    target = min(piece_bytes, -(-total // (count * alignment)) * alignment)
    piece: list[Span] = []
    held = 0
    for span in spans:
        memory, start, length = span
        while length:
            take = min(length, target - held)
            piece.append(span if take == span.length else Span(memory, start, take))
            held, start, length = held + take, start + take, length - take
            if held == target or len(piece) == SPANS_MAX:
                yield held, tuple(piece)
                piece, held = [], 0
    if piece:
        yield held, tuple(piece)


def skip(spans: Sequence[Span], count: int) -> tuple[Span, ...]:
    """What is left of `spans` after their first `count` bytes."""
    for index, (memory, start, length) in enumerate(spans):
        if count < length:
            return (Span(memory, start + count, length - count), *spans[index + 1 :])
        count -= length
    return ()
