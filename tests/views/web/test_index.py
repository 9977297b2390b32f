"""The index: what it answers, and that it holds the same however it was built."""

import contextlib
import shutil
import sqlite3
import threading

import httpx
import pytest
from msgspec.structs import replace

from shoal.alarms import Alarm, AlarmsLog
from shoal.errors import Overreach, PeerError, StateError
from shoal.ledger.event_types import make_entry
from shoal.ledger.lease_sizing import usual_pace_s
from shoal.ledger.log.check import verify
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.pay import Credit
from shoal.ledger.submissions import SubmissionReceived
from shoal.ledger.verdicts import VerdictGiven
from shoal.ledger.versions import CheckpointPublished
from shoal.protocol.messages import Measured
from shoal.runs.csv_tables import rows_of
from shoal.runs.run_reader import Replaced, RunReader, open_run
from shoal.views.web.index import insert_rows
from shoal.views.web.index.build import Builder
from shoal.views.web.index.group_queries import GroupFilter, filters, group, groups, number_of, same_task
from shoal.views.web.index.insert_rows import MetricsIndex
from shoal.views.web.index.queries import IndexQueries, RefusalFilter
from shoal.views.web.index.schema import NAMES, SIDECARS, open_to_read, open_to_write
from tests.roles.testbed import URL
from tests.runs.test_run_reader import append, grown, other


def built(path, where, *, transport=None, private=False):
    """Build the index of a run, all at once."""
    with open_run(where, private=private, transport=transport, clock=lambda: 1e9) as run:
        builder = Builder(path, run, clock=lambda: 1e9)
        builder.build()
        builder.close()
    return path


def contents(path, but=("conditions",)):
    """All rows of an index."""
    db = sqlite3.connect(path)
    found = {name: sorted(db.execute(f"SELECT * FROM {name}"), key=repr) for name in NAMES if name not in but}
    found["texts"] = sorted(db.execute("SELECT rowid, run, text FROM texts"))
    found["words"] = sorted(db.execute("SELECT run, text, what, ref FROM words"), key=repr)
    return found


@pytest.fixture(scope="module")
def index(testbed, tmp_path_factory):
    return built(tmp_path_factory.mktemp("index") / "index.sqlite", testbed.folder.root)


@pytest.fixture
def look(index):
    asked = IndexQueries(index)
    yield asked
    asked.close()


@pytest.fixture(scope="module")
def run(testbed):
    with open_run(testbed.folder.root) as reading:
        reading.catch_up()
        yield reading


def test_the_overview_has_the_figures_of_log_metrics_and_evaluations(look, run):
    [one] = look.runs()
    found = look.overview(one["run"])
    assert one["id"] == run.run and one["seq"] == found["seq"] == run.state.seq
    assert found["facts"]["accepted"] == run.state.accepted_groups and found["facts"]["refused"] == run.state.refused
    assert found["metrics"] == run.metrics()[-1] and found["left_s"] == 0.0 and found["tokens_per_s"] > 0
    assert [(row["name"], row["mean"], row["low95"]) for row in found["heldout"]] == [("before", 0.5, 0.4)]
    assert found["condition"]["phase"] == "ended" and not found["condition"]["is_live"]
    assert found["texts"] == [{"state": "done", "bodies": len(run.state.submissions)}]


def test_series_are_smoothed_and_thinned_here(folder_with_metrics, tmp_path):
    root = folder_with_metrics(*({"step": step, "loss": float(step % 2), "gone": None} for step in range(1000)))
    asked = IndexQueries(built(tmp_path / "index.sqlite", root))
    assert [row["value"] for row in asked.series(1, "loss")[:4]] == [0, 1, 0, 1] and asked.names(1) == ["loss", "step"]
    few = asked.series(1, "loss", smooth=0.99, wide=100)
    assert len(few) == 10 and few[-1]["step"] == 999 and abs(few[-1]["value"] - 0.5) < 0.02
    assert asked.series(1, "nonsense") == []
    asked.close()


