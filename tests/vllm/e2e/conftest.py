"""Everything here starts real vLLM engines, many a class; hence the mark and the longer limit."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(600))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of outputs.py that asks for it runs with each `blocks_per_chunk` of its class."""
    if "blocks_per_chunk" in metafunc.fixturenames:
        assert metafunc.cls
        metafunc.parametrize("blocks_per_chunk", metafunc.cls.blocks_per_chunk)
