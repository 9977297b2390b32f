"""The page in a browser: every view by clicks, at three widths, light and dark; axe finds nothing serious.

Slow: `make test-slow`. Skipped where Chromium or its driver is missing. With SHOAL_PICTURES set to a folder, each view's
picture is written there.
"""

import os
import shutil
import socket
import threading
from pathlib import Path

import pytest
import uvicorn

from shoal.watch.page import Shelf, page_app

sync_api = pytest.importorskip("playwright.sync_api")
axe_module = pytest.importorskip("axe_playwright_python.sync_playwright")

CHROMIUM = shutil.which("chromium") or ""
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--no-first-run"]  # fmt: skip
TOKEN = "t" * 43
VIEWS = ("Overview", "Figures", "Groups", "Nodes", "Validators", "Refusals", "Versions", "Log", "Alarms")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")]


@pytest.fixture(scope="module")
def url(town, tmp_path_factory):
    shelf = Shelf(tmp_path_factory.mktemp("browser") / "index.sqlite", [str(town.folder.root)])
    while shelf.step():
        pass
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(page_app(shelf, TOKEN), log_level="warning", lifespan="off"))
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    shelf.close()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield made
        made.close()


@pytest.fixture
def complaints():
    return []


def opened(browser, complaints, width=1600, mode="light", script=True):
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=mode, java_script_enabled=script
    )
    page = context.new_page()
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    return page


def picture(page, name):
    if folder := os.environ.get("SHOAL_PICTURES"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 900, 1600])
def test_every_view_is_reached_by_clicks_fits_its_width_and_has_no_serious_fault(url, browser, complaints, width, mode):
    page = opened(browser, complaints, width, mode)
    page.goto(f"{url}/?token={TOKEN}")
    for view in VIEWS:
        page.get_by_role("navigation", name="Views").get_by_role("link", name=view, exact=True).click()
        page.wait_for_load_state("networkidle")
        _look(page, f"{view.lower()}-{width}-{mode}", width)
    for view, link in (("Groups", "tbody th a"), ("Nodes", "tbody th a"), ("Log", ".timeline a.seq")):
        page.get_by_role("navigation", name="Views").get_by_role("link", name=view, exact=True).click()
        page.locator(link).first.click()
        page.wait_for_load_state("networkidle")
        _look(page, f"one-of-{view.lower()}-{width}-{mode}", width)
    assert complaints == []


def _look(page, name, width):
    picture(page, name)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, name
    found = axe_module.Axe().run(page).response["violations"]
    assert [
        (fault["id"], fault["nodes"][0]["html"]) for fault in found if fault["impact"] in ("serious", "critical")
    ] == [], name


def test_without_a_script_the_charts_are_pictures(url, browser, complaints):
    page = opened(browser, complaints, script=False)
    page.goto(url)
    assert page.locator("figure.chart svg[role=img]").count() > 0
    assert page.locator("figure.chart svg[role=img]").first.get_attribute("aria-label")


def test_with_the_script_charts_are_drawn_and_keys_go_through_rows(url, browser, complaints):
    page = opened(browser, complaints)
    page.goto(url)
    page.locator("figure.chart canvas").first.wait_for()
    page.goto(f"{url}/1/groups")
    page.keyboard.press("j")
    assert page.locator("tr.current").count() == 1
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "q"
    assert complaints == []


def test_the_first_paint_comes_within_a_second(url, browser, complaints):
    page = opened(browser, complaints)
    page.goto(url)
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    assert paint < 1000
