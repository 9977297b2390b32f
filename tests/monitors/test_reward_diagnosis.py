"""What is said of a run that ended without a gain: each cause alone, against made metrics."""

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct

from shoal.evaluation_files import Evaluation, why_not_comparable
from shoal.monitors.reward_diagnosis import PAGE, UNEVALUATED, LearningSetup, diagnose

SETUP = LearningSetup(preset_lr=5e-4, group_size=16, batch_groups=16, max_staleness=1)
HEALTHY = {
    "lr": 5e-4, "clip_share": 0.01, "entropy_nats": 0.6, "zero_signal_share": 0.2, "solve_rate": 0.3,
    "staleness_rollouts": {"0": 128, "1": 128}, "update_skipped": 0,
}  # fmt: skip


def run(rewards: list[float] | None = None, steps: int = 60, **changed: Any) -> list[dict[str, Any]]:
    """Metrics of a run whose reward is level, with some of the others changed: to a value, or to one for each step."""
    noise = random.Random(0)
    rewards = rewards or [0.3 + noise.uniform(-0.05, 0.05) for _ in range(steps)]
    figures = HEALTHY | changed
    return [
        {"step": i, "reward_all_mean": reward} | {k: v[i] if isinstance(v, list) else v for k, v in figures.items()}
        for i, reward in enumerate(rewards)
    ]


def heldout(mean: float, measure: str = "success") -> Evaluation:
    return Evaluation(mean, mean - 0.03, mean + 0.03, 512, measure=measure)


def test_nothing_is_said_of_a_run_whose_reward_rose() -> None:
    noise = random.Random(1)
    rising = [0.3 + 0.003 * i + noise.uniform(-0.05, 0.05) for i in range(60)]
    bad = {"lr": 1e-6, "clip_share": 0.3, "zero_signal_share": 0.9, "entropy_nats": 0.01}
    assert diagnose(run(rising, **bad), SETUP) == ()
    assert diagnose(run(rising, **bad), SETUP, heldout(0.3), heldout(0.3)) == ()
    assert diagnose(run(**bad), SETUP, heldout(0.3), heldout(0.4)) == ()
    assert diagnose(run([0.1] * 20 + [0.5] * 20), SETUP) == ()


def test_a_steady_rise_within_few_steps_is_a_rise_and_noise_is_none() -> None:
    noise, chance = random.Random(1), {}
    for steps in (8, 20, 60):
        flat = [run([noise.gauss(0.3, 0.05) for _ in range(steps)]) for _ in range(1000)]
        chance[steps] = sum(diagnose(lines, SETUP) == () for lines in flat) / len(flat)
        saturating = [0.3 + 0.2 * (1 - 0.001 ** (i / steps)) + noise.gauss(0.0, 0.02) for i in range(steps)]
        assert diagnose(run(saturating), SETUP) == ()
    assert max(chance.values()) <= 0.065, chance  # 5 %, and two standard errors of a thousand runs
    steady = [0.2 + 0.0045 * i + (0.04 if i % 4 < 2 else -0.04) for i in range(20)]
    assert diagnose(run(steady), SETUP) == (), "the means of six steps differ by less than their noise"
    hill = [0.3] * 20 + [0.9 - 0.009 * i for i in range(65)]
    assert "fell" not in diagnose(run(hill), SETUP)[0], "the end is above the start"


def test_held_out_tasks_that_were_not_evaluated_are_named_first() -> None:
    for before, after in ((None, None), (heldout(0.3), None), (None, heldout(0.3))):
        assert UNEVALUATED in diagnose(run(), SETUP, before, after)[0]
    assert UNEVALUATED not in diagnose(run(), SETUP, heldout(0.3), heldout(0.3))[0]


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert diagnose([], SETUP) == () and diagnose(run(steps=5), SETUP) == ()
    assert diagnose(run(), replace(SETUP, moving_tasks=True)) == (), "harder tasks keep the reward level"
    assert diagnose(run(), replace(SETUP, moving_tasks=True), heldout(0.3), heldout(0.3)) != ()
    assert diagnose([{"step": i, "reward_all_mean": None, "lr": None} for i in range(30)], SETUP) == ()


