"""What a directory of a policy holds, by its files and never by what a node says about it; and how it is opened.

Light: torch is imported when a model is opened.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import StateError
from shoal.models.hf_config import HFConfig, read_config
from shoal.models.lora_config import AdapterSpec, LoraBase, has_adapter
from shoal.models.nf4_layout import NF4, is_coded
from shoal.models.transformer_config import ARCHITECTURES, TransformerConfig, UnsupportedModel

if TYPE_CHECKING:
    import torch

    from shoal.models.interface import PolicyModel

OURS = "ours"
"""A whole policy that `transformer` computes."""

ANY = "any"
"""A whole policy of another architecture, which needs `transformers`; or no policy at all."""

AUTO = "auto"
"""`policy.implementation` of runs that take both kinds. Empty: only ours."""


def kind_of(directory: Path) -> str:
    """The kind of the policy in a directory."""
    try:
        TransformerConfig.from_directory(directory)
    except StateError:
        return ANY
    return OURS


def spec_of(directory: Path) -> TransformerConfig | HFConfig:
    """The spec of a policy of either kind. Raises `StateError` if it is neither: for a family of ours, as for ours."""
    try:
        return TransformerConfig.from_directory(directory)
    except StateError as refused:
        try:
            return HFConfig.from_directory(directory)
        except StateError as other:
            known = is_of_ours(directory) and not isinstance(refused, UnsupportedModel)
            raise (refused if known else other) from None


def is_of_ours(directory: Path) -> bool:
    """Whether a `config.json` names a family of ours, whatever else it says; also if it cannot be read."""
    try:
        return read_config(directory).get("model_type") in [*ARCHITECTURES]  # it may be no text
    except StateError:
        return True


def needs_transformers(directory: Path, implementation: str) -> bool:
    """Whether a run with this `policy.implementation` computes the policy in a directory with transformers."""
    return implementation == AUTO and kind_of(directory) == ANY


def demand_no_adapter(directory: Path) -> None:
    """Raise `StateError` if a run cannot begin at a directory, because it holds an adapter."""
    if has_adapter(directory):  # guard: runs-begin-with-models
        raise StateError(
            f"{directory} holds an adapter, and a run begins with a whole model: `shoal policy merge` makes one of it"
        )


def demand_named_base(directory: Path, base: str) -> None:
    """Raise `StateError` if the model in a directory is in NF4, and the run file's `policy.adapter.base` does not say so:
    memory would be reckoned wrongly, and nodes would not be told."""
    if base != NF4 and is_coded(directory):  # guard: codes-are-named
        raise StateError(
            f"{directory} holds a model in NF4, on which only adapters learn: set policy.adapter.rank, and "
            'policy.adapter.base = "nf4", or begin with the model that it was made of'
        )


def open_adapted(
    directory: Path, dtype: "torch.dtype", adapter: AdapterSpec, seed: int, base: LoraBase
) -> "PolicyModel":
    """Load the policy in a directory as the base, of `dtype`, of a new adapter, which alone learns. Raises `StateError`."""
    from shoal.models.checkpoint import load_policy
    from shoal.models.lora import begin_adapter

    if not (spec := spec_of(directory)).supports("adapters"):
        raise StateError(
            f"{directory} holds a {spec.family}, and an adapter is computed for Llama, Mistral, Qwen2 and "
            "Qwen3 only: leave policy.adapter out, or choose another model"
        )
    model = load_policy(directory, dtype)
    begin_adapter(model, adapter, seed, base)
    return model


def open_policy(directory: Path, dtype: "torch.dtype | None" = None, implementation: str = "") -> "PolicyModel":
    """Load the policy in a directory as a model of `dtype` (default float32), ready to learn. Raises `StateError`."""
    if needs_transformers(directory, implementation):
        import torch

        from shoal.models.hf_model import load_any

        return load_any(directory, dtype or torch.float32)
    from shoal.models.checkpoint import load_policy

    return load_policy(directory, dtype)
