"""Shows how far a calibration is: a counter in a terminal, one line elsewhere.

It writes to stderr, so that stdout holds the tables alone.
"""

import sys


def progress(what: str, done: int, total: int) -> None:
    """Show that `done` of `total` parts of the work are done."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}: {done} of {total}" if done < total else "\r\033[K", end="", file=sys.stderr, flush=True)
    elif done == 0:
        remark(f"{what} ...")


def remark(line: str) -> None:
    """Print a line that is not part of the tables."""
    print(line, file=sys.stderr, flush=True)