def test_a_run_without_a_step_is_not_blamed_on_its_batch_or_its_number_of_steps() -> None:
    few = replace(SETUP, group_size=4, batch_groups=4)
    (cause,) = diagnose([], few, heldout(0.0), heldout(0.0))[1:]
    assert "took no step" in cause and "cold start" in cause and "batch_groups" not in cause


def test_rewards_are_no_percentages() -> None:
    of_rewards, wins = heldout(-1.5, "reward"), heldout(0.29)
    assert "held-out reward -1.500 before, -1.500 after" in diagnose(run(), SETUP, of_rewards, of_rewards)[0]
    mix = (
        Evaluation(0.29, 0.26, 0.32, 512, {"a": wins, "b": wins}),
        Evaluation(0.29, 0.26, 0.32, 512, {"a": wins, "b": of_rewards}),
    )
    assert "held-out tasks 29.0% before, 29.0% after" in diagnose(run(), SETUP, mix[0], mix[0])[0]
    assert "held-out reward 0.290 before, 0.290 after" in diagnose(run(), SETUP, mix[1], mix[1])[0]


def test_a_level_run_without_a_cause_leads_to_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    said = diagnose(run(), SETUP, heldout(0.29), heldout(0.30))
    assert said[0].startswith(
        "The reward did not rise beyond chance: held-out tasks 29.0% before, 30.0% after; reward 0."
    )
    assert len(said) == 2 and "no usual cause" in said[1] and PAGE in said[1]
    assert (Path(__file__).parents[2] / PAGE).is_file()
    monkeypatch.chdir(tmp_path)  # as after `pip install`
    for line in diagnose(run(), SETUP, heldout(0.29), heldout(0.30)):
        assert PAGE not in line and "the page how-to/the-reward-does-not-rise of shoal's docs" in line


def test_small_groups_are_named_where_groups_were_flat():
    small = replace(SETUP, group_size=4)
    for solved, flat, is_named in ((0.0, 0.97, True), (0.95, 0.9, True), (0.3, 0.7, True), (0.95, 0.1, False)):
        lines = [{"reward_all_mean": 0.1, "solve_rate": solved, "zero_signal_share": flat}] * 50
        said = " ".join(diagnose(lines, small))
        assert ("rollouts.group_size" in said and "8 or more (was 4)" in said) == is_named, (solved, flat)
        assert "8 or more" not in " ".join(diagnose(lines, SETUP))


@pytest.mark.parametrize(
    ("changed", "saw", "change"),
    [
        ({"solve_rate": 0.0, "zero_signal_share": 0.97}, "solved 0.0% .* 97% of groups were flat", "cold start"),
        ({"solve_rate": 0.95, "zero_signal_share": 0.6}, "solved 95% of its rollouts from the start", "harder tasks"),
        ({"zero_signal_share": 0.7}, "70% of groups were flat", "group_size above 16"),
        ({"lr": 9e-5}, "train.lr was 9e-05, and the preset .* is 0.0005", r"train\.lr = 0\.0005"),
        ({"lr": 2e-3}, "train.lr was 0.002, and the preset", r"train\.lr = 0\.0005"),
        ({"clip_share": 0.08}, "8.0% of tokens were clipped", r"halve train\.lr"),
        ({"entropy_nats": 0.02}, "entropy was 0.020 nats a token from the start", "cold start earlier"),
        ({"entropy_nats": [0.8] * 20 + [0.1] * 40}, "entropy fell from 0.800 to 0.100", "entropy bonus"),
        ({"entropy_nats": [0.5] * 20 + [2.5] * 40}, "entropy rose from 0.500 to 2.500", r"lower train\.lr"),
        ({"staleness_rollouts": {"1": 100, "3": 100}}, "2.0 versions old", "max_staleness = 0"),
        ({"update_skipped": [0] * 30 + [1] * 30}, "30 of 60 steps were skipped", r"lower train\.lr"),
    ],
)
def test_each_cause_is_named_with_its_remedy(changed: dict[str, Any], saw: str, change: str) -> None:
    said = diagnose(run(**changed), SETUP)
    assert len(said) == 2 and re.search(f"{saw}.*: .*{change}", said[1]), said


