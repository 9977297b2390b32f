"""The report in a browser, opened as a file without a network: it asks for nothing, complains of nothing, and fits.

Slow: `make test-slow`. Skipped where Chromium or its driver is missing.
"""

import pytest

from shoal.cli.main import main
from tests.views.web.browser import CHROMIUM, QUIET, axe_module, needs_browser, sync_api

BLOCKED = "http://127.0.0.1:9"
"""A proxy that nobody serves: what leaves the machine ends there."""

pytestmark = [pytest.mark.slow, needs_browser]


@pytest.fixture(scope="module")
def report(testbed, tmp_path_factory):
    file = tmp_path_factory.mktemp("report") / "report.html"
    assert main(["report", str(testbed.folder.root), "--private", "--out", str(file)]) == 0
    return file


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET, proxy={"server": BLOCKED})
        yield made
        made.close()


@pytest.mark.parametrize(("width", "mode"), [(400, "dark"), (1280, "light")])
def test_a_report_opens_without_a_network_and_asks_for_nothing(report, browser, width, mode):
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=mode, offline=True)
    page, asked, complaints = context.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda said: complaints.append(said.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(report.as_uri())
    page.wait_for_load_state("networkidle")
    for summary in page.locator("details summary").all():
        summary.click()
    assert (asked, complaints) == ([report.as_uri()], [])
    assert page.locator("figure svg").count() > 0 and page.get_by_role("heading", name="Held-out results").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    context.close()


def test_a_report_has_no_serious_fault_for_those_who_do_not_see_it(report, browser):
    """With its policy out of the way, which also forbids the script that looks."""
    for mode in ("light", "dark"):
        context = browser.new_context(color_scheme=mode, bypass_csp=True, offline=True)
        page = context.new_page()
        page.goto(report.as_uri())
        found = axe_module.Axe().run(page).response["violations"]
        serious = [fault for fault in found if fault["impact"] in ("serious", "critical")]
        assert [(fault["id"], fault["nodes"][0]["html"]) for fault in serious] == [], mode
        context.close()
