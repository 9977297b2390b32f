"""The base of adapters in NF4: made of a model once, written as a directory, and read as a stranger's.

`nf4_layout` says which tensors it holds, and `nf4` multiplies by them.

The host codes and publishes the bytes, also of a model that nodes could get from a hub by themselves. Those would fetch
four times as much, need room for both, and each repeat the coding. In it a mean is a sum of floats, which may differ in its
last bit between machines and versions of torch: then an honest node would have another base. Bytes need no such agreement,
and relays pass them on.
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from shoal.errors import StateError, cause_of
from shoal.models.load_tensors import fill_all, read_rows
from shoal.models.nf4 import CODE_DTYPES, coded, constants_coded
from shoal.models.nf4_layout import coded_forms, demand_coded, flaw_of
from shoal.models.safetensors_header import INDEX, StoredTensor
from shoal.models.safetensors_writer import TensorHeader, write_files
from shoal.models.transformer import Transformer
from shoal.models.transformer_config import TransformerConfig
from shoal.run_folder import replaced_folder

CODED_VALUES = 1 << 22
"""Weights that are coded at a time."""


def load_coded(
    spec: TransformerConfig, stored: Mapping[str, StoredTensor], directory: Path, dtype: torch.dtype
) -> Transformer:
    """The policy of a directory whose layers are codes, and stay so in memory. What is beside the codes is `dtype`.

    Raises `StateError` if the tensors are not exactly those of its config, or give weights that are not finite numbers.
    """
    demand_coded(stored, spec, directory)  # before a hostile config makes us allocate too much
    kept = torch.bfloat16 if stored["model.embed_tokens.weight"].dtype == "BF16" else torch.float32
    model = Transformer(spec, dtype, kept)
    fill_all({**dict(model.named_parameters()), **dict(model.named_buffers())}, stored, directory)
    for name, codes in model.codes().items():
        if not codes.constants().to(codes.kept).isfinite().all():  # guard: finite-constants
            raise StateError(
                f"{directory}: {name} holds values that are not finite numbers: tell the host of the run, or code the "
                "model again"
            )
    return model


def write_coded(source: Path, stored: Mapping[str, StoredTensor], target: Path, shard_bytes: int) -> None:
    """Write the model in `source`, with its tokenizer, to the directory `target`, with the matrices of its layers in NF4;
    both may be the same. Little of it is in memory at a time. The directory appears whole or not at all.

    Raises `StateError` if the model is of another kind, cannot be coded, or cannot be written.
    """
    spec = TransformerConfig.from_directory(source)
    if fault := flaw_of(spec):
        raise StateError(f"{source}: {fault}: leave policy.adapter.base out, or choose another model")
    matrices, forms = spec.layer_matrices(), dict[str, dict[str, TensorHeader]]()
    for name, one in stored.items():
        if name in matrices:
            coded = coded_forms(name, one.shape).items()
            forms[name] = {part: TensorHeader(CODE_DTYPES[form.dtype], form.shape) for part, form in coded}
        else:
            forms[name] = {name: TensorHeader(torch.bfloat16 if one.dtype == "BF16" else torch.float32, one.shape)}

    def tensors_of(name: str) -> Iterator[tuple[str, Tensor]]:
        if name in matrices:
            yield from coded_matrix(name, stored[name]).items()
        else:
            yield name, read_rows(stored[name], 0, stored[name].shape[0], name).to(forms[name][name].dtype)

    try:
        with replaced_folder(target) as scratch:
            for file in source.iterdir():
                # Hidden is the name of a hub's model, which this one is not any more.
                if file.is_file() and not (file.suffix == ".safetensors" or file.name == INDEX or file.name[0] == "."):
                    shutil.copyfile(file, scratch / file.name)
            write_files(scratch / "model.safetensors", forms, tensors_of, shard_bytes)
    except OSError as error:
        raise StateError(f"cannot write the base in NF4 to {target}: {cause_of(error)}. Free some space") from None


def coded_matrix(name: str, stored: StoredTensor) -> dict[str, Tensor]:
    """What a file holds of a matrix that another file has in full precision."""
    outputs, inputs = stored.shape
    step, pairs, constants = max(1, CODED_VALUES // inputs), list[Tensor](), list[Tensor]()
    for start in range(0, outputs, step):
        part = coded(read_rows(stored, start, min(start + step, outputs), name).view(-1))
        pairs.append(part.pairs)
        constants.append(part.c_b)
    doubled = constants_coded(torch.cat(constants))
    tensors = (torch.cat(pairs).view(outputs, -1), doubled.code_b.view(outputs, -1), doubled.c2_g, doubled.mean)
    return dict(zip(coded_forms(name, stored.shape), tensors, strict=True))
