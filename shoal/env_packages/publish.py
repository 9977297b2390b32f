"""Publish a package: pack its folder, add it to the author's signed catalogue, and put both into a registry's folder.

The archive comes first and the catalogue last, so a reader never finds a version without its archive. What the author has
published anywhere is kept in this machine's home: so a second registry continues the same catalogue, and a registry that
lost or rolled back its own gets the right one again.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from shoal.env_packages import signed_catalog as words
from shoal.env_packages.archive import Packed, pack
from shoal.env_packages.metadata import About, read_package
from shoal.env_packages.package_reference import is_name, is_owner, owner_of
from shoal.env_packages.registry import (
    MAX_NAMES_BYTES,
    NAMES,
    FolderRegistry,
    Registry,
    archive_path,
    catalogue_path,
    keys_path,
    names_of,
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
from shoal.errors import ConfigError, NothingYet, StateError
from shoal.protocol.encoding import from_json, to_json
from shoal.protocol.field_types import fact
from shoal.protocol.signing import Key
from shoal.run_folder import held, write_atomically


class Pushed(NamedTuple):
    """What a registry now has."""

    about: About
    release: Release
    is_new: bool
    """False if the registry had this very version."""


class Believed(NamedTuple):
    """A catalogue that fits all that this machine knows of its author."""

    opened: VerifiedCatalog
    changes: tuple[KeyChange, ...]
    """Of its owner's key, as the registry has them."""
    is_new_owner: bool
    """Whether the owner was unknown until now."""


def read_catalogue(registry: Registry, name: str, trust: PinnedKeys, *, pin: bool = True) -> Believed:
    """A package's catalogue, believed. Without `pin`, a new owner's key is not remembered.

    Raises `ConfigError` for what is not a name, `NothingYet` if the registry has none, `PeerError` as `PinnedKeys.admit`
    does.
    """
    if not is_name(name):
        raise ConfigError("name the package by owner/name here, not by its digest")
    try:
        data = registry.read(catalogue_path(name), words.MAX_CATALOGUE_BYTES)
    except NothingYet:
        raise NothingYet(
            f"{registry.place} has no package {name}: `shoal env list --registry {registry.place}` names those it has"
        ) from None
    opened, changes = open_catalogue(data, name), read_changes(registry, name)
    return Believed(opened, changes, trust.admit(opened, changes, pin=pin))


def read_changes(registry: Registry, name: str) -> tuple[KeyChange, ...]:
    """The changes of an owner's key that a registry has."""
    try:
        data = registry.read(keys_path(name), words.MAX_CHANGES_BYTES)
    except NothingYet:
        return ()
    return open_changes(data, owner_of(name))


def push(
    folder: Path, registry: FolderRegistry, key: Key, home: Path, clock: Callable[[], float] = time.time
) -> Pushed:
    """Publish the package in a folder. Pushing the same version again changes nothing.

    Raises `ConfigError` if the folder is not a package or the version was published with other files, `PeerError` if the
    owner is known with another key.
    """
    with held(registry.folder / ".lock"), registry.aside() as file:
        packed = _pack(folder, registry, file)
        about = read_package(folder, packed.files).about
        known = _known(about.name, registry, (key.public,), home)
        before = known.release(about.version) if known else None
        if before and before.digest != packed.digest:  # guard: version-is-pushed-once
            raise ConfigError(
                f"{about.name} {about.version} is already published with other files (package {before.digest[:16]}…): "
                "raise version in environment.toml"
            )
        registry.add(archive_path(packed.digest), file)
        release = before or Release(about.version, packed.digest, packed.size_bytes, int(clock()))
        following = known if before and known else words.with_release(known, about.name, release, clock())
        _write(following, registry, key, home)
    return Pushed(about, release, before is None)


def withdraw(
    name: str, version: str, reason: str, registry: FolderRegistry, key: Key, home: Path,
    clock: Callable[[], float] = time.time,
) -> None:  # fmt: skip
    """Advise against a version. It stays, because runs may be pinned to it."""
    with held(registry.folder / ".lock"):
        known = _known(name, registry, (key.public,), home)
        before = known.release(version) if known else None
        if known is None or before is None:
            raise ConfigError(f"{name} {version} is not published: see `shoal env show {name}` for its versions")
        gone = Release(version, before.digest, before.size_bytes, before.created, fact(reason))
        _write(words.with_release(known, name, gone, clock()), registry, key, home)


