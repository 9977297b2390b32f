"""Algorithms of a run file: losses, corrections, advantages and regularisers, and the named presets of them.

A preset is a `Composition` with other defaults: a class here, listed in `Algorithm`. A new part is its class here, with
ranges as types, and:

- a loss: in `Loss` and `narrowest_bound` here, its formula in `algos/losses.py`, its case in `policy_loss` of
  `train/loss.py`, and its row in `LOSSES` and `BY_HAND` of `tests/algos/test_policy_losses.py`;
- a correction: the same with `Correction`, `algos/corrections.py` and `tests/algos/test_corrections.py`;
- an average: `algos/losses.py` and `tests/algos/test_advantages.py`;
- advantages: `algos/advantages.py`, its test, and `ledger/group_advantages.py` (from rewards) or
  `train/token_advantages.py` (of tokens).

Parts that do not go together are refused in `config/validate_algorithm.py`, and tested in `tests/test_algorithms.py`.
`python -m tests.test_docs --write` makes the tables of docs/reference/run-file.md.
"""

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shoal.protocol.constants import MAX_ROLLOUT_STEPS
from shoal.protocol.field_types import FINITE, Count, Finite, Fraction, NonNegative, OpenShare, Positive, PositiveShare

AboveOne = Annotated[float, Meta(gt=1, le=FINITE)]
StepLimit = Annotated[int, Meta(ge=1, le=MAX_ROLLOUT_STEPS)]


class AlgorithmPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name"):
    """Base of what an algorithm is composed of."""


# --- losses ---


class Clip(AlgorithmPart, frozen=True, tag="clip"):
    """PPO's clipped objective (`algos/losses`)."""

    eps_low: OpenShare = 0.2
    """A token that is discouraged has no gradient below a ratio of 1 - eps_low."""
    eps_high: Positive = 0.2
    """A token that is encouraged has no gradient above a ratio of 1 + eps_high; DAPO's clip-higher has 0.28."""
    delta: NonNegative = 0.0
    """Upper bound of the ratio if the advantage is negative; 0: none. INTELLECT-2 has 4."""


class Gspo(AlgorithmPart, frozen=True, tag="gspo"):
    """The clipped objective with one ratio for each row (`algos/losses`)."""

    eps_low: OpenShare = 3e-4
    """Range of the row's ratio below 1."""
    eps_high: Positive = 4e-4
    """Range of the row's ratio above 1."""
    by_token: bool = False
    """Whether tokens of a row may have different advantages (GSPO-token)."""


class Cispo(AlgorithmPart, frozen=True, tag="cispo"):
    """REINFORCE with a bounded importance weight (`algos/losses`)."""

    least: Fraction = 0.0
    """Smallest weight."""
    most: AboveOne = 5.0
    """Largest weight."""


class Dppo(AlgorithmPart, frozen=True, tag="dppo"):
    """The policy gradient without tokens whose probability has moved far (`algos/losses`)."""

    bound: OpenShare = 0.2
    """How far a token's probability may move in the direction of its advantage and still have a gradient."""


class Reinforce(AlgorithmPart, frozen=True, tag="reinforce"):
    """The plain policy gradient, without a ratio (`algos/losses`)."""


Loss = Clip | Gspo | Cispo | Dppo | Reinforce
"""What a token's term of the loss is."""


# --- corrections ---


class Truncate(AlgorithmPart, frozen=True, tag="truncate"):
    """Multiply terms by an importance weight with an upper bound (`algos/corrections`)."""

    most: Annotated[float, Meta(ge=1, le=FINITE)] = 2.0
    """Largest weight."""
    level: Literal["token", "row"] = "token"
    """Whether each token has a weight of its own, or the product over its row."""


class IcePop(AlgorithmPart, frozen=True, tag="icepop"):
    """Multiply terms by an importance weight, and drop tokens whose weight leaves a band (`algos/corrections`)."""

    least: Fraction = 0.5
    """Smallest weight."""
    most: AboveOne = 5.0
    """Largest weight."""


class SequenceMask(AlgorithmPart, frozen=True, tag="sequence_mask"):
    """Drop rows whose importance weight, the product over tokens, leaves a band (`algos/corrections`)."""

    least: Fraction = 0.0
    """Smallest product."""
    most: AboveOne = 3.0
    """Largest product."""


class GeometricMask(AlgorithmPart, frozen=True, tag="geometric_mask"):
    """Drop rows whose mean importance weight, the geometric mean over tokens, leaves a band (`algos/corrections`)."""

    least: Fraction = 0.99
    """Smallest mean."""
    most: AboveOne = 1.01
    """Largest mean."""


