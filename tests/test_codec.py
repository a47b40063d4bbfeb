"""Compression: exact, worth it or not done, and a payload that is not ours is never more than a miss."""

import random
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdisk import codec
from kvdisk.units import round_up

zstandard = pytest.importorskip("zstandard", reason="the optional package is not installed")

ALIGNMENT = 4096


def padded(payload: bytes) -> bytes:
    return payload.ljust(round_up(len(payload), ALIGNMENT), b"\0")


def unpack(found: codec.Packed, sizes: list[int]) -> list[bytes] | None:
    """The parts again, from a payload as it lies on disk."""
    parts = [bytearray(size) for size in sizes]
    good = codec.decompress(found.codec, [memoryview(padded(found.payload))], [memoryview(part) for part in parts])
    return [bytes(part) for part in parts] if good else None


def gaussian(words: int, dtype: str, seed: int = 0) -> bytes:
    """What KV cache looks like: "bf16" is the upper half of "f4"."""
    values = np.random.default_rng(seed).normal(size=words).astype(np.float32)
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype(dtype).tobytes()


# ---- worth it or not done


@pytest.mark.parametrize("dtype, expected, ratio_min", [
    ("bf16", codec.ZSTD_PLANES_2, 1.45), ("f2", codec.ZSTD_PLANES_2, 1.1), ("f4", codec.ZSTD_PLANES_4, 1.15),
])  # fmt: skip
def test_the_words_are_found_and_the_bytes_that_can_shrink_do(dtype: str, expected: int, ratio_min: float) -> None:
    data = gaussian(100_000, dtype)
    found = codec.compress([memoryview(data)], len(data))
    assert found is not None
    assert found.codec == expected
    assert len(data) / len(found.payload) > ratio_min
    assert unpack(found, [len(data)]) == [data]


def test_bytes_that_are_no_words_are_packed_as_they_are() -> None:
    data = Path(__file__).read_bytes()
    found = codec.compress([memoryview(data)], len(data))
    assert found is not None
    assert found.codec == codec.ZSTD
    assert unpack(found, [len(data)]) == [data]


