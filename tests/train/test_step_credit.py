"""What tokens are worth where turns or steps have rewards of their own: by hand, and what is refused."""

import numpy as np
import pytest

from shoal.protocol.algorithm_config import Composition, Steps, Turns
from shoal.protocol.encoding import digest, to_msgpack
from shoal.protocol.messages import BatchGroup, Group, StepReward, make_rollout
from shoal.train.batch_filter import select
from shoal.train.rows import Unlearnable, bytes_of, row_of, rows_of_group
from shoal.train.token_advantages import credit, token_rewards

S = StepReward


def rollout(author, starts=()):
    return make_rollout([0] * len(author), author, [-1.0] * sum(a > 0 for a in author), version=0, ending="stop",
                        starts=starts)  # fmt: skip


GROUP = Group(0, 0, "e", (rollout([0, 1, 1, 0, 1]), rollout([0, 1, 0, 1, 1])))
STEPS = ((S(2, 1.0), S(4, 0.0)), (S(1, 0.0), S(4, 1.0)))
"""Two turns each; the first rollout earns 1 by the first turn, the other by the second."""
REWARDS = (1.0, 1.0)


def test_a_turn_is_worth_what_follows_it_less_the_groups_mean():
    """Returns: 1 and 0 for the first, 1 and 1 for the other. Means: 1 and 0.5."""
    first, second = credit(GROUP, REWARDS, (), Composition(credit=Turns()), STEPS)
    assert first.tolist() == [0.0, 0.0, -0.5] and second.tolist() == [0.0, 0.5, 0.5]
    first, second = credit(GROUP, REWARDS, (), Composition(credit=Turns(discount=0.5)), STEPS)
    assert first.tolist() == [0.25, 0.25, -0.5] and second.tolist() == [-0.25, 0.5, 0.5]
    assert first.dtype == np.float32


def test_a_step_is_worth_its_own_and_later_rewards_less_the_mean_step():
    first, second = credit(GROUP, REWARDS, (), Composition(credit=Steps()), STEPS)
    assert first.tolist() == [0.0, 0.0, -0.5] and second.tolist() == [0.0, 0.5, 0.5]
    scaled = credit(GROUP, REWARDS, (), Composition(credit=Steps(), advantage="mean_std"), STEPS)
    assert scaled[0][2] == pytest.approx(-0.5 / np.std([1, 0, 0, 1], ddof=1), rel=1e-4)


def test_one_step_a_rollout_is_worth_the_rollouts_advantage():
    one = ((S(4, 1.0),), (S(4, 0.0),))
    for asked in (Turns(), Steps()):
        found = credit(GROUP, (1.0, 0.0), (), Composition(credit=asked), one)
        assert [A_P.tolist() for A_P in found] == [[0.5] * 3, [-0.5] * 3]
        plain = credit(GROUP, (1.0, 0.0), (), Composition())
        assert all((a == b).all() for a, b in zip(found, plain, strict=True))


GAE = Composition(advantage="gae", credit=Turns())


def test_a_critic_learns_what_each_turn_earned_at_its_last_token():
    first, second = token_rewards(GROUP, REWARDS, GAE, STEPS)
    assert first.tolist() == [0.0, 1.0, 0.0] and second.tolist() == [0.0, 0.0, 1.0]
    assert token_rewards(GROUP, REWARDS, Composition(advantage="gae"), ()) is None
    assert token_rewards(GROUP, REWARDS, Composition(credit=Turns()), STEPS) is None
    assert [A_P.tolist() for A_P in credit(GROUP, REWARDS, (), GAE, STEPS)] == [[0.0] * 3] * 2


def test_what_a_turn_earns_that_is_not_learned_from_follows_the_turn_before():
    masked = Group(0, 0, "e", (rollout([0, 2, 0, 1, 0, 2, 0, 1]),))
    steps = ((S(1, 0.5), S(3, 1.0), S(5, 2.0), S(7, 4.0)),)
    assert [r_P.tolist() for r_P in token_rewards(masked, (7.5,), GAE, steps)] == [[3.0, 4.0]]


def member(data, steps, rewards=REWARDS):
    return BatchGroup(0, 0, "s", 0, digest(data), rewards, steps=steps)


def rows(algorithm, steps=STEPS, group=GROUP):
    data = to_msgpack(group)
    return rows_of_group(member(data, steps), data, algorithm=algorithm, vocabulary=8, max_tokens=16)


def test_rows_have_the_credit_of_their_turns_and_what_a_critic_needs():
    first, second = rows(Composition(credit=Turns()))
    assert first.advantage_P.tolist() == [0.0, 0.0, -0.5] and first.reward_P is None and second.reward == 1.0
    first, second = rows(GAE)
    assert second.reward_P.tolist() == [0.0, 0.0, 1.0]
    assert row_of(bytes_of(second)).reward_P.tolist() == [0.0, 0.0, 1.0]
    assert bytes_of(rows(Composition(credit=Turns()))[0]).reward_P == b""


def test_rows_of_several_seats_have_the_credit_of_their_own_turns():
    both = rollout([0, 1, 0, 1, 0, 1, 0, 1], (4,))
    steps = (S(1, 0.0), S(5, 0.0), S(3, 0.0), S(7, 1.0))
    other = (S(1, 0.0), S(5, 0.0), S(3, 1.0), S(7, 0.0))
    found = rows(Composition(credit=Turns()), (steps, other), Group(0, 0, "e", (both, both)))
    assert [row.advantage_P.tolist() for row in found] == [[0.0, 0.0], [0.0, 0.5], [0.0, 0.0], [0.0, -0.5]]


@pytest.mark.parametrize("algorithm", [Composition(credit=Turns()), GAE])
@pytest.mark.parametrize(
    "steps",
    [
        (),
        STEPS[:1],
        ((), STEPS[1]),
        ((S(2, 1e308), S(4, -1e308)), STEPS[1]),
        ((S(2, 1.0), S(5, 0.0)), STEPS[1]),
        ((S(2, 2.0), S(4, 0.0)), STEPS[1]),
    ],
)
def test_a_batch_with_other_steps_than_a_verdict_may_say_is_not_learned_from(algorithm, steps):
    """Only a host or a validator that lies causes one."""
    with pytest.raises(Unlearnable, match="step"):
        rows(algorithm, steps)


def test_the_trainer_leaves_out_what_teaches_no_turn():
    algorithm = Composition(credit=Turns())
    for steps, left_out in ((STEPS, 0), ((STEPS[0],) * 2, 1)):
        data = to_msgpack(GROUP)
        found = select([member(data, steps)], [rows(algorithm, steps)], algorithm=algorithm, version=0, max_staleness=0)
        assert found.groups_without_signal == left_out and len(found.rows) == 2 * (1 - left_out)
