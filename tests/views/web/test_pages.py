"""The page: every view of a real run answers, strangers' text stays text, private bodies are the host's, nothing is
written."""

import asyncio
import contextlib
import csv
import html
import io
import json
import re
from collections import Counter
from html.parser import HTMLParser
from types import SimpleNamespace
from urllib.parse import urljoin

import numpy as np
import pytest
from starlette.datastructures import QueryParams
from starlette.testclient import TestClient

from shoal.alarms import Alarm, AlarmsLog
from shoal.errors import ConfigError, NothingYet, StateError
from shoal.ledger.leases import LAPSES, LeaseLapsed
from shoal.ledger.log.check import verify
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.roles.auditor.token_scores import rebuilt, scored
from shoal.run_folder import RunFolder
from shoal.runs.run_reader import GroupRef
from shoal.step_metrics import METRICS
from shoal.verification.checks_with_model import sampling
from shoal.views.web import csv_export
from shoal.views.web.app import HEADERS, page_app
from shoal.views.web.chart_data import Chart, ChartLine, chart_of
from shoal.views.web.csv_export import DOWNLOADS, lines_of_csv
from shoal.views.web.index.group_queries import GroupFilter, groups
from shoal.views.web.page_request import PageRequest
from shoal.views.web.page_server import host_token
from shoal.views.web.replay_gap_requests import Gaps, Rescoring, gaps_of
from shoal.views.web.run_pages import _ends
from shoal.views.web.served_runs import CHANGE_EVERY_S, ServedRuns
from shoal.views.web.template_filters import parts, templates
from tests.runs.test_run_reader import grown
from tests.views.web.conftest import TOKEN, viewer
from tests.views.web.hostile_run import hostile_addresses


@pytest.fixture(scope="module")
def served_runs(testbed, tmp_path_factory):
    served_runs = ServedRuns(tmp_path_factory.mktemp("page") / "index.sqlite", [str(testbed.folder.root)])
    while served_runs.step():
        pass
    yield served_runs
    served_runs.close()


class Tags(HTMLParser):
    """The elements of a page, as a browser would find them."""

    def __init__(self, text):
        super().__init__()
        self.found, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)


def table_of(client, address):
    """The rows of a CSV."""
    return list(csv.DictReader(io.StringIO(client.get(f"/1/csv/{address}").text)))


def links_of(answer):
    found = re.findall(r'(?:href|src|data-chart)="([^"#]+)', answer.text)
    return [urljoin(str(answer.url), html.unescape(link)) for link in found if not link.startswith("data:")]


def shape_of(address):
    """An address without what makes it one of many."""
    path = re.sub(r"(?<=/)\d+", "N", re.sub(r"[0-9a-f]{64}", "KEY", address.partition("?")[0]))
    return path.removeprefix("http://testserver"), bool(address.partition("?")[2])


def crawled(client, starts=("/",), most=2):
    """Pages that can be reached, by address: of many of one shape, a few."""
    found, todo, seen = {}, [urljoin("http://testserver", start) for start in starts], Counter()
    while todo:
        address = todo.pop(0)
        if address in found or seen[shape_of(address)] == most:
            continue
        seen[shape_of(address)] += 1
        answer = found[address] = client.get(address)
        if "html" in answer.headers["content-type"]:
            todo += links_of(answer)
    return found


def test_every_link_on_every_page_answers(anyone):
    found = crawled(anyone, ("/", "/compare"))
    assert {address: answer.status_code for address, answer in found.items() if answer.status_code != 200} == {}
    seen = {shape_of(address)[0] for address in found}
    views = ("", "figures", "steps/N", "nodes", "nodes/KEY", "validators", "refusals", "versions", "log", "log/N", "alarms",
             "groups", "groups/N", "versions/N/slots/N", "task", "heldout", "chart.json", "csv/rollouts.csv")  # fmt: skip
    assert {f"/N/{view}" for view in (*views, *(f"csv/{table}.csv" for table in DOWNLOADS))} <= seen


def test_pages_keep_to_themselves_and_to_their_size(anyone):
    answer = anyone.get("/1/")
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assets = [anyone.get(link) for link in links_of(answer) if "/static/" in link]
    assert all("immutable" in asset.headers["cache-control"] for asset in assets)
    assert len(answer.content) + sum(len(asset.content) for asset in assets) < 300_000


@pytest.mark.parametrize("method", ["POST", "OPTIONS"])
def test_the_page_only_reads(anyone, method):
    assert anyone.request(method, "/1/").status_code == 405
    assert anyone.head("/1/").status_code == 200


def test_a_page_that_did_not_change_is_not_sent_again(anyone, served_runs):
    for address in ("/1/", "/1/?live=1", "/1/groups"):
        etag = anyone.get(address).headers["etag"]
        assert anyone.get(address, headers={"if-none-match": etag}).status_code == 304
        served_runs.change += 1
        assert anyone.get(address, headers={"if-none-match": etag}).status_code == 200


