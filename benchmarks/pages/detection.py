"""The tables of `docs/design/detection.md` from a result of `benchmarks/detection.py`."""

from collections.abc import Sequence
from typing import Any

from benchmarks.detect.judgement import CHECKS, Share, share
from benchmarks.detect.policies import GROUP_SIZE
from benchmarks.pages.markdown import table
from shoal.verification.audit_checks import AUDIT
from shoal.verification.model_free import MODEL_FREE

Rows = list[dict[str, Any]]
FREE_CHECKS, AUDIT_CHECKS = [check.name for check in MODEL_FREE], [check.name for check in AUDIT]


def tables(report: dict[str, Any]) -> dict[str, str]:
    """By the name under which the page quotes each: a matrix a policy, one of what needs no model, and the others."""
    by_attack: dict[str, Rows] = {}
    for row in report["rows"]:
        by_attack.setdefault(row["attack"], []).append(row)
    free = {name for name, rows in by_attack.items() if any(row["checks"].get(c) for row in rows for c in FREE_CHECKS)}
    of_audit = [rows for name, rows in by_attack.items() if name not in free]
    return {
        "drift": _drift(report["policies"]),
        "bars": _bars(report["bars"], report["honest"]),
        "sent": _sent(list(by_attack.values()), report["policies"]),
        "missed": _missed(report["bars"]["missed"]),
        **{
            f"matrix_{100 * policy['target']:.0f}": _matrix([rows[place : place + 1] for rows in of_audit])
            for place, policy in enumerate(report["policies"])
        },
        "model_free": _attacks([by_attack[name] for name in by_attack if name in free], CHECKS),
        "tolerance": _tolerance(report["tolerance"]),
        "lease": _lease(report["large_lease"]),
    }


def said(found: Share) -> str:
    """Counts with their 95 % interval."""
    return f"{found.k} of {found.n} ({100 * found.low:.1f} to {100 * found.high:.2f} %)" if found.n else "0 of 0"


def _drift(policies: Rows) -> str:
    ages = [age for age in policies[0]["drift_nats"] if age != "0"]
    headings = ["one step of learning rate 1e-6", *(f"{age} step{'s' * (age != '1')}" for age in ages)]
    return table(
        ("nats a token", "logits times", *headings),
        [
            (f"{policy['entropy']:.3f}", f"{policy['scale']:.1f}",
             *(f"{policy['drift_nats'][age]:.4f}" for age in ("0", *ages)))
            for policy in policies
        ],
        right=range(len(headings) + 2),
    )  # fmt: skip


def _bars(bars: dict[str, Any], honest: Rows) -> str:
    rollouts, submissions = (Share(**bars[name]) for name in ("rollouts", "submissions"))
    refused = share(sum(row["groups_refused"] * GROUP_SIZE for row in honest), sum(row["rollouts"] for row in honest))
    return table(
        ("", "refused (95 %)", "asked"),
        [
            ("rollouts", _counts(rollouts), "at least 95 %"),
            ("submissions of eight rollouts", _counts(submissions), "at least 99.9 %"),
            (HONEST, _counts(refused), "none of 4,000"),
        ],
    )


HONEST = "honest rollouts: float32 in blocks of 4, 16 and 64 rollouts by 1 and 2 threads, declared bfloat16 and int8"


def _counts(found: Share) -> str:
    low, high = (f"{100 * bound:.2f}" for bound in (found.low, found.high))
    return f"{found.k:,} of {found.n:,} ({'0' if found.low == 0 else low} to {high} %)"


def _missed(missed: Rows) -> str:
    return table(
        ("attack", "nats", "rollouts that differ", "refused", "submissions that differ", "refused"),
        [
            (row["attack"], f"{row['entropy']:.3f}", row["differ"], row["refused"], *row["submissions"])
            for row in missed
        ],
        right=range(1, 6),
    )


