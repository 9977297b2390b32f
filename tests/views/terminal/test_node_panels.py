"""What `shoal join` and `shoal validate` show of a node and its run, at several sizes and as a line."""

import asyncio
import io
import logging
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from shoal.alarms import Alarm
from shoal.ledger.members import ASKED_BY_HOST
from shoal.net.client import Client, PeerRefused, Timing
from shoal.protocol import messages as t
from shoal.roles.coordinator.status import StatusCache
from shoal.roles.node.activity import JudgingStats, NodeActivity
from shoal.roles.node.throttle import Allowance, Hours
from shoal.runs.remote_status import RemoteRun
from shoal.runs.run_status import RunStatus
from shoal.views.terminal.node_screen import NodeNow, at, next_vesting, picture, plain
from shoal.views.terminal.node_view import NodeView, _draw, _on_screen, limits_of, shown
from tests.roles.testbed import RunTestbed, tiny_run
from tests.views.terminal.test_watch_command import Presses, host_of, told

ME = "bb" * 32


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> t.RunInfo:
    return StatusCache(RunTestbed(tmp_path_factory.mktemp("town") / "run", tiny_run()).coordinator).info()


@pytest.fixture
def worker(snapshot: RunStatus, info: t.RunInfo) -> NodeNow:
    refused = {"commit": 1, "sampling": 3}
    me = t.NodeState(
        ME, "worker", "worker-0", "good", 81234, 611, 4, 1, refused, "sampling: gap 2.3 (limit 0.1)", vested=70000
    )
    rival = msgspec.structs.replace(me, key="dd" * 32, name="rival", credits=100_000)
    run = replace(snapshot, nodes=(*snapshot.nodes, rival), url="http://host:8470")
    return NodeNow(
        "worker", run, "filling a lease of 4 groups, version 37", 12.0, ME, "worker-0", info, me, 85.4, 1234, 9000,
        up_s=12_000.0, accepted_before=11, limits="--hours 22-7",
    )  # fmt: skip


def lines_of(now: NodeNow, width: int, height: int, log: tuple[str, ...] = ()) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(picture(now, width, height, log))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_title_keeps_the_nodes_key_beside_a_long_name_of_the_run(worker: NodeNow) -> None:
    named = replace(worker, snapshot=replace(worker.snapshot, name="a-long-name-of-a-run-" * 3), name="m" * 30)
    for width in (80, 100, 120):
        title = lines_of(named, width, 24)[0]
        assert f"{ME[:12]} ─" in title and "working for a-long-n" in title, title


def text_of(now: NodeNow) -> str:
    return "\n".join(lines_of(now, 120, 30))


def test_a_worker_sees_the_run_it_helps_and_its_own_figures(worker: NodeNow) -> None:
    for said in (
        "working for wordle", "filling a lease of 4 groups, version 37", "trains a policy on arithmetic", "step 37/90",
        "reward 0.480", ": 0.347 to 0.438, means of", "accepted 611 groups", "4 refused (sampling 3x, commit 1x)",
        "credits 81,234 (70,000 vested)", "rank 2 of 3", "44.8% of all credits",
        "last refusal: sampling: gap 2.3", "85 tokens/s", "memory 1,234 MB", "GPU 9,000 MB", "up 3h20m", "--hours 22-7",
        "p pauses", "about 1m46s of steps left",
    ):  # fmt: skip
        assert said in text_of(worker), said
    line = plain(worker)
    assert "\n" not in line and "run=wordle running step=37/90" in line and "rank 2 of 3" in line


def test_a_quarantine_by_the_host_is_no_refusal(worker: NodeNow) -> None:
    node = msgspec.structs.replace(worker.node, refused=0, reasons={}, last_reason=ASKED_BY_HOST)
    text = text_of(replace(worker, node=node))
    assert "0 refused" in text and "last refusal" not in text and "last quarantine: the host asked for it" in text


