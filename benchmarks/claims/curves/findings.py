"""What the runs of each claim show: figures, whether the claim is reproduced, a table and a picture.

Called by `part`, once all runs of a claim are made. `grid` says what is measured, and what counts as reproduced; this file
computes it. It makes no run.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.claims.curves import findings_beside
from benchmarks.claims.curves.claim import Claim
from benchmarks.claims.curves.finding import Finding, Reports, rounded, spread
from benchmarks.claims.curves.finding import table as make_table
from benchmarks.claims.curves.harness import Curve
from benchmarks.claims.curves.picture import Line, picture
from benchmarks.claims.curves.ranks import spearman

SMOOTHED = 8
"""Steps of a moving mean."""

LEVELS = 5
"""Rewards at which entropies are compared."""

SPEARMAN_BAR = 0.8


def score(curve: Curve) -> float:
    """The reward at the end of a run, by which learning rates are chosen: the mean of the last two tests."""
    return statistics.fmean(curve.tested["reward"][-2:])


def clip_higher(claim: Claim, reports: Reports) -> Finding:
    """Entropies at equal reward."""
    low, high = (reports[arm.name, 0] for arm in claim.arms)
    differences, shares = [], []
    for one, other in zip(low, high, strict=True):
        found = [entropies_at(levels_of(one, other), curve) for curve in (one, other)]
        differences.append(statistics.fmean(found[1]) - statistics.fmean(found[0]))
        shares.append(statistics.fmean(found[1]) / statistics.fmean(found[0]))
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    mean = statistics.fmean(differences)
    above = sum(one > 0 for one in differences)
    figures: dict[str, Any] = {
        "entropy_difference_nats": rounded(differences),
        "entropy_times": rounded(shares),
        "mean_difference_nats": round(mean, 4),
        "standard_error_nats": round(error, 4),
        "seeds_above": above,
    }
    for arm in claim.arms:
        curves = reports[arm.name, 0]
        figures[arm.name] = {
            "reward_at_end": rounded([score(curve) for curve in curves]),
            "entropy_at_end_nats": rounded([curve.tested["entropy_nats"][-1] for curve in curves]),
            "clip_share": rounded([statistics.fmean(curve.learned["clip_share"]) for curve in curves]),
            "mean_clip_share": round(
                statistics.fmean(share for curve in curves for share in curve.learned["clip_share"]), 4
            ),
        }
    lines = []
    for colour, arm in enumerate(claim.arms):
        ways = [_way(curve) for curve in reports[arm.name, 0]]
        lines += [Line("", way, colour, faint=True) for way in ways]
        lines.append(
            Line(arm.name, [tuple(np.mean(points, axis=0).tolist()) for points in zip(*ways, strict=True)], colour)
        )
    table = make_table(
        ("Arm", "Reward at the end", "Entropy at the end, nats", "Clipped tokens"),
        [
            (
                arm.name,
                *(spread(figures[arm.name][name]) for name in ("reward_at_end", "entropy_at_end_nats", "clip_share")),
            )
            for arm in claim.arms
        ],
    )
    return Finding(
        figures,
        above >= len(differences) - 1 and mean > 2 * error and above > 0,
        f"the entropy at equal reward is {mean:+.3f} nats with 0.28 (standard error {error:.3f}, above 0 in {above} of "
        f"{len(differences)} seeds)",
        table,
        picture("Entropy against reward, as training goes on", "reward", "entropy of a token, nats", lines),
    )


def lengths(claim: Claim, reports: Reports) -> Finding:
    """Rank correlation of what was asked for and what was written."""
    figures: dict[str, Any] = {}
    rows, lines = [], []
    for colour, arm in enumerate(claim.arms):
        curves = reports[arm.name, 0]
        asked = sorted({asked for asked, _, _ in curves[0].last})
        means = [
            [statistics.fmean(length for of, length, _ in curve.last if of == target) for target in asked]
            for curve in curves
        ]
        figures[arm.name] = {
            "spearman": rounded(
                [spearman([a for a, _, _ in curve.last], [b for _, b, _ in curve.last]) for curve in curves]
            ),
            "spearman_before": rounded(
                [spearman([a for a, _, _ in curve.first], [b for _, b, _ in curve.first]) for curve in curves]
            ),
            "solved_at_end": rounded([curve.tested["solved"][-1] for curve in curves]),
            "solved_before": rounded([curve.tested["solved"][0] for curve in curves]),
        } | {f"length_asked_{target}": rounded([mean[i] for mean in means]) for i, target in enumerate(asked)}
        found = figures[arm.name]
        rows.append(
            (arm.name, *(spread(found[f"length_asked_{target}"], 1) for target in asked),
             spread(found["spearman"]), spread(found["solved_at_end"]))
        )  # fmt: skip
        middle = [(float(target), statistics.fmean(mean[i] for mean in means)) for i, target in enumerate(asked)]
        dots = [(float(target), mean[i]) for mean in means for i, target in enumerate(asked)]
        lines.append(Line(arm.name, middle, colour, dots))
    targets = sorted({asked for asked, _, _ in reports[claim.arms[0].name, 0][0].last})
    lines.append(Line("as asked", [(float(target), float(target)) for target in targets], 11, faint=True))
    worst = min(figures[claim.arms[0].name]["spearman"])
    figures["worst_spearman"] = worst
    return Finding(
        figures,
        worst >= SPEARMAN_BAR,
        f"with the penalty, the worst seed has a rank correlation of {worst:.2f}, bar {SPEARMAN_BAR}",
        make_table(("Arm", *(f"asked {target}" for target in targets), "Rank correlation", "Solved"), rows),
        picture(
            "Length written against length asked for, tokens", "asked for", "written", lines,
            [(float(target), str(target)) for target in targets],
        ),
    )  # fmt: skip


def staleness(claim: Claim, reports: Reports) -> Finding:
    """Reward at the end for each loss and each lag."""
    lags = list(claim.lags)
    found = {arm.name: {lag: [score(curve) for curve in reports[arm.name, lag]] for lag in lags} for arm in claim.arms}
    figures: dict[str, Any] = {
        "reward": {name: {f"lag_{lag}": rounded(one) for lag, one in by_lag.items()} for name, by_lag in found.items()}
    }
    means = {name: {lag: statistics.fmean(one) for lag, one in by_lag.items()} for name, by_lag in found.items()}
    figures["lost"] = {name: round(by_lag[lags[0]] - by_lag[lags[-1]], 4) for name, by_lag in means.items()}
    seeds = [max(one) - min(one) for by_lag in found.values() for one in by_lag.values()]
    figures["spread_of_seeds"] = round(statistics.fmean(seeds), 4)
    lines = [
        Line(name, [(float(i), by_lag[lag]) for i, lag in enumerate(lags)], colour,
             [(float(i), one) for i, lag in enumerate(lags) for one in found[name][lag]])
        for colour, (name, by_lag) in enumerate(means.items())
    ]  # fmt: skip
    last = sorted(means, key=lambda name: -means[name][lags[-1]])
    return Finding(
        figures,
        None,
        f"at staleness {lags[-1]} the rewards of the losses go from {means[last[-1]][lags[-1]]:.2f} ({last[-1]}) to "
        f"{means[last[0]][lags[-1]]:.2f} ({last[0]}); seeds differ by {figures['spread_of_seeds']:.2f} on average",
        make_table(
            ("Loss", *(f"staleness {lag}" for lag in lags)),
            [(name, *(spread(figures["reward"][name][f"lag_{lag}"], 2) for lag in lags)) for name in means],
        ),
        picture(
            "Reward after training, by staleness of the rollouts", "staleness, versions", "reward", lines,
            [(float(i), str(lag)) for i, lag in enumerate(lags)],
        ),
    )  # fmt: skip


def turns(claim: Claim, reports: Reports) -> Finding:
    """Reward at the end of each arm, less that of the first."""
    found = {arm.name: [score(curve) for curve in reports[arm.name, 0]] for arm in claim.arms}
    base, *others = found
    figures: dict[str, Any] = {"right_at_end": {name: rounded(values) for name, values in found.items()}}
    for name in others:
        gains = [mine - without for mine, without in zip(found[name], found[base], strict=True)]
        error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
        figures[name] = {
            "gains": rounded(gains),
            "mean_gain": round(statistics.fmean(gains), 4),
            "standard_error": round(error, 4),
            "seeds_above": sum(gain > 0 for gain in gains),
        }
    lines = []
    for colour, name in enumerate(found):
        ways = [list(zip(c.tested["version"], c.tested["reward"], strict=True)) for c in reports[name, 0]]
        lines += [Line("", way, colour, faint=True) for way in ways]
        lines.append(
            Line(name, [tuple(np.mean(points, axis=0).tolist()) for points in zip(*ways, strict=True)], colour)
        )
    told = figures["turns"]
    reproduced = told["seeds_above"] >= max(1, len(found[base]) - 1) and told["mean_gain"] > 2 * told["standard_error"]
    return Finding(
        figures,
        reproduced,
        f"with credit for turns the share of right turns is {told['mean_gain']:+.3f} (standard error "
        f"{told['standard_error']:.3f}, above 0 in {told['seeds_above']} of {len(found[base])} seeds)",
        make_table(
            ("Credit", "Right turns at the end", "Less that of whole rollouts"),
            [
                (name, spread(figures["right_at_end"][name]), spread(figures[name]["gains"]) if name in others else "")
                for name in found
            ],
        ),
        picture("Right turns as training goes on", "steps", "share of right turns", lines),
    )


FINDINGS: dict[str, Callable[[Claim, Reports], Finding]] = {
    "clip_higher": clip_higher,
    "clip_higher_at_0.0003": clip_higher,
    "clip_higher_at_0.001": clip_higher,
    "lengths": lengths,
    "lengths_longer": lengths,
    "staleness": staleness,
    **findings_beside.FINDINGS,
    "turns": turns,
    "turns_at_0.001": turns,
    "turns_at_0.003": turns,
}
"""By the name of the claim."""


def smoothed(values: Sequence[float]) -> NDArray[np.float64]:
    """Means over `SMOOTHED` values, or over all if there are fewer."""
    size = min(SMOOTHED, len(values))
    return np.convolve(np.asarray(values, np.float64), np.ones(size) / size, mode="valid")


def levels_of(one: Curve, other: Curve) -> list[float]:
    """Rewards that both runs go through."""
    first, last = zip(
        *((way[0], way[-1]) for way in (smoothed(c.sampled["reward"]) for c in (one, other))), strict=True
    )
    return [float(level) for level in np.linspace(statistics.fmean(first), min(last), LEVELS)]


def entropies_at(levels: Sequence[float], curve: Curve) -> list[float]:
    """The entropy where a run first has these rewards."""
    reward, entropy = smoothed(curve.sampled["reward"]), smoothed(curve.sampled["entropy_nats"])
    return [
        float(entropy[int(np.argmax(reward >= level))] if (reward >= level).any() else entropy[-1]) for level in levels
    ]


def _way(curve: Curve) -> list[tuple[float, float]]:
    """The curve of entropy over reward."""
    return list(
        zip(smoothed(curve.sampled["reward"]).tolist(), smoothed(curve.sampled["entropy_nats"]).tolist(), strict=True)
    )
