"""`shoal env check` on files with one thing wrong: each is rejected, with a message of its own."""

import base64
import hashlib
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal.env_packages.publish import push
from shoal.env_packages.registry import FolderRegistry
from shoal.envs.lint import CheckResult
from shoal.envs.lint.dependency_checks import pins
from shoal.envs.lint.process_checks import busy, check
from shoal.errors import ConfigError
from tests.env_packages.author import Author
from tests.envs import sums
from tests.sandbox.needs import needs_bubblewrap

TASK, ASKS = "return 13 * index + 7, 100 +", 'f"What is {task[0]} + {task[1]}?"'
ANSWERS, SCORES = "        return Step((state[0]", "float(state[1] == self.solution(state[0]))"
"""Places of `tests/envs/sums.py`."""


class Mistake(NamedTuple):
    """What is wrong, and the check that must fail, with words of its message."""

    check: str
    says: str
    changes: dict[str, str] = {}
    """Places, and what is there instead."""
    top: str = ""
    """Begins the file."""


SABOTAGED = {
    "wrong_gold": Mistake(
        "solutions", "task 19: its own solution '372' earns 0, the highest reward is 1: correct this answer",
        {SCORES: "float(state[1] == str(sum(state[0])))",
         "        return str(sum(task))": "        return {(254, 119): '372'}.get(task, str(sum(task)))"}),
    "clock_stopwatch": Mistake(
        "clock", "scores 1.0 after 1 turns, then 0.5 after 1 turns: do not ask what time it is",
        {'(task, "")': '(task, "", monotonic())', "action.strip())": "action.strip(), monotonic() - state[2])",
         SCORES: f"{SCORES} * (0.5 if state[2] > 60 else 1.0)"}, "from time import monotonic"),
    "hash_seed": Mistake(
        "hash seed", "with another hash seed, task", {ASKS: "' + '.join({str(number) for number in task})"}),
    "global_state": Mistake(
        "openings", "opens differently the second time",
        {ASKS: f'random.choice(["Hello.", "Good day.", "Please."]) + {ASKS}'}, "import random"),
    "global_state_memory": Mistake(
        "earlier tasks", "after other tasks, task",
        {ASKS: f'SEEN.setdefault(task, "Answer with a number. " if not SEEN else "") + {ASKS}'}, "SEEN = {}"),
    "leak": Mistake(
        "leaks", "in 32 of 32 tasks it comes right after '? [gold=', and a copy is rewarded. Leave it out",
        {ASKS: f'{ASKS} + f" [gold={{self.solution(task)}}]"'}),
    "network": Mistake(
        "network", "it looks for the host 192.0.2.1 (network.py line 13)",
        {f"        {TASK}": "        try: urllib.request.urlopen(f'http://192.0.2.1/tasks/{index}', timeout=2)\n"
                          f"        except OSError: pass\n        {TASK}"}, "import urllib.request"),
    "fork_bomb": Mistake(
        "processes", "it forks (fork_bomb.py line 20): an environment is one process. Leave it out",
        {ANSWERS: f"        while action:\n            os.fork()\n{ANSWERS}"}, "import os"),
    "endless_loop": Mistake(
        "time", " s (endless_loop.py line",
        {ANSWERS: f"        while action and not action[:1].isdigit(): pass\n{ANSWERS}"}),
    "endless_regex": Mistake(
        "time", "no line of Python ran: look for a regular expression",
        {ANSWERS: f"        re.fullmatch('(a|aa)+b', action)\n{ANSWERS}"}, "import re"),
    "memory": Mistake(
        "memory", "more than 2,048 MB are needed: held-out task 0, step() with action '1000000147': raised",
        {TASK: "return 10**9 + 13 * index + 7, 100 +",
         ANSWERS: f"        [0] * int(action) if action.isdecimal() and len(action) < 16 else []\n{ANSWERS}"}),
    "file_writes": Mistake(
        "files", "(file_writes.py line 19): keep everything in the state",
        {ANSWERS: f"        open(__file__.replace('.py', '.log'), 'a').close()\n{ANSWERS}"}),
    "effects_at_import": Mistake(
        "import", "environment variable TOKENIZERS_PARALLELISM (effects_at_import.py line 2)",
        top='import os\nos.environ["TOKENIZERS_PARALLELISM"] = "false"'),
    "effects_at_import_patch": Mistake(
        "import", "it changes a function of shoal",
        top="import shoal.envs.interface\nshoal.envs.interface.earned = lambda *given: 1.0"),
    "reward_hack": Mistake(
        "reward hacks", "rewards all answers at once with 100% of the range",
        {SCORES: "float(self.solution(state[0]) in state[1])"}),
    "reward_hack_empty": Mistake(
        "reward hacks", "the answer '' earns 100% of the range on average",
        {SCORES: "float(self.solution(state[0]).startswith(state[1]))"}),
}  # fmt: skip

