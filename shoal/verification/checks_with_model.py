"""Checks that read one prefill of the policy: sampling, log-probs and activations of a group.

Axes: P policy tokens of a rollout, N of the group, G its rollouts, C chunks of a proof.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.algos.sampling_evidence import (
    LIMIT_NATS,
    EvidenceFigures,
    cut,
    largest_sum,
    lean,
    most_flipped,
    pooled,
    room,
)
from shoal.algos.toploc import ChunkFigures, Floats, compare
from shoal.engine.interface import PolicyScore
from shoal.protocol.messages import Bounds, Group
from shoal.verification.check_context import CheckFailure, Context, GroupCheck, gravest, policy_positions

MILD = 10.0
"""A figure up to this many times its bound costs the pay but is not slashed."""

# --- sampling ---

FAR = 2.0
"""No single token may have a gap above this many times `Bounds.gap`: a flip by noise is at most twice the noise, and
`gap` is above the noise. At 20, a worker that picks the better of nearly tied tokens gains 1 % in reward."""


def sampling(group: Group, ctx: Context) -> CheckFailure | None:
    """Sampling: every policy token is the one that the lease's seed chooses from the policy's own logits.

    Catches another model, version, prompt, temperature, seed or order of rollouts, best-of-n, text that was not sampled,
    and a turn ended early. Each shows as a gap between the best of logits / T + noise and the token that was written.
    Cannot see a cheaper way to compute the same tokens, nor a change that never alters a choice: where the policy has
    little entropy, other seeds and near versions often agree with it. A node that uses up the tolerance in every group is
    found only over several groups, by adding up the figures of its verdicts (`algos/sampling_evidence`).
    Hard, but mild within ten times a bound, and always mild for the sum: the noise of unknown hardware exceeds a bound a
    little, never by much.

    There are three figures because a cheat can get around each alone: a sum of small gaps hides one forged token in a long
    group, a count of flips hides a few large gaps, and a largest gap hides many small ones (searched for at near ties). The
    run sets how much noise is allowed for each pair of dtypes. A constant (`FALSE_ALARM`) sets how rarely it is more.
    """
    return gravest(_sampling_failures(group, ctx))


def _sampling_failures(group: Group, ctx: Context) -> Iterator[CheckFailure | None]:
    far = limit_of_a_token(ctx.bounds)
    for index, (rollout, score) in enumerate(zip(group.rollouts, ctx.scores, strict=True)):
        gaps_P = gaps_of(score, ctx.bounds)
        # guard: look-at-nan-gaps
        if gaps_P.max() <= ctx.bounds.gap:  # nothing is flipped; a gap that is not a number fails this test
            continue
        positions_P = policy_positions(rollout)
        widest = int(np.argmax(gaps_P))
        # Written so that a gap that is not a number is refused.
        if not gaps_P[widest] <= far:  # guard: gap-size, gap-is-a-number
            figure = float(np.nan_to_num(gaps_P[widest], nan=1e9, posinf=1e9))
            detail = "token that its seed does not choose, nats"
            # guard: small-gap-is-mild
            yield CheckFailure(index, int(positions_P[widest]), figure, far, detail, mild=figure <= MILD * far)
        first = int(positions_P[np.argmax(gaps_P > ctx.bounds.gap)])
        yield _too_many(index, first, pooled(gaps_P, ctx.bounds.gap), ctx)  # guard: flips-of-a-rollout
    figures = figures_of(ctx)
    most = largest_sum(figures.tokens, ctx.bounds)
    if figures.gap_sum > most:  # guard: gap-sum
        yield CheckFailure(-1, -1, figures.gap_sum, most, "sum of the group's small gaps, nats", mild=True)
    yield _too_many(-1, -1, figures, ctx)  # guard: flips-of-a-group


def limit_of_a_token(bounds: Bounds) -> float:
    """The gap above which a single token is refused, nats. Above `Bounds.gap`, half of it, tokens are counted."""
    return FAR * bounds.gap


def figures_of(ctx: Context) -> EvidenceFigures:
    """The group's pooled figures, for the verdict."""
    return pooled(np.concatenate([gaps_of(score, ctx.bounds) for score in ctx.scores]), ctx.bounds.gap)


