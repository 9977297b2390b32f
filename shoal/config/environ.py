"""The process environment: the only file that reads it.

Called where a node's key is kept and where role commands are started. It knows nothing of run files.
"""

import os
from pathlib import Path


def node_home() -> Path:
    """Where this machine's node key is kept: $SHOAL_HOME, or ~/.shoal."""
    return Path(os.environ.get("SHOAL_HOME", "") or Path.home() / ".shoal")


def child_environment(threads: int) -> dict[str, str]:
    """Environment of a role's process: threads pinned, OpenMP waiting without spinning, one heap.

    A role has one thread for the event loop and one that computes. With a heap for each, both would keep freed tensors.
    """
    pinned = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return os.environ | pinned | {"OMP_WAIT_POLICY": "PASSIVE", "MALLOC_ARENA_MAX": "1", "PYTHONUNBUFFERED": "1"}
