"""TRL's side of `benchmarks/losses/dpo_step.py`: the loss and the gradients of one batch of pairs.

    .venv-trl/bin/python benchmarks/peers/trl_dpo_step.py FOLDER

FOLDER has `start` (a policy), `reference` (another one) and `pairs.jsonl`. It writes `theirs.safetensors`: the gradient of
each tensor, and `loss`. It imports nothing of shoal.
"""

import sys
import warnings
from pathlib import Path

if {"-h", "--help"} & {*sys.argv[1:]}:  # before the imports, which a reader may not have
    print(__doc__)
    sys.exit()

warnings.filterwarnings("ignore")

import torch  # noqa: E402 - after the warnings of the others are off
from datasets import load_dataset  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl import DPOConfig, DPOTrainer  # noqa: E402

BETA = 0.1


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    model, reference = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for name in ("start", "reference")
    )
    pairs = load_dataset("json", data_files=str(folder / "pairs.jsonl"), split="train")
    settings = DPOConfig(
        str(folder / "trl"), beta=BETA, per_device_train_batch_size=len(pairs), use_cpu=True, report_to=[],
        gradient_checkpointing=False, bf16=False,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder / "start")
    trainer = DPOTrainer(model, reference, args=settings, train_dataset=pairs, processing_class=tokenizer)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    found = {name: one.grad for name, one in trainer.model.named_parameters() if one.grad is not None}
    save_file(found | {"loss": loss.detach().reshape(1)}, str(folder / "theirs.safetensors"))


if __name__ == "__main__":
    main()
