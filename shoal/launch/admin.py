"""Administration of a hosted run: invitations, requests of its host, and the rotation of publishers."""

import asyncio
import re
import shlex
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msgspec import UNSET

from shoal.config import HostConfig, is_loopback
from shoal.errors import ConfigError, PeerError, StateError
from shoal.ledger.remedies import SAYS_FORK
from shoal.ledger.run_decisions import surplus_of
from shoal.net.client import Client, PeerRefused
from shoal.net.key_files import load_key, load_or_make_key, save_key
from shoal.net.server_address import living_pid, local_url, port_of_living
from shoal.protocol.constants import ADMIN_ACTIONS, EPISODES, MAIN_STREAM, MIN_LR_FACTOR
from shoal.protocol.host_signatures import sign_rotation
from shoal.protocol.messages import AdminRequest, NodeState, Rotation, RunInfo, Status, WriteAck
from shoal.protocol.messages.run import kind_of
from shoal.protocol.signing import Key, is_public_key
from shoal.run_folder import RunFolder, is_locked, is_url, write_atomically
from shoal.runs.run_status import suspended_process
from shoal.terminal import command

ADMIN_DEADLINE_S = 10.0
ANY_ADDRESS = ("", "0.0.0.0", "::")
TWO_VALIDATORS_RISK = (
    "If one of two lies, forging costs nothing: admit a third, or keep one. Several keys are admitted at once: "
    "`shoal admin admit RUN KEY KEY`"
)
LONE_VALIDATOR_RISK = (
    "Faults of an environment pause this run only if two validators find them: admit two more, "
    "`shoal admin admit RUN KEY KEY`"
)
"""Of a validator that is not the host's, in a run whose workers play."""
KICKED = "for good: its owner can only join with a new key, as a newcomer"


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
    actions = "|".join((*ADMIN_ACTIONS, "rotate-publisher"))
    lines.append(f"Steer it with: {command('admin')} {actions} {shlex.quote(str(run_dir))}")
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


def administer(action: str, run: str, request: AdminRequest, key_file: Path | None) -> str:
    """Sign and send one admin call; returns the state of the run after it, as text.

    `run` is the run's folder, or its URL, which needs `key_file`. Raises `ConfigError`, `StateError`, `PeerError`.
    """
    if action in ("kick", "admit", "quarantine") and not request.node:
        raise ConfigError(f"shoal admin {action}: say which node, by its key (or by name, to kick or quarantine)")
    if surplus := surplus_of(action, request):
        raise ConfigError(f"shoal admin {surplus}")
    lr_factor = request.lr_factor
    if action == "rate" and lr_factor is UNSET:
        raise ConfigError("shoal admin rate takes --factor, such as 0.5")
    if lr_factor is not UNSET and not MIN_LR_FACTOR <= lr_factor <= 1:
        raise ConfigError(f"--factor {lr_factor}: must be from {MIN_LR_FACTOR} to 1, times the run file's train.lr")
    if is_url(run):
        if key_file is None:
            raise ConfigError("a URL needs --key FILE, the run's key (keys/run.key in the run's folder)")
        url = run
    else:
        folder = RunFolder(Path(run))
        url, key_file = hosted_url(folder), key_file or folder.keys / "run.key"
        if stopped := suspended_process(living_pid(folder.address)):
            raise PeerError(f"the coordinator of {folder.root} does not answer: {stopped}")
    status, warning, done = asyncio.run(call(url, key_file, action, request, is_known=not is_url(run)))
    version = f"version {status.version} of {status.steps}"
    done = f"{action}: {done}. The run is {status.phase}, {version}"
    return f"{done}. {warning}" if warning else done


def hosted_url(folder: RunFolder) -> str:
    """The URL of the coordinator of a folder's run. Raises `PeerError` if none is up: the address that it left may be that
    of another program by now; and `StateError` if the folder has no run."""
    url = local_url(folder.address, folder.config().host.bind)
    if not url or not port_of_living(folder.address):
        if folder.summary.exists():
            raise PeerError(
                f"the run in {folder.root} has ended, and nobody hosts it: nothing of it can be steered any more"
            )
        if is_locked(folder.root) and (folder.checkpoints / "final").exists():
            raise PeerError(
                f"the run in {folder.root} has ended, and its host evaluates the final policy: nothing of it can be "
                "steered any more, and Ctrl-C in the host's terminal stops that"
            )
        if is_locked(folder.root):
            raise PeerError(f"the host of {folder.root} is starting its coordinator: try again in a few seconds")
        raise PeerError(f"{folder.root} is not being hosted: start it with `shoal run` or `shoal host` first")
    return url


Seen = tuple[Status, Sequence[NodeState]]
"""Status and nodes of a run, the first page of them."""


