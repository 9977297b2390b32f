"""A training step for which memory does not suffice begins again with smaller micro-batches."""

import json
import subprocess
import sys

import msgspec
import pytest
import torch

from shoal.config import SamplingConfig, TrainConfig
from shoal.errors import StateError
from shoal.train import learner as step_file
from shoal.train.learner import Learner

CONFIG = TrainConfig(lr=1e-2, warmup_steps=0, microbatch_tokens=384)


def learner_of(make_model, budget=384, **changes):
    config = msgspec.structs.replace(CONFIG, microbatch_tokens=budget, **changes)
    dtype = torch.bfloat16 if config.dtype else torch.float32
    return Learner(make_model().to(dtype), config, SamplingConfig(), steps=10)


def scarce(monkeypatch, most_tokens, error, at=0):
    """From the pass number `at`, one over more tokens fails, after part of its work."""
    predict, done = step_file.predict, []

    def limited(model, batch, temperature):
        done.append(batch.tokens_BT.numel())
        found = predict(model, batch, temperature)
        if len(done) > at and done[-1] > most_tokens:
            raise error
        return found

    monkeypatch.setattr(step_file, "predict", limited)
    return done


SHORTAGES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to ..."),
]


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"packing": "flat"}], ids=str)
def test_a_step_without_memory_is_that_of_smaller_micro_batches(make_model, make_rows, monkeypatch, error, changes):
    rows = make_rows(60)
    expected = learner_of(make_model, 96, **changes)
    expected.step(rows, 0)
    assert expected.budgets == [96]
    learner = learner_of(make_model, **changes)
    done = scarce(monkeypatch, 100, error, at=1)  # the first of several passes succeeds: its gradient must go
    learner.step(rows, 0)
    assert done[0] > 100 and learner.budgets == [96]
    assert all(t.equal(learner.state(1).tensors[n]) for n, t in expected.state(1).tensors.items())
    done.clear()
    learner.step(rows, 1)
    assert max(done) <= 96 and learner.budgets == [96], "later steps do not fail first"


def test_an_update_begins_again_and_those_before_it_stay(make_model, make_rows, monkeypatch):
    rows = make_rows(24)
    learner = learner_of(make_model, updates_per_batch=2)
    passes = len(step_file.plan(rows, 384, "padded"))
    scarce(monkeypatch, 200, MemoryError(), at=passes)
    learner.step(rows, 0)
    assert learner.budgets == [384, 192] and learner.updates == 2
    monkeypatch.undo()
    again = learner_of(make_model, updates_per_batch=2)
    again.step(rows, 0, learner.budgets)
    assert all(t.equal(again.state(1).tensors[n]) for n, t in learner.state(1).tensors.items())


def test_one_row_that_does_not_fit_is_an_error_with_figures_and_a_remedy(make_model, make_rows, monkeypatch):
    rows, learner = make_rows(4), learner_of(make_model)
    before = {name: tensor.clone() for name, tensor in learner.state(0).tensors.items()}
    scarce(monkeypatch, 0, MemoryError("no room"))
    longest = max(len(row.tokens_T) for row in rows)
    with pytest.raises(
        StateError, match=rf"the longest of {longest} tokens; \d+ MB are free \(no room\)\. Set train\."
    ):
        learner.step(rows, 0)
    assert all(tensor.equal(before[name]) for name, tensor in learner.state(0).tensors.items())
    assert all(p.grad is None for p in learner.model.parameters())


def test_other_errors_are_not_taken_for_a_lack_of_memory(make_model, make_rows, monkeypatch):
    scarce(monkeypatch, 0, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes"):
        learner_of(make_model).step(make_rows(4), 0)


REAL = """
import json, resource, sys
import numpy as np, torch
from shoal.config import SamplingConfig, TinyPolicy, TrainConfig
from shoal.models.transformer import Transformer
from shoal.models.random_model import initialise, tiny_spec
from shoal.train.rows import example_row
from shoal.train.learner import Learner

budget, room_mb = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
tiny = TinyPolicy(width=64, layers=4, heads=2, kv_heads=1, mlp_width=192, max_positions=256)
model = Transformer(tiny_spec(tiny))
initialise(model, seed=0)
learner = Learner(model, TrainConfig(lr=1e-3, warmup_steps=0, microbatch_tokens=budget), SamplingConfig(), steps=9)
rng = np.random.default_rng(0)
rows = [example_row(rng.integers(0, 64, 256).tolist(), [0] + [1] * 255) for _ in range(48)]
learner.step(rows[:1], 0)
if room_mb:
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + (room_mb << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
learner.step(rows, 1)
sums = {name: tensor.double().sum().item() for name, tensor in learner.state(1).tensors.items()}
print(json.dumps({"budgets": learner.budgets, "sums": sums}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_may_not_have_more_memory_trains_on(tmp_path):
    def ran(budget, room_mb):
        command = [sys.executable, "-c", REAL, str(budget), str(room_mb)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    limited = ran(48 * 256, 120)
    assert limited["budgets"][0] < 48 * 256
    assert limited == ran(limited["budgets"][0], 0)
