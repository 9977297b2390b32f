"""The exact half of the benchmark of the shelf: its ground is sound, its claims hold, and a wrong formula is found."""

import json
import sys

import numpy as np
import pytest

from benchmarks import shelf
from benchmarks.claims import credit, exact
from benchmarks.claims.tabular import (
    LENGTHS_R,
    ROLLOUTS,
    STATES,
    WRITTEN_RT,
    Policy,
    policy_of,
    policy_with,
    rewards_by,
)  # fmt: skip
from shoal.algos.gae import gae


def test_every_rollout_is_there_once_and_their_probabilities_add_up_to_1():
    assert len(set(ROLLOUTS)) == len(ROLLOUTS) == 31 and len(STATES) == 15 and LENGTHS_R.tolist()[:3] == [1, 2, 2]
    assert policy_of(0, scale=2.0).p_R.sum() == pytest.approx(1.0)
    groups, p_M = policy_of(0).groups(2)
    assert len(groups) == 31**2 and p_M.sum() == pytest.approx(1.0)


def test_the_gradient_of_a_mean_reward_matches_finite_differences():
    policy, rewards_R = policy_of(1), rewards_by(2)
    found = policy.gradient(rewards_R)
    for place in ((0, 2), (3, 1), (14, 0)):
        step = np.zeros_like(policy.logits_SV)
        step[place] = 1e-5
        up, down = (Policy(policy.logits_SV + sign * step).mean(rewards_R) for sign in (1, -1))
        assert (up - down) / 2e-5 == pytest.approx(found[place[0] * 3 + place[1]], abs=1e-9)


def test_a_policy_is_found_by_the_probabilities_of_its_rollouts():
    policy = policy_of(3)
    assert policy_with(policy.p_R).logp_R == pytest.approx(policy.logp_R)


def test_the_true_value_of_the_start_is_the_mean_reward():
    policy, rewards_R = policy_of(4), rewards_by(5)
    assert policy.values_S(rewards_R)[0] == pytest.approx(policy.mean(rewards_R))
    assert (policy.scores_RTP[~WRITTEN_RT] == 0).all()


@pytest.mark.parametrize("name", exact.CLAIMS)
def test_each_claim_holds_and_is_a_sentence(name):
    found = exact.CLAIMS[name]()
    assert found["holds"], found
    assert exact.said(exact.CLAIMS[name]).endswith(".")


def test_a_credit_that_is_wrong_is_found(monkeypatch):
    def wrong(values, rewards, lam):
        return gae(values, rewards, lam=0.5)

    monkeypatch.setattr(credit, "gae", wrong)
    assert not credit.critic()["holds"]


def test_the_benchmark_ends_with_a_line_of_json(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["shelf.py", "--only", "exact", "--quick"])
    monkeypatch.setattr(exact, "CLAIMS", {"turns": exact.CLAIMS["turns"]})
    assert shelf.main() == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["benchmark"] == "shelf" and told["exact"]["missed"] == [] and told["exact"]["turns"]["holds"]
    monkeypatch.setattr(sys, "argv", ["shelf.py", "--only", "demo"])
    with pytest.raises(SystemExit):
        shelf.main()
