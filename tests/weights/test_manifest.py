"""Manifests: only what was signed is accepted."""

import random

import msgspec
import pytest

from shoal.protocol import constants, encoding
from shoal.protocol.messages import FileEntry, Manifest, Patch, SignedManifest
from shoal.protocol.signing import Key
from shoal.weights.manifest import (
    MOST_FILES,
    MOST_PATCHES,
    PURPOSE,
    ManifestError,
    ManifestTrust,
    chunks_of,
    is_publishable,
    is_renewal,
    is_whole,
    open_manifest,
    renew_at,
    sign_manifest,
    weights_root,
)
from tests.weights.checkpoints import KEY, NOW, RUN, Chunks, make_checkpoint, published

OTHER = Key(b"\x02" * 32)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Manifest:
    return published(make_checkpoint(tmp_path_factory.mktemp("weights") / "checkpoint"), Chunks())


def encoded(manifest: Manifest, key: Key = KEY) -> bytes:
    """A manifest signed as it stands, however wrong."""
    body = encoding.to_json(manifest)
    return encoding.to_json(SignedManifest(body=body, key=key.public, signature=key.sign(PURPOSE, body)))


def accept(data: bytes, **options: object) -> Manifest:
    trust = {"run": RUN, "keys": {KEY.public}} | {
        name: options.pop(name) for name in ManifestTrust._fields if name in options
    }
    return open_manifest(data, ManifestTrust(**trust), **({"now": NOW} | options))  # type: ignore[arg-type]


def refused(data: bytes, **options: object) -> str:
    """The name of the attack, and the text."""
    with pytest.raises(ManifestError) as caught:
        accept(data, **options)
    assert "\n" not in str(caught.value)
    return f"{caught.value.code}: {caught.value}"


def changed(manifest: Manifest, **fields: object) -> Manifest:
    return msgspec.structs.replace(manifest, **fields)


def with_file(manifest: Manifest, **fields: object) -> Manifest:
    first, *rest = manifest.files
    return changed(manifest, files=(msgspec.structs.replace(first, **fields), *rest))


def test_an_unchanged_manifest_is_accepted(manifest):
    assert accept(encoded(manifest), version=3, max_bytes=100_000) == manifest


def test_only_plain_data_files_are_published(manifest):
    assert [entry.path for entry in manifest.files] == ["config.json", "model.safetensors", "tokenizer.json"]


def test_the_weights_root_depends_on_the_tensors_alone(tmp_path):
    first = make_checkpoint(tmp_path / "a")
    second = make_checkpoint(tmp_path / "b")
    (second / "config.json").write_text("{}")
    assert weights_root(first) == weights_root(second) != weights_root(make_checkpoint(tmp_path / "c", seed=1))


@pytest.mark.parametrize(
    ("fields", "options", "words"),
    [
        ({}, {"version": 4}, "not of the requested 4"),
        ({}, {"version": 2}, "not of the requested 2"),
        ({}, {"run": "run-2"}, "check the URL"),
        ({"stream": "critic"}, {}, "critic"),
        ({}, {"keys": {OTHER.public}}, "wrong-key: manifest signed by"),
        ({}, {"keys": set()}, "may not publish"),
        ({}, {"now": NOW + constants.MANIFEST_LIFETIME_S + 1}, "expired 1 s ago"),
        ({}, {"now": NOW - 3600}, "3600 s in the future"),
        ({}, {"max_bytes": 5000}, "too-long: version 3 has"),
        ({"expires": NOW * 2}, {}, "MANIFEST_LIFETIME_S"),
        ({"expires": NOW - 1}, {}, "MANIFEST_LIFETIME_S"),
        ({"version": -1}, {}, "versions count from 0"),
        ({"parents": (3,)}, {}, "older"),
        ({"parents": (-1,)}, {}, "older"),
        ({"dtype": "int4"}, {}, "dtype"),
        ({"root": "zz"}, {}, "root"),
        ({"root": "A" * 64}, {}, "root"),
        ({"chunk_bytes": 0}, {}, "chunks of 0"),
        ({"chunk_bytes": constants.MAX_CHUNK_BYTES + 1}, {}, "limits 1 to"),
        ({"chunk_bytes": 500}, {}, "do not match"),
        ({"files": ()}, {}, "no file"),
    ],
)
def test_a_manifest_that_is_not_what_was_asked_for_is_refused(manifest, fields, options, words):
    assert words in refused(encoded(changed(manifest, **fields)), **options)


