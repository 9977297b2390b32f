"""What a critic, continuations and a group's mean say of states of a corridor, beside their true values.

Called by `harness` in runs with a probe. All three speak of the same states, under the policy that wrote the rollouts, and
`benchmarks/corridor` counts what is true.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.corridor.environment import opens
from benchmarks.corridor.values import true_values
from shoal.envs.rollout import Conversation
from shoal.protocol.algorithm_config import Vine
from shoal.protocol.branching import places
from shoal.protocol.messages import POLICY, Group
from shoal.train.packing_flat import plan
from shoal.train.rows import example_row

if TYPE_CHECKING:
    from benchmarks.claims.curves.harness import TrainedRun


def errors_of(
    run: "TrainedRun", talks: Sequence[Conversation], group: Group, continued: Sequence[Conversation], vine: Vine
) -> Iterator[dict[str, float]]:
    """One row for each state of a group from which there are continuations: the true value, and those of each method."""
    letters = {letter: run.renderer.encode(letter)[0] for letter in "lr"}
    spelt = {token: letter for letter, token in letters.items()}
    opening = _opening(talks[0])
    known = true_values(
        run.model, talks[0].task, opening, letters, run.sampling.temperature, run.sampling.max_turn_tokens
    )
    rows = [example_row(talk.tokens, talk.author) for talk in talks]
    assert run.critic is not None, "only runs with a critic are probed"
    values = run.critic.values(rows, plan(rows, run.config.train.microbatch_tokens, run.config.train.packing))
    mean, rewards = float(np.mean([talk.reward for talk in talks])), iter(continued)
    for talk, rollout, value_P in zip(talks, group.rollouts, values, strict=True):
        for position in places(rollout, vine):
            walk = "".join(spelt.get(token, "?") for token in talk.tokens[len(opening) : position])
            yield {
                "step": float(len(walk)),
                "true": 1.0 if opens(talk.task, walk) else known.get(walk, 0.0),
                "critic": float(value_P[len(walk)]),
                "vine": float(np.mean([next(rewards).reward for _ in range(vine.continuations)])),
                "group_mean": mean,
            }


def _opening(talk: Conversation) -> list[int]:
    return talk.tokens[: talk.author.index(POLICY)]
