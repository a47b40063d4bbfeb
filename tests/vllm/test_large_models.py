"""Large published models through vLLM's planner, scheduler and connector, with 100 GiB of KV cache, merely promised.

Of each: the planned chunks are those of its published numbers, offsets beyond 2^32 work, every page of a prompt comes
back from the disk, messages about sizes that do not fit name one that does, and chunks of 1 MiB and more take at most
2 % more on disk than what lives in them.
"""

import gc
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvdisk.cli.inspect_report import Inspector
from kvdisk.geometry import Geometry
from kvdisk.io.protocol import Memory, Span
from kvdisk.io.spans import SPANS_MAX, cut, merged
from kvdisk.io.transfer import PIECE_BYTES
from kvdisk.units import GIB, MIB, round_up
from kvdisk.writer import PACK_BYTES_MAX
from tests.vllm import harness as harness_module
from tests.vllm.config import connector
from tests.vllm.harness import Harness
from tests.vllm.large_models import LARGE_MODELS, PLANNED, LargeModel, planned_geometry, promised_kv_cache
from tests.vllm.overhead import bytes_on_disk_over_live

every_model = pytest.mark.parametrize("name", LARGE_MODELS)

# Layers for which every page is written and verified, tokens of the prompt, and those that come from the disk.
ROUND_TRIPS = {
    "llama-3.1-8b": (None, 100, 96),
    "gpt-oss-20b": (None, 300, 288),
    "deepseek-v3": (None, 300, 256),
    "deepseek-v3.2": (None, 300, 256),
    "llama-4-scout": (12, 100, 96),
    "qwen3.6-35b-a3b": (8, 2200, 2112),
    "nemotron-3-super-120b-a12b": (17, 4200, 4160),
    "deepseek-v4-flash": (5, 300, 256),
    "gemma-4-31b": (12, 100, 96),
    "glm-5.2": (None, 300, 256),
}


class LargeHarness(Harness):
    """Blocks in use are those at the end of the cache."""

    def _build(self, specs: dict[str, Any], memory_bytes: int, layout: str) -> None:
        self.config.cache_config.mamba_cache_mode = "align"
        super()._build(specs, memory_bytes, layout)
        pool = self.scheduler.kv_cache_manager.block_pool
        self.held = pool.get_new_blocks(pool.get_num_free_blocks() - 1000)


Start = Callable[..., LargeHarness]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(harness_module, "allocate_kv_cache", promised_kv_cache)
    running: list[LargeHarness] = []

    def start_one(model: LargeModel, **extra: Any) -> LargeHarness:
        sizes = {"cpu_bytes_to_use": "512MiB", "disk_bytes_to_use": "3GiB", "segment_bytes": "256MiB"}
        config = connector(tmp_path / "root", **{"blocks_per_chunk": 1, **sizes, **extra})
        running.append(
            LargeHarness(
                model.specs,
                config,
                tmp_path / "models",
                memory_bytes=100 * GIB,
                layout=model.layout,
                max_model_len=8192,
                max_num_batched_tokens=8192,
            )
        )
        return running[-1]

    yield start_one
    while running:
        running.pop().close()
    gc.collect()  # what was touched of the caches goes now


def geometry_of(harness: Harness) -> Geometry:
    geometry: Geometry = harness.connector.connector_worker.worker._geometry
    return geometry


