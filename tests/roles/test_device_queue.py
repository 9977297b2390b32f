"""Processes are served in the order in which they came, and one that is killed has left."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from shoal.errors import StateError
from shoal.roles.node.device_queue import Queue


def test_first_come_first_served(tmp_path: Path) -> None:
    one, two, three = (Queue(tmp_path, name) for name in ("one", "two", "three"))
    for queue in (one, two, three):
        assert not queue.is_in
        queue.enter()
    assert (one.before(), two.before(), three.before()) == ([], ["one"], ["one", "two"])
    assert one.is_followed() and two.is_followed() and not three.is_followed()
    one.leave()
    one.enter()
    assert (two.before(), three.before(), one.before()) == ([], ["two"], ["two", "three"])
    two.leave()
    assert three.before() == []


def test_who_was_killed_has_left(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path), "holder"], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"in\n"
    queue = Queue(tmp_path, "next")
    queue.enter()
    assert queue.before() == ["holder"]
    holder.kill()
    holder.wait()
    assert queue.before() == []
    again = Queue(tmp_path, "holder")
    again.enter()  # and what it left is cleared away
    assert again.before() == ["next"] and len(list(tmp_path.glob("0*"))) == 2


def test_a_place_is_seen_when_it_is_locked(tmp_path: Path) -> None:
    """A file without its lock would be one of the dead, and its process would never be waited for."""
    (tmp_path / f".new-{os.getpid()}").touch()  # what a kill left, of a process with this number
    queue, other = Queue(tmp_path, "one"), Queue(tmp_path, "two")
    queue.enter()
    other.enter()
    assert other.before() == ["one"] and not list(tmp_path.glob(".new-*"))


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match=r"queue for a device.*host\.shifts=off"):
        Queue(tmp_path / "file" / "cuda", "one").enter()


HOLD = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from shoal.roles.node.device_queue import Queue
    queue = Queue(Path(sys.argv[1]), sys.argv[2])
    queue.enter()
    print("in", flush=True)
    time.sleep(600)
""")

WORK = textwrap.dedent("""
    import os, sys, time
    from pathlib import Path
    from shoal.roles.node.device_queue import Queue
    folder, name = Path(sys.argv[1]), sys.argv[2]
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    print("ready", flush=True)
    queue = Queue(folder / "queue", name)
    while True:
        queue.enter()
        while queue.before():
            time.sleep(0.001)
        os.write(log, f"{name} begins\\n".encode())
        time.sleep(0.002)  # the others come to the door meanwhile: the kernel lets anybody in, not who came first
        os.write(log, f"{name} ends\\n".encode())
        queue.leave()
""")


def test_kills_at_any_moment_leave_one_at_a_time_and_starve_nobody(tmp_path: Path) -> None:
    chance, names = random.Random(5), ["a", "b", "c"]

    def start(name: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", WORK, str(tmp_path), name], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    running = {name: start(name) for name in names}
    for _ in range(12):
        time.sleep(chance.uniform(0.02, 0.06))
        killed = chance.choice(names)
        running[killed].send_signal(signal.SIGKILL)
        running[killed].wait()
        running[killed] = start(killed)
    before = len((tmp_path / "log").read_text().splitlines())
    time.sleep(1.0)
    newest = (tmp_path / "log").read_text().splitlines()[before:]  # while all three live
    for process in running.values():
        process.kill()
        process.wait()
    lines, inside = (tmp_path / "log").read_text().splitlines(), ""
    for line in lines:
        name, what = line.split()
        # A killed process begins and never ends: then the next begins.
        assert what == "begins" or inside == name, f"{name} ended within {inside}'s shift"
        inside = name if what == "begins" else ""
    begun = [line.split()[0] for line in newest if line.endswith("begins")]
    assert all(begun.count(name) > len(begun) / 6 for name in names), {name: begun.count(name) for name in names}
