"""Evaluation of a run: each environment of a mix gets the figures that `shoal eval` gives it alone."""

import msgspec
import pytest

from shoal.config import TinyPolicy
from shoal.envs.evaluate import Evaluation, MixedEvaluation
from shoal.folder import RunFolder
from shoal.launch.snapshot import Snapshot
from shoal.launch.summary import UsageBook, write_summary
from shoal.policy.tiny import make_tiny
from shoal.protocol.types import Sampling
from shoal.roles import evaluate
from tests.roles.town import tiny_run

EASY = {"name": "arithmetic", "label": "easy", "weight": 3.0, "args": {"digits": 1}}
HARD = {"name": "arithmetic", "label": "hard", "args": {"digits": 4}}
SAMPLING = Sampling(1.0, 6, 64)


@pytest.fixture
def evaluated(tmp_path):
    """A run of some environments, evaluated before and after it on 4 episodes of each."""

    def run(*envs):
        config = tiny_run(envs=list(envs), eval={"samples": 1})
        folder = RunFolder(tmp_path / "run")
        folder.prepare(config, tmp_path)
        final = folder.checkpoints / "final"
        make_tiny(TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=32), final, 1, "float32")
        for when in ("before", "after"):
            evaluate.for_run(folder.root, final, 4, folder.evaluations / f"{when}.json", threads=1)
        return folder

    return run


def alone(folder, env, out):
    """Evaluate one environment as `shoal eval` does."""
    final, name, args = folder.checkpoints / "final", env["name"], env["args"]
    evaluate.main(final, name, args, 4, folder.config().seed, 1, SAMPLING, out)
    return msgspec.json.decode(out.read_bytes(), type=Evaluation)


def test_every_environment_of_a_mix_is_evaluated_as_it_is_alone(evaluated, tmp_path):
    folder = evaluated(EASY, HARD)
    found = msgspec.json.decode((folder.evaluations / "after.json").read_bytes(), type=MixedEvaluation)
    assert found.envs == {env["label"]: alone(folder, env, tmp_path / "alone.json") for env in (EASY, HARD)}
    assert found.envs["easy"] != found.envs["hard"] and found.episodes == 8


def test_evaluation_of_a_run_with_one_environment_is_that_of_the_environment(evaluated, tmp_path):
    folder = evaluated(HARD)
    alone(folder, HARD, tmp_path / "alone.json")
    assert (folder.evaluations / "after.json").read_bytes() == (tmp_path / "alone.json").read_bytes()


def test_summary_has_the_figures_and_a_game_of_each_environment(evaluated):
    folder = evaluated(EASY, HARD)
    end = write_summary(folder, folder.config(), Snapshot("town", "x", 3), UsageBook(folder.root / "usage.json"))
    figures = {"mean", "low95", "high95", "episodes"}
    for found in msgspec.json.decode(folder.summary.read_bytes())["heldout"].values():
        assert found.keys() == figures | {"envs"} and found["episodes"] == 8
        assert {label: (one.keys(), one["episodes"]) for label, one in found["envs"].items()} == {
            "easy": (figures, 4),
            "hard": (figures, 4),
        }
    assert [label for label, _ in end.games] == ["easy", "hard"]


def test_summary_of_one_environment_has_no_figures_by_environment(evaluated):
    folder = evaluated(HARD)
    end = write_summary(folder, folder.config(), Snapshot("town", "x", 3), UsageBook(folder.root / "usage.json"))
    for found in msgspec.json.decode(folder.summary.read_bytes())["heldout"].values():
        assert found.keys() == {"mean", "low95", "high95", "episodes"}
    assert [label for label, _ in end.games] == ["hard"]