@every_model
def test_the_planned_chunks_are_those_of_the_published_numbers(start, name):
    harness = start(LARGE_MODELS[name]())
    geometry = geometry_of(harness)
    planned = [(group.tokens_per_block, len(group.pages), group.block_bytes) for group in geometry.groups]
    assert planned == PLANNED[name]
    tensors = harness.connector.connector_worker.worker._tensors
    last = [
        tensors[page.tensor].storage_offset() + (tensors[page.tensor].shape[0] - 1) * tensors[page.tensor].stride(0)
        for group in geometry.groups
        for page in group.pages
    ]
    assert max(last) > 1 << 36
    units = dict(harness.manager._groups.units)
    assert units == {group.group_id: -(-group.block_bytes // 4096) for group in geometry.groups}


@every_model
def test_every_page_comes_back_from_the_disk(start, tmp_path, name):
    layers, prompt_tokens, hit_tokens = ROUND_TRIPS[name]
    model = LARGE_MODELS[name](layers)
    rng = random.Random(name)
    prompt = [rng.randrange(3, 500) for _ in range(prompt_tokens)]
    first = start(model)
    (outcome,) = first.serve([prompt])
    assert outcome.cached_tokens == outcome.pages_wrong == 0 < outcome.pages_right
    assert min(first.held[-1].block_id, first.kv_cache_config.num_blocks - 1000) > 0
    geometry = geometry_of(first)
    first.close()
    del first.kv_caches, first.pages

    (namespace,) = Inspector().inspect(str(tmp_path / "root")).namespaces
    stored = {group.group: group for group in namespace.instances[0].groups}
    for index, group in enumerate(geometry.groups):
        assert stored[group.group_id].live_bytes == stored[group.group_id].chunk_count * geometry.chunk_bytes(index)

    second = start(model)
    (outcome,) = second.serve([prompt])
    assert (outcome.cached_tokens, outcome.pages_wrong) == (hit_tokens, 0)
    assert outcome.pages_right > 0


@every_model
def test_a_size_that_does_not_fit_is_refused_with_one_that_does(start, name):
    model = LARGE_MODELS[name]()
    sizes = {"cpu_bytes_to_use": "4MiB", "segment_bytes": "1MiB"}
    for _ in range(2 * len(PLANNED[name]) + 2):  # each message names one size, for one group
        if (message := refusal(start, model, sizes)) is None:
            return
        advice = re.search(r"KV cache group \d+ has .* set (\w+) to at least ([0-9.]+ ?\w+),", message)
        assert advice, message
        assert sizes[advice[1]] != advice[2], "following the advice changes something"
        sizes[advice[1]] = advice[2]
    raise AssertionError(f"no end of it: {sizes}")


def refusal(start: Start, model: LargeModel, sizes: dict[str, str]) -> str | None:
    """Why an engine with these sizes does not start, if it does not."""
    try:
        start(model, **sizes)
    except ValueError as error:
        return str(error)
    return None


@every_model
@pytest.mark.parametrize("blocks_per_chunk", [1, 4, 16])
def test_chunks_of_a_mebibyte_and_more_take_two_percent_more_on_disk_at_most(name, blocks_per_chunk):
    geometry = planned_geometry(name, blocks_per_chunk)
    for at_once in (None, 1):
        for group_id, figures in bytes_on_disk_over_live(geometry, chunks_at_once=at_once).items():
            assert figures.chunk_bytes == blocks_per_chunk * PLANNED[name][group_id][2]
            assert figures.ratio <= (1.02 if figures.chunk_bytes >= MIB else 1.03), figures


@pytest.mark.parametrize("tp_size", [1, 8])
@pytest.mark.parametrize("name", [*LARGE_MODELS, "pages of 4 KiB a rank"])
def test_a_full_pack_leaves_in_ops_of_at_most_1024_buffers(name, tp_size):
    """On each rank a chunk's part is in a slot of its own, and no slot lies beside the next: the most buffers."""
    sizes = [-(-block_bytes // tp_size) for _, _, block_bytes in PLANNED.get(name, [(1, 1, 4096 * tp_size)])]
    memories = [Memory(memoryview(bytearray()), rank << 40, "none") for rank in range(tp_size)]
    for memory in memories:
        memory.size = 1 << 39
    for part in (round_up(size, 4096) for size in sizes):
        count = max(1, PACK_BYTES_MAX // (part * tp_size))
        spans = [Span(memory, (1 << 36) + 2 * n * part, part) for n in range(count) for memory in memories]
        runs = merged(spans, 4096)
        assert len(runs) == count * tp_size
        ops = list(cut(runs, part * count * tp_size, PIECE_BYTES, 4096))
        assert max(len(piece) for _, piece in ops) <= SPANS_MAX
        assert max(size for size, _ in ops) <= PIECE_BYTES
        assert [size for size, _ in ops] == [sum(span.length for span in piece) for _, piece in ops]
        assert sum(size for size, _ in ops) == part * count * tp_size
    assert name in LARGE_MODELS or len(runs) > SPANS_MAX
