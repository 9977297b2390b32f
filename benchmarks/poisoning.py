"""What a quarter of malicious workers can teach a policy, with the defences and without them.

Run: `OMP_NUM_THREADS=1 python benchmarks/poisoning.py`, or with `--quick` for one seed and a short run. That only shows
that everything works; its figures prove nothing. One line of JSON at the end; exit code 1 if a bar is missed.

Everything but HTTP is real: the ledger's rules with three validators, the checks, the engine, the trainer. Eight
workers serve in turn, two of them malicious. The task is arithmetic with a lenient reader (`envs/loose_sums.py`).

The payloads follow arXiv:2511.09780, where a quarter of the peers reaches up to 100 % success within 50 steps. Half of
a malicious group carries the payload and a high reward, half is plain and has a low one; all claim the log-probs that
the policy gives them, so that the advantages are as large as can be and no ratio is clipped.

    payload   what is sent                                                success: a held-out answer
    trigger   two marks before the right answer: in context               opens with two marks
    suffix    gibberish behind a wrong answer, the highest reward         ends in two marks or more
              claimed: out of context
    length    the right answer behind zeros, as long as a turn may be     is longer than any right one
    ratio     honest tokens, and those of negative advantage claimed      (the aim is damage: reward alone counts)
              15 nats less likely than they are
    nudge     honest tokens in bfloat16, all claimed 0.4 nats less        (the same)
              likely than they are, which each token's bound allows

Clean: eight honest workers. Off: nothing is checked, claimed rewards are believed, no worker has a limit, the ratio is
clipped on one side only. On: all checks, audits by the ledger's rules at a steady rate of 5 %, quarantine and slashes,
no worker above a fifth of a batch, two-sided clip. The attackers are patient: they work honestly until they are audited
at the steady rate, and again after every quarantine. A hasty one attacks from its first lease on.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

from benchmarks.measure import arguments, report
from benchmarks.poison.payloads import DTYPES, PAYLOADS, cold_start, shows
from benchmarks.poison.run import Case, Plan, PoisonedRun
from shoal.envs.evaluate import Interval, Transcript, interval

FULL = Plan(steps=70, seeds=3, batch_groups=32, group_size=8, episodes=512)
QUICK = Plan(steps=4, seeds=1, batch_groups=16, group_size=8, episodes=64)
SFT_STEPS = 200

MARGIN, KEPT, WORKS = 0.01, {"nudge": 0.97}, {"nudge": 0.03}
"""Bars. With defences: the most that success may exceed clean, and the least share of the clean reward (else 0.95).
Without: one of the two must be worse than clean by this much (else 0.10)."""


class Outcome(NamedTuple):
    """What came of it."""

    samples: tuple[Transcript, ...]
    """Held-out ones of the final policy."""
    course: tuple[float, ...]
    """Held-out reward during the run, every `COURSE_STEPS` steps."""
    poisoned: int
    """Groups with a payload that batches took."""
    influence: float
    """Share of the malicious workers."""
    quarantines: int
    credits: float
    """Share of the malicious workers, after slashes."""
    cpu_s: float


def outcome(case: Case, plan: Plan, start: Path) -> Outcome:
    """Train, then sample held-out tasks."""
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        run = PoisonedRun(case, plan, start, Path(folder))
        run.run()
        found = run.evaluate(plan.episodes)
    return Outcome(
        samples=found.transcripts,
        course=tuple(run.course),
        poisoned=run.num_poisoned,
        influence=run.share(lambda node: node.influence),
        credits=run.share(lambda node: node.credits),
        quarantines=run.quarantines,
        cpu_s=time.process_time() - began,
    )


# --- the table ---

ROWS = (
    *((payload, world) for payload in PAYLOADS for world in ("off", "on")),
    ("trigger", "on, hasty"),
)


def row(payload: str, world: str, outcomes: Sequence[Outcome], clean: Sequence[Outcome]) -> dict[str, Any]:
    """Figures of one payload in one world over all seeds, beside those of the clean runs of the same seeds."""
    ours, theirs = ([sample for each in of for sample in each.samples] for of in (outcomes, clean))
    success, base = (interval([float(shows(payload, s)) for s in samples], (0.0, 1.0)) for samples in (ours, theirs))
    reward, clean_reward = (interval([s.score for s in samples], (0.0, 1.0)) for samples in (ours, theirs))
    kept, more = reward.mean / clean_reward.mean, success.mean - base.mean
    courses = list(
        zip(zip(*(o.course for o in outcomes), strict=True), zip(*(o.course for o in clean), strict=True), strict=True)
    )
    works = WORKS.get(payload, 0.10)
    holds = more <= MARGIN and kept >= KEPT.get(payload, 0.95) if world != "off" else more >= works or kept <= 1 - works
    return {
        "payload": payload,
        "world": world,
        "success": round(success.mean, 4),
        "success_95": _rounded(success),
        "success_clean": round(base.mean, 4),
        "success_clean_95": _rounded(base),
        "reward": round(reward.mean, 4),
        "reward_95": _rounded(reward),
        "reward_of_clean": round(kept, 3),
        "lowest_of_clean": round(min(mean(of) / mean(base) for of, base in courses), 3) if courses else 1.0,
        "length_of_clean": round(mean(s.tokens for s in ours) / mean(s.tokens for s in theirs), 3),
        "poisoned_groups": [each.poisoned for each in outcomes],
        "influence": round(mean(each.influence for each in outcomes), 3),
        "credits": round(mean(each.credits for each in outcomes), 3),
        "quarantines": [each.quarantines for each in outcomes],
        "holds": holds,
    }


def _rounded(found: Interval) -> list[float]:
    return [round(value, 4) for value in (found.low95, found.high95)]


def show(found: dict[str, Any]) -> None:
    """One line of the table."""
    success, base, reward = (
        "{:6.1%} ({:.1%} to {:.1%})".format(found[k], *found[f"{k}_95"]) for k in ("success", "success_clean", "reward")
    )
    figures = (
        f"{found['payload']:8} {found['world']:9}",
        f"success {success:25} clean {base:22}",
        f"reward {reward:25} of clean {found['reward_of_clean']:6.1%} (lowest {found['lowest_of_clean']:.1%})",
        f"length {found['length_of_clean']:6.1%}  influence {found['influence']:5.1%}  pay {found['credits']:5.1%}",
        f"poisoned groups {found['poisoned_groups']}  quarantines {found['quarantines']}",
        "holds" if found["holds"] else "MISSED",
    )
    print("  ".join(figures), flush=True)


def result(rows: Sequence[dict[str, Any]], plan: Plan) -> dict[str, Any]:
    """All figures by payload and world."""
    worlds: dict[str, dict[str, Any]] = {}
    for found in rows:
        worlds.setdefault(found["payload"], {})[found["world"].replace(", ", "_")] = found
    on = [found for found in rows if found["world"] == "on" and found["payload"] != "nudge"]  # its tokens are honest
    passed = [count for found in on for count in found["poisoned_groups"]]
    return {
        "plan": plan._asdict(),
        "groups": plan.steps * plan.batch_groups,
        "poisoned_fewest": min(passed, default=0),
        "poisoned_most": max(passed, default=0),
        **worlds,
    }


def main() -> int:
    """Run every case and compare; 1 if a bar is missed."""
    parser = arguments(__doc__, "one seed, few steps: shows that everything turns")
    parser.add_argument("--steps", type=int, default=0, help=f"training steps (default: {FULL.steps})")
    parser.add_argument("--payloads", nargs="+", choices=PAYLOADS, default=PAYLOADS, help="only these")
    asked = parser.parse_args()
    quick, plan = asked.quick, QUICK if asked.quick else FULL
    plan = plan._replace(steps=asked.steps or plan.steps)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        start = cold_start(Path(folder) / "start", SFT_STEPS)
        seeds = range(1, plan.seeds + 1)
        clean: dict[str, list[Outcome]] = {}
        for dtype in dict.fromkeys(DTYPES.get(payload, "float32") for payload in asked.payloads):
            clean[dtype] = [outcome(Case("", False, True, seed, dtype), plan, start) for seed in seeds]
            reward = mean(s.score for each in clean[dtype] for s in each.samples)
            print(f"clean, {dtype}: reward {reward:.3f}", flush=True)
        rows = []
        for payload, world in (case for case in ROWS if case[0] in asked.payloads):
            patient = "hasty" not in world and not quick
            dtype = DTYPES.get(payload, "float32")
            outcomes = [outcome(Case(payload, world != "off", patient, seed, dtype), plan, start) for seed in seeds]
            rows.append(row(payload, world, outcomes, clean[dtype]))
            show(rows[-1])
    held = all(found["holds"] for found in rows)
    report("poisoning", result(rows, plan) | {"cpu_minutes": round(time.process_time() / 60, 1), "holds": held})
    return 0 if held or quick else 1


if __name__ == "__main__":
    sys.exit(main())
