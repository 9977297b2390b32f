"""The embedded engine: seeded sampling, turns on a cache, replay, and what it refuses."""

import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from shoal.engine.interface import Continuation, EngineRequest, ScoreRequest
from shoal.engine.native import LocalEngine
from shoal.errors import StateError
from shoal.protocol.noise import NOISES
from shoal.protocol.seed_chain import sample_seed
from tests.engine.claims import claims_of
from tests.engine.conftest import write_policy

NO_STOPS: frozenset[int] = frozenset()
STOPS = frozenset({0, 1, 2, 3})


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests change the number of threads; the next one starts with one."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


def _engine(directory: Path, threads: int = 1, dtype: str = "float32") -> LocalEngine:
    engine = LocalEngine(threads=threads, dtype=dtype)
    engine.load(directory, version=0)
    return engine


def _seed(index: int) -> bytes:
    return sample_seed(b"engine", index)


def _prompts(count: int, seed: int = 0, low: int = 3, high: int = 20) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(64) for _ in range(rng.randint(low, high))] for _ in range(count)]


def _requests(prompts: Sequence[list[int]], max_new: int = 24, stops: frozenset[int] = STOPS) -> list[EngineRequest]:
    return [EngineRequest(f"r{i}", prompt, _seed(i), max_new, stops) for i, prompt in enumerate(prompts)]


def _gaps(engine: LocalEngine, claims: Sequence[ScoreRequest], temperature: float = 1.0) -> np.ndarray:
    return np.concatenate([score.gaps_P for score in engine.score(claims, temperature)])


