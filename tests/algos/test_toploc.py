"""TOPLOC: the published format, which noise passes, and which forgeries do not."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from shoal.algos import toploc
from shoal.algos.toploc import CHUNK_TOKENS, PRIME, compare, evaluate, interpolate, prove, top_k
from shoal.config import ACTIVATION_ERROR
from shoal.verification.checks_with_model import judge_activations

GOLDEN = json.loads(Path(__file__).with_name("toploc_golden.json").read_text())
"""Made by the python package toploc 0.1.6: benchmarks/peers/toploc_golden.py."""

FP32, BF16 = ACTIVATION_ERROR["float32"], ACTIVATION_ERROR["bfloat16"]


def states(seed, tokens, width):
    return np.random.RandomState(seed).standard_normal((tokens, width)).astype(np.float32)


def passes(hidden, proof, bound=FP32):
    figures = compare(hidden, proof)
    return not isinstance(figures, str) and judge_activations(figures, bound) is None


# --- the published format ---


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: f"{c['tokens']}x{c['width']}-k{c['k']}-s{c['seed']}")
def test_our_bytes_equal_the_packages_and_each_reads_the_others(case):
    hidden = [states(case["seed"], case["tokens"], case["width"])]
    ours = prove(hidden, k=case["k"], chunk_tokens=case["chunk"])
    theirs = b"".join(bytes.fromhex(proof) for proof in case["proofs"])
    assert (ours == theirs) == (not case.get("tied", False))
    # The package's verdict on our bytes was recorded when the vectors were made; a tie at the k-th place costs it one.
    assert hashlib.sha256(ours).hexdigest() == case["our_sha256"]
    assert [said[1] for said in case["package_says_of_ours"]] == [0] * len(case["proofs"])
    assert sum(said[0] for said in case["package_says_of_ours"]) <= (1 if case.get("tied") else 0)
    figures = compare(hidden, theirs, k=case["k"], chunk_tokens=case["chunk"])
    assert figures.mismatched_C.sum() <= (1 if case.get("tied") else 0) and figures.error_C.sum() == 0


def test_a_modulus_below_the_field_is_among_the_vectors():
    assert any(min(case["moduli"]) < PRIME for case in GOLDEN["cases"])


# --- the polynomial ---


def slow_interpolation(x, y):
    """Lagrange's formula in plain integers."""
    total = [0] * len(x)
    for i in range(len(x)):
        basis, scale = [1], 1
        for j in range(len(x)):
            if j != i:
                basis = [
                    ((basis[n - 1] if n else 0) - x[j] * (basis[n] if n < len(basis) else 0)) % PRIME
                    for n in range(len(basis) + 1)
                ]
                scale = scale * (x[i] - x[j]) % PRIME
        inverse = pow(scale, PRIME - 2, PRIME)
        total = [(t + y[i] * b * inverse) % PRIME for t, b in zip(total, basis, strict=True)]
    return total


@pytest.mark.parametrize("k", [1, 3, 128])
def test_interpolation_and_evaluation_equal_plain_integer_arithmetic(k):
    rng = np.random.default_rng(k)
    x_CK = np.stack([rng.choice(PRIME, k, replace=False) for _ in range(3)])
    x_CK[0, np.argmin(x_CK[0])] = 0
    x_CK[0, np.argmax(x_CK[0])] = PRIME - 1
    y_CK = rng.integers(0, PRIME, (3, k))
    coefficients_CK = interpolate(x_CK, y_CK)
    assert (evaluate(coefficients_CK, x_CK) == y_CK).all()
    for row in range(3):
        assert coefficients_CK[row].tolist() == slow_interpolation(x_CK[row].tolist(), y_CK[row].tolist())
    at_CX = rng.integers(0, PRIME, (3, 5))
    for row in range(3):
        slow = [sum(c * pow(x, n, PRIME) for n, c in enumerate(coefficients_CK[row].tolist())) % PRIME
                for x in at_CX[row].tolist()]  # fmt: skip
        assert evaluate(coefficients_CK, at_CX)[row].tolist() == slow


