"""The root key of a run, for its host: which one a new run gets, and how it names another publisher.

Called by `shoal host --root` and `shoal admin rotate-publisher`. The root's private key is read, used once and not kept.
The coordinator decides whether a rotation is valid, and the trainer finds its new key in the run's folder.
"""

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

from shoal.errors import ConfigError, StateError
from shoal.folder import RunFolder, is_url, write_atomically
from shoal.launch.hosting import ADMIN_DEADLINE_S, hosted_url
from shoal.net.client import Client, PeerRefused
from shoal.net.keys import load_key, load_or_make_key, save_key
from shoal.protocol.constants import MAIN_STREAM
from shoal.protocol.identity import Key, is_public_key
from shoal.protocol.publishers import sign_rotation
from shoal.protocol.types import Done, Rotation, RunInfo

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
                    "/v1/publisher", sign_rotation(rotation, root), Done, deadline_s=ADMIN_DEADLINE_S
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