def test_nodes_are_ranked_and_found_by_key_and_name(look, run):
    honest, cheater = (next(node for node in run.nodes() if node.name == name) for name in ("honest", "cheater"))
    page = look.nodes(1, role="worker")
    assert [(row["name"], row["rank"]) for row in page["rows"]] == [("honest", 1), ("cheater", 2)] and page[
        "total"
    ] == 2
    assert [row["key"] for row in look.nodes(1, search=cheater.key[:12])["rows"]] == [cheater.key]
    assert [row["key"] for row in look.nodes(1, search="HONES")["rows"]] == [honest.key]
    first = look.nodes(1, by="place", limit=1)
    assert first["rows"][0]["key"] == run.nodes()[0].key and look.nodes(1, by="place", after=first["next"])["rows"]
    own = look.node(1, cheater.key)
    assert own["rank"] == 2 and own["refusals"][0]["check"] == "sampling" and own["reasons"] == cheater.reasons
    assert own["versions"] and look.node(1, "nobody") is None and look.node(1, honest.key)["steps"]


def test_a_slow_node_is_told_by_the_pace_that_the_log_shows(look, run):
    paces = {row["key"]: row["pace_s"] for row in look.nodes(1, role="worker", by="pace_s")["rows"]}
    assert paces == {key: member.pace_s for key, member in run.state.members.items() if member.role == "worker"}
    assert list(paces.values()) == sorted(paces.values(), reverse=True) and all(paces.values())
    assert look.usual_pace_s(1) == usual_pace_s(run.state) > 0


def test_refusals_are_counted_by_reason_and_listed_with_what_became_of_them(look, run):
    rows = rows_of(run, "refusals")
    counts = look.refusal_counts(1)
    assert sum(row["groups"] for row in counts) == len(rows) and {row["check"] for row in counts} == {"sampling"}
    found = look.refusals(1, RefusalFilter("sampling"))["rows"]
    assert {row["status"] for row in found} == {"refused"} and look.refusals(1, RefusalFilter("other"))["rows"] == []


def test_validators_are_listed_with_where_they_differ(look, run):
    [one] = look.validators(1)
    verdicts = rows_of(run, "verdicts")
    assert one["verdicts"] == len(verdicts) and one["hard"] == sum(row["hard"] for row in verdicts)
    assert one["differed"] == 0 == len(look.differences(1)["rows"])


def test_versions_say_how_they_spread(look, run):
    page = look.versions(1)
    assert [row["version"] for row in page["rows"]] == [2, 1, 0] and page["next"] is None
    first = page["rows"][-1]
    assert first["signal"] >= 3 and first["workers"] == 2 and 0 <= first["first_s"] <= first["half_s"]
    assert first["batch_seq"] == run.marks.batches[0] and sum(row["workers"] for row in look.ages(1)) == 2


def test_the_timeline_is_read_by_kind_node_and_words(look, run):
    kinds = {row["kind"]: row["events"] for row in look.kinds(1)}
    assert sum(kinds.values()) == run.state.seq + 1
    page = look.timeline(1, kinds=["batch_formed"], limit=1)
    assert page["rows"][0]["words"].startswith("the batch of step 1") and page["next"] == page["rows"][0]["seq"]
    assert look.timeline(1, kinds=["batch_formed"], after=page["next"])["rows"][0]["seq"] == run.marks.batches[0]
    key = next(node.key for node in run.nodes() if node.name == "cheater")
    assert {row["kind"] for row in look.timeline(1, node=key, limit=500)["rows"]} >= {"node_joined", "node_quarantined"}
    found = {row["kind"] for row in look.timeline(1, search="quarantin*", limit=500)["rows"]}
    assert {"node_quarantined"} <= found <= {"node_quarantined", "node_restored", "lease_lapsed"}
    assert look.timeline(1, search='" OR NEAR(')["rows"] == [] and look.event(1, 0)["kind"] == "run_created"


