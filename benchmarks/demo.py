"""What the demo learns: `shoal run recipes/wordle.toml` from start to end, for three seeds.

    python benchmarks/demo.py [--seeds 1,2,3]

A run takes about four minutes on two cores. Wins are those of the held-out words, before and after training, as
`summary.json` has them. `report_mb` is the size of what `shoal report` writes on the last run. The last line is JSON; lists
have a number a seed. The exit code is 1 if the report is larger than 2 MB.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, arguments, numbers, report, shoal_command

MOST_REPORT_MB = 2.0
"""Bar: such a file can be sent by mail."""


def main() -> int:
    """One run a seed, one after the other."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3])
    seeds = parser.parse_args().seeds
    summaries = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in seeds:
            summaries.append(run(seed, Path(scratch) / str(seed)))
            before, after = (summaries[-1]["heldout"][when]["mean"] for when in ("before", "after"))
            print(f"seed {seed}: {before:.1%} -> {after:.1%} in {summaries[-1]['wall_s']:.0f} s", flush=True)
        size_mb = report_mb(Path(scratch) / str(seeds[-1]))
    print(f"the report on the last run has {size_mb:.2f} MB, bar {MOST_REPORT_MB:g}")
    report("demo", {"seeds": seeds, **figures(summaries), "report_mb": size_mb})
    return 0 if size_mb <= MOST_REPORT_MB else 1


def run(seed: int, out: Path) -> dict[str, Any]:
    """The summary of a whole run."""
    command = shoal_command("run", "recipes/wordle.toml", "--out", out, "--set", f"seed={seed}")
    log = out.with_suffix(".log")
    with log.open("wb") as told:
        ended = subprocess.run(
            command, cwd=ROOT, stdout=told, stderr=told, stdin=subprocess.DEVNULL, check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    if ended.returncode:
        raise SystemExit(
            f"seed {seed} ended with {ended.returncode}:\n" + "\n".join(log.read_text().splitlines()[-20:])
        )
    return json.loads((out / "summary.json").read_text())


def report_mb(folder: Path) -> float:
    """Megabytes of the report on a run, rounded up: a bar is not met by rounding."""
    file = folder.with_suffix(".html")
    command = shoal_command("report", str(folder), "--out", str(file))
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return math.ceil(file.stat().st_size / 1e4) / 100


def figures(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Wins, pay and time of all runs."""
    before, after = ([summary["heldout"][when] for summary in summaries] for when in ("before", "after"))
    paid = [pay["credits"] for summary in summaries for pay in summary["credits"].values() if pay["role"] == "cheating"]
    return {
        "games": after[0]["episodes"],
        "wins_before": [round(found["mean"], 4) for found in before],
        "wins_after": [round(found["mean"], 4) for found in after],
        "wins_after_low95": [round(found["low95"], 4) for found in after],
        "wins_after_lowest95": round(min(found["low95"] for found in after), 4),
        "credits_of_cheats": sum(paid),
        "wall_s": [round(summary["wall_s"]) for summary in summaries],
        "cpu_s": [round(sum(summary["cpu_s"].values())) for summary in summaries],
    }


if __name__ == "__main__":
    sys.exit(main())
