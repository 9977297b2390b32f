"""The command line: quick help that teaches, mistakes in one line, and exit codes that scripts can rely on."""

import argparse
import contextlib
import errno
import http.server
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal import __version__
from shoal.cli import machine, main, role
from shoal.config import TinyPolicy, load_run, node_home
from shoal.errors import ConfigError, PeerError, StateError
from shoal.launch import doctor
from shoal.launch.local_run import open_local_run
from shoal.launch.preflight import check_first_policy
from shoal.launch.run_lock import locked
from shoal.models.random_model import make_tiny
from shoal.net.key_files import load_key
from shoal.run_folder import RunFolder

COMMANDS = (
    "run", "host", "join", "validate", "train", "eval", "sft", "env check", "env list", "ledger verify", "ledger show",
    "audit", "credits",
    "doctor", "admin", "relay", "plan", "key new", "key show", "watch", "node",
)  # fmt: skip

RECIPES = Path(__file__).parents[1] / "recipes"
EXAMPLES = RECIPES.parent / "examples" / "environments"
START = RECIPES / "arithmetic-start"

MY_ENV = '''
"""Say hello."""
from shoal.env import Step

class Hello:
    name, num_tasks, num_heldout, reward_bounds = "hello", 4, 0, (0.0, 1.0)
    def task(self, index, heldout=False):
        if not 0 <= index < 4 or heldout: raise IndexError(index)
        return index
    def reset(self, task): return (task, ""), [{"role": "user", "content": f"greet {task}"}]
    def step(self, state, action): return Step((state[0], action), None, True)
    def score(self, state): return float(state[1] == "hello")
    def players(self): return {"right": lambda state, rng: "hello", "wrong": lambda state, rng: "bye"}

def environment(**args): return Hello()
'''


