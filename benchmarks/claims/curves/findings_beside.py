"""What the runs of the claims in `grid_beside` show.

Part of `findings`, which says what a finding is. It makes no run.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.claims.curves.claim import Claim
from benchmarks.claims.curves.finding import Finding, Reports, rounded, spread, table
from benchmarks.claims.curves.harness import Curve
from benchmarks.claims.curves.picture import Line, picture

METHODS = ("critic", "vine", "group_mean")
"""What may say the value of a state."""

RANGES = (0.25, 0.5, 0.75)
"""Bounds between the ranges of true values."""

RANK_BAR = 0.8
SHARE_SLACK = 0.02

SAID_OF_PREFERRED = {
    "share": "Share of the possible gain",
    "utility": "True utility",
    "kl_nats": "KL to the first policy, nats",
    "right_form_share": "Answers of the right form",
}
"""Columns of the table of runs that learn from preferences."""


def credit(claim: Claim, reports: Reports) -> Finding:
    """Rewards at equal tokens; and beside the claim, those after as many rollouts as vine had, whatever the tokens."""
    found = _at_budget(claim, reports, "vine", "critic", "Tested reward against generated tokens")
    continued = reports["vine", 0]
    own = [_tokens_of_rollouts(curve) for curve in continued]
    found.figures["vine"]["continued_share"] = rounded(
        [1 - tokens / curve.tested["spent"][-1] for tokens, curve in zip(own, continued, strict=True)]
    )
    rows = []
    for arm in claim.arms:
        figures, curves = found.figures[arm.name], reports[arm.name, 0]
        tokens = own if arm.name != "vine" else [curve.tested["spent"][-1] for curve in curves]
        figures["reward_at_equal_rollouts"] = rounded(
            [at_budget(curve, n) for n, curve in zip(tokens, curves, strict=True)]
        )
        names = ("reward_before", "reward_at_budget", "reward_at_equal_rollouts")
        rows.append((arm.name, *(spread(figures[name]) for name in names)))
    head = ("Arm", "Reward before", "Reward at equal tokens", "Reward at equal rollouts")
    return found._replace(table=table(head, rows))


def offline_filter(claim: Claim, reports: Reports) -> Finding:
    """Rewards at equal tokens, those of measuring counted."""
    found = _at_budget(claim, reports, "filtered", "all_tasks", "Tested reward against generated tokens")
    measured = [curve.probed for curve in reports["filtered", 0]]
    found.figures["filtered"] |= {
        "measured_tokens": [one["measured_tokens"][0] for one in measured],
        "kept_tasks": [one["tasks"][0] for one in measured],
    }
    return found


def distillation(claim: Claim, reports: Reports) -> Finding:
    """Rewards and KL at equal tokens."""
    found = _at_budget(
        claim, reports, "on_policy", "sft", "KL to the teacher against tokens learned from",
        ("kl_nats", "KL, student from teacher, nats"),
    )  # fmt: skip
    budget = found.figures["budget_tokens"]
    kl = {arm.name: [at_budget(c, budget, "kl_nats") for c in reports[arm.name, 0]] for arm in claim.arms}
    lower = compared([sft - own for own, sft in zip(kl["on_policy"], kl["sft"], strict=True)])
    for arm in claim.arms:
        found.figures[arm.name] |= {
            "kl_at_budget_nats": rounded(kl[arm.name]),
            "forward_kl_at_budget_nats": rounded(
                [at_budget(curve, budget, "forward_kl_nats") for curve in reports[arm.name, 0]]
            ),
        }
    found.figures["kl_lower_nats"] = lower
    mine = [
        (arm.name, *(spread(found.figures[arm.name][key]) for key in
         ("reward_at_budget", "kl_at_budget_nats", "forward_kl_at_budget_nats")))
        for arm in claim.arms
    ]  # fmt: skip
    return found._replace(
        reproduced=bool(found.reproduced) and is_above(lower),
        sentence=f"{found.sentence}; its KL is {lower['mean']:.3f} nats lower (standard error {lower['error']:.3f}, in "
        f"{lower['above']} seeds)",
        table=table(("Arm", "Held-out reward", "KL, student from teacher, nats", "KL, teacher from student, nats"), mine),
    )  # fmt: skip


def values(claim: Claim, reports: Reports) -> Finding:
    """Bias and error of what is said of states."""
    curves = reports["critic", 0]
    figures: dict[str, Any] = {"states": [len(_states(curve)["true"]) for curve in curves]}
    rows, lines = [], []
    for colour, method in enumerate(METHODS):
        said = [errors_of(_states(curve), method) for curve in curves]
        figures[method] = {
            name: rounded([one[name] for one in said]) for name in ("mean_error", "bias", "deviation", "error")
        }
        rows.append((method, *(spread(figures[method][name]) for name in ("mean_error", "bias", "deviation", "error"))))
        ranges = [
            [point for point in points if not math.isnan(point[1])]
            for points in zip(*(one["points"] for one in said), strict=True)
        ]
        lines.append(
            Line(
                method,
                [(statistics.fmean(x for x, _ in one), statistics.fmean(y for _, y in one)) for one in ranges if one],
                colour,
                [point for one in ranges for point in one],
            )
        )
    lines.append(Line("the truth", [(0.0, 0.0), (1.0, 1.0)], 11, faint=True))
    less_biased = sum(2 * a < b for a, b in zip(figures["vine"]["bias"], figures["critic"]["bias"], strict=True))
    nearer = sum(a < b for a, b in zip(figures["vine"]["error"], figures["critic"]["error"], strict=True))
    figures |= {"seeds_less_biased": less_biased, "seeds_nearer": nearer}
    needed = max(1, len(curves) - 1)
    return Finding(
        figures,
        less_biased >= needed and nearer >= needed,
        f"continuations have less than half the critic's bias in {less_biased} of {len(curves)} seeds, and a smaller error "
        f"in {nearer}",
        table(("Method", "Mean error", "Bias", "Deviation", "Error"), rows),
        picture(
            "What is said of a state against its true value: a dot for each seed and range",
            "true value, mean of a range",
            "said, mean of the range",
            lines,
        ),
    )


def dpo(claim: Claim, reports: Reports) -> Finding:
    """Shares of what could be gained."""
    share = {arm.name: [curve.tested["reward"][-1] for curve in reports[arm.name, 0]] for arm in claim.arms}
    figures: dict[str, Any] = {}
    rows = []
    for arm in claim.arms:
        probed = [curve.probed for curve in reports[arm.name, 0]]
        figures[arm.name] = {
            "share": rounded(share[arm.name]),
            "utility": rounded([one["utility"][-1] for one in probed]),
            "kl_nats": rounded([one["kl_nats"][-1] for one in probed]),
            "right_form_share": rounded([one["valid"][-1] for one in probed]),
            "generated_tokens": [sum(curve.sampled["tokens"]) for curve in reports[arm.name, 0]],
        }
        rows.append((arm.name, *(spread(figures[arm.name][name]) for name in SAID_OF_PREFERRED)))
    first = reports[claim.arms[0].name, 0][0].probed
    figures |= {"utility_before": round(first["utility"][0], 4), "utility_of_best": round(first["best_utility"][0], 4)}
    differences = [a - b for a, b in zip(share["dpo"], share["reward_model"], strict=True)]
    found = compared(differences)
    figures["difference"] = found
    enough = sum(one >= -SHARE_SLACK for one in differences)
    return Finding(
        figures,
        enough >= max(1, len(differences) - 1) and found["mean"] >= -SHARE_SLACK,
        f"dpo gains {statistics.fmean(share['dpo']):.2f} of what is possible, and RL with a reward model "
        f"{statistics.fmean(share['reward_model']):.2f}",
        table(("Arm", *SAID_OF_PREFERRED.values()), rows),
        picture(
            "Share of the possible gain", "arm", "share",
            [
                Line(arm.name, [], colour, [(float(colour), one) for one in share[arm.name]])
                for colour, arm in enumerate(claim.arms)
            ],
            [(float(at), arm.name) for at, arm in enumerate(claim.arms)],
        ),
    )  # fmt: skip


def reward_model(claim: Claim, reports: Reports) -> Finding:
    """Rank correlation of scores and utilities."""
    curves = reports["reward_model", 0]
    unseen, seen = ([curve.probed[f"spearman_{name}"][0] for curve in curves] for name in ("unseen", "seen"))
    figures = {
        "spearman_unseen": rounded(unseen),
        "spearman_seen": rounded(seen),
        "worst_spearman_unseen": round(min(unseen), 4),
        "mean_spearman_unseen": round(statistics.fmean(unseen), 4),
    }
    return Finding(
        figures,
        min(unseen) >= RANK_BAR,
        f"the worst seed has a rank correlation of {min(unseen):.2f} on unseen answers, bar {RANK_BAR}",
        table(("Answers", "Rank correlation"), [("unseen", spread(unseen)), ("in pairs", spread(seen))]),
        picture(
            "Rank correlation of scores and true utilities", "answers", "Spearman's rank correlation",
            [
                Line("unseen", [], 0, [(0.0, one) for one in unseen]),
                Line("in pairs", [], 1, [(1.0, one) for one in seen]),
            ],
            [(0.0, "unseen"), (1.0, "in pairs")],
        ),
    )  # fmt: skip


FINDINGS: dict[str, Callable[[Claim, Reports], Finding]] = {
    "credit": credit,
    "values": values,
    "distillation": distillation,
    "offline_filter": offline_filter,
    "dpo": dpo,
    "dpo_slower": dpo,
    "reward_model": reward_model,
}


def _at_budget(
    claim: Claim, reports: Reports, one: str, other: str, title: str, drawn: tuple[str, str] = ("reward", "reward")
) -> Finding:
    """Rewards of the arms at the same number of tokens. `drawn` is the tested figure in the picture, and its name there."""
    budget = min(curve.tested["spent"][-1] for arm in claim.arms for curve in reports[arm.name, 0])
    found = {arm.name: [at_budget(curve, budget) for curve in reports[arm.name, 0]] for arm in claim.arms}
    difference = compared([a - b for a, b in zip(found[one], found[other], strict=True)])
    figures: dict[str, Any] = {"budget_tokens": budget, "difference": difference}
    rows, lines = [], []
    for colour, arm in enumerate(claim.arms):
        curves = reports[arm.name, 0]
        figures[arm.name] = {
            "reward_at_budget": rounded(found[arm.name]),
            "reward_before": rounded([curve.tested["reward"][0] for curve in curves]),
            "spent_tokens": [curve.tested["spent"][-1] for curve in curves],
        }
        rows.append(
            (arm.name, spread(figures[arm.name]["reward_before"]), spread(figures[arm.name]["reward_at_budget"]))
        )
        ways = [list(zip(curve.tested["spent"], curve.tested[drawn[0]], strict=True)) for curve in curves]
        lines += [Line("", way, colour, faint=True) for way in ways]
        lines.append(Line(arm.name, _middle(ways), colour))
    return Finding(
        figures,
        is_above(difference),
        f"at {budget:.0f} tokens {one} earns {difference['mean']:+.3f} more than {other} (standard error "
        f"{difference['error']:.3f}, above 0 in {difference['above']} of {len(found[one])} seeds)",
        table(("Arm", "Reward before", "Reward at equal tokens"), rows),
        picture(title, "tokens", drawn[1], lines),
    )


def _tokens_of_rollouts(curve: Curve) -> float:
    """The tokens of a run's rollouts, without those of continuations."""
    rollouts = curve.run["rollouts"]
    return sum(curve.sampled["length"]) * float(rollouts["batch_groups"] * rollouts["group_size"])


