"""What `benchmarks/detection.py` counts is what the pipeline decides."""

import msgspec
import numpy as np
import pytest

from benchmarks.detect.judgement import CHECKS, GROUP_SIZE, look, share
from benchmarks.detect.policies import Lab, copied, lease, rules
from benchmarks.pages.detection import tables
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


def test_tables_separate_what_checks_without_the_model_see():
    def row(attack, **checks):
        return {"attack": attack, "n": 100, "identical": 40, "checks": dict.fromkeys(CHECKS, 0) | checks, "together": 50,
                "without_proofs": 45, "differ": 60, "differ_refused": 50, "first": "sampling"}  # fmt: skip

    found = share(59, 60)._asdict()
    missed = {"attack": "seeds", "entropy": 0.2, "differ": 60, "refused": 59, "submissions": [8, 7]}
    drift = {"0": 0.0002, "1": 0.0147, "2": 0.0267, "8": 0.2102}
    report = {
        "policies": [{"target": 0.2, "entropy": 0.195, "scale": 3.0, "drift_nats": drift}],
        "rows": [row("seeds", sampling=45), row("cut", ending=100)],
        "bars": {"rollouts": found, "submissions": found, "missed": [missed]},
        "honest": [{"groups_refused": 0, "rollouts": 8064}],
        "tolerance": [{"attack": "spent", "entropy": 0.195, "rollouts": 1536, "honest_reward": 0.588, "gain": 0.00186,
                       "gain_95": 0.00206, "groups": 384, "groups_refused": 0, "groups_until_excessive": 0}],
        "large_lease": [{"blocks": 4, "caught": 2222, "n": 4000, "expected_loss_blocks": 20.4}],
    }  # fmt: skip
    text = tables(report)
    assert (
        "| seeds | 40 | 45 | 0 | 0 | 45 | **50** | 50 of 60 (" in text["matrix_20"] and "cut" not in text["matrix_20"]
    )
    assert "| cut | 40 | 0 | 0 | 0 | 0 | 0 | 100 |" in text["model_free"] and "seeds" not in text["model_free"]
    assert "| seeds | 50 % | 50 of 60 |" in text["sent"] and "| cut | 50 % |" in text["sent"]
    assert "0.20 nats" in text["sent"].splitlines()[0]
    assert "| 0.195 | 3.0 | 0.0002 | 0.0147 | 0.0267 | 0.2102 |" in text["drift"]
    assert "| rollouts | 59 of 60 (" in text["bars"] and "| 0 of 8,064 (0 to 0.05 %) | none of 4,000 |" in text["bars"]
    assert "| seeds | 0.195 | 60 | 59 | 8 | 7 |".replace("0.195", "0.200") in text["missed"]
    assert "| +0.00186 ± 0.00206 | 0 of 384 | more than 7,680 groups |" in text["tolerance"]
    assert "| 4 | 55.5 % (54.0 to 57.1 %) | 20 |" in text["lease"]


def test_no_message_of_a_worker_has_a_field_for_rewards(lab):
    """The reason why a forged reward has no row of its own but a broken schema."""
    group = from_msgpack(from_msgpack(lab.encode(lab.honest_groups), Submission).groups[0], Group)
    fields = set(msgspec.to_builtins(group, builtin_types=(bytes,))) | set(Submission.__struct_fields__)
    fields |= set(group.rollouts[0].__struct_fields__)
    assert not any("reward" in name for name in fields)
