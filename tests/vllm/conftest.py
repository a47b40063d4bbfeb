"""Everything here needs vLLM; without it the whole folder is left out, and the report's header says so."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.config import connector

if TYPE_CHECKING:
    from tests.vllm.harness import Harness
    from tests.vllm.tiering import Start

HAVE_VLLM = importlib.util.find_spec("vllm") is not None

collect_ignore_glob = [] if HAVE_VLLM else ["*"]


def pytest_report_header() -> str | None:
    """One line, so that nobody takes a run without these tests for a full one."""
    return None if HAVE_VLLM else "tests/vllm is left out: vLLM is not installed"


@pytest.fixture
def engine(tmp_path: Path) -> "Iterator[Callable[..., Harness]]":
    """`engine(specs, **kwargs)` starts a Harness over tmp_path/root with a small arena; closed at the end of the test.

    Its data plane is on a thread, where tests can reach it. `extra` of the keywords goes to the connector's extra
    config, the rest to Harness.
    """
    from tests.vllm.harness import Harness

    running: list[Harness] = []

    def start(specs: dict[str, Any], extra: dict[str, Any] | None = None, **kwargs: Any) -> Harness:
        small = {"cpu_bytes_to_use": "4MiB", "segment_bytes": "4MiB", "data_plane": "thread"}
        config = connector(tmp_path / "root", **{**small, **(extra or {})})
        long = {"max_model_len": 16384, "hf_overrides": {"max_position_embeddings": 65536}}
        kwargs = {**long, "memory_bytes": 48 << 20, "max_num_batched_tokens": 256, **kwargs}
        running.append(Harness(specs, config, tmp_path / "models", **kwargs))
        return running[-1]

    yield start
    for harness in running:
        harness.close()


@pytest.fixture
def start(tmp_path: Path) -> "Iterator[Start]":
    """`start(**kwargs)` makes Tiers over tmp_path/root; at the end they are closed, and none was switched off."""
    from tests.vllm.tiering import Tiers

    running: list[Tiers] = []

    def start_one(**kwargs: Any) -> Tiers:
        running.append(Tiers(tmp_path / "root", **kwargs))
        return running[-1]

    yield start_one
    for tiers in running:
        failed = tiers.tier._off and not tiers.region.cleaned
        if not tiers.region.cleaned:
            tiers.close()
        assert not failed, "the tier was switched off"
