"""Version 1 of the bytes on disk: segment header, pack, footer, epoch record. Defined here, told in docs/format.md.

What is encoded here is decoded here, and decoding trusts nothing: sizes, offsets and counts are checked against the
buffer and against the segment before they are used, and whatever does not fit is `None` (absent), never an exception
and never a guess. All integers are little-endian. Knows nothing of files, of the index, of torch or of vLLM.

A segment is one file of `segment_bytes`:

    [segment header][pack][pack]...[pack]  (free)  [footer]

A pack is one contiguous aligned write: a header that describes every chunk in it, then the payloads, each padded with
zeros to the alignment. What binds a pack to its place: the segment's random nonce and its own offset, both inside the
checksummed header. So neither the remains of a recycled segment, nor a pack that a disk wrote to the wrong place, nor
a payload that looks like a pack can pass for one.
"""

import itertools
import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvdisk.units import round_up

VERSION = 1
KEY_BYTES_MAX = 64
FINGERPRINT_BYTES = 32
ALIGNMENT_MIN = 4096
CODEC_NONE = 0
CIPHER_NONE = 0

Buffer = bytes | bytearray | memoryview

_SEGMENT_MAGIC = b"KVDsegm\n"
_PACK_MAGIC = b"KVDpack\n"
_FOOTER_MAGIC = b"KVDfoot\n"
_EPOCH_MAGIC = b"KVDepoc\n"

# magic, version, alignment, segment_bytes, sequence, nonce, epoch, fingerprint, reserved, checksum
_SEGMENT = struct.Struct("<8sIIQQQQ32s40sQ")
# magic, version, entry_count, header_bytes, reserved, pack_bytes, pack_sequence, segment_sequence, nonce, offset,
# fingerprint, reserved, checksum (of this struct with a zero checksum, then of the entries)
_PACK = struct.Struct("<8sIIIIQQQQQ32s24sQ")
# magic, version, pack_count, body_bytes, segment_sequence, nonce, checksum (of this struct with a zero checksum, then
# of the body); it fills the last bytes of the segment, the body (the packs' headers, unpadded) lies right before it
_FOOTER = struct.Struct("<8sIIQQQQ")
# magic, version, flags (1: after a reset), epoch, counter, checksum
_EPOCH = struct.Struct("<8sIIQQQ")

ENTRY_DTYPE = np.dtype(
    [
        ("key", "V64"),
        ("parent", "V64"),
        ("key_bytes", "u1"),
        ("parent_bytes", "u1"),
        ("codec", "u1"),
        ("cipher", "u1"),
        ("group", "<u4"),
        ("position", "<u8"),
        ("offset", "<u8"),
        ("stored_bytes", "<u8"),
        ("live_bytes", "<u8"),
        ("checksum", "<u8"),
        ("cipher_iv", "V16"),
        ("cipher_tag", "V16"),
    ]
)
"""One chunk in a pack's header, 208 bytes.

key, parent: the first key_bytes / parent_bytes (0: none) count, the rest is zero. group: KV cache group. position: end
of the chunk in tokens. offset: of the payload, from the pack's start. stored_bytes: what the checksum covers, a
multiple of the alignment. live_bytes: before padding and codec. codec, cipher: 0 is none; a reader that does not know
one treats the chunk as absent.
"""

_STRUCT_CODES = {"|V64": "64s", "|V16": "16s", "|u1": "B", "<u4": "I", "<u8": "Q"}
put_entry = struct.Struct("<" + "".join(_STRUCT_CODES[ENTRY_DTYPE[n].str] for n in ENTRY_DTYPE.names or ())).pack_into
"""put_entry(buffer, offset, *fields of ENTRY_DTYPE): several times as fast as numpy for the few chunks of a pack."""

