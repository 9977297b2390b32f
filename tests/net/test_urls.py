"""Which addresses are inside a network."""

import asyncio

import pytest

from shoal.errors import PeerError
from shoal.net import urls
from shoal.net.urls import is_outside, outside_address


@pytest.mark.parametrize(
    "inside",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1%eth0", "fd00::1", "ff02::1", "::ffff:10.0.0.1", "64:ff9b::a00:1",
        "2002:a00:1::", "2001:0:a00:1::1", "240.0.0.1", "localhost", "",
    ],
)  # fmt: skip
def test_addresses_inside_a_network_are_known(inside):
    assert not is_outside(inside)


@pytest.mark.parametrize("outside", ["1.1.1.1", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_of_the_internet_are_known(outside):
    assert is_outside(outside)


def test_a_name_with_one_address_inside_is_refused(monkeypatch):
    async def found(host: str, port: int) -> list[str]:
        return ["8.8.8.8", "10.0.0.7"] if host == "both" else ["8.8.8.8"]

    monkeypatch.setattr(urls, "addresses_of", found)
    assert asyncio.run(outside_address("fine", 80)) == "8.8.8.8"
    with pytest.raises(PeerError, match=r"both is 10\.0\.0\.7, an address inside a network"):
        asyncio.run(outside_address("both", 80))
