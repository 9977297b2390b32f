"""What an environment says of itself: found out in another process, and heard wherever it says so."""

import os
from pathlib import Path

import pytest

from shoal.config import EnvConfig
from shoal.env import Env
from shoal.env_packages.registry import FolderRegistry
from shoal.envs.interface import describe
from shoal.envs.load import facts_of, load_env
from shoal.envs.settings_wrapper import with_settings
from shoal.errors import ConfigError, ShoalError
from tests.env_packages.author import Author
from tests.envs import sums
from tests.envs.test_settings import Asking

GOOD = Path(sums.__file__).read_text()


def with_code(folder: Path, opening: str = "", inside: str = "") -> EnvConfig:
    path = folder / "mine.py"
    path.write_text(opening + GOOD.replace('name = "sums"', f'name = "sums"\n    {inside}'))
    return EnvConfig(str(path))


def test_a_file_is_executed_in_another_process(tmp_path: Path) -> None:
    env = with_code(tmp_path, "import os\nopen(__file__ + '.pid', 'w').write(str(os.getpid()))\nprint('[1, 2]')\n")
    found = facts_of(env)
    assert (found.name, found.num_tasks, found.reproducible) == ("mine", 40, True)
    assert int((tmp_path / "mine.py.pid").read_text()) != os.getpid()


def test_a_class_and_a_run_file_say_that_nobody_can_repeat_it(tmp_path: Path) -> None:
    assert not facts_of(with_code(tmp_path, inside="reproducible = False")).reproducible
    assert not facts_of(EnvConfig("wordle", reproducible=False)).reproducible
    assert facts_of(EnvConfig("wordle")).reproducible


@pytest.mark.parametrize("installed", [False, True])
def test_the_description_of_a_folder_says_so_too(author: Author, registry: FolderRegistry, installed: bool) -> None:
    folder = author.folder(more="reproducible = false")
    name = author.share(registry, folder) if installed else str(folder)
    assert not describe(load_env(name, {})).reproducible
    found = facts_of(EnvConfig(name))
    assert (found.num_tasks, found.reproducible) == (3, False)


def test_a_file_that_does_not_load_is_refused_with_its_line(tmp_path: Path) -> None:
    for opening, says in (
        ("1 / 0\n", r"mine.py line 1: ZeroDivisionError"),
        ("import os\nos._exit(3)\n", r"os\._exit\(3\)"),
    ):
        with pytest.raises(ShoalError, match=says):
            facts_of(with_code(tmp_path, opening))
    with pytest.raises(ConfigError, match="no environment nothing"):
        facts_of(EnvConfig("nothing"))


class Limited(Asking):
    max_turn_tokens, max_tokens, history, parser = 7, 70, "template", "hermes"


def test_settings_change_the_facts_that_they_name_and_no_others() -> None:
    own: Env = Limited()
    facts, under = describe(own), describe(with_settings(own, EnvConfig("asking", system="be brief", max_tokens=9)))
    assert (facts.max_turn_tokens, facts.max_tokens, facts.history, facts.parser) == (7, 70, "template", "hermes")
    assert (under.max_turn_tokens, under.max_tokens, under.history, under.parser) == (7, 9, "template", "hermes")
    assert (
        under.arguments == facts.arguments and describe(with_settings(own, EnvConfig("asking", label="a"))).name == "a"
    )


@pytest.mark.parametrize("member", ["num_tasks", "num_seats"])
def test_a_number_that_is_none_is_named(member: str) -> None:
    env = Asking()
    setattr(env, member, "x")
    with pytest.raises(TypeError, match=f"{member} is 'x'"):
        describe(env)
