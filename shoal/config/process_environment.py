"""The process environment: the only file that reads it."""

import contextlib
import ipaddress
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import ConfigError

CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""Without its own workspace for each stream, cuBLAS gives the same product different bits."""

HUB_OFFLINE = "HF_HUB_OFFLINE"
"""With it, huggingface_hub downloads nothing."""

SAME_EVERYWHERE = {"PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C.UTF-8"}
"""For a process that plays an environment: another one that plays the same episode must say the same words."""


def node_home() -> Path:
    """Where this machine's node key is kept: $SHOAL_HOME, or ~/.shoal."""
    return Path(os.environ.get("SHOAL_HOME", "") or Path.home() / ".shoal")


def set_node_home(home: Path) -> None:
    """From now on, `node_home` is this folder, as for processes that this one starts."""
    os.environ["SHOAL_HOME"] = str(home.absolute())


def child_environment(threads: int) -> dict[str, str]:
    """Environment of a role's process: threads pinned, OpenMP waiting without spinning, one heap.

    A role has one thread for the event loop and one that computes. With a heap for each, both would keep freed tensors.
    """
    pinned = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    waiting = {"OMP_WAIT_POLICY": "PASSIVE", "MALLOC_ARENA_MAX": "1", "PYTHONUNBUFFERED": "1"}
    return os.environ | pinned | waiting | dict([CUBLAS_WORKSPACE])


def wait_without_spinning() -> None:
    """In a process that no launcher started, before torch is imported: as `child_environment`. On a busy machine, threads
    that spin take most of the time from each other."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


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


def names_proxy() -> bool:
    """Whether the environment names a forward proxy for any server."""
    return any(map(_variable, ("https_proxy", "http_proxy", "all_proxy")))


def proxy_named(scheme: str, host: str) -> str:
    """The forward proxy that the environment names for a server (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY), or "" if it names
    none, or the server in NO_PROXY."""
    if any(_is_excepted(host, entry.strip()) for entry in _variable("no_proxy").lower().split(",")):
        return ""
    return _variable(f"{scheme}_proxy") or _variable("all_proxy")


def _variable(name: str) -> str:
    return os.environ.get(name, "") or os.environ.get(name.upper(), "")


def _is_excepted(host: str, entry: str) -> bool:
    """Whether an entry of NO_PROXY names a server: a name that its name ends with, an address, or a network such as
    10.0.0.0/8. A port is not looked at."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")) in ipaddress.ip_network(_without_port(entry), strict=False)
    name = _without_port(entry).lstrip("*").lstrip(".")
    return entry == "*" or bool(name and (host == name or host.endswith(f".{name}")))


def _without_port(entry: str) -> str:
    found = re.fullmatch(r"\[(.+)\](?::\d+)?|([^:]*):\d+", entry)
    return (found[1] or found[2]) if found else entry


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
