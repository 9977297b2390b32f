"""What a person sees of a calibration while it works: a counter in a terminal, one line elsewhere.

Called by the other files of this room. It goes to stderr, so that the tables can be kept by themselves.
"""

import sys


def progress(what: str, done: int, total: int) -> None:
    """So much of the work is done."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}: {done} of {total}" if done < total else "\r\033[K", end="", file=sys.stderr, flush=True)
    elif done == 0:
        remark(f"{what} ...")


def remark(line: str) -> None:
    """A line beside the tables."""
    print(line, file=sys.stderr, flush=True)
