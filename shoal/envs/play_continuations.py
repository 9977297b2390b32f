"""Play on from within an accepted group: what a worker does for a block of continuations.

The parent's turns are played again up to the place from which a rollout is continued, so the environment is in the state
that it was in there. From then on the policy writes, with a seed of its own. Where rollouts are continued from, and in
which order, is in `protocol/continuations`.
"""

import logging
from collections.abc import Mapping, Sequence

from shoal.chat.renderer import Renderer
from shoal.engine.interface import Engine
from shoal.env import Env
from shoal.envs.interface import task_of
from shoal.envs.play_episodes import EpisodeAttempt, converse
from shoal.envs.replay import replay_group
from shoal.envs.rollout_rules import Conversation
from shoal.errors import Overreach, ShoalError
from shoal.protocol.algorithm_config import Vine
from shoal.protocol.continuations import Branch, branches, continued_rollouts
from shoal.protocol.messages import ENVIRONMENT, Group, Rollout, Sampling, Slot, make_rollout

log = logging.getLogger(__name__)


class OtherStart(ShoalError):
    """The environment plays a task otherwise here than the accepted group says."""


def continue_block(
    engine: Engine, renderer: Renderer, envs: Mapping[str, Env], slots: Sequence[tuple[Slot, Group | None]], vine: Vine,
    at_once: int, sampling: Sampling,
) -> list[Group]:  # fmt: skip
    """Fill the slots of a block of continuations, each with the group that it continues, if there is one. Returns groups
    in the order of the slots.

    A slot whose parent is not what the environment plays is left empty: validators find the same, and it is void.
    The continuations of the whole block are played `at_once` at a time, in their order: this decides the bits.
    """
    of_slot = [
        [(slot, parent, branch) for branch in branches(parent, vine)]
        if parent and is_played_so(renderer, envs, slot, parent, vine, sampling)
        else []
        for slot, parent in slots
    ]
    planned = [one for found in of_slot for one in found]
    made: list[Rollout] = []
    for start in range(0, len(planned), at_once):
        made += _play(engine, renderer, envs, planned[start : start + at_once], sampling)
    left = iter(made)
    return [
        Group(slot.slot, slot.task, slot.env, tuple(next(left) for _ in found))
        for (slot, _), found in zip(slots, of_slot, strict=True)
    ]


def is_played_so(
    renderer: Renderer, envs: Mapping[str, Env], slot: Slot, parent: Group, vine: Vine, sampling: Sampling
) -> bool:
    """Whether the environment plays the rollouts that are continued as the accepted group has them. If not, a validator
    lied, or machines differ. Raises `ShoalError` for an environment that is not loaded."""
    env = _env_of(envs, slot)
    try:
        replays = replay_group(env, renderer, task_of(env, slot.task), continued_rollouts(parent, vine), sampling)
    except Overreach:
        raise
    except ShoalError as fault:
        log.warning("slot=%d is left empty reason=%r", slot.slot, str(fault))
        return False
    problem = next((replay.problem for replay in replays if replay.problem), "")
    if problem:
        log.warning("slot=%d is left empty reason='its parent is not what %s plays: %s'", slot.slot, env.name, problem)
    return not problem  # guard: forged-parents-are-left-out


def _env_of(envs: Mapping[str, Env], slot: Slot) -> Env:
    if slot.env not in envs:
        raise ShoalError(f"slot {slot.slot} asks for environment {slot.env}, which is not loaded")
    return envs[slot.env]


def _play(
    engine: Engine, renderer: Renderer, envs: Mapping[str, Env], planned: Sequence[tuple[Slot, Group, Branch]],
    sampling: Sampling,
) -> list[Rollout]:  # fmt: skip
    """Continuations that are played in one batch."""
    episodes, begun = [], []
    for slot, parent, branch in planned:
        env = _env_of(envs, slot)
        tokens = parent.rollouts[branch.rollout].tokens_T()[: branch.position].tolist()
        episode = EpisodeAttempt(env, task_of(env, slot.task), branch.seed(bytes.fromhex(slot.seed)))
        episodes.append(episode)
        begun.append(opened(episode, renderer, sampling, tokens))
    talks = converse(engine, renderer, episodes, sampling, begun)
    return [
        continuation(talk, branch.position, engine.version)
        for talk, (_, _, branch) in zip(talks, planned, strict=True)
    ]  # fmt: skip


def opened(
    episode: EpisodeAttempt, renderer: Renderer, sampling: Sampling, tokens: list[int]
) -> tuple[Conversation, list[int]]:
    """A conversation after the whole turns among these tokens, which an accepted rollout begins with, and the tokens of the
    turn that they end in. Raises `OtherStart` if the conversation is another one than when it was compared with the parent:
    the environment does not play alike twice."""
    try:
        talk = Conversation(episode.env, renderer, episode.task, sampling)
    except Overreach:
        raise
    except ShoalError as error:
        raise OtherStart(str(error)) from None
    while talk.ending is None and len(talk.context) < len(tokens):
        left = tokens[len(talk.context) :]
        end = next((i + 1 for i, token in enumerate(left) if token in renderer.stop_ids), 0)
        if not 0 < end <= talk.room or talk.context != tokens[: len(talk.context)]:  # guard: parents-turns-fit
            break
        talk.write(left[:end])
    before = len(talk.context)
    is_same = talk.ending is None and len(talk.rows) == 1 and talk.context == tokens[:before]
    if not is_same or talk.room <= len(tokens) - before:
        raise OtherStart(
            f"environment {episode.env.name} plays task {str(episode.task)[:80]!r} otherwise than a moment ago, so it "
            "cannot be continued here. Run shoal env check"
        )
    return talk, tokens[before:]


def continuation(talk: Conversation, position: int, version: int) -> Rollout:
    """A finished conversation as a rollout of which only what follows the position is the policy's work."""
    assert talk.ending is not None, "the conversation has not ended"
    author = [ENVIRONMENT] * position + talk.author[position:]
    return make_rollout(
        talk.tokens, author, talk.logprobs, version=version, ending=talk.ending, starts=talk.starts
    )  # fmt: skip
