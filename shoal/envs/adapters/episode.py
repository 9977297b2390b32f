"""Episodes of foreign environments that are written as one coroutine, and the bridge to them."""

import asyncio
import random
import re
import sys
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from shoal.env import Env, Message, Score, Step, require_index
from shoal.errors import ShoalError

# --- What all adapters share ---
#
# An episode of a foreign package runs as a suspended program, under shoal's protocol.
#
# An adapter writes an episode as a generator: it yields what the policy reads, receives what the policy wrote, and
# returns the score. Foreign code keeps its state where it likes. `TurnsSoFar`, the state that shoal sees, never changes: it
# is the task and the turns so far. If the suspended program has gone past a state, or was ended to score it, the turns
# are played again in a new one. Adapters run in the interpreter of the foreign package, so this room imports only modules
# that need no other package.


Told: TypeAlias = Sequence[Message]
"""Messages that the policy has not read yet."""

Episode: TypeAlias = Generator[Told, str | None, Score]
"""One episode. It receives None when a token limit ends it. Then it yields no more messages, and returns its score."""

_OFFER = re.compile(r"(?:available|legal|valid|possible)\s+(?:actions|moves)\b", re.IGNORECASE)
_BRACKETED = re.compile(r"\[(\w+)\]")


class Problem(NamedTuple):
    """A task of a foreign package."""

    content: Any
    number: int
    heldout: bool

    def __repr__(self) -> str:
        """The content without the index, so that equal tasks look equal to `shoal env check`."""
        return repr(self.content)


class TurnsSoFar(NamedTuple):
    """A state: the turns so far. Only the program in `live` changes; it saves playing the turns again."""

    task: Problem
    actions: tuple[str, ...]
    replies: tuple[Told, ...]
    live: "RunningEpisode"
    result: Score | None = None
    """The score, once the package has ended the episode."""


class RunningEpisode:
    """A suspended episode, how many turns it has taken, and the global random state that belongs to it."""

    def __init__(self, episode: Episode, seed: bytes) -> None:
        self.episode, self.turns = episode, 0
        self.cut: dict[int, Score] = {}
        """Scores of the episode if a token limit ends it, by the number of turns."""
        self._random = Randomness(seed)

    def begin(self) -> Told:
        with self._random.swapped():
            return next(self.episode)

    def send(self, action: str | None) -> Told | Score:
        """The next messages, or the score if the program has ended."""
        self.turns = -1 if action is None else self.turns + 1
        with self._random.swapped():
            try:
                return self.episode.send(action)
            except StopIteration as end:
                score: Score = end.value
                return score


class GeneratorEnv(Env):
    """An environment whose episodes are programs. A subclass writes `content` and `episode`."""

    reproducible = True
    """False if `content`, replies or scores may differ between two processes: the environment stays with the host."""
    source = Path()
    """The author's file: a fault is reported with the line there that led to it. Empty if the file is not known."""

    @abstractmethod
    def content(self, index: int) -> Any:
        """The content of a task. The indices of held-out tasks follow those of training tasks."""

    @abstractmethod
    def episode(self, task: Problem) -> Episode:
        """An episode of a task, from its start."""

    def task(self, index: int, heldout: bool = False) -> Problem:
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        at = index + (self.num_tasks if heldout else 0)
        with Randomness(self._seed(at, b"task")).swapped():
            return Problem(self.content(at), index, heldout)

    def reset(self, task: Problem) -> tuple[TurnsSoFar, list[Message]]:
        live = self._live(task)
        told = live.begin()
        return TurnsSoFar(task, (), (told,), live), list(told)

    def step(self, state: TurnsSoFar, action: str) -> Step:
        if state.result is not None:
            return Step(state, None, True)
        live = self._at(state)
        answer = live.send(action)
        played = TurnsSoFar(state.task, (*state.actions, action), state.replies, live)
        if isinstance(answer, Score):
            return Step(played._replace(result=answer), None, True)
        return Step(played._replace(replies=(*state.replies, answer)), list(answer), False)

    def score(self, state: TurnsSoFar) -> Score:
        """The score at the end, or the package's score for an episode that a token limit ends here."""
        if state.result is not None:
            return state.result
        turns = len(state.actions)
        if turns not in state.live.cut:
            score = self._at(state).send(None)
            if not isinstance(score, Score):
                raise ShoalError(f"environment {self.name} asks for another turn after a token limit ended the episode")
            state.live.cut[turns] = score
        return state.live.cut[turns]

    def _live(self, task: Problem) -> RunningEpisode:
        at = task.number + (self.num_tasks if task.heldout else 0)
        return RunningEpisode(self.episode(task), self._seed(at, b"episode"))

    def _at(self, state: TurnsSoFar) -> RunningEpisode:
        """The suspended episode after the turns of `state`: the live one, or a new one in which they are played again."""
        if state.live.turns == len(state.actions):
            return state.live
        live = self._live(state.task)
        told: Told | Score = live.begin()
        for action, before in zip(state.actions, state.replies, strict=False):
            if told != before:
                raise self._changed(before, told)
            told = live.send(action)
        if told != state.replies[-1]:
            raise self._changed(state.replies[-1], told)
        return live

    def _changed(self, before: object, after: object) -> ShoalError:
        return ShoalError(
            f"environment {self.name} is not deterministic: to the same turns it answered {before!r:.60}, then "
            f"{after!r:.60}. Keep it on the host (reproducible = false)"
        )

    def _seed(self, at: int, purpose: bytes) -> bytes:
        return sha256(b"\0".join((b"shoal/foreign", self.name.encode(), purpose, str(at).encode()))).digest()


