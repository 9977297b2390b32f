"""Offers of relays, most of them hostile: what the coordinator sends out for them, and who is listed."""

import asyncio
import random
import time
from dataclasses import dataclass, field

import httpx
import pytest

from shoal.errors import PeerError
from shoal.net import safe_http, urls
from shoal.net.urls import addresses_of
from shoal.protocol.encoding import to_json
from shoal.protocol.host_signatures import PROOF_PATH, sign_proof
from shoal.protocol.messages import RelayOffer, RelayProof
from shoal.protocol.signing import Key
from shoal.roles.coordinator import main, relay_challenges, relays
from shoal.roles.coordinator.relays import RelayList
from shoal.roles.node import serve_chunks
from shoal.weights.fetch.sources import HttpSource
from tests.roles.testbed import RunTestbed, tiny_run
from tests.weights.web import head, web_server

RUN = "r" * 32
HONEST, OTHER = Key.generate(), Key.generate()
OUTSIDE = "93.184.216.34"


@dataclass
class Internet:
    """What is asked, and who answers. Names resolve as `names` says; an address without a server refuses."""

    monkeypatch: pytest.MonkeyPatch
    now: float = 1000.0
    names: dict[str, list[str]] = field(default_factory=dict)
    servers: dict[str, Key | str] = field(default_factory=dict)
    """By URL: the relay that serves there, or what another server answers."""
    asked: list[str] = field(default_factory=list)
    may_be_inside: bool = True
    chunk: bytes = bytes(range(256)) * 512
    serves: bytes = b""

    def __post_init__(self):
        self.monkeypatch.setattr(urls, "addresses_of", self.addresses_of)
        self.monkeypatch.setattr(safe_http, "get", self.get)
        self.relay_list = RelayList(
            RUN, lambda: self.now, self.sample, may_be_inside=self.may_be_inside, rng=random.Random(0)
        )

    def sample(self, rng, most):
        return "c" * 64, 100, self.chunk[100 : 100 + most]

    async def addresses_of(self, host, port):
        if host in self.names:
            return self.names[host]
        return await addresses_of(host, port)

    async def get(self, url, *, cap, deadline_s, address, headers=None):
        self.asked.append(str(url))
        base, _, nonce = str(url).partition(f"{PROOF_PATH}/")
        server = self.servers.get(base.partition("/v1/blobs/")[0])
        if server is None:
            raise PeerError("connection refused")
        if not nonce:
            part = self.serves[100:][: len(self.sample(None, relays.PROBE_BYTES)[2])]
            return safe_http.Answer(206 if self.serves else 404, httpx.Headers(), part)
        proof = (
            server.encode()
            if isinstance(server, str)
            else to_json(RelayProof(server.public, sign_proof(server, RUN, nonce)))
        )
        return safe_http.Answer(200, httpx.Headers(), proof)

    def offer(self, key: Key, url: str = "", host: str = "198.51.100.7", port: int = 0, proxied: bool = False):
        return self.relay_list.offer(key.public, RelayOffer(url, port), host, proxied)

    def work(self):
        """Send all challenges that are due."""
        while (waiting := self.relay_list.challenges.next()) is not None:
            asyncio.run(self.relay_list.challenges.challenge(waiting))

    def probe(self, times: int = 1):
        for _ in range(times):
            asyncio.run(self.relay_list._probe())

    def listed(self):
        return [entry.url for entry in self.relay_list.told()]


@pytest.fixture
def net(monkeypatch):
    return Internet(monkeypatch)


def test_a_relay_that_proves_its_url_is_listed_with_the_address_that_was_asked(net):
    net.names["relay.example.net"] = [OUTSIDE]
    net.servers["https://relay.example.net/w"] = HONEST
    first = net.offer(HONEST, "https://relay.example.net/w/")
    assert not first.listed and first.retry_s < 5 and net.listed() == []
    net.work()
    assert net.offer(HONEST, "https://relay.example.net/w/").listed
    (entry,) = net.relay_list.told()
    assert (entry.url, entry.address, entry.key) == ("https://relay.example.net/w", OUTSIDE, HONEST.public)
    assert len(net.asked) == 1


def test_an_offer_that_comes_during_its_challenge_is_repeated_soon(net):
    """The third of three relays that begin together repeats its first offer when its challenge is under way."""
    net.servers["http://192.168.1.7:8480"], really, said = HONEST, net.get, []

    async def get(*args, **more):
        said.append(net.offer(HONEST, host="192.168.1.7", port=8480))
        return await really(*args, **more)

    net.monkeypatch.setattr(safe_http, "get", get)
    net.offer(HONEST, host="192.168.1.7", port=8480)
    net.work()
    assert not said[0].listed and said[0].retry_s < 5
    assert net.offer(HONEST, host="192.168.1.7", port=8480).listed and len(net.asked) == 1


