"""`shoal watch`: what it sees of a run, that it leaves the run alone, and what a hostile host can do to it."""

import asyncio
import contextlib
import fcntl
import io
import json
import os
import pty
import re
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from shoal.alarms import Alarm, AlarmsLog
from shoal.errors import EXIT_DONE, EXIT_NO, EXIT_USER_ERROR, PeerError, StateError
from shoal.launch.run_lock import locked
from shoal.ledger.event_types import make_entry
from shoal.ledger.fault_rate import FAULT_REMEDY, FAULTS
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.run_events import RulesChanged
from shoal.net.client import Client, Timing
from shoal.net.safe_http import SHOAL
from shoal.protocol.constants import MAX_NODES, MAX_STANDING_ALARMS
from shoal.protocol.messages import NodeState, StandingAlarm, Status
from shoal.run_folder import RunFolder
from shoal.runs.remote_status import PAGES_AT_ONCE, RemoteRun, cleaned_node, cleaned_status, decoded_line
from shoal.runs.rollout_samples import NewestSample, Samples
from shoal.runs.run_reader import open_run
from shoal.runs.run_status import RunStatus, SampleConversation
from shoal.step_metrics import MAX_NUMBER
from shoal.views.terminal.keyboard import Keyboard
from shoal.views.terminal.live_view import LiveView, plain, render
from shoal.views.terminal.watch_command import FolderWatch, _Log, follow, watch
from tests.roles.testbed import RunTestbed, tiny_run
from tests.runs.test_run_reader import append

Host = Callable[[httpx.Request], httpx.Response]


def told(body: bytes | object, status: int = 200) -> httpx.Response:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return httpx.Response(status, stream=httpx.ByteStream(content), headers={SHOAL: "1"})


def remote(host: Host, monotonic: Callable[[], float] = lambda: 0.0, nodes_every_s: float = 0.0) -> RemoteRun:
    async def no_pause(_: float) -> None:
        pass

    return RemoteRun(
        Client("http://host", transport=httpx.MockTransport(host), timing=Timing(sleep=no_pause)),
        monotonic,
        nodes_every_s=nodes_every_s,
    )


def looked(run: RemoteRun, times: int = 1) -> RunStatus:
    async def looks() -> RunStatus:
        for _ in range(times):
            snapshot = await run.look()
        return snapshot

    return asyncio.run(looks())


def terminal(**options: Any) -> Console:
    return Console(file=io.StringIO(), **{"width": 80, **options})


def text_of(console: Console) -> str:
    """What the terminal was sent."""
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def watched(root: Path, **options: Any) -> tuple[int, str]:
    """The exit code of one look at a folder, and what it says, in one line."""
    code = watch(str(root), console := terminal(**options), once=True)
    return code, re.sub(r"[\s│]+", " ", text_of(console))


def host_of(snapshot: RunStatus, lines: bytes = b"") -> Host:
    def answer(request: httpx.Request) -> httpx.Response:
        path, after = request.url.path, request.url.params.get("after", "-1")
        if path == "/v1/status":
            return told(snapshot.status)
        if path == "/v1/nodes":
            return told(snapshot.nodes)
        if path == "/v1/metrics":
            new = [line for line in lines.splitlines() if json.loads(line)["step"] > int(after)]
            return told(b"".join(line + b"\n" for line in new[:20]))
        return told({"error": "no such call", "code": "no_such_call"}, 404)

    return answer


def test_from_a_url_anyone_sees_status_workers_and_figures(snapshot: RunStatus) -> None:
    metrics = tuple({**line, "time_s": 2.0 * line["step"], "fault_rollouts": 3} for line in snapshot.metrics)
    snapshot = replace(snapshot, metrics=metrics)
    lines = b"".join(msgspec.json.encode(line) + b"\n" for line in snapshot.metrics)
    seen = looked(remote(host_of(snapshot, lines)))
    assert seen.metrics == snapshot.metrics and seen.nodes == snapshot.nodes and seen.status == snapshot.status
    assert seen.sample is None
    assert "env_faults=111" in plain(seen)
    assert "steps_took=1m14s" in plain(seen) and "elapsed" not in plain(seen), "nobody else knows when it began"
    (console := terminal(color_system=None)).print(render(seen))
    text = text_of(console)
    for point in ("step 37/90", "sampling 40x", "quarantined", "0.48", "waiting 8 s for workers"):
        assert point in text, point


