"""A training step against a slow one written out in full, and its guarantees."""

import contextlib
import subprocess
import sys
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from shoal import step_metrics
from shoal.algos.corrections import truncated_weights
from shoal.config import SamplingConfig, TrainConfig
from shoal.errors import StateError
from shoal.protocol.algorithm_config import Grpo, Truncate
from shoal.train.distributed.ranks import SingleProcess
from shoal.train.learner import Learner

CONFIG = TrainConfig(
    lr=1e-2, warmup_steps=2, weight_decay=0.1, microbatch_tokens=96, algorithm=Grpo(entropy_bonus=0.05)
)


def learner_of(model, config=CONFIG, **changes):
    return Learner(model, config, SamplingConfig(temperature=0.7), steps=10, **changes)


def gradients_of(learner, rows):
    """The step's loss and gradients, before they are used."""
    captured = {}

    def capture(lr, version):
        captured.update({name: p.grad.clone() for name, p in learner.model.named_parameters()})
        learner.model.zero_grad()
        return 0.0

    learner._update = capture
    return learner.step(rows, 0)["loss"], captured


def slow_loss(model, rows, config, temperature):
    """The objective written out: one row at a time, all logits, no tricks."""
    num_tokens = sum(len(row.positions_P) for row in rows)
    total = torch.zeros(())
    for row in rows:
        logits_TV = model.logits(model(torch.from_numpy(row.tokens_T)[None])[0]) / temperature
        logp_TV = torch.log_softmax(logits_TV, -1)
        for n, position in enumerate(row.positions_P):
            logp_V = logp_TV[position - 1]
            r = (logp_V[row.tokens_T[position]] - float(row.behaviour_logp_P[n])).exp()
            A, clip = float(row.advantage_P[n]), config.algorithm.loss
            objective = torch.minimum(r.clamp(max=clip.delta) * A, r.clamp(1 - clip.eps_low, 1 + clip.eps_high) * A)
            entropy = -(logp_V.exp() * logp_V).sum()
            total = total - (objective + config.algorithm.entropy_bonus * entropy) / num_tokens
    return total


@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_equal_the_slow_ones(make_model, make_rows, tied):
    model, rows = make_model(tied=tied), make_rows(6)
    expected = slow_loss(model, rows, CONFIG, 0.7)
    names = dict(model.named_parameters())
    gradients = dict(zip(names, torch.autograd.grad(expected, list(names.values())), strict=True))
    loss, found = gradients_of(learner_of(make_model(tied=tied)), rows)
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4)


def test_every_metric_of_a_step_is_declared(make_model, make_rows):
    found = learner_of(make_model()).step(make_rows(4), 0)
    assert found.keys() <= step_metrics.METRICS.keys()


def test_metrics_have_the_values_that_their_names_say(make_model, make_rows, monkeypatch):
    rows = make_rows(4, version=3) + make_rows(2, seed=1, version=5)
    clock = iter([10.0, 12.0])
    monkeypatch.setattr("shoal.train.learner.time.perf_counter", lambda: next(clock))
    found = learner_of(make_model()).step(rows, 5)
    assert found["staleness_rollouts"] == {"0": 2, "2": 4}
    assert found["reward_mean"] == pytest.approx(np.mean([row.reward for row in rows]))
    assert found["tokens"] == sum(len(row.tokens_T) for row in rows) == found["train_tokens_per_s"] * 2
    assert found["policy_tokens"] == sum(len(row.positions_P) for row in rows)
    assert 0 < found["entropy_nats"] < np.log(64) and 0 < found["clip_share"] < 1
    assert found["log_ratio_abs_max_nats"] > found["log_ratio_abs_mean_nats"] > 0


def test_several_updates_learn_from_the_same_rows_one_after_another(make_model, make_rows):
    rows, config = make_rows(8), msgspec.structs.replace(CONFIG, updates_per_batch=3)
    one, three = learner_of(make_model()), learner_of(make_model(), config)
    each, found = [one.step(rows, 4) for _ in range(3)], three.step(rows, 4)
    left, right = one.state(5), three.state(5)
    assert left.updates == right.updates == found["updates"] == 3
    assert all(torch.equal(left.tensors[name], right.tensors[name]) for name in left.tensors)
    for name in ("loss", "entropy_nats", "clip_share", "log_ratio_abs_mean_nats", "grad_norm"):
        assert found[name] == pytest.approx(np.mean([update[name] for update in each]))
    assert found["log_ratio_abs_max_nats"] == max(update["log_ratio_abs_max_nats"] for update in each)
    assert each[0]["log_ratio_abs_mean_nats"] != each[2]["log_ratio_abs_mean_nats"], "the ratio is to who sampled"


def test_updates_of_a_step_have_its_learning_rate(make_model, make_rows):
    learner = learner_of(make_model(), msgspec.structs.replace(CONFIG, updates_per_batch=2, schedule="linear"))
    seen, update = [], learner._update
    learner._update = lambda lr, version: (seen.append(lr), update(lr, version))[1]
    lrs = [learner.step(make_rows(4), version)["lr"] for version in (0, 1, 6)]
    assert seen == [lr for lr in lrs for _ in range(2)] and lrs[0] < lrs[1] and lrs[2] < lrs[1]


def test_log_probs_come_back_in_the_order_of_the_rows(make_model, make_rows):
    rows = make_rows(9)
    learner = learner_of(make_model())
    together = learner.logprobs(rows)
    for row, found_P in zip(rows, together, strict=True):
        np.testing.assert_allclose(found_P, learner.logprobs([row])[0], atol=1e-5)


