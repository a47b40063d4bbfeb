"""What must hold for every model family, end to end; test_families.py names the families.

The reference is the run that hit the GPU's own prefix cache at the same length: bf16 results depend on how a prompt was
split into steps. The prompts are whole chunks and a short rest, so that both hits are equally long.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvdisk.cli.inspect_report import GroupReport, Inspector
from tests.machine import has_avx512_bf16
from tests.vllm.e2e.engine import DRAIN, RESET, Server, cached, generate, outputs
from tests.vllm.e2e.tamper import forge
from tests.vllm.models_doc import END_TO_END, check_row

Kind = tuple[str, int]
"""Of KV cache groups: vLLM's class, and tokens a block."""
ALL: Kind = ("all", 0)


@dataclass
class Runs:
    """One model's engines with one `blocks_per_chunk`.

    Attributes:
        planned: vLLM's KV cache groups, see server.py.
        said: by the first engine, in its log.
        computed, gpu, host: of the first engine: it computed, hit the GPU's cache, then kvdisk's.
        restarted: of the second, which started from disk.
        forged: of engines that started from a disk on which the bytes of one kind of groups had been replaced; with
            all but the smallest chunks the bytes of all groups, which saves some engines.
        stored: what lies on disk, by group.
        work: what they all were asked.
        root: kvdisk's root_dir.
    """

    planned: list[dict[str, Any]]
    said: str
    computed: dict[str, Any]
    gpu: dict[str, Any]
    host: dict[str, Any]
    restarted: dict[str, Any]
    forged: dict[Kind, dict[str, Any]]
    stored: dict[int, GroupReport]
    work: Mapping[str, Any]
    root: Path


class Outputs:
    """A class each: pytest-xdist's loadscope keeps its tests and engines together.

    Attributes:
        model: of tiny_models.CONFIGS.
        blocks_per_chunk: with which kvdisk must hit.
        prompt_tokens: whole chunks of all groups, and a rest of less than a block.
        engine, shims, environment: what else vLLM needs to run it.
        silent: kinds of groups whose bytes decide nothing after a hit of this length, and why.
        row_of_avx512_bf16: its block sizes, and so its row, are those that vLLM chooses on processors with AVX512-BF16.
    """

    model: ClassVar[str]
    blocks_per_chunk: ClassVar[Sequence[int]] = (4, 1)
    prompt_tokens: ClassVar[int] = 1124
    prompt_count: ClassVar[int] = 2
    engine: ClassVar[Mapping[str, Any]] = {}
    shims: ClassVar[Sequence[str]] = ()
    environment: ClassVar[Mapping[str, str]] = {}
    silent: ClassVar[Mapping[Kind, str]] = {}
    row_of_avx512_bf16: ClassVar[bool] = False

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory, tiny_models_dir: Path) -> Iterator[Server]:
        log = tmp_path_factory.mktemp(cls.model) / "log"
        with Server(log, tiny_models_dir, cls.shims, cls.environment) as server:
            yield server

    @pytest.fixture(scope="class")
    @classmethod
    def all_runs(cls, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Runs]]:
        directory = tmp_path_factory.mktemp("roots")
        yield {each: cls.run(server, directory / str(each), each) for each in cls.blocks_per_chunk}
        shutil.rmtree(directory)

    @pytest.fixture
    def runs(self, all_runs: dict[int, Runs], blocks_per_chunk: int) -> Runs:
        return all_runs[blocks_per_chunk]

    @classmethod
    def run(cls, server: Server, root: Path, blocks_per_chunk: int) -> Runs:
        """All engines with one `blocks_per_chunk`."""
        work = generate(cls.prompt_tokens, count=cls.prompt_count)

        def start(directory: Path) -> list[dict[str, Any]]:
            return server.start(cls.model, directory, {"blocks_per_chunk": blocks_per_chunk}, **cls.engine)

        planned = start(root)
        computed, _, gpu, _, host = server.do(work, DRAIN, work, RESET, work)
        said = server.said()
        server.stop()
        start(root)
        (restarted,) = server.do(work)
        server.stop()
        stored = inspect(root)
        forged = {}
        each = kinds(planned) if blocks_per_chunk == min(cls.blocks_per_chunk) else {ALL: list(stored)}
        for kind, groups in each.items():
            copy = root.with_name(f"{root.name}-forged-{len(forged)}")
            shutil.copytree(root, copy)
            assert forge(copy, groups) == sum(stored[group].chunk_count for group in groups)
            start(copy)
            (forged[kind],) = server.do(work)
            server.stop()
        return Runs(planned, said, computed, gpu, host, restarted, forged, stored, work, root)

    def test_a_first_run_computes_everything(self, runs: Runs) -> None:
        assert cached(runs.computed) == [0] * self.prompt_count

    def test_the_reference_really_was_cached(self, runs: Runs) -> None:
        """The control: without a hit of the GPU's cache there is nothing to compare with."""
        assert min(cached(runs.gpu)) > self.prompt_tokens / 2

    def test_a_hit_in_host_memory_gives_the_same_bits(self, runs: Runs) -> None:
        assert cached(runs.host) == cached(runs.gpu)
        assert outputs(runs.host) == outputs(runs.gpu)

    def test_a_new_engine_gives_the_same_bits_from_disk_alone(self, runs: Runs) -> None:
        assert cached(runs.restarted) == cached(runs.gpu)
        assert outputs(runs.restarted) == outputs(runs.gpu)

    def test_a_new_engine_stores_nothing_a_second_time(self, runs: Runs) -> None:
        assert runs.restarted["stats"].get("chunks_stored", 0) == 0

    def test_every_group_is_on_disk_with_its_live_bytes(self, runs: Runs, blocks_per_chunk: int) -> None:
        assert sorted(runs.stored) == list(range(len(runs.planned)))
        for group, plan in enumerate(runs.planned):
            block_bytes = block_bytes_of(runs.stored[group], blocks_per_chunk)
            assert 0 < block_bytes <= plan["block_bytes"]

    def test_what_every_kind_of_group_has_on_disk_decides_the_output(self, runs: Runs) -> None:
        """The control of all the others: outputs do come from the bytes on disk, from those of all groups."""
        assert set(runs.forged) in (set(kinds(runs.planned)), {ALL})
        for kind, forged in runs.forged.items():
            assert cached(forged) == cached(runs.gpu)
            changed = [mine != right for mine, right in zip(outputs(forged), outputs(runs.gpu), strict=True)]
            assert changed == [kind not in self.silent] * self.prompt_count, kind

    def test_its_row_in_the_documents_is_what_was_found(
        self, all_runs: dict[int, Runs], pytestconfig: pytest.Config
    ) -> None:
        if self.row_of_avx512_bf16 and not has_avx512_bf16():
            pytest.skip("vLLM chooses other block sizes for it on this processor")
        check_row(END_TO_END, row(self, all_runs), write=pytestconfig.getoption("--write-models-doc"))


