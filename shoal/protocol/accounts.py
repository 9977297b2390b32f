"""What a run says about pay: lines that explain it, and balances that are signed.

Made by the coordinator from the log, read by nodes and auditors. Like `types`, these hold data and know nothing of how
it is come by.
"""

from shoal.protocol.types import Answer, Message


class CreditLine(Answer, frozen=True):
    """One event that touched a node's pay, and why."""

    seq: int
    """Of the event in the log."""
    time: float
    kind: str
    """Of the event."""
    credits: int
    """By how much the balance changed, policy tokens; 0 for work that was not paid."""
    detail: str
    """One line for a person."""
    version: int = -1
    slot: int = -1
    submission: str = ""
    validators: tuple[str, ...] = ()
    """Whose verdicts these are; empty where no verdict is meant, or where it lies on an earlier page."""
    audited: bool = False
    check: str = ""
    """That refused the group, with its figure and bound."""
    figure: float = 0.0
    bound: float = 0.0


class CreditPage(Answer, frozen=True):
    """`GET /v1/nodes/{key}/credits`: a node's pay explained, in the order of the log."""

    node: str
    leases: int
    """Ever granted to it."""
    lapsed: int
    """Of these, not filled in time."""
    lines: tuple[CreditLine, ...]
    after: int
    """Ask with this for the next page."""
    more: bool
    """Whether the log goes on after this page."""


class Statement(Message, frozen=True):
    """`GET /v1/nodes/{key}/statement`: a balance, signed by the run key over the statement with an empty signature."""

    run: str
    run_key: str
    """That signs. The run's first event names it."""
    node: str
    name: str
    credits: int
    """Balance after event `seq`, policy tokens."""
    seq: int
    head: str
    """Hash of event `seq`: the balance is what replaying the log up to it gives."""
    time: float
    signature: str
