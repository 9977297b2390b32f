"""Whether the first hour of a newcomer ends in success: the files and commands of docs/tutorial-own-task.md.

    python benchmarks/first_hour.py [--seeds 1-10] [--tasks sort,count,reverse,last]

The tasks take turns with the seeds. A case writes the page's files into an
empty folder and runs `shoal sft`, `shoal run` and `shoal eval` on them; only the task and the seed differ. `shoal eval`
plays the same held-out tasks again with other random choices.

A rise is the share of held-out tasks won after RL less the share won before it, with its 95 % interval (Newcombe 1998,
method 10). It is clear if the interval's lower end is above 0. A case may take 10 minutes on two cores: one that takes more
than 1200 CPU-seconds or `--limit-s`, or fails, counts as no rise. The last line is JSON; lists have a number a case. The
exit code is 1 if fewer than 9 of 10 cases rise clearly.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, arguments, numbers, report, shoal_command

PAGE = ROOT / "docs/tutorial-own-task.md"

TASKS = ("sort", "count", "reverse", "last")

CASE_S, CORES = 600.0, 2
MIN_CLEAR_SHARE = 0.9
"""Bar: share of cases that rise clearly."""


@dataclass(frozen=True)
class SuccessRate:
    """Held-out tasks won, with its 95 % interval."""

    mean: float
    low95: float
    high95: float


@dataclass(frozen=True)
class TutorialRun:
    """What one newcomer measured."""

    task: str
    seed: int
    before: SuccessRate
    after: SuccessRate
    again: SuccessRate
    """After, with other random choices."""
    wall_s: float
    cpu_s: float
    fault: str = ""
    """Why there is no result, if there is none."""

    @property
    def is_clear(self) -> bool:
        """Whether held-out results rose by more than chance, in time."""
        return not self.fault and self.rise.low95 > 0 and self.cpu_s <= CORES * CASE_S

    @property
    def rise(self) -> SuccessRate:
        """After less before."""
        return difference(self.before, self.after)


NONE = SuccessRate(0.0, 0.0, 0.0)


def main() -> int:
    """All cases."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=numbers, default="1-10", help="such as 1-10, or 3,5")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--limit-s", type=float, default=CASE_S, help="wall seconds of a case, on a busy machine")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    asked = parser.parse_args()
    tasks = asked.tasks.split(",")
    planned = [(tasks[(seed - 1) % len(tasks)], seed) for seed in asked.seeds]

    def case(of: tuple[str, int]) -> TutorialRun:
        with tempfile.TemporaryDirectory() as folder:
            done = newcomer(*of, Path(folder), asked.limit_s)
        print(in_words(done), flush=True)
        return done

    with ThreadPoolExecutor(asked.jobs) as pool:
        cases = list(pool.map(case, planned))
    result = figures(cases)
    report("first_hour", {**result})
    return 0 if result["clear_share"] >= MIN_CLEAR_SHARE else 1


def newcomer(task: str, seed: int, folder: Path, limit_s: float) -> TutorialRun:
    """Follow the page in an empty folder."""
    for name, text in files_of(PAGE.read_text()).items():
        (folder / name).write_text(text.replace('kind = "sort"', f'kind = "{task}"'))
    began, cpu_s = time.monotonic(), list[float]()
    deadline = began + limit_s
    limits = ["--max-turn-tokens", "16", "--max-tokens", "48"]
    play = ["--env", "words.py", "--env-args", json.dumps({"kind": task}), *limits, "--episodes", "512", "--json"]

    def shoal(*words: str) -> str:
        left_s = deadline - time.monotonic()
        code, used, output = measured(shoal_command(*words), folder, left_s)
        cpu_s.append(used)
        if code:
            raise RuntimeError(f"shoal {words[0]} ended with {code}: {output[-400:]}")
        return output

    before = after = again = NONE
    fault = ""
    try:
        shoal("sft", "start.toml", "--out", "start", "--eval-every", "10", "--stop-at", "0.4", "--set", f"seed={seed}")
        shoal("run", "run.toml", "--set", f"seed={seed}")
        heldout = json.loads((folder / "runs/words/summary.json").read_text())["heldout"]
        before, after = success_rate_of(heldout["before"]), success_rate_of(heldout["after"])
        again = success_rate_of(json.loads(shoal("eval", "runs/words/checkpoints/final", *play, "--seed", "1")))
    except TimeoutError:
        fault = f"it took more than {limit_s:.0f} s"
    except RuntimeError as error:
        fault = str(error)
    return TutorialRun(task, seed, before, after, again, time.monotonic() - began, sum(cpu_s), fault)


