"""Requests by which relays prove whose URL they offer, and fair shares of few places that many strangers want.

Nobody gets all places with many addresses of one network.
"""

import ipaddress
import random
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import httpx

from shoal.errors import PeerError
from shoal.net import safe_http
from shoal.net.server import Buckets, network_of
from shoal.net.urls import below
from shoal.protocol.encoding import WireError, from_json
from shoal.protocol.host_signatures import PROOF_PATH, is_proof
from shoal.protocol.messages import fact
from shoal.protocol.messages.batches import RelayProof

OF_IPV4, OF_IPV6 = 24, 48
"""Bits of an address that name its crowd. One customer may have all addresses of a crowd."""


def crowd_of(host: str) -> str:
    """The network whose addresses share places, by an address; what is no address is a crowd of its own."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    address = getattr(address, "ipv4_mapped", None) or address
    return str(ipaddress.ip_network((address, OF_IPV4 if address.version == 4 else OF_IPV6), strict=False))


def subnet_to_evict(crowds: Iterable[str], newcomer: str) -> str | None:
    """Which crowd gives a place to one more of the newcomer's crowd, if all places are taken: the largest one, unless it
    would then be the smaller of the two."""
    counts = Counter(crowds)
    largest = max(counts, key=lambda crowd: counts[crowd], default=newcomer)
    return largest if counts[largest] >= counts[newcomer] + 2 else None


# --- proofs of URLs ---
#
# However many keys offer however many URLs, a network address outside gets one request in ASK_AGAIN_S. Who asks for it
# first has no advantage: those that wait for an address are drawn, and each network of offerers has one chance. An
# offerer's own address needs no turn.


T = TypeVar("T")

MOST_QUEUED = 32

MOST_IN_TURN = 16
"""Offers that wait for one address."""

OFFERS_PER_S, OFFERS_BURST = 0.1, 30
"""Offers of unknown URLs from one address: that of a lab, or of a proxy in front of the host."""

ASK_AGAIN_S = 600.0
"""Least time between two challenges of a URL, or of a network address, that did not prove itself."""

CHALLENGE_S, CHALLENGE_BYTES = 5.0, 1024

OFFER_AGAIN_S = 60.0
"""How often a relay repeats its offer."""

FORGOTTEN_S = 900.0
"""An offer that is not repeated loses its turn."""

BEING_ASKED = "it is being asked to prove its URL", 2.0
"""Why a URL is not listed yet, and when to offer it again."""

WAIT_S = 10.0
"""An offer for which there is no place is repeated after so long, or later."""

MOST_REASON_CHARS = 300
"""Longest reason that is told for not listing a URL."""

REMEMBERED = 4096
"""URLs and addresses whose last challenge is remembered."""


@dataclass
class Waiting:
    """An offer whose challenge is to be sent."""

    url: httpx.URL
    caller: str
    """The offerer's own address; empty if a proxy hides it."""
    may_be_inside: bool
    """Whether the URL may be at the caller's address, although that is inside a network."""
    seen_at: float

    @property
    def crowd(self) -> str:
        """The network of offerers that it belongs to."""
        return crowd_of(self.caller)


class Proof(NamedTuple):
    """Whose key a URL proved, at which address and when. Somebody else may have offered it."""

    key: str
    address: str
    at: float


