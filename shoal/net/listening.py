"""Listening sockets of roles that serve.

Called by them before they start a server. It prefers the port of the last start, where clients still ask.
"""

import contextlib
import ipaddress
import json
import os
import socket
from pathlib import Path

from shoal.errors import StateError, cause_of


def port_of_last_start(address: Path) -> int:
    """The port that a role wrote into a JSON file when it started last; 0 if it did not."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads(address.read_bytes())["port"])
    return 0


def port_of_living(address: Path) -> int:
    """The same, if the process that wrote the file lives."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
        os.kill(int(json.loads(address.read_bytes())["pid"]), 0)
        return port_of_last_start(address)
    return 0


def local_url(address: Path, bind: str) -> str:
    """Where others on this machine reach a role that wrote this file and listens on `bind`; "" if it wrote none."""
    port = port_of_last_start(address)
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}" if port else ""


def reader_url(address: Path, bind: str) -> str:
    """The same for readers of a folder, which may be a stranger's; "" unless `bind` is an address of this machine."""
    return local_url(address, bind) if is_of_this_machine(bind) else ""  # guard: readers-ask-this-machine


def is_of_this_machine(bind: str) -> bool:
    """Whether one can listen there. Names are not looked up: that would ask whom the name's owner chose."""
    if bind in ("", "localhost"):
        return True
    with contextlib.suppress(ValueError, OSError):
        found = ipaddress.ip_address(bind)
        if found.is_loopback or found.is_unspecified:
            return True
        with socket.socket(socket.AF_INET6 if found.version == 6 else socket.AF_INET) as probe:
            probe.bind((bind, 0))
        return not found.is_multicast
    return False


def listen(bind: str, port: int, last: int = 0, key: str = "--port") -> socket.socket:
    """A listening socket at `port`; if that is 0, at the port of the last start, or else at a free one.

    `key` is what the user sets to choose the port. Raises `StateError`.
    """
    if port == 0 and last:
        with contextlib.suppress(StateError):
            return listen(bind, last)
    listener = socket.socket(socket.AF_INET6 if ":" in bind else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((bind, port))
        listener.listen(256)
    except OSError as error:
        listener.close()
        raise StateError(
            f"cannot listen on {bind} port {port}: {cause_of(error)}. Another program may be serving there: stop it, or "
            f"set {key} to another port; 0 takes a free one"
        ) from None
    return listener
