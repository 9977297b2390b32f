"""What a run of stages came to: report.json, and a table for the terminal.

Called by `launch/stages` at the end. It knows figures and words, and nothing of how a stage is done.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from shoal.envs.evaluate import interval
from shoal.heldout import Heldout, why_not_comparable


def share_of(right: float, count: int) -> Heldout:
    """Of so many rollouts, the share that is right."""
    values = [1.0] * round(right * count)
    found = interval(values + [0.0] * (count - len(values)), (0.0, 1.0))
    return Heldout(found.mean, found.low95, found.high95, count)


class StageEnd(msgspec.Struct, frozen=True):
    """One stage in report.json."""

    name: str
    kind: str
    key: str
    """Of its folder."""
    before: Heldout | None
    """Held-out reward, or share of wins, of the policy that it began with; of reject, the share of right rollouts; of
    reward_model, the share of held-out pairs that it ranks right."""
    after: Heldout | None
    """The same of what it made."""
    seconds: float
    """That the stage took; for a run, over all its starts, else those of the process that finished."""
    cpu_s: float
    tokens: int
    """That sft learned from, prompts and repetitions included; that rl paid for; that filter's policy wrote."""
    done_now: bool
    """Whether this start did it, and did not find it done."""
    figures: dict[str, Any]
    """What the kind says beside."""


def report(name: str, ends: Sequence[StageEnd]) -> dict[str, Any]:
    """report.json."""
    total = {
        "seconds": round(sum(end.seconds for end in ends), 3),
        "cpu_s": round(sum(end.cpu_s for end in ends), 3),
        "tokens": sum(end.tokens for end in ends),
    }
    return {"name": name, "stages": list(ends), "total": total}


def in_words(name: str, ends: Sequence[StageEnd]) -> str:
    """The table."""
    rows = [("stage", "kind", "before", "after", "seconds", "CPU-s", "tokens", "")]
    rows += [
        (
            end.name, end.kind, _mean(end.before), _mean(end.after), f"{end.seconds:.1f}", f"{end.cpu_s:.1f}",
            f"{end.tokens:,}" if end.tokens else "-", "" if end.done_now else "done before",
        )
        for end in ends
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        f"{name}: held-out reward before and after each stage; of reject, the share of right rollouts; of reward_model, "
        "that of held-out pairs ranked right"
    ]
    for row in rows:
        cells = [cell.ljust(width) if i in (0, 1, 7) else cell.rjust(width)
                 for i, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append("  ".join(cells).rstrip())
    for end in ends:
        if why := why_not_comparable(*filter(None, (end.before, end.after))):
            lines.append(f"{end.name}: {why}")
    return "\n".join(lines)


def _mean(found: Heldout | None) -> str:
    if found is None:
        return "-"
    mean = "none" if found.mean is None else f"{found.mean:.3f}"
    return f"{mean} ({found.faults:,} without a score)" if found.faults else mean
