"""The page of figures matches the records of the benchmarks.

python benchmarks/figures.py write     writes the page
"""

import platform
import re
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.figures import (
    PAGE,
    Headline,
    Record,
    Records,
    figures_of,
    headlines,
    last_line,
    page,
    run_benchmark,
    shown,
)

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def records() -> Records:
    return Records()


def test_the_page_of_figures_matches_the_records(records: Records) -> None:
    assert PAGE.read_text() == page(records), "run: python benchmarks/figures.py write"


def test_headlines_are_few_and_name_each_figure_once() -> None:
    names = [headline.figure for headline in headlines()]
    assert len(names) <= 50 and len(set(names)) == len(names)


def test_every_record_is_of_a_benchmark_that_is_in_the_tree(records: Records) -> None:
    folder = ROOT / "benchmarks"
    scripts = {"_".join(path.relative_to(folder).with_suffix("").parts) for path in folder.rglob("*.py")}
    scripts.add("calibrate")  # a command of shoal
    assert records.by_benchmark.keys() - scripts == set()


def test_every_benchmark_that_make_bench_runs_has_a_record(records: Records) -> None:
    found = re.search(r"^BENCHES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    names = found[1].split()
    assert len(names) > 6
    assert [name for name in names if not (ROOT / f"benchmarks/{name}.py").is_file()] == []
    assert [name for name in names if name not in records.by_benchmark] == []


@pytest.mark.parametrize(("digits", "unit", "value", "text"), [
    (2, "", 1.166, "1.17"), (1, "%", [0.276, 0.3008], "27.6, 30.1 %"), (0, "", 1234.4, "1,234"), (1, "ms", 1.1, "1.1 ms"),
])  # fmt: skip
def test_a_figure_is_rounded_and_a_share_is_shown_in_per_cent(
    digits: int, unit: str, value: figures.Value, text: str
) -> None:
    assert shown(Headline("", "", digits, unit), value) == text


def test_figures_are_the_numbers_at_keys() -> None:
    line = {
        "benchmark": "x",
        "plan": {"steps": 3},
        "ratio": 1.5,
        "held": True,
        "all": [1, 2],
        "rows": [{"a": 1}],
        "n": [],
    }
    assert dict(figures_of(line)) == {"plan.steps": 3, "ratio": 1.5, "all": [1, 2]}


def test_the_newest_run_that_has_a_figure_gives_it(tmp_path: Path) -> None:
    made = Records(tmp_path / "records")
    made.add("speed", Record("2026-01-01", "aaa", "speed", "old", {"ratio": 2.43, "gone": 7}))
    made.add("speed", Record("2026-01-02", "bbb", "speed", "new", {"ratio": 1.5}))
    made.add("speed", Record("2026-01-03", "bbb", "speed", "new", {"ratio": 9.0}))
    again = Records(made.folder)
    assert [run.date for run in again.by_benchmark["speed"]] == ["2026-01-03", "2026-01-01"]
    assert again.newest("speed.ratio")[0] == 9.0 and again.newest("speed.gone")[1].commit == "aaa"
    with pytest.raises(KeyError):
        again.newest("speed.none")


@pytest.mark.parametrize("output", ["", "no JSON\n", '{"ratio": 1}\n', "[1]\n", '{"benchmark": "x"}\nFailed.\n'])
def test_a_benchmark_that_did_not_end_with_its_line_is_not_recorded(output: str) -> None:
    with pytest.raises(ValueError, match="nothing is recorded"):
        last_line(output)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with one benchmark, which misses its bar."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/fake.py").write_text(
        "import json, sys\nprint('begun')\nprint(json.dumps({'benchmark': 'fake', 'words': len(sys.argv)}))\nsys.exit(1)\n"
    )
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    return tmp_path


def test_a_benchmark_that_misses_its_bar_is_recorded_and_gives_its_exit_code(root: Path) -> None:
    assert run_benchmark(Records(root / "records"), "fake", ["--repeats", "3"]) == 1
    [run] = Records(root / "records").by_benchmark["fake"]
    assert run.figures == {"words": 3} and run.command == "OMP_NUM_THREADS=1 python benchmarks/fake.py --repeats 3"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", run.date) and run.commit == "unknown"


def test_a_quick_run_is_not_recorded(root: Path) -> None:
    records = Records(root / "records")
    with pytest.raises(SystemExit, match="prove nothing"):
        run_benchmark(records, "fake", ["--quick"])
    assert records.by_benchmark == {}


def test_a_missing_benchmark_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"benchmarks/speed\.py is missing"):
        run_benchmark(Records(tmp_path), "speed", [])


def test_a_record_describes_the_machine_without_its_name() -> None:
    assert re.fullmatch(r"\d+ cores, \S+( with AVX\S+)?, torch \S+, load [\d.]+ before", figures.machine())
    assert not platform.node() or platform.node() not in figures.machine()
