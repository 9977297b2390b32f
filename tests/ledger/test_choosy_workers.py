"""Workers that know the rewards of what they played, and send only what they like, do not decide what a policy learns."""

from collections import Counter

import msgspec
import pytest

from shoal.ledger.constants import LAW
from tests.ledger.sim_choosy_workers import HONEST, PLANS, Plan, stage_of
from tests.nightly import first_of

HOLD, FRIENDS, STOP = PLANS[0], PLANS[-3], PLANS[-1]
QUICK = {(HOLD, 1), (PLANS[2], 1)}
"""Plans and staleness that every run of the tests looks at. `make test-slow` looks at all."""
EACH = [
    pytest.param(
        plan, staleness, id=f"{plan.name}-{staleness}", marks=() if (plan, staleness) in QUICK else pytest.mark.slow
    )
    for plan in PLANS
    for staleness in (1, 2)
]
ALLOWED = 2.0
"""Points by which the share of unwanted groups may move."""
ALONE = msgspec.structs.replace(LAW, block_workers=1)
"""A law under which each block is leased to one worker, once."""


@pytest.mark.parametrize(("plan", "staleness"), EACH)
def test_a_third_that_chooses_does_not_move_the_mix(plan, staleness):
    honest = stage_of(staleness=staleness).found().unwanted
    found = stage_of(plan=plan, staleness=staleness).found()
    assert abs(found.unwanted - honest) <= ALLOWED and abs(found.unwanted - 50.0) <= ALLOWED


@pytest.mark.parametrize("plan", first_of(HOLD, STOP), ids=lambda plan: plan.name)
def test_in_a_synchronous_run_a_third_that_chooses_changes_no_batch(plan):
    batches = [stage_of(plan=one, staleness=0, steps=20).state.main.batches for one in (HONEST, plan)]
    assert batches[0] == batches[1]


@pytest.mark.parametrize("staleness", first_of(1, 2))
def test_if_nobody_made_the_blocks_of_others_those_that_hold_would_move_the_mix(staleness):
    """So this world shows the attack."""
    found = stage_of(plan=HOLD, staleness=staleness, law=ALONE).found()
    assert found.unwanted < 50.0 - 1.75 * ALLOWED and found.void > 9.0


@pytest.mark.parametrize(
    "scene", first_of({"train_s": 60.0}, {"batch_blocks": 8, "steps": 60}, {"worker_share": 0.25}), ids=str
)
def test_neither_small_batches_nor_a_slow_trainer_nor_shares_let_them_choose(scene):
    usual = stage_of(**scene).found().unwanted
    assert abs(stage_of(plan=HOLD, **scene).found().unwanted - usual) <= ALLOWED


@pytest.mark.parametrize(("staleness", "most_hours"), first_of((1, 0.30), (0, 0.61), (2, 0.29)))
def test_an_honest_run_is_as_fast_as_if_nobody_made_the_blocks_of_others(staleness, most_hours):
    hours = [stage_of(staleness=staleness, law=law).found().hours for law in (ALONE, LAW)]
    assert hours[1] <= min(1.05 * hours[0], most_hours)


@pytest.mark.parametrize("staleness", first_of(1, 2))
def test_a_worker_of_a_quarter_of_the_usual_speed_loses_one_block_at_most_and_no_pay(staleness):
    stage = stage_of(staleness=staleness, honest=(0.25, *[1.0] * 8), choosers=0, batch_blocks=48)
    key = stage.workers[0].key
    node, ends = stage.state.members[key], Counter(x.status for x in stage.state.leases.values() if x.worker == key)
    assert ends["overtaken"] <= 1 and ends["decided"] >= 60
    assert node.credits == 10 * node.accepted and (node.lapsed, node.stale, node.refused) == (0, 0, 0)


@pytest.mark.parametrize("staleness", first_of(1, 0, 2))
@pytest.mark.parametrize("plan", [HONEST, Plan("hold, one key", "hold", drops_a_key=0)], ids=lambda plan: plan.name)
def test_a_run_goes_on_when_most_workers_vanish_with_leases_in_hand(plan, staleness):
    stage = stage_of(plan=plan, staleness=staleness, vanish=7, steps=30)
    assert stage.state.main.version == 30
    assert stage.found().hours < 3.0