SEGMENT_HEADER_BYTES = _SEGMENT.size
PACK_HEADER_BYTES = _PACK.size
ENTRY_BYTES = ENTRY_DTYPE.itemsize
FOOTER_BYTES = _FOOTER.size
EPOCH_BYTES = _EPOCH.size
ENTRY_COUNT_MAX = 1 << 20
SEGMENT_BYTES_LIMIT = 1 << 48
COUNTER_LIMIT = 1 << 63
"""Sequences and epochs stay below it, so that one read from a disk can always be counted on from."""

_PIECE_KEEPING_GIL = 64 << 10
_ONE_CALL = int(xxhash.VERSION.split(".")[0]) >= 4  # 3.4 keeps the GIL in that call, but not in a state's update

assert (SEGMENT_HEADER_BYTES, PACK_HEADER_BYTES, ENTRY_BYTES, FOOTER_BYTES) == (128, 128, 208, 48)


def checksum(*parts: Buffer) -> int:
    """XXH3-64 of the parts in order. Releases the GIL on large parts; docs/format.md says why this hash."""
    if len(parts) == 1 and _ONE_CALL:
        return xxhash.xxh3_64_intdigest(parts[0])
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


def checksum_keeping_gil(*parts: Buffer) -> int:
    """The same, in pieces so small that xxhash keeps the GIL: for callers who would wait long to get it back.

    xxhash 4.1 gives it up somewhere between 64 and 96 KiB.
    """
    state = xxhash.xxh3_64()
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _PIECE_KEEPING_GIL):
            state.update(view[start : start + _PIECE_KEEPING_GIL])
    return state.intdigest()


class SegmentHeader(NamedTuple):
    """First bytes of a segment.

    alignment: of packs and payloads, bytes. sequence: of this use of the file; recycling gives a new one. nonce:
    random, repeated in every pack. epoch: of the namespace when the segment was opened. fingerprint: of the namespace.
    """

    alignment: int
    segment_bytes: int
    sequence: int
    nonce: int
    epoch: int
    fingerprint: bytes


def encode_segment_header(header: SegmentHeader) -> bytes:
    """`header` padded with zeros to one alignment block, which is how it is written."""
    assert len(header.fingerprint) == FINGERPRINT_BYTES
    fields = (_SEGMENT_MAGIC, VERSION, *header, bytes(40))
    raw = _SEGMENT.pack(*fields, checksum(_SEGMENT.pack(*fields, 0)))
    return raw.ljust(header.alignment, b"\0")


def decode_segment_header(raw: Buffer, fingerprint: bytes | None = None) -> SegmentHeader | None:
    """The header in `raw`, or None: too short, damaged, another version, or (if given) another fingerprint."""
    if len(raw) < _SEGMENT.size:
        return None
    magic, version, *fields, reserved, stored = _SEGMENT.unpack_from(raw)
    if magic != _SEGMENT_MAGIC or version != VERSION:
        return None
    header = SegmentHeader(*fields)
    if stored != checksum(_SEGMENT.pack(magic, version, *header, reserved, 0)):
        return None
    if header.alignment < ALIGNMENT_MIN or header.alignment & (header.alignment - 1):
        return None
    if header.segment_bytes % header.alignment or header.segment_bytes < 2 * header.alignment:
        return None
    if header.segment_bytes > SEGMENT_BYTES_LIMIT or max(header.sequence, header.epoch) >= COUNTER_LIMIT:
        return None
    if fingerprint is not None and header.fingerprint != fingerprint:
        return None
    return header


class Pack(NamedTuple):
    """A pack's header: where it lies and which chunks it holds.

    offset: of the pack in its segment, bytes. header_bytes: to the first payload. pack_bytes: header and payloads.
    sequence: grows with every pack of a namespace instance, so of two packs with one key the higher is newer.
    entries: one ENTRY_DTYPE record a chunk.
    """

    offset: int
    header_bytes: int
    pack_bytes: int
    sequence: int
    entries: npt.NDArray[np.void]

    @property
    def raw_bytes(self) -> int:
        """Bytes of the header without padding, as the footer repeats it."""
        return PACK_HEADER_BYTES + ENTRY_BYTES * len(self.entries)


