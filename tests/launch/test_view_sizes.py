"""The terminal view at several sizes: what matters is there at each. Hostile texts: `test_hostile_texts`."""

import io
from dataclasses import replace

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from shoal.alarms import Alarm
from shoal.launch.remaining import seconds_left
from shoal.launch.snapshot import Sample, Snapshot
from shoal.launch.view import LiveView, render
from shoal.watch.index.look import _speed

SIZES = [(60, 24), (80, 24), (100, 30), (140, 40)]


def lines_of(snapshot: Snapshot, width: int, height: int | None, said: str = "", talks: bool = False) -> list[str]:
    """What the terminal shows."""
    console = Console(file=io.StringIO(), width=width, height=height or 100, force_terminal=True, color_system=None)
    console.print(render(snapshot, height, said, talks))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.splitlines()


def crowd(snapshot: Snapshot, honest: int) -> Snapshot:
    """The run with more honest workers, whose names come first in the alphabet and whose credits are higher."""
    good = next(node for node in snapshot.nodes if node.name == "worker-0")
    more = tuple(msgspec.structs.replace(good, name=f"a-{i:03}", credits=10**6 + i) for i in range(honest))
    return replace(snapshot, nodes=more + snapshot.nodes)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_who_was_refused_by_which_check_is_seen_at_every_size(snapshot: Snapshot, width: int, height: int) -> None:
    lines = lines_of(crowd(snapshot, 40), width, height, said="Others join with:\n\n    shoal join http://host:8470")
    assert len(lines) <= height and max(map(cell_len, lines)) <= width
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


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_workers_that_are_not_shown_are_counted(snapshot: Snapshot, width: int, height: int) -> None:
    lines = lines_of(crowd(snapshot, 60), width, height)
    shown = sum(" a-" in line or "worker-0" in line or "cheater-0" in line for line in lines)
    assert any(f"… and {62 - shown} more, none refused" in line for line in lines), lines


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (140, 40)])
def test_three_alarms_do_not_hide_what_the_run_waits_for(snapshot: Snapshot, width: int, height: int) -> None:
    said = "a summary that is so long that it takes two lines of the terminal, and then goes on for a while " * 2
    alarms = [Alarm(cause, "warning", 30, 37, said, "") for cause in ("drift", "clipping", "disk")]
    lines = lines_of(replace(snapshot, alarms=alarms), width, height)
    assert any("waiting 8 s for workers" in line for line in lines) and any("alarm drift" in line for line in lines)


def test_a_worker_that_is_new_and_was_refused_is_said_to_be_not_proven_yet(snapshot: Snapshot) -> None:
    cheater = msgspec.structs.replace(snapshot.nodes[0], standing="new", refused=8, reasons={"sampling": 8}, left=True)
    line = next(line for line in lines_of(replace(snapshot, nodes=(cheater,)), 80, 24) if "cheater-0" in line)
    assert "sampling 8x, not proven yet, left" in line


def test_workers_in_trouble_come_first_and_are_counted_when_there_is_no_room(snapshot: Snapshot) -> None:
    bad = next(node for node in snapshot.nodes if node.name == "cheater-0")
    cheats = tuple(msgspec.structs.replace(bad, name=f"z-{i:02}", refused=i + 1) for i in range(30))
    lines = lines_of(replace(crowd(snapshot, 10), nodes=crowd(snapshot, 10).nodes + cheats), 80, 24)
    rows = [line for line in lines if "sampling 40x" in line]
    assert "cheater-0" in rows[0] and " z-29 " in rows[1] and not any(" a-0" in line for line in lines)
    assert any(f"{31 - len(rows)} of them refused or shut out" in line for line in lines)


def test_a_worker_refused_by_several_checks_shows_the_most_frequent_first(snapshot: Snapshot) -> None:
    nodes = tuple(msgspec.structs.replace(n, reasons={"commit": 1, "sampling": 7}) for n in snapshot.nodes[:1])
    text = "\n".join(lines_of(replace(snapshot, nodes=nodes), 80, 24))
    assert "sampling 7x, commit 1x" in text


def test_a_conversation_is_shown_where_there_is_room_and_only_there(snapshot: Snapshot) -> None:
    sample = Sample("a rollout of version 37, reward 0.25", (("user", "2 + 2 = ?"), ("assistant", "four\nI think")))
    talking = replace(snapshot, sample=sample)
    tall = "\n".join(lines_of(talking, 80, 40))
    for said in ("a rollout of version 37, reward 0.25", "2 + 2 = ?", "four", "I think"):
        assert said in tall, said
    assert "2 + 2" not in "\n".join(lines_of(crowd(talking, 40), 80, 24))


def test_at_80x24_a_conversation_takes_turns_with_the_curve_and_refusals_stay(snapshot: Snapshot) -> None:
    talk = Sample("a rollout of version 37, reward 0.25", (("user", "2 + 2 = ?"), ("assistant", "four\nI think")))
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


def test_time_left_follows_the_newest_steps_and_shrugs_off_one_long_night(snapshot: Snapshot) -> None:
    assert seconds_left(snapshot) == pytest.approx((90 - 37) * 2.0)
    night = replace(snapshot, metrics=(*snapshot.metrics[:-1], {"step": 36, "step_s": 36_000.0}))
    assert seconds_left(night) == pytest.approx((90 - 37) * (19 * 2 + 10) / 20)
    assert seconds_left(replace(snapshot, evaluation_s=60.0)) == pytest.approx((90 - 37) * 2.0 + 60)
    paused = msgspec.structs.replace(snapshot.status, phase="paused")
    for unknown in (replace(snapshot, status=paused), replace(snapshot, metrics=()), replace(snapshot, steps=37)):
        assert seconds_left(unknown) is None


def test_the_page_and_the_terminal_say_the_same_speed_and_time_left(snapshot: Snapshot) -> None:
    lines = [{"step": i, "step_s": 100.0 if i == 30 else 2.0, "policy_tokens": 10 * i} for i in range(37)]
    for kept in (lines, lines[:1], [*lines[:-1], {"step": 36, "step_s": 0}], [{"step": 0, "step_s": "x"}] * 3):
        told, run = _speed(kept[::-1], 90 - 37), replace(snapshot, metrics=tuple(kept))
        assert told["tokens_per_s"] == run.tokens_per_s()
        assert seconds_left(run) in (None, pytest.approx((told["left_s"] or 0) * (90 - run.step) / (90 - 37)))


def test_a_dumb_terminal_gets_lines_and_no_escapes(snapshot: Snapshot) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    view = LiveView(console)
    view.show(snapshot)
    view.say("a word")
    view.close()
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text and "step 37/90" in text and "a word" in text


def test_no_color_keeps_the_picture_and_drops_colours(snapshot: Snapshot) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24,
                      _environ={"NO_COLOR": "1", "TERM": "xterm-256color"})  # fmt: skip
    console.print(render(snapshot, 24))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert "sampling 40x" in text and not any(f"\x1b[{code}m" in text for code in (31, 32, 33, 36, 91))


def test_what_is_said_during_the_picture_is_printed_after_it(snapshot: Snapshot) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24, color_system=None,
                      _environ={"TERM": "xterm"})  # fmt: skip
    view = LiveView(console)
    view.say("Others join with:\n    shoal join http://host:8470")
    view.show(snapshot)
    view.close()
    picture, after = console.file.getvalue().split("\x1b[?1049l")  # type: ignore[attr-defined]
    assert "shoal join http://host:8470" in picture and "step 37/90" in picture
    assert after.strip().endswith("shoal join http://host:8470") and "step" not in after
