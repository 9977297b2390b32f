"""Models that come from a hub: `hf:OWNER/NAME@REVISION`, fetched with huggingface_hub into its cache; the base of
somebody else's run, into a folder that the caller chooses.

It takes weights in safetensors, JSON files and the tokenizer's; never code, and nothing is ever executed. The cache makes a
second use, and one without network, free. HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE and tokens are huggingface_hub's own
business. It does not know manifests: the caller compares hashes.
"""

import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import USER_MUST_FIX, ConfigError, StateError, how_to_install, one_line
from shoal.models import chat_template_files, tokenizer_loader
from shoal.models.checkpoint import TOKENIZER_FILES
from shoal.models.safetensors_header import INDEX, names_of_weights
from shoal.protocol.hub_reference import EXAMPLE, HubRef, hub_ref, is_commit
from shoal.run_folder import existing, free_below, replaced_folder

PINNED = ".hub"
"""A file in a directory that was copied from a hub: the model's name, with the commit as its revision."""

MAX_PLAIN_BYTES = 64 << 20
"""Largest file without weights."""

MAX_FILES = 1000
"""Files of a model that are fetched."""

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_PLAIN = ("config.json", "generation_config.json", INDEX, *TOKENIZER_FILES, *chat_template_files.IN_FOLDER)


def parse_ref(path: str) -> HubRef:
    """Read a name. Raises `ConfigError`."""
    ref = hub_ref(path)
    if ref is None:
        raise ConfigError(f"{path[:200]!r}: a model on a hub is named hf:OWNER/NAME@REVISION, such as {EXAMPLE}")
    return ref


def source_of(directory: Path) -> str:
    """The hub's name of the model in a directory, with its commit; empty if it did not come from a hub."""
    pinned = directory / PINNED
    return pinned.read_text().strip() if pinned.exists() else ""


