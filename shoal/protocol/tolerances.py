"""How far honest arithmetic may differ between the engine that samples and the one that replays.

A key of `Rules.bounds` is "SAMPLED/RECOMPUTED". Each side is the dtype of the embedded engine, or KIND:DTYPE of another
kind, such as "remote:bfloat16/float32".

The node itself says which kind of engine it has. So its claim may tighten a bound but never loosen one: the bounds of the
run's own pair of dtypes always apply too, and of each bound the smallest value applies. `logprob_mean` and
`largest_logit` are always those of the run's own pair.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal, Protocol, TypeAlias, get_args

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


class Allowed(Protocol):
    """The bounds of one pair, in a run file or in the rules."""

    @property
    def logprob(self) -> float: ...

    @property
    def largest_logit(self) -> float: ...


def claims_bend_ratios(bounds: Mapping[str, Allowed], dtype: str, epsilon: float) -> bool:
    """Whether the checks let a worker claim log-probs that bend an importance ratio, in a run that samples in `dtype`.

    The trainer then computes the denominators itself. This depends on the run file alone, not on a row or a worker.
    """
    own = [allowed for pair, allowed in bounds.items() if (dtypes_of(pair) or ("",))[0] == dtype]
    tight = TIGHT * math.log1p(epsilon)
    # guard: loose-claims-are-recomputed, growing-bounds-are-loose
    return any(allowed.logprob > tight or allowed.largest_logit > 0 for allowed in own)
