"""Relays, which serve weights that they fetched: how one is offered to the coordinator, proves its URL, and is listed."""

from shoal.protocol.messages.base import Message, Response, Url


class RelayOffer(Message, frozen=True):
    """`POST /v1/relays`: the relay whose key signs the request serves chunks at this URL."""

    url: Url = ""
    """Empty: http, at `port` of the address that the request comes from."""
    port: int = 0


class RelayStanding(Response, frozen=True):
    """Answer to an offer."""

    url: str
    listed: bool
    """Whether clients are told of it."""
    reason: str
    """Why not, or not yet."""
    retry_s: float
    """When to offer again. An offer that is not repeated lapses."""


class RelayProof(Response, frozen=True):
    """`GET /.well-known/shoal-relay/{nonce}` of a relay: who serves there."""

    key: str
    signature: str
    """Over the run and the nonce."""


class RelayEntry(Response, frozen=True):
    """One of `GET /v1/relays`."""

    url: str
    address: str
    """The network address at which the proof was read. Only this one is asked."""
    key: str