def change_key(
    owner: str, old: Key, new: Key, registry: FolderRegistry, home: Path, clock: Callable[[], float] = time.time
) -> None:
    """Name another key as the owner's, signed by the old one, and sign all its catalogues again with the new one."""
    assert is_owner(owner)
    with held(registry.folder / ".lock"):
        names = sorted({*names_of(registry), *_published(home)})
        names = [name for name in names if owner_of(name) == owner]
        if not names:
            raise ConfigError(f"{owner} has published nothing here: simply push with the new key")
        catalogues = [_known(name, registry, (old.public, new.public), home) for name in names]
        change = sign(KeyChange(owner, old.public, new.public, int(clock())), old, words.KEY_CHANGE)
        held_changes = [signed for signed in _changes(registry, names[0]) if signed != change]
        registry.write(keys_path(names[0]), to_json([*held_changes, change]))
        for catalogue in filter(None, catalogues):
            _write(catalogue, registry, new, home)


def own_catalogue(home: Path, name: str) -> Catalogue | None:
    """The author's own copy of a package's catalogue; None if this machine has published no version of it."""
    with contextlib.suppress(FileNotFoundError):
        return open_catalogue(_own_copy(home, name).read_bytes(), name).catalogue
    return None


def _pack(folder: Path, registry: FolderRegistry, into: BinaryIO) -> Packed:
    try:
        return pack(folder, into)
    except OSError as error:
        raise registry.cannot_write(error) from None


def _known(name: str, registry: Registry, keys: Collection[str], home: Path) -> Catalogue | None:
    """The newest catalogue that the author has published, anywhere. Raises `ConfigError` if it is another's."""
    trust, found = PinnedKeys(home / "authors.json"), list[VerifiedCatalog]()
    changes = read_changes(registry, name)
    with contextlib.suppress(FileNotFoundError):
        found.append(open_catalogue(_own_copy(home, name).read_bytes(), name))
    with contextlib.suppress(NothingYet):
        found.append(open_catalogue(registry.read(catalogue_path(name), words.MAX_CATALOGUE_BYTES), name))
    for opened in found:
        if opened.key not in keys:  # guard: only-own-packages
            raise ConfigError(
                f"{name} belongs to the key {opened.key[:16]}…, and yours is {min(keys)[:16]}…: choose another owner, or "
                "give the author's key with --key"
            )
    if not found:
        return None
    newest = max(found, key=lambda opened: opened.catalogue.serial)
    trust.admit(newest, changes)
    return newest.catalogue


def _write(catalogue: Catalogue, registry: FolderRegistry, key: Key, home: Path) -> None:
    """Sign a catalogue and put it into home and registry. Signing the same one twice gives the same bytes."""
    signed = to_json(sign(catalogue, key, words.CATALOGUE))
    PinnedKeys(home / "authors.json").admit(
        open_catalogue(signed, catalogue.name), read_changes(registry, catalogue.name)
    )
    write_atomically(_own_copy(home, catalogue.name), signed)
    registry.write(catalogue_path(catalogue.name), signed)
    names = to_json(sorted({*names_of(registry), catalogue.name}))
    if len(names) > MAX_NAMES_BYTES:
        raise StateError(
            f"the registry {registry.place} is full: its list of names has the limit {MAX_NAMES_BYTES} bytes"
        )
    registry.write(NAMES, names)


def _changes(registry: Registry, name: str) -> tuple[SignedBytes, ...]:
    """The signed changes of an owner's key, to write them back."""
    with contextlib.suppress(NothingYet):
        data = registry.read(keys_path(name), words.MAX_CHANGES_BYTES)
        open_changes(data, owner_of(name))
        return from_json(data, tuple[SignedBytes, ...])
    return ()


def _own_copy(home: Path, name: str) -> Path:
    return home / "published" / f"{name}.json"


def _published(home: Path) -> Iterator[str]:
    """Names that this machine has published."""
    for path in sorted((home / "published").glob("*/*.json")):
        yield f"{path.parent.name}/{path.stem}"