def at_budget(curve: Curve, budget: float, name: str = "reward") -> float:
    """A tested figure at a number of tokens: the mean of that at seven eighths of them and that at all of them."""
    return float(np.mean(np.interp([budget * 7 / 8, budget], curve.tested["spent"], curve.tested[name])))


def compared(differences: Sequence[float]) -> dict[str, Any]:
    """Mean, standard error and number above 0."""
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return {
        "seeds": rounded(differences),
        "mean": round(statistics.fmean(differences), 4),
        "error": round(error, 4),
        "above": sum(one > 0 for one in differences),
    }


def is_above(found: dict[str, Any]) -> bool:
    """Whether differences are above 0 in all seeds but one, and their mean by more than two standard errors."""
    return found["above"] >= max(1, len(found["seeds"]) - 1) and found["mean"] > 2 * found["error"]


def errors_of(states: dict[str, NDArray[np.float64]], method: str) -> dict[str, Any]:
    """Of one method in one run: mean error, bias and deviation by ranges of the true value, and the root of the mean
    squared error, whose square is the sum of the squares of the two before; and the mean of each range with its truth."""
    true_I, error_I = states["true"], states[method] - states["true"]
    of_I, weighted, within, points = np.digitize(true_I, RANGES), 0.0, 0.0, []
    for place in range(len(RANGES) + 1):
        own_I = error_I[of_I == place]
        if len(own_I):
            weighted += len(own_I) * float(own_I.mean()) ** 2
            within += len(own_I) * float(own_I.var())
            mean = float(true_I[of_I == place].mean())
            points.append((mean, mean + float(own_I.mean())))
        else:
            points.append((math.nan, math.nan))
    return {
        "mean_error": float(error_I.mean()),
        "bias": math.sqrt(weighted / len(error_I)),
        "deviation": math.sqrt(within / len(error_I)),
        "error": float(np.sqrt((error_I**2).mean())),
        "points": points,
    }


def _states(curve: Curve) -> dict[str, NDArray[np.float64]]:
    """The probed states, without those before the critic has learned anything."""
    columns = {name: np.asarray(column) for name, column in curve.probed.items()}
    return {name: column[columns["version"] > 0] for name, column in columns.items()}


def _middle(ways: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The mean of several lines, point by point, as far as all have points."""
    return [
        (statistics.fmean(x for x, _ in points), statistics.fmean(y for _, y in points))
        for points in zip(*ways, strict=False)
    ]