def test_a_log_that_grows_all_the_time_changes_the_page_once_in_a_while(tmp_path):
    root, now = tmp_path / "run", [0.0]
    root.mkdir()
    (root / "run.json").write_text("{}")
    served_runs = ServedRuns(tmp_path / "index.sqlite", [str(root)], clock=lambda: now[0])
    changes = []
    with contextlib.closing(served_runs), (root / "metrics.jsonl").open("w") as metrics:
        for step in range(20):
            print(f'{{"step": {step}}}', file=metrics, flush=True)
            served_runs.step()
            changes.append(served_runs.change)
            now[0] += 1.0
        for _ in range(int(2 * CHANGE_EVERY_S)):
            served_runs.step()
            now[0] += 1.0
        assert changes == [1 + step // int(CHANGE_EVERY_S) for step in range(20)]
        assert served_runs.change == changes[-1] + 1, "what came last is shown, too"
        assert [row["step"] for row in served_runs.look().series(1, "step")][-1] == 19


def test_what_an_open_page_polls_has_its_parts_that_change_and_no_chart(anyone):
    whole, polled = anyone.get("/1/").text, anyone.get("/1/?live=1").text
    parts = re.findall(r'id="([^"]+)" data-swap', whole)
    assert parts == re.findall(r'id="([^"]+)" data-swap', polled) == ["live-read", "live-state", "live-tables", "read"]
    charts = re.findall(r'data-chart="([^"]+)"', whole)
    assert charts and re.findall(r'data-chart="([^"]+)"', polled) == charts and "<svg" not in polled
    log = anyone.get("/1/log?live=1").text
    counts = [f"of-{kind}" for kind in re.findall(r'name="kind" value="([^"]+)"', log)]
    assert counts and re.findall(r'id="([^"]+)" data-swap', log) == ["live-read", *counts, "events", "rows", "read"]
    next_page = re.search(r'rel="next" href="([^"]+)"', log)
    assert next_page and "live" not in next_page[1]


def private_group(served_runs):
    """The number of a group, made private in the index."""
    look = served_runs.look()
    return look.rows("SELECT id FROM groups WHERE run = 1 AND status = 'signal' ORDER BY id")[0]["id"]


@pytest.fixture
def one_private(served_runs, monkeypatch):
    """As if the body of a group were still private."""
    number = private_group(served_runs)
    db = served_runs.runs[0].builder._db
    submission = served_runs.look().rows("SELECT submission FROM groups WHERE id = ?", number)[0]["submission"]
    db.execute("UPDATE groups SET public = 0 WHERE submission = ?", (submission,))
    is_public = served_runs.runs[0].reading.is_public
    monkeypatch.setattr(served_runs.runs[0].reading, "is_public", lambda name: name != submission and is_public(name))
    served_runs.change += 1
    yield number
    db.execute("UPDATE groups SET public = 1 WHERE submission = ?", (submission,))
    served_runs.change += 1


def test_private_bodies_are_shown_to_the_host_alone(anyone, host, one_private):
    hidden, shown = (client.get(f"/1/groups/{one_private}").text for client in (anyone, host))
    assert "still private" in hidden and "Rollouts side by side" not in hidden and "<dt>Task</dt>" not in hidden
    assert "Rollouts side by side" in shown and "<dt>Task</dt>" in shown
    rows = [client.get("/1/csv/rollouts.csv").text.count("\n") for client in (anyone, host)]
    assert rows[0] < rows[1]


def test_what_is_private_is_refused_where_it_is_read(served_runs, one_private):
    row = served_runs.look().rows("SELECT submission, place FROM groups WHERE id = ?", one_private)[0]
    with pytest.raises(NothingYet, match="private"):
        served_runs.group(1, GroupRef(row["submission"], row["place"]), private=False)


@pytest.mark.parametrize("given", ["", "x" * 43, TOKEN[:-1], "é" * 43])
def test_a_wrong_token_makes_nobody_the_host(served_runs, given):
    client = viewer(served_runs)
    page = client.get("/", params={"token": given}).text
    assert not client.cookies
    assert ("The token in that address is wrong, so this is the public view" in page) == bool(given)
    assert "You are the host" not in client.get("/1/").text


def test_a_token_leaves_every_address_that_carries_it(served_runs):
    """Also that of one of several runs, as a reader puts it together from the host's link."""
    for address, leads_to in {
        f"/?token={TOKEN}": "/1/", f"/1?token={TOKEN}": "/1", f"/1/?token={TOKEN}": "/1/",
        f"/1/figure?token={TOKEN}&name=step_s": "/1/figure?name=step_s", f"/compare?run=1&token={TOKEN}": "/compare?run=1",
        f"/nothing?token={TOKEN}": "/nothing", f"//elsewhere.org/?token={TOKEN}": "/elsewhere.org/",
        "/1/log?token=wrong": "/1/log?wrong-token=1", "/?token=wrong": "/1/?wrong-token=1",
    }.items():  # fmt: skip
        client = TestClient(page_app(served_runs, TOKEN), follow_redirects=False)
        answer = client.get(f"http://testserver{address}")
        assert (answer.status_code, answer.headers["location"]) == (303, leads_to)
        assert answer.headers["cache-control"] == "no-store"
        cookie = answer.headers.get("set-cookie", "").lower()
        assert all(word in cookie for word in ("httponly", "samesite=strict")) == ("wrong" not in address)
        assert TOKEN not in cookie
        is_host = "You are the host" in client.get("/1/").text
        assert is_host == ("wrong" not in address)


def test_without_a_token_nobody_is_the_host(served_runs):
    client = viewer(served_runs, token="")
    client.get("/?token=")
    client.cookies.set("shoal-host-", "")
    assert "You are the host" not in client.get("/1/").text


def test_hostile_names_reasons_rewards_and_conversations_show_as_text(hostile):
    client = viewer(hostile, is_host=True)
    views = [*hostile_addresses(hostile), *(f"/1/log/{seq}" for seq in range(20))]
    for view in views:
        answer = client.get(view)
        assert answer.status_code == 200, view
        for tag, attrs in Tags(answer.text).found:
            assert tag not in ("iframe", "base", "style", "img", "object", "textarea"), view
            assert not [name for name in attrs if name.startswith("on") or name == "style"], (view, attrs)
            assert tag != "script" or str(attrs.get("src")).startswith("/static/"), view
            assert not str(attrs.get("href", "")).startswith("javascript:"), view
        page = Tags(answer.text)
        told = [*page.words, *(str(a[name]) for _, a in page.found for name in ("title", "aria-label") if name in a)]
        unseen = set("".join(told)) & set("\x00\x07\x1b\u202e\u2066\ud800")
        assert not unseen, view
    shown = {view: "&lt;script&gt;alert(1)&lt;/script&gt;" in client.get(view).text for view in views}
    without = {shape_of(view)[0] for view, is_shown in shown.items() if not is_shown}
    assert without <= {"/N/log/N", "/N/nodes/KEY", "/N/figure", "/N/task"}, "these have other hostile texts, too"
    assert (
        "<title>Log · &lt;/title&gt;&lt;script&gt;alert(1)&lt;/script&gt; · shoal</title>" in client.get("/1/log").text
    )


def test_no_cell_of_a_csv_is_a_formula(hostile):
    client = viewer(hostile)
    files = [client.get(f"/1/csv/{table}.csv").text for table in DOWNLOADS]
    cells = [cell for file in files for row in csv.reader(io.StringIO(file)) for cell in row]
    assert any(cell.startswith("'=cmd") for cell in cells) and any(cell.startswith("'@SUM") for cell in cells)
    assert [cell for cell in cells if re.match(r"[=+@]|-(?!\d+(\.\d+)?(e-\d+)?$)", cell)] == []


def test_a_metrics_name_begins_no_row_of_a_csv(testbed, indexed):
    served_runs = indexed(testbed.folder.root)
    line = json.dumps({"step": 1, "a\n=HYPERLINK(1)": 0.5, "b": 0.5})
    db = served_runs.runs[0].builder._db
    db.execute("UPDATE metrics SET line = ? WHERE step = 1", (line,))
    db.execute("INSERT INTO series VALUES (1, ?, 1, 0.5)", ("a\n=HYPERLINK(1)",))
    told = viewer(served_runs, token="").get("/1/csv/metrics.csv").text
    rows = list(csv.reader(io.StringIO(told, newline="")))
    assert "a\n=HYPERLINK(1)" in rows[0] and len(rows) == 3
    assert not [row for row in rows if row[0].startswith("=")]


def test_a_download_keeps_no_old_state_for_others_and_no_journal(testbed, indexed):
    served_runs = indexed(testbed.folder.root)
    db, look = served_runs.runs[0].builder._db, served_runs.look()
    asked = PageRequest(served_runs, look, 1, {}, QueryParams(), False, 0.0)
    begun = [(lines := lines_of_csv(asked, table), next(lines, "")) for table in DOWNLOADS]
    db.execute("UPDATE runs SET name = 'new'")
    assert look.runs()[0]["name"] == "new"
    assert db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0, "nobody reads an old state"
    for lines, _ in begun:
        lines.close()


def test_rollouts_as_csv_are_those_of_the_groups_that_a_filter_leaves(host):
    rows = table_of(host, "rollouts.csv")
    of_step = table_of(host, "rollouts.csv?step=1&by=best")
    assert of_step and {row["step"] for row in of_step} == {"1"} and len(of_step) < len(rows)
    assert sorted(map(str, of_step)) == sorted(str(row) for row in rows if row["step"] == "1")


def test_a_long_table_comes_whole_page_by_page(anyone, monkeypatch):
    tables = ("metrics", "rollouts", "events", "spread", "verdicts")
    whole = [anyone.get(f"/1/csv/{table}.csv").text for table in tables]
    monkeypatch.setattr(csv_export, "TEXTS", 3)
    monkeypatch.setattr(csv_export._in_order, "__defaults__", (2,))
    assert [anyone.get(f"/1/csv/{table}.csv").text for table in tables] == whole


def test_the_host_downloads_when_all_places_are_taken(anyone, host, monkeypatch):
    monkeypatch.setattr(csv_export.Places, "turn_away", lambda self: 59.5)
    answer = anyone.get("/1/csv/events.csv")
    assert answer.status_code == 503 and "try again in 60 seconds" in answer.text
    assert anyone.head("/1/csv/events.csv").status_code == 200
    assert host.get("/1/csv/events.csv").text.startswith("run,seq,")


def test_many_alarms_fill_no_overview_and_come_page_by_page(testbed, copied, indexed):
    log = AlarmsLog(RunFolder(copied).alarms)
    for worker in range(60):
        level = "critical" if worker == 7 else "notice"
        log.write(
            "raised",
            Alarm("stragglers", level, 1, 1, f"w{worker} is slow.", "Ask. " * 200 + "End.", node=f"w{worker}"),
            1.0,
        )
    served_runs = indexed(copied)
    client = viewer(served_runs, is_host=True)
    page = client.get("/1/").text
    assert page.count("is slow.") == 5 and page.index("w7 is slow") < page.index("55 more alarms")
    first = client.get("/1/alarms")
    assert first.text.count("Ask. End.") == 50, "its host reads whole what to do"
    assert first.text.count("is slow.") == 50 and client.get("/1/alarms?at=50").text.count("is slow.") == 10
    assert any(link.endswith("/1/alarms?at=50") for link in links_of(first))
    assert "There are no more alarms." in client.get("/1/alarms?at=60").text


def test_every_table_comes_as_csv_with_a_line_for_each_row(anyone, served_runs):
    for table in DOWNLOADS:
        answer = anyone.get(f"/1/csv/{table}.csv")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/csv")
        assert answer.headers["cache-control"] == "private, no-store" and answer.headers["vary"] == "cookie"
    rows = served_runs.look().rows("SELECT count(*) AS rows FROM events")[0]["rows"]
    events = anyone.get("/1/csv/events.csv")
    assert events.text.count("\n") == rows + 1
    assert events.headers["content-disposition"] == f"attachment; filename=run-1-events-before-event-{rows}.csv"
    assert anyone.get("/1/csv/secrets.csv").status_code == 404


@pytest.mark.parametrize(
    "address", ["/9/", "/1/groups/999999", "/1/log/99999999999999999999999", "/1/nodes/nobody", "/1/steps/99",
    "/nothing", "/0/",
                "/1/versions/99999999999999999999/slots/1", "/1/task?env=none&task=5", "/static/x/../app.py"],
)  # fmt: skip
def test_what_is_not_there_is_said_in_a_page(anyone, address):
    answer = anyone.get(address)
    assert answer.status_code == 404 and HEADERS.items() <= answer.headers.items()


@pytest.mark.parametrize("address", ["/" + "9" * 5000, "/1/log/" + "9" * 5000, "/1/?q=" + "x" * 5000])
def test_an_address_that_is_too_long_is_refused_before_it_is_read(anyone, address):
    answer = anyone.get(address)
    assert answer.status_code == 414 and HEADERS.items() <= answer.headers.items()


@pytest.mark.parametrize(
    "query", ["q=a&after=4000000000000000000", "smooth=9", "from=-1e300", "step=", "by=DROP",
              "kind=x&kind=y", "q=%22%22%22", "q=*", "q=AND%20OR%20NEAR", "q=%00", "worker=%ff", "colour=red",
              "rollout=999", "at=5"],
)  # fmt: skip
def test_no_query_breaks_a_view(anyone, served_runs, query):
    for view in ("figures", "groups", "nodes", "log", f"groups/{private_group(served_runs)}"):
        assert anyone.get(f"/1/{view}?{query}").status_code == 200


@pytest.mark.parametrize(
    "query", ["after=x", "at=-1", "after=99999999999999999999", "smooth=nan", "from=inf", "version=1e9", "group=-1",
              "step=%C2%B2", "to=x", "task=0x1", "rollout=1.0", "seq=-0"],
)  # fmt: skip
def test_a_filter_that_should_be_a_number_is_never_left_out_silently(anyone, query):
    for view in ("groups", "log", "csv/rollouts.csv", "csv/step.csv"):
        answer = anyone.get(f"/1/{view}?{query}")
        assert answer.status_code == 400
        assert f"{query.partition('=')[0]} must be a" in answer.text and "correct it" in answer.text


def test_a_volunteer_that_searches_its_key_sees_its_rank_among_all_workers(anyone, served_runs):
    key = served_runs.look().rows("SELECT key FROM nodes WHERE name = 'cheater'")[0]["key"]
    rows = anyone.get(f"/1/nodes?q={key[:10]}").text.partition("<tbody>")[2].partition("</tbody>")[0]
    assert re.findall(r'<tr class="row"><td class="n">(\d+)</td>', rows) == ["2"]
    [row] = table_of(anyone, f"nodes.csv?q={key[:10]}")
    assert (row["name"], row["rank"]) == ("cheater", "2")
    ranks = [(row["role"], row["name"], row["rank"]) for row in table_of(anyone, "nodes.csv")]
    assert ("worker", "honest", "1") in ranks and ("worker", "cheater", "2") in ranks and len(ranks) > 2
    assert [row["name"] for row in table_of(anyone, "nodes.csv?role=worker&by=refused")] == ["cheater", "honest"]


def test_a_refused_group_says_by_which_check_and_how_to_recompute_it(anyone, served_runs):
    row = served_runs.look().rows(
        'SELECT r."check", g.id FROM refusals r JOIN groups g USING (run, submission, slot) LIMIT 1'
    )[0]
    page = anyone.get(f"/1/groups/{row['id']}").text
    assert row["check"] in page and "shoal audit" in page and "--rollout" in page


def test_no_command_recomputes_a_group_whose_bytes_cannot_be_read(anyone, served_runs, monkeypatch):
    def gone(*_):
        raise NothingYet("blob 0 is not here: it is no longer kept (storage.retain)")

    monkeypatch.setattr(served_runs, "group", gone)
    page = anyone.get(f"/1/groups/{private_group(served_runs)}").text
    assert "no longer kept" in page and "shoal audit" not in page


def test_tokens_are_marked_by_log_prob_and_by_advantage_with_their_figures(anyone, served_runs):
    number = private_group(served_runs)
    by_logprob = anyone.get(f"/1/groups/{number}").text
    assert (
        re.search(r'<span class="t\d" title="-\d+\.\d+ nats">', by_logprob)
        and "Log-prob under the policy" in by_logprob
    )
    by_advantage = anyone.get(f"/1/groups/{number}?colour=advantage").text
    assert re.search(r'<span class="t\d [pn]" title="advantage [+-]\d', by_advantage)
    assert not re.search(r'<span class="t\d', anyone.get(f"/1/groups/{number}?colour=none").text)


def test_only_a_viewer_with_the_hosts_link_has_this_machine_compute(anyone, host, served_runs, monkeypatch):
    number, asked, plain = private_group(served_runs), [], served_runs.group

    def group(run, place, private, parts=False):
        asked.append(f"parts {parts}")
        return plain(run, place, private, parts)

    def gaps(run, place):
        asked.append("gaps")
        return Gaps(((0.0, 0.0005, 5.0, None),) * 99, 0.002)

    monkeypatch.setattr(served_runs, "group", group)
    monkeypatch.setattr(served_runs, "gaps", gaps)
    page = anyone.get(f"/1/groups/{number}?colour=gap&parts=1").text
    assert asked == ["parts False"] and "replay gap" not in page
    page = host.get(f"/1/groups/{number}?colour=gap&parts=1").text
    assert asked[1:] == ["parts False", "parts True", "gaps"]
    assert 'class="t0" title="gap 0 nats"' in page and 'class="t5" title="gap 5 nats"' in page
    assert "Limit 0.002 for a single token, as in findings" in page


def test_the_legend_has_the_limit_that_findings_have(testbed, served_runs):
    row = served_runs.look().rows("SELECT submission, place FROM groups WHERE id = ?", private_group(served_runs))[0]
    place = GroupRef(row["submission"], row["place"])
    told = asyncio.run(gaps_of(str(testbed.folder.root), place))

    async def failure():
        async with rebuilt(str(testbed.folder.root), place, {}) as work:
            found = (await scored(work)).scores_G
            bounds = work.context.state.rules.bounds["float32/float32"]
            wide = found[0].gaps_P + np.float32(3 * bounds.gap)
            scores = [found[0]._replace(gaps_P=wide), *found[1:]]
            return sampling(work.group, SimpleNamespace(bounds=bounds, scores=scores)), bounds

    found, bounds = asyncio.run(failure())
    assert found.detail.startswith("token that its seed does not choose")
    assert told["limit"] == found.bound == 2 * bounds.gap
    assert [len(gaps) for gaps in told["gaps"]] == [r.policy_tokens for r in served_runs.group(1, place, True).rollouts]
    assert all(gap <= bounds.gap for gaps in told["gaps"] for gap in gaps)


def test_what_could_not_be_computed_now_is_not_kept_for_later(host, served_runs, monkeypatch):
    def gaps(run, place):
        raise NothingYet("another group is being computed")

    monkeypatch.setattr(served_runs, "gaps", gaps)
    answer = host.get(f"/1/groups/{private_group(served_runs)}?colour=gap")
    assert "another group is being computed" in answer.text and "etag" not in answer.headers


def test_gaps_are_computed_one_group_at_a_time_and_remembered(monkeypatch):
    rescoring, places, made = Rescoring(), [GroupRef("a", 0), GroupRef("b", 0)], []

    def computed(where, place):
        with pytest.raises(NothingYet, match="another"):
            rescoring.gaps(where, places[1])
        made.append(place)
        return Gaps((), None)

    monkeypatch.setattr(rescoring, "_computed", computed)
    assert rescoring.gaps("run", places[0]) == rescoring.gaps("run", places[0]) == Gaps((), None)
    assert made == places[:1]


def test_the_address_of_a_figure_shows_its_newest_values(anyone):
    page = anyone.get("/1/figure?name=reward_mean").text
    assert "<title>reward_mean" in page and 'href="/1/steps/1"' in page
    assert anyone.get("/1/figure?name=nothing").status_code == 404


def test_a_csv_has_the_rows_of_the_filter_of_its_page(anyone, served_runs):
    key = served_runs.look().rows("SELECT key FROM nodes WHERE name = 'cheater'")[0]["key"]
    events = table_of(anyone, "events.csv")
    assert {row["node"] for row in table_of(anyone, f"events.csv?node={key}")} == {key}
    assert {row["version"] for row in table_of(anyone, "groups.csv?version=1")} == {"1"}
    assert {row["kind"] for row in table_of(anyone, "events.csv?kind=batch_formed&kind=decision")} == {
        "batch_formed",
        "decision",
    }
    found = table_of(anyone, "events.csv?q=quarantined")
    assert 0 < len(found) < len(events) and all("quarantined" in row["words"] for row in found)
    refusals = table_of(anyone, "refusals.csv")
    assert len(refusals) == len(table_of(anyone, f"refusals.csv?check=sampling&worker={key}&outcome=hard")) > 0
    for other in ("check=other", "worker=nobody", "outcome=soft", "validator=nobody", "seq=0"):
        assert table_of(anyone, f"refusals.csv?{other}") == []
    of_one = table_of(anyone, f"refusals.csv?seq={refusals[0]['seq']}")
    assert of_one and {row["seq"] for row in of_one} == {refusals[0]["seq"]} and "status" in of_one[0]
    assert {row["worker"] for row in table_of(anyone, f"spread.csv?worker={key}")} == {key}
    assert table_of(anyone, "verdicts.csv?validator=nobody") == [] != table_of(anyone, "verdicts.csv")
    assert list(table_of(anyone, "metrics.csv?name=reward_mean")[0]) == ["step", "reward_mean"]
    step = {row["name"]: row for row in table_of(anyone, "step.csv?step=1")}
    assert step["reward_mean"]["unit"] == "reward" and len(step) > 10
    assert {"workers", "half_s"} <= table_of(anyone, "versions.csv")[0].keys() and table_of(anyone, "runs.csv")[0][
        "phase"
    ]


def figures_of(page):
    """Name, text and links of each figure in the cards or tiles of a page."""
    shown = (
        page.partition('class="cards"')[2].partition("</form>")[0]
        + page.partition('class="tiles"')[2].partition("</dl>")[0]
    )
    for name, told in re.findall(r"<dt[^>]*>(.*?)</dt><dd[^>]*>(.*?)</dd>", shown, re.DOTALL):
        yield re.sub("<[^>]*>", "", name), re.sub("<[^>]*>", "", told), re.findall(r'href="([^"]*)"', told)


def test_each_figure_of_cards_and_tiles_leads_to_what_says_it(host, anyone, served_runs):
    keys = [row["key"] for row in served_runs.look().rows("SELECT key FROM nodes")]
    found = [
        (view, *figure)
        for view in ("", *(f"nodes/{key}" for key in keys))
        for figure in figures_of(host.get(f"/1/{view}").text)
    ]
    names = {name for _, name, _, _ in found}
    assert {"Version", "Time of a step", "Reward", "Held-out", "Accepted", "Share of credits", "Leases"} <= names
    assert ">Blobs<" in host.get("/1/").text and ">Blobs<" not in anyone.get("/1/").text
    of_here = ("Free disk", "Blobs")  # measured by the page, so nothing of the run says it
    bare = [figure for figure in found if re.search(r"\d", figure[2]) and not figure[3] and figure[1] not in of_here]
    assert bare == []
    links = {name: links for view, name, _, links in found if view == ""}
    assert links["Reward"][0] == links["Learned from"][0] == "/1/steps/1" and links["Held-out"] == ["/1/heldout"]
    assert "of version 0; version 2 has no evaluation yet" in host.get("/1/").text
    evaluations = host.get("/1/heldout").text
    assert 'href="/1/figure?name=heldout"' in evaluations and 'href="/1/heldout" aria-current="page"' in evaluations
    assert 'id="v0"' in host.get("/1/figure?name=heldout").text


def words_of_figures(page):
    return {name: text.split() for name, text, _ in figures_of(page)}


def test_a_run_of_several_environments_has_the_reward_and_spread_of_each(testbed, indexed):
    served_runs = indexed(testbed.folder.root)
    db, labels = served_runs.runs[0].builder._db, ("one", "<b>two")
    for place, label in enumerate(labels):
        db.execute("UPDATE groups SET env = ? WHERE env IS NOT NULL AND slot % 2 = ?", (label, place))
        db.execute("UPDATE groups SET spread = ? WHERE env = ?", (0.25 * (1 + place), label))
    line = json.dumps({"step": 1, "reward_mean": 0.5, "reward_mean/one": 0.25, "reward_mean/<b>two": 0.75})
    db.execute("UPDATE metrics SET line = ? WHERE step = 1", (line,))
    db.execute("UPDATE facts SET told = json_set(told, '$.envs', json(?))", (json.dumps(labels),))
    client, host = viewer(served_runs), viewer(served_runs)
    host.get(f"/?token={TOKEN}")
    page = client.get("/1/").text
    told = words_of_figures(page)
    assert "Of groups with a signal" in told
    assert told["one"] == ["0.25", "±", "0.25"] and told["&lt;b&gt;two"] == ["0.75", "±", "0.5"]
    assert "Reward and spread, one" in page and "Reward and spread, &lt;b&gt;two" in page
    lines = client.get("/1/chart.json?name=by-version/one").json()["lines"]
    assert [line["edge"] for line in lines] == [False, True, True]
    assert lines[1]["values"][-1] - lines[0]["values"][-1] == pytest.approx(0.25)
    assert client.get("/1/figure?name=by-version/%3Cb%3Etwo").status_code == 200
    columns = [name for _, name, *_ in db.execute("PRAGMA table_info(groups)") if name not in ("id", "place")]
    copied = ", ".join({"status": "'copied'", "spread": "9.0"}.get(name, name) for name in columns)
    db.execute(
        f"INSERT INTO groups ({', '.join(columns)}, place) SELECT {copied}, 999 FROM groups WHERE step = 1 LIMIT 1"
    )
    served_runs.change += 1
    assert words_of_figures(client.get("/1/").text)["one"] == told["one"]
    assert len(groups(served_runs.look(), 1, GroupFilter(step=1))["rows"]) == len(
        served_runs.runs[0].reading.state.main.batches[1]
    )
    taken = groups(served_runs.look(), 1, GroupFilter(step=1))["rows"][0]["id"]
    assert re.findall(r"groups\?step=(\d)", client.get(f"/1/groups/{taken}").text) == ["1"]
    db.execute(
        "UPDATE groups SET public = 0 WHERE id = (SELECT max(id) FROM groups WHERE step = 1 AND status = 'signal')"
    )
    served_runs.change += 1
    assert words_of_figures(client.get("/1/").text)["one"] == ["0.25"], (
        "and of an unknown part of a batch nothing is said"
    )
    assert words_of_figures(host.get("/1/").text)["one"] == told["one"]
    db.execute("UPDATE groups SET public = 0")
    served_runs.change += 1
    assert "Reward and spread, one" not in client.get("/1/").text, "which environment a private group is of is private"


def test_charts_give_their_numbers_smoothed(anyone):
    raw = anyone.get("/1/chart.json?name=reward_mean").json()
    assert raw["x"] == [0, 1] and raw["lines"][0]["label"] == "all"
    assert anyone.get("/1/chart.json?name=reward_mean&of=all&smooth=0.5").json()["lines"][0]["label"].startswith("1 ")


def test_what_is_of_a_family_has_its_unit_and_meaning_and_an_environment_may_be_called_all(
    folder_with_metrics, indexed
):
    line = {"step": 0, "reward_mean": 0.5, "reward_mean/all": 0.25, "reward_part/format": 0.5, "draw_weight/a": 1.0}
    served_runs = indexed(folder_with_metrics({**line, "staleness_rollouts": {"3": 8}}))
    client = viewer(served_runs, token="")
    told = {row["name"]: (row["unit"], row["meaning"]) for row in table_of(client, "step.csv?step=0")}
    for name, declared in (
        ("reward_part/format", "reward_part/NAME"),
        ("draw_weight/a", "draw_weight/LABEL"),
        ("staleness_rollouts/3", "staleness_rollouts"),
    ):
        assert told[name] == METRICS[declared][:2]
    assert METRICS["reward_part/NAME"].sentence in html.unescape(client.get("/1/steps/0").text)
    assert served_runs.look().metric_names(1, "named part") == ["reward_part/format"]
    assert "name=reward_part" in client.get("/1/").text and "Parts of the reward" in client.get("/1/").text
    drawn = client.get("/1/chart.json?name=reward_mean").json()["lines"]
    assert [(line["label"], line["values"]) for line in drawn] == [("all", [0.5]), ("all", [0.25])]
    assert client.get("/1/chart.json?name=reward_part").json()["unit"] == "reward"


def test_an_age_that_a_step_does_not_name_has_no_rollouts(folder_with_metrics, indexed):
    served_runs = indexed(
        folder_with_metrics(*({"step": step, "staleness_rollouts": {f"{step}": 8}} for step in (0, 1)))
    )
    drawn = viewer(served_runs, token="").get("/1/chart.json?name=staleness_rollouts").json()["lines"]
    assert [line["values"] for line in drawn] == [[8.0, 0.0], [0.0, 8.0]]


@pytest.mark.parametrize("steps", [9, 2000])
def test_a_step_without_a_value_is_a_gap_in_charts(folder_with_metrics, steps, indexed):
    third = steps // 3
    lines = [
        {
            "step": step,
            "env_metric/a": 1.0,
            **({} if third <= step < 2 * third else {"env_metric/b": 2.0 + step, "entropy_nats": 1.0}),
        }
        for step in range(steps)
    ]
    served_runs = indexed(folder_with_metrics(*lines))
    for name in ("env_metric", "entropy_nats"):
        drawn = chart_of(served_runs.look(), 1, name)
        assert drawn.x[-1] == steps - 1 and len(drawn.x) <= 400
        assert any(third < x < 2 * third - 1 for x in drawn.x)
        missing = [x for x, value in zip(drawn.x, drawn.lines[-1].values, strict=True) if value is None]
        assert missing and all(third <= x < 2 * third for x in missing)


def test_several_runs_are_compared(testbed, copied, indexed):
    served_runs = indexed(testbed.folder.root, copied)
    for worker in ("ann", "bob"):
        alarm = Alarm("stragglers", "notice", 1, 1, f"{worker} is slow.", "Ask.", node=worker)
        AlarmsLog(RunFolder(copied).alarms).write("raised", alarm, 1.0)
    served_runs.runs[1].builder.note_condition()
    client, host = viewer(served_runs, token=""), viewer(served_runs)
    host.get(f"/?token={TOKEN}")
    counts = [client.get("/compare").text.count(f'/2/alarms">{number}<') for number in (1, 2)]
    assert counts == [1, 0] and '/2/alarms">2<' in host.get("/compare").text, "not how many nodes are accused"
    answer = client.get("/")
    assert str(answer.url).endswith("/compare") and answer.text.count('<th scope="row">') == 2
    lines = {who: who.get("/1/chart.json?name=reward_mean&of=all").json()["lines"] for who in (client, host)}
    told = [re.fullmatch(r"[12] (.+) \(.+\)", line["label"]) for line in lines[host]]
    assert [one and one[1] for one in told] == [testbed.folder.root.name, copied.name]
    assert len(lines[client]) == 2 and "copy" not in str(lines[client]), "a folder is for its host"
    assert [line["label"] for line in lines[client]] == ["1 folder 1 (town)", "2 folder 2 (town)"], "they have one id"
    page = client.get("/compare").text
    assert "its host&#39;s folder 1" in page and "its host&#39;s folder 2" in page


def test_runs_are_told_apart_by_the_shortest_ends_of_their_paths():
    assert _ends(["/a/x/run", "/a/y/run", "other", "run"]) == {
        "/a/x/run": "x/run", "/a/y/run": "y/run", "other": "other", "run": "run",
    }  # fmt: skip


def test_the_legend_has_the_newest_value_of_a_shorter_line():
    lines = [
        ChartLine("long", [0.1, 0.2, 0.3]),
        ChartLine("short", [0.4, 0.5, None]),
        ChartLine("none", [None, None, None]),
    ]
    chart = Chart("reward", "Reward", "", "", "step", [0, 1, 2], lines)
    assert [chart.last(line) for line in lines] == [(2, 0.3), (1, 0.5), (2, None)]
    legend = parts(templates(), str, "").chart(1, chart)
    assert re.findall('data-last="([^"]+)"', legend) == ["0.3", "0.5 at 1", "–"]


def test_a_folder_without_a_run_is_an_error_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match="no folder"):
        ServedRuns(tmp_path / "index.sqlite", [str(tmp_path / "nothing")])


