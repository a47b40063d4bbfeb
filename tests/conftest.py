"""Fixtures of all tests."""

from pathlib import Path

import pytest

from kvdisk.cli import tiny_models


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "write the rows of docs/models.md that the tests find, instead of comparing them"
    parser.addoption("--write-models-doc", action="store_true", help=text)


@pytest.fixture(scope="session")
def tiny_models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every tiny model, and the plugin that loads them (see kvdisk/cli/tiny_models.py)."""
    directory = tmp_path_factory.mktemp("models")
    tiny_models.write(directory)
    return directory
