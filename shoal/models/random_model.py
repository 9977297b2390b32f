"""Models with random weights: tiny ones for tests, and ones in the shape of a real checkpoint.

A tiny model has a tokenizer of 64 characters. One in the shape of a checkpoint has one that reads bytes, and every other
token of its vocabulary is a made-up word, so whatever it samples is text. Torch is imported late, because the shape alone
is asked for where there is none.
"""

import dataclasses
import itertools
import json
import string
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from shoal.config import TinyPolicy
from shoal.errors import ConfigError, StateError
from shoal.models.checkpoint import save_policy
from shoal.models.config import write_json
from shoal.models.hf_config import HFConfig, read_config, without_own_keys
from shoal.models.open_model import spec_of
from shoal.models.transformer_config import TransformerConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shoal.models.interface import PolicyModel
    from shoal.models.transformer import Transformer

SPECIALS = ("<|pad|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
"""Token ids 0 to 5. A policy cannot spell one letter by letter, because `|` is not in the vocabulary."""

TURN_ENDS = (5, 0, 1, 2, 3, 4)
"""All of `SPECIALS`, with `<|end|>` first: a policy that does not write yet stops at whatever is no letter."""

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,:;!?'+-*/=()<>_#[]"
"""Token ids 6 to 63. Capitals become lower case; all other characters are `<|unk|>`."""

_BYTE_NAMES = {" ": "Ġ", "\n": "Ċ"}
"""How byte-level BPE spells these. We use BPE without merges because `transformers` rebuilds any tokenizer beside a Qwen2
config as byte-level BPE, whatever its file says."""

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tiny(tiny: TinyPolicy, directory: Path, seed: int, dtype: str) -> None:
    """Write a new policy with its tokenizer into `directory`, in HF format. The seed decides every weight.

    dtype is float32 or bfloat16. Raises `ConfigError` if the numbers do not match each other.
    """
    from shoal.models.transformer import Transformer

    model = Transformer(_spec(tiny))
    initialise(model, seed)
    with tempfile.TemporaryDirectory() as scratch:
        write_tokenizer(Path(scratch), tiny.max_positions)
        save_policy(model, directory, dtype, tokenizer_from=Path(scratch))


def write_all_but_weights(tiny: TinyPolicy, directory: Path) -> None:
    """Write what a renderer reads of the policy that `make_tiny` makes. Raises `ConfigError`."""
    spec = _spec(tiny)
    write_json(directory / "config.json", spec.to_hf())
    write_json(directory / "generation_config.json", spec.generation_to_hf())
    write_tokenizer(directory, tiny.max_positions)


def _spec(tiny: TinyPolicy) -> TransformerConfig:
    return dataclasses.replace(tiny_spec(tiny), turn_ends=TURN_ENDS)


def tiny_spec(tiny: TinyPolicy) -> TransformerConfig:
    """The shape that a run file's `[policy.tiny]` describes. Raises `ConfigError`."""
    heads = max(tiny.heads, 1)
    demands = [
        (min(tiny.width, tiny.layers, tiny.heads, tiny.kv_heads, tiny.mlp_width, tiny.max_positions) > 0,
         "every number must be above 0"),
        (tiny.width % (2 * heads) == 0, f"width = {tiny.width} must be an even multiple of heads = {tiny.heads}"),
        (tiny.kv_heads > 0 and heads % tiny.kv_heads == 0,
         f"heads = {tiny.heads} must be a multiple of kv_heads = {tiny.kv_heads}"),
    ]  # fmt: skip
    for holds, fault in demands:
        if not holds:
            raise ConfigError(f"policy.tiny: {fault}")
    return TransformerConfig(
        family=tiny.family,
        width=tiny.width,
        layers=tiny.layers,
        heads=tiny.heads,
        kv_heads=tiny.kv_heads,
        head_dim=tiny.width // heads,
        mlp_width=tiny.mlp_width,
        vocab_size=len(SPECIALS) + len(CHARACTERS),
        max_positions=tiny.max_positions,
        rope_theta=10000.0,
        norm_eps=1e-6,
        tied=tiny.tied,
        eos_ids=(SPECIALS.index("<|end|>"),),
        pad_id=SPECIALS.index("<|pad|>"),
    )


def initialise(model: "Transformer", seed: int) -> None:
    """Fill every parameter: norms 1, biases 0, matrices normal with the deviation from `_deviation`."""
    import torch

    generator = torch.Generator().manual_seed(seed % 2**63)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, _deviation(name, parameter, model.spec), generator=generator)


