"""What a node's software must support to take part in a run, as words that both sides know.

The coordinator lists them in `RunInfo.needs`, and a node that lacks one refuses before it joins. For each new kind of lease
item, dtype or proof add a word here, and to `SUPPORTED` in `roles/seat.py`. A new field of an answer does not suffice,
because older nodes ignore it.
"""

from shoal.protocol.constants import EPISODES
from shoal.protocol.types import Rules


def needs_of(rules: Rules) -> tuple[str, ...]:
    """The words of a run with these rules."""
    proofs = () if rules.proofs == "none" else (proofs_need(rules.proofs),)
    return (EPISODES, dtype_need(rules.dtype), *proofs)


def dtype_need(dtype: str) -> str:
    """The word for an engine that samples and scores in this dtype."""
    return f"dtype:{dtype}"


def proofs_need(proofs: str) -> str:
    """The word for making and checking proofs of activations in this format."""
    return f"proofs:{proofs}"
