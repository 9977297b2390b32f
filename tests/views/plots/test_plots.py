"""Pictures of runs: which lines they have, what is drawn as a band, and the files."""

import contextlib
import sqlite3
import sys
import time
from xml.etree import ElementTree

import pytest

from shoal.cli.main import main
from shoal.errors import ConfigError, NothingYet, how_to_install
from shoal.evaluation_files import Evaluation, JudgeResult
from shoal.runs.run_reader import open_run
from shoal.step_metrics import METRICS
from shoal.views.plots.render import draw, draw_inline, thinned
from shoal.views.plots.series import EVALUATED, USUAL, ReadRun, picture_of

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = ("</svg><script>alert(1)</script>", "$x^{2$", "\x1b[2J", "‮txet", "a\0b", "_hidden", "&amp;]]>", "名前")


def read(name="a", rewards=(0.0, 1.0), where="", heldout=(), config=None, **extra):
    lines = [
        {"step": step, "time_s": 3600.0 * (step + 1), "step_s": 3600.0, "tokens": 10, "reward_mean": value, **extra}
        for step, value in enumerate(rewards)
    ]
    return ReadRun(name, where or name, config or {"name": name}, lines, list(heldout))


def points(picture, panel=0, curve=0):
    return [tuple(point) for point in picture.panels[panel].curves[curve].points]


def test_runs_that_differ_in_their_seed_alone_are_one_line_with_a_band():
    runs = [
        read(rewards=(0.0, 1.0)),
        read(rewards=(1.0, 1.0, 5.0)),
        read(config={"name": "a", "steps": 9}, where="other"),
    ]
    picture = picture_of(runs, ["reward_mean"])
    assert [(curve.label, curve.seeds) for curve in picture.panels[0].curves] == [("a", 2), ("a (other)", 1)]
    assert points(picture) == [(0.0, 0.5, 0.0, 1.0), (1.0, 1.0, 1.0, 1.0)]
    assert "lowest and highest" in " ".join(picture.notes)
    assert b"a: mean of 2 seeds, band from lowest to highest" in draw(picture, "svg")
    assert draw(picture, "png").startswith(b"\x89PNG")


@pytest.mark.parametrize(("across", "expected"), [("step", [0, 1]), ("tokens", [10, 20]), ("time", [1, 2])])
def test_the_axis_is_steps_or_tokens_or_hours(across, expected):
    assert [point[0] for point in points(picture_of([read()], ["reward_mean"], across))] == expected


def test_smoothing_takes_the_mean_of_the_last_steps():
    picture = picture_of([read(rewards=(0.0, 2.0, 4.0))], ["reward_mean"], smooth=2)
    assert [point[1] for point in points(picture)] == [0.0, 1.0, 3.0] and "last 2 steps" in picture.notes[0]


def test_held_out_results_stand_at_their_version_with_their_interval():
    found = [Evaluation(0.5, 0.4, 0.6, 10, measure="success", name="before", version=0)]
    found.append(Evaluation(0.9, 0.8, 1.0, 10, measure="success", name="after", version=2))
    picture = picture_of([read(heldout=found)], ["heldout"])
    assert points(picture) == [(0.0, 0.5, 0.4, 0.6), (2.0, 0.9, 0.8, 1.0)]
    assert picture.panels[0].unit == "success" and "95 %" in picture.notes[0]
    assert [point[0] for point in points(picture_of([read(heldout=found)], ["heldout"], "tokens"))] == [0, 20]


def test_an_evaluation_with_many_faults_is_not_drawn():
    found = [Evaluation(0.5, 0.4, 0.6, 10, measure="success", name="before", version=0)]
    found.append(Evaluation(0.9, 0.8, 1.0, 10, measure="success", name="after", version=2, faults=5))
    assert points(picture_of([read(heldout=found)], ["heldout"])) == [(0.0, 0.5, 0.4, 0.6)]


def test_without_names_the_picture_has_what_tells_how_a_run_goes():
    run = read(staleness_rollouts={"0": 1, "2": 3}, entropy_nats=0.5, reward_all_mean=1, waiting_for="batch", lr=0)
    picture = picture_of([run], [])
    drawn = [panel.metric for panel in picture.panels]
    assert drawn == ["reward_all_mean", "entropy_nats", "staleness_rollouts", "step_s"]
    assert points(picture, 2)[0][1] == 1.5
    assert set(USUAL) - set(EVALUATED) <= METRICS.keys()


def test_runs_that_differ_in_their_seed_alone_may_be_drawn_apart():
    runs = [read(where="one", config={"name": "a"}), read(where="two", config={"name": "a"}, rewards=(1.0, 0.0))]
    curves = picture_of(runs, ["reward_mean"], apart=True).panels[0].curves
    assert [(curve.label, curve.seeds) for curve in curves] == [("a (one)", 1), ("a (two)", 1)]


def test_a_judge_and_the_parts_of_a_reward_are_drawn_without_being_asked_for():
    found = [Evaluation(0.5, 0.4, 0.6, 10, name="before", version=0, judge=JudgeResult(0.3, 0.2, 0.4))]
    picture = picture_of([read(heldout=found, **{"reward_part/form": 0.5})], [])
    assert [panel.metric for panel in picture.panels] == [
        "heldout",
        "heldout_judge",
        "step_s",
        "reward_part/form",
    ]
    assert points(picture_of([read(heldout=found)], ["heldout_judge"])) == [(0.0, 0.3, 0.2, 0.4)]