def _matrix(of_attacks: list[Rows]) -> str:
    """The attacks that no check without the model sees, against one policy."""
    return _attacks(of_attacks, (*AUDIT_CHECKS, "without_proofs"), "all but `activations`")


def _attacks(of_attacks: list[Rows], columns: Sequence[str], *sums: str) -> str:
    checks = columns[: len(columns) - len(sums)]
    headings = ("attack", "identical", *checks, *sums, SENT, "refused of those that differ (95 %)", "first")
    rows = [_attack(rows, ("identical", *columns, "together")) for rows in of_attacks]
    return table(headings, rows, right=range(1, len(headings) - 2))


SENT = "refused of those sent"


def _sent(of_attacks: list[Rows], policies: Rows) -> str:
    """The attacks of which some rollout passed on some policy: the share of all that were sent that is refused."""
    passing = [rows for rows in of_attacks if any(row["together"] < row["n"] for row in rows)]
    headings = (
        "attack",
        *(f"{SENT}, {policy['entropy']:.2f} nats" for policy in policies),
        "of those that differ, all",
    )
    return table(
        headings,
        [
            (
                rows[0]["attack"],
                *(f"{_percent(100 * row['together'] / row['n'])} %" for row in rows),
                _of_differing(rows),
            )
            for rows in passing
        ],
        right=range(1, len(headings)),
    )


def _of_differing(rows: Rows) -> str:
    refused, differ = (sum(row[name] for row in rows) for name in ("differ_refused", "differ"))
    return f"{refused:,} of {differ:,}"


def _attack(rows: Rows, columns: tuple[str, ...]) -> list[str]:
    """One attack's rows, pooled over policies: per cent of rollouts."""
    counts = [{**row["checks"], **row} for row in rows]
    cells = []
    for column in columns:
        run = [row for row in counts if column in row]
        percent = 100 * sum(row[column] for row in run) / sum(row["n"] for row in run) if run else None
        cells.append(f"**{_percent(percent)}**" if column == "together" else _percent(percent))
    differ = share(sum(row["differ_refused"] for row in rows), sum(row["differ"] for row in rows))
    first = ", ".join(sorted({row["first"] or "none" for row in rows}))
    return [rows[0]["attack"], *cells, said(differ), first]


def _percent(figure: float | None) -> str:
    """0 and 100 only where they are exact."""
    if figure is None:
        return "–"
    return f"{figure:.0f}" if figure in (0.0, 100.0) or 1 <= figure <= 99 else f"{figure:.1f}"


def _tolerance(rows: Rows) -> str:
    return table(
        ("attack", "nats", "rollouts", "honest reward", "gain (95 %)", "groups refused", "excessive after"),
        [
            (row["attack"], f"{row['entropy']:.3f}", f"{row['rollouts']:,}", f"{row['honest_reward']:.3f}",
             f"{row['gain']:+.5f} ± {row['gain_95']:.5f}", f"{row['groups_refused']} of {row['groups']}",
             _noticed(row["groups_until_excessive"], row["groups"]))
            for row in rows
        ],
        right=(1, 2, 3, 5),
    )  # fmt: skip


def _noticed(after: int, groups: int) -> str:
    """The benchmark stops looking after twenty times the groups that were played."""
    return f"{after:,} groups" if after else f"more than {20 * groups:,} groups"


def _lease(rows: Rows) -> str:
    return table(
        ("faked blocks", "drawn for audit (95 %)", "expected loss, blocks' pay"),
        [
            (row["blocks"], "{:.1f} % ({:.1f} to {:.1f} %)".format(*(100 * s for s in _drawn(row))),
             f"{row['expected_loss_blocks']:.0f}")
            for row in rows
        ],
        right=(0, 2),
    )  # fmt: skip


def _drawn(row: dict[str, Any]) -> tuple[float, float, float]:
    found = share(row["caught"], row["n"])
    return found.k / found.n, found.low, found.high
