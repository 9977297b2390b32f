"""A conversation of a run at a URL: found without the log's beginning, bounded, and of the hash that the log names."""

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest

from shoal.errors import PeerError, ShoalError, StateError
from shoal.launch.public_samples import LOOKED_BACK, MOST_TRIES, PublicSample, spread
from shoal.launch.watching import FolderWatch
from shoal.ledger.facts.batches import GroupAccepted
from shoal.net.client import Client
from shoal.net.sided import SHOAL
from shoal.policy.contained import ContainedRenderer
from tests.roles.town import Town, tiny_run

URL = "http://coordinator"


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Town:
    town = Town(tmp_path_factory.mktemp("talks") / "run", tiny_run(steps=1, storage={"retain": "all"}))
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("honest")))
    return town


class Counted(httpx.AsyncBaseTransport):
    """The town's coordinator, with the paths that were asked for; `change` replaces the body of an answer."""

    def __init__(self, town: Town, change: tuple[str, bytes] = ("nothing", b"")) -> None:
        self.inner = httpx.ASGITransport(town.app, raise_app_exceptions=False)
        self.asked: list[str] = []
        self.change = change

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.raw_path.decode())
        answer = await self.inner.handle_async_request(request)
        if not self.asked[-1].startswith(self.change[0]):
            return answer
        await answer.aread()
        headers = {k: v for k, v in answer.headers.items() if k in ("content-type", SHOAL)}
        return httpx.Response(answer.status_code, headers=headers, stream=httpx.ByteStream(self.change[1]))


def test_anyone_reads_a_conversation_of_a_url_and_each_once(town: Town) -> None:
    host = Counted(town)
    found = PublicSample(URL, host)
    sample = found.read()
    assert sample is not None and "one rollout of version 0" in sample.title and "reward" in sample.title
    assert [who for who, _ in sample.turns][:2] == ["environment", "policy"] and sample.turns[0][1].strip()
    bodies = sum(path.startswith("/v1/blobs/") for path in host.asked)
    before = len(host.asked)
    assert found.read() is None, "it was shown before"
    assert [path.partition("?")[0] for path in host.asked[before:]] == ["/v1/state", "/v1/events"]
    assert bodies < 12, "one submission, and the tokenizer's files"


def test_of_a_long_log_only_the_end_is_asked_for(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.launch.public_samples.LOOKED_BACK", 20)
    host = Counted(town)
    assert PublicSample(URL, host).read() is not None
    asked = [int(path.partition("=")[2]) for path in host.asked if path.startswith("/v1/events")]
    assert asked == [town.desk.book.state.seq - 20] and LOOKED_BACK == 500


def test_a_body_of_another_hash_is_not_shown(town: Town) -> None:
    with pytest.raises(StateError, match="another hash"):
        PublicSample(URL, Counted(town, ("/v1/blobs/", b"other bytes"))).read()


def test_a_group_that_the_log_does_not_name_is_not_shown(town: Town) -> None:
    found = PublicSample(URL, Counted(town))
    asyncio.run(found._read_events(Client(URL, transport=Counted(town))))
    changed = [msgspec.structs.replace(one, digest="00" * 32) for one in found._accepted]
    found._accepted.clear()
    found._accepted.extend(changed)
    with pytest.raises(StateError, match="not the one that the log names"):
        found.read()


def test_a_strangers_tokenizer_is_opened_in_another_process(town: Town) -> None:
    found = PublicSample(URL, Counted(town))
    found.read()
    assert isinstance(found._renderer, ContainedRenderer)


@pytest.mark.parametrize("path", ["/v1/run", "/v1/state", "/v1/blobs/", "/v1/manifests/"])
@pytest.mark.parametrize("body", [b"", b"{}", b"[" * 9999, b"\xff" * 99])
def test_nonsense_of_a_host_is_an_error_and_no_conversation(
    town: Town, path: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.launch.public_samples.ANSWER_S", 0.2)
    with pytest.raises(ShoalError):
        PublicSample(URL, Counted(town, (path, body))).read()


def test_events_that_are_none_show_nothing(town: Town) -> None:
    assert PublicSample(URL, Counted(town, ("/v1/events", b"{}\n" * 9))).read() is None


def test_a_body_or_page_that_is_too_large_is_left(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.launch.public_samples.MOST_BODY_BYTES", 100)
    with pytest.raises(PeerError):
        PublicSample(URL, Counted(town)).read()


def test_few_bodies_are_asked_for_and_older_ones_among_them() -> None:
    def accepted(number: int) -> GroupAccepted:
        return GroupAccepted(0, number, f"{number:064}", 0, "d", 1, (1.0,), False)

    found = [int(one.submission) for one in spread(accepted(i // 2) for i in range(200))]
    assert found == [99, 74, 49, 24] and len(found) == MOST_TRIES
    assert [int(one.submission) for one in spread([accepted(3)])] == [3] and spread([]) == []


def test_of_a_folder_that_nobody_hosts_the_log_says_who_did_what_and_the_last_conversation_is_shown(town: Town) -> None:
    watched = FolderWatch(town.folder.root)
    seen = asyncio.run(watched.look())
    assert [(node.name, node.accepted > 0) for node in seen.nodes if node.role == "worker"] == [("honest", True)]
    assert seen.status.version >= 0 and seen.status.accepted > 0
    assert watched._samples._thread is not None
    watched._samples._thread.join()
    assert (talk := asyncio.run(watched.look()).sample) is not None and "ended by" in talk.title


def test_the_folder_for_the_tokenizer_goes_with_the_reader(town: Town) -> None:
    found = PublicSample(URL, Counted(town))
    found.read()
    home = Path(found._home.name)
    assert home.is_dir()
    del found
    assert not home.exists()
