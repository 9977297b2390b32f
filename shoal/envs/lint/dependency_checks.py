"""What a package is pinned to: its dependencies as locked, and its files as published under the same version.

A folder is checked with all packages that are installed here, but an installed package finds only those of its lock, so
what its files import is read. A version that was published or installed never changes; so code, data or lock that
differ from it need another version.
"""

import ast
import base64
import csv
import hashlib
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from shoal.config import node_home
from shoal.env_packages.archive import Index, digest_of, index_folder, read_index
from shoal.env_packages.installed import PackageStore
from shoal.env_packages.lock import Requirement, normal_name
from shoal.env_packages.metadata import About, read_package
from shoal.env_packages.publish import own_catalogue, read_catalogue
from shoal.env_packages.registry import archive_path, open_registry
from shoal.env_packages.signed_catalog import PinnedKeys
from shoal.envs.lint.finding import CheckResult, fails, passes, skips
from shoal.errors import NothingYet


def pins(folder: Path, registry: str = "") -> list[CheckResult]:
    """Findings about dependencies and data of a package."""
    index = index_folder(folder)
    about, requirements = read_package(folder, index)
    changed = _unlike(about, index, _changed_since(about, index, registry))
    locked = _locked(requirements)
    known = {requirement.name for requirement in requirements}
    return [locked if locked.outcome == "failed" else unlocked(folder, index, known) or locked, *changed]


def _locked(requirements: Sequence[Requirement]) -> CheckResult:
    """The dependencies that are installed here are those of the lock, as their authors packed them."""
    missing = []
    for requirement in requirements:
        try:
            installed = distribution(requirement.name)
        except PackageNotFoundError:
            missing.append(requirement.name)
            continue
        if installed.version != requirement.version:
            both = f"{requirement.name} {installed.version} is installed, and the lock says {requirement.version}"
            return fails("dependencies", f"{both}: install what is locked, or lock what you use")
        if file := _changed_file(installed):
            changed = f"{file} of {requirement.name} {requirement.version} was changed after it was installed"
            return fails("dependencies", f"{changed}, under the same version: install it again")
    if missing:
        return skips("dependencies", f"{', '.join(missing[:5])} of the lock are not installed here")
    told = f"the {len(requirements)} of the lock are installed unchanged" if requirements else "there are none"
    return passes("dependencies", told)


def unlocked(folder: Path, index: Index, known: Collection[str]) -> CheckResult | None:
    """A finding about the first import of something that is installed here and not in the lock, which names `known`; None
    if there is none."""
    own = {Path(file.path).parts[0].removesuffix(".py") for file in index.files} | {"shoal", "msgspec"}
    packed = packages_distributions()
    for path in [file.path for file in index.files if file.path.endswith(".py")]:
        for line, name in _imports((folder / path).read_bytes()):
            dists = {normal_name(dist) for dist in packed.get(name, ())}
            if name not in own and name not in sys.stdlib_module_names and dists and not dists & set(known):
                says = f"{path} line {line} imports {name}, which the lock does not list, so others lack it"
                return fails("dependencies", f"{says}. Add {min(dists)}, and what that needs, to the lock")
    return None


def _imports(source: bytes) -> Iterator[tuple[int, str]]:
    """Line and top-level name of what a file imports, except where it is ready for a failure."""
    try:
        nodes: list[ast.AST] = [ast.parse(source)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # loading it says more
    for node in nodes:
        inner = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Try) and node.handlers:
            inner = [*node.handlers, *node.orelse, *node.finalbody]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            inner = [*node.orelse]
        nodes += inner
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module.partition(".")[0]


def _changed_file(installed: Distribution) -> str:
    """The first file of a distribution that does not have the hash of its record; empty if there is none."""
    for path, mark, _ in csv.reader((installed.read_text("RECORD") or "").splitlines()):
        kind, _, wanted = mark.partition("=")
        if kind != "sha256":
            continue
        file = Path(str(installed.locate_file(path)))
        with suppress(FileNotFoundError):  # such as compiled files that were deleted
            found = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).decode().rstrip("=")
            if found != wanted:
                return path
    return ""


def _changed_since(about: About, index: Index, registry: str) -> Iterator[tuple[str, Index | None]]:
    """Where the same version exists with other files, and its files if they are known."""
    own, home = digest_of(index), node_home()
    known = {own}
    for package in PackageStore(home / "envs").all():
        if (package.name, package.version) == (about.name, about.version) and package.digest not in known:
            known.add(package.digest)
            yield "installed here", package.files
    published = own_catalogue(home, about.name)
    release = published.release(about.version) if published else None
    if registry:
        with suppress(NothingYet):
            source = open_registry(registry)
            catalogue = read_catalogue(
                source, about.name, PinnedKeys(home / "authors.json"), pin=False
            ).opened.catalogue
            release = catalogue.release(about.version)
            if release and release.digest != own:
                with tempfile.TemporaryFile() as archive:
                    source.copy(archive_path(release.digest), release.size_bytes, archive)
                    archive.seek(0)
                    yield "published", read_index(archive, release.digest)
                return
    if release and release.digest not in known:
        yield "published", None


def _unlike(about: About, index: Index, versions: Iterator[tuple[str, Index | None]]) -> Iterator[CheckResult]:
    """One finding for each kind of file that differs from the same version elsewhere."""
    here = {file.path: file.sha256 for file in index.files}
    for where, files in versions:
        named = f"{about.name} {about.version} was {where}"
        if files is None:
            yield fails("version", f"{named} with other files: raise version in environment.toml")
            continue
        there = {file.path: file.sha256 for file in files.files}
        differ = sorted(path for path in here.keys() | there.keys() if here.get(path) != there.get(path))
        for kind, paths in _by_kind(about, differ).items():
            changed = f"{', '.join(paths[:3])} changed since {named}, under the same version"
            yield fails(kind, f"{changed}: raise version in environment.toml")


def _by_kind(about: About, changed: Sequence[str]) -> dict[str, list[str]]:
    """Paths by the check whose fault they are."""
    kinds: dict[str, list[str]] = {}
    for path in changed:
        kind = "dependencies" if path == about.lock else "data" if path in about.data else "version"
        kinds.setdefault(kind, []).append(path)
    return kinds