@dataclass(frozen=True)
class Hub:
    """One hub with its cache. None leaves the choice to huggingface_hub, which reads HF_ENDPOINT and HF_HOME."""

    endpoint: str | None = None
    cache: Path | None = None

    def bring(self, path: str, target: Path, say: Callable[[str], None] = lambda line: None) -> None:
        """Put a model into the directory `target`, whole or not at all. Raises `ConfigError`, `StateError`."""
        ref = parse_ref(path)
        pinned, sizes, cached = self._listed(ref)
        wanted = {name: size for name, size in sizes.items() if name in _PLAIN or _WEIGHTS.fullmatch(name)}
        if cached is not None:
            _demand_here(pinned, ["config.json", "tokenizer.json", *names_of_weights(cached)], wanted)
        _demand(pinned, wanted)
        self._demand_space(pinned, wanted, target.parent)
        say(f"{pinned}: {len(wanted)} files, {sum(wanted.values()) / 1e6:,.1f} MB")
        if not ref.is_pinned:
            self._file(ref, "config.json")  # so that the cache knows the branch's commit, when there is no network
        # Weights last: a cache that has them all has the other files as well.
        order = sorted(wanted, key=lambda name: (name not in _PLAIN, name))
        found = {name: self._file(pinned, name) for name in order}
        try:
            with replaced_folder(target) as scratch:
                _laid_out(found, scratch)
                (scratch / PINNED).write_text(f"{pinned}\n")
        except OSError as error:
            raise StateError(f"cannot put {pinned} into {target}: {error}. Free some space") from None

    def files(self, source: str, sizes: Mapping[str, int], into: Path) -> dict[str, Path]:
        """Weights of a model at a commit, by name: from the cache, or fetched into a folder; each must have the given size.

        Nothing is fetched if one has another. Raises `StateError`; the content is not yet verified.
        """
        ref = parse_ref(source)
        own = replace(self, cache=into)
        found = {
            name: path for name, size in sizes.items() for hub in (own, self) if (path := hub._held(ref, name, size))
        }
        lacking = {name: size for name, size in sizes.items() if name not in found}
        if not lacking:
            return found
        _, listed, cached = self._listed(ref)
        if cached is not None:
            _demand_here(ref, lacking, listed)
        for name, size in lacking.items():
            if not _WEIGHTS.fullmatch(name) or listed.get(name) != size:  # guard: hub-size-of-the-manifest
                raise StateError(
                    f"{ref}: {name} has {listed.get(name, 'no')} bytes on the hub, and the run's manifest names {size}: "
                    "the run's base is not that model. Tell the host, or leave the run"
                )
        _demand(ref, lacking, weights_only=True)
        own._demand_space(ref, lacking, into)
        return found | {name: own._file(ref, name) for name in lacking}

    def config(self, path: str) -> Path:
        """A directory with the JSON files that say the shape of a model. Raises `ConfigError`, `StateError`."""
        pinned, sizes, _ = self._listed(parse_ref(path))
        if "generation_config.json" in sizes:
            self._file(pinned, "generation_config.json")
        return self._file(pinned, "config.json", resolve=False).parent

    def _listed(self, ref: HubRef) -> "_Listing":
        """The commit that a name leads to, and the sizes of its files; from the cache, if the hub cannot be reached."""
        hub = _library()
        try:
            info = hub.HfApi(endpoint=self.endpoint).model_info(
                ref.repo, revision=ref.revision, files_metadata=True, timeout=20.0
            )
        except Exception as error:  # noqa: BLE001 - of its HTTP client, whichever that is
            refused = _refusal(hub, ref, error)
            if refused:
                raise StateError(refused) from None
            return self._cached(ref, error)
        commit, siblings = info.sha, info.siblings or []
        if not is_commit(commit):
            raise StateError(f"{ref}: the hub names no commit of it: check HF_ENDPOINT")
        if ref.is_pinned and commit != ref.revision:
            raise StateError(f"{ref}: the hub gives commit {commit[:12]} instead: check HF_ENDPOINT")
        sizes = {one.rfilename: one.size for one in siblings[: 100 * MAX_FILES] if isinstance(one.size, int)}
        return _Listing(HubRef(ref.owner, ref.name, commit), sizes, None)

    def _cached(self, ref: HubRef, error: Exception) -> "_Listing":
        hub = _library()
        try:
            folder = Path(
                hub.snapshot_download(ref.repo, revision=ref.revision, cache_dir=self.cache, local_files_only=True)
            )
        except Exception:  # noqa: BLE001 - as above
            raise StateError(
                f"{ref} is not in the hub's cache, and the hub cannot be reached ({one_line(error)}): connect, set "
                "HF_ENDPOINT, or copy the model here and name its directory in policy.path"
            ) from None
        found = [
            path for path in [*folder.iterdir(), *map(folder.joinpath, chat_template_files.IN_FOLDER)] if path.is_file()
        ]
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}
        return _Listing(HubRef(ref.owner, ref.name, folder.name), sizes, folder)

    def _file(self, ref: HubRef, name: str, resolve: bool = True) -> Path:
        hub = _library()
        try:
            found = Path(
                hub.hf_hub_download(ref.repo, name, revision=ref.revision, cache_dir=self.cache, endpoint=self.endpoint)
            )
        except Exception as error:  # noqa: BLE001 - as above
            refused = _refusal(hub, ref, error)
            full = isinstance(error, OSError) and error.errno in USER_MUST_FIX
            again = f"{'Free some space' if full else 'Try again'}: the files that are here are kept"
            raise StateError(refused or f"{ref}: {name} cannot be fetched: {one_line(error)}. {again}") from None
        return found.resolve() if resolve else found

    def _held(self, ref: HubRef, name: str, size: int) -> Path | None:
        """A file of weights, or another one that is fetched, if the cache has it in this size."""
        if name not in _PLAIN and not _WEIGHTS.fullmatch(name):  # guard: hub-names-of-files
            return None
        found = _library().try_to_load_from_cache(ref.repo, name, cache_dir=self.cache, revision=ref.revision)
        path = Path(found).resolve() if isinstance(found, str) else None
        return path if path is not None and path.stat().st_size == size else None

    def _demand_space(self, ref: HubRef, sizes: Mapping[str, int], target: Path) -> None:
        """Refuse a model that does not fit on the disk of the cache, or that of the target, where that is another one and
        cannot share the cache's files. Raises `StateError`."""
        cache = Path(_library().constants.HF_HUB_CACHE) if self.cache is None else self.cache
        lacking = {name: size for name, size in sizes.items() if self._held(ref, name, size) is None}
        needs = {existing(cache).stat().st_dev: (cache, sum(lacking.values()))}
        needs.setdefault(existing(target).stat().st_dev, (target, sum(sizes.values())))
        for folder, need in needs.values():
            if need > (free := free_below(folder)):  # guard: hub-fits-the-disk
                elsewhere = ", or set HF_HOME" if self.cache is None and folder == cache else ""
                raise StateError(
                    f"{ref} needs {need} bytes in {folder}, and {free} are free: free some space{elsewhere}"
                )


