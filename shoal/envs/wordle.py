"""Wordle: find a hidden five-letter word in six guesses, told after each which letters fit.

A built-in environment (`wordle`), multi-turn. It knows no tokens and no model.

The policy writes one word a turn. A legal word uses up a guess and is answered with a mark for each of its letters:
`=` right letter in the right place, `+` a letter of the word in another place, `-` not (or no longer) in it, so
"crane" for the hidden "cater" gives `=++-+`. Anything else is answered `?????`, no word, and uses up no guess, as in
the game, but the third such answer ends the episode. Marks stand in the order of the letters, so that a small model
finds the mark of a letter at a fixed distance.

A letter guessed twice is marked as often as the hidden word has it: places that are right count first, the rest from
left to right.

Reward: 1 for a win. Otherwise `partial` times the share of the guesses after the first that respect every mark given
before them, as "hard mode" demands: below 0.5 by default. It rewards a held-out word that fits as much as any other.
"""

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from shoal.envs.base import Message, Player, Step, require_index
from shoal.envs.words import WORDS
from shoal.errors import ConfigError
from shoal.protocol.wire import domain_hash
from shoal.tree import Section, from_tree

RIGHT, ELSEWHERE, ABSENT = "=", "+", "-"
NOT_A_WORD = "?????"


class WordleArgs(Section, frozen=True):
    """Arguments of the environment."""

    num_words: Annotated[int, msgspec.Meta(ge=8, le=len(WORDS))] = len(WORDS)
    """Words of the list in play, as guesses and answers; a smaller list is part of any larger one."""
    heldout: Annotated[int, msgspec.Meta(ge=1)] = 64
    """Words of these that are hidden only in evaluation."""
    guesses: Annotated[int, msgspec.Meta(ge=1, le=100)] = 6
    not_words: Annotated[int, msgspec.Meta(ge=1, le=100)] = 3
    """Actions that are no legal word: this many end the episode."""
    partial: Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)] = 0.5
    """Reward of a lost game in which every guess respected the marks before it."""
    opening: Annotated[str, msgspec.Meta(min_length=1, max_length=4000)] = "wordle"
    """The first message. A policy that was not trained for the game needs the rules here."""
    first_guess: str = ""
    """What the scripted players open with, if it is in play; empty is a random word."""
    careless: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.5
    """Share of the careless player's games in which it ignores the marks."""


class WordleState(NamedTuple):
    """An episode as it stands."""

    answer: str
    guesses: tuple[str, ...] = ()
    """Legal ones, in order."""
    not_words: int = 0
    """Actions so far that were no legal word."""


def environment(**args: Any) -> "Wordle":
    """Make the environment; arguments as `WordleArgs`. Raises `ConfigError` for any other."""
    return Wordle(from_tree(args, WordleArgs, "environment wordle"))


class Wordle:
    """The game. A task is the hidden word itself."""

    name = "wordle"
    reward_bounds = (0.0, 1.0)

    def __init__(self, args: WordleArgs) -> None:
        if args.heldout >= args.num_words:
            raise ConfigError(f"environment wordle: heldout = {args.heldout} leaves none of {args.num_words} words")
        self.args = args
        self.words = shuffled_words()[: args.num_words]
        self.legal = frozenset(self.words)
        self.num_tasks = args.num_words - args.heldout
        self.num_heldout = args.heldout

    def task(self, index: int, heldout: bool = False) -> str:
        """The hidden word: those for training stand before the held-out ones."""
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        return self.words[self.num_tasks + index if heldout else index]

    def reset(self, task: str) -> tuple[WordleState, list[Message]]:
        """Hide a word."""
        return WordleState(task), [{"role": "user", "content": self.args.opening}]

    def step(self, state: WordleState, action: str) -> Step:
        """Answer a guess."""
        guess = action.strip().lower()
        if guess not in self.legal:
            after = state._replace(not_words=state.not_words + 1)
            return Step(after, NOT_A_WORD, after.not_words >= self.args.not_words)
        after = state._replace(guesses=(*state.guesses, guess))
        done = guess == state.answer or len(after.guesses) >= self.args.guesses
        return Step(after, marks(guess, state.answer), done)

    def score(self, state: WordleState) -> float:
        """1 for a win, otherwise part of `partial`."""
        if self.success(state):
            return 1.0
        later = range(1, len(state.guesses))
        respectful = sum(_respects(state.guesses[i], state.guesses[:i], state.answer) for i in later)
        return self.args.partial * respectful / max(1, self.args.guesses - 1)

    def success(self, state: WordleState) -> bool:
        """Whether the hidden word was found."""
        return state.answer in state.guesses

    def players(self) -> Mapping[str, Player]:
        """Right: a random word among those that all marks allow. Wrong: any but the hidden one. Careless: a game of
        the one kind or of the other, to start from a policy that knows how to play but does not always do so."""
        return {"right": self._play_right, "wrong": self._play_wrong, "careless": self._play_careless}

    def _play_right(self, state: WordleState, rng: random.Random) -> str:
        if not state.guesses and self.args.first_guess in self.legal:
            return self.args.first_guess
        told = tuple((guess, marks(guess, state.answer)) for guess in state.guesses)
        return rng.choice(_consistent(self.words, told))

    def _play_wrong(self, state: WordleState, rng: random.Random) -> str:
        return rng.choice([word for word in self.words if word != state.answer])

    def _play_careless(self, state: WordleState, rng: random.Random) -> str:
        """Its mood is decided with the second guess, and can be told from that: a guess that ignores the marks."""
        started = len(state.guesses) > 1
        ignores = not all(_respects(g, state.guesses[:i], state.answer) for i, g in enumerate(state.guesses))
        if ignores if started else state.guesses and rng.random() < self.args.careless:
            return rng.choice(self.words)
        return self._play_right(state, rng)


@functools.lru_cache(maxsize=1 << 20)
def marks(guess: str, answer: str) -> str:
    """A mark for each letter of the guess."""
    right = [a == b for a, b in zip(guess, answer, strict=True)]
    spare = [b for b, fits in zip(answer, right, strict=True) if not fits]
    told = []
    for letter, fits in zip(guess, right, strict=True):
        if fits:
            told.append(RIGHT)
        elif letter in spare:
            spare.remove(letter)
            told.append(ELSEWHERE)
        else:
            told.append(ABSENT)
    return "".join(told)


def _respects(guess: str, before: Sequence[str], answer: str) -> bool:
    """Whether a guess could be the hidden word, by the marks that the guesses before it got."""
    return all(marks(earlier, guess) == marks(earlier, answer) for earlier in before)


@functools.cache
def shuffled_words() -> tuple[str, ...]:
    """The list in an order that has nothing to do with spelling, the same everywhere and always."""
    return tuple(sorted(WORDS, key=lambda word: domain_hash("wordle", word.encode())))


@functools.lru_cache(maxsize=65536)
def _consistent(words: tuple[str, ...], told: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Words that would have been answered by just these marks; never empty, for the hidden word is one."""
    if not told:
        return words
    guess, answered = told[-1]
    return tuple(word for word in _consistent(words, told[:-1]) if marks(guess, word) == answered)
