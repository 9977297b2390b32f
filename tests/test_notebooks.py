"""The notebooks of docs/notebooks run from the first cell to the last, and are kept without outputs.

Each is executed by a Jupyter kernel as a reader would, in a folder of its own. A quick variant with fewer steps is run
with every other test; the slow test runs what is in the file.
"""

import re
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import shoal
from tests.test_docs import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
QUICK = {"first_run": r"\1=2", "anatomy": r"\1=1"}
"""What takes the place of `steps=NUMBER`."""


CELL_S = 900
"""A cell may take so long: the longest trains for three minutes on a quiet machine, and others may share this one."""


def cells_of(path: Path, kind: str) -> list[str]:
    return [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == kind]


def executed(path: Path, folder: Path, quick: bool) -> list[str]:
    """Run a notebook in a folder; what each code cell showed, as text and HTML."""
    log_writer = nbformat.read(path, 4)
    for cell in log_writer.cells:
        if quick and cell.cell_type == "code":
            cell.source = re.sub(r"\b(steps)=\d+", QUICK[path.stem], cell.source)
    NotebookClient(
        log_writer, timeout=CELL_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return ["".join(map(_told, cell.outputs)) for cell in log_writer.cells if cell.cell_type == "code"]


def _told(output: nbformat.NotebookNode) -> str:
    return output.get("text", "") + str(output.get("data", ""))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_as_it_is_written(path):
    log_writer = nbformat.read(path, 4)
    nbformat.validate(log_writer)
    assert all(
        cell.outputs == [] and cell.execution_count is None for cell in log_writer.cells if cell.cell_type == "code"
    )
    assert max(len(line) for source in cells_of(path, "code") for line in source.splitlines()) <= 124


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_names_and_links_of_a_notebook_exist(path):
    text = "\n".join([*cells_of(path, "code"), *cells_of(path, "markdown")])
    assert {name for name in re.findall(r"(?<!from )\bshoal\.([A-Za-z_]+)", text) if not hasattr(shoal, name)} == set()
    links = re.findall(r"\]\(([^)#]+)", text)
    assert links and [link for link in links if not (path.parent / link).is_file()] == []


def test_a_policy_is_trained_in_ten_lines():
    first = cells_of(ROOT / "docs" / "notebooks" / "first_run.ipynb", "code")[0]
    assert "train_here" in first and len([line for line in first.splitlines() if line.strip()]) <= 10


@pytest.mark.slow
def test_the_first_run_works(tmp_path):
    sums, _, vowels, after, own_loss = executed(ROOT / "docs/notebooks/first_run.ipynb", tmp_path, quick=True)
    assert "image/png" in sums and len(re.findall(r"\d+% of held-out sums are right", sums)) == 2
    assert "image/png" in vowels and "mean reward on held-out tasks: 0." in after and "image/png" in own_loss


@pytest.mark.slow
def test_the_anatomy_works(tmp_path):
    shown = executed(ROOT / "docs/notebooks/anatomy.ipynb", tmp_path, quick=True)
    whole = "\n".join(shown)
    prompt, number = shown[0].splitlines()[:-1], shown[0].splitlines()[-1]
    assert prompt[0].startswith("first prompt of arithmetic") and all(line.startswith("  | ") for line in prompt[1:])
    assert re.fullmatch(r"1 0\.\d+", number)  # the number of the step and its reward
    assert "reward_all_mean" in shown[1] and "rgba(46,139,87" in shown[4] and "signal" in shown[3]
    assert whole.count("passed") >= 10 and "weights: " in whole and "agrees: True" in whole
    for name, check in (
        ("own digit", "sampling"),
        ("less sure", "logprobs"),
        ("shorter", "ending"),
        ("other question", "prompt"),
    ):
        assert f"{name}: {check}, hard: " in whole
    assert "the log agrees with what was recomputed" in whole


@pytest.mark.slow
def test_the_first_run_teaches_within_three_minutes(tmp_path):
    began = time.monotonic()
    sums = executed(ROOT / "docs/notebooks/first_run.ipynb", tmp_path, quick=False)[0]
    before, trained = map(int, re.findall(r"(\d+)% of held-out sums are right", sums))
    assert trained >= before + 20 and time.monotonic() - began < 180