def pack_header_bytes(entry_count: int, alignment: int) -> int:
    """Bytes that a header of `entry_count` chunks takes on disk."""
    return round_up(PACK_HEADER_BYTES + ENTRY_BYTES * entry_count, alignment)


def encode_pack(pack: Pack, segment: SegmentHeader) -> bytes:
    """The header of `pack`, without padding (`pack.raw_bytes`)."""
    assert 0 < len(pack.entries) <= ENTRY_COUNT_MAX
    entries = pack.entries.tobytes()
    fields = (
        _PACK_MAGIC,
        VERSION,
        len(pack.entries),
        pack.header_bytes,
        0,
        pack.pack_bytes,
        pack.sequence,
        segment.sequence,
        segment.nonce,
        pack.offset,
        segment.fingerprint,
        bytes(24),
    )
    return _PACK.pack(*fields, checksum(_PACK.pack(*fields, 0), entries)) + entries


def decode_pack(raw: Buffer, offset: int, segment: SegmentHeader) -> Pack | None:
    """The pack whose header starts `raw` and whose place is `offset` in `segment`; None if it is anything else.

    Args:
        raw: bytes from the pack's start; must hold the whole header (see `pack_header_size`).
        offset: where in the segment they were read, or where the pack claims to lie when read from a footer.
        segment: the segment's own, already verified header.
    """
    fields = _pack_fields(raw, offset, segment)
    if fields is None:
        return None
    count, header_bytes, pack_bytes, sequence = fields[2], fields[3], fields[5], fields[6]
    entries_end = _PACK.size + ENTRY_BYTES * count
    if entries_end > len(raw):
        return None
    entries_raw = bytes(memoryview(raw)[_PACK.size : entries_end])
    if fields[-1] != checksum(_PACK.pack(*fields[:-1], 0), entries_raw):
        return None
    pack = Pack(offset, header_bytes, pack_bytes, sequence, np.frombuffer(entries_raw, ENTRY_DTYPE))
    return pack if _entries_fit(pack.entries, [pack], segment.alignment) else None


def pack_header_size_at(raw: Buffer, offset: int, segment: SegmentHeader) -> int:
    """Bytes that the whole header of a pack at this place needs, 0 if `raw` does not begin one; see `decode_pack`.

    Its first bytes say what binds it to its place, so remains of other packs cost nothing more. Whoever copies them
    can still have any header read that fits into the segment.
    """
    fields = _pack_fields(raw, offset, segment)
    return 0 if fields is None else _PACK.size + ENTRY_BYTES * int(fields[2])


def _pack_fields(raw: Buffer, offset: int, segment: SegmentHeader) -> tuple[Any, ...] | None:
    """The fields of the _PACK that `raw` begins with, if it belongs there and every number in it is possible there."""
    if len(raw) < _PACK.size:
        return None
    fields = _PACK.unpack_from(raw)
    magic, version, count, header_bytes, _, pack_bytes, sequence, seg_sequence, nonce, place, fingerprint, *_ = fields
    if (magic, version, place) != (_PACK_MAGIC, VERSION, offset):
        return None
    if (seg_sequence, nonce, fingerprint) != (segment.sequence, segment.nonce, segment.fingerprint):
        return None
    if not 0 < count <= ENTRY_COUNT_MAX or sequence >= COUNTER_LIMIT:
        return None
    if offset < segment.alignment or (offset | header_bytes | pack_bytes) & (segment.alignment - 1):
        return None
    fits = _PACK.size + ENTRY_BYTES * count <= header_bytes <= pack_bytes <= segment.segment_bytes - offset
    return fields if fits else None


