"""Training in the caller's own process: `Run.train_here`, with an environment and a loss that the caller holds."""

import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import shoal
from shoal.env import Env, Step
from shoal.envs.own_env import OwnEnv
from shoal.errors import ConfigError, ShoalError, StateError
from shoal.launch.train_here import synchronous
from shoal.models.open_model import spec_of
from shoal.run_folder import RunFolder
from shoal.step_metrics import read_metrics
from shoal.weights.manifest import weights_root
from tests.engine.architectures import write_any
from tests.test_api import RUN_FILE, in_a_notebook

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import one_file


class Vowels(Env):
    """A share of vowels: random weights earn different rewards."""

    name = "vowels"
    num_tasks, num_heldout = 16, 4

    def task(self, index, heldout=False):
        return index

    def reset(self, task):
        return "", [{"role": "user", "content": f"{task}:"}]

    def step(self, state, action):
        return Step(action, None, True)

    def score(self, state):
        letters = [character for character in state if character.isalpha()]
        return sum(character in "aeiou" for character in letters) / max(1, len(letters))


class Nothing(Vowels):
    """No rollout ever earns anything."""

    name = "nothing"

    def score(self, state):
        return 0.0


@pytest.mark.parametrize("name", ["phi3", "gpt2"])
def test_another_architecture_learns_here_as_in_a_run(name, run_file, tmp_path):
    start = write_any(name, tmp_path / "model")
    run = shoal.recipe(run_file, steps=1, policy={"path": str(start), "implementation": "auto"})
    steps = list(run.train_here(tmp_path / "out", env=Vowels()))
    published = tmp_path / "out" / "published"
    assert len(steps) == 1 and weights_root(published) != weights_root(start)
    assert spec_of(published).family == name
    flat = shoal.recipe(run_file, policy={"path": str(start), "implementation": "auto"}, train={"packing": "flat"})
    with pytest.raises(StateError, match=r'train\.packing = "flat" needs a policy that shoal itself computes'):
        list(flat.train_here(tmp_path / "flat", env=Vowels()))


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(RUN_FILE)
    return path


def test_the_steps_are_those_of_one_file_and_their_metrics_are_kept(run_file, tmp_path):
    out, before = tmp_path / "here", torch.get_num_threads()
    run = shoal.recipe(run_file, steps=2)
    steps = in_a_notebook(lambda: list(run.train_here(out)))
    assert [step.number for step in steps] == [1, 2] and torch.get_num_threads() == before
    assert weights_root(out / "published") == one_file.train(synchronous(run.config), tmp_path / "one", tmp_path)
    with shoal.open(out) as opened:
        assert [row["reward_all_mean"] for row in opened.metrics] == [step.reward for step in steps]
        assert all(0 <= row[name] <= 1 for row in opened.metrics for name in ("zero_signal_share", "overlong_share"))
        assert len(opened.rollouts) == len(opened.log) == 0


def test_a_learning_rate_that_is_left_out_is_that_of_the_size_and_is_kept(run_file, tmp_path):
    out = tmp_path / "here"
    in_a_notebook(lambda: list(shoal.recipe(run_file, steps=1).train_here(out)))
    assert RunFolder(out).config().train.lr == 5e-4
    (line,) = read_metrics(RunFolder(out).metrics)
    assert line["lr"] == pytest.approx(5e-4 / 5), "the first of five steps of warm-up"


def test_an_environment_and_a_loss_of_the_program_are_trained_with_and_evaluated(run_file, tmp_path):
    seen = []

    def reinforce(terms, num_tokens):
        seen.append(num_tokens)
        loss_N = -terms.weight_N * terms.advantage_N * terms.logp_N
        return loss_N.sum() / num_tokens, {"mine": terms.advantage_N.abs()}

    out = tmp_path / "here"
    run = shoal.recipe(run_file, steps=1)
    (step,) = run.train_here(out, env=Vowels(), loss=reinforce)
    assert seen and step.metrics["mine"] > 0 and 0 < step.reward < 1
    (kept,) = read_metrics(out / "metrics.jsonl")
    assert kept["step"] == 0 and "mine" not in kept and RunFolder(out).config().envs[0].label == "vowels"
    assert shoal.policy(out / "published").evaluate(Vowels(), 4, max_turn_tokens=4, max_tokens=24).episodes == 4


