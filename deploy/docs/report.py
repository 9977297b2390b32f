"""The picture of a report for the docs: `python deploy/docs/report.py RUN_DIR`. Needs Chromium, playwright and Pillow.

It writes the report of the run as `shoal report` does, opens it in a browser as a file, and keeps two parts of it as
docs/pictures/report.png: its first screen, down to the first curves, and the nodes with what was refused. Give a run with
a cheater, such as the demo's.
"""

import io
import shutil
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from shoal.runs.run_reader import open_run
from shoal.views.report.report import report_of

OUT = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "report.png"
WIDTH, HEIGHT, GAP = 900, 1000, 24
COLOURS = 32
"""Of a picture: enough for text and thin curves, in a fraction of the bytes."""


def main(where: str) -> None:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as driver:
        file = Path(temporary) / "report.html"
        with open_run(where) as run:
            run.catch_up()
            file.write_text(report_of(run, time.time()))
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(file.as_uri())
        curves = page.locator("figure").first.bounding_box()
        nodes, after = (page.locator("h2", has_text=name).bounding_box() for name in ("Nodes", "Alarms"))
        assert curves is not None and nodes is not None and after is not None, "the report has them"
        spans = [(0.0, curves["y"] + curves["height"]), (nodes["y"], after["y"] - 20)]
        shots = [
            page.screenshot(full_page=True, clip={"x": 0, "y": start, "width": WIDTH, "height": end - start})
            for start, end in spans
        ]
        browser.close()
    parts = [Image.open(io.BytesIO(shot)).convert("RGB") for shot in shots]
    whole = Image.new("RGB", (WIDTH, parts[0].height + GAP + parts[1].height), "white")
    whole.paste(parts[0], (0, 0))
    whole.paste(parts[1], (0, parts[0].height + GAP))
    whole.quantize(COLOURS, dither=Image.Dither.NONE).save(OUT, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
