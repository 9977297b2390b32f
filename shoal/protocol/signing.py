"""Who sent or signed something: Ed25519 keys, signatures bound to a purpose, and signed HTTP requests.

It does no I/O and has no clock: `net/key_files` reads key files, and the time is an argument.

Requests follow RFC 9421 (HTTP Message Signatures) with Content-Digest (RFC 9530), for one fixed list of components:
method, path, query, body digest, and our headers where they are sent: `shoal-run` (the run the sender means),
`shoal-head` (the last head of the log it saw) and `shoal-manifest` (the manifest of the version it has). The authority
is not covered, because a proxy may rewrite it. The run id takes its place, so a server that knows its run must demand the
header. A request that is sent again within the window verifies again. That it changes nothing is for the server to see
to: the ledger's rules compare `Caller.created` with the latest one of the key (joins, leaves, requests of the host), the
coordinator remembers nonces (leases), and other writes are idempotent.
"""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shoal.protocol.constants import SIGNATURE_WINDOW_S
from shoal.protocol.encoding import domain_hash, is_digest

LABEL = "shoal"
"""Name of our signature in the Signature and Signature-Input dictionaries."""

TAG = "shoal/v1"
"""RFC 9421 `tag`: the application that a signature was made for."""


class Key:
    """An Ed25519 private key: the identity of a node."""

    def __init__(self, secret: bytes) -> None:
        """From 32 secret bytes. Raises ValueError for another length."""
        self._private = Ed25519PrivateKey.from_private_bytes(secret)
        self.public = self._private.public_key().public_bytes_raw().hex()
        """The public key, 64 lower-case hex digits: it names the node everywhere."""

    @staticmethod
    def generate() -> "Key":
        """A new key from the operating system's randomness."""
        return Key(Ed25519PrivateKey.generate().private_bytes_raw())

    def secret(self) -> bytes:
        """The 32 secret bytes, for `net/key_files` to store."""
        return self._private.private_bytes_raw()

    def sign(self, purpose: str, data: bytes) -> str:
        """Signature over a purpose and data, 128 hex digits. It is not valid for another purpose."""
        return self._private.sign(domain_hash(purpose, data)).hex()

    def sign_raw(self, data: bytes) -> bytes:
        """Signature over the bytes alone, for formats that name their own purpose (RFC 9421)."""
        return self._private.sign(data)


def verify_signature(public: str, purpose: str, data: bytes, signature: str) -> bool:
    """Whether `signature` was made by the key for this purpose and data. False for anything malformed.

    Only the canonical spelling passes (lower-case hex), so that a signature has one form.
    """
    return bool(_SIGNATURE_HEX.fullmatch(signature)) and _verify_raw(
        public, domain_hash(purpose, data), bytes.fromhex(signature)
    )


def is_public_key(text: str) -> bool:
    """Whether a text is spelled as a public key: 64 lower-case hex digits."""
    return is_digest(text)


_SIGNATURE_HEX = re.compile(r"[0-9a-f]{128}", re.ASCII)


def _verify_raw(public: str, data: bytes, signature: bytes) -> bool:
    if not is_public_key(public):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


# --- signed requests ---


class RequestLine(NamedTuple):
    """The signed parts of a request's first line as they were sent, neither decoded nor normalised."""

    method: str
    path: str
    """Percent-encoded, from the first slash."""
    query: str = ""
    """Without its question mark."""


@dataclass(frozen=True)
class Caller:
    """The sender of a verified request."""

    key: str
    """Public key, hex."""
    created: int
    """When it was signed, seconds since the epoch by the sender's clock."""
    nonce: str
    run: str
    """The run that the sender means; empty if it did not say."""
    head: str
    """The last log head that the sender saw; empty if none."""
    manifest: str
    """Digest of the signed manifest of the version that the sender has; empty if none."""
    digest: str
    """SHA-256 of the body, hex, as the sender signed it. The gate of `net/server` compares the body with it."""


