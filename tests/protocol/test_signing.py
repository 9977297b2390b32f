"""Signatures: what passes, and that everything else is refused."""

import base64
import datetime
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.protocol.constants import SIGNATURE_WINDOW_S
from shoal.protocol.encoding import digest
from shoal.protocol.signing import (
    LABEL,
    TAG,
    Key,
    RequestLine,
    SenderState,
    SignatureError,
    content_digest,
    sign_request,
    verify_headers,
    verify_signature,
)

KEY = Key(bytes(range(32)))
LINE = RequestLine("PUT", "/v1/leases/a%20b/submission", "x=1&y=%2F")
BODY = b'{"hello":1}'
NOW = 1_800_000_000


def signed(sender: SenderState = SenderState("run-1", "ab" * 32), created: int = NOW) -> dict[str, str]:
    return sign_request(KEY, LINE, digest(BODY), created=created, nonce="n" * 16, sender=sender)


def refusal(line: RequestLine, headers: dict[str, str], now: float = NOW) -> SignatureError:
    with pytest.raises(SignatureError) as caught:
        verify_headers(line, headers, now=now)
    return caught.value


# --- plain signatures ---


def test_a_signature_verifies_for_its_key_purpose_and_data_only():
    signature = KEY.sign("receipt", b"data")
    assert verify_signature(KEY.public, "receipt", b"data", signature)
    assert not verify_signature(KEY.public, "manifest", b"data", signature)
    assert not verify_signature(KEY.public, "receipt", b"Data", signature)
    assert not verify_signature(Key.generate().public, "receipt", b"data", signature)


@pytest.mark.parametrize(
    "spoil",
    [str.upper, lambda s: s[:-2], lambda s: s + "00", lambda s: " " + s[1:], lambda s: "", lambda s: "zz" + s[2:]],
)
def test_a_signature_has_one_spelling(spoil):
    signature = Key(b"\x07" * 32).sign("p", b"d")
    assert any(c.isalpha() for c in signature)
    assert not verify_signature(Key(b"\x07" * 32).public, "p", b"d", spoil(signature))


@pytest.mark.parametrize("public", ["", "00" * 31, KEY.public.upper(), "zz" * 32, "ff" * 32, "é" * 64])
def test_a_malformed_public_key_verifies_nothing(public):
    assert not verify_signature(public, "p", b"d", KEY.sign("p", b"d"))


def test_the_secret_decides_the_key():
    assert Key(KEY.secret()).public == KEY.public
    with pytest.raises(ValueError):
        Key(b"short")


# --- signed requests ---


def test_a_signed_request_tells_its_sender():
    caller = verify_headers(LINE, signed(), now=NOW + 1.5)
    assert (caller.key, caller.created, caller.run, caller.head) == (KEY.public, NOW, "run-1", "ab" * 32)
    caller = verify_headers(LINE, signed(SenderState()), now=NOW)
    assert (caller.run, caller.head) == ("", "")


@pytest.mark.parametrize(
    "line",
    [
        LINE._replace(method="POST"),
        LINE._replace(path="/v1/leases/a b/submission"),
        LINE._replace(path="/v1/leases/a%20c/submission"),
        LINE._replace(query="x=2&y=%2F"),
        LINE._replace(query=""),
        LINE._replace(path=LINE.path + '\n"@query": ?x'),
    ],
)
def test_a_changed_request_line_is_refused(line):
    assert refusal(line, signed()).code == "signature"


@pytest.mark.parametrize(
    "name", ["content-digest", "shoal-run", "shoal-head", "shoal-manifest", "signature", "signature-input"]
)
def test_a_changed_or_missing_header_is_refused(name):
    headers = signed(SenderState("run-1", "ab" * 32, "cd" * 32))
    assert refusal(LINE, headers | {name: headers[name][:-3] + "x" + headers[name][-2:]}).code == "signature"
    del headers[name]
    assert refusal(LINE, headers).code == "signature"


@pytest.mark.parametrize("name", ["shoal-run", "shoal-head", "shoal-manifest"])
def test_a_header_of_ours_added_on_the_way_is_refused(name):
    headers = signed(SenderState()) | {name: "something"}
    assert refusal(LINE, headers).code == "signature"


