"""The token that seeded sampling chooses, in one Triton kernel: noise, sum and argmax, in one pass over the vocabulary.

No noise is stored: each program makes that of a block of one row, in registers, and leaves one number, so that memory sees
the logits once. The noise is that of `noise.philox` and `noise.vllm`. Pure.

The bits of the references need the same operations, rounded alike:

    words     integers of 32 bits, which wrap
    noise     logarithms in float64, and the result rounded once to float32
    log1p     Triton has none. With w = 1 - u, log1p(-u) is log(w) and what w lost, divided by w
    score     one sum in float32. Products and sums are not fused

Scores are compared as integers in the order of the numbers, above the complement of the token's id. So the largest
integer is the largest score at its lowest id, in whichever order a GPU compares them. NaN is the largest number, as in
torch.

Axes: N rows, V vocabulary, S blocks of it.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.algos.noise import philox

Source = Literal["philox", "keyed", "murmur"]
"""Where random words come from: `noise.philox` or one of the two in `noise.vllm`."""

BLOCK = 2048
"""Tokens of one program."""

_WARPS = 8

_ROUNDS = tl.constexpr(philox.ROUNDS)
_M0, _M1 = tl.constexpr(philox.M0), tl.constexpr(philox.M1)
_W0, _W1 = tl.constexpr(philox.W0), tl.constexpr(philox.W1)
_RAND32 = tl.constexpr(float(torch.tensor(4.6566127342e-10)))
_SMALLEST, _BELOW_ONE = tl.constexpr(2.0**-1022), tl.constexpr(1.0 - 2.0**-53)
_BELOW_ONE_32 = tl.constexpr(1.0 - 2.0**-24)
_NONE = tl.constexpr(-(2**31))
"""Below the integer of every score."""

_SIGN_BITS = 0x7FFFFFFF


def best(
    scaled_NV: Tensor,
    words_N4: Tensor,
    positions_N: Tensor,
    tokens_N: Tensor | None = None,
    *,
    source: Source = "philox",
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The largest score of each row, float32[N], the lowest id that has it, int64[N], and the score of each row's token,
    float32[N], or nothing if no tokens are given.

    scaled_NV: logits / temperature, float32. The others are as for `gumbel.gumbel`; tokens_N: int64[N]. wide: the family
    whose noise has more than 32 random bits.
    """
    if scaled_NV.stride(1) != 1:
        scaled_NV = scaled_NV.contiguous()
    (N, V), device = scaled_NV.shape, scaled_NV.device
    best_NS = torch.empty(N, triton.cdiv(V, BLOCK), dtype=torch.int64, device=device)
    own_N = torch.empty(0 if tokens_N is None else N, device=device)
    with torch.cuda.device_of(scaled_NV):
        _best_of_block[best_NS.shape](
            scaled_NV, scaled_NV.stride(0), V, words_N4.contiguous(), positions_N.contiguous(),
            None if tokens_N is None else tokens_N.contiguous(), best_NS, None if tokens_N is None else own_N,
            SOURCE=source, WIDE=wide, BLOCK=BLOCK, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    best_N = best_NS.amax(1)
    order_N = (best_N >> 32).to(torch.int32)
    score_N = (order_N ^ ((order_N >> 31) & _SIGN_BITS)).view(torch.float32)
    return score_N, _SIGN_BITS - (best_N & _SIGN_BITS), own_N


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _best_of_block(
    scaled_ptr: tl.tensor, stride: tl.tensor, V: tl.tensor, words_ptr: tl.tensor, positions_ptr: tl.tensor,
    tokens_ptr: tl.tensor, best_ptr: tl.tensor, own_ptr: tl.tensor, SOURCE: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(words_ptr + 4 * row).to(tl.uint32)
    second = tl.load(words_ptr + 4 * row + 1).to(tl.uint32)
    position = tl.load(positions_ptr + row)
    if SOURCE == "philox":
        third = tl.load(words_ptr + 4 * row + 2).to(tl.uint32)
        fourth = tl.load(words_ptr + 4 * row + 3).to(tl.uint32)
        counters = (block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
        noise = _counted(counters, position.to(tl.uint32), first, second, third, fourth)
    elif SOURCE == "keyed":
        noise = _keyed(ids.to(tl.uint32), (position - 1).to(tl.uint32), first, second, WIDE)
    else:
        noise = _murmured(ids.to(tl.uint32), (position - 1).to(tl.uint32), first, second, WIDE)
    inside = ids < V
    score = tl.load(scaled_ptr + row * stride + ids, mask=inside, other=0.0) + noise
    if tokens_ptr is not None:
        token = tl.load(tokens_ptr + row)
        tl.store(own_ptr + row + tl.zeros_like(ids), score, mask=ids == token)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # both zeros are equal
    order = tl.where(score != score, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    order = tl.where(inside, order, _NONE)
    ranked = (order.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
    tl.store(best_ptr + row * tl.num_programs(1) + block, tl.max(ranked, 0))


# --- noise, float32, from random words ---


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _counted(
    counters: tl.tensor, position: tl.tensor, first: tl.tensor, second: tl.tensor, third: tl.tensor, fourth: tl.tensor
) -> tl.tensor:
    """Of four tokens a counter, in the order of their ids."""
    a, b, c, d = _philox(counters, position, third, fourth, first, second)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return _gumbel(tl.log((words.to(tl.float64) + 0.5) * 2.0**-32))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _keyed(ids: tl.tensor, read: tl.tensor, first: tl.tensor, second: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    zero = tl.full((), 0, tl.uint32)
    key, _b, _c, _d = _philox(read, zero, zero, zero, first, second)
    low, high, _e, _f = _philox(ids, zero, zero, zero, key, zero)
    if WIDE:
        uniform = (high.to(tl.float64) * 2.0**32 + low.to(tl.float64)) * 2.0**-64
        return _gumbel(tl.log(_within(uniform, _SMALLEST, _BELOW_ONE)))
    signed = low.to(tl.int32, bitcast=True)
    uniform = tl.where(signed < 0, ~signed, signed).to(tl.float32) * _RAND32
    return _gumbel(_log1p_of_minus(tl.where(uniform < _RAND32, _RAND32, uniform).to(tl.float64)))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _murmured(ids: tl.tensor, read: tl.tensor, first: tl.tensor, second: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    low = _murmur3(first, second, read, ids, 0)
    if WIDE:
        high = _murmur3(first, second, read, ids, 0x9E3779B9)
        random = (high.to(tl.int64) << 21) | (low >> 11).to(tl.int64)
        return _gumbel(tl.log(_within((random.to(tl.float64) + 0.5) * 2.0**-53, _SMALLEST, _BELOW_ONE)))
    uniform = ((low.to(tl.float64) + 0.5) * 2.0**-32).to(tl.float32).to(tl.float64)
    return _gumbel(_log1p_of_minus(_within(uniform, _SMALLEST, _BELOW_ONE_32)))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gumbel(log: tl.tensor) -> tl.tensor:
    return (-tl.log(-log)).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _log1p_of_minus(u: tl.tensor) -> tl.tensor:
    w = 1.0 - u
    return tl.log(w) - ((w - 1.0) + u) / w


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _within(x: tl.tensor, LEAST: tl.constexpr, MOST: tl.constexpr) -> tl.tensor:
    """The bounds are written in float64: some versions of Triton take a plain number as float32."""
    x = tl.where(x < LEAST, tl.full(x.shape, LEAST, tl.float64), x)
    return tl.where(x > MOST, tl.full(x.shape, MOST, tl.float64), x)


# --- random words ---


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _philox(c0: tl.tensor, c1: tl.tensor, c2: tl.tensor, c3: tl.tensor, k0: tl.tensor, k1: tl.tensor) -> tl.tensor:
    """As `philox.philox`, of uint32."""
    for _round in tl.static_range(_ROUNDS):
        high0, high1 = tl.umulhi(c0, _M0), tl.umulhi(c2, _M1)
        low0, low1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _W0, k1 + _W1
    return c0, c1, c2, c3


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _murmur3(first: tl.tensor, second: tl.tensor, read: tl.tensor, ids: tl.tensor, DOMAIN: tl.constexpr) -> tl.tensor:
    """As `noise.vllm._hashed`, of uint32."""
    h = _mixed(_mixed(_mixed(first * 0 + DOMAIN, _key(first)), _key(second)), _key(read))
    h = _mixed(h, _key(ids)) ^ 16
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _mixed(h: tl.tensor, key: tl.tensor) -> tl.tensor:
    return _rotated(h ^ key, 13) * 5 + 0xE6546B64


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _key(word: tl.tensor) -> tl.tensor:
    return _rotated(word * 0xCC9E2D51, 15) * 0x1B873593


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rotated(word: tl.tensor, BY: tl.constexpr) -> tl.tensor:
    return (word << BY) | (word >> (32 - BY))
