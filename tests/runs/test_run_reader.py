"""Reading a run, from its folder and from its URL: what it gives, and what a run or a host may do to its reader."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.chat.isolated import ContainedRenderer
from shoal.chat.renderer import FILES
from shoal.envs.load import env_digest
from shoal.errors import ConfigError, NothingYet, Overreach, PeerError, ShoalError, StateError
from shoal.ledger.event import Entry
from shoal.ledger.event_types import make_entry
from shoal.ledger.log.check import verify
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.state import state_hash
from shoal.ledger.verdicts import Decision
from shoal.net.blobs import path_of
from shoal.protocol import messages as t
from shoal.protocol.encoding import from_msgpack
from shoal.run_folder import RunFolder
from shoal.runs.log_follower import LogFollower
from shoal.runs.remote_status import CoordinatorWatch
from shoal.runs.rollouts import open_envs
from shoal.runs.run_reader import Replaced, open_run
from shoal.sandbox.bubblewrap import unreadable
from shoal.step_metrics import read_metrics
from tests.roles.testbed import URL


def at_url(testbed):
    return open_run(URL, transport=httpx.ASGITransport(testbed.app, raise_app_exceptions=False))


@pytest.fixture(params=["folder", "url"])
def run(request, testbed):
    with open_run(testbed.folder.root) if request.param == "folder" else at_url(testbed) as reading:
        reading.catch_up()
        yield reading


def test_both_ways_give_the_state_of_the_log(run, testbed):
    audit = verify(Store(sqlite_url(testbed.folder.log), read_only=True).read())
    assert state_hash(run.state) == state_hash(audit.state)
    assert [entry.hash for entry in run.events(3)] == [entry.hash for entry in audit.entries[4:]]
    assert run.refresh() == []
    assert [node.reasons for node in run.nodes() if node.name == "cheater"] != [{}]
    assert [version.version for version in run.versions()] == [0, 1, 2]
    assert run.manifest(2).root == run.versions()[2].root


def test_both_ways_give_the_metrics(run, testbed):
    lines = read_metrics(testbed.folder.metrics)
    assert run.metrics() == lines and run.metrics(after=0) == lines[1:]
    assert run.new_metrics() == lines and run.new_metrics() == []


def test_both_ways_give_accepted_groups_as_conversations(run, testbed):
    accepted = [place for place in run.places() if run.group(place).status in ("signal", "flat")]
    assert len(accepted) == run.state.accepted_groups > 4
    place = next(place for place in accepted if run.group(place).status == "signal")
    group = run.group(place, with_pieces=True)
    assert group.env == "arithmetic" and group.is_public and group.received_seq < group.seq
    assert run.place_of(group.version, group.slot) == place == run.place_named(group.digest)
    raw = from_msgpack(run.bytes_of(place), t.Group)
    assert abs(sum(rollout.advantage for rollout in group.rollouts)) < 1e-4
    for rollout, sent in zip(group.rollouts, raw.rollouts, strict=True):
        first, *_, last = rollout.turns
        assert (first.author, last.author) == ("environment", "policy") and rollout.ending == sent.ending
        assert [x for turn in rollout.turns for x in turn.token_ids] == sent.tokens_T().tolist()
        assert [x for turn in rollout.turns for x in turn.logprobs] == sent.logprobs_P().tolist()
        assert last.advantages == (np.float32(rollout.advantage),) * len(last.token_ids)
        assert all(len(turn.pieces) == len(turn.token_ids) for turn in rollout.turns)
        assert first.text.strip() and first.text.strip() in rollout.text()


def test_a_group_is_played_again_for_the_parts_of_its_rewards(run):
    place = next(place for place in run.places() if run.group(place).status == "signal")
    found = run.replayed(place)
    for rollout, texts in zip(found.group.rollouts, found.texts, strict=True):
        assert rollout.problem == "" and set(rollout.parts) >= set() and texts[-1][0] == "policy"
        assert texts[-1][1] == rollout.turns[-1].text
    refused = next(place for place in run.places() if run.group(place).status == "refused")
    assert run.group(refused).rollouts[0].reward is None


def test_a_strangers_tokenizer_gives_the_same_pieces_from_its_own_process(testbed):
    with open_run(testbed.folder.root) as run, at_url(testbed) as far:
        run.catch_up(), far.catch_up()
        own, strange = run.renderer(), far.renderer()
        turns = [own.encode("2+3="), [own.eos_id], list(range(30)), []]
        pieces = own.pieces(turns)
        assert ["".join(turn) for turn in pieces[:2]] == ["2+3=", "<|end|>"]
        assert [len(turn) for turn in pieces] == [len(turn) for turn in turns]
        assert isinstance(strange, ContainedRenderer) and strange.pieces(turns) == pieces


def test_the_sandbox_may_read_a_strangers_tokenizer_where_the_umask_hides_files(testbed, monkeypatch):
    monkeypatch.setattr("shoal.sandbox.bubblewrap.is_root", lambda: True)
    umask = os.umask(0o077)
    try:
        with at_url(testbed) as far:
            far.catch_up()
            assert far.renderer().decode([]) == ""
            home = Path(far.source._home.name)
            files = [home / name for name in FILES[far.state.sampling.stops] if (home / name).exists()]
            assert files and unreadable(files) == []
    finally:
        os.umask(umask)


def test_the_condition_is_the_coordinators_word_or_follows_from_the_log(testbed):
    with open_run(testbed.folder.root) as run, at_url(testbed) as far:
        assert run.condition().status.phase == "starting"
        run.catch_up()
        dead, live = run.condition(), far.condition()
    assert (dead.is_live, live.is_live) == (False, True)
    assert dead.status.accepted == live.status.accepted and dead.status.phase == live.status.phase == "ended"


def test_reading_leaves_the_folder_as_it_is(copied):
    def files():
        found = (path for path in copied.rglob("*") if path.is_file() and "log.sqlite" not in path.name)
        return {path: path.read_bytes() for path in found}

    before = files()
    with open_run(copied, private=True) as run:
        run.catch_up(), run.new_metrics(), run.evaluations(), run.condition()
        [run.group(place) for place in run.places()]
    assert files() == before and not (copied / "log.sqlite-wal").exists()


def test_a_run_that_is_starting_has_no_events_and_a_folder_without_a_run_is_refused(tmp_path, copied):
    with pytest.raises(ConfigError, match="holds no run"):
        open_run(tmp_path / "typo")
    log = copied / "log.sqlite"
    kept = log.read_bytes()
    log.unlink()
    with open_run(copied) as run, pytest.raises(StateError, match="is missing or empty, though the run has begun"):
        run.refresh()
    (copied / "metrics.jsonl").unlink()
    shutil.rmtree(copied / "trainer", ignore_errors=True)
    with open_run(copied) as run:
        assert run.refresh() == [] and not log.exists()
        log.write_bytes(b"")  # the coordinator has made the file, and no table
        assert run.refresh() == []
        log.write_bytes(kept)
        assert run.catch_up() > 0


def test_a_log_that_grows_is_read_on_and_one_that_was_replaced_is_noticed(testbed, tmp_path):
    entries = list(verify(Store(sqlite_url(testbed.folder.log), read_only=True).read()).entries)
    root = grown(tmp_path, entries[:20])
    with open_run(root) as run:
        assert run.catch_up() == 20
        append(root, entries[20:25])
        assert [entry.seq for entry in run.refresh()] == [20, 21, 22, 23, 24]
        shutil.rmtree(root)
        grown(tmp_path, entries[:15])
        with pytest.raises(Replaced, match="another log"):
            run.refresh()
    grown(tmp_path, [other(entries[0])])
    with open_run(root) as run:
        run.catch_up()
        shutil.rmtree(root)
        grown(tmp_path, entries[:2])
        with pytest.raises(Replaced):
            run.refresh()


def test_events_before_a_broken_one_are_given_and_then_the_fault(testbed, tmp_path):
    entries = list(verify(Store(sqlite_url(testbed.folder.log), read_only=True).read()).entries)
    nonsense = make_entry(20, entries[19].time, Decision("00" * 32, (), ()), entries[19].hash)
    with open_run(grown(tmp_path, [*entries[:20], nonsense])) as run:
        assert len(run.refresh()) == 20
        for _ in range(2):
            with pytest.raises(StateError, match="broken at event 20"):
                run.refresh()


def test_a_url_whose_log_does_not_fit_into_memory_is_left(testbed):
    transport = httpx.ASGITransport(testbed.app)
    with open_run(URL, max_memory_mb=1, transport=transport) as run:
        run._limit_bytes //= 10
        with pytest.raises(Overreach, match="does not fit"):
            run.catch_up()


def test_a_log_is_read_page_by_page_up_to_a_page_that_is_not_full(testbed, monkeypatch):
    monkeypatch.setattr("shoal.runs.log_source.MAX_EVENTS", 10)
    with open_run(testbed.folder.root) as run:
        assert run.catch_up() == testbed.coordinator.state.seq + 1
    with open_run(testbed.folder.root) as run:
        page = run.source.page

        async def dripping(after):
            return (await page(after))[:2]

        monkeypatch.setattr(run.source, "page", dripping)
        assert [run.catch_up() for _ in range(3)] == [2, 1, 1]


def test_a_program_that_does_not_close_a_run_ends(testbed):
    folder = str(testbed.folder.root)
    code = f"from shoal.runs.run_reader import open_run; run = open_run({folder!r}); print(run.catch_up())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) == testbed.coordinator.state.seq + 1 and done.stderr == ""


def test_rules_with_impossible_sizes_are_refused(testbed, tmp_path):
    first = verify(Store(sqlite_url(testbed.folder.log), read_only=True).read(limit=1)).entries[0]
    with (
        open_run(grown(tmp_path, [other(first, block_groups=1 << 40)])) as run,
        pytest.raises(StateError, match="blocks of no group or of more than 4096 rollouts"),
    ):
        run.refresh()


def test_private_bodies_and_held_out_tasks_need_the_hosts_key(testbed, copied, monkeypatch):
    monkeypatch.setattr("shoal.runs.run_reader.is_final", lambda state, submission: False)
    with pytest.raises(ConfigError, match="the host's folder"):
        open_run(URL, private=True)
    shown = {}
    for name, key in (("host", True), ("copy", False)):
        if not key:
            (copied / "keys" / "run.key").unlink()
        with open_run(copied, private=True) as run:
            run.catch_up()
            evaluation = run.evaluations()
            place = next(run.places())
            shown[name] = bool(evaluation[0].transcripts)
            assert [one.name for one in evaluation] == ["before"] and evaluation[0].low95 == 0.4
            if key:
                assert run.group(place).rollouts
            else:
                with pytest.raises(NothingYet, match="private"):
                    run.group(place)
    assert shown == {"host": True, "copy": False}


def test_a_body_that_is_gone_or_another_is_told(copied):
    with open_run(copied) as run:
        run.catch_up()
        first, *_ = run.places()
        path = path_of(copied / "blobs", first.submission)
        body = path.read_bytes()
        path.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
        with pytest.raises(StateError, match="another hash"):
            run.group(first)
        path.unlink()
        with pytest.raises(NothingYet):
            run.group(first)


def test_a_group_that_the_log_does_not_name_is_refused(testbed):
    with open_run(testbed.folder.root) as run:
        run.catch_up()
        place = next(run.places())
        run.state.submissions[place.submission].groups = ("00" * 32,) * 64
        with pytest.raises(StateError, match="not the one that the log names"):
            run.group(place)


@pytest.mark.parametrize("bind, asked", [
    ("127.0.0.1", "http://127.0.0.1:8470/v1/status"), ("0.0.0.0", "http://127.0.0.1:8470/v1/status"),
    ("::1", "http://[::1]:8470/v1/status"), ("192.0.2.7", ""), ("metadata.example", ""), ("a@192.0.2.7", ""),
    ("224.0.0.1", ""),
])  # fmt: skip
def test_a_folder_leads_its_reader_to_no_other_machine(copied, bind, asked):
    (copied / "coordinator.json").write_text(json.dumps({"port": 8470, "url": "http://192.0.2.7"}))
    file, seen = RunFolder(copied).run_file, []
    tree = json.loads(file.read_bytes())
    file.write_text(json.dumps(tree | {"host": tree["host"] | {"bind": bind}}))
    assert RunFolder(copied).config().host.bind == bind

    def answer(request):
        seen.append(str(request.url))
        return httpx.Response(404, stream=httpx.ByteStream(b""))

    with open_run(copied, transport=httpx.MockTransport(answer)) as run:
        run.catch_up()
        assert not run.condition().is_live
    assert set(seen) == ({asked} if asked else set())
    assert CoordinatorWatch(copied / "coordinator.json", bind, is_reader=True).url() == asked.removesuffix("/v1/status")


def test_a_reader_executes_no_file_that_a_folder_names(copied, tmp_path):
    """Also where the folder has the run's key, which whoever made the folder has, too."""
    hostile, ran = tmp_path / "hostile.py", tmp_path / "ran"
    hostile.write_text(f"open({str(ran)!r}, 'w')")
    for own_files in (False, True):
        with open_run(copied, own_files=own_files) as run:
            run.catch_up()
            run.state.envs = (replace(run.state.envs[0], name=str(hostile), digest=env_digest(str(hostile))),)
            with pytest.raises(ShoalError, match="--own-files" if not own_files else "environment"):
                run.replayed(next(run.places()))
        assert ran.exists() == own_files


