"""Patches from version to version: size beside PULSE's scheme, beside the entropy and beside the whole; speed; curves.

    OMP_NUM_THREADS=1 python benchmarks/patches.py [--steps 32] [--quick]

A policy of 103M parameters (a Qwen3 of width 1024 with 6 layers, 8,192 tokens) with random weights learns this
repository's text with the real `Learner`: float32 masters, AdamW, 512 tokens a step. After 12 steps of warm-up at learning
rate 1e-6, in which AdamW's moments fill, 32 more are published as bfloat16, and 21 of them are coded as patches from the
version before. Nothing is simulated: the weights that change are those that training changes. The masters start between the
values of bfloat16, as they are after many steps.

`entropy_bits` says what the bar on size is measured with. PULSE's scheme is `benchmarks/peers/pulse.py`. Speed is bytes of
bfloat16 weights a CPU-second of one thread, without hashing, in memory. Each patch is applied, stepped back and compared
bit for bit. The curves begin at the same state after the warm-up: over learning rates, two steps at each; over steps
skipped, patches from the first version to later ones.

The last line is JSON. The exit code is 1 if a bar is missed.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.measure import ROOT, arguments, pin_threads, report
from benchmarks.peers import pulse
from shoal.config import SamplingConfig, TrainConfig
from shoal.models.checkpoint import load_policy
from shoal.models.random_model import initialise
from shoal.models.transformer import Transformer
from shoal.models.transformer_config import TransformerConfig
from shoal.protocol.messages import POLICY
from shoal.train.learner import Learner, LearnerState
from shoal.train.loss import sft_objective
from shoal.train.rows import TrainingRow, example_row
from shoal.weights.delta.patch import apply_patch, make_patch
from shoal.weights.delta.tensor_codes import KINDS, EncodedTensor, Weights, coded, exponents, places, root_of

LR, WARMUP_STEPS, ROW_TOKENS, ROWS = 1e-6, 12, 256, 2
RATES = (1e-7, 3e-7, 3e-6, 1e-5, 1e-4)
SKIPPED = (1, 2, 4, 8, 16, 32)
SPEC = TransformerConfig(
    family="qwen3", width=1024, layers=6, heads=16, kv_heads=8, head_dim=128, mlp_width=3072, vocab_size=8192,
    max_positions=ROW_TOKENS, rope_theta=1e6, norm_eps=1e-6, tied=True, eos_ids=(0,),
)  # fmt: skip
BARS = {
    "patch_over_pulse": (0.5, "at most"), "patch_over_entropy": (1.15, "at most"), "full_over_patch": (100, "at least"),
    "encode_mb_s": (800, "at least"), "apply_mb_s": (800, "at least"),
}  # fmt: skip


def coded_tensors(tensors: Mapping[str, torch.Tensor]) -> Weights:
    """Contiguous tensors in the memory of this process, by name. What is written to the codes, the tensors hold."""
    dtypes = {torch.float32: "F32", torch.bfloat16: "BF16"}
    return {
        name: coded(dtypes[one.dtype], tuple(one.shape), one.detach().view(-1).view(torch.uint8).numpy())
        for name, one in tensors.items()
    }


def main() -> int:
    """Train, code, compare; print tables and one line of JSON."""
    parser = arguments(__doc__, "4 steps and two learning rates; proves nothing")
    parser.add_argument("--steps", type=int, default=32, help="steps that are coded at learning rate 1e-6")
    options = parser.parse_args()
    steps, rates = (4, RATES[::4]) if options.quick else (options.steps, RATES)
    torch.set_num_threads(1)
    run = Run()
    for _ in range(WARMUP_STEPS):
        run.learn(LR)
    warm = run.state()
    rows, by_skipped, pulse_hard = follow(run, steps)
    by_lr = {LR: rows} | {lr: at_rate(run, warm, lr) for lr in rates}
    figures: dict[str, Any] = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    figures["by_lr"] = {f"{lr:.0e}": medians(by_lr[lr]) for lr in sorted(by_lr)}
    figures["by_skipped"] = {str(skipped): row for skipped, row in by_skipped.items()}
    figures |= hashing(run.published()) | {
        "pulse_zstd_19_bytes": pulse_hard,
        "demo_is_sent_whole": int(demo_patch() is None),
    }
    for title, table in (("learning rate", figures["by_lr"]), ("steps apart", figures["by_skipped"])):
        show(title, table)
    missed = [name for name in BARS if not meets(name, figures[name])]
    missed += [] if figures["demo_is_sent_whole"] else ["demo_is_sent_whole"]
    for name, (limit, side) in BARS.items():
        print(f"{name} = {figures[name]:.3f}, bar {side} {limit}{'  MISSED' if name in missed else ''}")
    report("patches", {"parameters": run.parameters, "steps": steps, **rounded(figures)})
    return 1 if missed else 0


class Run:
    """A policy that learns text, with what it publishes."""

    def __init__(self) -> None:
        model = Transformer(SPEC)
        initialise(model, seed=0)
        self.parameters = sum(one.numel() for one in model.parameters())
        config = TrainConfig(lr=LR, warmup_steps=WARMUP_STEPS, microbatch_tokens=ROW_TOKENS * ROWS)
        self._learner = Learner(model, config, SamplingConfig(), steps=10_000, objective=sft_objective)
        self._tokens, self._rng, self._steps = text_tokens(), np.random.default_rng(0), 0

    def learn(self, lr: float) -> None:
        """One step on random places of the text."""
        self._learner.config = msgspec.structs.replace(self._learner.config, lr=lr)
        self._learner.step([self._row() for _ in range(ROWS)], self._steps)
        self._steps += 1

    def published(self) -> Weights:
        """The weights as bfloat16, rounded to nearest, as `save_policy` writes them."""
        tensors = {name: one.detach().to(torch.bfloat16) for name, one in self._learner.model.named_parameters()}
        return coded_tensors(tensors)

    def state(self) -> LearnerState:
        state = self._learner.state(self._steps)
        return LearnerState(state.version, state.updates, {name: one.clone() for name, one in state.tensors.items()})

    def restore(self, state: LearnerState) -> None:
        self._learner.restore(state)

    def _row(self) -> TrainingRow:
        start = int(self._rng.integers(len(self._tokens) - ROW_TOKENS))
        tokens_T = self._tokens[start : start + ROW_TOKENS]
        return example_row(tokens_T, [0] + [POLICY] * (ROW_TOKENS - 1))


def text_tokens() -> list[int]:
    """This repository's pages and source in the order of their names, by a byte-level BPE trained on them."""
    files = [path for folder in ("docs", "shoal", "tests") for path in (ROOT / folder).rglob("*")]
    files = sorted(path for path in files if path.suffix in (".md", ".py"))
    texts = [path.read_text(encoding="utf-8") for path in files]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=SPEC.vocab_size, show_progress=False))
    return [token for text in texts for token in tokenizer.encode(text).ids]


