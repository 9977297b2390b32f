"""The terminal view: what a snapshot and an ended run show, on a terminal and in a file."""

import html
import io
import re
import shlex
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console, RenderableType

from shoal.cli.host import recipe_as_typed
from shoal.cli.main import parser
from shoal.config import EnvConfig
from shoal.evaluation_files import Evaluation, Transcript
from shoal.ledger.fault_rate import FAULT_REMEDY, FAULTS
from shoal.runs.run_status import RunStatus
from shoal.terminal import printable
from shoal.views.terminal.end_screen import RunEnd, plain_end, render_end, save_picture
from shoal.views.terminal.live_view import LiveView, plain, plain_wait, render
from shoal.views.terminal.panels import chart, figures, figures_table


def shown(picture: RenderableType, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(picture)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_picture_shows_progress_workers_and_what_the_run_waits_for(snapshot: RunStatus) -> None:
    text = shown(render(snapshot))
    for expected in (
        "running", "step 37/90", "policy v37", "2m03s", "held-out before", "29.0% (25%-33%)", "41.0%",
        "worker-0", "81,234", "cheater-0 (cheats)", "quarantined", "sampling 40x",
        "waiting 8 s for workers: 9 of 16 groups", "restarted: trainer 1x", "2,000", "0:60%, 1:40%",
    ):  # fmt: skip
        assert expected in text, expected
    assert "validator-0" not in text


@pytest.mark.parametrize(("factor", "says"), [(0.5, True), (1.0, False)])
def test_a_small_picture_says_that_the_host_changed_the_learning_rate(
    snapshot: RunStatus, factor: float, says: bool
) -> None:
    found = replace(snapshot, status=msgspec.structs.replace(snapshot.status, lr_factor=factor))
    console = Console(file=io.StringIO(), width=80, height=24, color_system=None)
    console.print(render(found, 24))
    assert ("lr ×0.5" in console.file.getvalue()) is says  # type: ignore[attr-defined]
    assert ("lr_factor=0.5" in plain(found)) is says


def test_the_picture_says_that_a_run_is_starting() -> None:
    text = shown(render(RunStatus("wordle", "runs/wordle", 90, notice="starting the coordinator")))
    assert "starting the coordinator" in text and "no worker has joined yet" in text and "step 0/90" in text


def test_a_picture_of_an_ended_run_offers_nothing_to_stop(snapshot: RunStatus) -> None:
    status = msgspec.structs.replace(snapshot.status, phase="ended", waiting_for="nothing: the run has ended")
    text = shown(render(replace(snapshot, status=status)))
    assert "the run has ended" in text and "waiting" not in text.replace("trainer waits", "") and "Ctrl-C" not in text
    evaluated = replace(snapshot, status=msgspec.structs.replace(status, phase="evaluating"))
    assert "waiting" not in shown(render(evaluated)).replace("trainer waits", "")


def test_the_step_is_never_behind_the_version(snapshot: RunStatus) -> None:
    for version, step in ((40, 40), (30, 37), (10**6, 90)):
        status = msgspec.structs.replace(snapshot.status, version=version)
        assert f"step {step}/90" in shown(render(replace(snapshot, status=status)))


def test_the_plain_line_shows_the_newest_step(snapshot: RunStatus) -> None:
    line = plain(snapshot)
    assert "\n" not in line
    for expected in (
        "step 37/90", "reward=0.480", "tokens/s=2000", "staleness=0:60%,1:40%", "accepted=611 refused=40",
        "elapsed=2m03s",
    ):  # fmt: skip
        assert expected in line, expected


def test_reward_of_each_environment_of_a_mix_is_shown(snapshot: RunStatus) -> None:
    newest = {"step": 37, "reward_mean/easy": 0.75, "reward_mean/very hard": None}
    older = {"step": 36, "reward_mean/easy": 0.5, "reward_mean/very hard": 0.125}
    mix = replace(snapshot, metrics=(*snapshot.metrics, older, newest))
    assert "batch_reward_easy=0.750  batch_reward_very_hard=0.125" in plain(mix)
    text = shown(render(mix), 120)
    assert "batch reward" in text
    assert re.search(r"  easy +0\.750", text) and re.search(r"  very hard +0\.125", text)
    parts = {"easy": Evaluation(0.81, 0.7, 0.9, 32), "very hard": Evaluation(0.01, 0.0, 0.1, 32)}
    measured = replace(mix, heldout=(("before", Evaluation(0.41, 0.33, 0.5, 64, parts)),))
    assert "held-out_before=41.0%  held-out_before_easy=81.0%  held-out_before_very_hard=1.0%" in plain(measured)
    assert re.search(r"  very hard +1\.0% \(0%-10%\)", shown(render(measured), 120))
    assert "batch" not in plain(snapshot) and "batch reward" not in shown(render(snapshot))
    evil = replace(snapshot, metrics=({"step": 0, "reward_mean/[/x]\x9b\u202e": 0.5},))
    for text in (shown(render(evil)), printable(plain(evil))):
        assert "[/x]" in text and "\x9b" not in text and "\u202e" not in text


def test_the_plain_line_says_on_how_many_episodes_the_environment_failed(snapshot: RunStatus) -> None:
    parts = {"hard": Evaluation(None, None, None, 32, faults=32), "easy": Evaluation(0.9, 0.8, 1.0, 32)}
    measured = replace(snapshot, heldout=(("before", Evaluation(None, None, None, 64, parts, faults=32)),))
    console = Console(file=io.StringIO(), width=400)
    LiveView(console).show(measured)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "held-out_before=none  held-out_before_faults=32/64  held-out_before_hard=none" in said
    assert "held-out_before_hard_faults=32/32  held-out_before_easy=90.0%  accepted" in said


def test_each_step_of_a_batch_of_new_ones_has_a_line_when_piped(snapshot: RunStatus) -> None:
    console = Console(file=io.StringIO(), width=400)
    view, lines = LiveView(console), tuple({"step": step, "reward_all_mean": step / 10} for step in range(6))
    for known in (lines[:2], lines[:2], lines[:5], lines):
        view.show(replace(snapshot, metrics=known))
    said = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    steps = [line.split("  ")[0].split("/")[0] for line in said if line.startswith("step ")]
    assert steps == ["step 2", "step 3", "step 4", "step 5", "step 6"], "those before the viewer are not news"
    shown = [line for line in said if line.startswith("step ")]
    assert all(f"reward={step / 10:.3f}" in line for step, line in enumerate(shown, 1)), shown


def test_rollouts_on_which_the_environment_failed_are_counted_where_there_are_any(
    snapshot: RunStatus, end: RunEnd
) -> None:
    one, two = {"step": 37, "fault_rollouts": 3}, {"step": 38, "fault_rollouts": 2}
    assert "env_faults=3(+3)" in plain(replace(snapshot, metrics=(one,)))
    assert "env_faults=5(+2)" in plain(replace(snapshot, metrics=(one, two)))
    assert "env_faults=5  " in plain(replace(snapshot, metrics=(one, two, {"step": 39})))
    assert "env faults" in shown(render(replace(snapshot, metrics=(one,)))) and "env_faults" not in plain(snapshot)
    label = end.envs[0].label
    says = f"environment {label} failed on 5 rollouts, which counted in nothing"
    failed = replace(end, summary=end.summary | {"env_faults": 5})
    for said in (plain_end, lambda found: shown(render_end(found))):
        assert says in re.sub(r"\s+", " ", said(failed)) and f"environment {label} failed" not in said(end)
    lowest = replace(failed, envs=tuple(msgspec.structs.replace(env, on_fault="lowest") for env in end.envs))
    assert f"environment {label} failed on 5 rollouts, which have its lowest reward" in plain_end(lowest)
    named = replace(failed, fault="words.py line 7: KeyError: 'x'")
    assert f"{says}. The most frequent error: words.py line 7: KeyError: 'x'" in plain_end(named)


@pytest.mark.parametrize("size", [(80, 24), (80, 40), (120, 40), (50, 24)])
def test_the_share_of_rollouts_that_a_token_limit_ended_is_shown_where_it_is_large(
    snapshot: RunStatus, size: tuple[int, int]
) -> None:
    many = replace(snapshot, metrics=(*snapshot.metrics[:-1], snapshot.metrics[-1] | {"overlong_share": 0.414}))
    few = replace(many, metrics=(*many.metrics, {"step": 37, "overlong_share": 0.1}))
    width, height = size
    assert re.search(r"at token limit +41\.4%", shown(render(many, height), width)), "whatever the room"
    assert "at token limit" not in shown(render(few, height), width)
    assert plain(many).startswith("step 37/90  at_token_limit=41.4%  reward=0.480  ")
    assert "at_token_limit" not in plain(few) + plain(snapshot)


def test_groups_whose_tasks_cannot_begin_are_counted_at_the_end(end: RunEnd) -> None:
    unbegun = replace(end, summary=end.summary | {"unbegun": 9, "unbegun_cause": "task 6 of words cannot begin: no"})
    for said in (plain_end, lambda found: shown(render_end(found))):
        words = re.sub(r"\s+", " ", said(unbegun))
        assert (
            "groups not played, because their tasks cannot begin: 9; the last: task 6 of words cannot begin: no"
            in words
        )
        assert "not played" not in said(end)


def test_solve_rate_and_weight_of_each_environment_are_shown(snapshot: RunStatus) -> None:
    line = {"step": 37, "solve_rate": 0.25, "solve_rate/easy": 0.75, "solve_rate/very hard": None}
    mix = replace(snapshot, metrics=({**line, "draw_weight/easy": 1.0, "draw_weight/very hard": 0.25},))
    assert "solved=25.0%" in plain(mix) and "solved_easy=75.0%×1" in plain(mix)
    assert re.search(r"  easy +75\.0% × 1 ", shown(render(mix), 120))
    later = {"step": 38, "solve_rate/very hard": 0.125, "draw_weight/very hard": 0.1}
    assert "solved_very_hard=12.5%×0.1" in plain(replace(mix, metrics=(*mix.metrics, later)))
    assert "solved" not in plain(snapshot)


def test_only_long_waits_are_reported(snapshot: RunStatus) -> None:
    assert plain_wait(snapshot).startswith("waiting 8 s for workers: 9 of 16 groups")
    brief = replace(snapshot, status=type(snapshot.status)("", "running", 0, 9, 0, {}, 0, 0, "the trainer", 1.0))
    assert plain_wait(brief) == ""
    ended = type(snapshot.status)("", "ended", 9, 9, 0, {}, 0, 0, "nothing: the run has ended", 60.0)
    assert plain_wait(replace(snapshot, status=ended)) == "", "an older host counts on"


def test_a_piped_view_says_the_remedy_of_a_pause_once_and_cuts_nothing(snapshot: RunStatus) -> None:
    waits = f"the host: {FAULTS}words fails on 40 of its newest 400 rollouts: {'no answer ' * 20}"
    view = LiveView(Console(file=(file := io.StringIO()), width=80), wait_line_every_s=0.0)
    status = msgspec.structs.replace(snapshot.status, phase="paused", waiting_for=waits, remedy=FAULT_REMEDY)
    paused = replace(snapshot, status=status)
    for _ in range(3):
        view.show(paused)
    text = file.getvalue()
    assert text.count(FAULT_REMEDY) == 1 and text.count("waiting 8 s for the host: environment faults: words") == 3
    assert text.count("no answer " * 20) == 3 and "…" not in text


def test_lines_about_one_wait_come_ever_less_often_when_piped(
    snapshot: RunStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("shoal.views.terminal.live_view.time.monotonic", lambda: now[0])
    view = LiveView(Console(file=(file := io.StringIO()), width=80))

    def seconds_of_lines(waiting_for: str, seconds: int) -> list[int]:
        began, said = now[0] + 1.0, list[int]()
        status = msgspec.structs.replace(snapshot.status, waiting_for=waiting_for)
        for second in range(seconds):
            now[0], before = began + second, len(file.getvalue())
            view.show(replace(snapshot, status=msgspec.structs.replace(status, waiting_s=8.0 + second)))
            said += [second] * ("waiting" in file.getvalue()[before:])
        return said

    assert seconds_of_lines("workers: 9 of 16 groups", 1700) == [0, 10, 30, 70, 150, 310, 610, 910, 1210, 1510]
    assert seconds_of_lines("validators: 2 submissions to judge", 40) == [0, 10, 30], "another wait is news"


def test_a_line_on_a_terminal_is_broken_at_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    for is_terminal in (False, True):
        console = Console(file=(file := io.StringIO()), width=30, height=25, force_terminal=is_terminal)
        LiveView(console).say("a warning with a long word: unaccompanied")
        assert file.getvalue().splitlines()[0] == "a warning with a long word:" + " unaccompanied" * (not is_terminal)


def test_the_chart_places_values_by_step_and_height() -> None:
    # Four steps of eight columns: two done, so the left half is filled; 0.5 of two lines is one line of full blocks.
    assert chart([0.5, 1.0], total=4, width=8, height=2, low=0.0, high=1.0) == ["  ██    ", "████    "]
    # More steps than columns: means of 0 and 1, and of 1 and 1.
    assert chart([0.0, 1.0, 1.0, 1.0], total=4, width=2, height=1, low=0.0, high=1.0) == ["▄█"]
    assert chart([0.0, 0.0], total=2, width=2, height=1, low=0.0, high=0.0) == ["▁▁"], "of equal values"


def test_last_table_compares_before_and_after_and_names_the_cheater(end: RunEnd) -> None:
    for text in (shown(render_end(end)), plain_end(end)):
        for expected in (
            "29.0%", "71.0%", "cheater-0", "cheating", "sampling 40x", "not sampled with the leased seed", "81,234",
            "100.0%", "crane", "won, score 1.00", "runs/wordle/checkpoints/final",
            "shoal ledger verify runs/wordle",
            "shoal eval runs/wordle --samples 3",
            "Held-out tasks: 29.0% before training, 71.0% after.",
        ):  # fmt: skip
            assert expected in " ".join(text.replace("│", " ").split()), expected


@pytest.mark.parametrize("kind", [{"measure": "reward"}, {"high95": 1.4}])
def test_a_mean_of_rewards_has_no_percent_sign(end: RunEnd, kind: dict[str, object]) -> None:
    both = {when: one | kind for when, one in end.summary["heldout"].items()}
    text = plain_end(replace(end, summary=end.summary | {"heldout": both}))
    assert "held-out before: 0.290 (95 %: 0." in text
    assert "Held-out tasks, mean reward: 0.290 before training, 0.710 after." in text
    whole = shown(render_end(replace(end, summary=end.summary | {"heldout": both})))
    assert "0.290" in whole and "29.0%" not in whole and "71.0%" not in whole


def test_the_end_of_a_run_whose_environment_failed_compares_nothing(end: RunEnd) -> None:
    before, after = (end.summary["heldout"][when] for when in ("before", "after"))
    none = {"mean": None, "low95": None, "high95": None, "episodes": 512, "faults": 512}
    for changed, failed in ((after | {"faults": 200}, "200 of 512"), (none, "512 of 512")):
        text = plain_end(replace(end, summary=end.summary | {"heldout": {"before": before, "after": changed}}))
        assert f"Held-out tasks: no comparison, because {failed} held-out episodes have no score" in text
        assert "before training" not in text
    assert "no mean: none of 512 episodes has a score" in text


def test_the_last_table_says_how_to_host_the_same_run(end: RunEnd) -> None:
    command = [
        "run", "my recipes/a.toml", "--quick", "--random-policy", "--set", "steps=3", "--set", 'envs=[{name="x y"}]',
    ]  # fmt: skip
    typed = recipe_as_typed(parser().parse_args(command))
    ended = replace(end, recipe=typed, run_dir=Path("runs/my run"))
    for text in (shown(render_end(ended), width=200), plain_end(ended)):
        line = next(line for line in text.splitlines() if "shoal host" in line)
        assert shlex.split(line) == ["shoal", "host", *command[1:], "--out", "runs/my run-hosted"]
        assert "Host a run of its own" in text
    for without in (replace(ended, hosted=True), replace(ended, advice=("Change this first: train.lr = 1e-4",))):
        assert all("shoal host" not in text for text in (shown(render_end(without), width=200), plain_end(without)))


@pytest.mark.parametrize("width", [30, 60, 80, 200])
def test_the_commands_at_the_end_are_whole_at_any_width(end: RunEnd, width: int, tmp_path: Path) -> None:
    folder = "/home/me/my experiments/with a long name/and another long name/runs/wordle"
    ended = replace(end, run_dir=Path(folder), recipe="'/home/me/my experiments/recipes/wordle.toml' --set steps=3")
    commands = [
        *(["shoal", name, folder] for name in ("plot", "report", "dashboard")),
        ["shoal", "eval", folder, "--samples", "3"], ["shoal", "ledger", "verify", folder],
        ["shoal", "host", "/home/me/my experiments/recipes/wordle.toml", "--set", "steps=3", "--out", f"{folder}-hosted"],
    ]  # fmt: skip
    for force_terminal in (True, False):
        file = io.StringIO()
        view = LiveView(Console(file=file, width=width, height=24, force_terminal=force_terminal, color_system=None))
        view.close()
        view.end(render_end(ended), plain_end(ended))
        words = file.getvalue().split()
        assert "Everything" not in words and folder.split()[1] in words, "no word is broken"
        lines = [line for line in file.getvalue().splitlines() if line.startswith("  shoal ")]
        assert [shlex.split(line) for line in lines] == commands
    save_picture(render_end(ended), tmp_path / "end.svg", width)
    drawn = html.unescape("".join(re.findall(r">([^<]*)</text>", (tmp_path / "end.svg").read_text()))).replace(
        "\xa0", " "
    )
    assert all(shlex.join(command[:2]) in drawn and command[-1] in drawn for command in commands)
    content = (tmp_path / "end.svg").read_text()
    assert set(re.findall(r"\w+://[^\s\"]+", content)) <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
    box = re.search(r'viewBox="0 0 ([\d.]+) ', content)
    assert box is not None and float(box[1]) > 12 * max(map(len, lines))


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
        for expected in ("71.0%", "41.0%", "17.0%", "93.0%", "49.0%", "easy", "hard"):
            assert expected in text, expected
    assert "held-out after, hard: 49.0%" in plain_end(mix) and "sample 2 (hard, won" in plain_end(mix)
    assert "easy" not in plain_end(end)


def test_a_run_without_a_gain_ends_with_what_to_change(end: RunEnd) -> None:
    said = ("The reward did not rise: 1 then 1.", "- train.lr was 0.0001: set train.lr = 0.0005")
    for text in (shown(render_end(replace(end, advice=said)), 80), plain_end(replace(end, advice=said))):
        assert all(line in text for line in said)
        assert text.rstrip().endswith(said[-1]), "in sight on a small terminal"
    assert "did not rise" not in plain_end(end)


def test_last_table_without_evaluation_says_so(end: RunEnd) -> None:
    bare = replace(end, summary=end.summary | {"heldout": {"before": None, "after": None}}, games=())
    assert "not evaluated" in plain_end(bare)
    assert "before training" in shown(render_end(bare))


def test_a_figure_that_the_newest_step_lacks_is_not_that_of_an_older_one(snapshot: RunStatus) -> None:
    known = {"step": 37, "reward_all_mean": 0.5, "solve_rate": 0.477, "solve_rate/easy": 0.7, "draw_weight/easy": 1.0}
    after = {"step": 38, "reward_all_mean": 0.5}
    for lines, is_known in (((known,), True), ((known, after), False)):
        seen = replace(snapshot, metrics=(*snapshot.metrics, *lines))
        value = next(value for label, value in figures(seen) if label.plain == "solved")
        assert value == ("47.7%" if is_known else "-") and ("solved=" in plain(seen)) == is_known
        assert ("solved_easy=" in plain(seen)) == is_known and ("  easy" in shown(figures_table(seen))) == is_known


def test_two_workers_of_one_name_are_told_apart_in_the_table(snapshot: RunStatus) -> None:
    nodes = tuple(msgspec.structs.replace(node, name="a-machine-with-a-long-name") for node in snapshot.nodes)
    text = shown(render(replace(snapshot, nodes=nodes, cheaters=frozenset())), 80)
    assert "a-machine… (aaaaaaaaaaaa)" in text and "a-machine… (bbbbbbbbbbbb)" in text


def test_names_are_not_read_as_markup(snapshot: RunStatus, end: RunEnd) -> None:
    name = "[/x]\x9b\u202e"
    node = msgspec.structs.replace(next(n for n in snapshot.nodes if n.role == "worker"), name=name, last_reason=name)
    evil = replace(snapshot, name=name, out=name, nodes=(node,))
    credits = {name: {"credits": 0, "role": "honest"}}
    game = Transcript("", ((name, name),), 0.0, None, "done", 9)
    summary, label = end.summary | {"credits": credits, "influence": {name: 0.0}}, "[/x]\x9b"
    envs = (*end.envs, EnvConfig("wordle", label=label))
    figures = end.summary["heldout"]["after"]
    summary["heldout"] = dict.fromkeys(("before", "after"), figures | {"envs": {label: figures}})
    ended = replace(end, snapshot=evil, summary=summary, envs=envs, games=((label, game),), called={node.key: name})
    for text in (shown(render(evil)), shown(render_end(ended)), plain_end(ended)):
        assert "[/x]" in text and "\x9b" not in text and "\u202e" not in text
