"""Hostile texts of strangers in all views of the terminal: they show as text, and neither steer it nor move the frame.

The views of `shoal run`, `host` and `watch`, of `join` and of `validate`, the end of a run, and their lines when piped.
"""

import io
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from shoal.alarms import Alarm
from shoal.config import EnvConfig
from shoal.evaluation_files import Evaluation, Transcript
from shoal.protocol import messages as t
from shoal.roles.coordinator.status import StatusCache
from shoal.roles.node.activity import JudgingStats
from shoal.runs.remote_status import decoded_line
from shoal.runs.run_status import RunStatus, SampleConversation
from shoal.terminal import brief
from shoal.views.terminal.end_screen import RunEnd, plain_end, render_end
from shoal.views.terminal.live_view import LiveView, plain, render
from shoal.views.terminal.node_screen import NodeNow, picture
from shoal.views.terminal.node_screen import plain as plain_node
from tests.roles.testbed import RunTestbed, tiny_run
from tests.views.web.hostile_run import HOSTILE

TEXTS = [
    *HOSTILE, "\u202eevil\u2066\u200f", "\x1b[2J\x07\x9b31m\r\n\x08\x00", "鯨" * 40, "e" + "\u0301" * 500 + "\u20dd",
    "x" * 10_000, "[bold red]boo[/bold red][/x]",
    "❤\ufe0f👩\u200d💻" * 9, "a\nrun has ended", "\u2028two\u2029lines", "\t" * 30, "",
]  # fmt: skip


def shown(part: RenderableType, width: int = 80) -> list[str]:
    """The lines that a terminal is sent. A text that cannot be encoded fails, as it would there."""
    sent = io.BytesIO()
    file = io.TextIOWrapper(sent, encoding="utf-8", newline="")
    Console(file=file, width=width, height=24, force_terminal=True, color_system=None).print(part)
    file.flush()
    return sent.getvalue().decode().removesuffix("\n").split("\n")


def said_by_strangers(snapshot: RunStatus, evil: str) -> RunStatus:
    """The run, with one text in each place where a worker, a host, a policy or somebody else's folder may say one."""
    bad = msgspec.structs.replace(
        snapshot.nodes[0], name=evil, standing=evil, role="worker", reasons={evil: 3}, last_reason=evil
    )
    status = msgspec.structs.replace(snapshot.status, name=evil, waiting_for=evil, phase=evil, pause_cause=evil)
    figures = {f"{name}/{evil}"[:100]: 0.5 for name in ("reward_mean", "solve_rate", "draw_weight")}
    line = {"step": 37, **figures, "staleness_rollouts": {"0": 1}}
    found = Evaluation(0.5, 0.4, 0.6, 9, envs={evil: Evaluation(0.5, 0.4, 0.6, 9)})
    return replace(
        snapshot, name=evil, out=evil, hint=evil, status=status, nodes=(bad, *snapshot.nodes),
        metrics=(*snapshot.metrics, line), heldout=((evil, found),),
        sample=SampleConversation(evil, (("assistant", evil), (evil, f"{evil}\n{evil}"))),
        alarms=[Alarm(evil, "critical", 3, 4, evil, evil)],
    )  # fmt: skip


def assert_framed(lines: list[str], width: int, height: int) -> None:
    assert "".join(lines).isprintable() and len(lines) <= height
    assert {cell_len(line) for line in lines} == {width}, "the frame is straight"
    assert all(line[0] in "╭│╰" and line[-1] in "╮│╯" for line in lines)


def begins(text: str) -> str:
    """How a reader sees it: the first letters, escaped."""
    return brief(text, 28)[:6].rstrip()


@pytest.mark.parametrize("place", range(len(TEXTS)))
@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 40), (40, 12)])
def test_a_text_stays_text_in_the_view_of_a_run(snapshot: RunStatus, place: int, width: int, height: int) -> None:
    evil = TEXTS[place]
    seen = said_by_strangers(snapshot, evil)
    assert_framed(shown(render(seen, height, said=[evil], talks=True), width), width, height)
    lines = shown(render(seen, height, said=[evil]), width)
    assert_framed(lines, width, height)
    text = "\n".join(lines)
    assert "\u0301" * 3 not in text and "\ufe0f" not in text
    if width >= 80:
        assert "sampling 40x" in text and "step 38/90" in text, "what others are refused for is still there"
        assert begins(evil) in text


