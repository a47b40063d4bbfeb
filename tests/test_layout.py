"""The bytes on disk: equal to docs/format.md and to the golden file, and nothing else is ever taken for them."""

import importlib.util
import random
import re
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdisk import layout
from kvdisk.layout import Pack, SegmentHeader

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden" / "segment_v1.seg"

spec = importlib.util.spec_from_file_location("make_segment_v1", GOLDEN.with_name("make_segment_v1.py"))
assert spec is not None
assert spec.loader is not None
golden = importlib.util.module_from_spec(spec)
spec.loader.exec_module(golden)

HEADER: SegmentHeader = golden.HEADER
RAW = GOLDEN.read_bytes()
FIRST = HEADER.alignment
FOOTER_SIZE = layout.footer_size(RAW, HEADER)


# ---- one definition


def documented(title: str) -> list[tuple[str, int, int]]:
    """(field, offset, size) of the table under a heading of docs/format.md."""
    text = (ROOT / "docs" / "format.md").read_text()
    section = text.split(f"## {title}")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\w+) \|", section, re.M)
    return [(name, int(offset), int(size)) for offset, size, name in rows]


def offsets(structure: struct.Struct, names: str) -> list[tuple[str, int, int]]:
    parts = re.findall(r"\d*[a-zA-Z]", structure.format.lstrip("<"))
    codes: list[str] = []
    for part in parts:
        codes += [part] if part.endswith("s") else [part[-1]] * int(part[:-1] or 1)
    found, at = [], 0
    for name, code in zip(names.split(), codes, strict=True):
        size = struct.calcsize("<" + code)
        found.append((name, at, size))
        at += size
    assert at == structure.size
    return found


SEGMENT = "magic version alignment segment_bytes sequence nonce epoch fingerprint reserved checksum"
PACK = """magic version entry_count header_bytes reserved_1 pack_bytes pack_sequence segment_sequence nonce offset
          fingerprint reserved_2 checksum"""
FOOTER = "magic version pack_count body_bytes segment_sequence nonce checksum"
EPOCH = "magic version flags epoch counter checksum"


