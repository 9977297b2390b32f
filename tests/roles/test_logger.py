"""The role that feeds W&B, trackio and TensorBoard: no row is missing, whatever fails, hangs or is killed."""

import ast
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from msgspec.structs import replace

from shoal.config import LOGGERS
from shoal.errors import StateError
from shoal.launch import preflight
from shoal.roles.trackers.main import POLL_S, Follower, _about, follow, given_in
from shoal.roles.trackers.tracker_rows import Given, Row, Rows
from shoal.run_folder import RunFolder
from tests.roles.testbed import tiny_run

ROOT = Path(__file__).parents[2]


def put(folder: RunFolder, *steps: int) -> None:
    """Append the metrics of some steps."""
    folder.root.mkdir(parents=True, exist_ok=True)
    with folder.metrics.open("a") as file:
        for step in steps:
            line = {
                "step": step,
                "time_s": 1000.0 + step,
                "reward_mean": step / 8,
                "kl_nats": None,
                "waiting_for": "batch",
            }
            file.write(json.dumps(line | {"staleness_rollouts": {"0": 12, "1": 4}}) + "\n")


def put_heldout(folder: RunFolder, name: str, mean: float) -> None:
    folder.evaluations.mkdir(parents=True, exist_ok=True)
    found = {"mean": mean, "low95": mean - 0.1, "high95": mean + 0.1, "episodes": 64, "envs": {}}
    (folder.evaluations / f"{name}.json").write_text(json.dumps(found))


def end(folder: RunFolder) -> None:
    (folder.checkpoints / "final").mkdir(parents=True)


class Kept:
    """A logger in memory that can fail. It takes only steps that rise."""

    def __init__(self, rows: list[Row], fails: list[int], is_durable: bool = True) -> None:
        self.rows, self._fails, self.is_durable = rows, fails, is_durable

    def write(self, row: Row) -> None:
        if row.step in self._fails:
            self._fails.remove(row.step)
            raise ConnectionError("no network")
        if not self.rows or row.step > self.rows[-1].step:
            self.rows.append(row)

    def close(self) -> None:
        pass


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


def follower(folder, make):
    return Follower("kept", make, folder)


def steps_of(rows: Iterable[Row]) -> list[int]:
    return [row.step for row in rows]


def test_what_a_held_out_judge_says_is_logged_beside_the_evaluation(folder):
    found = {
        "mean": 0.5,
        "low95": 0.4,
        "high95": 0.6,
        "episodes": 64,
        "judge": {"mean": 0.2, "low95": 0.1, "high95": 0.3},
    }
    folder.evaluations.mkdir(parents=True)
    (folder.evaluations / "before.json").write_text(json.dumps(found))
    put(folder, 0, 1)
    (row,) = Rows(folder, Given()).new()
    values = row.evaluation.values
    assert {name: values[f"heldout/judge_{name}"] for name in ("mean", "low95", "high95")} == found["judge"]


def test_a_row_has_the_numbers_of_a_step_and_of_an_evaluation_that_came_before_it(folder):
    put(folder, 0, 1)
    rows = Rows(folder, Given())
    (first,) = rows.new()
    assert first == Row(0, 1000.0, {
        "step": 0, "time_s": 1000.0, "reward_mean": 0.0, "staleness_rollouts/0": 12, "staleness_rollouts/1": 4,
    })  # fmt: skip
    put_heldout(folder, "v000001", 0.5)
    put(folder, 2, 3)
    second, third = rows.new()
    assert (second.step, third.step, third.evaluation) == (1, 2, None)
    name, version, _, values = second.evaluation
    assert (name, version) == ("v000001", 1)
    assert values == {"heldout/version": 1, "heldout/mean": 0.5, "heldout/low95": 0.4, "heldout/high95": 0.6,
                      "heldout/episodes": 64, "heldout/faults": 0}  # fmt: skip


