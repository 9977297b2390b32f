"""The role that feeds W&B, trackio and TensorBoard: each row once, whatever fails, hangs or is killed."""

import ast
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from shoal.config import LOGGERS
from shoal.errors import StateError
from shoal.folder import RunFolder
from shoal.launch import loggers
from shoal.roles.logger.follower import POLL_S, Follower
from shoal.roles.logger.role import _about, follow
from shoal.roles.logger.rows import Journal, Row, Rows
from tests.roles.town import tiny_run

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


class Kept:
    """A logger in memory that can fail, and that loses what it has not written when it is opened again."""

    def __init__(self, rows: list[Row], fails: list[int], loses: int = 0) -> None:
        self.rows, self._fails = rows, fails
        del self.rows[len(self.rows) - loses :]

    def held(self) -> int:
        return len(self.rows)

    def write(self, row: Row) -> None:
        if row.number in self._fails:
            self._fails.remove(row.number)
            raise ConnectionError("no network")
        self.rows.append(row)

    def close(self) -> None:
        pass


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


def follower(folder, make):
    return Follower("kept", make, partial(Rows, folder), Journal(folder.loggers / "kept.rows"))


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
    values = next(iter(Rows(folder).new())).values
    assert {name: values[f"heldout/judge_{name}"] for name in ("mean", "low95", "high95")} == found["judge"]


def test_a_row_has_the_numbers_of_a_step_and_later_those_of_an_evaluation(folder):
    put(folder, 0)
    rows = Rows(folder)
    (first,) = rows.new()
    assert first == Row("step 0", "step", 0, 1000.0, {
        "step": 0, "time_s": 1000.0, "reward_mean": 0.0, "staleness_rollouts/0": 12, "staleness_rollouts/1": 4,
    })  # fmt: skip
    put_heldout(folder, "v000025", 0.5)
    ((name, kind, version, _, values),) = rows.new()
    assert (name, kind, version) == ("heldout v000025", "heldout", 25)
    assert values == {"heldout/version": 25, "heldout/mean": 0.5, "heldout/low95": 0.4, "heldout/high95": 0.6,
                      "heldout/episodes": 64, "heldout/faults": 0}  # fmt: skip


def test_half_lines_wait_and_a_repeated_step_is_one_row(folder):
    put(folder, 0, 1)
    with folder.metrics.open("a") as file:
        file.write('{"step": 2, "rew')
    rows = Rows(folder)
    assert [row.number for row in rows.new()] == [0, 1]
    with folder.metrics.open("a") as file:  # the trainer was killed and repeats step 1
        file.write("\n")
    put(folder, 1, 2, 3)
    assert [row.number for row in rows.new()] == [2, 3] and list(rows.new()) == []


def test_a_logger_that_fails_gets_what_it_missed_and_each_row_once(folder):
    kept, fails = list[Row](), [2, 2, 5]
    one = follower(folder, lambda: Kept(kept, fails))
    put(folder, 0, 1, 2, 3)
    assert one.look() == 2.0 and [row.number for row in kept] == [0, 1]
    assert one.look() == 4.0, "each failure in a row doubles the time"
    put(folder, 4, 5)
    assert one.look() == 2.0 * 4 and one.look() == POLL_S
    assert [row.number for row in kept] == list(range(6))


def test_rows_that_a_logger_lost_in_a_kill_are_given_again(folder):
    kept = list[Row]()
    put(folder, 0, 1, 2, 3)
    follower(folder, lambda: Kept(kept, [])).look()
    put(folder, 4)
    follower(folder, lambda: Kept(kept, [], loses=3)).look()
    assert [row.number for row in kept] == [0, 1, 2, 3, 4]


def test_a_journal_that_names_fewer_rows_than_the_logger_has_is_refused(folder):
    journal = Journal(folder.loggers / "kept.rows")
    with pytest.raises(StateError, match="names 0 rows, but the logger has 3"):
        journal.open(3)


def test_a_full_disk_stops_the_logger_and_no_row_is_lost(folder, monkeypatch):
    kept = list[Row]()
    put(folder, 0, 1)
    one = follower(folder, lambda: Kept(kept, []))
    with monkeypatch.context() as patch:
        patch.setattr("shoal.roles.logger.rows.sync_file", lambda path: (_ for _ in ()).throw(OSError(28, "no space")))
        assert one.look() > POLL_S and not kept
    assert one.look() == POLL_S and [row.number for row in kept] == [0, 1]


def test_a_logger_that_hangs_holds_up_neither_the_others_nor_the_end(folder):
    kept, stop, hangs = list[Row](), threading.Event(), threading.Event()

    class Hanging(Kept):
        def write(self, row: Row) -> None:
            hangs.set()
            threading.Event().wait()

    put(folder, 0, 1)
    stuck = Follower("stuck", lambda: Hanging([], []), partial(Rows, folder), Journal(folder.loggers / "stuck.rows"))
    both = [stuck, follower(folder, lambda: Kept(kept, []))]
    threading.Thread(target=lambda: (hangs.wait(), stop.set())).start()
    assert not follow(both, stop, finish_s=0.3)
    assert [row.number for row in kept] == [0, 1]


