"""The latest signed requests for leases, so that one that is sent again gets no second lease.

Called by `api` for each poll. A worker's key signs each poll once, so the same request a second time comes from a proxy
that repeats requests, or from an attacker. It gets the lease that the poll got, or is told to come back; an older poll is
refused, and an honest client signs the next one. This is in memory alone: after a restart, each poll of the last
SIGNATURE_WINDOW_S seconds that its key signed after its latest join or leave may get one lease again. What the log holds
stays refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from shoal.ledger.answers import Refused
from shoal.ledger.rules.members import member_as, refuse_replayed
from shoal.ledger.state import State
from shoal.protocol.constants import KEY_REQUESTS_PER_S
from shoal.protocol.identity import Caller


class Poll:
    """One signed request for a lease, however often it arrives."""

    def __init__(self) -> None:
        self.lease = ""
        """The lease that it got."""
        self.over = False
        """Whether it was answered, or its sender has gone."""


class Asked:
    """The polls that each worker signed in its latest second."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[int, dict[str, Poll]]] = {}
        """By key: when it signed, and its polls of that second by nonce."""

    @contextmanager
    def poll(self, caller: Caller, state: State) -> Iterator[Poll]:
        """The poll that a request is, for as long as its answer takes. Raises `Refused`."""
        member = member_as(state, caller.key, "worker")  # strangers take no memory
        refuse_replayed(caller.created, member.signed, changes=False)  # guard: poll-from-before-the-join
        self.refuse_older(caller)
        if caller.key not in self._latest or caller.created > self._latest[caller.key][0]:
            self._latest[caller.key] = (caller.created, {})
        polls = self._latest[caller.key][1]
        if len(polls) >= KEY_REQUESTS_PER_S and caller.nonce not in polls:  # guard: polls-of-a-second
            raise Refused("replayed", f"more than {KEY_REQUESTS_PER_S:.0f} requests for a lease are signed at "
                          f"{caller.created}: sign it again in a second")  # fmt: skip
        poll = polls.setdefault(caller.nonce, Poll())
        try:
            yield poll
        finally:
            poll.over = True

    def refuse_older(self, caller: Caller) -> None:
        """Refuse a request that was signed before the key's latest poll. Raises `Refused`."""
        created, _ = self._latest.get(caller.key, (0, {}))
        refuse_replayed(caller.created, created, changes=False)  # guard: old-poll
