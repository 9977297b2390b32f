"""A small run on this machine as its user sees it: started, refused a second time, stopped by Ctrl-C, killed, resumed.

Its logger dies at once, each time, and its logs are JSON.
"""

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.console import Console

from shoal.config import load_run
from shoal.errors import StateError
from shoal.launch.launcher_log import LoggingView
from shoal.launch.local_run import LocalRun
from shoal.launch.role_process import RoleProcess, with_ended_call, with_suspended
from shoal.launch.run_lock import locked
from shoal.launch.run_processes import RunProcesses
from shoal.launch.sizing import shifts_of
from shoal.ledger.commands import Admin
from shoal.ledger.fault_rate import FAULTS
from shoal.ledger.remedies import ENDED_CALLS, SILENT_REMEDY
from shoal.ledger.run_events import NO_SIGNAL
from shoal.monitors.learning import BY_LIMIT, FALLEN
from shoal.net.key_files import load_or_make_key
from shoal.protocol.messages import AdminRequest, Status
from shoal.run_folder import RunFolder
from shoal.runs.run_status import NO_STATUS, own_keys, suspended_process
from shoal.step_metrics import read_metrics
from shoal.views.terminal.live_view import LiveView, render
from shoal.views.terminal.watch_command import FolderWatch
from tests.roles.testbed import RunTestbed

ROOT = Path(__file__).parents[2]

STEPS = "steps = 12"
"""Enough to be still running when a second `shoal run` gives up."""

RUN_FILE = """
name = "small"
STEPS
seed = 1
[policy.tiny]
width = 32
layers = 1
heads = 2
kv_heads = 1
mlp_width = 64
max_positions = 32
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
cheating = 1
[eval]
episodes = 32
[storage]
checkpoint_every = 12
""".replace("STEPS", STEPS)


def local_run(root: Path, told: io.StringIO | None = None) -> LocalRun:
    """A run in a folder, without processes, and what is said of it."""
    folder, config = RunFolder(root), load_run(Path("recipes/wordle.toml"))
    view = LiveView(Console(file=told or io.StringIO(), width=300), wait_line_every_s=-1.0)
    return LocalRun(RunProcesses(folder, 0, False, shifts_of(config, folder, None, False)), view)


LOGGING = """
[logging]
format = "json"
to = ["jsonl", "tensorboard"]
"""

DIES = """
import os
os._exit(3)  # at once, without a word: no `except` of ours sees it
"""
"""A TensorBoard."""


