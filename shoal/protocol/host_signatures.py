"""Signatures of the host: grants, receipts, publishers, relays."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from shoal.protocol.algorithm_config import vine_of
from shoal.protocol.constants import SIGNATURE_WINDOW_S
from shoal.protocol.encoding import digest, to_json
from shoal.protocol.messages import EnvSpec, Grant, Publishers, Receipt, Rotation, Rules
from shoal.protocol.signing import Key, is_public_key, verify_signature

# --- what the run key promises a worker: a grant with each lease, a receipt for each submission ---


P = TypeVar("P", Grant, Receipt)

PURPOSES = {Grant: "lease", Receipt: "receipt"}
"""What each signature is for. Changing breaks: all evidence that nodes hold."""


def sign_promise(promise: P, key: Key) -> P:
    """The same promise with the signature of the run key."""
    return msgspec.structs.replace(promise, signature=key.sign(PURPOSES[type(promise)], _unsigned(promise)))


def is_promised(promise: Grant | Receipt, run_key: str) -> bool:
    """Whether the run key signed it."""
    return verify_signature(run_key, PURPOSES[type(promise)], _unsigned(promise), promise.signature)


def _unsigned(signed: Grant | Receipt | Rotation) -> bytes:
    return to_json(msgspec.structs.replace(signed, signature=""))


def terms_of(envs: Sequence[EnvSpec], rules: Rules) -> str:
    """Digest of what decides a lease's tokens beside the lease and its version. It never changes during a run."""
    vine = vine_of(rules.algorithm)  # from where rollouts are continued
    return digest(to_json([envs, rules.group_size, rules.dtype, rules.proofs, *([vine] if vine else [])]))


# --- rotation of publishers: the root key, which may be kept offline, names the key that signs manifests ---


PUBLISHER = "publisher"
"""The purpose of the root's signature. Changing breaks: every log that holds a rotation."""

CLOCKS_S = 2 * SIGNATURE_WINDOW_S
"""By this much, the clocks of a publisher and of the root may differ: a manifest that the predecessor signed before the
rotation may bear a date that is later by as much."""


def sign_rotation(rotation: Rotation, root: Key) -> Rotation:
    """The same rotation with the signature of the root key."""
    return msgspec.structs.replace(rotation, signature=root.sign(PUBLISHER, _unsigned(rotation)))


def is_named_by(rotation: Rotation, root: str) -> bool:
    """Whether the root key signed it."""
    return verify_signature(root, PUBLISHER, _unsigned(rotation), rotation.signature)


def flaw_of_next(rotation: Rotation, known: Publishers, root: str, run: str, stream: str) -> str:
    """Why a rotation cannot follow those that are known; empty if it can. It knows neither versions nor the time."""
    due, last = len(known.rotations) + 1, known.rotations[-1] if known.rotations else None
    if not is_named_by(rotation, root):  # guard: rotation-by-the-root
        return f"the root key {root[:12]} did not sign rotation {rotation.serial}"
    if (rotation.run, rotation.stream) != (run, stream):  # guard: rotation-of-this-run
        return f"the rotation is of run {rotation.run[:12]}, stream {rotation.stream[:12]!r}, not of {run[:12]}, {stream!r}"
    if rotation.serial < due:  # guard: rotation-goes-on
        return f"rollback: rotation {rotation.serial} is in the log already; the next one is {due}"
    if rotation.serial > due:  # guard: no-skipped-rotation
        return f"the rotation has the serial {rotation.serial}, the next one is {due}: one is missing"
    backwards = last is not None and (rotation.since < last.since or rotation.created < last.created)
    if backwards:  # guard: rotations-in-order
        return f"back in time: rotation {rotation.serial} was signed, or holds from a version, before the last one"
    if not is_public_key(rotation.key) or rotation.key in known.keys:  # guard: publisher-is-new
        return f"{rotation.key[:16]!r} is no new key: a rotation names a key that never published before"
    return ""


def chain_flaw(named: Publishers, root: str, run: str, stream: str) -> str:
    """Why some publishers are not all named by the root, in order; empty if they are."""
    for count, rotation in enumerate(named.rotations):
        known = Publishers(named.first, named.rotations[:count])
        if flaw := flaw_of_next(rotation, known, root, run, stream):
            return flaw
    return ""


def flaw_of_signer(named: Publishers, key: str, version: int, issued: float) -> str:
    """Why a key may not have signed the manifest of a version with this date of issue; empty if it may.

    The publisher of a version signs it. Each later publisher may sign it again, because the root trusts it now.
    """
    if key not in named.keys:  # guard: publisher-is-named
        return "is not a publisher of this run"
    place = named.keys.index(key)
    if place == len(named.rotations):
        return ""
    after = named.rotations[place]
    if version >= after.since:  # guard: publisher-until-replaced
        return f"published only before version {after.since}: rotation {after.serial} replaced it"
    if issued > after.created + CLOCKS_S:  # guard: replaced-renews-nothing
        return f"signed this after rotation {after.serial} had replaced it"
    return ""


# --- relays ---


RELAY = "relay"
"""The purpose of a relay's signature. Changing breaks: relays of other versions."""

PROOF_PATH = "/.well-known/shoal-relay"
"""Below the URL of a relay: where its proof is, for each nonce."""


def sign_proof(key: Key, run: str, nonce: str) -> str:
    """The signature of a relay over a nonce of the coordinator."""
    return key.sign(RELAY, to_json([run, nonce]))


def is_proof(key: str, run: str, nonce: str, signature: str) -> bool:
    """Whether this is the signature of the relay with this key."""
    return verify_signature(key, RELAY, to_json([run, nonce]), signature)
