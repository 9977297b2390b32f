"""Every forged proof of activations is refused by the check meant for it, and honest proofs never are."""

import msgspec
import numpy as np
import pytest

from shoal.config import ACTIVATION_ERROR
from tests.attacks.attack_fixture import RULES, World, load_engine, make_policy
from tests.attacks.proof_forgeries import FORGERIES, Forgery, honest_proofs, with_proofs

ASKING = msgspec.structs.replace(RULES, proofs="toploc", activation_error=ACTIVATION_ERROR["float32"])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("policies")
    return World(
        honest=make_policy(root / "honest", seed=0, sharpen=40.0),
        other=make_policy(root / "other", seed=1, sharpen=40.0),
        stale=make_policy(root / "stale", seed=0, sharpen=40.0, nudge=0.01),
        rules=ASKING,
    )


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda forgery: forgery.__name__)
def test_forgery_is_refused_by_its_check_in_every_group(world, forgery: type[Forgery]):
    for verdict in world.judge(forgery().body(world)):
        assert verdict.check in forgery.caught_by, verdict
        assert verdict.outcome in ("soft", "hard") and verdict.tokens == 0
        assert np.isfinite([verdict.figure, verdict.bound]).all()


@pytest.mark.parametrize(("threads", "sharpen"), [(1, 1.0), (2, 40.0)])
def test_honest_proofs_pass_whatever_the_threads(tmp_path, threads, sharpen):
    policy = make_policy(tmp_path / "policy", seed=3, sharpen=sharpen)
    world = World(honest=policy, other=policy, stale=policy, rules=ASKING)
    body = with_proofs(world, honest_proofs(world, load_engine(policy, threads=threads)))
    verdicts = world.judge(body, engine=load_engine(policy, threads=3 - threads))
    assert {(v.outcome, v.audited) for v in verdicts} == {("accept", True)}


def test_proofs_take_at_most_8_1_bytes_a_token(world):
    proofs = honest_proofs(world)
    tokens = sum(rollout.num_policy_tokens() for group in world.honest_groups for rollout in group.rollouts)
    assert sum(map(len, proofs)) / tokens < 8.1
