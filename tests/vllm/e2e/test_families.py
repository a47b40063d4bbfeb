"""Every model family that vLLM can run on a CPU, with real vLLM: the same bits come out, wherever the cache was."""

import shutil
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("vllm")
from kvdisk.cli.segment_files import chunks_of, files_of, flip_byte
from tests.machine import has_avx512_bf16
from tests.vllm.e2e.engine import Server, Site, cached, outputs
from tests.vllm.e2e.outputs import Outputs, Recurrent, Runs
from tests.vllm.e2e.shims import TRITON_INTERPRETED


class TestLlama(Outputs):
    """Full attention alone; and, one model being enough for that, a new process, and what a spoilt disk does."""

    model = "llama"

    def test_a_new_process_gives_the_same_bits_from_disk_alone(
        self, all_runs: dict[int, Runs], tmp_path: Path, tiny_models_dir: Path
    ) -> None:
        runs = all_runs[4]
        site = Site(self.model, tiny_models_dir, tmp_path, runs.root, {"blocks_per_chunk": 4})
        (step,) = site.start([runs.work])
        assert cached(step) == cached(runs.gpu)
        assert outputs(step) == outputs(runs.gpu)

    def test_a_flipped_byte_is_found_and_its_prompt_computed(
        self, all_runs: dict[int, Runs], server: Server, tmp_path: Path
    ) -> None:
        runs = all_runs[4]
        shutil.copytree(runs.root, tmp_path / "root")
        heads = [chunk for path in files_of(tmp_path / "root") for chunk in chunks_of(path) if not chunk.parent]
        assert len(heads) == 2, "each prompt's first chunk is on disk"
        flip_byte(heads[0].path, heads[0].start + heads[0].length // 2)

        server.start(self.model, tmp_path / "root", {"blocks_per_chunk": 4})
        (spoilt,) = server.do(runs.work)
        server.stop()
        assert spoilt["stats"]["chunks_damaged"] == 1
        assert sorted(cached(spoilt)) == [0, cached(runs.gpu)[0]]
        for i, length in enumerate(cached(spoilt)):
            reference = runs.gpu if length else runs.computed
            assert outputs(spoilt)[i] == outputs(reference)[i]


class TestGemma3(Outputs):
    """Groups of windows and of full attention, alike in size."""

    model = "gemma3"


class TestGemma4(Outputs):
    """Windows beside full attention, with other head sizes."""

    model = "gemma4"


class TestGemma4KVSharing(Outputs):
    """Layers without a cache of their own."""

    model = "gemma4_kv_sharing"


class TestGptOss(Outputs):
    """Window and full attention by turns."""

    model = "gpt_oss"


class TestLlama4(Outputs):
    """Chunked local attention; a hit ends in the middle of such a chunk."""

    model = "llama4"


class TestDeepseekV3(Outputs):
    """Latent attention: one vector a token, the same on every rank."""

    model = "deepseek_v3"


class TestGlm4MoeLite(Outputs):
    model = "glm4_moe_lite"


class TestQwen3Next(Recurrent):
    """A recurrent state beside full attention."""

    model = "qwen3_next"
    prompt_tokens = 1380
    row_of_avx512_bf16 = True


class TestQwen35Moe(Recurrent):
    """Its module imports torchvision, without need."""

    model = "qwen3_5_moe"
    prompt_tokens = 1380
    shims = ("torchvision",)
    row_of_avx512_bf16 = True


class TestNemotronH(Recurrent):
    """Mamba-2 states. On a CPU, vLLM 0.32 fails in a step that goes beyond a block's end (it looks for a state that its
    CPU kernel does not return), so steps are one block long.
    """

    model = "nemotron_h"
    engine: ClassVar = {"max_num_batched_tokens": 128}


@pytest.mark.skipif(not has_avx512_bf16(), reason="vLLM's kernels for this processor lack convert_weight_packed")
class TestDeepseekV4(Outputs):
    """Five groups in packed blocks of 4 to 256 tokens. Interpreted in part, hence fewer tokens to compute."""

    model = "deepseek_v4"
    prompt_count = 1
    shims = ("deepseek_v4",)
    environment: ClassVar = TRITON_INTERPRETED
    silent: ClassVar = {("SlidingWindowMLASpec", 8): "a sum over 128 tokens begins anew at 256, where hits end"}
