"""Supervised fine-tuning learns its examples, the same way every time."""

import torch

from shoal.config import EnvConfig, SftConfig, preset_imitation_lr, preset_lr
from shoal.train.sft import FineTuning, fine_tune

# The policy repeats the letter that the prompt shows.
EXAMPLES = [([2, letter, 3, letter, letter, 5], [0, 0, 0, 1, 1, 1]) for letter in range(6, 26)]


def tuned(make_model, seed=0):
    config = SftConfig(name="t", env=EnvConfig(name="none"), steps=60, batch=20, lr=1e-2, warmup_steps=5, seed=seed)
    losses = []
    model = make_model()
    fine_tune(model, EXAMPLES, config, lambda step, metrics: losses.append(metrics["loss"]))
    return losses, model.state_dict()


def test_the_loss_falls_to_almost_zero_on_a_task_that_can_be_learned(make_model):
    losses, _ = tuned(make_model)
    assert len(losses) == 60 and losses[0] > 3.0 and losses[-1] < 0.1


def test_the_seed_decides_every_bit(make_model):
    (_, first), (_, second), (_, other) = tuned(make_model), tuned(make_model), tuned(make_model, seed=1)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_learning_rate_that_is_left_open_is_that_of_imitation(make_model):
    model = make_model()
    learned = sum(one.numel() for one in model.trainable().values())
    config = SftConfig(name="t", env=EnvConfig(name="none"), steps=2, batch=20, warmup_steps=0)
    tuning = FineTuning(model, EXAMPLES, config)
    assert tuning.step()["lr"] == tuning.config.lr == preset_imitation_lr(learned) > preset_lr(learned)
