"""The kernel that draws tokens on GPUs: interpreted by Triton, it gives the tokens and the bits that a CPU gives; it is
compiled for GPUs, and it is used only where a trial shows that it draws the run's family. No test has a GPU.

What Triton interprets or compiles runs in a process of its own, because Triton is told when it is imported.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal.engine import noise as families
from shoal.engine import noise as fused
from shoal.engine.noise import FAMILIES, SOURCES, draws_the_family, family, kernel_for
from shoal.protocol.noise import NOISES, PHILOX

INTERPRETED = 'import os; os.environ["TRITON_INTERPRET"] = "1"\n'

BITS = """
import sys
import torch
from shoal.algos.noise.triton import BLOCK, best
from shoal.engine.noise import FAMILIES
from shoal.engine.noise import SOURCES
from tests.algos.test_argmax_search import drawn, logits

name, wrong, compared = sys.argv[1], [], 0
source, wide = SOURCES[name]
for vocabulary in (1, 3, 1026, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 999):
    words_N4, positions_N = drawn(3, vocabulary)
    tokens_N = torch.randint(0, vocabulary, (3,))
    for odd in (None, "nan", "inf"):
        for scaled_NV in logits(3, vocabulary) if odd is None else [torch.randn(3, vocabulary)]:
            if odd:
                scaled_NV[0, vocabulary // 2] = scaled_NV[0, vocabulary - 1] = float(odd)
                scaled_NV[1] = -torch.inf
            noisy_NV = scaled_NV + FAMILIES[name].noise(words_N4, positions_N + 1, vocabulary)
            ids_N = noisy_NV.argmax(-1)
            score_N, found_N, own_N = best(scaled_NV, words_N4, positions_N + 1, tokens_N, source=source, wide=wide)
            alone_N = best(scaled_NV, words_N4, positions_N + 1, source=source, wide=wide)[1]
            for row in range(3):
                same = (
                    ids_N[row] == found_N[row] == alone_N[row]
                    and torch.equal(noisy_NV[row, ids_N[row]].nan_to_num(7), score_N[row].nan_to_num(7))
                    and torch.equal(noisy_NV[row, tokens_N[row]].nan_to_num(7), own_N[row].nan_to_num(7))
                )
                compared += 1
                if not same:
                    wrong.append((vocabulary, odd, row))
print(compared, wrong)
"""

VIEWS = """
import torch
from shoal.algos.noise.triton import best
from tests.algos.test_argmax_search import drawn

wide_NV, (words_N4, positions_N) = torch.randn(4, 5000), drawn(4)
for scaled_NV in (wide_NV[:, :4097], wide_NV.t().contiguous().t(), wide_NV[::2], wide_NV[:0]):
    rows = len(scaled_NV)
    given = words_N4.t().contiguous().t()[:rows], positions_N[:rows]
    plain, found = (best(one, *given)[:2] for one in (scaled_NV.contiguous(), scaled_NV))
    assert torch.equal(plain[0], found[0]) and torch.equal(plain[1], found[1]) and len(found[0]) == rows
print("same")
"""

TRIALS = """
import torch
from functools import partial
from shoal.algos.noise.triton import best
from shoal.engine.noise import SOURCES, draws_the_family
print([name for name, (source, wide) in SOURCES.items()
       if draws_the_family(partial(best, source=source, wide=wide), name, torch.device("cpu"))])
"""

COMPILED = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from shoal.algos.noise.triton import BLOCK, _best_of_block

types = {
    "scaled_ptr": "*fp32", "stride": "i32", "V": "i32", "words_ptr": "*i64", "positions_ptr": "*i64",
    "tokens_ptr": "*i64", "best_ptr": "*i64", "own_ptr": "*fp32",
}
sizes = []
for source, wide in (("philox", False), ("keyed", False), ("keyed", True), ("murmur", False), ("murmur", True)):
    for absent in ((), ("tokens_ptr", "own_ptr")):
        values = {"SOURCE": source, "WIDE": wide, "BLOCK": BLOCK, **dict.fromkeys(absent)}
        signature = {name: kind for name, kind in types.items() if name not in absent} | dict.fromkeys(values, "constexpr")
        signature = {name: signature[name] for name in _best_of_block.arg_names}
        made = triton.compile(
            ASTSource(_best_of_block, signature, values), target=GPUTarget("cuda", int(sys.argv[1]), 32),
            options={"num_warps": 8, "enable_fp_fusion": False},
        )
        sizes.append(len(made.asm["cubin"]))
print(len(sizes), min(sizes) > 0)
"""


def _said(program: str, *arguments: str, scratch: Path | None = None) -> str:
    pytest.importorskip("triton")
    there = {"TRITON_CACHE_DIR": str(scratch)} if scratch else {}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=280,
        cwd=Path(__file__).parents[2], env={**os.environ, **there},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("name", NOISES)
def test_each_row_has_the_token_and_the_bits_of_a_cpu(name: str) -> None:
    assert _said(INTERPRETED + BITS, name) == "231 []"


def test_rows_may_be_apart_in_memory_or_absent() -> None:
    assert _said(INTERPRETED + VIEWS) == "same"


def test_the_kernel_passes_its_trial_in_every_family() -> None:
    assert _said(INTERPRETED + TRIALS) == str([*NOISES])


@pytest.mark.parametrize("capability", ["80", "90"])
def test_the_kernel_compiles_for_gpus(tmp_path: Path, capability: str) -> None:
    assert _said(COMPILED, capability, scratch=tmp_path) == "10 True"


def _plain(name: str, shift: int, scaled_NV: Tensor, words_N4: Tensor, positions_N: Tensor, tokens_N: Tensor) -> tuple:
    """As the kernel, with torch; a shift gives the noise of other positions."""
    noisy_NV = scaled_NV + FAMILIES[name].noise(words_N4, positions_N + shift, scaled_NV.shape[1])
    return noisy_NV.amax(-1), noisy_NV.argmax(-1), noisy_NV.gather(-1, tokens_N[:, None]).squeeze(-1)


@pytest.mark.parametrize("name", NOISES)
def test_a_trial_believes_only_tokens_and_bits_of_the_reference(name: str) -> None:
    cpu, right = torch.device("cpu"), partial(_plain, name, 0)
    assert draws_the_family(right, name, cpu)
    assert not draws_the_family(partial(_plain, name, 1), name, cpu)
    for wrong in range(3):

        def nearly(*given: Tensor, wrong: int = wrong) -> tuple:
            found = right(*given)
            found[wrong][5] = found[wrong][5].nextafter(torch.tensor(1e9)) if wrong != 1 else found[1][5] ^ 1
            return found

        assert not draws_the_family(nearly, name, cpu)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Triton's kernel replaced by torch's arithmetic, on any device; which families asked for it."""
    asked: list[str] = []

    def found(name: str, device: torch.device) -> fused.Draw:
        asked.append(name)
        return lambda *given: _plain(name, 0, *given[:3], given[2] if given[3] is None else given[3])

    monkeypatch.setattr(families, "kernel_for", found)
    yield asked


@pytest.mark.parametrize("name", NOISES)
def test_a_family_gives_the_same_tokens_and_gaps_with_the_kernel(name: str, kernel: list[str]) -> None:
    scaled_NV, words_N4 = torch.randn(5, 700), torch.randint(0, 1 << 32, (5, 4))
    given = scaled_NV, words_N4, torch.arange(5) + 30
    with_kernel = family(name).best(*given), family(name).gaps(*given, torch.arange(5))
    assert kernel == [name, name]
    plain = families._PLAIN[name]
    assert torch.equal(with_kernel[0], plain.best(*given))
    assert torch.equal(with_kernel[1], plain.gaps(*given, torch.arange(5)))


def test_only_cuda_is_asked_for_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_tried", lambda noise, device: f"{noise} on {device}")
    assert kernel_for(PHILOX, torch.device("cpu")) is None and kernel_for(PHILOX, torch.device("mps")) is None
    assert kernel_for(PHILOX, torch.device("cuda", 1)) == "philox on cuda:1"


@pytest.mark.parametrize("fault", [None, RuntimeError("no C compiler\nfound")])
def test_a_kernel_that_fails_its_trial_is_left_with_one_line(
    fault: Exception | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def best(*given: Tensor, source: str, wide: bool) -> tuple:
        if fault:
            raise fault
        return _plain(PHILOX, 1, *given)

    module = type(sys)("shoal.algos.noise.triton")
    module.best = best  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    fused._tried.cache_clear()
    with caplog.at_level(logging.INFO, "engine"):
        assert [fused._tried(PHILOX, torch.device("cpu")) for _ in range(3)] == [None] * 3
    fused._tried.cache_clear()
    (line,) = caplog.messages
    assert line.endswith("no C compiler found" if fault else "it differs from the reference") and "\n" not in line


def test_every_family_has_a_source_for_the_kernel() -> None:
    assert list(SOURCES) == list(NOISES) == list(FAMILIES)
