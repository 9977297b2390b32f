"""Small random models of many architectures, as `transformers` writes them: three layers of width 32, and 64 tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.models.random_model import write_tokenizer

WINDOW = 8
"""Tokens that sliding attention sees, far fewer than the conversations of the tests have."""

_COMMON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 5, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip


def _of(name: str, **changes: object) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        return getattr(transformers, f"{name}Config")(**_COMMON | changes)

    return make


def _gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=256, eos_token_id=5, bos_token_id=5, pad_token_id=0
    )


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": _of("Llama"),
    "qwen2": _of("Qwen2", tie_word_embeddings=True),
    "qwen3": _of("Qwen3", head_dim=8),
    "mistral": _of("Mistral", sliding_window=None),
    "mistral, sliding": _of("Mistral", sliding_window=WINDOW),
    "gemma2": _of("Gemma2", head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8),
    "gemma3": _of("Gemma3Text", head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8),
    "phi": _of("Phi", num_key_value_heads=4),
    "phi3": _of("Phi3"),
    "olmo2": _of("Olmo2"),
    "gpt2": _gpt2,
    "smollm": _of("Llama", tie_word_embeddings=True),
    "smollm3": _of("SmolLM3"),
    "cohere": _of("Cohere", logit_scale=0.25),
    "opt": _of("OPT", ffn_dim=48, word_embed_proj_dim=32),
    "qwen3-moe": _of("Qwen3Moe", head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24),
    "olmoe": _of("Olmoe", num_experts=8, num_experts_per_tok=2),
    "mixtral": _of("Mixtral", num_local_experts=4, num_experts_per_tok=2),
}
"""Configs by a name for tests."""

SHORT = 16
"""Tokens that the models below rotate by the factors for short texts."""

_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 3.0, 9.0, 16.0],
    "original_max_position_embeddings": SHORT,
}  # fmt: skip
ROTATIONS: dict[str, Callable[[], Any]] = {
    "phi3": _of("Phi3", original_max_position_embeddings=SHORT, rope_parameters=_LONGROPE),
    "phimoe": _of(
        "Phimoe", num_local_experts=4, original_max_position_embeddings=SHORT,
        rope_parameters=_LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.4},
    ),
    "llama": _of("Llama", rope_parameters=_LONGROPE),
    "qwen3": _of("Qwen3", head_dim=8, rope_parameters=_LONGROPE | {"factor": 16.0}),
}  # fmt: skip
"""Configs of models whose rotation changes with the length of a text."""

DYNAMIC = _of("Llama", max_position_embeddings=48, rope_parameters={
    "rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4
})  # fmt: skip
"""A model whose rotation would change where the longest text of a run ends."""

MIXTURES = ("qwen3-moe", "olmoe", "mixtral")
"""Those whose layers send each token to some of their experts."""


def write_any(name: str, directory: Path, seed: int = 7, sharpen: float = 1.0) -> Path:
    """As `write_config`, of one of ARCHITECTURES."""
    return write_config(ARCHITECTURES[name](), directory, seed, sharpen)


def write_config(config: Any, directory: Path, seed: int = 7, sharpen: float = 1.0) -> Path:
    """A model whose every parameter matters, with a tokenizer. `sharpen` multiplies the embedding of a tied head, or the
    head: larger logits, less entropy."""
    import transformers

    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.1 * noise if parameter.ndim == 1 else noise * parameter.shape[-1] ** -0.5)
        model.get_output_embeddings().weight.mul_(sharpen)
    model.save_pretrained(directory)
    write_tokenizer(directory, 256)
    return directory
