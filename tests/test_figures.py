"""Measured figures in prose are those of the records, and new prose quotes them.

python benchmarks/figures.py write     bring the page of figures and all quotes up to date
"""

import platform
import re
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.pages.quotes import pages, quotes, unmarked, updated
from benchmarks.pages.records import Record, Records, figures_of, last_line, unit
from benchmarks.pages.reference import PAGE, figures_page

ROOT = Path(__file__).parent.parent
LOG = ROOT / "LOG.md"
PROSE = sorted([ROOT / "README.md", ROOT / "docs/tutorial.md", *(ROOT / "docs").glob("explanation/*.md"),
                *(ROOT / "docs").glob("how-to/*.md")])  # fmt: skip
QUOTING_SINCE = "2026-11-22"
"""Days of the log before this one are history, with figures of their own."""


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def records() -> Records:
    return Records()


# --- the pages ---


def test_the_page_of_figures_matches_the_records(records):
    assert (ROOT / PAGE).read_text() == figures_page(records, ROOT), "run: python benchmarks/figures.py write"


@pytest.mark.parametrize("page", pages(ROOT), ids=page_id)
def test_a_quoted_figure_is_the_newest_one(page, records):
    wrong = [
        f"line {q.line}: {q.name} is {q.wanted}, not {q.text}" for q in quotes(page.read_text(), records) if not q.right
    ]
    assert wrong == [], "run: python benchmarks/figures.py write"


@pytest.mark.parametrize("page", PROSE, ids=page_id)
def test_measured_numbers_are_quoted(page):
    assert unmarked(page.read_text()) == [], "name the figure behind the number, as benchmarks/README.md shows"


def test_the_log_quotes_a_figure_of_some_run(records):
    wrong = [f"line {q.line}: {q.name} was never {q.text}" for q in quotes(LOG.read_text(), records) if not q.once]
    assert wrong == []


def test_a_new_entry_of_the_log_that_names_a_benchmark_quotes_it():
    days = re.split(r"^## (?=\d{4})", LOG.read_text(), flags=re.MULTILINE)[1:]
    new = [day for day in days if day[: len(QUOTING_SINCE)] >= QUOTING_SINCE]
    assert [entry for day in new for entry in entries_without_quotes(day)] == []


def entries_without_quotes(day: str) -> list[str]:
    """Titles of the entries of a day that name a benchmark and quote no figure."""
    entries = re.split(r"^### ", day, flags=re.MULTILINE)[1:]
    return [entry.partition("\n")[0] for entry in entries if "benchmarks/" in entry and "<!-- figure: " not in entry]


def test_an_entry_that_names_a_benchmark_without_a_quote_is_found():
    day = (
        "2026-11-22\n\n### How fast?\n\n- **Did**: `benchmarks/decode.py`.\n- **Saw**: 2.26.\n\n### Why?\n\nUnknown.\n"
    )
    assert entries_without_quotes(day) == ["How fast?"]
    assert entries_without_quotes(day.replace("2.26", "2.26<!-- figure: decode.ratio -->")) == []


