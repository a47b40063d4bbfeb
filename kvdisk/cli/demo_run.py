"""What `kvdisk demo` does: five ways to meet the same prompts, and what must hold in each.

    computed       nothing is cached: the model computes every token, kvdisk stores
    GPU cache      the same prompts again: vLLM's own prefix cache, the reference for speed and for every bit
    host           the GPU's cache dropped: kvdisk's arena
    disk           a new process: kvdisk's segment files alone
    damaged disk   a new process, after one byte of a stored chunk was flipped: found, never used, computed instead

Outputs are compared bit for bit, log probabilities included, with the run that had as many cached tokens: bf16 results
depend on how a prompt was split into steps, so another comparison would blame the cache for the arithmetic. Prompts are
whole chunks and a short rest, which makes the GPU's hits and kvdisk's equally long.

Engines run in processes of their own (engine_process.py). What can fail: `EngineFailed`, with the log's path.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvdisk.cli import tiny_models
from kvdisk.cli.engine_process import EngineFailed, run_engine
from kvdisk.cli.segment_files import StoredChunk, chunks_of, files_of, flip_byte

BLOCK_TOKENS = 128  # what vLLM's CPU attention prefers; any GPU backend takes it too
BLOCKS_PER_CHUNK = 4
CHUNKS = 7
REST_TOKENS = 100  # fewer than a block: computed in every phase
CACHEABLE_TOKENS = CHUNKS * BLOCKS_PER_CHUNK * BLOCK_TOKENS
PROMPT_TOKENS = CACHEABLE_TOKENS + REST_TOKENS
MODELS = ("llama", "gemma4")

Request = dict[str, Any]
Stats = dict[str, Any]


@dataclass
class Row:
    """One phase of one model, measured, and what did not hold in it.

    Tokens, bytes and chunks are sums over the prompts; ttft_s, the time to the first token, is the fastest of them,
    since what disturbs a measurement only ever adds to it.
    """

    model: str
    phase: str
    cached_tokens: int
    written_bytes: int
    read_bytes: int
    loaded_chunks: int
    file_count: int
    ttft_s: float
    is_identical: bool
    damaged_chunks: int
    io_engine: str
    problems: list[str] = field(default_factory=list)

    def demand(self, holds: bool, otherwise: str) -> None:
        """Note a problem unless `holds`."""
        if not holds:
            self.problems.append(otherwise)


@dataclass(frozen=True)
class Demo:
    """One run of the demo.

    Attributes:
        work_dir: for models, plans, results and logs.
        root_dir: holds kvdisk's root_dir of each model, so it decides the disk.
        prompt_count: prompts of each model.
        announce: called with (model, what comes next) before each start of an engine.
    """

    work_dir: Path
    root_dir: Path
    prompt_count: int
    announce: Callable[[str, str], None]

    def run(self, models: Sequence[str]) -> Iterator[Row]:
        """All phases of these models; each row as soon as its engine has ended.

        Raises:
            EngineFailed: an engine did not get to its end.
        """
        tiny_models.write(self.work_dir / "models")
        for model in models:
            yield from ModelDemo(self, model).run()


class ModelDemo:
    """The phases of one model, in their order, and the outputs that later phases are compared with."""

    def __init__(self, demo: Demo, model: str) -> None:
        self.demo = demo
        self.model = model
        self.root = demo.root_dir / model
        self.cacheable_tokens = CACHEABLE_TOKENS * demo.prompt_count
        self.references: dict[int, list[Request]] = {}  # cached tokens -> requests of a run without kvdisk's help

    def run(self) -> Iterator[Row]:
        """Five rows from three processes."""
        self.root.mkdir(parents=True, exist_ok=True)
        yield from self._first_process()
        yield from self._restarted()
        yield from self._damaged()

    def _first_process(self) -> Iterator[Row]:
        self.demo.announce(self.model, "computing, then with the GPU's cache, then with that dropped")
        generate = self._generate()
        steps = ["start", "computed", "stored", "gpu", "reset", "host"]
        actions = [_warm_up(), generate, {"do": "drain"}, generate, {"do": "reset"}, generate]
        result = dict(zip(steps, self._process("first", actions), strict=True))
        self.references[0] = result["computed"]["requests"]
        self.references[CACHEABLE_TOKENS] = result["gpu"]["requests"]

        row = self._row("computed", result["computed"], result["start"]["stats"], result["stored"]["stats"])
        row.demand(row.cached_tokens == 0, "something was cached before the first run")
        row.demand(row.written_bytes > 0, "nothing was written to the disk")
        yield row
        row = self._row("GPU cache", result["gpu"], result["stored"]["stats"])
        row.demand(
            row.cached_tokens == self.cacheable_tokens, "the GPU's cache did not hold all whole chunks: no reference"
        )
        yield row
        row = self._row("host memory", result["host"], result["reset"]["stats"])
        self._demand_all_loaded(row)
        yield row

    def _restarted(self) -> Iterator[Row]:
        self.demo.announce(self.model, "again in a new process, from the disk alone")
        start, loaded = self._process("restart", [_warm_up(), self._generate()])
        row = self._row("new process", loaded, start["stats"])
        self._demand_all_loaded(row)
        committed = start["stats"]["chunks_on_disk"]
        row.demand(
            row.loaded_chunks == committed > 0, f"{row.loaded_chunks} of {committed} chunks on the disk were loaded"
        )
        yield row

    def _damaged(self) -> Iterator[Row]:
        chunk = self._first_chunk()
        flip_byte(chunk.path, chunk.start + chunk.length // 2)
        self.demo.announce(self.model, "again in a new process, after one byte on the disk was flipped")
        start, loaded = self._process("damaged", [_warm_up(), self._generate()])
        row = self._row("one byte flipped", loaded, start["stats"])
        row.demand(row.damaged_chunks == 1, f"{row.damaged_chunks} damaged chunks were found instead of 1")
        cached = sorted(request["cached_tokens"] for request in loaded["requests"])
        expected = [0] + [CACHEABLE_TOKENS] * (self.demo.prompt_count - 1)
        row.demand(cached == expected, f"{cached} tokens were cached instead of {expected}")
        yield row

    def _demand_all_loaded(self, row: Row) -> None:
        row.demand(
            row.cached_tokens == self.cacheable_tokens,
            f"{row.cached_tokens} of {self.cacheable_tokens} tokens in whole chunks were loaded",
        )
        row.demand(row.damaged_chunks == 0, f"{row.damaged_chunks} damaged chunks on an undamaged disk")

    def _first_chunk(self) -> StoredChunk:
        """The chunk a whole prompt depends on: the first of the full-attention group, which alone has no parent."""
        for path in files_of(self.root):
            for chunk in chunks_of(path):
                if not chunk.parent:
                    return chunk
        raise EngineFailed(f"{self.model}: no chunk of a prompt's start is in {self.root}: was anything stored?")

    def _row(self, phase: str, step: dict[str, Any], before: Stats, after: Stats | None = None) -> Row:
        """Measure one step; `after` where what it caused on the disk ended only in a later step."""
        after = after or step["stats"]
        requests = step["requests"]
        row = Row(
            model=self.model,
            phase=phase,
            cached_tokens=sum(request["cached_tokens"] for request in requests),
            written_bytes=_grown(before, after, "bytes_written"),
            read_bytes=_grown(before, after, "bytes_read"),
            loaded_chunks=_grown(before, after, "chunks_promoted"),
            file_count=len(files_of(self.root)),
            ttft_s=min(request["ttft_s"] for request in requests),
            is_identical=all(map(self._is_as_reference, range(len(requests)), requests)),
            damaged_chunks=_grown({}, after, "chunks_damaged"),
            io_engine=str(after.get("engine", "unknown")),
        )
        row.demand(row.is_identical, "the output differs")
        return row

    def _is_as_reference(self, i: int, request: Request) -> bool:
        """Bit for bit, log probabilities too, against the run that had as much in its cache."""
        reference = self.references.get(request["cached_tokens"])
        if reference is None:
            return False
        return all(request[name] == reference[i][name] for name in ("tokens", "logprobs"))

    def _generate(self) -> dict[str, Any]:
        rng = random.Random(self.model)
        prompts = [
            [rng.randrange(3, tiny_models.VOCABULARY) for _ in range(PROMPT_TOKENS)]
            for _ in range(self.demo.prompt_count)
        ]
        return {"do": "generate", "prompts": prompts}

    def _process(self, name: str, actions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run `actions` in an engine of a new process; the connector's configuration is a user's, only smaller."""
        connector = {
            "spec_name": "KVDiskOffloadingSpec",
            "spec_module_path": "kvdisk.vllm",
            "root_dir": str(self.root),
            "disk_bytes_to_use": "1GiB",
            "cpu_bytes_to_use": "256MiB",
            "segment_bytes": "16MiB",
            "blocks_per_chunk": BLOCKS_PER_CHUNK,
        }
        engine = {
            "model": self.model,
            "block_size": BLOCK_TOKENS,
            "kv_transfer_config": {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": connector,
            },
        }
        base, models_dir = self.demo.work_dir / f"{self.model}-{name}", self.demo.work_dir / "models"
        in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the manager's counters are read in the same process
        return run_engine(base, models_dir, engine, actions, in_process)


def _warm_up() -> dict[str, Any]:
    """A first request that pays for what only a first request pays for; too short to be stored."""
    return {"do": "generate", "prompts": [[3] * REST_TOKENS]}


def _grown(before: Stats, after: Stats, name: str) -> int:
    """By how much a counter grew; one that never counted is absent."""
    return int(after.get(name, 0)) - int(before.get(name, 0))