def test_a_host_that_goes_away_leaves_what_was_seen_and_one_that_never_answered_is_an_error(
    snapshot: RunStatus,
) -> None:
    away = [False]

    def answer(request: httpx.Request) -> httpx.Response:
        if away[0]:
            return told(b"{" * 10)
        return host_of(snapshot)(request)

    run = remote(answer)
    looked(run)
    away[0] = True
    seen = looked(run)
    assert seen.status == snapshot.status and "answer of the wrong form" in seen.notice
    with pytest.raises(PeerError):
        looked(remote(answer))


def test_a_host_that_refuses_once_is_asked_again(snapshot: RunStatus) -> None:
    lines = b"".join(msgspec.json.encode(line) + b"\n" for line in snapshot.metrics)
    refusals = [(403, "too_many"), (404, "unknown")]

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/metrics" and refusals:
            status, code = refusals.pop(0)
            return told({"error": "not now", "code": code}, status)
        return host_of(snapshot, lines)(request)

    run = remote(answer)
    seen = looked(run)
    assert seen.metrics == () and "not now" in seen.notice and seen.nodes == snapshot.nodes
    assert looked(run).notice == "" and looked(run).metrics == snapshot.metrics


def test_figures_of_a_host_fill_no_memory(snapshot: RunStatus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.runs.remote_status.MOST_VALUES", 500)
    monkeypatch.setattr("shoal.runs.remote_status.MOST_NAMES", 30)
    labels = {f"solve_rate/{i}": 0.5 for i in range(100)} | {f"env_metric/{i}": 1.0 for i in range(50)}
    lines = b"".join(msgspec.json.encode({"step": i, "loss": 1.0} | labels) + b"\n" for i in range(100))
    seen = looked(remote(host_of(snapshot, lines)), times=3)
    assert seen.step == 100 and sum(len(line) for line in seen.metrics) <= 500
    names = {name for line in seen.metrics for name in line}
    assert 10 < len(names) < 30 and not any(name.startswith("env_metric") for name in names)


def test_a_host_that_goes_away_after_the_end_is_no_trouble(snapshot: RunStatus) -> None:
    status = msgspec.structs.replace(snapshot.status, phase="ended")
    ended, away = replace(snapshot, status=status), [False]

    def answer(request: httpx.Request) -> httpx.Response:
        return told(b"{") if away[0] else host_of(ended)(request)

    run = remote(answer)
    looked(run)
    away[0] = True
    assert looked(run).notice == "the run has ended, and its host no longer answers"


def test_only_finite_figures_of_known_names_are_kept_of_a_line() -> None:
    evil = {
        "step": 3, "reward_all_mean": 1e30, "entropy_nats": "\x1b[2J", "loss": 0.5, "solve_rate/\u202e": 0.25,
        "solve_rate/" + "x" * 999: 1.0, "unknown": 1, "waiting_for": "x" * 9999, "clip_share": True,
        "staleness_rollouts": {"0": 5, "x": 1, "9" * 50: 1, "1": -4, "2": 1e300},
    }  # fmt: skip
    kept = decoded_line(msgspec.json.encode(evil))
    assert kept == {"step": 3, "loss": 0.5, "staleness_rollouts": {"0": 5}}


def test_metrics_of_a_hostile_host_neither_go_back_nor_go_on_for_ever(snapshot: RunStatus) -> None:
    asked: list[str] = []

    def endless(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/v1/metrics":
            return host_of(snapshot)(request)
        asked.append(request.url.params["after"])
        return told(b'{"step": %d, "reward_all_mean": 1}\n{"step": 0, "reward_all_mean": 2}\n' % len(asked))

    seen = looked(remote(endless))
    assert len(asked) == PAGES_AT_ONCE and [line["step"] for line in seen.metrics] == list(range(PAGES_AT_ONCE + 1))
    assert seen.series("reward_all_mean") == [2.0] + [1.0] * PAGES_AT_ONCE


def test_alarms_of_a_url_are_shown_by_their_cause_and_too_many_are_refused(snapshot: RunStatus) -> None:
    def host(alarms: int) -> Host:
        standing = tuple(StandingAlarm("drift", "critical", step) for step in range(alarms))
        status = msgspec.structs.replace(snapshot.status, alarms=standing)
        return host_of(replace(snapshot, status=status))

    seen = looked(remote(host(1)))
    assert [(one.cause, one.since) for one in seen.alarms] == [("drift", 0)]
    assert seen.alarms[0].summary.startswith("The policy that samples")
    with pytest.raises(PeerError):
        looked(remote(host(MAX_STANDING_ALARMS + 1)))


def test_too_many_keys_that_never_joined_are_refused(snapshot: RunStatus) -> None:
    def host(keys: int) -> Host:
        unjoined = tuple(f"{i:064x}" for i in range(keys))
        return host_of(replace(snapshot, status=msgspec.structs.replace(snapshot.status, unjoined=unjoined)))

    assert len(looked(remote(host(MAX_NODES))).status.unjoined) == MAX_NODES
    with pytest.raises(PeerError):
        looked(remote(host(MAX_NODES + 1)))


def test_a_list_of_nodes_without_end_is_left_when_nothing_new_comes(snapshot: RunStatus) -> None:
    asked: list[str] = []
    page = [msgspec.structs.replace(snapshot.nodes[0], key=f"{i:064x}", name="n") for i in range(MAX_NODES)]

    def endless(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/v1/nodes":
            return host_of(snapshot)(request)
        asked.append(request.url.params.get("after", ""))
        return told(page)

    assert len(looked(remote(endless)).nodes) == MAX_NODES and len(asked) == 2


def test_texts_and_numbers_of_a_hostile_host_are_cut() -> None:
    huge = 10**300
    status = cleaned_status(
        Status("n" * 9999, "p" * 9999, huge, huge, huge, {f"{i}" * 200: i for i in range(999)}, huge, -huge, "w" * 99_999,
               1e300)
    )  # fmt: skip
    node = cleaned_node(
        NodeState("k" * 999, "r" * 999, "n" * 9999, "good", huge, huge, -5, 0, {f"{i}" * 300: i for i in range(99)},
                  "l" * 99_999, influence=1e300)
    )  # fmt: skip
    assert len(msgspec.json.encode(status)) < 6000 and len(msgspec.json.encode(node)) < 5000
    assert (
        status.version == status.steps == MAX_NUMBER and status.waiting_s == 0.0 and max(status.refused.values()) == 998
    )
    assert node.credits == MAX_NUMBER and node.refused == 0 and node.influence == 0.0
    snapshot = RunStatus("x", "x", status.steps, status=status, nodes=(node,))
    (console := terminal(height=24, color_system=None)).print(render(snapshot, 24))
    assert {cell_len(line) for line in text_of(console).splitlines()} == {80}
    assert plain(snapshot)


# --- the folder ---


@pytest.mark.parametrize("cause", [f"{FAULTS}words fails on 4 of its newest 9 rollouts: KeyError", ""])
def test_a_paused_run_that_nobody_hosts_says_both_and_why(tmp_path: Path, cause: str) -> None:
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    with open_run(testbed.folder.root) as run:
        run.catch_up()
        entry = make_entry(run.state.seq + 1, run.state.time, RulesChanged(phase="paused", cause=cause), run.state.head)
    append(testbed.folder.root, [entry])
    _, shown = watched(testbed.folder.root, height=24, force_terminal=True, color_system=None)
    assert "nobody hosts this run now" in shown and "It is paused" in shown and cause in shown
    assert ("Start its host again" in shown) == (FAULT_REMEDY in shown) == bool(cause)


@pytest.mark.parametrize("remedy", ["Start more workers", ""])
def test_a_look_at_a_run_says_each_alarm_that_stands(tmp_path: Path, remedy: str) -> None:
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    starved = Alarm("starved", "warning", 3, 3, "workers: w1 silent", remedy)
    for alarm in (starved, msgspec.structs.replace(starved, cause="disk", severity="critical")):
        AlarmsLog(testbed.folder.alarms).write("raised", alarm, 0.0)
    watch(str(testbed.folder.root), console := terminal(), once=True)
    lines = [line for line in text_of(console).splitlines() if line.startswith("ALARM")]
    assert [line.split()[1] for line in lines] == ["starved", "disk"]
    assert lines[1].endswith(f"silent. {remedy}" if remedy else "silent")


def test_a_look_at_a_paused_run_says_why_and_what_to_do_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    cause = f"{FAULTS}words fails on 4 of its newest 9 rollouts: KeyError"
    seen = asyncio.run(FolderWatch(testbed.folder.root).look())
    status = msgspec.structs.replace(
        seen.status,
        phase="paused",
        pause_cause=cause,
        waiting_for=f"the host: {cause}",
        remedy=FAULT_REMEDY,
        waiting_s=2.0,
    )
    paused = replace(seen, status=status, notice="")

    async def look(self: FolderWatch) -> RunStatus:
        return paused

    monkeypatch.setattr(FolderWatch, "look", look)
    assert f"paused for 2s, and waits for the host: {cause}. {FAULT_REMEDY}" in watched(testbed.folder.root)[1]


def test_a_folder_that_nobody_hosts_is_shown_and_left_as_it_was(tmp_path: Path) -> None:
    testbed = RunTestbed(tmp_path / "run", tiny_run())  # kept, so that its store is not closed meanwhile

    def files() -> dict[str, tuple[int, float]]:
        return {str(p): (p.stat().st_size, p.stat().st_mtime) for p in (tmp_path / "run").rglob("*") if p.is_file()}

    before = files()
    seen = asyncio.run(FolderWatch(tmp_path / "run").look())
    assert seen.status.phase == "not hosted" and "nobody hosts this run" in seen.notice and seen.steps == 3
    assert "step 0/3" in watched(tmp_path / "run")[1]
    assert files() == before and testbed


def test_of_a_folder_that_nobody_hosts_the_log_says_who_did_what_and_the_last_conversation_is_shown(
    tmp_path: Path,
) -> None:
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1, storage={"retain": "all"}))
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("honest")))
    watched = FolderWatch(testbed.folder.root)
    seen = asyncio.run(watched.look())
    assert [(node.name, node.accepted > 0) for node in seen.nodes if node.role == "worker"] == [("honest", True)]
    assert seen.status.version >= 0 and seen.status.accepted > 0
    assert watched._samples._thread is not None
    watched._samples._thread.join()
    assert (talk := asyncio.run(watched.look()).sample) is not None and "ended by" in talk.title


