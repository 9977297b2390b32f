"""The base of every attack of the zoo: honest work that a subclass changes. The files beside this one hold the attacks.

`caught_by` names the checks of which one must refuse every group that differs from honest work; `groups` plays or
edits, `proofs` proves activations where the run asks for that, `body` encodes. An attacker knows the code, the seeds
of its lease and the policy, and makes its lie as consistent as it can: arrays fit, log-probs exist for every token that
is claimed for the policy, and proofs are made by a prefill of what it sends.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from shoal.engine.interface import Engine
from shoal.protocol.messages import Group, Rollout
from tests.attacks.attack_fixture import World


class Attack:
    """Honest work, which the subclasses change."""

    caught_by: tuple[str, ...] = ()

    def groups(self, world: World) -> list[Group]:
        return [self.spoil(group) for group in world.honest_groups]

    def spoil(self, group: Group) -> Group:
        return msgspec.structs.replace(group, rollouts=tuple(self.spoil_rollout(r) for r in group.rollouts))

    def spoil_rollout(self, rollout: Rollout) -> Rollout:
        return rollout

    def prover(self, world: World) -> Engine:
        """The engine whose activations it proves: that of the right policy, if it has it."""
        return world.engine

    def proofs(self, world: World, groups: Sequence[Group]) -> tuple[bytes, ...]:
        return world.prove(groups, self.prover(world))

    def body(self, world: World) -> bytes:
        groups = self.groups(world)
        return world.encode(groups, proofs=self.proofs(world, groups))


class OtherEngine(Attack):
    """Generates and proves with another engine than the lease asks for."""

    caught_by = ("sampling", "logprobs", "activations")

    def groups(self, world):
        return world.play(self.prover(world))


def prefilled(world: World, groups: Sequence[Group]) -> list[Group]:
    """The groups with the log-probs that a prefill with the right policy gives their tokens."""
    scores = iter(world.score(world.requests(groups)))
    return [
        msgspec.structs.replace(
            group,
            rollouts=tuple(
                msgspec.structs.replace(r, logprobs=next(scores).logprobs_P.astype("<f4").tobytes())
                for r in group.rollouts
            ),
        )
        for group in groups
    ]


def with_rollouts(groups: Sequence[Group], rollouts: Sequence[Rollout]) -> list[Group]:
    """The groups with other rollouts in the place of theirs, in order."""
    rest = iter(rollouts)
    return [msgspec.structs.replace(g, rollouts=tuple(next(rest) for _ in g.rollouts)) for g in groups]


def shifted(rollout: Rollout, nats: float) -> Rollout:
    """The rollout with its log-probs moved by `nats`."""
    return msgspec.structs.replace(rollout, logprobs=(rollout.logprobs_P() + np.float32(nats)).tobytes())
