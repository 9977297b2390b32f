"""Claims of papers, each tested exactly: every rollout and every group of a tabular policy is counted with its probability.

Called by `benchmarks/shelf.py`. What is tested are the files in shoal/algos themselves: a claim calls them and compares
with the true gradient, which the enumeration knows. Nothing is sampled, so a claim holds up to rounding, or it does not.
Each claim is a function whose docstring says it, and whose figures have `holds`.
"""

from collections.abc import Callable
from typing import Any

from benchmarks.claims import credit, divergence, losses, pairs

CLAIMS: dict[str, Callable[[], dict[str, Any]]] = {
    "length_drift": losses.length_drift,
    "baselines": losses.baselines,
    "clipping": losses.clipping,
    "divergence": divergence.divergence,
    "critic": credit.critic,
    "vines": credit.vines,
    "turns": credit.turns,
    "preferences": pairs.preferences,
    "selection": pairs.selection,
    "distillation": pairs.distillation,
}


def measure(quick: bool) -> dict[str, Any]:
    """All claims: there is nothing that a quick run could leave out. `missed` names those that do not hold."""
    figures = {name: claim() for name, claim in CLAIMS.items()}
    return {**figures, "missed": [name for name, found in figures.items() if not found["holds"]]}


def told(figures: dict[str, Any]) -> str:
    """One line for each claim."""
    lines = [
        f"{'holds' if figures[name]['holds'] else 'MISSED':>7}  {name}: {said(claim)}" for name, claim in CLAIMS.items()
    ]
    return "\n".join(lines)


def said(claim: Callable[..., Any]) -> str:
    """A claim's sentence."""
    return " ".join((claim.__doc__ or "").split())
