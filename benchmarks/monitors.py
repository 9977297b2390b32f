"""Faults injected against alarms raised, and alarms of honest runs.

Run: `OMP_NUM_THREADS=1 python benchmarks/monitors.py`. `--only honest` or `--only faults` is a part of it. One line of
JSON at the end; exit code 1 if a fault is not named, if another worker is blamed, or if an honest run has an alarm.

Real runs, in one process, with real coordinator, trainer, validators and workers: for the faults a small run of
arithmetic, for honest ones three recipes. Seeds that are spent: 3, 11, 12, 21 and 22, on which limits were chosen; 31,
32, 41, 42, 51, 52, 61, 62, 71 and 72, which were reported, and monitors or rows changed since; 43, 44 and 101 to 106, on
which rows were made to work. Faults that take long to cause are edited into the record of the honest run of Wordle: its
metrics and evaluations (`faults/edited_metrics.py`), or the clock, the quota or the free space that the launcher sees
(`faults/edited_system.py`).

A fault is named rightly if the expected alarm is raised, if no other is raised but those that follow from it, and if an
alarm about a worker is about the one with the fault.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.faults.edited_metrics import CHANGES, heldout_falls, reward_rises
from benchmarks.faults.edited_system import EDITS, disk_is_used
from benchmarks.faults.runs import Faults, Honest, alarms_of, honest, with_metrics
from benchmarks.measure import arguments, report
from shoal.step_metrics import read_metrics

SEEDS = (81, 82)
"""Not used for tuning."""
HONEST = {
    "arithmetic": (24, ("rollouts.batch_groups=8", "rollouts.block_rollouts=64")),
    "wordle": (24, ("rollouts.batch_groups=8",)),
    "stones": (24, ("rollouts.batch_groups=8", "rollouts.block_rollouts=64")),
}
"""By recipe: steps, and what is smaller than in the recipe."""
EVALUATED = ("eval.episodes=64", "storage.checkpoint_every=8")
UNEQUAL = {"one slow worker": (1.0, 1.0, 2.5), "one fast worker": (1.0, 3.0, 3.0)}
"""Honest runs of arithmetic whose workers differ: how many times as long each takes. The fast one has most influence."""


RUN, EDITED = "run", "edited record:"
"""How a fault was had."""


class Expected(NamedTuple):
    """What names a fault."""

    alarm: str
    """Or one of these, separated by |."""
    follows: tuple[str, ...] = ()
    """Alarms that the fault leads to as well."""


EXPECTED = {
    "high_learning_rate": Expected("collapse|drift", ("collapse", "drift", "entropy", "hacking", "no_signal")),
    "temperature": Expected("drift", ("collapse", "entropy")),
    "pays_for_length": Expected("hacking", ("drift", "no_signal")),
    "pays_for_repetition": Expected("hacking", ("drift", "entropy", "no_signal")),
    "pays_for_a_digit": Expected("hacking", ("drift", "entropy", "no_signal")),
    "all_solved": Expected("no_signal"),
    "poisoned_worker": Expected("poisoning:bad"),
    "few_refusals": Expected("poisoning:bad"),
    "slow_worker": Expected("stragglers:bad"),
    "lapsed_leases": Expected("stragglers:bad"),
    "skewed_clock": Expected("clock:bad"),
    "host_clock": Expected("clock"),
    "lying_validator": Expected("validators:validator-0", ("poisoning",)),
}
"""By the method of `Faults`. Where all answers are paid alike there is no signal, and a validator that refuses all has
workers refused."""


def main() -> int:
    """Run all parts and print a table."""
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=("honest", "faults"), help="a part of it")
    parser.add_argument("--fault", default="", help="one fault alone, by name")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="others, to try a row: they are no report")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    asked = parser.parse_args()
    found, calm, cpu_s = dict[str, dict[str, Any]](), dict[str, dict[str, Any]](), 0.0
    with tempfile.TemporaryDirectory(prefix="shoal-") as temporary:
        root = asked.keep or Path(temporary)
        with ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn")) as pool:
            for done in pool.map(partial(made_by, root), jobs(asked)):
                cpu_s += done.cpu_s
                found |= {name: told(name, row) for name, row in done.found.items()}
                for name, row in done.calm.items():
                    calm[name] = row
                    print(f"{name:28} alarms: {', '.join(row['raised']) or 'none'}", flush=True)
    named, alarms = sum(row["named"] for row in found.values()), sum(len(row["raised"]) for row in calm.values())
    result = {
        "faults": len(found), "named": named, "honest_runs": len(calm), "false_alarms": alarms,
        "runs_with_faults": sum(row["made"] == RUN for row in found.values()),
        "recipes": len(HONEST), "cpu_s": round(cpu_s), "by_fault": found, "honest": calm,
    }  # fmt: skip
    report("monitors", result)
    return int(named < len(found) or alarms > 0)


def told(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row, printed."""
    print(f"{name:28} {'named' if row['named'] else 'MISSED':7} {', '.join(row['raised']) or 'none'}", flush=True)
    return row


