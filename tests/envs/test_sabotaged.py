"""`shoal env check` on files with one thing wrong: each is rejected, with a message of its own."""

import base64
import hashlib
import time
from pathlib import Path

import pytest

from shoal.env_packages.install import install
from shoal.env_packages.install_policy import InstallDecision
from shoal.env_packages.naming import read_reference
from shoal.env_packages.publish import push
from shoal.env_packages.registry import FolderRegistry
from shoal.envs.lint import CheckResult
from shoal.envs.lint.package_checks import pins
from shoal.envs.lint.run import busy, check
from shoal.errors import ConfigError
from tests.env_packages.author import Author
from tests.sandbox.needs import needs_bubblewrap

FOLDER = Path(__file__).parent / "sabotaged"

SABOTAGED = {
    "wrong_gold": ("solutions", "task 19: its own solution '372' earns 0, the highest reward is 1: correct this answer"),
    "clock": ("clock", "at another date, time and time zone, task"),
    "clock_stopwatch": ("clock", "scores 1.0 after 1 turns, then 0.5 after 1 turns: do not ask what time it is"),
    "hash_seed": ("hash seed", "with another hash seed, task"),
    "global_state": ("openings", "opens differently the second time"),
    "global_state_memory": ("earlier tasks", "after other tasks, task"),
    "leak": ("leaks", "in 32 of 32 tasks it comes right after '? [gold=', and a copy is rewarded. Leave it out"),
    "network": ("network", "it looks for the host 192.0.2.1 (network.py line 15)"),
    "fork_bomb": ("processes", "it forks (fork_bomb.py line 21): an environment is one process. Leave it out"),
    "endless_loop": ("time", " s (endless_loop.py line"),
    "endless_regex": ("time", "no line of Python ran: look for a regular expression"),
    "memory": ("memory", "more than 2,048 MB are needed: held-out task 0, step() with action '1000000147': raised"),
    "file_writes": ("files", "file_writes.log (file_writes.py line 20): keep everything in the state"),
    "effects_at_import": ("import", "environment variable TOKENIZERS_PARALLELISM (effects_at_import.py line 7)"),
    "effects_at_import_patch": ("import", "it changes a function of shoal"),
    "reward_hack": ("reward hacks", "rewards all answers at once with 100% of the range"),
    "reward_hack_empty": ("reward hacks", "the answer '' earns 100% of the range on average"),
    "reward_hack_any": ("reward hacks", "earns 100% of the range on average"),
    "data_changed": ("data", "sums.jsonl has changed: its SHA-256 is"),
}  # fmt: skip
"""The check that must fail, and words of its message."""

LONG = ("endless_regex",)
"""It is waited for until its time is over, twice."""


def failed(found: list[CheckResult]) -> dict[str, str]:
    return {finding.check: finding.detail for finding in found if finding.outcome == "failed"}


def checked(name: str, **more: object) -> list[CheckResult]:
    path = FOLDER / name
    return check(str(path if path.is_dir() else path.with_suffix(".py")), {}, call_s=2.0, **more)  # type: ignore[arg-type]


@needs_bubblewrap
def test_the_sound_environment_passes_every_check() -> None:
    assert [finding for finding in checked("good") if finding.outcome != "passed"] == []


@needs_bubblewrap
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in SABOTAGED]
)
def test_a_sabotaged_environment_is_rejected_by_name(name: str) -> None:
    begun, slower = time.monotonic(), busy()
    found = failed(checked(name))
    kind, words = SABOTAGED[name]
    assert list(found) == [kind] and words in found[kind], found
    assert time.monotonic() - begun < 60 * slower
    assert not list(FOLDER.rglob("*.log"))


def test_every_sabotaged_file_is_tried() -> None:
    there = {path.stem for path in FOLDER.iterdir() if not path.name.startswith("__")}
    assert there == {*SABOTAGED, "good"}


