"""The terminal view at several sizes: what matters is there at each. Hostile texts: `test_hostile_texts`."""

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from shoal.alarms import Alarm
from shoal.launch.alarm_actions import in_words
from shoal.ledger.fault_rate import (
    BOUNDS_REMEDY,
    FAULT_REMEDY,
    FAULTS,
    HANG_REMEDY,
    NUMBER_REMEDY,
    TEMPLATE_REMEDY,
    fault_remedy,
)
from shoal.ledger.remedies import (
    ADMIT_REMEDY,
    ALARM_REMEDY,
    IN_A_NEW_RUN,
    NO_SIGNAL_REMEDY,
    SILENT_REMEDY,
)
from shoal.monitors import (
    host,
    learning,
    nodes,
)
from shoal.monitors.alarms import AlarmChange
from shoal.protocol.messages import Status
from shoal.protocol.reward_rules import REPLY_REFUSED
from shoal.protocol.rollout_validation import MODEL_REMEDY, ROOM_REMEDY
from shoal.runs.run_status import RunStatus, SampleConversation, seconds_left
from shoal.terminal import as_called
from shoal.views.terminal.live_view import LiveView, plain, render
from shoal.views.terminal.panels import cropped
from shoal.views.web.index.queries import _speed

SIZES = [(60, 24), (140, 40)]


def lines_of(
    snapshot: RunStatus, width: int, height: int | None, said: Sequence[str] = (), talks: bool = False
) -> list[str]:
    """What the terminal shows."""
    console = Console(file=io.StringIO(), width=width, height=height or 100, force_terminal=True, color_system=None)
    console.print(render(snapshot, height, said, talks))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.splitlines()


def paused(snapshot: RunStatus, waits: str, remedy: str, cause: str = "") -> Status:
    return msgspec.structs.replace(snapshot.status, phase="paused", waiting_for=waits, remedy=remedy, pause_cause=cause)


def crowd(snapshot: RunStatus, honest: int) -> RunStatus:
    """The run with more honest workers, whose names come first in the alphabet and whose credits are higher."""
    good = next(node for node in snapshot.nodes if node.name == "worker-0")
    more = tuple(
        msgspec.structs.replace(good, key=f"{i:064}", name=f"a-{i:03}", credits=10**6 + i) for i in range(honest)
    )
    return replace(snapshot, nodes=more + snapshot.nodes)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_who_was_refused_by_which_check_is_seen_at_every_size(snapshot: RunStatus, width: int, height: int) -> None:
    lines = lines_of(crowd(snapshot, 40), width, height, said=["Others join with:\n\n    shoal join http://host:8470"])
    assert len(lines) <= height and max(map(cell_len, lines)) <= width
    shown = sum(" a-" in line or "worker-0" in line or "cheater-0" in line for line in lines)
    assert any(f"… and {42 - shown} more, none refused" in line for line in lines), lines
    refused = next(line for line in lines if "cheater-0" in line)
    assert "sampling 40x" in refused and "quarantined" in refused
    text = "\n".join(lines)
    for point in (
        "step 37/90",
        "waiting 8 s for workers: 9 of 16 groups",
        "0.48",
        "left",
        "shoal join http://host:8470",
    ):
        assert point in text, point


def test_an_alarm_takes_two_lines_of_a_small_terminal(snapshot: RunStatus) -> None:
    """Also while it is the newest message, which says the same once more."""
    summary = "worker-7 (3b6a27bcceb6) had 75.0% of its blocks refused, and 0.0% of the influence on batches"
    remedy = "See its refusals (`shoal credits RUN 3b6a27bcceb6`) and audit its groups (`shoal audit RUN`). " * 2
    alarm = Alarm("poisoning", "critical", 21, 24, summary, remedy)
    said = [in_words(AlarmChange("raised", alarm))]
    for width, height in ((80, 24), (60, 20), (120, 24)):
        shown = lines_of(replace(snapshot, alarms=[alarm]), width, height, said)
        first = next(i for i, line in enumerate(shown) if "alarm poisoning since step 21: worker-7" in line)
        assert shown[first + 2].startswith("╰"), shown
        assert shown[first + 1].rstrip("│ ").endswith("… (logs/launcher.log)"), "it says where the rest is"
        assert "ALARM" not in "".join(shown)
    large = "\n".join(lines_of(replace(snapshot, alarms=[alarm]), 120, 45, said))
    assert "ALARM" in large and "shoal audit RUN" in large, "where there is room, what to do is shown too"