def pack_header_size(raw: Buffer) -> int:
    """Bytes that a whole header starting like `raw` would need, 0 if it is none, wherever it may belong."""
    if len(raw) < _PACK.size:
        return 0
    magic, version, count, *_ = _PACK.unpack_from(raw)
    valid = magic == _PACK_MAGIC and version == VERSION and 0 < count <= ENTRY_COUNT_MAX
    return _PACK.size + ENTRY_BYTES * count if valid else 0


def _entries_fit(entries: npt.NDArray[np.void], packs: list[Pack], alignment: int) -> bool:
    """Whether every number in checksummed `entries`, those of `packs` in order, is possible; a stranger can compute
    checksums too. Recovery asks this of tens of thousands of packs, and numpy's calls cost more than a few entries."""
    counts = [len(pack.entries) for pack in packs]
    offset, stored, live = entries["offset"], entries["stored_bytes"], entries["live_bytes"]
    key_bytes, has_codec = entries["key_bytes"], entries["codec"] != CODEC_NONE
    # Each term is bounded before sums are formed, so that no unsigned sum can wrap.
    limit = np.repeat(np.array([pack.pack_bytes for pack in packs], np.uint64), counts)
    possible = (key_bytes > 0) & (key_bytes <= KEY_BYTES_MAX) & (entries["parent_bytes"] <= KEY_BYTES_MAX)
    possible &= (offset <= limit) & (stored <= limit) & (stored > 0) & (live > 0)
    possible &= ((offset | stored) & np.uint64(alignment - 1) == 0) & ((live <= stored) | has_codec)
    if not possible.all():
        return False
    ends = offset + stored
    begins = np.empty_like(ends)  # the first byte that may be a chunk's: after the one before it, or the pack's header
    begins[1:] = ends[:-1]
    begins[[0, *itertools.accumulate(counts[:-1])]] = [pack.header_bytes for pack in packs]
    return bool(((offset >= begins) & (ends <= limit)).all())


def entry_keys(entries: npt.NDArray[np.void], field: str = "key") -> list[bytes]:
    """The keys (or parents) of `entries` as bytes of their true lengths; an absent parent is b""."""
    lengths = entries[f"{field}_bytes"]
    length = int(lengths[0]) if len(lengths) else 0
    if 0 < length <= KEY_BYTES_MAX and (lengths == length).all():  # as good as always, and ten times as fast
        start = 64 * (field == "parent")
        part = np.dtype({"names": ["key"], "formats": [f"V{length}"], "offsets": [start], "itemsize": ENTRY_BYTES})
        keys: list[bytes] = entries.view(part)["key"].tolist()
        return keys
    return [key[:length] for key, length in zip(entries[field].tolist(), lengths.tolist(), strict=True)]


def footer_bytes(pack_raw_bytes: int, alignment: int) -> int:
    """Bytes a footer takes at the end of its segment, for packs whose unpadded headers sum to `pack_raw_bytes`."""
    return round_up(pack_raw_bytes + FOOTER_BYTES, alignment)


