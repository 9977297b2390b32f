"""The two answers to a command that are not events: it is against the rules, or there is nothing to give yet."""

from shoal.errors import ShoalError


class Refused(ShoalError):
    """The command is against the rules. The log does not record it; its sender gets the reason."""

    def __init__(self, code: str, message: str) -> None:
        """`code` is a stable word, such as "superseded"; `message` says what happened and what to do."""
        super().__init__(message)
        self.code = code


class Wait(ShoalError):
    """There is nothing to give now; the message says why."""

    def __init__(self, reason: str, retry_s: float) -> None:
        """`retry_s` is when to ask again, in seconds."""
        super().__init__(reason)
        self.retry_s = retry_s


FAULTS = (KeyError, IndexError, ValueError, TypeError, AttributeError, ArithmeticError, AssertionError)
"""What rules and state raise over events that no run of these rules ever wrote."""
