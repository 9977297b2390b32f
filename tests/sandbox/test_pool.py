"""The pool runs honest snippets as Python would, says how others ended, and leaves nothing behind."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import StateError
from shoal.ipc import Reason
from shoal.sandbox import bubblewrap
from shoal.sandbox.cgroups import Cgroup, processes_of
from shoal.sandbox.filesystem import outside
from shoal.sandbox.limits import Ended, Limits, Stopped
from shoal.sandbox.pool import Pool
from tests.sandbox.needs import needs_bubblewrap

LIMITS = Limits(wall_s=60.0, memory_mb=128)
pytestmark = needs_bubblewrap


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2, LIMITS, imports=["json"]) as pool:
        yield pool


def test_a_snippet_ends_as_a_script_would(pool: Pool) -> None:
    told = pool.run("import sys\nprint(sys.stdin.read().upper())\nprint('no', file=sys.stderr)\nsys.exit(3)", b"abc")
    assert told == Ended(3, b"ABC\n", b"no\n", cpu_s=told.cpu_s)
    assert pool.run("raise SystemExit('said')") == Ended(1, b"", b"said\n", cpu_s=pytest.approx(0, abs=1))
    failed = pool.run("def f(): return 1 / 0\nf()")
    assert isinstance(failed, Ended) and failed.exit_code == 1
    assert failed.stderr.decode().splitlines()[:3] == [
        "Traceback (most recent call last):",
        '  File "snippet.py", line 2, in <module>',
        "    f()",
    ]
    wrong = pool.run("def")
    assert isinstance(wrong, Ended) and b"SyntaxError" in wrong.stderr
    assert isinstance(pool.run("import os; os.abort()"), Ended)


def test_threads_subprocesses_and_exit_functions_work(pool: Pool) -> None:
    text = """
import atexit, multiprocessing, subprocess, sys, tempfile, threading, time
atexit.register(print, "last")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread", flush=True))).start()
print(subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout.strip(), flush=True)
with tempfile.NamedTemporaryFile("w+") as file: file.write("x")
queue = multiprocessing.get_context("fork").SimpleQueue()
child = multiprocessing.get_context("fork").Process(target=queue.put, args=("child",))
child.start()
print(queue.get(), flush=True)
child.join()
"""
    told = pool.run(text)
    assert isinstance(told, Ended) and told.exit_code == 0, told
    assert sorted(told.stdout.split()) == sorted([b"42", b"child", b"thread", b"last"]), told


def test_random_numbers_differ_and_hashes_do_not(pool: Pool) -> None:
    numbers = {pool.run("import random; print(random.random())").stdout for _ in range(3)}
    assert len(numbers) == 3
    assert len({pool.run("print(hash('a'), [*set('abcdef')])").stdout for _ in range(3)}) == 1


def test_reaching_a_limit_is_not_evidence(pool: Pool) -> None:
    """Its outcome has no exit code by which it could be judged."""
    for text, reason in (
        ("while True: pass", Reason.TIMEOUT),
        ("import time; time.sleep(30)", Reason.TIMEOUT),
        ("x = bytearray(10**9)", Reason.MEMORY),
        ("import os; os.kill(os.getpid(), 9)", Reason.KILLED),
    ):
        told = pool.run("print('before', flush=True)\n" + text, limits=replace(LIMITS, wall_s=0.5))
        assert isinstance(told, Stopped) and told.reason is reason, told
        assert told.stdout == b"before\n"
        assert not hasattr(told, "exit_code")


def test_a_process_that_computes_too_long_is_stopped_before_the_wall_time(pool: Pool) -> None:
    began = time.monotonic()
    told = pool.run("while True: pass", limits=replace(LIMITS, wall_s=60, cpu_s=1))
    assert isinstance(told, Stopped) and told.reason is Reason.TIMEOUT
    assert time.monotonic() - began < 20


def test_without_control_groups_memory_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cgroup, "make", staticmethod(lambda: Cgroup([])))
    share = "import os, time\nfor _ in range(6): os.fork() or (bytearray(40 * 10**6), time.sleep(9))\ntime.sleep(9)"
    with Pool(1, LIMITS) as pool:
        told = pool.run(share)
        assert isinstance(told, Stopped) and told.reason is Reason.MEMORY
        assert pool.run("print(1)").stdout == b"1\n"


def test_output_beyond_the_limit_is_cut_and_said_so(pool: Pool) -> None:
    told = pool.run("import sys\nprint('x' * 10**6)\nsys.stderr.write('y')")
    assert isinstance(told, Ended) and told.exit_code == 0
    assert told.stdout == b"x" * LIMITS.output_bytes and told.stdout_truncated
    assert told.stderr == b"y" and not told.stderr_truncated


def test_a_long_input_that_is_not_read_harms_nobody(pool: Pool) -> None:
    assert pool.run("print(1)", b"x" * 5_000_000) == Ended(0, b"1\n", cpu_s=pytest.approx(0, abs=1))
    told = pool.run("import sys; print(len(sys.stdin.read()))", b"x" * 5_000_000)
    assert told.stdout == b"5000000\n"


def test_a_caller_never_raises_a_limit_of_the_pool(pool: Pool) -> None:
    told = pool.run("x = bytearray(200 * 10**6)", limits=Limits(memory_mb=10_000))
    assert isinstance(told, Stopped) and told.reason is Reason.MEMORY


def test_snippets_run_beside_each_other(pool: Pool) -> None:
    began = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        assert all(isinstance(told, Ended) for told in threads.map(pool.run, ["import time; time.sleep(0.5)"] * 2))
    assert time.monotonic() - began < 0.95


def test_a_sandbox_that_something_ended_is_started_again() -> None:
    with Pool(1, LIMITS) as pool:
        first = pool.peek()
        os.kill(first, signal.SIGKILL)
        while Path(f"/proc/{first}").exists():
            time.sleep(0.01)
        assert pool.run("print(1)").stdout == b"1\n"
        killer = threading.Timer(0.3, os.kill, (pool.peek(), signal.SIGKILL))
        killer.start()
        told = pool.run("import time; time.sleep(3)")
        assert isinstance(told, Stopped) and told.reason is Reason.KILLED
        assert pool.run("print(2)").stdout == b"2\n"


def test_packages_are_shown_and_imported_once(tmp_path: Path) -> None:
    package = tmp_path / "site"
    package.mkdir()
    (package / "helper.py").write_text("import os\nMADE_BY = os.getpid()\n")
    with Pool(1, LIMITS, imports=["helper"], packages=[package]) as pool:
        told = pool.run("import helper; print(helper.MADE_BY)")
        assert told.stdout == b"1\n", "the zygote, which is the first process of the sandbox, has imported it"
        assert pool.run(f"open('{outside(package)}/new', 'w')").exit_code == 1  # type: ignore[union-attr]
    assert not (package / "new").exists()


def test_root_is_told_to_open_a_package_that_no_other_user_may_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with Pool(1, LIMITS, packages=[tmp_path]) as pool:
        if bubblewrap.is_root():
            with pytest.raises(StateError, match="chmod -R a\\+rX"):
                pool.run("print(1)")
        else:
            assert pool.run("print(1)").stdout == b"1\n"


@pytest.mark.parametrize(
    ("body", "said"),
    [("raise RuntimeError('no')", "RuntimeError: no"), ("import os; os._exit(1)", "exit code 1"),
     ("x = [bytearray(10**6) for _ in range(10**4)]", "memory")],
)  # fmt: skip
def test_a_package_that_cannot_be_imported_is_named(body: str, said: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "broken.py").write_text(body)
    with Pool(1, LIMITS, imports=["broken"], packages=[tmp_path]) as pool, pytest.raises(StateError, match=said):
        pool.run("print(1)")


def test_nothing_is_left_when_the_node_is_killed() -> None:
    program = """
