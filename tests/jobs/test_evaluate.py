"""Evaluation of a run: each environment of a mix gets the figures that `shoal eval` gives it alone."""

import io
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from shoal.cli import main
from shoal.config import EnvConfig, TinyPolicy
from shoal.config.role_options import EvalOptions
from shoal.env_packages.install import install
from shoal.env_packages.install_policy import InstallDecision
from shoal.env_packages.package_reference import read_reference
from shoal.env_packages.registry import FolderRegistry
from shoal.errors import ConfigError, StateError
from shoal.evaluation_files import Evaluation
from shoal.jobs import evaluate
from shoal.launch.summary import UsageBook, write_summary
from shoal.models.random_model import make_tiny
from shoal.net.key_files import load_or_make_key
from shoal.protocol.messages import NodeState, Sampling
from shoal.run_folder import RunFolder
from shoal.runs.run_status import RunStatus
from shoal.views.terminal.end_screen import plain_end, render_end
from tests.env_packages.author import Author
from tests.roles.testbed import tiny_run
from tests.sandbox.needs import needs_bubblewrap

EASY = {"name": "arithmetic", "label": "easy", "weight": 3.0, "args": {"digits": 1}}
HARD = {"name": "arithmetic", "label": "hard", "args": {"digits": 4}}
SAMPLING = Sampling(1.0, 6, 64)


@pytest.fixture
def evaluated(tmp_path):
    """A run of some environments, evaluated before and after it on 4 episodes of each."""

    def run(*envs):
        config = tiny_run(envs=list(envs), eval={"samples": 1, "episodes": 4})
        folder = RunFolder(tmp_path / "run")
        folder.prepare(config, tmp_path)
        final = folder.checkpoints / "final"
        make_tiny(TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=32), final, 1, "float32")
        for when in ("before", "after"):
            evaluate.for_run(
                folder.root, EvalOptions(checkpoint=str(final), out=str(folder.evaluations / f"{when}.json"))
            )
        return folder

    return run


def alone(folder, env, out):
    """Evaluate one environment as `shoal eval` does."""
    final, name, args = folder.checkpoints / "final", env["name"], env["args"]
    envs, sampling = (EnvConfig(name, args=args),), SAMPLING
    evaluate.main(evaluate.EvalPlan(final, envs, (4,), sampling, folder.config().seed, 1), out)
    return msgspec.json.decode(out.read_bytes(), type=Evaluation)


def test_every_environment_of_a_mix_is_evaluated_as_it_is_alone(evaluated, tmp_path):
    folder = evaluated(EASY, HARD)
    found = msgspec.json.decode((folder.evaluations / "after.json").read_bytes(), type=Evaluation)
    assert found.envs == {env["label"]: alone(folder, env, tmp_path / "alone.json") for env in (EASY, HARD)}
    assert found.envs["easy"] != found.envs["hard"] and found.episodes == 8


def test_evaluation_of_a_run_with_one_environment_is_that_of_the_environment(evaluated, tmp_path):
    folder = evaluated(HARD)
    alone(folder, HARD, tmp_path / "alone.json")
    assert (folder.evaluations / "after.json").read_bytes() == (tmp_path / "alone.json").read_bytes()


def test_an_environment_has_its_own_number_of_episodes_or_none(evaluated):
    folder = evaluated(EASY | {"eval_episodes": 0}, HARD | {"eval_episodes": 6}, {"name": "wordle"})
    found = msgspec.json.decode((folder.evaluations / "after.json").read_bytes(), type=Evaluation)
    assert {label: one.episodes for label, one in found.envs.items()} == {"hard": 6, "wordle": 4}
    assert found.mean == pytest.approx(sum(one.mean for one in found.envs.values()) / 2)
    write_summary(folder, folder.config(), RunStatus("town", "x", 3), UsageBook(folder.root / "usage.json"))
    summary = msgspec.json.decode(folder.summary.read_bytes())
    assert summary["heldout"]["after"]["envs"].keys() == {"hard", "wordle"}


