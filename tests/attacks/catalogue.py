"""The attack zoo: what a dishonest worker can send instead of its work. Each attack is a small class.

`choices` holds those that write other tokens than the seeds choose; this file holds those that edit honest work.
`proof_forgeries` has the proofs of activations. `ATTACKS` lists all that every policy with some entropy must see refused,
`TOLERATED` what one group's bounds let pass, which shows over several groups or gains nothing.
"""

import msgspec
import numpy as np

from shoal.protocol.encoding import to_msgpack
from shoal.protocol.messages import ENVIRONMENT, POLICY, Rollout, make_rollout
from tests.attacks.attack import Attack, shifted
from tests.attacks.attack_fixture import World
from tests.attacks.sampling_attacks import (
    SYSTEM_PROMPT,
    BestOf2,
    BestOf4,
    BestOf8,
    Bfloat16Weights,
    Colder,
    Cooler,
    DraftThenPrefill,
    Duplicates,
    EarlyEnd,
    Fabricated,
    HiddenPrompt,
    HiddenSystemPrompt,
    Hotter,
    Int4ThenPrefill,
    Int4Weights,
    Int8Weights,
    OneToken,
    OtherModel,
    OthersRollouts,
    OwnOldRollouts,
    OwnSeeds,
    QuietTolerance,
    RunnerUp,
    Shuffled,
    SpentTolerance,
    StalePolicy,
    Whispered,
)

# --- log-probs ---


class ShiftedLogprobs(Attack):
    """Claims that its tokens were less likely, which inflates their importance in the loss."""

    caught_by = ("logprobs",)

    def spoil_rollout(self, rollout):
        return shifted(rollout, -0.5)


class NudgedLogprobs(Attack):
    """Claims wrong log-probs within what the checks tolerate: nine tenths of the bound."""

    def groups(self, world):
        bound = world.rules.bounds[f"{world.rules.dtype}/{world.rules.dtype}"].logprob
        return [
            msgspec.structs.replace(group, rollouts=tuple(shifted(r, -0.9 * bound) for r in group.rollouts))
            for group in world.honest_groups
        ]


class InventedLogprobs(Attack):
    """Sends honest tokens with invented log-probs."""

    caught_by = ("logprobs",)

    def spoil_rollout(self, rollout):
        rng = np.random.default_rng(len(rollout.token_ids))
        invented = -rng.exponential(1.0, rollout.num_policy_tokens()).astype("<f4")
        return msgspec.structs.replace(rollout, logprobs=invented.tobytes())


class NanLogprobs(Attack):
    """Sends NaN as log-probs, to poison the trainer."""

    caught_by = ("shape",)

    def spoil_rollout(self, rollout):
        return msgspec.structs.replace(rollout, logprobs=np.full(rollout.num_policy_tokens(), np.nan, "<f4").tobytes())


# --- prompts, tasks, slots, versions ---


class EditedPrompt(Attack):
    """Shows the model a prompt with help in it, and sends that prompt: all else fits."""

    caught_by = ("prompt",)
    words: tuple[int, ...] = (6, 7, 8, 9)
    at = 1

    def groups(self, world):
        return [super(EditedPrompt, self).spoil(group) for group in world.play(self.liar(world))]

    def liar(self, world: World) -> Whispered:
        return Whispered(world.engine, self.words, self.at)

    def spoil_rollout(self, rollout):
        tokens_T = np.insert(rollout.tokens_T(), self.at, self.words)
        author_T = np.insert(rollout.author_T(), self.at, [ENVIRONMENT] * len(self.words))
        return make_rollout(tokens_T, author_T, rollout.logprobs_P(), version=rollout.version, ending=rollout.ending)


class SystemPrompt(EditedPrompt):
    """Adds a system message, and sends it."""

    words = SYSTEM_PROMPT
    at = 0


class SwappedPrompt(Attack):
    """Changes a token of the prompt afterwards."""

    caught_by = ("prompt",)

    def spoil_rollout(self, rollout):
        tokens_T = rollout.tokens_T().copy()
        tokens_T[1] = 9 if tokens_T[1] != 9 else 10
        return msgspec.structs.replace(rollout, token_ids=tokens_T.tobytes())