def test_what_the_host_alone_plays_is_not_played_again(testbed):
    with open_run(testbed.folder.root) as run:
        run.catch_up()
        for change in ({"kind": "completions"}, {"reproducible": False}):
            run.state.envs = (replace(run.state.envs[0], **change),)
            with pytest.raises(ConfigError, match="by the host alone"):
                open_envs(run.state, True)
            run.state.envs = (replace(run.state.envs[0], kind="episodes", reproducible=True),)


def test_a_rollout_with_a_flaw_is_told_and_not_decoded(testbed, monkeypatch):
    with open_run(testbed.folder.root) as run:
        run.catch_up()
        place = next(run.places())
        group = from_msgpack(run.bytes_of(place), t.Group)
        odd = t.Rollout(b"\xff" * 7, b"\x00\x09", b"\x00" * 3, 0, "environment")
        bad = t.make_rollout([1, 1 << 30], [0, 1], [-1.0], version=0, ending="environment")
        forged = t.Group(group.slot, group.task, group.env, (*group.rollouts[:2], odd, bad))
        monkeypatch.setattr("shoal.runs.run_reader.decoded", lambda data: forged)
        rollouts = run.group(place).rollouts
        assert [bool(rollout.flaw) for rollout in rollouts] == [False, False, True, True]
        assert [len(rollout.turns) > 0 for rollout in rollouts] == [True, True, False, False]
        monkeypatch.setattr("shoal.runs.rollouts.MAX_TOKENS", len(group.rollouts[0].author) + 1)
        assert "more than" in run.group(place).rollouts[1].flaw


