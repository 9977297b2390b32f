"""An author and an empty registry."""

from pathlib import Path

import pytest

from shoal.env_packages.registry import FolderRegistry
from tests.env_packages.author import Author


@pytest.fixture
def author(tmp_path: Path) -> Author:
    return Author(tmp_path / "ann")


@pytest.fixture
def registry(tmp_path: Path) -> FolderRegistry:
    (tmp_path / "registry").mkdir()
    return FolderRegistry(tmp_path / "registry")