async def call(
    url: str, key_file: Path, action: str, request: AdminRequest, is_known: bool = True
) -> tuple[Status, str, str]:
    """What the coordinator answers, a warning if this gives the run too few validators, and what was done. `is_known`: the
    URL is of a coordinator that has answered before."""
    async with Client(url, load_key(key_file)) as client:
        if is_known:
            client.expect_run()
        info = await client.get_json("/v1/run", RunInfo, deadline_s=ADMIN_DEADLINE_S)
        client.run = info.run
        was = await client.get_json("/v1/status", Status, deadline_s=ADMIN_DEADLINE_S)
        before = await client.get_json("/v1/nodes", list[NodeState], deadline_s=ADMIN_DEADLINE_S)
        try:
            status = await client.post_json(f"/v1/admin/{action}", request, Status, deadline_s=ADMIN_DEADLINE_S)
        except PeerRefused as refused:
            if refused.code == "ended":
                raise PeerError(f"the run at {url} has ended: nothing of it can be steered any more") from None
            raise
        nodes = await client.get_json("/v1/nodes", list[NodeState], deadline_s=ADMIN_DEADLINE_S)
    joined, judged = {*_judging(nodes)}, {*_judging(before), *was.unjoined}
    warning = ""
    if joined | {*status.unjoined} != judged:
        warning = _too_few(action, joined, status.unjoined, info)
    return status, warning, _what_was_done(action, request, (was, before), (status, nodes))


def _too_few(action: str, joined: set[str], unjoined: Sequence[str], info: RunInfo) -> str:
    """A warning if an admission, or the removal of a node, leaves a run with two validators, or with one of others."""
    num = len({*joined, *unjoined})
    once = f", once {', '.join(key[:12] for key in unjoined)} {'joins' if len(unjoined) == 1 else 'join'}"
    if action != "admit" and len(joined) == 2:
        return f"Warning: this leaves the run with two validators. {TWO_VALIDATORS_RISK}"
    if num == 2:
        return f"Warning: this gives the run two validators{once if unjoined else ''}. {TWO_VALIDATORS_RISK}"
    if action == "admit" and num == 1 and kind_of(info.envs) == EPISODES:  # the host's own needed no admission
        return f"Warning: this gives the run one validator{once if unjoined else ''}. {LONE_VALIDATOR_RISK}"
    return ""


def _judging(nodes: Iterable[NodeState]) -> dict[str, str]:
    """Validators that judge now: what they are called, by key."""
    validators = (n for n in nodes if n.role == "validator" and not n.left)
    return {n.key: _called(n) for n in validators if n.standing not in ("kicked", "suspended")}


def _called(node: NodeState) -> str:
    return f"{node.name} ({node.key[:12]})"


class NodesWatch:
    """The nodes of a run: says when a validator judges no longer, and what that leaves the run with, and when a node has
    seen another log."""

    def __init__(self) -> None:
        self._judging, self._forked = dict[str, str](), set[str]()

    def look(self, nodes: Sequence[NodeState], is_stopping: bool = False) -> list[str]:
        """Lines if there is news. Of a run that `is_stopping`, validators leave."""
        forked = [node for node in nodes if node.forked and node.key not in self._forked]
        self._forked.update(node.key for node in forked)
        more = f" (and {len(forked) - 1} more)" if len(forked) > 1 else ""
        said = [f"Warning: {_called(forked[0])}{more} {SAYS_FORK}"] if forked else []
        return said + ([] if is_stopping else self._no_longer_judging(nodes))

    def _no_longer_judging(self, nodes: Sequence[NodeState]) -> list[str]:
        before, self._judging = self._judging, _judging(nodes)
        gone = [node for node in nodes if node.key in before and node.key not in self._judging]
        if not gone:
            return []
        what = ", ".join(f"{_called(node)} {'has left' if node.left else f'was {node.standing}'}" for node in gone)
        silent = [node for node in nodes if node.key in self._judging and node.silent_s]
        what += "".join(f", {_called(node)} is silent" for node in silent)
        num = len(self._judging) - len(silent)
        back = bool(silent) or any(node.left and node.standing != "kicked" for node in gone)
        left = f"{num} validators judge now"
        if num == 2:
            left = f"two judge now. {TWO_VALIDATORS_RISK}"
        elif num == 1:
            left = "one judges now"
            if back:
                left += (
                    ", and each refusal waits for a second verdict: admit another (`shoal admin admit RUN KEY`), or kick "
                    "who will not come back"
                )
        elif num == 0:
            again = "start it again, or " if back else ""
            left = f"nobody judges now: {again}admit another (`shoal admin admit RUN KEY`)"
        return [f"{'Warning: ' if num < 3 else ''}validator {what}: {left}"]


def _is_news(request: AdminRequest, action: str, before: Seen, after: Seen) -> bool:
    """Whether an action changed something. Of nodes that the first page does not have it is taken for granted."""
    if not request.node:
        return (before[0].phase, before[0].lr_factor) != (after[0].phase, after[0].lr_factor)
    named = [_named(name, before[1]) or name in before[0].unjoined for name in (request.node, *request.also)]
    was, now = (
        {node.key: (node.standing, node.left) for name in (request.node, *request.also) for node in _named(name, nodes)}
        for _, nodes in (before, after)
    )
    begins_anew = action == "quarantine" and any(standing == "quarantined" for standing, _ in was.values())
    return not all(named) or was != now or begins_anew


