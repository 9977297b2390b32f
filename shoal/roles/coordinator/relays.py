"""The relays that clients are told of: each has proved that it serves at its URL, and is probed as long as it is listed.

`relay_challenges` asks the URLs. All of this is in memory: relays earn nothing, and offer themselves again after a restart.
What a client says about a relay changes nothing here.
"""

import asyncio
import ipaddress
import logging
import random
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from shoal.errors import PeerError
from shoal.net import safe_http
from shoal.net.server import network_of
from shoal.net.urls import below, checked_url
from shoal.protocol.constants import MAX_CHUNK_BYTES
from shoal.protocol.messages.batches import RelayEntry, RelayOffer, RelayStanding
from shoal.roles.coordinator.relay_challenges import (
    ASK_AGAIN_S,
    OFFER_AGAIN_S,
    Challenges,
    Waiting,
    crowd_of,
    remember,
    subnet_to_evict,
)

log = logging.getLogger("coordinator")

MOST_LISTED, MOST_OF_A_KEY = 256, 2

MOST_OF_AN_ADDRESS = 4
"""Relays listed at one network address, but for this machine itself."""

TOLD = 20
"""Relays that a client is told of, drawn at random."""

CHALLENGES_PER_S = 1.0
"""Of all URLs together."""

LAPSES_S = 900.0
"""A relay that does not repeat its offer within this time is no longer listed."""

PROBE_EVERY_S, PROBE_BYTES, PROBE_S = 15.0, 64 << 10, 10.0

MOST_WRONG, MOST_FAILED = 2, 5
"""A relay is dropped after this many wrong answers, or after this many missing answers in a row."""


@dataclass
class Listed:
    """A relay that proved itself."""

    url: httpx.URL
    key: str
    address: str
    seen_at: float
    wrong: int = 0
    failed: int = 0


