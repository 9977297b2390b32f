"""The poisoning benchmark in short: poison is learned if nothing is checked, and refused if everything is."""

import numpy as np
import pytest

from benchmarks.poison.payloads import DTYPES, PAYLOADS, cold_start
from benchmarks.poison.run import MALICIOUS, Case, Plan, PoisonedRun
from shoal.train.rows import TrainingRow

SMALL = Plan(steps=2, seeds=1, batch_groups=10, group_size=4, episodes=8)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return cold_start(tmp_path_factory.mktemp("cold") / "start", steps=2)


@pytest.mark.parametrize("payload", [payload for payload in PAYLOADS if payload not in DTYPES])
def test_poison_is_learned_without_defences_and_refused_with_them(tmp_path, start, payload):
    open_run, guarded = (
        PoisonedRun(Case(payload, defended=defended, patient=False, seed=1), SMALL, start, tmp_path / str(defended))
        for defended in (False, True)
    )
    for run in (open_run, guarded):
        run.run()
        assert run.state.main.version == SMALL.steps
    assert open_run.num_poisoned > 0 and open_run.quarantines == 0
    assert guarded.num_poisoned == 0 and guarded.quarantines >= len(MALICIOUS)
    assert guarded.share(lambda node: node.credits) == guarded.share(lambda node: node.influence) == 0.0
    honest = [node for key, node in guarded.state.members.items() if node.role == "worker" and key not in MALICIOUS]
    assert all(node.refused == 0 and node.standing == "good" for node in honest)


def test_claims_within_the_bounds_of_bfloat16_are_found_and_are_no_denominators(tmp_path, start):
    plan = SMALL._replace(steps=6, group_size=8)
    runs = [
        PoisonedRun(
            Case("nudge", defended, patient=False, seed=1, dtype="bfloat16"), plan, start, tmp_path / str(defended)
        )
        for defended in (False, True)
    ]
    for run in runs:
        run.run()
        assert run.state.main.version == plan.steps
    open_run, guarded = runs
    assert open_run.quarantines == 0 and guarded.quarantines >= len(MALICIOUS)
    assert guarded.num_poisoned < open_run.num_poisoned
    row = TrainingRow(
        np.arange(6), np.array([3, 4]), np.array([-9.0, -9.0], np.float32), *(np.ones(2, np.float32),) * 2,
        reward=1.0, version=plan.steps,
    )  # fmt: skip
    assert open_run._denominators([row])[0] is row
    assert (guarded._denominators([row])[0].behaviour_logp_P > -9.0).all(), "not as claimed"


PAST_PROBATION = SMALL._replace(steps=12)
"""Long enough that workers leave their probation, so that some groups are not audited."""


def test_a_run_without_defences_goes_on_when_not_every_group_is_audited(tmp_path, start):
    """One payload is enough: the rules see only verdicts and draws."""
    run = PoisonedRun(Case("trigger", defended=False, patient=False, seed=1), PAST_PROBATION, start, tmp_path)
    run.run()
    assert run.state.main.version == PAST_PROBATION.steps
    rates = {submission.rate for submission in run.state.submissions.values()}
    assert min(rates) < 1.0, "every group was audited: the run is too short to show anything"
    assert run.num_poisoned > 0 and run.quarantines == 0