LONG = ("endless_regex",)
"""It is waited for until its time is over, twice."""


def failed(found: list[CheckResult]) -> dict[str, str]:
    return {finding.check: finding.detail for finding in found if finding.outcome == "failed"}


def checked(folder: Path, name: str, mistake: Mistake) -> list[CheckResult]:
    code = Path(sums.__file__).read_text()
    for old, new in mistake.changes.items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(f"{mistake.top}\n{code}")
    return check(str(path), {}, call_s=2.0)


@needs_bubblewrap
def test_the_sound_environment_passes_every_check(tmp_path: Path) -> None:
    assert [finding for finding in checked(tmp_path, "good", Mistake("", "")) if finding.outcome != "passed"] == []


@needs_bubblewrap
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in SABOTAGED]
)
def test_a_sabotaged_environment_is_rejected_by_name(name: str, tmp_path: Path) -> None:
    begun, slower, mistake = time.monotonic(), busy(), SABOTAGED[name]
    found = failed(checked(tmp_path, name, mistake))
    assert list(found) == [mistake.check] and mistake.says in found[mistake.check], found
    assert time.monotonic() - begun < 60 * slower
    assert not list(tmp_path.rglob("*.log"))


def test_data_that_changed_after_they_were_pinned_are_found(author: Author) -> None:
    folder = author.folder()
    (folder / "sums.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    read = f"read_rows(Path(__file__).with_name('sums.jsonl'), '{'6' * 64}') and Parrot()"
    code = (folder / "environment.py").read_text().replace("return Parrot()", f"return {read}")
    code = code.replace("import Env, Step", "import Env, Step, read_rows")
    (folder / "environment.py").write_text(code)
    assert "sums.jsonl has changed: its SHA-256 is" in failed(check(str(folder), {}, sandboxed=False))["data"]


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


@pytest.mark.parametrize(("known", "file", "kind"), [
    ("by the registry", "lock.txt", "dependencies"), ("by an installation", "words.txt", "data"),
    ("by an installation", "environment.py", "version"), ("by the author", "environment.py", "version"),
])  # fmt: skip
def test_a_change_under_a_published_version_is_found(
    author: Author, registry: FolderRegistry, known: str, file: str, kind: str
) -> None:
    folder = author.folder(more='lock = "lock.txt"')
    (folder / "lock.txt").write_text("# nothing\n")
    if known == "by an installation":
        author.share(registry, folder)
    else:
        push(folder, registry, author.key, author.home)
    place = registry.place if known == "by the registry" else ""
    assert failed(pins(folder, place)) == {}
    (folder / file).write_text((folder / file).read_text() + f"\n# {file}\n")
    found = failed(pins(folder, place))
    if known == "by the author":
        assert "ann/parrot 0.1.0 was published with other files: raise version" in found["version"]
    else:
        where = "published" if known == "by the registry" else "installed here"
        assert f"{file} changed since ann/parrot 0.1.0 was {where}, under the same version" in found[kind]


def test_an_installed_package_is_checked_only_inside_the_sandbox(author: Author, registry: FolderRegistry) -> None:
    with pytest.raises(ConfigError, match="is checked only inside the sandbox"):
        check(author.share(registry, author.folder()), {}, sandboxed=False)


@needs_bubblewrap
def test_an_installed_package_that_imports_more_than_its_lock_fails(author: Author, registry: FolderRegistry) -> None:
    """It passes where the import is installed by chance, and fails elsewhere in the middle of an episode."""
    file = author.folder() / "environment.py"
    file.write_text(file.read_text().replace("        return 1.0", "        import numpy\n        return 1.0"))
    found = {finding.check: finding for finding in check(author.share(registry, file.parent), {})}
    assert found["sandbox"].outcome == "passed"
    assert found["dependencies"].outcome == "failed" and "imports numpy, which" in found["dependencies"].detail


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
