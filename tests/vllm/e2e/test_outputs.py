"""With real vLLM, one engine process after another: outputs are the same bit for bit, wherever the cache came from.

The reference is the run that hit the GPU's own prefix cache at the same length: bf16 results depend on how a prompt was
split into steps. The prompts are whole chunks and a short rest, so that both hits are equally long.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm")
from kvdisk.cli.segment_files import chunks_of, files_of, flip_byte
from tests.vllm.e2e.engine import DRAIN, RESET, Site, cached, generate, outputs, tokens
from tests.vllm.e2e.tamper import forge_all


@dataclass
class Runs:
    """One model's engines: the first computed, hit the GPU's cache, then kvdisk's; the second started from disk."""

    site: Site
    work: dict[str, Any]
    computed: dict[str, Any]
    gpu: dict[str, Any]
    host: dict[str, Any]
    restarted: dict[str, Any]


@pytest.fixture(scope="class")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_models_dir: Path
) -> Iterator[Runs]:
    case: type[Outputs] = request.cls
    directory = tmp_path_factory.mktemp(case.model)
    extra = {"blocks_per_chunk": case.blocks_per_chunk}
    site = Site(case.model, tiny_models_dir, directory, directory / "root", extra)
    work = generate(case.prompt_tokens)
    computed, _, gpu, _, host = site.start([work, DRAIN, work, RESET, work])
    (restarted,) = site.start([work])
    yield Runs(site, work, computed, gpu, host, restarted)
    shutil.rmtree(directory)


class Outputs:
    """What holds for every model. A class each: pytest-xdist's loadscope keeps its tests and engines together."""

    model: ClassVar[str]
    blocks_per_chunk: ClassVar[int] = 4
    prompt_tokens: ClassVar[int] = 1124  # whole chunks of all groups, and a rest of less than a block

    def test_a_first_run_computes_everything(self, runs: Runs) -> None:
        assert cached(runs.computed) == [0, 0]

    def test_the_reference_really_was_cached(self, runs: Runs) -> None:
        """The control: without a hit of the GPU's cache there is nothing to compare with."""
        assert min(cached(runs.gpu)) > self.prompt_tokens / 2

    def test_a_hit_in_host_memory_gives_the_same_bits(self, runs: Runs) -> None:
        assert cached(runs.host) == cached(runs.gpu)
        assert outputs(runs.host) == outputs(runs.gpu)

    def test_a_new_process_gives_the_same_bits_from_disk_alone(self, runs: Runs) -> None:
        assert cached(runs.restarted) == cached(runs.gpu)
        assert outputs(runs.restarted) == outputs(runs.gpu)

    def test_a_new_process_stores_nothing_a_second_time(self, runs: Runs) -> None:
        assert runs.restarted["stats"].get("chunks_stored", 0) == 0


class TestLlama(Outputs):
    """Full attention alone; and, one model being enough for that, what a spoilt disk does."""

    model = "llama"

    @pytest.fixture
    def copied(self, tmp_path: Path, runs: Runs) -> Site:
        """What the engines left on disk, to be spoilt."""
        shutil.copytree(runs.site.root, tmp_path / "root")
        return replace(runs.site, root=tmp_path / "root", directory=tmp_path, starts=0)

    def test_a_flipped_byte_is_found_and_its_prompt_computed(self, runs: Runs, copied: Site) -> None:
        heads = [chunk for path in files_of(copied.root) for chunk in chunks_of(path) if not chunk.parent]
        assert len(heads) == 2, "each prompt's first chunk is on disk"
        flip_byte(heads[0].path, heads[0].start + heads[0].length // 2)
        (spoilt,) = copied.start([runs.work])
        assert spoilt["stats"]["chunks_damaged"] == 1
        assert sorted(cached(spoilt)) == [0, cached(runs.gpu)[0]]
        for i, length in enumerate(cached(spoilt)):
            reference = runs.gpu if length else runs.computed
            assert outputs(spoilt)[i] == outputs(reference)[i]

    def test_forged_bytes_change_the_output(self, runs: Runs, copied: Site) -> None:
        """The control of all the others: outputs do come from the bytes on disk."""
        assert forge_all(copied.root) > 0
        (forged,) = copied.start([runs.work])
        assert cached(forged) == cached(runs.gpu)
        assert all(mine != right for mine, right in zip(tokens(forged), tokens(runs.gpu), strict=True))


class TestLlamaSmallChunks(Outputs):
    model = "llama"
    blocks_per_chunk = 1


class TestGemma4(Outputs):
    """Sliding windows beside full attention, with other head sizes."""

    model = "gemma4"


class TestGemma4SmallChunks(Outputs):
    model = "gemma4"
    blocks_per_chunk = 1


class TestQwen3Next(Outputs):
    """A recurrent state beside full attention; in larger chunks vLLM seldom offers its states."""

    model = "qwen3_next"
    blocks_per_chunk = 1
    prompt_tokens = 1380


class TestDeepseekV3(Outputs):
    """Latent attention: one vector a token, the same on every rank."""

    model = "deepseek_v3"
