"""Reads what a step learns from: the rows of its batch, and the rewards of all groups accepted for it.

It fetches bodies and verifies their hashes. The log says which groups are in a batch.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

from shoal.config import RunConfig
from shoal.ledger.batches import BatchFormed, GroupAccepted
from shoal.ledger.event_types import read_entry
from shoal.net.client import Client
from shoal.protocol import messages as t
from shoal.protocol.algorithm_config import Algorithm
from shoal.protocol.constants import MAX_EVENTS, MAX_EVENTS_BYTES, MAX_SUBMISSION_BYTES
from shoal.protocol.continuations import is_continued_slot
from shoal.protocol.encoding import from_msgpack
from shoal.protocol.reward_rules import fault_indices, without_faults
from shoal.roles.node.reward_part_files import means_of, take_scores
from shoal.train.batch_filter import select, signs_of
from shoal.train.rows import TrainingRow, Unlearnable, learned, mean_rewards, overlong_share, rows_of_group

log = logging.getLogger("trainer")


class BatchReader:
    """Reads batches from a coordinator, in the order of their steps."""

    def __init__(self, config: RunConfig, client: Client, vocabulary: int, scores: Path) -> None:
        """`scores` is the folder in which the host's processes leave what rollouts scored."""
        self._config, self._client, self._vocabulary, self._scores = config, client, vocabulary, scores
        self.seen_seq = -1

    async def rows(self, batch: t.Batch, info: t.RunInfo) -> tuple[list[TrainingRow], dict[str, Any]]:
        """The batch's rows in canonical order, and figures: what the filter left out, and rewards of all groups."""
        rules, bodies = info.rules, {}
        for name in dict.fromkeys(member.submission for member in batch.groups):
            body = await self._client.get_blob(name, cap=MAX_SUBMISSION_BYTES)
            bodies[name] = from_msgpack(body, t.Submission).groups
        rows_G = [
            self._rows_of(member, bodies[member.submission][member.index], rules.algorithm) for member in batch.groups
        ]
        chosen = select(
            batch.groups, rows_G, algorithm=rules.algorithm, version=batch.step, max_staleness=rules.max_staleness
        )
        counts: dict[str, Any] = {
            "groups_without_signal": chosen.groups_without_signal,
            "groups_unlearnable": sum(not rows for rows in rows_G),
            "stale_rollouts": chosen.stale_rollouts,
            "overlong_share": overlong_share(rows_G),
        }
        if rules.algorithm.mask_overlong:
            counts["overlong_rollouts"] = chosen.overlong_rollouts
        scores = await asyncio.to_thread(take_scores, self._scores)
        counts |= await self.accepted_for(batch.step, sum(tally.faults for tally in scores.values()))
        rows = learned(chosen.rows)
        counts |= _solve_rates(batch) | signs_of(rows)
        labels = [spec.label for spec in info.envs]
        if len(labels) > 1:
            counts |= {f"reward_mean/{label}": mean for label, mean in mean_rewards(chosen.rows, labels).items()}
        counts |= means_of(scores, labels)
        return chosen.rows, counts

    def _rows_of(self, member: t.BatchGroup, data: bytes, algorithm: Algorithm) -> list[TrainingRow]:
        """A group's rows; none if a validator should have refused it, since one bad group must not stop the run."""
        try:
            return rows_of_group(
                member, data, algorithm=algorithm, vocabulary=self._vocabulary,
                max_tokens=self._config.sampling.max_tokens,
                max_rollout_tokens=self._config.sampling.max_rollout_tokens,
            )  # fmt: skip
        except Unlearnable as fault:
            log.warning("left out of the batch: %s", fault)
            return []  # guard: unlearnable-is-left-out

    async def accepted_for(self, step: int, learned_faults: int = 0) -> dict[str, Any]:
        """Figures of all groups accepted since the batch of the step before, with or without signal. `learned_faults`: of
        their rollouts, how many count although the environment failed on them.

        Read from the log, so that a restart changes nothing: it reads the events of earlier steps again and skips them.
        """
        accepted, seen_seq = list[GroupAccepted](), self.seen_seq
        more, per_block = True, self._config.rollouts.block_rollouts // self._config.rollouts.group_size
        while more:
            page = await self._client.get(f"/v1/events?after={seen_seq}", cap=MAX_SUBMISSION_BYTES)
            lines = page.splitlines()
            more = len(lines) >= MAX_EVENTS or len(page) > MAX_EVENTS_BYTES  # guard: full-page-is-not-the-end
            for line in lines:
                entry, _ = read_entry(line)
                seen_seq = entry.seq
                if isinstance(entry.body, GroupAccepted) and not is_continued_slot(entry.body.slot, per_block):
                    accepted.append(entry.body)
                elif isinstance(entry.body, BatchFormed) and entry.body.step < step:
                    accepted.clear()
                elif isinstance(entry.body, BatchFormed):
                    more = False
                    break
        self.seen_seq = seen_seq  # only now: a page that failed is asked for again with those before it
        if not accepted:
            return {}
        flat = sum(not group.signal for group in accepted)
        rewards = [one for group in accepted for one in without_faults(group.rewards, fault_indices(group.faults))]
        figures: dict[str, Any] = {"zero_signal_share": flat / len(accepted)}
        if rewards:
            figures["reward_all_mean"] = sum(rewards) / len(rewards)
        played = sum(len(group.rewards) for group in accepted)
        if failed := min(played, played - len(rewards) + learned_faults):  # two validators may count the same
            figures["fault_share"] = failed / played
            figures["fault_rollouts"] = failed
        return figures


def _solve_rates(batch: t.Batch) -> dict[str, Any]:
    """Solve rates of all groups accepted for a batch; with several environments, those and the weight of each, too."""
    known = {label: found for label, found in batch.solved.items() if found.rate is not None}
    groups = sum(found.groups for found in known.values())
    if not groups:
        return {}
    figures: dict[str, Any] = {
        "solve_rate": sum((found.rate or 0.0) * found.groups for found in known.values()) / groups
    }
    if len(batch.solved) > 1:
        figures |= {f"solve_rate/{label}": found.rate for label, found in batch.solved.items()}
        figures |= {f"draw_weight/{label}": found.weight for label, found in batch.solved.items()}
    return figures
