"""Architectures: three RL steps, honest groups of other precision and batch shape, six cheats, and `transformers` beside.

Called by `benchmarks/real_models.py`. Honest work is sampled in blocks of 64 rollouts, in float32 or in bfloat16, and
replayed in either, three rollouts at a time. For mixtures of experts the bounds of bfloat16 are measured first, as
`shoal calibrate` does; what the built-in bounds would refuse is reported, too.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.detect.judgement import look, noticed_after, share
from benchmarks.detect.policies import GROUP_SIZE
from benchmarks.real.field import SAMPLING, Field, InThrees, Subject, engine_of, lease, make_subject, rules
from benchmarks.real.kept import Kept
from shoal.algos.toploc import compare
from shoal.engine.interface import Engine
from shoal.errors import StateError
from shoal.models.checkpoint import save_policy
from shoal.models.open_model import AUTO, open_policy
from shoal.protocol.messages import Group, Rules
from shoal.verification.context import by_group
from shoal.verification.fit_tolerances import MeasuredNoise, propose, propose_activation_error
from tests.attacks.attack import Attack, OtherEngine
from tests.attacks.attack_fixture import World
from tests.attacks.sampling_attacks import Cooler, HiddenPrompt, OwnSeeds
from tests.engine.architectures import MIXTURES

NAMES = (
    "llama", "qwen2", "qwen3", "mistral, sliding", "gemma2", "phi3", "olmo2", "gpt2", "smollm3", "olmoe", "qwen3-moe",
    "mixtral",
)  # fmt: skip
TARGETS = (0.3, 1.0)
"""Entropies, nats a token."""
PAIRS = {"float32": ("float32",), "bfloat16": ("float32", "bfloat16")}
"""Dtypes that sample, and those that replay it."""
SAFETY = 2.0
CHEATED_GROUPS = 24
"""Of each cheat."""
LIVES = 20
"""How often a cheat's groups are repeated until the evidence against their node is excessive."""
CALIBRATED_GROUPS = 128
"""By which bounds are measured: 512 rollouts, as `shoal calibrate` plays."""


class OtherModel(OtherEngine):
    """Samples with another model of the same shape."""

    def prover(self, world: World) -> Engine:
        return engine_of(world.other, world.rules.dtype)


class StalePolicy(OtherEngine):
    """Samples with the policy before the last RL step."""

    def prover(self, world: World) -> Engine:
        return engine_of(world.stale, world.rules.dtype)


class Int4Weights(OtherEngine):
    """Samples with matrices rounded to 4 bits."""

    def prover(self, world: World) -> Engine:
        return engine_of(in_4_bits(world.honest), world.rules.dtype)


CHEATS: dict[str, type[Attack]] = {
    "other model": OtherModel, "one step old": StalePolicy, "int4 weights": Int4Weights, "temperature x 0.8": Cooler,
    "own seeds": OwnSeeds, "hidden prompt": HiddenPrompt,
}  # fmt: skip


def measure(
    names: Sequence[str], scratch: Path, groups: int, train_groups: int, kept: Kept
) -> Iterator[dict[str, Any]]:
    """The figures of each architecture at each entropy, and a line of text for each."""
    for name in names:
        for target in TARGETS:
            asked = {"groups": groups, "train_groups": train_groups}
            found = kept.result(
                f"architectures {name} {target}",
                asked,
                lambda name=name, target=target: _found(name, target, scratch, groups, train_groups),  # type: ignore[misc]
            )
            print(_said(found), flush=True)
            yield found


def _found(name: str, target: float, scratch: Path, groups: int, train_groups: int) -> dict[str, Any]:
    began = time.process_time()
    subject = make_subject(name, target, subject_folder(scratch, name, target, train_groups), train_groups)
    found = {
        "architecture": name, "target": target, "entropy": round(subject.entropy, 3), "moved": subject.moved,
        "honest": honest(subject, groups), "cheats": cheats(subject, CHEATED_GROUPS, rules("float32")),
        "cheats_bfloat16": cheats(subject, CHEATED_GROUPS, rules_of(subject, "bfloat16", judges_of(subject, "bfloat16"))),
        "logits_off": logits_off(subject), "opened": opens_again(subject),
    }  # fmt: skip
    return found | {"cpu_s": round(time.process_time() - began, 1)}


