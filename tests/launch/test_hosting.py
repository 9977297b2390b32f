"""What a host is told: the line that others type, whom it reaches, what TLS needs, and what an admission means."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from shoal.cli.main import main
from shoal.config import HostConfig
from shoal.errors import ConfigError, PeerError, StateError
from shoal.launch.admin import LONE_VALIDATOR_RISK, NodesWatch, administer, hosted_url, invitation, rotate_publisher
from shoal.launch.background_run import _News
from shoal.launch.launcher_log import LoggingView
from shoal.launch.role_process import RoleProcess
from shoal.launch.run_lock import demand_free_ports, locked, locked_run
from shoal.ledger.commands import JoinRun, LeaveRun
from shoal.net.client import Client
from shoal.net.key_files import load_or_make_key
from shoal.net.server_address import living_pid, port_of_last_start, port_of_living, tell_address
from shoal.protocol import messages as t
from shoal.protocol.messages import AdminRequest
from shoal.run_folder import RunFolder, is_locked, write_atomically
from shoal.runs.remote_status import CoordinatorWatch
from shoal.runs.run_status import suspended_process
from shoal.views.terminal.watch_command import FolderWatch
from tests.roles.testbed import RunTestbed, tiny_run

RUN = Path("runs/wordle")


def test_loopback_says_that_only_this_machine_can_join() -> None:
    text = invitation("http://127.0.0.1:8470", HostConfig(), RUN)
    assert "    shoal join http://127.0.0.1:8470\n" in text
    assert "only this machine can join and watch" in text and "--bind 0.0.0.0" in text
    assert "caddy reverse-proxy" in text and "--public-url https://" in text


def test_the_join_line_of_an_open_address_has_the_machines_name() -> None:
    text = invitation("http://0.0.0.0:8470", HostConfig(bind="0.0.0.0"), RUN)
    assert f"    shoal join http://{socket.gethostname()}:8470\n" in text
    assert "without TLS" in text and "caddy reverse-proxy" in text


def test_the_join_line_has_a_public_url_with_tls_unchanged() -> None:
    text = invitation("https://shoal.example.org", HostConfig(public_url="https://shoal.example.org"), RUN)
    assert "    shoal join https://shoal.example.org\n" in text
    assert "caddy" not in text and "shoal admin" in text


def test_a_small_terminal_shows_the_page_and_how_to_steer_before_the_advice_on_tls() -> None:
    text = invitation("http://127.0.0.1:8470", HostConfig(), RUN)
    places = [text.index(word) for word in ("shoal join", "in a browser", "dashboard.url", "shoal admin", "put TLS")]
    assert places == sorted(places)


@pytest.mark.parametrize(("action", "run"), [("kick", "runs/x"), ("admit", "http://h"), ("pause", "http://h")])
def test_an_admin_call_names_what_it_lacks(action: str, run: str) -> None:
    with pytest.raises(ConfigError, match=r"say which node|--key"):
        administer(action, run, AdminRequest(), None)
    with pytest.raises(ConfigError, match="Only admit takes several keys"):
        administer("kick", "http://h", AdminRequest("worker-1", also=("worker-2",)), None)


@pytest.mark.parametrize(
    "line",
    ["drain RUN dora", "pause RUN dora", "resume RUN dora", "rate RUN dora --factor 0.5", "kick RUN dora --factor 0.5",
     "kick RUN dora --root x.key", "drain RUN --new-key 3f2a", "rotate-publisher RUN dora",
     "rotate-publisher RUN --key x.key", "rotate-publisher RUN --factor 0.5"],
)  # fmt: skip
def test_an_admin_call_refuses_what_its_action_does_not_take(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["admin", *line.split()]) == 2
    said = capsys.readouterr().err
    assert f"shoal admin {line.split()[0]} " in said and ("takes no" in said or "does not take" in said)


def test_a_folder_whose_run_is_not_up_is_steered_by_nobody(tmp_path: Path) -> None:
    """The address that it left may be another program's by now."""
    folder = RunTestbed(tmp_path / "run", tiny_run()).folder
    with socket.create_server(("127.0.0.1", 0)) as other:
        gone = subprocess.Popen(["true"])
        gone.wait()
        left = {"url": "http://127.0.0.1", "pid": gone.pid, "port": other.getsockname()[1]}
        folder.address.write_text(json.dumps(left))
        for steer in (lambda: administer("pause", str(folder.root), AdminRequest(), None),
                      lambda: rotate_publisher(str(folder.root), None, "")):  # fmt: skip
            with pytest.raises(PeerError, match="is not being hosted: start it with"):
                steer()
        with locked(folder.root):
            with pytest.raises(PeerError, match="is starting its coordinator: try again in a few seconds"):
                administer("pause", str(folder.root), AdminRequest(), None)
            (folder.checkpoints / "final").mkdir(parents=True)
            with pytest.raises(PeerError, match="has ended, and its host evaluates the final policy"):
                administer("pause", str(folder.root), AdminRequest(), None)
        folder.summary.write_text("{}")
        with pytest.raises(PeerError, match="has ended, and nobody hosts it"):
            administer("pause", str(folder.root), AdminRequest(), None)


