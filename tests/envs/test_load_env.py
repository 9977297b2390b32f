"""Loading: built-ins by name, a user's file by path, one line for everything that can go wrong, digests."""

import re
from pathlib import Path

import msgspec
import pytest

from shoal.envs.lint.process_checks import check
from shoal.envs.load import BUILT_IN, env_digest, load_built_in, load_env, load_run_envs
from shoal.errors import ConfigError, ShoalError
from shoal.protocol.messages import EnvSpec

GOOD = """
from dataclasses import dataclass
from shoal.env import Env, Step

@dataclass(frozen=True)
class State:
    said: str = ""

class Parrot(Env):
    name = "parrot"
    def __init__(self, num_tasks): self.num_tasks = num_tasks
    def task(self, index, heldout=False): return "abc"[index]
    def reset(self, task): return State(), [{"role": "user", "content": task}]
    def step(self, state, action): return Step(State(action), None, True)
    def score(self, state): return float(len(state.said) > 0)

def environment(num_tasks=3):
    return Parrot(num_tasks)
"""


@pytest.fixture
def write(tmp_path: Path):
    """Writes a user's file and gives its path."""

    def put(source: str) -> str:
        path = tmp_path / "my_env.py"
        path.write_text(source)
        return str(path)

    return put


@pytest.mark.parametrize("name", ["/tmp/evil.py", "a/b", "..\\evil.py"])
def test_only_built_ins_load_for_a_stranger(name: str) -> None:
    with pytest.raises(ConfigError, match="only built-in environments"):
        load_built_in(name, {})


def test_loading_for_a_stranger_executes_nothing(write, tmp_path: Path) -> None:
    path = write(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ConfigError):
        load_built_in(path, {})
    env_digest(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("x = 1\n1/0", r"my_env\.py line 2: ZeroDivisionError: division by zero"),
        ("def environment(:", r"my_env\.py line 1: "),
        ("import no_such_module_of_mine", r"line 1: ModuleNotFoundError"),
        ("x = 1", "defines no function environment"),
        ("def environment(**args):\n    raise ValueError('two\\nlines')", r"line 2: ValueError: two lines"),
        ("def environment(**args):\n    return 3", "returned a int without name, num_tasks"),
        (GOOD.replace('name = "parrot"', ""), "Parrot without name"),
        (GOOD.replace("def score", "def sore"), r"abstract.*score"),
        (GOOD.replace('name = "parrot"', 'name = "parrot"; reward_bounds = (1, 1)'), r"reward_bounds is \(1.0, 1.0\)"),
        (GOOD.replace('name = "parrot"', 'name = "parrot"; reward_bounds = (0, 2e6)'), "above 1e.06 by size"),
        (GOOD.replace('name = "parrot"', 'name = "parrot"; reward_bounds = (-2e6, 0)'), "above 1e.06 by size"),
        (GOOD.replace('name = "parrot"', 'name = "parrot"; reward_bounds = (0, float("inf"))'), "reward_bounds is"),
        (GOOD.replace("num_tasks=3", "num_tasks=0"), "num_tasks is 0; give a whole number of at least 1"),
    ],
)
def test_a_fault_in_a_users_file_is_one_line_that_names_file_and_line(source: str, told: str, write) -> None:
    with pytest.raises(ShoalError, match=told) as caught:
        load_env(write(source), {})
    assert "\n" not in str(caught.value) and "my_env.py" in str(caught.value)


def test_unknown_argument_of_a_users_environment_is_one_line(write) -> None:
    with pytest.raises(ShoalError, match="unexpected keyword argument 'size'"):
        load_env(write(GOOD), {"size": 2})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wordel", "did you mean wordle"),
        ("hello", rf"built-in are {', '.join(sorted(BUILT_IN))}\. A file needs its path, such as \./hello\.py"),
        ("none.py", "there is no such file"),
        ("ann/hello", "write ann/hello@VERSION for an installed package"),
        ("pkg:123", "has 64 hex digits"),
        ("backwards", r"write \./backwards for the file or folder of that name"),
    ],
)
def test_a_name_of_nothing_is_told_what_it_may_have_meant(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "backwards").mkdir()
    with pytest.raises(ConfigError, match=f"no environment {name}: .*{says}"):
        load_env(name, {})


def test_the_digest_depends_on_the_source_alone(write) -> None:
    before = env_digest(write(GOOD))
    assert before == env_digest(write(GOOD)) != env_digest(write(GOOD + " "))
    assert len({env_digest(name) for name in BUILT_IN} | {before}) == len(BUILT_IN) + 1
    assert len(bytes.fromhex(before)) == 32


