"""Numbers and first policies that rarely teach anything are named in one line each, and those that do are not."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.config import EnvConfig, RunConfig, TrainConfig, ValidatorsConfig, load_run, preset_lr
from shoal.evaluation_files import Evaluation
from shoal.launch.alarm_actions import AlarmWatch
from shoal.ledger.constants import LAW
from shoal.ledger.run_events import RunCreated
from shoal.monitors import config_warnings as advice
from shoal.monitors.config_warnings import (
    StartWarnings,
    config_warnings,
    success_rate_warning,
    task_warnings,
    token_limit_warning,
    zero_signal_warning,
)
from shoal.monitors.reward_diagnosis import LearningSetup, diagnose
from shoal.protocol.algorithm_config import Dapo
from shoal.protocol.messages import EnvSpec, Rules, Sampling
from shoal.protocol.rollout_validation import ROOM_REMEDY
from shoal.protocol.task_draws import TaskList
from shoal.run_folder import RunFolder
from shoal.runs.rollout_samples import newest_refusal
from shoal.runs.run_status import RunStatus
from tests.launch.test_memory_plan import RECIPES
from tests.ledger.ledger_fixture import World
from tests.ledger.test_no_signal import JUDGES, LONG, WORKER, serve_void, world_of

SMALL = RunConfig(name="r", steps=100, envs=(EnvConfig("words"),), train=TrainConfig(lr=6e-4))


def test_a_run_without_validators_is_told_how_one_is_admitted() -> None:
    alone = msgspec.structs.replace(SMALL, validators=ValidatorsConfig(count=0))
    (told,) = advice.role_warnings(alone, False, "http://h:1", Path("runs/r"))
    assert "`shoal validate http://h:1` prints its key" in told and "`shoal admin admit runs/r KEY`" in told
    assert advice.role_warnings(SMALL, True, "http://h:1", Path("runs/r")) == []


@pytest.mark.parametrize(("key", "count", "words"), [("count", 1, 1), ("count", 2, 0), ("cheating", 1, 1)])
def test_a_host_is_told_that_it_starts_no_workers(key: str, count: int, words: int) -> None:
    config = msgspec.structs.replace(SMALL, workers=msgspec.structs.replace(SMALL.workers, **{key: count}))
    told = advice.role_warnings(config, False, "http://h:1", Path("runs/r"))
    assert len(told) == words and all(f"workers.{key} = {count}" in line for line in told)


def with_rollouts(**changes: int) -> RunConfig:
    return msgspec.structs.replace(SMALL, rollouts=msgspec.structs.replace(SMALL.rollouts, **changes))


@pytest.mark.parametrize(
    ("lr", "words"), [(9e-5, ["slowly"]), (2e-3, ["unstably"]), (1e-4, []), (1.5e-3, []), (0.0, [])]
)
def test_a_learning_rate_far_from_the_preset_is_named(lr: float, words: list[str]) -> None:
    told = config_warnings(msgspec.structs.replace(SMALL, train=TrainConfig(lr=lr)), 800_000)
    says = f"train.lr = {lr:g}, and the preset for 800,000 parameters that learn is 0.0005: the policy may learn "
    assert [line[: len(says) + len(word)] for line, word in zip(told, words, strict=True)] == [says + w for w in words]


@pytest.mark.parametrize("factor", [0.01, 0.19, 0.21, 0.3, 1.0, 2.9, 3.1, 4.0, 20.0])
def test_the_start_of_a_run_warns_of_the_learning_rates_that_its_end_blames(factor: float) -> None:
    preset = preset_lr(800_000)
    config = msgspec.structs.replace(SMALL, train=TrainConfig(lr=factor * preset))
    level = [{"step": i, "reward_all_mean": 0.3 + 0.01 * (i % 2), "lr": config.train.lr} for i in range(60)]
    blamed = diagnose(level, LearningSetup(preset, 16, 16, 1))
    warned = config_warnings(config, 800_000)
    assert len(blamed) == 2 and len(warned) == ("train.lr was" in blamed[1]) == (not 0.2 < factor < 3)


def test_small_groups_and_small_batches_are_named() -> None:
    assert config_warnings(SMALL, 800_000) == []
    (batch,) = config_warnings(with_rollouts(group_size=8, batch_groups=8), 800_000)
    assert batch.startswith("A step learns from 64 rollouts (rollouts.batch_groups = 8 groups of 8)")
    (group,) = config_warnings(with_rollouts(group_size=4, batch_groups=32), 800_000)
    assert group.startswith("rollouts.group_size = 4: in small groups")


@pytest.mark.parametrize("recipe", ["wordle", "arithmetic", "stones"])
def test_recipes_that_learn_get_no_advice(recipe: str) -> None:
    sizes = {"wordle": 796_032, "arithmetic": 209_472, "stones": 102_784}
    assert config_warnings(load_run(RECIPES / f"{recipe}.toml"), sizes[recipe]) == []


def created(*envs: EnvSpec, **lists: TaskList) -> RunCreated:
    rules = Rules(16, 4, 16, 1, 100, 9.0, 1.0, "float32", {})
    return RunCreated("r", "r", "k", "t", (), "", "", envs, Sampling(1.0, 9, 9), rules, {}, LAW, task_lists=lists)


def test_an_environment_with_few_tasks_for_the_length_of_the_run_is_named() -> None:
    few, many = EnvSpec("few", "", 30, 1.0, {}), EnvSpec("many", "", 4000, 3.0, {})
    (line,) = task_warnings(created(few, many))
    assert line.startswith("few has 30 training tasks, so each comes about 13 times in this run: a small policy learns")
    assert task_warnings(created(many)) == []
    chosen = TaskList("many", {}, 4000, tuple(range(20)))
    (line,) = task_warnings(created(many, many=chosen))
    assert line.startswith("many has 20 training tasks, so each comes about 80 times in this run")


def wins(mean: float, measure: str = "success", **envs: Evaluation) -> Evaluation:
    return Evaluation(mean, mean, mean, 512, envs, measure=measure)


def test_a_first_policy_that_wins_nearly_everything_is_named_with_its_environment() -> None:
    (line,) = success_rate_warning(wins(0.86))
    assert line.startswith("The first policy already wins 86% of the held-out tasks: little is left to learn")
    assert success_rate_warning(msgspec.structs.replace(wins(0.86), faults=50)) == [], "it may lose those"
    assert success_rate_warning(wins(0.5)) == [] and success_rate_warning(wins(0.9, "reward")) == []
    (line,) = success_rate_warning(wins(0.6, sort=wins(0.95), count=wins(0.3)))
    assert "95% of the held-out tasks of sort" in line


def test_first_groups_without_signal_are_named_with_their_mean_reward() -> None:
    flat: dict[str, Any] = {"zero_signal_share": 0.9, "reward_all_mean": 0.01}
    assert zero_signal_warning([flat], 0, 0.0).startswith("In 90% of the first step's groups, all rewards are equal")
    assert "the mean reward is 0.01" in zero_signal_warning([flat], 0, 0.0)
    assert "in between, raise rollouts.group_size" in zero_signal_warning([], 80, 0.625)
    for solved, change in ((0.01, "longer cold start"), (0.625, "raise rollouts.group_size"), (0.95, "harder tasks")):
        said = zero_signal_warning([flat | {"solve_rate": solved}], 0, 0.0)
        assert change in said and f"{solved:.0%} of rollouts are solved: " in said and "if near" not in said
    assert zero_signal_warning([{"zero_signal_share": 0.5}], 0, 0.0) == ""
    assert zero_signal_warning([], advice.MIN_FLAT_GROUPS - 1, 0.0) == ""
    assert zero_signal_warning([], 80, 1.0).startswith("In each of the first 80 groups, all rewards are equal")
    said = zero_signal_warning([], 80, 0.0, lambda: "A token limit ended 64 of the 64 rollouts: raise it")
    assert said.endswith(". A token limit ended 64 of the 64 rollouts: raise it") and "easier tasks" not in said


def test_many_rollouts_that_a_token_limit_ended_are_named_with_the_keys_that_limit_them() -> None:
    cut = [{"step": step, "overlong_share": share} for step, share in enumerate((0.0, 0.05, 0.4, 0.4, 0.6, 0.6))]
    assert token_limit_warning([], SMALL) == token_limit_warning([{"step": 0}] * 5, SMALL) == ""
    noisy = [{"step": step, "overlong_share": 0.4 if step == 4 else 0.02} for step in range(5)]
    assert token_limit_warning(noisy, SMALL) == token_limit_warning(cut[2:], SMALL) == ""
    line = token_limit_warning(cut[4:], msgspec.structs.replace(SMALL, steps=2))
    assert "60% of the rollouts of the newest 2 steps" in line
    line = token_limit_warning(cut, SMALL)
    assert "41% of the rollouts of the newest 5 steps: raise sampling.max_turn_tokens = 64 or " in line
    assert "sampling.max_tokens = 512" in line and "[[envs]]" not in line and "mask_overlong" not in line
    masks = msgspec.structs.replace(
        SMALL, train=TrainConfig(algorithm=Dapo(mask_overlong=True)), envs=(EnvConfig("wordle", max_turn_tokens=8),)
    )
    line = token_limit_warning(cut, masks)
    assert "or those of [[envs]]; nothing is learned from such rollouts (mask_overlong)" in line


def test_each_advice_on_the_first_policy_is_said_once() -> None:
    first, flat = StartWarnings(), {"zero_signal_share": 0.9, "reward_all_mean": 0.97}
    assert first.look(None, [], 3, 0.0) == []
    assert len(first.look(wins(0.97), [], 3, 0.0)) == 1
    assert len(first.look(wins(0.97), [], 70, 1.0)) == 1
    assert first.look(wins(0.97), [flat, flat], 90, 1.0) == []
    late = StartWarnings()
    assert late.look(None, [{"zero_signal_share": 0.2}], 0, 0.0) == late.look(None, [flat, flat], 99, 0.0) == []


def test_tasks_that_can_never_begin_are_told_while_the_run_goes_on_once_for_each_key(tmp_path: Path) -> None:
    world = world_of(tmp_path, validators=JUDGES)
    watch, first = AlarmWatch(RunFolder(tmp_path), load_run(Path("recipes/wordle.toml"))), StartWarnings()
    assert first.look_at_unbegun(*watch.unbegun) == []
    serve_void(world)
    world.serve(WORKER, by=JUDGES[0])
    watch.look(RunStatus("small", "", 30))
    assert not world.state.main.unbegun and watch.unbegun[0] > 0, "a group with signal does not hide them"
    (line,) = first.look_at_unbegun(*watch.unbegun)
    assert LONG in line and ROOM_REMEDY in line and "sampling.max_tokens = 64" in line
    assert first.look_at_unbegun(watch.unbegun[0] + 1, LONG.replace("90", "91")) == []
    assert len(first.look_at_unbegun(9, "task 8 of long cannot begin: task() raised")) == 1


def test_a_run_of_which_all_groups_are_refused_is_told_why_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.publish()
    for worker in ("w" * 64, "x" * 64):
        world.enter(worker)
    first, refused, newest = StartWarnings(), world.state.refused, partial(newest_refusal, world.path)
    said = first.look_at_refusals(0, refused, newest)
    world.serve("w" * 64, outcome="hard", check="prompt", detail="the environment says token 224")
    said += first.look_at_refusals(world.state.accepted_groups, refused, newest)
    assert said == [] and refused["prompt"] > 0, "one worker may have cheated"
    world.serve("x" * 64, outcome="hard", check="prompt", detail="the environment says token 277")
    (line,) = first.look_at_refusals(world.state.accepted_groups, refused, newest)
    assert f"No group was accepted so far, and {refused['prompt']} failed a check (" in line
    assert "the newest: the environment says token 277. If your own workers made them" in line
    assert first.look_at_refusals(world.state.accepted_groups, refused, newest) == []
    accepted = StartWarnings()
    assert accepted.look_at_refusals(2, refused, newest) == accepted.look_at_refusals(0, refused, newest) == []
