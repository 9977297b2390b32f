"""Faults injected against alarms raised, and alarms of honest runs.

Run: `OMP_NUM_THREADS=1 python benchmarks/monitors.py`. `--only honest` or `--only faults` is a part of it. One line of
JSON at the end; exit code 1 if a fault is not named, if another worker is blamed, or if an honest run has an alarm.

Real runs, in one process, with real coordinator, trainer, validators and workers: for the faults a small run of
arithmetic, for honest ones three recipes. Their seeds were not used while limits were chosen: those were chosen on seeds
3, 11, 12, 21 and 22, and on runs of Wordle and of the stages of R1-Zero and INTELLECT-2 that other benchmarks had made.
Seeds 31 and 32 were reported once. The slow worker that was missed there had held up batches, so the monitor was changed
and not the fault; those seeds are spent since then.
Faults that take long to cause are written into the metrics of the honest run of Wordle (`monitored/changed.py`).

A fault is named rightly if the expected alarm is raised, if no other is raised but those that follow from it, and if an
alarm about a worker is about the one with the fault.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.monitored.changed import CHANGES, heldout_falls, reward_rises  # noqa: E402
from benchmarks.monitored.runs import Faults, alarms_of, full_quota, honest, with_metrics  # noqa: E402
from benchmarks.pages.monitors import tables  # noqa: E402
from shoal.config import RunConfig  # noqa: E402
from shoal.folder import RunFolder  # noqa: E402
from shoal.metrics import read_metrics  # noqa: E402

SEEDS = (41, 42)
"""Not used for tuning."""
HONEST = {
    "arithmetic": (24, ("rollouts.batch_groups=8", "rollouts.block_rollouts=64")),
    "wordle": (24, ("rollouts.batch_groups=8",)),
    "stones": (24, ("rollouts.batch_groups=8", "rollouts.block_rollouts=64")),
}
"""By recipe: steps, and what is smaller than in the recipe."""


class Expected(NamedTuple):
    """What names a fault."""

    alarm: str
    """Or one of these, separated by |."""
    follows: tuple[str, ...] = ()
    """Alarms that the fault leads to as well."""


EXPECTED = {
    "high_learning_rate": Expected("collapse|drift", ("collapse", "drift", "entropy", "hacking", "no_signal")),
    "temperature": Expected("drift", ("collapse", "entropy")),
    "pays_for_length": Expected("hacking", ("drift",)),
    "pays_for_repetition": Expected("hacking", ("drift", "entropy")),
    "pays_for_a_digit": Expected("hacking", ("drift", "entropy")),
    "all_solved": Expected("no_signal"),
    "poisoned_worker": Expected("poisoning:bad"),
    "slow_worker": Expected("stragglers:bad"),
    "skewed_clock": Expected("clock:bad"),
    "host_clock": Expected("clock"),
    "lying_validator": Expected("validators:validator-0", ("poisoning",)),
}
"""By the method of `Faults`. A validator that refuses all has workers refused, too."""


def main() -> int:
    """Run all parts and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("honest", "faults"), help="a part of it")
    parser.add_argument("--fault", default="", help="one fault alone, by name")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    asked = parser.parse_args()
    began, found, false = time.process_time(), dict[str, dict[str, Any]](), dict[str, list[str]]()
    with tempfile.TemporaryDirectory(prefix="shoal-") as temporary:
        root = asked.keep or Path(temporary)
        if asked.only != "honest":
            for name, row in real_faults(root, asked.fault):
                found[name] = told(name, row)
        if asked.only != "faults":
            for name, alarms, folder, config in honest_runs(root):
                false[name] = sorted(alarms)
                print(f"{name:28} alarms: {', '.join(sorted(alarms)) or 'none'}", flush=True)
                if name == f"wordle {SEEDS[0]}":
                    found |= {fault: told(fault, row) for fault, row in changed_faults(folder, config)}
    named, alarms = sum(row["named"] for row in found.values()), sum(map(len, false.values()))
    result = {
        "benchmark": "monitors", "faults": len(found), "named": named, "honest_runs": len(false), "false_alarms": alarms,
        "recipes": len(HONEST), "cpu_s": round(time.process_time() - began), "by_fault": found, "honest": false,
        "tables": tables(found),
    }  # fmt: skip
    print(json.dumps(result))
    return int(named < len(found) or alarms > 0)


def told(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row, printed."""
    print(f"{name:28} {'named' if row['named'] else 'MISSED':7} {', '.join(row['raised']) or 'none'}", flush=True)
    return row


def real_faults(root: Path, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each fault in a run of its own."""
    faults = Faults(root, SEEDS[0])
    for name, expected in EXPECTED.items():
        if only and name != only:
            continue
        folder, config = getattr(faults, name)()
        yield name.replace("_", " "), judged("a real run", expected, alarms_of(folder, config))
        if name == "skewed_clock":
            yield "full quota", judged("a real folder, with a small quota", Expected("disk"), full_quota(folder))


def changed_faults(folder: RunFolder, config: RunConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Faults that are written into the metrics of an honest run."""
    lines = read_metrics(folder.metrics)
    for name, (change, alarm) in CHANGES.items():
        yield name, judged("changed metrics", Expected(alarm), with_metrics(folder, config, change(lines)))
    raised = with_metrics(folder, config, reward_rises(lines), heldout_falls(lines))
    yield "held-out tasks fall", judged("changed evaluations", Expected("hacking"), raised)


def judged(made: str, expected: Expected, raised: set[str]) -> dict[str, Any]:
    """Whether the alarms name the fault."""
    wanted = expected.alarm.split("|")
    hit = any(alarm == one or alarm.startswith(f"{one}:") for alarm in raised for one in wanted)
    allowed = {*wanted, *expected.follows}
    others = {alarm for alarm in raised if not {alarm, alarm.partition(":")[0]} & allowed}
    return {"made": made, "expected": " or ".join(wanted), "raised": sorted(raised), "named": hit and not others}


def honest_runs(root: Path) -> Iterator[tuple[str, set[str], RunFolder, RunConfig]]:
    """Runs of recipes without a fault."""
    for recipe, (steps, changes) in HONEST.items():
        for seed in SEEDS:
            folder, config = honest(recipe, seed, steps, root / f"{recipe}-{seed}", "eval.episodes=0", *changes)
            yield f"{recipe} {seed}", alarms_of(folder, config), folder, config


if __name__ == "__main__":
    sys.exit(main())