@pytest.mark.parametrize(("host", "most"), [("127.0.0.1", 20), ("203.0.113.5", relays.MOST_OF_AN_ADDRESS)])
def test_twenty_machines_behind_one_address_know_within_a_minute_whether_they_are_listed(net, host, most):
    machines = {port: Key.generate() for port in range(9000, 9020)}
    net.servers |= {f"http://{host}:{port}": key for port, key in machines.items()}
    due, said = dict.fromkeys(machines, net.now), {}
    for _ in range(60):
        for port in [port for port, at in due.items() if at <= net.now]:
            said[port] = net.offer(machines[port], host=host, port=port)
            due[port] = net.now + said[port].retry_s
        if (waiting := net.relay_list.challenges.next()) is not None:
            asyncio.run(net.relay_list.challenges.challenge(waiting))
        net.now += 1 / relays.CHALLENGES_PER_S
    assert sum(each.listed for each in said.values()) == most
    assert all("which is the limit" in each.reason for each in said.values() if not each.listed)


HOSTILE = [
    "http://127.0.0.1:8000", "http://localhost:8000", "http://10.0.0.1:8000", "http://192.168.1.1:8000",
    "http://169.254.169.254", "http://[::1]:8000", "http://[::ffff:10.0.0.1]:8000", "http://0.0.0.0:8000",
    "http://inside.example.org:8000", "http://half.example.org:8000", "http://user:word@victim.example.org",
    "http://victim.example.org/?q=1", "http://victim.example.org/#x", "http://victim.example.org:22",
    "http://victim.example.org:25", "ftp://victim.example.org", "file:///etc/passwd", "gopher://victim.example.org:70",
    "http://victim.example.org/" + "a" * 300, "http://", "http://victim.example.org:99999", "//victim.example.org",
    "http://2130706433:8000", "http://0x7f.1:8000", "http://a..example.org:8080", f"http://{'a' * 70}.example.org:8080",
]  # fmt: skip


@pytest.mark.parametrize("url", HOSTILE)
def test_nothing_leaves_for_a_url_that_is_not_of_a_relay_outside(net, url):
    net.names |= {"inside.example.org": ["10.1.2.3"], "half.example.org": [OUTSIDE, "10.1.2.3"]}
    net.names["victim.example.org"] = [OUTSIDE]
    try:
        assert not net.offer(HONEST, url).listed
    except PeerError:
        pass
    net.work()
    assert net.asked == [] and net.listed() == []


def test_twenty_offers_of_other_peoples_urls_send_one_challenge_each_and_list_nothing(net):
    """Keys are free, paths are free, and names are cheap: the same server gets one request in ten minutes."""
    net.names |= {"victim.example.org": [OUTSIDE], "www.victim.example.org": [OUTSIDE]}
    net.servers["https://other.example.org"] = OTHER
    net.names["other.example.org"] = ["93.184.216.99"]
    urls = [f"https://victim.example.org/{i}" for i in range(8)] + ["https://www.victim.example.org"] * 4
    urls += [f"https://victim.example.org:{8000 + i}" for i in range(8)] + ["https://other.example.org"] * 4
    for i, url in enumerate(urls):
        net.offer(Key.generate(), url, host=f"198.51.100.{i}")
        net.work()
    for _ in range(3):  # and again
        for i, url in enumerate(urls):
            net.offer(Key.generate(), url, host=f"198.51.100.{i}")
        net.work()
    assert len(net.asked) == 2 and len({url.split("/")[2] for url in net.asked}) == 2
    assert net.listed() == []


def test_offers_of_one_address_and_the_queue_are_bounded(net):
    for i in range(200):
        net.names[f"h{i}.example.org"] = [f"93.184.{i % 200}.1"]
        net.offer(Key.generate(), f"http://h{i}.example.org")
    assert len(net.relay_list.challenges.queue) == relay_challenges.OFFERS_BURST
    for i in range(200):
        net.offer(Key.generate(), f"http://h{i}.example.org", host=f"198.51.{i}.1")
    assert len(net.relay_list.challenges.queue) == relay_challenges.MOST_QUEUED


