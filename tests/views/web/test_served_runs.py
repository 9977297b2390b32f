"""The threads that index runs: whatever goes wrong is shown and tried again, and never ends them."""

import contextlib
import csv
import io
import re
import shutil
import socket
import sqlite3
import time

import httpx
import pytest
from starlette.datastructures import QueryParams
from starlette.testclient import TestClient

from shoal.alarms import Alarm, AlarmsLog
from shoal.errors import Overreach
from shoal.run_folder import RunFolder
from shoal.runs.run_reader import open_run
from shoal.views.web.app import page_app
from shoal.views.web.index.build import numbered
from shoal.views.web.index.queries import IndexQueries
from shoal.views.web.index.schema import SIDECARS
from shoal.views.web.page_request import PageRequest
from shoal.views.web.served_runs import AGAIN_S, IDLE_S, LATE_S, MOST_AGAIN_S, STALE_S, ServedRuns
from tests.roles.testbed import URL
from tests.views.web.conftest import viewer


@pytest.fixture
def now():
    """What the clock of the served runs says; a test turns it."""
    return [0.0]


@pytest.fixture
def served_runs(copied, tmp_path, now):
    with contextlib.closing(ServedRuns(tmp_path / "index.sqlite", [str(copied)], clock=lambda: now[0])) as made:
        yield made


def first_page(served_runs):
    return viewer(served_runs, token="").get("/1/").text


def index_all(served_runs, now):
    """Index all that there is, later."""
    now[0] += AGAIN_S + 1
    while served_runs.step():
        pass
    return served_runs.look().overview(1)


def words(served_runs, address="/1/"):
    return " ".join(viewer(served_runs, token="").get(address).text.split())


def evaluate_last(root):
    folder = RunFolder(root).evaluations
    (folder / "after.json").write_bytes((folder / "before.json").read_bytes())


def evaluated(served_runs):
    return {(row["name"], row["version"]) for row in served_runs.look().rows("SELECT * FROM heldout")}


def test_a_log_that_is_half_read_is_not_shown_as_the_present(served_runs, copied, now, monkeypatch):
    """The run has ended. Its log is read in pages, as that of a long run is."""
    monkeypatch.setattr("shoal.runs.log_source.MAX_EVENTS", 25)
    evaluate_last(copied)
    shutil.copy(RunFolder(copied).evaluations / "before.json", RunFolder(copied).evaluations / "v000001.json")
    seen, read = [], []
    while served_runs.step() and not served_runs.runs[0].is_whole:
        page, log = words(served_runs), words(served_runs, "/1/log")
        percent = int(re.search(r"Reading the log, (\d+) %", page)[1])
        assert percent == int(re.search(r"Reading the log, (\d+) %", log)[1]) < 100
        for claim in ("The run has not begun", "Waits for", "has ended"):
            assert claim not in page and claim not in log
        assert f'data-badge="Reading {percent} %"' in page
        tells = " ".join(re.sub("<[^>]*>", " ", page).split())
        assert "Time left –" in tells and "Time of a step –" in tells and "Learned from –" in tells
        found, client = served_runs.look().overview(1), viewer(served_runs, token="")
        read.append(found["metrics_step"])
        assert (read[-1] or 0) < max(1, found["facts"]["version"]), "metrics are no further than the log"
        for table in ("metrics", "groups"):
            refused = client.get(f"/1/csv/{table}.csv")
            assert refused.status_code == 503 and "ask for this table once it is whole" in refused.text
        [row] = csv.DictReader(io.StringIO(client.get("/1/csv/runs.csv").text))
        assert row["phase"] == f"reading the log, {percent} %", "other runs of this page may be whole"
        refused = sum(found["facts"]["refused"].values())
        found_in = sum(row["groups"] for row in served_runs.look().refusal_counts(1))
        assert refused <= found_in and f"Refused {refused} " in tells, "a verdict may be read before its decision"
        of_read = {("before", 0), *([("v000001", 1)] if found["facts"]["version"] >= 1 else [])}
        if (
            served_runs.runs[0].reading.state.phase == "ended"
        ):  # the page may end between the run's end and later events
            of_read.add(("after", 2))
        assert evaluated(served_runs) <= of_read, "and the version of the final policy is not known"
        seen.append(percent)
        now[0] += 10.0
    assert seen == sorted(seen) and len({*seen}) > 3
    page = words(served_runs)
    assert "Reading the log" not in page and "The run has ended with version 2" in page
    assert evaluated(served_runs) == {("before", 0), ("v000001", 1), ("after", 2)}
    assert read[0] is None and 0 in read and served_runs.look().overview(1)["metrics_step"] == 1
    assert viewer(served_runs, token="").get("/1/csv/metrics.csv").status_code == 200


