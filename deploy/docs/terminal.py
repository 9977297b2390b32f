"""The picture of `shoal watch` for the docs: `python deploy/docs/terminal.py RUN_DIR_OR_URL --step 30`.

It waits until a run that is hosted has reached the step, and writes docs/pictures/watch.svg: what `shoal watch` shows
then, in a terminal of 100 columns. Give the demo's run while `make demo` is at work:

    python deploy/docs/terminal.py runs/wordle --step 30
"""

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path

from shoal.views.terminal.end_screen import save_picture
from shoal.views.terminal.live_view import render
from shoal.views.terminal.watch_command import LOOK_EVERY_S, OVER, opened

OUT = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "watch.svg"
COLUMNS, LINES = 100, 30


async def main(source: str, step: int, shown_as: str) -> None:
    """Write the picture. Raises `ShoalError` if nothing is seen of the run, `SystemExit` if it ends before the step."""
    async with opened(source) as run:
        while (snapshot := await run.look()).status.version < step:
            if snapshot.status.phase in OVER:
                raise SystemExit(
                    f"{source} is {snapshot.status.phase} at step {snapshot.status.version}: start it again"
                )
            await asyncio.sleep(LOOK_EVERY_S)
    save_picture(render(replace(snapshot, out=shown_as, hint="q leaves; the run goes on"), LINES), OUT, COLUMNS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--step", type=int, default=30)
    parser.add_argument("--shown-as", default="runs/wordle", help="the folder that the picture names")
    asked = parser.parse_args()
    asyncio.run(main(asked.run, asked.step, asked.shown_as))
