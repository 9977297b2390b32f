"""The attack zoo: what a dishonest worker can send instead of its work. Each attack is a small class.

`caught_by` names the checks of which one must refuse every group that differs from honest work; `groups` plays or
edits, `body` encodes. An attacker knows the code, the seeds of its lease and the policy, and makes its lie as
consistent as it can: arrays fit, log-probs exist for every token that is claimed for the policy.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from shoal.engine.base import Continuation, Request
from shoal.engine.cheats import Cheat, Fabricate, OtherSeed
from shoal.protocol.types import ENVIRONMENT, POLICY, Group, Rollout, make_rollout
from shoal.protocol.wire import domain_hash
from tests.attacks.world import World, lease_of, load_engine


class Attack:
    """Honest work, to be spoilt by the subclasses."""

    caught_by: tuple[str, ...] = ()

    def groups(self, world: World) -> list[Group]:
        return [self.spoil(group) for group in world.honest_groups]

    def spoil(self, group: Group) -> Group:
        return msgspec.structs.replace(group, rollouts=tuple(self.spoil_rollout(r) for r in group.rollouts))

    def spoil_rollout(self, rollout: Rollout) -> Rollout:
        return rollout

    def body(self, world: World) -> bytes:
        return world.encode(self.groups(world))


# --- not the sampling that was asked for ---


class OtherModel(Attack):
    """Generates with a model of its own."""

    caught_by = ("sampling",)

    def groups(self, world):
        return world.play(load_engine(world.other))


class StalePolicy(Attack):
    """Generates with the checkpoint before, saving a download."""

    caught_by = ("sampling", "logprobs")

    def groups(self, world):
        return world.play(load_engine(world.stale))


class Colder(Attack):
    """Samples at a lower temperature, for higher rewards."""

    caught_by = ("sampling", "logprobs")
    factor = 1 / 3

    def groups(self, world):
        asked = world.lease.sampling
        return world.play(sampling=msgspec.structs.replace(asked, temperature=asked.temperature * self.factor))


class Cooler(Colder):
    """The same, nearly unnoticeable."""

    factor = 0.8


class Hotter(Colder):
    """Samples at a higher temperature."""

    factor = 1.25


class Luck(Attack):
    """Samples honestly, with seeds of its own."""

    caught_by = ("sampling",)

    def groups(self, world):
        return world.play(OtherSeed(world.engine))


class BestOfN(Attack):
    """Plays each rollout several times and sends the longest: a stand-in for the best."""

    caught_by = ("sampling",)

    def groups(self, world):
        tries = [world.honest_groups, *(world.play(Reseeded(world.engine, salt)) for salt in (b"1", b"2", b"3"))]
        return [
            msgspec.structs.replace(
                of_slot[0],
                rollouts=tuple(
                    max(of_place, key=lambda r: len(r.author))
                    for of_place in zip(*(g.rollouts for g in of_slot), strict=True)
                ),
            )
            for of_slot in zip(*tries, strict=True)
        ]


class Reseeded(Cheat):
    """Another try at everything."""

    def __init__(self, engine, salt):
        super().__init__(engine)
        self.salt = salt

    def extend(self, requests: Sequence[Request], temperature: float) -> list[Continuation]:
        return self.engine.extend(
            [r._replace(seed=domain_hash("try", self.salt, r.seed)) for r in requests], temperature
        )


class Fabricated(Attack):
    """Writes random legal tokens and likely-looking log-probs, without a model."""

    caught_by = ("sampling",)

    def groups(self, world):
        return world.play(Fabricate(world.engine))


class EarlyEnd(Attack):
    """Ends each turn after one token with a stop token of its own, to be paid for quick work."""

    caught_by = ("sampling",)

    def groups(self, world):
        return world.play(StopsEarly(world.engine))


class StopsEarly(Cheat):
    """Asks the model for one token and stops by itself."""

    def extend(self, requests, temperature):
        stop = min(requests[0].stop_ids)
        short = self.engine.extend([r._replace(max_new=1) for r in requests], temperature)
        return [
            turn if turn.token_ids[-1] in request.stop_ids or request.max_new < 2
            else Continuation([*turn.token_ids, stop], [*turn.logprobs, -4.0])
            for turn, request in zip(short, requests, strict=True)
        ]  # fmt: skip


class HiddenPrompt(Attack):
    """Shows the model a prompt with help in it, and claims the right one."""

    caught_by = ("sampling",)

    def groups(self, world):
        return world.play(Whispered(world.engine))


class Whispered(Cheat):
    """Slips four tokens into every prompt."""

    def extend(self, requests, temperature):
        told = [r._replace(token_ids=[*r.token_ids[:1], 6, 7, 8, 9, *r.token_ids[1:]]) for r in requests]
        return self.engine.extend(told, temperature)


class Duplicates(Attack):
    """Makes one rollout and sends it as all of its group."""

    caught_by = ("sampling",)

    def spoil(self, group):
        return msgspec.structs.replace(group, rollouts=(group.rollouts[0],) * len(group.rollouts))


class Shuffled(Attack):
    """All rollouts are there, in another order than their seeds."""

    caught_by = ("sampling",)

    def spoil(self, group):
        return msgspec.structs.replace(group, rollouts=group.rollouts[1:] + group.rollouts[:1])


class CopiedAcrossSeeds(Attack):
    """Answers slot 2 with the work for slot 0, which holds the same task under another seed."""

    caught_by = ("sampling",)

    def groups(self, world):
        groups = world.honest_groups
        return [msgspec.structs.replace(groups[0], slot=2) if g.slot == 2 else g for g in groups]


class OneToken(Attack):
    """Changes a single token of one rollout: the first that the policy wrote in its last turn."""

    caught_by = ("sampling",)

    def spoil(self, group):
        rollout = group.rollouts[0]
        tokens_T, author_T = rollout.tokens_T().copy(), rollout.author_T()
        last = len(author_T) - 1 - int(np.argmax(author_T[::-1] == ENVIRONMENT)) + 1
        if last < len(tokens_T) - 1:
            tokens_T[last] = 6 + (tokens_T[last] - 6 + 13) % 26
        changed = msgspec.structs.replace(rollout, token_ids=tokens_T.tobytes())
        return msgspec.structs.replace(group, rollouts=(changed, *group.rollouts[1:]))


# --- log-probs ---


class ShiftedLogprobs(Attack):
    """Claims that its tokens were less likely, which inflates their importance in the loss."""

    caught_by = ("logprobs",)

    def spoil_rollout(self, rollout):
        return msgspec.structs.replace(rollout, logprobs=(rollout.logprobs_P() - np.float32(0.5)).tobytes())


class InventedLogprobs(Attack):
    """Honest tokens, log-probs from thin air."""

    caught_by = ("logprobs",)

    def spoil_rollout(self, rollout):
        rng = np.random.default_rng(len(rollout.token_ids))
        invented = -rng.exponential(1.0, rollout.num_policy_tokens()).astype("<f4")
        return msgspec.structs.replace(rollout, logprobs=invented.tobytes())


class NanLogprobs(Attack):
    """Poison for the trainer."""

    caught_by = ("shape",)

    def spoil_rollout(self, rollout):
        return msgspec.structs.replace(rollout, logprobs=np.full(rollout.num_policy_tokens(), np.nan, "<f4").tobytes())


# --- prompts, tasks, slots, versions ---


class EditedPrompt(Attack):
    """Plays honestly after a prompt of its own, and says so."""

    caught_by = ("prompt",)

    def spoil_rollout(self, rollout):
        tokens_T = rollout.tokens_T().copy()
        tokens_T[1] = 9 if tokens_T[1] != 9 else 10
        return msgspec.structs.replace(rollout, token_ids=tokens_T.tobytes())


class AddedPrompt(Attack):
    """Adds a hint to the prompt."""

    caught_by = ("prompt",)

    def spoil_rollout(self, rollout):
        start = int(np.argmax(rollout.author_T() == POLICY))
        tokens_T = np.insert(rollout.tokens_T(), start, [6, 7])
        author_T = np.insert(rollout.author_T(), start, [ENVIRONMENT] * 2)
        return make_rollout(tokens_T, author_T, rollout.logprobs_P(), version=rollout.version, ending=rollout.ending)


class EasierTask(Attack):
    """Solves an easier task under the name of the one it was given."""

    caught_by = ("prompt", "environment", "ending")

    def groups(self, world):
        easy = msgspec.structs.replace(
            world.lease,
            blocks=tuple(
                msgspec.structs.replace(b, slots=tuple(msgspec.structs.replace(s, task=s.task + 20) for s in b.slots))
                for b in world.lease.blocks
            ),
        )
        groups = world.play(lease=easy)
        return [msgspec.structs.replace(group, task=group.task - 20) for group in groups]


class WrongTask(Attack):
    """Solves a task of its own choice and says so."""

    caught_by = ("lease",)

    def spoil(self, group):
        return msgspec.structs.replace(group, task=group.task + 1)


class CopiedFromOtherSlot(Attack):
    """Sends the work of one slot for all slots."""

    caught_by = ("lease", "prompt", "environment", "ending", "sampling")

    def groups(self, world):
        groups = world.honest_groups
        return [
            msgspec.structs.replace(g, rollouts=groups[(i + 4) % len(groups)].rollouts) for i, g in enumerate(groups)
        ]


class WrongVersion(Attack):
    """Work of an older version, honestly labelled."""

    caught_by = ("lease",)

    def spoil_rollout(self, rollout):
        return msgspec.structs.replace(rollout, version=rollout.version - 1)


class MixedVersions(Attack):
    """Some rollouts of an older version."""

    caught_by = ("shape",)

    def spoil(self, group):
        old = msgspec.structs.replace(group.rollouts[0], version=group.rollouts[0].version - 1)
        return msgspec.structs.replace(group, rollouts=(old, *group.rollouts[1:]))


class ReplayedSubmission(Attack):
    """An earlier submission of its own, sent again for this lease."""

    caught_by = ("lease",)

    def body(self, world):
        return world.encode(world.honest_groups, lease="lease-0")


class OtherRun(Attack):
    """A submission made for another run."""

    caught_by = ("lease",)

    def body(self, world):
        return world.encode(world.honest_groups, run="run-0")


class EarlierSeeds(Attack):
    """The same tasks, played for an earlier lease under its seeds."""

    caught_by = ("sampling",)

    def groups(self, world):
        blocks = [[(s.slot, s.env, s.task) for s in block.slots] for block in world.lease.blocks]
        return world.play(lease=lease_of(blocks, seed="earlier"))


# --- endings and authors ---


class Truncated(Attack):
    """Cuts every rollout in half, to be paid for half the work."""

    caught_by = ("ending",)

    def spoil_rollout(self, rollout):
        policy_T = np.flatnonzero(rollout.author_T() == POLICY)
        if len(policy_T) < 2:
            return msgspec.structs.replace(rollout, ending="stop")
        cut = int(policy_T[len(policy_T) // 2])
        if rollout.author_T()[cut - 1] == ENVIRONMENT:
            cut += 1
        kept = rollout.author_T()[:cut]
        return make_rollout(
            rollout.tokens_T()[:cut],
            kept,
            rollout.logprobs_P()[: np.count_nonzero(kept)],
            version=rollout.version,
            ending="length" if rollout.tokens_T()[cut - 1] >= 6 else "stop",
        )


class ForgedEnding(Attack):
    """Claims another ending than the one that came."""

    caught_by = ("ending",)

    def spoil_rollout(self, rollout):
        return msgspec.structs.replace(rollout, ending="length" if rollout.ending == "environment" else "environment")


class ClaimedError(Attack):
    """Claims that the environment failed."""

    caught_by = ("environment",)

    def spoil_rollout(self, rollout):
        return msgspec.structs.replace(rollout, ending="error")


class ForgedAnswer(Attack):
    """Rewrites what the environment answered."""

    caught_by = ("environment",)

    def spoil_rollout(self, rollout):
        tokens_T, author_T = rollout.tokens_T().copy(), rollout.author_T()
        answers = np.flatnonzero((author_T == ENVIRONMENT) & (np.cumsum(author_T) > 0))
        if not answers.size:
            return msgspec.structs.replace(rollout, ending="error")
        tokens_T[answers[1]] = 6 + (tokens_T[answers[1]] - 5) % 26
        return msgspec.structs.replace(rollout, token_ids=tokens_T.tobytes())


class EnvironmentAsPolicy(Attack):
    """Claims what the environment wrote as the policy's, to be paid for it."""

    caught_by = ("prompt", "environment", "shape")

    def spoil_rollout(self, rollout):
        author_T = rollout.author_T().copy()
        author_T[int(np.argmax(author_T == POLICY)) - 1] = POLICY
        return _with_authors(rollout, author_T)