def test_every_benchmark_that_make_bench_runs_has_a_record(records):
    names = re.search(r"^BENCHES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert len(names) > 6
    assert [name for name in names if not (ROOT / f"benchmarks/{name}.py").is_file()] == []
    assert [name for name in names if name not in records.by_benchmark] == []


# --- quotes ---


@pytest.fixture
def small(tmp_path) -> Records:
    made = Records(tmp_path / "records")
    made.add(
        "speed", Record("2026-01-01", "aaa", "speed", "old machine", {"ratio": 2.43, "gone": 7}, {"all": ["| old |"]})
    )
    found = {"ratio": 1.3449, "wins": [0.276, 0.301], "share": 0.114, "tiny_nats": 1.3e-5, "big": 21482, "over": -0.035}
    made.add("speed", Record("2026-01-02", "bbb", "speed", "2 cores", found, {"all": ["| new |", "|---|"]}))
    return Records(tmp_path / "records")


@pytest.mark.parametrize("text", [
    "It takes 1.34<!-- figure: speed.ratio --> times as long.",
    "It takes 1.3×<!-- figure: speed.ratio -->.",
    "Wins: 27.6 and 30.1 %<!-- figure: speed.wins --> of all.",
    "Of CPU 11.4<!-- figure: speed.share --> % and 11 %<!-- figure: speed.share --> of it.",
    "Errors of 1.3e-5<!-- figure: speed.tiny_nats -->.",
    "Both, 21,482 and 1.345<!-- figure: speed.big, speed.ratio -->.",
    "More by -3.5 %<!-- figure: speed.over -->.",
    "An older one: 7<!-- figure: speed.gone -->.",
    "A limit of 0.3 %.<!-- figure: none -->",
])  # fmt: skip
def test_a_number_that_is_the_rounded_figure_is_right(small, text):
    assert all(quote.right for quote in quotes(text, small))
    assert updated(text, small) == text


@pytest.mark.parametrize(("text", "right"), [
    ("It takes 1.22<!-- figure: speed.ratio --> times.", "It takes 1.34<!-- figure: speed.ratio --> times."),
    ("It takes 2.43<!-- figure: speed.ratio --> times.", "It takes 1.34<!-- figure: speed.ratio --> times."),
    ("27.6 and 33.3 %<!-- figure: speed.wins --> win", "27.6 and 30.1 %<!-- figure: speed.wins --> win"),
    ("0.1 %<!-- figure: speed.share -->", "11.4 %<!-- figure: speed.share -->"),
    ("20,000<!-- figure: speed.big --> tokens", "21,482<!-- figure: speed.big --> tokens"),
    ("3e-5<!-- figure: speed.tiny_nats -->", "1e-5<!-- figure: speed.tiny_nats -->"),
    ("+0.01<!-- figure: speed.ratio -->", "+1.34<!-- figure: speed.ratio -->"),
    ("<!-- figures: speed.all -->\n| 1 |\n<!-- end of figures -->",
     "<!-- figures: speed.all -->\n| new |\n|---|\n<!-- end of figures -->"),
])  # fmt: skip
def test_a_number_that_is_not_the_newest_figure_is_found_and_replaced(small, text, right):
    assert not all(quote.right for quote in quotes(text, small))
    assert updated(text, small) == right
    assert updated(right, small) == right


def test_the_value_of_a_former_run_is_right_in_the_log_alone(small):
    [former] = quotes("It took 2.43<!-- figure: speed.ratio --> times.", small)
    [invented] = quotes("It took 2.44<!-- figure: speed.ratio --> times.", small)
    assert (former.right, former.once, invented.once) == (False, True, False)


@pytest.mark.parametrize(("text", "why"), [
    ("1.34<!-- figure: speed.ratios -->", "no run has a figure 'speed.ratios'"),
    ("Wins: 27.6 %<!-- figure: speed.wins -->", "1 numbers stand before"),
    ("1.34\n\nnone here<!-- figure: speed.ratio -->", "0 numbers stand before"),
    ("It takes 1.34\n<!-- figure: speed.ratio --> times", "begins a line"),
    ("<!-- figures: speed.none -->\n\n<!-- end of figures -->", "no run has a table"),
])  # fmt: skip
def test_a_quote_of_nothing_is_refused(small, text, why):
    with pytest.raises(ValueError, match=why):
        list(quotes(text, small))


def test_a_comment_in_a_code_block_is_not_a_quote(small):
    assert list(quotes("```text\n9.99<!-- figure: speed.ratio -->\n```\n", small)) == []


@pytest.mark.parametrize("text", [
    "`benchmarks/decode.py` gives 2.26 times the speed.",
    "By [the log](LOG.md), 73.3 % are won.",
    "- a setting of 3\n- It gained 0.0075 ± 0.0041.",
    "Measured on two cores: 12 ms.",
    "| machine | time |\n|---|---|\n| one | 3.5 |\n| two | 4 s |",
])  # fmt: skip
def test_measured_numbers_without_a_quote_are_found(text):
    assert len(unmarked(text)) == 1
    assert unmarked(f"{text}<!-- figure: none -->") == []


@pytest.mark.parametrize("text", [
    "`benchmarks/decode.py` compares 2 engines.", "At a rate of 5 % every twentieth is audited.",
    "```console\n$ python benchmarks/decode.py    # 2.5 minutes\n```", "| key | meaning |\n|---|---|\n| 3.5 | a version |",
])  # fmt: skip
def test_numbers_that_nobody_measured_need_no_quote(text):
    assert unmarked(text) == []


# --- records ---


def test_figures_are_the_numbers_at_keys():
    line = {"benchmark": "x", "plan": {"steps": 3}, "ratio": 1.5, "held": True, "all": [1, 2], "rows": [{"a": 1}],
            "none": [], "tables": {"all": "| 1 |"}}  # fmt: skip
    assert dict(figures_of(line)) == {"plan.steps": 3, "ratio": 1.5, "all": [1, 2]}


def test_a_run_of_the_same_command_at_the_same_commit_replaces_its_record(small):
    small.add("speed", Record("2026-01-03", "bbb", "speed", "2 cores", {"ratio": 9.0}, {"all": ["| newest |"]}))
    again = Records(small.folder)
    assert [(run.date, run.figures["ratio"]) for run in again.by_benchmark["speed"]] == [
        ("2026-01-03", 9.0),
        ("2026-01-01", 2.43),
    ]
    assert again.table("speed.all") == "| newest |" and again.by_benchmark["speed"][1].tables == {}


def test_the_page_shows_each_figure_with_its_run_and_former_values(small, tmp_path):
    page = figures_page(small, tmp_path)
    assert "| 2 | 2026-01-02 | `bbb` | `speed` | 2 cores |" in page
    assert "| `speed.ratio` | 1.3449 | times | 2 | 2.43 (1) |" in page
    assert "| `speed.gone` | 7 |  | 1 |  |" in page
    assert "| `speed.wins` | 0.276 0.301 | share of 1 | 2 |  |" in page


@pytest.mark.parametrize(("name", "is_in"), [
    ("decode.engine_grouped_b64_tokens_per_cpu_s", "tokens per CPU-second"), ("whole_system.peak_rss_mb.worker", "MB"),
    ("whole_system.cpu_s_per_step_by_role.trainer", "CPU-seconds"), ("verify_cost.wordle.forward_us_per_rollout", "µs"),
    ("kill_storm.coordinator_restart_s.max", "s"), ("kill_storm.kills.worker", ""),
    ("poisoning.cpu_minutes", "CPU-minutes"),
    ("verify_cost.wordle.model_free_over_generate", "share of 1"), ("decode.ratio_grouped_b64", "times"),
])  # fmt: skip
def test_a_figure_has_the_unit_that_its_name_says(name, is_in):
    assert unit(name) == is_in


@pytest.mark.parametrize("output", ["", "no JSON\n", '{"ratio": 1}\n', "[1]\n", '{"benchmark": "x"}\nFailed.\n'])
def test_a_benchmark_that_did_not_end_with_its_line_is_not_recorded(output):
    with pytest.raises(ValueError, match="nothing is recorded"):
        last_line(output)


@pytest.fixture
def workshop(tmp_path, monkeypatch) -> Path:
    """A tree with one benchmark, which misses its bar."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/fake.py").write_text(
        "import json, sys\nprint('at work')\n"
        "print(json.dumps({'benchmark': 'fake', 'words': len(sys.argv), 'tables': {'t': '| a |\\n|---|'}}))\nsys.exit(1)\n"
    )
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    return tmp_path


def test_a_benchmark_that_misses_its_bar_is_recorded_and_gives_its_exit_code(workshop):
    records = Records(workshop / "records")
    assert figures.run_benchmark(records, "fake", ["--repeats", "3"]) == 1
    [run] = Records(workshop / "records").by_benchmark["fake"]
    assert run.figures == {"words": 3} and run.tables == {"t": ["| a |", "|---|"]}
    assert run.command == "OMP_NUM_THREADS=1 python benchmarks/fake.py --repeats 3"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", run.date) and run.commit == "unknown"


def test_a_quick_run_is_not_recorded(workshop):
    records = Records(workshop / "records")
    with pytest.raises(SystemExit, match="prove nothing"):
        figures.run_benchmark(records, "fake", ["--quick"])
    assert records.by_benchmark == {}


def test_a_missing_benchmark_is_named(workshop):
    with pytest.raises(SystemExit, match=r"benchmarks/speed\.py is missing"):
        figures.run_benchmark(Records(workshop / "records"), "speed", [])


def test_a_record_describes_the_machine_without_its_name():
    assert re.fullmatch(r"\d+ cores, \S+( with AVX\S+)?, torch \S+, load [\d.]+ before", figures.machine())
    assert not platform.node() or platform.node() not in figures.machine()
