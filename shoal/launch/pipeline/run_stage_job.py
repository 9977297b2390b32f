"""The work of a stage, in a process of its own: each kind reads its job and leaves its outputs in the job's folder.

A job may have been begun before by a process that was killed. Heavy modules are imported by the kind that needs them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.config import RunConfig, SftConfig
from shoal.errors import EXIT_DONE, StateError, cause_of
from shoal.launch.pipeline.job_inputs import EVALUATION, EXAMPLES, POLICY, RATES, REWARD_MODEL, RUN, TASKS, Job, Made
from shoal.run_folder import RunFolder, write_atomically
from shoal.typed_toml import from_tree

if TYPE_CHECKING:
    from shoal.config.stages import DpoStage, RewardModelStage
    from shoal.train.preference_training import PairSettings, TokenPair


def do(folder: Path) -> int:
    """Do the job in a folder, from the start or from where a killed process left it; returns the exit code."""
    file = folder / "job.json"
    try:
        job = msgspec.json.decode(file.read_bytes(), type=Job)
    except (OSError, msgspec.MsgspecError) as error:
        raise StateError(f"{file} is no job of a stage: {cause_of(error)}. `shoal stages` writes it anew") from None
    work: dict[str, Callable[[Job, Path], Made | int]] = {
        "sft": _sft, "rl": _rl, "filter": _filter, "eval": _eval, "merge": _merge, "reject": _reject,
        "dpo": _preferences, "reward_model": _preferences,
    }  # fmt: skip
    done = work[job.kind](job, folder)
    if isinstance(done, int):
        return done
    write_atomically(folder / "made.json", msgspec.json.encode(done))
    return EXIT_DONE


def _sft(job: Job, folder: Path) -> Made:
    from shoal.jobs import sft
    from shoal.train.dataset_files import read_examples

    examples = read_examples(Path(job.inputs["examples"])) if "examples" in job.inputs else None
    config = from_tree(job.settings, SftConfig, "job.json")
    return Made(tokens=sft.make(config, folder, folder / POLICY, examples))


def _rl(job: Job, folder: Path) -> Made | int:
    from shoal.envs.load import is_repeatable
    from shoal.launch.pipeline.rollout_selection import digest_of, learned_groups
    from shoal.launch.pipeline.unattended_run import launch_unattended
    from shoal.launch.run_lock import locked
    from shoal.models.device import demand_device

    config, run = from_tree(job.settings, RunConfig, "job.json"), RunFolder(folder / RUN)
    for section in (config.train, config.workers, config.validators):
        demand_device(section.device)
    with locked(run.root) as lock_fd:
        run.prepare(config, folder, repeatable=is_repeatable)
        code = launch_unattended(run.root, lock_fd)
    if code != EXIT_DONE:
        return code
    summary = msgspec.json.decode(run.summary.read_bytes(), type=dict[str, Any])
    figures = {key: summary[key] for key in ("heldout", "steps", "accepted", "wall_s", "cpu_s")}
    return Made(summary["tokens"], figures | {"rollouts": digest_of(learned_groups(run))})


def _filter(job: Job, folder: Path) -> Made:
    from shoal.config.stages import FilterStage
    from shoal.jobs import solve_rates
    from shoal.protocol.encoding import to_json

    config, asked = from_tree(job.settings, RunConfig, "job.json"), FilterStage(name="", recipe="", **job.own)
    measured = solve_rates.measure(config, Path(config.policy.path), asked.env, asked.rollouts, asked.most)
    kept = measured.between(asked.low, asked.high)
    write_atomically(folder / RATES, msgspec.json.format(msgspec.json.encode(measured.rates)))
    write_atomically(folder / TASKS, to_json(kept))
    return Made(measured.tokens, measured.figures() | {"kept": len(kept.tasks), "tasks_digest": kept.digest})


def _eval(job: Job, folder: Path) -> Made:
    from shoal.config.role_options import EvalOptions
    from shoal.jobs import evaluate

    config, place = from_tree(job.settings, RunConfig, "job.json"), folder / "as-run"
    RunFolder(place).prepare(config, folder)
    policy, out = job.inputs["policy"], str(folder / EVALUATION)
    evaluate.for_run(place, EvalOptions(checkpoint=policy, out=out, threads=config.workers.threads))
    found = msgspec.json.decode((folder / EVALUATION).read_bytes(), type=dict[str, Any])
    return Made(figures={key: found[key] for key in ("mean", "low95", "high95", "episodes", "faults")})


def _merge(job: Job, folder: Path) -> Made:
    import shutil

    from shoal.jobs import merge_adapter

    shutil.rmtree(folder / POLICY, ignore_errors=True)  # of a process that was killed
    said = merge_adapter.main(
        Path(job.inputs["policy"]), None, folder / POLICY, job.settings["dtype"], int(job.settings["threads"])
    )
    return Made(figures={"said": said})


def _reject(job: Job, folder: Path) -> Made:
    from shoal.launch.pipeline.rollout_selection import choose
    from shoal.train.dataset_files import write_examples

    run = RunFolder(Path(job.inputs["rollouts"]))
    expected = msgspec.json.decode(job.identity)["inputs"]["rollouts"]
    examples, counted = choose(run, job.settings, expected)
    write_examples(examples, folder / EXAMPLES)
    return Made(figures=counted)


def _preferences(job: Job, folder: Path) -> Made:
    from shoal.config.stages import DpoStage, RewardModelStage
    from shoal.jobs import preferences

    start, kind = Path(job.inputs["policy"]), DpoStage if job.kind == "dpo" else RewardModelStage
    asked = kind(name="", policy="", **job.settings)
    pairs, settings = _pairs(job, asked, start)
    how = asked.publish_dtype, asked.threads
    if isinstance(asked, DpoStage):
        made = preferences.train_dpo(start, pairs, asked.beta, settings, folder / POLICY, *how)
    else:
        made = preferences.train_reward_model(start, pairs, settings, folder / REWARD_MODEL, *how)
    return Made(made.tokens, made.figures)


def _pairs(job: Job, asked: "DpoStage | RewardModelStage", start: Path) -> tuple["list[TokenPair]", "PairSettings"]:
    """The pairs that a stage learns from, and how."""
    from shoal.jobs import preferences
    from shoal.launch.pipeline.rollout_selection import choose_pairs
    from shoal.train.preference_training import PairSettings

    if asked.pairs:
        pairs = preferences.read_pairs(Path(asked.pairs), start, asked.max_tokens)
    else:
        expected = msgspec.json.decode(job.identity)["inputs"]["rollouts"]
        examples = choose_pairs(RunFolder(Path(job.inputs["rollouts"])), asked.last_steps, expected)
        pairs = preferences.pairs_of_examples(examples, start, asked.max_tokens)
    settings = PairSettings(asked.steps, asked.batch, asked.lr, asked.warmup_steps, asked.max_grad_norm, asked.seed)
    return pairs, settings