def test_only_workers_of_a_run_file_that_also_starts_cheaters_are_called_honest(evaluated):
    folder = evaluated(HARD)
    names = ("cheater-0", "worker-0", "stranger")
    keys = [load_or_make_key(folder.nodes / name / "node.key").public for name in names]
    nodes = tuple(
        NodeState(key, "worker", name, "good", 0, 0, 0, 0, {}, "") for key, name in zip(keys, names, strict=True)
    )
    for cheaters, roles in ((keys[:1], ["cheating", "honest", ""]), ((), ["", "", ""])):
        seen = RunStatus("town", "x", 3, nodes=nodes, cheaters=frozenset(cheaters))
        end = write_summary(folder, folder.config(), seen, UsageBook(folder.root / "usage.json"))
        assert [end.summary["credits"][name]["role"] for name in names] == roles
        assert ("(honest)" in plain_end(end)) == bool(cheaters)


def test_a_worker_that_takes_the_name_of_another_takes_neither_its_credits_nor_its_role(evaluated):
    folder = evaluated(HARD)
    keys = [load_or_make_key(folder.nodes / "worker-0" / "node.key").public, "b" * 64]
    nodes = tuple(
        NodeState(key, "worker", "worker-0", "good", credits, 0, 0, 0, {}, "", influence=credits)
        for key, credits in zip(keys, (36364, 63636), strict=True)
    )
    seen = RunStatus("town", "x", 3, nodes=nodes, cheaters=frozenset({"c" * 64}))
    end = write_summary(folder, folder.config(), seen, UsageBook(folder.root / "usage.json"))
    found = msgspec.json.decode(folder.summary.read_bytes())
    names = [f"worker-0 ({key[:12]})" for key in keys]
    pay = [{"credits": 36364, "role": "honest"}, {"credits": 63636, "role": ""}]
    assert [found["credits"][name] for name in names] == pay
    assert [found["influence"][name] for name in names] == [0.36364, 0.63636]
    console = Console(file=io.StringIO(), width=120)
    console.print(render_end(end))
    for text in (plain_end(end), console.file.getvalue()):
        for said in (*names, "36,364", "63,636", "36.4%", "63.6%"):
            assert said in text, said


def test_a_run_of_several_environments_names_the_one_that_it_evaluates(evaluated, tmp_path):
    folder = evaluated(EASY | {"eval_episodes": 0}, HARD)
    found = msgspec.json.decode((folder.evaluations / "after.json").read_bytes(), type=Evaluation)
    assert {label: one.episodes for label, one in found.envs.items()} == {"hard": 4}
    assert command(tmp_path / "out.json", folder.root) == (folder.evaluations / "after.json").read_bytes()
    assert b'"envs"' not in command(tmp_path / "one.json", folder.root, "--env", "hard")


def command(out, *words):
    """What `shoal eval` with these words writes."""
    assert main.main(["eval", *map(str, words), "--threads", "1", "--out", str(out)]) == 0
    return out.read_bytes()


@pytest.mark.parametrize(
    "envs", [(HARD,), (EASY, HARD), ({"name": "wordle", "args": {"num_words": 30, "heldout": 8}, "system": "Hi"},)]
)
def test_shoal_eval_of_a_run_gives_the_figures_of_the_run(evaluated, tmp_path, monkeypatch, envs):
    monkeypatch.chdir(tmp_path)
    folder = evaluated(*envs)
    expected = (folder.evaluations / "after.json").read_bytes()
    assert command(tmp_path / "1.json", "run") == expected
    assert command(tmp_path / "2.json", folder.checkpoints / "final") == expected


def test_what_the_command_line_says_takes_the_place_of_what_the_run_says(evaluated, tmp_path):
    folder = evaluated(EASY, HARD)
    whole = msgspec.json.decode((folder.evaluations / "after.json").read_bytes(), type=Evaluation)
    one = command(tmp_path / "1.json", folder.root, "--env", "hard")
    assert msgspec.json.decode(one, type=Evaluation) == whole.envs["hard"]
    plan = evaluate.planned(
        folder.root,
        evaluate.EvalChanges(env="hard", env_args={"digits": 2}, episodes=7, seed=5, samples=0, max_turn_tokens=3),
    )
    assert (plan.envs[0].args, plan.episodes, plan.seed, plan.samples) == ({"digits": 2}, (7,), 5, 0)
    assert plan.sampling.max_turn_tokens == 3 and plan.sampling.max_tokens == folder.config().sampling.max_tokens
    other = evaluate.planned(folder.root, evaluate.EvalChanges(env="./mine.py", env_args={"a": 1}))
    assert [(env.name, env.args) for env in other.envs] == [("./mine.py", {"a": 1})]
    assert (other.sampling.max_turn_tokens, other.sampling.max_tokens) == (64, 512)
    with pytest.raises(ConfigError, match="several environments: add --env with one of easy, hard"):
        evaluate.planned(folder.root, evaluate.EvalChanges(env="", env_args={"digits": 2}))


