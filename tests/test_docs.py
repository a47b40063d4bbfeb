"""The documents say what the code does: names that users type are compared with the code that reads them."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvdisk.api import _OPTIONS
from kvdisk.options import Options

ROOT = Path(__file__).parent.parent
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()


def first_column(section: str) -> set[str]:
    """Every `name` in the first cells of the tables between this heading and the next of its level."""
    body = CONFIGURATION.split(section, 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1] for line in body.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}


def test_every_option_of_open_is_documented_and_nothing_else() -> None:
    assert first_column("## Without vLLM") == {"root", *_OPTIONS}


def test_every_key_of_the_adapter_is_documented_and_nothing_else() -> None:
    config = pytest.importorskip("kvdisk.vllm.config", reason="vLLM is not installed")
    documented = first_column("## In vLLM")
    assert documented == {*config.STORE_KEYS, *config.ADAPTER_KEYS, *config.VLLM_KEYS}


def test_every_option_of_the_store_is_a_documented_key() -> None:
    assert {field.name for field in fields(Options)} <= first_column("## In vLLM")


def test_every_metric_is_documented_and_nothing_else() -> None:
    metrics = pytest.importorskip("kvdisk.vllm.metrics", reason="vLLM is not installed")
    assert first_column("## Metrics") == {*metrics.COUNTERS, *metrics.GAUGES}


@pytest.mark.parametrize("document", ["README.md", "docs/architecture.md", "docs/configuration.md", "docs/format.md"])
def test_links_between_documents_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), f"{document} links to {target}"