def test_an_unsigned_request_is_told_so():
    assert refusal(LINE, {}).code == "unsigned"


def test_another_key_in_the_input_is_refused():
    headers = signed()
    headers["signature-input"] = headers["signature-input"].replace(KEY.public, Key.generate().public)
    assert refusal(LINE, headers).code == "signature"


@pytest.mark.parametrize(
    ("created", "words"),
    [
        (NOW - 3600, "3600 s behind"),
        (NOW + 3600, "3600 s ahead of"),
        (NOW - SIGNATURE_WINDOW_S - 1, f"{SIGNATURE_WINDOW_S + 1} s behind"),
    ],
)
def test_an_old_or_future_request_is_refused_with_the_skew(created, words):
    verify_headers(LINE, signed(), now=NOW + SIGNATURE_WINDOW_S)
    error = refusal(LINE, signed(created=created))
    assert error.code == "clock" and words in str(error) and "set the clock" in str(error)


def test_a_request_signature_does_not_pass_as_a_signature_for_a_purpose():
    headers = signed()
    made = base64.b64decode(headers["signature"].removeprefix(f"{LABEL}=:").removesuffix(":")).hex()
    assert not verify_signature(KEY.public, "receipt", BODY, made)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["signature-input", "signature", "content-digest"]), st.text(max_size=300))
def test_garbage_headers_are_refused_with_a_signature_error(name, text):
    headers = signed()
    if text != headers[name]:
        assert refusal(LINE, headers | {name: text}).code == "signature"


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["signature-input", "signature"]), st.data())
def test_any_one_character_of_the_signature_headers_counts(name, data):
    headers = signed()
    at = data.draw(st.integers(0, len(headers[name]) - 1))
    character = data.draw(st.characters(min_codepoint=32, max_codepoint=126))
    changed = headers[name][:at] + character + headers[name][at + 1 :]
    if changed != headers[name]:
        assert refusal(LINE, headers | {name: changed}).code in ("signature", "clock")


# --- others speak the same ---


def library():
    """The `http-message-signatures` package with our algorithm and a key resolver."""
    package = pytest.importorskip("http_message_signatures")

    class Keys(package.HTTPSignatureKeyResolver):
        def resolve_public_key(self, key_id: str):
            return Ed25519PublicKey.from_public_bytes(bytes.fromhex(key_id))

        def resolve_private_key(self, key_id: str):
            return Ed25519PrivateKey.from_private_bytes(KEY.secret())

    return package, {"signature_algorithm": package.algorithms.ED25519, "key_resolver": Keys()}


def message(headers: dict[str, str]) -> SimpleNamespace:
    url = f"https://proxy.example:8443{LINE.path}?{LINE.query}"
    return SimpleNamespace(method=LINE.method, url=url, headers=headers)


def test_another_implementation_verifies_what_we_sign():
    package, options = library()
    now = int(datetime.datetime.now().timestamp())
    verifier = package.HTTPMessageVerifier(**options)
    results = verifier.verify(message(signed(created=now)), body=BODY, max_age=datetime.timedelta(seconds=60))
    assert results[0].label == LABEL and results[0].parameters["keyid"] == KEY.public
    with pytest.raises(package.HTTPMessageSignaturesException):
        verifier.verify(message(signed(created=now) | {"shoal-run": "run-2"}), body=BODY)


def test_we_verify_what_another_implementation_signs():
    package, options = library()
    request = message({"content-digest": content_digest(digest(BODY)), "shoal-run": "run-1"})
    package.HTTPMessageSigner(**options).sign(
        request,
        key_id=KEY.public,
        created=datetime.datetime.fromtimestamp(NOW),
        nonce="n" * 16,
        label=LABEL,
        tag=TAG,
        use_existing_digest=True,
        covered_component_ids=("@method", "@path", "@query", "content-digest", "shoal-run"),
    )
    headers = {name.lower(): value for name, value in request.headers.items()}
    assert verify_headers(LINE, headers, now=NOW).key == KEY.public
