"""Requests to a child process: a deadline and a cap both ways, why it gave no answer, and nothing left when it is ended."""

import json
import os
import subprocess
import sys
import threading
import time

import msgspec
import psutil
import pytest

from shoal.ipc import Child, ChildExited, Reason, end, read_message, spawn

ECHO = """
import sys, time
from shoal.ipc import read_message, take_pipes, write_message
time.sleep(float(sys.argv[1]))
requests, answers = take_pipes()
print("what a library prints")
assert sys.stdin.read() == ""
while (request := read_message(requests)) is not None:
    write_message(answers, request[::-1])
"""
MOTHER = """
import os, subprocess, sys, time
children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
pids = " ".join(str(child.pid) for child in children).encode()
os.write(1, len(pids).to_bytes(4, "big") + pids)
time.sleep(float(sys.argv[1]))
"""
WRITES = "import os, signal, sys, time\n"


def child(program: str, argument: float = 0.0) -> Child:
    return Child(spawn([sys.executable, "-c", program, str(argument)]))


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("pause_s", [0.0, 1.0])
def test_messages_of_any_size_come_back_also_from_a_child_that_reads_late(pause_s):
    echo = child(ECHO, pause_s)
    for data in (b"", b"abc", bytes(range(256)) * 8192):
        assert echo.ask(data, 60, 1 << 22) == data[::-1]
    echo.end()


@pytest.mark.parametrize(
    ("does", "reason", "code", "says"),
    [
        ("time.sleep(5)", Reason.TIMEOUT, None, r"took longer than 0\.5 s"),
        ("os.write(1, b'\\0\\0\\0\\x09part'); time.sleep(5)", Reason.TIMEOUT, None, "took longer"),
        ("while True: os.write(1, b'\\0\\0\\0\\0' * 999)", Reason.TIMEOUT, None, "took longer"),
        ("os.write(1, b'\\0\\0\\xff\\xff')\nwhile True: os.write(1, b'x'); time.sleep(0.01)", Reason.TIMEOUT, None, "took"),
        ("os.write(1, b'\\x7f\\xff\\xff\\xff')", Reason.LONG, None, "answered with 2147483647 bytes, limit 65536"),
        ("os.write(1, b'\\0\\0\\0\\x09part')", None, 0, "ended by itself, with exit code 0"),
        ("os._exit(3)", None, 3, "exit code 3"),
        ("os.abort()", None, -6, r"was ended by signal 6 \(SIGABRT\)"),
        ("os.kill(os.getpid(), 9)", None, -9, r"signal 9 \(SIGKILL\), as the system does when memory runs out"),
        ("os.kill(os.getpid(), signal.SIGRTMAX)", Reason.MEMORY, None, "found no memory left"),
        ("os.close(1); time.sleep(5)", Reason.WRONG, None, "closed its pipe"),
        ("os.write(1, b'\\0\\0\\0\\x01{'); time.sleep(5)", Reason.WRONG, None, "gave a wrong answer"),
    ],
    ids=["hangs", "hangs in an answer", "floods", "drips", "lies about a length", "dies in an answer", "exits", "aborts",
         "is killed", "no memory", "closes its pipe", "another form"],
)  # fmt: skip
def test_a_child_without_an_answer_is_ended_and_stays_ended(does, reason, code, says):
    asked, began = child(WRITES + does), time.monotonic()

    def answers() -> None:
        asked.send(b"", 60)
        until = time.monotonic() + 0.5
        while time.monotonic() < until + 4:
            data = asked.receive(until - time.monotonic() if does.startswith("while") else 0.5, 1 << 16)
            asked.decoded(data or b"{}", json.loads)

    for _ in range(2):
        with pytest.raises(ChildExited, match=says) as gone:
            answers()
        assert (gone.value.reason, gone.value.code) == (reason, code)
        assert asked.process.returncode is not None
    assert time.monotonic() - began < 5


def test_a_child_that_does_not_read_its_pipe_is_waited_for_until_the_deadline():
    deaf, began = child("import time; time.sleep(5)"), time.monotonic()
    with pytest.raises(ChildExited, match="took longer") as gone:
        deaf.send(b"x" * (1 << 20), 0.5)
    assert gone.value.reason is Reason.TIMEOUT and 0.5 <= time.monotonic() - began < 4


def test_what_is_seen_while_a_child_is_waited_for_ends_it():
    watched, looks = child("import time; time.sleep(60)"), []

    def look() -> None:
        looks.append(time.monotonic())
        if len(looks) == 3:
            raise RuntimeError("seen")

    watched.watch(look)
    with pytest.raises(RuntimeError, match="seen"):
        watched.ask(b"", 60, 1)
    assert watched.process.returncode is not None
    with pytest.raises(ChildExited):
        watched.ask(b"", 60, 1)


def test_an_answer_of_another_form_ends_the_child():
    for data in (b"\xa2\xff\xfe", b"\x91" * 100_000, b"\xc1", b"\xa1x"):
        echo = child(ECHO)
        with pytest.raises(ChildExited, match="gave a wrong answer") as gone:
            echo.decoded(data, msgspec.msgpack.Decoder(list[int] | int).decode)
        assert gone.value.reason is Reason.WRONG and echo.process.returncode is not None


def test_a_child_is_killed_from_another_thread():
    hung = child("import time; time.sleep(60)")
    threading.Timer(0.2, hung.kill).start()
    with pytest.raises(ChildExited, match="signal 9"):
        hung.ask(b"", 60, 1)


@pytest.mark.parametrize("pause_s", [60.0, 0.0])
def test_the_end_of_a_child_is_that_of_all_that_it_has_started(pause_s):
    """Also if the child has ended by itself before."""
    mother = child(MOTHER, pause_s)
    started = [int(pid) for pid in mother.receive(60, 99).split()]
    if pause_s == 0:
        mother.process.wait()
    assert all(map(is_alive, started))
    mother.end()
    until = time.monotonic() + 20
    while any(map(is_alive, started)):
        assert time.monotonic() < until, "its children outlive it"
        time.sleep(0.02)


def test_a_child_ends_when_nobody_has_it():
    process = spawn([sys.executable, "-c", "import time; time.sleep(60)"])
    forgotten = Child(process)
    del forgotten
    assert process.returncode == -9


def test_a_request_that_was_cut_is_none():
    whole = (5).to_bytes(4, "big") + b"whole"
    for size in range(len(whole) + 1):
        out, into = os.pipe()
        os.write(into, whole[:size])
        os.close(into)
        assert read_message(out) == (b"whole" if size == len(whole) else None)
        os.close(out)


def test_a_child_without_pipes_is_ended_too():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    end(process)
    assert process.returncode == -9