@pytest.mark.parametrize(
    "path",
    ["../config.json", "/etc/passwd", "a/b.json", "a\\b.json", "..", "", ".bashrc.json", "x.py", "x.bin", "x.pt",
     "x.json\n", "con\0.json", "x" * 200 + ".json", "ä.json", "C:x.json", "x.json/"],
)  # fmt: skip
def test_an_unsafe_path_is_refused(manifest, path):
    assert not is_publishable(path)
    assert "only plain data files" in refused(encoded(with_file(manifest, path=path)))


@pytest.mark.parametrize(
    "path",
    ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "merges.txt",
     "chat_template.jinja", "tokenizer.model", "special_tokens_map.json"],
)  # fmt: skip
def test_the_files_of_hf_checkpoints_are_published(path):
    assert is_publishable(path)


@pytest.mark.parametrize(
    "fields",
    [{"size": 0}, {"size": -1}, {"size": 10**15}, {"size": 2**70}, {"chunks": ()}, {"chunks": ("0" * 64,) * 50},
     {"chunks": ("zz",)}, {"digest": ""}, {"digest": "0" * 64}],
)  # fmt: skip
def test_sizes_chunks_and_hashes_must_fit(manifest, fields):
    refused(encoded(with_file(manifest, **fields)))


def test_a_repeated_chunk_counts_each_time(manifest):
    """8 MiB are fetched and 800 MB are written. A tensor of zeros repeats chunks too, so only the sum is limited."""
    chunk = encoding.digest(bytes(8 << 20))
    entry = FileEntry(path="model.safetensors", size=100 * (8 << 20), digest="0" * 64, chunks=(chunk,) * 100)
    repeating = encoded(changed(manifest, files=(entry,), chunk_bytes=8 << 20))
    assert "has 838860800 bytes, limit of this node 800000000" in refused(repeating, max_bytes=800_000_000)
    assert accept(repeating, max_bytes=838_860_800)


def test_only_weights_may_be_large(manifest):
    chunks = tuple(encoding.digest(str(i).encode()) for i in range(9))
    entry = FileEntry(path="tokenizer.json", size=9 * (8 << 20), digest="0" * 64, chunks=chunks)
    large = changed(manifest, files=(entry,), chunk_bytes=8 << 20)
    assert "too-long: manifest gives tokenizer.json 75497472 bytes, limit 67108864" in refused(encoded(large))
    fits = msgspec.structs.replace(entry, size=8 * (8 << 20), chunks=chunks[:8])
    assert accept(encoded(changed(large, files=(fits,))))


def test_a_version_has_few_files(manifest):
    empty = FileEntry(path="a.json", size=0, digest=encoding.digest(b""), chunks=())
    files = tuple(msgspec.structs.replace(empty, path=f"{i}.json") for i in range(MOST_FILES + 1))
    assert "too-long: manifest names 1001 files, limit 1000" in refused(encoded(changed(manifest, files=files)))
    assert accept(encoded(changed(manifest, files=files[1:])))


def test_a_file_named_twice_is_refused_whatever_its_case(manifest):
    twin = msgspec.structs.replace(manifest.files[0], path="Config.json")
    assert "twice" in refused(encoded(changed(manifest, files=(*manifest.files, twin))))


def test_another_keys_signature_is_refused(manifest):
    forged = encoded(manifest, OTHER)
    assert refused(forged).startswith("wrong-key: ")
    swapped = msgspec.structs.replace(encoding.from_json(forged, SignedManifest), key=KEY.public)
    assert "signature: manifest's signature does not verify" in refused(encoding.to_json(swapped))


def test_a_signature_for_another_purpose_is_refused(manifest):
    body = encoding.to_json(manifest)
    signed = SignedManifest(body=body, key=KEY.public, signature=KEY.sign("receipt", body))
    assert "does not verify" in refused(encoding.to_json(signed))


def test_an_old_version_stays_readable_and_an_expired_manifest_can_be_issued_again(manifest):
    later = NOW + 2 * constants.MANIFEST_LIFETIME_S
    assert accept(encoded(manifest), now=None) == manifest
    renewed = encoding.to_json(sign_manifest(manifest, KEY, now=later))
    assert accept(renewed, now=later).root == manifest.root


def test_a_thousand_single_bit_flips_are_never_accepted(manifest):
    data = encoded(manifest)
    rng = random.Random(0)
    for bit in rng.sample(range(8 * len(data)), 1000):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        refused(bytes(flipped))


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"null", b"[" * 1000, b"\xff" * 100, b'{"body":"","key":"","signature":""}']
)
def test_garbage_is_refused(data):
    assert refused(data).partition(":")[0] in ("malformed", "wrong-key")


def test_an_oversize_manifest_is_refused_before_it_is_parsed():
    assert "too-long: manifest of" in refused(b"x" * (constants.MAX_MANIFEST_BYTES + 1))


