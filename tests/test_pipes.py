"""Requests over the pipes of a child process: a deadline both ways, and nothing left when the child is ended."""

import io
import subprocess
import sys
import time

import psutil
import pytest

from shoal.pipes import Late, Pipes, end, next_frame

ECHO = """
import sys, time
from shoal.pipes import next_frame, write_frame
time.sleep(float(sys.argv[1]))
while (request := next_frame(sys.stdin.buffer)) is not None:
    write_frame(1, request[::-1])
"""
MOTHER = """
import subprocess, sys, time
children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
print(*(child.pid for child in children), flush=True)
time.sleep(float(sys.argv[1]))
"""


def child(program: str, argument: float = 0.0) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", program, str(argument)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True)


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("pause_s", [0.0, 1.0])
def test_frames_of_any_size_come_back_also_from_a_child_that_reads_late(pause_s):
    pipes, until = Pipes(child(ECHO, pause_s)), time.monotonic() + 60
    for data in (b"", b"abc", bytes(range(256)) * 8192):
        pipes.send(data, until)
        assert pipes.read(pipes.size(until), until) == data[::-1]
    pipes.end()


def test_a_child_that_does_not_read_its_pipe_is_waited_for_until_the_deadline():
    process = child("import time; time.sleep(5)")
    pipes, began = Pipes(process), time.monotonic()
    with pytest.raises(Late):
        pipes.send(b"x" * (1 << 20), began + 0.5)
    assert time.monotonic() - began >= 0.5 and process.poll() is None
    pipes.end()


def test_an_answer_that_does_not_come_or_never_ends_is_late():
    pipes, began = Pipes(child("import os, time; os.write(1, b'1234567'); time.sleep(60)")), time.monotonic()
    assert pipes.size(began + 60) == int.from_bytes(b"1234", "big")
    with pytest.raises(Late):
        pipes.read(4, time.monotonic() + 0.2)
    pipes.end()


@pytest.mark.parametrize("pause_s", [60.0, 0.0])
def test_the_end_of_a_child_is_that_of_all_that_it_has_started(pause_s):
    """Also if the child has ended by itself before."""
    process = child(MOTHER, pause_s)
    assert process.stdout is not None
    started = [int(pid) for pid in process.stdout.readline().split()]
    if pause_s == 0:
        process.wait()
    assert all(map(is_alive, started))
    end(process)
    until = time.monotonic() + 20
    while any(map(is_alive, started)):
        assert time.monotonic() < until, "its children outlive it"
        time.sleep(0.02)


def test_a_request_that_was_cut_is_none():
    whole = (5).to_bytes(4, "big") + b"whole"
    assert next_frame(io.BytesIO(whole)) == b"whole"
    assert [next_frame(io.BytesIO(whole[:size])) for size in range(len(whole))] == [None] * len(whole)
