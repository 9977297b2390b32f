"""The detection matrix: every attack of the zoo against every check alone and all together, at three entropies.

    python benchmarks/detection.py [--trials 384] [--quick]

Three policies of about 0.05, 0.2 and 0.5 nats a token (`detect/policies.py`) play rollouts of some 66 policy tokens,
four to a group; every attack and forgery of `tests/attacks` is played against each, with float32 bounds as built in and
proofs of activations on. Columns: the share of rollouts that each check refuses by itself (`detect/judgement.py`), then
all of them, all but `activations` (a run's default), and the check that catches it first. Beside them: honest work over
thread counts, batch shapes and declared dtypes; what a worker gains that spends the whole tolerance; a large lease after
small ones. One line of JSON at the end.
"""

import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.detect.judgement import CHECKS, Seen, Share, look, noticed_after, share
from benchmarks.detect.policies import GROUP_SIZE, STEPS, Family, lease, make_family, rules
from benchmarks.measure import arguments, pin_threads, report
from shoal.ledger.constants import LAW
from shoal.ledger.slot_draws import slot_draws
from shoal.protocol.audit_and_pay import must_audit
from shoal.protocol.encoding import domain_hash
from tests.attacks.attack import Attack
from tests.attacks.attack_fixture import load_engine
from tests.attacks.catalogue import (
    ATTACKS,
    TOLERATED,
    Colder,
    NudgedLogprobs,
    QuietTolerance,
    SpentTolerance,
    StalePolicy,
)
from tests.attacks.proof_forgeries import FORGERIES, Forgery

QUICK, FULL = 48, 384
"""Rollouts of a cell."""


def main() -> None:
    """Matrix, controls, tolerance, lease."""
    parser = arguments(__doc__, f"{QUICK} rollouts of a cell, small training batches")
    parser.add_argument("--trials", type=int, default=0, help=f"rollouts of a cell, a multiple of 8 (default {FULL})")
    options = parser.parse_args()
    trials = options.trials or (QUICK if options.quick else FULL)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        families = []
        for target in (0.05, 0.2, 0.5):
            families.append(make_family(target, Path(scratch) / str(target), 32 if options.quick else 256))
            _say_family(families[-1], began)
        matrices = [list(matrix(family, trials, began)) for family in families]
        honest = [control for family in families for control in controls(family, trials)]
        spending = [spent for family in families for spent in tolerance(family, trials)]
    leases = large_leases()
    figures = {
        "trials": trials,
        "rollout_tokens": round(float(np.mean([row.tokens for rows in matrices for row in rows])), 1),
        "policies": [
            {"target": f.target, "entropy": round(f.entropy, 3), "scale": round(f.scale, 2),
             "drift_nats": {str(age): round(nats, 5) for age, nats in f.drift.items()}}
            for f in families
        ],
        "bars": bars([row for rows in matrices for row in rows]),
        "honest": honest,
        "tolerance": spending,
        "large_lease": leases,
        "rows": [row.figures() for rows in matrices for row in rows],
        "cpu_minutes": round((time.process_time() - began) / 60, 1),
    }  # fmt: skip
    report("detection", figures)


# --- the matrix ---


@dataclass(frozen=True)
class Row:
    """One attack on one policy."""

    name: str
    entropy: float
    tokens: float
    seen: Seen
    tolerated: bool

    def differ(self) -> Share:
        """Of the rollouts that differ, those refused."""
        return share(self.seen.together_N[self.seen.differs_N])

    def figures(self) -> dict[str, Any]:
        """For the JSON: counts, and Wilson intervals where they are asked for."""
        seen = self.seen
        together, without = share(seen.together_N), share(seen.without_proofs_N)
        differ = self.differ()
        submissions, refused = seen.submissions()
        return {
            "attack": self.name,
            "entropy": round(self.entropy, 3),
            "n": len(seen.identical_N),
            "identical": int(seen.identical_N.sum()),
            "checks": {name: int(hits.sum()) for name, hits in seen.refused_N.items() if seen.run_N[name].any()},
            "together": together.k,
            "together_95": [round(together.low, 4), round(together.high, 4)],
            "without_proofs": without.k,
            "differ": differ.n,
            "differ_refused": differ.k,
            "differ_95": [round(differ.low, 4), round(differ.high, 4)],
            "beyond": int(seen.beyond_N.sum()),
            "submissions_differ": submissions,
            "submissions_refused": refused,
            "first": seen.first(),
        }


