"""Golden vectors of the published proof format, made by the python package `toploc` 0.1.6, both directions.

Run: `.venv-toploc/bin/python benchmarks/peers/toploc_golden.py`, where `peers/requirements-toploc.txt` is installed.
It writes `tests/algos/toploc_golden.json`, which `tests/algos/test_toploc.py` reads without the package: for each case
the package's bytes, whether ours (`shoal/algos/toploc.py`) were the same, and what its verifier says of ours.
"""

import hashlib
import json
import sys
from pathlib import Path

if {"-h", "--help"} & {*sys.argv[1:]}:  # before the imports, which a reader may not have
    print(__doc__)
    sys.exit()

import numpy as np
import torch
from toploc import build_proofs_bytes, verify_proofs_bytes

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from shoal.algos import toploc  # noqa: E402
from shoal.algos.toploc import PRIME  # noqa: E402

CASES = (
    {"tokens": 64, "width": 64, "k": 32, "chunk": 32},
    {"tokens": 35, "width": 64, "k": 16, "chunk": 32},
    {"tokens": 32, "width": 256, "k": 64, "chunk": 32},
    {"tokens": 33, "width": 512, "k": 128, "chunk": 32},
    {"tokens": 32, "width": 4096, "k": 128, "chunk": 32},
    {"tokens": 32, "width": 4096, "k": 128, "chunk": 32, "small_modulus": True},
    {"tokens": 32, "width": 4096, "k": 128, "chunk": 32, "tied": True},
)


def main() -> None:
    """Find a seed for each case that has the wanted properties, and write all of them."""
    readme = torch.manual_seed(42) and [torch.randn(5, 16, dtype=torch.bfloat16)]
    readme += [torch.randn(16, dtype=torch.bfloat16) for _ in range(10)]
    written = {
        "readme": {
            "prefill": codes(readme[0]),
            "generated": codes(torch.stack(readme[1:])),
            "k": 4,
            "chunk": 3,
            "proofs": [proof.hex() for proof in build_proofs_bytes(readme, 3, 4)],
        },
        "cases": [next(filter(None, (attempt(case, seed) for seed in range(10_000)))) for case in CASES],
    }
    (ROOT / "tests/algos/toploc_golden.json").write_text(json.dumps(written, indent=1) + "\n")
    for case in written["cases"]:
        print({key: value for key, value in case.items() if key != "proofs"})


def attempt(case: dict, seed: int) -> dict | None:
    """The case under this seed, or None where a chunk is tied at its k-th place (or not, where a tie is wanted)."""
    values = np.random.RandomState(seed).standard_normal((case["tokens"], case["width"])).astype(np.float32)
    tensor = torch.from_numpy(values).bfloat16()
    theirs = build_proofs_bytes(list(tensor), case["chunk"], case["k"], skip_prefill=True)
    ours = toploc.prove([values], k=case["k"], chunk_tokens=case["chunk"])
    tied = any(is_tied(part, case["k"]) for part in tensor.split(case["chunk"]))
    moduli = [int.from_bytes(proof[:2], "big") for proof in theirs]
    if tied != case.get("tied", False) or (min(moduli) < PRIME) != case.get("small_modulus", False):
        return None
    size = 2 + 2 * case["k"]
    cut = [ours[start : start + size] for start in range(0, len(ours), size)]
    results = verify_proofs_bytes(tensor, cut, case["chunk"], case["k"], True)
    return case | {
        "seed": seed,
        "proofs": [proof.hex() for proof in theirs],
        "moduli": moduli,
        "same_bytes": ours == b"".join(theirs),
        "our_sha256": hashlib.sha256(ours).hexdigest(),
        "package_says_of_ours": [[r.exp_mismatches, r.mant_err_mean] for r in results],
    }


def is_tied(part: torch.Tensor, k: int) -> bool:
    """Whether the k-th and the next largest magnitude of a chunk are equal."""
    largest = part.reshape(-1).abs().float().sort(descending=True).values
    return bool(largest[k - 1] == largest[k])


def codes(tensor: torch.Tensor) -> list[list[int]]:
    """bfloat16 codes of a matrix."""
    return (tensor.view(torch.int16).to(torch.int32) & 0xFFFF).tolist()


if __name__ == "__main__":
    main()