Correction = Truncate | IcePop | SequenceMask | GeometricMask
"""What is done about tokens that another policy sampled: a rounded one, one of an older version, or another arithmetic."""


# --- regularisers ---


class Kl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A penalty on the KL divergence from the run's first policy, which the trainer keeps (`algos/regularisers`)."""

    beta: NonNegative = 0.0
    """Weight of the penalty; 0: none, and no reference is kept."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """What is computed for each token. k1: the log-ratio. k2: half its square. k3: GRPO's."""
    place: Literal["loss", "weighted_loss", "advantage"] = "loss"
    """Where it counts. loss: added to each token's term. weighted_loss: the same, times the importance ratio. advantage:
    each token's advantage is lower by beta times the sum of k1 from it to the end of its row."""


# --- credit ---


class Vine(AlgorithmPart, frozen=True, tag="vine"):
    """VinePPO's credit: workers continue accepted rollouts from places within them, and the mean reward
    of the continuations is the value of the place."""

    continuations: Count = 4
    """Continuations from each place."""
    every: Count = 8
    """Policy tokens between two places of a rollout; more if there would be more than `most`."""
    most: Count = 4
    """Places of one rollout, at most."""


class Turns(AlgorithmPart, frozen=True, tag="turns"):
    """Return-to-go over turns (`algos/advantages`): a turn is worth what it and later turns earn, less the group's
    mean at the same turn."""

    discount: PositiveShare = 1.0
    """What a reward counts one turn earlier; 1: in full."""
    most: StepLimit = 16
    """Turns of one rollout with rewards of their own, at most; the last of them takes in all that follow."""


class Steps(AlgorithmPart, frozen=True, tag="steps"):
    """Process rewards (`algos/advantages`): a step is worth what it and later steps earn, each less the mean over all
    steps of the group. The environment marks steps within a turn; a turn without marks is one step."""

    most: StepLimit = 16
    """Steps of one rollout with rewards of their own, at most; the last of them takes in all that follow."""


StepCredit = Turns | Steps
"""What gives parts of a rollout advantages by rewards of their own, which validators recompute."""


# --- algorithms ---

Advantage = Literal["mean", "mean_std", "rloo", "maxrl", "reward", "gae", "teacher", "reward_model"]
Average = Literal["tokens", "rollouts", "prompts", "constant"]
Denominator = Literal["behaviour", "old"]


class Composition(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="composition"):
    """An algorithm of parts. The named ones below have these keys, too, with other defaults."""

    loss: Loss = Clip()
    """The term of each token."""
    advantage: Advantage = "mean"
    """What a rollout is worth. mean: its reward minus the group's mean. mean_std: that divided by the group's standard
    deviation. rloo: its reward minus the mean of the others. maxrl: its reward minus the mean, divided by the mean. reward:
    its reward. gae: for each token, by the trainer's critic (`train.critic`). teacher: each token's log-prob under
    `train.teacher` minus that under the policy. reward_model: its score by `train.reward_model` minus the group's mean."""
    batch_std: bool = False
    """Divide advantages by their standard deviation over the batch: over its tokens, if these have different ones."""
    average: Average = "tokens"
    """What terms are averaged over. tokens: all policy tokens of the batch. rollouts: the mean of each rollout. prompts:
    the mean over the tokens of each group. constant: the sum of each rollout, divided by `divisor_tokens`."""
    divisor_tokens: NonNegative = 0.0
    """What the sum of a rollout is divided by if average is constant; 0: the most tokens that a rollout may have."""
    ratio_to: Denominator = "behaviour"
    """Denominator of the ratio. behaviour: the policy that sampled. old: the trainer's policy at the start of the step,
    whose log-probs it computes itself."""
    corrections: tuple[Correction, ...] = ()
    """Weights and masks from the trainer's policy at the start of the step and the one that sampled; all multiply."""
    mask_overlong: bool = False
    """Learn nothing from rollouts that a token limit ended: their reward says little about what they would have been. They
    still count in the mean and deviation of rewards, and in the divisor of the average over rollouts or by a constant."""
    entropy_bonus: Finite = 0.0
    """Weight of the entropy of tokens, nats, averaged as `average` says: only with tokens is that their mean."""
    entropy_target: NonNegative = 0.0
    """Entropy a token, nats, above which the bonus is left out; at half of it, the bonus has all of its weight
    (`algos/regularisers`). 0: it always has."""
    squared_ratio: NonNegative = 0.0
    """Weight of the squared log-ratio to the policy that sampled (`algos/regularisers`)."""
    kl: Kl = Kl()
    """The penalty on leaving the first policy."""
    credit: Vine | Turns | Steps | UnsetType = UNSET
    """How tokens of one rollout differ in what they are worth. Left out: they do not, unless `advantage` says so."""


