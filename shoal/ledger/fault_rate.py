"""What a run remembers of environments that fail, and when that pauses the run.

Every rollout of a group counts once the group is accepted; a group with faults
counts only once they are confirmed, so that no single worker and no single validator of others can pause a run. What the
host's own stage played and recorded is confirmed by any validator that no other can check.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shoal.ledger.constants import Law
from shoal.protocol.messages import Faults
from shoal.protocol.reward_rules import REPLY_REFUSED

FAULTS = "environment faults: "
"""How the cause of such a pause begins."""

_ELSEWHERE = (
    "; or remove its [[envs]] if the run has others. This run can take none of these: begin a new one from "
    "checkpoints/final, which `shoal admin drain` writes; or go on with `shoal admin resume`, until it pauses again"
)

FAULT_REMEDY = (
    "Correct the environment, which `shoal env check` tries; where an action of the policy makes it raise, set "
    f'on_fault = "lowest"{_ELSEWHERE}'
)
"""What the host may do then, as a sentence."""

BOUNDS_REMEDY = f"Correct its score() or its reward_bounds; `shoal env check` tries both{_ELSEWHERE}"
NUMBER_REMEDY = f"Let its score() return a finite number for every answer; `shoal env check` tries some{_ELSEWHERE}"
HANG_REMEDY = (
    f"Give its calls a time limit of their own, or make them lighter; `shoal env check` tries them{_ELSEWHERE}"
)

TEMPLATE_REMEDY = f"Use a model whose chat template and tokenizer take its replies{_ELSEWHERE}"

TOOK_TOO_LONG = "a call took too long, or ended its process"
"""What is said of calls that were stopped."""


_NO_NUMBER = re.compile(r"Error: [^:]* is .{1,60}, not a (finite )?number")
_STOPPED = re.compile(r"\)( of task \d+)?: (its process was ended|took longer than)")
"""Our own sentences in the texts of errors, whose other words are the environment's."""


def fault_remedy(cause: str) -> str:
    """What the host may do about a pause by faults with this cause."""
    if REPLY_REFUSED in cause:
        return TEMPLATE_REMEDY
    if "outside its reward_bounds, to " in cause:
        return BOUNDS_REMEDY
    if _NO_NUMBER.search(cause):
        return NUMBER_REMEDY
    # of calls that workers stopped, or else the host's stage
    return HANG_REMEDY if TOOK_TOO_LONG in cause or _STOPPED.search(cause) else FAULT_REMEDY


class GroupOutcome(NamedTuple):
    """What an environment did on the rollouts of one group."""

    rollouts: int
    failed: int = 0
    """Of these, the ones that count in nothing."""
    outside: int = 0
    """Of these, the ones with a score outside the bounds."""
    score: float = 0.0
    """The first of these scores."""
    said: str = ""
    """The first error."""
    inside: int = 0
    """Of these, the ones with a score that is known to be inside the bounds."""

    @classmethod
    def of(cls, rewards: Sequence[float], faults: Faults | msgspec.UnsetType, lowest: bool = False) -> "GroupOutcome":
        """Of a group with these rewards, by what a verdict says of its faults. `lowest`: a rollout on which the environment
        fails has the lowest reward, and no verdict names it unless its score is outside."""
        least = min(rewards, default=0.0) if lowest else -math.inf  # guard: lowest-may-be-a-fault
        known = faults or Faults()
        unsure = {*known.rollouts, *known.outside}
        inside = sum(reward > least for index, reward in enumerate(rewards) if index not in unsure)
        return cls(len(rewards), len(known.rollouts), len(known.outside), known.score, known.said, inside)


class EnvFaultRecord(msgspec.Struct):
    """One environment."""

    newest: list[GroupOutcome] = []
    """Groups with the newest rollouts, in the order in which they counted, as many as `Law.fault_window` needs."""
    scored: bool = False
    """Whether any score is known to have been inside the bounds."""

    def count(self, group: GroupOutcome, window: int) -> None:
        """Add a group."""
        self.scored |= group.inside > 0
        self.newest.append(group)
        while self.num_rollouts - self.newest[0].rollouts >= window:
            del self.newest[0]

    @property
    def num_rollouts(self) -> int:
        return sum(group.rollouts for group in self.newest)

    def cause(self, label: str, law: Law) -> str:
        """Why the run must pause, in one line; empty if it need not."""
        seen = max(law.fault_window, self.num_rollouts)
        outside, failed = sum(group.outside for group in self.newest), sum(group.failed for group in self.newest)
        # guard: outside-scores-pause, first-scores-pause
        if outside > law.outside_share * seen or (outside and not self.scored):
            score = next(group.score for group in self.newest if group.outside)
            return (
                f"{FAULTS}{label} gives a score of {score!r}, outside its reward_bounds, to {outside} of its newest "
                f"{self.num_rollouts} rollouts"
            )
        if failed > law.fault_share * seen:  # guard: faults-pause
            said = [group.said for group in self.newest if group.failed]
            one = ", all of one task" if len(said) == 1 else ""
            return (
                f"{FAULTS}{label} fails on {failed} of its newest {self.num_rollouts} rollouts{one}: "
                f"{most_frequent_error(said)}"
            )
        return ""


def most_frequent_error(said: Sequence[str]) -> str:
    """Of the errors of groups, oldest first, the newest one of the place and type that most share."""
    shared, _ = Counter(map(_place, said)).most_common(1)[0]
    return next(error for error in reversed(said) if _place(error) == shared)


def _place(error: str) -> str:
    """Where it was raised and its type, without its text: the error is FILE line N: TYPE: TEXT, or CALL of task N: TEXT."""
    return re.sub(r" of task \d+$", "", error.split(": ")[0]) + ": " + ": ".join(error.split(": ")[1:2])


class FaultsRecord(msgspec.Struct):
    """All environments of a run."""

    envs: dict[str, EnvFaultRecord] = {}
    """By label."""
    waiting: dict[str, list[tuple[str, GroupOutcome]]] = {}
    """By submission that is judged again: groups with faults that one validator found, with their environments."""

    def count(self, label: str, group: GroupOutcome, window: int) -> None:
        """Add a group that nobody doubts."""
        self.envs.setdefault(label, EnvFaultRecord()).count(group, window)

    def wait(self, submission: str, label: str, group: GroupOutcome) -> None:
        """Add a group once a recheck of its submission confirms it."""
        self.waiting.setdefault(submission, []).append((label, group))

    def rechecked(self, submission: str, confirmed: bool, window: int) -> None:
        """A recheck has ended."""
        for label, group in self.waiting.pop(submission, []):
            if confirmed:  # guard: only-confirmed-faults-count
                self.count(label, group, window)

    def cause(self, law: Law) -> str:
        """Why the run must pause; empty if it need not."""
        causes = (self.envs[label].cause(label, law) for label in sorted(self.envs))
        return next((cause for cause in causes if cause), "")

    def reset(self) -> None:
        """The host lets the run go on: what it has looked at counts no more."""
        for record in self.envs.values():
            record.newest = []
