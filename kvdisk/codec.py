"""Compression of chunks: what turns a chunk's live bytes into a smaller payload, and back.

A compressed payload is one zstandard frame, whose content size is the chunk's live bytes, and zeros to the alignment.
In front of zstandard the bytes are sorted by *plane*: of words of 2 or 4 bytes all first bytes, then all second bytes,
and so on. KV cache in bf16 has a byte of mantissa that nothing can compress and a byte of sign and exponent with three
bits of information in it; apart, the one is copied and the other is coded. The words are not told but found, by the
entropy of a sample, for a group's dtype says little (packed MLA pages, states, scales) and a caller's bytes nothing.

    codec 1  planes of bytes as they are     fp8, text
    codec 2  planes of 2-byte words          bf16, fp16
    codec 3  planes of 4-byte words          fp32 states

What must hold: `decompress` gives back exactly what `compress` was given, or False. A payload is a stranger's, also
under a matching checksum: no more is written than the chunk has, and nothing is allocated that the payload asks for.
What can fail: zstandard is an optional package. Without it nothing is compressed and `KNOWN` is only `NONE`.

Everything gives up the GIL but for its Python; each thread keeps scratch memory of the size of its largest chunk.
"""

import math
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvdisk.layout import CODEC_NONE

try:
    import zstandard
except ImportError:
    IS_AVAILABLE = False
else:
    IS_AVAILABLE = True

ZSTD = 1
ZSTD_PLANES_2 = 2
ZSTD_PLANES_4 = 3

NONE = CODEC_NONE
KNOWN = frozenset({NONE, ZSTD, ZSTD_PLANES_2, ZSTD_PLANES_4} if IS_AVAILABLE else {NONE})
"""Codecs of payloads that can be read here."""

SAVED_SHARE_MIN = 1 / 16
"""A chunk that shrinks by less is stored as it is: the time to unpack it is worth more."""

_WORD_BYTES = {ZSTD: 1, ZSTD_PLANES_2: 2, ZSTD_PLANES_4: 4}
_WINDOW_MAX = 1 << 20  # of frames that are cut off and so not unpacked in one go; ours have 128 KiB
_SAMPLE_RUNS, _SAMPLE_RUN_BYTES = 16, 256
_SAMPLE_GAIN_MIN = 0.05  # bits a byte by which larger words must be better; less may be chance
_PIECE_WORDS = 1 << 17

_FLUSH_BLOCK = 1  # zstandard.COMPRESSOBJ_FLUSH_BLOCK

Bytes = npt.NDArray[np.uint8]

_LANES = np.arange(0, 1024, 256, dtype=np.uint16)
_COUNT_LOG2 = np.arange(4 * _SAMPLE_RUNS * _SAMPLE_RUN_BYTES + 1, dtype=np.float64)
_COUNT_LOG2[1:] *= np.log2(_COUNT_LOG2[1:])  # c * log2(c)


class Packed(NamedTuple):
    """A compressed chunk: its codec, and the payload without padding."""

    codec: int
    payload: bytes


