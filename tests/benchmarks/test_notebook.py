"""What `benchmarks/notebook.py` reads of the notebook, and makes of what its cells show."""

import pytest

from benchmarks.notebook import Trained, bars_of, code_lines, figures_of, first_cells, read, with_seed

SHOWN = "20% of held-out sums are right (15% to 25%)\n74% of held-out sums are right (68% to 79%)\n"


def test_the_first_cells_of_the_notebook_end_with_training_and_name_a_seed():
    cells = first_cells()
    assert "train_here" in cells[-1] and code_lines(cells) <= 10
    assert "seed=3" in with_seed(cells, 3)[-1] and "seed=1" not in with_seed(cells, 3)[-1]


def test_cells_without_a_seed_are_refused():
    with pytest.raises(ValueError, match="name no seed"):
        with_seed(["run = shoal.recipe('arithmetic.toml', steps=30)"], 2)


def test_lines_that_are_empty_or_comments_are_not_typed():
    assert code_lines(["import shoal\n\n# why\nrun = 1", "x"]) == 3


def test_what_a_cell_shows_is_read_as_shares_with_their_intervals():
    assert read(SHOWN, 41.0, 30.0) == Trained(0.2, 0.74, low_after=0.68, high_before=0.25, seconds=41.0, cpu_s=30.0)
    with pytest.raises(ValueError, match="does not say"):
        read(SHOWN.partition("\n")[0], 41.0, 30.0)


def test_each_bar_is_missed_by_its_own_fault():
    good = Trained(0.2, 0.74, 0.68, 0.25, 41.0, 30.0)
    figures = figures_of(7, 90.0, [good, good._replace(seconds=50.04)])
    assert (figures["train_slowest_s"], figures["with_install_minutes"]) == (50.0, 2.33)
    assert figures["success_after"] == [0.74, 0.74] and all(bars_of(figures, [good]).values())
    missed = {
        "lines": bars_of(figures | {"lines": 11}, [good]),
        "time": bars_of(figures | {"train_slowest_s": 181.0}, [good]),
        "learned": bars_of(figures, [good, good._replace(low_after=0.24)]),
    }
    assert {name: [bar for bar, met in bars.items() if not met] for name, bars in missed.items()} == {
        "lines": ["lines"], "time": ["time"], "learned": ["learned"],
    }  # fmt: skip