@pytest.mark.parametrize("title, structure, names", [
    ("Segment header", layout._SEGMENT, SEGMENT), ("Pack header", layout._PACK, PACK),
    ("Footer", layout._FOOTER, FOOTER), ("Epoch record", layout._EPOCH, EPOCH),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_the_document_has_every_field_of_the_structures(title: str, structure: struct.Struct, names: str) -> None:
    assert documented(title) == offsets(structure, names)


def test_the_document_has_every_field_of_an_entry() -> None:
    fields = layout.ENTRY_DTYPE.fields
    assert fields is not None
    assert documented("Entry") == [(name, int(at), dtype.itemsize) for name, (dtype, at) in fields.items()]
    assert sum(size for _, _, size in documented("Entry")) == layout.ENTRY_BYTES, "no gaps"


def test_the_worked_example_is_the_golden_file() -> None:
    text = (ROOT / "docs" / "format.md").read_text()
    lines = re.findall(r"^    ([0-9a-f]{8})  ((?:[0-9a-f]{2} +){16})\|", text, re.M)
    assert len(lines) > 15
    for offset, octets in lines:
        at = int(offset, 16)
        assert RAW[at : at + 16] == bytes.fromhex(octets), offset


# ---- the golden file


def test_the_golden_segment_decodes_to_what_was_written() -> None:
    header = layout.decode_segment_header(RAW, HEADER.fingerprint)
    assert header == HEADER
    packs = layout.decode_footer(RAW[-FOOTER_SIZE:], HEADER)
    assert packs is not None
    content = []
    for pack in packs:
        chunks = []
        columns = zip(
            layout.entry_keys(pack.entries), layout.entry_keys(pack.entries, "parent"), pack.entries, strict=True
        )
        for key, parent, entry in columns:
            at = pack.offset + int(entry["offset"])
            stored = RAW[at : at + int(entry["stored_bytes"])]
            assert layout.checksum(stored) == int(entry["checksum"])
            data = stored[: int(entry["live_bytes"])]
            chunks.append((key, parent, int(entry["group"]), int(entry["position"]), data))
        content.append((pack.sequence, chunks))
        walked = layout.decode_pack(RAW[pack.offset :], pack.offset, HEADER)
        assert walked is not None
        assert walked.entries.tobytes() == pack.entries.tobytes()
        assert (walked.header_bytes, walked.pack_bytes) == (pack.header_bytes, pack.pack_bytes)
    assert content == golden.CONTENT


def test_the_golden_segment_is_encoded_to_the_same_bytes() -> None:
    assert golden.segment() == RAW


# ---- damage


def with_byte_flipped(raw: bytes, at: int, bit: int = 1) -> bytes:
    return raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :]


@pytest.mark.parametrize("bit", [1, 0x80])
def test_no_flipped_byte_of_a_segment_header_is_accepted(bit: int) -> None:
    for at in range(layout.SEGMENT_HEADER_BYTES):
        assert layout.decode_segment_header(with_byte_flipped(RAW[:4096], at, bit)) is None, at


@pytest.mark.parametrize("bit", [1, 0x80])
def test_no_flipped_byte_of_a_pack_header_or_entry_is_accepted(bit: int) -> None:
    for pack, _ in golden.packs():
        raw = RAW[pack.offset : pack.offset + pack.header_bytes]
        assert layout.decode_pack(raw, pack.offset, HEADER) is not None
        for at in range(pack.raw_bytes):
            assert layout.decode_pack(with_byte_flipped(raw, at, bit), pack.offset, HEADER) is None, at


def test_no_flipped_byte_of_a_footer_is_accepted() -> None:
    raw = RAW[-FOOTER_SIZE:]
    used = layout.FOOTER_BYTES + sum(pack.raw_bytes for pack, _ in golden.packs())
    for at in range(len(raw) - used, len(raw)):
        assert layout.decode_footer(with_byte_flipped(raw, at), HEADER) is None, at


def test_no_flipped_byte_of_an_epoch_record_is_accepted() -> None:
    raw = layout.encode_epoch(layout.EpochRecord(12, 34, after_reset=True))
    assert layout.decode_epoch(raw) == (12, 34, True)
    for at in range(layout.EPOCH_BYTES):
        assert layout.decode_epoch(with_byte_flipped(raw, at)) is None, at


def test_nothing_cut_off_is_accepted_and_nothing_raises() -> None:
    pack, _ = golden.packs()[1]
    raw = RAW[pack.offset : pack.offset + pack.raw_bytes]
    for length in range(pack.raw_bytes):
        assert layout.decode_pack(raw[:length], pack.offset, HEADER) is None
        assert layout.pack_header_size(raw[:length]) in (0, pack.raw_bytes)
    for length in range(layout.SEGMENT_HEADER_BYTES):
        assert layout.decode_segment_header(RAW[:length]) is None
    footer = RAW[-FOOTER_SIZE:]
    for length in range(FOOTER_SIZE):
        assert layout.decode_footer(footer[:length], HEADER) is None
        body = layout.decode_footer(footer[FOOTER_SIZE - length :], HEADER)
        assert body is None or length == FOOTER_SIZE
    for length in range(layout.EPOCH_BYTES):
        assert layout.decode_epoch(layout.encode_epoch(layout.EpochRecord(1, 2))[:length]) is None


def test_a_pack_counts_only_at_its_own_place_and_in_its_own_segment() -> None:
    pack, _ = golden.packs()[0]
    raw = RAW[pack.offset :]
    assert layout.decode_pack(raw, pack.offset, HEADER) is not None
    assert layout.decode_pack(raw, pack.offset + HEADER.alignment, HEADER) is None
    for other in (HEADER._replace(nonce=1), HEADER._replace(sequence=8), HEADER._replace(fingerprint=bytes(32))):
        assert layout.decode_pack(raw, pack.offset, other) is None
        assert layout.decode_footer(RAW, other) is None or other.nonce == HEADER.nonce
    assert layout.decode_segment_header(RAW, bytes(32)) is None


def test_an_unknown_version_is_nothing() -> None:
    raw = bytearray(RAW[:4096])
    struct.pack_into("<I", raw, 8, 2)
    struct.pack_into("<Q", raw, 120, layout.checksum(bytes(raw[:120]) + bytes(8)))
    assert layout.decode_segment_header(raw) is None


# ---- a stranger who can compute checksums

HUGE = [0, 1, 4095, 4096, 1 << 16, 1 << 31, 1 << 32, (1 << 63) - 4096, 1 << 63, (1 << 64) - 4096, (1 << 64) - 1]


def fits(pack: Pack, header: SegmentHeader = HEADER) -> bool:
    """What must hold of whatever is accepted, in Python's unbounded integers."""
    places = [(int(e["offset"]), int(e["stored_bytes"]), int(e["live_bytes"])) for e in pack.entries]
    inside = all(pack.header_bytes <= at and at + size <= pack.pack_bytes and size > 0 for at, size, _ in places)
    apart = all(a + size <= b for (a, size, _), (b, _, _) in pairwise(places))
    whole = header.alignment <= pack.offset and pack.offset + pack.pack_bytes <= header.segment_bytes
    keys = all(0 < len(key) <= 64 for key in layout.entry_keys(pack.entries))
    return inside and apart and whole and keys


@pytest.mark.parametrize(
    "field", ["offset", "stored_bytes", "live_bytes", "key_bytes", "parent_bytes", "group", "position"]
)
@pytest.mark.parametrize("which", [0, 1])
def test_entries_with_impossible_numbers_and_a_right_checksum_are_nothing(field: str, which: int) -> None:
    pack, _ = golden.packs()[1]
    for value in HUGE:
        entries = pack.entries.copy()
        limit = (1 << 8 * entries.dtype[field].itemsize) - 1
        entries[field][which] = min(value, limit)
        crafted = Pack(pack.offset, pack.header_bytes, pack.pack_bytes, pack.sequence, entries)
        found = layout.decode_pack(layout.encode_pack(crafted, HEADER), pack.offset, HEADER)
        assert found is None or fits(found), f"{field}={value}"
        original = int(pack.entries[field][which])
        if field in ("offset", "stored_bytes") and entries[field][which] != original:
            assert found is None, f"{field}={value}"


@pytest.mark.parametrize("field", ["offset", "header_bytes", "pack_bytes", "sequence"])
def test_packs_with_impossible_numbers_and_a_right_checksum_are_nothing(field: str) -> None:
    pack, _ = golden.packs()[0]
    for value in HUGE:
        numbers = {
            "offset": pack.offset,
            "header_bytes": 4096,
            "pack_bytes": pack.pack_bytes,
            "sequence": 1,
            field: value,
        }
        if field == "header_bytes" and value >= 1 << 32:
            continue
        crafted = Pack(**numbers, entries=pack.entries)
        found = layout.decode_pack(layout.encode_pack(crafted, HEADER), numbers["offset"], HEADER)
        assert found is None or fits(found), f"{field}={value}"
        assert found is None or found.sequence < 1 << 63


def test_overlapping_payloads_are_nothing() -> None:
    pack, _ = golden.packs()[1]
    entries = pack.entries.copy()
    entries["offset"][1] = entries["offset"][0]
    crafted = Pack(pack.offset, pack.header_bytes, pack.pack_bytes, pack.sequence, entries)
    assert layout.decode_pack(layout.encode_pack(crafted, HEADER), pack.offset, HEADER) is None


@pytest.mark.parametrize("count", [0, 2, 3, 1 << 20, (1 << 20) + 1, (1 << 32) - 1])
def test_an_entry_count_beyond_the_buffer_is_nothing(count: int) -> None:
    raw = bytearray(RAW[FIRST : FIRST + 4096])
    struct.pack_into("<I", raw, 12, count)
    assert layout.decode_pack(raw, FIRST, HEADER) is None
    assert layout.pack_header_size(raw) <= layout.PACK_HEADER_BYTES + layout.ENTRY_BYTES * (1 << 20)


@pytest.mark.parametrize(
    "field, place", [("alignment", "<I"), ("segment_bytes", "<Q"), ("sequence", "<Q"), ("epoch", "<Q")]
)
def test_segment_headers_with_impossible_numbers_and_a_right_checksum_are_nothing(field: str, place: str) -> None:
    for value in HUGE:
        if value >= 1 << 8 * struct.calcsize(place):
            continue
        fields = (b"KVDsegm\n", 1, *HEADER._replace(**{field: value}), bytes(40))
        raw = layout._SEGMENT.pack(*fields, layout.checksum(layout._SEGMENT.pack(*fields, 0)))
        found = layout.decode_segment_header(raw)
        if found is not None:
            assert found.alignment >= 4096
            assert found.alignment.bit_count() == 1
            assert 2 * found.alignment <= found.segment_bytes <= 1 << 48
            assert max(found.sequence, found.epoch) < 1 << 63


@pytest.mark.parametrize("body_bytes", HUGE)
@pytest.mark.parametrize("pack_count", [0, 1, 2, 3, (1 << 32) - 1])
def test_footers_with_impossible_numbers_and_a_right_checksum_are_nothing(body_bytes: int, pack_count: int) -> None:
    raw = bytearray(RAW[-FOOTER_SIZE:])
    fields = (b"KVDfoot\n", 1, pack_count, body_bytes, HEADER.sequence, HEADER.nonce)
    body = bytes(raw[: -layout.FOOTER_BYTES])[len(raw) - layout.FOOTER_BYTES - min(body_bytes, len(raw)) :]
    raw[-layout.FOOTER_BYTES :] = layout._FOOTER.pack(*fields, layout.checksum(layout._FOOTER.pack(*fields, 0), body))
    assert layout.footer_size(raw, HEADER) <= HEADER.segment_bytes
    found = layout.decode_footer(raw, HEADER)
    assert found is None or found == []
    epoch = layout._EPOCH.pack(b"KVDepoc\n", 1, 0, body_bytes, pack_count, 0)
    signed = epoch[:-8] + struct.pack("<Q", layout.checksum(epoch))
    assert (layout.decode_epoch(signed) is None) == (body_bytes >= 1 << 63)


# ---- fuzz


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=700), st.sampled_from([b"", b"KVDsegm\n\1\0\0\0", b"KVDpack\n\1\0\0\0", b"KVDfoot\n\1\0\0\0"])
)
def test_random_bytes_are_nothing(raw: bytes, magic: bytes) -> None:
    for data in (magic + raw, raw + magic, memoryview(magic + raw), bytearray(magic + raw)):
        assert layout.decode_segment_header(data) is None
        assert layout.decode_pack(data, FIRST, HEADER) is None
        assert not layout.decode_footer(data, HEADER)
        assert layout.decode_epoch(data) is None
        layout.pack_header_size(data)
        layout.footer_size(data, HEADER)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 12))
