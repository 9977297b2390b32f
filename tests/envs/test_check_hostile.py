"""`shoal env check` on environments that answer in the name of the process that checks them, or are very slow."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.envs.lint import check_env, run, worker_process
from shoal.envs.lint.checks import ALWAYS, SOMETIMES, checks_of
from shoal.envs.lint.compare import OTHERS, compare
from shoal.envs.lint.finding import CheckResult
from shoal.envs.lint.messages import (
    CALL,
    LintEpisode,
    LintFailure,
    LoadedEnv,
    MalformedReply,
    Recorded,
    Seen,
    WorkerReply,
    names_of,
    read,
)
from shoal.envs.lint.run import check
from shoal.envs.lint.worker_process import Failed
from shoal.envs.load import load_env
from shoal.sandbox.limits import Reason
from tests.sandbox.needs import needs_bubblewrap

GOOD = (Path(__file__).parent / "sabotaged" / "good.py").read_text()

FORGER = """
import os, stat

def forge(data):
    "Write a frame to every pipe of this process, and end it."
    for descriptor in range(3, 12):
        try:
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.write(descriptor, len(data).to_bytes(4, "big") + data)
        except OSError:
            pass
    os._exit(0)
"""

FRAMES = {
    "not JSON": b"\xff{",
    "deeper than a parser goes": b"[" * 100_000,
    "a long number": b'{"value": ' + b"9" * 5000 + b"}",
    "not an object": b"[1]",
    "nothing": b"{}",
    "of another type": b'{"value": 7}',
    "of another form": b'{"value": [{"task": [0, false], "told": 5}]}',
    "no episodes": b'{"value": [{"index": 0, "heldout": false, "opens": ["x"], "episodes": []}]}',
    "no tasks": b'{"value": []}',
}


def faults(found: list[CheckResult]) -> dict[str, str]:
    return {finding.check: finding.detail for finding in found if finding.outcome == "failed"}


def with_code(folder: Path, opening: str) -> str:
    """The sound environment, with other code at the first line of `reset`. Returns its path."""
    path = folder / "my_env.py"
    path.write_text(FORGER + GOOD.replace("        return (task", f"        {opening}\n        return (task"))
    return str(path)


@pytest.mark.parametrize("what", FRAMES)
def test_a_forged_frame_is_a_finding(tmp_path: Path, what: str) -> None:
    found = faults(check(with_code(tmp_path, f"forge({FRAMES[what]!r})"), {}, sandboxed=False))
    assert list(found) == ["process"] and "the process of the environment" in found["process"], found
    assert len(found["process"]) < 1100 and "write to no file" in found["process"]


@needs_bubblewrap
def test_a_forged_frame_is_a_finding_in_the_sandbox(tmp_path: Path) -> None:
    found = faults(check(with_code(tmp_path, f"forge({FRAMES['of another type']!r})"), {}))
    assert list(found) == ["process"] and "gave an answer of another form" in found["process"]


def test_a_process_that_closes_its_pipe_and_goes_on_is_a_finding(tmp_path: Path) -> None:
    found = faults(check(with_code(tmp_path, "import time; os.closerange(3, 12); time.sleep(30)"), {}, sandboxed=False))
    assert list(found) == ["process"]


@pytest.mark.parametrize(
    ("opening", "says"),
    [
        (
            "import ctypes; ctypes.string_at(0)",
            r"my_env\.py: it ended its process with the signal SIGSEGV in task \d+, reset\(\)",
        ),
        (
            "os._exit(3)",
            r"exit code 3 in task \d+, reset\(\), os\._exit\(3\) at my_env\.py line \d+, while [a-z ]+: [a-z ]+ instead$",
        ),
        (
            "import signal, time; signal.alarm(1); time.sleep(3)",
            r"the signal SIGALRM in task \d+, reset\(\), at my_env\.py line \d+, while .*: an alarm that it set itself",
        ),
        (
            "os.kill(os.getpid(), 9)",
            r"SIGKILL in task \d+, reset\(\), while recording episodes: leave out what ends it, or use less memory",
        ),
        ("raise SystemExit('gone')", r"task \d+, reset\(\): it raised /.*my_env\.py line \d+: SystemExit: gone"),
    ],
)
def test_a_process_that_ends_names_the_task_and_the_call(opening: str, says: str, tmp_path: Path) -> None:
    (told,) = faults(check(with_code(tmp_path, opening), {}, sandboxed=False)).values()
    assert re.search(says, told), told


@pytest.mark.parametrize(
    ("opening", "check_name", "says"),
    [
        ("{}[task]", "openings", "task 1, reset(): raised "),
        ("{}[task] if task[1] - task[0] // 13 >= 140 else 0", "heldout", "held-out task 0, reset(): raised "),
    ],
)
def test_one_mistake_is_one_failed_line(opening: str, check_name: str, says: str, tmp_path: Path) -> None:
    found = check(with_code(tmp_path, opening), {}, sandboxed=False)
    told = faults(found)
    assert list(told) == [check_name] and told[check_name].startswith(says), told
    (others,) = [finding.detail for finding in found if finding.check == "not checked"]
    assert "solutions" in others and others.endswith(f": the cause is that of '{check_name}'")
    assert not any("replies differ already" in finding.detail for finding in found), "the episode failed"


@pytest.mark.parametrize(("opening", "call"), [("time.sleep(0.3)", r", task \d+, reset\(\)"), ("", "")])
def test_what_is_waited_for_is_said_with_its_limit(
    opening: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "WAIT_S", 0.1)
    monkeypatch.setattr(run, "TOTAL_S", 0.0)
    path, told = with_code(tmp_path, opening or "pass"), list[str]()
    text = Path(path).read_text()
    Path(path).write_text(f"import time\n{'' if opening else 'time.sleep(3)'}\n{text}")
    found = check(path, {}, sandboxed=False, wait=told.append)
    doing = "recording episodes" if opening else "loading it"
    assert any(re.fullmatch(rf"waiting for my_env\.py, at most \d+ s: {doing}{call}", one) for one in told), told
    (late,) = [finding for finding in found if finding.check == "not checked"]
    assert late.outcome == "skipped" and "members, indices" in late.detail and "0 s were over" in late.detail


def test_frames_of_calls_that_never_end_are_too_late() -> None:
    """A process may name calls for ever, so each such frame is looked at with the time that the answer has."""
    assert worker_process._call_in(CALL + b"task 3, \xff", time.monotonic() + 60) == "task 3, \ufffd"
    with pytest.raises(Failed, match="did not answer in time"):
        worker_process._call_in(CALL + b"task 3", time.monotonic() - 1)


def test_an_honest_answer_is_read() -> None:
    one = {"index": 3, "heldout": False, "opens": ["user: \ud800"],
           "episodes": [{"actions": ["", "x"], "replies": [["user: y"], None], "end": [True, 0.5, None]}]}  # fmt: skip
    read_one: Any = read(json.dumps({"value": [one]}).encode(), list[Recorded])
    assert read_one == [
        Recorded(3, False, ["user: \ud800"], [LintEpisode(["", "x"], [["user: y"], None], (True, 0.5, None))])
    ]
    assert read(b'{"failed": "it raised"}', LoadedEnv) == LintFailure("it raised")
    assert read(b'{"value": ["passed", "well"]}', WorkerReply) == WorkerReply("passed", "well")
    assert read(b'{"value": [["files", "it writes x", "a.py line 3"]]}', Seen) == (
        ("files", "it writes x", "a.py line 3"),
    )


@pytest.mark.parametrize(
    "data", [b'{"value": ["perfect", ""]}', b'{"value": ["passed"]}', b'{"stuck": "", "seen": []}', b'{"failed": 1}']
)
def test_an_answer_of_another_form_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedReply):
        read(data, WorkerReply)


def test_the_names_of_the_checks_are_known_here() -> None:
    assert tuple(checks_of(load_env("wordle", {}))) == ALWAYS
    assert names_of(LoadedEnv((*SOMETIMES, *ALWAYS), True, True)) == [*ALWAYS, *SOMETIMES]
    for names in (ALWAYS[1:], (), (*ALWAYS, "applause"), (*ALWAYS, ALWAYS[0])):
        with pytest.raises(MalformedReply, match="named other checks"):
            names_of(LoadedEnv(names, True, True))
    assert [finding.check for finding in check_env(load_env("arithmetic", {}), tasks=2)] == list(ALWAYS)


def recorded(*indices: int, reply: str = "x", episodes: int = 1) -> list[Recorded]:
    return [Recorded(i, False, ["o"], [LintEpisode(["a"], [reply], (True, 1.0, None))] * episodes) for i in indices]


def test_a_slow_process_that_played_fewer_tasks_is_compared_in_those() -> None:
    passed = compare(OTHERS[0], recorded(1, 2, 3), recorded(2, 3), True)
    assert passed == CheckResult(
        "earlier tasks", "passed", "after other tasks, 2 of 3 tasks give the same replies and scores"
    )
    assert compare(OTHERS[0], recorded(1, 2, 3), recorded(2, reply="y"), True).outcome == "failed"
    assert compare(OTHERS[0], recorded(1, 2, 3), recorded(3), True).outcome == "skipped"
    assert compare(OTHERS[0], recorded(1, 2), recorded(1, 2, 9), True).outcome == "passed"
    assert "has 2 episodes, then 1" in compare(OTHERS[0], recorded(1, episodes=2), recorded(1), True).detail


def test_only_another_process_that_ended_itself_is_a_fault() -> None:
    assert compare(OTHERS[1], recorded(1), Failed("it ended its process with exit code 3"), True).outcome == "failed"
    assert compare(OTHERS[1], recorded(1), Failed("too late", Reason.TIMEOUT), True).outcome == "skipped"
    assert compare(OTHERS[1], recorded(1), OSError("no sandbox"), True).outcome == "skipped"
