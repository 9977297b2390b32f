"""A learner that left its device between two steps goes on to the same bits."""

import pytest
import torch

from shoal.config import SamplingConfig, TrainConfig
from shoal.models.cpu_offload import storages_in
from shoal.train.learner import Learner
from tests.fake_device import values_are_zeros
from tests.models.test_cpu_offload import all_on
from tests.train.test_devices import update_in_place  # noqa: F401

LAYOUTS = [{}, {"dtype": "bfloat16", "moments": "8bit"}]


def learner_of(make_model, layout, device: str = "cpu") -> Learner:
    model = make_model().to(device, torch.bfloat16 if "dtype" in layout else torch.float32)
    return Learner(model, TrainConfig(lr=1e-2, **layout), SamplingConfig(), steps=4)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_learner_that_parked_between_steps_has_the_bits_of_one_that_stayed(
    make_model, make_rows, layout, monkeypatch
) -> None:
    monkeypatch.undo()  # with torch's own update
    stayed, parked = learner_of(make_model, layout), learner_of(make_model, layout)
    for version in range(3):
        for learner in (stayed, parked):
            learner.step(make_rows(6, seed=version), version)
        parked.park()
        assert not any(tensor.untyped_storage().nbytes() for tensor in parked.model.parameters())
        parked.come_back()
    one, other = stayed.state(3).tensors, parked.state(3).tensors
    assert all(torch.equal(one[name], other[name]) for name in one)
    left, right = (dict(learner.model.named_parameters()) for learner in (stayed, parked))
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("layout", [{}, {"dtype": "bfloat16"}], ids=str)
def test_a_learner_leaves_nothing_on_its_device(make_model, make_rows, monkeypatch, layout) -> None:
    before = all_on("meta")
    learner = learner_of(make_model, layout, "meta")
    with values_are_zeros(monkeypatch):
        learner.step(make_rows(6), 0)
    found = {storage._cdata for storage in storages_in([learner.model, learner._optimiser], "meta")}
    assert found >= all_on("meta").keys() - before.keys() and len(found) > 20
