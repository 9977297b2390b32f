"""A step of a dpo stage against TRL's: the same two policies and pairs, from files, and the gradients of the weights.

    python benchmarks/losses/dpo_step.py --peer PYTHON

PYTHON is of an environment with benchmarks/peers/requirements.txt. Both sides read a tiny policy, another one as the
reference, and a file of pairs in which prompts are chats. Ours goes through `jobs/preferences` and
`train/preference_training`, TRL's through `DPOTrainer.compute_loss`. Ends with one line of JSON: both losses, and the
relative L2 of the gradient over all weights. The bar is 1e-5.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # started as a file, as benchmarks are

from shoal.algos.preferences import dpo_loss  # noqa: E402
from shoal.config import TinyPolicy  # noqa: E402
from shoal.jobs.preferences import read_pairs  # noqa: E402
from shoal.models.checkpoint import load_policy  # noqa: E402
from shoal.models.random_model import make_tiny  # noqa: E402
from shoal.train.packing_padded import collate  # noqa: E402
from shoal.train.preference_training import answer_logps, in_microbatches, pair_sums  # noqa: E402

PEER = ROOT / "benchmarks" / "peers" / "trl_dpo_step.py"
BAR, BETA, PAIRS = 1e-5, 0.1, 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, metavar="PYTHON", help="of an environment with TRL")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="shoal-dpo-") as scratch:
        folder = Path(scratch)
        for seed, name in ((1, "start"), (2, "reference")):
            tiny = TinyPolicy(width=32, layers=2, heads=4, kv_heads=2, mlp_width=64, max_positions=64)
            make_tiny(tiny, folder / name, seed, "float32")
        write_pairs(folder / "pairs.jsonl")
        loss, ours = our_gradients(folder)
        subprocess.run([asked.peer, str(PEER), scratch], check=True, stdout=sys.stderr)
        theirs = load_file(folder / "theirs.safetensors")
    their_loss = float(theirs.pop("loss"))
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    off = sum(float((ours[name] - theirs[name]).square().sum()) for name in ours)
    far = (off / sum(float(one.square().sum()) for one in theirs.values())) ** 0.5
    print(json.dumps({"benchmark": "dpo_step", "loss": loss, "their_loss": their_loss, "relative_l2": far, "bar": BAR}))
    return int(not far <= BAR)


def write_pairs(path: Path) -> None:
    """Random words, of other lengths in each pair."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh 0123", k=rng.randint(2, 12))).strip() or "a" for _ in range(3 * PAIRS)]
    lines = []
    for prompt, chosen, rejected in zip(words[::3], words[1::3], words[2::3], strict=True):
        said = {"chosen": chosen, "rejected": rejected}
        answers = {name: [{"role": "assistant", "content": text}] for name, text in said.items()}
        lines.append(json.dumps({"prompt": [{"role": "user", "content": prompt}]} | answers))
    path.write_text("\n".join(lines) + "\n")


def our_gradients(folder: Path) -> tuple[float, dict[str, Tensor]]:
    """The loss over all pairs, and the gradient of each tensor."""
    model, reference = (load_policy(folder / name) for name in ("start", "reference"))
    pairs, loss = read_pairs(folder / "pairs.jsonl", folder / "start", 64), 0.0
    for members in in_microbatches(pairs):
        rows = [*(pair.chosen for pair in members), *(pair.rejected for pair in members)]
        chosen_B, rejected_B = answer_logps(model)(collate(rows), rows).chunk(2)
        known = torch.tensor([pair_sums(reference, pair) for pair in members])
        terms = dpo_loss(chosen_B, rejected_B, known[:, 0], known[:, 1], beta=BETA, num_pairs=len(pairs))
        terms.loss.backward()
        loss += terms.loss.item()
    return loss, {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


if __name__ == "__main__":
    sys.exit(main())