def test_the_queue_has_room_for_one_however_many_addresses_of_a_network_offer(net):
    net.names |= {f"h{i}.example.org": [f"93.184.{i}.1"] for i in range(200)}
    for i in range(200):
        net.offer(Key.generate(), f"http://h{i}.example.org", host=f"2001:db8:1:{i:x}::1")
    net.names["relay.example.net"], net.servers["http://relay.example.net"] = [OUTSIDE], HONEST
    net.offer(HONEST, "http://relay.example.net", host="198.51.100.7")
    assert "http://relay.example.net" in net.relay_list.challenges.queue
    assert len(net.relay_list.challenges.queue) == relay_challenges.MOST_QUEUED
    net.work()
    assert net.offer(HONEST, "http://relay.example.net").listed


def test_networks_take_turns_in_the_queue(net):
    """Else one network could let all others wait for all its offers."""
    net.names |= {f"h{i}.example.org": [f"93.184.{i}.1"] for i in range(relay_challenges.MOST_QUEUED - 1)}
    for name in net.names:
        net.offer(Key.generate(), f"http://{name}", host=f"203.0.113.{name[1:].split('.')[0]}")
    net.servers["http://198.51.100.7:8480"] = HONEST
    net.offer(HONEST, host="198.51.100.7", port=8480)
    for _ in range(10):
        asyncio.run(net.relay_list.challenges.challenge(net.relay_list.challenges.next()))
    assert net.offer(HONEST, host="198.51.100.7", port=8480).listed


def fill(net, addresses):
    """Offer four relays at each of some addresses, each with a key of its own."""
    for address in addresses:
        for port in range(9000, 9006):
            key, name = Key.generate(), f"[{address}]" if ":" in address else address
            net.servers[f"http://{name}:{port}"] = key
            for _ in range(2):
                net.offer(key, host=address, port=port)
                net.work()
                net.now += 1


def test_an_address_has_few_relays_in_the_list_and_an_honest_home_gets_its_own(net, monkeypatch):
    monkeypatch.setattr(relays, "TOLD", 1000)
    fill(net, ["203.0.113.5"])
    assert len(net.listed()) == relays.MOST_OF_AN_ADDRESS
    fill(net, ["2001:db8::1", "2001:db8::2"])  # one home
    assert len(net.listed()) == 2 * relays.MOST_OF_AN_ADDRESS
    again = net.offer(net.servers["http://203.0.113.5:9005"], host="203.0.113.5", port=9005)
    assert not again.listed and "which is the limit" in again.reason


def test_a_network_that_fills_the_list_gives_way_to_relays_of_others(net, monkeypatch):
    monkeypatch.setattr(relays, "TOLD", 1000)
    monkeypatch.setattr(relays, "MOST_LISTED", 12)
    fill(net, ["203.0.113.1", "203.0.113.2", "203.0.113.3", "203.0.113.4"])
    assert len(net.listed()) == 12
    fill(net, ["198.51.100.1"])
    fill(net, ["192.0.2.1", "192.0.2.2"])
    crowds = [url.split("/")[2].rpartition(".")[0] for url in net.listed()]
    assert [crowds.count(crowd) for crowd in ("203.0.113", "198.51.100", "192.0.2")] == [4, 4, 4]
    fill(net, ["203.0.113.5"])
    assert sum("203.0.113" in url for url in net.listed()) == 4


def test_a_key_has_few_urls_and_the_list_is_bounded(net, monkeypatch):
    for i in range(4):
        net.names[f"h{i}.example.org"] = [f"93.184.216.{i}"]
        net.servers[f"http://h{i}.example.org"] = HONEST
        net.offer(HONEST, f"http://h{i}.example.org")
        net.work()
        net.offer(HONEST, f"http://h{i}.example.org")
    assert len(net.listed()) == relays.MOST_OF_A_KEY
    monkeypatch.setattr(relays, "MOST_LISTED", 2)
    net.names["next.example.org"], net.servers["http://next.example.org"] = ["93.184.216.77"], OTHER
    net.offer(OTHER, "http://next.example.org")
    net.work()
    assert not net.offer(OTHER, "http://next.example.org").listed


@pytest.mark.parametrize("said", ["", "{}", "x" * 5000, '{"key":"k","signature":"s"}', "<html>", "null"])
def test_a_server_that_is_no_relay_is_not_listed(net, said):
    net.names["victim.example.org"] = [OUTSIDE]
    net.servers["http://victim.example.org"] = said or " "
    net.offer(HONEST, "http://victim.example.org")
    net.work()
    again = net.offer(HONEST, "http://victim.example.org")
    assert not again.listed and again.retry_s > 500 and len(net.asked) == 1


