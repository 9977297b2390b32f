"""Proofs of activations by a dishonest worker: the tokens are honest, the proofs are not.

As in `zoo`, `caught_by` names the checks of which one must refuse every group; `proofs` forges. A forger has the
lease, the tokens, the code, and for the typical ones the policy's states at other tokens, from a time when it worked.
"""

import msgspec
import numpy as np

from shoal.algos.toploc import PRIME, prove
from shoal.protocol.encoding import from_msgpack, to_msgpack
from shoal.protocol.messages import Submission
from shoal.verification.check_context import score_requests
from shoal.verification.encode_submission import prove_activations
from tests.attacks.attack_fixture import World, load_engine


def states_by_group(world: World, engine=None) -> list[list[np.ndarray]]:
    """Hidden states [P, D] of each rollout of the honest groups."""
    slots = [slot for block in world.lease.blocks for slot in block.slots]
    requests = [score_requests(slot, group) for slot, group in zip(slots, world.honest_groups, strict=True)]
    temperature = world.lease.sampling.temperature
    engine = engine or world.engine
    return [[score.hidden_PD for score in engine.score(r, temperature, hidden=True)] for r in requests]


def honest_proofs(world: World, engine=None) -> tuple[bytes, ...]:
    """As the worker makes them: one prefill for the lease."""
    slots = [slot for block in world.lease.blocks for slot in block.slots]
    pairs = zip(slots, world.honest_groups, strict=True)
    requests = [request for slot, group in pairs for request in score_requests(slot, group)]
    scores = (engine or world.engine).score(requests, world.lease.sampling.temperature, hidden=True)
    return prove_activations(world.honest_groups, scores)


def with_proofs(world: World, proofs: tuple[bytes, ...]) -> bytes:
    body = from_msgpack(world.encode(world.honest_groups), Submission)
    return to_msgpack(msgspec.structs.replace(body, proofs=proofs))


class Forgery:
    """Honest proofs, which the subclasses change."""

    caught_by: tuple[str, ...] = ("activations",)

    def proofs(self, world: World) -> tuple[bytes, ...]:
        return tuple(self.spoil(proof) for proof in honest_proofs(world))

    def spoil(self, proof: bytes) -> bytes:
        return proof

    def body(self, world: World) -> bytes:
        return with_proofs(world, self.proofs(world))


class Nothing(Forgery):
    """Sends no proofs."""

    caught_by = ("shape",)

    def proofs(self, world):
        return ()


class OneTooMany(Forgery):
    """Sends one proof more than there are groups."""

    caught_by = ("shape",)

    def proofs(self, world):
        return (*honest_proofs(world), b"")


class Oversize(Forgery):
    """Far more bytes than the lease can need."""

    caught_by = ("shape",)

    def spoil(self, proof):
        return bytes(1 << 20)


class Empty(Forgery):
    """A proof without bytes."""

    def spoil(self, proof):
        return b""


class Zero(Forgery):
    """The package's own null proof, which ends its verifier's process."""

    def spoil(self, proof):
        return bytes(len(proof))


class Long(Forgery):
    """One more polynomial than there are chunks."""

    def spoil(self, proof):
        return proof + proof[:66]


class Short(Forgery):
    """The last polynomial left out."""

    def spoil(self, proof):
        return proof[:-18]


class Random(Forgery):
    """Noise in the right format."""

    def spoil(self, proof):
        return prove_of_noise(len(proof))


def prove_of_noise(size: int) -> bytes:
    return np.random.default_rng(size).integers(0, PRIME, size // 2).astype(">u2").tobytes()


class NoiseUnderTheModulus(Forgery):
    """Honest moduli with invented coefficients."""

    def proofs(self, world):
        rng = np.random.default_rng(0)
        return tuple(
            prove([rng.standard_normal(states.shape).astype(np.float32) for states in of_group])
            for of_group in states_by_group(world)
        )


class Constant(Forgery):
    """One value of typical size for all: what the package takes for the real thing on wide models."""

    def proofs(self, world):
        return tuple(
            prove([np.full_like(states, np.quantile(np.abs(states), 0.98)) for states in of_group])
            for of_group in states_by_group(world)
        )


class TypicalChannels(Forgery):
    """What each channel usually holds at the tokens of all other groups, jittered so that it looks like work."""

    jitter = 0.003

    def proofs(self, world):
        by_group, rng = states_by_group(world), np.random.default_rng(0)
        forged = []
        for place, of_group in enumerate(by_group):
            others = np.concatenate([s for other, group in enumerate(by_group) if other != place for s in group])
            typical_D = np.median(others, axis=0)
            forged.append(prove([typical_D * (1 + self.jitter * rng.standard_normal(s.shape)).astype(np.float32)
                                 for s in of_group]))  # fmt: skip
        return tuple(forged)


class TypicalOfTheToken(Forgery):
    """What each channel usually holds before this very token, over all other groups."""

    def proofs(self, world):
        by_group, groups = states_by_group(world), world.honest_groups
        before = [
            [r.tokens_T()[np.flatnonzero(r.author_T()) - 1] for r in group.rollouts] for group in groups
        ]  # the token whose state predicts the policy's next
        forged = []
        for place in range(len(by_group)):
            others = [(token, state) for other, group in enumerate(by_group) if other != place
                      for tokens, states in zip(before[other], group, strict=True)
                      for token, state in zip(tokens.tolist(), states, strict=True)]  # fmt: skip
            overall_D = np.median([state for _, state in others], axis=0)
            typical = {
                token: np.median([state for known, state in others if known == token], axis=0)
                for token in {token for token, _ in others}
            }
            forged.append(prove([np.stack([typical.get(t, overall_D) for t in tokens.tolist()]).astype(np.float32)
                                 for tokens in before[place]]))  # fmt: skip
        return tuple(forged)


class Negated(Forgery):
    """Every activation is negated, which the package does not notice."""

    def proofs(self, world):
        return tuple(prove([-states for states in of_group]) for of_group in states_by_group(world))


class OtherModel(Forgery):
    """Honest tokens under the states of another model, such as the draft model that was cheap to run."""

    def proofs(self, world):
        return honest_proofs(world, load_engine(world.other))


class StalePolicy(Forgery):
    """The states of the previous checkpoint."""

    def proofs(self, world):
        return honest_proofs(world, load_engine(world.stale))


class CoarseArithmetic(Forgery):
    """bfloat16 in a run of float32."""

    def proofs(self, world):
        return honest_proofs(world, load_engine(world.honest, dtype="bfloat16"))


class AnotherGroups(Forgery):
    """Each group under the proof of the next."""

    def proofs(self, world):
        proofs = honest_proofs(world)
        return proofs[1:] + proofs[:1]


class Scaled(Forgery):
    """Every activation is off by two per cent."""

    def proofs(self, world):
        return tuple(prove([states * np.float32(1.02) for states in of_group]) for of_group in states_by_group(world))


FORGERIES: tuple[type[Forgery], ...] = (
    Nothing, OneTooMany, Oversize, Empty, Zero, Long, Short, Random, NoiseUnderTheModulus, Constant, TypicalChannels,
    TypicalOfTheToken, Negated, OtherModel, StalePolicy, CoarseArithmetic, AnotherGroups, Scaled,
)  # fmt: skip
