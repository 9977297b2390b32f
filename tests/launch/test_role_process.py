"""A supervised process: it is started again, given up, stopped, counted, and never outlives its launcher."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from shoal.launch.role_process import MAX_QUICK_DEATHS, RoleProcess, last_line, tail


def role(tmp_path: Path, code: str) -> RoleProcess:
    return RoleProcess("worker-0", [sys.executable, "-c", code], tmp_path / "logs" / "worker-0.log", threads=1)


def tend_until(process: RoleProcess, holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"{process.state}, log: {tail(process.log, 9)}"
        process.tend()
        time.sleep(0.01)


def test_a_role_that_finished_or_was_asked_to_end_is_not_started_again(tmp_path: Path) -> None:
    code = "import os; print(os.getpid() == os.getsid(0), os.environ['OMP_NUM_THREADS'])"
    finished, asked = role(tmp_path, code), role(tmp_path / "asked", "import time; time.sleep(60)")
    tend_until(asked, lambda: asked.pid is not None)
    asked.ask_to_end()
    for process in (finished, asked):
        tend_until(process, lambda process=process: process.state == "done" and process.pid is None)
        process.tend(now=time.monotonic() + 1000)
        assert process.pid is None and process.restarts == 0
    assert tail(finished.log, 5) == ["True 1"], "it has a session of its own, and pinned threads"


def test_a_role_that_keeps_dying_is_given_up_with_a_reason(tmp_path: Path) -> None:
    process = role(tmp_path, "import sys; sys.exit(3)")
    now, waits = time.monotonic(), []
    while process.state != "given up":
        before = now
        while process.pid is None and process.state == "restarting":
            process.tend(now)
            now += 0.05
        waits.append(now - before)
        while process.pid is not None:
            process.tend(now)
            time.sleep(0.005)
    assert process.restarts == MAX_QUICK_DEATHS - 1
    assert "5 times" in process.reason and "exit code 3" in process.reason
    assert waits[-1] > 2 * waits[1], "each restart waits longer than the one before"


def test_a_role_that_needs_its_user_to_act_is_given_up_at_once(tmp_path: Path) -> None:
    process = role(tmp_path, "import sys; print('error: port 80 is in use', file=sys.stderr); sys.exit(2)")
    tend_until(process, lambda: process.state == "given up")
    assert process.restarts == 0 and process.reason == "port 80 is in use"


def test_a_role_is_never_given_up_for_kills_from_outside(tmp_path: Path) -> None:
    process = role(tmp_path, "import time; time.sleep(60)")
    for kills in range(MAX_QUICK_DEATHS + 2):
        tend_until(process, lambda: process.pid is not None)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        tend_until(process, lambda kills=kills: process.restarts == kills + 1)
    assert process.state in ("restarting", "running")
    process.kill()
    tend_until(process, lambda: process.pid is None)


def test_a_death_just_before_a_role_is_asked_to_end_is_counted(tmp_path: Path) -> None:
    process = role(tmp_path, "import time\nwhile time.process_time() < 0.1: pass")
    tend_until(process, lambda: process.pid is not None)
    assert process.pid is not None
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    process.ask_to_end()
    process.kill()
    tend_until(process, lambda: process.pid is None)
    assert process.use.cpu_s >= 0.1


def test_cpu_time_is_counted_over_all_restarts(tmp_path: Path) -> None:
    process = role(tmp_path, "import time, os\nwhile time.process_time() < 0.2: pass\nos.kill(os.getpid(), 9)")
    tend_until(process, lambda: process.restarts == 2)
    assert process.use.cpu_s >= 0.4
    assert process.use.peak_rss_mb > 1
    process.kill()
    tend_until(process, lambda: process.pid is None)


@pytest.mark.parametrize("ignores_sigterm", [False, True])
def test_roles_die_with_a_launcher_that_is_killed(tmp_path: Path, ignores_sigterm: bool) -> None:
    child = (
        "from shoal.launch.role_process import die_with_parent; die_with_parent(); import signal, time; "
        f"{'signal.signal(signal.SIGTERM, signal.SIG_IGN); ' if ignores_sigterm else ''}time.sleep(60)"
    )
    launcher = (
        "import sys, time; from pathlib import Path; from shoal.launch.role_process import RoleProcess\n"
        f"p = RoleProcess('x', [sys.executable, '-c', {child!r}], Path({str(tmp_path / 'x.log')!r}), 1)\n"
        "p.tend(); print(p.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.5)
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_last_line_of_a_role_without_a_log_says_that_there_is_none(tmp_path: Path) -> None:
    assert last_line(tmp_path / "none.log") == "its log is empty"


def test_only_what_a_role_logged_since_its_start_is_shown_and_its_reason_once(tmp_path: Path) -> None:
    process = role(tmp_path, "import sys; print('reading'); sys.exit('error: steps = 80')")
    process.log.parent.mkdir(parents=True, exist_ok=True)
    process.log.write_text("error: an earlier start\n")
    process.command = [*process.command[:-1], process.command[-1].replace("sys.exit(", "print(") + "; sys.exit(2)"]
    tend_until(process, lambda: process.state == "given up")
    assert (process.last_words(12), process.reason) == (["reading"], "steps = 80")
    silent = role(tmp_path, "import sys; sys.exit(2)")
    tend_until(silent, lambda: silent.state == "given up")
    assert (silent.last_words(12), silent.reason) == ([], "its log is empty")