def matrix(family: Family, trials: int, began: float) -> Iterator[Row]:
    """Every attack against one policy; a line each."""
    print(f"\npolicy of {family.entropy:.3f} nats a token, {trials} rollouts a cell")
    print(f"{'attack':<34}{'identical':>10}" + "".join(f"{name[:9]:>10}" for name in CHECKS) + "  together   first")
    lab = family.lab(lease(trials, "matrix"))
    lab.score(lab.requests(lab.honest_groups))
    honest = dict(lab.known)
    attacks: tuple[type[Attack] | type[Forgery], ...] = (*ATTACKS, *FORGERIES, *TOLERATED)
    for attack in attacks:
        for age in AGES if attack is StalePolicy else (1,):
            lab.stale, lab.known = (family.versions[-1 - age] if age else family.near), dict(honest)
            seen = look(lab, attack(), attack().body(lab))
            tokens = np.mean([r.num_policy_tokens() for g in lab.honest_groups for r in g.rollouts])
            row = Row(_name(attack, age), family.entropy, float(tokens), seen, attack in TOLERATED)
            cells = (
                f"{100 * seen.refused_N[c].mean():>10.0f}" if seen.run_N[c].any() else f"{'-':>10}" for c in CHECKS
            )
            print(
                f"{row.name:<34}{100 * seen.identical_N.mean():>10.0f}" + "".join(cells)
                + f"{100 * seen.together_N.mean():>10.1f}   {seen.first()}  ({time.process_time() - began:.0f} s)",
                flush=True,
            )  # fmt: skip
            yield row


AGES = (0, 1, 2, STEPS)
"""Of stale checkpoints; 0 is a step of the smallest learning rate."""


def _name(attack: type[Attack] | type[Forgery], age: int) -> str:
    """The class's name as words; a stale checkpoint says how old it is."""
    if attack is StalePolicy:
        return f"checkpoint {age} steps old" if age > 1 else ("checkpoint 1 step old" if age else "1 step of lr 1e-6")
    if issubclass(attack, Colder):
        return f"temperature x {attack.factor:.2g}"
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=Of)(?=\d)", " ", attack.__name__).lower()
    return f"proof: {words}" if issubclass(attack, Forgery) else words


def bars(rows: list[Row]) -> dict[str, Any]:
    """What the issue asks, pooled over all attacks but the tolerated: of what differs, how much is refused."""
    refusable = [row for row in rows if not row.tolerated]
    rollouts = share(sum(row.differ().k for row in refusable), sum(row.differ().n for row in refusable))
    beyond = share(
        sum(int((row.seen.together_N & row.seen.beyond_N).sum()) for row in refusable),
        sum(int(row.seen.beyond_N.sum()) for row in refusable),
    )
    found = [row.seen.submissions() for row in refusable]
    submissions = share(sum(refused for _, refused in found), sum(differ for differ, _ in found))
    missed = [
        {"attack": row.name, "entropy": round(row.entropy, 3), "differ": row.differ().n, "refused": row.differ().k,
         "submissions": row.seen.submissions()}
        for row in refusable
        if row.differ().k < row.differ().n
    ]  # fmt: skip
    print(f"\nrefused of rollouts that differ: {said(rollouts)}; of those beyond the bounds: {said(beyond)}; of "
          f"submissions that differ: {said(submissions)}")  # fmt: skip
    for row in missed:
        print(f"  not all: {row}")
    return {
        "rollouts": rollouts._asdict(), "beyond": beyond._asdict(), "submissions": submissions._asdict(),
        "missed": missed,
    }  # fmt: skip


# --- honest work ---


