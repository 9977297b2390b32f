"""Wordle: find a hidden five-letter word in six guesses; marks after each guess say which letters fit.

A built-in environment (`wordle`), multi-turn. It knows no tokens and no model.

The policy writes one word a turn. A legal word uses up a guess, and the answer is one mark for each of its letters:
`=` for the right letter in the right place, `+` for a letter of the word in another place, `-` for a letter that is
not (or no longer) in it. So "crane" for the hidden "cater" gives `=++-+`. Any other text gets the answer `?????`. As in
the game, it uses up no guess, but the third such answer ends the episode. Marks are in the order of the letters, so
that a small model finds a letter's mark at a fixed distance.

A letter that is guessed twice is marked as often as the hidden word has it: letters in the right place count first,
then the others from left to right.

Reward: 1 for a win. Otherwise `partial` times the share of the guesses after the first that respect all earlier marks,
as "hard mode" demands: below 0.5 by default. A guess that fits the marks counts the same whether or not it is held out.
"""

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from shoal.env import Message, Player, Step, require_index
from shoal.envs.builtin.wordle_words import WORDS
from shoal.errors import ConfigError
from shoal.protocol.encoding import domain_hash
from shoal.typed_toml import Section, from_tree

RIGHT, ELSEWHERE, ABSENT = "=", "+", "-"
NOT_A_WORD = "?????"


class WordleArgs(Section, frozen=True):
    """Arguments of the environment."""

    num_words: Annotated[int, msgspec.Meta(ge=8, le=len(WORDS))] = len(WORDS)
    """Words of the list in play, as guesses and answers. A smaller list is part of every larger one."""
    heldout: Annotated[int, msgspec.Meta(ge=1)] = 64
    """How many of these words are hidden only in evaluation."""
    guesses: Annotated[int, msgspec.Meta(ge=1, le=100)] = 6
    not_words: Annotated[int, msgspec.Meta(ge=1, le=100)] = 3
    """This many actions that are not legal words end the episode."""
    partial: Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)] = 0.5
    """Reward of a lost game in which every guess respected the earlier marks."""
    opening: Annotated[str, msgspec.Meta(min_length=1, max_length=4000)] = "wordle"
    """The first message. For a policy that was not trained on the game, put the rules here."""
    first_guess: str = ""
    """The scripted players' first guess, if it is in play; empty for a random word."""
    careless: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.5
    """Share of games in which the careless player ignores the marks."""


class WordleState(NamedTuple):
    """The state of an episode."""

    answer: str
    guesses: tuple[str, ...] = ()
    """Legal guesses, in order."""
    not_words: int = 0
    """Number of actions so far that were not legal words."""


def environment(**args: Any) -> "Wordle":
    """Make the environment from the arguments of `WordleArgs`. Raises `ConfigError` for any other argument."""
    return Wordle(from_tree(args, WordleArgs, "environment wordle"))


class Wordle:
    """The environment. A task is the hidden word itself."""

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
        """The hidden word. Training words come before held-out words in the list."""
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
        """Players: "right" guesses a random word that all marks allow, "wrong" any word but the hidden one. "careless"
        plays each game like one of the two, to start from a policy that can play but does not always do so."""
        return {"right": self._play_right, "wrong": self._play_wrong, "careless": self._play_careless}

    def _play_right(self, state: WordleState, rng: random.Random) -> str:
        if not state.guesses and self.args.first_guess in self.legal:
            return self.args.first_guess
        told = tuple((guess, marks(guess, state.answer)) for guess in state.guesses)
        return rng.choice(_consistent(self.words, told))

    def _play_wrong(self, state: WordleState, rng: random.Random) -> str:
        return rng.choice([word for word in self.words if word != state.answer])

    def _play_careless(self, state: WordleState, rng: random.Random) -> str:
        """Decide with the second guess whether to ignore the marks. That guess shows the decision to later calls."""
        started = len(state.guesses) > 1
        ignores = not all(_respects(g, state.guesses[:i], state.answer) for i, g in enumerate(state.guesses))
        if ignores if started else state.guesses and rng.random() < self.args.careless:
            return rng.choice(self.words)
        return self._play_right(state, rng)


@functools.lru_cache(maxsize=1 << 20)
def marks(guess: str, answer: str) -> str:
    """One mark for each letter of the guess."""
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
    """Whether the guess could be the hidden word, by the marks of the guesses before it."""
    return all(marks(earlier, guess) == marks(earlier, answer) for earlier in before)


@functools.cache
def shuffled_words() -> tuple[str, ...]:
    """The list in an order that is unrelated to spelling and the same everywhere."""
    return tuple(sorted(WORDS, key=lambda word: domain_hash("wordle", word.encode())))


@functools.lru_cache(maxsize=65536)
def _consistent(words: tuple[str, ...], told: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Words that would have got exactly these marks; never empty, because the hidden word is one of them."""
    if not told:
        return words
    guess, answered = told[-1]
    return tuple(word for word in _consistent(words, told[:-1]) if marks(guess, word) == answered)
