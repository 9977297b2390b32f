"""Rollouts of a run's folder as text: of its newest group, now and then, and of groups that taught nothing, with the cause.

It reads the folder also while the coordinator writes to it, and asks no other process. It shows accepted rollouts.
The environment's answers are computed here, not taken from the worker. A folder may be a stranger's: only the launcher of
the run executes environment files that it names.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.chat.renderer import Renderer
from shoal.env import Env
from shoal.envs.evaluate import as_text, transcript_of
from shoal.envs.interface import task_of
from shoal.envs.load import is_file, load_run_envs
from shoal.envs.replay import retell
from shoal.errors import ShoalError, StateError
from shoal.ledger.batches import GroupAccepted
from shoal.ledger.remedies import IN_A_NEW_RUN
from shoal.ledger.run_events import RunCreated
from shoal.ledger.verdicts import Decision, VerdictGiven
from shoal.monitors.learning import BY_LIMIT, cause_or_collapse
from shoal.net.blobs import path_of
from shoal.protocol import messages as t
from shoal.protocol.constants import COMPLETIONS
from shoal.protocol.continuations import is_continued_slot
from shoal.protocol.encoding import WireError, digest, from_msgpack
from shoal.protocol.messages import ENVIRONMENT, Group, Rollout
from shoal.run_folder import RunFolder
from shoal.runs.log_follower import LogFollower, creation_of
from shoal.runs.rollouts import conversation
from shoal.runs.run_status import SampleConversation

log = logging.getLogger(__name__)

LOOKED_BACK = 2000
"""Events in which the newest accepted group is looked for."""

SAMPLE_EVERY_S = 20.0
"""Between two conversations."""

MOST_CHARS = 4000
"""Of one turn of a conversation."""

SPEAKERS = {"user": "environment", "system": "rules"}

UNDECODED = "as its tokens say: the environment is its host's file, which a watcher does not run"


class Samples:
    """The newest conversation of a run, looked for in a thread of its own now and then."""

    def __init__(self, newest: "NewestSample", every_s: float = SAMPLE_EVERY_S) -> None:
        self._newest, self._every_s = newest, every_s
        self._sample: SampleConversation | None = None
        self._thread: threading.Thread | None = None
        self._looked_at = -every_s

    def latest(self) -> SampleConversation | None:
        """What was found last; it waits for nothing."""
        now, found = time.monotonic(), self._sample
        if now - self._looked_at >= self._every_s and (self._thread is None or not self._thread.is_alive()):
            self._looked_at, self._thread = now, threading.Thread(target=self._look, name="samples", daemon=True)
            self._thread.start()
        return found

    def _look(self) -> None:
        try:
            self._sample = self._newest.read() or self._sample
        except Exception as error:  # noqa: BLE001  an environment may raise anything, and a view needs no conversation
            log.debug("no rollout can be shown: %s", error)


class NewestSample:
    """The newest accepted group of a run that goes on, one rollout of it as a conversation."""

    def __init__(self, folder: RunFolder, own_files: bool = False) -> None:
        """`own_files` executes environment files that the run names: the code of its host."""
        self._folder, self._own_files = folder, own_files
        self._log = LogFollower(folder.log)
        self._created: RunCreated | None = None
        self._accepted: GroupAccepted | None = None
        self._envs: Mapping[str, Env] = {}
        self._renderer: Renderer | None = None

    def read(self) -> SampleConversation | None:
        """The first rollout of the newest group whose body is still here; None if there is no new one.

        Raises `ShoalError` if it cannot be read.
        """
        if self._created is None:
            created = creation_of(self._folder.log)
            # guard: watched-files-stay-out
            specs = [spec for spec in created.envs if self._own_files or not is_file(spec.name)]
            self._envs = load_run_envs(specs, self._own_files)
            self._renderer = Renderer.from_directory(self._folder.policy, created.sampling.stops)
            self._log.skip_to_newest(but=LOOKED_BACK)
            self._created = created  # last: a run that is starting has no policy yet
        accepted: GroupAccepted | None = None
        for entry in self._log.events():
            accepted = entry.body if isinstance(entry.body, GroupAccepted) else accepted
        if accepted is None or self._renderer is None:
            return None
        group = group_of(self._folder, accepted)
        sampling = self._created.sampling
        if not group.rollouts:  # a validator that lies may have accepted anything
            return None
        if group.env not in self._envs:
            turns = conversation(sampling, group.rollouts[0], self._renderer)
            title = f"one rollout of version {accepted.version} · {group.env} · task {group.task} · {UNDECODED}"
            return sample_of(title, turns) if turns else None
        env = self._envs[group.env]
        talk = retell(env, self._renderer, task_of(env, group.task), group.rollouts[0], sampling)
        if talk is None:
            return None
        ending = f"reward {talk.reward:.2f} · ended by {talk.ending}"
        title = f"one rollout of version {accepted.version} · {group.env} · task {group.task} · {ending}"
        return sample_of(title, talk.texts)


def sample_of(title: str, texts: Iterable[tuple[str, str]]) -> SampleConversation:
    """A conversation, cut to what may be shown of it."""
    return SampleConversation(title, tuple((SPEAKERS.get(who, who), text[:MOST_CHARS]) for who, text in texts))


def group_of(folder: RunFolder, accepted: GroupAccepted) -> t.Group:
    """The bytes that were accepted, as the coordinator keeps them."""
    name = accepted.submission
    try:
        body = from_msgpack(path_of(folder.blobs, name).read_bytes(), t.Submission)
        data = body.groups[accepted.index]
        if digest(data) != accepted.digest:
            raise StateError(f"submission {name[:12]} is damaged on disk")
        return from_msgpack(data, t.Group)
    except OSError:
        raise StateError(f"submission {name[:12]} is not kept any more") from None
    except (WireError, IndexError) as error:
        raise ShoalError(f"submission {name[:12]} cannot be read: {error}") from None


# --- Groups that taught nothing: why, and rollouts of them ---


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
