"""Activations: a group's proof must hold the largest values of the policy's own hidden states.

Catches proofs made with another model, version, precision or prompt, and proofs that are invented, typical, negated,
copied, empty or too long (`algos/toploc` explains why a forged proof fails).
Cannot see how the tokens were chosen, nor who computed the states: one prefill can prove any tokens. Channels that
vary by less than the bound on the error prove nothing, and a run file that says "none" asks for no proofs.
Hard; mild if one chunk fails, or if the mean error is under 10 times the bound and at most one chunk is mostly wrong:
unknown hardware exceeds the bounds a little, first in a chunk of few tokens, but never gets half the values wrong.

Three figures count: the values of a chunk with the wrong sign or size, the mean error of its other values, and the mean
error of the whole group. A chunk has few values, so its mean varies more than the group's.
"""

import numpy as np

from shoal.algos.field_polynomials import Floats
from shoal.algos.toploc import ChunkFigures, compare
from shoal.protocol.messages import Group
from shoal.verification.context import CheckFailure, Context, Severity, policy_positions

NAME = "activations"
SEVERITY: Severity = "hard"

MISMATCHED = 0.15
"""Share of a chunk's values whose sign or size noise may change, or which it may move out of the largest. bfloat16
changes up to 6 %. A forger who does not know the signs gets half of them wrong."""

MILD = 10.0
"""A mean error up to this many times the bound costs the pay but is not slashed."""

WRONG_HALF = 0.5
"""Share of a chunk's values with a wrong sign or size that noise never reaches."""

SPREAD = 4.0
"""The mean error of K values may exceed the bound by this fraction of it, divided by the square root of K."""


def check(group: Group, ctx: Context) -> CheckFailure | None:
    if ctx.rules.proofs == "none":
        return None
    hidden = [score.hidden_PD for score in ctx.scores if score.hidden_PD is not None]
    assert len(hidden) == len(group.rollouts), "a run that asks for proofs is scored with hidden states"
    figures = compare(hidden, ctx.proof)
    if isinstance(figures, str):
        return CheckFailure(-1, -1, len(ctx.proof), 0, f"proof of activations: {figures}")
    failure = judge(figures, ctx.rules.activation_error)
    if failure is None or failure.rollout < 0:
        return failure
    at = int(policy_positions(group.rollouts[failure.rollout])[failure.position])
    return failure._replace(position=at)


def judge(figures: ChunkFigures, bound: float) -> CheckFailure | None:
    """What is wrong with a group's figures. `bound` is on the mean relative error; positions count policy tokens."""
    entries_C, wrong_C = figures.entries_C, figures.mismatched_C
    allowed_C = most_mismatched(figures)
    error_C, room_C, mean = _errors(figures)
    most_C = bound * room_C
    bad = np.flatnonzero((wrong_C > allowed_C) | (error_C > most_C))  # guard: chunk-values, chunk-mean
    if bad.size:
        worst = int(bad[np.argmax(wrong_C[bad] / entries_C[bad])])
        hopeless = int(np.count_nonzero(wrong_C > np.maximum(allowed_C, WRONG_HALF * entries_C)))
        mild = bool(bad.size == 1) or (hopeless < 2 and mean <= MILD * bound)  # guard: one-bad-chunk-is-mild
        rollout, first = int(figures.rollout_C[worst]), int(figures.first_C[worst])
        if wrong_C[worst] > allowed_C[worst]:
            detail = f"values of 32 tokens whose sign or size differs from the proof's, bad chunks: {bad.size}"
            return CheckFailure(rollout, first, int(wrong_C[worst]), float(allowed_C[worst]), detail, mild)
        detail = f"mean relative error of the proof's values for 32 tokens, bad chunks: {bad.size}"
        return CheckFailure(rollout, first, float(error_C[worst]), float(most_C[worst]), detail, mild)
    if mean > bound:  # guard: group-mean
        mild = mean <= MILD * bound  # guard: near-the-bound-is-mild
        return CheckFailure(-1, -1, mean, bound, "mean relative error of the proof's values", mild)
    return None


def most_mismatched(figures: ChunkFigures) -> Floats:
    """How many values of each chunk may have another sign or size."""
    return np.maximum(1, np.ceil(MISMATCHED * figures.entries_C))


def least_bound(figures: ChunkFigures) -> float:
    """The smallest bound that every mean error of a group's proof passes, however many values mismatch."""
    error_C, room_C, mean = _errors(figures)
    return max(mean, float((error_C / room_C).max()))


def _errors(figures: ChunkFigures) -> tuple[Floats, Floats, float]:
    """Mean error of each chunk, the multiple of the bound that it may reach, and the group's mean error."""
    matched_C = figures.entries_C - figures.mismatched_C
    error_C = figures.error_C / np.maximum(1, matched_C)
    room_C = 1 + SPREAD / np.sqrt(np.maximum(1, matched_C))
    return error_C, room_C, float(figures.error_C.sum() / max(1, int(matched_C.sum())))
