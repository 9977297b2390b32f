"""The origin: the process that serves the chunks and manifests of a run, so that the coordinator sends no bulk.

It reads one folder, in which every file is public, and writes nothing there. It knows no run, no log and no key. If it is
gone, clients fetch from the coordinator.
"""

import logging
import time
from pathlib import Path

from shoal.net.blobs import blob_app
from shoal.net.connection_limits import ServerLimits, connections_that_fit, http_server
from shoal.net.server_address import listen, port_of_last_start, tell_address
from shoal.run_folder import RunFolder

log = logging.getLogger("origin")


def main(run_dir: Path) -> None:
    """Serve a run's public blobs until told to stop. Raises `StateError` if the port cannot be used."""
    folder = RunFolder(run_dir)
    host = folder.config().host
    others = (host.port or port_of_last_start(folder.address), host.dashboard_port)
    last = port_of_last_start(folder.origin_address, others)
    listener = listen(host.bind, host.origin_port, last, "host.origin_port")
    port = listener.getsockname()[1]
    tell_address(folder.origin_address, port)
    log.info("serving chunks bind=%s port=%d", host.bind, port)
    limits = ServerLimits(total=connections_that_fit(), trusted=host.trusted_proxies)
    http_server(blob_app(folder.chunks, time.time), limits).run(sockets=[listener])
