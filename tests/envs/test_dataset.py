"""Tasks from data sets on disk: pinned by hash, split by content, and refused in one line."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.env import Step
from shoal.envs.dataset import DatasetEnv, digest_of, read_rows, split
from shoal.envs.lint import check_env
from shoal.errors import ConfigError

ROWS = [{"question": f"{i}+{i}", "answer": str(2 * i), "tags": ["sum", {"n": i}]} for i in range(40)]


def jsonl(path: Path, rows: list[Any] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Sums(DatasetEnv):
    """A question a row."""

    name = "sums"

    def reset(self, task: Any) -> Any:
        return (task, ""), [{"role": "user", "content": task[0]}]

    def step(self, state: Any, action: str) -> Step:
        return Step((state[0], str(action)), None, True)

    def score(self, state: Any) -> float:
        return float(state[1] == state[0][1])

    def players(self) -> Any:
        return {"right": lambda state, rng: state[0][1], "wrong": lambda state, rng: "?"}


def test_an_environment_of_rows_passes_its_checks(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "sums.jsonl")
    env = Sums(data, digest_of(data), heldout=8, to_task=lambda row: (row["question"], row["answer"]))
    assert (env.num_tasks, env.num_heldout) == (32, 8)
    assert [f.check for f in check_env(env) if f.outcome != "passed"] == ["solutions"]


def test_data_that_changed_are_refused_by_their_hash(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "sums.jsonl")
    pinned = digest_of(data)
    assert pinned == hashlib.sha256(data.read_bytes()).hexdigest()
    jsonl(data, [*ROWS[:-1], ROWS[-1] | {"answer": "0"}])
    with pytest.raises(ConfigError, match=f"has changed: its SHA-256 is [0-9a-f]+, not {pinned}. Restore the old"):
        read_rows(data, pinned)
    (tmp_path / "folder").mkdir()
    first, _ = jsonl(tmp_path / "folder" / "a.jsonl", ROWS[:2]), jsonl(tmp_path / "folder" / "b.jsonl", ROWS[2:])
    pinned = digest_of(tmp_path / "folder")
    assert read_rows(tmp_path / "folder", pinned) == ROWS
    first.rename(tmp_path / "folder" / "c.jsonl")
    with pytest.raises(ConfigError, match="has changed"):
        read_rows(tmp_path / "folder", pinned)


def test_the_split_follows_from_the_rows_contents_and_keeps_equal_rows_together() -> None:
    training, held = split(ROWS, 8)
    assert len(held) == 8 and sorted(map(str, training + held)) == sorted(map(str, ROWS))
    assert [row["answer"] for row in held] == ["16", "40", "44", "54", "60", "62", "64", "68"], (
        "as in every earlier run"
    )
    mixed_training, mixed_held = split(ROWS[::-1], 8)
    assert (mixed_training[::-1], mixed_held[::-1]) == (training, held)
    doubled_training, doubled_held = split(ROWS * 2, 8)
    assert not {str(row) for row in doubled_training} & {str(row) for row in doubled_held}
    assert split(ROWS, 0) == (ROWS, [])
    for wrong in (-1, 40):
        with pytest.raises(ConfigError, match=f"heldout = {wrong}"):
            split(ROWS, wrong)
    with pytest.raises(ConfigError, match="leaves no training rows"):
        split([ROWS[0]] * 3, 1)


def test_held_out_rows_may_be_files_of_their_own(tmp_path: Path) -> None:
    train, test = jsonl(tmp_path / "train.jsonl", ROWS[:30]), jsonl(tmp_path / "test.jsonl", ROWS[30:])
    env = Sums(train, heldout_path=test, heldout_sha256=digest_of(test))
    assert (env.num_tasks, env.num_heldout, env.task(0, heldout=True)) == (30, 10, ROWS[30])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no rows"),
        ("{", "line 1 is not JSON"),
        ("\n[1]\n", "line 2 is list: each line must be an object"),
        ("[" * 9999, "line 1 is not JSON"),
        ('{"a": NaN}', "row 0 contains a float"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says) as refused:
        read_rows(file)
    assert "\n" not in str(refused.value)


def test_a_path_without_a_data_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a")
    for path, says in (
        (tmp_path / "x.csv", "not a data set"),
        (tmp_path, "not a data set"),
        (tmp_path / "y", "cannot read"),
    ):
        with pytest.raises(ConfigError, match=says):
            read_rows(path)
    with pytest.raises(ConfigError, match="to_task fails on row 0"):
        Sums(jsonl(tmp_path / "sums.jsonl"), to_task=lambda row: row["missing"])


def test_parquet_and_saved_arrow_files_give_the_same_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"question": row["question"], "answer": row["answer"], "n": i} for i, row in enumerate(ROWS)]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "data-00000-of-00001.arrow", table.schema) as sink:
        sink.write_table(table)
    assert read_rows(tmp_path / "rows.parquet") == read_rows(tmp_path / "data-00000-of-00001.arrow") == rows
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match=r"bad\.parquet is damaged"):
        read_rows(tmp_path / "bad.parquet")
