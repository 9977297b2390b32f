"""Rollouts on which the environment failed have no part in what is learned, but in the divisor."""

import numpy as np
import pytest

from shoal.algos.losses import token_weights
from shoal.launch.pipeline.rollout_selection import _left
from shoal.ledger.batches import GroupAccepted
from shoal.ledger.group_advantages import advantages, advantages_by_step, teaches
from shoal.protocol.algorithm_config import Composition, Grpo, Steps, Turns, Vine
from shoal.protocol.audit_and_pay import influence
from shoal.protocol.encoding import digest, to_msgpack
from shoal.protocol.messages import BatchGroup, Faults, Group, StepReward, make_rollout
from shoal.train.batch_filter import select
from shoal.train.loss import averaged
from shoal.train.rows import rows_of_group
from shoal.train.token_advantages import credit

ALGORITHMS = [
    Grpo(), Grpo(advantage="mean_std"), Composition(advantage="rloo"), Composition(advantage="maxrl"),
    Composition(advantage="reward"), Composition(),
]  # fmt: skip
LEFT, FAULTS = (1.0, 0.0, 0.5, 0.25), (0, 3, 5)


def rollout(*authors):
    return make_rollout(
        [1] * len(authors), authors, [-1.0] * sum(map(bool, authors)), version=0, ending="environment"
    )  # fmt: skip


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@pytest.mark.parametrize("lowest", [0.0, -7.0])
def test_the_others_of_a_group_are_worth_what_they_are_without_it(algorithm, lowest):
    rewards = np.full(7, lowest)
    rewards[[1, 2, 4, 6]] = LEFT
    worth_G = advantages(rewards.tolist(), algorithm, FAULTS)
    assert worth_G[[1, 2, 4, 6]].tolist() == advantages(LEFT, algorithm).tolist()
    assert worth_G[list(FAULTS)].tolist() == [0.0] * 3
    assert influence(rewards.tolist(), 10, algorithm, faults=FAULTS) == influence(LEFT, 10, algorithm)
    assert advantages(rewards.tolist(), algorithm, (0, 1, 2, 3)).tolist() == [0.0] * 7, "fewer than half are left"
    assert influence(rewards.tolist(), 10, algorithm, faults=(0, 1, 2, 3)) == 0.0


@pytest.mark.parametrize("rule", [Turns(), Turns(discount=0.5), Steps()], ids=str)
def test_steps_of_the_others_are_worth_what_they_are_without_it(rule):
    algorithm = Composition(credit=rule)
    steps = [(StepReward(1, 1.0), StepReward(4, 0.0)), (StepReward(1, 0.0), StepReward(4, 1.0)), (StepReward(2, -9.0),)]
    found = advantages_by_step(steps, algorithm, (2,))
    alone = advantages_by_step(steps[:2], algorithm)
    assert [A_S.tolist() for A_S in found] == [*(A_S.tolist() for A_S in alone), [0.0]]
    equal = ((StepReward(4, 1.0),), (StepReward(4, 1.0),), steps[2])
    assert teaches((1.0, 1.0, -9.0), algorithm, equal) and not teaches((1.0, 1.0, -9.0), algorithm, equal, (2,))


def test_vines_take_neither_failed_rollouts_nor_failed_continuations():
    """Three rollouts of one place each, with two continuations from there."""
    algorithm = Composition(credit=Vine(continuations=2, every=2, most=1))
    group = Group(0, 0, "e", (rollout(0, 1, 1, 1),) * 3)
    whole = credit(Group(0, 0, "e", group.rollouts[:2]), (0.0, 1.0), (1.0, 1.0, 0.5, 0.5), algorithm)
    found = credit(group, (0.0, 1.0, -9.0), (1.0, -9.0, 0.5, 0.5, 3.0, 3.0), algorithm, (), (2,), (1,))
    assert [A_P.tolist() for A_P in found[:2]] == [A_P.tolist() for A_P in whole] and not found[2].any()


def batch(average, faults):
    """The rows of a step from a group of four rollouts, of one, two, three and four tokens."""
    group = Group(0, 0, "e", tuple(rollout(0, *(1,) * length) for length in (1, 2, 3, 4)))
    member = BatchGroup(0, 0, "", 0, digest(to_msgpack(group)), (1.0, 0.0, 0.5, 0.0), faults=faults)
    algorithm = Composition(average=average)
    rows = rows_of_group(member, to_msgpack(group), algorithm=algorithm, vocabulary=8, max_tokens=16)
    return averaged(select([member], [rows], algorithm=algorithm, version=0, max_staleness=0).rows, algorithm, 16)


def test_the_divisor_stays_the_size_of_the_group():
    rows = batch("rollouts", (1,))
    assert [row.id[2] for row in rows] == [0, 2, 3]
    expected = token_weights([1, 0, 3, 4], range(4), [0] * 4, average="rollouts", L=0.0)[[0, 2, 3]]
    assert [row.weight_P[0] for row in rows] == expected.astype(np.float32).tolist()
    assert [round(float(row.weight_P.sum()) * 4 / 8, 6) for row in rows] == [1.0] * 3, "a fourth of the mean each"
    assert [row.advantage_P[0] for row in rows] == advantages((1.0, 0.5, 0.0), Composition()).tolist()
    assert len(batch("constant", (1,))) == len(batch("tokens", (1,))) == 3


def test_rollouts_are_chosen_among_those_that_count():
    accepted = GroupAccepted(0, 0, "", 0, "", 10, (0.0, 1.0, 0.5), True, faults=Faults((0,)))
    assert _left(accepted) == ([1, 2], [1.0, 0.5])
