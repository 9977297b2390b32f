"""Stones: take stones from piles, in turn with an opponent; who takes the last one wins. The game is called Nim.

A built-in environment (`stones`), multi-turn. It knows no tokens and no model.

The policy reads the sizes of the piles, smallest first, such as "358" or, later in the game, "005". It writes a size and
what it leaves of it: "83" takes five stones from a pile of eight. Between the two digits, up to four characters that are
neither letters nor digits are ignored. An illegal move loses.

The opponent takes the winning move, if there is one, in a share of its turns (`perfect`), and otherwise any move, all
equally likely. Its luck is a hash of the task and the turn, so the same moves always get the same answers.

Games start from positions that can be won. Half of those with `stones` stones or one fewer are held out for evaluation.
Training starts from the other half, and from all smaller ones, so that some games are short. In a round at least two stones
are taken: so no game of training ever shows the policy a held-out position.

Reward: 1 for a win, else 0.
"""

import functools
import operator
import random
import re
from collections.abc import Mapping
from itertools import combinations_with_replacement
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec

from shoal.envs.base import Message, Player, Step, require_index
from shoal.errors import ConfigError
from shoal.protocol.wire import domain_hash
from shoal.tree import Section, from_tree

Piles: TypeAlias = tuple[int, ...]
"""Sizes of all piles, smallest first, empty ones included."""

Move: TypeAlias = tuple[int, int]
"""Size of a pile, and how many stones to leave of it."""

WRITTEN = re.compile(r"\s*([1-9])[^0-9a-zA-Z]{0,4}([0-9])\s*")
HELDOUT_SHARE = 2
"""One of the largest starts in this many is held out."""


class StonesArgs(Section, frozen=True):
    """Arguments of the environment."""

    piles: Annotated[int, msgspec.Meta(ge=1, le=5)] = 3
    """Number of piles; in small starts some are empty."""
    most: Annotated[int, msgspec.Meta(ge=2, le=9)] = 9
    """Most stones in a pile."""
    stones: Annotated[int, msgspec.Meta(ge=3, le=45)] = 16
    """Stones of the largest starts."""
    perfect: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.5
    """Share of its turns in which the opponent plays without fault."""
    cautious: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 0.5
    """The scripted teacher: how likely it is to take one stone more, relative to one fewer. 1: all moves alike."""
    opening: Annotated[str, msgspec.Meta(max_length=4000)] = ""
    """Comes before the piles in the first message. For a policy that was not trained on the game, put the rules here."""
    num_tasks: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)] = 1 << 16
    heldout: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 512
    """Number of tasks for evaluation."""


class StonesTask(NamedTuple):
    """A start, and what decides the opponent's luck."""

    piles: Piles
    luck: str


class StonesState(NamedTuple):
    """The state of an episode."""

    piles: Piles
    luck: str
    turn: int = 0
    """Moves that the policy has made."""
    won: bool = False


def environment(**args: Any) -> "Stones":
    """Make the environment from the arguments of `StonesArgs`. Raises `ConfigError` for any other argument."""
    return Stones(from_tree(args, StonesArgs, "environment stones"))


