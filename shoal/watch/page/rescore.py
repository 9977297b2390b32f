"""Replay gaps of one group's tokens, as a program of its own: `python -m shoal.watch.page.rescore RUN SUBMISSION INDEX`.

Started by `gaps`, so that the page's process loads no model. It takes the auditor's way: seeds from the log, weights
verified, one prefill. It prints one line of JSON: the gaps of each rollout's policy tokens, in nats, and the limit of one
token; or the error. It judges nothing.

Axes: P tokens of one rollout that the policy wrote.
"""

import asyncio
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from shoal.engine.open import EngineSpec
from shoal.errors import ConfigError, NothingYet, ShoalError
from shoal.proofs.context import by_group, score_requests
from shoal.protocol.bounds import bounds_for
from shoal.protocol.continuations import is_continued_slot
from shoal.protocol.types import Submission
from shoal.protocol.wire import WireError, from_msgpack
from shoal.roles.auditor.bench import Bench
from shoal.roles.auditor.evidence import leased
from shoal.roles.auditor.log import replay_log
from shoal.roles.auditor.source import open_run
from shoal.watch.reading.groups import decoded


def main(place: str, submission: str, index: int) -> None:
    """Print what `gaps_of` finds, or why it finds nothing."""
    try:
        told = asyncio.run(gaps_of(place, submission, index))
    except (ShoalError, NothingYet, WireError) as error:
        told = {"error": str(error)}
    print(json.dumps(told))


async def gaps_of(place: str, submission: str, index: int) -> dict[str, Any]:
    """The gaps of a group of a submission. Raises `ShoalError`; `NothingYet` while its seeds are secret."""
    async with open_run(place) as run:
        log = await replay_log(run)
        state = log.state
        if submission not in state.submissions:
            raise ConfigError(f"the log has no submission {submission[:12]}")
        lease = state.leases[state.submissions[submission].lease]
        if lease.version not in log.links:
            raise NothingYet(
                f"the seeds of version {lease.version} are secret until nothing of it can be submitted any more: wait"
            )
        sent = from_msgpack(await run.blob(submission), Submission)
        group = decoded(sent.groups[index])
        if is_continued_slot(group.slot, state.rules.block_groups):
            raise ConfigError("a continuation begins within another rollout: `shoal audit` recomputes it")
        asked = leased(state, lease, bytes.fromhex(log.links[lease.version].link))
        slot = next((slot for block in asked.blocks for slot in block.slots if slot.slot == group.slot), None)
        if slot is None:
            raise ConfigError(f"the group says slot {group.slot}, which its lease does not have")
        with tempfile.TemporaryDirectory(prefix="shoal-gaps-") as home:
            bench = Bench(run, log, {}, EngineSpec(threads=1), Path(home), 0)
            engine = await bench.take_weights(lease.version)
            scores = by_group([group], bench.tools(engine).score(score_requests(slot, group)))[0]
        bounds = bounds_for(state.rules, sent.engine.implementation, engine.facts.implementation, state.rules.dtype)
    gaps = [[_finite(gap) for gap in score.gaps_P.tolist()] for score in scores]
    return {"gaps": gaps, "limit": bounds.gap if bounds else None}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
