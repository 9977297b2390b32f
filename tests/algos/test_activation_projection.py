"""Projections: equal activations give equal numbers, others do not, and those of one key tell nothing about another's."""

import numpy as np

from shoal.algos.activation_projection import VALUES, agree, project

RNG = np.random.default_rng(0)


def activations(n=64, d=32):
    return RNG.standard_normal((n, d)).astype(np.float32)


def test_values_are_about_normal_with_variance_one():
    values = np.array([project([activations()], bytes([i & 255, i >> 8])) for i in range(2000)])
    assert abs(values.mean()) < 0.05 and abs(values.std() - 1.0) < 0.05


def test_rounding_to_bfloat16_agrees_and_other_activations_never_do():
    for i in range(500):
        hidden = activations()
        noisy = hidden * (1 + RNG.standard_normal(hidden.shape) / 256)
        assert agree(project([hidden], bytes([i % 256])), project([noisy.astype(np.float32)], bytes([i % 256])))
        assert not agree(project([hidden], b"a"), project([activations()], b"a"))


def test_a_guess_without_the_activations_never_agrees_in_many_tries():
    truth = np.array(project([activations()], b"a"))
    guesses = RNG.standard_normal((20_000, VALUES))
    assert not any(agree(truth, guess) for guess in guesses)


def test_activations_in_parts_give_the_numbers_of_the_whole():
    hidden = activations()
    assert agree(project([hidden], b"a"), project([hidden[:7], hidden[7:7], hidden[7:]], b"a"))


def test_projections_under_two_keys_do_not_agree():
    hidden = activations()
    assert not agree(project([hidden], b"a"), project([hidden], b"b"))


def test_nan_or_another_length_agrees_with_nothing():
    assert not agree((float("nan"),) * VALUES, (0.0,) * VALUES) and not agree((), (0.0,) * VALUES)


def test_the_order_of_tokens_matters_and_no_tokens_give_zeros():
    hidden = activations()
    assert not agree(project([hidden], b"a"), project([hidden[::-1]], b"a"))
    assert project([np.zeros((0, 8), np.float32)], b"a") == (0.0,) * VALUES
