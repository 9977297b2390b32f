"""A port that cannot be had: the cause is named, and what to do about that cause."""

import errno
import os
import socket

import pytest

from shoal.errors import StateError
from shoal.net.server_address import listen, port_of_last_start


@pytest.mark.parametrize("bind", ["203.0.113.5", "nosuch.invalid"])
def test_an_address_that_is_not_ours_is_no_port_in_use(bind):
    with pytest.raises(StateError, match=r"no address of this machine: set --bind to 0\.0\.0\.0") as caught:
        listen(bind, 0)
    assert "Another program" not in str(caught.value)
    with pytest.raises(StateError, match=r"set host\.bind to"):
        listen(bind, 0, key="host.port")


def test_a_port_in_use_is_another_program():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(StateError, match="Another program may be serving there"),
    ):
        listen("127.0.0.1", taken.getsockname()[1])


def test_a_port_of_root_needs_a_larger_number(monkeypatch):
    def refuse(self, address):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(StateError, match=r"Ports below 1024 belong to root: set host\.port to a larger one"):
        listen("127.0.0.1", 80, key="host.port")


def test_a_port_of_the_last_start_is_left_to_the_role_that_has_it_now(tmp_path):
    address = tmp_path / "origin.json"
    assert port_of_last_start(address) == 0
    address.write_text('{"port": 18470, "pid": 1}')
    assert port_of_last_start(address) == port_of_last_start(address, (0, 18471)) == 18470
    assert port_of_last_start(address, (18470, 0)) == 0
