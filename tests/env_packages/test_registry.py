"""Registries: what a reader believes of them, in a folder and over HTTP, when they or an author's successor cheat."""

import contextlib
import functools
import http.server
import io
import itertools
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from shoal.env_packages import publish
from shoal.env_packages import signed_catalog as words
from shoal.env_packages.archive import unpack
from shoal.env_packages.publish import change_key, push, withdraw
from shoal.env_packages.registry import (
    FolderRegistry,
    Registry,
    WebRegistry,
    archive_path,
    catalogue_path,
    keys_path,
    names_of,
    open_registry,
)
from shoal.env_packages.signed_catalog import (
    Catalogue,
    KeyChange,
    PinnedKeys,
    Release,
    SignedBytes,
    VerifiedCatalog,
    open_catalogue,
    open_changes,
    sign,
)
from shoal.errors import ConfigError, NothingYet, PeerError, ShoalError
from shoal.protocol.encoding import from_json, to_json
from shoal.protocol.signing import Key
from tests.env_packages.author import Author

NAME = "ann/parrot"


@pytest.fixture
def reader(tmp_path: Path) -> PinnedKeys:
    return PinnedKeys(tmp_path / "reader" / "authors.json")


def forge(registry: FolderRegistry, catalogue: Catalogue, key: Key) -> None:
    """Put a catalogue that this key signs into a registry, past all checks."""
    registry.write(catalogue_path(catalogue.name), to_json(sign(catalogue, key, words.CATALOGUE)))


def taken_over(author: Author, registry: FolderRegistry, reader: PinnedKeys) -> Key:
    """A reader knows the author's package, and another key signs a newer catalogue of it. Returns that key."""
    author.push(registry)
    read_catalogue(registry, NAME, reader)
    eve = Key.generate()
    forge(registry, Catalogue(NAME, 9, 1, catalogue_of(registry).releases), eve)
    return eve


def catalogue_of(registry: FolderRegistry) -> Catalogue:
    return open_catalogue(registry.read(catalogue_path(NAME), 1 << 20), NAME).catalogue


def read_catalogue(registry: Registry, name: str, trust: PinnedKeys) -> VerifiedCatalog:
    return publish.read_catalogue(registry, name, trust).opened


# --- publishing ---


def test_versions_are_published_and_read(
    author: Author, registry: FolderRegistry, reader: PinnedKeys, tmp_path: Path
) -> None:
    for version in ("0.9.0", "0.10.0", "0.2.0"):
        assert author.push(registry, version=version).is_new
    assert names_of(registry) == (NAME,)
    opened = read_catalogue(registry, NAME, reader)
    assert [release.version for release in opened.catalogue.releases] == ["0.2.0", "0.9.0", "0.10.0"]
    newest = opened.catalogue.release("")
    assert newest is not None and newest.version == "0.10.0" and opened.key == author.key.public
    archive = io.BytesIO()
    registry.copy(archive_path(newest.digest), newest.size_bytes, archive)
    archive.seek(0)
    unpack(archive, newest.digest, tmp_path / "out")
    assert (tmp_path / "out" / "words.txt").read_text() == "a b c"


def test_a_version_cannot_be_pushed_with_other_files(author: Author, registry: FolderRegistry) -> None:
    author.push(registry)
    with pytest.raises(ConfigError, match=r"0\.1\.0 is already published with other files .* raise version"):
        author.push(registry, words="x y z")
    assert catalogue_of(registry).serial == 1 and len(list((registry.folder / "packages").iterdir())) == 1


def test_another_author_cannot_push_under_a_name(author: Author, registry: FolderRegistry, tmp_path: Path) -> None:
    author.push(registry)
    with pytest.raises(ConfigError, match="belongs to the key"):
        Author(tmp_path / "eve").push(registry, version="0.2.0")


