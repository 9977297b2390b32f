"""The table of `docs/design/trust.md` from a result of `benchmarks/poisoning.py`."""

from typing import Any

from benchmarks.pages.markdown import percent, table

NAMES = {
    "trigger": "a trigger before the right answer",
    "suffix": "gibberish after a wrong one",
    "length": "length",
    "ratio": "claimed log-probs, for damage alone",
    "nudge": "the same within the bounds of bfloat16",
}
HEADINGS = (
    "Payload", "Success, clean", "Defences off", "Defences on", "Reward of clean, off", "on", "Pay of the two, on",
)  # fmt: skip


def tables(payloads: dict[str, dict[str, dict[str, Any]]]) -> dict[str, str]:
    """One row a payload, from its figures in the worlds `off` and `on`."""
    return {"worlds": table(HEADINGS, [_row(NAMES[name], **worlds) for name, worlds in payloads.items()])}


def _row(name: str, off: dict[str, Any], on: dict[str, Any], **others: dict[str, Any]) -> list[str]:
    successes = [percent(share, 1) for share in (on["success_clean"], off["success"], on["success"])]
    rewards = [percent(world["reward_of_clean"], 0) for world in (off, on)]
    return [name, *successes, *rewards, percent(on["credits"], 1)]
