"""What keeps an index from being built, as an error with a sentence: a full disk, or a stranger's run that no shoal
wrote."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.errors import ShoalError, StateError
from shoal.ledger.log.check import FAULTS


@contextmanager
def told_as_errors(run: str) -> Iterator[None]:
    """Turn a fault of the disk or of a stranger's run into a `StateError` with a sentence."""
    try:
        yield
    except ShoalError:
        raise
    except sqlite3.IntegrityError:
        raise StateError(
            f"another process has written what this one read of {run} into the same index: give one of them another place"
        ) from None
    except sqlite3.Error as error:
        busy = getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY")
        remedy = "Stop the other process that writes to it" if busy else "Free some space"
        # guard: full-disk-is-told
        raise StateError(f"the index cannot be written: {error}. {remedy}, or give another place") from None
    except OverflowError:
        raise StateError(f"the run {run} has larger numbers than a run can have: do not trust it") from None
    except (*FAULTS, RecursionError) as fault:
        # guard: odd-events-are-told
        raise StateError(
            f"the run {run} holds what no shoal writes ({type(fault).__name__}: {str(fault)[:100]}): do not trust it"
        ) from fault
