"""The metrics file: what it holds, and that it never stops training."""

import json

import numpy as np

from shoal.step_metrics import METRICS, MetricsLog, read_metrics


def test_each_line_is_one_json_object(tmp_path):
    file = tmp_path / "metrics.jsonl"
    metrics = MetricsLog(file)
    metrics.write({"step": 0, "reward_mean": 0.5, "staleness_rollouts": {"0": 3}})
    metrics.write({"step": 1, "grad_norm": float("inf")})
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"step": 0, "reward_mean": 0.5, "staleness_rollouts": {"0": 3}},
        {"step": 1, "grad_norm": None},
    ]


def test_failing_writes_are_counted_and_logged_once(tmp_path, caplog):
    metrics = MetricsLog(tmp_path / "missing" / "metrics.jsonl")
    for step in range(3):
        metrics.write({"step": step})
    assert metrics.failures == 3 and caplog.text.count("not being written") == 1


def test_a_value_that_cannot_be_encoded_or_is_not_declared_does_not_raise(tmp_path, caplog):
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    metrics.write({"step": np.float32(1)})
    metrics.write({"rewrad_mean": 1.0})
    assert metrics.failures == 2 and not (tmp_path / "metrics.jsonl").exists()


def test_a_metric_of_each_environment_is_declared_once_for_all_labels(tmp_path):
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    metrics.write({"step": 0, "reward_mean": 0.5, "reward_mean/my game/2": 0.5, "reward_mean/easy": None})
    assert metrics.failures == 0 and read_metrics(metrics.path)[0]["reward_mean/my game/2"] == 0.5
    metrics.write({"step": 1, "loss/easy": 0.5})
    assert metrics.failures == 1


def test_half_a_line_of_a_killed_writer_does_not_damage_other_lines(tmp_path):
    file = tmp_path / "metrics.jsonl"
    MetricsLog(file).write({"step": 0})
    with file.open("ab") as torn:
        torn.write(b'{"step": 1, "rew')
    MetricsLog(file).write({"step": 1})
    assert read_metrics(file) == [{"step": 0}, {"step": 1}]


def test_the_last_line_of_a_repeated_step_counts(tmp_path):
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    for step, loss in ((0, 1.0), (1, 2.0), (1, 3.0)):
        metrics.write({"step": step, "loss": loss})
    assert read_metrics(metrics.path) == [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 3.0}]


def test_a_missing_file_gives_no_metrics(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_every_metric_has_a_unit_and_a_sentence():
    assert all(metric.unit and metric.sentence.endswith(".") for metric in METRICS.values())
