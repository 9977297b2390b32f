"""Find an environment by name, file or package, make it, and compute the digest of its source.

A user's file is one Python file that defines `def environment(**args)`. It may import installed packages but not
neighbouring files, because its digest covers only itself. The digest of a package covers all its files and its lock.

Where an environment plays: a built-in one in this process; a user's file in child processes of ours, so that it can harm
no role and its steps run beside each other (`load_env` alone makes it in this process); a package like a file if this
machine's own author's key signed it and it has no dependencies, and any other in the sandbox.

A new built-in environment is three files: itself in `envs/builtin`, its row in `BUILT_IN` with the modules of its digest,
and a test in `tests/envs`. `envs/builtin/arithmetic.py` is an example: it draws tasks from hashes and reads its arguments
with `typed_toml`. `shoal env check NAME` says what is wrong with it. `python -m tests.test_docs --write` makes the table of
its arguments in docs/reference/run-file.md.
"""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

from shoal.config import node_home
from shoal.env import Env
from shoal.env_packages.archive import digest_of, index_folder
from shoal.env_packages.installed import Installed, PackageStore
from shoal.env_packages.metadata import read_package
from shoal.env_packages.package_reference import is_name, names_one_package, read_reference
from shoal.envs.builtin import arithmetic, wordle, wordle_words
from shoal.envs.env_from_file import make_env, read_source
from shoal.envs.interface import EnvFacts, describe
from shoal.envs.isolated.environment import ContainedEnv, in_child, in_sandbox
from shoal.envs.settings_wrapper import HISTORIES, Settings, WithSettings, with_settings
from shoal.errors import ConfigError, ShoalError
from shoal.net.key_files import load_key
from shoal.protocol.audit_and_pay import MAX_REWARD
from shoal.protocol.constants import COMPLETIONS
from shoal.protocol.encoding import domain_hash
from shoal.protocol.messages import EnvSpec
from shoal.protocol.messages.run import kind_of
from shoal.typed_toml import Section


class BuiltIn(NamedTuple):
    """An environment that comes with shoal."""

    make: Callable[..., Env]
    args: type[Section]
    """The arguments of `make`."""
    modules: tuple[ModuleType, ...]
    """The modules whose source decides how the environment behaves."""


BUILT_IN: Mapping[str, BuiltIn] = {
    "wordle": BuiltIn(wordle.environment, wordle.WordleArgs, (wordle, wordle_words)),
    "arithmetic": BuiltIn(arithmetic.environment, arithmetic.ArithmeticArgs, (arithmetic,)),
}

Opener: TypeAlias = Callable[[Installed, Sequence[Path], Mapping[str, Any]], Env]
"""Makes the environment of an installed package without running its code in this process, given the folders that its
interpreter has on `sys.path`, and its arguments."""

FileOpener: TypeAlias = Callable[[Path, Mapping[str, Any], str], Env]
"""Makes the environment of a file of this user, given its arguments and the function that returns it: `make_env` in this
process, `in_child` in processes of its own."""


def load_env(
    name_or_path: str, args: Mapping[str, Any], opener: Opener = in_sandbox, own: FileOpener = make_env
) -> Env:
    """Make a built-in environment, that of an installed package, or the one that the user's own file or folder defines.

    `opener` makes those of packages that somebody else wrote, `own` the others.

    Raises a one-line `ShoalError` for an unknown name, for wrong arguments, or, with the line, for a file that fails.
    """
    if is_package(name_or_path):
        return _open_package(_store().find(read_reference(name_or_path)), args, opener, own)
    if not is_file(name_or_path):
        return load_built_in(name_or_path, args)
    path = Path(name_or_path)
    if not path.exists():
        raise no_environment(name_or_path)
    if path.is_dir():
        about = read_package(path, index_folder(path)).about
        return _as_described(_load_file(path / about.entry_file, args, about.function, own), about.reproducible)
    return _load_file(path, args, "environment", own)


def env_of(settings: Settings, opener: Opener = in_sandbox, own: FileOpener = in_child) -> Env:
    """An environment of a run, as its run file describes it. Raises `ShoalError` as `load_env` does."""
    env = load_env(settings.name, settings.args, opener, own)  # guard: files-of-the-host-stay-outside
    return with_settings(env, settings)


