"""How much memory the engine for other architectures needs, before anything is allocated.

Called as `needs` is, for policies that transformers computes. The weights' sizes are those of the files. What an
architecture computes between them is not known, so its activations are taken to be as large as those of common ones. The
operating system enforces the limit in any case.

All results are bytes.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from shoal.engine.held import NOISE_VALUES, PREFILL_TOKENS, SCORED_VALUES
from shoal.engine.needs import ITEM_BYTES, LOGIT_BYTES, ROW_BYTES, SCORED_LOGIT_BYTES, TOKEN_BYTES, Needs
from shoal.policy.anyspec import AnySpec
from shoal.policy.files import find_tensors
from shoal.policy.sizes import ANY_WIDTHS
from shoal.policy.spec import PolicySpec

LIBRARY_BYTES = 200_000_000
"""Of transformers' own code, most of which is imported when the first policy is loaded."""

HF_CACHE_COPIES = 3
"""The cache grows by being copied, and a few rows are copied when others have ended."""


@dataclass(frozen=True)
class AnyNeeds:
    """What one policy needs in an engine of one dtype."""

    spec: AnySpec
    dtype: str
    values: int
    """Of all tensors in its files."""
    largest: int
    """Values of the largest tensor."""

    @staticmethod
    def of(spec: AnySpec, directory: Path, dtype: str) -> "AnyNeeds":
        """Those of the policy in a directory. Raises `StateError` if its files are damaged."""
        sizes = [math.prod(stored.shape) for stored in find_tensors(directory).values()]
        return AnyNeeds(spec, dtype, sum(sizes), max(sizes, default=0))

    @property
    def loaded(self) -> int:
        """The weights as they stay in memory, and the code that computes with them."""
        return ITEM_BYTES[self.dtype] * self.values + LIBRARY_BYTES

    def load(self) -> int:
        """While the weights are read: the tensors of the files, what transformers makes of them, and one tensor more."""
        return self.loaded + ITEM_BYTES[self.dtype] * self.values + 8 * self.largest

    def in_passing(self) -> int:
        """As of `Needs`."""
        return self.load()

    def play(self, rows: int, max_tokens: int, all_tokens: int = 0) -> int:
        """Beyond the weights, for a batch of `rows` conversations of at most `max_tokens`; `all_tokens` as for `Needs`."""
        spec, tokens = self.spec, min(max_tokens, self.spec.max_positions)
        cache = 2 * spec.layers * spec.kv_heads * spec.head_dim * ITEM_BYTES[self.dtype] * rows * tokens
        logits = LOGIT_BYTES * max(NOISE_VALUES, rows * spec.vocab_size)
        read = self._token * rows * tokens
        return HF_CACHE_COPIES * cache + logits + read + rows * (ROW_BYTES + max(tokens, all_tokens) * TOKEN_BYTES)

    def score(self, tokens: int, longest: int, hidden: bool) -> int:
        """Beyond the weights, for a prefill of conversations of at most `longest` tokens each, `tokens` in all."""
        logits = SCORED_LOGIT_BYTES * max(self.spec.vocab_size, min(SCORED_VALUES, tokens * self.spec.vocab_size))
        read = self._token * max(PREFILL_TOKENS["cpu"], min(longest, tokens, self.spec.max_positions))
        return logits + read + tokens * (TOKEN_BYTES + (2 * 4 * self.spec.width if hidden else 0))

    @property
    def _token(self) -> int:
        return 4 * ANY_WIDTHS * max(self.spec.width, self.spec.heads * self.spec.head_dim)


def needs_of_spec(spec: PolicySpec | AnySpec, dtype: str, adapter: int = 0, base: str = "") -> Needs | AnyNeeds:
    """What an engine needs for a policy whose files may not be here. `adapter` and `base` are as of `Needs`: other
    architectures have none."""
    if isinstance(spec, PolicySpec):
        return Needs(spec, dtype, adapter, base)
    return AnyNeeds(spec, dtype, spec.parameters, spec.vocab_size * spec.width)