def with_dependency(author: Author, site: Path, version: str = "1.0") -> Path:
    """A package that locks a dependency, which is installed in `site` with hashes of its files."""
    code, info = site / "tinydep.py", site / f"tinydep-{version}.dist-info"
    info.mkdir(parents=True)
    code.write_text("VERSION = 1\n")
    mark = base64.urlsafe_b64encode(hashlib.sha256(code.read_bytes()).digest()).decode().rstrip("=")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tinydep\nVersion: {version}\n")
    (info / "RECORD").write_text(f"tinydep.py,sha256={mark},12\n")
    folder = author.folder(more='lock = "lock.txt"')
    (folder / "lock.txt").write_text(f"tinydep==1.0 --hash=sha256:{'0' * 64}\n")
    return folder


@pytest.fixture
def author(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Author:
    author = Author(tmp_path / "ann")
    monkeypatch.setenv("SHOAL_HOME", str(author.home))
    (tmp_path / "registry").mkdir()
    return author


def test_a_dependency_that_changed_under_its_version_is_found(
    author: Author, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, site = with_dependency(author, tmp_path / "site"), tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))
    assert [f.detail for f in pins(folder)] == ["the 1 of the lock are installed unchanged"]
    (site / "tinydep.py").write_text("VERSION = 2\n")
    assert (
        "tinydep.py of tinydep 1.0 was changed after it was installed, under the same version" in pins(folder)[0].detail
    )
    assert pins(folder)[0].outcome == "failed"


