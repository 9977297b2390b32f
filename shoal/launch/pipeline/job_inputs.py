"""Jobs of a stage: their inputs, and the outputs that later stages read."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.chat.isolated import open_own
from shoal.config import RunConfig, SftConfig
from shoal.config.load import resolve_path
from shoal.config.stages import (
    EvalStage,
    FilterStage,
    MergeStage,
    RlStage,
    Stage,
    kind_of,
    policy_directory,
    taken_by,
    to_settings,
)
from shoal.envs.load import env_digest, is_file
from shoal.errors import ConfigError, ShoalError, StateError
from shoal.launch.preflight import demand_computable
from shoal.models.lora_config import AdapterSpec, demand_adapter, has_adapter
from shoal.models.open_model import spec_of
from shoal.protocol.encoding import digest, to_json
from shoal.protocol.hub_reference import is_hub
from shoal.protocol.task_draws import read_task_list
from shoal.train.dataset_files import demand_preference_pairs
from shoal.typed_toml import to_tree

# --- what a finished stage leaves in its folder, and the digests that say whether it is still that ---


POLICY, RUN, EVALUATION, EXAMPLES, TASKS, RATES, REWARD_MODEL = (
    "policy", "run", "eval.json", "examples.msgpack", "tasks.json", "rates.json", "reward-model"
)  # fmt: skip
"""Outputs in a job's folder."""

OUTPUTS = {
    "sft": {"policy": POLICY},
    "rl": {"policy": f"{RUN}/checkpoints/final"},
    "merge": {"policy": POLICY},
    "eval": {"evaluation": EVALUATION},
    "reject": {"examples": EXAMPLES},
    "dpo": {"policy": POLICY},
    "reward_model": {"reward_model": REWARD_MODEL},
    "filter": {"tasks": TASKS, "rates": RATES},
}
"""What a finished job of each kind has, and where: files and folders whose digests `done.json` holds."""


def digest_below(place: Path) -> str:
    """SHA-256, hex, over a file, or over all files below a folder with their names."""
    return digest(to_json(files_of(place)))


def files_of(place: Path) -> dict[str, str]:
    """SHA-256 of a file (named ""), or of each file below a folder, by name. Raises `StateError` if nothing is there."""
    files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    if not files:
        raise StateError(f"{place} is missing or empty")
    return {"" if path == place else path.relative_to(place).as_posix(): _digest_of(path) for path in files}


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def demand_whole(job_folder: Path, outputs: dict[str, dict[str, str]], kind: str, name: str) -> None:
    """Raise `StateError` if an output of a finished job is not what the job wrote."""
    for what, place in OUTPUTS[kind].items():
        try:
            found = files_of(job_folder / place)
        except (ShoalError, OSError):
            found = {}
        wrong = sorted(
            file for file in outputs[what].keys() | found.keys() if outputs[what].get(file) != found.get(file)
        )
        if wrong:
            raise StateError(
                f"stage {name}: {job_folder / place / wrong[0]} is not what the stage wrote. Restore it from a copy, or "
                f"delete {job_folder}, and the same command does the stage again"
            )


# --- a stage as a job: what decides its output and so its key ---
#
# A job's folder is named by its key. Its `job.json` is all that its process reads beside the inputs: a recipe that changes
# meanwhile changes nothing.


JUDGES = ("teacher", "reward_model")
"""Keys of `[train]` with the path of a model."""

FORMAT = 1
"""Raise it when stages of the same settings would give other outputs: every stage is then done again."""


class Job(msgspec.Struct, frozen=True):
    """`job.json`."""

    kind: str
    settings: dict[str, Any]
    """Of the recipe after overrides, with absolute paths; of a stage without a recipe, its own."""
    own: dict[str, Any]
    """Keys of the stage itself, where it has a recipe, too."""
    inputs: dict[str, str]
    """Where the outputs of other stages are, by the key that takes them."""
    identity: str
    """JSON of what the key is the digest of: neither names nor places."""

    @property
    def key(self) -> str:
        return digest(self.identity.encode())[:32]


@dataclass(frozen=True)
class Input:
    """An output of another stage."""

    place: Path
    digest: str


class Made(msgspec.Struct, frozen=True):
    """`made.json`: what the process of a job says of its work. It may be there before the outputs are known to be whole."""

    tokens: int = 0
    """Learned from by sft, prompts and repetitions included; paid for by rl; written by filter's policy. 0: the kind has
    none."""
    figures: dict[str, Any] = {}
    """Of the kind."""


