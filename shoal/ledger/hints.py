"""What a host may do about a wait or a pause, as sentences: one place, because views show them whole where the cause is
cropped.

Said by the coordinator's board after the cause; `split_remedy` finds them again in what it said, also where a view has put
a run's folder into their commands.
"""

import re

from shoal.ledger.fault_rate import BOUNDS_REMEDY, FAULT_REMEDY, HANG_REMEDY, NUMBER_REMEDY, TEMPLATE_REMEDY
from shoal.protocol.rollout_validation import ENV_REMEDY, MODEL_REMEDY, ROOM_REMEDY, unbegun_remedy

ALARM_REMEDY = "Look into it, then `shoal admin resume` or `shoal admin drain`"
NO_SIGNAL_REMEDY = "Look at some of them, then `shoal admin resume` or `shoal admin drain`"
SILENT_REMEDY = "Start it again (`shoal validate URL`), or admit another: `shoal admin admit RUN_DIR KEY`"
CONTINUE_REMEDY = "It goes on with `kill -CONT PID`"
IS_STOPPED = "is stopped (SIGSTOP or a debugger)"
"""Of a process of the host: then nothing else need be done."""
WORKER_REMEDY = "Start a silent worker again, or let others join: `shoal join URL`"
ADMIT_REMEDY = (
    "`shoal validate URL` prints its key: type `shoal admin admit RUN_DIR KEY`, or set validators.count = 1 and start the "
    "host again"
)
SAYS_FORK = (
    "says that it has seen an event that is not in this log. If the run's folder was copied, or its log restored from a "
    "copy, stop now: what is written from here on forks the run. Host the original, restore a newer copy, or begin a new "
    "run from the newest checkpoint. If not, this node lies, and there is nothing to do"
)
"""After the name of a node."""
ENDED_CALLS = "logs/stage.log names each call that it ends"
NO_LEASE = "no lease is granted"
"""Of a wait for workers: the host keeps them waiting."""
QUOTA = "the host's disk quota is used up"
RAISE_QUOTA = "Raise storage.quota_mb above what is needed, and start the host again"
IN_A_NEW_RUN = ", in a new run: `shoal admin drain` ends this one"
"""After what to change if most tasks of a paused run can never begin: they cannot after a `resume` either."""


def no_signal_remedy(flat: int, unbegun: int, cause: str) -> str:
    """What to do about so many groups without signal, of which so many have tasks that cannot begin for a cause."""
    return unbegun_remedy(cause) + IN_A_NEW_RUN if unbegun > flat / 2 else NO_SIGNAL_REMEDY


def split_remedy(said: str) -> tuple[str, str]:
    """A sentence about a wait in two parts: the cause, which may be cropped where there is little room, and what the host
    may do, which may not; the second is empty if nothing is said of it, and the first has no full stop if something is."""
    found = _REMEDY.search(said)
    cause = said[: found.start()] if found else said
    return cause.rstrip().removesuffix(".") if found else cause.rstrip(), said[found.start() :] if found else ""


def _with_any_command(remedy: str) -> str:
    """A pattern of a remedy: in a view's commands there is more than in ours."""
    return "`[^`]*`".join(map(re.escape, re.split("`[^`]*`", remedy)))


_REMEDY = re.compile(
    "|".join(
        map(
            _with_any_command,
            (
                FAULT_REMEDY, BOUNDS_REMEDY, NUMBER_REMEDY, HANG_REMEDY, TEMPLATE_REMEDY,
                ALARM_REMEDY, NO_SIGNAL_REMEDY, SILENT_REMEDY, CONTINUE_REMEDY, WORKER_REMEDY, ADMIT_REMEDY,
                ROOM_REMEDY + IN_A_NEW_RUN,
                ENV_REMEDY + IN_A_NEW_RUN, MODEL_REMEDY + IN_A_NEW_RUN,
            ),
        )
    )
)  # fmt: skip
