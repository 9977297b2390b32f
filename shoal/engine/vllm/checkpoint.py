"""The directory that vLLM opens: the weights of a policy, and a config that we wrote; and adapters as vLLM takes them.

vLLM looks into other files beside the weights, and chooses the code that runs by many keys of a `config.json`, which a host
could set: a class of its own by `architectures`, a second model by `speculators_config`, kernels by `compression_config`.
So it gets no file of the host but weights.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import StateError
from shoal.models import lora_config
from shoal.models.checkpoint import find_tensors, policy_tensors
from shoal.models.config import write_json
from shoal.models.hf_config import HFConfig, read_config, text_config, untied, without_own_keys
from shoal.models.hf_model import config_of
from shoal.models.lora import read_adapter
from shoal.models.lora_config import AdapterSpec, has_adapter
from shoal.models.rope import rotations_of
from shoal.models.safetensors_header import differ_in_files, key_of_base
from shoal.models.transformer_config import TransformerConfig


@contextlib.contextmanager
def files_for_vllm(directory: Path, spec: TransformerConfig | HFConfig) -> Iterator[Path]:
    """A directory with links to a policy's weights, and a config; an adapter's are not among them, since vLLM would take
    them for the model's. It exists while vLLM loads the weights.

    Raises `StateError` if the weights are damaged, hostile, or not those of the config, and if vLLM is not to load such a
    policy here.
    """
    stored = policy_tensors(directory)[1] if spec.tensor_shapes() else find_tensors(directory)
    with tempfile.TemporaryDirectory(prefix="shoal-vllm-") as made:
        for file in sorted({one.file for one in stored.values()} - {directory / lora_config.WEIGHTS}):
            (Path(made) / file.name).symlink_to(file.resolve())
        write_json(Path(made) / "config.json", config_for_vllm(directory, spec))
        yield Path(made)


def config_for_vllm(directory: Path, spec: TransformerConfig | HFConfig) -> dict[str, Any]:
    """What vLLM is told of a policy: only what decides what the model computes. Raises `StateError`."""
    if isinstance(spec, TransformerConfig):
        return spec.to_hf()  # guard: vllm-reads-our-config
    given = read_config(directory)
    if text_config(given) is not given:  # guard: vllm-reads-no-inner-config
        raise StateError(
            f"{directory} holds a {spec.family} that also reads images, which vLLM does not sample here: join "
            "without --engine vllm"
        )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    auto_model, config = config_of(directory, spec)
    known = type(config)().to_dict()
    told = {key: value for key, value in config.to_dict().items() if key in known}  # guard: vllm-reads-known-keys
    named = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[spec.family]], "model_type": spec.family}
    kinds = {one.get("rope_type") for one in rotations_of(config)}
    if odd := kinds & {"longrope", "dynamic"}:  # guard: vllm-rotates-as-transformers
        raise StateError(
            f"{directory}: its rotation depends on the length of a text (rope_type {sorted(map(str, odd))[0]}), which vLLM "
            "decides otherwise than transformers: join without --engine vllm"
        )
    ties = auto_model._model_mapping[type(config)]._tied_weights_keys if config.tie_word_embeddings else {}
    if any(differ_in_files(directory, *names) for names in (ties or {}).items()):
        told = untied(told)
    return dict(without_own_keys(told)) | named


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


def adapter_in(directory: Path, spec: TransformerConfig | HFConfig, dtype: str) -> Adapter | None:
    """The adapter in a directory, if there is one. Raises `StateError` if it is malformed, or not for float32, because vLLM
    would round it to the dtype of its base."""
    if not has_adapter(directory):
        return None
    if dtype != "float32" or isinstance(spec, HFConfig):
        raise StateError(
            f"{directory} holds an adapter, which vLLM computes in float32 only here, not in {dtype}: join without "
            "--engine vllm"
        )
    shape, _ = read_adapter(directory, spec)  # which refuses what a stranger may have put there
    return Adapter(directory, key_of_base(directory), shape)