def test_metrics_are_followed_line_by_line_with_repeats_and_halves(copied):
    path = copied / "metrics.jsonl"
    path.write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "lo')
    with open_run(copied) as run:
        assert run.new_metrics() == [{"step": 0, "loss": 1.0}]
        with path.open("a") as file:
            file.write('\n[1, 2]\n{"step": 1, "loss": 0.5}\n{"step": 0, "loss": 2.0}\n')
        assert [line["loss"] for line in run.new_metrics()] == [0.5, 2.0]
        assert [line["loss"] for line in run.metrics()] == [2.0, 0.5]
        replaced = path.with_name("new")
        replaced.write_text('{"step": 7}\n')
        os.replace(replaced, path)
        assert run.new_metrics() == [{"step": 7}]


WITHOUT_STEP = [
    b"[" * 100_000, b'{"step": 1e400}', b'{"step": -1}', b'{"step": true}', b'{"loss": 1}', b'\xff\xfe{"step": 3}',
    b'{"step": 99999999999}', b"", b"[]", b"{}", b'{"step": "1"}', b'{"step": 1.5}', b"{" * 9999,
    b'{"step": 1' + b"0" * 4000 + b"}", b'{"step": 1, "loss": ' + b"[" * 9999 + b"]" * 9999 + b"}",
]  # fmt: skip
HOSTILE = {
    "x": 1, "env_metric/" + "x" * 300: 1, "env_metric/\x1b": 1, "waiting_for": "y" * 300, "loss": 10**400, "lr": [1],
    "grad_norm": True, "entropy_nats": "high", "clip_share": {"a": {"b": 1}}, "kl_nats": {"0": 1}, "reward_mean": 1e300,
}  # fmt: skip