def test_a_host_whose_coordinator_does_not_answer_is_said_to_be_silent(tmp_path: Path) -> None:
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    with socket.socket() as mute, locked(testbed.folder.root):
        mute.bind(("127.0.0.1", 0))
        port = mute.getsockname()[1]
        testbed.folder.address.write_text(json.dumps({"url": "", "port": port, "pid": os.getpid()}))
        seen = asyncio.run(FolderWatch(testbed.folder.root).look())
        _, said = watched(testbed.folder.root)
        assert "the coordinator does not answer" in said and "coordinator.log" in said and "nobody hosts" not in said
        assert seen.status.phase == "silent", "a piped watch goes on"
        testbed.folder.address.unlink()
        assert "is starting the coordinator" in asyncio.run(FolderWatch(testbed.folder.root).look()).notice
    assert "nobody hosts" in asyncio.run(FolderWatch(testbed.folder.root).look()).notice


@pytest.mark.parametrize("once", [True, False])
def test_a_broken_log_is_told_and_is_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, once: bool) -> None:
    folder, read = RunTestbed(tmp_path / "run", tiny_run()).folder, _Log._read
    with contextlib.closing(sqlite3.connect(folder.log)) as log:
        log.execute("UPDATE events SET hash = ?", ("0" * 64,))
        log.commit()

    def slow(log: _Log, root: Path) -> None:
        time.sleep(0.3)
        read(log, root)

    monkeypatch.setattr(_Log, "_read", slow)
    monkeypatch.setattr("shoal.views.terminal.watch_command.LOG_WAIT_S", 0.0)
    console = terminal()
    assert watch(str(folder.root), console, once=once) == EXIT_NO
    said = text_of(console)
    assert "Its log cannot be read: the log is broken at event 0" in said and "accepted=" not in said
    monkeypatch.undo()
    _, shown = watched(folder.root, height=24, force_terminal=True, color_system=None)
    assert "It was edited or damaged; restore it from a copy. Nobody hosts this run now" in shown
    assert not any(text in shown for text in ("policy v", "no worker has joined", "in flight"))


