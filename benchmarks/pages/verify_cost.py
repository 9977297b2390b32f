"""The tables of `docs/design/detection.md#what-it-costs` from a result of `benchmarks/verify_cost.py`."""

from collections.abc import Mapping
from typing import Any

from benchmarks.pages.markdown import percent, table

TASKS = {"rounds": "the long game above", "wordle": "Wordle, the demo", "arithmetic": "arithmetic, the demo"}
POLICIES = {"tiny": "0.8M weights", "small": "25M weights"}


def tables(checks: Mapping[str, Mapping[str, Any]], seeded: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What the checks cost beside generation, and seeded sampling beside drawing from softmax."""
    return {
        "checks": table(
            ("task", "policy tokens a rollout", "audit, forward passes", "model-free checks, of generation",
             "steady, of generation"),
            [_task(name, checks[task]) for task, name in TASKS.items() if task in checks],
            right=range(1, 5),
        ),
        "sampling": table(
            ("policy", "vocabulary", "rows", "ms a token of each row", "with multinomial", "more"),
            [_sampling(*name.split("_"), row) for name, row in seeded.items()],
            right=range(1, 6),
        ),
    }  # fmt: skip


def _task(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    shares = [percent(row[key], 1) for key in ("model_free_over_generate", "steady_over_generate")]
    return name, f"{row['policy_tokens_per_rollout']:.0f}", f"{row['audit_over_forward']:.2f}", *shares


def _sampling(size: str, vocabulary: str, row: Mapping[str, Any]) -> tuple[object, ...]:
    taken = [f"{row[key]:.2f}" for key in ("seeded_ms", "multinomial_ms")]
    return POLICIES[size], f"{int(vocabulary):,}", row["batch"], *taken, f"{100 * row['over']:+.0f} %"
