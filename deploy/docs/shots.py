"""Pictures of the page for the docs: `python deploy/docs/shots.py RUN_DIR [NAME...]`. Needs what `make browser` installs.

It serves the run's page to a browser and writes docs/pictures/page-*.png, all or those of the given names: overview and all
rollouts of one prompt at 400, 900 and 1600 pixels, light and dark, and a refused group coloured by replay gaps. Give a run
with a cheater that keeps all bodies, such as

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

from shoal.views.web.app import page_app
from shoal.views.web.served_runs import ServedRuns

OUT = Path(__file__).resolve().parents[2] / "docs" / "pictures"
TOKEN = "t" * 43
COLOURS = 256
"""Of a picture: enough for flat pages, in a fraction of the bytes."""

SHOTS = {
    "page-overview": ("/1/", 1600, 1150, "light"),
    "page-overview-400": ("/1/", 400, 900, "light"),
    "page-group": ("/1/groups/{signal}?by=worst", 1600, 1000, "light"),
    "page-group-400": ("/1/groups/{signal}?by=worst", 400, 900, "light"),
    "page-forged": ("/1/groups/{refused}?colour=gap", 1280, 760, "light"),
}
"""View, width and height of the window, and mode, by name of the file."""


def main(run: str, *names: str) -> None:
    """Write the pictures of these names, or all."""
    with tempfile.TemporaryDirectory() as temporary:
        served_runs = ServedRuns(Path(temporary) / "index.sqlite", [run])
        while served_runs.step():
            pass
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(page_app(served_runs, TOKEN), log_level="warning", lifespan="off"))
        threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        asked = (
            "SELECT g.id FROM groups g JOIN rollouts r ON r.id = 4096 * g.id WHERE g.run = 1 AND public = 1 "
            "AND status = ? ORDER BY g.id DESC LIMIT 1"
        )
        groups = {
            status: row["id"] for status in ("refused", "signal") for row in served_runs.look().rows(asked, status)
        }
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for name in names or SHOTS:
                view, *window = SHOTS[name]
                _shot(browser, url, view.format(**groups), name, *window)
            browser.close()
        server.should_exit = True
        served_runs.close()


def _shot(browser: Browser, url: str, view: str, name: str, width: int, height: int, mode: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=mode)  # type: ignore[arg-type]
    context.set_default_timeout(120_000)
    page = context.new_page()
    page.goto(f"{url}/?token={TOKEN}")
    page.goto(url + view)
    page.wait_for_load_state("networkidle")
    with Image.open(io.BytesIO(page.screenshot())) as shot:
        shot.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(OUT / f"{name}.png", optimize=True)
    context.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
