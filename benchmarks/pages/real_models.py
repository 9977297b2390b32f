"""Tables of the record, from the rows of `benchmarks/real_models.py`."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.pages.markdown import percent, table

Rows = Sequence[Mapping[str, Any]]

PAIRS = ("float32/float32", "bfloat16/float32", "bfloat16/bfloat16")


def tables(rows: Mapping[str, Rows]) -> dict[str, str]:
    """The tables of the parts that ran, by part."""
    made = {
        "architectures": (_architectures, "architectures"), "bfloat16": (_bfloat16, "architectures"),
        "flips": (_flips, "flips"), "refusals": (_refusals, "refusals"),
    }  # fmt: skip
    return {name: make(rows[part]) for name, (make, part) in made.items() if rows.get(part)}


def _architectures(rows: Rows) -> str:
    heads = ("architecture", "nats", *(f"honest groups refused, {pair}" for pair in PAIRS), "flips in bfloat16",
             "cheated rollouts refused", "in bfloat16", "logits off by")  # fmt: skip
    return table(heads, [_architecture(row) for row in rows], right=range(1, 9))


def _architecture(row: Mapping[str, Any]) -> tuple[object, ...]:
    honest = [f"{row['honest'][pair]['refused']} of {row['honest'][pair]['groups']}" for pair in PAIRS]
    return (
        row["architecture"], f"{row['entropy']:.2f}", *honest, percent(row["honest"][PAIRS[1]]["flips"], 2),
        _caught(row["cheats"]), _caught(row.get("cheats_bfloat16", {})),
        f"{row['logits_off']:.0e}" if row["logits_off"] else "0",
    )  # fmt: skip


def _caught(cheats: Mapping[str, Mapping[str, int]]) -> str:
    refused, differ = (sum(row[key] for row in cheats.values()) for key in ("refused", "differ"))
    return f"{refused:,} of {differ:,}" if cheats else "-"


def _bfloat16(rows: Rows) -> str:
    """Each cheat in bfloat16, over all policies: what one group shows, and what a node's groups show together."""
    heads = ("cheat in bfloat16", "rollouts that differ", "refused", "submissions with one refused",
             "policies where the node is found in 480 groups", "after at most")  # fmt: skip
    judged = [row["cheats_bfloat16"] for row in rows if "cheats_bfloat16" in row]
    names = dict.fromkeys(name for cheats in judged for name in cheats)
    return table(heads, [_cheat(name, [cheats[name] for cheats in judged]) for name in names], right=range(1, 6))


def _cheat(name: str, rows: Rows) -> tuple[object, ...]:
    differ, refused, submissions, caught = (
        sum(row[key] for row in rows) for key in ("differ", "refused", "submissions", "submissions_refused")
    )
    groups = [row["groups_until_excessive"] for row in rows]
    return (
        name, f"{differ:,}", f"{refused:,}", f"{caught} of {submissions}",
        f"{sum(found > 0 for found in groups)} of {len(groups)}", max(groups),
    )  # fmt: skip


def _flips(rows: Rows) -> str:
    heads = ("architecture", "nats", "choices of experts that flip in bfloat16", "tokens with a flip",
             "99 % of their log-probs move less than", "of other tokens")  # fmt: skip
    return table(heads, [_flip(row) for row in rows], right=range(1, 6))


def _flip(row: Mapping[str, Any]) -> tuple[object, ...]:
    coarse = row["bfloat16"]
    return (
        row["architecture"], f"{row['entropy']:.2f}", percent(coarse["flipped"], 2), percent(coarse["tokens_flipped"], 1),
        f"{coarse['off_flipped']:.2g}", f"{coarse['off_others']:.2g}",
    )  # fmt: skip


def _refusals(rows: Rows) -> str:
    return table(("refused", "with"), [(row["case"], row["line"]) for row in rows])
