"""vLLM's own sampler, interpreted by Triton: it makes the noise of a family of ours, and draws with the seeds of a lease.

Each test is a process of its own, because Triton is told when it is imported. Skipped without vLLM, as test_vllm.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

INTERPRETED = "from tests.engine.interpreted import interpret_triton; interpret_triton()\n"

SAMPLER = """
from shoal.config import settle_vllm
settle_vllm(cpu=True)
from shoal.engine.vllm.engine import makes_noise_of
from shoal.protocol.noise import NOISES
print([name for name in NOISES if makes_noise_of(name, "cpu")])
"""

WORDS = """
import torch
import triton
from triton import language as tl
from vllm.v1.worker.gpu.sample import gumbel
from tests.protocol.test_noise import HASHED

@triton.jit
def ask(seed_ptr, pos_ptr, entry_ptr, low_ptr, high_ptr, of_32_ptr, of_64_ptr):
    case = tl.program_id(0)
    seed, pos, entry = tl.load(seed_ptr + case), tl.load(pos_ptr + case), tl.load(entry_ptr + case)
    tl.store(low_ptr + case, gumbel.murmur3_hash32(seed, pos, entry).to(tl.int64))
    tl.store(high_ptr + case, gumbel.murmur3_hash32(seed, pos, entry, domain=0x9E3779B9).to(tl.int64))
    uniform = gumbel.murmur3_uniform32(seed, pos, entry)
    tl.store(of_32_ptr + case, -tl.log(-gumbel._log1p_neg_stable(uniform)))
    tl.store(of_64_ptr + case, -tl.log(-tl.log(gumbel.murmur3_uniform64(seed, pos, entry))))

seeds, positions, entries = (torch.tensor(column) for column in zip(*HASHED))
low, high = torch.zeros(len(HASHED), dtype=torch.int64), torch.zeros(len(HASHED), dtype=torch.int64)
of_32, of_64 = torch.zeros(len(HASHED)), torch.zeros(len(HASHED), dtype=torch.float64)
ask[(len(HASHED),)](seeds, positions - 1, entries, low, high, of_32, of_64)
found = list(zip(low.tolist(), high.tolist(), of_32.tolist(), of_64.tolist()))
print([one for one, known in zip(found, HASHED.values()) if one != known])
"""

TOKENS = """
import sys
import numpy as np
from pathlib import Path
from shoal.config import TinyPolicy
from shoal.engine.interface import EngineRequest
from shoal.engine.native import LocalEngine
from shoal.engine.vllm.engine import VllmEngine
from shoal.models.random_model import make_tiny
from shoal.protocol.seed_chain import sample_seed
from tests.engine.test_vllm import STOPS, _agree, _requests

family, scratch = sys.argv[1], Path(sys.argv[2])
tiny = TinyPolicy(width=64, layers=1, heads=2, kv_heads=1, mlp_width=64, max_positions=64)
engine, ours = VllmEngine(threads=1, noise=family), LocalEngine(threads=1, noise=family)
requests = _requests(8, max_new=8)
for version in (0, 1):
    make_tiny(tiny, scratch / str(version), version, "float32")
    engine.load(scratch / str(version), version)
    ours.load(scratch / str(version), version)
    turns = engine.extend(requests, 0.8)
    _agree(ours, requests, turns, 0.8)
    assert [turn.token_ids for turn in turns] == [turn.token_ids for turn in ours.extend(requests, 0.8)]
print(engine.facts.implementation.rpartition("-own-")[2], sum(len(turn.token_ids) for turn in turns) > 40)
"""


def _said(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED + program, *arguments], capture_output=True, text=True, timeout=280,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_the_sampler_of_this_version_makes_the_families_that_hash() -> None:
    assert _said(SAMPLER) == "['murmur3-rand32-log1p', 'murmur3-rand53-log']"


def test_the_golden_vectors_are_those_of_vllm_word_for_word() -> None:
    assert _said(WORDS) == "[]"


@pytest.mark.parametrize("family", ["murmur3-rand32-log1p", "murmur3-rand53-log"])
def test_our_engine_replays_what_vllm_draws_with_its_own_seeds(tmp_path: Path, family: str) -> None:
    assert _said(TOKENS, family, str(tmp_path)) == "seeds True"
