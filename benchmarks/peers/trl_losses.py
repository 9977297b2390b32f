"""Gradients of TRL's `GRPOTrainer._compute_loss` for given logits: the other side of `benchmarks/losses/agree.py`.

Runs in the environment of `benchmarks/peers/requirements.txt`:

    python trl_losses.py CASE.npz CASES.json OUT.npz

CASE.npz has logits_BTV, tokens_BT, mask_BT, old_BT, mu_BT, reference_BT, A_B, R_B and overlong_B; CASES.json the settings
of each loss by name, as GRPOConfig spells them; the others have its defaults. OUT.npz gets each loss's gradient of the
logits, [B, T, V]. The trainer is made without a model or a data set: the loss reads only the attributes below. TRL computes
importance weights where it generates, so those are computed here, on padded rows; so are advantages from rewards
(`from_rewards`), and the mask of truncated rows.

Axes: B rows, T tokens, V vocabulary.
"""

import json
import sys
from collections import defaultdict
from dataclasses import MISSING, fields
from types import SimpleNamespace

if {"-h", "--help"} & {*sys.argv[1:]}:  # before the imports, which a reader may not have
    print(__doc__)
    sys.exit()

import numpy as np
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import nanstd

GROUP = 4
DEFAULTS = {field.name: field.default for field in fields(GRPOConfig) if field.default is not MISSING}


SAME_NAME = (
    "loss_type", "beta", "importance_sampling_level", "top_entropy_quantile", "off_policy_mask_threshold",
    "use_adaptive_entropy", "entropy_coef",
)  # fmt: skip


def main(case_file: str, cases_file: str, out_file: str) -> None:
    """Write the gradient of each case."""
    case = {name: torch.from_numpy(values) for name, values in np.load(case_file).items()}
    with open(cases_file) as file:
        cases = json.load(file)
    np.savez(out_file, **{name: gradient_of(case, settings).numpy() for name, settings in cases.items()})


def gradient_of(case: dict[str, torch.Tensor], settings: dict) -> torch.Tensor:
    """The gradient of one loss."""
    settings = DEFAULTS | settings
    logits_BTV = case["logits_BTV"].clone().requires_grad_()
    logp_BTV = torch.log_softmax(logits_BTV, -1)
    logp_BT = logp_BTV.gather(-1, case["tokens_BT"][..., None])[..., 0]
    entropy_BT = -(logp_BTV.exp() * logp_BTV).sum(-1)
    mask_BT = case["mask_BT"]
    if settings["mask_truncated_completions"]:
        mask_BT = mask_BT * (~case["overlong_B"])[:, None]
    A_B = advantages_of(case["R_B"], settings["scale_rewards"]) if "from_rewards" in settings else case["A_B"]
    inputs = {
        "prompt_ids": case["tokens_BT"][:, :0], "prompt_mask": mask_BT[:, :0], "completion_ids": case["tokens_BT"],
        "completion_mask": mask_BT, "advantages": A_B, "num_items_in_batch": mask_BT.sum(),
        "old_per_token_logps": case[settings.get("ratio_to", "old_BT")],
        "ref_per_token_logps": case["reference_BT"],
    }  # fmt: skip
    if "weights" in settings:
        inputs["importance_sampling_ratio"] = weights_of(case, **settings["weights"])
    trainer = trainer_of(settings, lambda *args, **kwargs: (logp_BT, entropy_BT, None))
    trainer.max_completion_length = mask_BT.shape[1]
    GRPOTrainer._compute_loss(trainer, None, inputs).backward()
    return logits_BTV.grad


def advantages_of(R_B: torch.Tensor, scale_rewards: str) -> torch.Tensor:
    """Advantages as TRL makes them from rewards of groups."""
    R_IG = R_B.view(-1, GROUP)
    scale_I1 = nanstd(R_IG, dim=1)[:, None] + 1e-4 if scale_rewards == "group" else 1.0
    return ((R_IG - R_IG.mean(1, keepdim=True)) / scale_I1).flatten()


def weights_of(case: dict[str, torch.Tensor], mode: str, most: float, least: float = 0.0) -> torch.Tensor:
    """Importance weights as TRL's modes name them."""
    log_BT = (case["old_BT"] - case["mu_BT"]) * case["mask_BT"]
    if mode.startswith("sequence"):
        log_BT = log_BT.sum(-1, keepdim=True)
    w_BT = log_BT.exp()
    if mode.endswith("truncate"):
        return w_BT.clamp(max=most)
    return w_BT.masked_fill((w_BT < least) | (w_BT > most), 0.0)


def trainer_of(settings: dict, predict) -> SimpleNamespace:
    """What `_compute_loss` reads of a trainer."""
    names = ("delta", "use_bias_correction_kl")
    args = SimpleNamespace(steps_per_generation=1, **{name: settings[name] for name in names})
    same = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x,
        sync_gradients=True,
    )  # fmt: skip
    return SimpleNamespace(
        epsilon_low=settings["epsilon"], epsilon_high=settings["epsilon_high"] or settings["epsilon"], args=args,
        accelerator=same, model=SimpleNamespace(training=True),
        use_vllm="weights" in settings, vllm_importance_sampling_correction="weights" in settings,
        aux_loss_enabled=False, current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=bool(settings["entropy_coef"]),
        _metrics=defaultdict(lambda: defaultdict(list)), _get_per_token_logps_and_entropies=predict,
        **{name: settings[name] for name in SAME_NAME},
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
