"""How a TOML file becomes a `RunConfig` or an `SftConfig`: defaults, the file, then `key.sub=value` overrides.

It names no key except `[quick]`, `[random]` and the built-in bounds: the others are in `run_file`, and `validate_algorithm`
fills in those of a named algorithm.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from shoal.config.run_file import BOUNDS, RunConfig, SftConfig
from shoal.config.trl import TRL_KEYS, TRL_SFT_KEYS
from shoal.config.validate import check_run
from shoal.config.validate_algorithm import filled, optimiser_fits
from shoal.errors import ConfigError
from shoal.tree import Section, from_tree, merge, read_toml, set_key, to_tree

T = TypeVar("T")


VARIANTS = {"quick": "--quick", "random": "--random-policy"}
"""Tables of a run file that override its other keys, and what asks for them."""


def load_run(
    path: Path, overrides: list[str] | None = None, quick: bool = False, random_policy: bool = False
) -> RunConfig:
    """Read a run file, apply `key.sub=value` overrides, and check that the numbers fit each other.

    With `quick`, the keys of the run file's table `[quick]` override the others, for a short version of the same run in
    a folder of its own. With `random_policy`, so do those of `[random]`, whose policy.path is the directory of a shape,
    with a config.json and no weights. Raises `ConfigError` that names the key, and the nearest known key if it is unknown.
    """
    tree = read_toml(path)
    variants = {name: tree.pop(name, None) for name in VARIANTS}
    _demand_kind(tree, RunConfig, path)
    for name in (name for name, asked in (("random", random_policy), ("quick", quick)) if asked):
        over, flag = variants[name], VARIANTS[name]
        if not isinstance(over, dict):
            raise ConfigError(f"{path} has no [{name}] table, so it cannot be run with {flag}: leave {flag} out")
        tree = merge(tree, {"name": f"{tree.get('name')}-{name}"} | over)
    config = _convert(merge(_built_in(), tree), overrides or [], RunConfig, path)
    check_run(config)
    return config


def _built_in() -> dict[str, Any]:
    """The defaults that a run file's own bounds override, pair by pair and key by key."""
    return {"verify": {"bounds": {pair: to_tree(bounds) for pair, bounds in BOUNDS.items()}}}


def load_sft(path: Path, overrides: list[str] | None = None) -> SftConfig:
    """Read an SFT recipe, as `load_run` reads a run file."""
    tree = read_toml(path, "a recipe of `shoal sft`")
    _demand_kind(tree, SftConfig, path)
    config = _convert(tree, overrides or [], SftConfig, path)
    if config.env.tasks:
        raise ConfigError(f"{path}: env.tasks has no effect on scripted games: leave it out")
    for holds, message in (*optimiser_fits(config), *_sft_fits(config)):
        if not holds:
            raise ConfigError(f"{path}: {message}")
    return config


def _sft_fits(config: SftConfig) -> Iterator[tuple[bool, str]]:
    """What must hold, each with what to say if it does not."""
    for key in ("episodes", "steps", "batch"):
        yield getattr(config, key) >= 1, f"{key} = {getattr(config, key)}: must be at least 1"
    yield config.eval_every >= 0, f"eval_every = {config.eval_every}: must be at least 0; 0 never evaluates"
    yield config.eval_episodes >= 1, f"eval_episodes = {config.eval_episodes}: must be at least 1"
    yield 0 <= config.stop_at <= 1, f"stop_at = {config.stop_at}: must be a share from 0 to 1, such as 0.4"
    fits = bool(config.policy.path) or not config.policy.implementation
    yield fits, "policy.implementation has no effect on policy.tiny: set policy.path, or leave it out"


_KINDS = {
    RunConfig: ("a run file", "shoal run {}"),
    SftConfig: ("a recipe of `shoal sft`", "shoal sft {} --out DIR"),
}
"""What each kind of file is called, and the command that takes it."""


def _demand_kind(tree: dict[str, Any], kind: type[Section], path: Path) -> None:
    """Raise `ConfigError` for a file of the other kind. Its keys would be compared with those of the wrong one."""
    other = SftConfig if kind is RunConfig else RunConfig
    keys = tree.keys() - VARIANTS.keys()
    if keys <= set(other.__struct_fields__) and not keys <= set(kind.__struct_fields__):
        (right, _), (found, command) = _KINDS[kind], _KINDS[other]
        raise ConfigError(f"{path} is {found}, not {right}. The command for it: `{command.format(path)}`")


def _convert(tree: dict[str, Any], overrides: list[str], kind: type[T], path: Path) -> T:
    for override in overrides:
        set_key(tree, override)
    source = " ".join([str(path), *(f"--set {override}" for override in overrides)])
    if kind is not RunConfig:
        return from_tree(tree, kind, source, TRL_SFT_KEYS)
    return from_tree(filled(tree), kind, source, TRL_KEYS)
