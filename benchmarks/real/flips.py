"""Router flips of mixtures of experts: how often a token goes to other experts when the arithmetic is another.

Called by `benchmarks/real_models.py`. Honest rollouts are read again in float32 three at a time, and in bfloat16; the
experts of each token and layer are compared with those of float32 in one batch, and so are the log-probs of the tokens.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.real.architectures import subject_folder
from benchmarks.real.field import GROUP_SIZE, SAMPLING, Subject, lease, make_subject, rules
from benchmarks.real.kept import Kept
from shoal.engine.interface import ScoreRequest
from tests.engine.architectures import MIXTURES

WAYS = ("float32, threes", "bfloat16")
"""How rollouts are read again."""


def measure(
    scratch: Path, groups: int, train_groups: int, targets: Sequence[float], kept: Kept
) -> Iterator[dict[str, Any]]:
    """Shares of tokens and layers with other experts, and what that does to log-probs."""
    for name in MIXTURES:
        for target in targets:
            found = kept.result(
                f"flips {name} {target}",
                {"groups": groups, "train_groups": train_groups},
                lambda name=name, target=target: _found(  # type: ignore[misc]
                    make_subject(name, target, subject_folder(scratch, name, target, train_groups), train_groups),
                    groups,
                ),
            )
            for way in WAYS:
                row = found[way]
                print(
                    f"{name}, {found['entropy']:.2f} nats, {way}: {row['flipped']:.3%} of choices of a token and layer, "
                    f"{row['tokens_flipped']:.2%} of tokens in some layer; 99 % of |d logp| below "
                    f"{row['off_flipped']:.3g} where flipped, {row['off_others']:.3g} elsewhere",
                    flush=True,
                )
            yield found


def _found(subject: Subject, groups: int) -> dict[str, Any]:
    field = subject.field(lease(groups, "flips"), rules("float32"))
    requests = field.requests(field.honest_groups)
    models = {dtype: _model(subject.policy, dtype) for dtype in (torch.float32, torch.bfloat16)}
    whole = _read(models[torch.float32], requests, len(requests))
    others = (_read(models[torch.float32], requests, 3), _read(models[torch.bfloat16], requests, len(requests)))
    return {
        "architecture": subject.name, "entropy": round(subject.entropy, 3), "rollouts": groups * GROUP_SIZE,
        **{way: _compared(whole, other) for way, other in zip(WAYS, others, strict=True)},
    }  # fmt: skip


def _model(policy: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(policy, dtype=dtype).eval()


@torch.inference_mode()
def _read(model: Any, requests: Sequence[ScoreRequest], rows: int) -> list[tuple[Tensor, Tensor]]:
    """For each conversation: the experts of its policy tokens, sorted, [P, L, k], and their log-probs, [P]."""
    chosen = model.config.num_experts_per_tok
    found = []
    for start in range(0, len(requests), rows):
        part = requests[start : start + rows]
        longest = max(len(request.token_ids) for request in part)
        tokens_BT = torch.tensor([[*r.token_ids, *[0] * (longest - len(r.token_ids))] for r in part])
        out = model(tokens_BT, output_router_logits=True, use_cache=False)
        experts_LBTk = torch.stack(
            [layer.view(len(part), longest, -1).topk(chosen).indices.sort(-1).values for layer in out.router_logits]
        )
        logp_BTV = (out.logits.float() / SAMPLING.temperature).log_softmax(-1)
        for row, request in enumerate(part):
            at_P = torch.tensor(request.policy_positions) - 1  # what predicts a token is the one before it
            tokens_P = torch.tensor(request.token_ids)[at_P + 1]
            found.append((experts_LBTk[:, row, at_P].transpose(0, 1), logp_BTV[row, at_P, tokens_P]))
    return found


def _compared(whole: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    flipped_PL = torch.cat([(mine[0] != theirs[0]).any(-1) for mine, theirs in zip(whole, other, strict=True)])
    off_P = torch.cat([(mine[1] - theirs[1]).abs() for mine, theirs in zip(whole, other, strict=True)]).numpy()
    any_P = flipped_PL.any(-1).numpy()

    def far(values: np.ndarray) -> float:
        return float(np.quantile(values, 0.99)) if values.size else 0.0

    return {
        "tokens": int(any_P.size), "flipped": float(flipped_PL.float().mean()), "tokens_flipped": float(any_P.mean()),
        "off_flipped": far(off_P[any_P]), "off_others": far(off_P[~any_P]),
    }  # fmt: skip
