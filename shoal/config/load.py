"""How a TOML file becomes a `RunConfig` or an `SftConfig`: defaults, the file, `key.sub=value`, absolute paths."""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shoal.config.env_settings import EnvConfig
from shoal.config.run_config import BOUNDS, EvalConfig, RunConfig, SftConfig
from shoal.config.trl import TRL_KEYS, TRL_SFT_KEYS
from shoal.config.validate import can_be_kept, check_run, judge_fits
from shoal.config.validate_algorithm import filled, lr_fits
from shoal.errors import ConfigError, cause_of
from shoal.protocol.encoding import WireError
from shoal.protocol.hub_reference import is_hub
from shoal.protocol.task_draws import TaskList, read_task_list
from shoal.terminal import brief
from shoal.typed_toml import Section, from_tree, merge, read_toml, to_tree

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
    fits = bool(config.policy.path) or not config.policy.implementation
    implemented = "policy.implementation has no effect on policy.tiny: set policy.path, or leave it out"
    for holds, message in (lr_fits(config.lr), (fits, implemented), *can_be_kept(config)):
        if not holds:
            raise ConfigError(f"{path}: {message}")
    return config


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


def set_key(tree: dict[str, Any], override: str) -> None:
    """Apply `workers.count=3`. The value is TOML, or a bare string. A number in the path selects an item of a list."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override}: write it as key=value, for example --set workers.count=3")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = key.strip().split(".")
    node: Any = tree
    for part in parents:
        if isinstance(node, list):
            if not (part.isdigit() and int(part) < len(node)):
                raise ConfigError(f"--set {override}: {part} is not an item of the list (it has {len(node)})")
            node = node[int(part)]
        elif isinstance(node, dict):
            node = node.setdefault(part, {})
    if not isinstance(node, dict):
        raise ConfigError(f"--set {override}: {'.'.join(parents)} is not a section")
    node[last] = value


# --- what a run file names by a path: relative to it, but a run's folder must work from anywhere ---


def resolve_path(key: str, path: str, beside: Path) -> Path:
    """A path that a key names, made absolute. Raises `ConfigError` if no file or folder can have it."""
    try:
        place = (beside / path).resolve()
        place.exists()
    except PermissionError as error:
        raise ConfigError(f"{key} = {brief(path)}: cannot be read: {cause_of(error)}. Make it readable") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{key} = {brief(path)}: cannot be a path: {cause_of(error)}. Correct it") from None
    return place


def with_absolute_paths(config: RunConfig, recipe_dir: Path) -> RunConfig:
    """Make all paths of a run file absolute. Raises `ConfigError` if no model is where it names one."""
    policy = config.policy
    if policy.path and not is_hub(policy.path):
        path = resolve_path("policy.path", policy.path, recipe_dir)
        if not path.is_dir():
            raise ConfigError(
                f"policy.path = {policy.path}: no directory at {path}. Give one with a Hugging Face model; "
                "--random-policy tries the run without one, if the run file has a table [random]"
            )
        policy = msgspec.structs.replace(policy, path=str(path))
    envs = tuple(env_at(env, recipe_dir) for env in config.envs)
    whole = msgspec.structs.replace(config, policy=policy, envs=envs, eval=_eval_at(config.eval, recipe_dir))
    for holds, message in judge_fits(whole):  # two paths may name one file
        if not holds:  # guard: judge-of-another-file
            raise ConfigError(message)
    return with_judge_at(whole, recipe_dir)


def _eval_at(asked: EvalConfig, recipe_dir: Path) -> EvalConfig:
    """With the path of the held-out judge. Evaluations run beside training, so a judge that is not there is told now."""
    if not is_path(asked.judge.name):
        return asked
    path = resolve_path("eval.judge.name", asked.judge.name, recipe_dir)
    if not path.exists():
        raise ConfigError(
            f"eval.judge.name = {asked.judge.name}: nothing at {path}. Give an environment's file or folder"
        )
    return msgspec.structs.replace(asked, judge=msgspec.structs.replace(asked.judge, name=str(path)))


def env_at(env: EnvConfig, recipe_dir: Path) -> EnvConfig:
    """An environment with absolute paths."""
    if is_path(env.name):
        env = msgspec.structs.replace(env, name=str(resolve_path("envs.name", env.name, recipe_dir)))
    if env.tasks:
        env = msgspec.structs.replace(env, tasks=str(resolve_path("envs.tasks", env.tasks, recipe_dir)))
    return env


def is_path(env: str) -> bool:
    """Whether the name of an environment is that of a file or folder, relative to the run file."""
    return env.endswith(".py") or env.startswith(("./", "../", "/"))


def with_judge_at(config: RunConfig, recipe_dir: Path) -> RunConfig:
    """Make the path of a run file's teacher or reward model absolute. Raises `ConfigError` if no directory is there."""
    train = config.train
    for key in ("teacher", "reward_model"):
        if given := getattr(train, key):
            path = resolve_path(f"train.{key}", given, recipe_dir)
            if not path.is_dir():
                raise ConfigError(f"train.{key} = {given}: no directory at {path}. Give one with a Hugging Face model")
            train = msgspec.structs.replace(train, **{key: str(path)})
    return msgspec.structs.replace(config, train=train)


def with_digests(config: RunConfig) -> tuple[RunConfig, list[TaskList]]:
    """A run file with absolute paths, with the digests of its lists of tasks instead of their paths; and the lists. Raises
    `ConfigError` if a file is not such a list."""
    envs, lists = list[EnvConfig](), list[TaskList]()
    for env in config.envs:
        if env.tasks:
            try:
                lists.append(read_task_list(Path(env.tasks).read_bytes()))
            except (OSError, WireError) as error:
                cause = cause_of(error)
                raise ConfigError(
                    f"envs.tasks = {env.tasks}: no task list of a filter stage: {cause}. Give the tasks.json of one"
                ) from None
            env = msgspec.structs.replace(env, tasks=lists[-1].digest)
        envs.append(env)
    return msgspec.structs.replace(config, envs=tuple(envs)), lists
