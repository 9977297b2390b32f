"""How a relay proves that it serves at a URL: it signs a nonce that the coordinator asks for there."""

from shoal.protocol import encoding
from shoal.protocol.signing import Key, verify_signature

PURPOSE = "relay"

PROOF_PATH = "/.well-known/shoal-relay"
"""Below the URL of a relay: where its proof is, for each nonce."""


def sign_proof(key: Key, run: str, nonce: str) -> str:
    """The signature of a relay over a nonce of the coordinator."""
    return key.sign(PURPOSE, encoding.to_json([run, nonce]))


def is_proof(key: str, run: str, nonce: str, signature: str) -> bool:
    """Whether this is the signature of the relay with this key."""
    return verify_signature(key, PURPOSE, encoding.to_json([run, nonce]), signature)
