"""Attacks on the choice of tokens: another model, prompt, temperature or seed than the lease's, or text not sampled."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from shoal.algos.sampling_evidence import largest_sum, most_flipped
from shoal.engine.dishonest import Cheat, Fabricate, OtherSeed
from shoal.engine.interface import Continuation, Engine, EngineRequest
from shoal.envs.play_episodes import EpisodeAttempt, play
from shoal.protocol.encoding import domain_hash
from shoal.protocol.messages import ENVIRONMENT, POLICY, Group, Rollout
from shoal.protocol.seed_chain import sample_seed
from shoal.verification.checks_with_model import FAR
from tests.attacks.attack import Attack, OtherEngine, prefilled, with_rollouts
from tests.attacks.attack_fixture import World, altered, halve, lease_of, load_engine, round_to_int4

# --- another model ---


class OtherModel(OtherEngine):
    """Generates with a model of its own."""

    caught_by = ("sampling",)

    def prover(self, world):
        return load_engine(world.other)


class StalePolicy(OtherEngine):
    """Generates with an older checkpoint, saving a download."""

    def prover(self, world):
        return load_engine(world.stale)


class Int8Weights(OtherEngine):
    """Generates with weights rounded to 8 bits, and does not say so."""

    def prover(self, world):
        return load_engine(world.honest, dtype="int8")


class Int4Weights(OtherEngine):
    """Generates with weights rounded to 4 bits, and does not say so."""

    def prover(self, world):
        return load_engine(altered(world.honest, "int4", round_to_int4))


class Bfloat16Weights(OtherEngine):
    """Generates in bfloat16, and does not say so."""

    def prover(self, world):
        return load_engine(world.honest, dtype="bfloat16")


class DraftThenPrefill(Attack):
    """Samples from half of the layers; log-probs and proofs come from one honest prefill."""

    caught_by = ("sampling",)

    def groups(self, world):
        return prefilled(world, world.play(load_engine(altered(world.honest, "half", halve))))


class Int4ThenPrefill(Attack):
    """Samples with weights of 4 bits; log-probs and proofs come from one honest prefill."""

    caught_by = ("sampling",)

    def groups(self, world):
        return prefilled(world, world.play(load_engine(altered(world.honest, "int4", round_to_int4))))


# --- another temperature or seed ---


class Colder(Attack):
    """Samples at a lower temperature, for higher rewards."""

    caught_by = ("sampling", "logprobs")
    factor = 1 / 3

    def groups(self, world):
        asked = world.lease.sampling
        return world.play(sampling=msgspec.structs.replace(asked, temperature=asked.temperature * self.factor))


class Cooler(Colder):
    """Samples at a slightly lower temperature, which is hard to notice."""

    factor = 0.8


class Hotter(Colder):
    """Samples at a higher temperature."""

    factor = 1.2


class OwnSeeds(Attack):
    """Samples honestly, with seeds of its own."""

    caught_by = ("sampling",)

    def groups(self, world):
        return world.play(OtherSeed(world.engine))


class BestOf2(Attack):
    """Plays each rollout several times and sends the best one; of equally good ones, the longest."""

    caught_by = ("sampling",)
    tries = 2

    def groups(self, world):
        salts = [bytes([n]) for n in range(1, self.tries)]
        for salt in salts:
            if salt not in world.tries:
                world.tries[salt] = world.play(Reseeded(world.engine, salt))
        tried = [world.honest_groups, *(world.tries[salt] for salt in salts)]
        rewards = [world.rewards(groups) for groups in tried]
        best = []
        for place, group in enumerate(world.honest_groups):
            for index in range(len(group.rollouts)):
                worth = [
                    (of_try[place][index], len(groups[place].rollouts[index].author))
                    for of_try, groups in zip(rewards, tried, strict=True)
                ]
                best.append(tried[worth.index(max(worth))][place].rollouts[index])
        return with_rollouts(world.honest_groups, best)


class BestOf4(BestOf2):
    """The best of four."""

    tries = 4


class BestOf8(BestOf2):
    """The best of eight."""

    tries = 8


class Reseeded(Cheat):
    """Samples every turn with other seeds."""

    def __init__(self, engine, salt):
        super().__init__(engine)
        self.salt = salt

    def extend(self, requests: Sequence[EngineRequest], temperature: float) -> list[Continuation]:
        return self.engine.extend(
            [r._replace(seed=domain_hash("try", self.salt, r.seed)) for r in requests], temperature
        )


class OwnOldRollouts(Attack):
    """Its own old work: the same tasks, played for an earlier lease under its seeds."""

    caught_by = ("sampling",)

    def groups(self, world):
        blocks = [[(s.slot, s.env, s.task) for s in block.slots] for block in world.lease.blocks]
        return world.play(lease=lease_of(blocks, seed="earlier", sampling=world.lease.sampling))


class OthersRollouts(Attack):
    """Someone else's work: answers a slot with the rollouts of an earlier slot that has the same task."""

    caught_by = ("sampling",)

    def groups(self, world):
        first: dict[tuple[str, int], Group] = {}
        for group in world.honest_groups:
            first.setdefault((group.env, group.task), group)
        return [msgspec.structs.replace(first[group.env, group.task], slot=group.slot) for group in world.honest_groups]


