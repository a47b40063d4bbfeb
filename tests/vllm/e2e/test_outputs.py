"""With real vLLM, one engine process after another: outputs are the same bit for bit, wherever the cache came from.

The reference is the run that hit the GPU's own prefix cache at the same length: bf16 results depend on how a prompt was
split into steps. The prompts are whole chunks and a short rest, so that both hits are equally long.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")
from kvdisk.cli.segment_files import chunks_of, files_of, flip_byte
from tests.vllm.e2e.engine import DRAIN, RESET, Site, cached, generate, outputs, tokens
from tests.vllm.e2e.tamper import forge_all


class Case(NamedTuple):
    """A model, the size of its chunks, and a prompt that is whole chunks of all its groups and a rest under a block."""

    model: str
    blocks_per_chunk: int
    prompt_tokens: int


LLAMA = Case("llama", 4, 1124)
CASES = [
    LLAMA,
    Case("llama", 1, 1124),
    Case("gemma4", 1, 1124),
    Case("gemma4", 4, 1124),
    Case("qwen3_next", 1, 1380),
    Case("deepseek_v3", 4, 1124),
]


@dataclass
class Runs:
    """One case's engines: the first computed, hit the GPU's cache, then kvdisk; the second started from disk."""

    case: Case
    site: Site
    computed: dict[str, Any]
    stored: dict[str, Any]
    gpu: dict[str, Any]
    host: dict[str, Any]
    restarted: dict[str, Any]

    @property
    def generate(self) -> dict[str, Any]:
        return generate(self.case.prompt_tokens)


def as_param(case: Case) -> Any:
    """Its tests go to one worker, which has its engines' results."""
    name = f"{case.model}-{case.blocks_per_chunk}"
    return pytest.param(case, id=name, marks=pytest.mark.xdist_group(name))


@pytest.fixture(scope="module", params=map(as_param, CASES))
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_models_dir: Path
) -> Iterator[Runs]:
    case: Case = request.param
    directory = tmp_path_factory.mktemp(case.model)
    extra = {"blocks_per_chunk": case.blocks_per_chunk}
    site = Site(case.model, tiny_models_dir, directory, directory / "root", extra)
    work = generate(case.prompt_tokens)
    computed, stored, gpu, _, host = site.start([work, DRAIN, work, RESET, work])
    (restarted,) = site.start([work])
    yield Runs(case, site, computed, stored, gpu, host, restarted)
    shutil.rmtree(directory)


def test_a_first_run_computes_everything(runs: Runs) -> None:
    assert cached(runs.computed) == [0, 0]


def test_the_reference_really_was_cached(runs: Runs) -> None:
    """The control: without a hit of the GPU's cache there is nothing to compare with."""
    assert min(cached(runs.gpu)) > runs.case.prompt_tokens / 2


def test_a_hit_in_host_memory_gives_the_same_bits(runs: Runs) -> None:
    assert cached(runs.host) == cached(runs.gpu)
    assert outputs(runs.host) == outputs(runs.gpu)


def test_a_new_process_gives_the_same_bits_from_disk_alone(runs: Runs) -> None:
    assert cached(runs.restarted) == cached(runs.gpu)
    assert outputs(runs.restarted) == outputs(runs.gpu)


def test_a_new_process_stores_nothing_a_second_time(runs: Runs) -> None:
    assert runs.restarted["stats"].get("chunks_stored", 0) == 0


one_model = pytest.mark.parametrize("runs", [as_param(LLAMA)], indirect=True)


@pytest.fixture
def copy_of_root(tmp_path: Path, runs: Runs) -> Site:
    """What the engines left on disk, to be spoilt."""
    shutil.copytree(runs.site.root, tmp_path / "root")
    return replace(runs.site, root=tmp_path / "root", directory=tmp_path, starts=0)


@one_model
def test_a_flipped_byte_is_found_and_its_prompt_computed(runs: Runs, copy_of_root: Site) -> None:
    heads = [chunk for path in files_of(copy_of_root.root) for chunk in chunks_of(path) if not chunk.parent]
    assert len(heads) == 2, "each prompt's first chunk is on disk"
    flip_byte(heads[0].path, heads[0].start + heads[0].length // 2)
    (spoilt,) = copy_of_root.start([runs.generate])
    assert spoilt["stats"]["chunks_damaged"] == 1
    assert sorted(cached(spoilt)) == [0, cached(runs.gpu)[0]]
    for i, length in enumerate(cached(spoilt)):
        reference = runs.gpu if length else runs.computed
        assert outputs(spoilt)[i] == outputs(reference)[i]


@one_model
def test_forged_bytes_change_the_output(runs: Runs, copy_of_root: Site) -> None:
    """The control of all the others: outputs do come from the bytes on disk."""
    assert forge_all(copy_of_root.root) > 0
    (forged,) = copy_of_root.start([runs.generate])
    assert cached(forged) == cached(runs.gpu)
    assert all(mine != right for mine, right in zip(tokens(forged), tokens(runs.gpu), strict=True))
