"""Make a policy with random weights of a model's shape, so that a run can be tried without the model.

Called by `launch/shaped` for `--random-policy`. The shape is the `config.json` of any model that shoal can run. The
tokenizer is made, too, because that of the model is part of what is not there: it reads bytes, and every other token of
the vocabulary is a made-up word, so whatever such a policy samples is text. It knows no language.

Torch is imported late, because the shape alone is asked for where there is none.
"""

import dataclasses
import itertools
import json
import string
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shoal.errors import StateError
from shoal.policy.anyspec import AnySpec, read_config, without_own_keys
from shoal.policy.files import save_policy
from shoal.policy.kinds import spec_of
from shoal.policy.spec import PolicySpec, write_json
from shoal.policy.tiny import CHAT_TEMPLATE, SPECIALS, initialise

if TYPE_CHECKING:
    from torch import nn

    from shoal.policy.base import PolicyModel

PAD, END = SPECIALS.index("<|pad|>"), SPECIALS.index("<|end|>")

BYTES = 256

LEAST_VOCABULARY = len(SPECIALS) + BYTES
"""Below it a vocabulary has no place for every byte."""


def make_shaped(shape: Path, directory: Path, seed: int, dtype: str) -> None:
    """Write a policy with the shape of `shape`'s config.json and random weights into `directory`, in HF format.

    The seed decides every weight. dtype is float32 or bfloat16. Raises `StateError` if the shape cannot be used.
    """
    spec = demand_shape(shape)
    model = _ours(spec, seed, dtype) if isinstance(spec, PolicySpec) else _any(shape, spec, seed, dtype)
    with tempfile.TemporaryDirectory() as scratch:
        write_byte_tokenizer(Path(scratch), spec.vocab_size, spec.max_positions)
        save_policy(model, directory, dtype, tokenizer_from=Path(scratch))


def demand_shape(shape: Path) -> PolicySpec | AnySpec:
    """The spec of a shape. Raises `StateError` if it is none, or too small for our tokenizer."""
    spec = spec_of(shape)
    if spec.vocab_size < LEAST_VOCABULARY:
        raise StateError(
            f"{shape / 'config.json'}: vocab_size = {spec.vocab_size}: a random policy reads bytes, so it needs at least "
            f"{LEAST_VOCABULARY}. Choose another shape"
        )
    return spec


def _ours(spec: PolicySpec, seed: int, dtype: str) -> "PolicyModel":
    import torch

    from shoal.policy.model import Transformer

    plain = dataclasses.replace(spec, eos_ids=(END,), turn_ends=(), pad_id=PAD, bos_id=None)
    model = Transformer(plain, getattr(torch, dtype))
    initialise(model, seed)
    return model


def _any(shape: Path, spec: AnySpec, seed: int, dtype: str) -> "PolicyModel":
    import torch

    from shoal.policy.anymodel import AnyModel, config_of

    auto_model, config = config_of(shape, spec)
    ends: dict[str, Any] = {"eos_token_id": END, "pad_token_id": PAD, "bos_token_id": None}
    for key, value in ends.items():
        setattr(config, key, value)
    whole = auto_model.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False).eval()
    _fill(whole, seed)
    told = json.loads(config.to_json_string(use_diff=False)) | read_config(shape) | ends
    return AnyModel(whole, spec, {"config.json": without_own_keys(told)})


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
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(texts)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "TokenizersBackend",
        "eos_token": SPECIALS[END],
        "pad_token": SPECIALS[PAD],
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(directory / "tokenizer_config.json", config)


def _words() -> Iterator[str]:
    """aa, ab, ... zz, aaa, ...: no two are equal."""
    for length in itertools.count(2):
        yield from map("".join, itertools.product(string.ascii_lowercase, repeat=length))
