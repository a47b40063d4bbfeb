"""Everything here starts real vLLM engines, each a process of 10 to 20 seconds; hence the mark and the longer limit."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(300))
