"""Which held-out evaluations a run makes, and when: before, during and after it, each once."""

import json
from pathlib import Path

import pytest

from shoal.config import EnvConfig, EvalConfig, RunConfig
from shoal.evaluation_files import evaluations_of, results_in
from shoal.launch.role_process import RoleProcess
from shoal.launch.run_processes import Evaluations
from shoal.roles.trackers.tracker_rows import Given, Rows
from shoal.run_folder import RunFolder

FIGURES = {"mean": 0.5, "low95": 0.4, "high95": 0.6, "episodes": 8}


class EvaluatedRun:
    """A folder and evaluations whose processes never really start."""

    def __init__(self, folder: RunFolder, episodes: int = 512, own: int = -1) -> None:
        env = EnvConfig("arithmetic", eval_episodes=own)
        config = RunConfig(name="x", steps=10, envs=(env,), eval=EvalConfig(episodes=episodes))
        self.folder, self.asked = folder, list[tuple[str, str, int]]()
        self.evaluations = Evaluations(config, folder, self.make)

    def make(self, name: str, checkpoint: Path, out: Path, one_in: int) -> RoleProcess:
        self.asked.append((name, checkpoint.name, one_in))
        return RoleProcess(name, ["true"], out.with_suffix(".log"), threads=1)

    def publish(self, version: int) -> None:
        (self.folder.checkpoints / f"v{version:06d}").mkdir(parents=True)

    def finish(self) -> None:
        """The running evaluation writes its file and ends."""
        process = self.evaluations.processes[-1]
        process.state = "done"
        out = self.folder.evaluations / f"{process.name.removeprefix('evaluate-')}.json"
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps(FIGURES | {"transcripts": []}))


@pytest.fixture
def evaluated(tmp_path: Path) -> EvaluatedRun:
    return EvaluatedRun(RunFolder(tmp_path))


def test_first_version_is_evaluated_first_and_in_full(evaluated: EvaluatedRun) -> None:
    evaluated.evaluations.start_due()
    assert evaluated.asked == [], "nothing is published yet"
    evaluated.publish(0)
    evaluated.publish(5)
    evaluated.evaluations.start_due()
    evaluated.evaluations.start_due()
    assert evaluated.asked == [("evaluate-before", "v000000", 1)], "one at a time"
    assert not evaluated.evaluations.first_is_done()
    evaluated.finish()
    assert evaluated.evaluations.first_is_done()


def test_during_a_run_the_newest_checkpoint_gets_a_part_of_the_episodes(evaluated: EvaluatedRun) -> None:
    for version in (0, 2, 4):
        evaluated.publish(version)
    evaluated.evaluations.start_due()
    evaluated.finish()
    evaluated.evaluations.start_due()
    evaluated.finish()
    evaluated.evaluations.start_due()
    assert evaluated.asked[1:] == [("evaluate-v000004", "v000004", 4)]
    assert [name for name, _ in evaluated.evaluations.results()] == ["before", "v4"]


def test_the_last_checkpoint_is_evaluated_only_by_the_last_evaluation(evaluated: EvaluatedRun) -> None:
    evaluated.publish(0)
    evaluated.evaluations.start_due()
    evaluated.finish()
    evaluated.publish(10)
    evaluated.evaluations.start_due()
    evaluated.evaluations.start_last()
    assert evaluated.asked[1:] == [("evaluate-after", "final", 1)]


def test_an_evaluation_in_the_folder_is_not_made_again(evaluated: EvaluatedRun, tmp_path: Path) -> None:
    evaluated.publish(0)
    for start in (evaluated.evaluations.start_due, evaluated.evaluations.start_last):
        start()
        evaluated.finish()
    again = EvaluatedRun(RunFolder(tmp_path))
    again.evaluations.start_due()
    again.evaluations.start_last()
    assert again.asked == [] and again.evaluations.first_is_done()


@pytest.mark.parametrize(("episodes", "own"), [(0, -1), (512, 0)])
def test_without_episodes_nothing_is_evaluated(tmp_path: Path, episodes: int, own: int) -> None:
    evaluated = EvaluatedRun(RunFolder(tmp_path), episodes, own)
    evaluated.publish(0)
    evaluated.evaluations.start_due()
    evaluated.evaluations.start_last()
    assert evaluated.asked == [] and evaluated.evaluations.first_is_done() and evaluated.evaluations.idle()


def test_an_environment_may_be_the_only_one_that_is_evaluated(tmp_path: Path) -> None:
    evaluated = EvaluatedRun(RunFolder(tmp_path), episodes=0, own=8)
    evaluated.publish(0)
    evaluated.evaluations.start_due()
    assert evaluated.asked == [("evaluate-before", "v000000", 1)]


def test_a_stray_file_or_folder_stops_nothing(evaluated: EvaluatedRun) -> None:
    folder = evaluated.folder
    for name in ("vX", "v", "v1.bak", "v²", "v-3", "v1_0", "v" + "1" * 200):
        (folder.checkpoints / name).mkdir(parents=True)
    folder.evaluations.mkdir()
    for name in ("vX", "v", "v1.bak", "v²", "v-3", "v1_0", "v" + "1" * 200, "v000025"):
        (folder.evaluations / f"{name}.json").write_text(json.dumps(FIGURES))
    assert [name for name, _ in results_in(folder.evaluations)] == ["v25"]
    folder.metrics.write_text('{"step": 25}\n{"step": 26}\n{"step": 27}\n')
    given = [row.evaluation.name if row.evaluation else "" for row in Rows(folder, Given()).new()]
    assert given == ["v000025", ""]
    files = {path.stem: path.read_bytes() for path in folder.evaluations.glob("*.json")}
    assert [one.version for one in evaluations_of(files, 30, private=True)] == [25]
    evaluated.publish(0)
    evaluated.evaluations.start_due()
    assert evaluated.asked == [("evaluate-before", "v000000", 1)]
    evaluated.finish()
    evaluated.publish(4)
    evaluated.evaluations.start_due()
    assert evaluated.asked[1:] == [("evaluate-v000004", "v000004", 4)]


def test_an_evaluation_that_fails_is_reported_and_delays_nothing(evaluated: EvaluatedRun) -> None:
    evaluated.publish(0)
    evaluated.evaluations.start_due()
    evaluated.evaluations.processes[0].state = "given up"
    assert evaluated.evaluations.first_is_done() and evaluated.evaluations.idle()
    assert evaluated.evaluations.given_up() is evaluated.evaluations.processes[0]