def test_a_loss_may_be_a_number_alone_and_a_run_is_replaced_by_the_next(run_file, tmp_path):
    def nothing(terms, num_tokens):
        return 0.0 * terms.logp_N.sum()

    out = tmp_path / "here"
    assert len(list(shoal.recipe(run_file, steps=1).train_here(out, env=Vowels()))) == 1
    before = weights_root(out / "published")
    assert len(list(shoal.recipe(run_file, steps=1, seed=2).train_here(out, env=Vowels(), loss=nothing))) == 1
    assert weights_root(out / "published") != before and len(read_metrics(out / "metrics.jsonl")) == 1


def test_an_environment_without_signal_ends_with_the_remedy_instead_of_never(run_file, tmp_path):
    run = shoal.recipe(run_file, rollouts={"max_flat_groups": 16})
    with pytest.raises(StateError, match=r"the last 16 groups have no signal: .* raise rollouts\.max_flat_groups"):
        next(run.train_here(tmp_path / "here", env=Nothing()))


def test_tasks_that_can_never_begin_end_the_run_with_the_length_and_the_key(run_file, tmp_path):
    class Long(Vowels):
        name = "long"

        def reset(self, task):
            return super().reset(task)[0], [{"role": "user", "content": "a" * 4000}]

    run = shoal.recipe(run_file, rollouts={"max_flat_groups": 16})
    said = (
        r"the last 16 groups have no signal: the tasks of 16 of them can never begin; the last: long, task \d+: its prompt "
        r"takes \d+ tokens, and sampling\.max_tokens = \d+ leaves no room"
    )
    with pytest.raises(StateError, match=said):
        next(run.train_here(tmp_path / "here", env=Long()))


@pytest.mark.parametrize(("changed", "line"), [
    ({"score": lambda state: 1 / 0}, r"environment vowels fails in score\(\): .*ZeroDivisionError.*Fix it, and run"),
    ({"step": lambda state, action: [].pop()}, r"vowels fails in step\(\): .*IndexError: pop from empty list"),
    ({"reset": lambda task: task.nothing}, r"vowels fails in reset\(\): .*AttributeError"),
    ({"task": lambda index, heldout=False: {}[index]}, r"vowels fails in task\(\): .*KeyError"),
    ({"score": lambda state: float("nan")}, r"environment vowels fails: .*score is nan, not a finite number"),
    ({"score": lambda state: 5.0}, r"environment vowels fails: .*score 5.0 is outside reward_bounds 0.0 to 1.0"),
    ({"score": lambda state: None}, r"environment vowels fails: .*TypeError"),
    ({"step": lambda state, action: "done"}, r"environment vowels fails: .*step\(\) must return Step"),
])  # fmt: skip
def test_a_fault_of_the_programs_environment_is_told_at_once_in_one_line(run_file, tmp_path, changed, line):
    env = Vowels()
    vars(env).update(changed)
    with pytest.raises(ShoalError, match=line) as told:
        next(shoal.recipe(run_file, steps=1).train_here(tmp_path / "here", env=env))
    assert "\n" not in str(told.value)


