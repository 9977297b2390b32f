"""How far honest arithmetic may differ between the engine that samples and the one that replays.

A key of `Rules.bounds` is "SAMPLED/RECOMPUTED". Each side is the dtype of the embedded engine, or KIND:DTYPE of another
kind, such as "remote:bfloat16/float32".

The node itself says which kind of engine it has. So its claim may tighten a bound but never loosen one: the bounds of the
run's own pair of dtypes always apply too, and of each bound the smallest value applies. `logprob_mean` and
`largest_logit` are always those of the run's own pair.

`PROTOCOL_VERSION` covers what follows from the version of shoal: raise it for a new noise, dtype, proof, check or patch.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias, get_args

import msgspec

from shoal.protocol.constants import VLLM
from shoal.protocol.messages import Bounds, Rules

Dtype: TypeAlias = Literal["float32", "bfloat16", "int8"]
"""What a run may sample in, and a validator replay in."""

DTYPES: tuple[str, ...] = get_args(Dtype)

LOCAL = "local"
"""Kind of the embedded engine. Keys of `Rules.bounds` do not write it."""

TIGHT = 0.1
"""Log-probs that differ by at most this share of the clip range ln(1 + epsilon) are taken from workers. At 1, a worker can
mute or amplify any token within its bounds."""

TRANSFORMERS = "transformers"
"""Kind of the engine that computes with transformers, for policies of other architectures than shoal's own."""

CHOSEN_ENGINES = (VLLM,)
"""Kinds that a worker chooses by itself. Nobody measured how far they differ from the engine that replays, unless the run
has bounds for them."""

MEAN_OF_LOGPROB = 0.02
"""The honest mean of claimed - replayed log-probs, in parts of `logprob`, for bounds that do not give it. Calibration sets
it no lower, because the mean grows while a policy learns. Measured: less than 0.004."""

_SIDE = rf"(?:(?!{LOCAL}:)[a-z][a-z0-9-]{{0,31}}:)?({'|'.join(DTYPES)})"
_PAIR = re.compile(f"{_SIDE}/{_SIDE}", re.ASCII)


def wire_bounds(bounds: Bounds) -> Bounds:
    """The bounds of one pair in a run file, as the rules of the run have them: 0 for `logprob_mean` filled in."""
    mean = bounds.logprob_mean or MEAN_OF_LOGPROB * bounds.logprob
    return msgspec.structs.replace(bounds, logprob_mean=mean)


def dtypes_of(pair: str) -> tuple[str, str] | None:
    """The dtypes that sample and recompute in a key of `Rules.bounds`, without their kinds; None for any other text."""
    found = _PAIR.fullmatch(pair)
    return (found[1], found[2]) if found else None


def engine_kind(implementation: str) -> str:
    """The kind that a node claims by its implementation: "local" for "shoal-local/torch-2.13.0"."""
    return implementation.partition("/")[0].removeprefix("shoal-")


def bounds_for(rules: Rules, sampled_by: str, replayed_by: str, replayed_dtype: str) -> Bounds | None:
    """Bounds for work that was sampled in the run's dtype and replayed in `replayed_dtype`; the first two arguments are the
    implementations that the two nodes claim.

    None if the run has no bounds for the two dtypes: such a replay shows nothing.
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
    smallest = Bounds(
        *(min(values) for values in zip(*map(msgspec.structs.astuple, found), strict=True))
    )  # guard: claims-loosen-no-bound
    # These two say what the others mean. 0 switches them off, so the smallest value would loosen.
    return msgspec.structs.replace(smallest, logprob_mean=own.logprob_mean, largest_logit=own.largest_logit)


def unmeasured(rules: Rules, implementation: str) -> str:
    """Why a worker with this engine may not take part: its user chose the engine, and the run has no bounds for it. Empty
    if it may."""
    kind = engine_kind(implementation)
    if kind not in CHOSEN_ENGINES or is_measured(rules.bounds, kind, rules.dtype):
        return ""
    return (
        f"this run has no calibrated bounds for work of {kind} in {rules.dtype}: join without --engine, or ask the host to "
        f"measure them (`shoal calibrate RUN_FILE --engine {kind} --write`) before a run begins"
    )


def is_measured(pairs: Iterable[str], kind: str, dtype: str) -> bool:
    """Whether there are bounds, by their keys, for work of this kind of engine in this dtype."""
    return any(pair.startswith(f"{kind}:{dtype}/") for pair in pairs)


def _sides(kind: str, dtype: str) -> tuple[str, ...]:
    """The names that an engine may have on one side of a key."""
    return (dtype,) if kind == LOCAL else (dtype, f"{kind}:{dtype}")


def claims_bend_ratios(bounds: Mapping[str, Bounds], dtype: str, epsilon: float) -> bool:
    """Whether the checks let a worker claim log-probs that bend an importance ratio, in a run that samples in `dtype`.

    The trainer then computes the denominators itself. This depends on the run file alone, not on a row or a worker.
    """
    own = [bound for pair, bound in bounds.items() if (dtypes_of(pair) or ("",))[0] == dtype]
    tight = TIGHT * math.log1p(epsilon)
    # guard: loose-claims-are-recomputed, growing-bounds-are-loose
    return any(bound.logprob > tight or bound.largest_logit > 0 for bound in own)


# --- what a run needs of engines ---


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
