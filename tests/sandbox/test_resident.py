"""A foreign program that stays: it answers, is isolated, and how it ends is told."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.ipc import ChildExited, Reason
from shoal.sandbox.cgroups import Cgroup
from shoal.sandbox.filesystem import interpreter, outside
from shoal.sandbox.limits import Limits
from shoal.sandbox.sandbox import Resident
from tests.sandbox.needs import needs_bubblewrap

ANSWERS = """
import os, signal, socket, sys, time
def read(size):
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece: sys.exit()
        data += piece
    return data
def answer(data): os.write(1, len(data).to_bytes(4, "big") + data)
while True:
    request = read(int.from_bytes(read(4), "big")).decode()
    if request == "socket":
        try: socket.socket(); answer(b"open")
        except OSError: answer(b"closed")
    elif request == "huge": os.write(1, (1 << 30).to_bytes(4, "big"))
    elif request == "noise": [os.write(2, bytes(60000)) for _ in range(100)]; answer(b"said")
    elif request.startswith("run "):
        try: answer(repr(eval(request[4:])).encode())
        except MemoryError: os.kill(os.getpid(), signal.SIGRTMAX)
    else: answer(request.encode())
"""


class Opened(Resident):
    """The program of ANSWERS."""

    def __init__(self, limits: Limits = Limits(), packages: tuple[Path, ...] = ()) -> None:
        super().__init__([str(interpreter()), "-c", ANSWERS], limits, packages)

    def said(self, request: str) -> str:
        return self.ask(request.encode(), self.limits.wall_s, 1 << 20).decode()

    def exited(self, request: str) -> Reason | int | None:
        """Why it gave no answer: a limit, or its exit code."""
        with pytest.raises(ChildExited) as gone:
            self.said(request)
        return gone.value.reason or gone.value.code


@needs_bubblewrap
def test_a_resident_remembers_and_answers() -> None:
    resident = Opened()
    assert resident.said("hello") == "hello"
    assert resident.said("run globals().__setitem__('x', 5)") == "None"
    assert resident.said("run x") == "5"
    assert resident.said("noise") == "said"
    resident.end()
    assert resident.exited("hello") is Reason.KILLED


@needs_bubblewrap
def test_memory_that_is_taken_between_two_answers_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without control groups nobody else counts it, and an answer that comes at once leaves no time to look."""
    monkeypatch.setattr(Cgroup, "make", staticmethod(lambda: Cgroup([])))
    resident = Opened(Limits(memory_mb=100))
    code = "[os.fork() or (globals().__setitem__('x', bytearray(50_000_000)), time.sleep(9)) for _ in range(4)]"
    resident.said(f"run {code}")
    time.sleep(1.5)
    assert resident.exited("hello") is Reason.MEMORY


CHAIN = """
def burn(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until: pass
if os.fork() == 0:
    for _ in range(40):
        burn(0.2)
        if os.fork() != 0: os._exit(0)
    os._exit(0)
"""
SILENT = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
def burn(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until: pass
if os.fork() == 0:
    for _ in range(40):
        if os.fork() == 0: burn(0.2); os._exit(0)
        time.sleep(0.25)
    os._exit(0)
"""


@needs_bubblewrap
@pytest.mark.parametrize("program", [CHAIN, SILENT])
def test_the_cpu_time_of_a_chain_of_forks_is_added_up(program: str) -> None:
    resident = Opened(Limits(wall_s=20.0, cpu_s=2))
    assert resident.said(f"run exec({program!r}, globals())") == "None"
    assert resident.exited("run time.sleep(15)") is Reason.TIMEOUT


@needs_bubblewrap
def test_a_resident_that_waits_takes_no_cpu_time() -> None:
    assert Opened(Limits(wall_s=20.0, cpu_s=1)).said("run time.sleep(1.5)") == "None"


@needs_bubblewrap
@pytest.mark.parametrize(
    ("request_", "how"),
    [
        ("run [0 for _ in iter(int, 1)]", {Reason.TIMEOUT, Reason.MEMORY}),
        ("huge", {Reason.LONG}),
        ("run os.kill(os.getpid(), 9)", {Reason.KILLED}),
        ("run os._exit(3)", {3}),
        ("run os.abort()", {-6}),
    ],
)
def test_a_resident_that_ends_says_why(request_: str, how: set[Reason | int]) -> None:
    """Beyond a limit, or by itself."""
    resident = Opened(Limits(wall_s=1.0, memory_mb=64))
    why = resident.exited(request_)
    assert why in how and resident.exited("hello") == why


@needs_bubblewrap
def test_a_resident_that_has_ended_kills_no_process_whose_descriptor_has_the_number_of_its_own() -> None:
    """`kill` comes from another thread, which may be late."""
    resident, other = Opened(), subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    number = resident._first._watched
    resident.end()
    taken = os.pidfd_open(other.pid)
    os.dup2(taken, number)
    resident.kill()
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.5)
    other.kill()
    other.wait()
    for descriptor in {taken, number}:
        os.close(descriptor)


@needs_bubblewrap
def test_a_resident_reaches_no_network_no_file_and_no_other_process(tmp_path: Path) -> None:
    shown, hidden = tmp_path / "shown", tmp_path / "hidden"
    shown.mkdir()
    hidden.mkdir()
    resident = Opened(packages=(shown,))
    assert resident.said("socket") == "closed"
    seen = resident.said(f"run os.path.exists('{outside(shown)}'), os.path.exists('{outside(hidden)}')")
    assert seen == "(True, False)"
    assert resident.said("run [p for p in os.listdir('/proc') if p.isdigit()]") == "['1', '2']"
    assert resident.said("run 'HOME' in os.environ and len(os.environ) < 9") == "True"
    assert resident.said(f"run os.path.exists('/proc/{os.getpid()}')") == "False"
