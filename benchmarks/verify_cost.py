"""What verification costs: CPU of the model-free checks for each rollout, and of an audit against its one forward pass.

Run: `OMP_NUM_THREADS=1 python benchmarks/verify_cost.py`. A worker plays blocks of Wordle and arithmetic with the
demo's policy, untrained; a validator judges the same bytes again and again. One line of JSON at the end.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from shoal.config import SamplingConfig, TinyPolicy, VerifyConfig
from shoal.engine.base import ScoreRequest
from shoal.engine.local import LocalEngine
from shoal.envs.arithmetic import environment as arithmetic
from shoal.envs.play import play_block
from shoal.envs.replay import replay
from shoal.envs.wordle import environment as wordle
from shoal.policy.render import Renderer
from shoal.policy.tiny import make_tiny
from shoal.proofs.commit import commit
from shoal.proofs.context import Tools
from shoal.proofs.verify import verify_submission
from shoal.protocol.randomness import sample_seed
from shoal.protocol.types import Block, Check, Lease, Sampling, Slot
from shoal.protocol.wire import digest, domain_hash

GROUPS, GROUP_SIZE, REPEATS = 4, 16, 15


def main() -> None:
    """Print the figures of both environments."""
    with tempfile.TemporaryDirectory() as directory:
        policy = Path(directory) / "policy"
        make_tiny(TinyPolicy(), policy, 0, "float32")
        engine = LocalEngine(threads=1)
        engine.load(policy, 0)
        figures = {name: measure(name, engine, Renderer.from_directory(policy)) for name in ("wordle", "arithmetic")}
    print(json.dumps({"benchmark": "verify_cost", "rollouts": GROUPS * GROUP_SIZE, **figures}))


def measure(name: str, engine: LocalEngine, renderer: Renderer) -> dict[str, float]:
    """CPU milliseconds of making, checking and auditing one block."""
    envs = {"wordle": wordle(), "arithmetic": arithmetic()}
    knobs, verify = SamplingConfig(), VerifyConfig()
    sampling = Sampling(knobs.temperature, knobs.max_turn_tokens, knobs.max_tokens)
    slots = tuple(Slot(i, domain_hash("bench", bytes([i])).hex(), name, i) for i in range(GROUPS))
    lease = Lease("lease", "worker", 0, (Block(0, slots),), sampling, 0.0, 60.0)
    bounds = {key: getattr(verify, key) for key in ("logprob_bound", "gap_bound", "max_flipped", "mean_gap_bound")}
    info = SimpleNamespace(run="run", rules=SimpleNamespace(group_size=GROUP_SIZE, **bounds))
    tools = Tools(info, envs, renderer, replay, lambda requests: engine.score(requests, sampling.temperature))  # type: ignore[arg-type]

    groups = play_block(engine, renderer, envs, lease.blocks[0], GROUP_SIZE, sampling)
    body = commit("run", lease, groups, engine.facts)
    requests = [
        ScoreRequest(
            rollout.tokens_T().tolist(),
            rollout.author_T().nonzero()[0].tolist(),
            sample_seed(bytes.fromhex(slot.seed), index),
        )
        for slot, group in zip(slots, groups, strict=True)
        for index, rollout in enumerate(group.rollouts)
    ]
    free = Check(digest(body), lease, (), 60.0)
    audit = Check(digest(body), lease, tuple(range(GROUPS)), 60.0)
    assert all(group.outcome == "accept" for group in verify_submission(body, audit, tools).groups)

    generate = cpu_ms(lambda: play_block(engine, renderer, envs, lease.blocks[0], GROUP_SIZE, sampling))
    forward = cpu_ms(lambda: engine.score(requests, sampling.temperature))
    without = cpu_ms(lambda: verify_submission(body, free, tools))
    audited = cpu_ms(lambda: verify_submission(body, audit, tools))
    tokens = sum(len(request.token_ids) for request in requests)
    print(
        f"{name}: {len(requests)} rollouts, {tokens} tokens, CPU ms: generate {generate:.0f}, one forward pass "
        f"{forward:.1f}, model-free checks {without:.1f}, with audit {audited:.1f}"
    )
    return {
        "tokens": tokens,
        "body_bytes_per_token": round(len(body) / tokens, 2),
        "model_free_us_per_rollout": round(1000 * without / len(requests), 1),
        "forward_us_per_rollout": round(1000 * forward / len(requests), 1),
        "audit_over_forward": round((audited - without) / forward, 2),
        "model_free_over_generate": round(without / generate, 4),
        "audited_over_generate": round(audited / generate, 4),
    }


def cpu_ms(work: Callable[[], object]) -> float:
    """Median CPU milliseconds of the process over some repeats."""
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        work()
        times.append(1000 * (time.process_time() - started))
    return median(times)


if __name__ == "__main__":
    main()
