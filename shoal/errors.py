"""Errors for users: one line saying what happened, why, and what to do.

Raised by every room, printed by `cli` without a traceback, exit code 2. Bugs of ours are assertions;
a stranger's fault is a verdict, which is data.
"""


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
