"""A policy in bfloat16 with float32 masters, and AdamW's moments in 8 bits: what is kept, and how near float32 it stays."""

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.config import SamplingConfig, TrainConfig
from shoal.errors import StateError
from shoal.models.checkpoint import load_policy, save_policy
from shoal.train import optimiser
from shoal.train.learner import Learner, _Part
from shoal.train.microbatches import plan

CONFIG = TrainConfig(lr=1e-2, warmup_steps=0, weight_decay=0.1, microbatch_tokens=96)
FORMS = {
    "8bit": {"moments": "8bit"},
    "bfloat16 8bit": {"dtype": "bfloat16", "moments": "8bit"},
}


@pytest.fixture
def learner_of(make_model):
    def make(config=CONFIG, **changes):
        config = msgspec.structs.replace(config, **changes)
        model = make_model(tied=True).to(torch.bfloat16 if config.dtype else torch.float32)
        return Learner(model, config, SamplingConfig(), steps=200)

    return make


@pytest.mark.parametrize("form", FORMS)
def test_the_policy_is_its_masters_rounded_and_is_what_is_published(learner_of, make_rows, tmp_path, form):
    learner = learner_of(**FORMS[form])
    for version in range(3):
        learner.step(make_rows(seed=version), version)
    state = learner.state(3)
    assert state.layout == form
    dtype = torch.bfloat16 if "bfloat16" in form else torch.float32
    for name, parameter in learner.model.named_parameters():
        master = state.tensors[f"weights/{name}"]
        assert parameter.dtype == dtype and master.dtype == torch.float32 and parameter.equal(master.to(dtype))
        assert parameter.grad is None
    if dtype == torch.bfloat16:
        moved = [not state.tensors[f"weights/{n}"].equal(p.float()) for n, p in learner.model.named_parameters()]
        assert all(moved), "masters keep what bfloat16 cannot show"
        save_policy(learner.model, tmp_path / "published", "bfloat16")
        again = load_policy(tmp_path / "published", torch.bfloat16)
        assert all(a.equal(b) for a, b in zip(again.parameters(), learner.model.parameters(), strict=True))


def test_gradients_of_micro_batches_are_summed_in_float32(learner_of, make_rows):
    rows = make_rows(16)

    def gradients(chosen, num_tokens):
        learner = learner_of(dtype="bfloat16")
        packed = plan(chosen, CONFIG.microbatch_tokens, CONFIG.packing)
        learner._gradients(_Part(chosen), num_tokens, packed)
        learner._optimiser._masters.collect()
        return {name: master.grad for name, master in learner._optimiser._learned.items()}

    num_tokens = sum(len(row.positions_P) for row in rows)
    together = gradients(rows, num_tokens)
    packed = plan(rows, CONFIG.microbatch_tokens, CONFIG.packing)
    parts = [gradients([rows[i] for i in planned.members], num_tokens) for planned in packed]
    assert len(parts) > 2
    for name, total in together.items():
        summed = parts[0][name].clone()
        for part in parts[1:]:
            summed += part[name]
        assert total.dtype == torch.float32 and total.equal(summed)
        assert not total.equal(total.to(torch.bfloat16).float()), "a sum in bfloat16 would have lost this"


def gain(learner, rows, steps=20):
    """How much more likely the rewarded tokens become, weighted by their advantage, in nats."""
    advantage = np.concatenate([row.advantage_P for row in rows])
    before = np.concatenate(learner.logprobs(rows))
    for version in range(steps):
        learner.step(rows, version)
    return float((np.concatenate(learner.logprobs(rows)) - before) @ advantage)


@pytest.mark.parametrize(("form", "other_gain", "other_way"), [("8bit", 0.01, 0.05), ("bfloat16 8bit", 0.05, 0.25)])
def test_what_is_rewarded_is_learned_as_in_float32(learner_of, make_rows, form, other_gain, other_way):
    """Shares of the gain of float32, and of the way of its weights."""
    rows = make_rows(8)
    exact, learner = learner_of(lr=1e-3), learner_of(lr=1e-3, **FORMS[form])
    start = {name: tensor.clone() for name, tensor in exact.state(0).tensors.items()}
    expected, found = gain(exact, rows), gain(learner, rows)
    assert expected > 0 and found == pytest.approx(expected, rel=other_gain)
    ways, apart = 0.0, 0.0
    for name, tensor in exact.state(0).tensors.items():
        if name.startswith("weights/"):
            ways += (tensor - start[name]).square().sum().item()
            apart += (learner.state(0).tensors[name] - tensor).square().sum().item()
    assert apart**0.5 < other_way * ways**0.5


def test_moments_of_8_bits_take_a_quarter_and_are_never_whole_in_float32(learner_of, make_rows, monkeypatch):
    monkeypatch.setattr(optimiser, "PIECE_VALUES", 512)
    exact, learner = learner_of(), learner_of(moments="8bit")
    for one in (exact, learner):
        one.step(make_rows(), 0)

    def taken(one):
        matrices = [n for n, p in one.model.named_parameters() if p.ndim == 2]
        found = one.state(1).tensors.items()
        return sum(t.nbytes for n, t in found if n.startswith("adam") and n.partition("/")[2] in matrices)

    assert taken(learner) < 0.26 * taken(exact)

    class Largest(TorchDispatchMode):
        """Remembers the largest float32 tensor that an operation made."""

        values = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
            for tensor in made if isinstance(made, tuple | list) else (made,):
                is_new = isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given
                if is_new and tensor.dtype == torch.float32:
                    self.values = max(self.values, tensor.numel())
            return made

    for parameter in learner.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with Largest() as mode:
        learner._optimiser._moments.step(1e-3)
    biggest = max(p.numel() for p in learner.model.parameters())
    assert 512 <= mode.values <= 768 < biggest


def test_offloaded_on_a_cpu_is_float32(learner_of, make_rows):
    exact, offloaded = learner_of(), learner_of(moments="offloaded")
    for learner in (exact, offloaded):
        learner.step(make_rows(), 0)
    left, right = exact.state(1), offloaded.state(1)
    assert right.layout == "" and all(left.tensors[name].equal(right.tensors[name]) for name in left.tensors)


def test_a_state_of_another_layout_is_refused_by_name(learner_of):
    state = learner_of(dtype="bfloat16").state(4)
    with pytest.raises(StateError, match="version 4 has the layout 'bfloat16', and the run file asks for 'float32'"):
        learner_of().restore(state)


def test_a_policy_of_another_precision_is_not_converted(make_model):
    with pytest.raises(AssertionError, match=r"is torch.bfloat16, but the trainer computes in torch.float32"):
        Learner(make_model().to(torch.bfloat16), CONFIG, SamplingConfig(), steps=1)
