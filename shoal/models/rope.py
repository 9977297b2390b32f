"""How the rotation of a policy's heads is scaled for texts longer than those of its first training.

It imports torch late, because `config` is light. It knows three kinds beside the plain rotation (arXiv:2104.09864):

    linear   every frequency divided by `factor` (arXiv:2306.15595)
    yarn     low frequencies divided, high ones kept, a ramp between them, and larger scores (arXiv:2309.00071)
    llama3   the same by wavelength, with another ramp (Llama 3.1)

The frequencies are computed with the operations of `transformers`, in their order: at position 100,000 the last bit of a
frequency is 0.006 radians.

Axes: e = E / 2 pairs of a head.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from shoal.errors import StateError

if TYPE_CHECKING:
    import torch

KINDS = ("default", "linear", "llama3", "yarn")

NEEDED = {
    "linear": ("factor",), "yarn": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}  # fmt: skip
"""The keys that a kind cannot do without."""

LARGEST = 1 << 24
"""Upper limit for factors and positions."""


@dataclass(frozen=True)
class RopeScaling:
    """The numbers of one scaled rotation. Those that its kind does not use have their defaults."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original: int = 1
    """Longest sequence, tokens, before the scaling."""
    low: float = 1.0
    """llama3: wavelengths above original / low are divided. yarn: the rotations within `original` below which they are."""
    high: float = 2.0
    """llama3: wavelengths below original / high stay. yarn: the rotations above which they do."""
    attention: float = 1.0
    """yarn: queries and keys are both multiplied by this."""
    truncate: bool = True
    """yarn: the ramp begins and ends at whole pairs."""

    def demands(self) -> Iterator[tuple[bool, str]]:
        """What must hold, each with the fault to report."""
        what, original = f"rope_type {self.kind}", self.original
        yield 1.0 <= self.factor <= LARGEST, f"{what}: factor = {self.factor}: not in 1..{LARGEST}"
        yield 1 <= original <= LARGEST, f"{what}: original_max_position_embeddings = {original}: not in 1..{LARGEST}"
        rising = 0.0 < self.low < self.high <= LARGEST
        yield rising, f"{what}: its bounds {self.low} and {self.high} must rise, above 0 and up to {LARGEST}"
        yield (
            0.0 < self.attention <= 100.0,
            f"{what}: attention_factor = {self.attention}: must be above 0 and at most 100",
        )

    def to_hf(self) -> dict[str, Any]:
        """The keys of `rope_parameters` that give this scaling again."""
        return {key: getattr(self, name) for key, name in _KEYS[self.kind].items()}


_LENGTH = {"factor": "factor", "original_max_position_embeddings": "original"}
_KEYS = {
    "linear": {"factor": "factor"},
    "llama3": {**_LENGTH, "low_freq_factor": "low", "high_freq_factor": "high"},
    "yarn": {
        **_LENGTH,
        "attention_factor": "attention",
        "beta_slow": "low",
        "beta_fast": "high",
        "truncate": "truncate",
    },
}
"""The keys of `rope_parameters` that a kind has, with our names for them."""


class _HfRope(msgspec.Struct):
    """The keys of `rope_parameters` that decide a scaling. Other keys are ignored."""

    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def scaling_of(kind: str, parameters: dict[str, Any], max_positions: int, original: int | None) -> RopeScaling | None:
    """The scaling that a `config.json` asks for; None for the plain rotation.

    `original` is the length that the config gives outside its `parameters`; it goes before that of the parameters, as in
    `transformers`. Raises `msgspec.ValidationError` for malformed parameters.
    """
    if kind == "default":
        return None
    hf = msgspec.convert(parameters, _HfRope)
    first = original or hf.original_max_position_embeddings or max_positions
    factor = hf.factor if hf.factor is not None else 0.0  # which is refused
    match kind:
        case "linear":
            return RopeScaling("linear", factor)
        case "llama3":
            return RopeScaling("llama3", factor, first, hf.low_freq_factor or 0.0, hf.high_freq_factor or 0.0)
        case "yarn":
            low, high = hf.beta_slow or 1.0, hf.beta_fast or 32.0
            return RopeScaling("yarn", factor, first, low, high, _attention(hf, factor), hf.truncate)
    raise ValueError(f"rope_type is {kind!r}; known: {', '.join(KINDS)}")