def test_a_call_that_does_not_return_is_interrupted(run_file, tmp_path, monkeypatch):
    def forever(state):
        while True:
            pass

    before = signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr("shoal.launch.train_here.OwnEnv", partial(OwnEnv, call_s=0.1))
    env = Vowels()
    env.score = forever
    with pytest.raises(ShoalError, match=r"vowels fails in score\(\): .*TimeoutError: it did not return within 0\.1 s"):
        next(shoal.recipe(run_file, steps=1).train_here(tmp_path / "here", env=env))
    assert signal.getsignal(signal.SIGALRM) == before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize(("loss", "line"), [
    (lambda terms, n: 0.5, "the loss gave a float: return a scalar tensor"),
    (lambda terms, n: terms.logp_N, r"the loss gave a tensor of shape \(\d+,\): return"),
    (lambda terms, n: terms.logp_N.detach().sum(), r"of shape \(\) without a gradient: return"),
    (lambda terms, n: terms.logp_N.sum() * float("nan"), "the loss is nan: nothing can be learned"),
])  # fmt: skip
def test_a_loss_that_gives_something_else_is_told_at_once(run_file, tmp_path, loss, line):
    with pytest.raises(ShoalError, match=line):
        next(shoal.recipe(run_file, steps=1).train_here(tmp_path / "here", env=Vowels(), loss=loss))


def test_an_interrupted_run_is_gone_on_with_to_the_same_bits(run_file, tmp_path):
    run = shoal.recipe(run_file, steps=3)
    unbroken = [step.reward for step in run.train_here(tmp_path / "whole", env=Vowels())]
    out, interrupted = tmp_path / "here", Vowels()
    score, begun = interrupted.score, []

    def until_ctrl_c(state):
        if begun:
            raise KeyboardInterrupt
        return score(state)

    interrupted.score = until_ctrl_c
    with pytest.raises(KeyboardInterrupt):
        for step in run.train_here(out, env=interrupted):
            begun.append(step.number)
    assert begun == [1]
    rest = list(run.train_here(out, env=Vowels(), resume=True))
    assert begun + [step.number for step in rest] == [1, 2, 3]
    assert [row["reward_all_mean"] for row in read_metrics(out / "metrics.jsonl")] == unbroken
    assert weights_root(out / "published") == weights_root(tmp_path / "whole" / "published")
    assert list(run.train_here(out, env=Vowels(), resume=True)) == []
    with pytest.raises(StateError, match=r"the run file differs .* train\.lr"):
        next(shoal.recipe(run_file, steps=3, train={"lr": 0.5}).train_here(out, env=Vowels(), resume=True))


def test_a_folder_with_a_log_is_left_alone(run_file, tmp_path):
    log = RunFolder(tmp_path / "run").log
    log.parent.mkdir()
    log.write_bytes(b"kept")
    with pytest.raises(StateError, match="holds a run with a log"):
        next(shoal.recipe(run_file).train_here(tmp_path / "run"))
    assert log.read_bytes() == b"kept"


def test_a_policy_in_the_folder_that_is_replaced_is_kept(run_file, tmp_path):
    published = tmp_path / "here" / "published"
    published.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"is in .*here, which is replaced: give another out"):
        next(shoal.recipe(run_file, policy={"path": str(published)}).train_here(tmp_path / "here"))
    assert published.is_dir()


def test_what_is_no_environment_is_refused_before_anything_is_made(run_file, tmp_path):
    with pytest.raises(ConfigError, match=r"env is a dict without name, num_tasks, .*inherits from shoal\.env\.Env"):
        next(shoal.recipe(run_file).train_here(tmp_path / "here", env={}))
    assert not (tmp_path / "here").exists()


def test_missing_torch_is_reported_in_one_line(run_file, tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.launch.train_here.find_spec", lambda name: None)
    with pytest.raises(ShoalError, match="torch is not installed"):
        next(shoal.recipe(run_file).train_here(tmp_path / "here"))


def test_a_package_without_its_recipes_says_how_to_get_them(run_file, tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.api.RECIPES", tmp_path)
    with pytest.raises(StateError, match=r"one_file\.py is not there: .*Install it again"):
        next(shoal.recipe(run_file).train_here(tmp_path / "here"))