def shoal(*args: str, cwd: Path | None = None, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal.cli.main", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=cwd)


def run_main(
    monkeypatch: pytest.MonkeyPatch, command: list[str], action: Callable[[argparse.Namespace], object]
) -> int:
    """main() with the command's action replaced."""
    monkeypatch.setattr({"doctor": machine, "role": role}[command[0]], command[0], action)
    return main.main(command)


# --- help ---


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main.main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    assert f"examples:\n  shoal {command}" in text
    for line in text.split("examples:\n")[1].splitlines():
        if line.startswith("  shoal "):
            main.parser().parse_args(line.split(" >")[0].split()[1:])
    assert max(len(line) for line in text.splitlines()) <= 100


def test_top_help_lists_every_command_but_the_hidden_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--help"])
    text = capsys.readouterr().out
    assert all(f"    {command.split()[0]} " in text for command in COMMANDS)
    assert "role" not in text


def test_help_takes_less_than_a_third_of_a_second() -> None:
    """In CPU time, which is wall time on a machine with nothing else to do."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert shoal("run", "--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


def test_the_version_is_printed() -> None:
    assert shoal("--version").stdout == f"shoal {__version__}\n"


# --- mistakes ---


def check_one_line(result: subprocess.CompletedProcess[str], *expected: str) -> None:
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), result.stderr
    for text in expected:
        assert text in result.stderr


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["rum"], "invalid choice: 'rum'"),
        (["run"], "required: RECIPE"),
        (["evl"], "invalid choice: 'evl'; did you mean eval? See: shoal --help"),
        (["zzz"], "credits, key, doctor. See: shoal --help"),
        (["env", "chek", "x"], "did you mean check? See: shoal env --help"),
        (["run", "good.toml", "--quik"], "--quik; did you mean --quick? See: shoal run --help"),
        (["run", "--quik"], "required: RECIPE; did you mean --quick? See: shoal run --help"),
        (["eval", "x", "--epsiodes=3"], "--epsiodes=3; did you mean --episodes? See: shoal eval --help"),
        (["env", "check", "x", "--zzz"], "arguments: --zzz. See: shoal env check --help"),
        (["run", "none.toml"], "cannot read none.toml"),
        (["run", "typo.toml"], "did you mean steps"),
        (["run", "good.toml", "--quick"], "no [quick] table"),
        (["run", "good.toml", "--set", "steps"], "key=value"),
        (["join", "not a url"], "not a url"),
        (["join", "ftp://host"], "http"),
        (["eval", "nowhere", "--env", "wordle"], "nowhere"),
        (["env", "check", "wordel"], "did you mean wordle"),
        (["env", "check", "ann/hello"], "write ann/hello@VERSION"),
        (["env", "rate", "mistyped", "--name", "ann"], "mistyped is not a folder of answers to rate"),
        (["env", "check", "./none.py"], "none.py"),
        (["env", "check", "./raises.py"], "raises.py line 2: RuntimeError: at work"),
        (["env", "check", "arithmetic", "--env-args", "2"], "not a JSON object"),
        (
            ["env", "check", "arithmetic", "--set", "envs.0.args.digits=2"],
            "is no run file or recipe. Give its arguments as --env-args",
        ),
        (["ledger", "verify", "nowhere"], "holds no run"),
        (["ledger", "show", "nowhere"], "holds no run"),
        (["ledger", "show", "http://host:8470"], "reads a run's folder only"),
        (["admin", "pause", "nowhere"], "holds no run"),
        (["admin", "pause", "good.toml"], "good.toml is a file"),
        (["admin", "kick", "nowhere"], "say which node"),
        (["admin", "pause", "http://127.0.0.1:9"], "needs --key"),
        (["admin", "explode", "nowhere"], "invalid choice"),
        (["sft", "none.toml", "--out", "x"], "cannot read none.toml"),
    ],
)
def test_mistake_is_one_line_and_exit_code_2(
    args: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = 'name = "good"\nsteps = 1\n[[envs]]\nname = "arithmetic"\n'
    (tmp_path / "good.toml").write_text(good)
    (tmp_path / "typo.toml").write_text("stepz = 1\n" + good)
    (tmp_path / "raises.py").write_text("def environment():\n    raise RuntimeError('at work')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    try:
        code: object = main.main(args)
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1 and said.startswith("error: ") and expected in said, said


def test_run_that_began_alone_with_a_seed_is_not_hosted_later(tmp_path: Path) -> None:
    (tmp_path / "fixed.toml").write_text('name = "fixed"\nsteps = 1\nseed = 5\n[[envs]]\nname = "arithmetic"\n')
    RunFolder(tmp_path / "runs/fixed").prepare(load_run(tmp_path / "fixed.toml"), tmp_path)
    for reach in ([], ["--bind", "0.0.0.0"], ["--public-url", "https://x.y"]):
        check_one_line(
            shoal("host", "fixed.toml", *reach, cwd=tmp_path), "began on this machine alone", "seed = 5", "--out"
        )


@pytest.mark.parametrize("command", ["run", "host"])
def test_a_folder_of_other_files_becomes_no_runs_folder(command: str, tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    recipe = tmp_path / "recipes" / "fixed.toml"
    recipe.write_text('name = "fixed"\nsteps = 1\n[[envs]]\nname = "arithmetic"\n')
    result = shoal(command, str(recipe), "--out", "recipes", cwd=tmp_path)
    check_one_line(result, "recipes is no run's folder", "holds fixed.toml", "--out")
    assert list((tmp_path / "recipes").iterdir()) == [recipe]


def test_what_a_killed_start_left_is_a_runs_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.demand_own()
    for path in (folder.root / ".lock", folder.keys, folder.logs, folder.policy, folder.secret_file):
        path.mkdir(parents=True)
    folder.demand_own()
    (folder.root / "lost+found").mkdir()  # of a new disk
    folder.demand_own()
    (folder.root / "notes.txt").touch()
    with pytest.raises(StateError, match=r"holds notes\.txt: "):
        folder.demand_own()
    folder.run_file.touch()
    folder.demand_own()


@pytest.mark.parametrize("command", ["run", "host"])
@pytest.mark.parametrize("name", ["./none.py", "wordel", "ann/none@0.1.0"])
def test_a_mistyped_environment_begins_no_run(command: str, name: str, tmp_path: Path) -> None:
    """Once corrected, the same command must start the run: a folder would hold another one."""
    (tmp_path / "typo.toml").write_text(f'name = "typo"\nsteps = 1\n[[envs]]\nname = "{name}"\n')
    check_one_line(shoal(command, "typo.toml", cwd=tmp_path), name.removeprefix("./"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["run", "host"])
def test_model_without_a_chat_template_is_one_line_before_any_role_starts(command: str, tmp_path: Path) -> None:
    make_tiny(TinyPolicy(), tmp_path / "model", seed=0, dtype="float32")
    config_file = tmp_path / "model/tokenizer_config.json"
    template = json.loads(config_file.read_text()).pop("chat_template")
    config_file.write_text('{"eos_token": "<|end|>"}')
    run_file = 'name = "bare"\nsteps = 1\n[policy]\npath = "model"\n[[envs]]\nname = "arithmetic"\n'
    (tmp_path / "bare.toml").write_text(run_file)
    check_one_line(shoal(command, "bare.toml", cwd=tmp_path), "model has no chat template", "add chat_template.jinja")
    folder = RunFolder(tmp_path / "runs/bare")
    assert not folder.root.exists(), "once repaired, the same command must start the run"
    (tmp_path / "model/chat_template.jinja").write_text(template)
    folder.prepare(load_run(tmp_path / "bare.toml", []), tmp_path)
    check_first_policy(folder, folder.config())
    folder.log.touch()
    (tmp_path / "model/chat_template.jinja").unlink()
    with pytest.raises(StateError, match="model has no chat template"):  # nor do they when the run goes on
        open_local_run(folder.root, -1, False, lambda: pytest.fail("no role is started"))


def test_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text('name = "good"\nsteps = 1\n[[envs]]\nname = "arithmetic"\n')
    (tmp_path / "file").write_text("not a folder")
    check_one_line(shoal("run", "good.toml", "--out", "file/run", cwd=tmp_path), "file")


@pytest.mark.parametrize(
    "command",
    [
        "run good.toml", "host good.toml", "join http://127.0.0.1:9", "validate http://127.0.0.1:9",
        "train http://127.0.0.1:9 --run-dir run", f"eval {START} --env arithmetic", f"sft {START}.toml --out start",
        "calibrate good.toml",
    ],
)  # fmt: skip
def test_machine_without_torch_is_told_how_to_get_it_and_nothing_is_begun(command: str, tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text('name = "good"\nsteps = 1\n[[envs]]\nname = "arithmetic"\n')
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    path = os.pathsep.join([str(tmp_path / "blocked"), *sys.path])
    result = subprocess.run(
        [sys.executable, "-m", "shoal.cli.main", *command.split()],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": path, "SHOAL_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    check_one_line(result, "torch is not installed: ")
    assert "[torch]" in result.stderr and "'shoal[" not in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocked", "good.toml"]


@pytest.mark.parametrize("below", ["", "/more"])
@pytest.mark.parametrize(
    "command",
    [
        ["run", str(RECIPES / "wordle.toml"), "--out"],
        ["host", str(RECIPES / "wordle.toml"), "--out"],
        ["join", "http://127.0.0.1:9", "--home"],
        ["relay", "http://127.0.0.1:9", "--home"],
    ],
    ids=lambda command: command[0],
)
def test_a_file_where_a_folder_is_needed_is_no_full_disk(
    command: list[str], below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    assert main.main([*command, f"{tmp_path}/file{below}"]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}/file{below} is a file, or below one, and has to be a folder" in said and "space" not in said
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("wrong"), 2),
        (PeerError("away"), 2),
        (OSError(errno.ENOSPC, "No space left on device", "blobs/x"), 2),
        (FileExistsError(errno.EEXIST, "File exists", "out"), 2),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "out/x"), 2),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "out"), 2),
        (ExceptionGroup("tasks", [PeerError("away"), ExceptionGroup("more", [ConfigError("wrong")])]), 2),
        (KeyboardInterrupt(), 130),
    ],
    ids=repr,
)
def test_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: argparse.Namespace) -> None:
        raise error

    assert run_main(monkeypatch, ["doctor"], fail) == code
    said = capsys.readouterr().err
    assert said.count("\n") == (code == 2) and (code != 2 or said.startswith("error: "))


@pytest.mark.parametrize("command", [
    ["join", "http://127.0.0.1:9"], ["validate", "http://127.0.0.1:9"], ["audit", "http://127.0.0.1:9", "--all"],
    ["eval", str(START), "--env", "arithmetic"], ["calibrate", str(RECIPES / "wordle.toml")],
], ids=lambda command: command[0])  # fmt: skip
def test_a_gpu_that_is_not_there_is_refused_in_one_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    assert main.main([*command, "--device", "cuda"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: device cuda: torch") and said.count("\n") == 1


@pytest.mark.parametrize("section", ["train", "workers", "validators"])
def test_a_run_that_asks_for_a_gpu_that_is_not_there_begins_nothing(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    recipe, out = str(RECIPES / "wordle.toml"), tmp_path / "out"
    assert main.main(["run", recipe, "--out", str(out), "--set", f"{section}.device=mps"]) == 2
    assert "error: device mps" in capsys.readouterr().err and not out.exists()
    assert main.main(["run", recipe, "--out", str(out), "--set", f"{section}.device=tpu"]) == 2
    assert f"{section}.device" in capsys.readouterr().err


def test_a_role_that_cannot_reach_another_exits_with_the_code_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: argparse.Namespace) -> None:
        raise PeerError("away")

    assert run_main(monkeypatch, ["role", "worker", "--run-dir", "run"], fail) == 75


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("worker", "garbage"), ("worker", "[]"), ("validator", '{"home": "x"}'), ("worker", '{"url": 3, "home": "x"}'),
        ("worker", '{"url": "http://h", "home": "x", "thread": 3}'), ("trainer", "{}"), ("rank", "[" * 50_000),
        ("evaluate", '{"checkpoint": "x"}'), ("evaluate", "\udcff"),
    ],
)  # fmt: skip
def test_options_of_a_role_that_are_garbage_are_one_line_and_exit_code_2(
    name: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(role, "_begin", lambda *_: None)
    assert main.main(["role", name, "--run-dir", str(tmp_path), "--options", options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --options ") and said.count("\n") == 1 and len(said) < 400


@pytest.mark.parametrize(
    "error",
    [AssertionError("a bug"), OSError(errno.EIO, "I/O error"), ExceptionGroup("t", [KeyError("a bug")])],
    ids=repr,
)
def test_a_bug_of_ours_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: argparse.Namespace) -> None:
        raise error

    with pytest.raises(type(error)):
        run_main(monkeypatch, ["doctor"], fail)


def test_message_of_several_lines_becomes_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: argparse.Namespace) -> None:
        raise ConfigError("first\n  second")

    run_main(monkeypatch, ["doctor"], fail)
    assert capsys.readouterr().err == "error: first second\n"


@pytest.mark.parametrize("typed", ["127.0.0.1:8470", "localhost:1/", "[::1]:8470", "shoal.example.org:443"])
def test_an_address_without_its_scheme_is_a_url_unless_there_is_such_a_folder(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["watch"], ["ledger", "verify"], ["admin", "pause"], ["dashboard"], ["plot"]):
        parsed = vars(main.parser().parse_args([*words, typed]))
        assert f"http://{typed}" in str(parsed), words
    for folder in ("runs/wordle", "run:one", "https://shoal.example.org"):
        assert vars(main.parser().parse_args(["watch", folder]))["source"] == folder
    (tmp_path / typed).mkdir(exist_ok=True)
    assert vars(main.parser().parse_args(["watch", typed]))["source"] == typed


def test_a_reader_that_closes_the_pipe_is_not_an_error() -> None:
    command = f"{sys.executable} -m shoal env list | true; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.stderr == "" and result.stdout.strip() in ("0",)


# --- commands that need no run ---


def test_built_in_environments_are_listed_and_pass_their_checks() -> None:
    listed = shoal("env", "list").stdout
    assert "wordle" in listed and "arithmetic" in listed
    checked = shoal("env", "check", "arithmetic", "--env-args", '{"digits": 1}')
    assert checked.returncode == 0 and "failed" not in checked.stdout and "replay" in checked.stdout


def test_an_environment_of_the_user_is_checked(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(MY_ENV)
    assert shoal("env", "check", "./my_env.py", cwd=tmp_path).returncode == 0
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "own.toml").write_text('name = "own"\nsteps = 1\n[[envs]]\nname = "my_env.py"\n')
    checked = shoal("env", "check", "../own.toml", cwd=tmp_path / "elsewhere")
    assert checked.returncode == 0 and "passed   prompts:" in checked.stdout
    with (tmp_path / "own.toml").open("a") as file:
        file.write("[sampling]\nmax_tokens = 4\nmax_turn_tokens = 2\n")
    checked = shoal("env", "check", "own.toml", cwd=tmp_path)
    assert checked.returncode == 1 and "sampling.max_tokens = 4 leaves no room for a turn" in checked.stdout
    make_tiny(TinyPolicy(max_positions=64), tmp_path / "short", 0, "float32")
    checked = shoal(
        "env", "check", "own.toml", "--set", "policy.path=short", "--set", "sampling.max_tokens=65", cwd=tmp_path
    )
    assert checked.returncode == 2 and "the model has 64 positions" in checked.stderr, "as `shoal run` refuses it"
    (tmp_path / "start.toml").write_text('name = "start"\n[env]\nname = "my_env.py"\n')
    checked = shoal("env", "check", "../start.toml", "--set", "steps=1", cwd=tmp_path / "elsewhere")
    assert checked.returncode == 0 and "passed   replay:" in checked.stdout, "a recipe of `shoal sft`, too"
    (tmp_path / "my_env.py").write_text(
        MY_ENV.replace('"right": lambda state, rng: "hello"', '"right": lambda state, rng: "x"')
    )
    broken = shoal("env", "check", "./my_env.py", cwd=tmp_path)
    assert broken.returncode == 1 and "failed   right player" in broken.stdout


@pytest.mark.parametrize("command", ["join", "validate"])
def test_a_second_node_in_one_home_is_refused_in_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both would have one key and one folder of weights: the first that left would end the other's leases."""
    monkeypatch.setattr("shoal.launch.run_lock.LOCK_WAIT_S", 0.2)
    with locked(tmp_path):
        assert main.main([command, "not a url", "--home", str(tmp_path)]) != 0
    said = capsys.readouterr().err
    assert f"{tmp_path} is in use by another shoal (process {os.getpid()})" in said and "--home" in said
    assert said.count("\n") == 1 and not (tmp_path / "node.key").exists()


@pytest.mark.parametrize("command", ["join", "validate"])
def test_a_home_that_is_named_is_also_where_packages_are(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "other"))
    assert main.main([command, "not a url", "--home", str(tmp_path / "mine")]) != 0
    assert node_home() == tmp_path / "mine"


