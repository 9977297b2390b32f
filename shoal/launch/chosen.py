"""Rejection sampling over a run that has ended: which of its rollouts a later stage imitates.

Called by a reject stage. It reads the log and the bodies that the run kept, and takes the rewards of the log, which
validators verified. It chooses from the groups that batches took, in the order of the steps: at max_staleness = 0 these
follow from the run file and the seed. The rules are in `algos/rejection`.
"""

from collections.abc import Sequence
from typing import Any

from shoal.algos.rejection import raft, star
from shoal.config.stages import RejectStage
from shoal.errors import StateError
from shoal.folder import RunFolder
from shoal.launch.samples import group_of
from shoal.ledger.facts.batches import BatchFormed, GroupAccepted
from shoal.ledger.log.store import Store, sqlite_url
from shoal.ledger.table import read_entry
from shoal.protocol.constants import COMPLETIONS
from shoal.protocol.types import POLICY, Rollout
from shoal.protocol.wire import WireError, digest, to_json
from shoal.train.chosen import Examples, tokenizer_digest

Learned = tuple[int, GroupAccepted]
"""A group that a batch took, and the batch's step."""


def learned_groups(folder: RunFolder) -> list[Learned]:
    """The groups that the run learned from, each once, in the order of their first steps and then of slots. Raises
    `StateError`."""
    store, batches = Store(sqlite_url(folder.log), read_only=True), dict[int, tuple[tuple[int, int], ...]]()
    accepted: dict[tuple[int, int], GroupAccepted] = {}
    try:
        for data, _ in store.read():
            body = read_entry(data)[0].body
            if isinstance(body, GroupAccepted):
                accepted[body.version, body.slot] = body
            elif isinstance(body, BatchFormed):
                batches[body.step] = tuple(place for place in body.groups if place not in (body.repeated or ()))
        return [(step, accepted[place]) for step, places in sorted(batches.items()) for place in places]
    except (WireError, KeyError) as error:
        raise StateError(
            f"the log {folder.log} is damaged: {error}. Restore it, or delete the stage's folder"
        ) from None
    finally:
        store.close()


def digest_of(learned: Sequence[Learned]) -> str:
    """SHA-256, hex, over which groups a run learned from, and over their bytes."""
    return digest(to_json([[step, one.version, one.slot, one.digest, list(one.rewards)] for step, one in learned]))


def choose(folder: RunFolder, settings: dict[str, Any], expected: str) -> tuple[Examples, dict[str, int]]:
    """The rows of the rollouts that the rule takes, and how many rollouts those are of how many.

    `settings` are a reject stage's; `expected` is the run's `digest_of`. Raises `StateError` if the run changed since,
    if it did not keep its rollouts, or if the rule takes none.
    """
    if any(env.kind == COMPLETIONS for env in folder.config().envs):  # guard: chosen-rollouts-are-whole
        raise StateError(
            "the run's host plays its environments, so the log has no whole rollouts: reject takes runs whose workers play"
        )
    learned = learned_groups(folder)
    if digest_of(learned) != expected:  # guard: chosen-from-the-finished-run
        raise StateError(
            f"the log {folder.log} is not that of the finished run: restore it, or delete the stage's folder"
        )
    asked, rows, seen, taken = RejectStage(name="", rollouts="", **settings), list[tuple[bytes, bytes]](), 0, 0
    last = max((step for step, _ in learned), default=0)
    for step, accepted in learned:
        if asked.last_steps and step <= last - asked.last_steps:
            continue
        seen += len(accepted.rewards)
        kept = (
            raft(accepted.rewards, asked.keep)
            if asked.rule == "raft"
            else star(accepted.rewards, asked.right, asked.most)
        )
        if kept:
            rollouts = _kept_group(folder, accepted)
            taken += len(kept)
            rows += [
                (row.tokens_T.astype("<i4").tobytes(), row.author_T.tobytes())
                for index in kept
                for row in rollouts[index].rows()
                if POLICY in row.author_T
            ]
    if not rows:
        raise StateError(f"the rule {asked.rule} takes none of {seen} rollouts: lower `right`, or raise `last_steps`")
    return Examples(tokenizer_digest(folder.policy), tuple(rows)), {"rollouts": seen, "chosen": taken}


def _kept_group(folder: RunFolder, accepted: GroupAccepted) -> tuple[Rollout, ...]:
    try:
        return group_of(folder, accepted).rollouts
    except StateError as error:
        raise StateError(
            f'{error}: let the rl stage keep what it learned from (set = ["storage.retain=batches"]), or choose from '
            "fewer `last_steps`"
        ) from None