def compress(parts: Sequence[memoryview], room: int) -> Packed | None:
    """The chunk that consists of `parts` in `room` bytes or fewer, or None: then it is to be stored as it is.

    Args:
        parts: the live bytes on each rank, contiguous; only read, and not changed meanwhile.
        room: most bytes that are worth it.
    """
    views = [np.frombuffer(part, np.uint8) for part in parts if len(part)]
    live_bytes = sum(map(len, views))
    room = min(room, int(live_bytes * (1 - SAVED_SHARE_MIN)))
    if not IS_AVAILABLE or room <= 0:
        return None
    codec, bits = _best_codec(views)
    if bits * live_bytes > 8 * room:
        return None
    tools = _tools()
    planes = views[0] if codec == ZSTD and len(views) == 1 else tools.scratch(live_bytes)
    if planes is not views[0]:
        _split(views, planes, _WORD_BYTES[codec], tools)
    payload = _pack(planes, live_bytes // _WORD_BYTES[codec], tools)
    return Packed(codec, payload) if len(payload) <= room else None


def decompress(codec: int, payload: Sequence[memoryview], parts: Sequence[memoryview]) -> bool:
    """Unpack a payload; whether `parts` now hold a whole chunk. If not, what they hold is anything.

    Args:
        codec: one of `KNOWN` but `NONE`.
        payload: the stored bytes in order, with padding; may lie in the memory of `parts`.
        parts: writable, of exactly the sizes that were compressed.
    """
    if codec not in KNOWN or codec == NONE:
        return False
    views = [np.frombuffer(part, np.uint8) for part in parts if len(part)]
    tools = _tools()
    planes = tools.scratch(sum(map(len, views)))
    source = payload[0] if len(payload) == 1 else memoryview(b"".join(payload))
    if not _unpack(source, planes, tools):
        return False
    _join(planes, views, _WORD_BYTES[codec])
    return True


# ---- zstandard


class _Tools(threading.local):
    """What a thread keeps: zstandard's contexts are not for several, and fresh memory costs more than copying."""

    def __init__(self) -> None:
        # Measured on KV cache of a trained model (docs/compression.md): matches are chance there, and a table of 64
        # of them finds the long ones. What remains is Huffman coding, at 1.4 times the speed of level 1 and smaller.
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            window_log=17,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,  # above 0 zstandard's fast strategy leaves Huffman coding out
            write_content_size=True,
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_MAX)
        self._scratch = np.empty(0, np.uint8)
        self._words: dict[int, npt.NDArray[np.unsignedinteger]] = {}

    def scratch(self, size: int) -> Bytes:
        """Memory for a chunk's planes, until the next call."""
        if len(self._scratch) < size:
            self._scratch = np.empty(size, np.uint8)
        return self._scratch[:size]

    def words(self, word_bytes: int) -> "npt.NDArray[np.unsignedinteger]":
        """Memory for a piece of a chunk's words, until the next call."""
        if word_bytes not in self._words:
            self._words[word_bytes] = np.empty(_PIECE_WORDS, f"<u{word_bytes}")
        return self._words[word_bytes]


_local = threading.local()


def _tools() -> _Tools:
    tools: _Tools | None = getattr(_local, "tools", None)
    if tools is None:
        tools = _local.tools = _Tools()
    return tools


def _pack(planes: Bytes, plane_bytes: int, tools: _Tools) -> bytes:
    """One frame. Planes do not share a block, for that has one Huffman table."""
    if plane_bytes == len(planes):
        return tools.compressor.compress(planes.data)
    frame = tools.compressor.compressobj(size=len(planes))
    pieces: list[bytes] = []
    for start in range(0, len(planes), plane_bytes):
        pieces += (frame.compress(planes[start : start + plane_bytes].data), frame.flush(_FLUSH_BLOCK))
    return b"".join((*pieces, frame.flush()))


def _unpack(source: memoryview, planes: Bytes, tools: _Tools) -> bool:
    """The content of the frame that starts `source`, if it has exactly the size of `planes`."""
    try:
        frame = zstandard.get_frame_parameters(source[:18])  # ZSTD_FRAMEHEADERSIZE_MAX
        if frame.content_size != len(planes) or frame.dict_id:
            return False
        # A whole frame whose size is known and has room is unpacked in one go, straight to where it is wanted.
        with tools.decompressor.stream_reader(source) as reader:
            return reader.readinto(planes.data) == len(planes)
    except zstandard.ZstdError:
        return False


# ---- planes


