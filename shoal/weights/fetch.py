"""Fetch the version that a manifest describes into a checkpoint directory, and verify every byte.

Called by workers, validators and auditors with a signed manifest. A fetch that was cut short goes on where it stopped. It
trusts no source and does not depend on any role. One process uses a folder.

A chunk comes from the first of these that has it: the unfinished directory, a version already here (`pieces`), a source
(`transfer`). The directory appears under its name whole, or not at all (`finish`).
"""

import asyncio
import logging
import random
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.errors import cause_of
from shoal.protocol.types import Manifest
from shoal.weights.finish import directory_name, fault_of, finish, prune
from shoal.weights.manifest import open_manifest
from shoal.weights.pieces import UNFINISHED, NotStored, Piece, forget_unfinished, prepare
from shoal.weights.sources import Source
from shoal.weights.transfer import Transfer

log = logging.getLogger(__name__)


def tell_blame(source: str, reason: str) -> None:
    """Log that a source is left; the default for `on_blame`."""
    log.warning("source=%s left=true reason=%s", source, reason)


async def fetch_version(
    data: bytes,
    version: int,
    sources: Sequence[Source],
    folder: Path,
    *,
    run: str,
    publisher: str,
    now: float | None,
    root: str = "",
    max_bytes: int | None = None,
    keep: int = 2,
    on_blame: Callable[[str, str], None] = tell_blame,
) -> Path:
    """The directory of a version by its signed manifest, both verified.

    `publisher` is the run's trainer key; `now` and `max_bytes` are as of `open_manifest`, `keep` and `on_blame` as of
    `fetch`; `root` is the version's in the log. Raises as both.
    """
    manifest = open_manifest(data, run=run, keys=(publisher,), now=now, version=version, max_bytes=max_bytes, root=root)
    return await fetch(manifest, sources, folder, keep=keep, on_blame=on_blame)


async def fetch(
    manifest: Manifest,
    sources: Sequence[Source],
    folder: Path,
    *,
    keep: int = 2,
    on_blame: Callable[[str, str], None] = tell_blame,
    on_progress: Callable[[str], None] | None = None,
    rng: random.Random | None = None,
) -> Path:
    """Fetch and verify a version; returns its directory in `folder`, where the `keep` newest versions stay.

    `on_blame` gets (source, reason) when a source is left, for a while or for good; `on_progress` a line every few seconds,
    which is logged by default. `rng` decides the order of the chunks and who is asked. The sources are closed at the end.

    Raises `PeerError`, naming each source's fault, if the sources together cannot serve everything. Raises `NotStored` if
    the disk is full, `StateError` if the chunks do not make the weights that the manifest promises.
    """
    target, partial = folder / directory_name(manifest), folder / f"{UNFINISHED}{directory_name(manifest)}"

    def log_progress(line: str) -> None:
        log.info("version=%d %s", manifest.version, line)

    try:
        await asyncio.to_thread(forget_unfinished, folder, partial)
        if target.exists():
            if await asyncio.to_thread(fault_of, target, manifest, trusted=False) == "":
                return target
            shutil.rmtree(partial, ignore_errors=True)
            target.replace(partial)  # damaged since it was made: reuse its good chunks
        missing: list[Piece] = await asyncio.to_thread(prepare, folder, partial, manifest)
        await Transfer(
            missing, sources, partial, rng=rng or random.Random(secrets.randbits(64)), on_blame=on_blame,
            on_progress=on_progress or log_progress,
        ).run()  # fmt: skip
        await asyncio.to_thread(finish, partial, target, manifest)
    except OSError as error:
        raise NotStored(
            f"cannot store version {manifest.version} in {folder}: {cause_of(error)}. Free some space or use "
            "another folder; what was fetched is kept"
        ) from None
    finally:
        for source in sources:
            await source.close()
    prune(folder, manifest, keep)
    return target
