"""The whole of shoal in one file: no network, no processes, no async. Read this first.

    python recipes/one_file.py recipes/arithmetic.toml --set steps=20

It runs a run file synchronously (max_staleness = 0). The final weights are the same, byte for byte, as those of the
distributed run with the same file and seed: coordinator, workers, validators and trainer only move this loop onto
machines that do not trust each other. `tests/roles/test_run.py` and `tests/test_survival.py` check that.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shoal.errors import EXIT_USER_ERROR, StateError, fault_of_user, no_torch

try:
    import torch
except ModuleNotFoundError:
    sys.exit(f"error: {no_torch()}")

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from shoal.chat.renderer import Renderer
from shoal.config import RunConfig, difficulty_of, load_run, sampling_of
from shoal.engine.interface import Engine
from shoal.engine.open import EngineSpec, kind_for, open_engine
from shoal.env import Env
from shoal.envs.load import env_of
from shoal.envs.own_env import OwnEnv
from shoal.envs.play_continuations import continue_block
from shoal.envs.play_episodes import begin, play_block
from shoal.envs.prompt_preview import first_prompt
from shoal.envs.replay import replay_group
from shoal.launch.preflight import demand_computable
from shoal.launch.sizing import first_spec, with_preset_lr
from shoal.ledger.constants import LAW
from shoal.ledger.fault_rate import FaultsRecord, GroupOutcome
from shoal.ledger.group_advantages import teaches
from shoal.ledger.slot_draws import env_draw
from shoal.ledger.task_difficulty import Records, SolvedGroup, add_groups, change_after, solve_rate, table_after
from shoal.models.checkpoint import save_policy
from shoal.models.open_model import open_policy
from shoal.models.random_model import make_tiny
from shoal.models.value_head import begin_valued
from shoal.protocol.algorithm_config import Algorithm, narrowest_bound, needs_reference, step_credit_of, vine_of
from shoal.protocol.continuations import branches, whole_author
from shoal.protocol.encoding import digest, to_msgpack
from shoal.protocol.messages import BatchGroup, Block, Faults, Group, Sampling, Slot, StepRewards
from shoal.protocol.reward_rules import fault_indices, faults_of, without_faults
from shoal.protocol.rollout_validation import unbegun_remedy
from shoal.protocol.seed_chain import SecretChain, slot_seed
from shoal.protocol.task_draws import DrawTable, draw_task
from shoal.protocol.tolerances import claims_bend_ratios
from shoal.run_folder import RunFolder
from shoal.terminal import printable
from shoal.train.batch_filter import select
from shoal.train.checkpoint import States
from shoal.train.critic import critic_of
from shoal.train.frozen_models import KLReference, judge_of, reference_of
from shoal.train.learner import Learner
from shoal.train.logprobs import loaded_anew, with_own_denominators
from shoal.train.loss import Objective
from shoal.train.master_weights import module_dtype
from shoal.train.rows import TrainingRow, overlong_share, rows_of_group
from shoal.weights.manifest import weights_root


def main() -> None:
    """Run a run file and print one line for each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="a run file (.toml)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    parser.add_argument("--out", type=Path, default=None, help="where the checkpoint goes (default: a new folder)")
    asked = parser.parse_args()
    try:
        config = load_run(asked.recipe, ["rollouts.max_staleness=0", "verify.audit_rate=1.0", *asked.set])
        out = asked.out or Path(tempfile.mkdtemp(prefix="shoal-"))
        print("weights", train(config, out, asked.recipe.parent, say=print))
    except Exception as error:
        fault = fault_of_user(error)
        if fault is None:
            raise
        print(f"error: {printable(' '.join(str(fault).split()))}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


def train(config: RunConfig, out: Path, recipe_dir: Path, say: Callable[[str], None] = lambda line: None) -> str:
    """Run all steps in `out`. Returns the weights root of the last version."""
    for metrics in steps(config, out, recipe_dir, say=say):
        say(f"step {metrics['step']} reward {metrics['reward_all_mean']:.3f} loss {metrics.get('loss', 0.0):+.4f}")
    return weights_root(out / "published")


def steps(
    config: RunConfig,
    out: Path,
    recipe_dir: Path,
    own: Mapping[str, Env] | None = None,
    loss: Objective | None = None,
    states: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Take all steps in `out`, and give the metrics of each. The policy is in `out/published`.

    `Run.train_here` gives environments of its own, by label, and a loss of its own. With `states`, the trainer's state is
    kept there after each step, and the newest one there is gone on from. `say` gets the first prompt of each environment.
    Raises `StateError` without signal.
    """
    torch.set_num_threads(1)
    folder = RunFolder(out)
    folder.prepare(config, recipe_dir)  # the run's secret
    config = with_preset_lr(folder.config(), first_spec(folder, folder.config()))
    folder.keep_found(config)
    sampling = sampling_of(config)
    envs = dict(own) if own is not None else {spec.label: env_of(spec) for spec in config.envs}
    links = SecretChain(folder.secret(), "chain/slots").links()
    per_block = config.rollouts.block_rollouts // config.rollouts.group_size
    first_table = [
        env_draw(spec.label, spec.weight, envs[spec.label].num_tasks, folder.task_list(spec)) for spec in config.envs
    ]
    table: DrawTable = first_table
    difficulty, records = difficulty_of(config), Records()
    failing, lowest = FaultsRecord(), {env.label for env in config.envs if env.on_fault}

    start = first_policy(config, folder)
    demand_computable(start, config)
    load = partial(open_policy, start, module_dtype(config.train), config.policy.implementation)
    model = load()
    # A critic begins as a copy of it with another head, and learns beside it.
    critic = critic_of(config.train, partial(begin_valued, start, module_dtype(config.train)))
    learner = Learner(model, config.train, config.sampling, steps=config.steps, critic=critic, objective=loss)
    # A penalty on leaving the first policy needs that policy, as it is now.
    refer: KLReference | None = None
    if needs_reference(config.train.algorithm):
        refer = reference_of(model, load, sampling.temperature, config.train.microbatch_tokens)
    # A teacher or a reward model decides what rollouts are worth, if the run file names one.
    judge = judge_of(config, start)
    # What an interrupted call had learned.
    kept = States(states, learner) if states is not None else None
    begun = (kept.load() if kept else None) or 0
    published = out / "published"
    save_policy(model, published, config.policy.dtype, tokenizer_from=start)
    renderer = Renderer.from_directory(start)
    for label, env in envs.items() if say is not None else ():
        say(first_prompt(label, env, renderer, sampling))
    engine = open_engine(EngineSpec(kind_for(start), dtype=config.sampled_dtype, threads=1, noise=sampling.noise))

    for version in range(begun, config.steps):
        # Workers sample with the published bytes. The secret chain decides the tasks and the seeds.
        engine.load(published, version)
        root = weights_root(published)
        members: list[BatchGroup] = []
        bodies: list[bytes] = []
        solved: list[SolvedGroup] = []
        earned: list[float] = []
        signal: list[bool] = []
        block = flat = 0
        unbegun, why_unbegun = 0, ""
        while len(members) < config.rollouts.batch_groups:
            slots = slots_of_block(folder.run_id(), version, root, links[version + 1], block, per_block, table)
            groups = play_block(engine, renderer, envs, slots, config.rollouts.group_size, sampling)
            # Validators recompute every reward; a group that teaches the run's algorithm nothing is left out.
            made: list[BatchGroup] = []
            for group in groups:
                if not group.rollouts:  # its task cannot begin: the slot is void, and counts as flat
                    why = begin(envs[group.env], renderer, group.task, sampling)[1]
                    flat, unbegun, why_unbegun = flat + 1, unbegun + 1, f"{group.env}, task {group.task}: {why}"
                    continue
                rewards, by_step, faults = recomputed(group, envs, renderer, sampling, config.train.algorithm)
                failing.count(group.env, GroupOutcome.of(rewards, faults, group.env in lowest), LAW.fault_window)
                # A rollout on which its environment fails counts in nothing.
                failed = fault_indices(faults)
                left = without_faults(rewards, failed)
                earned += left
                flat += 1
                if left and difficulty is not None and len(members) + len(made) < config.rollouts.batch_groups:
                    rate = solve_rate(left, difficulty.solved[group.env])
                    solved.append(SolvedGroup(group.env, group.task, rate))
                signal.append(teaches(rewards, config.train.algorithm, by_step, failed))
                if signal[-1]:
                    flat = unbegun = 0
                    body = to_msgpack(group)
                    made.append(
                        BatchGroup(version, group.slot, "", 0, digest(body), rewards, steps=by_step, faults=failed)
                    )
                    bodies.append(body)
            # Where credit comes from continuations, workers play on from within the groups of a batch.
            vine = vine_of(config.train.algorithm)
            members += (
                with_continuations(made, groups, slots, engine, renderer, envs, config, failing) if vine else made
            )
            block += 1
            if cause := failing.cause(LAW):
                raise StateError(
                    f"{cause}. Correct the environment, or its reward_bounds if a score is outside; where an action makes "
                    'it raise, set on_fault = "lowest"'
                )
            if 0 < config.rollouts.max_flat_groups <= flat:
                equal = "within each, all rewards are equal" if unbegun < flat else ""
                never = f"the tasks of {unbegun} of them can never begin; the last: {why_unbegun}" if unbegun else ""
                why = "; ".join(filter(None, (equal, never)))
                change = "Make the tasks easier or harder, let the score tell more apart"
                if unbegun > flat / 2:
                    change = unbegun_remedy(why_unbegun)
                raise StateError(
                    f"the last {flat} groups have no signal: {why}. {change}, or raise rollouts.max_flat_groups"
                )
        # The batch is the first groups with signal by slot number. Who made them, and when, makes no difference.
        members, bodies = members[: config.rollouts.batch_groups], bodies[: config.rollouts.batch_groups]
        # With a curriculum, all groups up to the last of the batch decide what the next version's tasks are drawn from.
        if difficulty is not None:
            change = change_after(solved, first_table, records, difficulty)
            add_groups(solved, change, first_table, records, difficulty)
            table = table_after(first_table, records, difficulty)

        # The trainer: (version v, batch) -> version v + 1.
        rows = learned_rows(config, members, bodies, version, published, model.spec.vocab_size)
        overlong = overlong_share([rows])
        if refer is not None:
            rows = refer(rows)
        if judge is not None and rows:
            rows, _ = judge(rows, learner.logprobs)
        metrics = learner.step(rows, version)
        save_policy(model, published, config.policy.dtype, tokenizer_from=start)
        if kept is not None:
            kept.save(version + 1)
        shares = {"zero_signal_share": 1 - sum(signal) / len(signal), "overlong_share": overlong}
        yield {"step": version, "reward_all_mean": sum(earned) / max(1, len(earned)), **shares, **metrics}


def first_policy(config: RunConfig, folder: RunFolder) -> Path:
    """The directory of version 0: the run file's policy, or a tiny one made from the seed."""
    start = Path(config.policy.path) if config.policy.path else folder.policy
    if not start.exists():
        make_tiny(config.policy.tiny, start, folder.weights_seed(config), config.policy.kept_dtype)
    return start


def with_continuations(
    made: list[BatchGroup], groups: list[Group], slots: Block, engine: Engine, renderer: Renderer, envs: dict[str, Env],
    config: RunConfig, failing: FaultsRecord,
) -> list[BatchGroup]:  # fmt: skip
    """Groups of a block, made by the policy, with what their continuations earned. Their faults count in `failing`."""
    sampling, vine = sampling_of(config), vine_of(config.train.algorithm)
    assert vine is not None, "only runs with continuations ask"
    parents = [group if any(group.slot == member.slot for member in made) else None for group in groups]
    continued_slots, at_once = list(zip(slots.slots, parents, strict=True)), config.rollouts.block_rollouts
    found = continue_block(engine, renderer, envs, continued_slots, vine, at_once, sampling)
    earned = {
        group.slot: continued(group, parent, envs, renderer, sampling, config.train.algorithm)
        for group, parent in zip(found, parents, strict=True)
        if parent is not None
    }
    for group in found:
        if group.slot in earned:
            rewards, faults = earned[group.slot]
            lowest = any(env.on_fault and env.label == group.env for env in config.envs)
            failing.count(group.env, GroupOutcome.of(rewards, faults, lowest), LAW.fault_window)
    return [
        replace(
            member, continuations=earned[member.slot][0], faulted_continuations=fault_indices(earned[member.slot][1])
        )
        for member in made
    ]


def learned_rows(
    config: RunConfig, members: list[BatchGroup], bodies: list[bytes], version: int, published: Path, vocabulary: int
) -> list[TrainingRow]:
    """What the trainer learns from a batch. It computes log-probs itself where workers could bend ratios by theirs."""
    algorithm, sampling = config.train.algorithm, sampling_of(config)
    rows_G = [
        rows_of_group(
            member, body, algorithm=algorithm, vocabulary=vocabulary,
            max_tokens=sampling.max_tokens, max_rollout_tokens=sampling.max_rollout_tokens,
        )
        for member, body in zip(members, bodies, strict=True)
    ]  # fmt: skip
    rows = select(members, rows_G, algorithm=algorithm, version=version, max_staleness=0).rows
    if not claims_bend_ratios(config.verify.bounds, config.sampled_dtype, narrowest_bound(algorithm)):
        return rows
    logprobs_at = loaded_anew(
        config.sampled_dtype, sampling.temperature, config.train.microbatch_tokens, module_dtype(config.train)
    )
    return with_own_denominators(rows, {version: published}, logprobs_at)


def slots_of_block(
    run: str, version: int, root: str, link: bytes, index: int, per_block: int, table: DrawTable
) -> Block:
    """The slots of a block, as the coordinator would lease them."""
    slots = []
    for number in range(index * per_block, (index + 1) * per_block):
        seed = slot_seed(run, version, root, link, number)
        slots.append(Slot(number, seed.hex(), *draw_task(seed, table)))
    return Block(index, tuple(slots))


def recomputed(
    group: Group, envs: dict[str, Env], renderer: Renderer, sampling: Sampling, algorithm: Algorithm
) -> tuple[tuple[float, ...], tuple[StepRewards, ...], Faults | UnsetType]:
    """Rewards of a group from its tokens alone, by replaying the environment with the actions; those of turns or steps, if
    the algorithm credits them; and where the environment failed."""
    env, credited = envs[group.env], step_credit_of(algorithm)
    found = replay_group(env, renderer, env.task(group.task), group.rollouts, sampling)
    if isinstance(env, OwnEnv):
        env.demand_sound(found)  # elsewhere, an environment's fault costs its rollout the reward, and the run goes on
    by_step = tuple(one.steps(credited) for one in found) if credited else ()
    return tuple(one.reward for one in found), by_step, faults_of(found)


def continued(
    group: Group, parent: Group, envs: dict[str, Env], renderer: Renderer, sampling: Sampling, algorithm: Algorithm
) -> tuple[tuple[float, ...], Faults | UnsetType]:
    """Rewards of continuations, and where the environment failed: with the parent's authors in front, they are rollouts
    like any other."""
    vine = vine_of(algorithm)
    assert vine is not None, "only runs with continuations ask"
    whole = [
        replace(
            rollout,
            author=whole_author(
                parent.rollouts[branch.rollout], rollout.author_T(), branch.position, renderer.stop_ids
            ).tobytes(),
        )
        for rollout, branch in zip(group.rollouts, branches(parent, vine), strict=True)
    ]
    if not whole:
        return (), UNSET
    rewards, _, faults = recomputed(replace(group, rollouts=tuple(whole)), envs, renderer, sampling, algorithm)
    return rewards, faults


if __name__ == "__main__":
    sys.exit(main())
