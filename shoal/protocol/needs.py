"""What a run needs of the software of those who take part, as words that both sides know.

The coordinator says them in `RunInfo.needs`, and a node that lacks one refuses before it joins. A new kind of lease
item, dtype or proof has its word here; a new field of an answer, which older nodes ignore, is never enough.
"""

from shoal.protocol.constants import EPISODES
from shoal.protocol.types import Rules


def needs_of(rules: Rules) -> tuple[str, ...]:
    """Of a run with these rules."""
    proofs = () if rules.proofs == "none" else (proofs_need(rules.proofs),)
    return (EPISODES, dtype_need(rules.dtype), *proofs)


def dtype_need(dtype: str) -> str:
    """An engine that samples and scores in a dtype."""
    return f"dtype:{dtype}"


def proofs_need(proofs: str) -> str:
    """To make and check proofs of activations in a format."""
    return f"proofs:{proofs}"