class Randomness:
    """The global random state of one episode. After each turn, the process gets its previous state back."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._own: Any = None
        self._numpy: Any = None

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Code in this block draws from the episode's generators: `random`, and numpy's if it is imported."""
        outer, numpy = random.getstate(), _numpy()
        outer_numpy = numpy.get_state() if numpy else None
        if self._own is None:
            random.seed(self._seed)
        else:
            random.setstate(self._own)
        if numpy:
            if self._numpy is None:
                numpy.seed(int.from_bytes(self._seed[:4], "big"))
            else:
                numpy.set_state(self._numpy)
        try:
            yield
        finally:
            after = _numpy()  # the block may have imported it
            self._own = random.getstate()
            random.setstate(outer)
            if after:
                self._numpy = after.get_state()
                if numpy:
                    after.set_state(outer_numpy)


def _numpy() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def opponents_move(kind: str | Sequence[str], told: str, turn: int, rng: random.Random) -> str:
    """What an opponent answers to `told`: a random one of the actions offered in square brackets, or the text for this
    turn from a list, whose last text repeats."""
    if kind != "random":
        return kind[min(turn, len(kind) - 1)]
    offers = list(_OFFER.finditer(told))
    moves = _BRACKETED.findall(told[offers[-1].end() :] if offers else told)
    if not moves:
        raise ShoalError(
            f"opponent = random finds no action in square brackets in {told[-80:]!r}: give a list of texts as opponent"
        )
    return f"[{rng.choice(moves)}]"


def one_opponent(opponent: object) -> str | Sequence[str]:
    """An adapter's argument `opponent`. Raises `ShoalError` if it has no valid form."""
    if opponent == "random":
        return "random"
    if isinstance(opponent, list) and opponent and all(isinstance(text, str) for text in opponent):
        return opponent
    raise ShoalError(f'opponent = {opponent!r:.60}: give "random", or a list of texts, one for each of its turns')


def bounds_of(given: Sequence[float] | None, weights: Mapping[str, float]) -> tuple[float, float]:
    """Lowest and highest score: as given, or for parts between 0 and 1."""
    if given is not None:
        low, high = given
        return float(low), float(high)
    return min(0.0, sum(w for w in weights.values() if w < 0)), sum(w for w in weights.values() if w > 0) or 1.0


def split(total: int, heldout: int) -> tuple[int, int]:
    """Numbers of training and held-out tasks, if the last `heldout` are held out. Raises `ShoalError`."""
    if not 0 <= heldout < total:
        raise ShoalError(f"heldout = {heldout}: give at least 0 and less than the {total} tasks")
    return total - heldout, heldout


# --- Turns a coroutine that asks the policy for turns into a generator that yields each request and receives the
# answer ---
#
# This suspends unmodified code that awaits a model at each request, without threads: its event loop runs only until it
# asks or ends. All episodes of an environment share one loop, because its clients and locks belong to that loop. Between
# turns nothing runs. The caller itself must not be in a coroutine.


Q = TypeVar("Q")
A = TypeVar("A")
R = TypeVar("R")

Ask: TypeAlias = Callable[[Sequence[Message]], Awaitable[str | None]]
"""Show messages to the policy, and await its turn; None if a token limit ended the episode."""

CLOSE_S = 5.0
"""How long a cancelled coroutine may clean up. After that we no longer wait for it."""


class CoroutineBridge(Generic[Q, A]):
    """The requests of one coroutine that wait for an answer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.waiting: deque[tuple[Q, asyncio.Future[A]]] = deque()
        self.rang = asyncio.Event()

    async def ask(self, request: Q) -> A:
        """The answer to a request. The coroutine stops here."""
        answer: asyncio.Future[A] = self._loop.create_future()
        self.waiting.append((request, answer))
        self.rang.set()
        return await answer


def suspended(
    loop: asyncio.AbstractEventLoop, program: Callable[[Callable[[Q], Awaitable[A]]], Coroutine[Any, Any, R]]
) -> Generator[Q, A, R]:
    """Run `program` with a function that asks. Closing the generator cancels the program."""
    line: CoroutineBridge[Q, A] = CoroutineBridge(loop)
    task = loop.create_task(program(line.ask))
    try:
        while True:
            if not line.waiting:
                line.rang.clear()
                loop.run_until_complete(_until_asked(task, line))
            if task.done():
                return task.result()
            request, answer = line.waiting.popleft()
            answer.set_result((yield request))
    finally:
        if not task.done():
            task.cancel()
            if not (loop.is_closed() or loop.is_running()):  # the garbage collector may call this while the loop runs
                loop.run_until_complete(asyncio.wait([task], timeout=CLOSE_S))


async def _until_asked(task: "asyncio.Task[R]", line: CoroutineBridge[Q, A]) -> None:
    ring = asyncio.ensure_future(line.rang.wait())
    try:
        await asyncio.wait([task, ring], return_when=asyncio.FIRST_COMPLETED)
    finally:
        ring.cancel()
