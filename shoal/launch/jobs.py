"""A stage as a job: what decides its output and so its key, and what a process of its own does for it.

Called by `launch/stages`, which starts the process, and by the hidden command `shoal stage-job` in that process. A job's
folder is named by its key. Its `job.json` is written before the work, and all that the process reads beside the inputs:
a recipe that changes meanwhile changes nothing. It does not know what was done before, or what follows.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.config import RunConfig, SftConfig
from shoal.config.stages import EvalStage, MergeStage, RejectStage, Stage, kind_of, to_settings
from shoal.envs.load import env_digest, is_file
from shoal.errors import EXIT_DONE, ConfigError, ShoalError, StateError
from shoal.folder import RunFolder, write_atomically
from shoal.protocol.hubref import is_hub
from shoal.protocol.wire import digest, to_json
from shoal.tree import from_tree, to_tree

FORMAT = 1
"""Raise it when stages of the same settings would give other outputs: every stage is then done again."""

POLICY, RUN, EVALUATION, EXAMPLES = "policy", "run", "eval.json", "examples.msgpack"
"""Outputs in a job's folder."""

OUTPUTS = {
    "sft": {"policy": POLICY},
    "rl": {"policy": f"{RUN}/checkpoints/final"},
    "merge": {"policy": POLICY},
    "eval": {"evaluation": EVALUATION},
    "reject": {"examples": EXAMPLES},
}
"""What a finished job of each kind has, and where: files and folders whose digests `done.json` holds."""


class Job(msgspec.Struct, frozen=True):
    """`job.json`."""

    kind: str
    settings: dict[str, Any]
    """After overrides, with absolute paths."""
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
    """Learned from by sft, prompts and repetitions included; paid for by rl. 0: the kind has none."""
    figures: dict[str, Any] = {}
    """Of the kind."""


def job_of(stage: Stage, settings: RunConfig | SftConfig | None, beside: Path, inputs: dict[str, Input]) -> Job:
    """The job of a stage of a file in `beside`. Raises `ConfigError` if something that its recipe names is not there."""
    kind, beside = kind_of(stage), (beside / getattr(stage, "recipe", "")).parent
    tree = to_settings(stage) if isinstance(stage, MergeStage | RejectStage) else to_tree(_demanded(stage, settings))
    known, digests = dict(tree), {key: found.digest for key, found in inputs.items()}
    if "policy" in tree and not isinstance(stage, MergeStage | RejectStage):
        path = tree["policy"]["path"]
        if "policy" in inputs:
            tree["policy"] = tree["policy"] | {"path": str(inputs["policy"].place)}
        elif path and not is_hub(path):
            own = (beside / path).resolve()
            if not own.is_dir():
                raise ConfigError(f"stage {stage.name}: policy.path = {path}: no directory at {own}")
            tree["policy"], digests["policy"] = tree["policy"] | {"path": str(own)}, digest_below(own)
        if "policy" in digests:
            known["policy"] = known["policy"] | {"path": ""}
        for key in ("env", "envs"):
            if key in tree:
                tree[key], known[key] = _environments(tree[key], beside)
    if isinstance(stage, EvalStage):  # how the policy was trained does not matter here
        known = {key: known[key] for key in ("seed", "envs", "sampling", "eval")}
    identity = {"format": FORMAT, "kind": kind, "settings": known, "inputs": digests}
    places = {key: str(found.place) for key, found in inputs.items()}
    return Job(kind, tree, places, to_json(identity).decode())


def _demanded(stage: Stage, settings: RunConfig | SftConfig | None) -> RunConfig | SftConfig:
    assert settings is not None, f"a stage of kind {kind_of(stage)} has a recipe"
    plays = isinstance(settings, SftConfig) or any(settings.eval_episodes(env) for env in settings.envs)
    if isinstance(stage, EvalStage) and not plays:
        raise ConfigError(f"stage {stage.name}: eval.episodes = 0: set how many episodes are played")
    return settings


def _environments(found: Any, beside: Path) -> tuple[Any, Any]:
    """Environments of a recipe with absolute paths; and for the key, with the digest of their source instead."""
    if isinstance(found, list):
        pairs = [_environments(env, beside) for env in found]
        return [absolute for absolute, _ in pairs], [pinned for _, pinned in pairs]
    name = found["name"]
    if is_file(name):
        name = str((beside / name).resolve())
    return found | {"name": name}, found | {"name": Path(name).name, "source": env_digest(name)}


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
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- in the process of a job ---


def do(folder: Path) -> int:
    """Do the job in a folder, from the start or from where a killed process left it; returns the exit code."""
    job = msgspec.json.decode((folder / "job.json").read_bytes(), type=Job)
    done = {"sft": _sft, "rl": _rl, "eval": _eval, "merge": _merge, "reject": _reject}[job.kind](job, folder)
    if isinstance(done, int):
        return done
    write_atomically(folder / "made.json", msgspec.json.encode(done))
    return EXIT_DONE


def _sft(job: Job, folder: Path) -> Made:
    from shoal.roles import sft
    from shoal.train.chosen import read_examples

    examples = read_examples(Path(job.inputs["examples"])) if "examples" in job.inputs else None
    config = from_tree(job.settings, SftConfig, "job.json")
    return Made(tokens=sft.make(config, folder, folder / POLICY, examples))


def _rl(job: Job, folder: Path) -> Made | int:
    from shoal.envs.declared import is_repeatable
    from shoal.launch.chosen import digest_of, learned_groups
    from shoal.launch.local import launch, locked
    from shoal.policy.device import demand_device

    config, run = from_tree(job.settings, RunConfig, "job.json"), RunFolder(folder / RUN)
    for section in (config.train, config.workers, config.validators):
        demand_device(section.device)
    with locked(run.root) as lock_fd:
        run.prepare(config, folder, repeatable=is_repeatable)
        code = launch(run.root, lock_fd)
    if code != EXIT_DONE:
        return code
    summary = msgspec.json.decode(run.summary.read_bytes(), type=dict[str, Any])
    figures = {key: summary[key] for key in ("heldout", "steps", "accepted", "wall_s", "cpu_s")}
    return Made(summary["tokens"], figures | {"rollouts": digest_of(learned_groups(run))})


def _eval(job: Job, folder: Path) -> Made:
    from shoal.roles import evaluate

    config, place = from_tree(job.settings, RunConfig, "job.json"), folder / "as-run"
    RunFolder(place).prepare(config, folder)
    evaluate.for_run(place, Path(job.inputs["policy"]), 1, folder / EVALUATION, config.workers.threads)
    found = msgspec.json.decode((folder / EVALUATION).read_bytes(), type=dict[str, Any])
    return Made(figures={key: found[key] for key in ("mean", "low95", "high95", "episodes")})


def _merge(job: Job, folder: Path) -> Made:
    import shutil

    from shoal.roles import merge

    shutil.rmtree(folder / POLICY, ignore_errors=True)  # of a process that was killed
    said = merge.main(
        Path(job.inputs["policy"]), None, folder / POLICY, job.settings["dtype"], int(job.settings["threads"])
    )
    return Made(figures={"said": said})


def _reject(job: Job, folder: Path) -> Made:
    from shoal.launch.chosen import choose
    from shoal.train.chosen import write_examples

    run = RunFolder(Path(job.inputs["rollouts"]))
    expected = msgspec.json.decode(job.identity)["inputs"]["rollouts"]
    examples, counted = choose(run, job.settings, expected)
    write_examples(examples, folder / EXAMPLES)
    return Made(figures=counted)


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