class Grpo(Composition, frozen=True, tag="grpo"):
    """GRPO with clipping on both sides (INTELLECT-2, arXiv:2505.07291), the default. In a run file, `epsilon` is short for
    `loss.eps_low` and `loss.eps_high`, and `delta` for `loss.delta`. If `policy.dtype` is int8, it has `ratio_to = "old"`
    and `corrections = [{name = "truncate"}]`, unless one of the two is given."""

    loss: Loss = Clip(delta=4.0)


class Ppo(Composition, frozen=True, tag="ppo"):
    """PPO's clip around the policy at the start of the step (arXiv:1707.06347), with the group's mean for a critic, unless
    `advantage = "gae"` asks for one."""

    ratio_to: Denominator = "old"


class Dapo(Composition, frozen=True, tag="dapo"):
    """DAPO (arXiv:2503.14476): clip-higher and the mean over tokens. Groups without signal are refilled in every run; a
    soft penalty on length belongs to the environment's reward."""

    loss: Loss = Clip(eps_high=0.28)
    advantage: Advantage = "mean_std"


class DrGrpo(Composition, frozen=True, tag="dr_grpo"):
    """Dr.GRPO (arXiv:2503.20783): no deviation, and a constant divisor."""

    average: Average = "constant"


class GspoNamed(Composition, frozen=True, tag="gspo"):
    """GSPO (arXiv:2507.18071)."""

    loss: Loss = Gspo()
    advantage: Advantage = "mean_std"
    average: Average = "rollouts"


class CispoNamed(Composition, frozen=True, tag="cispo"):
    """CISPO (MiniMax-M1, arXiv:2506.13585)."""

    loss: Loss = Cispo()
    advantage: Advantage = "mean_std"


class Rloo(Composition, frozen=True, tag="rloo"):
    """RLOO (arXiv:2402.14740): REINFORCE with the mean of the others as baseline. The weights correct for staleness."""

    loss: Loss = Reinforce()
    advantage: Advantage = "rloo"
    average: Average = "constant"
    corrections: tuple[Correction, ...] = (Truncate(),)


class MaxRl(Composition, frozen=True, tag="maxrl"):
    """MaxRL (arXiv:2602.02710): REINFORCE towards the log-likelihood of success. The weights correct for staleness."""

    loss: Loss = Reinforce()
    advantage: Advantage = "maxrl"
    average: Average = "constant"
    corrections: tuple[Correction, ...] = (Truncate(),)


class ScaleRl(Composition, frozen=True, tag="scalerl"):
    """ScaleRL (arXiv:2510.13786): CISPO, the mean over prompts, and the deviation of the batch."""

    loss: Loss = Cispo()
    batch_std: bool = True
    average: Average = "prompts"


class PrimeRl(Composition, frozen=True, tag="prime_rl"):
    """The default of prime-rl in August 2026: DPPO's mask (arXiv:2602.04879) and a squared log-ratio."""

    loss: Loss = Dppo()
    squared_ratio: NonNegative = 1e-3


class ReinforceNamed(Composition, frozen=True, tag="reinforce"):
    """REINFORCE (Williams 1992) with the group's mean as baseline. The weights correct for staleness."""

    loss: Loss = Reinforce()
    average: Average = "constant"
    corrections: tuple[Correction, ...] = (Truncate(),)


class ReinforcePlusPlus(Composition, frozen=True, tag="reinforce_plus_plus"):
    """REINFORCE++ with a baseline (arXiv:2501.03262), its form for several rollouts of a task: PPO's clip, the group's mean
    and the deviation of the batch. Its KL penalty is `kl` with the estimator k2."""

    batch_std: bool = True
    ratio_to: Denominator = "old"


class DecoupledPpo(Composition, frozen=True, tag="decoupled_ppo"):
    """Decoupled PPO (arXiv:2110.00641; AReaL, arXiv:2505.24298): the clip is around the policy at the start of the step,
    and weights between it and the one that sampled correct for staleness."""

    ratio_to: Denominator = "old"
    corrections: tuple[Correction, ...] = (Truncate(most=5.0),)


