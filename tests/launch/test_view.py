"""The terminal view: what a snapshot and an ended run show, on a terminal and in a file."""

import io
import re
import shlex
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console, RenderableType

from shoal.cli import parser
from shoal.commands.hosting import recipe_as_typed
from shoal.config import EnvConfig
from shoal.heldout import Heldout
from shoal.launch.finale import plain_end, render_end, save_picture
from shoal.launch.panels import chart, duration
from shoal.launch.snapshot import Sample, Snapshot
from shoal.launch.summary import RunEnd
from shoal.launch.view import LiveView, plain, plain_wait, render
from shoal.terminal import printable


def shown(picture: RenderableType, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(picture)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_picture_shows_progress_workers_and_what_the_run_waits_for(snapshot: Snapshot) -> None:
    text = shown(render(snapshot))
    for expected in (
        "running", "step 37/90", "policy v37", "2m03s", "held-out before", "29.0% (25%-33%)", "41.0%",
        "worker-0", "81,234", "cheater-0 (cheats)", "quarantined", "sampling 40x",
        "waiting 8 s for workers: 9 of 16 groups", "restarted: trainer 1x", "2,000", "0:60%, 1:40%",
    ):  # fmt: skip
        assert expected in text, expected
    assert "validator-0" not in text


def test_the_picture_says_which_workers_left(snapshot: Snapshot) -> None:
    gone = tuple(msgspec.structs.replace(node, left=node.name == "worker-0") for node in snapshot.nodes)
    assert "good, left" in shown(render(replace(snapshot, nodes=gone)))


def test_the_picture_says_that_a_run_is_starting() -> None:
    text = shown(render(Snapshot("wordle", "runs/wordle", 90, notice="starting the coordinator")))
    assert "starting the coordinator" in text and "no worker has joined yet" in text and "step 0/90" in text


def test_a_picture_of_an_ended_run_offers_nothing_to_stop(snapshot: Snapshot) -> None:
    status = msgspec.structs.replace(snapshot.status, phase="ended", waiting_for="nothing: the run has ended")
    text = shown(render(replace(snapshot, status=status)))
    assert "the run has ended" in text and "waiting" not in text.replace("trainer waits", "") and "Ctrl-C" not in text


def test_the_step_is_never_behind_the_version(snapshot: Snapshot) -> None:
    for version, step in ((40, 40), (30, 37), (10**6, 90)):
        status = msgspec.structs.replace(snapshot.status, version=version)
        assert f"step {step}/90" in shown(render(replace(snapshot, status=status)))


def test_a_turn_of_spaces_alone_is_said_to_be_blank(snapshot: Snapshot) -> None:
    assert "policy (blank)" in shown(render(replace(snapshot, sample=Sample("one rollout", (("policy", " \n "),)))))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_picture_fits_the_terminal(snapshot: Snapshot, width: int) -> None:
    assert max(len(line) for line in shown(render(snapshot), width).splitlines()) <= width


def test_the_plain_line_shows_the_newest_step(snapshot: Snapshot) -> None:
    line = plain(snapshot)
    assert "\n" not in line
    for expected in (
        "step 37/90", "reward=0.480", "tokens/s=2000", "staleness=0:60%,1:40%", "accepted=611 refused=40",
        "elapsed=2m03s",
    ):  # fmt: skip
        assert expected in line, expected


def test_reward_of_each_environment_of_a_mix_is_shown(snapshot: Snapshot) -> None:
    newest = {"step": 37, "reward_mean/easy": 0.75, "reward_mean/very hard": None}
    older = {"step": 36, "reward_mean/easy": 0.5, "reward_mean/very hard": 0.125}
    mix = replace(snapshot, metrics=(*snapshot.metrics, older, newest))
    assert "batch_reward_easy=0.750  batch_reward_very_hard=0.125" in plain(mix)
    text = shown(render(mix), 120)
    assert "batch reward" in text
    assert re.search(r"  easy +0\.750", text) and re.search(r"  very hard +0\.125", text)
    parts = {"easy": Heldout(0.81, 0.7, 0.9, 32), "very hard": Heldout(0.01, 0.0, 0.1, 32)}
    measured = replace(mix, heldout=(("before", Heldout(0.41, 0.33, 0.5, 64, parts)),))
    assert "held-out_before=41.0%  held-out_before_easy=81.0%  held-out_before_very_hard=1.0%" in plain(measured)
    assert re.search(r"  very hard +1\.0% \(0%-10%\)", shown(render(measured), 120))
    assert "batch" not in plain(snapshot) and "batch reward" not in shown(render(snapshot))
    evil = replace(snapshot, metrics=({"step": 0, "reward_mean/[/x]\x9b\u202e": 0.5},))
    for text in (shown(render(evil)), printable(plain(evil))):
        assert "[/x]" in text and "\x9b" not in text and "\u202e" not in text


def test_solve_rate_and_weight_of_each_environment_are_shown(snapshot: Snapshot) -> None:
    line = {"step": 37, "solve_rate": 0.25, "solve_rate/easy": 0.75, "solve_rate/very hard": None}
    mix = replace(snapshot, metrics=({**line, "draw_weight/easy": 1.0, "draw_weight/very hard": 0.25},))
    assert "solved=25.0%" in plain(mix) and "solved_easy=75.0%×1" in plain(mix)
    assert re.search(r"  easy +75\.0% × 1 ", shown(render(mix), 120))
    later = {"step": 38, "solve_rate/very hard": 0.125, "draw_weight/very hard": 0.1}
    assert "solved_very_hard=12.5%×0.1" in plain(replace(mix, metrics=(*mix.metrics, later)))
    assert "solved" not in plain(snapshot)


def test_only_long_waits_are_reported(snapshot: Snapshot) -> None:
    assert plain_wait(snapshot).startswith("waiting 8 s for workers: 9 of 16 groups")
    brief = replace(snapshot, status=type(snapshot.status)("", "running", 0, 9, 0, {}, 0, 0, "the trainer", 1.0))
    assert plain_wait(brief) == ""


def test_piped_view_prints_each_step_once(snapshot: Snapshot) -> None:
    console = Console(file=io.StringIO(), width=80)
    view = LiveView(console, wait_line_every_s=1e9)
    view.show(snapshot)
    view.show(snapshot)
    view.close()
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[:2] for line in lines].count(["step", "37/90"]) == 1
    assert all("\x1b" not in line for line in lines)