def subject_folder(scratch: Path, name: str, target: float, train_groups: int) -> Path:
    """Where the policies of a subject are."""
    return scratch / f"{name.replace(', ', '-')}-{target}-{train_groups}"


def honest(subject: Subject, groups: int) -> dict[str, Any]:
    """Groups, and how many of them the checks refuse, by pair of dtypes."""
    found: dict[str, Any] = {}
    for sampled in PAIRS:
        judges = judges_of(subject, sampled)
        field = subject.field(lease(groups, f"honest {sampled}"), rules(sampled))
        for pair, judge in judges.items():
            measured = needs_bounds(subject, sampled)
            found[f"{pair}, built-in bounds" if measured else pair] = _refused(field, judge)
        if needs_bounds(subject, sampled):
            field.rules = rules_of(subject, sampled, judges)
            found |= {pair: _refused(field, judge) for pair, judge in judges.items()}
    return found


def judges_of(subject: Subject, sampled: str) -> dict[str, InThrees]:
    """What replays work that was sampled in this dtype, by pair."""
    return {f"{sampled}/{dtype}": InThrees(engine_of(subject.policy, dtype)) for dtype in PAIRS[sampled]}


def needs_bounds(subject: Subject, dtype: str) -> bool:
    """Whether no run of this policy starts with the built-in bounds: see `launch/preflight`."""
    return dtype == "bfloat16" and subject.name in MIXTURES


def _refused(field: Field, judge: InThrees) -> dict[str, Any]:
    verdicts = field.judge(field.encode(field.honest_groups), engine=judge)
    scores = judge.score(field.requests(field.honest_groups), SAMPLING.temperature)
    gaps_P = np.concatenate([score.gaps_P for score in scores])
    refusals = [verdict for verdict in verdicts if verdict.outcome != "accept"]
    reasons = sorted({f"{v.check}: {v.detail} ({v.figure:.3g}, limit {v.bound:.3g})" for v in refusals})
    return {
        "groups": len(verdicts), "refused": len(refusals), "tokens": int(gaps_P.size),
        "flips": round(float((gaps_P > 0).mean()), 6), "largest_gap": round(float(gaps_P.max()), 4),
        "proofs": field.rules.proofs, "reasons": reasons[:3],
    }  # fmt: skip


def rules_of(subject: Subject, sampled: str, judges: dict[str, InThrees]) -> Rules:
    """A run's rules: with the built-in bounds, or where those do not hold, with what `shoal calibrate` would write.

    Bounds are measured by rollouts that are not judged here. If none lets all proofs pass, the rules ask for no proofs, as
    `shoal calibrate` then advises.
    """
    if not needs_bounds(subject, sampled):
        return rules(sampled)
    field = subject.field(lease(CALIBRATED_GROUPS, "calibrate"), rules("bfloat16"))
    played = field.honest_groups
    noise = {pair: _noise(field, played, judge) for pair, judge in judges.items()}
    own = {pair: propose(of_pair, len(of_pair.off_N), SAFETY, coarse=True) for pair, of_pair in noise.items()}
    try:
        error = propose_activation_error([figures for of_pair in noise.values() for figures in of_pair.figures], SAFETY)
    except StateError:
        error = 0.0
    return rules("bfloat16", own, error)


def _noise(field: Field, played: Sequence[Group], judge: InThrees) -> MeasuredNoise:
    scores = judge.score(field.requests(played), SAMPLING.temperature)
    claimed_P = np.concatenate([r.logprobs_P() for group in played for r in group.rollouts]).astype(np.float64)
    figures = []
    for proof, of_group in zip(field.prove(played), by_group(played, scores), strict=True):
        found = compare([score.hidden_PD for score in of_group if score.hidden_PD is not None], proof)
        assert not isinstance(found, str), found
        figures.append(found)
    return MeasuredNoise(
        np.concatenate([score.gaps_P for score in scores]),
        claimed_P - np.concatenate([score.logprobs_P for score in scores]),
        np.concatenate([score.largest_P for score in scores if score.largest_P is not None]),
        tuple(figures),
    )


