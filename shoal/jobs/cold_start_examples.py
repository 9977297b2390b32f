"""The rows that a cold start learns from: games of a scripted player, or chosen rollouts of a run.

A game that `max_tokens` cuts or that fails is no lesson: it is left out and counted.
"""

import contextlib
import logging
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

from shoal.chat.renderer import Renderer
from shoal.chat.turn_encoder import ClosedThought
from shoal.config import SftConfig
from shoal.env import Env, State, Task
from shoal.envs.env_from_file import make_env
from shoal.envs.interface import players_of, task_of, wrap_env_errors
from shoal.envs.lint.checks import MAX_COMPARED
from shoal.envs.load import env_of
from shoal.envs.play_episodes import play_scripted
from shoal.envs.prompt_preview import demand_shown, hidden_tools, unparsed_calls
from shoal.envs.rollout_rules import Conversation
from shoal.errors import ConfigError, ShoalError, StateError
from shoal.protocol.constants import MAX_ROLLOUT_ROWS
from shoal.protocol.messages import POLICY, Sampling
from shoal.terminal import printable
from shoal.train.dataset_files import Examples, tokenizer_digest

Example: TypeAlias = tuple[list[int], list[int]]
"""Token ids and authors of a row."""

GUESS_MARGIN = 0.1
"""Least difference between stop_at and the share of games with the most frequent answer."""

FIX = "Fix it, then run shoal env check"

SHORTEST_OF, MOST_TOKENS = 64, 1 << 16
"""Games, and tokens of each, that are played to say how long they are."""

log = logging.getLogger("sft")


def scripted_games(config: SftConfig, renderer: Renderer) -> list[tuple[list[int], list[int]]]:
    """Play the recipe's games with its scripted player; gives token ids and authors of each row that teaches."""
    env = env_of(config.env, own=make_env)  # a scripted player draws from one generator for all games
    with wrap_env_errors(env, f"players() of {env.name} fails", FIX):
        players = players_of(env)
    if config.player not in players:
        known = ", ".join(players) or "none: give it players()"
        raise ConfigError(
            f"player = {config.player}: environment {env.name} has no such scripted player; it has {known}"
        )
    num_tasks = env.num_tasks + (env.num_heldout if config.tasks == "all" else 0)

    tasks = dict[int, Task]()
    if not num_tasks:
        raise ConfigError(f"environment {env.name} has no task to play: see num_tasks")
    if unread := unparsed_calls(env.name, env, renderer, "env.parser"):
        log.warning("%s", unread)
    _demand_task_shown(env, renderer, _task(env, 0))

    changed, rewards, faults = list[tuple[str, str]](), list[float](), list[str]()

    def player(state: State, rng: random.Random) -> str:
        with wrap_env_errors(env, f"player = {config.player} fails", FIX):
            text = players[config.player](state, rng)
        said, end, rest = renderer.split_at_stop(text)
        if rest.strip():  # guard: players-write-whole-turns
            raise ConfigError(
                f"player = {config.player}: it writes {text!r:.60}, in which the tokenizer reads {end!r:.40}. That ends a "
                "turn, so the rest would be cut off: let it write one turn at a time, in characters that the tokenizer has"
            )
        if not changed and (read := renderer.decode(renderer.encode(said))).split() != said.split():
            changed.append((said, read))
        return text

    def played(episodes: int, max_tokens: int) -> list[list[Example]]:
        rng, games = random.Random(config.seed), list[list[Example]]()
        sampling = _sampling(max_tokens)
        for _ in range(episodes):
            drawn = rng.randrange(num_tasks)
            tasks[drawn] = _task(env, drawn)
            try:
                talk = play_scripted(env, renderer, tasks[drawn], player, rng, sampling)
            except ClosedThought as error:
                raise ConfigError(f"player = {config.player}: {error} (env.template)") from None
            if talk.ending == "length":
                continue  # what was cut teaches no end
            if talk.ending == "error":  # guard: failed-games-teach-nothing
                faults.append(printable(" ".join(talk.fault.split())))
                continue
            rewards.append(talk.reward)
            games.append([(list(row.tokens), list(row.author)) for row in talk.rows if POLICY in row.author])
        return games

    games = [row for game in played(config.episodes, config.max_tokens) for row in game]
    if len(faults) == config.episodes:
        raise ConfigError(f"each game of the player {config.player} fails; the first: {faults[0]}")
    log.info("played games=%d", len(rewards))
    if faults:
        log.warning("%d of %d games fail, and are left out; the first: %s", len(faults), config.episodes, faults[0])
    if games and (cut := config.episodes - len(rewards) - len(faults)):
        log.warning(
            "%d of %d games are longer than max_tokens = %d, and left out", cut, config.episodes, config.max_tokens
        )
    if games and max(rewards) <= min(env.reward_bounds):
        log.warning(
            "the player %s earns the lowest reward, %g, in all %d games that will be learned from: see that `shoal env "
            "check` passes, and that the environment reads action.visible if the chat template writes more than the player",
            config.player, max(rewards), len(rewards),
        )  # fmt: skip
    if changed:
        log.warning(
            "the policy's tokenizer makes %r of %r, so it can never write what the player wrote, and the environment reads "
            "the former: use other answers, or a policy whose tokenizer keeps them (that of policy.tiny has no capitals)",
            changed[0][1][:60], changed[0][0][:60],
        )  # fmt: skip
    if not games:
        _refuse_without_games(config, env, played(min(config.episodes, SHORTEST_OF), MOST_TOKENS))
    _tell_overlap(env, tasks.values())
    return games