def test_environments_of_a_run_equal_the_hosts_or_are_refused(write) -> None:
    spec = EnvSpec("wordle", env_digest("wordle"), 48, 1.0, {"num_words": 64, "heldout": 16})
    assert load_run_envs([spec], own_files=False)["wordle"].num_tasks == 48
    for change in ({"digest": "00" * 32}, {"num_tasks": 49}):
        with pytest.raises(ConfigError, match="wordle here differs from the host's"):
            load_run_envs([msgspec.structs.replace(spec, **change)], own_files=False)


def test_environments_of_one_name_are_told_apart_by_their_labels() -> None:
    easy, hard = (
        EnvSpec("arithmetic", env_digest("arithmetic"), 65536, 1.0, {"digits": digits}, own_label=label)
        for digits, label in ((1, "easy"), (4, "hard"))
    )
    envs = load_run_envs([easy, hard], own_files=False)
    assert {label: env.args.digits for label, env in envs.items()} == {"easy": 1, "hard": 4}
    with pytest.raises(ConfigError, match="labels two environments easy"):
        load_run_envs([easy, msgspec.structs.replace(hard, own_label="easy")], own_files=False)


def test_an_environment_from_a_file_must_be_allowed_and_have_the_right_digest_before_it_runs(
    write, tmp_path: Path
) -> None:
    path = write(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + GOOD)
    spec = EnvSpec(path, env_digest(path), 3, 1.0, {})
    with pytest.raises(ConfigError, match="only built-in environments"):
        load_run_envs([spec], own_files=False)
    with pytest.raises(ConfigError, match="differs"):
        load_run_envs([msgspec.structs.replace(spec, digest="00" * 32)], own_files=True)
    assert not (tmp_path / "ran").exists()
    assert load_run_envs([spec], own_files=True)[path].name == "parrot"


@pytest.mark.parametrize(
    ("make", "args", "said"),
    [
        ("num_tasks=3", {"tasks": 2}, "unexpected keyword argument 'tasks': environment(num_tasks=3) is given tasks"),
        ("num_tasks", {}, "missing a required argument: 'num_tasks': environment(num_tasks) is given no arguments"),
        ("", {"a": 1, "b": 2}, "got an unexpected keyword argument 'a': environment() is given a, b"),
    ],
)
def test_arguments_that_do_not_fit_are_no_fault_of_a_line(write, make: str, args: dict[str, int], said: str) -> None:
    path = write(
        GOOD.replace("environment(num_tasks=3)", f"environment({make})").replace("Parrot(num_tasks)", "Parrot(3)")
    )
    with pytest.raises(ShoalError) as caught:
        load_env(path, args)
    assert said in str(caught.value) and "Change args of the [[envs]]" in str(caught.value)
    assert "source.py" not in str(caught.value) and " line " not in str(caught.value)


def test_missing_arguments_of_a_data_set_name_its_class_and_the_run_file_that_has_them(write) -> None:
    path = write("from shoal.env import DatasetEnv\nclass Rows(DatasetEnv):\n    name = 'rows'\nenvironment = Rows\n")
    with pytest.raises(ShoalError) as caught:
        load_env(path, {})
    assert "'path': Rows(path: " in str(caught.value) and " at 0x" not in str(caught.value)
    assert "`shoal env check RUN.toml`" in str(caught.value)


@pytest.mark.parametrize("kept", ["open(path)", "read_rows(path)"])
def test_the_error_of_an_argument_that_is_a_path_says_where_it_was_looked_for(
    kept: str, write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts from where a command is started, while other paths of a run file count from the run file."""
    monkeypatch.chdir(tmp_path)
    name = write(GOOD + f"\nfrom shoal.env import read_rows\ndef environment(path, more=''): {kept}\n")
    given = {"path": "data/rows.jsonl", "more": "a/b"}
    told = f"the folder in which shoal is started: args.path is {tmp_path}/data/rows.jsonl"
    with pytest.raises(ShoalError, match=re.escape(told)) as caught:
        load_env(name, given)
    assert "args.more" not in str(caught.value)
    loading = next(one for one in check(name, given, sandboxed=False) if one.check == "load")
    assert loading.detail.count("args.path is") == 1 and told in loading.detail
    with pytest.raises(ShoalError, match="No such file") as caught:
        load_env(name, {"path": str(tmp_path / "rows.jsonl")})
    assert "args.path" not in str(caught.value)