class PolicyAsEnvironment(Attack):
    """Claims what the policy wrote as the environment's, so that its sampling is not looked at."""

    caught_by = ("prompt", "environment", "shape")

    def spoil_rollout(self, rollout):
        author_T = rollout.author_T().copy()
        author_T[int(np.argmax(author_T == POLICY))] = ENVIRONMENT
        return _with_authors(rollout, author_T)


def _with_authors(rollout: Rollout, author_T: np.ndarray) -> Rollout:
    logprobs_P = np.full(np.count_nonzero(author_T == POLICY), -1.0)
    return make_rollout(rollout.tokens_T(), author_T, logprobs_P, version=rollout.version, ending=rollout.ending)


# --- sizes and bytes ---


class LongTurn(Attack):
    """Writes on after the limit of a turn."""

    caught_by = ("shape",)

    def spoil_rollout(self, rollout):
        start = int(np.argmax(rollout.author_T() == POLICY))
        tokens_T = [*rollout.tokens_T()[:start], *[7] * 13]
        return make_rollout(tokens_T, [0] * start + [1] * 13, [-1.0] * 13, version=rollout.version, ending="length")


class ExtraRollout(Attack):
    """One more than asked, to be paid for it."""

    caught_by = ("shape",)

    def spoil(self, group):
        return msgspec.structs.replace(group, rollouts=(*group.rollouts, group.rollouts[0]))