def test_a_run_full_of_hostile_workers_shows_each_of_them_as_text(snapshot: RunStatus) -> None:
    nodes = tuple(
        msgspec.structs.replace(snapshot.nodes[0], key=f"{i:064x}", name=evil, reasons={evil: 99 - i}, last_reason=evil)
        for i, evil in enumerate(TEXTS)
    )
    lines = shown(render(replace(snapshot, nodes=nodes), 70))
    assert_framed(lines, 80, 70)
    text = "\n".join(lines)
    for evil in TEXTS:
        assert begins(evil) in text, evil


@pytest.mark.parametrize("evil", TEXTS)
def test_a_text_makes_one_line_when_the_view_is_piped(snapshot: RunStatus, evil: str) -> None:
    seen = said_by_strangers(snapshot, evil)
    for line in (plain(seen), plain_node(NodeNow("worker", seen, words=evil, node=seen.nodes[0]))):
        assert line.isprintable()
    sent = io.BytesIO()
    file = io.TextIOWrapper(sent, encoding="utf-8", newline="")
    view = LiveView(Console(file=file, width=80))
    view.show(seen)
    view.show(replace(seen, notice=evil))
    file.flush()
    assert len(sent.getvalue().decode().splitlines()) <= 2


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> t.RunInfo:
    return StatusCache(RunTestbed(tmp_path_factory.mktemp("town") / "run", tiny_run()).coordinator).info()


@pytest.mark.parametrize("evil", TEXTS)
@pytest.mark.parametrize("role", ["worker", "validator"])
def test_a_text_stays_text_in_the_view_of_a_node(snapshot: RunStatus, info: t.RunInfo, role: str, evil: str) -> None:
    seen = replace(said_by_strangers(snapshot, evil), url=evil)
    envs = tuple(msgspec.structs.replace(env, name=evil) for env in info.envs)
    judged = JudgingStats(3, 2, 0, 1, last_reason=evil)
    judged.refused[evil] = 1
    now = NodeNow(
        role, seen, f"waiting: {evil}", 3.0, seen.nodes[0].key, evil, msgspec.structs.replace(info, envs=envs),
        seen.nodes[0], judged=judged,
    )  # fmt: skip
    for height in (12, 40):
        lines = shown(picture(now, 80, height, (evil, "a line of the log")))
        assert_framed(lines, 80, height)
        assert height < 24 or begins(evil) in "\n".join(lines)
    assert plain_node(now).isprintable()


@pytest.mark.parametrize("evil", TEXTS)
def test_a_text_stays_text_at_the_end_of_a_run(end: RunEnd, evil: str, tmp_path: Path) -> None:
    found = {
        "mean": 0.5,
        "low95": 0.4,
        "high95": 0.6,
        "episodes": 9,
        "envs": {},
        "parts": {evil: 0.5},
        "metrics": {evil: 1.0},
    }
    found["envs"] = {evil: dict(found)}
    nodes = tuple(
        msgspec.structs.replace(n, name=evil, reasons={evil: 3}, last_reason=evil) for n in end.snapshot.nodes[:1]
    )
    summary = end.summary | {
        "heldout": {"before": found, "after": found}, "staleness": {"0": 3},
        "credits": {evil: {"credits": 1, "role": "honest"}}, "influence": {evil: 1.0},
    }  # fmt: skip
    game = Transcript("", (("assistant", evil), (evil, evil)), 0.5, None, "done", 9)
    over = replace(
        end, summary=summary, snapshot=replace(end.snapshot, name=evil, nodes=nodes), games=((evil, game),),
        envs=(EnvConfig("wordle"), EnvConfig("arithmetic")),
    )  # fmt: skip
    assert "".join(shown(render_end(over), 200)).isprintable()
    assert plain_end(over).replace("\n", "").isprintable()


def test_labels_in_the_metrics_of_a_url_are_kept_as_names_and_shown_as_text(snapshot: RunStatus) -> None:
    lines = [
        kept for i, evil in enumerate(TEXTS)
        if (kept := decoded_line(json.dumps({"step": 40 + i, f"reward_mean/{evil}"[:100]: 0.5}).encode())) is not None
    ]  # fmt: skip
    assert len(lines) > 9
    for line in [*lines, *({"step": 99, f"reward_mean/{evil}": 0.5} for evil in TEXTS)]:
        assert plain(replace(snapshot, metrics=(*snapshot.metrics, line))).isprintable()
    seen = replace(snapshot, metrics=(*snapshot.metrics, *lines))
    assert_framed(shown(render(seen, 40), 140), 140, 40)