@pytest.mark.parametrize(
    ("remedy", "core"),
    [
        (nodes.CLOCK_REMEDY, "by NTP"), (nodes.STRAGGLERS_REMEDY, "kick it"),
        (nodes.STOPPED_ENVIRONMENT_REMEDY, "Correct the environment"), (nodes.VALIDATORS_REMEDY, "`shoal audit RUN`"),
        (nodes.poisoning_remedy("3b6a27bcceb6"), "`shoal credits RUN 3b6a27bcceb6`"),
        (host.DISK_REMEDY, "storage.window_steps"), (host.QUOTA_REMEDY, "storage.quota_mb"),
        (host.PUBLISHING_REMEDY, "policy.adapter"), (learning.COLLAPSE_REMEDY, "a smaller train.lr"),
        (learning.DRIFT_REMEDY, "Lower train.lr"), (learning.ENTROPY_REMEDY, "a smaller train.lr"),
        (learning.HACKING_REMEDY, "Read rollouts"), (learning.EASY, "harder tasks"),
        (learning.HARD, "`shoal env check`"), (learning.CUT.format(0.6), "sampling.max_turn_tokens"),
        (learning.FALLEN, "a smaller train.lr"),
    ],
)  # fmt: skip
def test_the_core_of_a_remedy_comes_before_a_small_terminal_cuts_it(
    snapshot: RunStatus, remedy: str, core: str
) -> None:
    alarm = Alarm("no_signal", "critical", 21, 24, "the last 64 groups have no signal; at 128 the run pauses", remedy)
    shown = lines_of(replace(snapshot, alarms=[alarm]), 80, 24)
    assert any(core in line for line in shown), shown


def test_the_alarm_of_a_pause_leaves_its_cause_to_the_wait_and_has_its_remedy_whole(snapshot: RunStatus) -> None:
    summary = "the last 512 groups have no signal; at 500 the run pauses"
    alarm = Alarm("no_signal", "critical", 12, 13, summary, learning.FALLEN)
    for phase in ("running", "paused"):
        status = msgspec.structs.replace(snapshot.status, phase=phase, pause_cause="no signal")
        lines = lines_of(replace(snapshot, status=status, alarms=[alarm]), 80, 24)
        text = " ".join(line.strip("│ ") for line in lines)
        assert (f"the run has paused. {learning.FALLEN}" in text) == (phase == "paused")
        assert ("512 groups" in text) == (phase == "running")


def test_a_worker_that_is_new_and_was_refused_is_said_to_be_not_proven_yet(snapshot: RunStatus) -> None:
    cheater = msgspec.structs.replace(snapshot.nodes[0], standing="new", refused=8, reasons={"sampling": 8}, left=True)
    line = next(line for line in lines_of(replace(snapshot, nodes=(cheater,)), 80, 24) if "cheater-0" in line)
    assert "sampling 8x; not proven yet, left" in line


def test_a_small_table_says_who_is_silent_and_whose_leases_lapsed(snapshot: RunStatus) -> None:
    alice = msgspec.structs.replace(snapshot.nodes[2], name="alice", silent_s=170.0, lapsed=2)
    for width, said in ((80, "silent for 2m50s; 2 lapsed"), (120, "silent for 2m50s")):
        row = next(line for line in lines_of(replace(snapshot, nodes=(alice,)), width, 24) if " alice " in line)
        assert said in row, row
    crowded = replace(
        snapshot,
        nodes=tuple(msgspec.structs.replace(alice, key=f"{i:064}", name=f"w-{i}", silent_s=0.0) for i in range(99)),
    )
    crowded = replace(
        crowded, nodes=(*crowded.nodes, msgspec.structs.replace(alice, key="zz" * 32, name="zoe", credits=0))
    )
    assert any(" zoe " in line and "silent" in line for line in lines_of(crowded, 80, 24))


def test_workers_in_trouble_come_first_and_are_counted_when_there_is_no_room(snapshot: RunStatus) -> None:
    bad = next(node for node in snapshot.nodes if node.name == "cheater-0")
    cheats = tuple(msgspec.structs.replace(bad, key=f"z{i:063}", name=f"z-{i:02}", refused=i + 1) for i in range(30))
    lines = lines_of(replace(crowd(snapshot, 10), nodes=crowd(snapshot, 10).nodes + cheats), 80, 24)
    rows = [line for line in lines if "sampling 40x" in line]
    assert "cheater-0" in rows[0] and " z-29 " in rows[1] and not any(" a-0" in line for line in lines)
    assert any(f"{31 - len(rows)} of them refused or shut out" in line for line in lines)


