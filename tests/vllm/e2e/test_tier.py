"""`KVDiskTier` in real vLLM below TieringOffloadingSpec: outputs are the same bit for bit, from disk alone, too."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
from kvdisk.cli.engine_process import run_engine
from kvdisk.cli.segment_files import chunks_of, files_of, flip_byte
from kvdisk.cli.tiny_models import PLUGIN
from tests.vllm.e2e.engine import DRAIN, RESET, RESET_CONNECTOR, cached, generate, outputs, tokens
from tests.vllm.e2e.tamper import forge

REPOSITORY = Path(__file__).parents[3]
WORK = generate(1124)
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class Site:
    """One model over one root, engine after engine."""

    def __init__(self, model: str, models_dir: Path, directory: Path, blocks_per_chunk: int) -> None:
        self.root = directory / "root"
        self.root.mkdir(mode=0o700)
        self._model, self._models_dir, self._directory = model, models_dir, directory
        self._blocks_per_chunk = blocks_per_chunk
        self._starts = 0

    def start(
        self, actions: Sequence[Mapping[str, Any]], environment: Mapping[str, str] | None = None, **tier: Any
    ) -> list[dict[str, Any]]:
        """A new engine in a new process; what each action reports."""
        self._starts += 1
        entry = {
            "type": "KVDiskTier",
            "module_path": "kvdisk.vllm",
            "root_dir": str(self.root),
            "disk_bytes_to_use": "256MiB",
            "cpu_bytes_to_use": "32MiB",
            "segment_bytes": "8MiB",
            **tier,
        }
        extra = {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "bench.cpu_tiering",
            "cpu_bytes_to_use": 64 << 20,
            "blocks_per_chunk": self._blocks_per_chunk,
            "secondary_tiers": [entry],
        }
        connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        engine = {"model": self._model, "kv_transfer_config": connector, "kv_cache_memory_bytes": 128 << 20}
        base = self._directory / f"tier-{self._starts}"
        # Our own modules beside the models' plugin, which run_engine puts before this.
        path = {"PYTHONPATH": f"{self._models_dir}:{REPOSITORY}"}
        return run_engine(base, self._models_dir, engine, actions, {**ENVIRONMENT, **path, **(environment or {})})

    def promoted(self, step: Mapping[str, Any]) -> int:
        return int(step["metrics"].get("vllm:kvdisk_chunks_promoted", 0))


@pytest.mark.parametrize(("model", "chunk_blocks"), [("llama", 4), ("gemma4", 1), ("deepseek_v3", 4)])
def test_outputs_are_the_same_from_host_and_from_disk_alone(
    model: str, chunk_blocks: int, tmp_path: Path, tiny_models_dir: Path
) -> None:
    site = Site(model, tiny_models_dir, tmp_path, chunk_blocks)
    computed, _, gpu, _, host = site.start([WORK, DRAIN, WORK, RESET, WORK])
    assert cached(computed) == [0, 0]
    assert min(cached(gpu)) > 500, "the control: without a hit of the GPU's cache there is nothing to compare with"
    assert (cached(host), outputs(host)) == (cached(gpu), outputs(gpu))

    (restarted,) = site.start([WORK])
    assert (cached(restarted), outputs(restarted)) == (cached(gpu), outputs(gpu))
    assert site.promoted(restarted) > 0
    assert forge(site.root, range(16)) > 0
    (forged,) = site.start([WORK])
    assert cached(forged) == cached(gpu)
    assert tokens(forged) != tokens(gpu), "outputs come from the bytes on disk"


def test_a_damaged_chunk_is_computed_and_a_reset_is_what_the_operator_says(
    tmp_path: Path, tiny_models_dir: Path
) -> None:
    site = Site("llama", tiny_models_dir, tmp_path, 4)
    computed, _ = site.start([WORK, DRAIN])
    chunks = [chunk for path in files_of(site.root) for chunk in chunks_of(path)]
    head = next(chunk for chunk in chunks if not chunk.parent)
    flip_byte(head.path, head.start + head.length // 2)
    spoilt, _, kept = site.start([WORK, RESET_CONNECTOR, WORK], reset_keeps_disk=True)
    assert spoilt["metrics"]["vllm:kvdisk_chunks_damaged"] == 1
    assert sorted(cached(spoilt))[0] == 0
    assert sorted(cached(spoilt))[1] > 500
    assert tokens(spoilt) == tokens(computed)
    assert min(cached(kept)) > 500
    assert tokens(kept) == tokens(computed)

    _, _, stale = site.start([WORK, RESET_CONNECTOR, WORK])
    assert cached(stale) == [0, 0]
    assert tokens(stale) == tokens(computed)


def test_the_plugin_tells_the_tier_whose_data_it_is(tmp_path: Path, tiny_models_dir: Path) -> None:
    site = Site("llama", tiny_models_dir, tmp_path, 4)
    site.start([generate(200)], {"VLLM_PLUGINS": f"{PLUGIN},kvdisk", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    (path,) = site.root.glob("ns-*/namespace.json")
    facts = json.loads(path.read_text())
    text = json.dumps(facts)
    assert '"hf_config"' in text
    assert '"quantization": "none"' in text
    assert '"dtype": "torch.bfloat16"' in text