class Challenges:
    """The URLs that wait for a challenge, and what came of the others."""

    def __init__(self, run: str, clock: Callable[[], float], rng: random.Random) -> None:
        self._run, self._clock, self._rng = run, clock, rng
        self.queue: OrderedDict[str, Waiting] = OrderedDict()
        self._turns: OrderedDict[str, dict[str, Waiting]] = OrderedDict()
        """Offers that wait until a network address may be asked again."""
        self._asking = set[str]()
        """URLs whose challenge is under way."""
        self._refused: OrderedDict[str, tuple[float, str]] = OrderedDict()
        """Until when a URL is not asked again, and why."""
        self._asked: OrderedDict[str, float] = OrderedDict()
        """When a network address was asked and did not prove itself."""
        self._proofs: OrderedDict[str, Proof] = OrderedDict()
        self._offers = Buckets(OFFERS_PER_S, OFFERS_BURST)

    def proof(self, name: str, key: str) -> Proof | None:
        """The proof that a URL gave for a key lately."""
        proof = self._proofs.get(name)
        return proof if proof and proof.key == key and self._clock() - proof.at < ASK_AGAIN_S else None

    def refuse(self, name: str, until: float, why: str) -> None:
        """Do not ask a URL again until then, whatever it proved."""
        self._proofs.pop(name, None)
        remember(self._refused, name, (until, fact(why, MOST_REASON_CHARS)))

    def offer(self, waiting: Waiting, host: str) -> tuple[str, float]:
        """Let an offer from `host` wait for its challenge. Returns why it is not listed yet, and when to come again."""
        name, now = str(waiting.url), waiting.seen_at
        if name in self._asking:
            return BEING_ASKED
        until, why = max(self._refused.get(each, (0.0, "")) for each in (name, _as_offered(waiting)))
        if until > now:  # guard: one-challenge-a-url
            return f"{why}; it is asked again later", until - now
        network = next((each for each, offers in self._turns.items() if name in offers), None)
        if network is not None:
            if network != network_of(waiting.caller):  # guard: own-url-needs-no-turn
                self._turns[network][name].seen_at = now
                return self._wait_of(network, now)
            del self._turns[network][name]  # somebody else had offered it
        if name in self.queue:
            return BEING_ASKED
        wait_s = self._offers.take(network_of(host), now)
        if wait_s > 0 or not _take_place(self.queue, waiting, MOST_QUEUED):  # guard: offers-of-an-address
            return "too many offers wait: this one is repeated by itself", max(wait_s, WAIT_S)
        return BEING_ASKED

    def _wait_of(self, network: str, now: float) -> tuple[str, float]:
        due_s = max(2.0, self._asked.get(network, now) + ASK_AGAIN_S - now)
        return (
            f"another URL at its address was asked before, and one of those that wait is drawn in {due_s / 60:.0f} min: "
            "offer a URL at the address from which this relay calls, or wait",
            min(OFFER_AGAIN_S, due_s),
        )

    def next(self) -> Waiting | None:
        """The offer whose challenge is due: one that waited for its address, or the first in the queue of a network of
        offerers that is drawn."""
        now = self._clock()
        for network in [each for each in self._turns if now - self._asked.get(each, float("-inf")) >= ASK_AGAIN_S]:
            offers = {n: each for n, each in self._turns.pop(network).items() if now - each.seen_at < FORGOTTEN_S}
            # guard: turns-are-drawn
            crowd = self._rng.choice(sorted({each.crowd for each in offers.values()}) or [""])
            drawn = self._rng.choice([n for n, each in offers.items() if each.crowd == crowd] or [""])
            due = offers.pop(drawn, None)
            if offers:
                remember(self._turns, network, offers)
            if due is not None:
                return due
        crowds = sorted({each.crowd for each in self.queue.values()})  # guard: crowds-share-the-queue
        crowd = self._rng.choice(crowds or [""])
        first = next((name for name, each in self.queue.items() if each.crowd == crowd), None)
        return self.queue.pop(first) if first is not None else None

    async def challenge(self, waiting: Waiting) -> None:
        """Ask a URL once which key serves there. That key may have it listed."""
        self._asking.add(name := str(waiting.url))
        try:
            await self._challenge(name, waiting)
        finally:
            self._asking.discard(name)

    async def _challenge(self, name: str, waiting: Waiting) -> None:
        url, now = waiting.url, self._clock()
        try:
            address = await safe_http.judged_address(url, waiting.caller if waiting.may_be_inside else "")
        except PeerError as error:
            # another offerer may be at that address  # guard: judged-for-its-offerer
            remember(self._refused, _as_offered(waiting), (now + ASK_AGAIN_S, fact(str(error), MOST_REASON_CHARS)))
            return
        network = network_of(address)
        before = self._asked.get(network, float("-inf"))
        was_asked = now - before < ASK_AGAIN_S
        # guard: one-challenge-an-address, own-address-needs-no-turn
        if was_asked and network != network_of(waiting.caller):
            offers = self._turns.get(network, {})
            if _take_place(offers, waiting, MOST_IN_TURN):
                remember(self._turns, network, offers)
            return
        remember(self._asked, network, now)
        try:
            nonce = secrets.token_urlsafe(24)
            place = below(url, f"{PROOF_PATH}/{nonce}")
            answer = await safe_http.get(place, cap=CHALLENGE_BYTES, deadline_s=CHALLENGE_S, address=address)
            proof = from_json(answer.body, RelayProof) if answer.status == 200 else None
            if proof is None or not is_proof(proof.key, self._run, nonce, proof.signature):  # guard: proof-of-a-url
                raise PeerError(
                    f"it answered HTTP {answer.status} without a proof, so no relay of this run serves there: start one "
                    "there, or check the URL"
                )
        except (PeerError, WireError) as error:
            remember(self._refused, name, (self._clock() + ASK_AGAIN_S, fact(str(error), MOST_REASON_CHARS)))
            return
        remember(self._asked, network, before)  # it proved itself
        remember(self._refused, name, (self._clock() + ASK_AGAIN_S, "it is the URL of another key"))
        remember(self._proofs, name, Proof(proof.key, address, self._clock()))


def _as_offered(waiting: Waiting) -> str:
    """The name of a URL as one caller offers it."""
    return f"{waiting.url} {waiting.caller}"


def _take_place(places: dict[str, Waiting], newcomer: Waiting, most: int) -> bool:
    """Let an offer wait among others; returns whether it does. A larger network of offerers gives way."""
    if len(places) >= most:
        crowd = subnet_to_evict((each.crowd for each in places.values()), newcomer.crowd)
        if crowd is None:
            return False
        last = next(name for name in reversed(places) if places[name].crowd == crowd)
        del places[last]  # guard: offers-of-a-crowd
    places[str(newcomer.url)] = newcomer
    return True


def remember(recent: "OrderedDict[str, T]", name: str, value: T) -> None:
    """Note something of a name; the oldest notes go."""
    recent.pop(name, None)
    recent[name] = value
    if len(recent) > REMEMBERED:
        recent.popitem(last=False)
