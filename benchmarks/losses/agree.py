"""Our policy losses against TRL's, on the same logits: the relative L2 of each gradient.

    python benchmarks/losses/agree.py --peer PYTHON

PYTHON is of an environment with benchmarks/peers/requirements.txt. Random logits, float64, rows of 1 to 24 tokens, and
log-probs of other policies near them. Both sides get the gradient of the logits: ours through `train/loss` with the
weights of `train/loss`, TRL's through `GRPOTrainer._compute_loss`. What a case does not set has TRL's default.
Prints a table, and ends with one line of JSON. The bar is 1e-5.

Axes: B rows, T tokens, V vocabulary, N policy tokens, P policy tokens of a row.
"""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from benchmarks.measure import arguments
from shoal.algos.advantages import group_advantages
from shoal.protocol import algorithm_config as c
from shoal.protocol.algorithm_config import Algorithm
from shoal.train.loss import TokenTerms, averaged, objective_of
from shoal.train.rows import TrainingRow, counted_only

PEER = Path(__file__).parents[1] / "peers" / "trl_losses.py"
BAR = 1e-5
ROWS, GROUP, LONGEST, VOCABULARY = 16, 4, 24, 32

OLD = "old"
GSPO = c.Gspo(eps_low=0.05, eps_high=0.08)

