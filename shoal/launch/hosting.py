"""For the host of a run: the text that says how others join and how to add TLS, and the admin calls.

Called by `shoal host` and `shoal admin`. The coordinator decides what an admin call does.
"""

import asyncio
import socket
from pathlib import Path

from msgspec import UNSET

from shoal.config import HostConfig, is_loopback
from shoal.errors import ConfigError, PeerError
from shoal.folder import RunFolder, is_url
from shoal.launch.snapshot import CoordinatorWatch
from shoal.net.client import Client
from shoal.net.keys import load_key
from shoal.protocol.constants import MIN_LR_FACTOR
from shoal.protocol.types import AdminRequest, NodeState, RunInfo, Status

ADMIN_DEADLINE_S = 10.0
ANY_ADDRESS = ("", "0.0.0.0", "::")
TWO_VALIDATORS = (
    "Warning: this gives the run two validators. If one of two lies, forging costs nothing: admit a third, or keep one"
)


def shared_url(url: str, host: HostConfig) -> str:
    """The URL that others type. In the place of an address that means all addresses it has this machine's host name."""
    if host.bind in ANY_ADDRESS and not host.public_url:
        return f"http://{socket.gethostname()}:{url.rsplit(':', 1)[-1]}"
    return url


def invitation(url: str, host: HostConfig, run_dir: Path) -> str:
    """What `shoal host` prints once the coordinator answers: the join line, and who can use it."""
    port, shared = url.rsplit(":", 1)[-1], shared_url(url, host)
    lines = ["Others join with:", "", f"    shoal join {shared}", ""]
    has_tls = shared.startswith("https://")
    if not has_tls:
        lines.append(_reach(host.bind))
    if host.dashboard:
        if url_of_page := host.dashboard_url or ("" if host.public_url else shared):
            lines.append(f"Watch it in a browser: {url_of_page}")
        lines.append(f"The host's own page, with what is private: the address in {RunFolder(run_dir).dashboard_link}")
    lines.append(f"Steer it with: shoal admin pause|resume|drain|kick|admit|quarantine|rate|rotate-publisher {run_dir}")
    if not has_tls:  # last, because a small terminal cuts the end off
        lines += _how_to_add_tls(port)
    return "\n".join(lines)


def _reach(bind: str) -> str:
    if is_loopback(bind):
        return f"It listens on {bind}: only this machine can join and watch. --bind 0.0.0.0 lets your network in."
    return f"It listens on {bind}, without TLS: use it only in a network that you trust."


def _how_to_add_tls(port: str) -> list[str]:
    return [
        "For strangers, put TLS in front: requests are signed, but over plain HTTP anyone on the path can read them.",
        "  1. a name that points to this machine, such as shoal.example.org",
        "  2. a proxy that gets a certificate for it:",
        f"     caddy reverse-proxy --from shoal.example.org --to 127.0.0.1:{port}",
        f"  3. host with: --bind 127.0.0.1 --port {port} --public-url https://shoal.example.org",
    ]


def administer(action: str, run: str, node: str, key_file: Path | None, lr_factor: float | None = None) -> str:
    """Sign and send one admin call; returns the state of the run after it, as text.

    `run` is the run's folder, or its URL, which needs `key_file`. Raises `ConfigError`, `StateError`, `PeerError`.
    """
    if action in ("kick", "admit", "quarantine") and not node:
        raise ConfigError(f"shoal admin {action}: say which node, by its key (or by name, to kick or quarantine)")
    if (action == "rate") != (lr_factor is not None):
        raise ConfigError("shoal admin rate takes --factor, such as 0.5, and no other action does")
    if lr_factor is not None and not MIN_LR_FACTOR <= lr_factor <= 1:
        raise ConfigError(f"--factor {lr_factor}: must be from {MIN_LR_FACTOR} to 1, times the run file's train.lr")
    if is_url(run):
        if key_file is None:
            raise ConfigError("a URL needs --key FILE, the run's key (keys/run.key in the run's folder)")
        url = run
    else:
        folder = RunFolder(Path(run))
        url = CoordinatorWatch(folder.address, folder.config().host.bind).url()
        key_file = key_file or folder.keys / "run.key"
        if not url:
            raise PeerError(f"{run} is not being hosted: start it with `shoal run` or `shoal host` first")
    request = AdminRequest(node, UNSET if lr_factor is None else lr_factor)
    status, validators = asyncio.run(call(url, key_file, action, request))
    done = f"{action}: done. The run is {status.phase}, version {status.version} of {status.steps}"
    return f"{done}. {TWO_VALIDATORS}" if action in ("admit", "kick") and len(validators) == 2 else done


async def call(url: str, key_file: Path, action: str, request: AdminRequest) -> tuple[Status, set[str]]:
    """What the coordinator answers, and the keys of the validators that judge once an admitted one has joined."""
    async with Client(url, load_key(key_file)) as client:
        client.run = (await client.get_json("/v1/run", RunInfo, deadline_s=ADMIN_DEADLINE_S)).run
        status = await client.post_json(f"/v1/admin/{action}", request, Status, deadline_s=ADMIN_DEADLINE_S)
        nodes = await client.get_json("/v1/nodes", list[NodeState], deadline_s=ADMIN_DEADLINE_S)
    validators = (n for n in nodes if n.role == "validator" and not n.left)
    judging = {n.key for n in validators if n.standing not in ("kicked", "suspended")}
    return status, judging | ({request.node} if action == "admit" else set())
