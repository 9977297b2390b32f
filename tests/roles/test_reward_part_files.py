"""Named parts of rewards reach the metrics of each step, and an environment's author cannot flood them."""

import asyncio

import pytest

from shoal.envs.interface import MAX_NAME, MAX_NAMED, Earned
from shoal.roles.node import reward_part_files
from shoal.roles.node.reward_part_files import ScoreFile, Tally, means_of, take_scores
from shoal.step_metrics import read_metrics
from tests.roles.testbed import RunTestbed, tiny_run

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
    def group_scores(self, states):
        return [Score({"beside": 0.5}) for _ in states]

environment = Parts
"""


def lived(tmp_path, **env):
    """The lines of metrics of a run whose environment scores in parts."""
    (tmp_path / "parts.py").write_text(PARTS)
    testbed = RunTestbed(tmp_path / "run", tiny_run(envs=[{"name": str(tmp_path / "parts.py"), **env}]))
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker")))
    if testbed.stage is not None:
        testbed.stage.close()
    assert testbed.audit().findings == []
    return testbed, read_metrics(testbed.folder.metrics)


@pytest.mark.parametrize("kind", ["episodes", "completions"])
def test_each_step_has_the_means_of_named_parts_and_metrics_and_of_what_the_run_adds(tmp_path, kind):
    length = {"targets": [3, 5], "weight": 0.01, "say": " {target}"}
    shaping = {"length": length, "repetition": {"size": 1, "weight": 0.125}}
    testbed, lines = lived(tmp_path, kind=kind, shaping=shaping)
    assert len(lines) == testbed.config.steps
    for line in lines:
        assert line["reward_part/form"] == 0.25 and line["reward_part/beside"] == 0.5
        assert 0.0 <= line["reward_part/odd"] <= 1.0 and line["env_metric/letters"] >= 0.0
        assert -5.0 <= line["reward_part/shaping.length"] <= 0.0 >= line["reward_part/shaping.repetition"] >= -1.0
        if kind == "episodes":  # all that was accepted, and nothing else
            parts = sum(line[f"reward_part/{name}"] for name in ("form", "odd", "beside"))
            added = 0.01 * line["reward_part/shaping.length"] + 0.125 * line["reward_part/shaping.repetition"]
            assert line["reward_all_mean"] == pytest.approx(parts + added)


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
    scores = take_scores(tmp_path)
    assert means_of(scores, ["env"]) == {"reward_part/a": 2.0}
    assert means_of(scores, ["env", "other"]) == {"reward_part/env/a": 2.0}
    assert take_scores(tmp_path) == {} and not list(tmp_path.iterdir())


def test_scores_that_nobody_takes_do_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(reward_part_files, "MOST_BYTES", 1000)
    for _ in range(1000):
        ScoreFile(tmp_path, "stage").write("env", Tally().add([Earned(0.0, {"a": 1.0}, {})]))
    assert 1000 <= (tmp_path / "stage.jsonl").stat().st_size < 1100
