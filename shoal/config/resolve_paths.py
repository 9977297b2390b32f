"""What a run file names by a path: the path made absolute, and of lists of tasks also what is in them.

Such paths are relative to the run file or recipe, but a run's folder must work from anywhere. It copies and writes nothing.
"""

from pathlib import Path

import msgspec

from shoal.config.env_settings import EnvConfig
from shoal.config.run_file import EvalConfig, RunConfig
from shoal.errors import ConfigError, cause_of
from shoal.protocol.encoding import WireError
from shoal.protocol.package_reference import is_hub
from shoal.protocol.task_draws import TaskList, read_task_list
from shoal.terminal import brief


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
