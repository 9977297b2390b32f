"""The only place that knows engine classes: a description of an engine becomes the engine.

Called by every role that samples or scores. Light: torch is imported when a local engine is opened. A new kind of engine
adds a case here and its name to `protocol/bounds`; nothing else learns its class.
"""

from dataclasses import dataclass

from shoal.engine.base import Engine
from shoal.errors import StateError
from shoal.protocol.bounds import LOCAL

DTYPES = {LOCAL: ("float32", "bfloat16", "int8")}
"""What each kind of engine can sample and score in."""


@dataclass(frozen=True)
class EngineSpec:
    """Which engine, and how it computes."""

    kind: str = LOCAL
    dtype: str = "float32"
    """float32 or bfloat16, of weights and products; int8, of the layers' matrices, with products in float32."""
    threads: int | None = None
    """Of this process; None leaves torch's choice."""
    device: str = "cpu"


def open_engine(spec: EngineSpec) -> Engine:
    """An engine without a policy. Raises `StateError` for a kind or a dtype that this version of shoal does not have."""
    if spec.kind not in DTYPES:
        raise StateError(f"there is no engine of kind {spec.kind!r}: this shoal has {', '.join(DTYPES)}")
    if spec.dtype not in DTYPES[spec.kind]:
        raise StateError(
            f"the {spec.kind} engine does not compute in {spec.dtype!r}, only in {', '.join(DTYPES[spec.kind])}"
        )
    from shoal.engine.local import LocalEngine  # imports torch, which only an opened engine needs

    return LocalEngine(spec.threads, spec.dtype, spec.device)
