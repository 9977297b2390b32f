"""The only place that knows engine classes: a description of an engine becomes the engine.

Called by every role that samples or scores. Light: torch is imported when a local engine is opened. A new kind of engine
adds a case here and its name to `protocol/bounds`; nothing else learns its class.
"""

from dataclasses import dataclass
from pathlib import Path

from shoal.engine.base import Engine
from shoal.errors import StateError
from shoal.policy.device import CPU, take_device
from shoal.policy.kinds import AUTO, needs_transformers
from shoal.protocol import bounds
from shoal.protocol.noise import PHILOX


@dataclass(frozen=True)
class EngineSpec:
    """Which engine, and how it computes."""

    kind: str = bounds.LOCAL
    dtype: str = "float32"
    """float32 or bfloat16, of weights and products; int8, of the layers' matrices, with products in float32."""
    threads: int | None = None
    """Of this process; None leaves torch's choice."""
    device: str = CPU
    """One of `policy.device.DEVICES`."""
    noise: str = PHILOX
    """The run's noise family, one of `protocol.noise.NOISES`."""


def open_engine(spec: EngineSpec) -> Engine:
    """An engine without a policy. Raises `StateError` for a kind, a dtype or a noise family that this version of shoal does
    not have, and `ConfigError` for a device that this machine does not have."""
    if spec.dtype not in bounds.DTYPES:
        raise StateError(f"no engine computes in {spec.dtype!r}, only in {', '.join(bounds.DTYPES)}")
    match spec.kind:
        case bounds.LOCAL:
            from shoal.engine.local import LocalEngine  # imports torch, which only an opened engine needs

            return LocalEngine(spec.threads, spec.dtype, take_device(spec.device), spec.noise)
        case bounds.TRANSFORMERS:
            if spec.dtype == "int8":
                raise StateError("the engine for other architectures computes in float32 or bfloat16, not in int8")
            try:
                from shoal.engine.hf import TransformersEngine

                return TransformersEngine(spec.threads, spec.dtype, take_device(spec.device), spec.noise)
            except ImportError as error:
                raise StateError(
                    f"this run's policy needs transformers, which is not installed ({error.name}): "
                    "pip install -c constraints.txt '.[torch,hf]'"
                ) from None
        case _:
            raise StateError(f"unknown kind of engine {spec.kind!r}: this version of shoal has {', '.join(KINDS)}")


KINDS = (bounds.LOCAL, bounds.TRANSFORMERS)


def kind_for(directory: Path) -> str:
    """The kind of engine that computes the policy in a directory, where the user chose it and no run file does."""
    return bounds.TRANSFORMERS if needs_transformers(directory, AUTO) else bounds.LOCAL