def test_nobody_takes_the_url_of_another_relay_or_keeps_it_from_the_list(net):
    """The thief's offer comes first. What the server proves is whose it is."""
    net.names["relay.example.net"], net.servers["http://relay.example.net"] = [OUTSIDE], HONEST
    net.offer(OTHER, "http://relay.example.net")
    net.work()
    assert not net.offer(OTHER, "http://relay.example.net").listed
    assert net.offer(HONEST, "http://relay.example.net").listed and len(net.asked) == 1
    assert not net.offer(OTHER, "http://relay.example.net").listed
    assert [entry.key for entry in net.relay_list.told()] == [HONEST.public]


@pytest.mark.parametrize("may_be_inside", [True, False])
def test_a_relay_at_the_address_that_it_calls_from_waits_for_no_offers_of_others(monkeypatch, may_be_inside):
    """Others offer ports of its address that prove nothing, every 10 minutes; also where a trusted proxy is in front."""
    net = Internet(monkeypatch, may_be_inside=may_be_inside)
    net.servers[f"http://{OUTSIDE}:8480"] = HONEST
    for port in [*range(9000, 9008), 8480]:
        net.offer(Key.generate(), f"http://{OUTSIDE}:{port}", host=f"198.51.{port % 250}.7")
        net.work()
    assert len(net.asked) == 1
    net.offer(HONEST, host=OUTSIDE, port=8480)
    net.work()
    assert net.offer(HONEST, host=OUTSIDE, port=8480).listed and len(net.asked) == 2


def test_nobody_keeps_a_relay_inside_from_the_list_with_its_url(net):
    """Nothing may be asked there for others, but the relay itself calls from there."""
    net.servers["http://192.168.1.7:8480"] = HONEST
    for _ in range(2):
        net.offer(OTHER, "http://192.168.1.7:8480", host="198.51.100.7")
        net.work()
    assert net.asked == []
    net.offer(HONEST, host="192.168.1.7", port=8480)
    net.work()
    assert net.offer(HONEST, host="192.168.1.7", port=8480).listed and len(net.asked) == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_relay_elsewhere_than_it_calls_from_gets_its_turn_beside_endless_offers(net, seed):
    """As behind a proxy with TLS. The address gets one request in 10 minutes, and offers of one network have one chance."""
    net.relay_list.challenges._rng = random.Random(seed)
    net.names["relay.example.net"], net.servers["https://relay.example.net"] = [OUTSIDE], HONEST
    began = net.now
    is_listed = False
    while not is_listed:
        for port in range(9000, 9040):
            net.offer(Key.generate(), f"http://{OUTSIDE}:{port}", host=f"203.0.113.{port - 9000}")
        is_listed = net.offer(HONEST, "https://relay.example.net").listed
        net.work()
        net.now += 60
    waited_s = net.now - began
    assert waited_s < 9 * relay_challenges.ASK_AGAIN_S
    assert len(net.asked) <= 2 + waited_s / relay_challenges.ASK_AGAIN_S


def test_an_old_proof_is_not_good_for_a_new_nonce(net, monkeypatch):
    net.names["relay.example.net"] = [OUTSIDE]
    net.servers["http://relay.example.net"] = to_json(
        RelayProof(HONEST.public, sign_proof(HONEST, RUN, "n" * 32))
    ).decode()
    net.offer(HONEST, "http://relay.example.net")
    net.work()
    assert not net.offer(HONEST, "http://relay.example.net").listed


@pytest.mark.parametrize(("proxied", "may_be_inside"), [(True, True), (False, False)])
def test_behind_a_proxy_nobody_is_inside(monkeypatch, proxied, may_be_inside):
    """All requests come from the proxy's own address then: a stranger must not reach what listens there."""
    net = Internet(monkeypatch, may_be_inside=may_be_inside)
    net.servers["http://127.0.0.1:8480"] = HONEST
    net.offer(HONEST, "http://127.0.0.1:8480", host="127.0.0.1", proxied=proxied)
    net.work()
    assert net.asked == []


def test_a_caller_inside_reaches_only_itself(net):
    net.offer(HONEST, "http://192.168.1.1:8080", host="192.168.1.7")
    net.work()
    assert net.asked == []


# --- as long as it is listed ---


@pytest.fixture
def listed(net):
    net.names["relay.example.net"], net.servers["http://relay.example.net"] = [OUTSIDE], HONEST
    net.offer(HONEST, "http://relay.example.net")
    net.work()
    assert net.offer(HONEST, "http://relay.example.net").listed
    return net