def test_a_run_without_evaluations_is_evaluated_when_asked(evaluated):
    folder = evaluated(EASY | {"eval_episodes": 2})
    folder.run_file.write_bytes(folder.run_file.read_bytes().replace(b'"eval_episodes": 2', b'"eval_episodes": 0'))
    plan = evaluate.planned(folder.root)
    assert plan.episodes == (512,) and plan.envs[0].label == "easy"


def test_the_newest_policy_of_a_run_is_taken(evaluated):
    folder = evaluated(EASY)
    final, older, newer = (folder.checkpoints / name for name in ("final", "v000025", "v000100"))
    assert evaluate.planned(folder.root).checkpoint == final
    for one in (older, newer):
        shutil.copytree(final, one)
    shutil.rmtree(final)
    assert evaluate.planned(folder.root).checkpoint == newer
    assert evaluate.planned(older).checkpoint == older and evaluate.planned(older).envs[0].label == "easy"
    shutil.rmtree(folder.checkpoints)
    with pytest.raises(StateError, match="neither a run's folder nor a model's"):
        evaluate.planned(folder.root.parent)
    with pytest.raises(StateError, match="has made no policy yet"):
        evaluate.planned(folder.root)


def test_a_checkpoint_of_no_run_needs_an_environment(evaluated, tmp_path):
    alone = shutil.copytree(evaluated(EASY).checkpoints / "final", tmp_path / "elsewhere" / "alone")
    with pytest.raises(ConfigError, match="add --env NAME_OR_FILE"):
        evaluate.planned(alone)
    with pytest.raises(StateError, match="nowhere"):
        evaluate.planned(tmp_path / "nowhere")


def test_the_end_of_a_run_says_why_it_gained_nothing(evaluated):
    folder = evaluated(EASY | {"eval_episodes": 32})
    lines = tuple({"step": step, "reward_all_mean": 0.3, "lr": 1e-7, "zero_signal_share": 0.9} for step in range(50))
    config = folder.config()
    config = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, lr=1e-6))
    end = write_summary(folder, config, RunStatus("town", "x", 50, metrics=lines), UsageBook(folder.root / "u"))
    text = plain_end(end)
    assert "The reward did not rise beyond chance: held-out tasks" in text and "90% of groups were flat" in text
    assert "train.lr was 1e-06, and the preset for a policy of this size is 0.0005: set train.lr = 0.0005" in text
    assert "rollouts, so gradients were noisy: raise rollouts.batch_groups" in text


def test_the_end_of_a_run_without_evaluations_names_commands_whose_results_compare(tmp_path):
    config = tiny_run(envs=[EASY], eval={"episodes": 0})
    folder = RunFolder(tmp_path / "a run")
    folder.prepare(config, tmp_path)
    for place in (folder.policy, folder.checkpoints / "final"):
        make_tiny(TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=32), place, 1, "float32")
    lines = tuple({"step": step, "reward_all_mean": 0.3} for step in range(50))
    end = write_summary(folder, config, RunStatus("town", "x", 50, metrics=lines), UsageBook(folder.root / "u"))
    places = [shlex.split(one)[-1] for one in re.findall("`([^`]* eval [^`]*)`", plain_end(end))]
    before, after = (evaluate.planned(Path(place)) for place in places)
    assert (before.checkpoint, after.checkpoint) == (folder.policy, folder.checkpoints / "final")
    assert sum(before.episodes) > 0 and replace(before, checkpoint=after.checkpoint) == after


PARTS = """
from shoal.env import Env, Score, Step

class Parts(Env):
    name, num_tasks, num_heldout = "parts", 3, 3
    def task(self, index, heldout=False):
        return index
    def reset(self, task):
        return task, [{"role": "user", "content": "say"}]
    def step(self, state, action):
        return Step(state, None, True)
    def score(self, state):
        return Score({"right": 0.25, "form": 0.5}, {"letters": 7.0})

environment = Parts
"""


