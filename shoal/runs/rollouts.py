"""A group as people read it: its rollouts in turns, with the text, log-probs and advantages of the tokens.

Bytes, the state and a tokenizer in, values out. The bytes are a stranger's, and a validator that lies may have
accepted anything, so rollouts with a flaw are told and not decoded. Texts are as the policy and the environment wrote them:
any characters, controls included. Code that shows them must escape them.

Axes: G rollouts of a group, T tokens of one rollout, L tokens of it that are learned from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.chat.renderer import Renderer
from shoal.env import Env
from shoal.envs.interface import describe_fault, players_of, solution_of, source_of, task_of
from shoal.envs.lint.scripted_episode import played, scripted_player
from shoal.envs.load import files_needed, load_run_envs
from shoal.envs.replay import replay_group
from shoal.errors import ConfigError, ShoalError, StateError
from shoal.ledger.state import State
from shoal.protocol import messages as t
from shoal.protocol.algorithm_config import judged_by_trainer
from shoal.protocol.constants import EPISODES
from shoal.protocol.continuations import continued_slot, is_continued_slot
from shoal.protocol.encoding import WireError, from_msgpack
from shoal.protocol.rollout_validation import flaw_of
from shoal.train.token_advantages import credit

Author = Literal["environment", "policy"]

ANSWER_TURNS = 32
"""Of an answer, so many turns at most."""

MAX_TOKENS = 1 << 21
"""Most tokens of a group that are decoded: a stranger's may have more than fit into memory."""


@dataclass(frozen=True)
class ReadTurn:
    """Tokens that one author wrote without a break, in one row."""

    author: Author
    learned: bool
    """Whether the policy learns from these tokens: false of the environment's, and where the environment says so."""
    row: int
    start: int
    """Index in the rollout of its first token."""
    text: str
    """Without the tokens that end a turn."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    """Of each token under the policy that sampled it, as the worker claims, nats; empty of the environment."""
    advantages: tuple[float, ...] = ()
    """Of each token; empty where nothing is learned from it, or if the trainer alone knows."""
    pieces: tuple[str, ...] = ()
    """The text of each token, control tokens included; empty unless they were asked for."""


@dataclass(frozen=True)
class ReadRollout:
    index: int
    version: int
    ending: str
    turns: tuple[ReadTurn, ...]
    reward: float | None
    """As the validators recomputed it; None if the group was not accepted."""
    advantage: float | None
    """Of the rollout by the run's algorithm; None if no reward is known, or if the trainer alone knows."""
    tokens: int
    policy_tokens: int
    flaw: str = ""
    """Why it cannot be read; it then has no turns."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, before their weights; only after `RunReader.replayed`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the environment reports beside the reward; likewise."""
    problem: str = ""
    """What the replay found wrong; likewise."""
    failed: bool = False
    """Whether the environment failed on it, so that it counts in nothing, as the log says."""
    fault: str = ""
    """What the environment raised: of the first rollout on which it failed as the log says, of others only after
    `RunReader.replayed`."""

    def text(self) -> str:
        """All turns, each after the name of its author."""
        return "\n\n".join(f"{turn.author}: {turn.text}" for turn in self.turns)


@dataclass(frozen=True)
class ReadGroup:
    """A group with what the log says of it."""

    version: int
    slot: int
    submission: str
    index: int
    """Its place in the submission."""
    digest: str
    worker: str
    """Key."""
    env: str
    """Label of its environment."""
    task: int
    status: str
    """As in `Standing`."""
    is_public: bool
    step: int
    """The newest batch that took it; -1 if none did."""
    received_seq: int
    """Number of the event by which its submission came."""
    seq: int
    """Number of the event that accepted it, or refused its block; -1 before that."""
    rollouts: tuple[ReadRollout, ...]
    needs_files: bool = False
    """Whether playing the run's rollouts again executes files of its host: then an audit needs `--own-files`."""


Standing = Literal["pending", "signal", "flat", "continued", "void", "refused", "disputed", "copied"]
"""signal, flat, continued: accepted, as in the log's slots; void: the environment fails on the task; disputed: refused
without blame; copied: another worker's submission had filled the slot before; pending: nobody has decided."""


def rewards_of(state: State, version: int, slot: int, digest: str) -> tuple[float, ...]:
    """The rewards of a group if it is the one that was accepted for the slot; else nothing."""
    record = state.main.versions[version].slots.get(slot)
    return record.rewards if record is not None and record.digest == digest else ()


