"""Every attack of the zoo is refused by the check meant for it, and honest work never is."""

import msgspec
import pytest

from shoal.algos.sampling_evidence import EvidenceFigures, SamplingEvidence, excessive, update
from shoal.config import ACTIVATION_ERROR
from shoal.protocol.encoding import WireError, from_msgpack, to_msgpack
from shoal.protocol.messages import Submission
from tests.attacks.attack import Attack
from tests.attacks.attack_fixture import RULES, World, lease_of, load_engine, make_policy
from tests.attacks.catalogue import ATTACKS, TOLERATED, SpentTolerance

PROVEN = msgspec.structs.replace(RULES, proofs="toploc", activation_error=ACTIVATION_ERROR["float32"])


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    root = tmp_path_factory.mktemp("policies")
    return {
        "honest": make_policy(root / "honest", seed=0, sharpen=40.0),
        "other": make_policy(root / "other", seed=1, sharpen=40.0),
        "stale": make_policy(root / "stale", seed=0, sharpen=40.0, nudge=0.01),
    }


@pytest.fixture(scope="module")
def world(policies):
    return World(**policies, rules=PROVEN)


def spoilt(world: World, body: bytes) -> list[bool]:
    """For each slot, whether what was sent for it differs from what honest work would have been."""
    groups = [to_msgpack(group) for group in world.honest_groups]
    honest = list(zip(groups, world.prove(world.honest_groups), strict=True))
    try:
        said = from_msgpack(body, Submission)
    except WireError:
        return [True] * len(honest)
    if (said.run, said.lease, len(said.groups)) != ("run-1", world.lease.id, len(honest)):
        return [True] * len(honest)
    return [sent != due for sent, due in zip(zip(said.groups, said.proofs, strict=True), honest, strict=True)]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_attack_is_refused_by_its_check_and_honest_groups_beside_it_pass(world: World, attack: type[Attack]):
    body = attack().body(world)
    touched = spoilt(world, body)
    assert any(touched)
    for verdict, bad in zip(world.judge(body), touched, strict=True):
        if bad:
            assert verdict.check in attack.caught_by, verdict
            assert verdict.outcome in ("soft", "hard") and verdict.tokens == 0 and not verdict.rewards
        else:
            assert verdict.outcome == "accept", verdict


@pytest.mark.parametrize("attack", TOLERATED, ids=lambda attack: attack.__name__)
def test_an_attack_within_the_bounds_of_one_group_passes(world: World, attack: type[Attack]):
    body = attack().body(world)
    assert any(spoilt(world, body)) or attack.__name__ == "QuietTolerance"
    assert {v.outcome for v in world.judge(body)} == {"accept"}


def test_using_up_the_tolerance_of_every_group_becomes_excessive_and_honest_work_does_not(policies):
    class Spends(SpentTolerance):
        """Takes any tie: the test is about evidence, not about gain."""

        def _rewards(self, world, detours, played):
            return [2.0] * len(detours)

    world = World(**policies, rules=msgspec.structs.replace(RULES, group_size=16))
    noise = world.rules.bounds["float32/float32"]

    def judged_for_long(body):
        evidence = SamplingEvidence()
        for verdict in world.judge(body) * 40:
            assert verdict.outcome == "accept", verdict
            evidence = update(evidence, EvidenceFigures(verdict.tokens, verdict.flipped, verdict.gap_sum), noise)
        return excessive(evidence)

    assert judged_for_long(Spends().body(world))
    assert not judged_for_long(world.encode(world.honest_groups))


SLOTS = [(slot, ("wordle", "arithmetic")[slot % 2], 3 + slot // 2) for slot in range(16)]


@pytest.mark.parametrize(
    ("sharpen", "block_groups", "threads"),
    [(1.0, 16, 1), (40.0, 1, 1), (200.0, 4, 1), (200.0, 16, 2)],
)
def test_honest_work_passes_whatever_the_batch_and_the_threads(tmp_path, sharpen, block_groups, threads):
    policy = make_policy(tmp_path / "policy", seed=0, sharpen=sharpen)
    blocks = [SLOTS[i : i + block_groups] for i in range(0, 16, block_groups)]
    world = World(honest=policy, other=policy, stale=policy, lease=lease_of(blocks))
    body = world.encode(world.play(load_engine(policy, threads=threads)))
    verdicts = world.judge(body, engine=load_engine(policy, threads=3 - threads))
    assert {(v.outcome, v.audited) for v in verdicts} == {("accept", True)}
    assert sum(v.tokens for v in verdicts) > 128


def test_equal_rollouts_pass_if_the_policy_leaves_no_choice(policies, tmp_path):
    certain = make_policy(tmp_path / "certain", seed=0, sharpen=3000.0)
    world = World(**(policies | {"honest": certain}))
    alike = [group for group in world.honest_groups if len(set(group.rollouts)) == 1]
    assert alike, "a policy without entropy should repeat itself"
    assert {v.outcome for v in world.judge(world.encode(world.honest_groups))} == {"accept"}
