"""Tables for programs: what the libraries get, and what a notebook shows."""

import re
import sys

import pytest

from shoal.errors import ShoalError, how_to_install
from shoal.runs.csv_tables import Column
from shoal.views.notebook.data_frame import SHOWN_ROWS, Frame

HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J\u202e"
COLUMNS = {"step": Column("steps", "Number."), "who": Column("", "Its name."), "never": Column("", "Not there.")}
ROWS = [
    {"who": HOSTILE, "step": 1, "mixed": 1, "figure": 1, "list": [1, {"a": 2}]},
    {"who": "b", "step": 2, "mixed": "two", "figure": 0.5, "list": None},
]


@pytest.fixture
def frame():
    return Frame("names", "Some names.", COLUMNS, ROWS)


def test_documented_columns_come_first_and_absent_ones_are_left_out(frame):
    assert frame.names() == ["step", "who", "mixed", "figure", "list"]
    assert [row["column"] for row in frame.documented()] == ["step", "who", "never"]
    assert len(frame) == 2 and frame[1]["who"] == "b" and [row["step"] for row in frame] == [1, 2]


def test_each_library_gets_the_same_cells(frame):
    wanted = {
        "step": [1, 2],
        "who": [HOSTILE, "b"],
        "mixed": ["1", "two"],
        "figure": [1.0, 0.5],
        "list": ['[1, {"a": 2}]', None],
    }
    assert frame.polars().to_dict(as_series=False) == wanted
    assert frame.arrow().to_pydict() == wanted
    read = frame.pandas()
    assert list(read.columns) == list(wanted) and read["mixed"].tolist() == ["1", "two"]


def test_a_table_without_rows_is_a_table_without_columns():
    empty = Frame("nodes", "Nodes.", COLUMNS, [])
    assert empty.polars().shape == (0, 0) and empty.pandas().empty and empty.arrow().num_rows == 0
    assert "0 rows" in empty._repr_html_() and "nothing" in repr(empty)


def test_what_a_notebook_shows_is_text_and_short(frame):
    shown = Frame("names", "Names.", COLUMNS, ROWS * 20)._repr_html_()
    assert "<img" not in shown and "&lt;img" in shown and "\x1b" not in shown and "\u202e" not in shown
    assert shown.count("<tr>") == SHOWN_ROWS + 1 and 'title="Number. (steps)"' in shown


@pytest.mark.parametrize("name", ["polars", "pandas"])
def test_a_library_that_is_missing_is_named_with_its_remedy(frame, name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ShoalError, match=f"^{name} is not installed: {re.escape(how_to_install('notebook'))}$"):
        getattr(frame, name)()


def test_a_missing_datasets_is_named_too(frame, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ShoalError, match=r"^datasets is not installed: .*pip install .*\[notebook\]"):
        frame.dataset()


def test_a_data_set_is_written_and_read_again_with_the_same_cells(frame, tmp_path):
    datasets = pytest.importorskip("datasets")
    made = frame.dataset()
    made.save_to_disk(str(tmp_path / "rows"))
    again = datasets.load_from_disk(str(tmp_path / "rows"))
    assert again.column_names == frame.names() and again.to_list() == frame.arrow().to_pylist()
    made.to_parquet(str(tmp_path / "rows.parquet"))
    parquet = datasets.Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path))
    assert parquet.to_list() == again.to_list()
