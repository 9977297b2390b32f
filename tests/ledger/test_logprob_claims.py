"""Evidence from claimed log-probs: a worker whose claims lean one way in every group is found, an honest one never."""

import msgspec
import pytest

from shoal.protocol.messages import Bounds
from tests.ledger.ledger_fixture import started

WORKER = "a" * 64
JUDGES = ("d" * 64, "e" * 64, "f" * 64)
BOUNDS = Bounds(gap=1e-3, flipped=1e-4, mean_gap=1e-6, logprob=0.01, logprob_mean=2e-4)


def world_of(tmp_path, judges=JUDGES, bounds=BOUNDS):
    tmp_path.mkdir(exist_ok=True)
    return started(tmp_path, WORKER, judges, steps=400, max_staleness=99, bounds={"float32/float32": bounds})


def serve(world, judge, **claims):
    world.publish_if_due()
    world.serve(WORKER, by=judge, **claims)


@pytest.mark.parametrize(
    ("judges", "claims"),
    [(JUDGES, {"off_sum": -0.9}), (JUDGES[:1], {"off_weighted": 0.9})],
    ids=["plain, three judges", "weighted, one judge"],
)
def test_claims_that_lean_one_way_in_every_group_are_found(tmp_path, judges, claims):
    """By 0.9 nats in a group of ten tokens; one group alone may lean by 11.5."""
    world = world_of(tmp_path / "run", judges)
    node = world.state.members[WORKER]
    while not node.failures and len(world.state.leases) < 60:
        serve(world, judges[len(world.state.leases) % min(2, len(judges))], **claims)
    assert len(world.state.leases) < 60 and node.standing == "quarantined" and "over time" in node.last_reason
    assert node.evidence == {} and world.audit().findings == []


@pytest.mark.parametrize(
    ("bounds", "leans"),
    [(BOUNDS, 2e-3), (msgspec.structs.replace(BOUNDS, logprob_mean=0.0), 0.9)],
    ids=["honest", "bounds without a mean"],
)
def test_honest_claims_and_those_under_bounds_without_a_mean_are_no_evidence(tmp_path, bounds, leans):
    world = world_of(tmp_path / "run", bounds=bounds)
    for _ in range(20):
        serve(world, JUDGES[0], off_sum=leans)
    node = world.state.members[WORKER]
    assert node.failures == 0 and set(node.evidence[JUDGES[0]].claims) == {0.0}