@pytest.mark.parametrize("others", [(), (EASY,)])
def test_the_end_shows_the_parts_of_a_reward_and_metrics(evaluated, tmp_path, others):
    (tmp_path / "parts.py").write_text(PARTS)
    folder = evaluated({"name": str(tmp_path / "parts.py"), "label": "mine"}, *others)
    end = write_summary(folder, folder.config(), RunStatus("town", "x", 3), UsageBook(folder.root / "usage.json"))
    found = msgspec.json.decode(folder.summary.read_bytes())["heldout"]["after"]
    mine = found["envs"]["mine"] if others else found
    assert mine["parts"] == {"form": 0.5, "right": 0.25} and mine["metrics"] == {"letters": 7.0}
    text = plain_end(end)
    for line in ("form: 0.500", "right: 0.250", "letters: 7.000"):
        assert f"held-out after{', mine' if others else ''}, {line}" in text
    shown = Console(width=200, file=io.StringIO())
    shown.print(render_end(end))
    assert all(name in shown.file.getvalue() for name in ("form", "right", "letters"))


def test_a_run_has_a_number_of_rows_and_a_dtype_of_its_own_for_evaluations(evaluated, tmp_path, monkeypatch):
    """Without them it plays 128 rows at a time in float32, as ever: the figures keep their bits."""
    folder, made, played = evaluated(HARD), [], []
    open_engine, plays = evaluate.open_engine, evaluate.evaluate
    monkeypatch.setattr(evaluate, "open_engine", lambda spec: made.append(spec.dtype) or open_engine(spec))
    monkeypatch.setattr(evaluate, "evaluate", lambda *args: played.append(args[-2]) or plays(*args))
    done = []
    for own in ({}, {"rows": 3, "dtype": "bfloat16"}):
        config = folder.config()
        folder.keep_found(msgspec.structs.replace(config, eval=msgspec.structs.replace(config.eval, **own)))
        options = EvalOptions(checkpoint=str(folder.checkpoints / "final"), out=str(tmp_path / "own.json"))
        evaluate.for_run(folder.root, options)
        done.append((tmp_path / "own.json").read_bytes())
    assert made == ["float32", "bfloat16"] and played == [128, 3]
    assert done[0] == (folder.evaluations / "after.json").read_bytes()
    assert msgspec.json.decode(done[1], type=Evaluation).episodes == 4


def test_on_the_way_each_environment_has_a_part_of_its_episodes(evaluated, tmp_path):
    folder = evaluated(EASY | {"eval_episodes": 200}, HARD)
    options = EvalOptions(checkpoint=str(folder.checkpoints / "final"), out=str(tmp_path / "way.json"), one_in=4)
    evaluate.for_run(folder.root, options)
    found = msgspec.json.decode((tmp_path / "way.json").read_bytes(), type=Evaluation)
    assert {label: one.episodes for label, one in found.envs.items()} == {"easy": 50, "hard": 4}


def test_summary_has_the_figures_and_a_game_of_each_environment(evaluated):
    folder = evaluated(EASY, HARD)
    end = write_summary(folder, folder.config(), RunStatus("town", "x", 3), UsageBook(folder.root / "usage.json"))
    figures = {"mean", "low95", "high95", "episodes", "faults"}
    for found in msgspec.json.decode(folder.summary.read_bytes())["heldout"].values():
        assert found.keys() == figures | {"envs"} and found["episodes"] == 8
        assert {label: (one.keys(), one["episodes"]) for label, one in found["envs"].items()} == {
            "easy": (figures | {"measure"}, 4),
            "hard": (figures | {"measure"}, 4),
        }
    assert [label for label, _ in end.games] == ["easy", "hard"]


@needs_bubblewrap
def test_a_package_is_evaluated_in_the_sandbox(tmp_path, monkeypatch):
    """Ann's package, played by somebody else."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    checkpoint, author = tmp_path / "tiny", Author(tmp_path / "ann")
    make_tiny(TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=32), checkpoint, 1, "float32")
    registry = FolderRegistry(tmp_path / "hub")
    registry.folder.mkdir()
    author.push(registry)
    install(read_reference("ann/parrot"), registry, tmp_path / "home", InstallDecision(None, lambda _: True))
    plan = evaluate.EvalPlan(checkpoint, (EnvConfig("ann/parrot@0.1.0"),), (6,), SAMPLING, samples=0)
    evaluate.main(plan, tmp_path / "out.json")
    figures = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=Evaluation)
    assert figures.fault == "" and figures.solve_rates == (1.0, 1.0, 1.0)
