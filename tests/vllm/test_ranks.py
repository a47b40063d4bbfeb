"""Several ranks through vLLM's own scheduler: each loads its own bytes, and replicated ones are on disk once."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from kvdisk.cli.inspect_report import Inspector
from tests.vllm import models
from tests.vllm.config import connector
from tests.vllm.large_models import glm_5_2
from tests.vllm.ranks import RanksHarness

PROMPT_TOKENS = 500
BLOCKS_PER_CHUNK = 4


def latent() -> Any:
    return MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, max_tp_shards=1)


def heads(count: int) -> dict[str, Any]:
    """Four layers; full attention, or a window."""
    specs = [models.full(), models.window(64), models.full(), models.window(64)][:count]
    return {f"layers.{i}": spec for i, spec in enumerate(specs)}


def stage(first: int, count: int, spec: Callable[[], Any] = models.full) -> dict[str, Any]:
    return {f"layers.{i}": spec() for i in range(first, first + count)}


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": {"specs": [heads(4), heads(4)], "tp_size": 2},
    "tp 2, replicated latent": {
        "specs": [stage(0, 3, latent)] * 2,
        "tp_size": 2,
        "replicated": True,
        "model": "deepseek_v3",
    },
    "tp 2, replicated latent and index": {  # GLM-5.2: two page sizes in one group
        "specs": [glm_5_2(6).specs] * 2,
        "tp_size": 2,
        "replicated": True,
        "model": "deepseek_v3",
    },
    "pp 2": {"specs": [stage(0, 3), stage(3, 3)], "pp_size": 2},
    "pp 2, uneven": {"specs": [stage(0, 3), stage(3, 1)], "pp_size": 2},
    "pp 2, latent": {"specs": [stage(0, 2, latent), stage(2, 1, latent)], "pp_size": 2, "model": "deepseek_v3"},
    "tp 2, pp 2": {"specs": [heads(4)] * 2 + [stage(4, 1) | stage(5, 1, lambda: models.window(64))] * 2,
                   "tp_size": 2, "pp_size": 2},
}  # fmt: skip
every_layout = pytest.mark.parametrize("layout", LAYOUTS)

Start = Callable[..., RanksHarness]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[RanksHarness] = []

    def start_one(layout: str, **extra: Any) -> RanksHarness:
        arguments = dict(LAYOUTS[layout])
        model = arguments.pop("model", "llama")
        config = connector(tmp_path / "root", blocks_per_chunk=BLOCKS_PER_CHUNK, **extra)
        if model != "llama":
            arguments["model"] = str(tmp_path / "models" / model)
        running.append(RanksHarness(arguments.pop("specs"), config, tmp_path / "models", **arguments))
        return running[-1]

    yield start_one
    for harness in running:
        harness.close()


def prompts(count: int = 2) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def assert_loaded(outcomes: list[Any], cached_tokens: int) -> None:
    assert [o.cached_tokens for o in outcomes] == [cached_tokens] * len(outcomes)
    assert all(o.pages_wrong == 0 < o.pages_right for o in outcomes), outcomes


@every_layout
def test_every_rank_gets_its_own_bytes_back_from_the_disk(start, tmp_path, layout):
    first = start(layout)
    assert_loaded(first.serve(prompts()), 0)
    geometries = [rank.connector.connector_worker.worker._geometry for rank in first.ranks]
    replicated = first.replicated
    first.close()

    (namespace,) = Inspector().inspect(str(tmp_path / "root")).namespaces
    homes = geometries[:1] if replicated else geometries
    for index, group in enumerate(namespace.instances[0].groups):
        live = sum(geometry.chunk_bytes(index) for geometry in homes)
        assert group.live_bytes == group.chunk_count * live > 0, "each byte is on disk once"

    second = start(layout)
    whole = (PROMPT_TOKENS - 1) // second.chunk_tokens * second.chunk_tokens
    assert_loaded(second.serve(prompts()), whole)
    second.drop_gpu_cache()
    assert_loaded(second.serve(prompts()), whole)


def test_replicated_bytes_have_slots_on_one_rank_and_one_part_on_disk(start):
    harness = start("tp 2, replicated latent")
    shares = [rank.connector.connector_worker.worker._share for rank in harness.ranks]
    assert [share.unit_count > 0 for share in shares] == [True, False]
    harness.serve(prompts())
    assert {len(resident.parts) for resident in harness.manager._service.store.arena.owners()} == {1}


def test_the_smallest_share_decides_how_many_slots_there_are(start, monkeypatch):
    from kvdisk.vllm.spec import KVDiskOffloadingSpec

    units = KVDiskOffloadingSpec._units_a_rank

    def fewer_on_rank_1(self):
        return units(self) - 1000 * self.config.parallel.rank

    monkeypatch.setattr(KVDiskOffloadingSpec, "_units_a_rank", fewer_on_rank_1)
    harness = start("pp 2, uneven")
    assert_loaded(harness.serve(prompts()), 0)
    counts = [rank.connector.connector_worker.worker._share.unit_count for rank in harness.ranks]
    assert counts[0] == counts[1] + 1000
    assert harness.manager._service.store.arena.unit_count == counts[1]


def test_the_harness_sees_ranks_that_swapped_their_bytes(start):
    harness = start("tp 2")
    request = harness.add(prompts(1)[0], max_tokens=8)
    while request.num_computed_tokens < request.num_prompt_tokens:
        harness.step()
    right, wrong = harness.verify(request)
    assert (right > 0, wrong) == (True, 0)
    one, other = harness.ranks
    one.pages, other.pages = other.pages, one.pages
    assert harness.verify(request) == (0, right)
    harness.run([request])
