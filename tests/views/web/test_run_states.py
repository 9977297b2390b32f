"""What the overview says to somebody who looks from a phone: whether the run learns, why it stands still and what to type,
whether a validator is alive; and how a volunteer finds its own node."""

import asyncio
import contextlib
import html
import json
import re
import shutil
import sqlite3

import pytest

from shoal.launch.run_lock import locked
from shoal.ledger.batches import GroupAccepted
from shoal.ledger.fault_rate import FAULT_REMEDY, FAULTS
from shoal.protocol.audit_and_pay import REPLAY
from shoal.runs.csv_tables import node_note
from shoal.runs.event_text import sentence_of
from shoal.runs.run_reader import open_run
from shoal.views.report.report import report_of
from shoal.views.web.chart_data import chart_of
from shoal.views.web.served_runs import ServedRuns
from tests.envs import brittle
from tests.ledger.test_no_signal import JUDGES, LONG, WORKER, serve_void, world_of
from tests.roles.testbed import RunTestbed, tiny_run
from tests.views.web.conftest import viewer


def words_of(served_runs, address, is_host=False):
    """The words of a page, without its tags."""
    client = viewer(served_runs, is_host)
    return html.unescape(re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", client.get(address).text)))


def tell(served_runs, **said):
    """Make the index say so of the run."""
    db = served_runs.runs[0].builder._db
    told = json.loads(db.execute("SELECT told FROM conditions").fetchone()[0])
    db.execute("UPDATE conditions SET told = ?", (json.dumps(told | said),))


def test_the_page_says_that_it_reads_where_it_could_only_say_that_something_is_missing(testbed, tmp_path):
    with contextlib.closing(ServedRuns(tmp_path / "index.sqlite", [str(testbed.folder.root)])) as served_runs:
        for address in ("/1/", "/1/nodes", "/1/versions", "/1/refusals", "/1/validators", "/1/groups", "/1/log"):
            words = words_of(served_runs, address)
            assert "Nothing so far: reading the log" in words, address
            for missing in ("No worker", "No node", "No version", "Nothing was refused", "No validator", "is empty"):
                assert missing not in words, (address, missing)
        served_runs.catch_up()
        assert "reading the log" not in words_of(served_runs, "/1/")


def test_a_page_of_a_run_that_has_ended_does_not_call_itself_live(served_runs):
    client = viewer(served_runs, token="")
    db = served_runs.runs[0].builder._db
    for phase, is_live, is_stopped, badge in (
        ("running", 1, False, "Live"), ("running", 0, False, "No answer"), ("running", 0, True, "Stopped"),
        ("ended", 0, False, "The run has ended"), ("ended", 1, False, "The run has ended"),
    ):  # fmt: skip
        tell(served_runs, phase=phase, is_stopped=is_stopped)
        db.execute("UPDATE conditions SET is_live = ?", (is_live,))
        served_runs.change += 1
        assert f'data-badge="{badge}"' in client.get("/1/figures").text
        is_timed = badge == "Live" and re.search(r"Time left \d", words_of(served_runs, "/1/"))
        assert is_timed or re.search(r"Time left (–|stopped|none)", words_of(served_runs, "/1/"))


def test_a_run_that_was_stopped_says_so_with_its_step_and_what_resumes_it(copied, tmp_path):
    with contextlib.closing(sqlite3.connect(copied / "log.sqlite")) as log, log:
        log.execute("DELETE FROM events WHERE seq > (SELECT max(seq) / 2 FROM events)")

    def said():
        with (
            contextlib.closing(ServedRuns(tmp_path / f"{len(shown)}.sqlite", [str(copied)])) as served_runs,
            open_run(copied) as run,
        ):
            served_runs.catch_up(), run.catch_up()
            host, anyone = words_of(served_runs, "/1/", is_host=True), words_of(served_runs, "/1/")
            compared = words_of(served_runs, "/compare")
            shown.append((host, anyone, compared, re.sub("<[^>]*>", " ", report_of(run, 0.0))))
            return shown[-1]

    shown = []
    host, anyone, compared, report = said()
    for words in (host, anyone):
        assert "stopped Stopped at step 1 of 2: " in words and "Time left stopped" in words
        assert "Waits for" not in words and "does not answer" not in words
    assert "the same command resumes it" in host and "its host can resume it" in anyone
    assert "stopped" in compared and "stopped" in report and "Stopped at step 1 of 2: its host resumes" in report
    with locked(copied):  # its host is there, and its coordinator is silent
        for words in said()[:2]:
            assert "Stopped" not in words and "The coordinator does not answer" in words and "Time left –" in words


def test_a_paused_run_says_what_resumes_it_and_has_no_time_left(served_runs, testbed):
    tell(served_runs, phase="paused", waiting_for="the host: the run is paused")
    host, anyone = words_of(served_runs, "/1/", is_host=True), words_of(served_runs, "/1/")
    assert f"Resume it with shoal admin resume {testbed.folder.root}" in host and "Time left paused" in host
    assert "Its host resumes it" in anyone and "shoal admin" not in anyone and str(testbed.folder.root) not in anyone


def test_a_host_reads_how_to_pause_a_run_that_goes_on_and_others_do_not(served_runs, testbed):
    tell(served_runs, phase="running", waiting_for="workers")
    host, anyone = words_of(served_runs, "/1/", is_host=True), words_of(served_runs, "/1/")
    for word in ("pause", "resume", "drain"):
        assert f"shoal admin {word} {testbed.folder.root}" in host
    assert "shoal admin" not in anyone and "Waits for workers" in anyone


def test_the_overview_says_whether_the_reward_rises_as_the_terminal_does(served_runs):
    assert "means of" not in words_of(served_runs, "/1/")  # two steps are too few to say
    db = served_runs.runs[0].builder._db
    db.execute("DELETE FROM series WHERE name = 'reward_all_mean'")
    rows = [("reward_all_mean", step, reward) for step, reward in enumerate((0.0, 0.25, 0.5, 0.75))]
    db.executemany("INSERT INTO series (run, name, step, value) VALUES (1, ?, ?, ?)", rows)
    assert "Reward up in the last 4 steps: 0.125 to 0.625, means of 2 each." in words_of(served_runs, "/1/")


def test_the_overview_says_how_old_the_newest_verdict_is_while_the_run_goes_on(served_runs):
    assert "newest verdict" not in words_of(served_runs, "/1/")
    tell(served_runs, phase="running")
    assert re.search(r"Validators 1 newest verdict .+ ago", words_of(served_runs, "/1/"))


def test_a_volunteer_finds_its_own_page_in_one_step_and_a_list_where_several_match(served_runs):
    key = served_runs.look().rows("SELECT key FROM nodes WHERE name = 'honest'")[0]["key"]
    for mine in (key[:12], "honest"):
        found = words_of(served_runs, f"/1/nodes?q={mine}&find=1")
        assert "What it helped with" in found and "Share of credits" in found and key in found
    assert "No node matches" in words_of(served_runs, "/1/nodes?q=nobody&find=1")
    assert "Rank is the place" in words_of(served_runs, "/1/nodes?q=&find=1")


def test_the_page_draws_no_evaluation_that_has_many_faults(served_runs, monkeypatch):
    look = served_runs.look()
    rows = [{**row, "faults": 6} for row in look.heldout(1)]
    assert chart_of(look, 1, "heldout").lines
    monkeypatch.setattr(look, "heldout", lambda run: rows)
    drawn = chart_of(look, 1, "heldout")
    assert not drawn.lines and drawn.sentence.endswith("Not drawn, because of faults: 1.")


@pytest.fixture(scope="module")
def brittle_runs(tmp_path_factory):
    """The page of a run whose environment fails on some rollouts, and its reading."""
    env = {"name": brittle.__file__, "kind": "episodes"}
    testbed = RunTestbed(
        tmp_path_factory.mktemp("brittle") / "run", tiny_run(envs=[env], steps=2, storage={"retain": "all"})
    )
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker-0")))

    def open_one(where, private):
        return open_run(where, private=private, own_files=True)

    served_runs = ServedRuns(
        tmp_path_factory.mktemp("brittle") / "index.sqlite", [str(testbed.folder.root)], open_one=open_one
    )
    served_runs.catch_up()
    yield served_runs
    served_runs.close()


def test_a_rollout_on_which_the_environment_failed_says_so_and_what_was_raised(brittle_runs):
    reading = brittle_runs.runs[0].reading
    accepted = [e.body for e in reading.events() if isinstance(e.body, GroupAccepted) and e.body.faults]
    failed = max(accepted, key=lambda body: len(body.faults.rollouts))
    address = f"/1/versions/{failed.version}/slots/{failed.slot}"
    first, *others = failed.faults.rollouts
    words = words_of(brittle_runs, f"{address}?rollout={first}", is_host=True)
    assert "The environment failed on this rollout: it counts in nothing that is learned" in words
    assert f"Raised: {failed.faults.said}" in words
    assert f"Environment failed on {1 + len(others)} rollout" in words
    assert words.count("counts in nothing environment failed") == 1 + len(others)
    whole = next(index for index in range(len(failed.rewards)) if index not in failed.faults.rollouts)
    assert "failed on this rollout" not in words_of(brittle_runs, f"{address}?rollout={whole}", is_host=True)
    group = brittle_runs.group(1, reading.place_of(failed.version, failed.slot), True, parts=True)
    assert [r.index for r in group.rollouts if r.failed] == list(failed.faults.rollouts)
    assert all("KeyError: 'no answer such as" in r.fault for r in group.rollouts if r.failed)
    rows = brittle_runs.look().rows("SELECT version, slot, faults FROM groups WHERE faults > 0")
    assert sorted((row["version"], row["slot"], row["faults"]) for row in rows) == sorted(
        (body.version, body.slot, len(body.faults.rollouts)) for body in accepted
    )


def test_a_host_whose_run_paused_by_environment_faults_reads_the_whole_remedy(served_runs, testbed):
    cause = f"{FAULTS}words fails on 40 of its newest 400 rollouts: words.py line 7: KeyError: {'no such answer ' * 12}"
    tell(served_runs, phase="paused", pause_cause=cause, waiting_for=f"the host: {cause}", remedy=FAULT_REMEDY)
    words, folder = words_of(served_runs, "/1/", is_host=True), testbed.folder.root
    assert "which shoal env check tries; where" in words.replace(" ;", ";") and "words fails on 40" in words
    for action in ("resume", "drain"):  # once here, once in the list of commands below
        assert words.count(f"shoal admin {action} {folder}") == words.count(f"shoal admin {action}") == 2
    assert "`" not in words and "Resume it with" not in words
    assert "Start its host again first, because nobody answers. Correct the environment" in words
    others = words_of(served_runs, "/1/")
    assert "Its host resumes it" in others and "Correct the environment" not in others


@pytest.mark.parametrize(("check", "is_told"), [("environment", True), (REPLAY, False)])
def test_the_overview_says_why_tasks_cannot_begin_while_the_run_goes_on(tmp_path, check, is_told, indexed):
    world = world_of(tmp_path, validators=JUDGES)
    serve_void(world, check=check)
    world.serve(WORKER, by=JUDGES[0])
    world.log_writer.store.close()
    (tmp_path / "run.json").write_text("{}")
    served_runs = indexed(tmp_path)
    for is_new in (True, False):
        assert (LONG in words_of(served_runs, "/1/")) == is_told, is_new
        served_runs.close()
        served_runs = indexed(tmp_path)


def test_the_overview_and_the_report_count_the_rollouts_on_which_the_environment_failed(brittle_runs, served_runs):
    events = list(brittle_runs.runs[0].reading.events())
    faults = [e.body.faults.rollouts for e in events if isinstance(e.body, GroupAccepted) and e.body.faults]
    number, those = sum(map(len, faults)), "rollout" if sum(map(len, faults)) == 1 else "rollouts"
    assert f"Environment failed on {number} {those}, which count in nothing" in words_of(brittle_runs, "/1/")
    assert "Environment failed on" not in words_of(served_runs, "/1/")
    with open_run(brittle_runs.runs[0].where) as run:
        run.catch_up()
        report = re.sub(r"\s+", " ", report_of(run, 0.0))
    assert f"The environment failed on {number} {those}, which count in nothing" in report
    told = [sentence_of(e.body) for e in events if isinstance(e.body, GroupAccepted) and e.body.faults]
    for words, failed in zip(told, faults, strict=True):
        assert words.endswith(f"the environment fails on {len(failed)} rollout{'s' if len(failed) > 1 else ''}")


def test_the_start_page_says_which_log_is_broken_and_which_is_still_read(testbed, copied, tmp_path):
    broken = shutil.copytree(copied, tmp_path / "broken")
    with contextlib.closing(sqlite3.connect(broken / "log.sqlite")) as log, log:
        log.execute("UPDATE events SET hash = printf('%064d', 0) WHERE seq = 3")
    served_runs = ServedRuns(tmp_path / "index.sqlite", [str(testbed.folder.root), str(copied), str(broken)])
    words = words_of(served_runs, "/compare")
    assert words.count("reading the log, 0 %") == 3 and "starting" not in words
    served_runs.catch_up()
    words = words_of(served_runs, "/compare")
    assert words.count("log broken") == 1 and "reading the log" not in words
    refused = viewer(served_runs).get("/3/csv/metrics.csv")
    assert refused.status_code == 503 and served_runs.fault(3) not in refused.text, "it may name the host's folders"
    assert "cannot be read to its end" in refused.text and "reading" not in refused.text.lower()
    tell(served_runs, phase="paused", waiting_for="the host: the run is paused")
    assert words_of(served_runs, "/compare").count("paused") == 4, (
        "not twice, as phase and as time left, of both whole runs"
    )
    served_runs.close()


def test_an_announced_cheater_is_named_so_after_its_quarantine(served_runs):
    run, builder = served_runs.runs[0].reading, served_runs.runs[0].builder
    cheater = next(member for member in run.state.members.values() if member.name == "cheater")
    assert cheater.until > 0, "it was quarantined"
    cheater.name, cheater.standing = "cheater-0", "new"
    run.state.config = {**run.state.config, "workers": {"cheating": 1}}
    builder._put_nodes()
    builder._db.commit()
    for address in ("/1/", "/1/nodes", f"/1/nodes/{cheater.key}"):
        words = words_of(served_runs, address)
        assert words.count("new cheats, was quarantined") == 1 and words.count("was quarantined") == 1, address
    assert report_of(run, 0.0).count("new (cheats, was quarantined)") == 1
    run.state.config = {"workers": {"cheating": "many"}}
    assert node_note(cheater, run.state) == "was quarantined"
