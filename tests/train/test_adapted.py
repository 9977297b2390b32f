"""A learner with an adapter: only A and B move, its state has nothing else, and a resumed run has the same bits."""

import msgspec
import pytest
import torch

from shoal.config import SamplingConfig, TrainConfig
from shoal.errors import StateError
from shoal.models.checkpoint import load_policy, save_policy, write_nf4
from shoal.models.lora import begin_adapter, decode
from shoal.models.lora_config import AdapterSpec
from shoal.train.learner import Learner

CONFIG = TrainConfig(lr=1e-2, warmup_steps=0, weight_decay=0.1, microbatch_tokens=96)


@pytest.fixture
def learner_of(make_model):
    def make(rank=4, seed=1, **changes):
        config = msgspec.structs.replace(CONFIG, **changes)
        model = make_model(tied=True).to(torch.bfloat16 if config.dtype else torch.float32)
        begin_adapter(model, AdapterSpec(rank, 8.0), seed)
        return Learner(model, config, SamplingConfig(), steps=200)

    return make


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"moments": "8bit"}, {"moments": "offloaded"},
                                     {"recompute": "layers", "packing": "flat"}])  # fmt: skip
def test_only_the_adapter_learns_and_a_resumed_run_has_the_same_bits(learner_of, make_rows, changes):
    learner, half = learner_of(**changes), learner_of(**changes)
    frozen = {name: one.clone() for name, one in learner.model.named_parameters() if not one.requires_grad}
    for version in range(4):
        metrics = learner.step(make_rows(seed=version), version)
        assert metrics["updates"] == 1 and metrics["grad_norm"] > 0
        if version < 2:
            half.step(make_rows(seed=version), version)
    assert all(one.equal(frozen[name]) for name, one in learner.model.named_parameters() if name in frozen)
    moved = learner.model.trainable()
    begun = learner_of(**changes).model.trainable()
    assert not any(one.equal(begun[name]) for name, one in moved.items())
    assert all(one.dtype == torch.float32 for one in moved.values())
    state, resumed = half.state(2), learner_of(seed=9, **changes)
    assert {name.partition("/")[2] for name in state.tensors} == moved.keys(), "no weight of the base is in it"
    resumed.restore(state)
    for version in (2, 3):
        resumed.step(make_rows(seed=version), version)
    assert all(one.equal(resumed.model.trainable()[name]) for name, one in moved.items())


def test_a_state_of_another_rank_is_refused(learner_of):
    with pytest.raises(StateError, match="belongs to another model"):
        learner_of(rank=2).restore(learner_of(rank=4).state(1))


@pytest.mark.parametrize("changes", [{}, {"recompute": "layers", "packing": "flat"}, {"dtype": "bfloat16"}])
def test_steps_over_codes_are_those_over_the_decoded_weights(make_model, make_rows, tmp_path, changes):
    save_policy(make_model(width=128, mlp_width=192, tied=True), tmp_path / "plain", "bfloat16")
    write_nf4(tmp_path / "plain", tmp_path / "coded")
    config = msgspec.structs.replace(CONFIG, lr=1e-3, **changes)
    learners, begun = [], None
    for is_plain in (False, True):
        model = load_policy(tmp_path / "coded", torch.bfloat16 if config.dtype else torch.float32)
        if is_plain:
            decode(model)
        begin_adapter(model, AdapterSpec(4, 8.0), 1)
        begun = {name: one.detach().clone() for name, one in model.trainable().items()}
        learners.append(Learner(model, config, SamplingConfig(), steps=200))
    before = {name: one.clone() for name, one in learners[0].model.named_buffers()}
    for version in range(1 if config.dtype else 4):  # rounded to bfloat16, gradients soon go their own ways
        rows = make_rows(seed=version)
        found, wanted = (learner.step(rows, version) for learner in learners)
        assert found["loss"] == pytest.approx(wanted["loss"], abs=1e-4)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-3)
    assert all(one.equal(before[name]) for name, one in learners[0].model.named_buffers())
    coded, plain = (learner.model.trainable() for learner in learners)
    for name, one in plain.items():
        moved = (one - begun[name]).abs().max()
        differ = (coded[name] - one).abs()  # of a gradient of almost 0, AdamW's first update takes the sign alone
        assert (differ.mean() if config.dtype else differ.max()) <= 0.02 * moved, name
    assert sum(not one.equal(begun[name]) for name, one in coded.items()) >= 14
