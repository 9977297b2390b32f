"""The MessagePack messages between an environment in another process and our end: a list of requests, an answer to each.

Used by both ends, `line` and `inside`. Of what comes out of the process, only the type is checked here. The content is
checked where it is used, as for an environment in this process.
"""

from typing import Any

import msgspec

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


class Request(msgspec.Struct, tag=True):
    """`drop` names states that nobody needs any more."""

    drop: list[int]


class Pose(Request):
    """Make a task."""

    index: int
    heldout: bool


class Begin(Request):
    """Reset a task, and keep its state under the number `new`."""

    new: int
    index: int
    heldout: bool


class Act(Request):
    """Take a step from `state`, and keep the next one as `new`."""

    new: int
    state: int
    text: str
    notation: str = ""
    thinking: bool = False
    tools: Any = None
    """The tools that the policy was shown; None if they are the environment's own."""


class Judge(Request):
    """Score a state, by the name of the method."""

    state: int
    how: str


class Compare(Request):
    """Compare states with each other."""

    states: list[int]


class Play(Request):
    """Ask a scripted player for its action."""

    state: int
    player: str
    seed: int


class Solve(Request):
    """Ask for the solution of a task."""

    index: int
    heldout: bool


AnyRequest = Pose | Begin | Act | Judge | Compare | Play | Solve


class Parts(msgspec.Struct, tag=True):
    """A `Score`."""

    parts: dict[str, float]
    metrics: dict[str, float]


Points = bool | int | float | Parts


class Answer(msgspec.Struct, tag=True):
    """What the inside says."""


class Facts(Answer):
    """The environment, as it is when it has been made."""

    name: str
    num_tasks: int
    num_heldout: int
    reward_bounds: tuple[float, float]
    members: list[str]
    """The methods in OPTIONAL that it has."""
    players: list[str]
    num_seats: int
    max_turn_tokens: int
    max_tokens: int
    parser: str
    history: str
    reproducible: bool
    tools: list[dict[str, Any]]
    template: dict[str, Any]
    weights: dict[str, float]


OPTIONAL = ("truncated_score", "group_scores", "success", "players", "solution")
"""Methods that an environment need not have."""


class Refused(Answer):
    """The environment cannot be made."""

    why: str
    trace: str


class TaskAnswer(Answer):
    """A task as text for people, and a digest of its whole content."""

    shown: str
    digest: bytes


class Begun(Answer):
    messages: Any


class Acted(Answer):
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


class Judged(Answer):
    points: Points


class Compared(Answer):
    points: list[Points]


class Said(Answer):
    text: str


class Solution(Answer):
    turns: str | tuple[str, ...] | None


class Fault(Answer):
    """What the environment raised."""

    line: str
    trace: str
    usual: bool
    """An IndexError or ValueError, which `task` raises for an index that is out of range."""
    unreachable: bool = False
    """An endpoint, such as a judge, did not answer. See `envs.exceptions.is_unreachable`."""


class Unknown(Answer):
    """States that the inside does not keep."""

    states: list[int]


AnyAnswer = TaskAnswer | Begun | Acted | Judged | Compared | Said | Solution | Fault | Unknown
