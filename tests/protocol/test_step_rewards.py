"""Rewards of steps: how they divide a reward, what no verdict may say of them, and which tokens each is of."""

import math
from random import Random

import msgspec
import pytest

from shoal.protocol.algorithm_config import Grpo
from shoal.protocol.audit_and_pay import MAX_REWARD, influence
from shoal.protocol.constants import MAX_ROLLOUT_STEPS
from shoal.protocol.messages import BatchGroup, GroupVerdict, StepReward, make_rollout
from shoal.protocol.reward_rules import divided, largest_credits, malformed_steps, step_of_tokens

S = StepReward


def test_the_last_step_earns_what_the_others_left():
    assert divided([S(3, 0.25), S(6, 0.5), S(9, 0.0)], 1.0, 4) == (S(3, 0.25), S(6, 0.5), S(9, 0.25))
    assert divided([S(3, 0.1), S(6, 0.2), S(9, 0.3)], 0.0, 4)[-1] == S(9, -math.fsum([0.1, 0.2]))
    assert divided([S(9, 5.0)], 1.0, 4) == (S(9, 1.0),) and divided([], 1.0, 4) == ()


def test_steps_beyond_the_most_belong_to_the_last():
    steps = [S(3, 0.25), S(6, 0.5), S(9, 0.125), S(12, 0.0)]
    assert divided(steps, 1.0, 2) == (S(3, 0.25), S(12, 0.75)) and divided(steps, 1.0, 1) == (S(12, 1.0),)


GOOD = ((S(3, 0.25), S(9, 0.75)), (S(4, 0.3),), (S(5, 0.0),))


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (GOOD[:2], "has steps of 2 rollouts for 3 rewards"),
        ((GOOD[0], (), GOOD[2]), "has no steps of rollout 1"),
        (((*GOOD[0][:1], S(5, 0.0), S(9, 0.75)), *GOOD[1:]), "has 3 steps of rollout 0, limit 2"),
        (((S(3, 0.25), S(3, 0.75)), *GOOD[1:]), "outside of it, or at one token"),
        (((S(3, 0.25), S(10, 0.75)), *GOOD[1:]), "outside of it"),
        (((S(-1, 0.25), S(9, 0.75)), *GOOD[1:]), "outside of it"),
        (((S(3, 2e6), S(9, 1.0 - 2e6)), *GOOD[1:]), "gives a step of rollout 0 a reward above 1e+06 in size"),
        (((S(3, math.nan), S(9, 0.75)), *GOOD[1:]), "gives a step of rollout 0 a reward above"),
        (((S(3, 0.5), S(9, 0.75)), *GOOD[1:]), "has steps of rollout 0 that do not add up to its reward"),
        (((S(3, 0.25), S(9, math.nextafter(0.75, 1))), *GOOD[1:]), "do not add up"),
    ],
)
def test_what_no_honest_validator_says_is_named(steps, says):
    assert says in malformed_steps(steps, (1.0, 0.3, 0.0), 2, 10, MAX_REWARD)
    assert malformed_steps(GOOD, (1.0, 0.3, 0.0), 2, 10, MAX_REWARD) == ""


def test_any_numbers_are_judged_without_an_exception():
    """Validators are strangers. What passes adds up, by the rule, to a reward that was judged before."""
    rng, passed = Random(3), 0
    odd = (0.0, -0.0, 0.25, 1e-300, 1e6, -1e6, 1e308, -1e308, math.inf, -math.inf, math.nan)
    for _ in range(2000):
        numbers = [
            [rng.choice((-1, 0, 9, 10, 2**62, rng.randrange(10))) for _ in range(rng.randrange(4))] for _ in "ab"
        ]
        steps = tuple(tuple(S(end, rng.choice(odd)) for end in ends) for ends in numbers[: rng.randrange(3)])
        rewards = tuple(rng.choice(odd[:6]) for _ in range(rng.randrange(3)))
        if rng.random() < 0.5:
            steps = tuple(
                divided(one, reward, 2) if fits(one) else one for one, reward in zip(steps, rewards, strict=False)
            )
        if not malformed_steps(steps, rewards, 2, 10, MAX_REWARD):
            passed += bool(rewards)
            assert all(
                not one or math.fsum(step.reward for step in one) == r for one, r in zip(steps, rewards, strict=True)
            )
            assert math.isfinite(influence(rewards, 10, Grpo(), steps))
    assert passed > 20