def test_a_log_that_ends_before_the_trainers_state_is_told(tmp_path: Path) -> None:
    folder = RunTestbed(tmp_path / "run", tiny_run()).folder
    for version, code in ((0, EXIT_DONE), (7, EXIT_NO)):
        (folder.trainer / f"v{version:06d}").mkdir(parents=True)
        found, said = watched(folder.root)
        assert found == code
        assert ("has reached version 7, and log.sqlite has no version" in said) == (code == EXIT_NO)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_log_that_was_deleted_is_told_and_not_made_again(tmp_path: Path, is_terminal: bool) -> None:
    folder = RunTestbed(tmp_path / "run", tiny_run()).folder
    folder.trainer.mkdir()
    for file in folder.root.glob("log.sqlite*"):
        file.unlink()
    code, said = watched(folder.root, height=30, force_terminal=is_terminal)
    assert code == EXIT_USER_ERROR
    assert "is missing or empty, though the run has begun" in said and "accepted=" not in said
    with pytest.raises(StateError, match="there is no log"):
        Store(sqlite_url(folder.log), read_only=True).newest()
    assert not list(folder.root.glob("log.sqlite*"))


def test_a_folder_shows_the_alarms_that_stand(tmp_path: Path) -> None:
    folder = RunTestbed(tmp_path / "run", tiny_run()).folder
    alarm = Alarm("drift", "critical", 1, 1, "the log ratio is 0.9 nats", "Lower train.lr")
    AlarmsLog(folder.alarms).write("raised", alarm, 0.0)
    assert asyncio.run(FolderWatch(folder.root).look()).alarms == [alarm]
    starved = Alarm("starved", "warning", 2, 2, "no step for 42 s: waiting for workers: 0 of 8", "Let others join")
    AlarmsLog(folder.alarms).write("raised", starved, 0.0)
    _, shown = asyncio.run(FolderWatch(folder.root).look()).alarms
    assert shown.summary == f"when it was raised: {starved.summary}" and shown.remedy == starved.remedy, (
        "figures of then contradict the status"
    )


