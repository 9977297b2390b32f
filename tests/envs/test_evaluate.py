"""Evaluation: held-out tasks only, intervals by hand, figures, repeatability, transcripts safe to print."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from shoal.chat.renderer import Renderer
from shoal.config import EnvConfig
from shoal.env import Message, Step
from shoal.envs.builtin import arithmetic, wordle
from shoal.envs.evaluate import as_text, evaluate, interval, mixed
from shoal.envs.interface import is_decided
from shoal.envs.isolated.connection import OWN_LIMITS
from shoal.envs.isolated.environment import in_child
from shoal.envs.load import load_env
from shoal.envs.own_env import OwnEnv
from shoal.envs.settings_wrapper import with_settings
from shoal.errors import ConfigError, ShoalError
from shoal.evaluation_files import Evaluation, Transcript
from shoal.jobs.evaluate import in_words
from shoal.jobs.solve_rates import TaskRates
from shoal.protocol.messages import Sampling
from shoal.protocol.task_draws import TaskList
from shoal.runs.rollout_samples import sample_of
from tests.envs.plain import Plain


class Ask(Plain):
    """No held-out tasks, no success: half a point for an answer."""

    name = "ask"
    num_tasks = 3
    reward_bounds = (-1.0, 1.0)

    def reset(self, task: int) -> tuple[Any, list[Message]]:
        return (task, ""), [{"role": "user", "content": "?"}]

    def step(self, state: Any, action: str) -> Step:
        if action == "raise":
            raise ValueError("asked to")
        return Step((state[0], action), None, True)

    def score(self, state: Any) -> float:
        return 0.5 * (state[1] == "yes")


def test_wilson_interval_equals_the_numbers_worked_by_hand() -> None:
    found = interval([1.0] * 8 + [0.0] * 2, (0.0, 1.0))
    assert (found.mean, round(found.low95, 4), round(found.high95, 4)) == (0.8, 0.4902, 0.9433)
    assert interval([0.0] * 10, (0.0, 1.0)).low95 == 0.0
    assert round(interval([0.0] * 10, (0.0, 1.0)).high95, 4) == 0.2775


def test_normal_interval_equals_hand_worked_numbers_and_stays_within_the_reward_bounds() -> None:
    found = interval([0.2, 0.4, 0.6], (0.0, 1.0))  # sd 0.2, standard error 0.11547
    assert (round(found.mean, 6), round(found.low95, 4), round(found.high95, 4)) == (0.4, 0.1737, 0.6263)
    assert interval([0.9, 0.1], (0.0, 1.0)).high95 == 1.0
    single = interval([0.3], (-1.0, 2.0))
    assert (single.low95, single.high95) == (-1.0, 2.0)


def test_only_heldout_tasks_are_played_one_after_another(random_engine, renderer, sampling) -> None:
    env = wordle.environment(num_words=32, heldout=5)
    played: Counter[str] = Counter()

    class Watched(wordle.Wordle):
        def reset(self, task: str) -> Any:
            played[task] += 1
            return super().reset(task)

    evaluate(random_engine(), renderer, Watched(env.args), 13, 0, sampling)
    assert played == {env.task(i, heldout=True): 3 if i < 3 else 2 for i in range(5)}


def test_the_headline_is_the_success_rate_if_the_environment_has_one(answering_engine, renderer, sampling) -> None:
    env = arithmetic.environment(heldout=100)
    solver = answering_engine(lambda text: str(arithmetic.solve(text.rstrip("="))))
    found = evaluate(solver, renderer, env, 150, 0, sampling)
    assert (found.mean, found.measure, found.tasks, found.episodes) == (1.0, "success", "heldout", 150)
    assert found.success is not None and found.low95 == found.success.low95 == pytest.approx(0.975, abs=1e-3)
    assert found.endings == {"environment": 150}
    nearly = evaluate(answering_engine(lambda text: "0"), renderer, env, 100, 0, sampling)
    assert nearly.mean < 0.1 < nearly.reward.mean


@pytest.mark.parametrize("passed_on_by", [lambda env: with_settings(env, EnvConfig("a", system="x")), OwnEnv])
def test_the_headline_is_the_success_rate_also_through_what_passes_an_environment_on(
    answering_engine, renderer, sampling, passed_on_by
) -> None:
    """From Python 3.12 on, `isinstance` of a protocol does not see what is passed on."""
    env = passed_on_by(arithmetic.environment(heldout=100))
    assert is_decided(env) and not is_decided(passed_on_by(Ask()))
    found = evaluate(answering_engine(lambda text: "0"), renderer, env, 50, 0, sampling)
    assert found.measure == "success" and found.mean < 0.1 < found.reward.mean
    judged = evaluate(answering_engine(lambda text: "0"), renderer, env, 50, 0, sampling, judge=env).judge
    assert judged is not None and judged.mean < 0.1


def test_the_headline_is_else_the_reward_and_training_tasks_replace_missing_heldout_ones(
    answering_engine, renderer, sampling
):
    found = evaluate(answering_engine(lambda text: "yes"), renderer, Ask(), 10, 0, sampling)
    assert (found.mean, found.measure, found.tasks, found.success) == (0.5, "reward", "training", None)


def test_same_seed_gives_the_same_figures_and_another_seed_others(random_engine, renderer, sampling) -> None:
    env = wordle.environment(num_words=32, heldout=8)
    runs = [evaluate(random_engine(env.words), renderer, env, 40, seed, sampling, samples=40) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_an_environment_that_raises_is_counted_and_named(answering_engine, renderer, sampling) -> None:
    found = evaluate(answering_engine(lambda text: "raise"), renderer, Ask(), 4, 0, sampling)
    assert found.endings == {"error": 4} and found.faults == 4
    assert (found.mean, found.low95, found.high95, found.reward) == (None,) * 4, "no mean, not 0"
    assert "test_evaluate.py line" in found.fault and "ValueError: asked to" in found.fault
    assert found.solve_rates == ()  # a task that always fails is no hard task
    told = as_text(found.transcripts[0])
    assert "no score" in told and "ValueError: asked to" in told
    assert mixed({"a": found}, [1.0]).mean is None


def test_an_episode_on_which_the_environment_failed_has_no_part_in_the_mean(
    answering_engine, renderer, sampling
) -> None:
    class Odd(Ask):
        def step(self, state: Any, action: str) -> Step:
            return super().step(state, "raise" if state[0] == 1 else action)

    yes = answering_engine(lambda text: "yes")
    found, whole = (evaluate(yes, renderer, env, 6, 0, sampling, samples=6, judge=env) for env in (Odd(), Ask()))
    assert (found.mean, found.faults, found.episodes, found.endings) == (0.5, 2, 6, {"environment": 4, "error": 2})
    assert found.judge is not None and found.judge.mean == 0.5
    assert [one.score for one in found.transcripts] == [0.5, None, 0.5] * 2 and whole.faults == 0
    none = msgspec.structs.replace(found, mean=None, low95=None, high95=None)
    both = mixed({"odd": found, "none": none}, [1.0, 9.0])
    assert (both.mean, both.faults) == (None, 4), "an environment that breaks raises no mean"
    assert mixed({"odd": found, "none": none}, [1.0, 0.0]).mean == 0.5
    assert list(both.as_file()) == ["mean", "low95", "high95", "episodes", "envs", "judge", "faults"]
    assert not {"envs", "name", "version"} & both.as_file()["envs"]["odd"].keys()
    read = msgspec.json.decode(msgspec.json.encode(both.as_file()), type=Evaluation)
    assert (read.faults, read.envs["none"].mean) == (4, None)
    assert "0.500 (95 % interval" in in_words(found, "odd") and "failed on 2 episodes, which have no score" in in_words(
        found, "odd"
    )


KILLER = """
import os, time
class Killer:
    name, num_tasks, num_heldout, reward_bounds = "killer", 1, 5, (0.0, 1.0)
    def task(self, index, heldout=False):
        if index == 4: raise KeyError("lost")
        return index
    def reset(self, task):
        if task == 3: raise ValueError("no such board")
        return task, [{"role": "user", "content": "?"}]
    def step(self, state, action):
        if state == 1: os.kill(os.getpid(), 9)
        if state == 2: time.sleep(60)
        return state, None, True
    def score(self, state): return 1.0
