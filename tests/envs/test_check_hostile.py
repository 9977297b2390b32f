"""`shoal env check` on environments that answer in the name of the process that checks them, or are very slow."""

import re
from pathlib import Path

import pytest

from shoal.envs.lint import check_env
from shoal.envs.lint import process_checks as run
from shoal.envs.lint.checks import ALWAYS, SOMETIMES, checks_of
from shoal.envs.lint.finding import CheckResult
from shoal.envs.lint.messages import (
    LintEpisode,
    LoadedEnv,
    MalformedReply,
    Recorded,
    WorkerReply,
    names_of,
    read,
)
from shoal.envs.lint.process_checks import OTHERS, check, compare
from shoal.envs.lint.worker_process import Failed
from shoal.envs.load import load_env
from shoal.ipc import Reason
from tests.envs import sums
from tests.sandbox.needs import needs_bubblewrap

GOOD = Path(sums.__file__).read_text()

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
    "nothing": b"{}",
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
    found = faults(check(with_code(tmp_path, f"forge({FRAMES['of another form']!r})"), {}))
    assert list(found) == ["process"] and "gave an answer of another form" in found["process"]


def test_a_process_that_closes_its_pipe_and_goes_on_is_a_finding(tmp_path: Path) -> None:
    found = faults(check(with_code(tmp_path, "import time; os.closerange(3, 12); time.sleep(30)"), {}, sandboxed=False))
    assert list(found) == ["process"]


@pytest.mark.parametrize(
    ("opening", "says"),
    [
        (
            "import ctypes; ctypes.string_at(0)",
            r"my_env\.py: its process was ended by signal 11 \(SIGSEGV\) in task \d+, reset\(\)",
        ),
        (
            "os._exit(3)",
            r"exit code 3 in task \d+, reset\(\), os\._exit\(3\) at my_env\.py line \d+, while [a-z ]+: [a-z ]+ instead$",
        ),
        (
            "import signal, time; signal.alarm(1); time.sleep(3)",
            r"signal 14 \(SIGALRM\) in task \d+, reset\(\), at my_env\.py line \d+, while .*: an alarm that it set itself",
        ),
        (
            "os.kill(os.getpid(), 9)",
            r"SIGKILL\).* in task \d+, reset\(\), while recording episodes: leave out what ends it, or use less memory",
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


SLEEPS_ONCE = "'slept' in globals() or globals().update(slept=time.sleep(0.3))"


@pytest.mark.parametrize(("opening", "call"), [(SLEEPS_ONCE, r", task \d+, reset\(\)"), ("", "")])
def test_what_is_waited_for_is_said_with_its_limit(
    opening: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "WAIT_S", 0.1)
    monkeypatch.setattr(run, "TOTAL_S", 0.0)
    path, told = with_code(tmp_path, opening or "pass"), list[str]()
    text = Path(path).read_text()
    Path(path).write_text(f"import time\n{'' if opening else 'time.sleep(0.5)'}\n{text}")
    found = check(path, {}, sandboxed=False, wait=told.append)
    doing = "recording episodes" if opening else "loading it"
    assert any(re.fullmatch(rf"waiting for my_env\.py, at most \d+ s: {doing}{call}", one) for one in told), told
    (late,) = [finding for finding in found if finding.check == "not checked"]
    assert late.outcome == "skipped" and "members, indices" in late.detail and "0 s were over" in late.detail


@pytest.mark.parametrize("data", [
    b'{"value": ["perfect", ""]}', b'{"value": ["passed"]}', b'{"stuck": "", "seen": []}', b'{"failed": 1}', b"[1]",
    b"[" * 100_000, b'{"value": ' + b"9" * 5000 + b"}", b'{"value": 7}',
])  # fmt: skip
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