def serving(pages):
    """A reading of a host that answers `GET /v1/metrics` with these pages in turn."""
    left = iter(pages)

    async def answer(request: Request) -> Response:
        return Response(next(left, b""), headers={"shoal-protocol": "1"})

    app = Starlette(routes=[Route("/v1/metrics", answer)])
    return open_run("http://host", transport=httpx.ASGITransport(app))


def test_lines_of_strangers_have_a_step_and_nothing_but_declared_figures():
    good = {"step": 4, "reward_mean": 0.5, "waiting_for": "<b>\x1b[31m", "staleness_rollouts": {"0": 3}, "loss": None}
    many = {"step": 5} | {f"env_metric/{i}": 1 for i in range(3000)}
    lines = [json.dumps(line).encode() for line in (HOSTILE | {"step": 3}, good)]
    with serving([b"\n".join([*WITHOUT_STEP, *lines])]) as run:
        assert run.new_metrics() == [{"step": 3}, good]
    with serving([json.dumps(many).encode()]) as run:
        assert len(run.new_metrics()[0]) == 2000


def test_a_host_whose_metrics_never_end_is_left():
    pages = [
        b"".join(b'{"step": %d}\n' % step for step in range(first, first + 500)) for first in range(0, 15_000, 500)
    ]
    with serving(pages) as run, pytest.raises(PeerError, match="more steps"):
        run.metrics()


