"""Through vLLM's own scheduler: what was stored comes back, on every KV cache layout, page for page."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, SparseCacheRole

from tests.vllm.config import connector
from tests.vllm.harness import Harness, Outcome

BF16 = torch.bfloat16
PROMPT_TOKENS = 700


def full(head_size: int = 64) -> Any:
    return FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=head_size, dtype=BF16)


def window() -> Any:
    return SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=BF16, sliding_window=64)


def latent_and_indexer(i: int) -> dict[str, Any]:
    """One layer of DeepSeek-V3.2 or GLM-5: an MLA latent and an indexer's keys, of very different page sizes."""
    latent = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=576, dtype=BF16, max_tp_shards=1, is_index_group_leader=True
    )
    indexer = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=132,
        dtype=torch.uint8,
        max_tp_shards=1,
        cache_role=SparseCacheRole.INDEXER,
    )
    return {f"layers.{i}.attn": latent, f"layers.{i}.indexer": indexer}


MODELS: dict[str, dict[str, Any]] = {
    "full": {f"layers.{i}": full() for i in range(3)},
    "full_and_window": {f"layers.{i}": full() if i % 3 == 2 else window() for i in range(6)},
    "two_head_sizes": {f"layers.{i}": full(head_size=128) if i % 3 == 2 else window() for i in range(6)},
    "two_page_sizes": {name: spec for i in range(3) for name, spec in latent_and_indexer(i).items()},
}
every_model = pytest.mark.parametrize("model", MODELS)

Start = Callable[..., Harness]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start an engine over the same root directory; closed at the end of the test unless it was before."""
    running: list[Harness] = []

    def start_one(model: str, blocks_per_chunk: int = 4, **extra: Any) -> Harness:
        config = connector(tmp_path / "root", blocks_per_chunk=blocks_per_chunk, **extra)
        running.append(Harness(MODELS[model], config, tmp_path / "models"))
        return running[-1]

    yield start_one
    for harness in running:
        harness.close()


def prompts(count: int = 3, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def whole_chunks(harness: Harness) -> int:
    """Tokens of a prompt that whole chunks cover; the last token is always computed."""
    return (PROMPT_TOKENS - 1) // harness.chunk_tokens * harness.chunk_tokens


def assert_loaded(outcomes: list[Outcome], cached_tokens: int) -> None:
    assert [o.cached_tokens for o in outcomes] == [cached_tokens] * len(outcomes)
    assert all(o.pages_wrong == 0 < o.pages_right for o in outcomes), outcomes


@every_model
@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_every_page_comes_back_after_the_gpu_cache_was_dropped(start: Start, model: str, blocks_per_chunk: int) -> None:
    harness = start(model, blocks_per_chunk)
    assert_loaded(harness.serve(prompts()), 0)
    harness.drop_gpu_cache()
    assert_loaded(harness.serve(prompts()), whole_chunks(harness))


@every_model
def test_a_restarted_engine_loads_everything_from_disk(start: Start, model: str) -> None:
    first = start(model)
    assert_loaded(first.serve(prompts()), 0)
    first.close()
    second = start(model)
    assert_loaded(second.serve(prompts()), whole_chunks(second))


@every_model
def test_prompts_that_were_never_stored_are_computed(start: Start, model: str) -> None:
    harness = start(model)
    harness.serve(prompts(seed=1))
    harness.drop_gpu_cache()
    assert_loaded(harness.serve(prompts(seed=2)), 0)


@every_model
def test_a_reset_of_the_connector_makes_everything_miss(start: Start, model: str) -> None:
    harness = start(model)
    harness.serve(prompts())
    harness.drop_gpu_cache()
    assert harness.scheduler.reset_prefix_cache(reset_connector=True)
    assert_loaded(harness.serve(prompts()), 0)


def test_a_reset_of_the_connector_outlives_a_restart(start: Start) -> None:
    first = start("full")
    first.serve(prompts())
    assert first.scheduler.reset_prefix_cache(reset_connector=True)
    first.close()
    assert_loaded(start("full").serve(prompts()), 0)


def test_a_shared_head_is_loaded_and_the_rest_computed(start: Start) -> None:
    harness = start("full")
    head = prompts(1)[0]
    harness.serve([head])
    harness.drop_gpu_cache()
    assert_loaded(harness.serve([head[:330] + prompts(1, seed=2)[0][330:]]), 320)


def test_requests_for_one_prefix_at_the_same_time_all_load_it(start: Start) -> None:
    first = start("full_and_window")
    first.serve(prompts(1))
    first.close()
    second = start("full_and_window")
    outcomes = second.serve(prompts(1) * 4)  # those that come later may find the first one's blocks on the GPU
    assert min(o.cached_tokens for o in outcomes) == whole_chunks(second)
    assert all(o.pages_wrong == 0 < o.pages_right for o in outcomes)


def test_the_harness_sees_a_single_wrong_page(start: Start) -> None:
    """The control for every assertion above: one byte in one page is found."""
    harness = start("full")
    request = harness.add(prompts(1)[0], max_tokens=8)
    while request.num_computed_tokens < request.num_prompt_tokens:
        harness.step()
    right, wrong = harness.verify(request)
    assert (right > 0, wrong) == (True, 0)
    _, layers, _, block, _ = next(iter(harness._blocks(request)))
    harness.pages[layers[0]][block][-1] ^= 1
    assert harness.verify(request) == (right - 1, 1)
    harness.run([request])
