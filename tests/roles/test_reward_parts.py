"""Named parts of rewards reach the metrics of each step, and an environment's author cannot flood them."""

import asyncio

import pytest

from shoal.envs.interface import MAX_NAME, MAX_NAMED, Earned
from shoal.metrics import read_metrics
from shoal.roles.node import reward_parts
from shoal.roles.node.reward_parts import ScoreFile, Tally, means_of, take_scores
from tests.roles.in_memory_run import Town, tiny_run

PARTS = """
from shoal.env import Env, Score, Step

class Parts(Env):
    name, num_tasks, num_heldout = "parts", 64, 1
    reward_bounds = (0.0, 2.0)
    def task(self, index, heldout=False):
        return index
    def reset(self, task):
        return "", [{"role": "user", "content": "say"}]
    def step(self, state, action):
        return Step(action, None, True)
    def score(self, state):
        return Score({"form": 0.25, "odd": float(len(state) % 2)}, {"letters": len(state)})
"""
COMPARED = """    def group_scores(self, states):
        return [Score({"beside": 0.5}) for _ in states]
"""
PLAIN, BESIDE = (f"{source}\nenvironment = Parts\n" for source in (PARTS, PARTS + COMPARED))


def lived(tmp_path, source, *others, **env):
    """The lines of metrics of a run whose environment scores in parts."""
    (tmp_path / "parts.py").write_text(source)
    town = Town(tmp_path / "run", tiny_run(envs=[{"name": str(tmp_path / "parts.py"), "label": "mine"} | env, *others]))
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker")))
    if town.stage is not None:
        town.stage.close()
    assert town.audit().findings == []
    return town, read_metrics(town.folder.metrics)


@pytest.mark.parametrize("kind", ["episodes", "completions"])
@pytest.mark.parametrize("source", [PLAIN, BESIDE])
def test_each_step_has_the_means_of_named_parts_and_metrics(tmp_path, kind, source):
    town, lines = lived(tmp_path, source, kind=kind)
    assert len(lines) == town.config.steps
    for line in lines:
        beside = line.get("reward_part/beside", 0.0)
        assert line["reward_part/form"] == 0.25 and beside == (0.5 if source is BESIDE else 0.0)
        assert 0.0 <= line["reward_part/odd"] <= 1.0 and line["env_metric/letters"] >= 0.0
        if kind == "episodes":  # all that was accepted, and nothing else
            parts = sum(line[f"reward_part/{name}"] for name in ("form", "odd")) + beside
            assert parts == pytest.approx(line["reward_all_mean"])


@pytest.mark.parametrize("kind", ["episodes", "completions"])
def test_what_a_run_adds_to_rewards_is_judged_and_reported(tmp_path, kind):
    length = {"targets": [3, 5], "weight": 0.01, "say": " {target}"}
    shaping = {"length": length, "repetition": {"size": 1, "weight": 0.125}}
    town, lines = lived(tmp_path, PLAIN, kind=kind, shaping=shaping)
    assert len(lines) == town.config.steps
    for line in lines:
        assert -5.0 <= line["reward_part/shaping.length"] <= 0.0 >= line["reward_part/shaping.repetition"] >= -1.0
        if kind == "episodes":
            plain = line["reward_part/form"] + line["reward_part/odd"]
            added = 0.01 * line["reward_part/shaping.length"] + 0.125 * line["reward_part/shaping.repetition"]
            assert line["reward_all_mean"] == pytest.approx(plain + added)


def test_several_environments_have_their_labels_in_the_names(tmp_path):
    _, lines = lived(tmp_path, PLAIN, {"name": "arithmetic"})
    named = {name for line in lines for name in line if name.startswith(("reward_part", "env_metric"))}
    assert named == {"reward_part/mine/form", "reward_part/mine/odd", "env_metric/mine/letters"}


def test_an_environment_with_other_names_in_each_score_has_few_in_a_line(tmp_path):
    file = ScoreFile(tmp_path, "stage")
    for episode in range(10):
        names = {f"{episode}-{i}": 1.0 for i in range(MAX_NAMED)}
        file.write("env", Tally().add([Earned(0.0, names | {"x" * (MAX_NAME + 1): 1.0}, names)]))
    means = means_of(take_scores(tmp_path), ["env"])
    assert len(means) == 2 * MAX_NAMED and max(map(len, means)) < 20


def test_scores_are_taken_once_and_half_lines_are_left_out(tmp_path):
    for writer, value in (("stage", 1.0), ("validator-0", 3.0)):
        ScoreFile(tmp_path, writer).write("env", Tally().add([Earned(0.0, {"a": value}, {})] * 2))
    with (tmp_path / "stage.jsonl").open("ab") as file:
        file.write(b'["env",{"parts":{"a":[')
    assert means_of(take_scores(tmp_path), ["env"]) == {"reward_part/a": 2.0}
    assert take_scores(tmp_path) == {} and not list(tmp_path.iterdir())


def test_scores_that_nobody_takes_do_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(reward_parts, "MOST_BYTES", 1000)
    for _ in range(1000):
        ScoreFile(tmp_path, "stage").write("env", Tally().add([Earned(0.0, {"a": 1.0}, {})]))
    assert 1000 <= (tmp_path / "stage.jsonl").stat().st_size < 1100


def test_an_environment_without_parts_writes_nothing(tmp_path):
    ScoreFile(tmp_path / "scores", "stage").write("env", Tally().add([Earned(0.5, {}, {})]))
    assert not (tmp_path / "scores").exists()
