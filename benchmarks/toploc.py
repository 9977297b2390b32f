"""Proofs of activations: speed beside the python package, forgeries accepted, honest work refused, mutated bytes.

Run: `OMP_NUM_THREADS=1 python benchmarks/toploc.py`, and with `--long` for 1,000 forgeries a cell and 10^6 mutated
proofs. The package `toploc` 0.1.6 lives in `.venv-toploc`, with a torch that its wheel loads with; it is installed there
when that is missing. One line of JSON at the end.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.measure import arguments, cpu_ms, report
from shoal.algos.toploc import CHUNK_TOKENS, PRIME, compare, prove, top_k
from shoal.config import ACTIVATION_ERROR, TinyPolicy
from shoal.engine.interface import ScoreRequest
from shoal.engine.native import LocalEngine
from shoal.models.random_model import make_tiny
from shoal.verification.checks_with_model import judge_activations

HERE = Path(__file__).resolve().parent
PEER_VENV = HERE.parent / ".venv-toploc"
SPEED_WIDTHS, SPEED_CHUNKS, SPEED_REPEATS, ROUNDS = (512, 1024, 4096), 64, 7, 3
WIDTHS = (64, 256, 512, 2048, 4096)
SHAPES = ((64, 2), (128, 4), (256, 4), (512, 6))
"""Widths and layers of the policies that honest work is done with."""
GROUP_CHUNKS = 16
"""Chunks of the group in which a forger forges everything."""


def main() -> None:
    parser = arguments(__doc__, "10 forgeries a cell, 1,000 mutated proofs, no package")
    parser.add_argument("--long", action="store_true", help="1,000 forgeries a cell, 1,000,000 mutated proofs")
    options = parser.parse_args()
    num_forgeries, num_proofs = (1000, 1_000_000) if options.long else (10, 1000) if options.quick else (100, 20_000)
    result = {
        "speed": {} if options.quick else speed(),
        "forgeries": forgeries(num_forgeries),
        "honest": honest(SHAPES[:1] if options.quick else SHAPES),
        "fuzz": fuzz(num_proofs),
    }
    report("toploc", result)


# --- speed ---


def speed() -> dict[str, dict[str, float]]:
    """CPU-microseconds for a chunk of 32 tokens at k = 128, ours and the package's, in alternating rounds."""
    rounds = [(_ours(), _theirs()) for _ in range(ROUNDS)]
    table = {}
    print("CPU us for a chunk, k = 128      build: ours  package   ratio    check: ours  package   ratio    both")
    for width in map(str, SPEED_WIDTHS):
        row = {f"{side}_{job}_us": round(1e6 * median(pair[i][width][job] for pair in rounds), 1)
               for i, side in enumerate(("our", "package")) for job in ("build", "check")}  # fmt: skip
        build = row["package_build_us"] / row["our_build_us"]
        check = row["package_check_us"] / row["our_check_us"]
        both = sum(row[f"package_{job}_us"] for job in ("build", "check")) / (row["our_build_us"] + row["our_check_us"])
        table[width] = row | {"ratio_build": round(build, 2), "ratio_check": round(check, 2), "ratio": round(both, 2)}
        print(f"  width {width:>5}                    {row['our_build_us']:>7} {row['package_build_us']:>8} {build:>7.1f}"
              f"        {row['our_check_us']:>7} {row['package_check_us']:>8} {check:>7.1f} {both:>7.1f}")  # fmt: skip
    return table


def _ours() -> dict[str, dict[str, float]]:
    figures = {}
    for width in SPEED_WIDTHS:
        states = np.random.default_rng(0).standard_normal((SPEED_CHUNKS * CHUNK_TOKENS, width), dtype=np.float32)
        proof = prove([states])
        assert len(proof) == SPEED_CHUNKS * 258
        figures[str(width)] = {
            "build": _seconds(lambda given=states: prove([given])) / SPEED_CHUNKS,
            "check": _seconds(lambda given=states, p=proof: compare([given], p)) / SPEED_CHUNKS,
        }
    return figures


def _theirs() -> dict[str, dict[str, float]]:
    if not (PEER_VENV / "bin/python").exists():
        print(f"installing toploc 0.1.6 into {PEER_VENV} ...", flush=True)
        venv.create(PEER_VENV, with_pip=True)
        needed = HERE / "peers/requirements-toploc.txt"
        subprocess.run([PEER_VENV / "bin/python", "-m", "pip", "install", "-qq", "-r", needed], check=True)
    asked = [json.dumps(SPEED_WIDTHS), str(SPEED_CHUNKS), str(SPEED_REPEATS)]
    command = [PEER_VENV / "bin/python", HERE / "peers/toploc_speed.py", *asked]
    told = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True, text=True
    )
    return json.loads(told.stdout.splitlines()[-1])


