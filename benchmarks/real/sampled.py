"""Work that vLLM samples, judged: honest groups by two engines that replay it, and six cheats.

Called by `benchmarks/vllm_tokens.py`. The policies, the task and the cheats are those of `architectures.py`, with heads
that vLLM takes on a CPU, and the cheats sample with vLLM, too. Bounds are measured with both engines on other rollouts,
as `shoal calibrate --engine vllm` does.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.detect.policies import GROUP_SIZE
from benchmarks.real.architectures import CALIBRATED_GROUPS, SAFETY, TARGETS, in_4_bits
from benchmarks.real.field import SAMPLING, Field, InThrees, Subject, lease, make_subject, rules
from shoal.engine.hf import TransformersEngine
from shoal.engine.interface import Continuation, Engine, EngineRequest, PolicyScore, ScoreRequest
from shoal.engine.native import LocalEngine
from shoal.engine.vllm.engine import VllmEngine
from shoal.protocol.constants import VLLM
from shoal.protocol.encoding import from_msgpack, to_msgpack
from shoal.protocol.messages import Group, Rules, Submission
from shoal.verification.fit_tolerances import MeasuredNoise, joined, propose
from tests.attacks.attack import Attack, OtherEngine
from tests.attacks.attack_fixture import VERSION
from tests.attacks.sampling_attacks import Cooler, HiddenPrompt, OwnSeeds
from tests.engine import architectures

NAME, PAIR = "llama, wide heads", f"{VLLM}:float32/float32"
TRAINED_GROUPS = 16

architectures.ARCHITECTURES[NAME] = architectures._of("Llama", hidden_size=128, intermediate_size=192)


def measure(
    scratch: Path, sampler: VllmEngine, noise: str, rollouts: int, with_cheats: bool
) -> Iterator[dict[str, Any]]:
    """The figures at each entropy, and a line of text for each. `sampler` makes this family of noise."""
    for target in TARGETS:
        began = time.process_time()
        subject = make_subject(NAME, target, scratch / f"{noise}-{target}", TRAINED_GROUPS)
        judges = {"ours": LocalEngine(1, noise=noise), "transformers": TransformersEngine(1, noise=noise)}
        for engine in (sampler, *judges.values()):
            engine.load(subject.policy, VERSION)
        groups = rollouts // len(TARGETS) // GROUP_SIZE
        the_rules = _rules(subject, sampler, judges, min(CALIBRATED_GROUPS, groups))
        field = SampledField.of(subject, sampler, judges["ours"], groups, "honest", the_rules)
        body = field.encode(field.honest_groups)
        found = {
            "target": target, "entropy": round(subject.entropy, 3), "noise": noise, "rollouts": groups * GROUP_SIZE,
            "tokens": sum(r.num_policy_tokens() for group in field.honest_groups for r in group.rollouts),
            "gap": the_rules.bounds[PAIR].gap, "logprob": the_rules.bounds[PAIR].logprob,
            "refused": {
                name: GROUP_SIZE * sum(v.outcome != "accept" for v in field.judge(body, engine=InThrees(engine)))
                for name, engine in judges.items()
            },
            "cheats": cheats(subject, sampler, judges["ours"], max(8, groups // 4), the_rules) if with_cheats else {},
        }  # fmt: skip
        caught = ", ".join(f"{name} {row['refused']}/{row['differ']}" for name, row in found["cheats"].items())
        refused = ", ".join(f"{count} by {name}" for name, count in found["refused"].items())
        print(
            f"{noise}, {subject.entropy:.2f} nats: of {found['rollouts']} honest refused {refused}; cheats {caught} "
            f"({time.process_time() - began:.0f} CPU-s)",
            flush=True,
        )
        yield found


def cheats(
    subject: Subject, sampler: VllmEngine, judge: Engine, groups: int, the_rules: Rules
) -> dict[str, dict[str, int]]:
    """For each cheat: groups in which a token differs from honest work, and those of them that are refused."""
    field = SampledField.of(subject, sampler, judge, groups, "cheats", the_rules)
    honest, found = [_tokens(group) for group in field.honest_groups], {}
    for name, cheat in CHEATS.items():
        made = cheat().groups(field)
        sampler.load(subject.policy, VERSION)
        verdicts = field.judge(field.encode(made), engine=InThrees(judge))
        differ = [_tokens(group) != due for group, due in zip(made, honest, strict=True)]
        refused = [verdict.outcome != "accept" for verdict, differs in zip(verdicts, differ, strict=True) if differs]
        found[name] = {"sent": groups, "differ": sum(differ), "refused": sum(refused)}
    return found


def _tokens(group: Group) -> list[object]:
    return [rollout.token_ids for rollout in group.rollouts]


def _rules(subject: Subject, sampler: VllmEngine, judges: dict[str, Engine], groups: int) -> Rules:
    """A run's rules with bounds for vLLM that were measured with every judge, without proofs of activations."""
    built_in = rules("float32", activation_error=0)
    field = SampledField.of(subject, sampler, judges["ours"], groups, "calibrate", built_in)
    played = field.honest_groups
    claimed_P = np.concatenate([r.logprobs_P() for group in played for r in group.rollouts]).astype(np.float64)
    parts = []
    for judge in judges.values():
        scores = InThrees(judge).score(field.requests(played), SAMPLING.temperature)
        parts.append(
            MeasuredNoise(
                np.concatenate([score.gaps_P for score in scores]),
                claimed_P - np.concatenate([score.logprobs_P for score in scores]),
                np.concatenate([score.largest_P for score in scores if score.largest_P is not None]),
            )
        )
    own = {PAIR: propose(joined(parts), len(claimed_P), SAFETY, coarse=False)}
    return rules("float32", own, activation_error=0)


