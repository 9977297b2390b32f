"""Starts the processes of a trainer that has several, by torchrun's agent, and ends them together.

If one of them ends, the agent ends the others, and this process ends as the first one did: its launcher starts all of them
again, and they go on from their saved state. Nothing listens on a network: the agent is alone, and the processes meet at a
file.
"""

import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shoal.config import stay_on_this_machine
from shoal.config.role_options import TrainerOptions
from shoal.errors import EXIT_TRY_AGAIN, EXIT_USER_ERROR
from shoal.run_folder import RunFolder

log = logging.getLogger("trainer")


def run_processes(folder: RunFolder, url: str, count: int) -> None:
    """Run so many processes of the trainer until they end. Ends this process as they ended, unless all is well."""
    meetings = folder.trainer / "meetings"
    shutil.rmtree(meetings, ignore_errors=True)
    meetings.mkdir(parents=True)
    meeting = Path(tempfile.mkdtemp(dir=meetings)) / "store"
    options = msgspec.json.encode(TrainerOptions(url=url, meeting=str(meeting))).decode()
    command = ["-m", "shoal.cli.main", "role", "rank", "--run-dir", str(folder.root), "--options", options]
    rendezvous_handler_registry.register(_BACKEND, lambda parameters: _OneAgent())
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=count, run_id=folder.root.name, rdzv_backend=_BACKEND,
        max_restarts=0, local_addr="127.0.0.1", logs_specs=DefaultLogsSpecs(os.devnull),
    )  # fmt: skip
    log.info("starting %d processes", count)
    _give_children_a_pipe()
    stay_on_this_machine()
    logging.disable(logging.CRITICAL)  # the agent repeats what the processes say themselves
    try:
        elastic_launch(config, sys.executable)(*command)
    except SignalException:
        return  # it has passed the signal on, and waited
    except ChildFailedError as error:
        _end_as([failure.exitcode for failure in error.failures.values()])


def _end_as(codes: Sequence[int]) -> None:
    """End as the process did whose end says most. Those that lost another, or that the agent ended, say least."""
    if EXIT_USER_ERROR in codes:
        sys.exit(EXIT_USER_ERROR)
    crashes = [code for code in codes if code > 0 and code != EXIT_TRY_AGAIN]
    if crashes:  # before deaths: the agent kills those that do not end in time
        sys.exit(crashes[0])
    deaths = [-code for code in codes if code < 0 and code != -signal.SIGTERM]
    if deaths:
        if deaths[0] != signal.SIGKILL:
            signal.signal(deaths[0], signal.SIG_DFL)
        os.kill(os.getpid(), deaths[0])
    sys.exit(EXIT_TRY_AGAIN if EXIT_TRY_AGAIN in codes else 1)


def _give_children_a_pipe() -> None:
    """Give children that are started from now on a standard input that closes when this process ends, even by SIGKILL."""
    reading, _ = os.pipe()
    os.dup2(reading, sys.stdin.fileno())
    os.close(reading)


_BACKEND = "one-agent"


class _OneAgent(RendezvousHandler):
    """Where the agents of several machines would meet: there is one."""

    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        # Its processes are given this address and port, and use neither.
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return _BACKEND

    def shutdown(self) -> bool:
        return True
