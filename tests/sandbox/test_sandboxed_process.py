"""A foreign program that stays: it answers, is isolated, and how it ends is told."""

import os
import time
from pathlib import Path

import pytest

from shoal.sandbox.cgroups import Cgroup
from shoal.sandbox.filesystem import interpreter, outside
from shoal.sandbox.limits import Ended, Limits, Reason, Stopped
from shoal.sandbox.sandboxed_process import Resident, ask_all
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


def opened(limits: Limits = Limits(wall_s=2.0), packages: tuple[Path, ...] = ()) -> Resident:
    return Resident([str(interpreter()), "-c", ANSWERS], limits, packages)


@needs_bubblewrap
def test_a_resident_remembers_and_answers() -> None:
    resident = opened()
    assert resident.ask(b"hello") == b"hello"
    assert resident.ask(b"run globals().__setitem__('x', 5)") == b"None"
    assert resident.ask(b"run x") == b"5"
    assert resident.ask(b"noise") == b"said"
    resident.close()
    assert resident.ask(b"hello") == Stopped(Reason.KILLED)


@needs_bubblewrap
def test_memory_that_is_taken_between_two_answers_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without control groups nobody else counts it, and an answer that comes at once leaves no time to look."""
    monkeypatch.setattr(Cgroup, "make", staticmethod(lambda: Cgroup([])))
    resident = opened(Limits(wall_s=2.0, memory_mb=100))
    code = b"run [os.fork() or (globals().__setitem__('x', bytearray(50_000_000)), time.sleep(9)) for _ in range(4)]"
    resident.ask(code)
    time.sleep(1.5)
    assert resident.ask(b"hello") == Stopped(Reason.MEMORY)


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
    resident = opened(Limits(wall_s=20.0, cpu_s=2))
    assert resident.ask(f"run exec({program!r}, globals())".encode()) == b"None"
    assert resident.ask(b"run time.sleep(15)") == Stopped(Reason.TIMEOUT)


@needs_bubblewrap
def test_a_resident_that_waits_takes_no_cpu_time() -> None:
    resident = opened(Limits(wall_s=20.0, cpu_s=2))
    assert resident.ask(b"run time.sleep(2.5)") == b"None"


@needs_bubblewrap
@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (b"run [0 for _ in iter(int, 1)]", {Reason.TIMEOUT, Reason.MEMORY}),
        (b"run time.sleep(9)", {Reason.TIMEOUT}),
        (b"huge", {Reason.KILLED}),
        (b"run os.kill(os.getpid(), 9)", {Reason.KILLED}),
    ],
)
def test_a_resident_beyond_a_limit_is_ended_and_blamed_for_nothing(request_: bytes, reason: set[Reason]) -> None:
    resident = opened(Limits(wall_s=1.0, memory_mb=64))
    told = resident.ask(request_)
    assert isinstance(told, Stopped) and told.reason in reason
    assert resident.ask(b"hello") == told


@needs_bubblewrap
def test_a_resident_that_ends_by_itself_says_its_exit_code() -> None:
    assert opened().ask(b"run os._exit(3)") == Ended(3)
    assert opened().ask(b"run os.abort()") == Ended(-6)


@needs_bubblewrap
def test_a_resident_reaches_no_network_no_file_and_no_other_process(tmp_path: Path) -> None:
    shown, hidden = tmp_path / "shown", tmp_path / "hidden"
    shown.mkdir()
    hidden.mkdir()
    resident = opened(packages=(shown,))
    assert resident.ask(b"socket") == b"closed"
    assert (
        resident.ask(f"run os.path.exists('{outside(shown)}'), os.path.exists('{outside(hidden)}')".encode())
        == b"(True, False)"
    )
    assert resident.ask(b"run [p for p in os.listdir('/proc') if p.isdigit()]") == b"['1', '2']"
    assert resident.ask(b"run 'HOME' in os.environ and len(os.environ) < 9") == b"True"
    assert resident.ask(f"run os.path.exists('/proc/{os.getpid()}')".encode()) == b"False"


@needs_bubblewrap
def test_many_residents_are_asked_at_once() -> None:
    residents = [opened() for _ in range(4)]
    began = time.monotonic()
    assert ask_all(residents, [b"run time.sleep(0.5)"] * 4) == [b"None"] * 4
    assert time.monotonic() - began < 1.5
    assert ask_all(residents, [b"a", b"run os._exit(1)", b"c", b"d"]) == [b"a", Ended(1), b"c", b"d"]
