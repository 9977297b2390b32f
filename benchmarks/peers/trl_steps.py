"""The peer of the training measurements of `real_models.py`: the loss of TRL's GRPOTrainer on given rows, and AdamW.

    OMP_NUM_THREADS=1 .venv-trl/bin/python benchmarks/peers/trl_steps.py POLICY '{"groups": 2, ...}'

Started by `real/training.py` in a virtual environment of its own; of shoal's files it imports those that need only
numpy. It does not generate: the trainer's loss gets the rows that our learner gets, padded as the trainer pads them,
in micro-batches of as many padded tokens. Prints the JSON line of `report_steps`.
"""

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

if {"-h", "--help"} & {*sys.argv[1:]}:  # before the imports, which a reader may not have
    print(__doc__)
    sys.exit()

warnings.filterwarnings("ignore")
os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"})

import torch  # noqa: E402 - after the environment that they read
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from benchmarks.real.resident import report_steps, resident_mb  # noqa: E402
from benchmarks.real.rows import Batch  # noqa: E402

BETAS, MAX_GRAD_NORM, LR = (0.9, 0.95), 1.0, 1e-5
"""As our learner has them."""


def main() -> None:
    asked = json.loads(sys.argv[2])
    recompute, steps = asked.pop("recompute"), asked.pop("steps")
    batch, directory = Batch(**asked), Path(sys.argv[1])
    torch.set_num_threads(1)
    warm_up()
    before = resident_mb()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    padded = batch.prompt + int(batch.lengths().max())
    rows = max(1, batch.microbatch_tokens // padded)
    micro_batches = -(-batch.rows // rows)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config(scratch, batch, micro_batches, recompute),
            train_dataset=Dataset.from_dict({"prompt": ["one"] * 64}),
            processing_class=AutoTokenizer.from_pretrained(directory),
        )
    model = trainer.model.train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainer.current_gradient_accumulation_steps = micro_batches
    optimiser = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True)
    inputs = inputs_of(batch, model.config.vocab_size)
    inputs["old_per_token_logps"] = old_logps(trainer, model, inputs, rows)

    def take_step(_: int) -> float:
        loss_sum = 0.0
        for first in range(0, batch.rows, rows):
            part = {name: value[first : first + rows] for name, value in inputs.items()}
            loss = trainer.compute_loss(model, part | {"num_items_in_batch": inputs["completion_mask"].sum()})
            loss.backward()
            loss_sum += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimiser.step()
        optimiser.zero_grad()
        return loss_sum

    report_steps(take_step, steps, before, model)


def warm_up() -> None:
    """Take a step with a tiny matrix first, so that one-time setup is not measured as the policy's memory."""
    layer = torch.nn.Linear(64, 64)
    optimiser = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(64, 64)).logsumexp(-1).sum().backward()
    optimiser.step()


def config(scratch: str, batch: Batch, micro_batches: int, recompute: bool) -> GRPOConfig:
    """The objective of our learner's defaults."""
    return GRPOConfig(
        output_dir=scratch, per_device_train_batch_size=batch.group_size, num_generations=max(2, batch.group_size),
        gradient_accumulation_steps=micro_batches, steps_per_generation=micro_batches,
        max_completion_length=int(batch.lengths().max()), beta=0.0, epsilon=0.2, delta=4.0, loss_type="dapo",
        scale_rewards="none", gradient_checkpointing=recompute, bf16=False, use_cpu=True, dataloader_pin_memory=False,
        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip


def inputs_of(batch: Batch, vocabulary: int) -> dict[str, Any]:
    """The rows as the trainer keeps them: prompts beside completions that are padded to the longest of all."""
    drawn, longest = batch.token_ids(vocabulary), int(batch.lengths().max())
    completions = [completion + [0] * (longest - len(completion)) for _, completion in drawn]
    kept = [[1] * len(completion) + [0] * (longest - len(completion)) for _, completion in drawn]
    prompts = torch.tensor([prompt for prompt, _ in drawn])
    return {
        "prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "completion_ids": torch.tensor(completions),
        "completion_mask": torch.tensor(kept), "advantages": torch.tensor(batch.advantages()),
    }  # fmt: skip


@torch.no_grad()
def old_logps(trainer: GRPOTrainer, model: Any, inputs: dict[str, Any], rows: int) -> torch.Tensor:
    """Log-probs before the first step, by the trainer's own function."""
    ids, mask = (torch.cat([inputs[f"prompt_{of}"], inputs[f"completion_{of}"]], 1) for of in ("ids", "mask"))
    keep = inputs["completion_ids"].shape[1]
    return torch.cat([
        trainer._get_per_token_logps_and_entropies(model, ids[at : at + rows], mask[at : at + rows], keep)[0]
        for at in range(0, len(ids), rows)
    ])  # fmt: skip


if __name__ == "__main__":
    main()