def test_a_copy_of_a_hosted_folder_is_not_hosted_and_a_moved_one_is(tmp_path: Path) -> None:
    testbed = RunTestbed(tmp_path / "run", tiny_run())  # it lives as long as the test, so no file of its log vanishes
    folder = testbed.folder
    tell_address(folder.address, 8470, "http://127.0.0.1:8470")
    copied = RunFolder(shutil.copytree(folder.root, tmp_path / "copy", ignore=shutil.ignore_patterns("*-shm")))
    for is_reader in (True, False):
        watch = CoordinatorWatch(copied.address, "127.0.0.1", is_reader)
        assert watch.url() == watch.public_url() == "" and not watch.healthy(os.getpid())
    assert living_pid(copied.address) == port_of_living(copied.address) == 0
    assert port_of_last_start(copied.address) == 8470, "clients of a backup still ask there"
    with pytest.raises(PeerError, match="is not being hosted"):
        administer("pause", str(copied.root), AdminRequest(), None)
    moved = RunFolder(folder.root.rename(tmp_path / "moved"))
    assert hosted_url(moved) == "http://127.0.0.1:8470"


@pytest.mark.parametrize("host_plays", [False, True])
def test_the_host_is_told_that_one_validator_of_others_cannot_pause_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_plays: bool
) -> None:
    config = tiny_run(validators={"count": 0})
    envs = tuple(replace(env, kind="completions" if host_plays else "") for env in config.envs)
    testbed = RunTestbed(tmp_path / "run", replace(config, envs=envs))
    transport = httpx.ASGITransport(testbed.app)
    monkeypatch.setattr("shoal.launch.admin.Client", lambda url, key: Client(url, key, transport=transport))
    first, second = (load_or_make_key(tmp_path / f"{i}.key").public for i in range(2))
    said = administer("admit", "http://host", AdminRequest(first), tmp_path / "run/keys/run.key")
    assert (LONE_VALIDATOR_RISK in said, f"one validator, once {first[:12]} joins" in said) == (not host_plays,) * 2
    said = administer("admit", "http://host", AdminRequest(second), tmp_path / "run/keys/run.key")
    assert f"two validators, once {first[:12]}, {second[:12]} join" in said and LONE_VALIDATOR_RISK not in said


def test_host_is_warned_when_an_admission_or_a_removal_leaves_two_validators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    transport = httpx.ASGITransport(testbed.app)
    monkeypatch.setattr("shoal.launch.admin.Client", lambda url, key: Client(url, key, transport=transport))

    async def take_seat(key_file: Path) -> str:
        async with testbed.client(key_file) as client:
            client.run = testbed.coordinator.state.run
            join = t.Join("validator", key_file.stem, 0.0, "test", "float32", "cpu")
            return (await client.post_json("/v1/nodes", join, t.NodeState)).key

    def tell(action: str, node: str) -> bool:
        return "If one of two lies, forging costs nothing" in administer(
            action, "http://host", AdminRequest(node), tmp_path / "run/keys/run.key"
        )

    asyncio.run(take_seat(testbed.folder.keys / "validator-0.key"))
    for place, warned in ((1, True), (2, False)):
        key_file = tmp_path / f"guest-{place}.key"
        assert tell("admit", load_or_make_key(key_file).public) is warned
        asyncio.run(take_seat(key_file))
    assert not tell("pause", "") and tell("kick", "guest-1")
    testbed.coordinator.log_writer.write(
        LeaveRun(load_or_make_key(tmp_path / "guest-2.key").public, testbed.clock()), testbed.clock()
    )
    assert tell("admit", load_or_make_key(tmp_path / "guest-3.key").public), "the one that left does not count"
    asyncio.run(take_seat(tmp_path / "guest-2.key"))
    worker = t.Join("worker", "alice", 0.0, "test", "float32", "cpu")
    testbed.coordinator.log_writer.write(JoinRun("aa" * 32, worker, testbed.clock()), testbed.clock())
    assert not tell("kick", "alice") and not tell("kick", "guest-1"), "it changes nothing for who judges"
    more = [load_or_make_key(tmp_path / f"guest-{place}.key").public for place in (4, 5)]
    key_file, seq = tmp_path / "run/keys/run.key", testbed.coordinator.state.seq
    with pytest.raises(PeerError, match="'another name' is not a public key"):
        administer("admit", "http://host", AdminRequest(more[0], also=("another name",)), key_file)
    assert testbed.coordinator.state.seq == seq, "all or none"
    admitted = administer("admit", "http://host", AdminRequest(more[0], also=(more[1], more[0])), key_file)
    assert "two validators" not in admitted
    assert testbed.coordinator.state.validators[-2:] == tuple(more) and testbed.coordinator.state.seq == seq + 2
    testbed.coordinator.log_writer.write(
        LeaveRun(load_or_make_key(tmp_path / "guest-2.key").public, testbed.clock()), testbed.clock()
    )
    assert not tell("admit", more[0]), "several may judge, though they have not joined yet"