def test_the_gradient_is_clipped_to_its_bound(make_model, make_rows):
    learner = learner_of(make_model(), TrainConfig(max_grad_norm=1e-3))
    seen = {}
    count = lambda lr: seen.update(n=sum(p.grad.square().sum() for p in learner.model.parameters()))  # noqa: E731
    learner._optimiser._moments.step = count
    assert learner.step(make_rows(), 0)["grad_norm"] > 1e-3
    assert seen["n"].sqrt().item() == pytest.approx(1e-3, rel=1e-3)


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(make_model, make_rows, caplog):
    config = msgspec.structs.replace(CONFIG, updates_per_batch=3)
    learner = learner_of(make_model(), config, objective=lambda terms, n: (terms.logp_N.sum() * float("nan"), {}))
    before = {name: tensor.clone() for name, tensor in learner.state(0).tensors.items()}
    found = learner.step(make_rows(), 0)
    assert found["update_skipped"] == 1 and found["updates"] == learner.updates == 0
    assert caplog.text.count("gradient not finite") == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.state(1).tensors.items())


def test_a_step_without_rows_leaves_the_weights_alone(make_model, make_rows, caplog):
    learner = learner_of(make_model())
    before = {name: tensor.clone() for name, tensor in learner.state(0).tensors.items()}
    found = learner.step([], 0)
    assert (
        found["update_skipped"] == 1
        and found.keys() <= step_metrics.METRICS.keys()
        and "nothing to learn from" in caplog.text
    )
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.state(1).tensors.items())


def test_only_matrices_decay(make_model, make_rows):
    config = TrainConfig(lr=0.5, warmup_steps=0, weight_decay=0.5, max_grad_norm=1e-30)
    learner = learner_of(make_model(), config)
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    learner.step(make_rows(), 0)
    for name, parameter in learner.model.named_parameters():
        kept = 0.75 if parameter.ndim == 2 else 1.0
        torch.testing.assert_close(parameter.data, before[name] * kept, atol=1e-6, rtol=1e-6)


def test_the_same_steps_give_the_same_bits(make_model, make_rows):
    final = []
    for _ in range(2):
        learner = learner_of(make_model())
        for version in range(3):
            learner.step(make_rows(seed=version), version)
        final.append({name: tensor.clone() for name, tensor in learner.state(3).tensors.items()})
    assert all(torch.equal(final[0][name], final[1][name]) for name in final[0])


def test_a_step_that_computes_layers_again_gives_the_same_bits(make_model, make_rows):
    def after(**changes):
        learner = learner_of(make_model(), msgspec.structs.replace(CONFIG, **changes))
        learner.step(make_rows(6), 0)
        return learner.model.recompute, learner.state(1).tensors

    (kept, tensors), (again, others) = after(), after(recompute="layers")
    assert not kept and again and all(tensors[name].equal(others[name]) for name in tensors)


def test_a_state_of_another_model_is_refused_by_name(make_model):
    other = learner_of(make_model(width=16)).state(4)
    with pytest.raises(StateError, match=r"version 4 belongs to another model: .* is \(.*16.*\) there"):
        learner_of(make_model()).restore(other)


def test_importing_the_step_does_not_import_transformers():
    code = "import sys, shoal.train.checkpoint, shoal.train.sft; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"False\n"


def truncated(most):
    return Grpo(ratio_to="old", corrections=(Truncate(most),))


def test_weights_correct_for_who_sampled_and_clips_are_against_the_start_of_the_step(make_model, make_rows):
    """Three updates equal those of the plain loss on rows that say so themselves."""
    rows, weighted = make_rows(8), []
    plain = msgspec.structs.replace(CONFIG, updates_per_batch=3, lr=3e-2, warmup_steps=0, algorithm=Grpo())
    truncating = msgspec.structs.replace(plain, algorithm=truncated(1.5))
    learner, other = learner_of(make_model(), truncating), learner_of(make_model(), plain)
    for row, old_P in zip(rows, other.logprobs(rows), strict=True):
        w_P, _ = truncated_weights(torch.from_numpy(old_P), torch.from_numpy(row.behaviour_logp_P), C=1.5)
        weighted.append(replace(row, behaviour_logp_P=old_P, weight_P=w_P.numpy()))
    found, expected = learner.step(rows, 0), other.step(weighted, 0)
    assert found["loss"] == expected["loss"] and found["clip_share"] == expected["clip_share"] > 0
    assert 0 < found["truncated_share"] < 1 and "truncated_share" not in expected
    for name, tensor in other.state(1).tensors.items():
        assert learner.state(1).tensors[name].equal(tensor), name


class First(SingleProcess):
    """One of several processes, which computes the first micro-batch."""

    def shares(self, packed):
        return super().shares(packed[:1])


def test_weights_of_rows_that_another_process_had_are_not_made_up(make_model, make_rows):
    """As when a step in which memory ran out between its updates is repeated by several processes."""
    budgets = (32, 4096)
    for algorithm in (Grpo(), truncated(2.0)):
        config = msgspec.structs.replace(CONFIG, updates_per_batch=2, algorithm=algorithm)
        learner = learner_of(make_model(), config, ranks=First())
        with pytest.raises(StateError, match="processes = 1") if algorithm.corrections else contextlib.nullcontext():
            learner.step(make_rows(8), 0, budgets)
