"""`import shoal` as programs and notebooks use it: real runs from a coroutine, because a notebook has a running loop."""

import asyncio
import gc
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

import shoal
from shoal.api import MAX_EVAL_TOKENS
from shoal.cli import main
from shoal.config import TinyPolicy
from shoal.errors import ConfigError, ShoalError, StateError
from shoal.evaluation_files import read_evaluation
from shoal.launch.background_run import _News
from shoal.launch.run_lock import locked
from shoal.models.random_model import make_tiny
from shoal.protocol.messages import Status
from shoal.run_folder import RunFolder
from shoal.runs.run_status import RunStatus
from shoal.step_metrics import read_metrics
from tests.test_docs import ROOT, fences

PAGE = ROOT / "docs" / "how-to" / "use-from-python.md"
RUN_FILE = """
name = "small"
steps = 40
seed = 1
[policy.tiny]
width = 32
layers = 1
heads = 2
kv_heads = 1
mlp_width = 64
max_positions = 64
[[envs]]
name = "arithmetic"
args = { digits = 1, operations = "+" }
[sampling]
max_turn_tokens = 4
max_tokens = 24
[rollouts]
group_size = 8
block_rollouts = 64
batch_groups = 4
[workers]
count = 1
[eval]
episodes = 0
[quick]
steps = 2
"""


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(RUN_FILE)
    return path


def roles_of(folder: Path) -> list[psutil.Process]:
    """Processes that name the folder in their command."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def in_a_notebook(work):
    """Call `work` where an event loop is already running."""

    async def cell():
        return work()

    return asyncio.run(cell())


# --- a run ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps, made from a coroutine, and the steps that it told."""
    place = tmp_path_factory.mktemp("api")
    (place / "small.toml").write_text(RUN_FILE)
    run = shoal.recipe(place / "small.toml", steps=2, eval={"episodes": 16})
    steps = in_a_notebook(lambda: list(run.train(place / "run")))
    return place / "run", steps


def test_a_run_is_trained_step_by_step_where_an_event_loop_runs(trained):
    folder, steps = trained
    lines = read_metrics(folder / "metrics.jsonl")
    assert [step.number for step in steps] == [1, 2]
    assert [dict(step.metrics) for step in steps] == lines
    assert [step.reward for step in steps] == [line["reward_all_mean"] for line in lines]
    assert (folder / "summary.json").is_file() and roles_of(folder) == []


def test_a_step_cannot_be_changed(trained):
    step = trained[1][0]
    with pytest.raises(AttributeError):
        step.reward = 1.0
    with pytest.raises(TypeError):
        step.metrics["loss"] = 0.0


def test_a_run_is_audited_where_an_event_loop_runs(trained):
    folder, _ = trained
    found = in_a_notebook(lambda: shoal.audit(folder, sample=3, threads=1))
    assert found.disagreements == [] and found.groups == 3 and found.agrees
    assert "the log agrees with what was recomputed" in str(found)


def test_a_run_is_audited_with_what_its_nodes_kept(trained):
    folder, _ = trained
    homes = [path.parent for path in sorted(folder.glob("nodes/*/evidence")) if any(path.glob("*/*.submission"))]
    found = shoal.audit(folder, evidence=homes, threads=1)
    assert homes and found.disagreements == [] and found.signed > 0 and found.groups > 0
    assert shoal.audit(folder, evidence=homes[0], threads=1).signed > 0


FIRST_USE = """
import sys, shoal
assert shoal.audit(sys.argv[1], sample=1, threads=3).agrees
import torch
print(torch.get_num_threads())
"""


def test_an_audit_leaves_the_callers_threads_alone_even_if_torch_was_not_imported_before(trained):
    untouched = python("import torch; print(torch.get_num_threads())").stdout
    assert python(FIRST_USE, trained[0]).stdout == untouched != "3\n"


SCARCE = """
import resource, sys, shoal.api, torch
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
try:
    shoal.audit(sys.argv[1], threads=1)
except OSError as error:
    print(error.strerror)
"""


def test_an_audit_of_a_process_that_can_open_no_more_files_ends_with_the_reason(tmp_path):
    assert python(SCARCE, tmp_path).stdout.strip() == "Too many open files"


def test_a_policy_has_the_figures_of_shoal_eval(trained, tmp_path, capsys):
    folder, _ = trained
    final, out = shutil.copytree(folder / "checkpoints" / "final", tmp_path / "alone"), tmp_path / "eval.json"
    words = ["eval", str(final), "--env", "arithmetic", "--episodes", "24", "--seed", "3", "--threads", "1"]
    assert main.main([*words, "--env-args", '{"digits": 1}', "--out", str(out)]) == 0
    policy = shoal.policy(final)
    found = in_a_notebook(lambda: policy.evaluate("arithmetic", episodes=24, env_args={"digits": 1}, seed=3, threads=1))
    theirs = read_evaluation(out)
    assert theirs is not None and found.tokens > 0
    assert (found.mean, found.low95, found.high95, found.episodes) == (theirs.mean, theirs.low95, theirs.high95, 24)
    assert msgspec.json.encode(found.as_file()) == out.read_bytes()


