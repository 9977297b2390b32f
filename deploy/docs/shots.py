"""Pictures of the page for the docs: `python deploy/docs/shots.py RUN_DIR`. Needs what `make browser` installs.

It serves the run's page to a browser and writes docs/pictures/page-*.png: the overview, a refused group coloured by replay
gaps, all rollouts of one prompt, and the overview on a phone. Give a run with a cheater that keeps all bodies, such as

    shoal run recipes/wordle.toml --set storage.retain='"all"'
    python deploy/docs/shots.py runs/wordle
"""

import io
import shutil
import socket
import sys
import tempfile
import threading
from pathlib import Path

import uvicorn
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from shoal.watch.page import Shelf, page_app

OUT = Path(__file__).resolve().parents[2] / "docs" / "pictures"
TOKEN = "t" * 43
COLOURS = 160
"""Of a picture: enough for flat pages, in a fraction of the bytes."""


def main(run: str) -> None:
    """Write the pictures."""
    with tempfile.TemporaryDirectory() as temporary:
        shelf = Shelf(Path(temporary) / "index.sqlite", [run])
        while shelf.step():
            pass
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(page_app(shelf, TOKEN), log_level="warning", lifespan="off"))
        threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        look = shelf.look()
        asked = "SELECT id FROM groups WHERE run = 1 AND public = 1 AND status = ? ORDER BY id DESC LIMIT 1"
        refused, signal = (look.rows(asked, status)[0]["id"] for status in ("refused", "signal"))
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            _shot(browser, url, "/1/", "page-overview", 1280, 960, "light")
            _shot(browser, url, "/1/", "page-phone", 400, 860, "dark")
            _shot(browser, url, f"/1/groups/{signal}?by=worst", "page-group", 1280, 760, "light")
            _shot(browser, url, f"/1/groups/{refused}?colour=gap", "page-forged", 1280, 760, "light")
            browser.close()
        server.should_exit = True
        shelf.close()


def _shot(browser: Browser, url: str, view: str, name: str, width: int, height: int, mode: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=mode)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(f"{url}/?token={TOKEN}")
    page.goto(url + view)
    page.wait_for_load_state("networkidle")
    with Image.open(io.BytesIO(page.screenshot())) as shot:
        shot.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(OUT / f"{name}.png", optimize=True)
    context.close()


if __name__ == "__main__":
    main(sys.argv[1])
