"""Rollouts of groups without signal as text, for the host of a paused run to decide whether it should continue.

Called by `launch/local`, on the folder of its own run, so the environment's files are executed. It does not know why the
run is paused, and decides nothing.
"""

from collections import deque

from shoal.envs.base import task_of
from shoal.envs.evaluate import as_text, transcript_of
from shoal.envs.load import load_run_envs
from shoal.envs.replay import retell
from shoal.errors import StateError
from shoal.folder import RunFolder
from shoal.launch.samples import group_of
from shoal.ledger.facts.batches import GroupAccepted
from shoal.ledger.facts.run import RunCreated
from shoal.ledger.log.store import Store, sqlite_url
from shoal.ledger.table import read_entry
from shoal.policy.render import Renderer
from shoal.protocol.continuations import is_continued_slot
from shoal.protocol.wire import WireError

SHOWN = 2
"""Number of groups; one rollout of each is shown."""


def flat_samples(folder: RunFolder) -> list[str]:
    """The first rollout of each of the newest SHOWN accepted groups without signal.

    Raises `ShoalError` if they cannot be read.
    """
    created, flat = _read_log(folder)
    envs = load_run_envs(created.envs, own_files=True)
    renderer = Renderer.from_directory(folder.policy, created.sampling.stops)
    samples = []
    for accepted in flat:
        group = group_of(folder, accepted)
        if group.env in envs and group.rollouts:  # a validator that lies may have accepted anything
            env = envs[group.env]
            talk = retell(env, renderer, task_of(env, group.task), group.rollouts[0], created.sampling)
            samples += [as_text(transcript_of(talk))] if talk is not None else []
    return samples


def _is_flat(accepted: GroupAccepted, created: RunCreated | None) -> bool:
    assert created is not None, "the first event creates the run"
    return not (accepted.has_signal or is_continued_slot(accepted.slot, created.rules.block_groups))


def _read_log(folder: RunFolder) -> tuple[RunCreated, deque[GroupAccepted]]:
    store, flat = Store(sqlite_url(folder.log), read_only=True), deque[GroupAccepted](maxlen=SHOWN)
    created: RunCreated | None = None
    try:
        for data, _ in store.read():
            body = read_entry(data)[0].body
            if isinstance(body, RunCreated):
                created = body
            elif isinstance(body, GroupAccepted) and _is_flat(body, created):
                flat.append(body)
    except WireError as error:
        raise StateError(f"the log {folder.log} is damaged: {error}") from None
    finally:
        store.close()
    if created is None:
        raise StateError(f"the log {folder.log} is empty")
    return created, flat
