"""What a node's software must support to take part in a run, as words that both sides know.

The coordinator lists them in `RunInfo.needs`, and a node that lacks one refuses before it joins. For each new kind of lease
item, dtype or proof add a word here, and to `SUPPORTED` in `roles/seat.py`. A new field of an answer does not suffice,
because older nodes ignore it.
"""

from collections.abc import Iterable

from shoal.protocol.constants import EPISODES
from shoal.protocol.types import EnvSpec, Rules

SETTINGS = "env-settings"
"""The word for environments with a system prompt, examples, template arguments or token limits of their own."""


def needs_of(rules: Rules, envs: Iterable[EnvSpec] = ()) -> tuple[str, ...]:
    """The words of a run with these rules and environments."""
    proofs = () if rules.proofs == "none" else (proofs_need(rules.proofs),)
    settings = (SETTINGS,) if any(env.has_settings for env in envs) else ()
    return (EPISODES, dtype_need(rules.dtype), *proofs, *settings)


def dtype_need(dtype: str) -> str:
    """The word for an engine that samples and scores in this dtype."""
    return f"dtype:{dtype}"


def proofs_need(proofs: str) -> str:
    """The word for making and checking proofs of activations in this format."""
    return f"proofs:{proofs}"