def files_of(page: str) -> dict[str, str]:
    """The files whose whole text a page shows, by name."""
    return dict(re.findall(r"^```(?:python|toml) (\S+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))


def success_rate_of(figures: dict[str, Any]) -> SuccessRate:
    """The wins of an evaluation."""
    return SuccessRate(*(float(figures[key]) for key in ("mean", "low95", "high95")))


def difference(before: SuccessRate, after: SuccessRate) -> SuccessRate:
    """After less before, with the interval that follows from theirs (Newcombe 1998, method 10)."""
    mean = after.mean - before.mean
    low = mean - math.hypot(after.mean - after.low95, before.high95 - before.mean)
    return SuccessRate(mean, low, mean + math.hypot(after.high95 - after.mean, before.mean - before.low95))


def measured(command: list[str], folder: Path, limit_s: float) -> tuple[int, float, str]:
    """Run a command; gives its exit code, CPU-seconds of all its processes, and what it printed. Raises TimeoutError."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        started = subprocess.Popen(
            command, cwd=folder, stdout=printed, stderr=errors, stdin=subprocess.DEVNULL, env=environment
        )
        deadline = time.monotonic() + limit_s
        while True:
            pid, status, use = os.wait4(started.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                started.kill()
                started.wait()
                raise TimeoutError
            time.sleep(0.2)
        started.returncode = os.waitstatus_to_exitcode(status)
        texts = []
        for file in (errors, printed) if started.returncode else (printed,):
            file.seek(0)
            texts.append(file.read())
        return started.returncode, use.ru_utime + use.ru_stime, "".join(texts)


def in_words(case: TutorialRun) -> str:
    """A line for people."""
    if case.fault:
        return f"{case.task} seed {case.seed}: no result, {case.fault}"
    rise, wins = case.rise, f"{case.before.mean:.1%} -> {case.after.mean:.1%} (again {case.again.mean:.1%})"
    return (
        f"{case.task} seed {case.seed}: {wins}, rise {rise.mean:+.1%} (95 %: {rise.low95:+.1%} to {rise.high95:+.1%}) in "
        f"{case.wall_s:.0f} s, {case.cpu_s:.0f} CPU-s"
    )


def figures(cases: Sequence[TutorialRun]) -> dict[str, Any]:
    """All cases, and the share of clear rises."""
    rises = [case.rise for case in cases]
    clear = sum(case.is_clear for case in cases)
    return {
        "seeds": [case.seed for case in cases],
        "cases": len(cases),
        "clear": clear,
        "clear_share": clear / len(cases),
        "wins_before": [round(case.before.mean, 4) for case in cases],
        "wins_after": [round(case.after.mean, 4) for case in cases],
        "wins_again": [round(case.again.mean, 4) for case in cases],
        **{f"rise_{key}": [round(asdict(rise)[key], 4) for rise in rises] for key in ("mean", "low95", "high95")},
        "smallest_rise": round(min(rise.mean for rise in rises), 4),
        "wall_s": [round(case.wall_s) for case in cases],
        "cpu_s": [round(case.cpu_s) for case in cases],
    }


if __name__ == "__main__":
    sys.exit(main())