@pytest.mark.parametrize("size", [1, 3, 4096, 100_000])
def test_what_does_not_shrink_is_left_alone(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert codec.compress([memoryview(data)], size) is None


def test_a_payload_never_exceeds_the_room_it_is_given() -> None:
    data = gaussian(50_000, "bf16")
    size = len(codec.compress([memoryview(data)], len(data)).payload)  # type: ignore[union-attr]
    assert codec.compress([memoryview(data)], size) is not None
    assert codec.compress([memoryview(data)], size - 1) is None
    assert codec.compress([memoryview(data)], 0) is None
    assert codec.compress([memoryview(data)], -4096) is None


def test_what_saves_less_than_a_sixteenth_is_not_worth_unpacking() -> None:
    data = bytes(6_000) + random.Random(1).randbytes(94_000)
    assert codec.compress([memoryview(data)], len(data)) is None


def test_a_chunk_of_zeros_shrinks_to_almost_nothing() -> None:
    found = codec.compress([memoryview(bytes(1 << 20))], 1 << 20)
    assert found is not None
    assert len(found.payload) < 200
    assert unpack(found, [1 << 20]) == [bytes(1 << 20)]


# ---- exact


@st.composite
def chunks(draw: st.DrawFn) -> list[bytes]:
    """Chunks of one or several parts, some empty, of odd sizes, each piece compressible or not."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    parts = []
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.sampled_from([0, 1, 2, 3, 4, 5, 7, 100, 4095, 4096, 4097, 30_001]))
        kind = draw(st.sampled_from(["zeros", "bf16", "f4", "random", "text"]))
        made = {"zeros": b"", "bf16": gaussian(size, "bf16", size), "f4": gaussian(size, "f4", size),
                "random": rng.randbytes(size), "text": b"kvdisk " * size}[kind]  # fmt: skip
        parts.append(made[:size].ljust(size, b"\0"))
    return parts


@given(chunks())
@settings(max_examples=300, deadline=None)
def test_what_was_packed_comes_back_bit_for_bit(parts: list[bytes]) -> None:
    found = codec.compress([memoryview(part) for part in parts], sum(map(len, parts)))
    if found is not None:
        assert unpack(found, [len(part) for part in parts]) == parts


@pytest.mark.parametrize("word_bytes, codec_id", [
    (1, codec.ZSTD), (2, codec.ZSTD_PLANES_2), (4, codec.ZSTD_PLANES_4),
])  # fmt: skip
def test_planes_are_in_the_order_that_the_format_says(word_bytes: int, codec_id: int) -> None:
    """Against the words of docs/format.md, not against the code that packs."""
    parts = [bytes(range(10)), bytes(range(100, 107))]
    whole = [part[: len(part) // word_bytes * word_bytes] for part in parts]
    content = b"".join(part[plane::word_bytes] for plane in range(word_bytes) for part in whole)
    content += b"".join(part[len(words) :] for part, words in zip(parts, whole, strict=True))
    frame = codec.Packed(codec_id, zstandard.ZstdCompressor().compress(content))
    assert unpack(frame, [10, 7]) == parts


def test_a_payload_may_lie_where_it_is_unpacked_to() -> None:
    data = gaussian(50_000, "bf16")
    found = codec.compress([memoryview(data)], len(data))
    assert found is not None
    slot = memoryview(bytearray(data))
    slot[:] = bytes(len(slot))
    slot[: len(found.payload)] = found.payload
    stored = round_up(len(found.payload), ALIGNMENT)
    assert codec.decompress(found.codec, [slot[:stored]], [slot])
    assert slot == data


def test_a_payload_in_pieces_is_as_good_as_in_one() -> None:
    data = gaussian(50_000, "bf16")
    found = codec.compress([memoryview(data)], len(data))
    assert found is not None
    stored = memoryview(padded(found.payload))
    out = bytearray(len(data))
    assert codec.decompress(found.codec, [stored[:4096], stored[4096:8192], stored[8192:]], [memoryview(out)])
    assert out == data


def test_threads_do_not_disturb_each_other() -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        for turn in range(20):
            data = gaussian(20_000 + seed, "bf16", 100 * seed + turn)
            found = codec.compress([memoryview(data)], len(data))
            if found is None or unpack(found, [len(data)]) != [data]:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- a stranger's payloads


def frame_header(content_size: int, window_log: int = 17) -> bytes:
    """Magic, descriptor (8 bytes of content size, with a window), window; see RFC 8878, section 3.1.1."""
    return struct.pack("<IBBQ", 0xFD2FB528, 0b11000000, (window_log - 10) << 3, content_size)


RAW_BLOCK_LAST = struct.pack("<I", (4 << 3) | 1)[:3] + b"abcd"
GOOD = zstandard.ZstdCompressor().compress(b"x" * 8192)


@pytest.mark.parametrize("payload", [
    b"",
    bytes(4096),
    b"\xff" * 4096,
    random.Random(1).randbytes(4096),
    zstandard.ZstdCompressor().compress(b"x" * 8191),
    zstandard.ZstdCompressor().compress(b"x" * 8193),
    zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 8192),
    zstandard.ZstdCompressor().compress(b"x" * (64 << 20)),
    frame_header(1 << 62) + RAW_BLOCK_LAST,
    frame_header(1 << 40, window_log=41) + RAW_BLOCK_LAST,
    frame_header(8192) + RAW_BLOCK_LAST,
    frame_header(8192, window_log=41) + RAW_BLOCK_LAST,
    frame_header(8192) + struct.pack("<I", (8192 << 3) | 4)[:3],
    frame_header(4) + RAW_BLOCK_LAST,
    struct.pack("<II", 0x184D2A50, 8192) + bytes(8192),
    GOOD[:12],
], ids=[
    "nothing", "zeros", "ones", "garbage", "a byte short", "a byte long", "no size", "64 MiB", "claims 2^62",
    "claims 2^40 and a window of as much", "claims more than it has", "the same with a window of 2^41", "cut off",
    "claims less", "skippable", "half a frame",
])  # fmt: skip
@pytest.mark.parametrize("codec_id", sorted(codec.KNOWN - {codec.NONE}))
def test_a_payload_that_is_not_the_chunk_is_a_miss(payload: bytes, codec_id: int) -> None:
    part = bytearray(8192)
    assert not codec.decompress(codec_id, [memoryview(payload)], [memoryview(part)])


def test_an_unknown_codec_is_a_miss() -> None:
    for codec_id in (codec.NONE, 4, 255):
        assert codec_id not in codec.KNOWN - {codec.NONE}
        assert not codec.decompress(codec_id, [memoryview(GOOD)], [memoryview(bytearray(8192))])


@given(st.integers(0, 2**32), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_any_damage_yields_a_miss_or_some_bytes_but_never_an_error_nor_more_than_the_chunk(seed: int, n: int) -> None:
    """The checksum is what tells damage; behind it nothing may break."""
    rng = random.Random(seed)
    data = gaussian(4_000, "bf16", seed % 100)
    found = codec.compress([memoryview(data)], len(data))
    assert found is not None
    payload = bytearray(padded(found.payload))
    for _ in range(n):
        payload[rng.randrange(len(found.payload))] = rng.randrange(256)
    memory = bytearray(b"\xaa" * (len(data) + 64))
    codec.decompress(found.codec, [memoryview(payload)], [memoryview(memory)[: len(data)]])
    assert memory[len(data) :] == b"\xaa" * 64


def test_a_frame_costs_no_more_memory_than_the_chunk_whatever_it_claims() -> None:
    """In a process of its own whose memory is bounded: an allocation of what a frame claims would fail there."""
    script = """
import resource, sys
from kvdisk import codec
from tests.test_codec import RAW_BLOCK_LAST, frame_header
size = 1 << 20
part = memoryview(bytearray(size))
codec.decompress(codec.ZSTD, [memoryview(b"")], [part])  # contexts and scratch memory
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), resource.RLIM_INFINITY))
for claim in (size, 1 << 30, 1 << 40, 1 << 62):
    for window_log in (20, 27, 31, 41):
        frame = frame_header(claim, window_log) + RAW_BLOCK_LAST
        assert not codec.decompress(codec.ZSTD, [memoryview(frame)], [part])
        assert not codec.decompress(codec.ZSTD, [memoryview(frame[:-1])], [part])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_the_package_nothing_is_packed_and_only_plain_chunks_are_known() -> None:
    script = """
import sys
sys.modules["zstandard"] = None
from kvdisk import codec
assert codec.KNOWN == {codec.NONE}
assert codec.compress([memoryview(bytes(100_000))], 100_000) is None
assert not codec.decompress(codec.ZSTD, [memoryview(bytes(4096))], [memoryview(bytearray(8192))])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