def job_of(stage: Stage, settings: RunConfig | SftConfig | None, beside: Path, inputs: dict[str, Input]) -> Job:
    """The job of a stage of a file in `beside`. Raises `ConfigError` if something that its recipe names is not there."""
    kind, own = kind_of(stage), to_settings(stage)
    recipe: str = getattr(stage, "recipe", "")
    if policy := policy_directory(stage):
        own_place = _own_directory(stage, "policy", policy, beside)
        inputs = inputs | {"policy": Input(own_place, digest_below(own_place))}
    beside = (beside / recipe).parent if recipe else beside
    digests = {key: found.digest for key, found in inputs.items()}
    places = {key: str(found.place) for key, found in inputs.items()}
    if settings is None:
        tree, known, own = own, own, {}
        if tree.get("pairs"):
            pairs = resolve_path(f"stage {stage.name}: pairs", tree["pairs"], beside)
            if not pairs.is_file():
                raise ConfigError(f"stage {stage.name}: pairs = {tree['pairs']}: no file at {pairs}")
            digests["pairs"] = digest_below(pairs)
            tree, known = tree | {"pairs": str(pairs)}, known | {"pairs": ""}
    else:
        tree, known = _resolved(stage, to_tree(settings), beside, inputs, digests)
    identity = {"format": FORMAT, "kind": kind, "settings": known, "inputs": digests} | ({"own": own} if own else {})
    return Job(kind, tree, own, places, to_json(identity).decode())


