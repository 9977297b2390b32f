"""What a host is told: the line that others type, whom it reaches, and what TLS needs."""

import socket
from pathlib import Path

import pytest

from shoal.config import HostConfig
from shoal.errors import ConfigError
from shoal.launch.hosting import administer, invitation

RUN = Path("runs/wordle")


def test_loopback_says_that_only_this_machine_can_join() -> None:
    text = invitation("http://127.0.0.1:8470", HostConfig(), RUN)
    assert "    shoal join http://127.0.0.1:8470\n" in text
    assert "only this machine can join" in text and "--bind 0.0.0.0" in text
    assert "caddy reverse-proxy" in text and "--public-url https://" in text


def test_open_address_is_shared_by_the_machines_name() -> None:
    text = invitation("http://0.0.0.0:8470", HostConfig(bind="0.0.0.0"), RUN)
    assert f"    shoal join http://{socket.gethostname()}:8470\n" in text
    assert "without TLS" in text and "caddy reverse-proxy" in text


def test_public_address_with_tls_is_shared_as_it_is() -> None:
    text = invitation("https://shoal.example.org", HostConfig(public_url="https://shoal.example.org"), RUN)
    assert "    shoal join https://shoal.example.org\n" in text
    assert "caddy" not in text and "shoal admin" in text


@pytest.mark.parametrize(("action", "run"), [("kick", "runs/x"), ("admit", "http://h"), ("pause", "http://h")])
def test_admin_call_that_lacks_something_says_what(action: str, run: str) -> None:
    with pytest.raises(ConfigError, match=r"say which node|--key"):
        administer(action, run, "", None)
