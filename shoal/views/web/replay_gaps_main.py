"""Replay gaps of one group's tokens, as a program of its own: `python -m shoal.views.web.replay_gaps_main RUN SUBMISSION
INDEX`.

`roles/auditor/rescore` computes. It prints one line of JSON: the gaps of each rollout's policy tokens, in nats, and the
limit of one token; or the error. It judges nothing.
"""

import asyncio
import json
import math
import sys
from typing import Any

from shoal.errors import NothingYet, ShoalError
from shoal.protocol.encoding import WireError
from shoal.roles.auditor.rescore import rebuilt, scored
from shoal.runs.replay import GroupRef


def main(where: str, submission: str, index: int) -> None:
    """Print what `gaps_of` finds, or why it finds nothing."""
    try:
        told = asyncio.run(gaps_of(where, GroupRef(submission, index)))
    except (ShoalError, NothingYet, WireError) as error:
        told = {"error": str(error)}
    print(json.dumps(told))


async def gaps_of(where: str, place: GroupRef) -> dict[str, Any]:
    """The gaps of a group of a submission. Raises `ShoalError`; `NothingYet` while its seeds are secret."""
    async with rebuilt(where, place, {}) as work:
        found = await scored(work)
    gaps = [[_finite(gap) for gap in score.gaps_P.tolist()] for score in found.scores_G]
    return {"gaps": gaps, "limit": found.limits.gap if found.limits else None}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
