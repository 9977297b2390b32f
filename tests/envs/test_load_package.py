"""Packages in a run: named by version or digest, pinned by digest, and never run here if somebody else wrote them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.env import Env
from shoal.env_packages.installed import Installed
from shoal.env_packages.registry import FolderRegistry
from shoal.envs.interface import AuthorError
from shoal.envs.isolated import environment as opening
from shoal.envs.isolated.environment import ContainedEnv, in_child
from shoal.envs.load import env_digest, is_file, is_package, load_built_in, load_env, load_run_envs
from shoal.errors import ConfigError, StateError
from shoal.net.key_files import save_key
from shoal.protocol.messages import EnvSpec
from shoal.sandbox.selftest import SelftestReport
from tests.env_packages.author import CODE, Author
from tests.sandbox.needs import needs_bubblewrap

NAME = "ann/parrot@0.1.0"


@pytest.fixture
def ann(author: Author, registry: FolderRegistry) -> Author:
    """Ann has published and installed her package."""
    save_key(author.home / "author.key", author.key)
    author.share(registry, author.folder())
    return author


@pytest.fixture
def bob(ann: Author, registry: FolderRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody else, who has installed the package too."""
    home = tmp_path / "bob"
    monkeypatch.setenv("SHOAL_HOME", str(home))
    ann.share(registry, ann.folder(), home)
    return home


def spec() -> EnvSpec:
    return EnvSpec(NAME, env_digest(NAME), 3, 1.0, {})


def test_an_author_runs_the_installed_package(ann: Author) -> None:
    env = load_env(NAME, {})
    assert (env.name, env.task(1)) == ("parrot", "b")
    assert load_env(f"pkg:{env_digest(NAME)}", {}).name == "parrot"
    assert list(load_run_envs([spec()], own_files=True)) == [NAME]


@needs_bubblewrap
def test_a_package_that_times_out_fails_alike_for_its_author_and_for_others(
    ann: Author, registry: FolderRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the sandbox no endpoint ever answers, so a timeout is a fault there."""
    monkeypatch.setattr(
        "tests.env_packages.author.CODE",
        "import concurrent.futures\n"
        + CODE.replace("return Step(", "return concurrent.futures.Future().result(0) or ("),
    )
    folder = ann.folder(version="0.2.0")
    for home in (ann.home, tmp_path / "bob"):
        monkeypatch.setenv("SHOAL_HOME", str(home))
        env = load_env(ann.share(registry, folder, home), {}, own=in_child)
        assert isinstance(env, ContainedEnv)
        with pytest.raises(AuthorError, match="TimeoutError"):
            env.step(env.reset(env.task(0))[0], "a")


def test_a_folder_is_loaded_as_it_would_be_packed(ann: Author) -> None:
    folder = ann.folder()
    assert load_env(str(folder), {}).task(0) == "a" and env_digest(str(folder)) == env_digest(NAME)
    (folder / "words.txt").write_text("x y z")
    assert env_digest(str(folder)) != env_digest(NAME)


def test_names_of_packages_files_and_built_ins_are_told_apart() -> None:
    assert is_package(NAME) and is_package("pkg:" + "a" * 64)
    assert not any(map(is_package, ("wordle", "./x.py", "ann/parrot", "./ann/parrot@0.1.0", "ann/parrot.py")))
    assert not is_file(NAME) and is_file("./ann/parrot@0.1.0") and is_file("ann/parrot")
    with pytest.raises(ConfigError, match="only built-in"):
        load_built_in(NAME, {})


@needs_bubblewrap
def test_a_package_of_somebody_else_never_runs_in_this_process(bob: Path) -> None:
    for env in (load_env(NAME, {}), *(load_run_envs([spec()], own_files=own)[NAME] for own in (False, True))):
        assert isinstance(env, ContainedEnv) and (env.name, repr(env.task(1))) == ("parrot", "'b'")


def test_without_a_sandbox_a_package_of_somebody_else_is_refused_with_the_remedy(
    bob: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        opening, "examined", lambda: SelftestReport(False, "bubblewrap is not installed", "apt install it")
    )
    monkeypatch.setattr(opening, "EnvConnection", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(ConfigError, match=r"ann/parrot 0\.1\.0 runs only inside the sandbox, which .*: apt install it"):
        load_env(NAME, {})


def test_a_host_cannot_replace_a_package_under_its_name(bob: Path) -> None:
    """The digest of the run counts, not what the name means here."""
    other = msgspec.structs.replace(spec(), digest="a" * 64)
    with pytest.raises(ConfigError, match=r"uses the package ann/parrot@0\.1\.0 \(a{16}…\), which is not installed"):
        load_run_envs([other], own_files=False)


def test_a_name_that_means_another_package_here_is_opened_by_the_digest(bob: Path) -> None:
    opened: list[str] = []

    def opener(package: Installed, paths: Sequence[Path], args: Mapping[str, Any]) -> Env:
        opened.append(package.name)
        return load_env(str(paths[0]), args)

    lying = msgspec.structs.replace(spec(), name="eve/other@9.9.9")
    load_run_envs([lying], own_files=False, opener=opener)
    assert opened == ["ann/parrot"]


def test_a_package_that_was_changed_on_the_disk_is_not_loaded(ann: Author) -> None:
    installed = ann.home / "envs" / env_digest(NAME) / "package" / "environment.py"
    installed.write_text(installed.read_text() + "\nimport os\n")
    with pytest.raises(StateError, match=r"environment\.py of ann/parrot 0\.1\.0 was changed"):
        load_env(NAME, {})


def test_a_package_that_is_not_installed_is_refused_in_one_line(ann: Author) -> None:
    with pytest.raises(ConfigError, match=r"shoal env install ann/none@1\.0\.0"):
        load_env("ann/none@1.0.0", {})