def test_the_help_of_shoal_eval_says_how_long_an_episode_is(capsys):
    with pytest.raises(SystemExit):
        main.main(["eval", "--help"])
    assert f"(default: the run's or recipe's, or {MAX_EVAL_TOKENS}, or" in " ".join(capsys.readouterr().out.split())


def test_evaluating_leaves_the_callers_threads_alone(tmp_path):
    make_tiny(
        TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=32, max_positions=64), tmp_path, 1, "float32"
    )
    before = torch.get_num_threads()
    shoal.policy(tmp_path).evaluate("arithmetic", episodes=2, threads=before + 1)
    assert torch.get_num_threads() == before


def test_nothing_starts_before_the_first_step_is_requested(run_file, tmp_path):
    steps = shoal.recipe(run_file).train(tmp_path / "run")
    del steps
    gc.collect()
    assert not (tmp_path / "run").exists()


INTERRUPTED = """
import os, signal, sys, threading, shoal
try:
    for step in shoal.recipe(sys.argv[1]).train(sys.argv[2]):
        if step.number == 1:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_stops_the_run_the_next_one_goes_on_and_leaving_the_loop_stops_it_too(run_file, tmp_path):
    """One story, because each part needs a run under way."""
    folder = tmp_path / "run"
    done = python(INTERRUPTED, run_file, folder)
    assert done.stdout.strip() == "interrupted" and "Stopped at step" in done.stderr and roles_of(folder) == []
    made = len(read_metrics(folder / "metrics.jsonl"))
    assert 1 <= made < 40

    before = set(threading.enumerate())
    for step in shoal.recipe(run_file).train(folder):
        assert step.number == made + 1
        break
    assert roles_of(folder) == [] and set(threading.enumerate()) <= before


FORGOTTEN = """
import sys, shoal
steps = shoal.recipe(sys.argv[1]).train(sys.argv[2])
print(next(steps).number)
"""


@pytest.mark.slow
def test_a_program_that_ends_ends_its_run_cleanly(run_file, tmp_path):
    done = python(FORGOTTEN, run_file, tmp_path / "run")
    assert done.stdout.strip() == "1" and "Stopped at step" in done.stderr and roles_of(tmp_path / "run") == []


def python(program, *words):
    command = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def test_a_hosted_run_gives_its_join_line_takes_a_worker_and_ends_with_the_with_statement(run_file, tmp_path):
    folder = tmp_path / "run"
    with shoal.recipe(run_file).host(folder) as hosted:
        assert hosted.join_line == f"shoal join {hosted.url}" and hosted.url.startswith("http://127.0.0.1:")
        command = [
            sys.executable,
            "-m",
            "shoal.cli.main",
            *hosted.join_line.split()[1:],
            "--home",
            str(folder / "worker"),
        ]
        worker = subprocess.Popen([*command, "--threads", "1"], stderr=subprocess.DEVNULL)
        assert next(hosted.steps()).number == 1
        worker.terminate()
        worker.wait(60)
    assert roles_of(folder) == []


@pytest.mark.slow
def test_the_cells_of_the_page_do_what_they_say(tmp_path, monkeypatch, capsys):
    """In one namespace, in a folder whose `arithmetic.toml` is a small one."""
    cells = [fence.text for fence in fences(PAGE) if fence.info == "python run"]
    (tmp_path / "arithmetic.toml").write_text(RUN_FILE)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    in_a_notebook(lambda: [exec(cell, names) for cell in cells])
    said = capsys.readouterr().out
    assert re.findall(r"^(\d+) \d\.\d+$", said, re.MULTILINE) == [str(number) for number in range(1, 21)]
    assert "unknown key rollouts.max_stalenes; did you mean rollouts.max_staleness?" in said
    assert "True []\n" in said and "the log agrees with what was recomputed" in said


def test_names_on_the_page_that_are_not_run_exist():
    text = PAGE.read_text() + (ROOT / "README.md").read_text()
    assert {name for name in re.findall(r"\bshoal\.([A-Za-z]+)", text) if not hasattr(shoal, name)} == set()
    assert set(re.findall(r"\brunning\.([a-z_]+)", text)) == {"join_line", "steps", "stop"}


# --- what goes wrong ---


def test_an_unknown_key_names_the_nearest(run_file):
    with pytest.raises(ConfigError, match=r"unknown key rollouts\.max_stalenes; did you mean rollouts\.max_staleness"):
        shoal.recipe(run_file, rollouts={"max_stalenes": 0})


def test_a_key_that_contradicts_another_is_refused_at_once(run_file):
    with pytest.raises(ConfigError, match=r"verify\.audit_rate = .*: must be 1 if"):
        shoal.recipe(run_file, rollouts={"max_staleness": 0}, verify={"audit_rate": 0.5})


def test_an_unknown_run_file_names_those_beside_the_package():
    with pytest.raises(
        ConfigError,
        match=r"no run file nothing\.toml: .* gym\.toml, olmoe\.toml, .*, qwen3-8b-lora\.toml, stones\.toml, wordle\.toml$",
    ):
        shoal.recipe("nothing.toml")


def test_a_value_that_no_run_file_can_hold_is_refused(run_file):
    with pytest.raises(ConfigError, match="steps = None: give a string, a number"):
        shoal.recipe(run_file, steps=None)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(StateError, match=r"cannot read .*config\.json"):
        shoal.policy(tmp_path)


def test_an_unknown_group_is_refused(trained):
    with pytest.raises(ConfigError, match="'first' names no rollout"):
        shoal.audit(trained[0], rollout="first")
    with pytest.raises(ConfigError, match="sample = -3: give a number of groups"):
        shoal.audit(trained[0], sample=-3)
    with pytest.raises(ConfigError, match="give one of them"):
        shoal.audit(trained[0], rollout="1/2", sample=3)
    with pytest.raises(ConfigError, match="give one of them"):
        shoal.audit(trained[0], evidence=["here"], sample=3)


def test_a_folder_in_use_is_refused(run_file, tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.launch.run_lock.LOCK_WAIT_S", 0.1)
    with locked(tmp_path / "run"), pytest.raises(StateError, match="is in use by another shoal"):
        next(shoal.recipe(run_file).train(tmp_path / "run"))


def test_a_run_that_cannot_go_on_raises_its_reason(run_file, tmp_path):
    run = shoal.recipe(run_file, seed=-1, host={"bind": "203.0.113.1", "port": 1})
    with pytest.raises(StateError, match=r"cannot listen on 203\.0\.113\.1 port 1"):
        run.host(tmp_path / "run")
    assert roles_of(tmp_path / "run") == []


def test_messages_for_people_go_to_the_log_and_nothing_else_is_a_warning(caplog):
    news = _News()
    with caplog.at_level("INFO", "shoal"):
        news.say("The run has paused itself\x1b[2J")
        for waiting_s, waits in [
            (8, "v silent for 1 min"),
            (68, "v silent for 2 min"),
            (70, "w left"),
            (1, ""),
            (9, "w left"),
        ]:
            news.show(
                RunStatus("small", "run", 40, Status("r", "running", 3, 40, 0, {}, 0, 0, waits, float(waiting_s)))
            )
        news.end("picture", "it has ended")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "The run has paused itself\\u001b[2J"),
        ("INFO", "waiting 8 s for v silent for 1 min"),
        ("INFO", "waiting 70 s for w left"),
        ("INFO", "waiting 9 s for w left"),
        ("INFO", "it has ended"),
    ]


# --- keys and names ---


def test_keyword_arguments_change_the_keys_of_a_run_file(run_file):
    changed = shoal.recipe(
        run_file, seed=-1, train={"lr": 1e-5}, sampling={"temperature": 0.5}, host={"public_url": 'http://a"b\\ü'},
        envs=[{"name": "arithmetic", "args": {"digits": 1}, "weight": 2}, {"name": "wordle"}],
        verify={"bounds": {"float32/float32": {"gap": 0.25}}},
    ).config  # fmt: skip
    assert (changed.seed, changed.train.lr, changed.sampling.temperature) == (-1, 1e-5, 0.5)
    assert changed.host.public_url == 'http://a"b\\ü' and changed.sampling.max_tokens == 24
    assert [(env.name, env.weight, env.args) for env in changed.envs] == [
        ("arithmetic", 2.0, {"digits": 1}),
        ("wordle", 1.0, {}),
    ]
    assert changed.verify.bounds["float32/float32"].gap == 0.25 and len(changed.verify.bounds) == 4


def test_quick_takes_the_quick_values_and_explicit_changes_override_them(run_file):
    assert shoal.recipe(run_file, quick=True).config.steps == 2
    assert shoal.recipe(run_file, quick=True, steps=3).config.steps == 3


def test_a_run_file_beside_the_package_is_found_by_its_name():
    assert shoal.recipe("wordle.toml", steps=7).config.steps == 7


def test_a_file_in_this_folder_is_preferred_to_one_beside_the_package(run_file, tmp_path, monkeypatch):
    run_file.rename(tmp_path / "wordle.toml")
    monkeypatch.chdir(tmp_path)
    assert shoal.recipe("wordle.toml").config.name == "small"


def test_every_public_name_exists_and_the_package_is_marked_as_typed():
    assert all(getattr(shoal, name) for name in shoal.__all__)
    assert (Path(shoal.__file__).parent / "py.typed").is_file()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = shoal.nothing


def test_missing_torch_is_reported_in_one_line(run_file, tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.launch.background_run.find_spec", lambda name: None)
    with pytest.raises(ShoalError, match="torch is not installed"):
        next(shoal.recipe(run_file).train(tmp_path / "run"))
    assert not RunFolder(tmp_path / "run").root.exists()


def test_a_key_below_a_number_is_refused(run_file):
    with pytest.raises(ConfigError, match=r"steps\.first is not a section"):
        shoal.recipe(run_file, steps={"first": {"second": 1}})
