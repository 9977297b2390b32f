"""What a directory of a policy holds, by its files and never by what a node says about it; and how it is opened.

Called by everything that opens a policy which may not be one of ours. Light: torch is imported when a model is opened.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import StateError
from shoal.policy.spec import PolicySpec

if TYPE_CHECKING:
    import torch

    from shoal.policy.base import PolicyModel

OURS = "ours"
"""A whole policy that `model` computes."""

ANY = "any"
"""A whole policy of another architecture, which needs `transformers`; or no policy at all."""


def kind_of(directory: Path) -> str:
    """The kind of the policy in a directory."""
    try:
        PolicySpec.from_directory(directory)
    except StateError:
        return ANY
    return OURS


def open_policy(directory: Path, dtype: "torch.dtype | None" = None) -> "PolicyModel":
    """Load the policy in a directory as a model of `dtype` (default float32), ready to learn. Raises `StateError`."""
    from shoal.policy.files import load_policy

    return load_policy(directory, dtype)
