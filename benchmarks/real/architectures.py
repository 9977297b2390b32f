"""Architectures: three RL steps, honest groups of other precision and batch shape, six cheats, and `transformers` beside.

Called by `benchmarks/real_models.py`. Honest work is sampled in blocks of 64 rollouts, in float32 or in bfloat16, and
replayed in either, three rollouts at a time. For mixtures of experts the bounds of bfloat16 are measured first, as
`shoal calibrate` does; what the built-in bounds would refuse is reported, too.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.detect.judgement import look, share
from benchmarks.detect.policies import GROUP_SIZE
from benchmarks.real.field import SAMPLING, Field, InThrees, Subject, engine_of, lease, make_subject, rules
from shoal.algos.toploc import compare
from shoal.engine.base import Engine
from shoal.errors import StateError
from shoal.policy.files import save_policy
from shoal.policy.kinds import AUTO, open_policy
from shoal.proofs.context import by_group
from shoal.proofs.rounding import Noise, propose, propose_activation_error
from shoal.protocol.types import Bounds, Rules
from tests.attacks.attack import Attack, OtherEngine
from tests.attacks.choices import Cooler, HiddenPrompt, OwnSeeds
from tests.attacks.world import World
from tests.engine.architectures import MIXTURES

NAMES = (
    "llama", "qwen2", "qwen3", "mistral, sliding", "gemma2", "phi3", "olmo2", "gpt2", "smollm3", "olmoe", "qwen3-moe",
    "mixtral",
)  # fmt: skip
TARGETS = (0.3, 1.0)
"""Entropies, nats a token."""
PAIRS = (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))
"""Dtypes that sample and replay."""
SAFETY = 2.0
CALIBRATED_GROUPS = 128
"""By which bounds are measured: 512 rollouts, as `shoal calibrate` plays."""


class OtherModel(OtherEngine):
    """Samples with another model of the same shape."""

    def prover(self, world: World) -> Engine:
        return engine_of(world.other)


class StalePolicy(OtherEngine):
    """Samples with the policy before the last RL step."""

    def prover(self, world: World) -> Engine:
        return engine_of(world.stale)


class Int4Weights(OtherEngine):
    """Samples with matrices rounded to 4 bits."""

    def prover(self, world: World) -> Engine:
        return engine_of(in_4_bits(world.honest))


CHEATS: dict[str, type[Attack]] = {
    "other model": OtherModel, "one step old": StalePolicy, "int4 weights": Int4Weights, "temperature x 0.8": Cooler,
    "own seeds": OwnSeeds, "hidden prompt": HiddenPrompt,
}  # fmt: skip


def measure(names: Sequence[str], scratch: Path, groups: int, train_groups: int) -> Iterator[dict[str, Any]]:
    """The figures of each architecture at each entropy, and a line of text for each."""
    for name in names:
        for target in TARGETS:
            began = time.process_time()
            subject = make_subject(name, target, scratch / f"{name.replace(', ', '-')}-{target}", train_groups)
            found = {
                "architecture": name, "target": target, "entropy": round(subject.entropy, 3), "moved": subject.moved,
                "honest": honest(subject, groups), "cheats": cheats(subject, max(8, groups // 2)),
                "logits_off": logits_off(subject), "opened": opens_again(subject),
            }  # fmt: skip
            found["cpu_s"] = round(time.process_time() - began, 1)
            print(_said(found), flush=True)
            yield found


def honest(subject: Subject, groups: int) -> dict[str, Any]:
    """Groups, and how many of them the checks refuse, by pair of dtypes."""
    found: dict[str, Any] = {}
    for sampled, replayed in PAIRS:
        pair, own, activation_error = f"{sampled}/{replayed}", {}, -1.0
        if sampled == "bfloat16" and subject.name in MIXTURES:
            found[f"{pair}, built-in bounds"] = _refused(subject, pair, rules(sampled), groups)
            bounds, activation_error = _measured(subject, pair)
            own = {pair: bounds}
        found[pair] = _refused(subject, pair, rules(sampled, own, activation_error), groups)
    return found


def _refused(subject: Subject, pair: str, the_rules: Rules, groups: int) -> dict[str, Any]:
    field, judge = subject.field(lease(groups, f"honest {pair}"), the_rules), _judge(subject, pair)
    verdicts = field.judge(field.encode(field.honest_groups), engine=judge)
    scores = judge.score(field.requests(field.honest_groups), SAMPLING.temperature)
    gaps_P = np.concatenate([score.gaps_P for score in scores])
    reasons = sorted({f"{v.check}: {v.detail}" for v in verdicts if v.outcome != "accept"})
    return {
        "groups": groups, "refused": sum(v.outcome != "accept" for v in verdicts), "tokens": int(gaps_P.size),
        "flips": round(float((gaps_P > 0).mean()), 6), "largest_gap": round(float(gaps_P.max()), 4),
        "proofs": the_rules.proofs, "reasons": reasons[:3],
    }  # fmt: skip


def _judge(subject: Subject, pair: str) -> InThrees:
    return InThrees(engine_of(subject.policy, pair.partition("/")[2]))


def _measured(subject: Subject, pair: str) -> tuple[Bounds, float]:
    """Bounds with a safety factor of 2, from rollouts that are not judged; and that of proofs, 0 if none lets all pass."""
    field = subject.field(lease(CALIBRATED_GROUPS, "calibrate"), rules("bfloat16"))
    played = field.honest_groups
    scores = _judge(subject, pair).score(field.requests(played), SAMPLING.temperature, hidden=True)
    claimed_P = np.concatenate([r.logprobs_P() for group in played for r in group.rollouts]).astype(np.float64)
    noise = Noise(
        np.concatenate([score.gaps_P for score in scores]),
        claimed_P - np.concatenate([score.logprobs_P for score in scores]),
        np.concatenate([score.largest_P for score in scores if score.largest_P is not None]),
    )
    figures = []
    for proof, of_group in zip(field.prove(played), by_group(played, scores), strict=True):
        found = compare([score.hidden_PD for score in of_group if score.hidden_PD is not None], proof)
        assert not isinstance(found, str), found
        figures.append(found)
    try:
        error = propose_activation_error(figures, SAFETY)
    except StateError:  # `shoal calibrate` then says to ask for no proofs
        error = 0.0
    return propose(noise, len(claimed_P), SAFETY, coarse=True), error


def cheats(subject: Subject, groups: int) -> dict[str, Any]:
    """For each cheat of a run in float32: rollouts that differ from honest work, and those of them that are refused."""
    field: Field = subject.field(lease(groups, "cheats"), rules("float32"))
    field.score(field.requests(field.honest_groups))
    honest_scores, found = dict(field.known), {}
    for name, cheat in CHEATS.items():
        field.known = dict(honest_scores)
        seen = look(field, cheat(), cheat().body(field))
        refused = share(seen.together_N[seen.differs_N])
        submissions, caught = seen.submissions()
        found[name] = {
            "sent": groups * GROUP_SIZE, "differ": refused.n, "refused": refused.k,
            "submissions": submissions, "submissions_refused": caught,
        }  # fmt: skip
    return found


def in_4_bits(policy: Path) -> Path:
    """A copy of a policy whose matrices are rounded: 15 values, one scale for each 8 inputs of an output; made once."""
    copy = policy.with_name(f"{policy.name}-int4")
    if not copy.exists():
        model = open_policy(policy, torch.float32, AUTO)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() > 1 and "embed" not in name and "lm_head" not in name and "wte" not in name:
                    parts = weight.view(*weight.shape[:-1], -1, 8)
                    scale = parts.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 7
                    parts.copy_((parts / scale).round() * scale)
        save_policy(model, copy, "float32", tokenizer_from=policy)
    return copy


def logits_off(subject: Subject) -> float:
    """Largest |difference| between what the learner's model and `transformers` compute, float32, at honest rollouts."""
    from transformers import AutoModelForCausalLM

    field = subject.field(lease(8, "logits"), rules("float32"))
    model, peer = (
        open_policy(subject.policy, torch.float32, AUTO),
        AutoModelForCausalLM.from_pretrained(subject.policy, dtype=torch.float32).eval(),
    )
    worst = 0.0
    with torch.inference_mode():
        for request in field.requests(field.honest_groups):
            tokens_1T = torch.tensor([request.token_ids])
            ours_TV, theirs_TV = model.logits(model.hidden(tokens_1T)[0]), peer(tokens_1T, use_cache=False).logits[0]
            worst = max(worst, float((ours_TV - theirs_TV).abs().max()))
    return worst


