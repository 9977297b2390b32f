"""What a person sees of a calibration while it works: a counter in a terminal, one line elsewhere."""

import sys


def progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{what}: {done} of {total}" if done < total else "\r\033[K", end="", file=sys.stderr, flush=True)
    elif done == 0:
        say(f"{what} ...")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
