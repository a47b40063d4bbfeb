"""The engine and its workers in processes of their own, as vLLM is served: rendezvous, shares, every rank's part."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
from kvdisk.cli.engine_process import engine_arguments
from kvdisk.cli.inspect_report import Inspector
from kvdisk.cli.tiny_models import VOCABULARY
from tests.vllm.config import connector
from tests.vllm.e2e.engine import (
    DRAIN,
    OWN_PROCESS,
    RESET,
    RESET_CONNECTOR,
    Site,
    cached,
    generate,
    outputs,
    variables,
)
from tests.vllm.e2e.outputs import block_bytes_of, inspect

MIB = 1 << 20
WORK = generate(1124, count=3)
TOGETHER = {**WORK, "together": True}
LLAMA_BLOCK_BYTES = 3 * 128 * 2 * 2 * 64 * 2
"""3 layers, 128 tokens, keys and values, 2 heads (1 on each of 2 ranks) of 64, in bfloat16."""
DEEPSEEK_BLOCK_BYTES = 3 * 16 * (512 + 64) * 2
"""3 layers, 16 tokens, one latent vector with its rotary part, in bfloat16; every rank has all of it."""


@pytest.mark.parametrize(
    ("model", "ranks", "hit", "block_tokens", "block_bytes"),
    [
        ("llama", 1, 1024, 128, LLAMA_BLOCK_BYTES),
        ("llama", 2, 1024, 128, LLAMA_BLOCK_BYTES),
        ("deepseek_v3", 2, 1088, 16, DEEPSEEK_BLOCK_BYTES),
    ],
)
def test_ranks_in_other_processes_store_each_byte_once_and_load_it(
    model: str, ranks: int, hit: int, block_tokens: int, block_bytes: int, tmp_path: Path, tiny_models_dir: Path
) -> None:
    if ranks > len(os.sched_getaffinity(0)):
        pytest.skip(f"vLLM's CPU workers need a core each, {ranks} of them")
    environment = {**OWN_PROCESS, "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))}
    engine = {"tensor_parallel_size": ranks, "kv_cache_memory_bytes": 200 * MIB}
    site = Site(model, tiny_models_dir, tmp_path, tmp_path / "root")

    computed, _, gpu, _, loaded = site.start([WORK, DRAIN, WORK, RESET, WORK], environment, **engine)
    assert cached(computed) == [0] * 3
    assert min(cached(gpu)) >= hit
    assert cached(loaded) == [hit] * 3
    assert outputs(loaded) == outputs(gpu)

    (group,) = inspect(site.root).values()
    assert group.chunk_count == 3 * hit // (4 * block_tokens), "each chunk once"
    assert block_bytes_of(group, blocks_per_chunk=4) == block_bytes, "and each byte of it"

    restarted, _, together, _, forgotten = site.start(
        [WORK, RESET, TOGETHER, RESET_CONNECTOR, WORK], environment, **engine, max_num_seqs=8
    )
    assert cached(restarted) == cached(together) == [hit] * 3, "from disk alone; then all at the same time"
    assert outputs(restarted) == outputs(gpu)
    assert cached(forgotten) == [0] * 3, "after reset_connector nothing may hit"
    assert outputs(forgotten) == outputs(computed)


def test_data_parallel_engines_keep_to_their_shares_and_find_their_own_again(
    tmp_path: Path, tiny_models_dir: Path
) -> None:
    rng = random.Random(1)
    prompts = [[[rng.randrange(3, VOCABULARY) for _ in range(1124)] for _ in range(8)] for _ in range(2)]
    cap = 40 * MIB
    extra = {"blocks_per_chunk": 1, "segment_bytes": "4MiB", "disk_bytes_to_use": cap, "cpu_bytes_to_use": "32MiB"}
    # float32, since it is not known where in its prompt a hit will end.
    engine = {"model": "llama", "dtype": "float32", "data_parallel_size": 2, "kv_cache_memory_bytes": 128 * MIB}
    engine["kv_transfer_config"] = connector(tmp_path / "root", **extra)
    assert cap // 2 < 8 * 8 * 2 * LLAMA_BLOCK_BYTES, "each engine is asked to keep more than its share"

    def serve(asked: list[list[list[int]]]) -> list[list[dict[str, Any]]]:
        plan, result = tmp_path / "plan.json", tmp_path / "result.json"
        plan.write_text(json.dumps({"engine": engine_arguments(tiny_models_dir, engine), "prompts": asked}))
        command = [sys.executable, "-m", "tests.vllm.e2e.data_parallel", str(plan), str(result)]
        with (tmp_path / "log").open("w") as log:
            environment = {**variables(tiny_models_dir), **OWN_PROCESS}
            subprocess.run(command, env=environment, stdout=log, stderr=log, check=True)
        answers: list[list[dict[str, Any]]] = json.loads(result.read_text())
        return answers

    first = serve(prompts)
    assert [[request["cached_tokens"] for request in each] for each in first] == [[0] * 8] * 2

    found = Inspector().inspect(str(tmp_path / "root"))
    (namespace,) = found.namespaces
    assert [Path(each.path).name for each in namespace.instances] == ["dp0", "dp1"]
    for each in namespace.instances:
        assert cap // 4 < each.used_bytes <= cap // 2
    assert found.used_bytes <= cap

    last = [each[-2:] for each in prompts]
    again = serve(last)
    assert min(request["cached_tokens"] for each in again for request in each) > 0
    assert [[request["tokens"] for request in each] for each in again] == [
        [request["tokens"] for request in each[-2:]] for each in first
    ]
