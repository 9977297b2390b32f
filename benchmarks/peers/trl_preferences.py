"""The same logits into our losses of pairs and of a teacher, and into TRL 1.16's: how far the gradients differ.

    PYTHONPATH=. .venv-trl/bin/python benchmarks/peers/trl_preferences.py

Of shoal it imports `algos` alone, so it needs only what `requirements.txt` of this folder lists. TRL's methods are called
with the logits that a model would give, in place of the model. Both sides compute in float32. Prints one line of JSON: the
relative L2 distance of the gradients by loss. The exit code is 1 if one exceeds the bar.
"""

import json
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

if {"-h", "--help"} & {*sys.argv[1:]}:  # before the imports, which a reader may not have
    print(__doc__)
    sys.exit()

warnings.filterwarnings("ignore")

import torch  # noqa: E402 - after the warnings of the others are off
from torch import Tensor  # noqa: E402
from trl import DPOTrainer, RewardTrainer  # noqa: E402
from trl.experimental.gkd import GKDTrainer  # noqa: E402

from shoal.algos.preference_losses import bradley_terry_loss, dpo_loss, reverse_kl  # noqa: E402

BAR = 1e-5
"""Largest relative L2 distance of two gradients."""

PAIRS, LENGTH, VOCABULARY, BETA = 16, 12, 40, 0.1
"""Of the random batch. An answer has 1 to LENGTH tokens."""


def main() -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {"dpo": dpo(), "bradley_terry": bradley_terry(), "reverse_kl": distillation()}
    print(json.dumps({"benchmark": "trl_preferences", "relative_l2": found, "bar": BAR}))
    return int(max(found.values()) > BAR)


def dpo() -> float:
    """Chosen answers first, then rejected ones, as TRL has them; a prompt of one token comes before each."""
    logits = torch.randn(2 * PAIRS, LENGTH + 1, VOCABULARY)
    input_ids = torch.randint(VOCABULARY, (2 * PAIRS, LENGTH + 1))
    lengths = torch.randint(1, LENGTH + 1, (2 * PAIRS, 1))
    at = torch.arange(LENGTH + 1)
    mask = ((at > 0) & (at <= lengths)).long()
    ref = -3.0 * lengths[:, 0] + torch.randn(2 * PAIRS)

    def summed(logits: Tensor) -> Tensor:
        logp = torch.log_softmax(logits[:, :-1], -1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        return logp * mask[:, 1:]

    def ours(logits: Tensor) -> Tensor:
        chosen, rejected = summed(logits).sum(1).chunk(2)
        return dpo_loss(chosen, rejected, *ref.chunk(2), beta=BETA, num_pairs=PAIRS).loss

    def theirs(logits: Tensor) -> Tensor:
        trainer = trainer_of(
            ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=["sigmoid"],
            loss_weights=[1.0], beta=BETA, use_weighting=False, aux_loss_enabled=False,
        )  # fmt: skip
        chosen_ref, rejected_ref = ref.chunk(2)
        zeros = torch.zeros_like(logits[:, 1:, 0])
        outputs = SimpleNamespace(log_probs=summed(logits), entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
        inputs = {
            "input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "completion_mask": mask,
            "ref_chosen_logps": chosen_ref, "ref_rejected_logps": rejected_ref,
        }  # fmt: skip
        return DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, return_outputs=False)

    return distance(logits, ours, theirs)


def bradley_terry() -> float:
    """One score for each answer, chosen ones first."""
    scores = 3.0 * torch.randn(2 * PAIRS, 1)

    def ours(scores: Tensor) -> Tensor:
        chosen, rejected = scores.squeeze(-1).chunk(2)
        return bradley_terry_loss(chosen, rejected, num_pairs=PAIRS)

    def theirs(scores: Tensor) -> Tensor:
        inputs = {"attention_mask": torch.ones(2 * PAIRS, LENGTH)}
        trainer = trainer_of(args=SimpleNamespace(center_rewards_coefficient=None))
        return RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=scores), inputs)

    return distance(scores, ours, theirs)


def distillation() -> float:
    """Reverse KL: TRL's generalised divergence with beta = 1, over the tokens that are not padding."""
    logits, teacher = torch.randn(PAIRS, LENGTH, VOCABULARY), torch.randn(PAIRS, LENGTH, VOCABULARY)
    labels = torch.randint(VOCABULARY, (PAIRS, LENGTH)).masked_fill(torch.rand(PAIRS, LENGTH) < 0.3, -100)
    written = labels != -100

    def ours(logits: Tensor) -> Tensor:
        logp_NV, teacher_NV = (torch.log_softmax(z[written], -1) for z in (logits, teacher))
        return reverse_kl(logp_NV, teacher_NV, torch.ones(len(logp_NV)), num_tokens=int(written.sum()))

    def theirs(logits: Tensor) -> Tensor:
        return GKDTrainer.generalized_jsd_loss(logits, teacher, labels=labels, beta=1)

    return distance(logits, ours, theirs)


def trainer_of(**settings: Any) -> Any:
    """What TRL's methods read of a trainer on one CPU."""
    same: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
    accelerator = SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same)
    return SimpleNamespace(
        accelerator=accelerator, model=SimpleNamespace(training=True), _metrics={"train": defaultdict(list)},
        _total_train_tokens=0, _tp_size=1, **settings,
    )  # fmt: skip


def distance(given: Tensor, ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]) -> float:
    """|ours - theirs| / |theirs| of the gradients, both by the same numbers."""
    found, wanted = (
        torch.autograd.grad(loss(z), z)[0] for loss in (ours, theirs) for z in [given.clone().requires_grad_()]
    )
    return float((found - wanted).norm() / wanted.norm())


if __name__ == "__main__":
    sys.exit(main())
