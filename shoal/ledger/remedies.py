"""What a host may do about a wait or a pause, as sentences. Views show them whole where the cause is cropped."""

from shoal.protocol.rollout_validation import unbegun_remedy

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