def test_a_second_registry_continues_the_catalogue(
    author: Author, registry: FolderRegistry, reader: PinnedKeys, tmp_path
) -> None:
    (tmp_path / "second").mkdir()
    second = FolderRegistry(tmp_path / "second")
    author.push(registry)
    author.push(second, version="0.2.0")
    assert read_catalogue(second, NAME, reader).catalogue.serial == 2
    author.push(registry, version="0.3.0")
    assert [release.version for release in read_catalogue(registry, NAME, reader).catalogue.releases] == [
        "0.1.0", "0.2.0", "0.3.0",
    ]  # fmt: skip


def test_a_withdrawn_version_stays_but_is_not_the_newest(
    author: Author, registry: FolderRegistry, reader: PinnedKeys
) -> None:
    author.push(registry)
    author.push(registry, version="0.2.0")
    withdraw(NAME, "0.2.0", "gold answers are wrong", registry, author.key, author.home)
    catalogue = read_catalogue(registry, NAME, reader).catalogue
    newest, gone = catalogue.release(""), catalogue.release("0.2.0")
    assert newest is not None and newest.version == "0.1.0"
    assert gone is not None and gone.withdrawn == "gold answers are wrong"


def test_what_a_killed_push_left_is_deleted(author: Author, registry: FolderRegistry) -> None:
    (registry.folder / ".new-0123").write_bytes(b"half an archive")
    author.push(registry)
    assert sorted(path.name for path in registry.folder.iterdir()) == [".lock", "names", "names.json", "packages"]


