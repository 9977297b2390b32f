"""Errors for users: one line saying what happened, why, and what to do.

Raised by every room, printed by `cli` without a traceback, exit code 2. Bugs of ours are assertions;
a stranger's fault is a verdict, which is data.
"""

import errno

NO_TORCH = "torch is not installed: pip install 'shoal[torch]'"

USER_MUST_MEND = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""Faults of the system that are the user's to mend, wherever they turn up."""


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


def fault_of_user(error: BaseException) -> ShoalError | None:
    """What the user must mend, if that is what it is: tasks that ran side by side wrap it in groups."""
    if isinstance(error, ShoalError):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return ShoalError(NO_TORCH)
    if isinstance(error, OSError) and error.errno in USER_MUST_MEND:
        place = f" {error.filename}" if error.filename else ""
        return ShoalError(f"cannot write{place}: {cause_of(error)}. Free some disk or mend the permissions, then go on")
    if isinstance(error, BaseExceptionGroup):
        faults = [fault_of_user(inner) for inner in error.exceptions]
        return None if None in faults else faults[0]
    return None