class Duplicates(Attack):
    """Makes one rollout and sends copies of it as the whole group."""

    caught_by = ("sampling",)

    def spoil(self, group):
        return msgspec.structs.replace(group, rollouts=(group.rollouts[0],) * len(group.rollouts))


class Shuffled(Attack):
    """Sends all rollouts of a group, in another order than that of their seeds."""

    caught_by = ("sampling",)

    def spoil(self, group):
        return msgspec.structs.replace(group, rollouts=group.rollouts[1:] + group.rollouts[:1])


# --- another prompt, not claimed ---


class HiddenPrompt(Attack):
    """Shows the model a prompt with help in it, and claims the right one."""

    caught_by = ("sampling",)

    def groups(self, world):
        return world.play(Whispered(world.engine))


class HiddenSystemPrompt(Attack):
    """Shows the model a system message before the prompt, and claims the right one."""

    caught_by = ("sampling",)

    def groups(self, world):
        return world.play(Whispered(world.engine, SYSTEM_PROMPT, at=0))


SYSTEM_PROMPT = (2, 6, 7, 8, 9, 10, 5)
"""<|system|>abcde<|end|> in the tokens of a tiny policy."""


class Whispered(Cheat):
    """Slips some tokens into every conversation."""

    def __init__(self, engine: Engine, words: Sequence[int] = (6, 7, 8, 9), at: int = 1) -> None:
        super().__init__(engine)
        self.words, self.at = list(words), at

    def extend(self, requests, temperature):
        told = [r._replace(token_ids=[*r.token_ids[: self.at], *self.words, *r.token_ids[self.at :]]) for r in requests]
        return self.engine.extend(told, temperature)


# --- text that was not sampled ---


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


class RunnerUp(Attack):
    """Takes the second best token once in the middle of each rollout, and continues honestly."""

    caught_by = ("sampling",)

    def groups(self, world):
        rollouts = [(place, index) for place, g in enumerate(world.honest_groups) for index in range(len(g.rollouts))]
        detours = []
        for (place, index), nearly in zip(rollouts, world.nearly_taken(world.honest_groups), strict=True):
            at = len(nearly.token_P) // 2
            written_P = np.flatnonzero(world.honest_groups[place].rollouts[index].author_T() == POLICY)
            detours.append(Detour(place, index, int(written_P[at]), int(nearly.token_P[at]), float(nearly.gap_P[at])))
        return prefilled(world, with_rollouts(world.honest_groups, detoured(world, detours)))


class Detour(msgspec.Struct, frozen=True):
    """One token of one honest rollout to be replaced by the runner-up."""

    place: int
    """Of the group in the lease."""
    index: int
    """Of the rollout in its group."""
    position: int
    token: int
    gap: float
    """What it costs, nats."""


def detoured(world: World, detours: Sequence[Detour]) -> list[Rollout]:
    """Each detour's rollout, continued honestly after the replaced token."""
    episodes = [
        EpisodeAttempt(env, env.task(slot.task), sample_seed(bytes.fromhex(slot.seed), detour.index))
        for detour in detours
        for slot in [world.slots[detour.place]]
        for env in [world.envs[slot.env]]
    ]
    forced = {number: (detour.position, detour.token) for number, detour in enumerate(detours)}
    return play(Forced(world.engine, forced), world.renderer, episodes, world.lease.sampling)