def controls(family: Family, trials: int) -> Iterator[dict[str, Any]]:
    """Honest rollouts by other threads and batches than the verifier's, and in declared dtypes: refused by any check."""
    for dtype, replayed, block_groups, threads in (
        ("float32", "float32", 16, 1), ("float32", "float32", 1, 1), ("float32", "float32", 4, 2),
        ("float32", "float32", 16, 2), ("bfloat16", "float32", 16, 1), ("bfloat16", "bfloat16", 4, 2),
        ("int8", "int8", 4, 1),
    ):  # fmt: skip
        the_lease = lease(trials, f"control {dtype} {block_groups} {threads}", block_groups)
        lab = family.lab(the_lease, rules(dtype))
        body = lab.encode(lab.play(load_engine(family.policy, threads=threads, dtype=dtype)))
        judge = load_engine(family.policy, threads=3 - threads, dtype=replayed)
        verdicts = lab.judge(body, engine=judge)
        refused = sum(v.outcome != "accept" for v in verdicts)
        shape = f"blocks of {block_groups * GROUP_SIZE}, {threads} threads"
        reasons = sorted({f"{v.check}: {v.detail}" for v in verdicts if v.outcome != "accept"})
        print(
            f"honest, {family.entropy:.3f} nats: {dtype}, {shape}, replayed in {replayed}: {refused} groups refused "
            f"{'; '.join(reasons)}"
        )
        yield {
            "entropy": round(family.entropy, 3), "dtype": dtype, "replayed": replayed, "block": block_groups * GROUP_SIZE,
            "threads": threads, "rollouts": trials, "groups_refused": refused,
        }  # fmt: skip
    load_engine(family.policy, threads=1)


# --- spending the tolerance ---


def tolerance(family: Family, trials: int) -> Iterator[dict[str, Any]]:
    """Gain in reward of a worker that takes the better of nearly tied tokens, or claims what the bound of a token allows,
    and how long it goes unnoticed."""
    lab = family.lab(lease(4 * trials, "tolerance"))
    honest = np.array(lab.rewards(lab.honest_groups))
    noise = lab.rules.bounds["float32/float32"]
    for attack in (SpentTolerance, QuietTolerance, NudgedLogprobs):
        groups = attack().groups(lab)
        gain_S = (np.array(lab.rewards(groups)) - honest).mean(1)
        verdicts = lab.judge(lab.encode(groups))
        noticed = noticed_after(verdicts * 20, noise)
        mean, half = float(gain_S.mean()), float(1.96 * gain_S.std(ddof=1) / len(gain_S) ** 0.5)
        print(
            f"{_name(attack, 1)}, {family.entropy:.3f} nats: reward {mean:+.5f} ± {half:.5f} on {honest.mean():.3f}, "
            f"{sum(v.outcome != 'accept' for v in verdicts)} of {len(verdicts)} groups refused, "
            f"noticed after {noticed or f'more than {20 * len(verdicts)}'} groups"
        )
        yield {
            "attack": _name(attack, 1), "entropy": round(family.entropy, 3), "rollouts": 4 * trials,
            "honest_reward": round(float(honest.mean()), 4), "gain": round(mean, 6), "gain_95": round(half, 6),
            "groups": len(verdicts), "groups_refused": sum(v.outcome != "accept" for v in verdicts),
            "groups_until_excessive": noticed,
        }  # fmt: skip


# --- a large lease after small ones ---


def large_leases(trials: int = 4000) -> list[dict[str, Any]]:
    """A worker is trusted after 60 valid blocks, then fakes a lease of so many blocks whole: how often one is audited."""
    rows = []
    for blocks in (1, 4, 16, 64):
        rate, groups = LAW.audit_rate(60, 0.05), 4 * blocks
        caught = 0
        for trial in range(trials):
            draws = slot_draws(str(trial), range(groups), domain_hash("large", bytes([blocks])))
            caught += any(must_audit(draw, rate, 1.0, 1.0) for draw in draws)
        found = share(caught, trials)
        loss = (found.k * LAW.vesting_blocks - (found.n - found.k) * blocks) / found.n
        rows.append({
            "blocks": blocks, "groups": groups, "caught": found.k, "n": found.n,
            "caught_95": [round(found.low, 4), round(found.high, 4)], "expected_loss_blocks": round(loss, 1),
        })  # fmt: skip
        print(
            f"a lease of {blocks} faked blocks after 60 valid ones: drawn for audit in {said(found)}, expected loss "
            f"{loss:.0f} blocks' pay"
        )
    return rows


def said(found: Share) -> str:
    """Counts with their 95 % interval."""
    return f"{found.k} of {found.n} ({100 * found.low:.1f} to {100 * found.high:.2f} %)" if found.n else "0 of 0"


def _say_family(family: Family, began: float) -> None:
    drift = ", ".join(f"{age or 'lr 1e-6'}: {nats:.4f}" for age, nats in family.drift.items())
    print(f"policy: {family.entropy:.3f} nats a token, logits x {family.scale:.2f}; mean |log-prob| moved over steps: "
          f"{drift} ({time.process_time() - began:.0f} CPU s)", flush=True)  # fmt: skip


if __name__ == "__main__":
    pin_threads()
    main()
