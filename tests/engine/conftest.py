"""Small policies in which every parameter matters, and conversations to put to them."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from shoal.config import TinyPolicy
from shoal.models.checkpoint import save_policy
from shoal.models.random_model import initialise, tiny_spec
from shoal.models.transformer import Transformer


def write_policy(
    directory: Path, family: str = "qwen3", tied: bool = False, seed: int = 7, noise: float = 0.05,
    sizes: Mapping[str, int] | None = None,
) -> Path:  # fmt: skip
    """A policy of 64 tokens, 3 layers, 6 heads on 2; its norms and biases are not what they are at the start."""
    usual = {"width": 48, "layers": 3, "heads": 6, "kv_heads": 2, "mlp_width": 80}
    tiny = TinyPolicy(family=family, tied=tied, **(usual | dict(sizes or {})))  # type: ignore[arg-type]
    model = Transformer(tiny_spec(tiny))
    initialise(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
        model.head_weight().mul_(4.0)  # logits large enough that a wrong cache shows
    save_policy(model, directory, "float32")
    return directory


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-style policy's directory."""
    return write_policy(tmp_path_factory.mktemp("engine") / "policy")
