"""Serves the page of some runs: binds a port, makes the host's token, says the addresses, and runs until it is ended.

Called by `shoal dashboard`, typed by a person or started by `launch/local`.
"""

import contextlib
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from shoal.errors import ConfigError, StateError
from shoal.watch.page.app import page_app
from shoal.watch.page.shelf import Shelf

CONNECTIONS = 1000
"""At a time; the next ones are told to come back."""


def serve(
    places: Sequence[str], bind: str, port: int, index: Path | None, token_file: Path | None, say: Callable[[str], None]
) -> None:
    """Serve the runs in these folders or at these URLs, until SIGINT or SIGTERM.

    `index` is kept for the next time; without one it is in a temporary folder. `token_file` holds the host's token, and is
    made if there is none; without one the token is of this process. Raises `ShoalError` as `open_run`, `ConfigError` if the
    port is taken.
    """
    with contextlib.ExitStack() as stack:
        if index is None:
            index = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-page-"))) / "index.sqlite"
        listener = stack.enter_context(_listening(bind, port))
        shelf = Shelf(index, places)
        stack.callback(shelf.close)
        own = any(shown.reading is not None and shown.reading.source.is_own for shown in shelf.runs)
        token = _token(token_file) if own else ""
        shelf.start()
        url = address(bind, listener.getsockname()[1])
        say(f"The page: {url}/")
        if token:
            say(f"As the host, with what is private: {url}/?token={token}")
            say("Give the second address to nobody. Ctrl-C ends the page, and the run goes on.")
        config = uvicorn.Config(
            page_app(shelf, token), log_level="warning", access_log=False, server_header=False, lifespan="off",
            limit_concurrency=CONNECTIONS, timeout_keep_alive=20,
        )  # fmt: skip
        uvicorn.Server(config).run(sockets=[listener])


def address(bind: str, port: int) -> str:
    """The URL of a page on this machine, or of this machine."""
    name = socket.gethostname() if bind in ("", "0.0.0.0", "::") else f"[{bind}]" if ":" in bind else bind
    return f"http://{name}:{port}"


def _listening(bind: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        made = socket.socket(family)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((bind, port))
        made.listen(128)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {bind}, port {port}: {error}. Give another --port; 0 takes a free one"
        ) from None
    return made


def _token(file: Path | None) -> str:
    """The host's token, from its file if there is one."""
    if file is None:
        return secrets.token_urlsafe(32)
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
