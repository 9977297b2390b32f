"""Hosting and joining by the commands that people type: the join line works, the host pauses and resumes, all leave."""

import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from shoal.config import load_run
from shoal.protocol.messages import NodeState
from shoal.run_folder import RunFolder
from tests.launch.test_supervisor import RUN_FILE
from tests.net.forward_proxy import forward_proxy

SHOAL = [sys.executable, "-m", "shoal.cli.main"]


def begin(folder: Path, name: str, *args: str) -> subprocess.Popen[bytes]:
    """Start a command in the background, with its own home and output file."""
    with (folder / f"{name}.txt").open("wb") as out:
        environment = os.environ | {"SHOAL_HOME": str(folder / f"{name}-home"), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([*SHOAL, *args], cwd=folder, stdout=out, stderr=out, env=environment)


def said(folder: Path, name: str, pattern: str, timeout_s: float = 90.0) -> str:
    """Wait until a command's output matches; returns the match's first group, or all of the match."""
    deadline = time.monotonic() + timeout_s
    while not (found := re.search(pattern, text := (folder / f"{name}.txt").read_text())):
        assert time.monotonic() < deadline, f"{name} did not say {pattern!r} but: {text}"
        time.sleep(0.05)
    return found[1] if found.groups() else found[0]


def admin(folder: Path, *args: str) -> str:
    return subprocess.run([*SHOAL, "admin", *args], cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder and the URL of a host whose run is longer than the tests that visit it. It is stopped by Ctrl-C."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "small.toml").write_text(RUN_FILE)
    values = ("steps=4000", "eval.episodes=0", "workers.cheating=0")
    host = begin(folder, "host", "host", "small.toml", *(word for value in values for word in ("--set", value)))
    try:
        yield folder, said(folder, "host", r"shoal join (http://127\.0\.0\.1:\d+)\n")
        host.send_signal(signal.SIGINT)
        assert host.wait(timeout=60) == 130
        said(folder, "host", "The same command resumes the run")
    finally:
        host.kill()
        host.wait()


@pytest.mark.parametrize("proxy_from", ["option", pytest.param("environment", marks=pytest.mark.slow)])
def test_a_stranger_joins_through_a_proxy_sees_what_was_accepted_and_leaves(
    hosted: tuple[Path, str], proxy_from: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, url = hosted
    name = f"stranger-{proxy_from}"
    with forward_proxy() as proxy:
        given = f"http://127.0.0.1:{proxy.port}"
        if proxy_from == "environment":
            monkeypatch.setenv("HTTP_PROXY", given)
            monkeypatch.delenv("NO_PROXY", raising=False)
            given = "env"
        words = ("--threads", "1", "--name", name, "--log", f"{name}.jsonl", "--proxy", given)
        worker = begin(folder, name, "join", url, *words)
        monkeypatch.undo()  # the host's commands need no proxy
        try:
            said(folder, name, rf"joined run=small as={name}")
            said(folder, name, r"accepted groups=\d+ credits=\+\d+")

            assert "The run is paused" in admin(folder, "pause", "runs/small")
            said(folder, name, r"waiting reason='.*paused")
            key_file = str(folder / "runs" / "small" / "keys" / "run.key")
            assert "The run is running" in admin(folder, "resume", url, "--key", key_file)

            worker.send_signal(signal.SIGINT)
            assert worker.wait(timeout=60) == 0, said(folder, name, "(?s).*")
            said(folder, name, r"left credits=[1-9]\d* accepted=[1-9]\d* refused=0")
        finally:
            worker.kill()
            worker.wait()
        places = [place for _, place in proxy.asked]
    kept = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    assert {line["role"] for line in kept} == {"worker"}
    assert any(line["message"].startswith("left credits=") for line in kept)
    origin = json.loads((folder / "runs/small/origin.json").read_text())["port"]
    assert places.count(url.removeprefix("http://")) > 5 and f"127.0.0.1:{origin}" in places, "and the weights, too"


COUNTING = """
from shoal.env import Env, Step

class Counting(Env):
    name, num_tasks = "counting", 100
    def task(self, index, heldout=False):
        return index
    def reset(self, task):
        return "", [{"role": "user", "content": f"{task}: say letters"}]
    def step(self, state, action):
        return Step(action, "", True)
    def score(self, state):
        return min(4, sum(letter.isalpha() for letter in state)) / 4

environment = Counting
"""


@pytest.mark.slow
def test_strangers_that_have_nothing_of_it_train_on_the_hosts_own_file(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(COUNTING)
    (tmp_path / "small.toml").write_text(RUN_FILE.replace('name = "arithmetic"', 'name = "counting.py"').replace(
        'args = { digits = 1, operations = "+" }', ""))  # fmt: skip
    values = ("steps=3", "eval.episodes=0", "workers.cheating=0", "rollouts.max_staleness=0")
    host = begin(tmp_path, "host", "host", "small.toml", *(word for value in values for word in ("--set", value)))
    workers = []
    try:
        url = said(tmp_path, "host", r"shoal join (http://127\.0\.0\.1:\d+)\n")
        workers = [begin(tmp_path, name, "join", url, "--threads", "1", "--name", name) for name in ("one", "two")]
        assert host.wait(timeout=120) == 0, said(tmp_path, "host", "(?s).*")
        for name, worker in zip(("one", "two"), workers, strict=True):
            assert worker.wait(timeout=60) == 0, said(tmp_path, name, "(?s).*")
            said(tmp_path, name, r"left credits=\d+ accepted=\d+ refused=0")
        (tmp_path / "counting.py").unlink()
        audit = subprocess.run([*SHOAL, "audit", "runs/small", "--all"], cwd=tmp_path, capture_output=True, text=True)
        assert audit.returncode == 0 and "the log agrees with what was recomputed" in audit.stdout, audit.stdout
    finally:
        for process in (*workers, host):
            process.kill()
            process.wait()


def test_two_strangers_wait_to_be_admitted_and_judge_together(hosted: tuple[Path, str]) -> None:
    folder, url = hosted
    judges = {"one": begin(folder, "one", "validate", url, "--threads", "1", "--name", "anna")}
    judges["two"] = begin(folder, "two", "validate", url, "--threads", "1")
    try:
        keys = [said(folder, name, r"Send the host this key:\n.* ([0-9a-f]{64})\n") for name in judges]
        said(folder, "one", r"The host types, .*: shoal admin admit RUN_DIR KEY")
        assert all(judge.poll() is None for judge in judges.values())
        assert "two validators" not in admin(folder, "admit", "runs/small", *keys)
        for name in judges:
            said(folder, name, "joined run=small")
        nodes = msgspec.json.decode(httpx.get(f"{url}/v1/nodes").content, type=list[NodeState])
        names = {node.key: node.name for node in nodes if node.role == "validator"}
        assert names[keys[0]] == "anna" and names[keys[1]] == platform.node() and len(names) == 3
        for judge in judges.values():
            judge.send_signal(signal.SIGINT)
            assert judge.wait(timeout=60) == 0
    finally:
        for judge in judges.values():
            judge.kill()
            judge.wait()


def test_a_signal_ends_a_node_that_is_still_looking_for_its_run(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(RUN_FILE)
    RunFolder(tmp_path / "run").prepare(load_run(tmp_path / "small.toml"), tmp_path)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"  # bound, but nobody listens
        commands = {"join": ["--threads", "1"], "validate": ["--threads", "1"], "train": ["--run-dir", "run"]}
        nodes = {command: begin(tmp_path, command, command, url, *args) for command, args in commands.items()}
        try:
            for (command, process), number in zip(
                nodes.items(), (signal.SIGINT, signal.SIGTERM, signal.SIGTERM), strict=True
            ):
                said(tmp_path, command, f"waiting for {url} .*Check that it is running.* It asks again; Ctrl-C ends it")
                process.send_signal(number)
                assert process.wait(timeout=30) == 0
                assert "stopped before" in (tmp_path / f"{command}.txt").read_text().splitlines()[-1]
        finally:
            for process in nodes.values():
                process.kill()


def test_a_relay_of_a_host_that_is_away_says_what_it_waits_for_and_how_to_end_it(tmp_path: Path) -> None:
    relay = begin(tmp_path, "relay", "relay", "http://127.0.0.1:9", "--bind", "127.0.0.1", "--port", "0")
    try:
        said(tmp_path, "relay", r"asking http://127\.0\.0\.1:9 for its run")
        said(tmp_path, "relay", r"waiting for http://127\.0\.0\.1:9 .* It asks again; Ctrl-C ends it", timeout_s=40.0)
        relay.send_signal(signal.SIGINT)
        assert relay.wait(timeout=30) == 0
        said(tmp_path, "relay", "stopped before the host answered")
    finally:
        relay.kill()
        relay.wait()
