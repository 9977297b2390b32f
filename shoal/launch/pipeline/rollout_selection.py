"""Which rollouts of a run that has ended later stages learn from: by rejection sampling, or as pairs of better and worse.

It reads the log and the bodies that the run kept, and takes the rewards of the log, which validators verified. It chooses
from the groups that batches took, in the order of the steps: at max_staleness = 0 these follow from the run file and the
seed. The rules are in `algos/rejection_sampling`.
"""

from collections.abc import Sequence
from typing import Any

from shoal.algos.rejection_sampling import raft, star
from shoal.config.stages import RejectStage
from shoal.errors import StateError
from shoal.ledger.batches import BatchFormed, GroupAccepted
from shoal.ledger.task_difficulty import solve_rate
from shoal.protocol.constants import COMPLETIONS
from shoal.protocol.encoding import digest, to_json
from shoal.protocol.messages import POLICY, Rollout
from shoal.protocol.reward_rules import fault_indices, without_faults
from shoal.run_folder import RunFolder
from shoal.runs.log_follower import LogFollower
from shoal.runs.rollout_samples import group_of
from shoal.train.dataset_files import Examples, tokenizer_digest

Learned = tuple[int, GroupAccepted]
"""A group that a batch took, and the batch's step."""


def learned_groups(folder: RunFolder) -> list[Learned]:
    """The groups that the run learned from, in the order of steps and then of slots. Raises `StateError`."""
    batches, accepted = dict[int, tuple[tuple[int, int], ...]](), dict[tuple[int, int], GroupAccepted]()
    for entry in LogFollower(folder.log).events():
        if isinstance(body := entry.body, GroupAccepted):
            accepted[body.version, body.slot] = body
        elif isinstance(body, BatchFormed):
            batches[body.step] = body.groups
    try:
        return [(step, accepted[place]) for step, places in sorted(batches.items()) for place in places]
    except KeyError as error:
        raise StateError(
            f"the log {folder.log} is damaged: it lacks group {error}. Restore it, or delete the stage's folder"
        ) from None


def digest_of(learned: Sequence[Learned]) -> str:
    """SHA-256, hex, over which groups a run learned from, and over their bytes."""
    return digest(to_json([[step, one.version, one.slot, one.digest, list(one.rewards)] for step, one in learned]))


def choose(folder: RunFolder, settings: dict[str, Any], expected: str) -> tuple[Examples, dict[str, Any]]:
    """The rows of the rollouts that the rule takes; and how many rollouts those are of how many, with the shares of
    both that are right.

    `settings` are a reject stage's; `expected` is the run's `digest_of`. Raises `StateError` if the run changed since,
    if it did not keep its rollouts, or if the rule takes none.
    """
    asked, rows = RejectStage(name="", rollouts="", **settings), list[tuple[bytes, bytes]]()
    seen, taken = list[float](), list[float]()
    for accepted in _groups(folder, asked.last_steps, expected):
        left, rewards = _left(accepted)
        seen += rewards
        kept = [
            left[index]
            for index in (raft(rewards, asked.keep) if asked.rule == "raft" else star(rewards, asked.right, asked.most))
        ]
        if kept:
            rollouts = _kept_group(folder, accepted)
            taken += [accepted.rewards[index] for index in kept]
            rows += [row for index in kept for row in _rows(rollouts[index])]
    if not rows:
        raise StateError(
            f"the rule {asked.rule} takes none of {len(seen)} rollouts: lower `right`, or raise `last_steps`"
        )
    counts = {"rollouts": len(seen), "chosen": len(taken)}
    shares = {
        f"right_of_{name}": solve_rate(found, asked.right) for name, found in (("rollouts", seen), ("chosen", taken))
    }
    return Examples(tokenizer_digest(folder.policy), tuple(rows)), counts | shares


def _left(accepted: GroupAccepted) -> tuple[Sequence[int], Sequence[float]]:
    """The rollouts of a group on which its environment did not fail, and their rewards."""
    faults = fault_indices(accepted.faults)
    return without_faults(range(len(accepted.rewards)), faults), without_faults(accepted.rewards, faults)


def choose_pairs(folder: RunFolder, last_steps: int, expected: str) -> Examples:
    """The best and the worst rollout of each group, in this order, of groups whose rollouts have one row; as `choose`."""
    rows = list[tuple[bytes, bytes]]()
    for accepted in _groups(folder, last_steps, expected):
        left, rewards = _left(accepted)
        if len(set(rewards)) < 2:  # an algorithm may learn from groups whose rewards are equal
            continue
        rollouts = _kept_group(folder, accepted)
        best, worst = (pick(left, key=accepted.rewards.__getitem__) for pick in (max, min))
        both = _rows(rollouts[best]), _rows(rollouts[worst])
        if all(len(found) == 1 for found in both):
            rows += [found[0] for found in both]
    if not rows:
        raise StateError(
            "the run has no group of rollouts of one row with different rewards: there are no pairs in it. With "
            'envs.history = "template", several turns make several rows: take "append", or name a file of pairs (pairs)'
        )
    return Examples(tokenizer_digest(folder.policy), tuple(rows))


def _groups(folder: RunFolder, last_steps: int, expected: str) -> list[GroupAccepted]:
    """The groups that the run learned from, of the last steps if so many are asked for. Raises `StateError`."""
    if any(env.kind == COMPLETIONS for env in folder.config().envs):  # guard: chosen-rollouts-are-whole
        raise StateError(
            "the run's host plays its environments, so the log has no whole rollouts: take a run whose workers play"
        )
    learned = learned_groups(folder)
    if digest_of(learned) != expected:  # guard: chosen-from-the-finished-run
        raise StateError(
            f"the log {folder.log} is not that of the finished run: restore it, or delete the stage's folder"
        )
    last = max((step for step, _ in learned), default=0)
    return [accepted for step, accepted in learned if not last_steps or step > last - last_steps]


def _rows(rollout: Rollout) -> list[tuple[bytes, bytes]]:
    """Tokens and authors of the rows in which the policy wrote."""
    found = (row for row in rollout.rows() if POLICY in row.author_T)
    return [(row.tokens_T.astype("<i4").tobytes(), row.author_T.tobytes()) for row in found]


def _kept_group(folder: RunFolder, accepted: GroupAccepted) -> tuple[Rollout, ...]:
    try:
        return group_of(folder, accepted).rollouts
    except StateError as error:
        raise StateError(
            f'{error}: let the rl stage keep what it learned from (set = ["storage.retain=batches"]), or choose from '
            "fewer `last_steps`"
        ) from None