def test_values_are_rounded_as_torch_rounds():
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    bits[:6] = [0x7F7FFFFF, 0xFF7F8000, 0x3F808000, 0x3F818000, 0x00000001, 0x80000000]
    rounded = torch.from_numpy(bits.view(np.float32).copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    finite = ~np.isnan(bits.view(np.float32))
    assert (toploc._codes(bits.astype(np.int64)) == rounded)[finite].all()


@pytest.mark.parametrize("values", ["gaussian", "few levels", "mostly zero", "all equal"])
def test_selection_equals_a_plain_sort_with_ties_to_the_lower_index(values):
    rng = np.random.default_rng(5)
    values_CN = rng.standard_normal((4, 700)).astype(np.float32)
    if values == "few levels":
        values_CN = np.round(values_CN)
    if values == "mostly zero":
        values_CN[:, 3:] = 0
    if values == "all equal":
        values_CN[:] = -2.5
    index_CK, code_CK = toploc._largest(values_CN, 37)
    for row, chunk in enumerate(values_CN):
        codes = toploc._codes(chunk.view(np.uint32).astype(np.int64))
        order = sorted(range(700), key=lambda i: (-(codes[i] & 0x7FFF), i))[:37]
        assert index_CK[row].tolist() == order and (code_CK[row] == codes[order]).all()


# --- sizes ---


def test_k_follows_from_width_and_tokens():
    full = [top_k(CHUNK_TOKENS * width, width) for width in (64, 128, 256, 512, 8192)]
    assert full == [32, 32, 64, 128, 128]
    assert [top_k(tokens * 64, 64) for tokens in (1, 2, 3, 4, 5)] == [8, 16, 24, 32, 32]
    assert top_k(4, 4) == 1


@pytest.mark.parametrize("tokens", [1, 32, 65])
@pytest.mark.parametrize("width", [4, 64, 4096])
def test_honest_proof_of_any_length_is_read_without_error(tokens, width):
    hidden = [states(1, tokens, width), states(2, 1, width)]
    proof = prove(hidden)
    figures = compare(hidden, proof)
    chunks = -(-tokens // CHUNK_TOKENS)
    assert len(figures.entries_C) == chunks + 1 and figures.rollout_C.tolist() == [0] * chunks + [1]
    assert figures.first_C.tolist() == [*range(0, tokens, CHUNK_TOKENS), 0]
    assert not figures.mismatched_C.any() and not figures.error_C.any()
    assert len(proof) == 2 * (figures.entries_C + 1).sum() <= (chunks + 1) * (2 + 2 * toploc.MAX_K)
    assert passes(hidden, proof)


def test_full_chunks_cost_at_most_8_1_bytes_a_token():
    assert len(prove([states(0, 320, 1024)])) / 320 <= 8.1


def test_activations_that_are_not_finite_are_not_proven():
    for value in (np.nan, np.inf):
        hidden = states(0, 3, 64)
        hidden[1, 5] = value
        with pytest.raises(ValueError, match="not finite"):
            prove([hidden])


# --- noise and errors ---


@pytest.mark.parametrize("width", [64, 2048])
def test_float32_noise_passes_and_an_error_of_one_percent_does_not(width):
    rng, hidden = np.random.default_rng(0), states(3, 160, width)
    proof = prove([hidden])
    noise = rng.standard_normal(hidden.shape).astype(np.float32)
    assert passes([hidden * (1 + 1e-5 * noise)], proof)
    assert not passes([hidden + 1e-2 * noise], proof)
    assert passes([hidden + 1e-2 * noise], proof, BF16)
    assert not passes([hidden + 1e-1 * noise], proof, BF16)


def test_the_sign_counts():
    hidden = states(0, 64, 256)
    figures = compare([-hidden], prove([hidden]))
    assert (figures.mismatched_C == figures.entries_C).all()


def test_an_error_above_a_sixteenth_is_a_mismatch():
    hidden = states(0, 64, 256)
    near, far = (compare([hidden * np.float32(scale)], prove([hidden])) for scale in (1.04, 1.1))
    assert near.mismatched_C.max() <= 3  # after rounding, other values may be the k-th largest
    assert (far.mismatched_C == far.entries_C).all()


def test_honest_values_that_are_all_equal_pass():
    hidden = np.ones((70, 64), dtype=np.float32)
    hidden[:, 9] = 40
    assert passes([hidden], prove([hidden])) and passes([hidden * np.float32(1 + 1e-5)], prove([hidden]))


# --- forgeries; the long table is benchmarks/toploc.py ---


def constant(width, code):
    k = top_k(CHUNK_TOKENS * width, width)
    return np.array([PRIME, code, *[0] * (k - 1)], dtype=">u2").tobytes()


@pytest.mark.parametrize("width", [64, 4096])
@pytest.mark.parametrize("scales", ["gaussian", "lognormal"])
def test_one_typical_magnitude_for_all_is_refused(width, scales):
    rng = np.random.default_rng(width)
    scale_D = rng.lognormal(0, 0.8, width) if scales == "lognormal" else np.ones(width)
    for _ in range(5):
        hidden = (rng.standard_normal((CHUNK_TOKENS, width)) * scale_D).astype(np.float32)
        typical = int(np.median(toploc._largest(hidden.reshape(1, -1), top_k(hidden.size, width))[1] & 0x7FFF))
        for bound in (FP32, BF16):
            assert not passes([hidden], constant(width, typical), bound)


@pytest.mark.parametrize("variation", [0.02, 0.2])
@pytest.mark.parametrize("jitter", [0.0, 0.003])
def test_typical_magnitudes_of_outlier_channels_are_refused(variation, jitter):
    """The forger knows which four channels hold the largest values, their signs and means, but not this chunk."""
    rng, width = np.random.default_rng(7), 2048
    for _ in range(3):
        hidden = rng.standard_normal((CHUNK_TOKENS, width)).astype(np.float32)
        mean = rng.uniform(10, 40, 4) * rng.choice([-1, 1], 4)
        hidden[:, [5, 77, 900, 2000]] = mean * (1 + variation * rng.standard_normal((CHUNK_TOKENS, 4)))
        typical = np.zeros_like(hidden)
        typical[:, [5, 77, 900, 2000]] = mean * (1 + jitter * rng.standard_normal((CHUNK_TOKENS, 4)))
        proof = prove([typical])
        assert not passes([hidden], proof)
        assert not passes([hidden], proof, BF16)


def test_a_small_modulus_does_not_let_one_point_prove_many_values():
    """With m = width, one point of the polynomial covers a channel at every token."""
    rng, width = np.random.default_rng(0), 4096
    hidden = rng.standard_normal((CHUNK_TOKENS, width)).astype(np.float32)
    hidden[:, [5, 77, 900, 2000]] = [30, -20, 15, 11]
    hidden[3, 8] = 50  # one value that the forger did not expect
    channels = np.arange(128)[None] * 32 + 5
    channels[0, :4] = [5, 77, 900, 2000]
    code_CK = toploc._codes(np.where(np.arange(128) < 4, np.array([30, -20, 15, 11] * 32), 1.5 + np.arange(128))
                            .astype(np.float32).view(np.uint32).astype(np.int64))[None]  # fmt: skip
    coefficients_CK = interpolate(channels, code_CK)
    proof = np.concatenate([[width], coefficients_CK[0]]).astype(">u2").tobytes()
    assert compare([hidden], proof).mismatched_C[0] >= 124
    narrow = hidden[:, :1024]
    assert compare([narrow], proof) == "modulus that no prover writes"


def test_a_proof_under_another_modulus_fits_no_value():
    """The largest values have indices below 2^15, which no modulus near 65497 changes."""
    hidden = states(0, CHUNK_TOKENS, 4096)
    hidden[:8] *= 10
    proof = prove([hidden])
    assert passes([hidden], proof)
    other = (PRIME - 1).to_bytes(2, "big") + proof[2:]
    assert compare([hidden], other).mismatched_C[0] == 128


# --- hostile bytes ---


@pytest.mark.parametrize("body", [b"", b"\0", b"\xff\xd9", bytes(66), bytes(1 << 16)])
def test_a_proof_of_another_length_is_named_as_such(body):
    assert compare([states(0, 40, 64)], body) == "length differs from that of its chunks"


def test_numbers_outside_the_field_are_named_as_such():
    hidden = [states(0, 32, 64)]
    proof = prove(hidden)
    for modulus in (0, 1, 64, PRIME - 1, PRIME + 1, 65535):
        assert compare(hidden, modulus.to_bytes(2, "big") + proof[2:]) == "modulus that no prover writes"
    for coefficient in (PRIME, 65535):
        assert compare(hidden, proof[:-2] + coefficient.to_bytes(2, "big")) == "coefficient outside the field"


def test_a_modulus_outside_the_field_is_refused_at_every_width():
    """A chunk of more values than the field has elements may have any modulus below it, so only the range is checked."""
    hidden = [states(0, 32, 4096)]
    proof = prove(hidden)
    for modulus in (0, PRIME + 1, 65535):
        assert compare(hidden, modulus.to_bytes(2, "big") + proof[2:]) == "modulus that no prover writes"


def test_mutated_proofs_are_refused_and_never_raise():
    """Bits, cuts, splices and noise; in float32 none is accepted."""
    rng, accepted = np.random.default_rng(0), 0
    hidden = [[states(seed, tokens, 64)] for seed, tokens in ((0, 1), (1, 5), (2, 33), (3, 40))]
    proofs = [prove(h) for h in hidden]
    for attempt in range(2_000):
        place = attempt % len(proofs)
        mutant = mutated(proofs[place], rng)
        accepted += mutant != proofs[place] and passes(hidden[place], mutant)
    assert accepted == 0


def mutated(proof: bytes, rng: np.random.Generator) -> bytes:
    mutant, kind = bytearray(proof), rng.integers(6)
    at = int(rng.integers(len(mutant)))
    if kind == 0:
        mutant[at] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        del mutant[at : at + int(rng.integers(1, 8))]
    elif kind == 2:
        mutant[at:at] = rng.bytes(int(rng.integers(1, 8)))
    elif kind == 3:
        mutant[at : at + 8] = rng.bytes(len(mutant[at : at + 8]))
    elif kind == 4:
        mutant[:] = rng.bytes(len(mutant))
    else:
        mutant[at & ~1 :] = bytes(len(mutant) - (at & ~1))
    return bytes(mutant)
