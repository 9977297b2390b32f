"""Serves the page of some runs: binds a port, makes the host's token, says the addresses, and runs until it is ended."""

import contextlib
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from shoal.config.run_config import HostConfig
from shoal.errors import StateError
from shoal.net.connection_limits import ServerLimits, connections_that_fit, http_server
from shoal.net.server_address import listen, port_of_last_start, tell_address
from shoal.run_folder import RunFolder, is_url
from shoal.runs.run_reader import open_run
from shoal.views.web.app import page_app
from shoal.views.web.served_runs import ServedRuns


def serve(
    places: Sequence[str], bind: str, port: int, index: Path | None, say: Callable[[str], None], own_files: bool = False
) -> None:
    """Serve the runs in these folders or at these URLs, until SIGINT or SIGTERM.

    `index` is kept for the next time; without one it is in a temporary folder. `own_files` lets the host have rollouts
    played again by environment files that the runs name. Raises `ShoalError` as `open_run`, and
    `StateError` if the port is taken.
    """
    with contextlib.ExitStack() as stack:
        if index is None:
            index = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-page-"))) / "index.sqlite"
        listener = stack.enter_context(listen(bind, port))
        own = any(not is_url(place) for place in places)
        token = secrets.token_urlsafe(32)
        url = address(bind, listener.getsockname()[1])

        def told() -> None:
            say(f"The page: {url}/")
            more = "For you as the host, with private rollouts; it can" if own else "For you alone; it can"
            say(f"{more} have this machine recompute rollouts: {host_link(url, token)}")
            say("Keep the second address secret. Ctrl-C stops the page, and no run.")

        serve_on(listener, places, index, token, told, own_files)


def serve_on(
    listener: socket.socket, places: Sequence[str], index: Path, token: str, told: Callable[[], None] = lambda: None,
    own_files: bool = False, trusted: tuple[str, ...] = HostConfig().trusted_proxies,
) -> None:  # fmt: skip
    """The same on a socket; `told` is called when the runs are open. `trusted`: addresses or networks of proxies."""
    os.umask(0o077)  # a host's index has texts that are still private
    served_runs = ServedRuns(index, places, open_one=partial(open_run, own_files=own_files))
    with contextlib.closing(served_runs):
        served_runs.start()
        told()
        server_of(page_app(served_runs, token), trusted).run(sockets=[listener])


def server_of(page: ASGIApp, trusted: tuple[str, ...] = HostConfig().trusted_proxies) -> uvicorn.Server:
    """A server for a page. Its viewers are strangers like those of a coordinator, so connections have the same limits."""
    return http_server(page, ServerLimits(total=connections_that_fit(), trusted=trusted))


def address(bind: str, port: int) -> str:
    """The URL of a page on this machine, or of this machine."""
    name = socket.gethostname() if bind in ("", "0.0.0.0", "::") else f"[{bind}]" if ":" in bind else bind
    return f"http://{name}:{port}"


def host_link(url: str, token: str) -> str:
    """The address that makes a browser the host's."""
    return f"{url}/?token={token}"


def host_token(file: Path) -> str:
    """The host's token from its file, which is made if there is none. Raises `StateError`."""
    try:
        with contextlib.suppress(FileExistsError):
            fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w") as made:
                made.write(secrets.token_urlsafe(32))
        found = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(f"the page's token {file} cannot be read: {error}. Delete it, and a new one is made") from None
    if len(found) < 32:  # guard: token-is-long
        raise StateError(f"the page's token {file} is shorter than 32 characters: delete it, and a new one is made")
    return found


# --- The page of a run that this machine hosts, as a process beside the coordinator ---
#
# The coordinator leads browsers to it.


log = logging.getLogger("dashboard")

NICE = 10
"""The coordinator comes first: on a busy machine viewers wait, and submissions do not."""


def serve_hosted(run_dir: Path) -> None:
    """Serve until told to stop. Raises `StateError` if the port or the folder cannot be used."""
    os.nice(NICE)
    folder = RunFolder(run_dir)
    host = folder.config().host
    others = (host.port or port_of_last_start(folder.address), host.origin_port)
    last = port_of_last_start(folder.dashboard_address, others)
    with listen(host.bind, host.dashboard_port, last, "host.dashboard_port") as listener:
        port, token = listener.getsockname()[1], host_token(folder.dashboard_token)
        url = host.dashboard_url.rstrip("/") or address(host.bind, port)
        _tell(folder, port, host_link(url, token))
        log.info("serving the page run=%s url=%s", folder.root, url)
        serve_on(listener, [str(folder.root)], folder.dashboard_index, token, trusted=host.trusted_proxies)


def _tell(folder: RunFolder, port: int, link: str) -> None:
    """Write the page's address into the run's folder. The port stays there for the next start."""
    with open(os.open(folder.dashboard_link, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(f"{link}\n")
    tell_address(folder.dashboard_address, port)