def _resolved(
    stage: Stage, tree: dict[str, Any], beside: Path, inputs: dict[str, Input], digests: dict[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a recipe in `beside` with absolute paths; and for the key, with digests instead. The digest of a
    policy of one's own is added to `digests`."""
    known, path = dict(tree), tree["policy"]["path"]
    if "policy" in inputs:
        tree["policy"] = tree["policy"] | {"path": str(inputs["policy"].place)}
    elif path and not is_hub(path):
        own = _own_directory(stage, "policy.path", path, beside)
        tree["policy"], digests["policy"] = tree["policy"] | {"path": str(own)}, digest_below(own)
    if "policy" in digests:
        known["policy"] = known["policy"] | {"path": ""}
    if "train" in tree:
        known["train"] = tree["train"] | dict.fromkeys(JUDGES, "")
        tree["train"], found = _judges_at(stage, tree["train"], beside, inputs)
        if isinstance(stage, RlStage):
            digests |= found  # guard: key-follows-the-judge
    for key in ("env", "envs"):
        if key in tree:
            tree[key], known[key] = _environments(tree[key], beside)
    if "tasks" in inputs and inputs["tasks"].digest:
        tree["envs"] = _drawn_from(inputs["tasks"].place, tree["envs"], stage.name)
    if isinstance(stage, EvalStage):  # how the policy was trained does not matter here
        known = {key: known[key] for key in ("seed", "envs", "sampling", "eval")}
    if isinstance(stage, FilterStage):
        known = {key: known[key] for key in ("seed", "envs", "sampling")}
    return tree, known


def _judges_at(
    stage: Stage, train: dict[str, Any], beside: Path, inputs: dict[str, Input]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The `train` of a run file in `beside` with absolute paths of its teacher and its reward model; and the digests of
    those that are no other stage's."""
    digests = dict[str, str]()
    for key in JUDGES:
        if key in inputs:
            train = train | {key: str(inputs[key].place)}
        elif path := train[key]:
            own = _own_directory(stage, f"train.{key}", path, beside)
            train, digests[key] = train | {key: str(own)}, digest_below(own)
    return train, digests


def _own_directory(stage: Stage, key: str, path: str, beside: Path) -> Path:
    what = f"stage {stage.name}: {key}"
    own, give = resolve_path(what, path, beside), "Give one with a Hugging Face model"
    if not own.is_dir():
        raise ConfigError(f"{what} = {path}: no directory at {own}. {give}")
    if not any(file.is_file() for file in own.rglob("*")):
        raise ConfigError(f"{what} = {path}: no file is in {own}. {give}")
    return own


def demand_same_inputs(job: Job, name: str, folder: Path) -> None:
    """Raise `StateError` if something that a job in this folder takes is not what its key says.
    `launch/pipeline/rollout_selection` compares the rollouts of a run where it reads them."""
    settings, pinned = job.settings, msgspec.json.decode(job.identity)["inputs"]
    found = {"policy": settings.get("policy"), "pairs": settings.get("pairs"), **settings.get("train", {})} | job.inputs
    for key, expected in pinned.items():
        at = found[key]["path"] if isinstance(found[key], dict) else found[key]
        if key != "rollouts" and digest_below(Path(at)) != expected:
            raise StateError(
                f"stage {name}: its {key} at {at} changed while it worked. Restore that and delete {folder}, and the same "
                "command does the stage again"
            )


def demand_doable(stage: Stage, settings: RunConfig | SftConfig | None, beside: Path) -> None:
    """Raise `ConfigError` if something that a recipe names is not there, if a file of pairs has a line that is none, if a
    model is damaged, or if the stage would wait for others. Called for all stages before the first begins."""
    what = f"stage {stage.name}"
    if isinstance(settings, RunConfig):
        if isinstance(stage, EvalStage) and not any(settings.eval_episodes(env) for env in settings.envs):
            raise ConfigError(f"{what}: eval.episodes = 0: set how many episodes are played")
        if isinstance(stage, FilterStage):
            demand_measurable(stage, settings)
        missing = [key for key in ("workers", "validators") if not getattr(settings, key).count]
        if isinstance(stage, RlStage) and missing:  # guard: stage-needs-nobody-else
            raise ConfigError(f"{what}: {missing[0]}.count = 0: a stage is a run of this machine alone: set at least 1")
    if settings is not None or policy_directory(stage) or bool(getattr(stage, "pairs", "")):
        job = job_of(stage, settings, beside, {key: Input(Path(), "") for key in taken_by(stage)})
        if pairs := job.settings.get("pairs"):
            _demand_pairs(stage, Path(pairs))
        _demand_models(stage, settings, job)


def _demand_models(stage: Stage, settings: RunConfig | SftConfig | None, job: Job) -> None:
    """Raise `ConfigError` if a model that a stage begins with or asks, and no other stage makes, is damaged. Weights are
    not read: the stage does that."""
    named, taken, train = policy_directory(stage), taken_by(stage), job.settings.get("train", {})
    key = "policy" if named else "policy.path"
    path = job.inputs["policy"] if named else job.settings.get("policy", {}).get("path", "")
    try:
        if path and not is_hub(path) and "policy" not in taken:
            if isinstance(stage, MergeStage):
                demand_adapter(Path(path))
                spec_of(Path(path))
            else:
                open_own(Path(path))  # guard: policies-of-stages-are-read-first
            if has_adapter(Path(path)):
                AdapterSpec.from_directory(Path(path))
        for judge in JUDGES if isinstance(stage, RlStage) else ():
            key = f"train.{judge}"
            if train[judge] and judge not in taken:
                spec_of(Path(train[judge]))  # guard: judges-of-stages-are-read-first
    except ShoalError as error:
        raise ConfigError(f"stage {stage.name}: {key}: {error}") from None
    if path and not is_hub(path) and "policy" not in taken and isinstance(stage, RlStage):
        assert isinstance(settings, RunConfig), "an rl stage has a run file"
        try:
            demand_computable(Path(path), settings)
        except ShoalError as error:
            raise ConfigError(f"stage {stage.name}: {error}") from None


def _demand_pairs(stage: Stage, pairs: Path) -> None:
    try:
        demand_preference_pairs(pairs)  # guard: pairs-are-read-first
    except StateError as error:
        raise ConfigError(f"stage {stage.name}: pairs: {error}") from None


def demand_measurable(stage: FilterStage, settings: RunConfig) -> None:
    """Raise `ConfigError` if it is not clear which environment a filter stage measures, or with which policy."""
    labels = [env.label for env in settings.envs]
    if stage.env not in labels and (stage.env or len(labels) > 1):
        raise ConfigError(f"stage {stage.name}: env = {stage.env!r}: name one of {', '.join(labels)}")
    if not settings.policy.path or is_hub(settings.policy.path):
        raise ConfigError(
            f"stage {stage.name}: policy: which one plays? Write stage:NAME, or a directory as policy.path"
        )


def _environments(found: Any, beside: Path) -> tuple[Any, Any]:
    """Environments of a recipe with absolute paths; and for the key, with the digest of their source instead."""
    if isinstance(found, list):
        pairs = [_environments(env, beside) for env in found]
        return [absolute for absolute, _ in pairs], [pinned for _, pinned in pairs]
    name = found["name"]
    if is_file(name):
        name = str(resolve_path("envs.name", name, beside))
    tasks = str(resolve_path("envs.tasks", found["tasks"], beside)) if found["tasks"] else ""
    if tasks and not Path(tasks).is_file():
        raise ConfigError(f"envs.tasks = {found['tasks']}: no file at {tasks}")
    pinned = {"name": Path(name).name, "source": env_digest(name), "tasks": digest_below(Path(tasks)) if tasks else ""}
    return found | {"name": name, "tasks": tasks}, found | pinned


def _drawn_from(place: Path, envs: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The environments of a run file, of which those that a list was measured on draw from it."""
    found = read_task_list(place.read_bytes())
    fits = [env_digest(env["name"]) == found.source and env["args"] == found.args for env in envs]
    if not any(fits):
        raise ConfigError(f"stage {name}: tasks: the filter stage measured another environment, or one with other args")
    return [env | {"tasks": str(place)} if fit else env for env, fit in zip(envs, fits, strict=True)]