def test_a_search_of_the_log_looks_at_a_bounded_number_of_events_and_goes_on(look, run, monkeypatch):
    monkeypatch.setattr("shoal.views.web.index.queries.SCANNED", 20)
    asked, found, pages, after = [], [], 0, None
    look.db.set_trace_callback(asked.append)
    while pages == 0 or after is not None:
        page = look.timeline(1, kinds=["run_created"], search="*", after=after)
        found, pages, after = found + page["rows"], pages + 1, page["next"]
    look.db.set_trace_callback(None)
    assert [row["seq"] for row in found] == [0] and pages == (run.state.seq + 1) // 20 + 1
    assert sum("* FROM events" in query for query in asked) <= pages, (
        "a stranger asks for a filter that hardly any event has"
    )


@pytest.mark.parametrize("by", ["best", "worst"])
def test_groups_come_in_the_order_of_their_rewards(look, by):
    found, after = [], None
    while True:
        page = groups(look, 1, GroupFilter(by=by), after, limit=3)
        found += page["rows"]
        if (after := page["next"]) is None:
            break
    rewards = [row["reward"] for row in found if row["reward"] is not None]
    assert len(set(rewards)) > 1 and rewards == sorted(rewards, reverse=by == "best")
    assert 0 < len(rewards) < len(found), "refused groups have no reward, and come last"
    assert [row["reward"] for row in found[len(rewards) :]] == [None] * (len(found) - len(rewards))
    assert len({row["id"] for row in found}) == len(found) == look.rows("SELECT count(*) AS n FROM groups")[0]["n"]


def test_groups_are_filtered_and_paged_and_found_by_their_words(look, run):
    every, after = [], None
    while True:
        page = groups(look, 1, after=after, limit=2)
        every += page["rows"]
        if (after := page["next"]) is None:
            break
    assert len(every) == len(list(run.places())) and [row["id"] for row in every] == sorted(
        (row["id"] for row in every), reverse=True
    )
    cheater = next(node.key for node in run.nodes() if node.name == "cheater")
    assert {row["status"] for row in groups(look, 1, GroupFilter(worker=cheater))["rows"]} == {"refused"}
    good = groups(look, 1, GroupFilter(env="arithmetic", status="signal", version=0, reward_from=0.0))["rows"]
    assert good and all(row["version"] == 0 and row["task"] >= 0 for row in good)
    one = group(look, 1, good[0]["id"])
    read = run.group(run.place_named(one["digest"]))
    assert [r["reward"] for r in one["rollouts"]] == [rollout.reward for rollout in read.rollouts]
    assert [r["advantage"] for r in one["rollouts"]] == pytest.approx([rollout.advantage for rollout in read.rollouts])
    assert [r["ending"] for r in one["rollouts"]] == [rollout.ending for rollout in read.rollouts]
    assert one["body"]["state"] == "done" and one["verdicts"] and one["findings"] == []
    text = read.rollouts[0].turns[0].text.split()[-1].strip("=")
    found = groups(look, 1, GroupFilter(text=text))["rows"]
    assert one["id"] in [row["id"] for row in found] and all(row["excerpt"] for row in found)
    assert groups(look, 1, GroupFilter(text='zzz" OR text : "'))["rows"] == []
    assert number_of(look, 1, version=0, slot=one["slot"]) == one["id"]
    assert one["id"] in [row["id"] for row in same_task(look, 1, one["env"], one["task"])]
    assert filters(look, 1)["envs"][0]["env"] == "arithmetic"


def test_groups_of_a_step_and_steps_of_a_worker_are_found_without_a_look_at_all_of_the_run(look, run):
    asked, worker = list[str](), next(node.key for node in run.nodes() if node.name == "honest")
    look.db.set_trace_callback(asked.append)
    assert groups(look, 1, GroupFilter(step=0))["rows"] and look.node(1, worker)["steps"]
    look.db.set_trace_callback(None)
    plans = [[row["detail"] for row in look.rows(f"EXPLAIN QUERY PLAN {one}")] for one in asked if "step" in one]
    assert len(plans) == 2 and not [row for plan in plans for row in plan if "(run=?)" in row or "status=?" in row]