@pytest.mark.parametrize(
    ("width", "said"), [(80, "sampling 120x +6 more; quarantined "), (200, "shape 3x +1 more · it")]
)
def test_what_is_left_out_of_the_checks_that_refused_a_worker_is_counted(
    snapshot: RunStatus, width: int, said: str
) -> None:
    checks = {"commit": 44, "sampling": 120, "log_probs": 30, "reward": 12, "length": 7, "shape": 3, "stops": 2}
    nodes = tuple(msgspec.structs.replace(n, reasons=checks, last_reason="it was") for n in snapshot.nodes[:1])
    assert said in "\n".join(lines_of(replace(snapshot, nodes=nodes), width, 24))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60)])
def test_the_table_of_workers_keeps_its_place(snapshot: RunStatus, width: int, height: int) -> None:
    """Whatever else comes and goes: conversations, messages, alarms, the first figures, workers."""
    talk = SampleConversation("a rollout of version 37, reward 0.25", (("user", "2 + 2 = ?"), ("policy", "four")))
    alarms = [Alarm(cause, "warning", 30, 37, "a long summary " * 20, "") for cause in ("drift", "clipping")]
    talking = replace(snapshot, sample=talk)
    early = replace(snapshot, metrics=(), heldout=(), elapsed_s=0.0)
    cause = f"{FAULTS}wordle fails on 40 of its newest 400 rollouts: words.py line 7: {'KeyError: 5 ' * 12}"
    faults = msgspec.structs.replace(
        snapshot.status, phase="paused", waiting_for=f"the host: {cause}", remedy=FAULT_REMEDY
    )
    worst = replace(crowd(talking, 40), alarms=alarms, status=faults)
    runs = (snapshot, talking, early, crowd(talking, 40), replace(talking, alarms=alarms), worst)
    for said in ([], ["Others join with:\n\n    shoal join http://host:8470\n" + "more\n" * 9, "a warning " * 30] * 3):
        for run in runs:
            for talks in (False, True):
                lines = lines_of(run, width, height, said, talks)
                assert "refused by" in lines[3] and "cheater-0" in lines[4], lines
                assert len(lines) <= height and lines[-1].startswith("╰") and "waiting 8 s" in "".join(lines), lines
    assert "no worker has joined yet" in lines_of(replace(early, nodes=()), width, height)[3]


def test_at_80x24_a_conversation_takes_turns_with_the_curve_and_refusals_stay(snapshot: RunStatus) -> None:
    talk = SampleConversation(
        "a rollout of version 37, reward 0.25", (("user", "2 + 2 = ?"), ("policy", "four\nI think"))
    )
    talking = replace(snapshot, sample=talk)
    both = [lines_of(shown, 80, 24, talks=turn) for turn in (False, True) for shown in (talking, crowd(talking, 40))]
    for lines in both:
        assert len(lines) <= 24 and {cell_len(line) for line in lines} == {80}
        text = "\n".join(lines)
        for point in ("step 37/90", "cheater-0", "sampling 40x", "quarantined", "waiting 8 s for workers", "reward"):
            assert point in text, point
    assert not any("four" in line for lines in both[:2] for line in lines)
    assert all(any("four" in line for line in lines) for lines in both[2:])
    assert lines_of(talking, 80, 40, talks=True) == lines_of(talking, 80, 40), "there is room for both"
    assert lines_of(snapshot, 80, 24, talks=True) == lines_of(snapshot, 80, 24), "there is none"


def test_time_left_follows_the_newest_steps_and_shrugs_off_one_long_night(snapshot: RunStatus) -> None:
    assert seconds_left(snapshot) == pytest.approx((90 - 37) * 2.0)
    night = replace(snapshot, metrics=(*snapshot.metrics[:-1], {"step": 36, "step_s": 36_000.0}))
    assert seconds_left(night) == pytest.approx((90 - 37) * (19 * 2 + 10) / 20)
    whole = replace(snapshot, evaluation_s=60.0)
    assert seconds_left(whole) == pytest.approx((90 - 37) * 2.0 + 60)
    assert "left=2m46s" in plain(whole) and "about 2m46s left" in "\n".join(lines_of(whole, 100, None))
    assert "left_for_steps=1m46s" in plain(snapshot) and "about 1m46s of steps left" in "\n".join(
        lines_of(snapshot, 80, None)
    )
    still = replace(snapshot, status=msgspec.structs.replace(snapshot.status, waiting_s=107.0))
    assert seconds_left(still) is None and "left" not in plain(still), "nobody knows when it goes on"
    paused = msgspec.structs.replace(snapshot.status, phase="paused")
    for unknown in (replace(snapshot, status=paused), replace(snapshot, metrics=()), replace(snapshot, steps=37)):
        assert seconds_left(unknown) is None