def test_a_live_log_is_whole_once_all_is_read_that_it_had(served_runs, monkeypatch):
    """Each look finds more of it: events come all the time, and bodies take longer than events."""
    monkeypatch.setattr("shoal.runs.log_source.MAX_EVENTS", 40)
    monkeypatch.setattr(served_runs.runs[0].reading.source, "newest", lambda: 99)
    said = [words(served_runs) for _ in range(3) if served_runs.step()]
    assert ["Reading the log" in page for page in said] == [True, True, False]


def test_an_empty_page_says_that_it_reads_before_it_has_read(served_runs):
    page, log = words(served_runs), words(served_runs, "/1/log")
    assert "Reading the log, 0 %" in page and "not begun" not in page + log
    assert "of which nothing was read" in page and "event -1" not in page


def test_a_broken_log_is_told_and_stays_told_while_it_is_read_again(served_runs, copied, now, monkeypatch, caplog):
    monkeypatch.setattr("shoal.runs.log_source.MAX_EVENTS", 40)
    with contextlib.closing(sqlite3.connect(copied / "log.sqlite")) as log:
        (last,) = log.execute("SELECT max(seq) FROM events").fetchone()
        log.execute("UPDATE events SET hash = ? WHERE seq = ?", ("0" * 64, last - 5))
        log.commit()
    evaluate_last(copied)
    while served_runs.step():
        now[0] += 10.0
    for _ in range(8):
        page = words(served_runs)
        assert page.count("cannot be read now") == 1 and f"broken at event {last - 5}" in page
        assert page.count("ask the run's host") == 1
        assert "Reading the log" not in page and evaluated(served_runs) == {("before", 0)}
        now[0] += MOST_AGAIN_S
        served_runs.step()
    assert caplog.text.count(f"broken at event {last - 5}") == 1


def test_a_live_page_says_how_old_it_is_when_its_index_is_late(served_runs, now):
    index_all(served_runs, now)
    served_runs.runs[0].is_live = True
    served_runs.runs[0].builder._db.execute("""UPDATE conditions SET is_live = 1, told = '{"phase": "running"}'""")
    client, etag = viewer(served_runs, token=""), ""
    for age_s, badge in ((LATE_S - 1, "Live"), (LATE_S + 6, "As of 20s ago")):
        now[0] = served_runs.runs[0].asked_at + age_s
        answer = client.get("/1/figures", headers={"if-none-match": etag})
        assert f'data-badge="{badge}"' in answer.text
        etag = answer.headers["etag"]
    assert client.get("/1/figures", headers={"if-none-match": etag}).status_code == 304


class Leaving(httpx.AsyncBaseTransport):
    """The way to a host, which may go. `asked` is called before each request to one that has gone."""

    def __init__(self, app):
        self._way, self.is_gone, self.asked = httpx.ASGITransport(app), False, lambda path: None

    async def handle_async_request(self, request):
        if self.is_gone:
            self.asked(request.url.path)
            raise httpx.ConnectError("refused")
        return await self._way.handle_async_request(request)


def test_a_host_that_is_gone_is_told_before_its_log_is_asked_for_and_a_run_that_has_ended_is_no_trouble(
    testbed, tmp_path, now, monkeypatch
):
    monkeypatch.setattr("shoal.runs.log_source.STATUS_S", 0.1)
    monkeypatch.setattr("shoal.runs.log_source.ANSWER_S", 0.1)
    way, told = Leaving(testbed.app), []

    def open_one(where, private):
        return open_run(where, private=private, transport=way)

    with contextlib.closing(
        ServedRuns(tmp_path / "index.sqlite", [URL], clock=lambda: now[0], open_one=open_one)
    ) as served_runs:
        served_runs.catch_up()
        assert "no longer answers" not in words(served_runs) and served_runs.look().condition(1)["is_live"]
        way.is_gone, before = True, served_runs.change

        def asked(path):
            if path == "/v1/events":
                told.append((served_runs.look().condition(1)["is_live"], served_runs.change > before))

        way.asked = asked
        now[0] += IDLE_S
        served_runs.step()
        assert told and {*told} == {(0, True)}
        page = words(served_runs)
        assert "The run has ended with version 2. Its host no longer answers" in page
        assert "cannot be read now" not in page and 'data-badge="The run has ended"' in page


