"""Solve rates of each environment, of the groups that were accepted between two batches: measured in every run.

Used by `board`, which gives them to the trainer with each batch. The desk has the links of versions in use, so it knows
the task of each slot before the log does. Nothing is decided by these figures, and a restart loses those of one step:
draws that follow solve rates count in `ledger/pools`.
"""

from collections.abc import Mapping

from shoal.ledger.drawn import table_of
from shoal.ledger.entry import Entry
from shoal.ledger.facts.batches import BatchFormed, GroupAccepted
from shoal.ledger.pools import solve_rate
from shoal.ledger.seeds import slot_of
from shoal.protocol.continuations import is_continued_slot
from shoal.protocol.env_faults import fault_indices, without_faults
from shoal.protocol.types import SolveRate
from shoal.roles.coordinator.desk import Desk

KEPT = 8
"""Batches whose figures are remembered: the trainer may ask for one again."""


class SolveRates:
    """Follows a desk's log."""

    def __init__(self, desk: Desk, solved: Mapping[str, float]) -> None:
        """`solved` is the least reward of a solved rollout, by label."""
        self._desk, self._solved = desk, solved
        self._since: dict[str, list[float]] | None = {} if not desk.state.accepted_groups else None
        """Solve rates of groups since the last batch, by label; None until there is one after a restart."""
        self._by_step: dict[int, dict[str, SolveRate]] = {}
        desk.book.watch(self._see)

    def of_step(self, step: int) -> dict[str, SolveRate]:
        """Figures of the groups accepted for a step, by label; empty if they were forgotten."""
        return self._by_step.get(step, {})

    def _see(self, entries: list[Entry]) -> None:
        for body in (entry.body for entry in entries):
            if isinstance(body, GroupAccepted) and self._since is not None:
                if is_continued_slot(body.slot, self._desk.state.rules.block_groups):
                    continue
                stream, link = self._desk.state.streams[body.stream], self._desk.slot_links[body.version + 1]
                label = slot_of(self._desk.state, stream, body.version, body.slot, link).env
                rewards = without_faults(body.rewards, fault_indices(body.faults))
                if rewards:
                    self._since.setdefault(label, []).append(solve_rate(rewards, self._solved.get(label, 1.0)))
            elif isinstance(body, BatchFormed):
                if self._since is not None:
                    self._keep(body.step, self._since)
                self._since = {}

    def _keep(self, step: int, rates: Mapping[str, list[float]]) -> None:
        state = self._desk.state
        table = table_of(state, state.main, state.main.version)
        self._by_step[step] = {
            env.label: SolveRate(sum(own) / len(own) if own else None, len(own), env.weight)
            for env in table
            for own in [rates.get(env.label, [])]
        }
        while len(self._by_step) > KEPT:
            del self._by_step[min(self._by_step)]
