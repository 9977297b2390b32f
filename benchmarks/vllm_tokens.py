"""What vLLM samples for us: is honest work accepted, are cheats caught, and how many tokens a second are left of vLLM's.

    .venv-vllm/bin/python benchmarks/vllm_tokens.py [--rollouts 2000] [--repeats 5] [--native 128] [--policy DIR]

`make vllm` makes that environment, with a build for CPUs; on a GPU machine, use one with vLLM for its GPU. Honest: random
policies whose head is multiplied until a token has an entropy of 0.3 or 1 nats play `recipes/vowels.py`; our engine and
transformers replay them three at a time, with bounds that were measured on other rollouts (`real/sampled.py`). Speed: one
process, same weights and prompts. `plain` is vLLM without seeds, `native` draws with the seeds of a family that its own
sampler makes, `processor` adds our noise. The ways alternate; medians of wall time. All return log-probs.

On CPUs vLLM's sampler makes no family of ours unless Triton has a backend for CPUs, so `native` is measured in a second
process in which Triton is interpreted, beside the same vLLM without seeds: some thousand times slower, so only their ratio
means anything. One line of JSON at the end.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

GROUP, PROMPT, TEMPERATURE = 16, 32, 0.9
INTERPRETED = {"batch": 8, "new": 8, "repeats": 5}
"""Settings of the speed measurement under the interpreter."""


def main() -> None:
    """Honest work, cheats, speed; or, with --interpreted, the part for which Triton is interpreted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", type=Path, help="for the speed; by default one of 4.9M parameters and 64 tokens")
    parser.add_argument("--rollouts", type=int, default=2000, help="honest ones that are replayed")
    parser.add_argument("--native", type=int, default=128, help="of them as many again are drawn by vLLM's own sampler")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--interpreted", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.interpreted:
        from tests.engine.interpreted import interpret_triton

        interpret_triton()
        asked.batch, asked.new, asked.repeats = INTERPRETED.values()
    from benchmarks.real import sampled  # imports torch
    from shoal.protocol.noise import MURMUR_32, PHILOX

    with tempfile.TemporaryDirectory() as scratch:
        policy = asked.policy or _policy(Path(scratch) / "policy")
        draws = _engine(MURMUR_32)
        native = draws.facts.implementation.endswith("own-seeds")
        if asked.interpreted:
            assert native, "the interpreted sampler does not make its family"
            speeds = compare(policy, {"plain": Plain(draws.facts), "native": draws}, asked)
            print(json.dumps({"speed": speeds, "work": _drawn(Path(scratch), asked)}))
            return
        engines = {"plain": Plain(draws.facts), "processor": _engine(PHILOX)} | ({"native": draws} if native else {})
        speeds = compare(policy, engines, asked)
        sampler = engines["processor"]
        work = list(sampled.measure(Path(scratch), _engine(PHILOX), PHILOX, asked.rollouts, with_cheats=True))
        other = {"speed": speeds, "work": _drawn(Path(scratch), asked)} if native else _interpreted(asked)
    drawn, ratios = other["work"], other["speed"]
    print(
        json.dumps({
            "benchmark": "vllm_tokens", "engine": sampler.facts.implementation, "device": sampler.facts.device,
            **{f"{name}_tokens_per_s": round(speed, 1) for name, speed in speeds.items()},
            "processor_ratio": round(speeds["processor"] / speeds["plain"], 3),
            "native_ratio": round(ratios["native"] / ratios["plain"], 3), "native_interpreted": not native,
            "rollouts": sum(one["rollouts"] for one in work),
            "refused_by_ours": sum(one["refused"]["ours"] for one in work),
            "refused_by_transformers": sum(one["refused"]["transformers"] for one in work),
            "native_rollouts": sum(one["rollouts"] for one in drawn),
            "native_refused": sum(sum(one["refused"].values()) for one in drawn),
            "cheats_differ": sum(row["differ"] for one in work for row in one["cheats"].values()),
            "cheats_refused": sum(row["refused"] for one in work for row in one["cheats"].values()),
            "work": work, "native_work": drawn,
        })
    )  # fmt: skip


def _engine(noise: str) -> Any:
    from shoal.engine.vllm.engine import VllmEngine
    from shoal.models.device import AUTO

    return VllmEngine(threads=1, device=AUTO, noise=noise)


def _drawn(scratch: Path, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Honest work whose tokens vLLM draws with its own seeds."""
    from benchmarks.real import sampled
    from shoal.protocol.noise import MURMUR_32

    if not asked.native:
        return []
    return list(sampled.measure(scratch, _engine(MURMUR_32), MURMUR_32, asked.native, with_cheats=False))


def compare(policy: Path, engines: dict[str, Any], asked: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of each way, medians of alternating runs."""
    from shoal.engine.interface import EngineRequest
    from shoal.protocol.seed_chain import sample_seed

    requests = [
        EngineRequest(
            f"r{i}",
            [1 + (i // GROUP + j) % 60 for j in range(PROMPT)],
            sample_seed(b"bench", i),
            asked.new,
            frozenset(),
        )
        for i in range(asked.batch)
    ]
    for engine in engines.values():
        engine.load(policy, 0)
    took: dict[str, list[float]] = {name: [] for name in engines}
    for round_ in range(asked.repeats + 1):
        for name, engine in engines.items():
            began = time.perf_counter()
            engine.extend(requests, TEMPERATURE)
            if round_:  # the first warms up
                took[name].append(time.perf_counter() - began)
    speeds = {name: asked.batch * asked.new / statistics.median(times) for name, times in took.items()}
    for name, speed in speeds.items():
        print(f"{name:>9}: {speed:8.0f} tokens/s, {speed / speeds['plain']:.2f} times plain", flush=True)
    return speeds


class Plain:
    """vLLM as it is, opened as we open it: samples without seeds, and returns log-probs."""

    def __init__(self, facts: Any) -> None:
        self.facts = facts

    def load(self, directory: Path, version: int) -> None:
        from vllm import LLM

        from shoal.config import settle_vllm_runner
        from shoal.engine.vllm.engine import arguments

        own_seeds = self.facts.implementation.endswith("own-seeds")
        settle_vllm_runner(own_seeds)
        self._llm = LLM(model=str(directory), logprobs_mode="processed_logprobs", **arguments(self.facts))

    def extend(self, requests: list[Any], temperature: float) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=temperature, max_tokens=requests[0].max_new, ignore_eos=True, logprobs=0, detokenize=False
        )
        self._llm.generate([{"prompt_token_ids": list(one.token_ids)} for one in requests], params, use_tqdm=False)


def _policy(directory: Path) -> Path:
    from shoal.config import TinyPolicy
    from shoal.models.random_model import make_tiny

    tiny = TinyPolicy(width=256, layers=6, heads=4, kv_heads=2, mlp_width=768, max_positions=256)
    make_tiny(tiny, directory, seed=0, dtype="float32")
    return directory


def _interpreted(asked: argparse.Namespace) -> dict[str, Any]:
    """What the second process measured."""
    print("Triton interpreted:", flush=True)
    child = subprocess.run(
        [sys.executable, __file__, "--interpreted", "--native", str(asked.native)],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    *said, last = child.stdout.strip().splitlines()
    print("\n".join(said), flush=True)
    return dict(json.loads(last))


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main()