class Both:
    """An engine that samples with vLLM and scores with another."""

    def __init__(self, sampler: VllmEngine, scorer: Engine) -> None:
        self.sampler, self.scorer, self.facts = sampler, scorer, scorer.facts

    @property
    def version(self) -> int:
        return self.sampler.version

    def load(self, directory: Path, version: int) -> None:
        raise AssertionError("it is made of engines that have a policy")

    def extend(self, requests: Sequence[EngineRequest], temperature: float) -> list[Continuation]:
        return self.sampler.extend(requests, temperature)

    def forget(self, rollouts: Iterable[str]) -> None:
        self.sampler.forget(rollouts)

    def score(self, requests: Sequence[ScoreRequest], temperature: float, hidden: bool = False) -> list[PolicyScore]:
        return self.scorer.score(requests, temperature, hidden)


class SampledField(Field):
    """A world whose worker samples with vLLM, honest or not."""

    sampler: VllmEngine

    @staticmethod
    def of(
        subject: Subject, sampler: VllmEngine, judge: Engine, groups: int, seed: str, the_rules: Rules
    ) -> "SampledField":
        field = SampledField(subject.policy, subject.other, subject.versions[-2], lease(groups, seed), the_rules)
        field.sampler, field.engine = sampler, Both(sampler, judge)
        return field

    def with_weights(self, directory: Path) -> Engine:
        """vLLM with another policy, until the right one is loaded again."""
        self.sampler.load(directory, VERSION)
        return Both(self.sampler, self.engine)

    def encode(self, groups: Sequence[Group], *others: Any, **named: Any) -> bytes:
        submission = from_msgpack(super().encode(groups, *others, **named), Submission)
        return to_msgpack(
            Submission(
                submission.run, submission.lease, submission.version, submission.groups, submission.proofs,
                self.sampler.facts,
            )
        )  # fmt: skip


class OtherModel(OtherEngine):
    """Samples with another model of the same shape."""

    def prover(self, world):
        return world.with_weights(world.other)


class StalePolicy(OtherEngine):
    """Samples with the policy before the last RL step."""

    def prover(self, world):
        return world.with_weights(world.stale)


class Int4Weights(OtherEngine):
    """Samples with matrices rounded to 4 bits."""

    def prover(self, world):
        return world.with_weights(in_4_bits(world.honest))


CHEATS: dict[str, type[Attack]] = {
    "other model": OtherModel, "one step old": StalePolicy, "int4 weights": Int4Weights, "temperature x 0.8": Cooler,
    "own seeds": OwnSeeds, "hidden prompt": HiddenPrompt,
}  # fmt: skip