def test_half_lines_wait_and_of_a_repeated_step_the_last_line_is_logged(folder):
    put(folder, 0, 1)
    rows = Rows(folder, Given())
    assert steps_of(rows.new()) == [0]
    with folder.metrics.open("a") as file:  # the trainer was killed and repeats step 1
        file.write('{"step": 1, "reward_mean": 0.75}\n{"step": 2, "rew')
    assert steps_of(rows.new()) == []
    with folder.metrics.open("a") as file:
        file.write("\n")
    put(folder, 2)
    (row,) = rows.new()
    assert row.step == 1 and row.values["reward_mean"] == 0.75
    end(folder)
    assert steps_of(rows.new()) == [2] and list(rows.new(is_stopping=True)) == []


def test_steps_that_are_repeated_after_their_rows_were_given_are_given_again(folder):
    """A trainer whose newest states are damaged goes back several steps."""
    put(folder, 0, 1, 2, 3)
    rows = Rows(folder, Given())
    assert steps_of(rows.new()) == [0, 1, 2]
    with folder.metrics.open("a") as file:
        file.writelines(json.dumps({"step": step, "reward_mean": 9}) + "\n" for step in (1, 2, 3, 4))
    for again in (list(rows.new()), list(Rows(folder, rows.given).new())):
        assert [(row.step, row.values["reward_mean"]) for row in again] == [(1, 9), (2, 9), (3, 9)]


def test_evaluations_after_the_last_step_have_rows_of_their_own(folder):
    put(folder, 0, 1, 2)
    for name in ("before", "v000002", "after"):
        put_heldout(folder, name, 0.5)
    rows = Rows(folder, Given())
    assert [(row.step, row.evaluation and row.evaluation.name) for row in rows.new()] == [(0, "before"), (1, "v000002")]
    end(folder)
    put_heldout(folder, "v000001", 0.5)
    (last,) = rows.new()
    assert (last.step, last.evaluation.name) == (2, "v000001")
    (left,) = rows.new(is_stopping=True)
    assert (left.step, left.values, left.evaluation.name, left.evaluation.version) == (3, {}, "after", 3)
    assert list(Rows(folder, Given(3, ("before", "v000001", "v000002", "after"))).new(is_stopping=True)) == []


def test_a_logger_that_fails_gets_what_it_missed_and_each_row_once(folder):
    kept, fails = list[Row](), [2, 2, 5]
    one = follower(folder, lambda: Kept(kept, fails))
    put(folder, 0, 1, 2, 3)
    assert one.look() == 2.0 and steps_of(kept) == [0, 1]
    assert one.look() == 4.0, "each failure in a row doubles the time"
    put(folder, 4, 5, 6)
    assert one.look() == 2.0 * 4 and one.look() == POLL_S
    assert steps_of(kept) == list(range(6))


def test_a_restart_goes_on_after_the_last_step_that_is_noted(folder):
    put(folder, 0, 1, 2)
    put_heldout(folder, "before", 0.5)
    first, second = list[Row](), list[Row]()
    follower(folder, lambda: Kept(first, [])).look()
    put(folder, 3)
    follower(folder, lambda: Kept(second, [])).look()
    assert steps_of(first) == [0, 1] and steps_of(second) == [2] and second[0].evaluation is None
    assert given_in(folder.loggers / "kept.json") == Given(2, ("before",))


def test_rows_that_a_logger_has_in_memory_are_given_again_after_a_kill(folder):
    put(folder, 0, 1, 2)
    killed, closed = list[Row](), list[Row]()
    follower(folder, lambda: Kept(killed, [], is_durable=False)).look()
    one = follower(folder, lambda: Kept(closed, [], is_durable=False))
    one.look()
    one.close()
    assert steps_of(killed) == steps_of(closed) == [0, 1]
    put(folder, 3)
    after = list[Row]()
    follower(folder, lambda: Kept(after, [], is_durable=False)).look()
    assert steps_of(after) == [2]