def fits(steps):
    return all(abs(step.reward) <= MAX_REWARD for step in steps)


def rollout(author, starts=()):
    return make_rollout([0] * len(author), author, [-1.0] * sum(a > 0 for a in author), version=0, ending="stop",
                        starts=starts)  # fmt: skip


def test_a_token_belongs_to_the_first_step_that_ends_at_it_or_later():
    one = rollout([0, 1, 1, 1, 0, 1, 1, 0, 2, 1])
    assert step_of_tokens(one, (S(3, 0.0), S(6, 0.0), S(9, 0.0))).tolist() == [0, 0, 0, 1, 1, 2]
    assert step_of_tokens(one, (S(2, 0.0), S(9, 0.0))).tolist() == [0, 0, 1, 1, 1, 1]


def test_turns_of_several_rows_are_found_in_their_rows():
    """Two seats in turn: the first seat's second turn is in the first row, before the second seat's."""
    both = rollout([0, 1, 0, 1, 0, 1, 1, 0, 1], (4,))
    assert step_of_tokens(both, (S(1, 0.0), S(6, 0.0), S(3, 0.0), S(8, 0.0))).tolist() == [0, 2, 1, 1, 3]
    # Beyond the most, the last step takes in the rest of every row.
    assert step_of_tokens(both, (S(1, 0.0), S(8, 0.0))).tolist() == [0, 1, 1, 1, 1]
    assert step_of_tokens(both, (S(6, 0.0), S(3, 0.0))).tolist() == [1, 1, 0, 0, 1]


def test_tokens_without_steps_are_refused():
    assert step_of_tokens(rollout([0, 2]), ()).tolist() == []
    with pytest.raises(ValueError, match="no steps"):
        step_of_tokens(rollout([0, 1]), ())


def test_the_largest_credit_is_that_of_either_formula():
    """Return-to-go: 1, 0 against 1, 1 differ by 1 at the second turn, so by half from their mean."""
    assert largest_credits(((S(1, 1.0), S(3, 0.0)), (S(1, 0.0), S(3, 1.0)))) == [0.5, 0.5]
    # Process rewards: the mean step earns 0.5, and the long rollout's three last steps earn 1.5 less together.
    assert largest_credits(((S(1, 1.0),), (S(1, 1.0), S(2, 0.0), S(3, 0.0)))) == [0.5, 1.0]
    assert largest_credits(((S(1, 1.0),), (S(1, 0.0),))) == [0.5, 0.5] and largest_credits(((), ())) == [0.0, 0.0]


def test_equal_rewards_have_influence_if_their_steps_differ():
    steps = ((S(1, 1.0), S(3, 0.0)), (S(1, 0.0), S(3, 1.0)))
    assert influence((1.0, 1.0), 100, Grpo()) == 0.0 and influence((1.0, 1.0), 100, Grpo(), steps) == 50.0
    one = tuple((S(1, reward),) for reward in (0.0, 1.0))
    assert influence((0.0, 1.0), 100, Grpo(), one) == influence((0.0, 1.0), 100, Grpo())


def test_where_deviations_divide_rewards_each_step_that_follows_counts():
    steps = ((S(1, 0.01), S(3, 0.0)), (S(1, 0.0), S(3, 0.01)))
    assert influence((0.01, 0.01), 100, Grpo(advantage="mean_std"), steps) == 200.0
    same = ((S(1, 0.5), S(3, 0.5)), (S(1, 0.5), S(3, 0.5)))
    assert influence((1.0, 1.0), 100, Grpo(advantage="mean_std"), same) == 0.0


def test_a_list_of_steps_is_refused_before_it_is_read():
    """Memory is bounded by what a verdict can need."""
    for length, fits in ((MAX_ROLLOUT_STEPS, True), (MAX_ROLLOUT_STEPS + 1, False)):
        said = GroupVerdict(0, False, "accept", steps=(tuple(S(i, 0.0) for i in range(length)),))
        data = msgspec.json.encode(said)
        if fits:
            assert msgspec.json.decode(data, type=GroupVerdict) == said
        else:
            with pytest.raises(msgspec.ValidationError, match="length <= 256"):
                msgspec.json.decode(data, type=GroupVerdict)


def test_other_runs_send_no_steps():
    assert b"steps" not in msgspec.json.encode(GroupVerdict(0, False, "accept"))
    assert b"steps" not in msgspec.json.encode(BatchGroup(0, 0, "s", 0, "d", (1.0,)))
