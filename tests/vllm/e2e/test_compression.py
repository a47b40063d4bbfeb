"""With real vLLM: what was stored compressed is loaded to the same bits, also by an engine that does not compress."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("zstandard")
from dataclasses import replace

from tests.vllm.e2e.engine import DRAIN, Site, cached, generate, outputs


@pytest.mark.parametrize("model", ["llama", "gemma4"])
def test_compressed_chunks_load_to_the_same_bits(model: str, tmp_path: Path, tiny_models_dir: Path) -> None:
    extra = {"blocks_per_chunk": 4, "compression": "zstd"}
    site = Site(model, tiny_models_dir, tmp_path, tmp_path / "root", extra)
    work = generate(1124)
    _, drained, gpu = site.start([work, DRAIN, work])
    stats = drained["stats"]
    assert stats["chunks_compressed"] > 0
    assert stats["bytes_written"] < 0.85 * stats["bytes_flushed"]
    plain = replace(site, extra={"blocks_per_chunk": 4}, starts=1)
    (loaded,) = plain.start([work])
    assert cached(loaded) == cached(gpu)
    assert min(cached(loaded)) > 500
    assert outputs(loaded) == outputs(gpu)
    assert loaded["stats"].get("chunks_stored", 0) == 0