def test_the_chart_places_values_by_step_and_height() -> None:
    # Four steps of eight columns: two done, so the left half is filled; 0.5 of two lines is one line of full blocks.
    assert chart([0.5, 1.0], total=4, width=8, height=2, low=0.0, high=1.0) == ["  ██    ", "████    "]
    # More steps than columns: means of 0 and 1, and of 1 and 1.
    assert chart([0.0, 1.0, 1.0, 1.0], total=4, width=2, height=1, low=0.0, high=1.0) == ["▄█"]


def test_chart_of_equal_values_does_not_divide_by_zero() -> None:
    assert chart([0.0, 0.0], total=2, width=2, height=1, low=0.0, high=0.0) == ["▁▁"]


def test_durations_have_at_most_two_units() -> None:
    assert [duration(s) for s in (7.9, 123, 3720)] == ["7s", "2m03s", "1h02m"]


def test_last_table_compares_before_and_after_and_names_the_cheater(end: RunEnd) -> None:
    for text in (shown(render_end(end)), plain_end(end)):
        for expected in (
            "29.0%", "71.0%", "cheater-0", "cheating", "sampling 40x", "not sampled with the leased seed", "81,234",
            "100.0%", "crane", "won, score 1.00", "runs/wordle/checkpoints/final",
            "shoal ledger verify runs/wordle",
            "--env wordle --env-args '{\"num_words\": 64}'",
            "Held-out tasks: 29.0% before training, 71.0% after.",
        ):  # fmt: skip
            assert expected in " ".join(text.replace("│", " ").split()), expected


def test_the_last_table_says_how_to_host_the_same_run(end: RunEnd) -> None:
    command = [
        "run", "my recipes/a.toml", "--quick", "--random-policy", "--set", "steps=3", "--set", 'envs=[{name="x y"}]',
    ]  # fmt: skip
    typed = recipe_as_typed(parser().parse_args(command))
    ended = replace(end, recipe=typed, run_dir=Path("runs/my run"))
    for text in (shown(render_end(ended), width=200), plain_end(ended)):
        line = next(line for line in text.splitlines() if "shoal host" in line)
        assert shlex.split(line) == ["shoal", "host", *command[1:], "--out", "runs/my run-hosted"]


