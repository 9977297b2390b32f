"""What the run key promises a worker, one signed message each: a grant with each lease, a receipt for each submission.

Called by the coordinator, which signs, by workers, which check and keep them, and by auditors. Pure.
"""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from shoal.protocol.algorithms import vine_of
from shoal.protocol.identity import Key, verify_signature
from shoal.protocol.types import EnvSpec, Grant, Receipt, Rules
from shoal.protocol.wire import digest, to_json

P = TypeVar("P", Grant, Receipt)

PURPOSES = {Grant: "lease", Receipt: "receipt"}
"""What each signature is for. Changing breaks: all evidence that nodes hold."""


def sign_promise(promise: P, key: Key) -> P:
    """The same promise with the signature of the run key."""
    return msgspec.structs.replace(promise, signature=key.sign(PURPOSES[type(promise)], _unsigned(promise)))


def is_promised(promise: Grant | Receipt, run_key: str) -> bool:
    """Whether the run key signed it."""
    return verify_signature(run_key, PURPOSES[type(promise)], _unsigned(promise), promise.signature)


def _unsigned(promise: Grant | Receipt) -> bytes:
    return to_json(msgspec.structs.replace(promise, signature=""))


def terms_of(envs: Sequence[EnvSpec], rules: Rules) -> str:
    """Digest of what decides a lease's tokens beside the lease and its version. It never changes during a run."""
    vine = vine_of(rules.algorithm)  # from where rollouts are continued
    return digest(to_json([envs, rules.group_size, rules.dtype, rules.proofs, *([vine] if vine else [])]))
