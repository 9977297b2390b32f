"""The process environment: the only file that reads it.

Called where a node's key is kept, where role commands and the processes of a trainer are started, and where a judge is
asked. It knows nothing of run files.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import ConfigError

CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""Without its own workspace for each stream, cuBLAS gives the same product different bits."""

HUB_OFFLINE = "HF_HUB_OFFLINE"
"""With it, huggingface_hub downloads nothing."""


def node_home() -> Path:
    """Where this machine's node key is kept: $SHOAL_HOME, or ~/.shoal."""
    return Path(os.environ.get("SHOAL_HOME", "") or Path.home() / ".shoal")


def child_environment(threads: int) -> dict[str, str]:
    """Environment of a role's process: threads pinned, OpenMP waiting without spinning, one heap.

    A role has one thread for the event loop and one that computes. With a heap for each, both would keep freed tensors.
    """
    pinned = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    waiting = {"OMP_WAIT_POLICY": "PASSIVE", "MALLOC_ARENA_MAX": "1", "PYTHONUNBUFFERED": "1"}
    return os.environ | pinned | waiting | dict([CUBLAS_WORKSPACE])


def repeatable_cuda() -> None:
    """In a process that no launcher started: as `child_environment`. cuBLAS reads it when it makes its first product."""
    os.environ.setdefault(*CUBLAS_WORKSPACE)


def rank_here() -> tuple[int, int]:
    """Which of how many processes of a trainer this is, as torchrun says."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def stay_on_this_machine() -> None:
    """Processes that this one starts, and that train together, then talk over loopback alone."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.update({"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback})


def settle_vllm(cpu: bool) -> None:
    """Before vLLM is imported: it reports nothing, starts no process, talks over loopback and pins no thread. Its log and
    its cache on a CPU, 1 GiB, may be set from outside. `cpu`: it is a build for CPUs, which does not compile what it
    runs."""
    loopback = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_LOOPBACK_IP": "127.0.0.1"}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"} | loopback
    chosen = {"VLLM_LOGGING_LEVEL": "ERROR"}
    if cpu:
        os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "TORCHDYNAMO_DISABLE": "1"}
        chosen |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in chosen.items():
        os.environ.setdefault(name, value)


def settle_vllm_runner(own_sampler: bool) -> None:
    """Before vLLM opens a policy: its second model runner has the sampler that makes noise of ours, its first takes our
    processor."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(own_sampler))


@contextlib.contextmanager
def without_hub() -> Iterator[None]:
    """While a package is imported that shall download nothing: huggingface_hub reads this once, when it is imported.
    Processes that this one starts later may download."""
    before = os.environ.get(HUB_OFFLINE)
    os.environ[HUB_OFFLINE] = "1"
    try:
        yield
    finally:
        del os.environ[HUB_OFFLINE]
        os.environ |= {} if before is None else {HUB_OFFLINE: before}


def settle_loggers(folder: Path) -> None:
    """Before a logger is imported: its files go below the run's folder, and without a key W&B reaches no network. What
    the user's environment says otherwise stays."""
    chosen = {"TRACKIO_DIR": str(folder / "trackio"), "WANDB_SILENT": "true"}
    if not os.environ.get("WANDB_API_KEY"):
        chosen["WANDB_MODE"] = "offline"
    for name, value in chosen.items():
        os.environ.setdefault(name, value)


def secret_named(name: str) -> str:
    """A secret, such as the key of a service, by the name of its environment variable. Never log it or send it to a
    node."""
    value = os.environ.get(name, "").strip()
    if not value:
        raise ConfigError(f"the environment variable {name} is empty: put the service's key into it")
    return value
