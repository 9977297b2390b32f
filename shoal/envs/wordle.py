"""Wordle: find a hidden five-letter word in six guesses, told after each which letters fit.

A built-in environment (`wordle`), multi-turn. It knows no tokens and no model.

The policy writes one word a turn. A legal word uses up a guess and is answered letter by letter with a mark each:
`=` right letter in the right place, `+` a letter of the word in another place, `-` not (or no longer) in it, so
"crane" for the hidden "cater" gives `c=r+a+n-e+`. Anything else is answered "not a word" and uses up no guess, as in
the game, but the third such answer ends the episode.

A letter guessed twice is marked as often as the hidden word has it: places that are right count first, the rest from
left to right.

Reward: 1 for a win. Otherwise `partial` times the best guess's share of right letters, of which one in the wrong
place counts half: below 0.5 by default.
"""

import functools
import random
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec

from shoal.config import Section, from_tree
from shoal.envs.base import Message, Player, Step, require_index
from shoal.envs.words import WORDS
from shoal.errors import ConfigError
from shoal.protocol.wire import domain_hash

RIGHT, ELSEWHERE, ABSENT = "=", "+", "-"
NOT_A_WORD = "not a word"
LETTERS = 5


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
    """Reward of a lost game whose best guess had all letters right, if there were such a game."""
    opening: Annotated[str, msgspec.Meta(min_length=1, max_length=4000)] = "wordle"
    """The first message. A policy that was not trained for the game needs the rules here."""


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
        return Step(after, render(guess, marks(guess, state.answer)), done)

    def score(self, state: WordleState) -> float:
        """1 for a win, otherwise part of `partial`."""
        if self.success(state):
            return 1.0
        shares = (closeness(marks(guess, state.answer)) for guess in state.guesses)
        return self.args.partial * max(shares, default=0.0)

    def success(self, state: WordleState) -> bool:
        """Whether the hidden word was found."""
        return state.answer in state.guesses

    def players(self) -> Mapping[str, Player]:
        """Right: a random word among those that all marks allow. Wrong: a random word that they rule out."""
        return {"right": self._play_right, "wrong": self._play_wrong}

    def _play_right(self, state: WordleState, rng: random.Random) -> str:
        told = tuple((guess, marks(guess, state.answer)) for guess in state.guesses)
        return rng.choice(_consistent(self.words, told))

    def _play_wrong(self, state: WordleState, rng: random.Random) -> str:
        return rng.choice([word for word in self.words if word != state.answer])


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


def render(guess: str, told: str) -> str:
    """What the policy reads: each letter followed by its mark."""
    return "".join(letter + mark for letter, mark in zip(guess, told, strict=True))


def closeness(told: str) -> float:
    """Share of letters that are right, those in the wrong place counted half."""
    return (told.count(RIGHT) + told.count(ELSEWHERE) / 2) / LETTERS


@functools.cache
def shuffled_words() -> tuple[str, ...]:
    """The list in an order that has nothing to do with spelling, the same everywhere and always."""
    return tuple(sorted(WORDS, key=lambda word: domain_hash("wordle", word.encode())))


@functools.lru_cache(maxsize=4096)
def _consistent(words: tuple[str, ...], told: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Words that would have been answered by just these marks; never empty, for the hidden word is one."""
    if not told:
        return words
    guess, answered = told[-1]
    return tuple(word for word in _consistent(words, told[:-1]) if marks(guess, word) == answered)
