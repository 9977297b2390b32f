"""What a run asks of the engines of its nodes, and facts of its rules that both sides derive.

The coordinator lists the words in `RunInfo.needs`. A node of another version of shoal is refused before, by
`PROTOCOL_VERSION` and the version of the ledger's rules: raise the former for a new noise, dtype, proof, check or patch.
"""

from collections.abc import Iterable

from shoal.protocol.constants import COMPLETIONS, EPISODES
from shoal.protocol.messages import EnvSpec
from shoal.protocol.tolerances import TRANSFORMERS

ADAPTERS = "adapters"
"""The word for versions that are low-rank adapters of a model that stays the same."""

CODED_BASE = "nf4-base"
"""The word for adapters of a model whose layers are published as NF4 codes."""


def needs_of(transformers: bool, adapters: bool, coded_base: bool) -> tuple[str, ...]:
    """The words of a run. `transformers`: whether its policy is of another architecture than shoal's own; `adapters`:
    whether its versions are adapters; `coded_base`: whether their base is in NF4."""
    words = {TRANSFORMERS: transformers, ADAPTERS: adapters, CODED_BASE: coded_base}
    return tuple(word for word, is_needed in words.items() if is_needed)


def may_be_patched(published_dtype: str) -> bool:
    """Whether a version may be published as a patch: if rounding leaves most weights as they are in a step. In float32, a
    step changes them all."""
    return published_dtype in ("bfloat16", "int8")


def kind_of(envs: Iterable[EnvSpec]) -> str:
    """The kind of a run's blocks. If the host plays one environment, it plays all."""
    return COMPLETIONS if any(env.kind == COMPLETIONS for env in envs) else EPISODES