class Recurrent(Outputs):
    """Families with states: one is stored where a step ends, which is seldom the end of a chunk of several blocks."""

    blocks_per_chunk = (1,)

    @pytest.fixture(scope="class")
    @classmethod
    def larger(cls, server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
        """What an engine with larger chunks says at start, and what it reports."""
        work = generate(cls.prompt_tokens, count=cls.prompt_count)
        server.start(cls.model, tmp_path_factory.mktemp("larger"), {"blocks_per_chunk": 4}, **cls.engine)
        said = server.said()
        results = server.do(work, RESET, work)
        server.stop()
        return said, results

    def test_with_larger_chunks_it_says_at_start_that_there_may_be_no_hits(
        self, larger: tuple[str, list[dict[str, Any]]], all_runs: dict[int, Runs]
    ) -> None:
        said, _ = larger
        states = kinds(all_runs[1].planned)["MambaSpec", all_runs[1].planned[0]["block_tokens"]]
        assert f"KV cache groups {states} hold Mamba or linear-attention states" in said
        assert "set blocks_per_chunk to 1" in said
        assert "hold Mamba or linear-attention states" not in all_runs[1].said

    def test_with_larger_chunks_there_are_none_and_outputs_are_right(
        self, larger: tuple[str, list[dict[str, Any]]]
    ) -> None:
        _, (computed, _, again) = larger
        assert cached(again) == [0] * self.prompt_count
        assert outputs(again) == outputs(computed)


def row(case: Outputs, all_runs: Mapping[int, Runs]) -> list[str]:
    """A family's row in docs/models.md."""
    smallest = min(all_runs)
    runs = all_runs[smallest]
    groups, tokens, block_bytes = [], [], []
    for kind, members in kinds(runs.planned).items():
        plan = runs.planned[members[0]]
        layers = "+".join(str(runs.planned[group]["layers"]) for group in members)
        groups.append(f"{NAMES[kind[0]]} {layers}")
        tokens.append(f"{plan['block_tokens']:,}")
        live = {block_bytes_of(runs.stored[group], smallest) for group in members}
        planned = {runs.planned[group]["block_bytes"] for group in members}
        sizes = [" or ".join(f"{size:,}" for size in sorted(each)) for each in (live, planned)]
        block_bytes.append(sizes[0] if live == planned else " of ".join(sizes))
    hits = [f"{bpc}: {cached(one.restarted)[0]:,}" for bpc, one in sorted(all_runs.items())]
    if isinstance(case, Recurrent):
        hits.append("4: none, as it says at start")
    stored = [
        sum(group.stored_bytes for group in one.stored.values())
        / sum(group.live_bytes for group in one.stored.values())
        for _, one in sorted(all_runs.items())
    ]
    return [
        f"`{case.model}`",
        "; ".join(groups),
        "; ".join(tokens),
        "; ".join(block_bytes),
        ", ".join(f"{ratio:.3f}" for ratio in stored),
        f"{', '.join(hits)} of {case.prompt_tokens:,}",
        ", ".join([*case.shims, *(f"{name} {value}" for name, value in case.engine.items())]) or "as it is",
    ]


NAMES = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "ChunkedLocalAttentionSpec": "local",
    "MLAAttentionSpec": "latent",
    "SlidingWindowMLASpec": "latent window",
    "MambaSpec": "state",
}


def kinds(planned: Sequence[Mapping[str, Any]]) -> dict[Kind, list[int]]:
    """Groups by the kind of their layers and the tokens of a block."""
    found: dict[Kind, list[int]] = {}
    for group, plan in enumerate(planned):
        found.setdefault((plan["kind"], plan["block_tokens"]), []).append(group)
    return found


def inspect(root: Path) -> dict[int, GroupReport]:
    """What `kvdisk inspect` finds, by group; the root has one namespace and one instance."""
    found = Inspector().inspect(str(root))
    assert not found.all_problems
    ((instance,),) = [namespace.instances for namespace in found.namespaces]
    return {group.group: group for group in instance.groups}


def block_bytes_of(group: GroupReport, blocks_per_chunk: int) -> int:
    """Live bytes of one GPU block of a group, as they were stored."""
    blocks = group.chunk_count * blocks_per_chunk
    assert group.live_bytes % blocks == 0
    return group.live_bytes // blocks