def test_an_index_of_the_url_holds_the_same(index, testbed, tmp_path):
    far = built(tmp_path / "far.sqlite", URL, transport=httpx.ASGITransport(testbed.app))
    assert contents(far, ("conditions", "heldout")) == contents(index, ("conditions", "heldout"))


def test_the_size_of_a_page_changes_nothing(index, testbed, tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.runs.log_source.MAX_EVENTS", 7)
    assert contents(built(tmp_path / "paged.sqlite", testbed.folder.root)) == contents(index)


class Killed(Exception):
    pass


@pytest.mark.parametrize("writes", [3, 100])
def test_a_builder_that_is_killed_goes_on_to_the_same_index(index, testbed, tmp_path, monkeypatch, writes):
    monkeypatch.setattr("shoal.runs.log_source.MAX_EVENTS", 50)
    path, left, put = tmp_path / "killed.sqlite", [writes], Builder._put

    def put_until(builder, table, values):
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        put(builder, table, values)

    monkeypatch.setattr(Builder, "_put", put_until)
    for left[0] in (writes, 30):
        with pytest.raises(Killed):
            built(path, testbed.folder.root)
    assert contents(built(path, testbed.folder.root)) == contents(index)


@pytest.mark.parametrize(("owner", "name"), [(insert_rows, "_rows"), (MetricsIndex, "_name")])
def test_a_builder_that_is_killed_while_it_reads_bodies_or_metrics_goes_on(
    index, testbed, tmp_path, monkeypatch, owner, name
):
    path, calls, goes_on = tmp_path / "killed.sqlite", [], getattr(owner, name)

    def until(*given):
        calls.append(given)
        if len(calls) == 10:
            raise Killed
        return goes_on(*given)

    monkeypatch.setattr(owner, name, until)
    with pytest.raises(Killed):
        built(path, testbed.folder.root)
    assert contents(built(path, testbed.folder.root)) == contents(index)


def test_a_run_that_was_replaced_or_set_back_is_indexed_anew(testbed, tmp_path):
    entries = list(verify(Store(sqlite_url(testbed.folder.log), read_only=True).read()).entries)
    path, root = tmp_path / "index.sqlite", grown(tmp_path, entries[:60])
    built(path, root)
    grown(tmp_path, entries[:20])
    built(path, root)
    fresh = contents(built(tmp_path / "fresh.sqlite", root))
    assert contents(path) == fresh and len(fresh["events"]) == 20
    with open_run(root) as run:
        builder = Builder(path, run)
        builder.build()
        grown(tmp_path, entries[:10])
        with pytest.raises(Replaced):
            builder.advance()
        builder.close()


def test_an_index_that_cannot_be_written_says_so(testbed, tmp_path):
    with open_run(testbed.folder.root) as run:
        builder = Builder(tmp_path / "index.sqlite", run)
        builder._db.execute("PRAGMA query_only=1")
        with pytest.raises(StateError, match="cannot be written"):
            builder.advance()
        builder.close()


def test_events_that_fit_no_state_are_told_and_stop_no_thread(testbed, tmp_path, monkeypatch):
    entries = verify(Store(sqlite_url(testbed.folder.log), read_only=True).read()).entries
    sent = next(entry for entry in entries if isinstance(entry.body, SubmissionReceived))
    odd = make_entry(sent.seq, sent.time, replace(sent.body, lease="nobody"), sent.hash)
    path = built(tmp_path / "index.sqlite", grown(tmp_path, [other(entries[0])]))
    grown(tmp_path, entries)
    with open_run(tmp_path / "run") as run:
        monkeypatch.setattr(run, "events", lambda after=-1: iter([odd]))
        builder = Builder(path, run)
        with pytest.raises(StateError, match=r"KeyError.*do not trust it"):
            builder.advance()
        builder.close()


def test_a_body_that_asks_for_too_much_is_left_with_the_reason(testbed, tmp_path, monkeypatch):
    with open_run(testbed.folder.root, clock=lambda: 1e9) as run:
        run.catch_up()
        name, read = next(iter(run.state.submissions)), RunReader.group

        def group(reading, place, with_pieces=False):
            if place.submission == name:
                raise Overreach("the tokenizer took too long")
            return read(reading, place, with_pieces)

        monkeypatch.setattr(RunReader, "group", group)
        asked = IndexQueries(built(tmp_path / "index.sqlite", testbed.folder.root))
        gone = asked.rows("SELECT submission, why FROM bodies WHERE state = 'gone'")
        assert [(row["submission"], row["why"].partition(";")[0]) for row in gone] == [
            (name, "the tokenizer took too long")
        ]
        assert asked.overview(1)["condition"]
        asked.close()
        with pytest.raises(Overreach):
            rows_of(run, "rollouts")


def test_two_runs_in_one_index_do_not_mix(index, testbed, copied, tmp_path):
    path = built(tmp_path / "both.sqlite", testbed.folder.root)
    (copied / "metrics.jsonl").unlink()
    built(path, copied)
    asked = IndexQueries(path)
    assert [row["run"] for row in asked.runs()] == [1, 2]
    assert len(groups(asked, 1)["rows"]) == len(groups(asked, 2)["rows"]) > 0
    assert asked.metric_names(1, "entropy") and not asked.metric_names(2, "entropy")
    word = asked.rows("SELECT text FROM texts LIMIT 1")[0]["text"].split()[1]
    assert {row["run"] for row in groups(asked, 2, GroupFilter(text=word))["rows"]} == {2}
    asked.close()


def test_alarms_of_a_folder_are_told_by_cause_node_and_step_the_open_ones_first(copied, tmp_path):
    path, log = tmp_path / "index.sqlite", AlarmsLog(copied / "alarms.jsonl")
    drift = Alarm("drift", "warning", 3, 5, "It drifts.", "Lower the rate.", (Measured("kl", 0.4, 0.1),))
    full = Alarm("disk", "critical", 5, 5, "It is full.", "Delete.")
    slow = [Alarm("stragglers", "notice", 3, 3, "It is slow.", "Wait.", (), f"ab{n}" * 12) for n in range(2)]
    for time, change, alarm in [
        (1.0, "raised", drift), (2.0, "raised", slow[0]), (3.0, "raised", slow[1]), (4.0, "cleared", drift),
        (5.0, "raised", full), (6.0, "raised", replace(full, since=8)), (7.0, "cleared", replace(full, since=8)),
    ]:  # fmt: skip
        log.write(change, alarm, time)
    built(path, copied)
    asked = IndexQueries(path)
    rows = asked.alarms(1)
    assert [(row["cause"], row["node"], row["since_step"], row["is_open"]) for row in rows] == [
        ("stragglers", slow[1].node, 3, 1), ("stragglers", slow[0].node, 3, 1), ("disk", "", 8, 0), ("disk", "", 5, 0),
        ("drift", "", 3, 0),
    ]  # fmt: skip
    assert (rows[4]["first_s"], rows[4]["last_s"], rows[4]["words"]) == (1.0, 4.0, "It drifts. Lower the rate.")
    assert rows[4]["evidence"] == {"step": 5, "measured": [{"name": "kl", "value": 0.4, "limit": 0.1}]}
    asked.close()


def test_a_url_tells_alarms_by_their_cause_alone_and_what_it_stops_telling_was_cleared(testbed, tmp_path):
    path, log = tmp_path / "index.sqlite", AlarmsLog(testbed.folder.alarms)
    alarms = [
        Alarm("stragglers", "warning", 3, 4, "A secret.", "Wait.", (), key) for key in ("ab" * 32, "cd" * 32)
    ] + [Alarm("disk", "critical", 5, 5, "Full.", "Delete.")]  # fmt: skip
    try:
        for alarm in alarms:
            log.write("raised", alarm, 1.0)
        with open_run("http://host", transport=httpx.ASGITransport(testbed.app), clock=lambda: 1e9) as run:
            now = iter([10.0, 20.0, 30.0])
            builder, asked = Builder(path, run, clock=lambda: next(now)), IndexQueries(path)
            builder.note_condition()
            first = asked.alarms(1)
            log.write("cleared", alarms[2], 2.0)
            builder.note_condition()
            then = asked.alarms(1)
            builder.close()
    finally:
        testbed.folder.alarms.unlink()
    assert {(row["cause"], row["node"], row["since_step"], row["level"]) for row in first} == {
        ("stragglers", "", 3, "warning"), ("disk", "", 5, "critical"),
    }  # fmt: skip
    assert "A worker lets leases lapse" in first[0]["words"] + first[1]["words"] and "secret" not in repr(first)
    assert [(row["cause"], row["is_open"], row["first_s"], row["last_s"]) for row in then] == [
        ("stragglers", 1, 10.0, 10.0), ("disk", 0, 10.0, 20.0),
    ]  # fmt: skip
    asked.close()


HOSTILE = [
    "<script>alert(1)</script>", "a\0b", "\x1b[31m", "\u202egnp", "'; DROP TABLE groups; --", '" NEAR(x', "x" * 100_000,
]  # fmt: skip


def test_hostile_numbers_and_texts_are_stored_as_text(testbed, tmp_path, monkeypatch):
    entries, rechained = verify(Store(sqlite_url(testbed.folder.log), read_only=True).read()).entries, []
    head, odd = "0" * 64, " ".join(HOSTILE)
    for entry in entries:
        body = entry.body
        if isinstance(body, VerdictGiven):
            body = replace(body, groups=tuple(replace(g, detail=odd) if g.check else g for g in body.groups))
        elif isinstance(body, Credit):
            body = replace(body, tokens=10**30)
        rechained.append(make_entry(entry.seq, entry.time, body, head))
        head = rechained[-1].hash
    root = tmp_path / "run"
    shutil.copytree(testbed.folder.root, root, ignore=shutil.ignore_patterns("log.sqlite*"))
    append(root, rechained)
    text = "\0 <b> ' \" \ud83d odd"
    monkeypatch.setattr("shoal.runs.rollouts.ReadRollout.text", lambda rollout: text)
    asked = IndexQueries(built(tmp_path / "index.sqlite", root))
    assert [row["reason"] for row in asked.refusal_counts(1)] == [odd]
    assert groups(asked, 1, GroupFilter(text="odd"))["rows"][0]["excerpt"].endswith("odd")
    assert asked.nodes(1)["rows"] and asked.overview(1)["facts"]
    for typed in [*HOSTILE, "*", '"', "a AND", "(", "text:x", "-x", "^x", "\0", ""]:
        groups(asked, 1, GroupFilter(text=typed)), asked.timeline(1, search=typed), asked.nodes(1, search=typed)
    asked.close()


def test_a_log_with_larger_numbers_than_a_run_is_refused(testbed, tmp_path):
    entries = verify(Store(sqlite_url(testbed.folder.log), read_only=True).read()).entries
    huge = CheckpointPublished(10**30, "0" * 64, "0" * 64)
    last = make_entry(entries[-1].seq + 1, entries[-1].time, huge, entries[-1].hash)
    with pytest.raises(StateError, match="larger numbers than a run"):
        built(tmp_path / "index.sqlite", grown(tmp_path, [*entries, last]))


def test_a_private_group_shows_only_what_the_log_says(testbed, tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.runs.run_reader.is_final", lambda state, submission: False)
    asked = IndexQueries(built(tmp_path / "index.sqlite", testbed.folder.root, private=True))
    row = groups(asked, 1, GroupFilter(status="signal"))["rows"][0]
    assert row["env"] is None and row["reward"] is not None
    assert (
        groups(asked, 1, GroupFilter(env="arithmetic"))["rows"]
        == []
        == groups(asked, 1, GroupFilter(text="policy"))["rows"]
    )
    assert "ending" not in group(asked, 1, row["id"])["rollouts"][0] and filters(asked, 1)["envs"] == []
    own = groups(asked, 1, GroupFilter(env="arithmetic", text="policy"), private=True)["rows"]
    assert own and own[0]["env"] == "arithmetic" and "ending" in group(asked, 1, row["id"], private=True)["rollouts"][0]
    asked.close()
    built(path := tmp_path / "public.sqlite", testbed.folder.root)
    assert contents(path)["texts"] == []


def test_two_that_build_one_index_are_told_and_the_second_goes_on_when_it_begins_anew(index, testbed, tmp_path):
    path = tmp_path / "shared.sqlite"
    with open_run(testbed.folder.root, private=True) as one, open_run(testbed.folder.root, private=True) as other:
        late = Builder(path, other)
        first = Builder(path, one)
        first.build()
        first.close()
        with pytest.raises(StateError, match="give one of them another place"):
            late.advance()
        late.close()
    assert contents(built(path, testbed.folder.root)) == contents(index)


def test_readers_of_a_deleted_index_keep_its_shared_memory(tmp_path):
    """Where SQLite truncates it, they end with SIGBUS."""
    path = tmp_path / "index.sqlite"
    sidecars = [path.with_name(path.name + part) for part in SIDECARS]
    old = open_to_write(path)
    old.execute("INSERT INTO heldout (run, name, env) VALUES (1, 'old', '')")
    reader = open_to_read(path)
    assert reader.execute("SELECT count(*) FROM heldout").fetchone()[0] == 1
    before = {file.stat().st_ino for file in sidecars}
    path.unlink()
    new = open_to_write(path)
    assert not before & {file.stat().st_ino for file in sidecars}
    assert reader.execute("SELECT count(*) FROM heldout").fetchone()[0] == 1
    assert new.execute("SELECT count(*) FROM heldout").fetchone()[0] == 0
    old.close()
    assert all(file.exists() for file in sidecars), "what the old ones close is not the new one's"
    for connection in (reader, new):
        connection.close()


def test_several_may_make_one_index_at_the_same_time(tmp_path):
    path, together = tmp_path / "index.sqlite", threading.Barrier(4)
    found = []

    def opened():
        together.wait()
        found.append(open_to_write(path))

    for _ in range(10):
        threads = [threading.Thread(target=opened) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        path.unlink()
    assert len(found) == 40
    for connection in found:
        connection.close()


def test_an_index_that_another_process_makes_is_not_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.views.web.index.schema.LOCKED_S", 0.1)
    path = tmp_path / "index.sqlite"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        other.execute("CREATE TABLE theirs (number)")
        with pytest.raises(StateError, match="database is locked"):
            open_to_write(path)
        other.execute("COMMIT")
        assert [name for (name,) in sqlite3.connect(path).execute("SELECT name FROM sqlite_master")] == ["theirs"]


def test_a_damaged_or_older_index_is_made_anew_and_a_missing_one_is_told(index, tmp_path):
    path = tmp_path / "index.sqlite"
    with pytest.raises(StateError, match="cannot be read"):
        IndexQueries(path)
    path.write_bytes(b"not a database" * 100)
    open_to_write(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version=99")
    db.commit()
    db.close()
    with pytest.raises(StateError, match="another version"):
        IndexQueries(path)
    open_to_write(path).close()
    assert IndexQueries(path).runs() == []


def test_a_builder_whose_url_fails_while_it_begins_again_goes_on_later(index, testbed, tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.views.web.index.build.PAGE", 10)
    path, failing = tmp_path / "index.sqlite", [True]
    built(
        path, grown(tmp_path, [other(verify(Store(sqlite_url(testbed.folder.log), read_only=True).read()).entries[0])])
    )
    db = sqlite3.connect(path)
    db.execute("UPDATE runs SET place = ?", (str(testbed.folder.root),))
    db.commit()
    with open_run(testbed.folder.root, clock=lambda: 1e9) as run:
        events = run.events

        def some(after=-1):
            yield from (entry for entry in events(after) if not failing or entry.seq < 25)
            if failing:
                failing.clear()
                raise PeerError("the line is cut")

        monkeypatch.setattr(run, "events", some)
        builder = Builder(path, run, clock=lambda: 1e9)
        with pytest.raises(PeerError):
            builder.build()
        builder.build()
        builder.close()
    assert contents(path) == contents(index)
