"""The engine and its workers in processes of their own, as vLLM is served: rendezvous, shares, every rank's part."""

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm")
from tests.vllm.e2e.engine import DRAIN, OWN_PROCESS, RESET, RESET_CONNECTOR, Site, cached, generate, tokens

WORK = generate(1124, count=3, together=True)
WHOLE_CHUNKS = [1024] * 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_in_other_processes_store_and_load(ranks: int, tmp_path: Path, tiny_models_dir: Path) -> None:
    if ranks > len(os.sched_getaffinity(0)):
        pytest.skip(f"vLLM's CPU workers need a core each, {ranks} of them")
    environment = {**OWN_PROCESS, "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))}
    engine = {"tensor_parallel_size": ranks, "max_num_seqs": 8, "kv_cache_memory_bytes": 200 << 20}
    site = Site("llama", tiny_models_dir, tmp_path, tmp_path / "root")

    computed, _, loaded, _ = site.start([WORK, RESET, WORK, DRAIN], environment, **engine)
    assert cached(computed) == [0] * 3
    assert cached(loaded) == WHOLE_CHUNKS
    assert tokens(loaded) == tokens(computed)

    restarted, _, forgotten = site.start([WORK, RESET_CONNECTOR, WORK], environment, **engine)
    assert cached(restarted) == WHOLE_CHUNKS, "from disk alone"
    assert tokens(restarted) == tokens(computed)
    assert cached(forgotten) == [0] * 3, "after reset_connector nothing may hit"
    assert tokens(forgotten) == tokens(computed)
