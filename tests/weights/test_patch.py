"""Patches: exact both ways, refused where no patch leads, not made where they are not worth it, and never trusted."""

import itertools
import random

import numpy as np
import pytest
from safetensors.numpy import save_file

from shoal.errors import PeerError, StateError
from shoal.weights.delta import patch
from shoal.weights.delta.golomb_rice import write_number
from shoal.weights.delta.patch import MAGIC, apply_patch, make_patch
from shoal.weights.delta.tensor_codes import EncodedTensor, coded_directory, root_of
from shoal.weights.manifest import weights_root
from tests.weights.versions import as_stored, copied, equal, framed, sections_of, versions

CASES = 1000


def patch_of(base, new, **options):
    made = make_patch(base, new, **options)
    assert made is not None
    return made


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_a_patch_leads_to_the_next_version_and_back(dtype, threads):
    old, new = versions(dtype=dtype)
    weights, made = copied(old), patch_of(old, new, threads=threads)
    apply_patch(weights, made, threads=threads)
    assert equal(weights, new) and not equal(weights, old)
    apply_patch(weights, made, back=True, threads=threads)
    assert equal(weights, old)


def test_a_chain_of_patches_leads_from_version_to_version_and_back():
    rng = np.random.RandomState(1)
    path = 0.02 * rng.standard_normal((50, 80)) + np.cumsum(2e-6 * rng.standard_normal((6, 50, 80)), axis=0)
    past = [{"w": as_stored(values, "BF16")} for values in path]
    chain = [patch_of(base, new) for base, new in itertools.pairwise(past)]
    weights = copied(past[0])
    for made, new in zip(chain, past[1:], strict=True):
        apply_patch(weights, made)
        assert equal(weights, new)
    for made, base in zip(reversed(chain), reversed(past[:-1]), strict=True):
        apply_patch(weights, made, back=True)
        assert equal(weights, base)


def test_tensors_of_several_pieces_and_of_none_have_patches(monkeypatch):
    monkeypatch.setattr(patch, "PIECE_VALUES", 1000)
    old, new = versions(shapes={"a": (70, 40), "b": (1000,), "empty": (0, 4), "one": ()})
    weights = copied(old)
    apply_patch(weights, patch_of(old, new))
    assert equal(weights, new)


def test_a_tensor_that_does_not_change_costs_a_byte():
    old, new = versions()
    wider = [{**one, "still": as_stored(np.ones((300, 300)), "BF16")} for one in (old, new)]
    assert len(patch_of(*wider)) == len(patch_of(old, new)) + 1


def test_a_version_with_other_tensors_has_no_patch():
    old, new = versions()
    renamed = {("extra" if name == "head" else name): one for name, one in new.items()}
    turned = {**new, "head": EncodedTensor("BF16", (60, 40), new["head"].codes)}
    for other in (renamed, turned, {**new, "head": as_stored(np.ones((40, 60)), "F16")}):
        with pytest.raises(StateError, match=r"no patch leads to this version: (head|extra) was .* and is .* Publish"):
            make_patch(old, other)


def test_a_patch_that_is_not_worth_it_is_not_made():
    assert make_patch(*versions(dtype="F32", lr=1e-3)) is None
    assert make_patch(*versions(dtype="BF16", lr=1e-2)) is None
    sparse = versions(dtype="BF16", lr=1e-6)
    assert make_patch(*sparse) is not None and make_patch(*sparse, worth_it=0.001) is None


# --- where the tensors are ---


def test_patched_files_are_the_published_ones_byte_for_byte(tmp_path):
    folders = []
    for number, weights in enumerate(versions(dtype="F16")):
        folder = tmp_path / str(number)
        folder.mkdir()
        arrays = {name: one.codes.view("<f2").reshape(one.shape) for name, one in weights.items()}
        save_file(arrays, folder / "model.safetensors")
        folders.append(folder)
    base, new = (coded_directory(folder) for folder in folders)
    made = patch_of(base, new)
    assert root_of(new, threads=2) == weights_root(folders[1])
    apply_patch(coded_directory(folders[0], writable=True), made)
    assert (folders[0] / "model.safetensors").read_bytes() == (folders[1] / "model.safetensors").read_bytes()


