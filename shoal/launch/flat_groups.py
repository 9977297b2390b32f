"""What the log of a run has of groups that taught nothing, for its host: two rollouts without signal as text, whether most
of them were cut short or failed, and why a submission was refused.

It does not know why the run is paused, and decides nothing.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.chat.renderer import Renderer
from shoal.envs.evaluate import as_text, transcript_of
from shoal.envs.interface import task_of
from shoal.envs.load import load_run_envs
from shoal.envs.replay import retell
from shoal.errors import ShoalError
from shoal.ledger.batches import GroupAccepted
from shoal.ledger.hints import IN_A_NEW_RUN
from shoal.ledger.log.sqlite_store import creation_of
from shoal.ledger.run import RunCreated
from shoal.ledger.verdicts import Decision, VerdictGiven
from shoal.monitors.no_signal import BY_LIMIT, cause_or_collapse
from shoal.protocol.branching import is_continued_slot
from shoal.protocol.constants import COMPLETIONS
from shoal.protocol.messages import ENVIRONMENT, Group, Rollout
from shoal.run_folder import RunFolder
from shoal.runs.conversation import LOOKED_BACK, group_of
from shoal.runs.log import LogFollower

SHOWN = 2
"""Number of groups; one rollout of each is shown."""

COUNTED = 8
"""Number of groups whose endings are counted."""


def flat_samples(folder: RunFolder) -> list[str]:
    """The first rollout of each of the newest SHOWN accepted groups without signal.

    Raises `ShoalError` if they cannot be read.
    """
    created, flat = _read_log(folder, SHOWN)
    envs = load_run_envs(created.envs, own_files=True)
    renderer = Renderer.from_directory(folder.policy, created.sampling.stops)
    samples = []
    for accepted in flat:
        group = group_of(folder, accepted)
        if group.env in envs and group.rollouts:  # a validator that lies may have accepted anything
            env = envs[group.env]
            talk = retell(env, renderer, task_of(env, group.task), group.rollouts[0], created.sampling)
            samples += [as_text(transcript_of(talk))] if talk is not None else []
    return samples


def why_paused(folder: RunFolder, lines: Sequence[Mapping[str, Any]], flat_reward: float) -> str:
    """As `why_flat`; for a run whose rewards fell, by the lines of its metrics, that."""
    if not (why := why_flat(folder)):
        return ""
    difficulty = folder.config().difficulty
    return cause_or_collapse(why, lines, flat_reward, difficulty.curriculum or difficulty.pools)


def why_flat(folder: RunFolder) -> str:
    """That a token limit or errors ended most rollouts of the newest accepted groups without signal, unsolved, and what to
    do, as a sentence without its stop; empty if neither did, or if they cannot be read."""
    try:
        solved = {env.label: env.solved for env in folder.config().envs}
        created, flat = _read_log(folder, COUNTED)
    except ShoalError:
        return ""
    rollouts, ended = 0, dict[str, list[tuple[Group, Rollout]]]()
    for accepted in flat:
        try:
            group = group_of(folder, accepted)
        except ShoalError:
            continue
        rollouts += len(group.rollouts)
        for rollout, reward in zip(group.rollouts, accepted.rewards, strict=False):
            if reward < solved.get(group.env, 1.0):
                ended.setdefault(rollout.ending, []).append((group, rollout))
    cut, failed = ended.get("length", []), ended.get("error", [])
    of_them = f"of the {rollouts} rollouts of the newest groups without signal"
    if len(cut) > rollouts / 2:
        [(limit, _)] = Counter(_limit_of(created, *one) for one in cut).most_common(1)
        change = f"raise {limit} if answers need more, or take a cold start (`shoal sft`) if the policy never ends them"
        return f"{BY_LIMIT} {len(cut)} {of_them}: {change}{IN_A_NEW_RUN}"
    if len(failed) > rollouts / 2:
        role = "stage" if any(env.kind == COMPLETIONS for env in created.envs) else "worker"
        where = f"{folder.logs}/{role}*.log, or the log of the worker's machine, has each as environment_error"
        return f"Errors of the environment ended {len(failed)} {of_them}: correct the environment; {where}"
    return ""


def newest_refusal(log: Path) -> tuple[int, str]:
    """How many submissions were refused, and the newest reason for a group. Raises `ShoalError`."""
    submissions, detail = 0, ""
    for entry in LogFollower(log).events():
        if isinstance(body := entry.body, VerdictGiven):
            detail = next((group.detail for group in body.groups[::-1] if group.check and group.detail), detail)
        elif isinstance(body, Decision) and set(body.refused) - set(body.disputed):
            submissions += 1
    return submissions, detail


def _limit_of(created: RunCreated, group: Group, rollout: Rollout) -> str:
    """The key and value of the limit that ended a rollout: that of the turn, if its last turn fills it."""
    spec, sampling = next((env for env in created.envs if env.label == group.env), None), created.sampling

    def named(name: str) -> tuple[str, int]:
        own, of_run = getattr(spec, name, 0), getattr(sampling, name)
        return ("envs", own) if 0 < own < of_run else ("sampling", of_run)

    turn, name = len(rollout.author) - 1 - rollout.author.rfind(ENVIRONMENT), "max_tokens"
    if turn >= named("max_turn_tokens")[1]:
        name = "max_turn_tokens"
    elif 0 < sampling.max_rollout_tokens <= len(rollout.author):
        name = "max_rollout_tokens"
    section, value = named(name)
    return f"{section}.{name} = {value}"


def _read_log(folder: RunFolder, most: int) -> tuple[RunCreated, deque[GroupAccepted]]:
    """The first event, and the newest groups without signal. Raises `ShoalError`."""
    created, log = creation_of(folder.log), LogFollower(folder.log)
    log.skip_to_newest(but=LOOKED_BACK)
    groups, size = (e.body for e in log.events() if isinstance(e.body, GroupAccepted)), created.rules.block_groups
    return created, deque((one for one in groups if not (one.signal or is_continued_slot(one.slot, size))), most)