def test_loggers_are_told_the_name_of_the_policys_folder_and_not_where_it_is():
    for path, told in (("/home/somebody/models/small", "small"), ("hf:owner/name@rev", "hf:owner/name@rev")):
        config = tiny_run()
        assert _about(replace(config, policy=replace(config.policy, path=path)))["policy"] == told


def test_a_missing_package_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None if name == "wandb" else name)
    with pytest.raises(StateError, match=r"names wandb, which is not installed: pip install .*\[wandb\]"):
        loggers.demand_loggers(tiny_run(logging={"to": ["jsonl", "wandb", "trackio"]}))
    loggers.demand_loggers(tiny_run())


def test_no_other_file_imports_the_packages_of_loggers():
    found = {
        file.name
        for file in (ROOT / "shoal").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
        if name.split(".")[0] in LOGGERS.values()
    }
    assert found == {"to_wandb.py", "to_trackio.py", "to_tensorboard.py"}


# --- the real ones, in processes of their own ---

FOLLOW = """
import os, signal, sys
from pathlib import Path
from shoal.config import LoggingConfig, settle_loggers
from shoal.folder import RunFolder
from shoal.roles.logger import role
folder = RunFolder(Path(sys.argv[1]))
settle_loggers(folder.loggers)
folder.run_id = lambda: "abcdef"
config = role.RunConfig(name="town", steps=3, envs=(), logging=LoggingConfig(to=(sys.argv[2],)))
(one,) = role.followers(folder, config)
print(one.look(), flush=True)
if sys.argv[3] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
one.close()
"""


def look(folder: RunFolder, name: str, end: str = "close") -> None:
    """Give a logger what is new, in a process that then closes it or is killed."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "TRACKIO"))}
    done = subprocess.run(
        [sys.executable, "-c", FOLLOW, str(folder.root), name, end], capture_output=True, text=True, env=kept
    )
    assert done.returncode == (0 if end == "close" else -signal.SIGKILL), done.stderr
    assert float(done.stdout.split()[-1]) == POLL_S, done.stderr


def rows_of(folder: RunFolder, logger: str, run: str, run_id: str) -> list[dict[str, float]]:
    """Figures of training steps, and of evaluations, that a logger's own files hold."""
    if logger == "tensorboard":
        return tensorboard_rows(folder)
    return trackio_rows(folder, run) if logger == "trackio" else wandb_rows(folder, run_id)


def tensorboard_rows(folder: RunFolder) -> list[dict[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder.loggers / "tensorboard")).Reload()
    rows: dict[int, dict[str, float]] = {}
    for tag in read.Tags()["scalars"]:
        for event in read.Scalars(tag):
            row = rows.setdefault(event.step + 1000 * tag.startswith("heldout/"), {})
            assert tag not in row, f"{tag} of step {event.step} is there twice"
            row[tag] = event.value
    return list(rows.values())


def trackio_rows(folder: RunFolder, run: str) -> list[dict[str, float]]:
    code = (
        "import sys, json; from trackio.sqlite_storage import SQLiteStorage as s;"
        "rows = s.get_logs('shoal', sys.argv[1]);"
        "print(json.dumps([{k: v for k, v in row.items() if k != 'timestamp'} for row in rows]))"
    )
    env = os.environ | {"TRACKIO_DIR": str(folder.loggers / "trackio")}
    found = subprocess.run([sys.executable, "-c", code, run], capture_output=True, text=True, env=env, check=True)
    return json.loads(found.stdout)


def wandb_rows(folder: RunFolder, run_id: str) -> list[dict[str, float]]:
    from wandb.proto.wandb_internal_pb2 import Record

    from shoal.roles.logger.to_wandb import files_of, records_of

    rows = []
    for file in files_of(folder.loggers, run_id):
        for record in map(Record.FromString, records_of(file.read_bytes())):
            if record.HasField("history"):
                items = record.history.item
                rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    return rows


@pytest.mark.parametrize("name", [*LOGGERS])
@pytest.mark.slow
def test_files_of_a_logger_hold_each_figure_once_after_a_kill_and_a_resume(folder, name):
    pytest.importorskip(LOGGERS[name])
    put(folder, 0, 1, 2)
    put_heldout(folder, "before", 0.25)
    look(folder, name, "kill")
    time.sleep(1.0)  # wandb's own process ends by itself
    put(folder, 3)
    look(folder, name, "kill")
    put(folder, 4, 5)
    put_heldout(folder, "v000005", 0.5)
    look(folder, name)
    rows = rows_of(folder, name, "town", "abcdef")
    steps = [row for row in rows if "reward_mean" in row]
    assert sorted((row["step"], row["reward_mean"]) for row in steps) == [(step, step / 8) for step in range(6)]
    heldout = [(row["heldout/version"], row["heldout/mean"]) for row in rows if "heldout/mean" in row]
    assert sorted(heldout) == [(0, 0.25), (5, 0.5)]