def test_a_damaged_note_begins_at_the_first_row(folder):
    put(folder, 0, 1)
    folder.loggers.mkdir()
    (folder.loggers / "kept.json").write_bytes(b"\xff{")
    kept = list[Row]()
    follower(folder, lambda: Kept(kept, [])).look()
    assert steps_of(kept) == [0]


def test_a_full_disk_stops_the_logger_and_no_row_is_lost(folder, monkeypatch):
    kept = list[Row]()
    put(folder, 0, 1, 2)
    one = follower(folder, lambda: Kept(kept, []))
    with monkeypatch.context() as patch:
        full = OSError(28, "no space")
        patch.setattr("shoal.roles.trackers.main.write_atomically", lambda *_: (_ for _ in ()).throw(full))
        assert one.look() > POLL_S and steps_of(kept) == [0]
    assert one.look() == POLL_S and steps_of(kept) == [0, 1]


def test_a_logger_that_hangs_holds_up_neither_the_others_nor_the_end(folder):
    kept, stop, hangs = list[Row](), threading.Event(), threading.Event()

    class Hanging(Kept):
        def write(self, row: Row) -> None:
            hangs.set()
            threading.Event().wait()

    put(folder, 0, 1, 2)
    stuck = Follower("stuck", lambda: Hanging([], []), folder)
    both = [stuck, follower(folder, lambda: Kept(kept, []))]
    threading.Thread(target=lambda: (hangs.wait(), stop.set())).start()
    assert not follow(both, stop, finish_s=0.3)
    assert steps_of(kept) == [0, 1]


def test_loggers_are_told_the_name_of_the_policys_folder_and_not_where_it_is():
    for path, told in (("/home/somebody/models/small", "small"), ("hf:owner/name@rev", "hf:owner/name@rev")):
        config = tiny_run()
        assert _about(replace(config, policy=replace(config.policy, path=path)))["policy"] == told


def test_a_missing_package_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr(preflight, "find_spec", lambda name: None if name == "wandb" else name)
    with pytest.raises(StateError, match=r"names wandb, which is not installed: pip install .*\[wandb\]"):
        preflight.demand_loggers(tiny_run(logging={"to": ["jsonl", "wandb", "trackio"]}))
    preflight.demand_loggers(tiny_run())


def test_no_other_file_imports_the_packages_of_loggers():
    found = {
        file.name
        for file in (ROOT / "shoal").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
        if name.split(".")[0] in LOGGERS.values()
    }
    assert found == {"loggers.py"}


# --- the real ones, in processes of their own ---

FOLLOW = """
import json, os, signal, sys
from pathlib import Path
from shoal.config import LoggingConfig, settle_loggers
from shoal.run_folder import RunFolder
from shoal.roles.trackers import main as role
folder = RunFolder(Path(sys.argv[1]))
settle_loggers(folder.loggers)
folder.run_id = lambda: "abcdef"
config = role.RunConfig(name="town", steps=3, envs=(), logging=LoggingConfig(to=(sys.argv[2],)))
(one,) = role.followers(folder, config)
print(one.look(), flush=True)
if sys.argv[2] == "wandb":
    print(json.dumps(dict(one._logger._run.summary)), flush=True)
if sys.argv[3] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
one.close()
"""


