"""Ctrl-C: the first signal lets a role finish its work, the second ends the process at once."""

import signal
import subprocess
import sys
import time

import pytest

from shoal.net.server_address import ONE_STOP_S

BUSY = """
import asyncio, time
from shoal.net.server_address import Stopping

async def role():
    stopping = Stopping()
    with stopping.at_signals():
        print("ready", flush=True)
        await asyncio.to_thread(time.sleep, {work_s})  # as a worker plays a lease
    print("left", bool(stopping), flush=True)

asyncio.run(role())
"""


def begin(work_s: float) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY.format(work_s=work_s)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_process_at_once_while_a_thread_works(number: signal.Signals) -> None:
    process = begin(20.0)
    process.send_signal(number)
    time.sleep(ONE_STOP_S + 0.5)
    assert process.poll() is None, "the first signal must wait for the work in hand"
    began = time.monotonic()
    process.send_signal(number)
    assert process.wait(timeout=30) == -number
    assert time.monotonic() - began < 2


def test_two_signals_at_once_are_one_stop() -> None:
    """As of a Ctrl-C that the terminal sends to all of a group, and that their parent passes on."""
    process = begin(1.0)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[0] == "left True\n" and process.returncode == 0


def test_a_role_that_left_gives_the_signals_back() -> None:
    program = BUSY.format(work_s=0.5).replace("asyncio.run(role())", "") + (
        "import signal\nbefore = signal.getsignal(signal.SIGINT)\nasyncio.run(role())\n"
        "assert signal.getsignal(signal.SIGINT) is before"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[0] == "left True\n" and process.returncode == 0