CASES: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "grpo, two-sided": (c.Grpo(), {"loss_type": "bnpo", "delta": 4.0, "ratio_to": "mu_BT"}),
    "grpo, mean of rollouts": (c.Composition(average="rollouts", ratio_to=OLD), {"loss_type": "grpo"}),
    "ppo": (c.Ppo(), {"loss_type": "bnpo"}),
    "ppo with delta": (c.Ppo(loss=c.Clip(delta=1.5)), {"loss_type": "bnpo", "delta": 1.5}),
    "dapo": (c.Dapo(ratio_to=OLD), {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dr_grpo": (c.DrGrpo(ratio_to=OLD), {"loss_type": "dr_grpo"}),
    "gspo": (
        c.GspoNamed(loss=GSPO, ratio_to=OLD),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.08},
    ),
    "gspo, mean of tokens": (
        c.GspoNamed(loss=GSPO, ratio_to=OLD, average="tokens"),
        {"loss_type": "dapo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.08},
    ),
    "cispo": (c.CispoNamed(loss=c.Cispo(most=1.5), ratio_to=OLD), {"loss_type": "cispo", "epsilon_high": 1.5}),
    "entropy bonus": (c.Ppo(entropy_bonus=0.1), {"loss_type": "bnpo", "entropy_coef": 0.1}),
    "kl, k3": (c.Ppo(kl=c.Kl(0.05)), {"loss_type": "bnpo", "beta": 0.05, "use_bias_correction_kl": False}),
    "kl, k3, weighted": (c.Ppo(kl=c.Kl(0.05, place="weighted_loss")), {"loss_type": "bnpo", "beta": 0.05}),
    "truncate": (
        c.Ppo(corrections=(c.Truncate(1.3),)),
        {"loss_type": "dapo", "weights": {"mode": "token_truncate", "most": 1.3}},
    ),
    "truncate, rows": (
        c.Ppo(corrections=(c.Truncate(1.3, "row"),)),
        {"loss_type": "dapo", "weights": {"mode": "sequence_truncate", "most": 1.3}},
    ),
    "icepop": (
        c.Ppo(corrections=(c.IcePop(0.8, 1.3),)),
        {"loss_type": "dapo", "weights": {"mode": "token_mask", "least": 0.8, "most": 1.3}},
    ),
    "sequence mask": (
        c.Ppo(corrections=(c.SequenceMask(0.5, 3.0), c.Truncate(1e6, "row"))),
        {"loss_type": "dapo", "weights": {"mode": "sequence_mask", "least": 0.5, "most": 3.0}},
    ),
}  # fmt: skip
"""Our algorithm and TRL's settings, by what they are."""

MEAN_STD = c.Composition(advantage="mean_std")
MASKED = {"mask_truncated_completions": True}
DR_GRPO = c.DrGrpo(advantage="mean_std", divisor_tokens=LONGEST)

PAGE: dict[str, tuple[c.Composition, dict[str, Any]]] = {
    "page: defaults": (MEAN_STD, {}),
    "page: no scale_rewards": (c.Composition(), {"scale_rewards": "none"}),
    "page: beta": (replace(MEAN_STD, kl=c.Kl(0.05, place="weighted_loss")), {"beta": 0.05}),
    "page: dr_grpo": (DR_GRPO, {"loss_type": "dr_grpo"}),
    "page: sequence": (
        c.GspoNamed(loss=c.Gspo(eps_low=0.2, eps_high=0.2), average="tokens"),
        {"importance_sampling_level": "sequence"},
    ),
    "page: luspo": (
        c.GspoNamed(loss=c.Gspo(eps_low=0.2, eps_high=0.2), average="constant", divisor_tokens=1),
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    ),
    "page: cispo": (c.CispoNamed(), {"loss_type": "cispo", "epsilon_high": 5.0}),
    "page: masked": (replace(MEAN_STD, mask_overlong=True), MASKED),
    "page: masked, grpo": (replace(MEAN_STD, average="rollouts", mask_overlong=True), MASKED | {"loss_type": "grpo"}),
    "page: masked, dr_grpo": (replace(DR_GRPO, mask_overlong=True), MASKED | {"loss_type": "dr_grpo"}),
}
"""What docs/how-to/coming-from.md tells to write for some settings of TRL, whose others keep TRL's defaults. Here,
advantages follow from rewards, on both sides."""
CASES |= {name: (ours, {"from_rewards": True, "ratio_to": "mu_BT"} | theirs) for name, (ours, theirs) in PAGE.items()}


def main() -> None:
    """Compare all cases."""
    parser = arguments(__doc__)
    parser.add_argument("--peer", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    case = case_of(options.seed)
    theirs = peer_gradients(case, options.peer)
    found = {}
    print(f"{'loss':<24} {'relative L2':>12}")
    for name, (algorithm, settings) in CASES.items():
        ours = gradient_of(case, algorithm, "from_rewards" in settings)
        found[name] = float(np.linalg.norm(ours - theirs[name]) / np.linalg.norm(theirs[name]))
        print(f"{name:<24} {found[name]:12.1e}")
    print(
        json.dumps({"agree": max(found.values()) <= BAR, "bar": BAR, "largest": max(found.values()), "losses": found})
    )


def case_of(seed: int) -> dict[str, np.ndarray]:
    """Logits, what was sampled, and what other policies say of it."""
    rng = np.random.default_rng(seed)
    logits_BTV = rng.normal(size=(ROWS, LONGEST, VOCABULARY))
    tokens_BT = rng.integers(0, VOCABULARY, size=(ROWS, LONGEST))
    lengths_B = rng.integers(1, LONGEST + 1, size=ROWS)
    logp_BTV = logits_BTV - np.log(np.exp(logits_BTV).sum(-1, keepdims=True))
    logp_BT = np.take_along_axis(logp_BTV, tokens_BT[..., None], -1)[..., 0]
    near = {
        name: np.minimum(logp_BT + rng.normal(0, spread, size=logp_BT.shape), -1e-3)
        for name, spread in (("old_BT", 0.3), ("mu_BT", 0.4), ("reference_BT", 0.5))
    }
    mask_BT = (np.arange(LONGEST) < lengths_B[:, None]).astype(np.float64)
    A_B = rng.normal(size=ROWS)
    rewards = {"R_B": rng.normal(0, 1000, size=ROWS), "overlong_B": rng.random(ROWS) < 0.3}  # far above all floors
    return {"logits_BTV": logits_BTV, "tokens_BT": tokens_BT, "mask_BT": mask_BT, "A_B": A_B, **near, **rewards}


def gradient_of(case: dict[str, np.ndarray], algorithm: Algorithm, from_rewards: bool = False) -> np.ndarray:
    """The gradient of our loss by the logits, [B, T, V]."""
    learned_B = ~case["overlong_B"] if algorithm.mask_overlong else np.ones(ROWS, dtype=bool)
    lengths_B, A_B = case["mask_BT"].sum(-1).astype(int), case["A_B"]
    if from_rewards:
        A_B = np.concatenate([group_advantages(R_G, algorithm.advantage) for R_G in case["R_B"].reshape(-1, GROUP)])  # type: ignore[arg-type]
    whole = [_row(case, b, length) for b, length in enumerate(lengths_B)]
    rows = averaged([row if learned_B[b] else counted_only(row) for b, row in enumerate(whole)], algorithm, LONGEST)
    lengths_R = lengths_B[learned_B]
    logits_BTV = torch.from_numpy(case["logits_BTV"]).requires_grad_()
    written_BT = torch.from_numpy(case["mask_BT"]).bool() & torch.from_numpy(learned_B)[:, None]
    logp_NV = torch.log_softmax(logits_BTV[written_BT], -1)
    logp_N = logp_NV.gather(-1, torch.from_numpy(case["tokens_BT"])[written_BT][:, None])[:, 0]

    def of_rows(values: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(values).astype(np.float64))

    terms = TokenTerms(
        logp_N=logp_N,
        entropy_N=-(logp_NV.exp() * logp_NV).sum(-1),
        old_logp_N=torch.from_numpy(case["old_BT"])[written_BT],
        behaviour_logp_N=torch.from_numpy(case["mu_BT"])[written_BT],
        advantage_N=of_rows([np.full(length, A) for length, A in zip(lengths_R, A_B[learned_B], strict=True)]),
        weight_N=of_rows([row.weight_P for row in rows]),
        row_N=torch.from_numpy(np.repeat(np.arange(len(lengths_R)), lengths_R)),
        reference_logp_N=torch.from_numpy(case["reference_BT"])[written_BT],
    )
    loss, _ = objective_of(algorithm)(terms, float(lengths_R.sum()))
    loss.backward()
    assert logits_BTV.grad is not None
    return logits_BTV.grad.numpy()


def _row(case: dict[str, np.ndarray], b: int, length: int) -> TrainingRow:
    ones_P = np.ones(length, dtype=np.float32)
    return TrainingRow(
        tokens_T=case["tokens_BT"][b, :length], positions_P=np.arange(length), behaviour_logp_P=ones_P,
        advantage_P=ones_P, weight_P=ones_P, reward=0.0, version=0,
    )  # fmt: skip


def peer_gradients(case: dict[str, np.ndarray], python: Path) -> dict[str, np.ndarray]:
    """The gradients of TRL's losses, by what they are."""
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        np.savez(there / "case.npz", **case)  # type: ignore[arg-type]
        (there / "cases.json").write_text(json.dumps({name: settings for name, (_, settings) in CASES.items()}))
        files = [there / "case.npz", there / "cases.json", there / "out.npz"]
        subprocess.run([str(python), str(PEER), *map(str, files)], check=True)
        return dict(np.load(there / "out.npz"))


if __name__ == "__main__":
    main()