def test_the_hosts_token_is_kept_for_it_alone(tmp_path):
    file = tmp_path / "page.token"
    made = host_token(file)
    assert len(made) >= 32 and host_token(file) == made and file.stat().st_mode & 0o777 == 0o600
    file.write_text("short")
    with pytest.raises(StateError, match="shorter"):
        host_token(file)


def test_the_counts_of_a_node_and_a_validator_are_the_rows_that_they_lead_to(anyone, served_runs):
    look = served_runs.look()
    for node in look.nodes(1, role="worker")["rows"]:
        page = html.unescape(anyone.get("/1/nodes").text)
        for kind, count in (
            ("credit", bool(node["credits"])),
            ("group_accepted", node["accepted"]),
            ("lease_lapsed", node["lapsed"]),
        ):
            link = f"log?node={node['key']}&kind={kind}"
            assert (f"/1/{link}" in page) == bool(count), link
            rows = table_of(anyone, link.replace("log?", "events.csv?"))
            if kind == "lease_lapsed":  # the quarantine of the cheater may close a lease, which is no lapse
                closed = {
                    e.seq: e.body for e in served_runs.runs[0].reading.events() if isinstance(e.body, LeaseLapsed)
                }
                rows = [row for row in rows if closed[int(row["seq"])].cause in LAPSES]
            assert len(rows) == count or (kind == "credit" and bool(rows) == count), link
    [one] = look.validators(1)
    page = html.unescape(anyone.get("/1/validators").text)
    for link, count in (
        (f"log?kind=verdict_given&node={one['validator']}", one["verdicts"]),
        (f"refusals?validator={one['validator']}&outcome=hard", one["hard"]),
    ):
        assert f"/1/{link}" in page
        assert (
            len(table_of(anyone, link.replace("log?", "events.csv?").replace("refusals?", "refusals.csv?")))
            == count
            > 0
        )


def test_before_the_first_version_the_version_is_none_and_not_minus_one(testbed, tmp_path, indexed):
    first = verify(Store(sqlite_url(testbed.folder.log), read_only=True).read()).entries[0]
    served_runs = indexed(grown(tmp_path, [first]))
    client = viewer(served_runs, token="")
    assert [view for view in ("/1/", "/compare") if "-1" in "".join(Tags(client.get(view).text).words)] == []


def test_the_form_of_a_figure_asks_for_the_same_metric(hostile):
    name = "env_metric/\u202etxt.exe"
    page = Tags(viewer(hostile, token="").get("/1/figure", params={"name": name}).text)
    assert [a["value"] for tag, a in page.found if tag == "input" and a.get("type") == "hidden"] == [name]