def test_a_relay_that_is_quiet_lapses(listed):
    listed.now += relays.LAPSES_S + 1
    assert listed.listed() == []


def test_only_own_probes_drop_a_relay_and_for_longer_each_time(listed):
    listed.serves = listed.chunk
    listed.probe(20)
    assert listed.listed()
    listed.serves = bytes(len(listed.chunk))
    listed.probe(relays.MOST_WRONG)
    assert listed.listed() == []
    again = listed.offer(HONEST, "http://relay.example.net")
    assert not again.listed and "dropped: it sent 2 wrong chunks" in again.reason and again.retry_s == 600
    listed.now += 601
    listed.offer(HONEST, "http://relay.example.net")
    listed.work()
    assert listed.offer(HONEST, "http://relay.example.net").listed
    listed.probe(relays.MOST_WRONG)
    assert listed.offer(HONEST, "http://relay.example.net").retry_s == 1200


def test_a_relay_that_is_gone_is_dropped_and_one_that_fills_stays(listed):
    listed.probe(50)  # 404
    assert listed.listed()
    del listed.servers["http://relay.example.net"]
    listed.probe(relays.MOST_FAILED - 1)
    assert listed.listed()
    listed.probe(1)
    assert listed.listed() == []


# --- one real request ---


def test_a_request_follows_no_redirect_reads_little_and_ends_in_time():
    reached = []

    async def serve(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        reached.append(path)
        if path.endswith("/away"):
            writer.write(b"HTTP/1.1 302 Found\r\nlocation: /inside\r\ncontent-length: 0\r\n\r\n")
        elif path.endswith("/endless"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n" + b"x" * 100_000)
        elif path.endswith("/slow"):
            await asyncio.sleep(5)
        await writer.drain()
        writer.close()

    async def scenario():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            base = httpx.URL(f"http://relay.example.net:{port}/base")
            for path, message in (
                ("/away", "which is not followed"),
                ("/endless", "has more than 100"),
                ("/slow", "within"),
            ):
                with pytest.raises(PeerError, match=message):
                    await safe_http.get(urls.below(base, path), cap=100, deadline_s=0.5, address="127.0.0.1")
            server.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert reached == ["/base/away", "/base/endless", "/base/slow"]


@pytest.mark.parametrize("name", ["a..example.org", "a" * 70 + ".example.org"])
def test_a_name_that_no_dns_can_hold_is_refused_before_it_is_looked_up(name):
    """Looking it up raises another error than a name that is not known: it ended the task that asks all relays."""
    with pytest.raises(PeerError, match="is not a URL"):
        urls.checked_url(f"http://{name}:8080")
    with pytest.raises(PeerError, match="is not a URL"):
        HttpSource(f"http://{name}:8080/v1/blobs")


def test_an_offered_url_does_not_end_the_coordinators_task_for_relays():
    async def answer(path, said, writer):
        writer.write(head(302, Location="javascript:1", Content_Length=0))

    async def scenario() -> None:
        async with web_server(answer) as url:
            relay_list = RelayList("r" * 32, time.monotonic, lambda rng, most: None, may_be_inside=True)
            relay_list.offer("k", RelayOffer(url, 0), "127.0.0.1", False)
            working = asyncio.create_task(relay_list.run())
            while "redirects" not in (said := relay_list.offer("k", RelayOffer(url, 0), "127.0.0.1", False)).reason:
                await asyncio.sleep(0.05)
            assert not working.done() and not said.listed
            working.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize(("task", "what"), [("relays.run", "asking relays"), ("tick", "the clock")])
def test_the_coordinators_tasks_start_again_whatever_ends_them(tmp_path, monkeypatch, caplog, task, what):
    monkeypatch.setattr(serve_chunks, "REST_S", 0.01)
    testbed, runs = RunTestbed(tmp_path, tiny_run()), []

    async def failing() -> None:
        runs.append(len(runs))
        raise RuntimeError("nobody thought of this")

    async def scenario() -> None:
        monkeypatch.setattr(main, "TICK_S", 0.01)
        owner = testbed.coordinator.relays if "." in task else testbed.coordinator
        setattr(owner, task.rpartition(".")[2], failing)
        async with main._ticking(testbed.coordinator)(testbed.app):
            while len(runs) < 3:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert f"{what} ended (RuntimeError: nobody thought of this): it starts again" in caplog.text
    testbed.coordinator.log_writer.store.close()