import os, sys, threading, time
from shoal.sandbox.pool import Pool
pool = Pool(1)
print(pool.peek(), flush=True)
text = "import os, time\\nif os.fork() == 0: os.setsid()\\ntime.sleep(60)"
threading.Thread(target=pool.run, args=(text,), daemon=True).start()
time.sleep(0.5)
os.kill(os.getpid(), 9)
"""
    node = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    told, _ = node.communicate(timeout=60)
    init, until = int(told), time.monotonic() + 10
    while Path(f"/proc/{init}").exists():
        assert time.monotonic() < until, f"the sandbox outlived its node: {processes_of(init)}"
        time.sleep(0.05)
    Cgroup.make().remove()
    assert list(Path("/sys/fs/cgroup").rglob(f"shoal-{node.pid}-*")) == [], "the next sandbox sweeps its groups away"


def test_a_sandbox_outlives_the_thread_that_asked_for_it() -> None:
    """The kernel would end it with the thread that started it."""
    with Pool(1, LIMITS) as pool:
        first: list[int] = []
        thread = threading.Thread(target=lambda: first.append(pool.peek()))
        thread.start()
        thread.join()
        time.sleep(0.2)
        assert pool.peek() == first[0]


def test_root_gives_its_sandboxes_another_user(pool: Pool) -> None:
    owners = {os.stat(f"/proc/{pid}").st_uid for pid in processes_of(pool.peek())}
    if bubblewrap.is_root():
        assert all(bubblewrap.FIRST_USER <= owner < bubblewrap.FIRST_USER + bubblewrap.NUM_USERS for owner in owners)
    else:
        assert owners == {os.geteuid()}


def public_python() -> str:
    """An interpreter that every user may run, as that of a test may not be; and this tree must be readable."""
    for path in (shutil.which("python3", path="/usr/bin:/usr/local/bin"), sys.executable):
        if path and os.geteuid() == 0:
            with contextlib.suppress(PermissionError):
                tried = subprocess.run(
                    [path, "-c", "import sys, shoal.sandbox.pool; sys.exit(sys.version_info < (3, 11))"],
                    user=12345, group=12345, extra_groups=[], capture_output=True, cwd="/", env=ordinary_environment(),
                )  # fmt: skip
                if tried.returncode == 0:
                    return path
    return ""


def ordinary_environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}


def test_an_ordinary_user_has_the_same_sandbox() -> None:
    python = public_python()
    if not python:
        pytest.skip("not root, or no interpreter that another user may run")
    program = "from shoal.sandbox.selftest import examine; report = examine(); print(report); assert report.works"
    told = subprocess.run(
        [python, "-c", program], user=12345, group=12345, extra_groups=[], capture_output=True, text=True, cwd="/",
        env=ordinary_environment(), timeout=60,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr
