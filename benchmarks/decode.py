"""Tokens per second of our engine beside `transformers.generate`: same weights, same prompts, same process, one thread.

    python benchmarks/decode.py [--batches 1,64,256] [--repeats 7]

Both sample at temperature 1 from the same Qwen3-style policy (width 128, 4 layers, 4 heads on 2, mlp 384, vocabulary 64):
prompts of 32 tokens, exactly 64 new ones, tokens and the log-prob of each returned. The peer runs as a careful user would
set it up: `generate(do_sample=True, top_k=0, use_cache=True)` in inference mode, end token disabled; it is timed with
and without returning logits for log-probs, and the better figure counts. Both have the environment of our roles (one
thread, freed memory kept), which speeds up both.

Two loads: `grouped`, as RL asks for (16 rollouts of each prompt: ours reads a prompt once, the peer 16 times), and
`distinct` (every prompt another one). The ways alternate; figures are medians of CPU-seconds, since wall time is worthless
on a shared machine. The last line is JSON.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.measure import arguments, cpu_ms, numbers, pin_threads, report
from shoal.config import TinyPolicy
from shoal.engine.interface import EngineRequest
from shoal.engine.native import LocalEngine
from shoal.models.random_model import make_tiny

PROMPT, NEW, VOCABULARY, GROUP = 32, 64, 64, 16


def main() -> None:
    """Compare at each batch size, print a line for each load, and all figures as JSON at the end."""
    parser = arguments(__doc__)
    parser.add_argument("--batches", type=numbers, default=[1, 64, 256])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "policy"
        make_tiny(TinyPolicy(), directory, seed=0, dtype="float32")
        engine = LocalEngine(threads=1)
        engine.load(directory, version=0)
        peer = AutoModelForCausalLM.from_pretrained(directory).eval()
        peer.generation_config.eos_token_id = None  # else it replaces the one that we leave out
    figures: dict[str, float] = {}
    for batch in options.batches:
        for load in ("grouped", "distinct") if batch >= GROUP else ("distinct",):
            figures |= compare(engine, peer, batch, load, options.repeats)
    report("decode", {"threads": 1, "prompt": PROMPT, "new": NEW, "group": GROUP, **figures})


def compare(engine: LocalEngine, peer: torch.nn.Module, batch: int, load: str, repeats: int) -> dict[str, float]:
    """Medians of alternating runs at one batch size, in tokens per CPU-second, and their ratio."""
    prompts = torch.randint(6, VOCABULARY, (batch, PROMPT), generator=torch.Generator().manual_seed(batch))
    if load == "grouped":
        prompts = prompts[torch.arange(batch) // GROUP * GROUP]
    ways: dict[str, Callable[[], None]] = {
        "engine": lambda: ours(engine, prompts),
        "generate": lambda: theirs(peer, prompts, logits=False),
        "generate_logprobs": lambda: theirs(peer, prompts, logits=True),
    }
    speed = {name: 1000 * batch * NEW / taken for name, taken in cpu_ms(repeats, ways).items()}
    ratio = speed["engine"] / max(speed["generate"], speed["generate_logprobs"])
    print(
        f"batch {batch:4d} {load:8s}  engine {speed['engine']:7.0f} tokens per CPU-second  generate "
        f"{speed['generate']:7.0f}  with log-probs {speed['generate_logprobs']:7.0f}  ratio {ratio:.2f}",
        flush=True,
    )
    named = {f"{name}_{load}_b{batch}_tokens_per_cpu_s": round(figure) for name, figure in speed.items()}
    return named | {f"ratio_{load}_b{batch}": round(ratio, 2)}


def ours(engine: LocalEngine, prompts: torch.Tensor) -> None:
    """One block of rollouts, forgotten at the end."""
    requests = [
        EngineRequest(str(row), tokens, row.to_bytes(32, "little"), NEW, frozenset())
        for row, tokens in enumerate(prompts.tolist())
    ]
    turns = engine.extend(requests, 1.0)
    assert all(len(turn.token_ids) == len(turn.logprobs) == NEW for turn in turns)
    engine.forget([request.rollout for request in requests])


def theirs(peer: torch.nn.Module, prompts: torch.Tensor, logits: bool) -> None:
    """The same by `transformers.generate`."""
    settings = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=NEW,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
        output_logits=logits,
        return_dict_in_generate=logits,
    )
    with torch.inference_mode():
        out = peer.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=settings)
        if logits:
            written = out.sequences[:, PROMPT:]
            torch.stack(out.logits, 1).log_softmax(-1).gather(-1, written.unsqueeze(-1))
            out = out.sequences
    assert out.shape[1] == PROMPT + NEW


if __name__ == "__main__":
    pin_threads()
    main()
