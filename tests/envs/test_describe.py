"""What an environment says of itself: found out in another process, and heard wherever it says so."""

import os
from pathlib import Path
from typing import Any

import pytest

from shoal.config import EnvConfig
from shoal.env_packages.install import install
from shoal.env_packages.install_policy import InstallDecision
from shoal.env_packages.naming import read_reference
from shoal.env_packages.publish import push
from shoal.env_packages.registry import FolderRegistry
from shoal.envs.describe import Declared, declared
from shoal.envs.load import load_env
from shoal.errors import ConfigError
from tests.env_packages.author import Author

GOOD = (Path(__file__).parent / "sabotaged" / "good.py").read_text()


@pytest.fixture
def author(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Author:
    author = Author(tmp_path / "ann")
    monkeypatch.setenv("SHOAL_HOME", str(author.home))
    return author


def with_code(folder: Path, opening: str = "", inside: str = "") -> EnvConfig:
    path = folder / "mine.py"
    path.write_text(opening + GOOD.replace('name = "sums"', f'name = "sums"\n    {inside}'))
    return EnvConfig(str(path))


def test_a_file_is_executed_in_another_process(tmp_path: Path) -> None:
    env = with_code(tmp_path, "import os\nopen(__file__ + '.pid', 'w').write(str(os.getpid()))\nprint('[1, 2]')\n")
    assert declared(env) == Declared(40, True)
    assert int((tmp_path / "mine.py.pid").read_text()) != os.getpid()


def test_a_class_says_that_nobody_can_repeat_it(tmp_path: Path) -> None:
    assert declared(with_code(tmp_path, inside="reproducible = False")) == Declared(40, False)


def test_a_run_file_says_so_too(tmp_path: Path) -> None:
    assert not declared(EnvConfig("wordle", reproducible=False)).reproducible
    assert declared(EnvConfig("wordle")).reproducible


@pytest.mark.parametrize("installed", [False, True])
def test_the_description_of_a_folder_says_so_too(author: Author, tmp_path: Path, installed: bool) -> None:
    folder = author.folder(more="reproducible = false")
    name = str(folder)
    if installed:
        registry = FolderRegistry(tmp_path / "registry")
        registry.folder.mkdir()
        push(folder, registry, author.key, author.home)
        install(read_reference("ann/parrot@0.1.0"), registry, author.home, InstallDecision(None, lambda _: True))
        name = "ann/parrot@0.1.0"
    env: Any = load_env(name, {})
    assert env.reproducible is False
    assert declared(EnvConfig(name)) == Declared(3, False)


def test_a_file_that_does_not_load_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine.py line 1: ZeroDivisionError"):
        declared(with_code(tmp_path, "1 / 0\n"))
    with pytest.raises(ConfigError, match="ended its process with code 3"):
        declared(with_code(tmp_path, "import os\nos._exit(3)\n"))
    with pytest.raises(ConfigError, match="no environment nothing"):
        declared(EnvConfig("nothing"))
