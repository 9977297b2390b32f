"""What a run says about pay: lines that explain it, and signed balances.

The coordinator makes them from the log; nodes and auditors read them. Like `types`, they only hold data. They do not know
how pay is computed.
"""

from shoal.protocol.messages import Message, Response


class CreditLine(Response, frozen=True):
    """One event that touched a node's pay, and why."""

    seq: int
    """Of the event in the log."""
    time: float
    kind: str
    """Of the event."""
    credits: int
    """Change of the balance, policy tokens; 0 for work that was not paid."""
    detail: str
    """One line for people to read."""
    version: int = -1
    slot: int = -1
    submission: str = ""
    validators: tuple[str, ...] = ()
    """Keys of those who gave the verdicts; empty if the line is about no verdict, or if it is on an earlier page."""
    audited: bool = False
    check: str = ""
    """The check that refused the group; its figure and bound follow."""
    figure: float = 0.0
    bound: float = 0.0


class CreditPage(Response, frozen=True):
    """`GET /v1/nodes/{key}/credits`: a node's pay explained, in the order of the log."""

    node: str
    leases: int
    """All leases that the node was ever granted."""
    lapsed: int
    """How many of them lapsed."""
    lines: tuple[CreditLine, ...]
    after: int
    """To get the next page, ask with this value."""
    more: bool
    """Whether there is a next page."""


class Statement(Message, frozen=True):
    """`GET /v1/nodes/{key}/statement`: a balance, signed by the run key over the statement with an empty signature."""

    run: str
    run_key: str
    """The key that signs. The run's first event names it."""
    node: str
    name: str
    credits: int
    """Balance after event `seq`, policy tokens."""
    seq: int
    head: str
    """Hash of event `seq`: the balance is what replaying the log up to it gives."""
    time: float
    signature: str