Algorithm = (
    Grpo | Composition | Ppo | Dapo | DrGrpo | GspoNamed | CispoNamed | Rloo | MaxRl | ScaleRl | PrimeRl | ReinforceNamed
    | ReinforcePlusPlus | DecoupledPpo
)  # fmt: skip
"""What a run names."""

NAMED = tuple(kind for kind in get_args(Algorithm) if kind is not Composition)
"""The named compositions."""


# --- what an algorithm needs and credits, and how far a lie must bend a ratio to reach a bound ---


DEFAULT = "grpo"
"""The algorithm of a run file that gives arguments and no name."""


def defaults_of(name: object) -> Algorithm | None:
    """The algorithm with this name as it is if a run file overrides nothing."""
    for kind in get_args(Algorithm):
        if kind.__struct_config__.tag == name:
            return kind()
    return None


def needs_reference(algorithm: Algorithm) -> bool:
    """Whether the trainer must keep the run's first policy."""
    return algorithm.kl.beta > 0


def needs_old(algorithm: Algorithm) -> bool:
    """Whether the loss needs log-probs of the policy at the start of the step."""
    in_advantage = algorithm.kl.beta > 0 and algorithm.kl.place == "advantage"
    return algorithm.ratio_to == "old" or bool(algorithm.corrections) or in_advantage


def needs_critic(algorithm: Algorithm) -> bool:
    """Whether a critic of the trainer's decides what tokens are worth."""
    return algorithm.advantage == "gae"


def credits_tokens(algorithm: Algorithm) -> bool:
    """Whether the tokens of a rollout may have different advantages, before any penalty."""
    return bool(algorithm.credit) or needs_critic(algorithm) or judge_named(algorithm) == "teacher"


def judge_named(algorithm: Algorithm) -> Literal["", "teacher", "reward_model"]:
    """The key of `[train]` with the frozen model that decides what rollouts are worth; empty if none does."""
    return algorithm.advantage if algorithm.advantage in ("teacher", "reward_model") else ""


def judged_by_trainer(algorithm: Algorithm) -> bool:
    """Whether a model of the trainer's decides what rollouts are worth, and not their rewards alone."""
    return needs_critic(algorithm) or bool(judge_named(algorithm))


def vine_of(algorithm: Algorithm) -> Vine | None:
    """The settings of continuations, if the algorithm learns from any."""
    return algorithm.credit if isinstance(algorithm.credit, Vine) else None


def step_credit_of(algorithm: Algorithm) -> StepCredit | None:
    """The settings of rewards for turns or steps, if the algorithm learns from any. Then verdicts and batches have them."""
    return algorithm.credit if isinstance(algorithm.credit, StepCredit) else None


def narrowest_bound(algorithm: Algorithm) -> float:
    """How far from 1 an importance ratio may be before any bound of the algorithm removes or cuts a gradient; 0 if a
    claimed log-prob may count without limit, so that the trainer must compute all of them itself."""
    if _counts_claims_without_limit(algorithm):  # guard: unlimited-claims-are-not-taken
        return 0.0
    found = [float("inf")]
    match algorithm.loss:
        case Clip(eps_low, eps_high) | Gspo(eps_low, eps_high):
            found += [eps_low, eps_high]
        case Cispo(least, most):
            found += [1 - least if least > 0 else float("inf"), most - 1]
        case Dppo(bound):
            found.append(bound)
        case Reinforce():
            pass
    for correction in algorithm.corrections:
        match correction:
            case SequenceMask():
                found.append(0.0)  # differences of a row add up, so no difference of a token is small
            case Truncate(most, level):
                found.append(most - 1 if level == "token" else 0.0)
            case IcePop(least, most) | GeometricMask(least, most):
                found += [1 - least if least > 0 else float("inf"), most - 1]
    return max(0.0, min(found))


def _counts_claims_without_limit(algorithm: Algorithm) -> bool:
    """Whether one claimed log-prob, such as -1e30 in a group that is not audited, may outweigh the rest of a batch:
    in a ratio without an upper bound, or in the entropy that is compared with a target."""
    loss, kl = algorithm.loss, algorithm.kl
    unbounded = isinstance(loss, Gspo | Dppo) or (isinstance(loss, Clip) and not loss.delta)
    weighted = kl.beta > 0 and kl.place == "weighted_loss"
    return algorithm.entropy_target > 0 or (algorithm.ratio_to == "behaviour" and (unbounded or weighted))