def cheats(subject: Subject, groups: int, the_rules: Rules) -> dict[str, Any]:
    """For each cheat of a run: rollouts that differ from honest work, and those of them that are refused."""
    field = subject.field(lease(groups, "cheats"), the_rules)
    field.score(field.requests(field.honest_groups))
    honest_scores, found = dict(field.known), {}
    bounds = the_rules.bounds[f"{the_rules.dtype}/{the_rules.dtype}"]
    for name, cheat in CHEATS.items():
        field.known = dict(honest_scores)
        seen = look(field, cheat(), cheat().body(field))
        refused = share(seen.together_N[seen.differs_N])
        submissions, caught = seen.submissions()
        found[name] = {
            "sent": groups * GROUP_SIZE, "differ": refused.n, "refused": refused.k,
            "submissions": submissions, "submissions_refused": caught,
            "groups_until_excessive": noticed_after(seen.verdicts * LIVES, bounds),
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
    groups: Counter[str] = Counter()
    for one in found:
        groups[one["architecture"]] += sum(row["groups"] for name, row in one["honest"].items() if "," not in name)
    coarse = [row for one in found for row in one.get("cheats_bfloat16", {}).values()]
    return {
        "architectures": len({one["architecture"] for one in found}),
        "honest_groups": sum(row["groups"] for row in judged),
        "honest_refused": sum(row["refused"] for row in judged),
        "honest_refused_by_built_in_bounds_of_experts": sum(row["refused"] for name, row in work if "," in name),
        "least_honest_groups": min(groups.values()),
        **_caught("cheat", caught),
        **_caught("cheat_bfloat16", coarse),
        "bfloat16": {name: _of_cheat(found, name) for name in CHEATS},
        "logits_off": max(one["logits_off"] for one in found),
        "opened": all(one["opened"] for one in found),
        "learned": all(one["moved"] > 0 for one in found),
    }


def faults(summary: dict[str, Any], bars: dict[str, float]) -> list[str]:
    """The bars that a summary misses."""
    said = []
    for kind in ("rollouts", "submissions"):
        differ, refused = (summary[f"cheat_{kind}"][key] for key in "nk")
        if refused < bars[kind] * differ:
            said.append(f"{refused} of {differ} cheated {kind} are refused, asked {bars[kind]:.1%}")
    if summary["honest_refused"]:
        said.append(f"{summary['honest_refused']} honest groups are refused")
    if summary["least_honest_groups"] < bars["honest_groups"]:
        said.append(f"{summary['least_honest_groups']} honest groups of an architecture, asked {bars['honest_groups']}")
    if summary["logits_off"] >= bars["logits_off"]:
        said.append(f"logits are off by {summary['logits_off']:.1e}, limit {bars['logits_off']}")
    if not (summary["opened"] and summary["learned"]):
        said.append("transformers does not open a checkpoint, or a policy did not move")
    return said


def _of_cheat(found: Sequence[dict[str, Any]], name: str) -> dict[str, int]:
    """One cheat in bfloat16, over all architectures and entropies."""
    rows = [one["cheats_bfloat16"][name] for one in found if "cheats_bfloat16" in one]
    excessive = [row["groups_until_excessive"] for row in rows]
    return {
        **{key: sum(row[key] for row in rows) for key in ("differ", "refused", "submissions", "submissions_refused")},
        "policies": len(rows), "policies_noticed": sum(groups > 0 for groups in excessive),
        "most_groups_until_excessive": max(excessive, default=0),
    }  # fmt: skip


def _caught(name: str, cheats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    differ, refused, submissions, caught = (
        sum(row[key] for row in cheats) for key in ("differ", "refused", "submissions", "submissions_refused")
    )
    return {
        f"{name}_rollouts": share(refused, differ)._asdict(),
        f"{name}_submissions": share(caught, submissions)._asdict(),
    }


def _said(found: dict[str, Any]) -> str:
    honest_work = "; ".join(
        f"{pair}: {row['refused']} of {row['groups']} groups refused, flips {row['flips']:.3%}"
        for pair, row in found["honest"].items()
    )
    caught = "; ".join(
        f"{said} " + ", ".join(f"{name} {row['refused']}/{row['differ']}" for name, row in found[key].items())
        for key, said in (("cheats", "cheats"), ("cheats_bfloat16", "in bfloat16"))
        if key in found
    )
    return (
        f"{found['architecture']}, {found['entropy']:.2f} nats: {honest_work}; {caught}; logits off by "
        f"{found['logits_off']:.1e}; opens again: {found['opened']} ({found['cpu_s']:.0f} CPU-s)"
    )