class MissingRollout(Attack):
    """Leaves out the rollout it likes least: the last here."""

    caught_by = ("complete",)

    def spoil(self, group):
        return msgspec.structs.replace(group, rollouts=group.rollouts[:-1])


class Empty(Attack):
    """Claims that its slots could not be played at all."""

    caught_by = ("complete",)

    def spoil(self, group):
        return msgspec.structs.replace(group, rollouts=())


class MissingGroup(Attack):
    """Leaves out a group."""

    caught_by = ("shape",)

    def groups(self, world):
        return world.honest_groups[:-1]


class SwappedGroups(Attack):
    """Sends the groups in another order than the lease's."""

    caught_by = ("lease",)

    def groups(self, world):
        return world.honest_groups[::-1]


class Oversize(Attack):
    """Far more bytes than the lease can need."""

    caught_by = ("shape",)

    def body(self, world):
        return world.encode([], encoded=(bytes(1 << 22),))


class Garbage(Attack):
    """Not a submission at all."""

    caught_by = ("shape",)

    def body(self, world):
        return bytes(range(256)) * 16


class GarbageGroups(Attack):
    """A submission whose groups are noise."""

    caught_by = ("shape",)

    def body(self, world):
        return world.encode([], encoded=(b"\xc1" * 100,) * 8)


ATTACKS: tuple[type[Attack], ...] = (
    OtherModel, StalePolicy, Colder, Cooler, Hotter, Luck, BestOfN, Fabricated, EarlyEnd, HiddenPrompt, Duplicates,
    Shuffled, CopiedAcrossSeeds, OneToken, ShiftedLogprobs, InventedLogprobs, NanLogprobs, EditedPrompt, AddedPrompt,
    EasierTask, WrongTask, CopiedFromOtherSlot, WrongVersion, MixedVersions, ReplayedSubmission, OtherRun, EarlierSeeds,
    Truncated, ForgedEnding, ClaimedError, ForgedAnswer, EnvironmentAsPolicy, PolicyAsEnvironment, LongTurn,
    ExtraRollout, MissingRollout, Empty, MissingGroup, SwappedGroups, Oversize, Garbage, GarbageGroups,
)  # fmt: skip
