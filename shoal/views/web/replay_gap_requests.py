"""Replay gaps on request: starts the program that computes them, one at a time, and keeps the newest answers.

A gap is how far a token is from the one that its seed chooses, under the weights of the version; see `verification`. Honest
tokens have gaps near 0.
"""

import asyncio
import json
import math
import subprocess
import sys
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

from shoal.errors import NothingYet, ShoalError, StateError
from shoal.protocol.encoding import WireError
from shoal.runs.run_reader import GroupRef

LIMIT_S = 120.0
"""Time of one computation."""

KEPT = 64


class Gaps(NamedTuple):
    by_rollout: tuple[tuple[float | None, ...], ...]
    """Nats, of the policy's tokens of each rollout in order."""
    limit: float | None
    """Above it the sampling check refuses a single token, nats, and above half of it counts the token; None if the run has
    no bound for the two engines."""


class Rescoring:
    """Computes gaps, and remembers them."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._turn = threading.Lock()
        self._known = OrderedDict[tuple[str, GroupRef], Gaps]()

    def gaps(self, where: str, place: GroupRef) -> Gaps:
        """The gaps of a group. Raises `NothingYet` while another is computed, or its seeds are secret; `StateError`."""
        if (known := self._known.get((where, place))) is not None:
            return known
        if not self._turn.acquire(blocking=False):  # guard: one-rescoring-at-a-time
            raise NothingYet("another group is being computed: reload the page in a few seconds")
        try:
            found = self._known[where, place] = self._computed(where, place)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
            return found
        finally:
            self._turn.release()

    def _computed(self, where: str, place: GroupRef) -> Gaps:
        command = [
            sys.executable,
            "-m",
            "shoal.views.web.replay_gap_requests",
            where,
            place.submission,
            str(place.index),
        ]
        try:
            done = subprocess.run(command, capture_output=True, timeout=self._limit_s, check=False)
            told = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            raise StateError(f"it took more than {self._limit_s:.0f} s: use the command below") from None
        except ValueError:
            last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise StateError(f"the program that computes gaps failed: {last[:200]}") from None
        if "error" in told:
            raise StateError(told["error"])
        return Gaps(tuple(tuple(gaps) for gaps in told["gaps"]), told["limit"])


# --- The program: `python -m shoal.views.web.replay_gap_requests RUN SUBMISSION INDEX` ---


def main(where: str, submission: str, index: int) -> None:
    """Print what `gaps_of` finds, or why it finds nothing."""
    try:
        told = asyncio.run(gaps_of(where, GroupRef(submission, index)))
    except (ShoalError, NothingYet, WireError) as error:
        told = {"error": str(error)}
    print(json.dumps(told))


async def gaps_of(where: str, place: GroupRef) -> dict[str, Any]:
    """The gaps of a group of a submission. Raises `ShoalError`; `NothingYet` while its seeds are secret."""
    from shoal.roles.auditor.token_scores import rebuilt, scored

    async with rebuilt(where, place, {}) as work:
        found = await scored(work)
    gaps = [[_finite(gap) for gap in score.gaps_P.tolist()] for score in found.scores_G]
    return {"gaps": gaps, "limit": found.limits.gap if found.limits else None}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