def _refuse_without_games(config: SftConfig, env: Env, longer: Sequence[Sequence[Example]]) -> NoReturn:
    """Raise `ConfigError`: no game teaches. `longer` are some with MOST_TOKENS."""
    if not longer:
        raise ConfigError(
            f"no game of environment {env.name} fits in {MOST_TOKENS} tokens: shorten its prompts and answers"
        )
    least = min((max(len(tokens) for tokens, _ in game) for game in longer if game), default=0)
    if not least:
        raise ConfigError(f"the player {config.player} writes nothing in any game of environment {env.name}")
    positions = 0 if config.policy.path else config.policy.tiny.max_positions
    more = f", and policy.tiny.max_positions (now {positions}), too" if 0 < positions < least else ""
    more = more or (", if the model has so many positions" if config.policy.path else "")
    raise ConfigError(
        f"no game fits in max_tokens = {config.max_tokens}: the shortest takes {least}. Raise max_tokens to at least "
        f"that{more}"
    )


def _demand_task_shown(env: Env, renderer: Renderer, task: Task) -> None:
    """As `demand_shown`. A task that cannot begin is left to its game, which says why."""
    try:
        talk = Conversation(env, renderer, task, _sampling(MOST_TOKENS))
    except ShoalError:
        return
    demand_shown(env.name, talk, renderer)
    if hidden := hidden_tools(env.name, talk, renderer):
        log.warning("%s", hidden)


def _task(env: Env, index: int) -> Task:
    """Held-out tasks come after the others."""
    is_heldout = index >= env.num_tasks
    return task_of(env, index - is_heldout * env.num_tasks, is_heldout)


def _sampling(max_tokens: int) -> Sampling:
    """Limits of games whose rows have at most so many tokens."""
    return Sampling(1.0, max_tokens, max_tokens, MAX_ROLLOUT_ROWS * max_tokens)


def _tell_overlap(env: Env, learned: Iterable[Task]) -> None:
    """Say how many held-out tasks are among those that are learned from. One that cannot be made is compared with none."""
    heldout = []
    for index in range(min(env.num_heldout, MAX_COMPARED)):
        with contextlib.suppress(ShoalError):
            heldout.append(task_of(env, index, heldout=True))
    found = set(map(repr, heldout)).intersection(map(repr, learned))
    if both := sum(repr(task) in found for task in heldout):
        log.warning("%d of %d held-out tasks are among the training tasks: results count memory", both, len(heldout))


def chosen_rows(given: Examples, start: Path, max_tokens: int) -> list[tuple[list[int], list[int]]]:
    """Rows of chosen rollouts that teach, without longer ones. Raises `StateError` for none, or another tokenizer's."""
    if given.tokenizer != tokenizer_digest(start):  # guard: chosen-with-one-tokenizer
        raise StateError(
            "the chosen rollouts have another tokenizer than the policy that is to learn them: start from the run's own "
            "policy, or from one that it began with"
        )
    rows = [row for row in given.read() if len(row[0]) <= max_tokens and POLICY in row[1]]
    if not rows:
        raise StateError(
            f"no rollout was chosen that has at most max_tokens = {max_tokens} tokens: choose more in the reject stage, or "
            "raise max_tokens"
        )
    return rows


def demand_positions(config: SftConfig, games: Sequence[Example], most: int) -> None:
    """Raise `ConfigError` if the policy has too few positions for a row."""
    lengths = [len(tokens) for tokens, _ in games]
    longest = max(lengths)
    if longest > most:
        key = "the model's max_position_embeddings" if config.policy.path else "policy.tiny.max_positions"
        can_be_lowered = min(lengths) <= most and max(_first_turn_end(author) for _, author in games) <= most
        raise ConfigError(
            f"the longest game takes {longest} tokens, and {key} = {most}: "
            + (f"lower max_tokens (now {config.max_tokens}) to {most}, or " if can_be_lowered else "")
            + ("take a model with more positions" if config.policy.path else f"raise {key} to at least {longest}")
        )


def _first_turn_end(author: Sequence[int]) -> int:
    """How many tokens a row takes up to the end of the policy's first turn: with fewer it teaches no whole answer."""
    begin = author.index(POLICY)
    return next((i for i in range(begin, len(author)) if author[i] != POLICY), len(author))


def demand_more_than_guessing(config: SftConfig, games: Sequence[Example]) -> None:
    """Raise `ConfigError` if a policy that always writes the most frequent answer would reach `stop_at`, or nearly. RL from
    such a policy learns to guess, too."""
    answers = Counter(tuple(one for one, who in zip(*game, strict=True) if who == POLICY) for game in games)
    share = max(answers.values()) / len(games)
    if 0 < config.stop_at < share + GUESS_MARGIN:  # guard: stop-above-guessing
        least = min(0.95, math.ceil(20 * (share + 2 * GUESS_MARGIN)) / 20)
        set_it = f"Set stop_at to {least:g}, or let" if least >= share + GUESS_MARGIN else "Let"
        raise ConfigError(
            f"stop_at = {config.stop_at:g} may be reached by guessing: one answer is right in {share:.0%} of the games. "
            f"{set_it} the environment vary its answers more"
        )
