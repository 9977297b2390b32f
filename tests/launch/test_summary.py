"""What is gathered at the end of a run, and what is known while it lasts."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.humanize import percent
from shoal.launch.role_process import RoleUsage
from shoal.launch.summary import UsageBook, _troubles, influence_shares
from shoal.ledger.batches import GroupAccepted
from shoal.ledger.event_types import make_entry
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.net.outbound_proxy import use_proxy
from shoal.net.safe_http import SHOAL
from shoal.protocol.constants import MAX_NODES
from shoal.protocol.encoding import to_json
from shoal.protocol.messages import Faults, NodeState, Status
from shoal.run_folder import RunFolder
from shoal.runs.remote_status import CoordinatorWatch
from shoal.runs.run_status import NO_STATUS, RunStatus, names_apart
from shoal.step_metrics import MetricsFollower

STATUS = Status("x", "running", 3, 9, 5, {}, 1, 0, "workers", 2.0)


def test_the_error_that_most_groups_share_is_in_the_log_of_a_run(tmp_path: Path) -> None:
    said = ("a.py line 1: KeyError: 'x'", "a.py line 9: ValueError: odd", "a.py line 1: KeyError: 'y'")
    assert _troubles(RunFolder(tmp_path).log) == (0, "", ""), "there is no log"
    store = Store(sqlite_url(tmp_path / "log.sqlite"))
    for seq, error in enumerate(said):
        group = GroupAccepted(0, seq, "s", 0, "d", 4, (0.0, 1.0), False, faults=Faults((0,), said=error))
        store.append([make_entry(seq, 1.0, group, "0" * 64)])
    store.close()
    assert _troubles(RunFolder(tmp_path).log) == (0, "", said[2])


def test_usage_is_summed_by_role_and_over_restarts(tmp_path: Path) -> None:
    first = UsageBook(tmp_path / "usage.json")
    first.save({"worker-0": RoleUsage(1.0, 50.0), "cheater-0": RoleUsage(2.0, 60.0), "trainer": RoleUsage(4.0, 90.0)})
    second = UsageBook(tmp_path / "usage.json")
    second.save({"worker-0": RoleUsage(0.5, 10.0)})
    total = second.by_role()
    assert (total["worker"], total["trainer"]) == (RoleUsage(3.5, 60.0), RoleUsage(4.0, 90.0))
    assert json.loads((tmp_path / "usage.json").read_text())["cpu_s"]["worker"] == 3.5


def test_wall_time_goes_on_from_where_the_last_launch_ended(tmp_path: Path) -> None:
    (tmp_path / "usage.json").write_text('{"wall_s": 100.0, "cpu_s": {}, "peak_rss_mb": {}}')
    assert 100.0 <= UsageBook(tmp_path / "usage.json").wall_s() < 200.0
    seen = UsageBook(tmp_path / "usage.json", has_ended=True)
    seen.save({"trainer": RoleUsage(1.0, 1.0)})
    assert seen.wall_s() == 100.0 and json.loads((tmp_path / "usage.json").read_text())["wall_s"] == 100.0


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"wall_s": 1, "cpu_s": {"x": 1}}', b'{"wall_s": "x"}'])
def test_a_damaged_usage_file_starts_again_at_zero(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "usage.json").write_bytes(damage)
    assert UsageBook(tmp_path / "usage.json").by_role() == {}


def test_usage_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log_writer = UsageBook(tmp_path / "file" / "usage.json")
    log_writer.save({"trainer": RoleUsage(1.0, 1.0)})
    assert log_writer.by_role()["trainer"] == RoleUsage(1.0, 1.0) and (tmp_path / "file").read_text() == ""


def test_influence_is_each_workers_share_of_everything_learned() -> None:
    def node(name: str, role: str, influence: float) -> NodeState:
        return NodeState(name.encode().hex() * 32, role, name, "good", 0, 0, 0, 0, {}, "", influence=influence)  # type: ignore[arg-type]

    nodes = [node("a", "worker", 30.0), node("b", "worker", 10.0)]
    called = names_apart(nodes)
    assert influence_shares(nodes, called) == {"a": 0.75, "b": 0.25}
    shares = influence_shares([node("a", "worker", 50352.0), node("b", "worker", 49648.0)], called)
    assert f"{shares['a']:.1%}" == percent(0.50352) == "50.4%", "rounded once, and as in the report"
    assert influence_shares([], {}) == {} and influence_shares([node("a", "worker", 0.0)], called) == {"a": 0.0}


def test_no_two_nodes_are_called_the_same() -> None:
    def called(*named: tuple[str, str], most: int = 0) -> list[str]:
        nodes = [NodeState(key, "worker", name, "good", 0, 0, 0, 0, {}, "") for key, name in named]
        found = names_apart(nodes, most)
        assert [*found] == [node.key for node in nodes] and len({*found.values()}) == len(nodes)
        return [*found.values()]

    a, b, same_start = "a" * 64, "b" * 64, "a" * 63 + "b"
    assert called((a, "vm"), (b, "box")) == ["vm", "box"]
    assert called((a, "vm"), (b, "vm")) == [f"vm ({a[:12]})", f"vm ({b[:12]})"]
    assert called((a, "vm"), (same_start, "vm")) == [a, same_start]
    imitated = f"vm ({a[:12]})"
    assert called((a, "vm"), (b, "vm"), ("c" * 64, imitated)) == [a, f"vm ({b[:12]})", f"{imitated} (cccccccccccc)"]
    called((a, "vm"), (b, "vm"), ("c" * 64, a), ("d" * 64, imitated))
    for most in (0, 28):  # composed or not, they look the same
        assert called((a, "a\u0301b"), (b, "\u00e1b"), most=most) == [f"\u00e1b ({key[:12]})" for key in (a, b)]
    long = "gpu-of-the-cluster-in-hall-"
    assert called((a, f"{long}1"), (b, f"{long}2"), most=25) == [f"gpu-of-th… ({key[:12]})" for key in (a, b)]


def test_metrics_are_read_as_the_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    watch = MetricsFollower(path)
    assert watch.lines() == ()
    path.write_text('{"step": 0, "policy_tokens": 10, "step_s": 2.0}\n{"step": 1, "poli')
    assert [line["step"] for line in watch.lines()] == [0]
    path.write_text(
        '{"step": 0, "policy_tokens": 10, "step_s": 2.0}\n{"step": 1, "policy_tokens": 30, "step_s": 2.0}\n'
    )
    snapshot = RunStatus("x", "runs/x", 9, metrics=watch.lines())
    assert (snapshot.step, snapshot.tokens_per_s(), snapshot.latest("policy_tokens")) == (2, 10.0, 30.0)
    assert snapshot.latest("reward_all_mean") is None
    known = watch.lines()[0]
    with path.open("a") as file:
        file.write('{"step": 1, "loss": 2.0}\n')
    assert watch.lines() == (known, {"step": 1, "loss": 2.0}) and watch.lines()[0] is known, "each line is decoded once"
    path.write_text('{"step": 0, "loss": 3.0}\n')
    assert watch.lines() == ({"step": 0, "loss": 3.0},)
    path.unlink()
    assert watch.lines() == ()


class Answers(http.server.BaseHTTPRequestHandler):
    """A coordinator that answers only what the watch asks."""

    bodies: dict[str, bytes]

    def do_GET(self) -> None:
        body = self.bodies.get(self.path)
        self.send_response(200 if body is not None else 500)
        self.send_header(SHOAL, "1")
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[http.server.HTTPServer]:
    Answers.bodies = {"/v1/status": to_json(STATUS), "/v1/nodes": b"[]"}
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        address = {"url": "https://public.example.org", "port": server.server_port, "pid": 42}
        (tmp_path / "coordinator.json").write_text(json.dumps(address))
        yield server
        server.shutdown()
        thread.join()


def test_the_coordinator_is_asked_over_loopback_whatever_its_public_name_is(
    coordinator: http.server.HTTPServer, tmp_path: Path
) -> None:
    watch = CoordinatorWatch(tmp_path / "coordinator.json", "0.0.0.0")
    assert watch.url() == f"http://127.0.0.1:{coordinator.server_port}"
    assert watch.public_url() == "https://public.example.org"
    assert watch.healthy(42) and not watch.healthy(41)
    assert watch.status() == STATUS


def test_the_coordinator_of_a_folder_is_asked_without_the_proxy_of_the_user(
    coordinator: http.server.HTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    use_proxy("env")
    try:
        assert CoordinatorWatch(tmp_path / "coordinator.json", "127.0.0.1").status() == STATUS
    finally:
        use_proxy("")


def test_the_last_answer_is_kept_while_the_coordinator_restarts_or_answers_nonsense(
    coordinator: http.server.HTTPServer, tmp_path: Path
) -> None:
    watch = CoordinatorWatch(tmp_path / "coordinator.json", "127.0.0.1")
    assert watch.status() == STATUS
    for babble in (b"{", b"[]", b"\xff", to_json({"phase": "running"})):
        Answers.bodies = {"/v1/status": babble}
        assert watch.status() == STATUS
    Answers.bodies = {}
    assert watch.status() == STATUS and not watch.answers and watch.nodes == ()


def test_nodes_come_page_by_page_and_a_list_with_a_page_missing_is_not_shown(
    coordinator: http.server.HTTPServer, tmp_path: Path
) -> None:
    nodes = [NodeState(f"{i:064x}", "worker", f"w{i}", "new", 0, 0, 0, 0, {}, "") for i in range(2 * MAX_NODES + 50)]
    starts = range(0, len(nodes), MAX_NODES)
    pages = {i: to_json(nodes[i : i + MAX_NODES]) for i in starts}
    paths = {i: f"/v1/nodes?after={nodes[i - 1].key}" if i else "/v1/nodes" for i in starts}
    watch = CoordinatorWatch(tmp_path / "coordinator.json", "127.0.0.1")

    def told(bodies: dict[str, bytes]) -> tuple[NodeState, ...]:
        Answers.bodies = bodies | {"/v1/status": to_json(STATUS)}
        watch.status()
        return watch.nodes

    assert told({paths[i]: pages[i] for i in starts[:-1]}) == ()
    assert told({paths[i]: pages[i] for i in starts}) == tuple(nodes)
    assert told({"/v1/nodes": b"[]"}) == tuple(nodes), "what takes several answers is asked for seldom"


def test_a_list_of_nodes_that_never_ends_is_left(coordinator: http.server.HTTPServer, tmp_path: Path) -> None:
    page = [NodeState(f"{i:064x}", "worker", f"w{i}", "new", 0, 0, 0, 0, {}, "") for i in range(MAX_NODES)]
    Answers.bodies |= {"/v1/nodes": to_json(page), f"/v1/nodes?after={page[-1].key}": to_json(page)}
    watch = CoordinatorWatch(tmp_path / "coordinator.json", "127.0.0.1")
    assert watch.status() == STATUS and watch.nodes == tuple(page)


def test_nothing_is_known_before_the_coordinators_first_answer(tmp_path: Path) -> None:
    watch = CoordinatorWatch(tmp_path / "coordinator.json", "127.0.0.1")
    assert (watch.url(), watch.status(), watch.healthy(1)) == ("", NO_STATUS, False)
    for damage in ("", "[]", "{}", '{"url": 1}'):
        (tmp_path / "coordinator.json").write_text(damage)
        assert watch.url() == ""
