"""What the benchmark of a newcomer's first hour counts as a rise, and where its files come from."""

from dataclasses import replace

import pytest

from benchmarks.first_hour import NONE, PAGE, TASKS, SuccessRate, TutorialRun, difference, figures, files_of
from shoal.envs.load import load_env

BEFORE, AFTER = SuccessRate(0.30, 0.26, 0.34), SuccessRate(0.45, 0.41, 0.49)
CASE = TutorialRun("sort", 1, BEFORE, AFTER, AFTER, 90.0, 150.0)


def test_the_interval_of_a_rise_follows_from_both_intervals() -> None:
    rise = difference(BEFORE, AFTER)
    assert rise.mean == pytest.approx(0.15)
    assert rise.low95 == pytest.approx(0.15 - 0.04 * 2**0.5) and rise.high95 == pytest.approx(0.15 + 0.04 * 2**0.5)


def test_a_case_is_clear_if_it_rose_by_more_than_chance_in_time() -> None:
    assert CASE.is_clear
    assert not replace(CASE, after=SuccessRate(0.34, 0.30, 0.38)).is_clear
    assert not replace(CASE, before=AFTER, after=BEFORE).is_clear
    assert not replace(CASE, cpu_s=1300.0).is_clear
    assert not replace(CASE, fault="shoal sft ended with 1").is_clear


def test_cases_without_a_rise_stay_in_the_figures() -> None:
    lost = TutorialRun("count", 2, NONE, NONE, NONE, 600.0, 900.0, "it took more than 600 s")
    found = figures([CASE, lost])
    assert (found["cases"], found["clear"], found["clear_share"], found["rise_mean"]) == (2, 1, 0.5, [0.15, 0.0])


def test_the_files_are_those_of_the_page_and_hold_every_task(tmp_path) -> None:
    files = files_of(PAGE.read_text())
    assert set(files) == {"words.py", "start.toml", "run.toml"}
    assert all('kind = "sort"' in files[name] for name in ("start.toml", "run.toml"))
    (tmp_path / "words.py").write_text(files["words.py"])
    for kind in TASKS:
        env = load_env(str(tmp_path / "words.py"), {"kind": kind})
        state, (question,) = env.reset(env.task(0))
        assert question["content"] and env.score(env.step(state, env.solution(env.task(0))).state) == 1.0