@pytest.mark.parametrize("family", NOISES)
def test_each_token_is_the_argmax_of_transformers_logits_plus_the_reference_noise(policy: Path, family: str) -> None:
    requests, temperature = _requests(_prompts(5), stops=NO_STOPS), 0.8
    engine = LocalEngine(threads=1, noise=family)
    engine.load(policy, version=0)
    turns = engine.extend(requests, temperature)
    assert _gaps(engine, claims_of(requests, turns), temperature).max() < 1e-4
    peer = AutoModelForCausalLM.from_pretrained(policy)
    for request, turn in zip(requests, turns, strict=True):
        start, ids = len(request.token_ids), [*request.token_ids, *turn.token_ids]
        with torch.no_grad():
            scaled_TV = peer(torch.tensor([ids])).logits[0, start - 1 : -1] / temperature
        noise_TV = NOISES[family]([request.seed] * 24, np.arange(start, len(ids)), 64)
        assert (scaled_TV + torch.from_numpy(noise_TV)).argmax(-1).tolist() == turn.token_ids
        expected = scaled_TV.log_softmax(-1)[torch.arange(24), turn.token_ids]
        assert torch.allclose(torch.tensor(turn.logprobs), expected, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_turns_on_a_cache_equal_one_prefill(family: str, tmp_path: Path) -> None:
    """Ragged openings, turns and replies; shared openings; rows that drop out, in another order."""
    engine, rng = _engine(write_policy(tmp_path / "policy", family, tied=family == "qwen2")), random.Random(1)
    talks = _prompts(12)
    talks += [list(talks[-1]) for _ in range(4)]
    written: list[list[int]] = [[] for _ in talks]
    logprobs: list[list[float]] = [[] for _ in talks]
    rows = list(range(len(talks)))
    for turn in range(6):
        requests = [EngineRequest(f"r{i}", talks[i], _seed(i), rng.randint(4, 14), STOPS) for i in rows]
        for i, made in zip(rows, engine.extend(requests, 0.9), strict=True):
            written[i] += range(len(talks[i]), len(talks[i]) + len(made.token_ids))
            logprobs[i] += made.logprobs
            talks[i] = [*talks[i], *made.token_ids, *(rng.randrange(64) for _ in range(rng.randint(1, 9)))]
        if turn >= 2:
            rows = rows[::-1][:-2]
    scores = engine.score(
        [ScoreRequest(t, w, _seed(i)) for i, (t, w) in enumerate(zip(talks, written, strict=True))], 0.9
    )
    assert sum(map(len, written)) > 300
    for claimed, score in zip(logprobs, scores, strict=True):
        assert np.abs(np.array(claimed, dtype=np.float32) - score.logprobs_P).max() < 1e-4
        assert score.gaps_P.max() < 1e-4


def test_a_second_turn_uses_the_cache_without_a_prefill(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(policy)
    requests = _requests(_prompts(3), max_new=5)
    turns = engine.extend(requests, 1.0)
    decoder = engine._loaded
    assert decoder is not None
    monkeypatch.setattr(decoder, "prefill", None)
    engine.extend(
        [r._replace(token_ids=[*r.token_ids, *t.token_ids, 9, 9]) for r, t in zip(requests, turns, strict=True)], 1.0
    )


def test_honest_rollouts_replay_without_gaps_across_batch_sizes_and_threads(policy: Path) -> None:
    prompts, worst, flipped, total = _prompts(64), 0.0, 0, 0
    for size, threads in ((64, 1), (16, 1), (1, 1), (64, 2)):
        engine = _engine(policy, threads)
        requests = _requests(prompts)
        claims = [
            claim
            for start in range(0, 64, size)
            for claim in claims_of(requests[start : start + size], engine.extend(requests[start : start + size], 1.0))
        ]
        gaps = _gaps(_engine(policy, 1), claims)
        worst, flipped, total = max(worst, float(gaps.max())), flipped + int((gaps > 0).sum()), total + len(gaps)
    assert total > 2000 and worst < 1e-4 and flipped <= total / 1000


def test_honest_bfloat16_rollouts_replay_with_few_and_small_gaps(policy: Path) -> None:
    requests = _requests(_prompts(64))
    claims = claims_of(requests, _engine(policy, dtype="bfloat16").extend(requests, 1.0))
    for verifier in (_engine(policy, dtype="bfloat16"), _engine(policy)):
        gaps = _gaps(verifier, claims)
        assert (gaps > 0).mean() < 0.03 and gaps.max() < 0.2


def test_honest_int8_rollouts_replay_as_int8_like_float32_and_not_as_float32(policy: Path) -> None:
    requests = _requests(_prompts(64))
    claims = claims_of(requests, _engine(policy, dtype="int8").extend(requests, 1.0))
    assert _gaps(_engine(policy, dtype="int8"), claims).max() < 1e-4
    undeclared = _gaps(_engine(policy), claims)
    assert 1e-3 < (undeclared > 1e-3).mean() < 0.03 and undeclared.max() < 0.5


def test_another_seed_temperature_policy_or_prompt_shows_as_gaps(policy: Path, tmp_path: Path) -> None:
    engine, requests = _engine(policy), _requests(_prompts(32))
    claims = claims_of(requests, engine.extend(requests, 1.0))
    other = _engine(write_policy(tmp_path / "other", seed=8))
    assert (_gaps(engine, claims) > 1e-3).mean() == 0
    assert (_gaps(engine, [c._replace(seed=c.seed[::-1]) for c in claims]) > 1e-3).mean() > 0.2
    assert (_gaps(engine, claims, temperature=1.5) > 1e-3).mean() > 0.03
    assert (_gaps(other, claims) > 1e-3).mean() > 0.2
    moved = [c._replace(token_ids=[(c.token_ids[0] + 1) % 64, *c.token_ids[1:]]) for c in claims]
    assert (_gaps(engine, moved) > 1e-3).mean() > 0.01


def test_a_batch_has_the_same_bits_whatever_the_engine_did_before(policy: Path) -> None:
    def play(engine: LocalEngine) -> list[Continuation]:
        requests = _requests(_prompts(20))
        first = engine.extend(requests, 1.0)
        more = [
            r._replace(token_ids=[*r.token_ids, *t.token_ids, 7]) for r, t in zip(requests, first, strict=True) if t
        ]
        return first + engine.extend(more[::2], 1.0)

    fresh, used = _engine(policy), _engine(policy)
    used.extend([EngineRequest(f"other{i}", p, _seed(i), 9, STOPS) for i, p in enumerate(_prompts(33, seed=5))], 1.0)
    assert play(fresh) == play(used)


def test_rollouts_of_a_group_share_their_opening_and_then_differ(policy: Path) -> None:
    openings = [prompt for prompt in _prompts(4, low=10) for _ in range(8)]
    requests = _requests(openings)
    together = _engine(policy).extend(requests, 1.0)
    for request, turn in zip(requests, together, strict=True):
        (alone,) = _engine(policy).extend([request], 1.0)
        assert alone.token_ids == turn.token_ids
        assert np.allclose(alone.logprobs, turn.logprobs, atol=1e-4)
    assert len({tuple(turn.token_ids) for turn in together}) > 24


def test_a_turn_ends_with_its_first_stop_token_or_at_its_own_limit(policy: Path) -> None:
    prompts = _prompts(40)
    requests = [
        EngineRequest(f"r{i}", prompt, _seed(i), 1 + i, STOPS if i % 2 else frozenset({50}))
        for i, prompt in enumerate(prompts)
    ]
    for request, turn in zip(requests, _engine(policy).extend(requests, 1.0), strict=True):
        ends = [token in request.stop_ids for token in turn.token_ids]
        assert not any(ends[:-1])
        assert ends[-1] or len(turn.token_ids) == request.max_new
        assert len(turn.logprobs) == len(turn.token_ids)


def test_a_conversation_that_was_changed_is_read_again_from_its_beginning(policy: Path) -> None:
    engine, requests = _engine(policy), _requests(_prompts(6))
    engine.extend(requests, 1.0)
    changed = [request._replace(token_ids=[5, *request.token_ids]) for request in requests]
    assert engine.extend(changed, 1.0) == _engine(policy).extend(changed, 1.0)


def test_a_version_is_not_loaded_while_the_engine_is_at_work(policy: Path) -> None:
    engine = _engine(policy)
    with engine._at_work:
        loading = threading.Thread(target=engine.load, args=(policy, 1))
        loading.start()
        loading.join(0.1)
        assert engine.version == 0
    loading.join(30)
    assert engine.version == 1


def test_forgotten_rollouts_leave_nothing_behind(policy: Path) -> None:
    engine, requests = _engine(policy), _requests(_prompts(6))
    engine.extend(requests, 1.0)
    assert engine._batches
    engine.forget([request.rollout for request in requests] + ["never seen"])
    assert not engine._batches
    engine.extend(requests, 1.0)
    engine.load(policy, version=3)
    assert not engine._batches and engine.version == 3


def test_score_gives_the_hidden_state_that_predicted_each_token(policy: Path) -> None:
    engine, requests = _engine(policy), _requests(_prompts(5))
    claims = claims_of(requests, engine.extend(requests, 1.0))
    peer = AutoModelForCausalLM.from_pretrained(policy)
    for claim, score in zip(claims, engine.score(claims, 1.0, hidden=True), strict=True):
        with torch.no_grad():
            states_TD = peer.model(torch.tensor([claim.token_ids])).last_hidden_state[0]
        expected = states_TD[[position - 1 for position in claim.policy_positions]]
        assert score.hidden_PD is not None and score.hidden_PD.dtype == np.float32
        assert np.allclose(score.hidden_PD, expected.numpy(), atol=1e-4)


def test_scores_keep_the_order_of_requests_and_do_not_depend_on_the_batch(policy: Path) -> None:
    engine, requests = _engine(policy), _requests([p for p in _prompts(5) for _ in range(3)])
    claims = claims_of(requests, engine.extend(requests, 1.0))
    random.Random(3).shuffle(claims)
    for claim, score in zip(claims, engine.score(claims, 1.0), strict=True):
        (alone,) = engine.score([claim], 1.0)
        assert np.allclose(alone.logprobs_P, score.logprobs_P, atol=1e-5)
        assert np.allclose(alone.gaps_P, score.gaps_P, atol=1e-4)


def test_a_rollout_without_policy_tokens_has_an_empty_score(policy: Path) -> None:
    (score,) = _engine(policy).score([ScoreRequest([1, 2, 3], [], _seed(0))], 1.0)
    assert score.logprobs_P.shape == score.gaps_P.shape == (0,)


@pytest.mark.parametrize("prompts", [[[7]], [[7], [8], [7]], [[7], [8, 9, 10, 11], [8, 9, 10, 11], [7]]])
def test_an_opening_may_be_a_single_token(prompts: list[list[int]], policy: Path) -> None:
    engine, requests = _engine(policy), _requests(prompts, stops=NO_STOPS)
    turns = engine.extend(requests, 1.0)
    again = [r._replace(token_ids=[*r.token_ids, *t.token_ids, 5]) for r, t in zip(requests, turns, strict=True)]
    later = engine.extend(again, 1.0)
    assert _gaps(engine, claims_of(requests, turns)).max() < 1e-4
    assert _gaps(engine, claims_of(again, later)).max() < 1e-4


def test_no_requests_give_no_results(policy: Path) -> None:
    engine = _engine(policy)
    assert engine.extend([], 1.0) == [] and engine.score([], 1.0) == []


@pytest.mark.parametrize(
    ("token_ids", "max_new", "says"),
    [([1] * 500, 13, "500 tokens may grow by 13"), ([], 4, "empty"), ([64], 4, r"0\.\.63"), ([-1], 4, r"0\.\.63")],
)
def test_what_the_policy_cannot_read_is_refused(policy: Path, token_ids: list[int], max_new: int, says: str) -> None:
    engine = _engine(policy)
    with pytest.raises(StateError, match=says):
        engine.extend([EngineRequest("r", token_ids, _seed(0), max_new, STOPS)], 1.0)


_WORKER = """
import re, sys
from pathlib import Path
import httpx
from shoal.engine.interface import EngineRequest
from shoal.engine.native import LocalEngine
engine = LocalEngine(threads=1)
engine.load(Path(sys.argv[1]), 0)
for block in range(3):
    names = [f"{block}-{i}" for i in range(64)]
    engine.extend([EngineRequest(n, list(range(32)), bytes([i]) * 32, 64, frozenset()) for i, n in enumerate(names)], 1.0)
    engine.forget(names)
heavy = [name for name in ("transformers", "torch._inductor", "pandas") if name in sys.modules]
peak_kb = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
print(int(peak_kb) // 1024, heavy)
"""


def test_a_worker_with_the_engine_stays_below_350_MB_and_does_not_import_transformers(tmp_path: Path) -> None:
    from shoal.config import TinyPolicy, child_environment
    from shoal.models.random_model import make_tiny

    make_tiny(TinyPolicy(), tmp_path / "policy", seed=0, dtype="float32")
    result = subprocess.run(
        [sys.executable, "-c", _WORKER, str(tmp_path / "policy")],
        capture_output=True, text=True, env=child_environment(1), check=True, timeout=120,
    )  # fmt: skip
    megabytes, _, heavy = result.stdout.strip().partition(" ")
    assert heavy == "[]" and int(megabytes) <= 350


def test_rows_that_end_early_are_dropped_and_join_their_batch_again_in_the_next_turn(policy: Path) -> None:
    """Rows that end early are dropped, more than once. The second turn reads what all rows wrote."""
    engine, prompts = _engine(policy), _prompts(24)
    limits = [90 if i == 5 else 30 if i % 8 == 0 else 2 for i in range(24)]
    requests = [
        EngineRequest(f"r{i}", p, _seed(i), n, NO_STOPS) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))
    ]
    turns = engine.extend(requests, 1.0)
    assert [len(turn.token_ids) for turn in turns] == limits
    assert _gaps(engine, claims_of(requests, turns)).max() < 1e-4
    again = [r._replace(token_ids=[*r.token_ids, *t.token_ids, 9]) for r, t in zip(requests, turns, strict=True)]
    assert _gaps(engine, claims_of(again, engine.extend(again, 1.0))).max() < 1e-4
