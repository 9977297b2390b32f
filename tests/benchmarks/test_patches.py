"""What patches are measured with: the entropy of a step, and PULSE's scheme."""

import numpy as np
import pytest

from benchmarks.patches import entropy_bits
from shoal.weights.delta.patch import make_patch
from shoal.weights.delta.tensor_codes import EncodedTensor
from tests.weights.versions import copied, equal, versions


def tensor(codes: list[int]) -> EncodedTensor:
    return EncodedTensor("BF16", (len(codes),), np.array(codes, "<u2"))


def test_the_entropy_is_that_of_places_signs_and_sizes_by_exponent():
    # Of 8 values with one exponent 2 change, by +1 and -1; of 2 with another both change, by +1 and +3.
    old = [0x3C10] * 8 + [0x3D10] * 2
    new = [0x3C11, 0x3C0F] + [0x3C10] * 6 + [0x3D11, 0x3D13]
    bits, figures = entropy_bits({"w": tensor(old)}, {"w": tensor(new)})
    places = 8 * (0.25 * 2 + 0.75 * np.log2(4 / 3))
    assert bits == pytest.approx(places + 2 + 0 + 0 + 0 + 2)
    assert figures["changed"] == 0.4 and figures["jump_1"] == 0.75 and figures["jump_3_4"] == 0.25


def test_a_patch_costs_little_more_than_the_entropy_of_its_step():
    old, new = versions(lr=4e-7, shapes={"w": (1024, 1024)})
    bits, _ = entropy_bits(old, new)
    patch = make_patch(old, new)
    assert patch is not None and bits < 8 * len(patch) < 1.08 * bits


def test_pulses_scheme_leads_to_the_next_version():
    pytest.importorskip("pyarrow")
    from benchmarks.peers import pulse

    old, new = versions(lr=1e-5)
    data, counts = pulse.encode(old, new)
    weights = copied(old)
    pulse.apply(weights, data, counts)
    assert equal(weights, new)
    assert len(data) < sum(5 * count for count in counts.values())
