"""Everything here needs vLLM; without it the whole folder is left out, and the report's header says so."""

import importlib.util

HAVE_VLLM = importlib.util.find_spec("vllm") is not None

collect_ignore_glob = [] if HAVE_VLLM else ["*"]


def pytest_report_header() -> str | None:
    """One line, so that nobody takes a run without these tests for a full one."""
    return None if HAVE_VLLM else "tests/vllm is left out: vLLM is not installed"
