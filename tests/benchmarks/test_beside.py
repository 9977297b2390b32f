"""Runs with something beside the policy: what is counted, what is exact, and what counts as reproduced."""

import math
import random
from itertools import islice
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from benchmarks.claims.curves import findings_beside, grid, preferred
from benchmarks.claims.curves.beside import Beside
from benchmarks.claims.curves.harness import Curve, TrainedRun, config_of, trained
from benchmarks.envs import graded_sums, liked_letters
from shoal.config import TinyPolicy
from shoal.errors import StateError
from shoal.models.random_model import make_tiny
from shoal.tree import merge

VOWELS = {
    "name": "vowels", "steps": 2, "seed": 3,
    "envs": [{"name": "benchmarks/envs/vowels.py", "args": {"shown": 4, "new": 8}}],
    "sampling": {"max_turn_tokens": 8, "max_tokens": 32},
    "rollouts": {"group_size": 4, "block_rollouts": 16, "batch_groups": 4, "max_staleness": 0},
    "train": {"lr": 1e-2, "warmup_steps": 1, "algorithm": {"name": "ppo"}}, "eval": {"episodes": 4},
}  # fmt: skip
WITH_VINE = merge(
    VOWELS, {"train": {"algorithm": {"credit": {"name": "vine", "continuations": 2, "every": 2, "most": 2}}}}
)


@pytest.fixture
def start(tmp_path):
    return tiny(tmp_path / "start", 1)


def tiny(folder, seed):
    shape = TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=16, max_positions=64)
    make_tiny(shape, folder, seed, "float32")
    return folder


def curve_of(spent, reward, probed=None, **tested):
    """A made-up curve."""
    columns = {"spent": list(spent), "reward": list(reward)} | tested
    run = {"rollouts": {"batch_groups": 5, "group_size": 2}}
    return Curve("", run, {"tokens": [1.0], "length": [2.0, 3.0]}, {}, columns, [], [], "", 1.0, probed or {})


def claim(name):
    return next(one for one in grid.CLAIMS if one.name == name)


def test_the_tokens_of_continuations_are_counted(start):
    plain, vine = trained(VOWELS, start), trained(WITH_VINE, start)
    assert vine.sampled["reward"][0] == plain.sampled["reward"][0], "the same rollouts"
    assert vine.sampled["tokens"][0] > plain.sampled["tokens"][0] == plain.tested["spent"][1] > 0
    assert vine.tested["spent"] == [0.0, *np.cumsum(vine.sampled["tokens"]).tolist()]
    assert vine.weights != plain.weights


def test_an_offline_filter_draws_from_what_it_kept_and_counts_what_it_measured(start):
    tree = VOWELS | {"envs": [{"name": "benchmarks/envs/graded_sums.py", "args": {"tasks": 2}}]}
    beside = msgspec.convert({"filtered": {"rollouts": 2, "low": 0.0, "high": 1.0}}, Beside)
    run = TrainedRun(config_of(tree, start), start, start.parent / "published", beside, None)
    assert run.drawn[0].listed == tuple(range(6)) and run.spent == run.probed["measured_tokens"][0] > 0
    beside = msgspec.convert({"filtered": {"rollouts": 2, "low": 0.9, "high": 1.0}}, Beside)
    with pytest.raises(StateError, match="0 of 6 tasks"):
        TrainedRun(config_of(tree, start), start, start.parent / "published", beside, None)


def test_a_student_that_imitates_learns_from_the_teachers_rollouts(start):
    teacher = tiny(start.parent / "teacher", 2)
    by_sft, own = trained(VOWELS, start, Beside(imitates=True), teacher), trained(VOWELS, teacher)
    assert by_sft.sampled["tokens"][0] == own.sampled["tokens"][0], "the teacher wrote them"
    assert by_sft.tested["kl_nats"][0] > 0 and by_sft.weights != trained(VOWELS, start).weights


def test_the_divergence_from_oneself_is_0(start):
    run = TrainedRun(config_of(VOWELS, start), start, start.parent / "published", Beside(), start)
    run._publish(0)
    assert run.tested["kl_nats"] == [0.0] and run.tested["forward_kl_nats"] == [0.0]


def test_no_policy_is_worth_more_than_the_best_one_and_that_one_is_worth_it():
    rng = np.random.default_rng(0)
    first_XY = rng.dirichlet(np.ones(len(liked_letters.ANSWERS)), len(liked_letters.PROMPTS)) * 0.98
    beta, rest = 0.3, 0.02
    tilted_XY = first_XY * np.exp(preferred.UTILITY_XY / beta)
    best_XY = tilted_XY / (tilted_XY.sum(1, keepdims=True) + rest * math.exp(liked_letters.WORST / beta))
    most = preferred.best(first_XY, beta)
    assert preferred.worth(best_XY, first_XY, beta).objective == pytest.approx(most, abs=1e-6)
    assert preferred.worth(first_XY, first_XY, beta).kl_nats == pytest.approx(0.0)
    for _ in range(20):
        other_XY = rng.dirichlet(np.ones(best_XY.shape[1] + 1), len(best_XY))[:, :-1]
        assert preferred.worth(other_XY, first_XY, beta).objective < most


def test_bias_and_deviation_add_up_to_the_error_and_noise_is_no_bias():
    rng = np.random.default_rng(0)
    true = rng.uniform(0, 1, 4000)
    states = {"true": true, "noisy": true + rng.normal(0, 0.3, 4000), "flat": np.full(4000, true.mean())}
    noisy, flat = (findings_beside.errors_of(states, method) for method in ("noisy", "flat"))
    for found in (noisy, flat):
        assert found["error"] ** 2 == pytest.approx(found["bias"] ** 2 + found["deviation"] ** 2)
    assert noisy["bias"] < 0.02 < 0.25 < flat["bias"] and abs(flat["mean_error"]) < 1e-9


