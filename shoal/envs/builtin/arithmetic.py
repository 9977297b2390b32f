"""Arithmetic: work out a line such as "12+34=" and answer with the number.

A built-in environment (`arithmetic`), single-turn, whose difficulty is set by digits, operands and operations.
It knows no tokens and no model.

Products come before sums, as usual; results may be negative. A hash of the problem's text decides whether it is held
out (one in eight is), so training and held-out problems never overlap, even if there are few.

Reward: 1 for the exact answer. Any other whole number earns FORMAT, plus up to DIGITS for the share of digits that are
right, compared place by place from the right, if the sign is right too.
"""

import random
import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec

from shoal.env import Message, Player, Step, require_index
from shoal.errors import ConfigError
from shoal.protocol.encoding import domain_hash
from shoal.typed_toml import Section, from_tree

FORMAT, DIGITS = 0.1, 0.4
NUMBER = re.compile(r"-?[0-9]{1,40}")
HELDOUT_SHARE = 8
"""One problem in this many is held out."""
MAX_DRAWS = 10_000
"""Attempts to draw one problem of the requested kind. A family that has none is refused when it is made."""


class ArithmeticArgs(Section, frozen=True):
    """Arguments of the environment."""

    digits: Annotated[int, msgspec.Meta(ge=1, le=9)] = 2
    """The most digits in an operand."""
    operands: Annotated[int, msgspec.Meta(ge=2, le=8)] = 2
    operations: Annotated[str, msgspec.Meta(pattern=r"^[+*-]+$", max_length=8)] = "+-"
    """Operations to draw from, uniformly; one written twice is twice as likely."""
    num_tasks: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)] = 1 << 16
    heldout: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 256
    """Number of tasks for evaluation."""


class ArithmeticState(NamedTuple):
    """The state of an episode."""

    problem: str
    answer: str
    given: str | None = None
    """The policy's answer, if it is a whole number."""


def environment(**args: Any) -> "Arithmetic":
    """Make the environment from the arguments of `ArithmeticArgs`. Raises `ConfigError` for any other argument."""
    return Arithmetic(from_tree(args, ArithmeticArgs, "environment arithmetic"))


class Arithmetic:
    """The environment. A task is the problem as text, such as "12+34"."""

    name = "arithmetic"
    reward_bounds = (0.0, 1.0)

    def __init__(self, args: ArithmeticArgs) -> None:
        self.args = args
        self.num_tasks = args.num_tasks
        self.num_heldout = args.heldout

    def task(self, index: int, heldout: bool = False) -> str:
        """The problem with this index: the first draw for it that is held out, or is not, as requested."""
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        for attempt in range(MAX_DRAWS):
            problem = self._draw(f"{index} {attempt}")
            if is_heldout(problem) == heldout:
                return problem
        raise ConfigError(f"environment arithmetic: no problem in {MAX_DRAWS} draws; raise digits or operands")

    def reset(self, task: str) -> tuple[ArithmeticState, list[Message]]:
        """Pose a problem."""
        return ArithmeticState(task, str(solve(task))), [{"role": "user", "content": task + "="}]

    def step(self, state: ArithmeticState, action: str) -> Step:
        """Take the answer, which ends the episode."""
        given = action.strip()
        return Step(state._replace(given=given if NUMBER.fullmatch(given) else None), None, True)

    def score(self, state: ArithmeticState) -> float:
        """1 for the exact answer, otherwise partial credit."""
        if state.given is None:
            return 0.0
        if self.success(state):
            return 1.0
        return FORMAT + DIGITS * digits_right(state.given, state.answer)

    def success(self, state: ArithmeticState) -> bool:
        """Whether the answer is exact."""
        return state.given == state.answer

    def players(self) -> Mapping[str, Player]:
        """Players: "right" answers correctly, "wrong" gives a number near the negative of the answer."""
        return {"right": lambda state, rng: state.answer, "wrong": _play_wrong}

    def _draw(self, label: str) -> str:
        """Draw a problem from a hash of its label, because Python's own generators may change between versions."""
        problem = ""
        for place in range(self.args.operands):
            bits = int.from_bytes(domain_hash("arithmetic/draw", f"{label} {place}".encode()), "big")
            bits, operation = divmod(bits, len(self.args.operations))
            bits, digits = divmod(bits, self.args.digits)
            problem += (self.args.operations[operation] if place else "") + str(bits % 10 ** (digits + 1))
        return problem


def solve(problem: str) -> int:
    """The value of numbers joined by + - *, products first."""
    total = 0
    for sign, term in re.findall(r"([+-]?)([0-9*]+)", problem):
        product = 1
        for factor in term.split("*"):
            product *= int(factor)
        total += -product if sign == "-" else product
    return total


def is_heldout(problem: str) -> bool:
    """Whether a problem is reserved for evaluation."""
    return domain_hash("arithmetic/heldout", problem.encode())[0] % HELDOUT_SHARE == 0


def digits_right(given: str, answer: str) -> float:
    """Share of matching digits, place by place from the right, of the longer number; 0 if the sign is wrong."""
    if given.startswith("-") != answer.startswith("-"):
        return 0.0
    given, answer = given.lstrip("-"), answer.lstrip("-")
    same = sum(a == b for a, b in zip(reversed(given), reversed(answer), strict=False))
    return same / max(len(given), len(answer))


def _play_wrong(state: ArithmeticState, rng: random.Random) -> str:
    return str(-int(state.answer) + rng.choice([-3, 3]))
