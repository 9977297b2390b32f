"""Errors for users: one line saying what happened, why, and what to do.

Raised by every room, printed by `cli` without a traceback, exit code 2. Bugs of ours are assertions;
a stranger's fault is a verdict, which is data.
"""

import errno


class ShoalError(ValueError):
    """Something a user can mend. The message is one line and names the remedy."""


class ConfigError(ShoalError):
    """A run file or an option is wrong."""


class StateError(ShoalError):
    """What is on disk does not fit: corrupt checkpoint, changed run file, broken log, full disk."""


class PeerError(ShoalError):
    """Another node cannot be reached, refuses us, or sent something wrong."""


class Superseded(PeerError):
    """The lease was given to another worker or is too old: drop the work and ask for the next."""


class NothingYet(PeerError):
    """What was asked for does not exist yet: ask again later."""


TOO_MANY_FILES = (
    "this process has too many files and connections open. Raise its limit (ulimit -n), or close some connections"
)
"""Cause and remedy in one, because databases and files report it in different words."""


def cause_of(error: Exception) -> str:
    """Why something could not be read or written, in a few words.

    An `OSError` that gathers others (`shutil.Error`) has no `strerror`: its first cause is named instead.
    """
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return TOO_MANY_FILES
    gathered = error.args[0] if error.args else None
    if isinstance(gathered, list) and gathered:
        return str(gathered[0][-1])
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