def _seconds(work: Callable[[], object]) -> float:
    return cpu_ms(SPEED_REPEATS, {"": work})[""] / 1000


# --- forgeries ---


class Source:
    """Synthetic activations: the forger knows their law, the verifier's chunks are new draws."""

    def __init__(self, width: int, scales: str, outliers: int, variation: float, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.width, self.variation = width, variation
        self.scale_D = self.rng.lognormal(0.0, 0.8, width) if scales == "lognormal" else np.ones(width)
        self.channels = self.rng.choice(width, outliers, replace=False)
        top = 8.0 * float(self.scale_D.max())
        self.mean = self.rng.uniform(top, 4 * top, outliers) * self.rng.choice([-1, 1], outliers)

    def chunk(self) -> np.ndarray:
        """What the policy computes for 32 tokens."""
        states = self.rng.standard_normal((CHUNK_TOKENS, self.width), dtype=np.float32) * self.scale_D
        noise = self.rng.standard_normal((CHUNK_TOKENS, len(self.channels)))
        states[:, self.channels] = self.mean * (1 + self.variation * noise)
        return states.astype(np.float32)

    def typical(self) -> np.ndarray:
        """What a channel usually holds when it is among the largest, jittered."""
        states = np.broadcast_to(3.0 * self.scale_D, (CHUNK_TOKENS, self.width)).copy()
        states[:, self.channels] = self.mean
        jitter = self.rng.standard_normal(states.shape)
        return (states * (1 + 0.002 * jitter)).astype(np.float32)


def forgeries(num: int) -> dict[str, dict[str, int]]:
    """Accepted out of `num`, each by the bounds of float32 and of bfloat16: single chunks, and groups of 16 chunks."""
    table = {}
    print(f"\nforgeries accepted of {num}           float32  bfloat16  bfloat16, group of {GROUP_CHUNKS} chunks")
    for name, source, forge in _cells():
        k = top_k(CHUNK_TOKENS * source.width, source.width)
        chunks, passed = [], {"float32": 0, "bfloat16": 0}
        for _ in range(num):
            figures = compare([source.chunk()], forge(source, k))
            assert not isinstance(figures, str)
            chunks.append(figures)
            for dtype in passed:
                passed[dtype] += judge_activations(figures, ACTIVATION_ERROR[dtype]) is None
        groups = np.random.default_rng(0).integers(0, num, (num, GROUP_CHUNKS))
        pooled = [
            type(chunks[0])(*map(np.concatenate, zip(*(chunks[i] for i in group), strict=True))) for group in groups
        ]
        row = {
            **passed,
            "group_bfloat16": sum(judge_activations(g, ACTIVATION_ERROR["bfloat16"]) is None for g in pooled),
        }
        table[name] = row
        print(f"  {name:<38}{row['float32']:>5}{row['bfloat16']:>10}{row['group_bfloat16']:>10}", flush=True)
    return table


def _cells() -> Iterator[tuple[str, Source, Callable[[Source, int], bytes]]]:
    for width, scales in itertools.product(WIDTHS, ("gaussian", "lognormal")):
        yield f"{width} {scales}: constant", Source(width, scales, 0, 0.0, width), constant
        yield f"{width} {scales}: typical", Source(width, scales, 0, 0.0, width), typical
    for width, variation in itertools.product(WIDTHS, (0.02, 0.05, 0.1, 0.2)):
        k = top_k(CHUNK_TOKENS * width, width)
        for outliers in sorted({4, k // CHUNK_TOKENS}):
            name = f"{width} {outliers} outliers {variation:.0%}"
            yield f"{name}: typical", Source(width, "gaussian", outliers, variation, width), typical
    for width in WIDTHS:
        yield f"{width} 4 outliers 2%: constant", Source(width, "gaussian", 4, 0.02, width), constant
    for variation in (0.001, 0.003, 0.01):  # the limit: what varies by less than the bound proves nothing
        yield f"512 4 outliers {variation:.1%}: typical", Source(512, "gaussian", 4, variation, 512), typical


def constant(source: Source, k: int) -> bytes:
    """One magnitude for all, the median of an earlier chunk's largest, in the commoner sign."""
    values = source.chunk().reshape(-1)
    largest = values[np.argpartition(-np.abs(values), k)[:k]]
    value = np.float32(np.median(np.abs(largest)) * (1 if np.median(largest) > 0 else -1))
    code = int(value.view(np.uint32)) >> 16
    return np.array([PRIME, code, *[0] * (k - 1)], dtype=">u2").tobytes()


def typical(source: Source, k: int) -> bytes:
    """A polynomial of full length through what each channel usually holds."""
    return prove([source.typical()])


# --- honest work ---


def honest(shapes: Sequence[tuple[int, int]]) -> dict[str, dict[str, float]]:
    """Groups refused, the worst chunk's and the worst group's error: a random policy, proofs and checks of two engines."""
    table = {}
    print(
        "\nhonest groups                              refused       mismatched   error of a chunk   of a group  (worst)"
    )
    for width, layers in shapes:
        with tempfile.TemporaryDirectory() as folder:
            make_tiny(TinyPolicy(width=width, layers=layers, mlp_width=3 * width), Path(folder) / "p", 0, "float32")
            states = {key: list(_states(Path(folder) / "p", *key)) for key in itertools.product(
                ("float32", "bfloat16"), (1, 8))}  # fmt: skip
        for prover, verifier, bound in (
            (("float32", 1), ("float32", 8), "float32"),
            (("bfloat16", 1), ("bfloat16", 8), "bfloat16"),
            (("bfloat16", 8), ("float32", 8), "bfloat16"),
        ):
            name = f"{width}: {prover[0]} by {prover[1]}, replayed in {verifier[0]} by {verifier[1]}"
            table[name] = _refusals(states[prover], states[verifier], ACTIVATION_ERROR[bound])
            row = table[name]
            print(f"  {name:<45}{row['refused']:>3} of {row['groups']:<5}{row['mismatched']:>9.3f}"
                  f"{row['chunk_error']:>15.5f}{row['group_error']:>15.5f}", flush=True)  # fmt: skip
    return table


def _states(policy: Path, dtype: str, together: int) -> Iterator[np.ndarray]:
    """Hidden states of 320 rollouts, prefilled so many at a time."""
    engine, rng = LocalEngine(threads=1, dtype=dtype), np.random.default_rng(0)
    engine.load(policy, 0)
    requests = []
    for _ in range(320):
        length = int(rng.integers(20, 100))
        requests.append(ScoreRequest(rng.integers(6, 60, length).tolist(), list(range(8, length)), bytes(32)))
    for start in range(0, len(requests), together):
        for score in engine.score(requests[start : start + together], 1.0, hidden=True):
            assert score.hidden_PD is not None
            yield score.hidden_PD


def _refusals(proved: list[np.ndarray], replayed: list[np.ndarray], bound: float) -> dict[str, float]:
    """Of groups of four rollouts."""
    refused, mismatched, chunk_error, group_error = 0, 0.0, 0.0, 0.0
    for start in range(0, len(proved), 4):
        figures = compare(replayed[start : start + 4], prove(proved[start : start + 4]))
        assert not isinstance(figures, str)
        refused += judge_activations(figures, bound) is not None
        matched_C = np.maximum(1, figures.entries_C - figures.mismatched_C)
        mismatched = max(mismatched, float((figures.mismatched_C / figures.entries_C).max()))
        chunk_error = max(chunk_error, float((figures.error_C / matched_C).max()))
        group_error = max(group_error, float(figures.error_C.sum() / matched_C.sum()))
    return {"groups": len(proved) // 4, "refused": refused, "mismatched": round(mismatched, 4),
            "chunk_error": round(chunk_error, 6), "group_error": round(group_error, 6)}  # fmt: skip


# --- hostile bytes ---


def fuzz(num: int) -> dict[str, float]:
    """Mutated proofs of chunks of 1, 5, 33 and 40 tokens: none may raise, none be accepted in float32."""
    rng = np.random.default_rng(0)
    hidden = [[np.random.default_rng(n).standard_normal((n, 64), dtype=np.float32)] for n in (1, 5, 33, 40)]
    proofs, accepted, slowest_s = [prove(states) for states in hidden], 0, 0.0
    began = time.process_time()
    for attempt in range(num):
        mutant = mutated(proofs[attempt % 4], rng)
        started = time.process_time()
        figures = compare(hidden[attempt % 4], mutant)
        slowest_s = max(slowest_s, time.process_time() - started)
        if not isinstance(figures, str) and mutant != proofs[attempt % 4]:
            accepted += judge_activations(figures, ACTIVATION_ERROR["float32"]) is None
        if attempt % 100_000 == 0 and attempt:
            print(f"  {attempt} mutated proofs, {time.process_time() - began:.0f} CPU s", file=sys.stderr, flush=True)
    print(f"\nmutated proofs: {num}, accepted {accepted}, raised 0, slowest {1000 * slowest_s:.1f} ms")
    return {"mutated": num, "accepted": accepted, "slowest_ms": round(1000 * slowest_s, 2)}


def mutated(proof: bytes, rng: np.random.Generator) -> bytes:
    """A bit, a cut, a splice, eight bytes, all of it, or zeros to the end."""
    mutant, kind, at = bytearray(proof), rng.integers(6), int(rng.integers(len(proof)))
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


if __name__ == "__main__":
    main()