class RelayList:
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
        self._clock, self._sample, self._may_be_inside = clock, sample, may_be_inside
        self._rng = rng or random.Random(secrets.randbits(64))
        self._listed: dict[str, Listed] = {}
        self.challenges = Challenges(run, clock, self._rng)
        self._drops: OrderedDict[str, int] = OrderedDict()
        self._work = asyncio.Event()

    def told(self) -> list[RelayEntry]:
        """Some of the listed relays."""
        self._forget_lapsed()
        some = self._rng.sample(list(self._listed.values()), min(TOLD, len(self._listed)))
        return [RelayEntry(str(each.url), each.address, each.key) for each in some]

    def offer(self, key: str, offered: RelayOffer, host: str, proxied: bool) -> RelayStanding:
        """Take the offer of a key that calls from `host`; a challenge follows if one is needed. Raises `PeerError`.

        `proxied`: a proxy that is not trusted may have passed it on, so the address may not be the caller's own.
        """
        url = checked_url(offered.url or _url_of(host, offered.port))
        name, now = str(url), self._clock()
        self._forget_lapsed()
        known = self._listed.get(name)
        if known is not None and known.key == key:
            known.seen_at = now
            return RelayStanding(name, True, "", OFFER_AGAIN_S)
        if sum(each.key == key for each in self._listed.values()) >= MOST_OF_A_KEY:  # guard: urls-of-a-key
            reason = f"a key may have {MOST_OF_A_KEY} URLs listed: start another relay with another --home"
            return RelayStanding(name, False, reason, OFFER_AGAIN_S)
        if proof := self.challenges.proof(name, key):
            reason = self._list(url, key, proof.address)
            return RelayStanding(name, not reason, reason, OFFER_AGAIN_S)
        waiting = Waiting(url, "" if proxied else host, self._may_be_inside, now)
        reason, retry_s = self.challenges.offer(waiting, host)
        self._work.set()
        return RelayStanding(name, False, reason, retry_s)

    # --- what takes time ---

    async def run(self) -> None:
        """Send challenges and probes, one after another, until cancelled."""
        probe_at = self._clock() + PROBE_EVERY_S
        while True:
            if self._clock() >= probe_at:  # first, so that a queue of offers keeps no liar listed
                probe_at = self._clock() + PROBE_EVERY_S
                await self._probe()
            elif (waiting := self.challenges.next()) is not None:
                await self.challenges.challenge(waiting)
                await asyncio.sleep(1 / CHALLENGES_PER_S)
            else:
                self._work.clear()
                try:
                    async with asyncio.timeout(min(PROBE_EVERY_S, max(0.01, probe_at - self._clock()))):
                        await self._work.wait()
                except TimeoutError:
                    continue

    async def _probe(self) -> None:
        """Compare a piece of a chunk that a relay serves with ours."""
        self._forget_lapsed()
        piece = self._sample(self._rng, PROBE_BYTES)
        if piece is None or not self._listed:
            return
        relay = self._rng.choice(list(self._listed.values()))
        digest, start, data = piece
        try:
            answer = await safe_http.get(
                below(relay.url, f"/v1/blobs/{digest}"), cap=MAX_CHUNK_BYTES, deadline_s=PROBE_S, address=relay.address,
                headers={"range": f"bytes={start}-{start + len(data) - 1}"},
            )  # fmt: skip
        except PeerError as error:
            relay.failed += 1
            if relay.failed >= MOST_FAILED:
                self._drop(relay, f"{MOST_FAILED} probes in a row failed, the last with: {error}")
            return
        if answer.status == 404:
            return  # it is still filling
        relay.failed = 0 if answer.status in (200, 206) else relay.failed + 1
        sent = answer.body if answer.status == 206 else answer.body[start : start + len(data)]
        if answer.status in (200, 206) and sent != data:
            relay.wrong += 1
        if relay.wrong >= MOST_WRONG or relay.failed >= MOST_FAILED:  # guard: dropped-after-own-probe
            self._drop(relay, f"it sent {relay.wrong} wrong chunks, and failed {relay.failed} times in a row")

    # --- the list ---

    def _list(self, url: httpx.URL, key: str, address: str) -> str:
        """List a relay that proved itself; returns why not, if there is no place for it."""
        others = {name: each.address for name, each in self._listed.items() if name != str(url)}
        same = sum(network_of(other) == network_of(address) for other in others.values())
        if same >= MOST_OF_AN_ADDRESS and not ipaddress.ip_address(address).is_loopback:  # guard: relays-of-an-address
            return f"{MOST_OF_AN_ADDRESS} relays at {address} are listed, which is the limit: this one is not needed"
        if len(others) >= MOST_LISTED:
            crowd = subnet_to_evict(map(crowd_of, others.values()), crowd_of(address))
            if crowd is None:  # guard: largest-crowd-gives-way
                return f"{MOST_LISTED} relays are listed, which is the limit: this one is offered again by itself"
            last = next(name for name in reversed(others) if crowd_of(others[name]) == crowd)
            del self._listed[last]
            log.info("relay=%s listed=false reason='its network has the most, and another needs a place'", last)
        self._listed[str(url)] = Listed(url, key, address, self._clock())
        log.info("relay=%s address=%s key=%s listed=true", url, address, key[:16])
        return ""

    def _drop(self, relay: Listed, why: str) -> None:
        """Take a relay off the list, each time for twice as long."""
        name, drops = str(relay.url), self._drops.get(str(relay.url), 0)
        remember(self._drops, name, drops + 1)
        del self._listed[name]
        self.challenges.refuse(name, self._clock() + ASK_AGAIN_S * 2 ** min(drops, 10), f"dropped: {why}")
        log.warning("relay=%s key=%s listed=false reason=%s", name, relay.key[:16], why)

    def _forget_lapsed(self) -> None:
        now = self._clock()
        for name in [name for name, each in self._listed.items() if now - each.seen_at > LAPSES_S]:
            del self._listed[name]


def _url_of(host: str, port: int) -> str:
    if not 0 < port < 65536:
        raise PeerError("the offer has neither a URL nor a port: give --public-url or --port")
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