def footer_bytes_max(segment: SegmentHeader) -> int:
    """Bytes of the largest footer there can be: a chunk takes a block at least, and most of a header if it is alone."""
    return footer_bytes(
        (PACK_HEADER_BYTES + ENTRY_BYTES) * (segment.segment_bytes // segment.alignment), segment.alignment
    )


def encode_footer(pack_headers: list[bytes], segment: SegmentHeader) -> bytes:
    """The footer, padded in front so that it is a multiple of the alignment; it ends where the segment ends."""
    body = b"".join(pack_headers)
    fields = (_FOOTER_MAGIC, VERSION, len(pack_headers), len(body), segment.sequence, segment.nonce)
    tail = _FOOTER.pack(*fields, checksum(_FOOTER.pack(*fields, 0), body))
    return (body + tail).rjust(footer_bytes(len(body), segment.alignment), b"\0")


def footer_size(raw: Buffer, segment: SegmentHeader) -> int:
    """Bytes of the footer that ends with `raw` (the segment's last bytes), 0 if there is none."""
    if len(raw) < _FOOTER.size:
        return 0
    magic, version, _, body_bytes, sequence, nonce, _ = _FOOTER.unpack_from(raw, len(raw) - _FOOTER.size)
    if (magic, version, sequence, nonce) != (_FOOTER_MAGIC, VERSION, segment.sequence, segment.nonce):
        return 0
    size = footer_bytes(body_bytes, segment.alignment)
    return size if size < segment.segment_bytes else 0


def decode_footer(raw: Buffer, segment: SegmentHeader) -> list[Pack] | None:
    """All packs named by the footer that ends with `raw`; None if any byte of it is not as it was written."""
    if len(raw) < _FOOTER.size or footer_size(raw, segment) > len(raw) or not footer_size(raw, segment):
        return None
    start = len(raw) - _FOOTER.size
    fields = _FOOTER.unpack_from(raw, start)
    pack_count, body_bytes = fields[2], fields[3]
    body = bytearray(memoryview(raw)[start - body_bytes : start])
    if fields[-1] != checksum(_FOOTER.pack(*fields[:-1], 0), body):
        return None
    found: list[tuple[Any, ...]] = []
    entries_raw: list[memoryview] = []
    view, at = memoryview(body), 0
    while at < body_bytes:
        if body_bytes - at < _PACK.size:
            return None
        one = _pack_fields(view[at : at + _PACK.size], _PACK.unpack_from(body, at)[9], segment)
        first, at = at, at + (0 if one is None else _PACK.size + ENTRY_BYTES * one[2])
        if one is None or at > body_bytes:
            return None
        body[first + _PACK.size - 8 : first + _PACK.size] = bytes(8)  # the checksum is of a header without it
        if one[-1] != checksum(view[first:at]):
            return None
        found.append(one)
        entries_raw.append(view[first + _PACK.size : at])
    return _packs(found, b"".join(entries_raw), segment) if len(found) == pack_count else None


def _packs(found: list[tuple[Any, ...]], entries_raw: bytes, segment: SegmentHeader) -> list[Pack] | None:
    """The packs of a footer, by their fields; None if they, or their entries, do not fit."""
    entries = np.frombuffer(entries_raw, ENTRY_DTYPE)
    packs: list[Pack] = []
    first, end = 0, segment.alignment
    for _, _, count, header_bytes, _, pack_bytes, sequence, _, _, offset, *_ in found:
        pack = Pack(offset, header_bytes, pack_bytes, sequence, entries[first : first + count])
        if offset < end:
            return None
        packs.append(pack)
        first += count
        end = offset + pack_bytes
    return packs if not packs or _entries_fit(entries, packs, segment.alignment) else None


class EpochRecord(NamedTuple):
    """The namespace's epoch. counter: of two records the higher is newer. after_reset: it began with a reset of a
    running server, whose weights may have been others since than those it was started with."""

    epoch: int
    counter: int
    after_reset: bool = False


def encode_epoch(record: EpochRecord) -> bytes:
    """One alignment block. Two are kept, written in turn, so that a torn write leaves the other."""
    fields = (_EPOCH_MAGIC, VERSION, int(record.after_reset), record.epoch, record.counter)
    return _EPOCH.pack(*fields, checksum(_EPOCH.pack(*fields, 0))).ljust(ALIGNMENT_MIN, b"\0")


def decode_epoch(raw: Buffer) -> EpochRecord | None:
    """The record in `raw`, or None."""
    if len(raw) < _EPOCH.size:
        return None
    *fields, stored = _EPOCH.unpack_from(raw)
    if fields[0] != _EPOCH_MAGIC or fields[1] != VERSION or stored != checksum(_EPOCH.pack(*fields, 0)):
        return None
    _, _, flags, epoch, counter = fields
    return EpochRecord(epoch, counter, bool(flags & 1)) if max(epoch, counter) < COUNTER_LIMIT else None
