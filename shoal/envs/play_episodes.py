"""Play tasks with an engine: many episodes in lockstep, with one engine call for each turn.

It connects environment, renderer and engine. `play_scripted` plays by the same rules with a scripted player, for checks
and for the supervised cold start.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal.chat.renderer import Renderer
from shoal.engine.interface import Engine, EngineRequest
from shoal.env import Env, Player, Task
from shoal.envs.concurrent_episodes import together
from shoal.envs.episode import Calling
from shoal.envs.interface import label_of, task_of
from shoal.envs.rollout_rules import Conversation, begins_fault
from shoal.errors import Overreach, ShoalError, Undecided
from shoal.protocol.messages import Block, Group, Rollout, Sampling
from shoal.protocol.rollout_validation import no_room
from shoal.protocol.seed_chain import row_seed, sample_seed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeAttempt:
    """One attempt at a task, before it is played."""

    env: Env
    task: Task
    seed: bytes
    """Sample seed, 32 bytes. It drives only the sampling noise."""


class NoTask(NamedTuple):
    """In the place of a task that the environment failed to give."""

    name: str
    fault: str

    def __str__(self) -> str:
        return self.name


def play_block(
    engine: Engine, renderer: Renderer, envs: Mapping[str, Env], block: Block, group_size: int, sampling: Sampling
) -> list[Group]:
    """Fill the slots of a block, with all rollouts in one batch. Returns groups in the order of the slots.

    A task that cannot begin gives a group without rollouts. Validators find that it cannot, too, and the slot is void.
    """
    episodes: list[EpisodeAttempt] = []
    of_slot: dict[int, range] = {}
    for slot in block.slots:
        if slot.env not in envs:
            raise ShoalError(
                f"slot {slot.slot} asks for environment {slot.env}, which is not loaded ({', '.join(sorted(envs))[:200]})"
            )
        env, seed, first = envs[slot.env], bytes.fromhex(slot.seed), len(episodes)
        opened, why = begin(env, renderer, slot.task, sampling)
        if opened is None:
            report_unbegun(slot.env, slot.task, why)
        else:
            episodes += [EpisodeAttempt(env, opened.task, sample_seed(seed, i)) for i in range(group_size)]
        of_slot[slot.slot] = range(first, len(episodes))
    rollouts = play(engine, renderer, episodes, sampling)
    return [
        Group(slot.slot, slot.task, slot.env, tuple(rollouts[i] for i in of_slot[slot.slot])) for slot in block.slots
    ]


def begin(env: Env, renderer: Renderer, index: int, sampling: Sampling) -> tuple[Conversation | None, str]:
    """The opening of the task with this index; None if no rollout of it can begin, and why."""
    begins = ""
    try:
        task = task_of(env, index)
        begins = begins_fault(env, task)
        opened = Conversation(env, renderer, task, sampling)
    except Overreach:
        raise  # guard: overreach-is-not-void
    except ShoalError as fault:
        return None, str(fault).removeprefix(begins)
    return (opened, "") if opened.ending is None else (None, why_task_cannot_begin(opened, sampling))


def why_task_cannot_begin(opened: Conversation, sampling: Sampling) -> str:
    """Why the policy writes nothing in a conversation that has ended already."""
    room = no_room(opened.episode.facts.max_tokens, sampling, len(opened.tokens))
    return room or f"it ends by {opened.ending} before the policy writes"


MAX_REPORTED = 1000
"""Tasks that can never begin, of which each is reported once; of more, some are reported again."""

_reported: dict[tuple[str, int], None] = {}


def report_unbegun(label: str, task: int, why: str) -> None:
    """Log that a task can never begin, once for each task."""
    if (label, task) in _reported:  # guard: unbegun-is-reported-once
        return
    if len(_reported) >= MAX_REPORTED:
        del _reported[next(iter(_reported))]
    _reported[label, task] = None
    log.warning("task cannot begin env=%s task=%d reason=%s", label, task, why)


def play(engine: Engine, renderer: Renderer, episodes: Sequence[EpisodeAttempt], sampling: Sampling) -> list[Rollout]:
    """Play episodes to their end. Returns rollouts in the same order."""
    return [talk.rollout(engine.version) for talk in converse(engine, renderer, episodes, sampling)]


def converse(
    engine: Engine,
    renderer: Renderer,
    episodes: Sequence[EpisodeAttempt],
    sampling: Sampling,
    begun: Sequence[tuple[Conversation, list[int]]] = (),
    faults_end: bool = False,
) -> list[Conversation]:
    """Play episodes to their end. Returns whole conversations, with rewards and texts. `begun` has the conversation of each
    episode, and the tokens of its turn that are there already; without it, all begin anew.

    Each turn is one `extend` over the unfinished episodes in their order, so the same episodes always give the engine
    the same batches. Each episode has one row in a batch. The engine forgets a row that the next turn does not continue,
    so it never remembers more rows than there are episodes. Environments with processes of their own answer the turns
    beside each other. With `faults_end`, an episode that cannot begin, or of which a call is undecided, ends by that alone;
    otherwise it is raised.
    """
    open_one = _opening_or_fault if faults_end else Conversation.opening
    opening = (open_one(e.env, renderer, e.task, sampling) for e in episodes)
    talks = [talk for talk, _ in begun] or together([*opening])
    heads = [head for _, head in begun] or [[] for _ in episodes]
    open_now = [i for i, talk in enumerate(talks) if talk.ending is None]
    names: list[str] = []
    try:
        while open_now:
            names = [_name(i, episodes[i], talks[i]) for i in open_now]
            requests = [
                EngineRequest(
                    name, [*talks[i].context, *heads[i]], row_seed(episodes[i].seed, talks[i].row),
                    talks[i].room - len(heads[i]), renderer.stop_ids,
                )
                for i, name in zip(open_now, names, strict=True)
            ]  # fmt: skip
            turns = engine.extend(requests, sampling.temperature)
            written = [[*heads[i], *turn.token_ids] for i, turn in zip(open_now, turns, strict=True)]
            actions = renderer.decode_all(written)
            together([
                (_writing_or_fault if faults_end else Conversation.writing)(talks[i], token_ids, turn.logprobs, action)
                for i, token_ids, turn, action in zip(open_now, written, turns, actions, strict=True)
            ])  # fmt: skip
            heads = [[] for _ in episodes]
            open_now = [i for i in open_now if talks[i].ending is None]
            going_on = {_name(i, episodes[i], talks[i]) for i in open_now}
            engine.forget([name for name in names if name not in going_on])
            names = [name for name in names if name in going_on]
    finally:
        engine.forget(names)
    for talk in talks:
        if talk.fault:
            log.warning("environment_error env=%s task=%.80r fault=%s", label_of(talk.env), talk.task, talk.fault)
    return talks


def _opening_or_fault(env: Env, renderer: Renderer, task: Task, sampling: Sampling) -> Calling[Conversation]:
    if isinstance(task, NoTask):
        return Conversation.failed(env, renderer, task, sampling, ShoalError(task.fault))
    try:
        return (yield from Conversation.opening(env, renderer, task, sampling))
    except ShoalError as error:
        if isinstance(error, Overreach) and not isinstance(error, Undecided):
            raise
        return Conversation.failed(env, renderer, task, sampling, error)


def _writing_or_fault(talk: Conversation, *turn: Any) -> Calling[None]:
    try:
        yield from talk.writing(*turn)
    except Undecided as error:
        talk.fail(error, "step")


def _name(index: int, episode: EpisodeAttempt, talk: Conversation) -> str:
    """The engine's name for the row that an episode's next turn continues."""
    return f"{index}-{row_seed(episode.seed, talk.row).hex()[:16]}"


def play_scripted(
    env: Env, renderer: Renderer, task: Task, player: Player, rng: random.Random, sampling: Sampling
) -> Conversation:
    """Let a scripted player play a task, under the same rules of turns and limits as a policy.

    An action too long for its turn is cut off, which ends the rollout by "length".
    """
    talk = Conversation(env, renderer, task, sampling)
    while talk.ending is None:
        talk.write(renderer.written(player(talk.state, rng), talk.episode.facts.arguments, talk.asked())[: talk.room])
    return talk
