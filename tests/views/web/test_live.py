"""The page in a browser while its run goes on: news come without a reload, and take nothing from the reader's hands.

The log grows by the events that a real run wrote. The browser's clock is turned forward, so no test waits for it. Slow.
"""

import contextlib
import itertools
import re
import sqlite3
import time

import pytest

from shoal.views.web.served_runs import ServedRuns
from tests.views.web.browser import MOST_S, needs_browser, opened, served, sync_api

LATER_MS = 6_000
"""More than the page waits before it asks again."""
LIVE = "live=1"
"""In the address of what a page asks for when it looks for news."""

pytestmark = [pytest.mark.slow, needs_browser]
expect = sync_api.expect


class Going:
    """A copy of a run that has come some way, and goes on when it is told to."""

    def __init__(self, root, index):
        self._log, self._metrics = root / "log.sqlite", root / "metrics.jsonl"
        with contextlib.closing(sqlite3.connect(self._log)) as log, log:
            self._rows = log.execute("SELECT seq, data, hash FROM events ORDER BY seq").fetchall()
            log.execute("DELETE FROM events")
        self._lines = self._metrics.read_text()
        self._metrics.write_text("")
        # Each look at the clock is later by more than the time after which a run is asked how it does.
        self.served_runs = ServedRuns(index, [str(root)], itertools.count(step=10).__next__)
        self.on(len(self._rows) // 2)

    def on(self, events=None, lines=True):
        """Write the next events, all if no number is given, and then the metrics."""
        now, self._rows = self._rows[:events], self._rows[events:] if events else []
        with contextlib.closing(sqlite3.connect(self._log)) as log, log:
            log.executemany("INSERT INTO events VALUES (?, ?, ?)", now)
        if not self._rows:
            self._metrics.write_text(self._lines)
        for _ in range(2):  # the condition is noted when all is read
            while self.served_runs.step():
                pass
        return now[-1][0]


@pytest.fixture
def going(testbed, copied, tmp_path):
    made = Going(copied, tmp_path / "index.sqlite")
    yield made
    made.served_runs.close()


def looked_at(browser, complaints, address):
    """A page whose clock the test turns, and the statuses of what its script asked for."""
    page, asked = opened(browser, complaints), []
    page.clock.install()
    page.on("response", lambda answer: asked.append(answer.status) if LIVE in answer.url else None)
    page.goto(address)
    page.evaluate("window.isTheSame = true")
    later(page, asked)
    return page, asked


def later(page, asked):
    """Turn the clock until the page has asked again, and has been answered."""
    before, deadline = len(asked), time.monotonic() + MOST_S
    page.clock.fast_forward(LATER_MS)
    while len(asked) == before and time.monotonic() < deadline:
        page.wait_for_timeout(25)
    page.wait_for_load_state("networkidle")


def test_a_page_follows_its_run_without_a_reload(going, browser, complaints):
    with served(going.served_runs) as url:
        page, asked = looked_at(browser, complaints, f"{url}/1/")
        expect(page.locator("#live-state")).to_contain_text("Stopped at step")
        charts = page.locator("figure.chart").count()
        later(page, asked)
        assert asked[-1] == 304, "nothing has changed, so nothing is sent"
        last = going.on()
        later(page, asked)
        expect(page.locator("#live-state")).to_contain_text("The run has ended with version 2")
        expect(page.locator("#refused-h ~ .scroll tbody tr")).not_to_have_count(0)
        expect(page.locator("footer")).to_contain_text(f"up to event {last}")
        expect(page.get_by_role("link", name="Entropy")).to_be_visible()
        expect(page.locator("figure.chart canvas").first).to_be_attached()
        assert page.locator("figure.chart").count() > charts
        assert page.evaluate("window.isTheSame") and asked[-1] == 200
    assert complaints == []


def test_news_take_neither_the_focus_nor_what_was_opened(going, browser, complaints):
    with served(going.served_runs) as url:
        page, asked = looked_at(browser, complaints, f"{url}/1/log")
        page.get_by_text("Kinds", exact=True).click()
        for _ in range(3):
            page.keyboard.press("j")
        focused = "document.activeElement.getAttribute('href')"
        newest, mine = page.locator("#rows a.seq").first.get_attribute("href"), page.evaluate(focused)
        last = going.on(5)
        later(page, asked)
        expect(page.locator("#rows a.seq").first).not_to_have_attribute("href", newest)
        expect(page.locator("#events")).to_contain_text(f"{last + 1:,} events")
        assert page.evaluate(focused) == mine == page.locator("li.current a.seq").get_attribute("href")
        assert page.locator("details[open]").count() == 1
        going.on()  # so many that the focused row is on a later page: the reader keeps it
        later(page, asked)
        assert page.evaluate(focused) == mine == page.locator("li.current a.seq").get_attribute("href")
        page.evaluate("document.activeElement.blur()")
        later(page, asked)
        assert mine not in page.locator("#rows a.seq").evaluate_all("all => all.map((a) => a.getAttribute('href'))")
    assert complaints == []


def test_a_page_says_when_nobody_answers_and_goes_on_when_somebody_does(going, browser, complaints):
    with served(going.served_runs) as url:
        page, _ = looked_at(browser, complaints, f"{url}/1/")
        expect(page.locator("#polled")).to_have_text("Stopped")  # nobody hosts the copy
    page.clock.fast_forward(LATER_MS)
    expect(page.locator("#polled")).to_have_text("No answer, trying again")
    going.on()
    with served(going.served_runs, int(url.rpartition(":")[2])):
        page.clock.fast_forward(4 * LATER_MS)
        expect(page.locator("#polled")).to_have_text("The run has ended")
        expect(page.locator("#live-state")).to_contain_text("The run has ended")
        assert page.evaluate("window.isTheSame")
    assert [words for words in complaints if "ERR_CONNECTION_REFUSED" not in words] == []


def test_a_live_page_says_how_old_it_is_while_an_answer_is_long_in_coming(going, browser, complaints):
    with served(going.served_runs) as url:
        going.served_runs.runs[0].builder._db.execute(
            """UPDATE conditions SET is_live = 1, told = '{"phase": "running"}'"""
        )
        page = opened(browser, complaints)
        page.clock.install()
        page.route(f"**{LIVE}**", lambda route: None)
        page.goto(f"{url}/1/")
        expect(page.locator("#polled")).to_have_text("Live")
        page.clock.fast_forward(2_000)
        waited = page.locator("#live-state time[data-since]").first.inner_text()
        page.clock.fast_forward(20_000)
        expect(page.locator("#polled")).to_have_text(re.compile("As of 2[05]s ago"))
        assert page.locator("#live-state time[data-since]").first.inner_text() == waited, (
            "of the same moment as the rest"
        )
    assert complaints == []


def test_a_paused_page_asks_nothing_until_it_goes_on(going, browser, complaints):
    with served(going.served_runs) as url:
        page, begun = looked_at(browser, complaints, f"{url}/1/")[0], list[str]()
        page.keyboard.press("p")
        page.on("request", lambda request: begun.append(request.url) if LIVE in request.url else None)
        going.on()
        for _ in range(5):
            page.clock.fast_forward(LATER_MS)
            page.wait_for_timeout(20)
        assert begun == [] and page.locator("#polled").inner_text() == "Paused"
        page.keyboard.press("p")
        expect(page.locator("#live-state")).to_contain_text("The run has ended")
        expect(page.locator("#polled")).to_have_text("The run has ended")
    assert complaints == []