class Stones:
    """The environment. A task is a start with the opponent's luck; training starts and held-out ones come in turn."""

    name = "stones"
    reward_bounds = (0.0, 1.0)

    def __init__(self, args: StonesArgs) -> None:
        self.args = args
        starts = starts_of(args.piles, args.most, args.stones)
        largest = [start for start in starts if all(start) and sum(start) >= args.stones - 1]
        self.heldout_starts = tuple(largest[: len(largest) // HELDOUT_SHARE])
        self.training_starts = tuple(start for start in starts if start not in self.heldout_starts)
        if not self.heldout_starts:
            raise ConfigError(
                f"environment stones: {args.piles} piles of at most {args.most} with {args.stones} or {args.stones - 1} "
                f"stones can be won from {len(largest)} starts, and it needs {HELDOUT_SHARE}: raise piles or most"
            )
        self.num_tasks = args.num_tasks
        self.num_heldout = args.heldout

    def task(self, index: int, heldout: bool = False) -> StonesTask:
        """The task with this index."""
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        starts = self.heldout_starts if heldout else self.training_starts
        return StonesTask(starts[index % len(starts)], f"{'heldout' if heldout else 'training'} {index}")

    def reset(self, task: StonesTask) -> tuple[StonesState, list[Message]]:
        """Lay out the piles."""
        piles, luck = task
        return StonesState(tuple(piles), luck), [{"role": "user", "content": self.args.opening + told(tuple(piles))}]

    def step(self, state: StonesState, action: str) -> Step:
        """Take the policy's move, and answer it."""
        written = WRITTEN.fullmatch(action)
        move = (int(written[1]), int(written[2])) if written else (0, 0)
        after = state._replace(turn=state.turn + 1)
        if move not in moves_of(state.piles):
            return Step(after, None, True)
        left = taken(state.piles, move)
        if not any(left):
            return Step(after._replace(piles=left, won=True), None, True)
        left = taken(left, self._answer(left, state))
        return Step(after._replace(piles=left), told(left), not any(left))

    def score(self, state: StonesState) -> float:
        """1 for a win."""
        return float(state.won)

    def success(self, state: StonesState) -> bool:
        """Whether the policy took the last stone."""
        return state.won

    def players(self) -> Mapping[str, Player]:
        """Players: "right" plays without fault. "teacher" sees only wins in one move; else it is cautious, and rather takes
        few stones. "wrong" takes none."""
        return {"right": _play_right, "wrong": lambda state, rng: "00", "teacher": self._play_teacher}

    def _answer(self, piles: Piles, state: StonesState) -> Move:
        """The opponent's move. The first half of the hash says whether it looks for the winning one."""
        luck = domain_hash("stones/luck", state.luck.encode(), str(state.turn).encode())
        best = winning(piles)
        if best and int.from_bytes(luck[:8], "big") < self.args.perfect * 2.0**64:
            return best[int.from_bytes(luck[8:16], "big") % len(best)]
        moves = moves_of(piles)
        return moves[int.from_bytes(luck[16:24], "big") % len(moves)]

    def _play_teacher(self, state: StonesState, rng: random.Random) -> str:
        moves, weights = self.teacher_weights(state.piles)
        return written_as(rng.choices(moves, weights)[0])

    def teacher_weights(self, piles: Piles) -> tuple[tuple[Move, ...], list[float]]:
        """The teacher's moves and how likely each is, relative to the others."""
        moves = moves_of(piles)
        last = [move for move in moves if not any(taken(piles, move))]
        return (tuple(last), [1.0]) if last else (moves, [self.args.cautious ** (size - rest) for size, rest in moves])


def _play_right(state: StonesState, rng: random.Random) -> str:
    """A winning move; in a position that is lost, any one."""
    return written_as(rng.choice(winning(state.piles) or moves_of(state.piles)))


def told(piles: Piles) -> str:
    """The piles as the policy reads them."""
    return "".join(map(str, piles))


def written_as(move: Move) -> str:
    """A move as the policy writes it."""
    return f"{move[0]}{move[1]}"


@functools.lru_cache(maxsize=1 << 16)
def taken(piles: Piles, move: Move) -> Piles:
    """The piles after a legal move."""
    size, rest = move
    others = list(piles)
    others.remove(size)
    return tuple(sorted([*others, rest]))


@functools.lru_cache(maxsize=1 << 16)
def moves_of(piles: Piles) -> tuple[Move, ...]:
    """All legal moves, piles of equal size counted once."""
    return tuple((size, rest) for size in sorted(set(piles)) for rest in reversed(range(size)))


@functools.lru_cache(maxsize=1 << 16)
def winning(piles: Piles) -> tuple[Move, ...]:
    """The moves that leave the exclusive or of the sizes at 0: from there the other side loses against perfect play."""
    return tuple(move for move in moves_of(piles) if not nim_sum(taken(piles, move)))


def nim_sum(piles: Piles) -> int:
    """The exclusive or of all sizes (Bouton, Annals of Mathematics 3, 1901)."""
    return functools.reduce(operator.xor, piles, 0)


@functools.cache
def starts_of(piles: int, most: int, stones: int) -> tuple[Piles, ...]:
    """All positions of at least two piles and at most so many stones that can be won, in an order that is unrelated to
    sizes and the same everywhere."""
    sizes = combinations_with_replacement(range(most + 1), piles)
    starts = [start for start in sizes if sum(start) <= stones and len(start) - start.count(0) > 1 and nim_sum(start)]
    return tuple(sorted(starts, key=lambda start: domain_hash("stones/starts", told(start).encode())))