def test_mutated_bytes_are_nothing_and_resigned_ones_stay_in_bounds(seed: int, count: int) -> None:
    chance = random.Random(seed)
    pack, _ = golden.packs()[chance.randrange(2)]
    raw = bytearray(RAW[pack.offset : pack.offset + pack.raw_bytes])
    for _ in range(count):
        raw[chance.randrange(12, len(raw))] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
    if bytes(raw) != RAW[pack.offset : pack.offset + pack.raw_bytes]:
        assert layout.decode_pack(raw, pack.offset, HEADER) is None
    struct.pack_into("<Q", raw, 120, 0)
    fields = layout._PACK.unpack_from(raw)
    end = layout.PACK_HEADER_BYTES + layout.ENTRY_BYTES * min(fields[2], len(pack.entries))
    entries = bytes(raw[layout.PACK_HEADER_BYTES : end])
    struct.pack_into("<Q", raw, 120, layout.checksum(layout._PACK.pack(*fields[:-1], 0), entries))
    found = layout.decode_pack(raw, pack.offset, HEADER)
    assert found is None or fits(found)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=64), st.binary(max_size=64), st.integers(1, 30_000)), min_size=1)
)
def test_any_pack_decodes_to_what_was_encoded(chunks: list[tuple[bytes, bytes, int]]) -> None:
    header = HEADER._replace(segment_bytes=1 << 30)
    entries = np.zeros(len(chunks), layout.ENTRY_DTYPE)
    at = header_bytes = layout.pack_header_bytes(len(chunks), 4096)
    for entry, (key, parent, live) in zip(entries, chunks, strict=True):
        stored = -(-live // 4096) * 4096
        entry["key"], entry["key_bytes"] = key.ljust(64, b"\0"), len(key)
        entry["parent"], entry["parent_bytes"] = parent.ljust(64, b"\0"), len(parent)
        entry["offset"], entry["stored_bytes"], entry["live_bytes"] = at, stored, live
        at += stored
    pack = Pack(8192, header_bytes, at, 5, entries)
    found = layout.decode_pack(layout.encode_pack(pack, header) + b"behind it", 8192, header)
    assert found is not None
    assert layout.entry_keys(found.entries) == [key for key, _, _ in chunks]
    assert layout.entry_keys(found.entries, "parent") == [parent for _, parent, _ in chunks]
    assert found.entries.tobytes() == entries.tobytes()
    footer = layout.encode_footer([layout.encode_pack(pack, header)], header)
    assert len(footer) == layout.footer_bytes(pack.raw_bytes, 4096) == layout.footer_size(footer, header)
    packs = layout.decode_footer(footer, header)
    assert packs is not None
    assert [p.offset for p in packs] == [8192]