@pytest.mark.parametrize(
    ("ending", "saw", "change"),
    [
        ("length", "a token limit ended 40%", "max_turn_tokens"),
        ("error", "environment failed in 40%", "shoal env check"),
    ],
)
def test_how_held_out_episodes_ended_is_a_cause(ending: str, saw: str, change: str) -> None:
    said = diagnose(run(), SETUP, heldout(0.3), heldout(0.3), {"environment": 60, ending: 40})
    assert len(said) == 2 and re.search(f"{saw}.*: .*{change}", said[1]), said


def test_a_token_limit_is_a_cause_without_an_evaluation() -> None:
    said = diagnose(run(overlong_share=[0.06, 0.5] * 30), SETUP)
    assert len(said) == 2 and re.search("a token limit ended 28% of rollouts: raise .*max_turn_tokens", said[1]), said
    evaluated = diagnose(run(overlong_share=0.5), SETUP, heldout(0.3), heldout(0.3), {"environment": 100})
    assert "no usual cause" in evaluated[1]


@pytest.mark.parametrize(("at_first", "after", "causes"), [
    (0.0, 0.0, ["train.lr was"]),
    (0.4, 0.0, ["train.lr was", "a token limit ended 40%"]),
    (0.0, 0.3, ["a token limit ended 40%", "train.lr was"]),
])  # fmt: skip
def test_a_limit_that_a_run_came_to_while_it_fell_is_no_cause(at_first: float, after: float, causes: list[str]) -> None:
    lines = run(lr=0.02, overlong_share=[at_first, *[0.9] * 59])
    said = diagnose(lines, SETUP, heldout(0.3), heldout(after), {"environment": 60, "length": 40})
    assert [cause in line for cause, line in zip(causes, said[1:], strict=True)] == [True] * len(causes), said


def test_the_learning_rate_is_named_as_the_run_file_says_it_and_not_of_a_warm_up() -> None:
    warm_up = run(clip_share=0.3, lr=1.2e-4)
    assert "was 0.0002)" in diagnose(warm_up, replace(SETUP, preset_lr=2e-4, lr=2e-4))[1]
    assert "train.lr was 1e-05" in diagnose(run(lr=2e-6), replace(SETUP, lr=1e-5))[1]


def test_a_rate_far_above_the_preset_is_not_to_be_halved_as_well() -> None:
    rewards = [0.2 + 0.001 * (i % 3) + 0.4 * (20 < i < 40) for i in range(60)]
    said = " ".join(diagnose(run(rewards, lr=0.03, clip_share=0.3), SETUP))
    assert "set train.lr = 0.0005" in said and "start from the checkpoint" in said and "hal" not in said


def test_an_evaluation_without_a_mean_says_nothing_of_a_gain() -> None:
    none = replace_struct(heldout(0.3), mean=None, low95=None, high95=None, faults=512)
    assert diagnose(run(steps=5), SETUP, none, heldout(0.9)) == diagnose(run(steps=5), SETUP, heldout(0.9), none) == ()


def test_an_environment_that_fails_raises_no_mean() -> None:
    """A policy that makes it fail where it would lose wins nine of the ten games that are left of twenty."""
    before, after = heldout(0.5), replace_struct(heldout(0.9), episodes=200, faults=100)
    assert diagnose(run(), SETUP, before, replace_struct(after, faults=10)) == (), "5 % are still compared"
    many = "no comparison, because 100 of 200 held-out episodes have no score, more than 5 %"
    assert many in diagnose(run(), SETUP, before, after)[0] and "90.0%" not in diagnose(run(), SETUP, before, after)[0]
    assert many in why_not_comparable(after, before) and not why_not_comparable(
        before, replace_struct(after, faults=10)
    )
    few = replace_struct(after, episodes=16)
    assert not why_not_comparable(replace_struct(few, faults=2)) and why_not_comparable(replace_struct(few, faults=3))
    part = why_not_comparable(Evaluation(0.5, 0.4, 0.6, 4000, {"easy": before, "har\x1bd": after}, faults=100))
    assert "100 of 200 held-out episodes of har\\u001bd have" in part, "of a run with several, each counts"


def test_too_few_rollouts_and_steps_are_causes() -> None:
    small = replace(SETUP, group_size=8, batch_groups=8)
    assert "8 x 8 = 64 rollouts" in diagnose(run(), small)[1] and "batch_groups to 32" in diagnose(run(), small)[1]
    assert "the run took 20 steps: raise steps" in diagnose(run(steps=20), SETUP)[1]
    drained = diagnose(run(steps=20), replace(SETUP, steps=200))[1]
    assert "20 of its 200 steps" in drained and "raise steps" not in drained


