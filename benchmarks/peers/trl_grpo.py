"""The peer of `whole_system.py`: TRL's GRPOTrainer on the same policy, prompts, reward and objective.

    OMP_NUM_THREADS=1 .venv-trl/bin/python benchmarks/peers/trl_grpo.py POLICY '{"steps": 12, "warmup": 3, ...}'

Started in a virtual environment of its own; it imports nothing of shoal's but the environment file. Prints one JSON line:
CPU-seconds and wall seconds of every step after the warm-up, the reward of every step, peak memory. The settings are those
that a careful user would choose on a CPU; `benchmarks/whole_system.py` says why.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

if {"-h", "--help"} & {*sys.argv[1:]}:  # before the imports, which a reader may not have
    print(__doc__)
    sys.exit()

STARTED = time.perf_counter()
sys.path.insert(0, str(Path(__file__).parents[1] / "envs"))
warnings.filterwarnings("ignore")
os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"})

import torch  # noqa: E402 - after the environment that they read
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from vowels import NEW, NUM_TASKS, PROMPT, prompt_of, reward_of  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("policy", type=Path, help="HF-format directory of the first weights")
    parser.add_argument("settings", type=json.loads, help="as JSON")
    asked = parser.parse_args()
    settings = asked.settings
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = AutoModelForCausalLM.from_pretrained(asked.policy, dtype=torch.float32)
    rewards: list[float] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        scores = [reward_of(written) for written in completions]
        rewards.append(sum(scores) / len(scores))
        return scores

    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config(settings, scratch),
            train_dataset=Dataset.from_dict({"prompt": [prompt_of(index) for index in range(NUM_TASKS)]}),
            processing_class=AutoTokenizer.from_pretrained(asked.policy),
            callbacks=[watch],
        )
        trainer.train()
    tokens = trainer.state.num_input_tokens_seen
    expected = settings["steps"] * settings["completions"] * (PROMPT + NEW)
    assert tokens == expected, f"TRL saw {tokens} tokens, not {expected}: a completion was not {NEW} tokens long"
    warmup = settings["warmup"]
    figures = {
        "threads": torch.get_num_threads(),
        "startup_s": watch.at[0][0] - STARTED,
        "wall_s": [after[0] - before[0] for before, after in pairwise(watch.at)][warmup:],
        "cpu_s": [after[1] - before[1] for before, after in pairwise(watch.at)][warmup:],
        "rewards": rewards,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(figures))


def config(settings: dict[str, Any], scratch: str) -> GRPOConfig:
    """The same objective and optimiser as our run file, and TRL's own costs taken away."""
    return GRPOConfig(
        output_dir=scratch,
        max_steps=settings["steps"],
        per_device_train_batch_size=settings["microbatch"],
        gradient_accumulation_steps=settings["completions"] // settings["microbatch"],
        num_generations=settings["group"],
        max_completion_length=NEW,
        temperature=1.0,
        cache_implementation="static",
        num_iterations=1,
        beta=0.0,
        epsilon=settings["epsilon"],
        delta=settings["delta"],
        loss_type="dapo",
        scale_rewards="none",
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=settings["beta1"],
        adam_beta2=settings["beta2"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["max_grad_norm"],
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=settings["seed"],
    )


class Stopwatch(TrainerCallback):
    """Wall and CPU time of this process when training began and after each step."""

    def __init__(self) -> None:
        self.at: list[tuple[float, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.at.append((time.perf_counter(), time.process_time()))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.at.append((time.perf_counter(), time.process_time()))


if __name__ == "__main__":
    main()
