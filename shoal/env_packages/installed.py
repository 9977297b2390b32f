"""The installed packages of this machine, each in a folder named by its digest: `envs/DIGEST` in the node's home.

    package/          the files as the author packed them
    dependencies/     the unpacked wheels of its lock, for `sys.path`; no interpreter reads `.pth` files there
    installed.json    who signed what, written last

Written by `install`, read when a run loads a package. A folder has its name only once it is whole.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

from shoal.env_packages.archive import Index, digest_of, matches
from shoal.env_packages.package_reference import PackageReference, order_of
from shoal.errors import ConfigError, StateError, cause_of
from shoal.protocol.encoding import WireError, from_json, is_digest
from shoal.protocol.field_types import Message

INSTALLED = "installed.json"


class Installed(Message, frozen=True, forbid_unknown_fields=False):
    """What is known of an installed package: the contents of its `installed.json`, which an older version of shoal may
    have written with other fields."""

    name: str
    version: str
    digest: str
    author: str
    """The key that signed it."""
    entry: str
    """File and function that make the environment."""
    reproducible: bool
    files: Index
    dependencies: dict[str, str]
    """Version of each."""
    num_wheel_files: int
    """Files in `dependencies/`."""


class PackageStore:
    """The folder of installed packages. Several processes may use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def package_of(self, digest: str) -> Path:
        """The folder with the package's own files."""
        return self.folder / digest / "package"

    def paths_of(self, digest: str) -> tuple[Path, Path]:
        """What an interpreter has on `sys.path` to run it: its own files, and its dependencies."""
        return self.package_of(digest), self.folder / digest / "dependencies"

    def get(self, digest: str) -> Installed | None:
        """An installed package; None if it is not installed. Raises `StateError` if its record is damaged."""
        assert is_digest(digest)
        try:
            installed = from_json((self.folder / digest / INSTALLED).read_bytes(), Installed)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, WireError) as error:
            raise StateError(
                f"{self.folder / digest} cannot be read: {cause_of(error)}. Delete it and install again"
            ) from None
        if installed.digest != digest or digest_of(installed.files) != digest:  # guard: record-of-this-package
            raise StateError(f"{self.folder / digest} describes another package: delete it and install again")
        return installed

    def find(self, reference: PackageReference) -> Installed:
        """The installed package that a name and version, or a digest, means. Raises `ConfigError` if there is none."""
        if reference.digest:
            found = [package for package in [self.get(reference.digest)] if package]
        else:
            found = [package for package in self.all() if package.name == reference.name]
            found = [package for package in found if reference.version in ("", package.version)]
        if not found:
            if reference.digest:
                raise ConfigError(
                    f"the package pkg:{reference.digest} is not installed: install it by the name that its author gave it, "
                    "shoal env install OWNER/NAME@VERSION --registry URL"
                )
            text = "@".join(filter(None, reference[:2]))
            raise ConfigError(f"the package {text} is not installed: shoal env install {text} --registry URL")
        if len({package.digest for package in found if package.version == found[-1].version}) > 1:
            raise ConfigError(
                f"two packages are called {reference.name} {found[-1].version} here: name one by its digest"
            )
        return found[-1]

    def all(self) -> list[Installed]:
        """Every installed package, by name and version."""
        digests = [path.name for path in self.folder.glob("*") if is_digest(path.name)]
        found = [package for package in map(self.get, sorted(digests)) if package]
        return sorted(found, key=lambda package: (package.name, order_of(package.version), package.digest))

    def demand_unchanged(self, installed: Installed) -> Path:
        """The package's folder, if each file still is as the author packed it. Raises `StateError`."""
        folder = self.package_of(installed.digest)
        changed = matches(folder, installed.files)
        if changed:  # guard: installed-files-are-unchanged
            raise StateError(
                f"{folder / changed} of {installed.name} {installed.version} was changed after it was installed: delete "
                f"{folder.parent} and install it again"
            )
        return folder

    def unfinished(self) -> Iterator[Path]:
        """Folders of installations that go on or were killed."""
        return self.folder.glob(".new-*")

    def remove(self, digest: str) -> None:
        """Delete an installed package, if there is one. Its name goes first, so a kill leaves no half of it."""
        target, gone = self.folder / digest, self.folder / f".new-removed-{digest}"
        if target.exists():
            target.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