def test_files_of_a_strangers_folder_are_cleaned_and_stop_no_view(tmp_path: Path) -> None:
    folder = RunTestbed(tmp_path / "run", tiny_run()).folder
    bad = {
        "step": 1,
        "reward_all_mean": "x",
        "reward_mean/a\n\x1b[2J": 0.5,
        "staleness_rollouts": {"old": 1, "0": "x", "1": 2},
    }
    lines = [
        b'{"step": 0, "reward_all_mean": 0.25}',
        b'{"step": 2, "loss": ' + b"[" * 9999,
        b"{}",
        msgspec.json.encode(bad),
    ]
    folder.metrics.write_bytes(b"\n".join(lines) + b"\n")
    folder.evaluations.mkdir(exist_ok=True)
    for name in ("vx", "v-1", "v1\x1b[2J"):
        (folder.evaluations / f"{name}.json").write_text("{}")
    AlarmsLog(folder.alarms).write("raised", Alarm("\x1b[2J", "critical", 1, 1, "\x1b[2J", ""), 0.0)
    seen = asyncio.run(FolderWatch(folder.root).look())
    assert seen.series("reward_all_mean") == [0.25] and seen.metrics[-1]["staleness_rollouts"] == {"1": 2}
    (console := terminal(height=24, color_system=None)).print(render(seen, 24))
    assert {cell_len(line) for line in text_of(console).splitlines()} == {80}
    assert plain(seen).isprintable()


def test_a_folder_without_a_run_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="holds no run"):
        watch(str(tmp_path), Console(file=io.StringIO()), once=True)


def test_a_view_waits_for_no_conversation_and_survives_an_environment_that_raises(tmp_path: Path) -> None:
    samples = Samples(NewestSample(RunFolder(tmp_path)), every_s=0.0)
    found = SampleConversation("one", (("policy", "words"),))
    answers = iter([RuntimeError("an environment"), None, found, None, None])

    def read() -> SampleConversation | None:
        answer = next(answers)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    samples._newest.read = read  # type: ignore[method-assign]
    seen = []
    for _ in range(5):
        seen.append(samples.latest())
        if samples._thread is not None and len(seen) < 5:
            samples._thread.join()
    assert seen == [None, None, None, found, found]


# --- the terminal ---


class Presses(Keyboard):
    """Keys that a person will press."""

    def __init__(self, keys: Iterator[str]) -> None:
        super().__init__(None)
        self.keys = keys

    def pressed(self, wait_s: float = 0.0) -> str:
        return next(self.keys)


def test_a_terminal_that_is_gone_gives_no_more_keys() -> None:
    ours, theirs = pty.openpty()
    keys = Keyboard(theirs)
    assert keys.is_there and keys.pressed() == ""
    os.close(ours)
    assert keys.pressed(1.0) == "" and not keys.is_there
    os.close(theirs)


