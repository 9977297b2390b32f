"""What `benchmarks/detection.py` counts is what the pipeline decides."""

import msgspec
import numpy as np
import pytest

from benchmarks.detect.judgement import GROUP_SIZE, look, share
from benchmarks.detect.policies import Lab, copied, lease, rules
from shoal.protocol.encoding import from_msgpack
from shoal.protocol.messages import Group, Submission
from tests.attacks.attack import Attack
from tests.attacks.catalogue import DropsBadGroups, Garbage, NanLogprobs, ReplayedSubmission, ShiftedLogprobs, Truncated
from tests.attacks.proof_forgeries import AnotherGroups, Negated
from tests.attacks.sampling_attacks import OneToken, OwnSeeds


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    policy = copied("wordle-start", tmp_path_factory.mktemp("lab"))
    return Lab(policy, policy, policy, lease(32, "test"), rules())


def test_honest_work_passes_every_check_alone(lab):
    seen = look(lab, Attack(), Attack().body(lab))
    assert seen.identical_N.all() and not seen.differs_N.any() and not seen.together_N.any()
    assert all(run.all() for run in seen.run_N.values())
    assert [verdict.outcome for verdict in seen.verdicts] == ["accept"] * 8
    assert seen.submissions() == (0, 0)


@pytest.mark.parametrize("attack", [OwnSeeds, OneToken, ShiftedLogprobs, NanLogprobs, Truncated, ReplayedSubmission,
                                    DropsBadGroups, Garbage, Negated, AnotherGroups])  # fmt: skip
def test_the_pipeline_refuses_a_group_exactly_when_a_check_alone_refuses_one_of_its_rollouts(lab, attack):
    seen = look(lab, attack(), attack().body(lab))
    alone = seen.together_N.reshape(-1, GROUP_SIZE).any(1)
    assert alone.tolist() == [verdict.outcome != "accept" for verdict in seen.verdicts]
    assert alone.any() and (seen.together_N & seen.differs_N).any()
    for verdict, refused in zip(seen.verdicts, np.arange(len(alone)) * GROUP_SIZE, strict=True):
        if verdict.check:
            assert seen.refused_N[verdict.check][refused : refused + GROUP_SIZE].any()


def test_one_bad_rollout_is_counted_as_one(lab):
    seen = look(lab, OneToken(), OneToken().body(lab))
    assert seen.identical_N.sum() == 24 and seen.differs_N.sum() == 8
    assert seen.refused_N["sampling"].sum() == 8
    assert seen.submissions() == (4, 4)


def test_a_share_has_its_wilson_interval():
    k, n, low, high = share(np.array([True] * 9 + [False]))
    assert (k, n) == (9, 10)
    assert low == pytest.approx(0.5958, abs=1e-4) and high == pytest.approx(0.9821, abs=1e-4)
    assert share(0, 300).high == pytest.approx(0.0126, abs=1e-4)


def test_no_message_of_a_worker_has_a_field_for_rewards(lab):
    """The reason why a forged reward has no row of its own but a broken schema."""
    group = from_msgpack(from_msgpack(lab.encode(lab.honest_groups), Submission).groups[0], Group)
    fields = set(msgspec.to_builtins(group, builtin_types=(bytes,))) | set(Submission.__struct_fields__)
    fields |= set(group.rollouts[0].__struct_fields__)
    assert not any("reward" in name for name in fields)
