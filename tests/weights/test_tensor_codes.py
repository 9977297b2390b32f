"""Codes of numbers: their order and their exponents."""

import numpy as np
import pytest

from shoal.weights.delta.tensor_codes import KINDS, at_places, exponents, places


@pytest.mark.parametrize("name", ["BF16", "F16", "F8_E4M3", "F8_E5M2", "I16", "U8"])
def test_places_and_codes_are_one_to_one(name):
    kind = KINDS[name]
    codes = np.arange(1 << kind.bits).astype(kind.codes)
    assert np.array_equal(at_places(places(codes, kind), kind), codes)
    assert len(np.unique(places(codes, kind))) == len(codes)


def test_places_ascend_by_one_from_value_to_value():
    codes = np.arange(1 << 16).astype("<u2")
    values = codes.view("<f2").astype(np.float64)
    finite = np.isfinite(values)
    order = np.argsort(places(codes[finite], KINDS["F16"]))
    assert np.all(np.diff(values[finite][order]) >= 0)
    assert np.all(np.diff(places(codes[finite], KINDS["F16"])[order]) == 1)
    zeros = np.array([-0.0, 0.0], "<f4").view("<u4")
    assert places(zeros, KINDS["F32"]).tolist() == [0x7FFFFFFF, 0x80000000]


def test_exponents_are_those_of_the_values():
    values = np.array([1.0, -1.5, 0.02, -3e38, 0.0, np.inf, np.nan], "<f4")
    assert exponents(values.view("<u4"), KINDS["F32"]).tolist() == [127, 127, 121, 254, 0, 255, 255]
    assert exponents((values.view("<u4") >> 16).astype("<u2"), KINDS["BF16"]).tolist() == [
        127,
        127,
        121,
        254,
        0,
        255,
        255,
    ]
    assert exponents(np.array([1.0, -2.0, 6e-8], "<f2").view("<u2"), KINDS["F16"]).tolist() == [15, 16, 0]
    assert exponents(np.array([200, 3], "<u2"), KINDS["U16"]).tolist() == [0, 0]