@pytest.mark.parametrize(
    ("setup", "named", "not_named"),
    [
        (SETUP, "max_staleness", "updates_per_batch"),
        (replace(SETUP, max_staleness=0), "halve train.lr", "max_staleness"),
        (replace(SETUP, max_staleness=0, updates=2), "updates_per_batch (was 2)", "max_staleness"),
    ],
)
def test_what_is_already_set_is_no_remedy_of_clipped_tokens(setup: LearningSetup, named: str, not_named: str) -> None:
    said = " ".join(diagnose(run(clip_share=0.08), setup))
    assert named in said and not_named not in said


@pytest.mark.parametrize(
    ("rewards", "after"), [(None, 0.0), ([0.3] * 10 + [0.1] * 10, 0.3), ([0.3] * 10 + [0.1] * 10, 0.0)]
)
def test_a_reward_that_fell_is_said_to_fall_and_more_steps_are_no_remedy(
    rewards: list[float] | None, after: float
) -> None:
    said = diagnose(run(rewards, steps=20), SETUP, heldout(0.3), heldout(after))
    assert "fell beyond chance" in said[0] and "raise steps" not in " ".join(said)
    assert f"train.lr = {SETUP.preset_lr:g}: halve it" in said[1], "the preset is too high, if nothing else explains it"
    for lr, blamed in ((0.0, "no usual cause"), (SETUP.preset_lr / 9, "halve it")):
        assert blamed in diagnose(run(rewards, steps=20, lr=lr), SETUP, heldout(0.3), heldout(after))[1]
    cut = diagnose(run(rewards, steps=20), SETUP, heldout(0.3), heldout(after), {"error": 9})
    assert len(cut) == 2 and "`shoal env check`" in cut[1]


def test_a_reward_that_rose_and_fell_is_a_cause() -> None:
    rewards = [0.2 + 0.001 * (i % 3) + 0.4 * (20 < i < 40) for i in range(60)]
    said = diagnose(run(rewards), SETUP)
    assert len(said) == 2 and re.search(r"rose to 0\.601 until step \d+, and fell to 0\.201: start from", said[1]), said


@pytest.mark.parametrize("steps", [12, 20, 60])
def test_noise_is_no_rise_and_fall_but_a_collapse_is_at_a_rate_that_is_not_too_low(steps: int) -> None:
    noise = random.Random(steps)

    def named(rewards: list[float], lr: float = 5e-4) -> bool:
        return "the reward rose to" in " ".join(diagnose(run(rewards, lr=lr), SETUP, heldout(0.3), heldout(0.3)))

    flat = [[noise.gauss(0.3, 0.05) for _ in range(steps)] for _ in range(300)]
    assert sum(map(named, flat)) <= 0.02 * len(flat)
    hill = [0.2 + 0.4 * max(0.0, min(i / (0.4 * steps), 3 - i / (0.25 * steps))) for i in range(steps)]
    collapse = [reward + noise.gauss(0.0, 0.02) for reward in hill]
    assert named(collapse) and not named(collapse, lr=1e-6)


def test_causes_come_in_the_order_of_the_page() -> None:
    bad = {"zero_signal_share": 0.8, "lr": 1e-5, "entropy_nats": 0.02, "staleness_rollouts": {"2": 9}}
    said = diagnose(run(steps=20, **bad), replace(SETUP, batch_groups=4))
    seen = ["flat", "train.lr was", "entropy", "versions old", "4 x 16", "took 20 steps"]
    assert len(said) == 1 + len(seen) and all(word in line for word, line in zip(seen, said[1:], strict=True))
    page = (Path(__file__).parents[2] / PAGE).read_text()
    headings = [page.index(f"\n## {number}. ") for number in range(1, 9)]
    assert headings == sorted(headings)


def test_the_last_steps_of_metrics_from_a_file_may_hold_nulls() -> None:
    lines = run(zero_signal_share=0.8, lr=None, staleness_rollouts=None, entropy_nats=None, clip_share=None)
    assert "flat" in diagnose(lines, SETUP)[1]