def follow(run: Run, steps: int) -> tuple[list[dict[str, float]], dict[int, dict[str, float]], int]:
    """Figures of each patch between neighbours, and of those from the first version to later ones.

    And the bytes of PULSE's scheme at the first step if zstd tries its hardest, at level 19.
    """
    first = before = run.published()
    rows, skipped, pulse_hard = [], {}, 0
    for step in range(1, steps + 1):
        run.learn(LR)
        now = run.published()
        if step % 2 or step in SKIPPED:
            rows.append(figures_of(before, now))
            print(f"step {step}: {line_of(rows[-1])}", file=sys.stderr, flush=True)
        if step in SKIPPED:
            skipped[step] = rows[-1] if step == 1 else figures_of(first, now)
        pulse_hard = pulse_hard or len(pulse.encode(before, now, level=19)[0])
        before = now
    return rows, skipped, pulse_hard


def at_rate(run: Run, warm: LearnerState, lr: float) -> list[dict[str, float]]:
    """Figures of the first two steps at another learning rate, from the state after the warm-up."""
    run.restore(warm)
    rows, before = [], run.published()
    for _ in range(2):
        run.learn(lr)
        now = run.published()
        rows.append(figures_of(before, now))
        before = now
    print(f"learning rate {lr:.0e}: {line_of(rows[-1])}", file=sys.stderr, flush=True)
    return rows


# --- one patch ---


def figures_of(base: Weights, new: Weights) -> dict[str, float]:
    """Sizes, speeds and statistics of the patch from one version to another; checks that it is exact, both ways."""
    full_bytes = sum(tensor.codes.nbytes for tensor in base.values())
    patch = make_patch(base, new, worth_it=1.0)
    assert patch is not None
    weights = {name: EncodedTensor(one.dtype, one.shape, one.codes.copy()) for name, one in base.items()}
    apply_patch(weights, patch)
    assert all(np.array_equal(weights[name].codes, new[name].codes) for name in new)
    apply_patch(weights, patch, back=True)
    assert all(np.array_equal(weights[name].codes, base[name].codes) for name in base)
    [encode_s] = timed(lambda: make_patch(base, new, worth_it=1.0))
    apply_s, back_s = timed(lambda: apply_patch(weights, patch), lambda: apply_patch(weights, patch, back=True))
    pulse_data, counts = pulse.encode(base, new)
    entropy, statistics_ = entropy_bits(base, new)
    return {
        "patch_bytes": len(patch),
        "pulse_bytes": len(pulse_data),
        "entropy_bytes": entropy / 8,
        "full_bytes": full_bytes,
        "patch_over_pulse": len(patch) / len(pulse_data),
        "patch_over_entropy": 8 * len(patch) / entropy,
        "full_over_patch": full_bytes / len(patch),
        "bits_a_change": 8 * len(patch) / sum(counts.values()),
        "encode_mb_s": full_bytes / encode_s / 1e6,
        "apply_mb_s": full_bytes / apply_s / 1e6,
        "back_mb_s": full_bytes / back_s / 1e6,
        **statistics_,
    }