@pytest.mark.parametrize("role", ["worker", "validator"])
def test_figures_of_a_host_that_is_gone_are_said_to_be_of_then(worker: NodeNow, role: str) -> None:
    words = "waiting: nothing is for this validator to judge now"
    now = replace(worker, role=role, unheard_s=73.0, seen_s=184.0, words=words)
    said = "the host has not answered for 1m13s; the run 3m04s ago:"
    text, line = "\n".join(lines_of(now, 80, 24)), plain(now)
    assert said in text and said in line[:80] and "running" not in line and "left=" not in line
    assert all("waiting for the host" in one and "nothing is for" not in one for one in (text, line))
    assert at(replace(now, words="sending a verdict")) == "waiting for the host"
    assert at(replace(now, words="judging a submission of 16 groups")).startswith("judging")


def test_a_host_is_silent_from_its_last_answer_to_the_node_and_not_to_its_view(
    snapshot: RunStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("shoal.views.terminal.node_view.time", SimpleNamespace(monotonic=lambda: now[0]))
    answers = [httpx.MockTransport(host_of(snapshot))]

    async def scenario() -> NodeNow:
        client = Client("http://host", transport=answers[0], timing=Timing(monotonic=lambda: now[0]))
        refuses = httpx.MockTransport(lambda request: told({"error": "enough groups", "code": "not_yours"}, 403))
        node = Client("http://host", transport=refuses, timing=Timing(monotonic=lambda: now[0]))
        view = NodeView("worker", "http://host", NodeActivity(answered_at=lambda: node.answered_at))
        await view.look(RemoteRun(client, lambda: now[0]))
        now[0] += 147.0
        with pytest.raises(PeerRefused):
            await node.get("/v1/leases", cap=1000)
        now[0] += 37.0
        return view.now()

    seen = asyncio.run(scenario())
    assert (seen.unheard_s, seen.seen_s) == (37.0, 184.0)


@pytest.mark.parametrize(("width", "height"), [(40, 12), (60, 20), (80, 24), (140, 40)])
def test_the_workers_picture_fits_every_terminal(worker: NodeNow, width: int, height: int) -> None:
    lines = lines_of(worker, width, height, tuple(f"line {i} of the log" for i in range(50)))
    assert len(lines) == height and {cell_len(line) for line in lines} == {width}
    assert "filling a lease" in lines[1]
    if width >= 80:
        assert any("611 groups" in line for line in lines) and any("line 49 of the log" in line for line in lines)


def test_alarms_take_lines_of_the_log_and_none_of_the_frame(worker: NodeNow) -> None:
    alarms = [Alarm(cause, "warning", 30, 37, f"{cause} is wrong", "") for cause in ("drift", "clipping", "disk")]
    lines = lines_of(replace(worker, snapshot=replace(worker.snapshot, alarms=alarms)), 80, 24, ("older", "newest"))
    assert len(lines) == 24 and any("disk is wrong" in line for line in lines)
    assert any("newest" in line for line in lines) and any("waiting 8 s for workers" in line for line in lines)


def test_states_are_said_in_words(worker: NodeNow) -> None:
    paused = replace(worker, words="waiting: paused by you: no lease is taken until you resume", paused=True)
    assert "paused by you: no lease is taken" in text_of(paused) and "p resumes" in text_of(paused)
    night = Allowance(Hours.parse("22-7"), cpu_share=0.5)
    assert limits_of(night) == "--hours 22-7 --cpu-share 0.5" and limits_of(Allowance()) == limits_of(None) == ""


def test_time_to_the_first_vesting_follows_the_pace_of_this_session(worker: NodeNow) -> None:
    assert worker.node is not None and worker.info is not None
    window = 40 * worker.info.rules.block_groups
    young = msgspec.structs.replace(worker.node, vested=0, accepted=window - 30)
    fast = replace(worker, node=young, accepted_before=window - 40, up_s=100.0)
    assert next_vesting(fast) == "the first pay vests after 30 more accepted groups, in about 5m00s"
    assert "in about" not in next_vesting(replace(fast, accepted_before=young.accepted))
    assert next_vesting(worker).startswith("each further accepted group")
    assert next_vesting(replace(worker, node=msgspec.structs.replace(worker.node, vested=81234))) == ""


def test_the_key_stays_in_sight_and_a_long_state_keeps_for_how_long_it_has_been_so(worker: NodeNow) -> None:
    resting = "waiting: outside --hours 2-3: leases are taken again at 02:00 tomorrow, and until then it asks for none"
    lines = lines_of(replace(worker, words=resting, words_s=65.0), 80, 24)
    assert "worker-0 bbbbbbbbbbbb" in lines[0] and all(cell_len(line) == 80 for line in lines)
    assert "● outside --hours 2-3" in lines[1] and "1m05s" in lines[1]


# --- validators ---


def verdict_of(*outcomes: str) -> tuple[t.GroupVerdict, ...]:
    return tuple(
        t.GroupVerdict(slot, slot == 0, "soft" if check else "accept", check)  # type: ignore[arg-type]
        for slot, check in enumerate(outcomes)
    )


def test_a_validator_sees_what_it_judged(worker: NodeNow) -> None:
    judged = JudgingStats()
    judged.add(t.Verdict("s1", verdict_of("", "sampling")), 2.0)
    judged.add(t.Verdict("s2", verdict_of("", "")), 1.0)
    now = replace(worker, role="validator", judged=judged, node=None)
    for said in (
        "judging for wordle", "judged 2 submissions · 1.5 s each: 3 groups accepted, 1 refused (sampling 1x)",
        "audited with the model: 50% of the groups", "2 submissions wait to be judged",
    ):  # fmt: skip
        assert said in text_of(now), said


def test_a_wait_goes_on_where_only_its_numbers_change() -> None:
    now = [0.0]
    doing = NodeActivity(clock=lambda: now[0])
    for when, words, since in (
        (1.0, "fetching version 1", 1.0),
        (2.0, "fetching version 2", 2.0),
        (3.0, "waiting: the last 8 groups have no signal", 3.0),
        (4.0, "waiting: the last 9 groups have no signal", 3.0),
        (5.0, "waiting: the run has ended", 5.0),
    ):
        now[0] = when
        doing.now(words)
        assert (doing.words, doing.since) == (words, since)


# --- the thread ---


def test_piped_the_view_logs_and_ends_with_the_role(caplog: pytest.LogCaptureFixture, info: t.RunInfo) -> None:
    doing, before = NodeActivity(), threading.active_count()
    with (
        caplog.at_level(logging.INFO),
        shown(NodeView("worker", "http://127.0.0.1:9", doing), Console(file=io.StringIO())),
    ):
        doing.info = info
    deadline = time.monotonic() + 5.0
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_p_pauses_and_a_stop_gives_the_terminal_back_at_once(snapshot: RunStatus) -> None:
    presses = iter(["", "p", ""])
    left = [3]

    def stopping() -> bool:
        left[0] -= 1
        return left[0] < 0

    doing, allowance = NodeActivity(stopping=stopping), Allowance()
    view = NodeView("worker", "http://host", doing, allowance)
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24, _environ={"TERM": "xterm"})
    client = Client("http://host", transport=httpx.MockTransport(host_of(snapshot)))

    async def scenario() -> None:
        with _on_screen(console) as (live, lines):
            logging.getLogger("worker").warning("a line of the log")
            await _draw(view, RemoteRun(client), live, lines, Presses(presses), threading.Event())

    asyncio.run(scenario())
    assert allowance.paused and view.snapshot.status.phase == "running"
    shown_text = console.file.getvalue()  # type: ignore[attr-defined]
    picture_text, after = shown_text.split("\x1b[?1049l")
    assert "p resumes" in picture_text and "a line of the log" in after


def test_a_host_that_stops_answering_is_silent_from_its_last_answer(
    snapshot: RunStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, now = [True], [1000.0]
    monkeypatch.setattr("shoal.views.terminal.node_view.time", SimpleNamespace(monotonic=lambda: now[0]))

    def host(request: httpx.Request) -> httpx.Response:
        return host_of(snapshot)(request) if answers[0] else told({"error": "gone", "code": "no_run"}, 404)

    async def scenario() -> list[float]:
        client = Client("http://host", transport=httpx.MockTransport(host))
        view, run = NodeView("worker", "http://host", NodeActivity()), RemoteRun(client, lambda: now[0])
        found = list[float]()
        for answers[0], now[0] in ((True, 1000.0), (False, 1010.0), (False, 1060.0), (True, 1070.0)):
            await view.look(run)
            found.append(view.now().unheard_s)
        return found

    assert asyncio.run(scenario()) == [0.0, 0.0, 60.0, 0.0]