def advantages_of(
    state: State, group: t.Group, version: int, rewards_G: Sequence[float]
) -> list[NDArray[np.float32]] | None:
    """The advantage of each learned token, G arrays float32[L], by the run's algorithm; None if the trainer alone knows, or
    nothing is learned from the group."""
    algorithm, size = state.rules.algorithm, state.rules.block_groups
    if judged_by_trainer(algorithm) or is_continued_slot(group.slot, size) or len(rewards_G) != len(group.rollouts):
        return None
    slots = state.main.versions[version].slots
    record, continued = slots.get(group.slot), slots.get(continued_slot(group.slot, size))
    continuations = continued.rewards if continued is not None else ()
    steps_G = (record.steps or ()) if record is not None else ()
    faults, failed = ((one.faults or ()) if one is not None else () for one in (record, continued))
    try:
        return credit(group, rewards_G, continuations, algorithm, steps_G, faults, failed)
    except ValueError:
        return None  # continuations or steps that are not those of this group: nothing that a batch could take


def read_rollouts(
    state: State, group: t.Group, version: int, digest: str, renderer: Renderer, with_pieces: bool
) -> tuple[ReadRollout, ...]:
    """The rollouts of a group. Raises `ShoalError` if the tokenizer cannot decode them."""
    rewards_G = rewards_of(state, version, group.slot, digest)
    room, flaws = MAX_TOKENS, list[str]()
    for rollout in group.rollouts:
        room -= len(rollout.author)
        # guard: read-group-fits-memory
        flaws.append(
            _flaw(state.sampling, rollout, renderer) if room >= 0 else f"the group has more than {MAX_TOKENS} tokens"
        )
    credit_G = None if any(flaws) else advantages_of(state, group, version, rewards_G)
    found = []
    for index, (rollout, flaw) in enumerate(zip(group.rollouts, flaws, strict=True)):
        reward = rewards_G[index] if index < len(rewards_G) else None
        A_L = credit_G[index] if credit_G is not None else None
        # guard: flawed-rollout-is-not-decoded
        turns = () if flaw else tuple(_turns(rollout, A_L, renderer, with_pieces))
        worth = None if A_L is None else float(np.mean(A_L)) if A_L.size else 0.0
        found.append(ReadRollout(
            index, rollout.version, rollout.ending, turns, reward, worth, len(rollout.author), rollout.num_policy_tokens(),
            flaw,
        ))  # fmt: skip
    return tuple(found)


def with_faults(rollouts_G: Sequence[ReadRollout], faults: t.Faults | None) -> tuple[ReadRollout, ...]:
    """The rollouts of a group with what the log says of its faults."""
    failed = faults.rollouts if faults is not None else ()
    said = dict.fromkeys(failed[:1], faults.said) if faults is not None else {}
    return tuple(
        replace(rollout, failed=rollout.index in failed, fault=said.get(rollout.index, "")) for rollout in rollouts_G
    )


def conversation(sampling: t.Sampling, rollout: t.Rollout, renderer: Renderer) -> list[tuple[Author, str]]:
    """Who wrote what, by the tokens alone; nothing of a rollout with a flaw."""
    if _flaw(sampling, rollout, renderer):
        return []
    return [(turn.author, turn.text) for turn in _turns(rollout, None, renderer, False)]


def decoded(data: bytes) -> t.Group:
    """A group's bytes. Raises `StateError`."""
    try:
        return from_msgpack(data, t.Group)
    except WireError as error:
        raise StateError(f"a group that the log names is not one: {error}") from None


def _flaw(sampling: t.Sampling, rollout: t.Rollout, renderer: Renderer) -> str:
    flaw = flaw_of(
        [rollout], vocabulary=renderer.vocabulary, max_tokens=sampling.max_tokens,
        max_rollout_tokens=sampling.max_rollout_tokens,
    )  # fmt: skip
    return "" if flaw is None else str(flaw)


def _turns(
    rollout: t.Rollout, A_L: NDArray[np.float32] | None, renderer: Renderer, with_pieces: bool
) -> Iterator[ReadTurn]:
    spans = list(_spans(rollout))
    texts = renderer.decode_all([token_ids for _, _, _, token_ids, _ in spans])
    pieces = renderer.pieces([token_ids for _, _, _, token_ids, _ in spans]) if with_pieces else [()] * len(spans)
    learned = 0
    for (author, row, start, token_ids, logprobs), text, by_token in zip(spans, texts, pieces, strict=True):
        worth: tuple[float, ...] = ()
        if author == t.POLICY and A_L is not None:
            worth = tuple(A_L[learned : learned + len(token_ids)].tolist())
            learned += len(token_ids)
        who: Author = "environment" if author == t.ENVIRONMENT else "policy"
        yield ReadTurn(
            who, author == t.POLICY, row, start, text, tuple(token_ids), tuple(logprobs), worth, tuple(by_token)
        )