def test_a_host_whose_metrics_fill_the_memory_is_left(monkeypatch):
    names = [
        json.dumps({"step": step} | {f"env_metric/{step}-{i}": 0 for i in range(1000)}).encode() for step in range(5)
    ]
    with serving(names) as run, pytest.raises(PeerError, match="more metrics than a run has: 2001 names"):
        run.metrics()
    monkeypatch.setattr("shoal.runs.remote_status.MOST_METRICS_BYTES", 1000)
    long = [b'{"step": %d, "loss": 0.%s}' % (step, b"1" * 300) for step in range(9)]
    junk = [b'{"step": %d, "loss": 0.5}\n%s' % (step, b"x" * 300) for step in range(9)]
    for pages in (long, junk):
        with serving(pages) as run, pytest.raises(PeerError, match="2 names, 1"):
            run.metrics()
        with serving(pages) as run, pytest.raises(PeerError, match="2 names, 1"):
            for _ in pages:
                assert run.new_metrics()
    short = b"".join(b'{"step": %d, "loss": 9e14}\n' % step for step in range(9))  # msgspec would write more digits
    grows = [short + b'{"step": 9, "loss": %d%s}\n' % (at, b" " * 100) for at in range(99)]
    with serving(grows) as run, pytest.raises(PeerError, match="2 names, 1"):
        for _ in grows:
            assert run.new_metrics()


def test_a_host_that_repeats_steps_more_often_than_there_are_steps_is_read(monkeypatch):
    monkeypatch.setattr("shoal.runs.remote_status.CHAIN_LENGTH", 4)
    pages = [b"".join(b'{"step":%d,"loss":%d}\n' % (step, at) for step in range(8)) for at in range(9)]
    with serving(pages) as run:
        for at in range(9):
            assert [line["loss"] for line in run.new_metrics()] == [at] * 8


def test_lines_that_are_known_already_count_once(monkeypatch):
    monkeypatch.setattr("shoal.runs.remote_status.MOST_METRICS_BYTES", 1000)
    pages = [b"".join(b'{"step":%d,"loss":0.5}\n' % step for step in range(last + 1)) for last in range(16)]
    with serving([page for page in pages for _ in range(9)]) as run:
        for last in range(16):
            assert [len(run.new_metrics()) for _ in range(9)] == [1, *[0] * 8], last


def test_a_host_whose_metrics_stand_still_is_left():
    with serving([b'{"step": 1}\n'] * 100) as run:
        assert run.metrics() == [{"step": 1}]


def test_events_of_a_log_that_were_passed_over_are_not_read_again(testbed):
    log = LogFollower(testbed.folder.log)
    assert {entry.kind for entry in log.events(having=(b"batch_formed",))} == {"batch_formed"}
    assert log.seq == testbed.coordinator.state.seq and list(log.events()) == []


def test_events_that_are_read_again_are_those_that_were_replayed(testbed, tmp_path):
    entries = list(verify(Store(sqlite_url(testbed.folder.log), read_only=True).read()).entries)
    with open_run(grown(tmp_path, entries[:20])) as run:
        run.catch_up()
        others, head = [], "0" * 64
        for entry in entries[:20]:
            others.append(make_entry(entry.seq, entry.time + 1, entry.body, head))
            head = others[-1].hash
        grown(tmp_path, others)
        with pytest.raises(Replaced, match="other events"):
            list(run.events())


def grown(tmp_path: Path, entries: list[Entry]) -> Path:
    """A run's folder whose log has these entries."""
    root = tmp_path / "run"
    root.mkdir(exist_ok=True)
    (root / "log.sqlite").unlink(missing_ok=True)
    append(root, entries)
    return root


def append(root: Path, entries: list[Entry]) -> None:
    store = Store(sqlite_url(root / "log.sqlite"))
    store.append(entries)
    store.close()


def other(first: Entry, **rules) -> Entry:
    """Another first event."""
    body = replace(first.body, run="ff" * 16, rules=replace(first.body.rules, **rules))
    return make_entry(0, first.time, body, "0" * 64)
