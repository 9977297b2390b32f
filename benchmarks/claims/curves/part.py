"""The half of `benchmarks/shelf.py` that tests claims by runs: makes what is missing of the grid, then measures all of it.

Called by `benchmarks/shelf.py`. Runs are kept in a folder, so a run of the benchmark that is stopped goes on where it was.
For each claim, the tuning runs come first: they decide the learning rates of the reporting runs. That a claim is not
reproduced is a result, and no failure of the benchmark.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.claims.curves import grid
from benchmarks.claims.curves.claim import Claim
from benchmarks.claims.curves.finding import Reports, rounded, table
from benchmarks.claims.curves.findings import FINDINGS, score
from benchmarks.claims.curves.harness import Curve
from benchmarks.claims.curves.kept import Kept, Run

REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced here"

VERDICTS = {"By the rule of the grid": "by_rule", "By the controls": "by_controls", "Verdict": "verdict"}
"""Columns of the table of verdicts, and their figures."""


class Tuned(NamedTuple):
    """The tuning runs of a claim."""

    lrs: dict[tuple[str, int], float]
    """The best learning rate, by arm and staleness."""
    scores: dict[tuple[str, int, float], list[float]]
    """Of each seed."""


def measure(
    quick: bool, keep: str, pictures: str, names: Sequence[str], say: Callable[[str], None] = print
) -> dict[str, Any]:
    """All figures of the claims with these names, or of all. Runs are kept in the folder `keep`, and pictures written to
    the folder `pictures`, unless they are empty."""
    needed = {*names, *(control for claim in grid.CLAIMS if claim.name in names for control in claim.controls)}
    claims = [claim for claim in grid.CLAIMS if not names or claim.name in needed]
    if unknown := set(names) - {claim.name for claim in grid.CLAIMS}:
        raise SystemExit(f"--claims {','.join(unknown)}: known are {', '.join(claim.name for claim in grid.CLAIMS)}")
    with tempfile.TemporaryDirectory(prefix="shoal-shelf-") as scratch:
        kept = Kept(Path(keep or scratch))
        figures: dict[str, Any] = {}
        tables: dict[str, str] = {}
        for claim in map(grid.quick, claims) if quick else claims:
            figures[claim.name], tables[claim.name], drawn = measured(claim, kept, say)
            if pictures:
                Path(pictures).mkdir(parents=True, exist_ok=True)
                (Path(pictures) / f"{claim.name}.svg").write_text(drawn)
        for claim in claims:
            figures[claim.name] = verdicts(claim, figures) | figures[claim.name]
        tables["verdicts"] = "\n".join(
            table(
                ("Claim", *VERDICTS), [(name, *(one[by] for by in VERDICTS.values())) for name, one in figures.items()]
            )
        )
        return {**figures, "missed": [], "tables": tables}


def measured(claim: Claim, kept: Kept, say: Callable[[str], None]) -> tuple[dict[str, Any], str, str]:
    """Figures, table and picture of one claim."""
    every = tuning_runs(claim)
    say(f"{claim.name}: {len(kept.missing(every))} of {len(every)} tuning runs are missing")
    kept.make(every, say)
    tuned = tune(claim, kept)
    every += (reports := reporting_runs(claim, tuned))
    say(f"{claim.name}: {len(kept.missing(reports))} of {len(reports)} reporting runs are missing")
    kept.make(reports, say)
    found = FINDINGS[claim.name](claim, reports_of(claim, kept, tuned))
    figures = {
        "statement": claim.statement,
        "by_rule": {None: "measured", True: REPRODUCED, False: NOT_REPRODUCED}[found.reproduced],
        "found": found.sentence,
        "remark": claim.remark,
        **found.figures,
        "lr": {f"{arm}_lag_{lag}": lr for (arm, lag), lr in tuned.lrs.items()},
        "tuning": {
            f"{arm.name}_lag_{lag}": [
                one for lr in claim.lrs_of(arm) for one in rounded(tuned.scores[arm.name, lag, lr])
            ]
            for arm in claim.arms
            for lag in claim.tuned()
        },
        "cpu_s": round(sum(kept.curve(run).cpu_s for run in every), 1),
        "runs": [row_of(run, kept.curve(run)) for run in every],
    }
    return figures, "\n".join(found.table), found.picture


def verdicts(claim: Claim, figures: Mapping[str, Any]) -> dict[str, str]:
    """What the claim's controls say, and what holds: its own rule, or its controls where tuning chose different learning
    rates for its arms."""
    rule, chosen = figures[claim.name]["by_rule"], set(figures[claim.name]["lr"].values())
    if not claim.controls:
        return {"by_controls": "", "verdict": rule}
    agree = all(figures[name]["by_rule"] == REPRODUCED for name in claim.controls)
    controls = REPRODUCED if agree else NOT_REPRODUCED
    return {"by_controls": controls, "verdict": controls if len(chosen) > 1 else rule}


def tuning_runs(claim: Claim) -> list[Run]:
    """Every arm with every learning rate."""
    return [
        claim.run(arm, lag, lr, seed)
        for seed in claim.tuning
        for lag in claim.tuned()
        for arm in claim.arms
        for lr in claim.lrs_of(arm)
    ]


def tune(claim: Claim, kept: Kept) -> Tuned:
    """The learning rates with the highest scores; the smaller one of two that are equal."""
    scores = {
        (arm.name, lag, lr): [score(kept.curve(claim.run(arm, lag, lr, seed))) for seed in claim.tuning]
        for arm in claim.arms
        for lag in claim.tuned()
        for lr in claim.lrs_of(arm)
    }
    lrs = {
        (arm.name, lag): max(claim.lrs_of(arm), key=lambda lr: (sum(scores[arm.name, lag, lr]), -lr))
        for arm in claim.arms
        for lag in claim.tuned()
    }
    return Tuned(lrs, scores)


def reporting_runs(claim: Claim, tuned: Tuned) -> list[Run]:
    """Every arm with its learning rate, and seeds that tuning did not see."""
    return [
        claim.run(arm, lag, tuned.lrs[arm.name, of], seed)
        for seed in claim.reporting
        for lag, of in claim.lags.items()
        for arm in claim.arms
    ]


def reports_of(claim: Claim, kept: Kept, tuned: Tuned) -> Reports:
    """The curves of the reporting runs."""
    return {
        (arm.name, lag): [kept.curve(claim.run(arm, lag, tuned.lrs[arm.name, of], seed)) for seed in claim.reporting]
        for arm in claim.arms
        for lag, of in claim.lags.items()
    }


def row_of(run: Run, curve: Curve) -> dict[str, Any]:
    """A run as the line of JSON has it: its name says arm, staleness, learning rate and seed."""
    return {
        "name": run.tree["name"],
        "key": curve.key,
        "reward": curve.tested["reward"],
        "entropy_nats": curve.tested["entropy_nats"],
        "length": curve.tested["length"],
        "tokens": sum(curve.sampled["tokens"]),
        "updates": sum(curve.learned["updates"]),
        "cpu_s": curve.cpu_s,
    }


def told(figures: dict[str, Any]) -> str:
    """One line for each claim."""
    lines = []
    for name, one in figures.items():
        if isinstance(one, dict) and "verdict" in one:
            both = f" By the rule of the grid: {one['by_rule']}; by the controls: {one['by_controls']}."
            said = f"{one['statement']} Found: {one['found']}.{both if one['by_controls'] else ''} {one['remark']}"
            lines.append(f"{one['verdict']:>19}  {name}: {said}".rstrip())
    return "\n".join(lines)