class Forced(Cheat):
    """Writes a given token at a given index of each episode, by its number; all else is sampled."""

    def __init__(self, engine: Engine, forced: Mapping[int, tuple[int, int]]) -> None:
        super().__init__(engine)
        self.forced = forced

    def extend(self, requests, temperature):
        turns = list(self.engine.extend(requests, temperature))
        again: dict[int, EngineRequest] = {}
        for row, (request, turn) in enumerate(zip(requests, turns, strict=True)):
            position, token = self.forced[int(request.rollout.split("-")[0])]
            before = position - len(request.token_ids)
            if not 0 <= before < len(turn.token_ids):
                continue
            head = [*turn.token_ids[:before], token]
            turns[row] = Continuation(head, [*turn.logprobs[:before], -1.0])
            if token not in request.stop_ids and len(head) < request.max_new:
                token_ids = [*request.token_ids, *head]
                again[row] = request._replace(
                    rollout=f"{request.rollout}-on", token_ids=token_ids, max_new=request.max_new - len(head)
                )
        if again:
            for row, rest in zip(again, self.engine.extend(list(again.values()), temperature), strict=True):
                turns[row] = Continuation(
                    [*turns[row].token_ids, *rest.token_ids], [*turns[row].logprobs, *rest.logprobs]
                )
            self.engine.forget([request.rollout for request in again.values()])
        return turns


class SpentTolerance(Attack):
    """Plays both ways if two tokens are nearly tied, and sends what pays better, within the bounds of one group."""

    caught_by = ()
    far = FAR
    """It looks for ties up to this many times the bound of a gap."""

    def groups(self, world):
        best: dict[tuple[int, int], tuple[float, Detour, Rollout]] = {}
        detours = self.detours(world)
        honest = world.rewards(world.honest_groups)
        played = detoured(world, detours)
        for detour, rollout, reward in zip(detours, played, self._rewards(world, detours, played), strict=True):
            key, gain = (detour.place, detour.index), reward - honest[detour.place][detour.index]
            if gain > 0 and (key not in best or gain > best[key][0]):
                best[key] = (gain, detour, rollout)
        chosen: dict[int, list[tuple[float, Detour, Rollout]]] = {}
        for found in sorted(best.values(), key=lambda found: -found[0]):
            of_group = chosen.setdefault(found[1].place, [])
            if self._fits(world, [detour for _, detour, _ in (*of_group, found)]):
                of_group.append(found)
        spent = [list(group.rollouts) for group in world.honest_groups]
        for of_group in chosen.values():
            for _, detour, rollout in of_group:
                spent[detour.place][detour.index] = rollout
        return prefilled(world, with_rollouts(world.honest_groups, [r for rollouts in spent for r in rollouts]))

    def detours(self, world: World) -> list[Detour]:
        """Every runner-up within that distance."""
        widest = self.far * world.rules.bounds[f"{world.rules.dtype}/{world.rules.dtype}"].gap * 0.99
        nearly = iter(world.nearly_taken(world.honest_groups))
        return [
            Detour(place, index, int(positions_P[at]), int(token), float(gap))
            for place, group in enumerate(world.honest_groups)
            for index, rollout in enumerate(group.rollouts)
            for positions_P in [np.flatnonzero(rollout.author_T() == POLICY)]
            for at, (token, gap) in enumerate(zip(*next(nearly), strict=True))
            if gap <= widest
        ]

    def _fits(self, world: World, detours: Sequence[Detour]) -> bool:
        """Whether a group with these passes, all else having gap 0."""
        noise = world.rules.bounds[f"{world.rules.dtype}/{world.rules.dtype}"]
        tokens = sum(r.num_policy_tokens() for r in world.honest_groups[detours[0].place].rollouts)
        flips = sum(detour.gap > noise.gap for detour in detours)
        total = sum(min(detour.gap, noise.gap) for detour in detours)
        return flips <= most_flipped(tokens, noise) and total <= 0.9 * largest_sum(tokens, noise)

    def _rewards(self, world: World, detours: Sequence[Detour], played: Sequence[Rollout]) -> list[float]:
        groups = [
            Group(slot.slot, slot.task, slot.env, (rollout,))
            for detour, rollout in zip(detours, played, strict=True)
            for slot in [world.slots[detour.place]]
        ]
        return [rewards[0] for rewards in world.rewards(groups)]


class QuietTolerance(SpentTolerance):
    """Does the same only with ties within the bound of a gap, so that no token counts as flipped."""

    far = 1.0