def test_a_dependency_of_another_version_than_the_lock_is_found(
    author: Author, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_dependency(author, tmp_path / "site", "1.1")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert "tinydep 1.1 is installed, and the lock says 1.0" in failed(pins(folder))["dependencies"]


def test_an_import_that_the_lock_does_not_list_is_found(
    author: Author, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_dependency(author, tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "site" / "tinydep-1.0.dist-info" / "top_level.txt").write_text("tinydep\n")
    file, code = folder / "environment.py", (folder / "environment.py").read_text()
    allowed = "import os, msgspec, helper\nimport tinydep\nfrom shoal.env import Step\n"
    allowed += "try:\n    import pytest\nexcept ImportError:\n    pass\n"
    (folder / "helper.py").write_text("WORD = 1\n")
    file.write_text(allowed + code)
    assert pins(folder)[0].outcome == "passed"
    (folder / "helper.py").write_text("def late():\n    from numpy import random\n")
    told = failed(pins(folder))["dependencies"]
    assert "helper.py line 2 imports numpy, which the lock does not list" in told and "Add numpy" in told
    (folder / "helper.py").write_text("")
    (folder / "environment.toml").write_text((folder / "environment.toml").read_text().replace('lock = "lock.txt"', ""))
    (folder / "lock.txt").unlink()
    assert "imports tinydep, which the lock does not list" in failed(pins(folder))["dependencies"]


@pytest.mark.parametrize(
    ("file", "kind"), [("lock.txt", "dependencies"), ("words.txt", "data"), ("environment.py", "version")]
)
@pytest.mark.parametrize("known", ["by the registry", "by an installation", "by the author"])
def test_a_change_under_a_published_version_is_found(
    author: Author, tmp_path: Path, known: str, file: str, kind: str
) -> None:
    folder, registry = author.folder(more='lock = "lock.txt"'), FolderRegistry(tmp_path / "registry")
    (folder / "lock.txt").write_text("# nothing\n")
    push(folder, registry, author.key, author.home)
    if known == "by an installation":
        install(read_reference("ann/parrot@0.1.0"), registry, author.home, InstallDecision(None, lambda _: True))
    place = str(tmp_path / "registry") if known == "by the registry" else ""
    assert failed(pins(folder, place)) == {}
    (folder / file).write_text((folder / file).read_text() + f"\n# {file}\n")
    found = failed(pins(folder, place))
    if known == "by the author":
        assert "ann/parrot 0.1.0 was published with other files: raise version" in found["version"]
    else:
        where = "published" if known == "by the registry" else "installed here"
        assert f"{file} changed since ann/parrot 0.1.0 was {where}, under the same version" in found[kind]


def test_an_installed_package_is_checked_only_inside_the_sandbox(author: Author, tmp_path: Path) -> None:
    registry = FolderRegistry(tmp_path / "registry")
    push(author.folder(), registry, author.key, author.home)
    install(read_reference("ann/parrot@0.1.0"), registry, author.home, InstallDecision(None, lambda _: True))
    with pytest.raises(ConfigError, match="is checked only inside the sandbox"):
        check("ann/parrot@0.1.0", {}, sandboxed=False)


@needs_bubblewrap
def test_an_installed_package_is_checked(author: Author, tmp_path: Path) -> None:
    registry = FolderRegistry(tmp_path / "registry")
    push(author.folder(), registry, author.key, author.home)
    install(read_reference("ann/parrot@0.1.0"), registry, author.home, InstallDecision(None, lambda _: True))
    found = {finding.check: finding for finding in check("ann/parrot@0.1.0", {})}
    assert found["members"].outcome == "passed" and found["sandbox"].outcome == "passed"
    assert found["reward hacks"].outcome == "failed", "it rewards every answer"


@needs_bubblewrap
def test_an_installed_package_that_imports_more_than_its_lock_fails(author: Author, tmp_path: Path) -> None:
    """It passes where the import is installed by chance, and fails elsewhere in the middle of an episode."""
    registry, folder = FolderRegistry(tmp_path / "registry"), author.folder()
    (folder / "environment.py").write_text(
        (folder / "environment.py")
        .read_text()
        .replace("        return 1.0", "        import numpy\n        return 1.0")
    )
    push(folder, registry, author.key, author.home)
    install(read_reference("ann/parrot@0.1.0"), registry, author.home, InstallDecision(None, lambda _: True))
    assert "imports numpy, which the lock does not list" in failed(check("ann/parrot@0.1.0", {}))["dependencies"]


SMALL = """
from shoal.env import Env, Step, require_index
{at_import}
class Vowels(Env):
    name, num_tasks, num_heldout = "vowels", 400, 64
    def task(self, index, heldout=False):
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        return index + self.num_tasks * heldout
    def reset(self, task):
        return (task, ""), [{{"role": "user", "content": f"q{{task}}"}}]
    def step(self, state, action):
        if state[0] % 33 == 3 and {raises}: raise ValueError(f"bad {{state[0]}}")
        return Step((state[0], str(action)), None, True)
    def score(self, state):
        return {high} if state[0] % 7 == 3 else sum(c in "aeiou" for c in state[1]) / max(1, len(state[1]))
    def players(self):
        return {{"right": lambda state, rng: "aeiou", "wrong": lambda state, rng: "xyz"}}
environment = Vowels
"""


@pytest.mark.parametrize(("changes", "name", "words"), [
    ({"raises": True}, "episodes", "line 12: ValueError: bad 333"),
    ({"high": 1.5}, "right player", "line 14: it gives 1.5, not a number within reward_bounds 0 to 1"),
    ({"at_import": "kept = [bytearray(50_000_000) for _ in range(99)]"}, "memory",
     "more than 2,048 MB are needed when it is imported: "),
])  # fmt: skip
def test_a_fault_in_few_tasks_or_at_import_is_found_with_its_line(
    tmp_path: Path, changes: dict[str, object], name: str, words: str
) -> None:
    path = tmp_path / "vowels.py"
    path.write_text(SMALL.format(**({"raises": False, "high": 1.0, "at_import": ""} | changes)))
    found = check(str(path), {}, sandboxed=False)
    assert words in failed(found)[name] and f"{path} line " in failed(found)[name]
    skipped = " ".join(one.detail for one in found if one.check == "not checked")
    assert name == "memory" or "earlier tasks, hash seed, clock: the cause is that of" in skipped