class _Listing(NamedTuple):
    ref: HubRef
    """With the commit."""
    sizes: dict[str, int]
    cached: Path | None
    """Where they are in the cache, if the hub could not be reached: then they may be a part of the model's."""


def _demand_here(ref: HubRef, needed: Iterable[str], here: Collection[str]) -> None:
    """Refuse the part of a model that a fetch left in the cache when it was cut short."""
    lacking = sorted(set(needed) - set(here))
    if lacking:  # guard: part-in-the-cache-is-no-model
        raise StateError(
            f"{ref}: {lacking[0]} is not in the hub's cache, and the hub cannot be reached: connect and try again: what is "
            "here is kept"
        )


def _demand(ref: HubRef, sizes: Mapping[str, int], weights_only: bool = False) -> None:
    """Refuse a model without config.json or safetensors weights, or with files that are too large. Raises `StateError`."""
    weights = [name for name in sizes if _WEIGHTS.fullmatch(name)]
    if not weights or (not weights_only and "config.json" not in sizes):
        raise StateError(f"{ref} has no config.json with weights in safetensors: choose another model or revision")
    large = [name for name, size in sizes.items() if name not in weights and size > MAX_PLAIN_BYTES]
    if large or len(sizes) > MAX_FILES:  # guard: hub-file-size
        raise StateError(
            f"{ref}: {large[0] if large else 'it'} has more than {MAX_PLAIN_BYTES} bytes or {MAX_FILES} files"
        )


def _refusal(hub: Any, ref: HubRef, error: Exception) -> str:
    """What to say if the hub answered that a model cannot be had; empty if it did not answer."""
    errors = hub.errors
    if isinstance(error, errors.GatedRepoError):
        return f"{ref} is gated: accept its terms on the hub, and log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{ref}: the hub has no revision {ref.revision!r} of it: name a branch, a tag or a commit"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{ref}: the hub has no such model, or it is private and you are not logged in: check its name"
    if isinstance(error, errors.HFValidationError):
        return f"{ref} is not a valid model name: {one_line(error)}"
    return ""


def _library() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise StateError(
            f"a model of the form hf:OWNER/NAME@REVISION needs huggingface_hub, which is not installed ({error.name}): "
            + how_to_install("hub")
        ) from None
    return huggingface_hub


def _laid_out(files: Mapping[str, Path], folder: Path) -> None:
    """Put a model's files into a folder that has none of its own, as versions of a policy have none: the templates of a
    folder go into `tokenizer_config.json`. Raises `StateError`."""
    merged = files.keys() & chat_template_files.IN_FOLDER.keys()
    replaced = {chat_template_files.FILE, tokenizer_loader.CONFIG, *merged} if merged else set()
    for name in files.keys() - replaced:
        _linked(files[name], folder / name)
    if merged:
        config = (
            tokenizer_loader.read_object(files[tokenizer_loader.CONFIG]) if tokenizer_loader.CONFIG in files else {}
        )
        (folder / tokenizer_loader.CONFIG).write_bytes(chat_template_files.with_folder(config, files))


def _linked(source: Path, target: Path) -> None:
    """Another name of a file in the cache, or a copy if that is on another disk."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)