class AddedPrompt(Attack):
    """Adds a hint to the prompt afterwards."""

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
    """Solves a task of its own choice, and names it."""

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
    """Claims another ending than the true one."""

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
    """Goes on writing after the limit of a turn."""

    caught_by = ("shape",)

    def spoil_rollout(self, rollout):
        start = int(np.argmax(rollout.author_T() == POLICY))
        tokens_T = [*rollout.tokens_T()[:start], *[7] * 13]
        return make_rollout(tokens_T, [0] * start + [1] * 13, [-1.0] * 13, version=rollout.version, ending="length")


class ExtraRollout(Attack):
    """Sends one rollout more than asked for, to be paid for it."""

    caught_by = ("shape",)

    def spoil(self, group):
        return msgspec.structs.replace(group, rollouts=(*group.rollouts, group.rollouts[0]))


class MissingRollout(Attack):
    """Leaves out one rollout: the last."""

    caught_by = ("complete",)

    def spoil(self, group):
        return msgspec.structs.replace(group, rollouts=group.rollouts[:-1])


class DropsBadRollouts(Attack):
    """Leaves the worst rollout out of each group; of equally bad ones, the last."""

    caught_by = ("complete",)

    def groups(self, world):
        kept = []
        for group, rewards in zip(world.honest_groups, world.rewards(world.honest_groups), strict=True):
            worst = len(rewards) - 1 - rewards[::-1].index(min(rewards))
            rollouts = group.rollouts[:worst] + group.rollouts[worst + 1 :]
            kept.append(msgspec.structs.replace(group, rollouts=rollouts))
        return kept


class DropsBadGroups(Attack):
    """Claims that the worse half of its slots could not be played."""

    caught_by = ("complete",)

    def groups(self, world):
        mean_of = [sum(rewards) / len(rewards) for rewards in world.rewards(world.honest_groups)]
        bad = set(sorted(range(len(mean_of)), key=lambda place: mean_of[place])[: len(mean_of) // 2])
        return [
            msgspec.structs.replace(group, rollouts=()) if place in bad else group
            for place, group in enumerate(world.honest_groups)
        ]


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


class ForgedReward(Attack):
    """Claims a reward for its rollouts. No message has a field for one, so it has to invent the field."""

    caught_by = ("shape",)

    def body(self, world):
        groups = [msgspec.to_builtins(group, builtin_types=(bytes,)) for group in world.honest_groups]
        encoded = tuple(msgspec.msgpack.encode(group | {"rewards": [1.0] * len(group["rollouts"])}) for group in groups)
        return world.encode([], encoded=encoded)


class CutBytes(Attack):
    """A submission whose groups break off in the middle."""

    caught_by = ("shape",)

    def body(self, world):
        whole = [to_msgpack(group) for group in world.honest_groups]
        return world.encode([], encoded=tuple(data[: len(data) // 2] for data in whole))


ATTACKS: tuple[type[Attack], ...] = (
    OtherModel, StalePolicy, Int8Weights, Int4Weights, Bfloat16Weights, DraftThenPrefill, Int4ThenPrefill,
    Colder, Cooler, Hotter, OwnSeeds, BestOf2, BestOf4, BestOf8, OwnOldRollouts, OthersRollouts, Duplicates, Shuffled,
    HiddenPrompt, HiddenSystemPrompt, Fabricated, EarlyEnd, OneToken, RunnerUp,
    ShiftedLogprobs, InventedLogprobs, NanLogprobs, EditedPrompt, SystemPrompt, SwappedPrompt, AddedPrompt,
    EasierTask, WrongTask, CopiedFromOtherSlot, WrongVersion, MixedVersions, ReplayedSubmission, OtherRun,
    Truncated, ForgedEnding, ClaimedError, ForgedAnswer, EnvironmentAsPolicy, PolicyAsEnvironment, LongTurn,
    ExtraRollout, MissingRollout, DropsBadRollouts, Empty, DropsBadGroups, MissingGroup, SwappedGroups,
    ForgedReward, CutBytes, Oversize, Garbage, GarbageGroups,
)  # fmt: skip

TOLERATED: tuple[type[Attack], ...] = (SpentTolerance, QuietTolerance, NudgedLogprobs)
