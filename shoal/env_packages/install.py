"""Install a package: fetch, verify, ask, unpack, add its dependencies, and only then give it its name.

Everything happens in a folder that no reader looks at; it is renamed to the digest at the end. A kill at any point leaves
at most that folder, which the next installation deletes. Installations do not wait for each other, because one may ask its
user a question. The package's code is started only by `start`, which is the sandbox's; without a sandbox it is installed,
but not tried.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from shoal.env_packages.archive import Index, unpack
from shoal.env_packages.install_policy import (
    InstallCandidate,
    InstallDecision,
    demand_consent,
    demand_offer_fits,
)
from shoal.env_packages.installed import INSTALLED, Installed, PackageStore
from shoal.env_packages.lock import Downloader, download, most_unpacked, unpack_wheels
from shoal.env_packages.metadata import Described, read_package, unfit
from shoal.env_packages.package_reference import PackageReference
from shoal.env_packages.publish import read_catalogue
from shoal.env_packages.registry import Registry, archive_path
from shoal.env_packages.signed_catalog import PinnedKeys, Release
from shoal.errors import PeerError, ShoalError, StateError, cause_of
from shoal.humanize import data_size
from shoal.protocol.encoding import to_json
from shoal.run_folder import held, name_folder, write_atomically


class StartInSandbox(Protocol):
    """Runs Python code inside the sandbox."""

    def __call__(self, code: str, paths: Sequence[Path], timeout_s: float) -> str:
        """What the code printed. `paths` are shown to it read-only and come first in its `sys.path`. Raises
        `ShoalError` if the code fails, is stopped, or cannot be started."""
        ...


Counter: TypeAlias = Callable[[str, Release, str], int]
"""How many keys, other than the author's, attest that a release of a name passes its check."""


def nobody_checked(name: str, release: Release, author: str) -> int:
    """The `Counter` where attestations are not read."""
    return 0


PROBE_S = 60.0
"""Time for an environment's code to be imported."""

