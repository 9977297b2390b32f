"""Questions about a run's algorithm: what it needs, what it credits, and how far a lie must bend a ratio to reach a bound.

Asked by the ledger, the trainer and auditors. `ledger/algorithm` finds what a group teaches, and `train/objective` has the
loss.
"""

from typing import Literal

from shoal.protocol import compositions as c
from shoal.protocol.compositions import Algorithm

DEFAULT = "grpo"
"""The algorithm of a run file that gives arguments and no name."""


def defaults_of(name: object) -> Algorithm | None:
    """The algorithm with this name as it is if a run file overrides nothing."""
    for kind in (c.Composition, *c.NAMED):
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


def vine_of(algorithm: Algorithm) -> c.Vine | None:
    """The settings of continuations, if the algorithm learns from any."""
    return algorithm.credit if isinstance(algorithm.credit, c.Vine) else None


def step_credit_of(algorithm: Algorithm) -> c.StepCredit | None:
    """The settings of rewards for turns or steps, if the algorithm learns from any. Then verdicts and batches have them."""
    return algorithm.credit if isinstance(algorithm.credit, c.StepCredit) else None


def narrowest_bound(algorithm: Algorithm) -> float:
    """How far from 1 an importance ratio may be before any bound of the algorithm removes or cuts a gradient; 0 if a
    claimed log-prob may count without limit, so that the trainer must compute all of them itself."""
    if _counts_claims_without_limit(algorithm):  # guard: unlimited-claims-are-not-taken
        return 0.0
    found = [float("inf")]
    match algorithm.loss:
        case c.Clip(eps_low, eps_high) | c.Gspo(eps_low, eps_high):
            found += [eps_low, eps_high]
        case c.Cispo(least, most):
            found += [1 - least if least > 0 else float("inf"), most - 1]
        case c.Dppo(bound):
            found.append(bound)
        case c.Reinforce():
            pass
    for correction in algorithm.corrections:
        match correction:
            case c.SequenceMask():
                found.append(0.0)  # differences of a row add up, so no difference of a token is small
            case c.Truncate(most, level):
                found.append(most - 1 if level == "token" else 0.0)
            case c.IcePop(least, most) | c.GeometricMask(least, most):
                found += [1 - least if least > 0 else float("inf"), most - 1]
    return max(0.0, min(found))


def _counts_claims_without_limit(algorithm: Algorithm) -> bool:
    """Whether one claimed log-prob, such as -1e30 in a group that is not audited, may outweigh the rest of a batch:
    in a ratio without an upper bound, or in the entropy that is compared with a target."""
    loss, kl = algorithm.loss, algorithm.kl
    unbounded = isinstance(loss, c.Gspo | c.Dppo) or (isinstance(loss, c.Clip) and not loss.delta)
    weighted = kl.beta > 0 and kl.place == "weighted_loss"
    return algorithm.entropy_target > 0 or (algorithm.ratio_to == "behaviour" and (unbounded or weighted))
