"""A browser that looks at a page, for the tests: what it needs, how the page is served, and what it complains about."""

import contextlib
import shutil
import socket
import threading

import pytest

from shoal.views.web.app import page_app
from shoal.views.web.page_server import server_of

NEEDS = "needs a browser: make browser"
sync_api = pytest.importorskip("playwright.sync_api", reason=NEEDS)
axe_module = pytest.importorskip("axe_playwright_python.sync_playwright", reason=NEEDS)

CHROMIUM = shutil.which("chromium") or ""
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--no-first-run"]  # fmt: skip
TOKEN = "t" * 43

MOST_S = 120
"""A step of a browser may take so long. Three tests may share the machine's cores, and the slowest answer plays a group
again with the model to compute its gaps: in the default of 5 s, honest pages failed."""

sync_api.expect.set_options(timeout=1000 * MOST_S)

needs_browser = pytest.mark.skipif(not CHROMIUM, reason=NEEDS)


@contextlib.contextmanager
def served(served_runs, port=0):
    """The address of some runs, which is answered until the context ends."""
    listener = socket.create_server(("127.0.0.1", port))
    server = server_of(page_app(served_runs, TOKEN))
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def opened(browser, complaints, width=1600, mode="light", script=True):
    """A page of its own, whose faults, forbidden scripts and dialogs are noted."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=mode, java_script_enabled=script
    )
    context.set_default_timeout(1000 * MOST_S)
    page = context.new_page()
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    return page


def go(page, view):
    """Click the name of a view."""
    page.get_by_role("navigation", name="Views").get_by_role("link", name=view, exact=True).click()
    page.wait_for_load_state("networkidle")


def checked(page, width):
    """Nothing is wider than the window, and axe finds nothing serious."""
    name = page.title()
    assert page.evaluate("document.documentElement.scrollWidth") <= width, name
    found = axe_module.Axe().run(page).response["violations"]
    assert [
        (fault["id"], fault["nodes"][0]["html"]) for fault in found if fault["impact"] in ("serious", "critical")
    ] == [], name
