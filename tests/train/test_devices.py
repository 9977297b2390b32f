"""A learner computes where its model is, and nowhere else."""

import numpy as np
import pytest
import torch

from shoal.config import SamplingConfig, TrainConfig
from shoal.protocol.algorithm_config import Grpo
from shoal.train.learner import Learner
from tests.fake_device import values_are_zeros


@pytest.fixture(autouse=True)
def update_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW's fused update has no form for `meta`: this one only demands that all it needs is at one place."""

    class Placed(torch.optim.AdamW):
        def __init__(self, groups, *, fused, **settings):
            assert fused
            super().__init__(groups, **settings)

        def step(self):
            for parameter, moments in self.state.items():
                assert parameter.grad is not None
                found = [parameter, parameter.grad, *moments.values()]
                assert {tensor.device.type for tensor in found} == {"meta"}

    monkeypatch.setattr(torch.optim, "AdamW", Placed)


@pytest.mark.parametrize("recompute", ["none", "layers"])
def test_a_step_stays_on_the_device_of_the_model(make_model, make_rows, monkeypatch, recompute) -> None:
    config = TrainConfig(microbatch_tokens=96, recompute=recompute, algorithm=Grpo(entropy_bonus=0.05))
    learner, rows = Learner(make_model().to("meta"), config, SamplingConfig(temperature=0.7), steps=10), make_rows(6)
    with values_are_zeros(monkeypatch):
        metrics = learner.step(rows, 0)
        logp = learner.logprobs(rows)
    assert metrics["updates"] == 1 and [len(logp_P) for logp_P in logp] == [len(row.positions_P) for row in rows]
    assert all(tensor.is_meta for tensor in learner.state(1).tensors.values())
    assert isinstance(logp[0], np.ndarray)


def test_a_state_goes_to_the_device_of_the_model(make_model, make_rows, monkeypatch) -> None:
    saved = Learner(make_model(), TrainConfig(), SamplingConfig(), steps=10).state(3)
    learner = Learner(make_model(1).to("meta"), TrainConfig(), SamplingConfig(), steps=10)
    with values_are_zeros(monkeypatch):
        learner.restore(saved)
    assert all(parameter.is_meta for parameter in learner.model.parameters())