def test_a_host_is_told_when_a_validator_leaves_and_what_that_leaves_the_run_with() -> None:
    nodes = [t.NodeState(f"{i}" * 64, "validator", f"v{i}", "good", 0, 0, 0, 0, {}, "") for i in range(4)]
    judges, said = NodesWatch(), list[str]()
    assert judges.look(nodes) == [] == judges.look(nodes)
    for i, change in enumerate(({"left": True}, {"standing": "suspended"}, {"left": True}, {"standing": "kicked"})):
        nodes[i] = replace(nodes[i], **change)
        said += judges.look([*nodes, t.NodeState("e" * 64, "worker", "w", "good", 0, 0, 0, 0, {}, "", left=True)])
        assert judges.look(nodes) == []
    assert said[0] == "validator v0 (000000000000) has left: 3 validators judge now"
    assert said[1].startswith("Warning: validator v1 (111111111111) was suspended: two judge now. If one of two lies")
    assert "v2 (222222222222) has left: one judges now, and each refusal waits" in said[2]
    assert "v3 (333333333333) was kicked: nobody judges now" in said[3] and len(said) == 4


def test_the_silent_do_not_count_as_judging_and_who_leaves_a_run_that_stops_is_no_news() -> None:
    nodes = [t.NodeState(f"{i}" * 64, "validator", f"v{i}", "good", 0, 0, 0, 0, {}, "") for i in range(3)]
    judges, stopping = NodesWatch(), NodesWatch()
    assert judges.look(nodes) == stopping.look(nodes) == []
    nodes = [replace(nodes[0], left=True), replace(nodes[1], silent_s=100.0), nodes[2]]
    (said,) = judges.look(nodes)
    assert "v0 (000000000000) has left, v1 (111111111111) is silent: one judges now" in said
    assert stopping.look(nodes, is_stopping=True) == []


def test_a_host_is_told_once_of_each_node_that_has_seen_another_log() -> None:
    nodes = [t.NodeState(f"{i}" * 64, "worker", f"w{i}", "good", 0, 0, 0, 0, {}, "") for i in range(3)]
    watch, said = NodesWatch(), list[str]()
    for forked in ((), (0,), (0,), (0, 1, 2)):
        said += watch.look([replace(node, forked=i in forked) for i, node in enumerate(nodes)], is_stopping=True)
    assert said[0].startswith("Warning: w0 (000000000000) says") and "forks the run" in said[0]
    assert said[1].startswith("Warning: w1 (111111111111) (and 1 more) says") and len(said) == 2


def test_a_coordinator_that_was_stopped_by_a_signal_is_named_with_what_goes_on(tmp_path: Path) -> None:
    folder = RunTestbed(tmp_path / "run", tiny_run()).folder
    role = RoleProcess("coordinator", ["sleep", "60"], tmp_path / "log", 1, 0)
    with subprocess.Popen(["sleep", "60"]) as process, locked(folder.root):
        folder.address.write_text(json.dumps({"url": "http://127.0.0.1", "pid": process.pid, "port": 9}))
        assert suspended_process(process.pid) == "" == suspended_process(None)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        named = rf"its process {process.pid} is stopped .*`kill -CONT {process.pid}`"
        with pytest.raises(PeerError, match=named):
            administer("pause", str(folder.root), AdminRequest(), None)
        assert re.search(named, asyncio.run(FolderWatch(folder.root).look()).notice)
        view, role._process = LoggingView(_News(), tmp_path / "launcher.log", "text"), process
        view.stopped([role])
        view.stopped([role])
        assert (tmp_path / "launcher.log").read_text().count(f"coordinator: its process {process.pid} is stopped") == 1
        process.kill()
    assert suspended_process(process.pid) == ""


