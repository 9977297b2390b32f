"""What tokens are worth: hand-worked vines, and what takes their place."""

import numpy as np
import pytest

from shoal.protocol.algorithm_config import Composition, Vine
from shoal.protocol.messages import Group, make_rollout
from shoal.train.token_advantages import credit

VINES = Composition(credit=Vine(continuations=2, every=2, most=2))


def rollout(author):
    return make_rollout([0] * len(author), author, [-1.0] * sum(a > 0 for a in author), version=0, ending="stop")


GROUP = Group(0, 0, "e", (rollout([0, 1, 1, 1, 1, 1]), rollout([0, 1, 1, 0, 1, 2, 1])))
"""Five learned tokens with places at the third and the fifth; four of which one place is at the third."""


def test_each_step_is_worth_the_change_of_the_value_that_it_makes():
    """First rollout: the other earned 1, then values 0.75 and 0. Second: the other earned 0, then 1."""
    found = credit(GROUP, (0.0, 1.0), (1.0, 0.5, 0.0, 0.0, 1.0, 1.0), VINES)
    assert found[0].tolist() == [-0.25, -0.25, -0.75, -0.75, 0.0]
    assert found[1].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert all(A_P.dtype == np.float32 for A_P in found)


def test_the_steps_of_a_rollout_add_up_to_its_reward_less_that_of_the_other():
    rng = np.random.default_rng(0)
    for _ in range(20):
        rewards, told = rng.random(2), rng.random(6)
        first, second = credit(GROUP, rewards.tolist(), told.tolist(), VINES)
        steps = first[0] + first[2] + first[4], second[0] + second[2]
        assert np.allclose(steps, rewards - rewards[::-1], atol=1e-6)


def test_void_continuations_and_runs_without_vines_give_all_tokens_of_a_rollout_one_advantage():
    """Of void continuations the rewards less that of the other; without vines, less the mean 0.5."""
    for algorithm, size in ((VINES, 1.0), (Composition(), 0.5)):
        found = credit(GROUP, (0.0, 1.0), (), algorithm)
        assert [set(A_P.tolist()) for A_P in found] == [{-size}, {size}] and [len(A_P) for A_P in found] == [5, 4]


@pytest.mark.parametrize("num", [1, 5, 7])
def test_another_number_of_continuations_is_refused(num):
    with pytest.raises(ValueError, match="6 due"):
        credit(GROUP, (0.0, 1.0), (0.5,) * num, VINES)
