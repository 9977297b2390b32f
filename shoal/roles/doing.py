"""What a worker or a validator is at, and what it has done since it started: for its user's view.

Written by the role, from its event loop and its threads; read by `launch/node_view`, from another thread. It decides
nothing.
"""

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.protocol import types as t


@dataclass
class Judged:
    """What a validator judged since it started, in groups."""

    submissions: int = 0
    accepted: int = 0
    void: int = 0
    audited: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By check."""
    last_reason: str = ""
    busy_s: float = 0.0
    """Time that it took to judge, without fetching and waiting."""

    def add(self, verdict: t.Verdict, took_s: float) -> None:
        """Count a verdict."""
        self.submissions, self.busy_s = self.submissions + 1, self.busy_s + took_s
        for group in verdict.groups:
            self.accepted += group.outcome == "accept"
            self.void += group.outcome == "void"
            self.audited += group.audited
            if group.outcome in ("soft", "hard"):
                self.refused[group.check] += 1
                self.last_reason = f"{group.check}: {group.detail} ({group.figure:.3g}, limit {group.bound:.3g})"


@dataclass
class Doing:
    """A node of this machine, now."""

    clock: Callable[[], float] = time.monotonic
    words: str = "starting"
    since: float = 0.0
    """When it began to do that."""
    started: float = 0.0
    key: str = ""
    name: str = ""
    info: t.RunInfo | None = None
    node: t.NodeState | None = None
    """As the coordinator said last."""
    tokens_per_s: float = 0.0
    memory: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """What the node takes of the machine's memory and of its GPU's, MB; 0 if unknown."""
    answered_at: Callable[[], float | None] = lambda: None
    """When the host last answered the node anything, by the monotonic clock; None if never."""
    judged: Judged = field(default_factory=Judged)
    stopping: Callable[[], bool] = bool
    """Whether it was told to stop."""

    def __post_init__(self) -> None:
        self.started = self.since = self.clock()

    def now(self, words: str) -> None:
        """It begins to do something else. A wait of which only the numbers change goes on."""
        if words != self.words and not (words.startswith("waiting") and _letters(words) == _letters(self.words)):
            self.since = self.clock()
        self.words = words


def _letters(words: str) -> str:
    return re.sub(r"\d+", "", words)