_PROBE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("package_entry", sys.path[0] + "/" + {file!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert callable(getattr(module, {function!r}, None)), "it defines no function {function}"
print("loads")
"""


class Result(NamedTuple):
    """An installed package."""

    package: Installed
    folder: Path
    is_new: bool
    """False if it was installed already."""
    tried: str
    """What `start` says about its code: "loads", or why it was not tried."""


def install(
    reference: PackageReference,
    registry: Registry,
    home: Path,
    consent: InstallDecision,
    *,
    start: StartInSandbox | None = None,
    downloader: Downloader | None = None,
    checks: Counter = nobody_checked,
    tell: Callable[[str], None] = lambda _: None,
) -> Result:
    """Install a version of a package, or find it installed.

    `checks` counts the keys that attest that a version passes. `tell` gets a line before each download. Raises
    `ConfigError` if the user, the policy file or this machine refuses, `PeerError` if the registry or the author is at
    fault, `StateError` if the disk is.
    """
    store = PackageStore(home / "envs")
    if reference.digest:
        return _present(store, store.find(reference))
    offer = offer_of(reference, registry, home, checks)
    known = store.get(offer.release.digest)
    if known is not None:
        return _present(store, known)
    demand_offer_fits(offer, consent)
    try:
        with _unfinished(store) as new:
            tell(f"downloading {offer.name} {offer.release.version}, {data_size(offer.release.size_bytes)}")
            files, described = _fetch(offer, registry, new)
            demand_consent(offer, described.about, described.requirements, consent)
            PinnedKeys(home / "authors.json").admit(offer.believed.opened, offer.believed.changes)
            if described.requirements:
                tell(f"downloading {len(described.requirements)} dependencies, at most {data_size(consent.max_bytes)}")
            num_wheel_files = _add_dependencies(described, new, consent.max_bytes, downloader or by_pip())
            tried = _try(described, new, start)
            package = _recorded(offer, described, files, num_wheel_files)
            write_atomically(new / INSTALLED, to_json(package))
            with held(store.folder / ".lock"):
                known = store.get(package.digest)
                if known is not None:  # guard: installed-once
                    return _present(store, known)
                name_folder(new, store.folder / package.digest)
    except OSError as error:
        raise StateError(
            f"cannot install into {store.folder}: {cause_of(error)}. Free some space, or make it writable"
        ) from None
    return Result(package, store.package_of(package.digest), True, tried)


def offer_of(
    reference: PackageReference, registry: Registry, home: Path, checks: Counter = nobody_checked
) -> InstallCandidate:
    """What a registry offers under a name. The author is not pinned yet. Raises `PeerError`."""
    believed = read_catalogue(registry, reference.name, PinnedKeys(home / "authors.json"), pin=False)
    opened = believed.opened
    release = opened.catalogue.release(reference.version)
    if release is None:
        raise PeerError(opened.catalogue.lacks(reference.version))
    passed = checks(reference.name, release, opened.key)
    return InstallCandidate(reference.name, release, believed, passed, registry.place)


def by_pip(*options: str) -> Downloader:
    """Downloads wheels with pip. The options may name an index, or a folder of wheels."""
    return lambda requirements, into, max_bytes: download(requirements, into, max_bytes=max_bytes, pip_options=options)


def _present(store: PackageStore, package: Installed) -> Result:
    return Result(package, store.package_of(package.digest), False, "it was installed already")


@contextlib.contextmanager
def _unfinished(store: PackageStore) -> Iterator[Path]:
    """A folder to install into. Its installation locks it, so one that nobody locks was left by a kill, and is deleted."""
    new = store.folder / f".new-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as locks:
        with held(store.folder / ".lock"):
            for leftover in store.unfinished():
                with _locked(leftover) as is_ours:
                    if is_ours:  # guard: others-install-on
                        shutil.rmtree(leftover, ignore_errors=True)
            new.mkdir()
            locks.enter_context(_locked(new))
        try:
            yield new
        finally:
            shutil.rmtree(new, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder as long as this lasts. Gives False if another process has locked it, or it is gone."""
    with contextlib.ExitStack() as undo:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except OSError:
            locked = False
        yield locked


def _fetch(offer: InstallCandidate, registry: Registry, new: Path) -> tuple[Index, Described]:
    """Bring the archive to the disk, verify and unpack it, and read what it says about itself."""
    archive = new / "archive"
    with archive.open("w+b") as file:
        registry.copy(archive_path(offer.release.digest), offer.release.size_bytes, file)
        file.seek(0)
        files = unpack(file, offer.release.digest, new / "package")
    archive.unlink()
    described = read_package(new / "package", files)
    about = described.about
    if (about.name, about.version) != (offer.name, offer.release.version):  # guard: package-has-its-name
        raise PeerError(
            f"the package of {offer.name} {offer.release.version} calls itself {about.name} {about.version}: its "
            "author signed another one. Use another version"
        )
    if why := unfit(about):
        raise PeerError(f"{offer.name} {offer.release.version} cannot be installed: {why}")
    return files, described


def _add_dependencies(described: Described, new: Path, max_bytes: int, downloader: Downloader) -> int:
    """Download and unpack the wheels of the lock; returns the number of their files."""
    if not described.requirements:
        (new / "dependencies").mkdir()
        return 0
    found = downloader(described.requirements, new / "download", max_bytes)
    wheels = [found[requirement.name] for requirement in described.requirements]
    num_files = unpack_wheels(wheels, new / "dependencies", most_unpacked(wheels, 4 * max_bytes))
    shutil.rmtree(new / "download")
    return num_files


def _try(described: Described, new: Path, start: StartInSandbox | None) -> str:
    """Import the environment's code inside the sandbox."""
    if start is None:
        return "not tried: there is no sandbox here"
    about = described.about
    code = _PROBE.format(file=about.entry_file, function=about.function)
    try:
        said = start(code, (new / "package", new / "dependencies"), PROBE_S)
    except ShoalError as error:
        raise PeerError(f"{about.name} {about.version} does not load inside the sandbox: {error}") from None
    return " ".join(said.split())[:200]


def _recorded(offer: InstallCandidate, described: Described, files: Index, num_wheel_files: int) -> Installed:
    about = described.about
    dependencies = {requirement.name: requirement.version for requirement in described.requirements}
    return Installed(
        about.name, about.version, offer.release.digest, offer.author, about.entry, about.reproducible, files,
        dependencies, num_wheel_files,
    )  # fmt: skip