def _best_codec(views: Sequence[Bytes]) -> tuple[int, float]:
    """The codec by which a sample of the chunk gets smallest, and bits a byte that remain."""
    sample = _sample(views).reshape(-1, 4) + _LANES
    lanes = np.bincount(sample.ravel(), minlength=1024).reshape(4, 256)
    pairs = lanes[:2] + lanes[2:]
    found = ((ZSTD, pairs[:1] + pairs[1:]), (ZSTD_PLANES_2, pairs), (ZSTD_PLANES_4, lanes))
    codec, bits = NONE, 8.0
    for candidate, counts in found:
        entropy = _entropy(counts, len(sample) * 4 // len(counts))
        if codec == NONE or entropy < bits - _SAMPLE_GAIN_MIN:
            codec, bits = candidate, entropy
    return codec, bits


def _entropy(counts: npt.NDArray[np.intp], total: int) -> float:
    """Bits a byte of lanes with these counts, one a row, each of `total` bytes; 8 if there is nothing to count.

    Corrected for the sample's size, as Miller proposed (Note on the bias of information estimates, 1955).
    """
    if not total:
        return 8.0
    rows = len(counts)
    bits = math.log2(total) - float(_COUNT_LOG2[counts].sum()) / (rows * total)
    return bits + (int(np.count_nonzero(counts)) / rows - 1) / (2 * math.log(2) * total)


def _sample(views: Sequence[Bytes]) -> Bytes:
    """Runs spread over the chunk, each from the start of a word; all of a small one."""
    runs = -(-_SAMPLE_RUNS // len(views))
    taken: list[Bytes] = []
    for view in views[:_SAMPLE_RUNS]:
        whole = len(view) // _SAMPLE_RUN_BYTES
        if whole <= runs:
            taken.append(view[: len(view) // 4 * 4])
        else:
            rows = view[: whole * _SAMPLE_RUN_BYTES].reshape(whole, _SAMPLE_RUN_BYTES)
            taken.append(rows[(np.arange(runs) * whole) // runs].ravel())
    return np.concatenate(taken)


def _split(views: Sequence[Bytes], planes: Bytes, word_bytes: int, tools: _Tools) -> None:
    """Sort the words of `views` by plane; what is no whole word at the end of each follows the planes."""
    counts = [len(view) // word_bytes for view in views]
    total = sum(counts)
    rest = total * word_bytes
    for view, count, first in zip(views, counts, accumulate(counts, initial=0), strict=False):
        whole = count * word_bytes
        if word_bytes == 1:
            planes[first : first + count] = view
            continue
        words = view[:whole].view(f"<u{word_bytes}")
        for start in range(0, count, _PIECE_WORDS):
            piece = words[start : start + _PIECE_WORDS]
            shifted = tools.words(word_bytes)[: len(piece)]
            for plane in range(word_bytes):
                at = plane * total + first + start
                source = np.right_shift(piece, 8 * plane, out=shifted) if plane else piece
                np.copyto(planes[at : at + len(piece)], source, casting="unsafe")  # the lowest byte
        planes[rest : rest + len(view) - whole] = view[whole:]
        rest += len(view) - whole


def _join(planes: Bytes, views: Sequence[Bytes], word_bytes: int) -> None:
    """Undo `_split`."""
    counts = [len(view) // word_bytes for view in views]
    total = sum(counts)
    rest = total * word_bytes
    for view, count, first in zip(views, counts, accumulate(counts, initial=0), strict=False):
        whole = count * word_bytes
        if word_bytes == 1:
            view[:] = planes[first : first + count]
            continue
        words = view[:whole].view(f"<u{word_bytes}")
        for start in range(0, count, _PIECE_WORDS):
            piece = words[start : start + _PIECE_WORDS]
            for plane in reversed(range(word_bytes)):
                at = plane * total + first + start
                source = planes[at : at + len(piece)]
                if plane == word_bytes - 1:
                    piece[:] = source
                else:
                    np.left_shift(piece, 8, out=piece)
                    np.bitwise_or(piece, source, out=piece)
        view[whole:] = planes[rest : rest + len(view) - whole]
        rest += len(view) - whole
