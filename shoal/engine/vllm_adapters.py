"""Low-rank adapters as vLLM takes them.

Called by `engine.vllm`. A run's versions are adapters of one base, which vLLM keeps. It reads only the newest adapter.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import StateError
from shoal.policy.adapters import read_adapter
from shoal.policy.adapterspec import AdapterSpec, has_adapter
from shoal.policy.anyspec import AnySpec
from shoal.policy.spec import PolicySpec
from shoal.policy.stored import key_of_base

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""For which vLLM makes room."""


@dataclass(frozen=True)
class Adapter:
    """An adapter beside its base."""

    directory: Path
    base: str
    """As of `key_of_base`."""
    shape: AdapterSpec

    def fits(self, other: "Adapter | None") -> bool:
        """Whether a vLLM with the other one takes it."""
        return other is not None and (self.base, self.shape) == (other.base, other.shape)

    def asked(self) -> dict[str, Any]:
        """Arguments with which vLLM makes room for it."""
        rank = next(most for most in RANKS if most >= self.shape.rank)
        return {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}

    def request(self, number: int) -> Any:
        """vLLM's name for it. What it computed with another number, it does not use."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"shoal-{number}", number, str(self.directory))


def adapter_in(directory: Path, spec: PolicySpec | AnySpec, dtype: str) -> Adapter | None:
    """The adapter in a directory, if there is one. Raises `StateError` if it is malformed, or not for float32, because vLLM
    would round it to the dtype of its base."""
    if not has_adapter(directory):
        return None
    if dtype != "float32" or not isinstance(spec, PolicySpec):
        raise StateError(
            f"{directory} holds an adapter, which vLLM computes in float32 only here, not in {dtype}: join without "
            "--engine vllm"
        )
    shape, _ = read_adapter(directory, spec)  # which refuses what a stranger may have put there
    return Adapter(directory, key_of_base(directory), shape)