def start(folder: Path) -> subprocess.Popen[str]:
    (folder / "small.toml").write_text(RUN_FILE + LOGGING)
    (folder / "broken" / "tensorboard").mkdir(parents=True, exist_ok=True)
    (folder / "broken" / "tensorboard" / "__init__.py").write_text(DIES)
    env = os.environ | {"PYTHONPATH": f"{folder / 'broken'}:{ROOT}"}
    command = [sys.executable, "-m", "shoal.cli.main", "run", "small.toml"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def wait_for(what: str, holds: Callable[[], bool], run: subprocess.Popen[str], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if run.poll() is not None or time.monotonic() > deadline:
            run.kill()
            raise AssertionError(f"waited for {what}; the run said: {run.communicate()[0]}")
        time.sleep(0.05)


def steps_done(folder: Path) -> int:
    metrics = folder / "runs" / "small" / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def processes_in(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in process.cwd() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_run_is_stopped_killed_resumed_and_ends_with_a_summary(tmp_path: Path) -> None:
    """One story, because each part needs a run under way."""
    run = start(tmp_path)
    lock = tmp_path / "runs" / "small" / ".lock"
    wait_for("the lock", lambda: lock.exists() and lock.read_text() == str(run.pid), run)

    second = subprocess.run(
        [sys.executable, "-m", "shoal.cli.main", "run", "small.toml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert second.returncode == 2 and f"in use by another shoal (process {run.pid})" in second.stderr

    wait_for("a first step", lambda: steps_done(tmp_path) >= 1, run)
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 130, said
    assert "The same command resumes the run" in said
    assert processes_in(tmp_path) == []
    fewer = [sys.executable, "-m", "shoal.cli.main", "run", "small.toml", "--set", "steps=1"]
    for _ in range(2):  # the second start does not repeat what the first one logged
        refused = subprocess.run(fewer, cwd=tmp_path, capture_output=True, text=True)
        assert refused.returncode == 2 and "of steps = 12: it would end at once" in refused.stderr
        assert (refused.stdout + refused.stderr).count("it would end at once") == 1 and "step 1/" not in refused.stdout
        assert "type `shoal admin drain runs/small`" in refused.stderr

    run = start(tmp_path)
    wait_for("the roles", lambda: len(processes_in(tmp_path)) >= 6, run)
    run.kill()
    run.communicate()
    deadline = time.monotonic() + 10
    while processes_in(tmp_path):
        assert time.monotonic() < deadline, "the roles outlive their launcher"
        time.sleep(0.05)

    run = start(tmp_path)
    said, _ = run.communicate(timeout=240)
    assert run.returncode == 0, said
    check_end(tmp_path / "runs" / "small", said)
    check_logs(tmp_path / "runs" / "small", said)


def check_end(folder: Path, said: str) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) == {
        "heldout", "steps", "tokens", "accepted", "refused", "credits", "influence", "staleness", "wall_s", "cpu_s",
        "weights_hash", "env_faults", "unbegun", "unbegun_cause",
    }  # fmt: skip
    for when in ("before", "after"):
        found = summary["heldout"][when]
        assert found["episodes"] == 32 and found["low95"] <= found["mean"] <= found["high95"]
    assert summary["steps"] == 12 and summary["accepted"] > 0 and len(summary["weights_hash"]) == 64
    honest, cheater = summary["credits"]["worker-0"], summary["credits"]["cheater-0"]
    assert honest["role"] == "honest" and honest["credits"] == summary["tokens"] > 0
    assert cheater == {"credits": 0, "role": "cheating"}
    assert summary["influence"] == {"worker-0": 1.0, "cheater-0": 0.0}
    assert {"coordinator", "trainer", "worker", "validator", "evaluate", "launcher"} <= summary["cpu_s"].keys()
    assert summary["wall_s"] > 1 and sum(summary["staleness"].values()) > 0
    assert "held-out after:" in said and "checkpoints/final" in said and "shoal ledger verify" in said
    verified = subprocess.run(
        [sys.executable, "-m", "shoal.cli.main", "ledger", "verify", str(folder)], capture_output=True
    )
    assert verified.returncode == 0, verified.stdout


def check_logs(folder: Path, said: str) -> None:
    """The logger that died stopped no training, was told once, and every log is JSON."""
    assert sorted({line["step"] for line in read_metrics(folder / "metrics.jsonl")}) == [*range(12)]
    told = [line for line in said.splitlines() if "logger" in line]
    assert len(told) == 1 and re.match(r"the run goes on without logger: logger died \d times", told[0]), said
    logs = {path.stem: path.read_text().splitlines() for path in (folder / "logs").glob("*.log")}
    assert {"launcher", "coordinator", "trainer", "worker-0", "validator-0"} <= logs.keys()
    logs["coordinator"] = [
        line for line in logs["coordinator"] if not line.startswith("error: steps = 1")
    ]  # last words
    lines = {name: [json.loads(line) for line in text] for name, text in logs.items()}
    assert all(
        {"time", "level", "role", "message", "fields"} <= line.keys() for each in lines.values() for line in each
    )
    own = lines["launcher"]
    assert "running" in {line["fields"].get("phase") for line in own}
    assert any(line["fields"].get("process") == "logger" and line["level"] == "warning" for line in own)
    assert told[0] in [line["message"] for line in own] and own[-1]["role"] == "launcher"


def test_a_role_that_dies_is_said_once_with_its_signal(tmp_path: Path) -> None:
    process = RoleProcess("trainer", [sys.executable, "-c", "input()"], tmp_path / "trainer.log", threads=1)
    told = LoggingView(LiveView(Console(file=(out := io.StringIO()), width=60)), tmp_path / "launcher.log", "text")
    process.tend()
    told.died([process])
    assert process.pid is not None and out.getvalue() == ""
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10.0
    while not process.restarts and time.monotonic() < deadline:
        process.tend()
    for _ in range(2):
        told.died([process])
    said = "trainer died of signal SIGKILL and is started again (1x so far). Its log: "
    assert out.getvalue().count(said) == out.getvalue().count("died") == 1
    assert "process=trainer died of signal SIGKILL" in (tmp_path / "launcher.log").read_text()
    process.kill()
    while process.pid is not None:
        process.tend()


def test_trainer_and_validators_are_ended_at_once_and_the_coordinator_after_them(tmp_path: Path) -> None:
    run, asked = local_run(tmp_path), list[tuple[str, ...]]()
    run._stop = lambda *groups: asked.append(tuple(one.name for group, _ in groups for one in group))  # type: ignore[method-assign]
    processes = run._processes
    processes.trainer, processes.validators = processes.role("trainer"), [processes.role("validator-0")]
    run._stop_roles((processes.onlookers, 1.0))
    assert asked == [(), ("trainer", "validator-0"), ("origin", "coordinator", "dashboard")]


def test_a_coordinator_that_does_not_answer_is_what_the_run_waits_for(tmp_path: Path) -> None:
    run = local_run(tmp_path, told := io.StringIO())
    run._processes.trainer = run._processes.role("trainer")
    run._look()
    assert "not answered" not in told.getvalue()
    run._answered -= 9.0
    run._look(0.0)
    assert "the coordinator has not answered for 9 s" in told.getvalue()


def waiting(words: str, remedy: str = "") -> Status:
    return msgspec.structs.replace(NO_STATUS, phase="running", waiting_for=words, remedy=remedy)


def test_a_wait_for_a_slow_answer_names_the_call_that_the_stage_ended_last(tmp_path: Path) -> None:
    roles = [RoleProcess("stage", [], tmp_path / "stage.log", 1)]
    waits = waiting(f"a slow answer: {ENDED_CALLS}; workers: ...")
    assert with_ended_call(waits, roles) == waits == with_ended_call(waits, [])
    lines = ("killed env=own task=3 reason='step() line 1'", "killed env=own task=5 reason='step() line 9'", "other")
    roles[0].log.write_text("\n".join(lines))
    said = f"a slow answer: {ENDED_CALLS}, last 'step() line 9'; workers: ..."
    assert with_ended_call(waits, roles).waiting_for == said
    assert with_ended_call(waiting("workers: 0 of 8"), roles) == waiting("workers: 0 of 8")


def test_a_wait_names_the_processes_of_its_role_that_were_stopped_and_the_monitors_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = subprocess.Popen(["sleep", "60"])
    try:
        roles = [RoleProcess(name, [], Path(f"{name}.log"), 1) for name in ("trainer", "worker-0")]
        for role in roles:
            role._process = stopped  # type: ignore[assignment]
        keys_of = partial(own_keys, folder := RunFolder(tmp_path))
        own_key = load_or_make_key(folder.keys / "validator-0.key").public
        waits = "the trainer: the next step"
        assert with_suspended(waiting(waits), roles, keys_of) == waiting(waits)
        os.kill(stopped.pid, signal.SIGSTOP)
        while not suspended_process(stopped.pid):
            time.sleep(0.01)
        said = with_suspended(waiting(waits, SILENT_REMEDY), roles, keys_of)
        cause = said.waiting_for
        assert f"{waits}; trainer: its process {stopped.pid} is stopped" in cause and "worker-0" not in cause
        assert f"`kill -CONT {stopped.pid}`" in said.remedy and "validate" not in said.remedy
        assert with_suspended(waiting(""), roles, keys_of) == waiting("")
        roles[1].name, own = "validator-0", f"validator-0 ({own_key[:12]}) silent for 40 s"
        others = [f"{name} ({'b' * 12}) left" for name in ("big box", "validator-0")]
        for other in ("", *others):
            silent = f"{own}, {other}" if other else own
            said = with_suspended(waiting(f"validators: {silent}", SILENT_REMEDY), roles, keys_of)
            remedy = said.remedy
            assert silent in said.waiting_for and "kill -CONT" in remedy
            assert "shoal admin admit" in remedy if other else "shoal admin admit" not in remedy
            assert (f"For {other.partition(' (')[0]}: " in remedy) == bool(other)
        roles[1].name = "worker-0"
        run, seen = local_run(tmp_path), list[Status]()
        run._processes.trainer = roles[0]
        monkeypatch.setattr(run._watch, "status", lambda: waiting(waits))
        monkeypatch.setattr(run._alarms, "look", lambda snapshot: seen.append(snapshot.status) or [])
        run._look()
        assert seen == [with_suspended(waiting(waits), roles, keys_of)] == [run._shown().status]
    finally:
        stopped.kill()
        stopped.wait()


@pytest.mark.parametrize(
    ("phase", "says"),
    [
        ("running", "The same command resumes the run"),
        ("paused", "stays paused until\n`shoal admin resume "),
        ("draining", "drains the run to its end"),
        ("ended", "The run has ended"),
    ],
)
def test_what_is_said_of_a_run_follows_from_its_phase(tmp_path: Path, phase: str, says: str) -> None:
    """The cause of the last pause stays in the status of a run that ends."""
    run = local_run(tmp_path, told := io.StringIO())
    status = msgspec.structs.replace(NO_STATUS, phase=phase, pause_cause=f"{FAULTS}words fails")
    run._snapshot = replace(run._snapshot, status=status)
    run._messages.explain_pause(run._snapshot, [run._processes.role("stage")])
    assert ("stage.log has the traceback or the call" in told.getvalue()) == (phase == "paused")
    assert ("has paused itself" in told.getvalue()) == (phase == "paused")
    run.supervisor.request_stop()
    assert run._say_stopped() == 130 and says in told.getvalue()
    assert ("resumes the run" in told.getvalue()) == (phase == "running")
    assert ("missing" in told.getvalue()) == (phase == "ended")
    (tmp_path / "summary.json").write_text("{}")
    told.truncate(0)
    assert run._say_stopped() == 130 and "missing" not in told.getvalue()
    run._look()
    assert "Ctrl-C" not in run._snapshot.hint and "stopping" in run._snapshot.hint


def test_folder_is_held_by_one_launcher_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.launch.run_lock.LOCK_WAIT_S", 0.2)
    with locked(tmp_path), pytest.raises(StateError, match=f"process {os.getpid()}"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_a_role_that_cannot_continue_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(RUN_FILE)
    (tmp_path / "runs" / "small").mkdir(parents=True)
    (tmp_path / "runs" / "small" / "log.sqlite").write_bytes(b"no log" * 1000)
    command = [sys.executable, "-m", "shoal.cli.main", "run", "small.toml", "--set", "seed=-1"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.count("error: ") == 1 and "log.sqlite cannot be read" in result.stderr
    assert result.stderr.endswith("coordinator.log)\n"), "the role's own log says more"
    assert processes_in(tmp_path) == []


def test_a_resume_shows_the_steps_so_far_while_the_log_is_read(tmp_path: Path) -> None:
    folder, config = RunFolder(tmp_path), load_run(Path("recipes/wordle.toml"))
    folder.log.touch()
    folder.metrics.write_text("".join(f'{{"step": {step}, "reward_all_mean": 0.5}}\n' for step in range(120)))
    screen = Console(file=io.StringIO(), width=80, height=24, force_terminal=True, color_system=None)
    view = LiveView(screen)
    run = LocalRun(RunProcesses(folder, 0, False, shifts_of(config, folder, None, False)), view)
    run._notice = run._start_notice()
    run._look()
    view.close()
    screen.print(render(run._shown(), 24))
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "step 120/" in shown and "it reads the log of the 120 steps so far" in shown
    assert not any(text in shown for text in ("step 0/", "no worker has joined", "still being made", "policy v0"))


def test_a_run_whose_final_policy_is_evaluated_is_not_shown_as_ended(tmp_path: Path) -> None:
    run = local_run(tmp_path)
    run._look()
    run._snapshot = replace(run._snapshot, status=msgspec.structs.replace(run._snapshot.status, phase="ended"))
    assert run._shown().status.phase == "evaluating", "its evaluation is not begun"
    run._processes.evaluations.processes.append(
        RoleProcess("evaluate-after", ["true"], tmp_path / "evaluate.log", 1, None)
    )
    assert run._shown().status.phase == "evaluating" and run._snapshot.status.phase == "ended"
    run._processes.evaluations.processes[0].state = "done"
    assert run._shown().status.phase == "ended"


@pytest.mark.parametrize(("at_first", "is_cause"), [(0.0, False), (0.9, True)])
def test_a_pause_blames_no_limit_that_a_run_came_to_while_it_fell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_first: float, is_cause: bool
) -> None:
    config = load_run(Path("recipes/wordle.toml"))
    monkeypatch.setattr("shoal.launch.launcher_log.flat_samples", lambda folder: [])
    monkeypatch.setattr("shoal.runs.rollout_samples.why_flat", lambda folder: f"{BY_LIMIT} 62 of the 64 rollouts")
    monkeypatch.setattr(RunFolder, "config", lambda folder: config)
    run = local_run(tmp_path, told := io.StringIO())
    status = msgspec.structs.replace(run._snapshot.status, phase="paused", pause_cause=NO_SIGNAL, flat_reward=0.0)
    metrics = ({"step": 0, "reward_all_mean": 0.3, "solve_rate": 0.3, "overlong_share": at_first},)
    run._snapshot = replace(run._snapshot, status=status, metrics=metrics)
    run._messages.explain_pause(run._snapshot, [])
    assert (BY_LIMIT in told.getvalue()) is is_cause and (FALLEN in told.getvalue()) is not is_cause


@pytest.mark.parametrize("change", ["steps=40", "storage.quota_mb=0"])
def test_a_refused_resume_leaves_the_run_as_it_was_and_a_watch_follows_one_that_is_taken(
    tmp_path: Path, change: str
) -> None:
    (tmp_path / "small.toml").write_text(RUN_FILE)
    folder, run_file = RunFolder(tmp_path / "run"), tmp_path / "small.toml"
    log_writer = RunTestbed(folder.root, load_run(run_file)).coordinator.log_writer
    log_writer.write(Admin("drain", AdminRequest(), time.time()), time.time())
    assert log_writer.state.phase == "draining"
    log_writer.store.close()
    watched, before = FolderWatch(folder.root), folder.run_file.read_bytes()
    command = [sys.executable, "-m", "shoal.cli.main", "run", "small.toml", "--out", "run", "--set", change]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2, result.stdout
    assert folder.run_file.read_bytes() == before and not folder.start_file.exists()
    folder.prepare(load_run(run_file, ["steps=9"]), tmp_path)
    assert asyncio.run(watched.look()).steps == 12 and folder.start_config().steps == 9
    folder.take_start()
    assert asyncio.run(watched.look()).steps == 9 and folder.start_config().steps == 9


def test_a_resume_deletes_what_was_kept_only_where_set_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "small.toml").write_text(RUN_FILE)
    folder, run_file = RunFolder(tmp_path / "run"), tmp_path / "small.toml"
    RunTestbed(folder.root, load_run(run_file, ["storage.retain=all"])).coordinator.log_writer.store.close()
    command = [sys.executable, "-m", "shoal.cli.main", "run", "small.toml", "--out", "run"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and not folder.start_file.exists(), result.stderr
    assert "--set storage.retain=all" in result.stderr and "--set storage.retain=window" in result.stderr
    folder.prepare(load_run(run_file), tmp_path, overrides=["storage.retain = window"])
    assert folder.start_config().storage.retain == "window"
    folder.summary.write_text("{}")  # it has ended
    folder.prepare(load_run(run_file), tmp_path)
    assert folder.start_config().storage.retain == "all" and not caplog.messages
    folder.prepare(load_run(run_file), tmp_path, overrides=["storage.retain=window", "steps=12"])
    (line,) = caplog.messages
    assert folder.start_config().storage.retain == "all" and "--set storage.retain=window changes" in line


def test_a_run_without_workers_of_its_own_says_how_one_joins(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(RUN_FILE)
    command = [sys.executable, "-m", "shoal.cli.main", "run", "small.toml", "--set", "workers.count=0"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.stdout is not None
    said = next(line for line in run.stdout if line.startswith("workers.count = 0"))
    assert "type `shoal join http://127.0.0.1:" in said and "in another terminal, or set workers.count" in said
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)