def test_the_last_table_shows_each_environment_of_a_mix(end: RunEnd) -> None:
    def part(mean: float) -> dict[str, float]:
        return {"mean": mean, "low95": mean - 0.05, "high95": mean + 0.05, "episodes": 512}

    heldout = {
        "before": part(0.29) | {"envs": {"easy": part(0.41), "hard": part(0.17)}},
        "after": part(0.71) | {"envs": {"easy": part(0.93), "hard": part(0.49)}},
    }
    envs = tuple(EnvConfig("arithmetic", args={"digits": n}, label=label) for n, label in ((1, "easy"), (4, "hard")))
    games = (("easy", end.games[0][1]), ("hard", end.games[0][1]))
    mix = replace(end, summary=end.summary | {"heldout": heldout}, envs=envs, games=games)
    for text in (shown(render_end(mix)), plain_end(mix)):
        for expected in ("71.0%", "41.0%", "17.0%", "93.0%", "49.0%", "easy", "hard", '{"digits": 1}', '{"digits": 4}'):
            assert expected in text, expected
    assert "held-out after, hard: 49.0%" in plain_end(mix) and "sample 2 (hard, won" in plain_end(mix)
    assert "easy" not in plain_end(end)


def test_letters_with_marks_become_tiles(end: RunEnd) -> None:
    assert "C   R   A   N   E" in shown(render_end(end))
    assert "c=r+a+n-e+" in plain_end(end)


def test_last_table_without_evaluation_says_so(end: RunEnd) -> None:
    bare = replace(end, summary=end.summary | {"heldout": {"before": None, "after": None}}, games=())
    assert "not evaluated" in plain_end(bare)
    assert "before training" in shown(render_end(bare))


def test_what_a_policy_wrote_cannot_steer_the_terminal(end: RunEnd) -> None:
    evil = {"turns": [["assistant", "\x1b[2J[bold]boo[/bold]\x07"]], "score": 0.0, "success": None}
    ended = replace(end, games=(("wordle", evil),))
    for text in (shown(render_end(ended)), plain_end(ended)):
        assert "\x1b[2J" not in text and "\x07" not in text and "[bold]boo" in text


def test_name_of_a_worker_cannot_steer_the_terminal(snapshot: Snapshot, end: RunEnd) -> None:
    nodes = tuple(msgspec.structs.replace(node, name="\x1b[2J[red]x", last_reason="\x07") for node in snapshot.nodes)
    evil = replace(snapshot, nodes=nodes)
    for text in (shown(render(evil)), shown(render_end(replace(end, snapshot=evil)))):
        assert "\x1b[2J" not in text and "\x07" not in text


def test_names_are_not_read_as_markup(snapshot: Snapshot, end: RunEnd) -> None:
    name = "[/x]\x9b\u202e"
    node = msgspec.structs.replace(next(n for n in snapshot.nodes if n.role == "worker"), name=name, last_reason=name)
    evil = replace(snapshot, name=name, out=name, nodes=(node,))
    credits = {name: {"credits": 0, "role": "honest"}}
    game = {"turns": [[name, name]], "score": 0.0, "success": None}
    summary, label = end.summary | {"credits": credits, "influence": {name: 0.0}}, "[/x]\x9b"
    envs = (*end.envs, EnvConfig("wordle", label=label))
    figures = end.summary["heldout"]["after"]
    summary["heldout"] = dict.fromkeys(("before", "after"), figures | {"envs": {label: figures}})
    ended = replace(end, snapshot=evil, summary=summary, envs=envs, games=((label, game),))
    for text in (shown(render(evil)), shown(render_end(ended)), plain_end(ended)):
        assert "[/x]" in text and "\x9b" not in text and "\u202e" not in text


def test_the_picture_can_be_saved_as_svg(snapshot: Snapshot, tmp_path: Path) -> None:
    save_picture(render(snapshot), tmp_path / "terminal.svg")
    content = (tmp_path / "terminal.svg").read_text()
    assert set(re.findall(r"\w+://[^\s\"]+", content)) <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
    assert content.startswith("<svg") and "cheater-0" in content