def _named(name: str, nodes: Sequence[NodeState]) -> list[NodeState]:
    """Nodes that a key, the start of one or a name means."""
    keys = {node.key for node in nodes}
    return [n for n in nodes if n.key == name or (name not in keys and name in (n.name, n.key[: len(name)]))]


def _what_was_done(action: str, request: AdminRequest, before: Seen, after: Seen) -> str:
    """Whether an action changed something, and to whom it was done."""
    names = dict.fromkeys(filter(None, (request.node, *request.also)))
    kicked = f", {KICKED}" if action == "kick" else ""
    whom = [
        f"{_called(node)} {'may judge' if action == 'admit' else f'is {node.standing}'}{kicked}"
        for name in names
        for node in _named(name, after[1])
    ]
    whom += [f"{name[:12]} may judge, and has not joined yet" for name in names if name in after[0].unjoined]
    news = "done" if _is_news(request, action, before, after) else "nothing changed"
    return ": ".join((news, *(["; ".join(whom)] if whom else [])))


# --- the root key of a run ---
#
# Its private part is read, used once and not kept.


TRIES = 5
"""A version that is published while a rotation is signed makes it late: it is signed again, at most this often."""


def take_root(folder: RunFolder, given: str) -> str:
    """Give a new run its root key: 64 hex digits, or a key file, which is made if there is none. Returns what to tell the
    host. Raises `StateError` if the run began with another root, and `ConfigError`."""
    file = Path(given)
    if not is_public_key(given) and re.fullmatch("[0-9a-fA-F]{32,}", given) and not file.exists():
        raise ConfigError(f"--root {given} is neither a key file nor a public key, which has 64 lower-case hex digits")
    made = not is_public_key(given) and not file.exists()
    if made and (folder.root_key() or folder.log.exists()):  # guard: one-root-is-made
        raise StateError(
            f"there is no {file}, and the run in {folder.root} keeps the root that it has: leave out --root"
        )
    public = given if is_public_key(given) else load_or_make_key(file).public
    known = folder.root_key()
    if folder.log.exists() and known != public:  # guard: a-run-keeps-its-root
        began = f"with the root {known}" if known else "without a root key of its own: its run key is its root"
        raise StateError(f"the run in {folder.root} began {began}. It keeps that: leave out --root, or give --out")
    write_atomically(folder.root_key_file, public.encode() + b"\n")
    if not made:
        return ""
    return (
        f"Made the root key {file}. Move it to a disk that this machine does not have: anyone who has it can name "
        "another publisher, and without it nobody can replace a trainer key that has leaked."
    )


def rotate_publisher(run: str, root_file: Path | None, new_key: str) -> str:
    """Name another publisher, signed by the root; returns what to tell the host.

    `run` is the run's folder, where the new key is then made, or its URL, with the public part of a key that is already in
    the folder. Without `root_file`, the run key is used, which is the root of runs that have no other. Raises
    `ConfigError`, `StateError`, `PeerError`.
    """
    if is_url(run):
        if root_file is None or not new_key:
            raise ConfigError(
                "a URL needs --root FILE, and --new-key KEY: the public key of a keys/trainer-*.key in the run's folder"
            )
        return asyncio.run(_rotate(run, load_key(root_file), lambda: new_key))
    folder = RunFolder(Path(run))
    url = hosted_url(folder)
    if root_file is None and folder.root_key():
        raise ConfigError(f"the root of this run is the key {folder.root_key()}: give its file, --root FILE")
    root = load_key(root_file or folder.keys / "run.key")
    return asyncio.run(_rotate(url, root, lambda: new_key or make_publisher(folder)))


def make_publisher(folder: RunFolder) -> str:
    """A new key for the trainer in the run's folder; returns its public part."""
    key = Key.generate()
    save_key(folder.keys / f"trainer-{key.public[:16]}.key", key)
    return key.public


async def _rotate(url: str, root: Key, new_publisher: Callable[[], str]) -> str:
    """Rotate. The new publisher is asked for once it is clear that the root may name one."""
    new_key = ""
    async with Client(url, root) as client:
        for left in reversed(range(TRIES)):
            info = await client.get_json("/v1/run", RunInfo, deadline_s=ADMIN_DEADLINE_S)
            if root.public != info.root:
                raise ConfigError(f"this key is {root.public}, and the run's root is {info.root}: give the root's file")
            client.run = info.run
            new_key = new_key or new_publisher()
            serial = len(info.all_publishers.rotations) + 1
            rotation = Rotation(info.run, MAIN_STREAM, new_key, info.version + 1, serial, int(time.time()), "")
            try:
                await client.post_json(
                    "/v1/publisher", sign_rotation(rotation, root), WriteAck, deadline_s=ADMIN_DEADLINE_S
                )
            except PeerRefused as refusal:
                if refusal.code != "conflict" or not left:
                    raise
            else:
                break
    return (
        f"rotation {serial}: {new_key} publishes from version {rotation.since} on; {info.trainer_key[:16]} signs nothing "
        "more. The trainer takes the new key by itself"
    )