def test_a_start_that_is_refused_leaves_no_folder_behind_but_what_was_there_before(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "new"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for key in ("port", "origin_port", "dashboard_port"):
            with pytest.raises(StateError, match=f"port {port}: .* set host.{key} to another port"):
                demand_free_ports(out, HostConfig(**{key: port}), hosts=True)
        for refused in (HostConfig(bind="192.0.2.1"), HostConfig(bind="no host")):
            with pytest.raises(StateError, match="cannot listen on"):
                demand_free_ports(out, refused, hosts=False)
        assert demand_free_ports(out, HostConfig(dashboard_port=port), hosts=False) == [], "there is no page"

    def refuse(said: str, *made: str) -> bool:
        with pytest.raises(StateError), locked_run(out):
            for name in ("keys/run.key", *made):
                write_atomically(out / name, b"x")
            raise StateError(said)
        return out.exists()

    assert not refuse("the quota is too small") and out.parent.exists()
    assert refuse(f"the coordinator ended (full log: {out / 'logs' / 'coordinator.log'})"), "its log is named"
    assert refuse("the quota is too small"), "it was there before"
    shutil.rmtree(out)
    assert refuse("the trainer ended", "log.sqlite") and (out / "keys/run.key").exists()


def test_a_start_says_which_port_of_the_last_start_is_taken(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as ended:
        port, free = other.getsockname()[1], ended.getsockname()[1]
        ended.close()
        folder.address.write_text(json.dumps({"port": free}))
        folder.origin_address.write_text(json.dumps({"port": port}))
        (line,) = demand_free_ports(tmp_path, HostConfig(), hosts=True)
    assert f"{port}, at which the origin" in line and "host.origin_port" in line
    assert demand_free_ports(tmp_path, HostConfig(), hosts=True) == []


def test_a_host_is_not_told_done_for_what_was_so_before_or_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    transport = httpx.ASGITransport(testbed.app)
    monkeypatch.setattr("shoal.launch.admin.Client", lambda url, key: Client(url, key, transport=transport))

    async def take_seat(role: str, key_file: Path) -> str:
        async with testbed.client(key_file) as client:
            client.run = testbed.coordinator.state.run
            join = t.Join(role, key_file.stem, 0.0, "test", "float32", "cpu")  # type: ignore[arg-type]
            return (await client.post_json("/v1/nodes", join, t.NodeState)).key

    def said(action: str, node: str, *also: str) -> str:
        return administer(action, "http://host", AdminRequest(node, also=also), tmp_path / "run/keys/run.key")

    worker, other = (asyncio.run(take_seat("worker", tmp_path / f"{name}.key")) for name in ("worker-1", "worker-2"))
    validator = asyncio.run(take_seat("validator", testbed.folder.keys / "validator-0.key"))
    stranger = load_or_make_key(tmp_path / "guest.key").public
    for keys in ([worker], [stranger, worker]):
        with pytest.raises(PeerError, match=r"worker-1 \(.{12}\) is a worker, which needs no admission"):
            said("admit", *keys)
    assert stranger not in testbed.coordinator.state.validators, "all or none"
    assert "validator-0" in said("admit", validator)
    assert stranger[:12] in (line := said("admit", stranger, validator)) and "admit: done: " in line
    assert f"admit: nothing changed: {stranger[:12]} may judge" in said("admit", stranger)
    newer = load_or_make_key(tmp_path / "newer.key").public
    assert f"admit: done: {newer[:12]} may judge" in said("admit", newer, stranger)
    for action in ("kick", "quarantine"):
        with pytest.raises(PeerError, match="0 nodes match 'worker-3'"):
            said(action, "worker-3")
    with pytest.raises(PeerError, match="is a validator: only workers are quarantined"):
        said("quarantine", "validator-0")
    steps = [("resume", "", False), ("pause", "", True), ("pause", "", False), ("resume", "", True)]
    steps += [("quarantine", "worker-2", True), ("quarantine", other[:10], True)]
    steps += [("kick", "worker-1", True), ("kick", worker, False), ("quarantine", worker, False)]
    for action, node, is_news in steps:
        assert f"{action}: {'done' if is_news else 'nothing changed'}" in (line := said(action, node))
        assert {"kick": f"worker-1 ({worker[:12]}) is kicked, for good", "pause": "The run is paused"}.get(
            action, ""
        ) in line
    for factor, is_news in ((1.0, False), (0.5, True), (0.5, False), (1.0, True)):
        line = administer("rate", "http://host", AdminRequest(lr_factor=factor), tmp_path / "run/keys/run.key")
        assert ("rate: done" in line) is is_news
    assert "kick: done" in said("kick", validator)
    with pytest.raises(PeerError, match="was kicked, and that is for good: admit another key"):
        said("admit", validator)
    testbed.coordinator.state.phase = "ended"
    with pytest.raises(PeerError, match=r"^the run at http://host has ended: nothing of it can be steered any more$"):
        said("drain", "")


def test_a_start_that_waited_for_a_refused_one_holds_the_folder_that_is_there(tmp_path: Path) -> None:
    """The refused one removes the folder, with the lock that the other waits for."""

    def wait() -> bool:
        with locked(tmp_path / "run"):
            return is_locked(tmp_path / "run")

    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path / "run"):
            waiting = pool.submit(wait)
            time.sleep(0.3)
            shutil.rmtree(tmp_path / "run")
        assert waiting.result(30)