def entropy_bits(base: Weights, new: Weights) -> tuple[float, dict[str, float]]:
    """The empirical entropy of a step given (tensor, exponent), in bits; the share of changed values, and of jumps.

    For each tensor and each exponent of the base, sum of three entropies under the frequencies found there: which of its n
    values change, n H(k / n); the sign of each change's jump; the size of each jump, in units in the last place. This is
    what a coder pays that knows these frequencies for nothing and knows nothing else.
    """
    bits, num_values, sizes = 0.0, 0, np.zeros(1 << 17, np.int64)
    for name, tensor in base.items():
        kind, old, now = KINDS[tensor.dtype], tensor.codes, new[name].codes
        at = np.flatnonzero(old != now)
        exponent, of_change = exponents(old, kind), exponents(old[at], kind)
        jumps = places(now[at], kind).astype(np.int64) - places(old[at], kind).astype(np.int64)
        values_E = np.bincount(exponent, minlength=256)
        for e in np.unique(of_change):
            here = jumps[of_change == e]
            bits += cost(np.array([len(here), values_E[e] - len(here)]))
            bits += cost(np.array([(here > 0).sum(), (here < 0).sum()])) + cost(np.bincount(np.abs(here)))
        num_values += len(old)
        sizes += np.bincount(np.abs(jumps), minlength=len(sizes))
    changed = int(sizes.sum())
    shares = {"jump_1": sizes[1], "jump_2": sizes[2], "jump_3_4": sizes[3:5].sum(), "jump_5_16": sizes[5:17].sum()}
    shares["jump_above_16"] = sizes[17:].sum()
    return bits, {"changed": changed / num_values} | {name: float(n) / changed for name, n in shares.items()}


def cost(counts: np.ndarray) -> float:
    """Bits of a sequence in which each symbol is this often, under its own frequencies."""
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def timed(*works: Callable[[], Any]) -> list[float]:
    """CPU-seconds of some works that follow each other, each the best of three rounds: the machine does other work too."""
    rounds = []
    for _ in range(3):
        times = [time.process_time()]
        for work in works:
            work()
            times.append(time.process_time())
        rounds.append(np.diff(times))
    return np.min(rounds, axis=0).tolist()


# --- beside the patches ---


def hashing(weights: Weights) -> dict[str, float]:
    """MB a second of the weights root, by one thread and by two; wall time."""
    size_mb = sum(tensor.codes.nbytes for tensor in weights.values()) / 1e6
    speeds = {}
    for threads in (1, 2):
        started = time.perf_counter()
        root_of(weights, threads=threads)
        speeds[f"hash_mb_s_{threads}"] = size_mb / (time.perf_counter() - started)
    return speeds


def demo_patch() -> bytes | None:
    """The patch of a real step of the demo's policy: float32, 0.8M parameters, learning rate 2e-4."""
    model = load_policy(ROOT / "recipes" / "wordle-start")
    learner = Learner(model, TrainConfig(lr=2e-4), SamplingConfig(), steps=100, objective=sft_objective)
    rng = np.random.default_rng(0)
    versions = []
    for step in range(3):
        tokens_T = rng.integers(6, model.spec.vocab_size, 64).tolist()
        learner.step([example_row(tokens_T, [0] + [POLICY] * 63)], step)
        versions.append(coded_tensors({name: one.detach().clone() for name, one in model.named_parameters()}))
    return make_patch(versions[-2], versions[-1])


# --- printing ---


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def meets(name: str, value: float) -> bool:
    limit, side = BARS[name]
    return value <= limit if side == "at most" else value >= limit


def show(title: str, table: dict[str, dict[str, float]]) -> None:
    """One row for each learning rate or distance."""
    print(f"\n{title:>13}  changed  by one  bits  of full  of PULSE  of entropy  encode  apply   back MB/s")
    for key, row in table.items():
        print(f"{key:>13}  {line_of(row)}")


def line_of(row: dict[str, float]) -> str:
    return (
        f"{100 * row['changed']:6.2f}%  {100 * row['jump_1']:5.1f}%  {row['bits_a_change']:4.1f}  "
        f"1/{row['full_over_patch']:<5.0f}  {row['patch_over_pulse']:8.3f}  {row['patch_over_entropy']:10.3f}  "
        f"{row['encode_mb_s']:6.0f}  {row['apply_mb_s']:5.0f}  {row['back_mb_s']:5.0f}"
    )


def rounded(value: Any) -> Any:
    """Figures with five digits, whole numbers as they are."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) and not value.is_integer() else value


if __name__ == "__main__":
    pin_threads()
    sys.exit(main())