environment = Killer
"""


def test_a_heldout_task_that_hangs_or_ends_its_process_fails_alone(
    answering_engine, renderer, sampling, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("shoal.envs.isolated.environment.OWN_LIMITS", replace(OWN_LIMITS, wall_s=0.3))
    (tmp_path / "killer.py").write_text(KILLER)
    env = load_env(str(tmp_path / "killer.py"), {}, own=in_child)
    found = evaluate(answering_engine(lambda text: "yes"), renderer, env, 10, 0, sampling, samples=5)
    assert (found.mean, found.episodes, found.faults) == (1.0, 10, 8)
    said = [one.fault for one in found.transcripts]
    assert said[0] == "" and "was ended by" in said[1] and "took longer than" in said[2]
    assert "no such board" in said[3] and "KeyError" in said[4]
    assert [one.task for one in found.transcripts] == ["0", "1", "2", "3", "held-out task 4"]


def test_a_heldout_prompt_without_room_for_a_turn_is_no_lost_episode(answering_engine, renderer) -> None:
    class Long(Ask):
        def reset(self, task: int) -> tuple[Any, list[Message]]:
            return (task, ""), [{"role": "user", "content": "?" * (200 if task == 1 else 1)}]

    for rows in (1, 6):
        found = evaluate(answering_engine(lambda text: "yes"), renderer, Long(), 6, 0, Sampling(1.0, 16, 64), rows=rows)
        assert (found.mean, found.episodes, found.faults) == (0.5, 6, 2)
    assert found.transcripts[1].score is None and "sampling.max_tokens = 64" in found.transcripts[1].fault


def test_a_task_on_which_the_environment_always_fails_is_in_no_band_of_solve_rates() -> None:
    found = TaskRates([0.0, math.nan, 0.5], 9, TaskList("00" * 32, {}, 3, (0, 1, 2)))
    assert found.between(0.0, 1.0).tasks == (0, 2) and found.figures() == {
        "measured": 3, "rate": 0.25, "never": 1, "always": 0,
    }  # fmt: skip


def test_an_impossible_evaluation_is_refused_in_one_line(random_engine, renderer: Renderer, sampling) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        evaluate(random_engine(), renderer, Ask(), 0, 0, sampling)
    with pytest.raises(ShoalError, match=r"sampling\.max_tokens = 3 leaves no room"):
        evaluate(random_engine(), renderer, Ask(), 2, 0, Sampling(1.0, 3, 3))

    class Never(Ask):
        def task(self, index: int, heldout: bool = False) -> int:
            raise IndexError(index)

    with pytest.raises(ShoalError, match=r"cannot make task 0: .*IndexError: 0"):
        evaluate(random_engine(), renderer, Never(), 3, 0, sampling)


def test_mix_has_the_weighted_mean_and_an_interval_worked_by_hand(answering_engine, renderer, sampling) -> None:
    found = evaluate(answering_engine(lambda text: "yes"), renderer, Ask(), 2, 0, sampling)
    easy = msgspec.structs.replace(found, mean=0.8, low95=0.7, high95=0.85)
    hard = msgspec.structs.replace(found, mean=0.2, low95=0.1, high95=0.4, episodes=3)
    both = mixed({"easy": easy, "hard": hard}, [3.0, 1.0])
    # Mean 3/4 0.8 + 1/4 0.2; below 0.075 and 0.025, above 0.0375 and 0.05, each added by squares.
    assert (both.mean, both.episodes, both.envs) == (pytest.approx(0.65), 5, {"easy": easy, "hard": hard})
    assert (both.low95, both.high95) == (pytest.approx(0.65 - 0.0790569), pytest.approx(0.65 + 0.0625))
    alone = mixed({"easy": easy}, [2.0])
    assert (alone.mean, alone.low95, alone.high95) == pytest.approx((0.8, 0.7, 0.85))


def test_progress_is_reported_after_each_batch(answering_engine: Callable[..., Any], renderer, sampling) -> None:
    told: list[int] = []
    evaluate(answering_engine(lambda text: "yes"), renderer, Ask(), 300, 0, sampling, progress=told.append)
    assert told == [128, 256, 300]


def test_an_assistants_turn_in_the_opening_is_not_shown_as_the_policys(answering_engine, renderer, sampling) -> None:
    examples = ({"role": "user", "content": "one"}, {"role": "assistant", "content": "two"})
    env = with_settings(Ask(), EnvConfig("ask", examples=examples))
    (transcript,) = evaluate(answering_engine(lambda text: "yes"), renderer, env, 1, 0, sampling, samples=1).transcripts
    assert [who for who, _ in transcript.turns] == ["user", "assistant", "user", "policy"]
    assert "assistant | two" in as_text(transcript) and "policy | yes" in as_text(transcript)
    shown = sample_of("", transcript.turns).turns
    assert [who for who, _ in shown] == ["environment", "assistant", "environment", "policy"]


def test_printed_text_cannot_steer_a_terminal() -> None:
    told = as_text(Transcript("t\x1b", (("policy", "one\ntwo\x07"),), 0.0, None, "length", 3))
    assert "\x1b" not in told and "\x07" not in told and "two" in told.splitlines()[-1]