def _spans(rollout: t.Rollout) -> Iterator[tuple[int, int, int, list[int], list[float]]]:
    """Author, row, start, token ids and log-probs of each stretch of one author."""
    for number, row in enumerate(rollout.rows()):
        author_T, policy = row.author_T, 0
        edges = [0, *(np.flatnonzero(np.diff(author_T)) + 1).tolist(), len(author_T)]
        for begin, end in pairwise(edges):
            by, logprobs = int(author_T[begin]), list[float]()
            if by != t.ENVIRONMENT:
                logprobs = row.logprobs_P[policy : policy + end - begin].tolist()
                policy += end - begin
            yield by, number, row.start + begin, row.tokens_T[begin:end].tolist(), logprobs


# --- What only the environment can say: it plays a group again, without any model ---


class ReplayedEpisode(NamedTuple):
    group: ReadGroup
    """With parts, metrics and problems of its rollouts."""
    texts: tuple[tuple[tuple[str, str], ...], ...]
    """Of each rollout, the author and text of each message; empty where the replay differs from the claim."""


def open_envs(state: State, own_files: bool) -> dict[str, Env]:
    """The environments of a run by label. Raises `ConfigError` if its host alone can play them, `ShoalError` if one is not
    here."""
    for spec in state.envs:
        if spec.kind != EPISODES or not spec.reproducible:  # guard: replays-ask-no-judge
            raise ConfigError(
                f"environment {spec.label} is played by the host alone: its rollouts are not played again"
            )
    needed = files_needed(state.envs)
    if needed and not own_files:
        raise ConfigError(
            f"environment {needed[0]} is a file of the run's host: read it, then allow this machine to run it, with "
            "shoal dashboard --own-files, or with own_files=True in shoal.open"
        )
    return load_run_envs(state.envs, own_files)


def replay(state: State, envs: dict[str, Env], renderer: Renderer, group: ReadGroup, sent: t.Group) -> ReplayedEpisode:
    """Play a group again. Raises `ShoalError` if its environment cannot begin the task."""
    env = _env_of(envs, group)
    whole = [rollout for rollout in group.rollouts if not rollout.flaw]
    claims = [sent.rollouts[rollout.index] for rollout in whole]
    found = replay_group(env, renderer, task_of(env, group.task), claims, state.sampling)
    told, texts = dict[int, ReadRollout](), dict[int, tuple[tuple[str, str], ...]]()
    for rollout, replayed in zip(whole, found, strict=True):
        earned, talk = replayed.earned, replayed.talk
        told[rollout.index] = replace(
            rollout,
            parts=earned.parts if earned else {},
            metrics=earned.metrics if earned else {},
            problem=replayed.problem,
            fault=replayed.fault or rollout.fault,
        )
        texts[rollout.index] = tuple(talk.texts) if talk else ()
    rollouts = tuple(told.get(rollout.index, rollout) for rollout in group.rollouts)
    return ReplayedEpisode(replace(group, rollouts=rollouts), tuple(texts.get(r.index, ()) for r in group.rollouts))


def answer_of(envs: dict[str, Env], group: ReadGroup) -> tuple[str, ...]:
    """The turns that solve a group's task by its environment: its solution, or else what its right player plays; empty if
    it knows none. Raises `ShoalError`."""
    env = _env_of(envs, group)
    task = task_of(env, group.task)
    try:
        told = solution_of(env, task)
        right = players_of(env).get("right") if told is None else None
        if right is None:
            return told or ()
        walk = played(env, task, scripted_player(right, 0, group.task), turns=ANSWER_TURNS)
    except (MemoryError, ShoalError):
        raise
    except Exception as error:  # noqa: BLE001  foreign code may raise anything: its user gets one line
        raise ConfigError(f"environment {group.env} gives no answer: {describe_fault(error, source_of(env))}") from None
    return walk.actions if walk.done and walk.success is not False else ()


def _env_of(envs: dict[str, Env], group: ReadGroup) -> Env:
    if group.env not in envs or not 0 <= group.task < envs[group.env].num_tasks:
        raise ConfigError(
            f"the group names task {group.task} of environment {group.env!r:.80}, which the run does not have"
        )
    return envs[group.env]