def test_the_page_and_the_terminal_say_the_same_speed_and_time_left(snapshot: RunStatus) -> None:
    lines = [{"step": i, "step_s": 100.0 if i == 30 else 2.0, "policy_tokens": 10 * i} for i in range(37)]
    for kept in (lines, lines[:1], [*lines[:-1], {"step": 36, "step_s": 0}], [{"step": 0, "step_s": "x"}] * 3):
        told, run = _speed(kept[::-1], 90 - 37), replace(snapshot, metrics=tuple(kept))
        assert told["tokens_per_s"] == run.tokens_per_s()
        assert seconds_left(run) in (None, pytest.approx((told["left_s"] or 0) * (90 - run.step) / (90 - 37)))


def test_a_dumb_terminal_gets_lines_and_no_escapes(snapshot: RunStatus) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    view = LiveView(console)
    view.show(snapshot)
    view.say("a word")
    view.close()
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text and "step 37/90" in text and "a word" in text


def test_no_color_keeps_the_picture_and_drops_colours(snapshot: RunStatus) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24,
                      _environ={"NO_COLOR": "1", "TERM": "xterm-256color"})  # fmt: skip
    console.print(render(snapshot, 24))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert "sampling 40x" in text and not any(f"\x1b[{code}m" in text for code in (31, 32, 33, 36, 91))


def test_what_is_said_during_the_picture_is_printed_after_it(snapshot: RunStatus) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24, color_system=None,
                      _environ={"TERM": "xterm"})  # fmt: skip
    view = LiveView(console)
    view.say("Others join with:\n    shoal join http://host:8470")
    view.show(snapshot)
    view.close()
    picture, after = console.file.getvalue().split("\x1b[?1049l")  # type: ignore[attr-defined]
    assert "shoal join http://host:8470" in picture and "step 37/90" in picture
    assert after.strip().endswith("shoal join http://host:8470") and "step" not in after


PROMPTS = "first prompt of wordle:\n" + "a line of the prompt\n" * 20
WARNINGS = [f"{key} = 1e-09, and the preset is 0.0005: the policy may learn slowly. Leave it out" for key in "abcdef"]


@pytest.mark.parametrize(("width", "height", "shows"), [(80, 24, "ef"), (60, 20, "f"), (140, 50, "abcdef")])
def test_warnings_of_the_start_stay_in_the_picture(snapshot: RunStatus, width: int, height: int, shows: str) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None,
                      _environ={"TERM": "xterm"})  # fmt: skip
    view = LiveView(console)
    for line in WARNINGS:
        view.say(line)
    view.say(PROMPTS, passes=True)
    for _ in range(2):
        view.show(snapshot)
    picture = console.file.getvalue().split("step 37/90")[-1]  # type: ignore[attr-defined]
    view.close()
    text = re.sub(r"\s+", " ", picture.replace("│", " "))
    for key, line in zip("abcdef", WARNINGS, strict=True):
        assert (line in text) is (key in shows), (key, picture)
    left_out = 1 + len(WARNINGS) - len(shows)
    assert shows == "abcdef" or f"{left_out} more in logs/launcher.log" in text
    assert "first prompt of wordle" in text or shows != "abcdef", "where there is room"


def test_a_command_before_what_is_left_out_keeps_its_last_word_and_gets_more_room_before_the_first_step(
    snapshot: RunStatus,
) -> None:
    said = [
        "a prompt of wordle",
        "evaluated: 0.3",
        f"Others join with:\n\n    shoal join http://host:8470\n{'more ' * 99}",
    ]
    lines = lines_of(snapshot, 80, 24, said)
    assert any(line.strip("│ ") == "shoal join http://host:8470" for line in lines)
    assert not any(" more " in line for line in lines) and "whole in logs/launcher.log" in "\n".join(lines)
    at_first = lines_of(replace(snapshot, metrics=(), heldout=()), 80, 24, said)
    assert len(at_first) <= 24 and sum(" more " in line for line in at_first) > 1
    far = "    shoal join http://host.of.a.long.name:8470/below/a/path/that/is/as/long"
    assert cropped(Text(f"{far}\n{far}"), 40, 2).plain.endswith("…"), "half of a command is marked"