def gaps_of(score: PolicyScore, bounds: Bounds) -> NDArray[np.float32]:
    """A rollout's gaps, reduced where its logits are larger than those for which the bounds hold."""
    return score.gaps_P / room(score.largest_P, bounds.largest_logit)  # guard: large-logits-flip-coarsely


def _too_many(rollout: int, position: int, figures: EvidenceFigures, ctx: Context) -> CheckFailure | None:
    most = most_flipped(figures.tokens, ctx.bounds)
    if figures.flipped <= most:
        return None
    mild = figures.flipped <= MILD * most  # guard: few-flips-are-mild
    return CheckFailure(rollout, position, figures.flipped, most, "tokens that their seeds do not choose", mild)


# --- log-probs ---


class Leaning(NamedTuple):
    """Sums of a group's claimed - replayed log-probs, each cut to the bound, nats."""

    plain: float
    weighted: float
    """Times the sign of each rollout's advantage, or of each token's where steps decide it."""


def logprobs(group: Group, ctx: Context) -> CheckFailure | None:
    """Log-probs: the worker claims the log-probs that the policy gives.

    Catches log-probs that were invented, shifted, or taken from another model or temperature; also small shifts that all
    lean one way over a rollout, or over a group, plainly or against its advantages. They would distort the importance ratio
    in the loss.
    Cannot see errors below the bounds, nor any error in groups that are not audited. Where the bounds leave room to bend
    the ratio, the trainer does not use the claims at all (`train/logprobs`); elsewhere clipping limits them.
    Small shifts in every group are found over several groups (`algos/sampling_evidence`).
    Hard, but mild within ten times the bound, and always mild for sums: another machine's arithmetic exceeds a bound a
    little, never by much.
    """
    return gravest(_logprob_failures(group, ctx))


def _logprob_failures(group: Group, ctx: Context) -> Iterator[CheckFailure]:
    yield from _single_tokens(group, ctx)
    if not ctx.bounds.logprob_mean:
        return
    totals_G = _totals(group, ctx)
    for index, (total, score) in enumerate(zip(totals_G, ctx.scores, strict=True)):
        excess = lean(total, len(score.logprobs_P), ctx.bounds)
        if excess > LIMIT_NATS:  # guard: leaning-rollout
            yield CheckFailure(index, -1, excess, LIMIT_NATS, "claimed log-probs lean one way, nats over", mild=True)
    tokens = sum(len(score.logprobs_P) for score in ctx.scores)
    leaning = _leaning(totals_G, group, ctx)
    for total, how in ((leaning.plain, "one way"), (leaning.weighted, "against the advantages")):
        excess = lean(total, tokens, ctx.bounds)
        if excess > LIMIT_NATS:  # guard: leaning-group
            yield CheckFailure(-1, -1, excess, LIMIT_NATS, f"the group's log-probs lean {how}, nats over", mild=True)


def leaning_of(group: Group, ctx: Context) -> Leaning:
    """The group's sums, for the verdict."""
    return _leaning(_totals(group, ctx), group, ctx)


def _leaning(totals_G: list[float], group: Group, ctx: Context) -> Leaning:
    signs = ctx.signs_of_tokens(group)
    if signs is None:
        return Leaning(float(sum(totals_G)), float(np.dot(totals_G, ctx.signs_G(group))))
    weighted = (float(np.dot(off_P, signs_P)) for off_P, signs_P in zip(_off(group, ctx), signs, strict=True))
    return Leaning(float(sum(totals_G)), sum(weighted))  # guard: claims-against-steps


def _totals(group: Group, ctx: Context) -> list[float]:
    return [float(off_P.sum()) for off_P in _off(group, ctx)]


