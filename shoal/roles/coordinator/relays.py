"""The relays that clients are told of: each has proved that it serves at its URL, and is probed as long as it is listed.

Called by `api`, and by the role for the time that it takes. A stranger's URL gets one small request, whatever is offered
and by how many keys, and only at an address outside. All of this is in memory: relays earn nothing, and after a restart
they offer themselves again. What a client says about a relay changes nothing here.
"""

import asyncio
import logging
import random
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import httpx

from shoal.errors import PeerError
from shoal.net import outside
from shoal.net.server import Buckets, network_of
from shoal.protocol.relays import PROOF_PATH, is_proof
from shoal.protocol.types import fact
from shoal.protocol.types.relays import RelayEntry, RelayOffer, RelayProof, RelayStanding
from shoal.protocol.wire import WireError, from_json

T = TypeVar("T")

log = logging.getLogger("coordinator")

MOST_LISTED, MOST_OF_A_KEY, MOST_QUEUED = 256, 2, 32

TOLD = 20
"""A client is told of so many at random."""

OFFERS_PER_S, OFFERS_BURST = 0.1, 10
"""Offers of unknown URLs from one address."""

ASK_AGAIN_S = 600.0
"""A URL, and a network address, that did not prove itself is not asked again sooner."""

CHALLENGES_PER_S = 1.0
"""Of all URLs together."""

CHALLENGE_S, CHALLENGE_BYTES = 5.0, 1024

OFFER_AGAIN_S, LAPSES_S = 60.0, 900.0
"""A relay repeats its offer; without that it is not listed any more."""

PROBE_EVERY_S, PROBE_BYTES, PROBE_S = 15.0, 64 << 10, 10.0

MOST_WRONG, MOST_FAILED = 2, 5
"""A relay is dropped after so many wrong answers, or so many in a row that did not come."""

REMEMBERED = 4096
"""URLs and addresses whose last challenge is remembered."""


@dataclass
class Listed:
    """A relay that proved itself."""

    url: httpx.URL
    key: str
    address: str
    seen_at: float
    wrong: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Waiting:
    """An offer whose challenge is to be sent."""

    url: httpx.URL
    own: str
    """The offerer's address, if the URL may be there although it is inside a network."""