def opens_again(subject: Subject) -> bool:
    """Whether `transformers` finds every tensor of the last version, and none that it does not know."""
    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(subject.policy, output_loading_info=True)
    return not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the issue asks, over all architectures."""
    work = [row for one in found for row in one["honest"].items()]
    judged = [row for name, row in work if "," not in name]
    caught = [row for one in found for row in one["cheats"].values()]
    differ, refused = (sum(row[name] for row in caught) for name in ("differ", "refused"))
    submissions, submissions_refused = (
        sum(row[name] for row in caught) for name in ("submissions", "submissions_refused")
    )
    return {
        "architectures": len({one["architecture"] for one in found}),
        "honest_groups": sum(row["groups"] for row in judged),
        "honest_refused": sum(row["refused"] for row in judged),
        "honest_refused_by_built_in_bounds_of_experts": sum(row["refused"] for name, row in work if "," in name),
        "cheat_rollouts": share(refused, differ)._asdict(),
        "cheat_submissions": share(submissions_refused, submissions)._asdict(),
        "logits_off": max(one["logits_off"] for one in found),
        "opened": all(one["opened"] for one in found),
        "learned": all(one["moved"] > 0 for one in found),
    }


def _said(found: dict[str, Any]) -> str:
    honest_work = "; ".join(
        f"{pair}: {row['refused']} of {row['groups']} groups refused, flips {row['flips']:.3%}"
        for pair, row in found["honest"].items()
    )
    caught = ", ".join(f"{name} {row['refused']}/{row['differ']}" for name, row in found["cheats"].items())
    return (
        f"{found['architecture']}, {found['entropy']:.2f} nats: {honest_work}; cheats {caught}; logits off by "
        f"{found['logits_off']:.1e}; opens again: {found['opened']} ({found['cpu_s']:.0f} CPU-s)"
    )