def test_a_figure_at_a_budget_is_read_between_tests():
    curve = curve_of([0, 400, 800], [0.0, 0.4, 0.6])
    assert findings_beside.at_budget(curve, 800) == pytest.approx((0.55 + 0.6) / 2)
    assert findings_beside.at_budget(curve, 400) == pytest.approx((0.35 + 0.4) / 2)


def test_credit_counts_as_reproduced_only_if_the_seeds_agree():
    def verdict(*gains):
        critic = [curve_of([0, 100], [0.0, 0.5]) for _ in gains]
        vine = [curve_of([0, 200], [0.0, 1.0 + 2 * gain]) for gain in gains]
        found = findings_beside.credit(
            claim("credit"), {("group_mean", 0): critic, ("critic", 0): critic, ("vine", 0): vine}
        )
        assert found.figures["budget_tokens"] == 100
        assert found.figures["vine"]["continued_share"][0] == 0.75, "its rollouts have 50 tokens"
        assert found.figures["critic"]["reward_at_equal_rollouts"][0] == pytest.approx((0.25 + 0.21875) / 2, abs=1e-4)
        return found.reproduced

    assert verdict(0.1, 0.11, 0.09, 0.1, 0.12) and not verdict(0.1, 0.11, -0.2, -0.1, 0.12)


def test_values_count_as_reproduced_only_if_the_critic_is_more_biased_and_errs_more():
    rng = np.random.default_rng(1)
    true = rng.uniform(0, 1, 500)

    def verdict(critic_I, vine_I):
        said = {"true": true, "critic": critic_I, "vine": vine_I, "group_mean": np.full(500, 0.5)}
        columns = {name: column.tolist() for name, column in said.items()} | {"version": [10.0] * 500}
        curves = [curve_of([0], [0], columns)] * 5
        return findings_beside.values(claim("values"), {("critic", 0): curves}).reproduced

    continued = rng.binomial(3, true) / 3
    assert verdict(np.full(500, 0.5), true) and verdict(1 - true, continued)
    assert not verdict(true, continued) and not verdict(true + 0.1, continued)


def test_distillation_needs_both_a_lower_kl_and_a_higher_reward():
    def verdict(reward, kl):
        own = [
            curve_of([0, 100], [0, reward + 0.01 * n], kl_nats=[1.0, kl], forward_kl_nats=[1.0, 1.0]) for n in range(5)
        ]
        sft = [curve_of([0, 100], [0, 0.5], kl_nats=[1.0, 0.5], forward_kl_nats=[1.0, 1.0]) for _ in range(5)]
        return findings_beside.distillation(claim("distillation"), {("on_policy", 0): own, ("sft", 0): sft}).reproduced

    assert verdict(0.7, 0.2) and not verdict(0.7, 0.6) and not verdict(0.4, 0.2)


def test_preferences_have_a_known_truth():
    env = liked_letters.environment()
    assert env.score(env.step(env.reset("w")[0], "abc").state) == liked_letters.utility("w", "abc")
    assert liked_letters.utility("w", "abcd") == liked_letters.utility("w", "abx") == liked_letters.WORST
    assert preferred.UTILITY_XY.min() > liked_letters.WORST and preferred.UTILITY_XY.max() < env.reward_bounds[1]
    assert all(
        env.success(env.reset(x)[0]._replace(given=env.players()["right"](env.reset(x)[0], None))) for x in "wxyz"
    )


def test_pairs_are_what_the_first_policy_wrote_without_unseen_answers(start, monkeypatch):
    def wrote(answer, reward):
        tokens = [1, *map(ord, answer)]
        state = liked_letters.LikedState("w", answer)
        return SimpleNamespace(tokens=tokens, author=[0] + [1] * len(answer), reward=reward, state=state)

    worse, better, unseen = wrote("aaa", -50.0), wrote("ab", 50.0), wrote("bbb", 0.0)
    talks = [worse, better, better, worse, worse, worse, unseen, better, worse, unseen]
    monkeypatch.setattr(TrainedRun, "written", lambda run, purpose, step, groups, size: talks)
    tree = VOWELS | {"envs": [{"name": "benchmarks/envs/liked_letters.py"}]}
    pairs = list(islice(preferred._pairs(tree, start, np.array(liked_letters.ANSWERS) == "bbb"), 3))
    assert [(pair.chosen.tokens_T.tolist(), pair.rejected.tokens_T.tolist()) for pair in pairs] == [
        (better.tokens, worse.tokens)
    ] * 3
    assert preferred._unseen(1).sum() == 25 and (preferred._unseen(1) != preferred._unseen(2)).any()


def test_sums_are_graded():
    env, rng = graded_sums.environment(), random.Random(0)
    assert len({env.reset(env.task(i))[1][0]["content"] for i in range(env.num_tasks)}) == env.num_tasks == 96
    rates = dict.fromkeys(graded_sums.LEVELS, 0.0)
    for i in range(env.num_tasks):
        state, _ = env.reset(env.task(i))
        for _ in range(20):
            rates[state.problem[0]] += env.score(env.step(state, env.players()["graded"](state, rng)).state) / 640
        assert env.score(env.step(state, env.players()["right"](state, rng)).state) == 1.0
    assert rates["easy"] == pytest.approx(1.0) and rates["hard"] == 0.0 and 0.25 < rates["middle"] < 0.35
