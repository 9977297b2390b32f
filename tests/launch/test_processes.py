"""Runs whose trainer has several processes: one of them is killed at any moment, and nothing is lost."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shoal.roles.trainer import processes
from tests.launch import test_supervisor
from tests.launch.test_supervisor import RUN_FILE, processes_in, steps_done, wait_for

STEPS = 12

DIVIDED = (
    RUN_FILE.replace(test_supervisor.STEPS, f"steps = {STEPS}")
    .replace("cheating = 1", "")
    .replace("episodes = 32", "episodes = 0")
    .replace("batch_groups = 4", "batch_groups = 4\nmax_staleness = 0")
    + """
[train]
processes = {processes}
lr = 1e-3
microbatch_tokens = 128
"""
)


def start(folder: Path, processes: int, steps: int = STEPS, storage: str = "") -> subprocess.Popen[str]:
    """`shoal run` of a small run, in a folder of its own."""
    folder.mkdir(exist_ok=True)
    text = DIVIDED.replace("{processes}", str(processes)).replace(f"steps = {STEPS}", f"steps = {steps}")
    text = text.replace("[storage]", f"[storage]\n{storage}")
    (folder / "small.toml").write_text(text)
    command = [sys.executable, "-m", "shoal.cli.main", "run", "small.toml"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ranks_of(folder: Path) -> list[psutil.Process]:
    """The trainer's processes, without the agent that started them."""
    found = []
    for process in processes_in(folder):
        try:
            if "rank" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def finished(folder: Path, run: subprocess.Popen[str], timeout_s: float = 240) -> bytes:
    """The final weights of a run that must end well."""
    said, _ = run.communicate(timeout=timeout_s)
    assert run.returncode == 0, said
    out = folder / "runs" / "small"
    verified = subprocess.run(
        [sys.executable, "-m", "shoal.cli.main", "ledger", "verify", str(out)], capture_output=True, text=True
    )
    assert verified.returncode == 0, verified.stdout
    assert processes_in(folder) == []
    return (out / "checkpoints" / "final" / "model.safetensors").read_bytes()


def wait_for_the_end_of_all(folder: Path) -> None:
    """Wait until no process of the trainer is left, after its launcher was killed."""
    deadline = time.monotonic() + 10
    while processes_in(folder):
        assert time.monotonic() < deadline, "the trainer's processes outlive their launcher"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_trainer_of_two_processes_is_stopped_killed_and_resumed(tmp_path: Path) -> None:
    """One story, because each part needs a run under way. It ends as a run that nobody touched."""
    untouched = finished(tmp_path / "a", start(tmp_path / "a", 2, 6))
    folder = tmp_path / "b"
    run = start(folder, 2, 6)
    wait_for("a second step", lambda: steps_done(folder) >= 2, run)
    assert len(ranks_of(folder)) == 2
    listening = [c for p in ranks_of(folder) for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
    assert {c.laddr.ip for c in listening} <= {"127.0.0.1", "::1"}
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 130, said
    assert processes_in(folder) == []

    run = start(folder, 2, 6)
    wait_for("both processes", lambda: len(ranks_of(folder)) == 2, run)
    before = {p.pid for p in ranks_of(folder)}
    ranks_of(folder)[1].kill()
    wait_for("others", lambda: len(ranks_of(folder)) == 2 and not before & {p.pid for p in ranks_of(folder)}, run)
    run.kill()
    run.communicate()
    wait_for_the_end_of_all(folder)
    assert finished(folder, start(folder, 2, 6)) == untouched


@pytest.mark.slow
def test_an_error_that_only_the_user_can_fix_ends_the_run_in_one_line(tmp_path: Path) -> None:
    run = start(tmp_path, 2)
    wait_for("a first step", lambda: steps_done(tmp_path) >= 1, run)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)
    for state in (tmp_path / "runs" / "small" / "trainer").glob("v*"):
        (state / "state.json").unlink()
    run = start(tmp_path, 2)
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 2 and "no trainer state under" in said.splitlines()[-1], said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_repeat_the_steps_since_their_last_saved_state(tmp_path: Path) -> None:
    def started(folder: Path) -> subprocess.Popen[str]:
        return start(folder, 2, 6, storage="state_every = 9")

    untouched = finished(tmp_path / "a", started(tmp_path / "a"))
    folder = tmp_path / "b"
    run = started(folder)
    wait_for("a third step", lambda: steps_done(folder) >= 3, run)
    run.kill()
    run.communicate()
    wait_for_the_end_of_all(folder)
    assert finished(folder, started(folder)) == untouched
    log = (folder / "runs" / "small" / "logs" / "trainer.log").read_text()
    assert "repeated the step that made version=1 " in log and "repeated the step that made version=2 " in log


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("processes", [2])
def test_ten_kills_at_random_moments_lose_nothing(tmp_path: Path, processes: int) -> None:
    """The bar of the plan. A process that is killed may be starting, training, saving, publishing or waiting."""
    untouched = finished(tmp_path / "a", start(tmp_path / "a", processes))
    folder, moments = tmp_path / "b", random.Random(0)
    run = start(folder, processes)
    wait_for("a first step", lambda: steps_done(folder) >= 1, run)
    for _ in range(10):
        wait_for("processes", lambda: len(ranks_of(folder)) == processes, run)
        time.sleep(moments.uniform(0, 6))
        victim = moments.choice(ranks_of(folder) or [None])
        assert victim, f"the run ended after {steps_done(folder)} steps, before all kills"
        victim.kill()
        psutil.wait_procs([victim], timeout=10)
    assert finished(folder, run, 600) == untouched


@pytest.mark.parametrize(
    ("codes", "end"), [([1, -9], 1), ([75, -9], -9), ([-9, 2], 2), ([75, -15], 75), ([-15, -15], 1), ([75, -11], -11)]
)
def test_a_trainer_ends_as_the_process_that_failed(codes: list[int], end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not as one that the agent killed because it did not end in time: a trainer that is killed is started again."""

    def died(pid: int, number: int) -> None:
        raise SystemExit(-number)

    monkeypatch.setattr("os.kill", died)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    with pytest.raises(SystemExit) as ended:
        processes._end_as(codes)
    assert ended.value.code == end