def test_doctor_measures_this_machine() -> None:
    result = shoal("doctor")
    for what in ("Python", "cores", "memory", "disk", "torch", "GFLOP/s", "tokens/s", "transformers", "clock", "home"):
        assert what in result.stdout
    assert result.returncode == 0, result.stdout


def test_doctor_says_what_to_do_about_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment = os.environ | {"SHOAL_HOME": str(tmp_path / "file")}
    command = [sys.executable, "-m", "shoal.cli.main", "doctor", "--url", "http://127.0.0.1:9"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 1
    assert "missing  home" in result.stdout and "set SHOAL_HOME" in result.stdout
    assert "missing  clock" in result.stdout and "2 missing" in result.stdout


@pytest.mark.parametrize("url", ["not a url", "http://[", "file:///etc/passwd", "http://127.0.0.1:9"])
def test_doctor_says_in_one_line_that_a_clock_cannot_be_asked(url: str) -> None:
    line = doctor._clock(url)
    assert line.state == "missing" and line.found.startswith(f"{url} does not answer: ") and line.remedy


def test_doctor_asks_for_the_clock_as_nodes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past any proxy that the environment names, and no further than the URL says."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(http.server.BaseHTTPRequestHandler, "do_GET", lambda self: self.send_error(200), raising=False)
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        line = doctor._clock(f"http://127.0.0.1:{server.server_port}/")
        server.shutdown()
    assert line.state == "ok" and " s from http://127.0.0.1" in line.found, line


def dripping(handler: http.server.BaseHTTPRequestHandler) -> None:
    until = time.monotonic() + 12
    with contextlib.suppress(OSError):
        while time.monotonic() < until:
            handler.wfile.write(b"x")
            time.sleep(0.05)


def redirect(handler: http.server.BaseHTTPRequestHandler) -> None:
    assert handler.path == "/healthz", "a redirect is not followed"
    handler.send_response(302)
    handler.send_header("location", "/inside")
    handler.end_headers()


def absurd_date(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.send_response_only(200)
    handler.send_header("date", "Mon, 99999999999999999999 Jan 2020 00:00:00 GMT")
    handler.end_headers()


def endless_header(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nx: ")
    dripping(handler)  # each read is in time, all of them together are not


def endless_body(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    dripping(handler)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (redirect, "redirects to '/inside', which is not followed"),
        (absurd_date, "too large"),
        (endless_header, "no answer within 1 s"),
        (endless_body, " s from http://127.0.0.1"),
    ],
)
def test_doctor_asks_a_host_that_answers_anything_for_its_clock(
    answer: Callable[[http.server.BaseHTTPRequestHandler], None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "ANSWER_S", 1.0)
    monkeypatch.setattr(http.server.BaseHTTPRequestHandler, "do_GET", answer, raising=False)
    began = time.monotonic()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        line = doctor._clock(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert says in line.found and "\n" not in line.found and time.monotonic() - began < 10
    assert line.state == ("ok" if answer is endless_body else "missing")


def test_a_key_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys" / "root.key"
    assert main.main(["key", "new", str(file)]) == 0
    public, secret = capsys.readouterr().out.strip(), file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o600 and load_key(file).public == public
    assert main.main(["key", "show", str(file)]) == 0 and capsys.readouterr().out.strip() == public
    for taken in (file, tmp_path):
        assert main.main(["key", "new", str(taken)]) == 2
        assert "exists, and is not overwritten: give another name" in capsys.readouterr().err
    assert file.read_bytes() == secret


PORTS, HUGE = ["65536", "-1", "8 470", "http"], "9" * 5000


@pytest.mark.parametrize(
    ("words", "refused", "says"),
    [
        (["host", "x.toml", "--port"], PORTS, "is not a port"),
        (["relay", "http://host", "--port"], PORTS, "is not a port"),
        (["join", "http://host", "--share-port"], PORTS, "is not a port"),
        (["join", "http://host", "--threads"], ["0", "-1", "1.5", "²"], "whole number above 0"),
        (["join", "http://host", "--cpu-share"], ["0", "1.1", "nan"], "is not a share"),
        (["eval", "x", "--temperature"], ["0", "-1", "nan", "inf", "hot"], "number above 0"),
        (["eval", "x", "--samples"], ["-1", "1.5"], "whole number above -1"),
        (["calibrate", "x.toml", "--safety"], ["0.9", "nan", "inf"], "number from 1"),
        (["plan", "x.toml", "--signal-share"], ["0", "1e-14", "1.1"], "number from 0.001 to 1"),
        (["plan", "x.toml", "--relays"], ["-1", "1001"], "from 0 to 1000"),
        (["plan", "x.toml", "--patch-share"], ["1.1", "nan"], "number from 0 to 1"),
        (["plan", "x.toml", "--uplink"], ["-1", "1e15", "nan"], "number from 0"),
    ],
)
def test_a_number_out_of_its_range_is_refused_in_a_line(
    words: list[str], refused: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in [*refused, HUGE]:
        with pytest.raises(SystemExit) as ended:
            main.main([*words, value])
        message = capsys.readouterr().err
        assert ended.value.code == 2 and says in message and message.count("\n") == 1 and len(message) < 300


@pytest.mark.parametrize(
    "words", [["relay", "http://host", "--public-url"], ["join", "http://host", "--share", "--share-url"]]
)
@pytest.mark.parametrize(
    "url", ["host:8480", "ftp://host", "http://a@host", "http://host:22", "http://", "http://h/" + "a" * 300]
)
def test_where_nobody_may_call_a_relay_is_refused_in_a_line(
    words: list[str], url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main([*words, url])
    message = capsys.readouterr().err
    assert ended.value.code == 2 and words[-1] in message and message.count("\n") == 1 and len(message) < 500


def test_a_folder_beside_the_run_file_is_an_environment_where_one_starts_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever folder that is: ./NAME stays the path of a folder, and becomes no built-in name."""
    from shoal.cli.host import demand_environments

    shutil.copytree(EXAMPLES / "stones", tmp_path / "stones")
    (tmp_path / "run.toml").write_text('name = "x"\nsteps = 1\n[[envs]]\nname = "./stones"\n')
    for folder, recipe in (
        (tmp_path, "run.toml"),
        (tmp_path / "stones", "../run.toml"),
        (EXAMPLES, tmp_path / "run.toml"),
    ):
        monkeypatch.chdir(folder)
        config = load_run(Path(recipe), [])
        demand_environments(config, Path(recipe).parent)
        assert [env.name for env in config.envs] == ["./stones"]
    with pytest.raises(ConfigError, match="moved"):
        demand_environments(load_run(tmp_path / "run.toml", ["envs.0.name=./moved"]), tmp_path)
