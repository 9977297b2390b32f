"""Errors for users: one line that says what happened, why, and what to do.

Every room raises them. `cli` prints them without a traceback and exits with code 2. Our own bugs are assertions; a
stranger's fault is a verdict, which is data.
"""

import errno

EXIT_DONE, EXIT_NO, EXIT_USER_ERROR, EXIT_TRY_AGAIN, EXIT_INTERRUPTED = 0, 1, 2, 75, 130
"""Exit codes of commands. A role ends with EXIT_USER_ERROR if a person must act (its last line says how), and with
EXIT_TRY_AGAIN if another node could not be reached, so that starting again may help."""

NO_TORCH = "torch is not installed: pip install 'shoal[torch]'"

USER_MUST_FIX = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""System errors that only the user can fix: a full disk, a read-only disk, missing permissions."""


class ShoalError(ValueError):
    """Something that a user can fix. The message is one line and says how."""


class ConfigError(ShoalError):
    """A run file or an option is wrong."""


class StateError(ShoalError):
    """The disk holds something wrong: corrupt checkpoint, changed run file, broken log, full disk."""


class Overreach(StateError):
    """A run asks for more time or memory than this node gives it. It is evidence against no worker."""


class Undecided(Overreach):
    """The sandbox stopped an environment that a validator replays. Another machine might not stop it: the slot is void."""


class PeerError(ShoalError):
    """Another node cannot be reached, refuses us, or sent something wrong."""


class Superseded(PeerError):
    """The lease was given to another worker or is too old: drop the work and ask for the next."""


class NothingYet(PeerError):
    """The requested thing does not exist yet: ask again later."""


TOO_MANY_FILES = (
    "this process has too many files and connections open. Raise its limit (ulimit -n), or close some connections"
)
"""Cause and remedy in one text, because databases and files report this fault in different words."""


def cause_of(error: Exception) -> str:
    """In a few words, why reading or writing failed.

    An `OSError` that collects others (`shutil.Error`) has no `strerror`, so this names its first cause.
    """
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return TOO_MANY_FILES
    gathered = error.args[0] if error.args else None
    if isinstance(gathered, list) and gathered:
        return str(gathered[0][-1])
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def fault_of_user(error: BaseException) -> ShoalError | None:
    """The fault that the user must fix, if there is one. Tasks that ran side by side wrap it in groups."""
    if isinstance(error, ShoalError):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return ShoalError(NO_TORCH)
    if isinstance(error, MemoryError):
        return ShoalError(
            "there is not enough memory: close other programs, or allow a node more (`shoal join --max-memory MB`)"
        )
    if isinstance(error, OSError) and error.errno in USER_MUST_FIX:
        place = f" {error.filename}" if error.filename else ""
        return ShoalError(f"cannot write{place}: {cause_of(error)}. Free some disk or fix the permissions, then go on")
    if isinstance(error, BaseExceptionGroup):
        faults = [fault_of_user(inner) for inner in error.exceptions]
        return None if None in faults else faults[0]
    return None