def _attention(hf: _HfRope, factor: float) -> float:
    """How much yarn enlarges queries and keys (arXiv:2309.00071 eq. 22), or as the config says."""

    def enlarged(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if hf.attention_factor is not None:
        return hf.attention_factor
    if hf.mscale and hf.mscale_all_dim:
        whole = enlarged(hf.mscale_all_dim)
        return enlarged(hf.mscale) / whole if whole else 0.0  # which is refused
    return enlarged(1.0)


def frequencies(scaling: RopeScaling, theta: float, head_dim: int, device: "torch.device") -> "torch.Tensor":
    """Radians for each position, float32[e], of each pair of a head."""
    import torch

    exponents_e = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    powers_e = theta**exponents_e
    plain_e = 1.0 / powers_e
    match scaling.kind:
        case "linear":
            return plain_e / scaling.factor
        case "llama3":
            return _by_wavelength(plain_e, scaling)
        case "yarn":
            begin, end = _ramp(scaling, theta, head_dim)
            pairs_e = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
            kept_e = 1 - ((pairs_e - begin) / (end - begin)).clamp(0, 1)
            return 1.0 / (scaling.factor * powers_e) * (1 - kept_e) + plain_e * kept_e


def _by_wavelength(plain_e: "torch.Tensor", scaling: RopeScaling) -> "torch.Tensor":
    import torch

    wavelength_e = 2 * math.pi / plain_e
    longest, shortest = scaling.original / scaling.low, scaling.original / scaling.high
    scaled_e = torch.where(wavelength_e > longest, plain_e / scaling.factor, plain_e)
    kept_e = (scaling.original / wavelength_e - scaling.low) / (scaling.high - scaling.low)
    mixed_e = (1 - kept_e) * scaled_e / scaling.factor + kept_e * scaled_e
    between_e = ~(wavelength_e < shortest) & ~(wavelength_e > longest)
    return torch.where(between_e, mixed_e, scaled_e)


def _ramp(scaling: RopeScaling, theta: float, head_dim: int) -> tuple[float, float]:
    """The pairs between which frequencies pass from kept to divided."""

    def pair(rotations: float) -> float:
        """The pair that turns so often within the original length."""
        return head_dim * math.log(scaling.original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    begin, end = pair(scaling.high), pair(scaling.low)
    if scaling.truncate:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, head_dim - 1)
    return begin, end + 0.001 if begin == end else end


ORIGINAL = "original_max_position_embeddings"


def rotations_of(text: Any) -> list[dict[str, Any]]:
    """The parameters of each rotation of a config, which may nest them by layer type."""
    rope = getattr(text, "rope_parameters", None) or {}
    return [rope, *(one for one in rope.values() if isinstance(one, dict))]


def longrope_of(text: Any) -> list[dict[str, Any]]:
    """The parameters of each rotation with a set of factors for short texts and one for long texts."""
    return [one for one in rotations_of(text) if one.get("rope_type") == "longrope"]


def short_rotation(config: Any, architecture: str, max_positions: int) -> int:
    """Tokens of the longest text that has the short rotation; 0 if every text of the policy has, or if there is none."""
    lengths = {int(one[ORIGINAL]) for one in longrope_of(config.get_text_config())}
    if len(lengths) > 1:
        raise StateError(f"{architecture}: layers whose rotations change at different lengths, {sorted(lengths)}")
    found = next(iter(lengths), 0)
    if found < 0:
        raise StateError(f"{architecture}: {ORIGINAL} = {found}: must not be below 0")
    return found if found < max_positions else 0
