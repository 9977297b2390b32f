"""The shapes that `benchmarks/real_models.py` times, as policies with random weights in HF format."""

import json
from pathlib import Path
from typing import Any

import torch

from shoal.algos.regularisers import logprob_and_entropy
from shoal.models.checkpoint import load_policy, save_policy
from shoal.models.random_model import make_shaped

ROOT = Path(__file__).resolve().parents[2]
_QWEN3 = json.loads((ROOT / "recipes" / "shapes" / "qwen3-0.6b" / "config.json").read_text())


def _scaled(width: int, layers: int, heads: int, kv_heads: int, mlp_width: int, vocabulary: int) -> dict[str, Any]:
    return _QWEN3 | {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": 64, "intermediate_size": mlp_width, "vocab_size": vocabulary, "eos_token_id": vocabulary - 1,
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _scaled(64, 2, 2, 1, 128, 1024),
    "25m": _scaled(384, 8, 6, 2, 1024, 32_768),
    "100m": _scaled(768, 12, 12, 4, 2048, 32_768),
    "0.6b": _QWEN3,
}
"""config.json of Qwen3 policies with a tied head; `tiny` is for --quick."""


ENTROPY = 1.0
"""Nats a token, to which logits are scaled: those of plain random weights hide rounding, and to sample from them takes more
noise than from a real policy's."""


def make_shape(name: str, scratch: Path) -> Path:
    """A policy of this shape in float32 whose tokens have about `ENTROPY`; made once."""
    shape, directory = scratch / f"{name}-shape", scratch / name
    if not directory.exists():
        shape.mkdir(parents=True)
        (shape / "config.json").write_text(json.dumps(SHAPES[name]))
        make_shaped(shape, directory, seed=0, dtype="float32")
        _scale(directory)
    return directory


@torch.no_grad()
def _scale(directory: Path) -> None:
    """Multiply the final norm, and with it the logits, until random texts have the entropy: bisection of the logarithm."""
    model = load_policy(directory, torch.float32)
    tokens_BT = torch.randint(model.spec.vocab_size, (4, 32), generator=torch.Generator().manual_seed(0))
    logits_NV = model.logits(model.hidden(tokens_BT).flatten(0, 1)[::4])
    low, high = -4.0, 8.0
    for _ in range(12):
        middle = (low + high) / 2
        entropy = float(logprob_and_entropy(logits_NV * 2**middle, logits_NV.argmax(-1))[1].mean())
        low, high = (middle, high) if entropy > ENTROPY else (low, middle)
    model.model.norm.weight *= 2**low
    save_policy(model, directory, "float32", tokenizer_from=directory, durable=False)