class SignatureError(ValueError):
    """A request is not properly signed. `code` is a stable word for the refusal."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class SenderState(NamedTuple):
    """What the sender of a request says of itself: the values of OPTIONAL headers, each empty if it is not sent."""

    run: str = ""
    head: str = ""
    manifest: str = ""


def sign_request(
    key: Key, line: RequestLine, digest: str, *, created: int, nonce: str, sender: SenderState
) -> dict[str, str]:
    """The headers that sign a request: content-digest, those of OPTIONAL that are given, signature-input, signature.

    `digest` is the SHA-256 of the body, hex.
    """
    headers = {"content-digest": content_digest(digest)}
    headers |= {name: value for name, value in zip(OPTIONAL, sender, strict=True) if value}
    parameters = (
        f'({_components(headers)});created={created};keyid="{key.public}";alg="ed25519";nonce="{nonce}";tag="{TAG}"'
    )
    signature = key.sign_raw(_signature_base(line, headers, parameters))
    headers["signature-input"] = f"{LABEL}={parameters}"
    headers["signature"] = f"{LABEL}=:{base64.b64encode(signature).decode()}:"
    return headers


def verify_headers(line: RequestLine, headers: Mapping[str, str], *, now: float) -> Caller:
    """The sender of a request whose signature and time are right, before its body has come.

    `headers` has lower-case names. The body must still be compared with the digest that was signed. Raises
    `SignatureError` with code "unsigned", "signature" or "clock".
    """
    if "signature" not in headers and "signature-input" not in headers:
        raise SignatureError("unsigned", "the request is not signed: sign it with your node's key (RFC 9421)")
    asked = _INPUT.fullmatch(headers.get("signature-input", ""))
    made = _SIGNATURE.fullmatch(headers.get("signature", ""))
    promised = _DIGEST.fullmatch(headers.get("content-digest", ""))
    if promised is None or asked is None or made is None or asked["components"] != _components(headers):
        raise SignatureError(
            "signature",
            f"cannot read the signature: its input must be {LABEL}=({_components(headers)});created;keyid;alg;nonce;tag"
            f" in this order, over content-digest, and {', '.join(OPTIONAL)} where they are sent",
        )
    skew_s = int(asked["created"]) - now
    if abs(skew_s) > SIGNATURE_WINDOW_S:
        raise SignatureError("clock", _explain_skew(skew_s))
    base = _signature_base(line, headers, asked["parameters"])
    if not _verify_raw(asked["keyid"], base, base64.b64decode(made["signature"])):
        raise SignatureError(
            "signature",
            f"the signature does not verify for key {asked['keyid'][:16]}…: the request was changed on its way "
            "(does a proxy rewrite paths?) or signed with another key",
        )
    return Caller(
        key=asked["keyid"],
        created=int(asked["created"]),
        nonce=asked["nonce"],
        run=headers.get(RUN_HEADER, ""),
        head=headers.get(HEAD_HEADER, ""),
        manifest=headers.get(MANIFEST_HEADER, ""),
        digest=base64.b64decode(promised["digest"]).hex(),
    )


def content_digest(digest: str) -> str:
    """RFC 9530 Content-Digest of a body, given its SHA-256 in hex."""
    return f"sha-256=:{base64.b64encode(bytes.fromhex(digest)).decode()}:"


OPTIONAL = RUN_HEADER, HEAD_HEADER, MANIFEST_HEADER = "shoal-run", "shoal-head", "shoal-manifest"
"""Headers that are signed where they are sent, in this order."""

_INPUT = re.compile(
    rf'{LABEL}=(?P<parameters>\((?P<components>[a-z" @-]*)\);created=(?P<created>[1-9][0-9]{{0,11}});'
    rf'keyid="(?P<keyid>[0-9a-f]{{64}})";alg="ed25519";nonce="(?P<nonce>[A-Za-z0-9_-]{{16,64}})";tag="{TAG}")',
    re.ASCII,
)
_SIGNATURE = re.compile(rf"{LABEL}=:(?P<signature>[A-Za-z0-9+/]{{85}}[AQgw]==):", re.ASCII)
"""64 bytes in base64, canonical: the last digit carries two bits."""
_DIGEST = re.compile(r"sha-256=:(?P<digest>[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=):", re.ASCII)
"""32 bytes in base64, canonical: the last digit carries four bits."""


def _components(headers: Mapping[str, str]) -> str:
    names = ["@method", "@path", "@query", "content-digest"]
    names += [name for name in OPTIONAL if name in headers]
    return " ".join(f'"{name}"' for name in names)


def _signature_base(line: RequestLine, headers: Mapping[str, str], parameters: str) -> bytes:
    """RFC 9421 section 2.5: one line for each component, the parameters last.

    With a newline in a value, one component could look like another, so no value may hold one.
    """
    values = [f'"@method": {line.method}', f'"@path": {line.path}', f'"@query": ?{line.query}']
    values += [f'"{name}": {headers[name]}' for name in ("content-digest", *OPTIONAL) if name in headers]
    values.append(f'"@signature-params": {parameters}')
    if any("\n" in value or not value.isascii() for value in values):
        raise SignatureError("signature", "a signed part of the request holds a newline or a character beyond ASCII")
    return "\n".join(values).encode()


def _explain_skew(skew_s: float) -> str:
    side = "ahead of" if skew_s > 0 else "behind"
    return (
        f"your clock is {abs(skew_s):.0f} s {side} this server's (limit {SIGNATURE_WINDOW_S} s), or the request is "
        "an old one replayed: set the clock (for example: timedatectl set-ntp true) and try again"
    )
