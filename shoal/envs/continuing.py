"""Play on from within an accepted group: what a worker does for a block of continuations.

Called by the worker and by `recipes/one_file.py`. The parent's turns are played again up to the place from which a rollout
is continued, so the environment is in the state that it was in there. From then on the policy writes, with a seed of its
own. Where rollouts are continued from, and in which order, is in `protocol/continuations`.
"""

from collections.abc import Mapping, Sequence

from shoal.engine.base import Engine
from shoal.envs.base import Env, task_of
from shoal.envs.conversation import Conversation
from shoal.envs.play import Episode, converse
from shoal.errors import Overreach, ShoalError
from shoal.policy.render import Renderer
from shoal.protocol.compositions import Vine
from shoal.protocol.continuations import Branch, branches
from shoal.protocol.types import ENVIRONMENT, Block, Group, Rollout, Sampling, Slot, make_rollout


class OtherStart(ShoalError):
    """The environment plays a task otherwise here than the accepted group says."""


def continue_block(
    engine: Engine, renderer: Renderer, envs: Mapping[str, Env], block: Block, parents: Sequence[Group | None],
    vine: Vine, at_once: int, sampling: Sampling,
) -> list[Group]:  # fmt: skip
    """Fill the slots of a block of continuations. Returns groups in the order of the slots; `parents` has the group that
    each slot continues, None where it continues none.

    The continuations of the whole block are played `at_once` at a time, in their order: this decides the bits.
    """
    of_slot = [branches(parent, vine) if parent else [] for parent in parents]
    planned = [
        (slot, parent, branch)
        for slot, parent, found in zip(block.slots, parents, of_slot, strict=True)
        if parent is not None
        for branch in found
    ]
    made: list[Rollout] = []
    for start in range(0, len(planned), at_once):
        made += _play(engine, renderer, envs, planned[start : start + at_once], sampling)
    left = iter(made)
    return [
        Group(slot.slot, slot.task, slot.env, tuple(next(left) for _ in found))
        for slot, found in zip(block.slots, of_slot, strict=True)
    ]


def _play(
    engine: Engine, renderer: Renderer, envs: Mapping[str, Env], planned: Sequence[tuple[Slot, Group, Branch]],
    sampling: Sampling,
) -> list[Rollout]:  # fmt: skip
    """Continuations that are played in one batch."""
    episodes, begun = [], []
    for slot, parent, branch in planned:
        if slot.env not in envs:
            raise ShoalError(f"slot {slot.slot} asks for environment {slot.env}, which is not loaded")
        env = envs[slot.env]
        tokens = parent.rollouts[branch.rollout].tokens_T()[: branch.position].tolist()
        episode = Episode(env, task_of(env, slot.task), branch.seed(bytes.fromhex(slot.seed)))
        episodes.append(episode)
        begun.append(opened(episode, renderer, sampling, tokens))
    talks = converse(engine, renderer, episodes, sampling, begun)
    return [
        continuation(talk, branch.position, engine.version)
        for talk, (_, _, branch) in zip(talks, planned, strict=True)
    ]  # fmt: skip


def opened(
    episode: Episode, renderer: Renderer, sampling: Sampling, tokens: list[int]
) -> tuple[Conversation, list[int]]:
    """A conversation after the whole turns among these tokens, which an accepted rollout begins with, and the tokens of the
    turn that they end in. Raises `OtherStart` if the conversation is another one here: machines differ, or a validator
    lied."""
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
            f"environment {episode.env.name} plays task {str(episode.task)[:80]!r} otherwise here than where the accepted "
            "rollout was made, so it cannot be continued. If others can, update shoal and the environment's data"
        )
    return talk, tokens[before:]


def continuation(talk: Conversation, position: int, version: int) -> Rollout:
    """A finished conversation as a rollout of which only what follows the position is the policy's work."""
    assert talk.ending is not None, "the conversation has not ended"
    author = [ENVIRONMENT] * position + talk.author[position:]
    return make_rollout(
        talk.tokens, author, talk.logprobs, version=version, ending=talk.ending, starts=talk.starts
    )  # fmt: skip