def test_a_manifest_of_62_gigabytes_fits():
    chunks = tuple(encoding.digest(str(i).encode()) for i in range(7750))
    entry = FileEntry(path="model.safetensors", size=7750 * (8 << 20), digest="0" * 64, chunks=chunks)
    manifest = Manifest(
        run=RUN, stream="policy", version=1, parents=(0,), dtype="bfloat16", root="0" * 64, files=(entry,),
        chunk_bytes=8 << 20, issued=NOW, expires=NOW,
    )  # fmt: skip
    assert accept(encoding.to_json(sign_manifest(manifest, KEY, now=NOW))).files == (entry,)


def test_a_renewal_has_the_same_contents_and_a_clearly_later_expiry(manifest):
    week = constants.MANIFEST_LIFETIME_S
    dated = changed(manifest, issued=NOW, expires=NOW + week)
    assert renew_at(dated) == NOW + week / 2
    assert is_renewal(changed(manifest, issued=NOW + week / 2, expires=NOW + 1.5 * week), dated)
    assert not is_renewal(changed(manifest, issued=NOW + 60.0, expires=NOW + 60.0 + week), dated)
    assert not is_renewal(changed(manifest, issued=NOW - week, expires=NOW), dated)
    assert not is_renewal(changed(manifest, issued=NOW + week, expires=NOW + 2 * week, files=()), dated)


# --- patches ---


def with_patches(manifest: Manifest, *patches: Patch) -> Manifest:
    return changed(manifest, patches=patches)


@pytest.fixture
def patch() -> Patch:
    chunk = encoding.digest(b"p" * 700)
    return Patch(base=2, base_root="1" * 64, codec="gaps-1", file=FileEntry("2.patch", 700, chunk, (chunk,)))


def test_a_manifest_may_offer_patches_beside_its_weights_or_instead(manifest, patch):
    both = with_patches(manifest, patch)
    assert accept(encoded(both)) == both and is_whole(both)
    plain = tuple(entry for entry in manifest.files if not entry.path.endswith(".safetensors"))
    instead = changed(both, files=plain)
    assert accept(encoded(instead)) == instead and not is_whole(instead)
    assert chunks_of(instead) == {chunk for entry in (*plain, patch.file) for chunk in entry.chunks}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"base": 3}, "mixed"),
        ({"base": 4}, "mixed"),
        ({"base": -1}, "mixed"),
        ({"base_root": "no root"}, "malformed"),
        ({"codec": "x" * 65}, "malformed"),
    ],
)
def test_a_patch_from_nowhere_is_refused(manifest, patch, fields, code):
    with pytest.raises(ManifestError) as caught:
        accept(encoded(with_patches(manifest, msgspec.structs.replace(patch, **fields))))
    assert caught.value.code == code


@pytest.mark.parametrize(
    "fields",
    [{"path": "2.json"}, {"path": "../2.patch"}, {"path": "model.safetensors"}, {"size": 2000}, {"size": -1},
     {"chunks": ("zz",)}, {"digest": "0" * 64}],
)  # fmt: skip
def test_a_patch_has_the_name_and_the_chunks_of_one(manifest, patch, fields):
    file = msgspec.structs.replace(patch.file, **fields)
    refused(encoded(with_patches(manifest, msgspec.structs.replace(patch, file=file))))


def test_a_patch_from_too_many_versions_before_is_refused(manifest, patch):
    later = changed(
        manifest, version=100, patches=(msgspec.structs.replace(patch, base=100 - constants.MAX_PATCH_CHAIN),)
    )
    assert accept(encoded(later))
    further = changed(later, patches=(msgspec.structs.replace(patch, base=99 - constants.MAX_PATCH_CHAIN),))
    assert "the 32 versions before it" in refused(encoded(further))


def test_a_version_has_few_patches_each_from_another_base(manifest, patch):
    many = changed(
        manifest,
        version=50,
        patches=tuple(msgspec.structs.replace(patch, base=49 - i) for i in range(MOST_PATCHES + 1)),
    )
    assert "has 9 patches, limit 8" in refused(encoded(many))
    assert accept(encoded(changed(many, patches=many.patches[1:])))
    assert "two patches from one version" in refused(encoded(with_patches(manifest, patch, patch)))


def test_a_patch_that_is_larger_than_this_node_takes_is_refused(manifest, patch):
    large = with_patches(changed(manifest, files=manifest.files[:1]), patch)
    assert accept(encoded(large), max_bytes=700)
    assert "a patch to version 3 has 700 bytes, limit of this node 699" in refused(encoded(large), max_bytes=699)
