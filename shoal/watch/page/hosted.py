"""The page of a run that this machine hosts, as a process beside the coordinator.

Called by `shoal role dashboard`, which the launcher of `shoal host` starts. The coordinator leads browsers to it.
"""

import logging
import os
from pathlib import Path

from shoal.folder import RunFolder
from shoal.net.listening import listen, port_of_last_start, tell_address
from shoal.watch.page.serve import address, host_link, host_token, serve_on

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
