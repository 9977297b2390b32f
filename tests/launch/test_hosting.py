"""What a host is told: the line that others type, whom it reaches, what TLS needs, and what an admission means."""

import asyncio
import socket
from pathlib import Path

import httpx
import pytest

from shoal.config import HostConfig
from shoal.errors import ConfigError
from shoal.launch.hosting import administer, invitation
from shoal.ledger.facts.members import Leave
from shoal.net.client import Client
from shoal.net.keys import load_or_make_key
from shoal.protocol import types as t
from tests.roles.town import Town, tiny_run

RUN = Path("runs/wordle")


def test_loopback_says_that_only_this_machine_can_join() -> None:
    text = invitation("http://127.0.0.1:8470", HostConfig(), RUN)
    assert "    shoal join http://127.0.0.1:8470\n" in text
    assert "only this machine can join and watch" in text and "--bind 0.0.0.0" in text
    assert "caddy reverse-proxy" in text and "--public-url https://" in text


def test_the_join_line_of_an_open_address_has_the_machines_name() -> None:
    text = invitation("http://0.0.0.0:8470", HostConfig(bind="0.0.0.0"), RUN)
    assert f"    shoal join http://{socket.gethostname()}:8470\n" in text
    assert "without TLS" in text and "caddy reverse-proxy" in text


def test_the_join_line_has_a_public_url_with_tls_unchanged() -> None:
    text = invitation("https://shoal.example.org", HostConfig(public_url="https://shoal.example.org"), RUN)
    assert "    shoal join https://shoal.example.org\n" in text
    assert "caddy" not in text and "shoal admin" in text


def test_a_small_terminal_shows_the_page_and_how_to_steer_before_the_advice_on_tls() -> None:
    text = invitation("http://127.0.0.1:8470", HostConfig(), RUN)
    places = [text.index(word) for word in ("shoal join", "in a browser", "dashboard.url", "shoal admin", "put TLS")]
    assert places == sorted(places)


@pytest.mark.parametrize(("action", "run"), [("kick", "runs/x"), ("admit", "http://h"), ("pause", "http://h")])
def test_an_admin_call_names_what_it_lacks(action: str, run: str) -> None:
    with pytest.raises(ConfigError, match=r"say which node|--key"):
        administer(action, run, "", None)


def test_host_is_warned_when_an_admission_or_a_removal_leaves_two_validators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    town = Town(tmp_path / "run", tiny_run())
    transport = httpx.ASGITransport(town.app)
    monkeypatch.setattr("shoal.launch.hosting.Client", lambda url, key: Client(url, key, transport=transport))

    async def take_seat(key_file: Path) -> str:
        async with town.client(key_file) as client:
            client.run = town.desk.state.run
            join = t.Join("validator", key_file.stem, 0.0, "test", "float32", "cpu")
            return (await client.post_json("/v1/nodes", join, t.NodeState)).key

    def tell(action: str, node: str) -> bool:
        return "If one of two lies, forging costs nothing" in administer(
            action, "http://host", node, tmp_path / "run/keys/run.key"
        )

    asyncio.run(take_seat(town.folder.keys / "validator-0.key"))
    for place, warned in ((1, True), (2, False)):
        key_file = tmp_path / f"guest-{place}.key"
        assert tell("admit", load_or_make_key(key_file).public) is warned
        asyncio.run(take_seat(key_file))
    assert not tell("pause", "") and tell("kick", "guest-1")
    town.desk.book.write(Leave(load_or_make_key(tmp_path / "guest-2.key").public, town.clock()), town.clock())
    assert tell("admit", load_or_make_key(tmp_path / "guest-3.key").public), "the one that left does not count"