def look(folder: RunFolder, name: str, end: str = "close") -> dict[str, float]:
    """Give a logger what is new, in a process that then closes it or is killed. Returns the newest figures that W&B has."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "TRACKIO"))}
    done = subprocess.run(
        [sys.executable, "-c", FOLLOW, str(folder.root), name, end], capture_output=True, text=True, env=kept
    )
    assert done.returncode == (0 if end == "close" else -signal.SIGKILL), done.stderr
    waits_s, *summary = done.stdout.splitlines()[-2 if name == "wandb" else -1 :]
    assert float(waits_s) == POLL_S, done.stderr
    return json.loads(summary[0]) if summary else {}


def trackio_rows(folder: RunFolder, run: str = "town") -> list[dict[str, float]]:
    code = (
        "import json, sys; from trackio.sqlite_storage import SQLiteStorage as s;"
        "rows = s.get_logs('shoal', sys.argv[1]);"
        "print(json.dumps([{k: v for k, v in row.items() if k != 'timestamp'} for row in rows]))"
    )
    env = os.environ | {"TRACKIO_DIR": str(folder.loggers / "trackio")}
    found = subprocess.run([sys.executable, "-c", code, run], capture_output=True, text=True, env=env, check=True)
    return json.loads(found.stdout)


def tensorboard_points(folder: RunFolder, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder.loggers / "tensorboard")).Reload()
    return [(event.step, event.value) for event in read.Scalars(tag)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trackio", "tensorboard"])
def test_files_of_a_logger_hold_each_figure_after_a_kill_and_a_resume(folder, name):
    pytest.importorskip(LOGGERS[name])
    put(folder, 0, 1, 2)
    put_heldout(folder, "before", 0.25)
    look(folder, name, "kill")
    (folder.loggers / f"{name}.json").unlink()  # killed before it was written: all comes again
    put(folder, 3)
    look(folder, name, "kill")
    put(folder, 4, 5)
    put_heldout(folder, "v000005", 0.5)
    end(folder)
    look(folder, name)
    if name == "trackio":
        rows = trackio_rows(folder)
        steps = [(row["step"], row["reward_mean"]) for row in rows if "reward_mean" in row]
        heldout = [(row["step"], row["heldout/mean"]) for row in rows if "heldout/mean" in row]
        assert len(rows) == 8, "a row that comes again is ignored"
    else:
        steps, heldout = (tensorboard_points(folder, tag) for tag in ("reward_mean", "heldout/mean"))
        assert steps.count((0, 0.0)) == 2, "and there the same point twice"
    assert sorted({*steps}) == [(step, step / 8) for step in range(6)]
    assert sorted({*heldout}) == [(0, 0.25), (5, 0.5)]


@pytest.mark.slow
def test_files_of_wandb_hold_the_newest_figures_by_step_after_a_kill_and_a_resume(folder):
    pytest.importorskip("wandb")
    put(folder, 0, 1, 2)
    put_heldout(folder, "before", 0.25)
    look(folder, "wandb", "kill")
    assert given_in(folder.loggers / "wandb.json") == Given(), "its own process may not have written them"
    time.sleep(1.0)  # that ends by itself
    put(folder, 3)
    second = look(folder, "wandb")
    assert (second["_step"], second["step"], second["heldout/mean"]) == (2, 2, 0.25)
    put(folder, 4, 5)
    put_heldout(folder, "v000005", 0.5)
    end(folder)
    third = look(folder, "wandb")
    assert (third["_step"], third["step"], third["reward_mean"], third["heldout/mean"]) == (5, 5, 5 / 8, 0.5)


LOWER = """
import json, sys
from pathlib import Path
from shoal.config import settle_loggers
from shoal.roles.trackers.tracker_rows import Row
from shoal.roles.trackers.loggers import WandB
folder = Path(sys.argv[1])
settle_loggers(folder)
run = WandB(folder, "shoal", "town", "abcdef", {})
for step, value in ((4, 1.0), (5, 2.0), (5, 3.0), (3, 4.0)):
    run.write(Row(step, 1000.0 + step, {"reward_mean": value}))
print(json.dumps(dict(run._run.summary)))
run.close()
"""


@pytest.mark.slow
def test_wandb_ignores_a_step_that_it_has_and_lower_ones(folder):
    pytest.importorskip("wandb")
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    code = [sys.executable, "-c", LOWER, str(folder.loggers)]
    found = json.loads(subprocess.run(code, check=True, capture_output=True, env=kept).stdout)
    assert (found["_step"], found["reward_mean"]) == (5, 2.0)