def test_a_push_that_fails_leaves_the_registry_as_it_was(author: Author, registry: FolderRegistry, monkeypatch) -> None:
    author.push(registry)
    before = sorted(path.name for path in registry.folder.rglob("*"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shoal.env_packages.publish.pack", full)
    with pytest.raises(ShoalError, match="No space left on device"):
        author.push(registry, version="0.2.0")
    assert sorted(path.name for path in registry.folder.rglob("*")) == before


# --- cheating registries and authors ---


def test_a_changed_catalogue_is_refused(author: Author, registry: FolderRegistry, reader: PinnedKeys) -> None:
    author.push(registry)
    signed = from_json(registry.read(catalogue_path(NAME), 1 << 20), SignedBytes)
    body = signed.body.replace(b"0.1.0", b"0.1.1")
    registry.write(catalogue_path(NAME), to_json(SignedBytes(body, signed.key, signed.signature)))
    with pytest.raises(PeerError, match="signature of the catalogue of ann/parrot does not verify"):
        read_catalogue(registry, NAME, reader)


def test_a_signature_for_another_purpose_is_refused(
    author: Author, registry: FolderRegistry, reader: PinnedKeys
) -> None:
    author.push(registry)
    registry.write(catalogue_path(NAME), to_json(sign(catalogue_of(registry), author.key, "manifest")))
    with pytest.raises(PeerError, match="does not verify"):
        read_catalogue(registry, NAME, reader)


@pytest.mark.parametrize(("change", "why"), [
    ({"name": "ann/other"}, "it is that of"),
    ({"releases": (Release("1.0.0", "ab", 1, 1),)}, "malformed"),
    ({"releases": (Release("1.0.0-x", "a" * 64, 1, 1),)}, "malformed"),
    ({"releases": (Release("1.1.0", "a" * 64, 1, 1), Release("1.0.0", "b" * 64, 1, 1))}, "not sorted"),
    ({"releases": (Release("1.0.0", "a" * 64, 1, 1), Release("1.0.0", "b" * 64, 1, 1))}, "listed twice"),
    ({"releases": tuple(Release(f"1.0.{i}", "a" * 64, 1, 1) for i in range(1001))}, "limit 1000"),
])  # fmt: skip
def test_a_malformed_catalogue_is_refused(
    author: Author, registry: FolderRegistry, reader: PinnedKeys, change, why
) -> None:
    catalogue = Catalogue(**{"name": NAME, "serial": 1, "created": 1, "releases": ()} | change)
    registry.write(catalogue_path(NAME), to_json(sign(catalogue, author.key, words.CATALOGUE)))
    with pytest.raises(PeerError, match=why):
        read_catalogue(registry, NAME, reader)


def test_a_huge_catalogue_is_not_read(author: Author, registry: FolderRegistry, reader: PinnedKeys) -> None:
    author.push(registry)
    (registry.folder / catalogue_path(NAME)).write_bytes(b"[" * (2 << 20))
    with pytest.raises(PeerError, match="more than 1048576 bytes"):
        read_catalogue(registry, NAME, reader)


def test_another_key_under_a_known_owner_is_refused_by_name(
    author: Author, registry: FolderRegistry, reader: PinnedKeys
) -> None:
    eve = taken_over(author, registry, reader)
    with pytest.raises(PeerError, match=f"ann signs with the key {eve.public[:16]}"):
        read_catalogue(registry, NAME, reader)
    forge(registry, Catalogue("ann/new", 1, 1, ()), eve)  # also for a name that was never seen
    with pytest.raises(PeerError, match="known here with"):
        read_catalogue(registry, "ann/new", reader)


def test_an_older_catalogue_is_refused(author: Author, registry: FolderRegistry, reader: PinnedKeys) -> None:
    author.push(registry)
    old = registry.read(catalogue_path(NAME), 1 << 20)
    author.push(registry, version="0.2.0")
    read_catalogue(registry, NAME, reader)
    registry.write(catalogue_path(NAME), old)
    with pytest.raises(PeerError, match="serial 1, and this machine has seen 2"):
        read_catalogue(registry, NAME, reader)


@pytest.mark.parametrize(("serial", "releases", "why"), [
    (3, (Release("0.1.0", "f" * 64, 1, 1),), "a version never changes"),
    (3, (), r"0\.1\.0 is gone"),
    (1, (Release("0.1.0", "", 1, 1), Release("0.5.0", "f" * 64, 1, 1)), "two catalogues with serial 1"),
])  # fmt: skip
def test_an_author_cannot_rewrite_what_was_seen(
    author: Author, registry: FolderRegistry, reader: PinnedKeys, serial: int, releases: tuple[Release, ...], why: str
) -> None:
    digest = author.push(registry).release.digest
    read_catalogue(registry, NAME, reader)
    releases = tuple(Release(r.version, r.digest or digest, 1, 1) for r in releases)
    forge(registry, Catalogue(NAME, serial, 1, releases), author.key)
    with pytest.raises(PeerError, match=why):
        read_catalogue(registry, NAME, reader)


def test_a_change_of_key_that_the_old_key_signed_is_followed(
    author: Author, registry: FolderRegistry, reader: PinnedKeys
) -> None:
    author.push(registry)
    author.push(registry, name="ann/other")
    read_catalogue(registry, NAME, reader)
    old, new, newest = author.key, Key.generate(), Key.generate()
    change_key("ann", old, new, registry, author.home)
    change_key("ann", new, newest, registry, author.home)
    assert (
        read_catalogue(registry, NAME, reader).key == read_catalogue(registry, "ann/other", reader).key == newest.public
    )
    author.key = newest
    author.push(registry, version="0.2.0")
    assert read_catalogue(registry, NAME, reader).catalogue.serial == 2
    forge(
        registry, Catalogue(NAME, 8, 1, catalogue_of(registry).releases), old
    )  # a thief of the old key comes too late
    with pytest.raises(PeerError, match="somebody else may have signed"):
        read_catalogue(registry, NAME, reader)


def test_a_change_of_key_that_another_key_signed_is_refused(
    author: Author, registry: FolderRegistry, reader: PinnedKeys
) -> None:
    eve = taken_over(author, registry, reader)
    change = KeyChange("ann", author.key.public, eve.public, 1)
    registry.write(keys_path(NAME), to_json([sign(change, eve, words.KEY_CHANGE)]))
    with pytest.raises(PeerError, match="not signed by the key that it replaces"):
        read_catalogue(registry, NAME, reader)


def test_a_key_that_names_two_successors_is_refused(
    author: Author, registry: FolderRegistry, reader: PinnedKeys
) -> None:
    author.push(registry)
    opened = read_catalogue(registry, NAME, reader)
    changes = [KeyChange("ann", author.key.public, Key.generate().public, 1) for _ in range(2)]
    with pytest.raises(PeerError, match="names two keys after it"):
        reader.admit(VerifiedCatalog(opened.catalogue, changes[0].new, opened.digest), changes)


def test_following_key_changes_in_a_circle_ends(author: Author, registry: FolderRegistry, reader: PinnedKeys) -> None:
    author.push(registry)
    opened = read_catalogue(registry, NAME, reader)
    a, b = author.key.public, Key.generate().public
    with pytest.raises(PeerError, match="somebody else"):
        reader.admit(
            VerifiedCatalog(opened.catalogue, "c" * 64, opened.digest),
            [KeyChange("ann", a, b, 1), KeyChange("ann", b, a, 1)],
        )


def test_too_many_changes_are_refused() -> None:
    keys = [Key.generate() for _ in range(66)]
    changes = [
        sign(KeyChange("ann", old.public, new.public, 1), old, words.KEY_CHANGE)
        for old, new in itertools.pairwise(keys)
    ]
    with pytest.raises(PeerError, match="limit 6"):
        open_changes(to_json(changes), "ann")


def test_malformed_names_are_left_out(registry: FolderRegistry) -> None:
    registry.write("names.json", to_json(["ann/parrot", "../../etc", "\x1b[2J", "a/b/c"]))
    assert names_of(registry) == ("ann/parrot",)


def test_a_registry_of_links_and_pipes_is_not_followed(registry: FolderRegistry, tmp_path: Path) -> None:
    (registry.folder / "packages").mkdir()
    os.mkfifo(registry.folder / archive_path("a" * 64))
    with pytest.raises(PeerError, match="is not a file"):
        registry.read(archive_path("a" * 64), 10)
    (registry.folder / archive_path("b" * 64)).symlink_to("/etc/passwd")
    with pytest.raises(PeerError, match="cannot read"):
        registry.read(archive_path("b" * 64), 10)


# --- over HTTP ---


@pytest.fixture
def url(registry: FolderRegistry) -> Iterator[str]:
    """Any static web server: Python's own."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(registry.folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_static_web_server_is_a_registry(
    author: Author, registry: FolderRegistry, reader: PinnedKeys, url: str
) -> None:
    release = author.push(registry).release
    web = open_registry(url + "/")
    assert names_of(web) == (NAME,) and read_catalogue(web, NAME, reader).catalogue.release("0.1.0") == release
    into = io.BytesIO()
    web.copy(archive_path(release.digest), release.size_bytes, into)
    assert into.getvalue() == (registry.folder / archive_path(release.digest)).read_bytes()
    with pytest.raises(NothingYet, match="has no package ann/none"):
        read_catalogue(web, "ann/none", reader)
    with pytest.raises(PeerError, match="more than 10 bytes"):
        web.read(catalogue_path(NAME), 10)
    for size, why in ((-1, "has more than"), (1, "ended after")):
        with pytest.raises(PeerError, match=why):
            WebRegistry(url, sleep=lambda _: None).copy(
                archive_path(release.digest), release.size_bytes + size, io.BytesIO()
            )


def web(answer) -> WebRegistry:
    return WebRegistry("http://hub.example", httpx.MockTransport(answer), sleep=lambda _: None)


@pytest.mark.parametrize(
    "target", ["http://169.254.169.254/latest/meta-data", "http://127.0.0.1:22/", "file:///etc/passwd"]
)
def test_a_redirect_is_never_followed(target: str) -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(302, headers={"location": target})

    with pytest.raises(PeerError, match="redirects to"):
        web(answer).read(catalogue_path(NAME), 100)
    assert asked == [f"http://hub.example/{catalogue_path(NAME)}"]


def test_an_endless_answer_ends_at_its_limit() -> None:
    sent = []

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(400):
            sent.append(1)
            yield b"x" * 65536

    with pytest.raises(PeerError, match="more than 100000 bytes"):
        web(lambda _: httpx.Response(200, content=endless())).read(catalogue_path(NAME), 100_000)
    assert len(sent) < 10
    into = io.BytesIO()
    with pytest.raises(PeerError, match="more than 100000 bytes"):
        web(lambda _: httpx.Response(200, content=endless())).copy(archive_path("a" * 64), 100_000, into)
    assert len(into.getvalue()) <= 100_000


DRIPS = {
    "body": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"],
    "headers": [b"HTTP/1.1 200 OK\r\n", b"X-Header: a\r\n"],
    "one header": [b"HTTP/1.1 200 OK\r\nX-Header: ", b"a"],
    "before an answer": [b"", b"HTTP/1.1 100 Continue\r\n\r\n"],
    "in a chunk's size": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"a"],
    "behind the body": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[]\r\n0\r\n", b"X-Trailer: a\r\n"],
}


@pytest.mark.parametrize(("where", "pause_s"), [("body", 0.0), *((where, 0.05) for where in DRIPS)])
def test_an_answer_that_drips_ends_by_the_clock(where: str, pause_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece comes in time, so no time-out of a socket ends it."""
    monkeypatch.setattr("shoal.env_packages.registry.SILENCE_S", 0.3)
    monkeypatch.setattr("shoal.env_packages.registry.ATTEMPTS", 1)
    begin, piece = DRIPS[where]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            until = time.monotonic() + 2.0
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(begin)
                while time.monotonic() < until:
                    connection.sendall(piece)
                    time.sleep(pause_s)

        thread = threading.Thread(target=drip)
        thread.start()
        began = time.monotonic()
        with pytest.raises(PeerError):
            WebRegistry(f"http://127.0.0.1:{server.getsockname()[1]}").read(catalogue_path(NAME), 4000)
        assert time.monotonic() - began < 1.5
        thread.join()


def test_an_answer_that_ends_early_is_asked_for_again() -> None:
    async def body(text: bytes) -> AsyncIterator[bytes]:
        yield text

    answers = iter([httpx.Response(200, content=body(b"abc")), httpx.Response(200, content=body(b"abcdef"))])
    into = io.BytesIO(b"before")
    into.seek(6)
    web(lambda _: next(answers)).copy(archive_path("a" * 64), 6, into)
    assert into.getvalue() == b"beforeabcdef"


def test_a_server_that_fails_for_a_moment_is_asked_again(author: Author, registry: FolderRegistry) -> None:
    author.push(registry)
    good = registry.read(catalogue_path(NAME), 1 << 20)

    async def body() -> AsyncIterator[bytes]:
        yield good

    answers = iter([httpx.Response(503), httpx.Response(200, content=body())])
    assert open_catalogue(web(lambda _: next(answers)).read(catalogue_path(NAME), 1 << 20), NAME)


@pytest.mark.parametrize(
    "place", ["ftp://x/y", "http://user:pw@host/", "http://", "https://host/?q=1", "http://h\0st/"]
)
def test_an_address_without_a_registry_is_refused_in_one_line(place: str) -> None:
    with pytest.raises(ConfigError):
        open_registry(place)


def test_push_and_withdraw_of_something_else_are_refused(
    author: Author, registry: FolderRegistry, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"it has no environment\.toml"):
        (tmp_path / "empty").mkdir()
        push(tmp_path / "empty", registry, author.key, author.home)
    with pytest.raises(ConfigError, match="is not published"):
        withdraw(NAME, "1.0.0", "bad", registry, author.key, author.home)