# --- strangers' bytes ---


def test_a_patch_for_other_tensors_or_of_another_format_changes_nothing():
    old, new = versions()
    made = patch_of(old, new)
    other = {("h" if name == "head" else name): one for name, one in copied(old).items()}
    with pytest.raises(PeerError, match="for tensors of other names"):
        apply_patch(other, made)
    weights = copied(old)
    for wrong in (b"", b"PK\x03\x04" * 50, b"X" + made[1:], made[:-1], made + b"\x00"):
        with pytest.raises(PeerError, match=r"patch cannot be used: it .* Fetch the whole version"):
            apply_patch(weights, wrong)
        assert equal(weights, old)


def flipped(data, rng):
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def truncated(data, rng):
    return data[: rng.randrange(len(data))]


def reordered(data, rng):
    a, b, c, d = sorted(rng.randrange(len(data) + 1) for _ in range(4))
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def lying(data, rng):
    """Another number within a piece, or another length of one."""
    head, sections = sections_of(data)
    one = rng.choice([index for index, section in enumerate(sections) if section])
    lie = write_number(rng.choice([0, 1, 2, 3, 50, 127, 128, 2400, 3600, 1 << 20, 1 << 40]))
    if rng.random() < 0.7:
        at = rng.randrange(min(60, len(sections[one])))
        sections[one] = sections[one][:at] + lie + sections[one][at + rng.choice([0, 1, 2]) :]
        return framed(head, sections)
    before, after = framed(head, sections[:one]), framed(b"", sections[one + 1 :])
    return before + lie + sections[one] + after


@pytest.mark.parametrize("back", [False, True], ids=["forward", "back"])
@pytest.mark.parametrize("spoil", [flipped, truncated, reordered, lying])
def test_a_spoiled_patch_never_makes_wrong_weights(spoil, back):
    rng = random.Random(f"{spoil.__name__} {back}")
    old, new = versions(shapes={"a": (60, 40), "b": (30, 40), "norm": (40,)}, lr=3e-6)
    made = patch_of(old, new)
    start, end = (new, old) if back else (old, new)
    promised, refused, torn = root_of(end), 0, 0
    for _ in range(CASES):
        while (spoiled := spoil(made, rng)) == made:
            pass
        weights = copied(start)
        try:
            apply_patch(weights, spoiled, back=back)
        except PeerError as error:
            assert "\n" not in str(error)
            refused += 1
            torn += not equal(weights, start)
        else:
            wrong = root_of(weights) != promised
            refused += wrong
            assert wrong or equal(weights, end)
    assert refused > 0.99 * CASES and (torn > 0 or spoil is truncated)


def test_the_format_has_not_changed():
    old = {"b": EncodedTensor("BF16", (6,), np.array([0x3C00, 0x3C01, 0x3C7F, 0xBC00, 0, 0x8000], "<u2"))}
    new = {"b": EncodedTensor("BF16", (6,), np.array([0x3C00, 0x3C02, 0x3C80, 0xBC00, 0, 0], "<u2"))}
    old["a"] = new["a"] = EncodedTensor("F32", (), np.array([7], "<u4"))
    made = patch_of(old, new, worth_it=100)
    assert made[:8] == MAGIC and made[40:] == bytes(
        [
            *(0, 11),  # nothing of a, 11 bytes of b
            *(1, 0x00, 0x78, 6, 2, 0, 1, 0),  # one group with 6 values; 2 of them change, 1 crosses, all by one unit
            *(0b1101, 0b1011),  # {1, 5} of 6 and {2} of 6: unary 1, 01, 1 and low parts 1, 1, 2 in 1, 1, 2 bits
            0b000,  # all up
        ]
    )
    weights = copied(old)
    apply_patch(weights, made)
    assert equal(weights, new)