def test_a_run_is_asked_how_it_does_when_its_log_has_another_version(copied, tmp_path, now):
    with contextlib.closing(sqlite3.connect(copied / "log.sqlite")) as log, log:
        rows = log.execute("SELECT * FROM events ORDER BY seq").fetchall()
        log.execute("DELETE FROM events WHERE seq >= ?", (len(rows) // 2,))
        with contextlib.closing(
            ServedRuns(tmp_path / "index.sqlite", [str(copied)], clock=lambda: now[0])
        ) as served_runs:
            log.commit()
            served_runs.catch_up()
            assert served_runs.look().condition(1)["version"] == 1
            log.executemany("INSERT INTO events VALUES (?, ?, ?)", rows[len(rows) // 2 :])
            log.commit()
            served_runs.catch_up()
            found = served_runs.look().overview(1)
            assert found["condition"]["version"] == found["facts"]["version"] == 2
            assert found["condition"]["phase"] == found["facts"]["phase"] == "ended"


def test_a_full_disk_is_told_and_indexing_goes_on_when_there_is_room(served_runs, now):
    served_runs.runs[0].builder._db.execute("PRAGMA max_page_count=1")
    assert not served_runs.step() and served_runs.change == 1
    assert "cannot be read now" in (page := first_page(served_runs)) and "disk is full" in page
    found = index_all(served_runs, now)
    assert found["facts"]["phase"] == "ended" and found["condition"]["phase"] == "ended"
    assert "cannot be read now" not in first_page(served_runs)


def test_a_disk_that_is_full_when_conditions_are_noted_is_told(served_runs, now):
    index_all(served_runs, now)
    served_runs.runs[0].builder._db.execute("PRAGMA query_only=1")
    now[0] += AGAIN_S + 1
    assert not served_runs.step() and "the index cannot be written" in served_runs.trouble(1)
    index_all(served_runs, now)
    assert served_runs.trouble(1) == ""


def test_a_fault_of_ours_is_logged_and_does_not_end_the_thread(served_runs, now, monkeypatch, caplog):
    def broken():
        raise RuntimeError("nobody foresaw it")

    monkeypatch.setattr(served_runs.runs[0].builder, "advance", broken)
    assert not served_runs.step() and "RuntimeError" in first_page(served_runs) and "nobody foresaw" in caplog.text
    assert index_all(served_runs, now)["facts"] and served_runs.trouble(1) == ""


def test_alarms_of_a_strangers_folder_stop_nothing(served_runs, copied, now):
    log = AlarmsLog(copied / "alarms.jsonl")
    log.write("raised", Alarm("disk", "critical", 10**30, 5, "It is full.", "Delete."), 1.0)
    with log.path.open("a") as file:
        file.write('{"deep": ' + "[" * 100_000 + "\n")
    assert index_all(served_runs, now)["condition"]["phase"] == "ended" and served_runs.trouble(1) == ""
    assert [row["words"] for row in served_runs.look().alarms(1)] == ["It is full. Delete."]
    assert viewer(served_runs, token="").get("/1/alarms").status_code == 200


def test_a_damaged_index_is_made_anew_for_all_runs_and_all_viewers(testbed, copied, tmp_path, now):
    path, places = tmp_path / "index.sqlite", [str(testbed.folder.root), str(copied)]
    with contextlib.closing(ServedRuns(path, places, clock=lambda: now[0])) as served_runs:
        index_all(served_runs, now)
        served_runs.runs[0].builder._db.execute("UPDATE runs SET name = 'old'")
        assert {row["name"] for row in served_runs.look().runs()} == {"old"}
        served_runs._let_go(served_runs.runs[0])
        (tmp_path / "damaged").write_bytes(b"not a database" * 100)
        (tmp_path / "damaged").replace(path)
        for part in ("-wal", "-shm"):
            path.with_name(path.name + part).unlink()
        index_all(served_runs, now)
        rows = served_runs.look().runs()
        assert len(rows) == 2 and {row["name"] for row in rows} == {served_runs.runs[0].reading.state.name}
        assert {row["seq"] for row in rows} == {served_runs.runs[0].reading.state.seq}
        assert [served_runs.look().overview(row["run"])["facts"]["phase"] for row in rows] == ["ended", "ended"]


def test_an_index_that_is_deleted_is_told_and_made_anew(testbed, copied, tmp_path, now):
    path, places = tmp_path / "index.sqlite", [str(testbed.folder.root), str(copied)]
    with contextlib.closing(ServedRuns(path, places, clock=lambda: now[0])) as served_runs:
        index_all(served_runs, now)
        path.unlink()
        client = viewer(served_runs, token="")
        for address in ("/1/", "/1/csv/events.csv", "/nothing"):
            answer = client.get(address)
            assert answer.status_code == 503 and "cannot be read now: try again" in answer.text
        index_all(served_runs, now)
        assert [client.get(f"/{shown.number}/").status_code for shown in served_runs.runs] == [200, 200]
        assert [served_runs.look().overview(shown.number)["facts"]["phase"] for shown in served_runs.runs] == [
            "ended",
            "ended",
        ]


def test_a_table_that_cannot_be_read_has_a_status_of_its_own(served_runs, now, tmp_path):
    index_all(served_runs, now)
    client = viewer(served_runs, token="")
    served_runs.look_apart = lambda: IndexQueries(tmp_path / "nothing")
    assert client.get("/1/csv/events.csv").status_code == 503 and client.head("/1/csv/events.csv").status_code == 200


def test_runs_keep_their_numbers_in_an_index_made_anew_or_are_told_apart(copied, tmp_path, now, monkeypatch):
    """Otherwise the page would show strangers the folder of one run as the URL of the other."""
    monkeypatch.setattr("shoal.runs.log_source.STATUS_S", 0.1)
    monkeypatch.setattr("shoal.runs.log_source.ANSWER_S", 0.1)
    path, places = tmp_path / "index.sqlite", ["http://127.0.0.1:9", str(copied)]
    with contextlib.closing(ServedRuns(path, places, clock=lambda: now[0])) as served_runs:
        while served_runs.step():
            pass
        path.unlink()
        while served_runs.step():  # the URL is not asked again yet
            pass
        client = TestClient(page_app(served_runs, "x" * 43))
        assert [shown.number for shown in served_runs.runs] == [1, 2]
        assert [client.get(f"/{number}/").status_code for number in (1, 2)] == [200, 200]
        before, other = served_runs.look_apart(), tmp_path / "other"
        assert numbered(other, [str(copied), places[0]]) == [1, 2]
        other.replace(path)
        for part in SIDECARS:
            path.with_name(path.name + part).unlink(missing_ok=True)
        while served_runs.step():
            pass
        assert [shown.number for shown in served_runs.runs] == [2, 1]
        for look in (before, served_runs.look()):
            for run in PageRequest(served_runs, look, 0, {}, QueryParams(), False, 0.0).runs():
                assert str(copied) not in str(run) and run["is_own"] == (run["run"] == (2 if look is before else 1))
        before.close()
        for address in ("/1/", "/2/", "/compare", "/1/csv/runs.csv"):
            assert str(copied) not in client.get(address).text


def test_a_host_that_does_not_answer_holds_up_no_other_run(copied, tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.views.web.served_runs.GROUP_WAIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        places = [f"http://127.0.0.1:{silent.getsockname()[1]}", str(copied)]
        with contextlib.closing(ServedRuns(tmp_path / "index.sqlite", places)) as served_runs:
            served_runs.start()
            deadline = time.monotonic() + 20  # the silent host has 30 s to answer
            while served_runs.look().overview(2)["facts"].get("phase") != "ended" or not served_runs.change:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert viewer(served_runs, token="").get("/2/").status_code == 200


def test_a_run_that_is_too_large_is_not_read_again_at_once(served_runs, now, monkeypatch):
    def broken():
        raise Overreach("the log does not fit into memory")

    index_all(served_runs, now)
    monkeypatch.setattr(served_runs.runs[0].builder, "advance", broken)
    served_runs.step()
    for _ in range(20):
        index_all(served_runs, now)
    assert served_runs.runs[0].reading is None and "does not fit" in served_runs.trouble(1)
    now[0] += MOST_AGAIN_S
    index_all(served_runs, now)
    assert served_runs.runs[0].reading is not None and served_runs.trouble(1) == ""


def test_a_run_that_fails_again_and_again_is_opened_less_and_less_often(served_runs, now, monkeypatch):
    opened, open_again = [], served_runs._open

    def fails(shown):
        opened.append(now[0])
        open_again(shown)
        shown.builder.advance = lambda: 1 / 0

    monkeypatch.setattr(served_runs, "_open", fails)
    served_runs._let_go(served_runs.runs[0])
    for now[0] in range(1300):
        served_runs.step()
    assert opened == [0, 5, 15, 35, 75, 155, 315, 635, 1235]
    monkeypatch.undo()
    now[0] += MOST_AGAIN_S
    assert index_all(served_runs, now)["facts"] and served_runs.runs[0].wait_s == AGAIN_S


def test_a_page_whose_run_waits_is_made_anew_now_and_then(served_runs, now):
    index_all(served_runs, now)
    before = served_runs.change
    now[0] += STALE_S + 1
    served_runs.step()
    assert served_runs.change == before + 1, "it tells for how long, and what is free on the disk"


def test_each_change_of_a_condition_is_news_but_the_time_that_it_lasts(served_runs, now):
    def later():
        index_all(served_runs, now)
        return served_runs.change

    later(), later()
    assert later() == (before := served_runs.change), "only what the run waits for lasts longer"
    served_runs.runs[0].reading.state.main.flat += 1
    assert later() == before + 1
    served_runs.runs[0].reading.state.pause_cause = "no signal"
    assert later() == before + 2


def test_an_evaluation_is_news(served_runs, copied, now):
    index_all(served_runs, now), index_all(served_runs, now)
    page = viewer(served_runs, token="").get
    assert "version 2 has no evaluation yet" in page("/1/").text
    evaluate_last(copied)
    index_all(served_runs, now)
    assert "has no evaluation yet" not in page("/1/").text
