"""The directory that vLLM opens: the weights of a policy, and a config that we wrote.

Called by `vllm`. vLLM looks into other files beside the weights, and chooses the code that runs by many keys of a
`config.json`, which a host could set: a class of its own by `architectures`, a second model by `speculators_config`,
kernels by `compression_config`. So it gets no file of the host but weights. It does not import vLLM.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.errors import StateError
from shoal.policy import adapterspec
from shoal.policy.anymodel import config_of
from shoal.policy.anyspec import AnySpec, read_config, text_config, untied, without_own_keys
from shoal.policy.files import find_tensors, policy_tensors
from shoal.policy.rope import rotations_of
from shoal.policy.spec import PolicySpec, write_json
from shoal.policy.stored import differ_in_files


@contextlib.contextmanager
def files_for_vllm(directory: Path, spec: PolicySpec | AnySpec) -> Iterator[Path]:
    """A directory with links to a policy's weights, and a config; an adapter's are not among them, since vLLM would take
    them for the model's. It exists while vLLM loads the weights.

    Raises `StateError` if the weights are damaged, hostile, or not those of the config, and if vLLM is not to load such a
    policy here.
    """
    stored = policy_tensors(directory)[1] if isinstance(spec, PolicySpec) else find_tensors(directory)
    with tempfile.TemporaryDirectory(prefix="shoal-vllm-") as made:
        for file in sorted({one.file for one in stored.values()} - {directory / adapterspec.WEIGHTS}):
            (Path(made) / file.name).symlink_to(file.resolve())
        write_json(Path(made) / "config.json", config_for_vllm(directory, spec))
        yield Path(made)


def config_for_vllm(directory: Path, spec: PolicySpec | AnySpec) -> dict[str, Any]:
    """What vLLM is told of a policy: only what decides what the model computes. Raises `StateError`."""
    if isinstance(spec, PolicySpec):
        return spec.to_hf()  # guard: vllm-reads-our-config
    given = read_config(directory)
    if text_config(given) is not given:  # guard: vllm-reads-no-inner-config
        raise StateError(
            f"{directory} holds a {spec.architecture} that also reads images, which vLLM does not sample here: join "
            "without --engine vllm"
        )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    auto_model, config = config_of(directory, spec)
    known = type(config)().to_dict()
    told = {key: value for key, value in config.to_dict().items() if key in known}  # guard: vllm-reads-known-keys
    named = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[spec.architecture]], "model_type": spec.architecture}
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
