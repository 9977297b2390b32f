"""A run that nobody watches: it ends with the reason where a host would be waited for, and goes on afterwards."""

import json
from pathlib import Path

import msgspec
import pytest

from shoal.errors import StateError
from shoal.launch.pipeline.unattended_run import IDLE_LIMIT_S, UnattendedView
from shoal.run_folder import RunFolder
from shoal.runs.run_status import NO_STATUS, RunStatus
from tests.launch.test_pipeline import RL, ROOT, finish, start

WAKING = """        if not Path("AWAKE").exists():
            return 0.5
"""
"""Comes first in the score of recipes/vowels.py: no group has signal before this file is there."""


class Heard:
    """A view that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def show(self, snapshot: RunStatus) -> None: ...

    def say(self, line: str, passes: bool = False) -> None:
        self.lines.append(line)

    def end(self, picture: object, text: str) -> None: ...

    def close(self) -> None: ...


class Clock:
    """Time as the test sets it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def view(tmp_path: Path, clock: Clock) -> UnattendedView:
    return UnattendedView(Heard(), RunFolder(tmp_path), clock)


def running(**changes: object) -> RunStatus:
    status = msgspec.structs.replace(NO_STATUS, **{"phase": "running", "version": 0, "steps": 3} | changes)
    return RunStatus("run", "runs/run", 3, status=status)


def test_a_run_that_paused_itself_ends_after_its_rollouts_were_shown(view: UnattendedView) -> None:
    said = "the last 12 groups have no signal: the tasks of 12 of them can never begin; the last: it is too long"
    paused = running(phase="paused", accepted=20, flat_groups=12, no_signal=said, pause_cause="no signal")
    view.show(paused)  # then the launcher shows rollouts
    with pytest.raises(StateError, match=r"paused itself \(no signal\): .* can never begin; the last: it is too long"):
        view.show(paused)
    view.show(paused)  # while the launcher stops the roles


def test_a_run_whose_environment_fails_ends_with_the_error_and_what_to_do(view: UnattendedView) -> None:
    cause = "environment faults: words fails on 12 of its newest 96 rollouts: words.py line 7: KeyError: 'x'"
    paused = running(phase="paused", accepted=20, pause_cause=cause)
    view.show(paused)
    with pytest.raises(StateError, match=r"words.py line 7: KeyError: 'x'\). Correct the environment, .*on_fault"):
        view.show(paused)


def test_a_run_that_a_person_paused_is_waited_for(view: UnattendedView, clock: Clock) -> None:
    paused = RunStatus("run", "runs/run", 3, status=msgspec.structs.replace(running().status, phase="paused"))
    for _ in range(3):
        clock.now += IDLE_LIMIT_S
        view.show(paused)
    resumed = running(waiting_on="workers", waiting_for="workers: 0 of 4 groups for the next step")
    view.show(resumed)  # the pause does not count as a time without workers
    clock.now += 1.1 * IDLE_LIMIT_S
    view.show(resumed)  # then the launcher shows rollouts
    with pytest.raises(StateError, match="no worker has had a lease"):
        view.show(resumed)


def test_a_run_without_workers_ends_after_a_while_and_a_slow_one_does_not(view: UnattendedView, clock: Clock) -> None:
    slow = running(waiting_on="workers", waiting_for="workers: 0 of 4 groups for the next step", in_flight=2)
    without = running(waiting_on="workers", waiting_for="workers: 0 of 4 groups for the next step")
    training = running(waiting_on="trainer", waiting_for="the trainer: the next step")
    for shown in (slow, without, slow, training, training, without):
        view.show(shown)
        clock.now += 0.9 * IDLE_LIMIT_S
        view.show(shown)
    clock.now += 0.2 * IDLE_LIMIT_S
    view.show(without)
    with pytest.raises(
        StateError, match="no worker has had a lease for 30 minutes, and the run waits for workers: 0 of 4"
    ):
        view.show(without)


@pytest.mark.slow
def test_a_stage_whose_run_pauses_ends_with_the_reason_and_goes_on_when_it_is_gone(tmp_path: Path) -> None:
    awake = tmp_path / "awake"
    source = "from pathlib import Path\n" + (ROOT / "recipes" / "vowels.py").read_text()
    score = "        letters = ["
    (tmp_path / "sleepy.py").write_text(source.replace(score, WAKING.replace("AWAKE", str(awake)) + score))
    sleepy = ('name = "vowels.py"', 'name = "sleepy.py"')
    few = ("batch_groups = 2", "batch_groups = 2\nmax_flat_groups = 12")
    (tmp_path / "rl.toml").write_text(RL.replace(*sleepy).replace(*few))
    (tmp_path / "one.toml").write_text('name = "one"\n[[stages]]\nname = "rl"\nkind = "rl"\nrecipe = "rl.toml"\n')
    out = tmp_path / "out"
    for tried in (1, 2):
        said = finish(start(tmp_path / "one.toml", out), code=2)
        error = said.strip().splitlines()[-1]
        assert error.startswith("error: stage rl: the run paused itself (no signal): within each of the last ")
        assert error.count("(full log: ") == 1
        (log,) = out.glob("stages/*/log.txt")
        assert log.read_text().count("reward 0.50 \u00b7 ended by") >= 2 * tried, "rollouts are shown each time"
    awake.touch()
    finish(start(tmp_path / "one.toml", out))
    (end,) = json.loads((out / "report.json").read_bytes())["stages"]
    assert end["figures"]["steps"] == 3
