"""The settings of a model that learns beside the policy: `[train.critic]`.

Part of `sections`. What a critic goes together with is checked in `credit`.
"""

from shoal.tree import Section


class CriticConfig(Section, frozen=True):
    """The critic of runs with `train.algorithm.advantage = "gae"`: the layers of the first policy below a head that says
    what a rollout will earn. It learns in the same updates as the policy. AdamW's other settings are those of `[train]`."""

    lr: float = 1e-4
    """Its learning rate at its highest; it warms up and falls as `train.schedule` says."""
    gamma: float = 1.0
    """Discount of each further token. 1 is usual, because a rollout ends."""
    lam: float = 0.95
    """Lambda of GAE (arXiv:1506.02438). 0: a token's credit is how much the value rises with it. 1: it is the reward
    minus the value before it, whatever the critic says of later tokens."""
    clip: float = 0.2
    """How far a step may move a value and still gain by it, in units of the reward; 0: as far as it likes."""
    warmup_steps: int = 0
    """Steps at the beginning in which only the critic learns. Their versions have the first policy's weights."""
