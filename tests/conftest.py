"""Fixtures of all tests."""

from pathlib import Path

import pytest

from kvdisk.cli import tiny_models


@pytest.fixture(scope="session")
def tiny_models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every tiny model, and the plugin that loads them (see kvdisk/cli/tiny_models.py)."""
    directory = tmp_path_factory.mktemp("models")
    tiny_models.write(directory)
    return directory