class RelayBook:
    """The relays of a run."""

    def __init__(
        self,
        run: str,
        clock: Callable[[], float],
        sample: Callable[[random.Random, int], tuple[str, int, bytes] | None],
        *,
        may_be_inside: bool,
        rng: random.Random | None = None,
    ) -> None:
        """`sample` gives a random piece of a chunk that relays should have: hash, offset and bytes. `may_be_inside`: no
        proxy is in front, so callers' addresses are their own, and a relay inside a network may name its own address."""
        self._run, self._clock, self._sample, self._may_be_inside = run, clock, sample, may_be_inside
        self._rng = rng or random.Random(secrets.randbits(64))
        self._listed: dict[str, Listed] = {}
        self._queue: OrderedDict[str, Waiting] = OrderedDict()
        self._refused: OrderedDict[str, tuple[float, str]] = OrderedDict()
        """Until when a URL is not asked again, and why."""
        self._asked: OrderedDict[str, float] = OrderedDict()
        """When a network address was asked and did not prove itself."""
        self._proofs: OrderedDict[str, tuple[str, str, float]] = OrderedDict()
        """Whose key a URL proved, at which address and when. Somebody else may have offered it."""
        self._drops: OrderedDict[str, int] = OrderedDict()
        self._offers = Buckets(OFFERS_PER_S, OFFERS_BURST)
        self._work = asyncio.Event()

    def told(self) -> list[RelayEntry]:
        """Some of the listed relays."""
        self._forget_lapsed()
        some = self._rng.sample(list(self._listed.values()), min(TOLD, len(self._listed)))
        return [RelayEntry(str(each.url), each.address, each.key) for each in some]

    def offer(self, key: str, offered: RelayOffer, host: str, proxied: bool) -> RelayStanding:
        """Take the offer of a key that calls from `host`; a challenge follows if one is needed. Raises `PeerError`.

        `proxied`: the request says that it came through a proxy, so the address may not be the caller's own.
        """
        own = host if self._may_be_inside and not proxied else ""
        url = outside.checked_url(offered.url or _url_of(host, offered.port))
        name, now = str(url), self._clock()
        known = self._listed.get(name)
        if known is not None and known.key == key:
            known.seen_at = now
            return RelayStanding(name, True, "", OFFER_AGAIN_S)
        reason, retry = self._why_not(key)
        if reason:
            return RelayStanding(name, False, reason, retry)
        if (proof := self._proofs.get(name)) and proof[0] == key and now - proof[2] < ASK_AGAIN_S:
            self._list(url, key, proof[1])
            return RelayStanding(name, True, "", OFFER_AGAIN_S)
        until, why = self._refused.get(name, (0.0, ""))
        if until > now:  # guard: one-challenge-a-url
            return RelayStanding(name, False, f"{why}; it is asked again later", until - now)
        if name not in self._queue:
            wait_s = self._offers.take(network_of(host), now)
            if wait_s > 0 or len(self._queue) >= MOST_QUEUED:  # guard: offers-of-an-address
                return RelayStanding(
                    name, False, "too many offers wait: this one is repeated by itself", max(wait_s, 30.0)
                )
            self._queue[name] = Waiting(url, own)
            self._work.set()
        return RelayStanding(name, False, "it is being asked to prove its URL", 2.0)

    def _why_not(self, key: str) -> tuple[str, float]:
        """Why a key cannot have this URL listed whatever it proves, and when to come again."""
        self._forget_lapsed()
        if sum(each.key == key for each in self._listed.values()) >= MOST_OF_A_KEY:  # guard: urls-of-a-key
            return f"a key may have {MOST_OF_A_KEY} URLs listed: start another relay with another --home", OFFER_AGAIN_S
        if len(self._listed) >= MOST_LISTED:
            return "enough relays are listed", OFFER_AGAIN_S
        return "", 0.0

    # --- what takes time ---

    async def run(self) -> None:
        """Send challenges and probes, one after another, until cancelled."""
        probe_at = self._clock() + PROBE_EVERY_S
        while True:
            if self._clock() >= probe_at:  # first, so that a queue of offers keeps no liar listed
                probe_at = self._clock() + PROBE_EVERY_S
                await self._probe()
            elif self._queue:
                _, waiting = self._queue.popitem(last=False)
                await self._challenge(waiting)
                await asyncio.sleep(1 / CHALLENGES_PER_S)
            else:
                self._work.clear()
                try:
                    async with asyncio.timeout(min(PROBE_EVERY_S, max(0.01, probe_at - self._clock()))):
                        await self._work.wait()
                except TimeoutError:
                    continue

    async def _challenge(self, waiting: Waiting) -> None:
        """Ask a URL once which key serves there. That key may have it listed."""
        name, url, now = str(waiting.url), waiting.url, self._clock()
        try:
            address = await outside.judged_address(url, waiting.own)
            network = network_of(address)
            is_own = address == waiting.own
            # guard: one-challenge-an-address
            if not is_own and now - self._asked.get(network, float("-inf")) < ASK_AGAIN_S:
                raise PeerError(f"{address} was asked for another URL and proved nothing")
            _remember(self._asked, network, now)
            _remember(self._refused, name, (now + ASK_AGAIN_S, "it was asked a moment ago"))
            nonce = secrets.token_urlsafe(24)
            status, body = await outside.ask(
                url, address, f"{PROOF_PATH}/{nonce}", cap=CHALLENGE_BYTES, limit_s=CHALLENGE_S
            )
            proof = from_json(body, RelayProof) if status == 200 else None
            if proof is None or not is_proof(proof.key, self._run, nonce, proof.signature):  # guard: proof-of-a-url
                raise PeerError(f"it answered HTTP {status} without a proof: no relay of this run serves there")
        except (PeerError, WireError) as error:
            _remember(self._refused, name, (self._clock() + ASK_AGAIN_S, fact(str(error))))
            return
        self._asked.pop(network, None)
        _remember(self._refused, name, (self._clock() + ASK_AGAIN_S, "it is the URL of another key"))
        _remember(self._proofs, name, (proof.key, address, self._clock()))

    async def _probe(self) -> None:
        """Compare a piece of a chunk that a relay serves with ours."""
        self._forget_lapsed()
        piece = self._sample(self._rng, PROBE_BYTES)
        if piece is None or not self._listed:
            return
        relay = self._rng.choice(list(self._listed.values()))
        digest, start, data = piece
        try:
            status, body = await outside.ask(
                relay.url, relay.address, f"/v1/blobs/{digest}", cap=start + len(data), limit_s=PROBE_S,
                headers={"range": f"bytes={start}-{start + len(data) - 1}"},
            )  # fmt: skip
        except PeerError as error:
            relay.failed += 1
            if relay.failed >= MOST_FAILED:
                self._drop(relay, f"{MOST_FAILED} probes in a row failed, the last with: {error}")
            return
        if status == 404:
            return  # it is still filling
        relay.failed = 0 if status in (200, 206) else relay.failed + 1
        if status in (200, 206) and (body if status == 206 else body[start:]) != data:
            relay.wrong += 1
        if relay.wrong >= MOST_WRONG or relay.failed >= MOST_FAILED:  # guard: dropped-after-own-probe
            self._drop(relay, f"it sent {relay.wrong} wrong chunks, and failed {relay.failed} times in a row")

    # --- the list ---

    def _list(self, url: httpx.URL, key: str, address: str) -> None:
        self._listed[str(url)] = Listed(url, key, address, self._clock())
        log.info("relay=%s address=%s key=%s listed=true", url, address, key[:16])

    def _drop(self, relay: Listed, why: str) -> None:
        """Take a relay off the list, each time for twice as long."""
        name, drops = str(relay.url), self._drops.get(str(relay.url), 0)
        _remember(self._drops, name, drops + 1)
        del self._listed[name]
        self._proofs.pop(name, None)
        _remember(self._refused, name, (self._clock() + ASK_AGAIN_S * 2 ** min(drops, 10), fact(f"dropped: {why}")))
        log.warning("relay=%s key=%s listed=false reason=%s", name, relay.key[:16], why)

    def _forget_lapsed(self) -> None:
        now = self._clock()
        for name in [name for name, each in self._listed.items() if now - each.seen_at > LAPSES_S]:
            del self._listed[name]


def _remember(book: "OrderedDict[str, T]", name: str, value: T) -> None:
    """Note something of a name; the oldest notes go."""
    book.pop(name, None)
    book[name] = value
    if len(book) > REMEMBERED:
        book.popitem(last=False)


def _url_of(host: str, port: int) -> str:
    if not 0 < port < 65536:
        raise PeerError("the offer has neither a URL nor a port")
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
