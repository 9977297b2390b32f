"""What a node pins of the keys behind a run's weights: the root, and each publisher that it named so far.

It trusts what it saw first, and after that only what the root signed: a coordinator can neither name a publisher itself nor
take a rotation back.
"""

from pathlib import Path

from shoal.errors import DISK_FULL, PeerError, StateError, cause_of
from shoal.protocol.constants import MAIN_STREAM
from shoal.protocol.encoding import WireError, from_json, to_json
from shoal.protocol.host_signatures import chain_flaw
from shoal.protocol.messages import Message, Publishers, RunInfo
from shoal.run_folder import write_atomically
from shoal.weights.fetch.chunks import NoSpace


class Pinned(Message, frozen=True):
    """The file: what this node knows of a run's publishers."""

    root: str
    publishers: Publishers


def take_publishers(path: Path, info: RunInfo) -> Publishers:
    """The run's publishers, if they go on from those in the file, which then holds them. Raises `PeerError`, `StateError`.

    Without a file, they are only compared with the root that the run names.
    """
    told = info.all_publishers
    if told.newest != info.trainer_key:  # guard: newest-publishes
        raise PeerError(
            f"the run says that {info.trainer_key[:16]!r} publishes, but its root named {told.newest[:16]!r} last: tell "
            "its host"
        )
    if flaw := chain_flaw(told, info.root, info.run, MAIN_STREAM):  # guard: publishers-by-the-root
        raise PeerError(
            f"the run names a publisher that its root key did not: {flaw}. Leave this run, and tell its host"
        )
    try:
        known = from_json(path.read_bytes(), Pinned) if path.exists() else None
        if known is not None:
            _demand_goes_on(known, info.root, told, path)
        new = Pinned(info.root, told)
        if new != known:
            write_atomically(path, to_json(new))
    except OSError as error:
        kind = NoSpace if error.errno in DISK_FULL else StateError
        raise kind(f"cannot keep the run's publishers in {path}: {cause_of(error)}. Free some space") from None
    except WireError as error:
        raise StateError(f"{path} is damaged ({error}): restore it, or delete {path.parent} to begin anew") from None
    return told


def _demand_goes_on(known: Pinned, root: str, told: Publishers, path: Path) -> None:
    """Refuse another root, another first publisher, and publishers that lack a rotation that this node has seen."""
    end = (
        f"Either this host is another than before, or its keys were stolen: ask it. To begin anew, delete {path.parent}"
    )
    if root != known.root:  # guard: one-root-a-run
        raise PeerError(f"the run has another root key than before: {root[:16]!r}, not {known.root[:16]!r}. {end}")
    seen = known.publishers
    if told.first != seen.first:  # guard: one-first-publisher
        raise PeerError(
            f"the run names another publisher than before, without its root: {told.first[:16]!r}, not {seen.first[:16]!r}. "
            + end
        )
    if told.rotations[: len(seen.rotations)] != seen.rotations:  # guard: no-rotation-taken-back
        raise PeerError(
            f"rollback: the run lacks a rotation of its publisher that this node has seen ({len(seen.rotations)} of them, "
            f"the run tells {len(told.rotations)}). {end}"
        )