def test_an_unknown_metric_is_told_with_near_names():
    with pytest.raises(ConfigError, match="did you mean reward_mean or"):
        picture_of([read()], ["rewrad_mean"])
    with pytest.raises(ConfigError, match="did you mean env_metric/thought"):
        picture_of([read(**{"env_metric/thought": 1.0})], ["env_metric/thouht"])
    with pytest.raises(ConfigError, match="a word"):
        picture_of([read()], ["waiting_for"])
    with pytest.raises(NothingYet, match="KL divergence"):
        picture_of([read()], ["kl_nats"])


def test_a_run_that_is_starting_has_nothing_to_draw_yet():
    with pytest.raises(NothingYet, match="first step"):
        picture_of([read(rewards=())], [])


def test_the_same_picture_gives_the_same_bytes():
    picture = picture_of([read(), read("b")], ["reward_mean"])
    assert draw(picture, "svg", "t") == draw(picture, "svg", "t")


def test_hostile_names_are_letters():
    runs = [read(name, config={"name": name, "n": n}) for n, name in enumerate(HOSTILE)]
    picture = picture_of(runs, ["reward_mean"])
    root = ElementTree.fromstring(draw(picture, "svg", HOSTILE[1]))
    assert root.tag == f"{SVG}svg" and not list(root.iter(f"{SVG}script"))
    assert draw(picture, "png", HOSTILE[1])


def test_numbers_that_nobody_can_draw_are_left_out():
    rewards = (1.7e308, 1.6e308, float("nan"), float("inf"), -1.7e308, 1.0, 2.0)
    ages = [{"inf": 1, "-inf": 1}, {"1": 1e308, "2": 1e308}, {"x": 1}, {}, {"1": 2, "3": 2}]
    run = read(rewards=rewards)
    for line, age in zip(run.lines, ages, strict=False):
        line["staleness_rollouts"] = age
    picture = picture_of([run], ["reward_mean", "staleness_rollouts"], smooth=3)
    assert points(picture) == [(5.0, 1.0, 1.0, 1.0), (6.0, 1.5, 1.5, 1.5)] and points(picture, 1) == [
        (4.0, 2.0, 2.0, 2.0)
    ]
    assert draw(picture, "png")


def test_ten_thousand_steps_are_drawn_in_time_and_keep_their_extremes():
    rewards = [0.5] * 10_000
    rewards[7_777], rewards[3_333] = 9.0, -9.0
    draw(picture_of([read()], []), "png")  # imports matplotlib
    started = time.process_time()
    picture = picture_of([read(rewards=rewards)], ["reward_mean"])
    drawn = draw(picture, "svg")
    assert time.process_time() - started < 2 and len(drawn) < 200_000
    kept = [point.y for point in thinned(picture.panels[0].curves[0].points)]
    assert len(kept) <= 1600 and {9.0, -9.0} <= set(kept)


def test_an_inline_panel_follows_the_ink_of_its_page():
    picture = picture_of([read()], ["reward_mean"])
    drawn = draw_inline(picture.panels[0], picture)
    root = ElementTree.fromstring(drawn)
    assert root.tag == f"{SVG}svg" and "currentColor" in drawn and "#1a1b1c" not in drawn and "width" not in root.attrib


def test_the_command_writes_a_picture_of_a_folder(testbed, tmp_path, capsys):
    out = tmp_path / "a.svg"
    assert main(["plot", str(testbed.folder.root), "--out", str(out)]) == 0
    assert ElementTree.fromstring(out.read_bytes()).tag == f"{SVG}svg"
    assert "reward_all_mean, heldout" in capsys.readouterr().out


def test_the_command_says_what_of_a_folder_it_could_not_read(copied, tmp_path, capsys, caplog):
    with (copied / "metrics.jsonl").open("ab") as file:
        file.write(b'half\n{"no step": 1}\nits end is still to come')
    with contextlib.closing(sqlite3.connect(copied / "log.sqlite")) as log, log:
        log.execute("UPDATE events SET hash = printf('%064d', 0) WHERE seq = 3")
    assert main(["plot", str(copied), "--out", str(tmp_path / "a.svg")]) == 0
    assert [record.args for record in caplog.records] == [(2, copied / "metrics.jsonl")]
    assert "event 3" in (said := capsys.readouterr().err) and said.count(str(copied)) == said.count("\n") == 1
    caplog.clear()
    with open_run(copied) as run:
        assert run.new_metrics() and not run.new_metrics() and run.metrics()
    assert [record.args[0] for record in caplog.records] == [2], "once"


def test_faults_of_the_command_are_one_line(testbed, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", str(testbed.folder.root), "--metric", "lose"]) == 2
    assert capsys.readouterr().err.startswith("error: there is no metric 'lose': did you mean loss")
    with pytest.raises(SystemExit, match="2"):
        main(["plot", str(testbed.folder.root), "--out", "a.jpg"])
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(testbed.folder.root)]) == 2
    assert capsys.readouterr().err == f"error: matplotlib is not installed: {how_to_install('plot')}\n"
    assert not list(tmp_path.iterdir())
