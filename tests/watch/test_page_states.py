"""What the overview says to somebody who looks from a phone: whether the run learns, why it stands still and what to type,
whether a validator is alive; and how a volunteer finds its own node."""

import html
import json
import re

import pytest
from starlette.testclient import TestClient

from shoal.watch.page import Shelf, page_app
from shoal.watch.page.charts import Chart, Line, picture_of

TOKEN = "t" * 43


@pytest.fixture
def shelf(town, tmp_path):
    shelf = Shelf(tmp_path / "index.sqlite", [str(town.folder.root)])
    while shelf.step():
        pass
    yield shelf
    shelf.close()


def words_of(shelf, address, is_host=False):
    """The words of a page, without its tags."""
    client = TestClient(page_app(shelf, TOKEN))
    client.get(f"/?token={TOKEN if is_host else ''}")
    return html.unescape(re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", client.get(address).text)))


def tell(shelf, **said):
    """Make the index say so of the run."""
    db = shelf.runs[0].builder._db
    told = json.loads(db.execute("SELECT told FROM conditions").fetchone()[0])
    db.execute("UPDATE conditions SET told = ?", (json.dumps(told | said),))


def test_a_paused_run_says_what_resumes_it_and_has_no_time_left(shelf, town):
    tell(shelf, phase="paused", waiting_for="the host: the run is paused")
    host, anyone = words_of(shelf, "/1/", is_host=True), words_of(shelf, "/1/")
    assert f"Resume it with shoal admin resume {town.folder.root}" in host and "Time left paused" in host
    assert "Its host resumes it" in anyone and "shoal admin" not in anyone and str(town.folder.root) not in anyone


def test_a_host_reads_how_to_pause_a_run_that_goes_on_and_others_do_not(shelf, town):
    tell(shelf, phase="running", waiting_for="workers")
    host, anyone = words_of(shelf, "/1/", is_host=True), words_of(shelf, "/1/")
    for word in ("pause", "resume", "drain"):
        assert f"shoal admin {word} {town.folder.root}" in host
    assert "shoal admin" not in anyone and "Waits for workers" in anyone


def test_the_overview_says_whether_the_reward_rises_as_the_terminal_does(shelf):
    assert "means of" not in words_of(shelf, "/1/")  # two steps are too few to say
    db = shelf.runs[0].builder._db
    db.execute("DELETE FROM series WHERE name = 'reward_all_mean'")
    rows = [("reward_all_mean", step, reward) for step, reward in enumerate((0.0, 0.25, 0.5, 0.75))]
    db.executemany("INSERT INTO series (run, name, step, value) VALUES (1, ?, ?, ?)", rows)
    assert "Reward up: 0.125 to 0.625, means of 2 steps each." in words_of(shelf, "/1/")


def test_the_overview_says_how_old_the_newest_verdict_is_while_the_run_goes_on(shelf):
    assert "newest verdict" not in words_of(shelf, "/1/")
    tell(shelf, phase="running")
    assert re.search(r"Validators 1 newest verdict .+ ago", words_of(shelf, "/1/"))


def test_a_volunteer_finds_its_own_page_in_one_step_and_a_list_where_several_match(shelf):
    key = shelf.look().rows("SELECT key FROM nodes WHERE name = 'honest'")[0]["key"]
    for mine in (key[:12], "honest"):
        found = words_of(shelf, f"/1/nodes?q={mine}&find=1")
        assert "What it helped with" in found and "Share of credits" in found and key in found
    assert "No node matches" in words_of(shelf, "/1/nodes?q=nobody&find=1")
    assert "Rank is the place" in words_of(shelf, "/1/nodes?q=&find=1")


def test_a_chart_of_one_point_is_a_dot_before_a_script_draws_it():
    drawn = picture_of(Chart("heldout", "Held-out results", "success", "", "version", [0], [Line("mean", [0.5])], ""))
    assert drawn is not None
    first, last = drawn.lines[0][1].split(" ")
    assert first == last