@pytest.mark.parametrize("key", ["Q", "xyzq"])
def test_q_leaves(snapshot: RunStatus, key: str) -> None:
    view = LiveView(Console(file=io.StringIO()))
    left = iter(["", "p", key, "not asked for"])
    asyncio.run(follow(remote(host_of(snapshot)), snapshot, view, Presses(left), piped=False))
    assert list(left) == ["not asked for"]


@pytest.mark.parametrize("phase", ["running", "ended", "not hosted"])
def test_a_run_goes_on_for_those_who_leave_only_if_it_does(snapshot: RunStatus, phase: str) -> None:
    view = LiveView(Console(file=io.StringIO()))
    hints = list[str]()
    view.show = lambda shown: hints.append(shown.hint)  # type: ignore[method-assign]
    seen = replace(snapshot, status=msgspec.structs.replace(snapshot.status, phase=phase))
    asyncio.run(follow(remote(host_of(seen)), seen, view, Presses(iter("q")), piped=False))
    assert ["goes on" in hint for hint in hints] == [phase == "running"]


def test_piped_it_ends_with_the_run(snapshot: RunStatus) -> None:
    ended = msgspec.structs.replace(snapshot.status, phase="ended")
    over = RunStatus("wordle", "", 90, status=ended, metrics=snapshot.metrics)
    console = Console(file=io.StringIO())
    asyncio.run(follow(remote(host_of(over)), over, LiveView(console), Keyboard(None), piped=True))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0].startswith("step 37/90") and lines[-1] == "the run has ended"


def frames(screen: bytes) -> list[list[str]]:
    """The pictures that a terminal was sent, each as its lines."""
    texts = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", frame.decode()) for frame in screen.split(b"\x1b[H")[1:]]
    return [text.split("\n") for text in texts]


def test_each_picture_covers_the_whole_terminal_whatever_its_size_was_before(snapshot: RunStatus) -> None:
    """So nothing of an earlier picture stays."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24, _environ={"TERM": "xterm"})
    view, sizes = LiveView(console), ((80, 24), (60, 18), (140, 40), (40, 10))
    for console.width, console.height in sizes:
        view.show(snapshot)
    shown = frames(console.file.getvalue().encode())  # type: ignore[attr-defined]
    for (columns, lines), picture in zip(sizes, shown[-4:], strict=True):
        assert len(picture) == lines and {cell_len(line) for line in picture} == {columns}


def resize(terminal: int, columns: int, lines: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


@pytest.mark.slow
@pytest.mark.parametrize("leave", ["q", "ctrl-c"])
def test_it_follows_the_size_of_the_terminal_and_gives_it_back(tmp_path: Path, leave: str) -> None:
    RunTestbed(tmp_path / "run", tiny_run())
    terminal, inside = pty.openpty()
    resize(terminal, 80, 24)
    before = termios.tcgetattr(inside)
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    environment |= {"TERM": "xterm", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "shoal.cli.main", "watch", str(tmp_path / "run")]
    watcher = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=environment, start_new_session=True,
                               preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))  # fmt: skip
    screen = b""

    def until(found: Callable[[], bool]) -> None:
        nonlocal screen
        deadline = time.monotonic() + 30.0
        while not found():
            assert time.monotonic() < deadline, screen
            screen += os.read(terminal, 65536)

    try:
        until(lambda: b"q leaves" in screen)
        for columns, lines in ((60, 20), (132, 40)):
            seen = len(screen)
            resize(terminal, columns, lines)
            until(lambda: screen[seen:].count(b"\x1b[H") > 3)  # noqa: B023
            picture = frames(screen[seen:])[-2]  # the last one may not be here whole
            assert len(picture) == lines and {cell_len(line) for line in picture} == {columns}
        if leave == "q":
            os.write(terminal, b"q")
        else:
            watcher.send_signal(signal.SIGINT)
        until(lambda: b"\x1b[?1049l" in screen)
        assert watcher.wait(timeout=10) == 0 and termios.tcgetattr(inside) == before
        assert screen.count(b"\x1b[?1049h") == 1 and b"\x1b[?25h" in screen.rpartition(b"\x1b[H")[2]
    finally:
        watcher.kill()
        watcher.wait()
        os.close(terminal)
        os.close(inside)
