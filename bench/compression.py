"""What compression is worth on KV cache: size, speed of a core, and the disk below which it is faster.

    python bench/compression.py                          made-up KV caches, bf16 and fp8
    python bench/compression.py --store LABEL=DIR        chunks of a kvdisk store (written with compression "none")
    python bench/compression.py --model DIR --text FILE  vLLM runs this model over these texts, then as --store

Repeat --store to compare several. Of every bf16 source there is an fp8 one: its values rounded to e4m3 with scale 1,
which is what vLLM does without a calibrated scale. Candidates take turns on the same chunks; times are those of the
measuring thread's CPU clock, medians of the rounds. blosc2 is compared where it is installed.

Two break-even bandwidths, for loads (unpacking, speed D) and stores (packing), at ratio r:

    alone    D * (1 - 1/r)   a single chunk: it is unpacked after it was read, so both times add up
    stream   D               many chunks: one is unpacked while others are read; times the threads that unpack

A disk that is slower loads faster with compression; a faster one loads faster without.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import zstandard

from kvdisk import codec
from kvdisk.cli.segment_files import chunks_of, files_of
from kvdisk.units import round_up

ALIGNMENT = 4096

Chunks = list[bytes]


@dataclass
class Candidate:
    """A way to pack: `pack` gives what is stored, or None to store the chunk as it is; `unpack` undoes it."""

    name: str
    pack: Callable[[bytes], Any]
    unpack: Callable[[Any, bytearray], None]
    size: Callable[[Any], int] = len


@dataclass
class Row:
    """A candidate on a source. Ratio: of bytes on disk, without over with compression. Speeds: MB/s of live bytes."""

    source: str
    candidate: str
    ratio: float
    pack_mb_s: float
    unpack_mb_s: float
    samples: list[tuple[float, float]] = field(default_factory=list)

    def alone(self, speed: float) -> float:
        """Break-even bandwidth of a single chunk, MB/s."""
        return speed * (1 - 1 / self.ratio)


# ---- sources


def chunks_of_store(root: Path, bytes_max: int) -> Chunks:
    """Payloads of the store, evenly from all of it; sizes as stored."""
    found = [chunk for path in files_of(root) for chunk in chunks_of(path)]
    if not found:
        raise SystemExit(f"{root} holds no chunks of a kvdisk store")
    step = max(1, sum(chunk.length for chunk in found) // bytes_max)
    chunks = []
    for chunk in found[::step]:
        with chunk.path.open("rb") as file:
            file.seek(chunk.start)
            chunks.append(file.read(chunk.length))
    return chunks


def made_up(chunk_bytes: int, bytes_max: int, seed: int = 0) -> Chunks:
    """bf16 keys and values of 8 heads of 128 channels, token by token: normal values, each channel with its own scale.

    Scales are log-normal, sigma 0.7; of keys, one channel in 64 is ten times as large, as is seen in trained models.
    """
    rng = np.random.default_rng(seed)
    channels = 1024
    scale = rng.lognormal(0.0, 0.7, (2, channels)).astype(np.float32)
    scale[0, ::64] *= 10
    chunks = []
    for number in range(bytes_max // chunk_bytes):
        values = rng.standard_normal((chunk_bytes // 2 // channels, channels), dtype=np.float32) * scale[number % 2]
        chunks.append((values.view(np.uint32) >> 16).astype("<u2").tobytes())
    return chunks


def as_fp8(chunks: Chunks) -> Chunks:
    """bf16 values rounded to float8_e4m3fn with scale 1, ties to the nearer lower code; beyond 448 they saturate."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    words = np.arange(1 << 16, dtype=np.uint32)
    floats = np.nan_to_num((words << 16).view(np.float32), nan=0.0)
    table = np.searchsorted((values[1:] + values[:-1]) / 2, np.minimum(np.abs(floats), 448.0)).astype(np.uint8)
    table |= ((words >> 15) << 7).astype(np.uint8)
    return [table[np.frombuffer(chunk, "<u2", len(chunk) // 2)].tobytes() for chunk in chunks]


def run_model(model: Path, texts: Sequence[Path], root: Path, tokens: int) -> None:
    """Let vLLM compute each text's first `tokens` tokens and kvdisk store them under `root`, uncompressed."""
    from transformers import AutoTokenizer  # type: ignore[import-not-found,unused-ignore]

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer(path.read_text())["input_ids"][:tokens] for path in texts]
    extra = {
        "spec_name": "KVDiskOffloadingSpec", "spec_module_path": "kvdisk.vllm", "root_dir": str(root),
        "disk_bytes_to_use": "2GiB", "cpu_bytes_to_use": "512MiB", "segment_bytes": "64MiB", "blocks_per_chunk": 1,
    }  # fmt: skip
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    engine = {
        "model": str(model), "dtype": "bfloat16", "max_model_len": tokens + 64, "max_num_seqs": 1, "block_size": 32,
        "enforce_eager": True, "disable_log_stats": False, "kv_transfer_config": connector,
    }  # fmt: skip
    actions = [{"do": "generate", "prompts": prompts, "max_tokens": 2}, {"do": "drain"}]
    plan = root.parent / "plan.json"
    plan.write_text(json.dumps({"engine": engine, "actions": actions}))
    variables = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "kvdisk.vllm.demo_phase", str(plan), str(plan.with_suffix(".out"))]
    subprocess.run(command, env=variables, check=True)


# ---- candidates


def as_shipped() -> Candidate:
    """What kvdisk does, sample and choice of planes included."""

    def pack(chunk: bytes) -> codec.Packed | None:
        return codec.compress([memoryview(chunk)], round_up(len(chunk), ALIGNMENT) - ALIGNMENT)

    def unpack(packed: codec.Packed, out: bytearray) -> None:
        assert codec.decompress(packed.codec, [memoryview(packed.payload)], [memoryview(out)])

    return Candidate("kvdisk", pack, unpack, lambda packed: len(packed.payload))


def zstd(level: int, word_bytes: int) -> Candidate:
    """One frame of a zstandard level, of bytes as they are or by planes, which are made as kvdisk makes them."""
    compressor, decompressor = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
    tools = codec._tools()

    def pack(chunk: bytes) -> bytes:
        if word_bytes == 1:
            return compressor.compress(chunk)
        planes = tools.scratch(len(chunk))
        codec._split([np.frombuffer(chunk, np.uint8)], planes, word_bytes, tools)
        return compressor.compress(planes.data)

    def unpack(packed: bytes, out: bytearray) -> None:
        planes = tools.scratch(len(out))
        decompressor.stream_reader(packed).readinto(planes.data)
        codec._join(planes, [np.frombuffer(out, np.uint8)], word_bytes)

    return Candidate(f"zstd {level}{', shuffle' * (word_bytes > 1)}", pack, unpack)


def blosc(name: str, filter_name: str, level: int, word_bytes: int) -> Candidate:
    """A blosc2 codec behind one of its filters, on one thread."""
    import blosc2  # type: ignore[import-not-found,unused-ignore]

    options = {"codec": getattr(blosc2.Codec, name), "filters": [getattr(blosc2.Filter, filter_name)],
               "typesize": word_bytes, "clevel": level, "nthreads": 1}  # fmt: skip

    def pack(chunk: bytes) -> bytes:
        packed: bytes = blosc2.compress2(chunk, **options)
        return packed

    def unpack(packed: bytes, out: bytearray) -> None:
        blosc2.decompress2(packed, dst=out, nthreads=1)

    shown = {"NOFILTER": "", "SHUFFLE": ", shuffle", "BITSHUFFLE": ", bitshuffle"}[filter_name]
    return Candidate(f"blosc2 {name.lower()} {level}{shown}", pack, unpack)


def candidates(word_bytes: int) -> list[Candidate]:
    """All, for values of `word_bytes`."""
    found = [as_shipped(), *(zstd(level, 1) for level in (1, -1, -5, 3))]
    if word_bytes > 1:
        found += [zstd(level, word_bytes) for level in (1, -1, -5, 3)]
    if importlib.util.find_spec("blosc2"):
        for name, level in (("LZ4", 1), ("LZ4", 5), ("ZSTD", 1)):
            filters = ("SHUFFLE", "BITSHUFFLE") if word_bytes > 1 else ("NOFILTER", "BITSHUFFLE")
            found += [blosc(name, filter_name, level, word_bytes) for filter_name in filters]
    return found


# ---- measuring


def measure(source: str, chunks: Chunks, word_bytes: int, rounds: int) -> list[Row]:
    """Every candidate on `chunks`, in turns."""
    everybody = candidates(word_bytes)
    rows = [Row(source, one.name, 1.0, 0.0, 0.0) for one in everybody]
    for turn in range(rounds + 1):
        for candidate, row in zip(everybody, rows, strict=True):
            row.ratio, *speeds = _pass(candidate, chunks)
            if turn:  # the first one warms up
                row.samples.append((speeds[0], speeds[1]))
    for row in rows:
        row.pack_mb_s, row.unpack_mb_s = (statistics.median(one) for one in zip(*row.samples, strict=True))
    return rows


def _pass(candidate: Candidate, chunks: Chunks) -> tuple[float, float, float]:
    """Ratio, MB/s packed, MB/s unpacked. A chunk that does not shrink costs the try and is never unpacked."""
    live = plain = stored = unpacked = 0
    pack_s = unpack_s = 0.0
    outs = {len(chunk): bytearray(len(chunk)) for chunk in chunks}
    for chunk in chunks:
        live += len(chunk)
        start = time.thread_time()
        packed = candidate.pack(chunk)
        pack_s += time.thread_time() - start
        plain_bytes = round_up(len(chunk), ALIGNMENT)
        packed_bytes = plain_bytes if packed is None else round_up(candidate.size(packed), ALIGNMENT)
        plain += plain_bytes
        stored += min(plain_bytes, packed_bytes)
        if packed_bytes >= plain_bytes:
            continue
        out = outs[len(chunk)]
        start = time.thread_time()
        candidate.unpack(packed, out)
        unpack_s += time.thread_time() - start
        unpacked += len(chunk)
        if out != chunk:
            raise SystemExit(f"{candidate.name} did not give back what it was given")
    return plain / stored, live / pack_s / 1e6, unpacked / unpack_s / 1e6 if unpacked else 0.0


# ---- reports


def markdown(rows: Sequence[Row]) -> list[str]:
    """One table a source; the candidates that shrink anything first."""
    lines: list[str] = []
    for source in dict.fromkeys(row.source for row in rows):
        lines += [f"**{source}**", "", "| | ratio | pack MB/s | unpack MB/s | load alone | load stream | store alone | "
                  "store stream |", "| --- |" + " ---: |" * 7]  # fmt: skip
        for row in (row for row in rows if row.source == source):
            pack, unpack = row.pack_mb_s, row.unpack_mb_s
            even = [row.alone(unpack), unpack, row.alone(pack), pack] if row.ratio > 1.005 else []
            cells = [f"{value:,.0f}" for value in even] or ["-"] * 4
            shown = f"{unpack:,.0f}" if even else "-"
            lines.append(f"| {row.candidate} | {row.ratio:.2f} | {pack:,.0f} | {shown} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def sources(arguments: argparse.Namespace) -> list[tuple[str, Chunks]]:
    """What the command line names: (label, bf16 chunks)."""
    found = []
    for label, _, directory in (one.partition("=") for one in arguments.store):
        if not directory:
            raise SystemExit(f"--store {label}: give LABEL=DIR")
        found.append((label, chunks_of_store(Path(directory), arguments.bytes)))
    if arguments.model:
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
            root = Path(scratch) / "root"
            root.mkdir(mode=0o700)
            run_model(arguments.model, arguments.text, root, arguments.tokens)
            found.append((arguments.model.name, chunks_of_store(root, arguments.bytes)))
    if not found:
        found = [
            (f"made up, chunks of {size >> 10} KiB", made_up(size, arguments.bytes)) for size in (128 << 10, 1 << 20)
        ]
    return found


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", action="append", default=[], metavar="LABEL=DIR")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path, action="append", default=[])
    parser.add_argument("--tokens", type=int, default=2600, help="of each text (2600)")
    parser.add_argument("--bytes", type=int, default=16 << 20, help="of each source (16 MiB)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=Path, help="where the model's store lies meanwhile")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.model and not arguments.text:
        parser.error("--model needs --text: a cache of random tokens says nothing about a real one")
    rows = []
    for label, chunks in sources(arguments):
        sizes = sorted({len(chunk) for chunk in chunks})
        print(f"{label}: {len(chunks)} chunks of {sizes[0]:,} to {sizes[-1]:,} bytes", flush=True)
        for kind, word_bytes, values in (("bf16", 2, chunks), ("fp8", 1, as_fp8(chunks))):
            rows += measure(f"{label}, {kind}", values, word_bytes, arguments.rounds)
    print("\n".join(markdown(rows)))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