@pytest.mark.parametrize("error", ["KeyError: 'no answer such as 5'", "KeyError: " + "no such answer " * 12])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_pause_by_environment_faults_says_what_to_do_at_every_size(
    snapshot: RunStatus, width: int, height: int, error: str
) -> None:
    cause = f"{FAULTS}wordle fails on 40 of its newest 400 rollouts: words.py line 7: {error}"
    status = paused(snapshot, f"the host: {cause}", FAULT_REMEDY, cause)
    said = [f"The run has paused itself and waits for {status.wait_in_words}"]
    lines = lines_of(replace(snapshot, status=status), width, height, said)
    assert len(lines) <= height and max(map(cell_len, lines)) <= width
    text = re.sub(r"\s+", " ", " ".join(line.strip("│ ") for line in lines))
    assert FAULT_REMEDY in text and text.count("waits for") == 0
    assert "wordle fails on 40 of its newest 400 rollouts" in text and "cheater-0" in text
    is_cropped = len(error) > 100 and width < 100
    assert not is_cropped or "… Correct the environment" in text


@pytest.mark.parametrize(("error", "remedy", "shows"), [
    ("words.py line 7: score(): ValueError: the score is nan, not a finite number", NUMBER_REMEDY, "the score is nan"),
    ("words.py line 7: score(): TypeError: the score is None, not a number", NUMBER_REMEDY, "the score is None"),
    ("score() of task 72: its process was ended: it took longer than 10 s, at words.py line 7", HANG_REMEDY, "of task 72"),
    ("step() or score() of task 72: its process was ended: it was ended by signal 11 (SIGSEGV)", HANG_REMEDY, "of task 72"),
    ("words.py line 7: KeyError: 'guess'", FAULT_REMEDY, "KeyError: 'guess'"),
    ("words.py line 7: ValueError: a word, not a number, took longer than 1", FAULT_REMEDY, "ValueError: a word"),
    (f"{REPLY_REFUSED}: it shows no turn", TEMPLATE_REMEDY, "the policy's chat"),
])  # fmt: skip
def test_each_kind_of_fault_is_named_in_a_small_terminal_with_its_own_remedy(
    snapshot: RunStatus, error: str, remedy: str, shows: str
) -> None:
    cause = f"{FAULTS}wordle fails on 40 of its newest 400 rollouts: {error}"
    assert fault_remedy(cause) == remedy
    assert fault_remedy(f"{FAULTS}wordle gives a score of 7.0, outside its reward_bounds, to 1 of its") == BOUNDS_REMEDY
    lines = lines_of(replace(snapshot, status=paused(snapshot, f"the host: {cause}", remedy, cause)), 80, 24)
    text = re.sub(r"\s+", " ", " ".join(line.strip("│ ") for line in lines))
    assert shows in text and remedy in text
    assert " in …" not in text and "flight …" not in text


@pytest.mark.parametrize("remedy", [
    ALARM_REMEDY, NO_SIGNAL_REMEDY, SILENT_REMEDY, ADMIT_REMEDY, ROOM_REMEDY + IN_A_NEW_RUN, FAULT_REMEDY,
    BOUNDS_REMEDY, NUMBER_REMEDY, HANG_REMEDY, TEMPLATE_REMEDY, MODEL_REMEDY + IN_A_NEW_RUN,
])  # fmt: skip
def test_what_the_host_may_do_is_shown_whole_where_a_cause_is_cropped(snapshot: RunStatus, remedy: str) -> None:
    cause = f"the host: the last 40 groups have no signal: {'the tasks of 40 of them can never begin; ' * 9}"
    status = paused(snapshot, cause, as_called(remedy, Path("/srv/runs/wordle")))
    for width, height in ((80, 24), (120, 40)):
        lines = lines_of(replace(snapshot, status=status), width, height)
        text = re.sub(r"\s+", " ", " ".join(line.strip("│ ") for line in lines))
        assert len(lines) <= height and as_called(remedy, Path("/srv/runs/wordle")) in text
        assert "the last 40 groups have no signal" in text and "cheater-0" in text