def _off(group: Group, ctx: Context) -> Iterator[NDArray[np.float64]]:
    """Claimed - replayed log-probs of each rollout, each cut to the bound."""
    for rollout, score in zip(group.rollouts, ctx.scores, strict=True):
        yield cut(rollout.logprobs_P().astype(np.float64) - score.logprobs_P, ctx.bounds)


def _single_tokens(group: Group, ctx: Context) -> Iterator[CheckFailure]:
    bound = ctx.bounds.logprob
    claimed_N = np.concatenate([rollout.logprobs_P() for rollout in group.rollouts]).astype(np.float64)
    off_N = np.abs(claimed_N - np.concatenate([score.logprobs_P for score in ctx.scores]))
    # guard: look-at-nan-differences
    if (off_N <= bound).all():  # rollouts are many and short: look at all of them at once
        return
    ends = np.cumsum([len(score.logprobs_P) for score in ctx.scores])
    for index, (rollout, score, off_P) in enumerate(
        zip(group.rollouts, ctx.scores, np.split(off_N, ends[:-1]), strict=True)
    ):
        off_P = off_P / room(score.largest_P, ctx.bounds.largest_logit)  # guard: large-logits-round-coarsely
        worst = int(np.argmax(off_P))
        if not off_P[worst] <= bound:  # a difference that is not a number fails too  # guard: difference-is-a-number
            figure = float(np.nan_to_num(off_P[worst], nan=1e9, posinf=1e9))
            at = int(policy_positions(rollout)[worst])
            detail = "claimed log-prob is not the policy's, nats"
            # guard: small-difference-is-mild
            yield CheckFailure(index, at, figure, bound, detail, mild=figure <= MILD * bound)


# --- activations ---

MISMATCHED = 0.15
"""Share of a chunk's values whose sign or size noise may change, or which it may move out of the largest. bfloat16
changes up to 6 %. A forger who does not know the signs gets half of them wrong."""

WRONG_HALF = 0.5
"""Share of a chunk's values with a wrong sign or size that noise never reaches."""

SPREAD = 4.0
"""The mean error of K values may exceed the bound by this fraction of it, divided by the square root of K."""


def activations(group: Group, ctx: Context) -> CheckFailure | None:
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
    if ctx.rules.proofs == "none":
        return None
    hidden = [score.hidden_PD for score in ctx.scores if score.hidden_PD is not None]
    assert len(hidden) == len(group.rollouts), "a run that asks for proofs is scored with hidden states"
    figures = compare(hidden, ctx.proof)
    if isinstance(figures, str):
        return CheckFailure(-1, -1, len(ctx.proof), 0, f"proof of activations: {figures}")
    failure = judge_activations(figures, ctx.rules.activation_error)
    if failure is None or failure.rollout < 0:
        return failure
    at = int(policy_positions(group.rollouts[failure.rollout])[failure.position])
    return failure._replace(position=at)


def judge_activations(figures: ChunkFigures, bound: float) -> CheckFailure | None:
    """What is wrong with a group's figures. `bound` is on the mean relative error; positions count policy tokens."""
    entries_C, wrong_C = figures.entries_C, figures.mismatched_C
    allowed_C = most_mismatched(figures)
    error_C, room_C, mean = _chunk_errors(figures)
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
    error_C, room_C, mean = _chunk_errors(figures)
    return max(mean, float((error_C / room_C).max()))


def _chunk_errors(figures: ChunkFigures) -> tuple[Floats, Floats, float]:
    """Mean error of each chunk, the multiple of the bound that it may reach, and the group's mean error."""
    matched_C = figures.entries_C - figures.mismatched_C
    error_C = figures.error_C / np.maximum(1, matched_C)
    room_C = 1 + SPREAD / np.sqrt(np.maximum(1, matched_C))
    return error_C, room_C, float(figures.error_C.sum() / max(1, int(matched_C.sum())))


# guard: check-sampling, check-logprobs, check-activations
AUDIT = (
    GroupCheck("sampling", "hard", sampling),
    GroupCheck("logprobs", "hard", logprobs),
    GroupCheck("activations", "hard", activations),
)
"""Checks of the groups that are drawn for audit, all from one prefill."""
