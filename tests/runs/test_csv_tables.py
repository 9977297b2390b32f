"""A run as tables and CSV."""

import csv
import io

import pytest

from shoal.errors import ConfigError
from shoal.runs.csv_tables import TABLES, as_csv, rows_of
from shoal.runs.run_reader import open_run
from shoal.step_metrics import METRICS


@pytest.fixture(scope="module")
def run(testbed):
    with open_run(testbed.folder.root) as reading:
        reading.catch_up()
        yield reading


@pytest.mark.parametrize("name", TABLES)
def test_each_table_has_rows_and_explains_its_columns(run, name):
    rows = rows_of(run, name)
    columns = TABLES[name].columns
    families = tuple(column.partition("/")[0] + "/" for column in METRICS if "/" in column)
    assert rows and {key for row in rows for key in row if not key.startswith(families)} <= columns.keys()
    if name != "metrics":
        assert {key for row in rows for key in row} == columns.keys()
    read = list(csv.DictReader(io.StringIO(as_csv(rows, list(columns)))))
    assert len(read) == len(rows) and list(read[0])[: len(columns)] == list(columns)


def test_rows_name_the_events_that_say_so(run):
    kinds = {row["seq"]: row["kind"] for row in rows_of(run, "events")}
    assert list(kinds) == list(range(run.state.seq + 1))
    named = {"verdicts": "verdict_given", "refusals": "verdict_given", "versions": "checkpoint_published"}
    assert {table: {kinds[row["seq"]] for row in rows_of(run, table)} for table in named} == {
        table: {kind} for table, kind in named.items()
    }
    groups = rows_of(run, "groups")
    assert {kinds[row["seq"]] for row in groups if row["status"] in ("signal", "flat")} == {"group_accepted"}
    assert {kinds[row["seq"]] for row in groups if row["status"] == "refused"} == {"decision"}
    assert sum(row["status"] in ("signal", "flat") for row in groups) == run.state.accepted_groups


def test_rollouts_of_a_group_have_its_mean_reward(run):
    groups = {(row["submission"], row["index"]): row for row in rows_of(run, "groups")}
    of_one = [row for row in rows_of(run, "rollouts") if row["status"] == "signal"][:8]
    group = groups[of_one[0]["submission"], of_one[0]["index"]]
    assert sum(row["reward"] for row in of_one) / 8 == pytest.approx(group["reward_mean"])
    assert sum(row["policy_tokens"] for row in of_one) == group["tokens"]


def test_csv_runs_no_formula_and_keeps_odd_texts():
    texts = ["=1+1", "+1", "-1", "@x", "\tx", 'a "quote",\nand a line', "plain", "\0=1", "a\0b"]
    read = list(csv.reader(io.StringIO(as_csv([{"text": text, "n": -1.5} for text in texts]))))
    assert [cell for cell, _ in read[1:]] == [
        "'=1+1", "'+1", "'-1", "'@x", "'\tx", 'a "quote",\nand a line', "plain", "'=1", "ab"
    ]  # fmt: skip
    assert {number for _, number in read[1:]} == {"-1.5"}


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_no_cell_of_a_csv_begins_a_row(end):
    told = as_csv([{f"a{end}=HYPERLINK(1)": f"b{end}=1+1"}])
    assert list(csv.reader(io.StringIO(told, newline=""))) == [[f"a{end}=HYPERLINK(1)"], [f"b{end}=1+1"]]
    assert told.count('"') == 4


def test_an_unknown_table_is_refused_with_the_names(run):
    with pytest.raises(ConfigError, match="events, metrics"):
        rows_of(run, "nonsense")
