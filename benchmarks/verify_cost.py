"""What verification costs: CPU of the checks beside generation and beside a forward pass, and of seeded sampling.

Run: `OMP_NUM_THREADS=1 python benchmarks/verify_cost.py [--repeats 15] [--vocabularies 64,1024,4096,32768,151936]`.

The checks: a worker plays a block of the demo's recipes, and of the long game of `detection.py` (66 policy tokens), with
the committed policies; a validator judges the same bytes again and again. `forward` is one prefill of the same tokens
with their noise; `steady` is what a trusted worker's blocks cost: every group without the model, one in twenty with it,
and one submission in twenty judged a second time.

Seeded sampling: the engine decodes 32 tokens of each row as it is, and with softmax, `torch.multinomial` and the log of the
drawn probability in the place of noise, argmax and log-softmax; by two sizes of policy. Ways alternate; figures are
medians of CPU-seconds. One line of JSON at the end.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.detect.policies import ARGS, SAMPLING, Rounds, copied
from benchmarks.measure import ROOT, arguments, cpu_ms, numbers, pin_threads, report
from shoal.algos.noise.philox import gumbel
from shoal.chat.renderer import Renderer
from shoal.config import BOUNDS, SamplingConfig, TinyPolicy, load_run
from shoal.engine.interface import EngineRequest
from shoal.engine.native import LocalEngine
from shoal.env import Env
from shoal.envs.load import load_env
from shoal.envs.play_episodes import play_block
from shoal.envs.replay import replay_group
from shoal.ledger.constants import LAW
from shoal.models.checkpoint import save_policy
from shoal.models.random_model import initialise, make_tiny, tiny_spec
from shoal.models.transformer import Transformer
from shoal.protocol.encoding import digest, domain_hash
from shoal.protocol.messages import Block, Check, Lease, Rules, Sampling, Slot
from shoal.verification.check_context import Tools, score_requests
from shoal.verification.encode_submission import encode_submission
from shoal.verification.verify import verify_submission

GROUPS, GROUP_SIZE = 4, 16
STEADY_RATE = 0.05
SIZES = {"tiny": TinyPolicy(), "small": TinyPolicy(width=512, layers=8, heads=8, kv_heads=4, mlp_width=1536)}
"""0.8 and 25 million weights beside embedding and head."""

PROMPT, NEW = 32, 32


def main() -> None:
    """Checks, then sampling."""
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--vocabularies", type=numbers, default=[64, 1024, 4096, 32768, 151936])
    options = parser.parse_args()
    torch.set_num_threads(1)
    checks = {}
    for name in ("wordle", "arithmetic"):
        run = load_run(ROOT / "recipes" / f"{name}.toml", [])
        envs = {spec.label: load_env(spec.name, spec.args) for spec in run.envs}
        checks[name] = measure(name, ROOT / "recipes" / f"{name}-start", envs, run.sampling, options.repeats)
    with tempfile.TemporaryDirectory() as scratch:
        policy = copied("wordle-start", Path(scratch))
        knobs = SamplingConfig(max_turn_tokens=SAMPLING.max_turn_tokens, max_tokens=SAMPLING.max_tokens)
        checks["rounds"] = measure("rounds", policy, {"rounds": Rounds(ARGS)}, knobs, options.repeats)
    seeded = {
        f"{size}_{vocabulary}": seeded_sampling(size, vocabulary, max(3, options.repeats // 3))
        for size in SIZES
        for vocabulary in options.vocabularies
    }
    head = {"rollouts": GROUPS * GROUP_SIZE}
    report("verify_cost", {**head, **checks, "seeded_sampling": seeded})


# --- the checks ---


def measure(name: str, policy: Path, envs: Mapping[str, Env], knobs: SamplingConfig, repeats: int) -> dict[str, float]:
    """CPU milliseconds of making, checking and auditing one block."""
    engine, renderer = LocalEngine(threads=1), Renderer.from_directory(policy)
    engine.load(policy, 0)
    sampling = Sampling(knobs.temperature, knobs.max_turn_tokens, knobs.max_tokens)
    slots = tuple(Slot(i, domain_hash("bench", bytes([i])).hex(), name, i) for i in range(GROUPS))
    lease = Lease("lease", "worker", 0, (Block(0, slots),), sampling, 0.0, 60.0)
    rules = Rules(GROUP_SIZE, GROUPS, GROUPS, 0, 1, 60.0, 1.0, "float32", BOUNDS)
    tools = Tools(
        SimpleNamespace(run="run", rules=rules),  # type: ignore[arg-type]
        envs,
        renderer,
        replay_group,
        "float32",
        lambda requests: engine.score(requests, sampling.temperature),
    )

    def play() -> list:
        return play_block(engine, renderer, envs, lease.blocks[0], GROUP_SIZE, sampling)

    groups = play()
    body = encode_submission("run", lease, groups, engine.facts)
    requests = [r for slot, group in zip(slots, groups, strict=True) for r in score_requests(slot, group)]
    free = Check(digest(body), lease, (), 60.0)
    audit = Check(digest(body), lease, tuple(range(GROUPS)), 60.0)
    assert all(group.outcome == "accept" for group in verify_submission(body, audit, tools).groups)

    ways = {
        "generate": play,
        "forward": lambda: engine.score(requests, sampling.temperature),
        "without": lambda: verify_submission(body, free, tools),
        "audited": lambda: verify_submission(body, audit, tools),
    }
    generate, forward, without, audited = cpu_ms(repeats, ways).values()
    tokens = sum(len(request.token_ids) for request in requests)
    written = sum(len(request.policy_positions) for request in requests)
    steady = (1 + LAW.recheck_rate) * (without + STEADY_RATE * (audited - without))
    print(
        f"{name:<11}{len(requests)} rollouts, {tokens} tokens, {written} by the policy; CPU ms: generate {generate:.0f}, "
        f"one forward pass {forward:.1f}, model-free checks {without:.1f} ({without / generate:.1%} of generation), with "
        f"audit {audited:.1f} ({(audited - without) / forward:.2f} passes), steady {steady / generate:.1%}",
        flush=True,
    )
    return {
        "tokens": tokens,
        "policy_tokens": written,
        "policy_tokens_per_rollout": round(written / len(requests), 1),
        "body_bytes_per_token": round(len(body) / tokens, 2),
        "model_free_us_per_rollout": round(1000 * without / len(requests), 1),
        "forward_us_per_rollout": round(1000 * forward / len(requests), 1),
        "audit_over_forward": round((audited - without) / forward, 3),
        "model_free_over_generate": round(without / generate, 4),
        "audited_over_generate": round(audited / generate, 4),
        "steady_over_generate": round(steady / generate, 4),
    }


# --- seeded sampling ---


def seeded_sampling(size: str, vocabulary: int, repeats: int) -> dict[str, float]:
    """Decoding with the lease's noise over decoding with softmax and multinomial, and what the noise alone takes."""
    batch = 64 if vocabulary <= 4096 else 16 if vocabulary <= 32768 else 4
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = Path(scratch) / "tokenizer"
        make_tiny(TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=16), tokenizer, 0, "float32")
        model = Transformer(replace(tiny_spec(SIZES[size]), vocab_size=vocabulary))
        initialise(model, 0)
        save_policy(model, Path(scratch) / "policy", "float32", tokenizer_from=tokenizer)
        engine = LocalEngine(threads=1)
        engine.load(Path(scratch) / "policy", 0)
    prompt = torch.randint(6, 64, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    requests = [EngineRequest(str(row), prompt, row.to_bytes(32, "little"), NEW, frozenset()) for row in range(batch)]

    def decode() -> None:
        engine.extend(requests, 1.0)
        engine.forget([request.rollout for request in requests])

    def decode_multinomial() -> None:
        with patch("shoal.engine.sampling._write_some", _write_some_multinomial):
            decode()

    words_N4, positions_N = torch.zeros(batch, 4, dtype=torch.int64), torch.arange(batch)
    ways = {
        "seeded": decode,
        "multinomial": decode_multinomial,
        "noise": lambda: [gumbel(words_N4, positions_N, vocabulary) for _ in range(NEW)],
    }
    ours, theirs, noise = cpu_ms(repeats, ways).values()
    print(
        f"{size:<6}vocabulary {vocabulary:>6}, batch {batch:>2}: CPU ms a token of each row: seeded {ours / NEW:.2f}, "
        f"softmax + multinomial {theirs / NEW:.2f}, over by {ours / theirs - 1:+.1%}; noise alone {noise / NEW:.2f}",
        flush=True,
    )
    return {
        "batch": batch,
        "seeded_ms": round(ours / NEW, 3),
        "multinomial_ms": round(theirs / NEW, 3),
        "over": round(ours / theirs - 1, 4),
        "noise_ms": round(noise / NEW, 3),
    }


def _write_some_multinomial(
    decoder, cache, rows, hidden_BD: Tensor, written: int, longest: int, temperature: float, family: object
) -> tuple[Tensor, Tensor, Tensor]:
    """In the place of the engine's: all remaining tokens, drawn by torch's own generator."""
    steps = longest - written
    rope_KB = decoder.rope(rows.positions_B + torch.arange(written, longest)[:, None])
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    for step in range(steps):
        probability_BV = decoder.logits(hidden_BD).div_(temperature).softmax(-1)
        drawn_B1 = torch.multinomial(probability_BV, 1)
        tokens.append(drawn_B1.squeeze(-1))
        logprobs.append(probability_BV.gather(-1, drawn_B1).squeeze(-1).log())
        rows.note(tokens[-1], written + step + 1)
        if step + 1 < steps:
            hidden_BD = decoder.extend(tokens[-1][:, None], rope_KB[step], cache)
    return torch.stack(tokens), torch.stack(logprobs), hidden_BD


if __name__ == "__main__":
    pin_threads()
    main()