def facts_of(settings: Settings) -> EnvFacts:
    """What an environment of a run says of itself. The code of a file or a package runs in another process, which ends.
    Raises `ShoalError` as `load_env`."""
    env = env_of(settings)
    inner = env.env if isinstance(env, WithSettings) else env
    if isinstance(inner, ContainedEnv):
        inner.pool.close()
    return describe(env)


def is_repeatable(settings: Settings) -> bool:
    """Whether others can repeat an environment's answers. Raises as `facts_of`."""
    return facts_of(settings).reproducible


def load_built_in(name: str, args: Mapping[str, Any]) -> Env:
    """Make a built-in environment; never executes other code. Raises `ConfigError` for any other name."""
    if is_file(name) or is_package(name):
        raise _no_file(name)
    return _built_in(name).make(**args)


def files_needed(specs: Sequence[EnvSpec]) -> list[str]:
    """The environment files that are executed where a run's rollouts are played again: none if its host plays."""
    return [] if kind_of(specs) == COMPLETIONS else [spec.name for spec in specs if is_file(spec.name)]


def load_run_envs(
    specs: Sequence[EnvSpec], own_files: bool, opener: Opener = in_sandbox, own: FileOpener = in_child
) -> dict[str, Env]:
    """The environments of a run by label, identical to the host's. `own_files` allows files of this user; `opener` makes
    those of packages that this user installed, `own` those of files.

    Raises `ShoalError` if an environment is missing here, or differs from the host's.
    """
    envs: dict[str, Env] = {}
    for spec in specs:
        if is_file(spec.name) and not own_files:
            raise _no_file(spec.name)
        if is_package(spec.name):
            _demand_installed(spec)
        elif env_digest(spec.name) != spec.digest:
            raise _differs(spec)
        if spec.label in envs:  # guard: label-of-one-environment
            raise ConfigError(
                f"the run labels two environments {spec.label}, so its slots are ambiguous: the host must "
                "give each [[envs]] its own label"
            )
        name = f"pkg:{spec.digest}" if is_package(spec.name) else spec.name  # guard: package-by-its-digest
        env = load_env(name, spec.args, opener, own)
        if isinstance(env, ContainedEnv):
            env.pool.called = spec.label
        envs[spec.label] = with_settings(env, spec)
        if envs[spec.label].num_tasks != spec.num_tasks:
            raise _differs(spec)
    return envs


def env_digest(name_or_path: str) -> str:
    """SHA-256, in hex, of the source that defines an environment: its file, a built-in's modules, or all of a package.

    Equal digests mean equal behaviour for equal arguments, if the source reads no other files. Raises `ShoalError` if there
    is no such environment.
    """
    if is_package(name_or_path):
        return _store().find(read_reference(name_or_path)).digest
    if is_file(name_or_path) and Path(name_or_path).is_dir():
        return digest_of(index_folder(Path(name_or_path)))
    if is_file(name_or_path):
        sources = [read_source(Path(name_or_path))]
    else:
        sources = [Path(str(module.__file__)).read_bytes() for module in _built_in(name_or_path).modules]
    return domain_hash("environment", *sources).hex()


def is_file(name_or_path: str) -> bool:
    """Whether a run file's environment is a path rather than a built-in name or a package."""
    if is_package(name_or_path):
        return False
    return name_or_path.endswith(".py") or "/" in name_or_path or "\\" in name_or_path


def is_package(name: str) -> bool:
    """Whether a run file's environment is an installed package: owner/name@version, or pkg: and a digest."""
    return names_one_package(name)


def _store() -> PackageStore:
    return PackageStore(node_home() / "envs")


def _demand_installed(spec: EnvSpec) -> None:
    """Raise `ConfigError` unless this user installed the very package. The name is the host's word, the digest is not."""
    if _store().get(spec.digest) is None:
        raise ConfigError(
            f"this run uses the package {spec.name} ({spec.digest[:16]}…), which is not installed here: ask the host "
            f"for its registry, and install it with `shoal env install {spec.name} --registry URL`"
        )


def _open_package(package: Installed, args: Mapping[str, Any], opener: Opener, own: FileOpener) -> Env:
    """The environment of an installed package."""
    store = _store()
    folder = store.demand_unchanged(package)
    file, _, function = package.entry.partition(":")
    if is_own(package) and not package.dependencies:  # guard: strangers-packages-stay-out
        env = _as_described(_load_file(folder / file, args, function, own), package.reproducible)
        if isinstance(env, ContainedEnv):
            env.pool.has_network = False  # guard: own-packages-play-as-everywhere
        return env
    env = opener(package, store.paths_of(package.digest), args)
    require_members(env, Path(package.name, file))
    return env


