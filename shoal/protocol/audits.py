"""What all nodes must agree on about audits: which groups are audited, and what a verdict may say.

Used by validators, by auditors, and by the rules, which refuse a verdict that audits other groups. Pure.
"""

from collections.abc import Sequence

CHECKS = (
    "shape", "lease", "prompt", "environment", "reward", "ending", "complete", "sampling", "logprobs", "activations",
)  # fmt: skip
"""Checks that a verdict may name. Refusals are counted by check, so this bounds the size of answers. A name may be
added; changing or removing one breaks: replay of logs that hold it."""

MAX_REWARD = 1e6
"""Largest size of one rollout's reward. Larger ones could add up to infinity, which no log can hold."""

MAX_REASON_CHARS = 300
"""Length of what a verdict says about one group, its check and detail together: people read it in terminals."""


def influence(rewards: Sequence[float], tokens: int) -> float:
    """How far a group can move the policy: the mean |reward - group mean| of its rollouts, times its policy tokens."""
    if not rewards:
        return 0.0
    mean = sum(rewards) / len(rewards)
    return sum(abs(reward - mean) for reward in rewards) / len(rewards) * tokens


def must_audit(draw: float, rate: float, influence: float, mean_influence: float) -> bool:
    """Whether a group is audited. Influence above the run's mean raises the rate in proportion. Influence below it changes
    nothing.

    The draw, in [0, 1), was made before anyone knew the rewards. `mean_influence` is 0 before the first accepted group.
    """
    raised = influence / mean_influence if mean_influence > 0.0 else 1.0
    return draw < rate * max(1.0, raised)  # guard: influence-raises-the-rate, influence-never-lowers-the-rate
