"""A run of stages that is killed again and again, beside one that is not: same bytes, and each stage's own measure.

    OMP_NUM_THREADS=1 python benchmarks/stages.py [--file FILE] [--kills 10] [--seed 1] [--whole] [--keep FOLDER]

It runs a stages file, recipes/stages/r1/r1.toml unless told otherwise, with --quick (with --whole: without), once to its
end and once with kills, spread over its jobs: the launcher gets SIGKILL at times that follow from the seed, and the same
command is started again. All stages of the file must be synchronous. Then the digests of every stage's outputs are
compared, the weights of the last policy among them. With `--kills 0` it only measures. Folders in FOLDER are kept and gone
on with.

The last line is JSON: `same` says whether every output is equal, `stages` what each stage improved. The exit code is 1 if
an output differs, or if a stage that has a measure did not improve it.
"""

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # started as a file, as benchmarks are


LONGEST_WAIT_S = 12.0
"""A kill comes at most so long after the job before has ended."""


def main() -> int:
    """Run the stages twice, compare, and print all figures as JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=ROOT / "recipes" / "stages" / "r1" / "r1.toml", metavar="FILE")
    parser.add_argument(
        "--kills", type=int, default=10, help="how often the second run is killed; 0: there is no second"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the times")
    parser.add_argument("--whole", action="store_true", help="without --quick")
    parser.add_argument("--keep", type=Path, default=None, metavar="FOLDER", help="where the folders of the runs stay")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-stages-") as scratch:
        place, flags = asked.keep or Path(scratch), [] if asked.whole else ["--quick"]
        whole_s = finish(asked.file, place / "whole", flags)
        report, known = read(place / "whole"), outputs(place / "whole")
        figures: dict[str, Any] = {
            "benchmark": "stages", "file": asked.file.name, "quick": not asked.whole, "seconds": round(whole_s, 1),
            "total": report["total"], "stages": [improvement(end) for end in report["stages"]],
        }  # fmt: skip
        if asked.kills:
            jobs, rng = num_done(place / "whole"), random.Random(asked.seed)
            kills, killed_s = killed(asked.file, place / "killed", flags, asked.kills, jobs, rng)
            other = outputs(place / "killed")
            differing = sorted(name for name in known.keys() | other.keys() if known.get(name) != other.get(name))
            figures |= {
                "kills": kills,
                "killed_seconds": round(killed_s, 1),
                "same": not differing,
                "differing": differing,
            }
    for stage in figures["stages"]:
        print(told(stage))
    print(json.dumps(figures))
    missed = [stage["name"] for stage in figures["stages"] if stage.get("gain", 1) <= 0]
    return int(bool(missed) or not figures.get("same", True))


def start(file: Path, out: Path, flags: list[str]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "shoal.cli.main", "stages", str(file), "--out", str(out), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=sys.stderr)


def finish(file: Path, out: Path, flags: list[str]) -> float:
    """Seconds until the stages are done."""
    began = time.monotonic()
    if start(file, out, flags).wait():
        raise SystemExit(f"the stages in {out} failed")
    return time.monotonic() - began


def killed(
    file: Path, out: Path, flags: list[str], times: int, jobs: int, rng: random.Random
) -> tuple[list[tuple[int, float]], float]:
    """Kill the stages so often, spread over their jobs, then let them end. Gives for each kill how many jobs were done by
    then and how long the next one was let work, seconds; and seconds in all."""
    began, found = time.monotonic(), list[tuple[int, float]]()
    for kill in range(times):
        process, wait_s = start(file, out, flags), rng.uniform(0.1, LONGEST_WAIT_S)
        while num_done(out) < kill * jobs // times and process.poll() is None:
            time.sleep(0.05)
        try:
            process.wait(timeout=wait_s)
            break  # it has ended before
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            found.append((num_done(out), round(wait_s, 2)))
    finish(file, out, flags)
    return found, time.monotonic() - began


def num_done(out: Path) -> int:
    """Stages and evaluations that are done."""
    return len(list(out.glob("stages/*/done.json")))


def read(out: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((out / "report.json").read_bytes())
    return report


def outputs(out: Path) -> dict[str, Any]:
    """By the name of each stage, its key and the digests of its outputs. A run's folder has more, such as times."""
    found = {}
    for end in read(out)["stages"]:
        done = json.loads((out / "stages" / end["key"] / "done.json").read_bytes())
        found[end["name"]] = (end["key"], done["outputs"], done["made"]["figures"].get("rollouts", ""))
    return found


def improvement(end: dict[str, Any]) -> dict[str, Any]:
    """What a stage improved: before and after, with standard errors, and the difference."""
    shown = {name: end[name] for name in ("name", "kind", "seconds", "cpu_s")}
    measure = "share right" if end["kind"] == "reject" else "held out"
    if end["before"] is None or end["after"] is None:
        return shown | {"measure": measure, "after": end["after"] and end["after"]["mean"]}
    # A 95 % interval is 3.92 standard errors wide.
    return shown | {"measure": measure} | difference(
        *((m["mean"], (m["high95"] - m["low95"]) / 3.92, m["episodes"]) for m in (end["before"], end["after"]))
    )  # fmt: skip


def difference(before: tuple[float, float, int], after: tuple[float, float, int]) -> dict[str, Any]:
    """Two means with standard errors and numbers of episodes."""
    return {
        "before": round(before[0], 4), "before_stderr": round(before[1], 4),
        "after": round(after[0], 4), "after_stderr": round(after[1], 4),
        "gain": round(after[0] - before[0], 4), "gain_stderr": round(math.hypot(before[1], after[1]), 4),
        "episodes": after[2],
    }  # fmt: skip


def told(stage: dict[str, Any]) -> str:
    head = f"{stage['name']:>10} {stage['kind']:<7} {stage['seconds']:7.1f} s"
    if "gain" not in stage:
        return f"{head}  {stage['measure']} {stage.get('after')}"
    return (
        f"{head}  {stage['measure']} {stage['before']:.3f} -> {stage['after']:.3f} "
        f"({stage['gain']:+.3f}, standard error {stage['gain_stderr']:.3f})"
    )


if __name__ == "__main__":
    sys.exit(main())
