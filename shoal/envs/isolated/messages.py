"""The MessagePack messages between an environment in another process and our end: a list of requests, an answer to each.

Of what comes out of the process, only the type is checked here. The content is checked where it is used, as for an
environment in this process.
"""

from typing import Any

import msgspec

from shoal.envs.interface import EnvFacts as EnvFacts

MAX_ANSWER_BYTES = 2 << 20
"""An environment that says more in one turn has failed: no policy reads that much."""

MAX_LINE_CHARS = 500
"""Limit on the line about a fault, which others read."""

MAX_TRACE_CHARS = 8000
"""Limit on a traceback, which the author reads."""

MAX_STATES = 4096
"""Number of states that the inside keeps. Older ones are made again from their actions."""

MARK = "written by the policy"
"""Key of the table that replaces a `Written` among messages."""


class IsolatedRequest(msgspec.Struct, tag=True):
    """`drop` names states that nobody needs any more."""

    drop: list[int]


class Pose(IsolatedRequest):
    """Make a task."""

    index: int
    heldout: bool


class Begin(IsolatedRequest):
    """Reset a task, and keep its state under the number `new`."""

    new: int
    index: int
    heldout: bool


class Act(IsolatedRequest):
    """Take a step from `state`, and keep the next one as `new`."""

    new: int
    state: int
    text: str
    notation: str = ""
    thinking: bool = False
    tools: Any = None
    """The tools that the policy was shown; None if they are the environment's own."""


class ScoreState(IsolatedRequest):
    """Score a state, by the name of the method."""

    state: int
    how: str


class Compare(IsolatedRequest):
    """Compare states with each other."""

    states: list[int]


class Play(IsolatedRequest):
    """Ask a scripted player for its action."""

    state: int
    player: str
    seed: int


class Solve(IsolatedRequest):
    """Ask for the solution of a task."""

    index: int
    heldout: bool


AnyRequest = Pose | Begin | Act | ScoreState | Compare | Play | Solve


class Parts(msgspec.Struct, tag=True):
    """A `Score`."""

    parts: dict[str, float]
    metrics: dict[str, float]


Points = bool | int | float | Parts


class IsolatedAnswer(msgspec.Struct, tag=True):
    """What the inside says."""


class EnvRefused(IsolatedAnswer):
    """The environment cannot be made."""

    why: str
    trace: str


class TaskAnswer(IsolatedAnswer):
    """A task as text for people, and a digest of its whole content."""

    shown: str
    digest: bytes


class Begun(IsolatedAnswer):
    messages: Any


class Acted(IsolatedAnswer):
    reply: Any
    done: bool
    reward: float
    learn: bool
    seat: int
    restart: bool
    points: Points | None = None
    """The score, if the episode is done, because it is asked for next."""
    success: bool | None = None
    steps: tuple[tuple[int, float], ...] = ()


class ScoreReply(IsolatedAnswer):
    points: Points


class Compared(IsolatedAnswer):
    points: list[Points]


class StepReply(IsolatedAnswer):
    text: str


class Solution(IsolatedAnswer):
    turns: str | tuple[str, ...] | None


class EnvFault(IsolatedAnswer):
    """What the environment raised."""

    line: str
    trace: str
    usual: bool
    """An IndexError or ValueError, which `task` raises for an index that is out of range."""
    unreachable: bool = False
    """An endpoint, such as a judge, did not answer. See `envs.exceptions.is_unreachable`."""


class Unknown(IsolatedAnswer):
    """States that the inside does not keep."""

    states: list[int]


AnyAnswer = TaskAnswer | Begun | Acted | ScoreReply | Compared | StepReply | Solution | EnvFault | Unknown