def _deviation(name: str, weight: "torch.Tensor", spec: TransformerConfig) -> float:
    """1/sqrt(inputs) for matrices, divided by sqrt(2·layers) if they write to the residual stream; 0.02 for the others."""
    if "layers" not in name:
        return 0.02
    scale = float(weight.shape[1]) ** -0.5
    return scale * (2 * spec.layers) ** -0.5 if "o_proj" in name or "down_proj" in name else scale


def write_tokenizer(directory: Path, max_positions: int) -> None:
    """Write the tokenizer and its chat template, which `AutoTokenizer` and our renderer can open."""
    letters = [_BYTE_NAMES.get(character, character) for character in CHARACTERS]
    _write_tokenizer(directory, [*SPECIALS, *letters], max_positions, lowercase=True)


def _write_tokenizer(directory: Path, texts: Sequence[str], max_positions: int, lowercase: bool) -> None:
    """A byte-level tokenizer with a token for each of these texts, in their order; with an unknown one in lower case."""
    unknown = {"unk_token": "<|unk|>"} if lowercase else {}
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(texts)}, merges=[], **unknown))
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "TokenizersBackend",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(directory / "tokenizer_config.json", config | unknown)


PAD, END = SPECIALS.index("<|pad|>"), SPECIALS.index("<|end|>")

BYTES = 256

LEAST_VOCABULARY = len(SPECIALS) + BYTES
"""Below it a vocabulary has no place for every byte."""


def make_shaped(shape: Path, directory: Path, seed: int, dtype: str) -> None:
    """Write a policy with the shape of `shape`'s config.json and random weights into `directory`, in HF format.

    The seed decides every weight. dtype is float32 or bfloat16. Raises `StateError` if the shape cannot be used.
    """
    spec = demand_shape(shape)
    model = _ours(spec, seed, dtype) if isinstance(spec, TransformerConfig) else _any(shape, spec, seed, dtype)
    with tempfile.TemporaryDirectory() as scratch:
        write_byte_tokenizer(Path(scratch), spec.vocab_size, spec.max_positions)
        save_policy(model, directory, dtype, tokenizer_from=Path(scratch))


def demand_shape(shape: Path) -> TransformerConfig | HFConfig:
    """The spec of a shape. Raises `StateError` if it is none, or too small for our tokenizer."""
    spec = spec_of(shape)
    if spec.vocab_size < LEAST_VOCABULARY:
        raise StateError(
            f"{shape / 'config.json'}: vocab_size = {spec.vocab_size}: a random policy reads bytes, so it needs at least "
            f"{LEAST_VOCABULARY}. Choose another shape"
        )
    return spec


def _ours(spec: TransformerConfig, seed: int, dtype: str) -> "PolicyModel":
    import torch

    from shoal.models.transformer import Transformer

    plain = dataclasses.replace(spec, eos_ids=(END,), turn_ends=(), pad_id=PAD, bos_id=None)
    model = Transformer(plain, getattr(torch, dtype))
    initialise(model, seed)
    return model


def _any(shape: Path, spec: HFConfig, seed: int, dtype: str) -> "PolicyModel":
    import torch

    from shoal.models.hf_model import HFModel, config_of

    auto_model, config = config_of(shape, spec)
    ends: dict[str, Any] = {"eos_token_id": END, "pad_token_id": PAD, "bos_token_id": None}
    for key, value in ends.items():
        setattr(config, key, value)
    whole = auto_model.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False).eval()
    _fill(whole, seed)
    told = json.loads(config.to_json_string(use_diff=False)) | read_config(shape) | ends
    return HFModel(whole, spec, {"config.json": without_own_keys(told)})


def _fill(model: "nn.Module", seed: int) -> None:
    """Matrices are normal, divided by the root of their inputs; what has one axis, such as a norm, stays as it was made."""
    import torch

    generator = torch.Generator().manual_seed(seed % 2**63)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02 if "embed" in name else parameter.shape[-1] ** -0.5, generator=generator)


def write_byte_tokenizer(directory: Path, vocabulary: int, max_positions: int) -> None:
    """Write a tokenizer that reads bytes and knows a text for every token, with a chat template beside it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*SPECIALS, *letters, *itertools.islice(_words(), vocabulary - LEAST_VOCABULARY)]
    _write_tokenizer(directory, texts, max_positions, lowercase=False)


def _words() -> Iterator[str]:
    """aa, ab, ... zz, aaa, ...: no two are equal."""
    for length in itertools.count(2):
        yield from map("".join, itertools.product(string.ascii_lowercase, repeat=length))