class Job(NamedTuple):
    """A run to make: one with a fault, or an honest one."""

    kind: str
    """A fault's name, a recipe, or a row of `UNEQUAL`."""
    seed: int
    has_edits: bool = False
    """Whether its record is edited, for more faults."""


class Done(NamedTuple):
    """What came of it."""

    found: dict[str, dict[str, Any]]
    """By fault."""
    calm: dict[str, dict[str, Any]]
    """By honest run."""
    cpu_s: float


def jobs(asked: argparse.Namespace) -> list[Job]:
    """All runs, in the order of the tables."""
    faults = [Job(name, asked.seeds[0]) for name in EXPECTED if asked.fault in ("", name)]
    calm = [
        Job(kind, seed, kind == "wordle" and seed == asked.seeds[0] and asked.only != "honest")
        for kind in (*HONEST, *UNEQUAL)
        for seed in asked.seeds
    ]
    return [*(faults if asked.only != "honest" else []), *(calm if asked.only != "faults" else [])]


def made_by(root: Path, job: Job) -> Done:
    """Make a run, and look at it. Called in a process of its own, so that several are made at a time."""
    began = time.process_time()
    if job.kind in EXPECTED:
        folder, config = getattr(Faults(root, job.seed), job.kind)()
        row = judged(RUN, EXPECTED[job.kind], alarms_of(folder, config))
        return Done({job.kind.replace("_", " "): row}, {}, time.process_time() - began)
    recipe, times = (job.kind, (1.0, 1.0, 1.0)) if job.kind in HONEST else ("arithmetic", UNEQUAL[job.kind])
    steps, changes = HONEST[recipe]
    place = root / f"{job.kind.replace(' ', '-')}-{job.seed}"
    made = honest(recipe, job.seed, steps, place, *EVALUATED, *changes, times=times)
    calm = {f"{job.kind} {job.seed}": quiet(made)}
    return Done(dict(edited_faults(made)) if job.has_edits else {}, calm, time.process_time() - began)


def edited_faults(made: Honest) -> Iterator[tuple[str, dict[str, Any]]]:
    """Faults that are edited into the record of an honest run."""
    folder, config, _ = made
    lines = read_metrics(folder.metrics)
    for name, (change, alarm) in CHANGES.items():
        yield name, judged(f"{EDITED} metrics", Expected(alarm), with_metrics(folder, config, change(lines)))
    raised = with_metrics(folder, config, reward_rises(lines), heldout_falls(lines))
    yield "held-out tasks fall", judged(f"{EDITED} evaluations", Expected("hacking"), raised)
    for name, (looks, what, alarm) in EDITS.items():
        yield name, judged(f"{EDITED} {what}", Expected(alarm), looks(folder, config, lines))


def quiet(made: Honest) -> dict[str, Any]:
    """What was looked at in an honest run, and the alarms."""
    raised = alarms_of(made.folder, made.config) | disk_is_used(made.folder, made.config, ())
    evaluations = sum(1 for _ in made.folder.evaluations.glob("*.json"))
    return {"evaluations": evaluations, "looks": made.looks, "raised": sorted(raised)}


def judged(made: str, expected: Expected, raised: set[str]) -> dict[str, Any]:
    """Whether the alarms name the fault."""
    wanted = expected.alarm.split("|")
    hit = any(alarm == one or alarm.startswith(f"{one}:") for alarm in raised for one in wanted)
    allowed = {*wanted, *expected.follows}
    others = {alarm for alarm in raised if not {alarm, alarm.partition(":")[0]} & allowed}
    return {"made": made, "expected": " or ".join(wanted), "raised": sorted(raised), "named": hit and not others}


if __name__ == "__main__":
    sys.exit(main())
