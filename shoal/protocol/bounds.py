"""How far honest arithmetic may differ, by the engines that sample and replay.

Called by the checks and by the ledger's evidence, which must look up the same bounds. A key of `Rules.bounds` is
"SAMPLED/REPLAYED". Each side is the dtype of the embedded engine, or KIND:DTYPE of another kind, such as
"remote:bfloat16/float32".

A node says itself which kind of engine it has, so this claim may tighten a bound and never loosen one: the run's own
pair of dtypes is always among those that apply, and the smallest value of each applies.
"""

import msgspec

from shoal.protocol.types import Bounds, Rules

LOCAL = "local"
"""Kind of the embedded engine, which keys of `Rules.bounds` leave out."""


def engine_kind(implementation: str) -> str:
    """The kind that a node claims by its implementation: "local" for "shoal-local/torch-2.13.0"."""
    return implementation.partition("/")[0].removeprefix("shoal-")


def bounds_for(rules: Rules, sampled_by: str, replayed_by: str, replayed_dtype: str) -> Bounds | None:
    """Bounds for work sampled in the run's dtype and replayed in another; each side by the implementation it claims.

    None where the run has no bounds for the two dtypes: then such a replay says nothing.
    """
    own = rules.bounds.get(f"{rules.dtype}/{replayed_dtype}")
    if own is None:
        return None
    pairs = {
        f"{sampled}/{replayed}"
        for sampled in _sides(engine_kind(sampled_by), rules.dtype)
        for replayed in _sides(engine_kind(replayed_by), replayed_dtype)
    }
    found = [rules.bounds[pair] for pair in sorted(pairs) if pair in rules.bounds]
    return Bounds(
        *(min(values) for values in zip(*map(msgspec.structs.astuple, found), strict=True))
    )  # guard: claims-loosen-no-bound


def _sides(kind: str, dtype: str) -> tuple[str, ...]:
    """How one side of a key may name an engine."""
    return (dtype,) if kind == LOCAL else (dtype, f"{kind}:{dtype}")
