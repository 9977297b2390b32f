"""Tokens per CPU-second of our engine beside `transformers.generate`, for policies of real shapes.

Called by `benchmarks/real_models.py`. As `benchmarks/decode.py` does: same weights and prompts, one process, one
thread, float32, both return tokens and log-probs, ways alternate, medians. The peer is timed with and without its
logits, and the better figure counts. `grouped` has 16 rollouts of each prompt, `distinct` a prompt for each.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.real.kept import Kept
from shoal.engine.interface import EngineRequest
from shoal.engine.native import LocalEngine

GROUP = 16


class Load(NamedTuple):
    """Tokens of a prompt, tokens written for it, and repeats."""

    prompt: int
    new: int
    repeats: int


def measure(directory: Path, shape: str, batches: Sequence[int], load: Load, kept: Kept) -> Iterator[dict[str, Any]]:
    """A line and a row of figures for each batch size and load."""
    sides = _Sides(directory)
    for batch in batches:
        for kind in ("grouped", "distinct"):
            found = kept.result(
                f"decode {shape} {kind} {batch}",
                load._asdict(),
                lambda batch=batch, kind=kind: _compared(sides, batch, kind, load),  # type: ignore[misc]
            )
            print(
                f"decode, batch {batch:3} {kind:8}: engine {found['engine_tokens_per_cpu_s']:7.1f} tokens per CPU-second, "
                f"generate {found['generate_tokens_per_cpu_s']:7.1f}, with log-probs "
                f"{found['generate_logprobs_tokens_per_cpu_s']:7.1f}: ratio {found['ratio']:.2f}",
                flush=True,
            )
            yield {"shape": shape, "batch": batch, "load": kind} | found


class _Sides:
    """Both sides over the same policy, opened when they are first needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @cached_property
    def engine(self) -> LocalEngine:
        engine = LocalEngine(threads=1)
        engine.load(self._directory, version=0)
        return engine

    @cached_property
    def peer(self) -> Any:
        from transformers import AutoModelForCausalLM

        peer = AutoModelForCausalLM.from_pretrained(self._directory, dtype=torch.float32).eval()
        peer.generation_config.eos_token_id = None
        return peer


def _compared(sides: _Sides, batch: int, kind: str, load: Load) -> dict[str, Any]:
    engine, peer = sides.engine, sides.peer
    vocabulary = peer.config.vocab_size
    prompts = torch.randint(262, vocabulary, (batch, load.prompt), generator=torch.Generator().manual_seed(batch))
    if kind == "grouped":
        prompts = prompts[torch.arange(batch) // GROUP * GROUP]
    ways: dict[str, Callable[[], None]] = {
        "engine": lambda: _ours(engine, prompts, load.new),
        "generate": lambda: _theirs(peer, prompts, load.new, logits=False),
        "generate_logprobs": lambda: _theirs(peer, prompts, load.new, logits=True),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(load.repeats):
        for name, way in ways.items():
            start = time.process_time()
            way()
            taken[name].append(time.process_time() - start)
    speed = {name: batch * load.new / statistics.median(seconds) for name, seconds in taken.items()}
    ratio = speed["engine"] / max(speed["generate"], speed["generate_logprobs"])
    return {f"{name}_tokens_per_cpu_s": round(value, 1) for name, value in speed.items()} | {"ratio": round(ratio, 3)}


def _ours(engine: LocalEngine, prompts: torch.Tensor, new: int) -> None:
    requests = [
        EngineRequest(str(row), tokens, row.to_bytes(32, "little"), new, frozenset())
        for row, tokens in enumerate(prompts.tolist())
    ]
    turns = engine.extend(requests, 1.0)
    assert all(len(turn.token_ids) == len(turn.logprobs) == new for turn in turns)
    engine.forget([request.rollout for request in requests])


def _theirs(peer: Any, prompts: torch.Tensor, new: int, logits: bool) -> None:
    from transformers import GenerationConfig

    settings = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=new, eos_token_id=None, pad_token_id=0, use_cache=True,
        output_logits=logits, return_dict_in_generate=logits,
    )  # fmt: skip
    with torch.inference_mode():
        out = peer.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=settings)
        if logits:
            torch.stack(out.logits, 1).log_softmax(-1).gather(-1, out.sequences[:, prompts.shape[1] :].unsqueeze(-1))
            out = out.sequences
    assert out.shape[1] == prompts.shape[1] + new
