"""Runs that credit turns or steps: verdicts say what each earns, the log keeps it, and signal and agreement follow it."""

import msgspec
import pytest

from shoal.ledger.batches import GroupAccepted
from shoal.ledger.errors import Refused
from shoal.ledger.verdict_majority import tally_verdicts
from shoal.protocol.algorithm_config import Composition, Steps, Turns
from shoal.protocol.messages import GroupVerdict, StepReward
from tests.ledger.ledger_fixture import World

S = StepReward
TURNS = Composition(credit=Turns(most=2))
EQUAL = (1.0,) * 4
SHIFTED = ((S(3, 1.0), S(9, 0.0)), (S(3, 0.0), S(9, 1.0))) * 2
"""Rollouts with equal rewards, earned at other turns."""
ALIKE = ((S(3, 1.0), S(9, 0.0)), (S(5, 1.0), S(7, 0.0))) * 2
WORKER = "w" * 64


def world_of(tmp_path, algorithm=TURNS, **changes):
    world = World(tmp_path, algorithm=algorithm, **changes)
    world.publish()
    world.enter(WORKER)
    return world


def accepted(world):
    return [entry.body for entry in world.audit().entries if isinstance(entry.body, GroupAccepted)]


def test_a_group_of_equal_rewards_teaches_if_its_turns_earned_them_differently(tmp_path):
    world = world_of(tmp_path)
    world.serve(WORKER, rewards=EQUAL, steps=SHIFTED)
    assert [(one.signal, one.steps) for one in accepted(world)] == [(True, SHIFTED)] * 2
    assert world.state.main.versions[0].slots[0].steps == SHIFTED
    assert world.state.influence == 2 * 10 * 0.5  # of two groups of ten tokens, each worth 0.5
    assert world.audit().findings == []


@pytest.mark.parametrize(
    ("algorithm", "signal"),
    [
        (TURNS, False),
        (Composition(credit=Steps(most=2)), True),
        (Composition(advantage="gae", credit=Turns(most=2)), True),
    ],
    ids=["turns", "steps", "critic"],
)
def test_turns_that_earned_the_same_teach_only_steps_and_critics(tmp_path, algorithm, signal):
    world = world_of(tmp_path, algorithm)
    world.serve(WORKER, rewards=EQUAL, steps=ALIKE)
    assert [one.signal for one in accepted(world)] == [signal] * 2


@pytest.mark.parametrize(
    "steps",
    [
        msgspec.UNSET,
        (),
        SHIFTED[:3],
        ((),) * 4,
        ((), *SHIFTED[1:]),
        (((S(3, 1.0), S(9, 0.5))), *SHIFTED[1:]),
        (((S(3, 1.0), S(5, 0.0), S(9, 0.0))), *SHIFTED[1:]),
        (((S(3, 1.0), S(64, 0.0))), *SHIFTED[1:]),
    ],
)
def test_a_verdict_with_steps_that_no_group_has_is_refused(tmp_path, steps):
    world = world_of(tmp_path)
    name = world.submit(WORKER, world.lease(WORKER))
    with pytest.raises(Refused, match="an accepted group "):
        world.judge(name, rewards=EQUAL, steps=steps)
    with pytest.raises(Refused, match="only an accepted group has"):
        world.judge(name, "hard", steps=SHIFTED)
    world.judge(name, rewards=EQUAL, steps=SHIFTED)
    assert world.state.submissions[name].decided


def test_a_verdict_says_steps_only_where_the_run_credits_them(tmp_path):
    world = world_of(tmp_path, Composition())
    name = world.submit(WORKER, world.lease(WORKER))
    for steps in (SHIFTED, ()):
        with pytest.raises(Refused, match="this run credits no steps"):
            world.judge(name, rewards=EQUAL, steps=steps)
    world.judge(name)
    assert [one.steps for one in accepted(world)] == [msgspec.UNSET] * 2


def weighed(*verdicts, more=False):
    return tally_verdicts({str(i): groups for i, groups in enumerate(verdicts)}, (0,), 1, more)


def test_a_validator_that_moves_reward_between_turns_is_outvoted():
    """The totals are the same, so that only the steps tell."""
    honest, moved = (
        (GroupVerdict(0, True, "accept", rewards=EQUAL, tokens=10, steps=steps),) for steps in (SHIFTED, SHIFTED[::-1])
    )
    refused = (GroupVerdict(0, True, "soft", "reward"),)
    assert weighed(refused, honest, more=True) is None
    found = weighed(refused, moved, honest)
    assert found.disputed == (0,) and not found.accepted
    found = weighed(moved, honest, honest)
    assert found.accepted == {0: honest} and found.outvoted == ("0",)
