"""Errors for users: one line that says what happened, why, and what to do.

Every room raises them. `cli` prints them without a traceback and exits with code 2. Our own bugs are assertions; a
stranger's fault is a verdict, which is data.
"""

import errno
import re
import shlex
import shutil
import sys
from pathlib import Path

EXIT_DONE, EXIT_NO, EXIT_USER_ERROR, EXIT_TRY_AGAIN, EXIT_INTERRUPTED = 0, 1, 2, 75, 130
"""Exit codes of commands. A role ends with EXIT_USER_ERROR if a person must act (its last line says how), and with
EXIT_TRY_AGAIN if another node could not be reached, so that starting again may help."""

NOT_A_FOLDER = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
"""System errors of a file in the place of a folder, or the reverse: only the user knows which is meant."""

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""System errors that end when somebody frees some space."""

USER_MUST_FIX = (*DISK_FULL, errno.EROFS, errno.EACCES, errno.EPERM)
"""System errors that only the user can fix: a full disk, a read-only disk, missing permissions."""


def how_to_install(*extras: str) -> str:
    """The command that installs extras of this shoal, for an error's text.

    The name on PyPI is not ours. In a clone, pip takes the folder with its pinned versions; beside an installed wheel, the
    packages that the extras name.
    """
    clone, bin_dir = Path(__file__).parents[1], Path(sys.executable).parent
    where = "" if Path(shutil.which("pip") or "").parent == bin_dir else f" (with the pip of {bin_dir})"
    if (clone / "constraints.txt").is_file():
        place = "" if Path.cwd() == clone else f"{clone}/"
        target = f"{place.rstrip('/') or '.'}[{','.join(extras)}]"
        return f"pip install -c {shlex.quote(f'{place}constraints.txt')} -e {shlex.quote(target)}{where}"
    return f"pip install {shlex.join(_packages_of(extras))}{where}"


def _packages_of(extras: tuple[str, ...]) -> list[str]:
    """The packages of extras, as the installed shoal names them with their versions."""
    from importlib.metadata import requires

    found = []
    for line in requires("shoal") or ():
        package, _, condition = line.partition(";")
        if set(extras) & set(re.findall(r"""extra == ['"]([^'"]+)['"]""", condition)):
            found.append(package.strip())
    return found


def no_torch() -> str:
    """What is said where torch is needed and missing."""
    return f"torch is not installed: {how_to_install('torch')}"


class ShoalError(ValueError):
    """Something that a user can fix. The message is one line and says how."""


class MessagesRefused(ShoalError):
    """The policy's chat template or tokenizer does not take an environment's messages."""


class ConfigError(ShoalError):
    """A run file or an option is wrong."""


class PromptsTooLong(ConfigError):
    """The prompts of an environment leave the policy no room for a turn, so that none of its tasks can begin."""


class StateError(ShoalError):
    """The disk holds something wrong: corrupt checkpoint, changed run file, broken log, full disk."""


class Overreach(StateError):
    """A run asks for more time or memory than this node gives it. It is evidence against no worker."""


class Undecided(Overreach):
    """A call of an environment took too long, or ended its process. Another machine might not stop it: the lease is given
    back, and a validator's slot is void."""


class Interrupted(Overreach):
    """The node was told to stop while a call of an environment went on."""


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


def one_line(error: object, most_chars: int = 200) -> str:
    """What an error of another library says, cut, on one line."""
    return " ".join(str(error).split())[:most_chars] or type(error).__name__


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


def remedy_of(error: OSError) -> str:
    """What the user does so that a file can be written."""
    if error.errno in DISK_FULL:
        return "Free some space on that disk"
    if error.errno == errno.EFBIG:
        return "Raise the limit of file sizes (ulimit -f)"
    is_forbidden = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    return "Make the folder writable" if is_forbidden else "Correct its path"


def fault_of_user(error: BaseException) -> ShoalError | None:
    """The fault that the user must fix, if there is one. Tasks that ran side by side wrap it in groups."""
    if isinstance(error, ShoalError):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return ShoalError(no_torch())
    if isinstance(error, MemoryError):
        return ShoalError(
            "there is not enough memory: close other programs, or allow a node more (`shoal join --max-memory MB`)"
        )
    if isinstance(error, OSError) and error.errno in USER_MUST_FIX:
        place = f" {error.filename}" if error.filename else ""
        return ShoalError(f"cannot write{place}: {cause_of(error)}. Free some disk or fix the permissions, then go on")
    if isinstance(error, OSError) and error.errno in NOT_A_FOLDER and error.filename:
        return ShoalError(
            f"{error.filename} cannot be used ({cause_of(error)}): a file is where a folder is needed, or the reverse. "
            "Give another path"
        )
    if isinstance(error, BaseExceptionGroup):
        faults = [fault_of_user(inner) for inner in error.exceptions]
        return None if None in faults else faults[0]
    return None