def _as_described(env: Env, reproducible: bool) -> Env:
    """The environment, which is not reproducible if its class or its environment.toml says so."""
    if not reproducible:
        try:
            env.reproducible = False  # type: ignore[attr-defined]
        except AttributeError:
            raise ConfigError(
                f"{env.name}: environment.toml says reproducible = false: say so in its class, too"
            ) from None
    return env


def is_own(package: Installed) -> bool:
    """Whether the author's key of this machine signed a package."""
    key = node_home() / "author.key"
    return key.exists() and load_key(key).public == package.author


def _no_file(name: str) -> ConfigError:
    return ConfigError(f"environment {name} is a file on the host; nodes that join run only built-in environments")


def _differs(spec: EnvSpec) -> ConfigError:
    return ConfigError(
        f"environment {spec.name} here differs from the host's: install the same version of shoal as the host"
    )


def _built_in(name: str) -> BuiltIn:
    if name not in BUILT_IN:
        raise no_environment(name)
    return BUILT_IN[name]


def no_environment(name: str) -> ConfigError:
    """The error for a name or path that leads to nothing, with what its writer may have meant."""
    near = difflib.get_close_matches(name, BUILT_IN, n=1)
    if is_name(name):
        hint = f"write {name}@VERSION for an installed package, or the path of a file or folder that exists"
    elif name.startswith("pkg:"):
        hint = "the digest of a package has 64 hex digits"
    elif is_file(name):
        hint = "there is no such file. Give the path of a .py file, or of a package's folder"
    elif Path(name).exists():
        hint = f"write ./{name} for the file or folder of that name"
    else:
        hint = f"did you mean {near[0]}?" if near else f"built-in are {', '.join(sorted(BUILT_IN))}."
        hint += f" A file needs its path, such as ./{name}.py"
    return ConfigError(f"no environment {name}: {hint}")


def _load_file(path: Path, args: Mapping[str, Any], function: str, own: FileOpener) -> Env:
    try:
        env = own(path, args, function)
    except ShoalError as error:
        raise type(error)(with_place_looked(str(error), args)) from None
    require_members(env, path)
    return env


_RELATIVE_PATHS = ". Paths among the args count from the folder in which shoal is started: "


def with_place_looked(error: str, args: Mapping[str, Any]) -> str:
    """The error of an environment, with the whole path of an argument that it names and that leads nowhere. Machines have
    their data in places of their own, so arguments reach the environment as they are written."""
    error = error.partition(_RELATIVE_PATHS)[0]  # a process in a sandbox is in a folder of its own
    for key, value in args.items():
        looks_like_path = isinstance(value, str) and ("/" in value or Path(value).suffix)
        if looks_like_path and value in error and not Path(value).is_absolute() and not Path(value).exists():
            return f"{error}{_RELATIVE_PATHS}args.{key} is {Path(value).absolute()}"
    return error


def require_members(env: Env, path: Path | str) -> None:
    """Raise `ShoalError` unless what the environment says of itself fits a run."""
    try:
        facts = describe(env)
    except (TypeError, ValueError) as error:
        raise ShoalError(f"{path}: {error}") from None
    low, high = facts.reward_bounds
    if not (low < high and math.isfinite(high - low)):
        raise ShoalError(
            f"{path}: reward_bounds is {facts.reward_bounds}; give the lowest and highest reward, such as (0.0, 1.0)"
        )
    if max(-low, high) > MAX_REWARD:  # guard: promised-rewards
        raise ShoalError(
            f"{path}: reward_bounds is {facts.reward_bounds}; no run takes rewards above {MAX_REWARD:g} by size: scale "
            "them down"
        )
    if facts.history not in HISTORIES:
        raise ShoalError(f"{path}: history is {facts.history!r}; known are {', '.join(HISTORIES)}")
    counts = {
        "num_tasks": (facts.num_tasks, 1),
        "num_heldout": (facts.num_heldout, 0),
        "num_seats": (facts.num_seats, 1),
    }
    for name, (count, least) in counts.items():
        if count < least:
            raise ShoalError(f"{path}: {name} is {count}; give a whole number of at least {least}")
