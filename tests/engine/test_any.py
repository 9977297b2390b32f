"""Policies of any architecture: the engine and the learner against transformers, and what is refused."""

import functools
import inspect
import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.config import SamplingConfig, TrainConfig
from shoal.engine.hf import TransformersEngine
from shoal.engine.interface import Continuation, EngineRequest, ScoreRequest
from shoal.engine.native import LocalEngine
from shoal.engine.open import EngineSpec, kind_for, open_engine
from shoal.errors import StateError
from shoal.models.checkpoint import demand_weights, find_tensors, save_policy, snapshot
from shoal.models.hf_model import HFModel, load_any
from shoal.models.open_model import AUTO, open_policy, spec_of
from shoal.models.safetensors_header import MASKS
from shoal.protocol.noise import KEYED_32, KEYED_64, NOISES, PHILOX
from shoal.protocol.seed_chain import sample_seed
from shoal.train.learner import Learner
from shoal.train.rows import TrainingRow
from shoal.weights.manifest import weights_root
from tests.engine.architectures import ARCHITECTURES, MIXTURES, write_any, write_config
from tests.engine.claims import claims_of
from tests.nightly import first_of

STOPS = frozenset({5})
IDS = torch.tensor([[7, 8, 9]])
KINDS = list(dict.fromkeys(["llama", "mistral, sliding", "gemma3", "gpt2", "cohere", "olmoe", *ARCHITECTURES]))
"""Six of different layers first; slow tests have the others."""
each_kind = pytest.mark.parametrize("name", first_of(*KINDS, num=6))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory for each architecture."""
    root = tmp_path_factory.mktemp("any")
    return {name: write_any(name, root / name.replace(", ", "-"), sharpen=2.0) for name in ARCHITECTURES}


def _engine(directory: Path, dtype: str = "float32", noise: str = PHILOX) -> TransformersEngine:
    engine = TransformersEngine(threads=1, dtype=dtype, noise=noise)
    engine.load(directory, version=0)
    return engine


def _peer(directory: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def _requests(count: int = 12, low: int = 3, high: int = 40, max_new: int = 16) -> list[EngineRequest]:
    """Of groups of two with the same opening; openings of many lengths, longer than a sliding window."""
    rng = random.Random(1)
    openings = [[rng.randrange(6, 64) for _ in range(rng.randint(low, high))] for _ in range(count // 2)]
    prompts = [opening for opening in openings for _ in range(2)]
    return [EngineRequest(f"r{i}", prompt, sample_seed(b"any", i), max_new, STOPS) for i, prompt in enumerate(prompts)]


def _rows(claims: Sequence[ScoreRequest], turns: Sequence[Continuation]) -> list[TrainingRow]:
    rows = []
    for i, (claim, turn) in enumerate(zip(claims, turns, strict=True)):
        P = len(turn.token_ids)
        ones_P = np.ones(P, np.float32)
        advantage_P = ones_P * (1.0 if i % 2 else -1.0)
        tokens_T, logp_P = np.array(claim.token_ids), np.array(turn.logprobs, np.float32)
        rows.append(
            TrainingRow(tokens_T, np.array(claim.policy_positions), logp_P, advantage_P, ones_P, float(i % 2), 0)
        )
    return rows


@pytest.mark.parametrize(
    ("name", "family"), [*first_of(*((name, PHILOX) for name in KINDS), num=6), ("gpt2", KEYED_32), ("olmoe", KEYED_64)]
)
def test_each_token_is_the_argmax_of_transformers_logits_plus_the_reference_noise(
    name: str, family: str, models: dict[str, Path]
) -> None:
    requests, temperature = _requests(), 0.8
    engine, peer = _engine(models[name], noise=family), _peer(models[name])
    turns = engine.extend(requests, temperature)
    assert max(float(score.gaps_P.max()) for score in engine.score(claims_of(requests, turns), temperature)) < 1e-4
    for request, turn in zip(requests, turns, strict=True):
        start, ids = len(request.token_ids), [*request.token_ids, *turn.token_ids]
        with torch.no_grad():
            logits_TV = peer(torch.tensor([ids])).logits[0, start - 1 : -1]
        scaled_TV = logits_TV / temperature
        noise_TV = torch.from_numpy(
            NOISES[family]([request.seed] * len(turn.token_ids), np.arange(start, len(ids)), 64)
        )
        assert (scaled_TV + noise_TV).argmax(-1).tolist() == turn.token_ids
        expected = scaled_TV.log_softmax(-1)[torch.arange(len(turn.token_ids)), turn.token_ids]
        assert torch.allclose(torch.tensor(turn.logprobs), expected, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_our_engine_replays_what_transformers_sampled_and_writes_it_again(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    requests = _requests()
    claims = claims_of(requests, _engine(models[name]).extend(requests, 1.0))
    save_policy(open_policy(models[name]), tmp_path / "ours", "float32")
    for directory in (models[name], tmp_path / "ours"):
        ours = LocalEngine(threads=1)
        ours.load(directory, 0)
        assert max(float(score.gaps_P.max()) for score in ours.score(claims, 1.0)) < 1e-4
    ids = torch.tensor([claims[0].token_ids])
    with torch.no_grad():
        assert torch.allclose(_peer(models[name])(ids).logits, _peer(tmp_path / "ours")(ids).logits, atol=1e-5)


@each_kind
def test_honest_turns_replay_in_other_batches_without_gaps(name: str, models: dict[str, Path]) -> None:
    engine, requests = _engine(models[name]), _requests()
    together = claims_of(requests, engine.extend(requests, 1.0))
    alone = claims_of(requests, [engine.extend([request], 1.0)[0] for request in requests])
    assert together == alone
    for claims in (together, together[:1]):
        scores = engine.score(claims, 1.0, hidden=True)
        assert max(float(score.gaps_P.max()) for score in scores) < 1e-4
        assert all(score.hidden_PD is not None and score.largest_P is not None for score in scores)
    other = [claim._replace(seed=claim.seed[::-1]) for claim in together]
    assert np.mean(np.concatenate([s.gaps_P for s in engine.score(other, 1.0)]) > 1e-3) > 0.2


@each_kind
def test_the_learner_sees_what_the_engine_saw_and_transformers_opens_what_it_learned(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    engine, requests = _engine(models[name]), _requests()
    turns = engine.extend(requests, 0.9)
    claims = claims_of(requests, turns)
    rows = _rows(claims, turns)
    model = load_any(models[name])
    learner = Learner(
        model, TrainConfig(lr=1e-3, warmup_steps=0, microbatch_tokens=200), SamplingConfig(temperature=0.9), steps=3
    )
    for row, logp_P in zip(rows, learner.logprobs(rows), strict=True):
        assert np.abs(row.behaviour_logp_P - logp_P).max() < 1e-4
    before = model.hidden(torch.tensor([[7, 8, 9]])).detach()
    losses = [learner.step(rows, version)["loss"] for version in range(3)]
    assert np.isfinite(losses).all() and losses[2] < losses[0]
    assert not torch.allclose(before, model.hidden(torch.tensor([[7, 8, 9]])), atol=1e-4)

    save_policy(model, tmp_path / "whole", "float32", tokenizer_from=models[name], shard_bytes=8192)
    save_policy(snapshot(model, "float32"), tmp_path / "again", "float32", tokenizer_from=models[name])
    assert weights_root(tmp_path / "whole") == weights_root(tmp_path / "again")
    assert find_tensors(tmp_path / "whole").keys() == find_tensors(models[name]).keys()
    peer, ids = _peer(tmp_path / "whole"), torch.tensor([claims[0].token_ids])
    with torch.no_grad():
        assert torch.allclose(peer(ids).logits, model.logits(model.hidden(ids)), atol=1e-4)
        assert torch.allclose(peer(ids).logits, _logits(_engine(tmp_path / "again"), ids), atol=1e-4)


def _logits(engine: TransformersEngine, ids: Tensor) -> Tensor:
    decoder = engine._loaded
    assert decoder is not None
    return decoder.logits(decoder.hidden_states(ids)[0])[None]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "cohere", "olmoe"])
def test_gradients_are_those_of_plain_logits_with_and_without_pieces_and_recomputing(
    name: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = _requests(4)
    turns = _engine(models[name]).extend(requests, 1.0)
    rows = _rows(claims_of(requests, turns), turns)

    def gradients(**changes: Any) -> dict[str, Tensor]:
        model, found = load_any(models[name]), dict[str, Tensor]()
        learner = Learner(
            model, TrainConfig(microbatch_tokens=300, **changes), SamplingConfig(temperature=0.7), steps=1
        )

        def capture(lr: float, version: int) -> float:
            found.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            return 0.0

        monkeypatch.setattr(learner, "_update", capture)
        learner.step(rows, 0)
        return found

    plain, again = gradients(), gradients(recompute="layers")
    monkeypatch.setattr("shoal.train.logprobs.HELD_LOGITS", 64 * 5)
    pieces = gradients()
    monkeypatch.setattr(HFModel, "_examine_head", lambda self: None)
    whole = gradients()
    assert plain and all(torch.equal(plain[key], again[key]) for key in plain)
    for others in (pieces, whole):
        for key, gradient in plain.items():
            torch.testing.assert_close(others[key], gradient, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", ["llama", "opt", "gemma2", "phi", "cohere"])
def test_heads_are_proven_where_logits_are_large_enough_to_show_a_cap(name: str, models: dict[str, Path]) -> None:
    model = load_any(models[name])
    assert (model.head_weight() is None) == (name == "opt")  # its head reads from a part of the model without its head
    assert (model.after_head is not None) == (name in ("gemma2", "phi", "cohere"))


def test_a_model_with_a_head_of_its_own_kind_gives_whole_logits(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gpt2 import modeling_gpt2

    forward = modeling_gpt2.GPT2LMHeadModel.forward

    def squared(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits + 0.01 * output.logits.square()
        return output

    monkeypatch.setattr(modeling_gpt2.GPT2LMHeadModel, "forward", squared)
    engine, requests = _engine(models["gpt2"]), _requests(4)
    assert engine._loaded is not None and engine._loaded.model.head_weight() is None
    claims = claims_of(requests, engine.extend(requests, 1.0))
    assert max(float(score.gaps_P.max()) for score in engine.score(claims, 1.0)) < 1e-4


def test_where_padding_changes_a_model_conversations_of_other_lengths_are_read_apart(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gpt2 import modeling_gpt2

    forward = modeling_gpt2.GPT2Model.forward

    def blind(self: Any, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    blind.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(modeling_gpt2.GPT2Model, "forward", blind)
    engine, requests = _engine(models["gpt2"]), _requests()
    assert engine._loaded is not None and not engine._loaded.reads_padding
    claims = claims_of(requests, engine.extend(requests, 1.0))
    assert max(float(score.gaps_P.max()) for score in engine.score(claims, 1.0)) < 1e-4


def test_models_whose_cache_changes_what_they_compute_are_refused(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gpt2 import modeling_gpt2

    forward = modeling_gpt2.GPT2Model.forward

    def forgetful(self: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        output = forward(self, *args, past_key_values=past_key_values, **kwargs)
        if past_key_values is not None:
            output.last_hidden_state = output.last_hidden_state * 1.01
        return output

    forgetful.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(modeling_gpt2.GPT2Model, "forward", forgetful)
    with pytest.raises(StateError, match="gpt2: with a cache, transformers computes other values of this gpt2 than"):
        _engine(models["gpt2"])


def test_models_without_a_cache_are_refused_in_one_line(tmp_path: Path) -> None:
    import transformers

    config = transformers.OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=256)
    transformers.OpenAIGPTLMHeadModel(config).save_pretrained(tmp_path / "first")
    with pytest.raises(StateError, match=r"first: openai-gpt has no cache of keys .* Choose another model"):
        _engine(tmp_path / "first")


@pytest.mark.parametrize(
    ("name", "changes"), [("phi3", {"sliding_window": 1 << 63}), ("gemma3", {"sliding_window": -1})], ids=str
)
def test_models_that_fail_with_a_cache_are_refused_in_one_line(
    name: str, changes: dict[str, object], models: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(
        StateError, match=rf"transformers cannot run this {name}.* sliding_window = .*Error: "
    ) as refused:
        _engine(_changed(models[name], tmp_path / "bad", **changes))
    assert "\n" not in str(refused.value)


HALF = ["sliding_attention", "full_attention", "sliding_attention"]
CHUNKED = ["chunked_attention", "full_attention", "chunked_attention"]


@pytest.mark.parametrize(
    ("name", "changes", "keys"),
    [
        ("olmo2", {"sliding_window": 16}, "sliding_window"),
        ("olmo2", {"sliding_window": 4096}, "sliding_window"),
        ("opt", {"attention_chunk_size": 100}, "attention_chunk_size"),
        ("llama", {"layer_types": HALF, "sliding_window": 16}, "layer_types and sliding_window"),
        ("llama", {"layer_types": CHUNKED}, "layer_types"),
    ],
    ids=str,
)
def test_windows_that_only_the_cache_obeys_are_refused_by_their_keys(
    name: str, changes: dict[str, object], keys: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """Also those that are longer than the text with which a model is examined."""
    directory = _changed(models[name], tmp_path / "windowed", **changes)
    with pytest.raises(StateError, match=f"this {name} .*Set {keys} to null") as refused:
        _engine(directory)
    assert "\n" not in str(refused.value)
    _engine(_changed(directory, tmp_path / "set", **dict.fromkeys(changes)))


@pytest.mark.parametrize("wide", [False, True])
def test_windows_that_the_forward_pass_obeys_are_taken_and_left_as_they_were(
    wide: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("mistral, sliding", "gemma2", "gemma3", "phi3"):
        window = 64 if wide or name == "phi3" else 8
        engine = _engine(_changed(models[name], tmp_path / name, sliding_window=window))
        assert engine._loaded is not None and engine._loaded.reads_padding
        assert engine._loaded.model.whole.config.sliding_window == window
        windows = {getattr(one, "sliding_window", None) for one in engine._loaded.model.whole.modules()}
        assert windows <= {None, window}


def test_sparse_attention_is_refused_by_its_key_where_texts_may_be_longer_than_what_it_chooses(tmp_path: Path) -> None:
    import transformers

    few = dict.fromkeys(["n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"], 1)
    few |= {"num_experts_per_tok": 2, "n_routed_experts": 4, "index_n_heads": 2, "index_head_dim": 16}
    few |= dict.fromkeys(["num_hidden_layers", "num_attention_heads", "num_key_value_heads"], 2)
    few |= dict.fromkeys(["qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"], 8)
    few |= {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "index_topk": 100,
    }
    config = transformers.DeepseekV32Config(**few, max_position_embeddings=256, eos_token_id=5)
    sparse = write_config(config, tmp_path / "sparse")
    with pytest.raises(StateError, match=r"it has index_topk = 100, .*Set max_position_embeddings to 100, so that"):
        _engine(sparse)
    _engine(_changed(sparse, tmp_path / "short", max_position_embeddings=100))


def test_masks_that_are_ignored_are_those_that_transformers_ignores() -> None:
    import transformers

    for kind, name in (("gpt2", "GPT2LMHeadModel"), ("gpt_neox", "GPTNeoXForCausalLM")):
        patterns = getattr(transformers, name)._keys_to_ignore_on_load_unexpected
        assert tuple(f".{pattern}" for pattern in patterns) == MASKS[kind]


def test_honest_mixtures_with_windows_pass_the_examination_in_bfloat16(tmp_path: Path) -> None:
    """Their differences are 0.009 of the largest value at most, over 100 of them, also with sharp routers."""
    import transformers

    common = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "sliding_window": 8}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    for config in (
        transformers.MixtralConfig(**common, **experts),
        transformers.GptOssConfig(**common, **experts),
        transformers.Qwen3MoeConfig(
            **common, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=24, use_sliding_window=True
        ),
    ):
        engine = _engine(write_config(config, tmp_path / config.model_type), "bfloat16")
        assert engine._loaded is not None and engine._loaded.model.window_keys() and engine._loaded.reads_padding
        requests = _requests(4)
        claims = claims_of(requests, engine.extend(requests, 1.0))
        gaps = np.concatenate([score.gaps_P for score in engine.score(claims, 1.0)])
        assert np.mean(gaps > 0.05) < 0.05


def test_what_a_first_version_hides_is_seen_in_the_next(models: dict[str, Path], tmp_path: Path) -> None:
    """Its attention adds nothing, so that neither windows nor caches show."""
    from safetensors.torch import load_file, save_file

    for name, changes in (
        ("olmo2", {"sliding_window": 17}),
        ("llama", {"layer_types": HALF, "sliding_window": 17}),
        ("llama", {"layer_types": CHUNKED, "attention_chunk_size": 17}),
    ):
        honest = _changed(models[name], tmp_path / f"{name} {[*changes]}", **changes)
        blind = _changed(honest, tmp_path / f"blind {name} {[*changes]}")
        tensors = load_file(honest / "model.safetensors")
        for key in tensors:
            if key.endswith(("o_proj.weight", "post_attention_layernorm.weight")):
                tensors[key].zero_()
        save_file(tensors, blind / "model.safetensors", metadata={"format": "pt"})
        engine = _engine(blind)
        with pytest.raises(StateError, match="by which its cache forgets"):
            engine.load(honest, 1)


def test_what_later_versions_forget_after_a_text_below_their_window_is_seen(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.mistral import modeling_mistral

    directory = _changed(models["mistral, sliding"], tmp_path / "one", sliding_window=29)
    engine, forward = _engine(directory), modeling_mistral.MistralModel.forward

    def forgetful(self: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        before = 0 if past_key_values is None else past_key_values.get_seq_length()
        output = forward(self, *args, past_key_values=past_key_values, **kwargs)
        if 0 < before < 4:
            output.last_hidden_state = output.last_hidden_state * 1.5
        return output

    forgetful.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(modeling_mistral.MistralModel, "forward", forgetful)
    with pytest.raises(StateError, match="by which its cache forgets"):
        engine.load(directory, 1)


def test_a_version_is_not_loaded_while_the_engine_is_at_work(models: dict[str, Path]) -> None:
    engine = _engine(models["gpt2"])
    with engine._at_work:
        loading = threading.Thread(target=engine.load, args=(models["gpt2"], 1))
        loading.start()
        loading.join(0.1)
        assert engine.version == 0
    loading.join(30)
    assert engine.version == 1


@pytest.mark.parametrize("make", [TransformersEngine, LocalEngine])
def test_a_turn_that_waits_for_a_load_is_written_by_what_was_loaded(make: Any, tmp_path: Path) -> None:
    first, second = (make(threads=1) for _ in range(2))
    for seed, engine in enumerate((first, second)):
        engine.load(write_any("llama", tmp_path / str(seed), seed), seed)
    requests, turns = _requests(2), list[Continuation]()
    with first._at_work:
        waiting = threading.Thread(target=lambda: turns.extend(first.extend(requests, 1.0)))
        waiting.start()
        waiting.join(0.1)
        first._loaded, first.version = second._loaded, 1
    waiting.join(30)
    assert turns == second.extend(requests, 1.0)


@each_kind
def test_honest_bfloat16_replays_with_few_and_small_gaps(name: str, models: dict[str, Path]) -> None:
    """In a mixture of experts, a token near the border of two of them may go to the other one, and change its logits."""
    large = 0.03 if name in MIXTURES else 0.003
    requests = _requests(32)
    claims = claims_of(requests, _engine(models[name], "bfloat16").extend(requests, 1.0))
    for dtype in ("bfloat16", "float32"):
        gaps = np.concatenate([score.gaps_P for score in _engine(models[name], dtype).score(claims, 1.0)])
        assert len(gaps) > 200 and (gaps > 0.4).mean() < large and (gaps > 0).mean() < 0.1


def _changed(source: Path, target: Path, **changes: object) -> Path:
    """A copy of a model's directory with another `config.json`."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return target


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}, "auto_map"),
        ({"model_type": "t5"}, "has no language model 't5'"),
        ({"model_type": "bert", "num_attention_heads": 4}, "from different models"),
        ({"is_encoder_decoder": True}, "has an encoder"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"n_embd": 64}, "asks for"),
        ({"n_layer": 1 << 20}, "n_layer = 1048576"),
        ({"n_layer": 4}, "asks for"),
        ({"n_layer": 2}, "has a tensor that its config does not explain"),
        ({"n_positions": None}, "does not say max_position_embeddings"),
        ({"n_head": 5}, "transformers"),
        ({"activation_function": "mine"}, "transformers cannot run this gpt2"),
        ({"nested": functools.reduce(lambda inner, _: {"a": inner}, range(900), {})}, "gpt2: RecursionError"),
        ({"is_causal": False}, "is_causal is False: tokens would see later ones"),
        ({"is_causal": 0}, "is_causal is 0: tokens would see later ones"),
        ({"per_layer_config": {"0": {"sliding_window": 8}}}, "per_layer_config"),
        ({"vocab_size": 1 << 30}, "vocab_size"),
    ],
)
def test_configs_that_ask_for_anything_else_are_refused_in_one_line(
    changes: dict[str, object], says: str, models: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(StateError, match=says) as refused:
        load_any(_changed(models["gpt2"], tmp_path / "bad", **changes))
    assert "\n" not in str(refused.value)


def test_an_adapter_beside_a_whole_model_is_refused_before_its_file_is_read(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """The memory that a model takes is estimated without it."""
    directory = _changed(models["gpt2"], tmp_path / "beside")
    (directory / "adapter_model.safetensors").write_bytes(b"not read")
    with pytest.raises(StateError, match=r"adapter_model\.safetensors beside a whole model"):
        load_any(directory)


def test_a_config_cannot_say_how_it_is_loaded(models: dict[str, Path], tmp_path: Path) -> None:
    """Each of these keys would make transformers fetch code or other files, compute in another way, or fill the memory."""
    loud = {
        "attn_implementation": "no-such", "_attn_implementation": "no-such", "auto_map": {"A": "a.B"},
        "transformers_weights": "../other.safetensors", "_name_or_path": "someone/model", "torch_dtype": "float64",
        "fusion_config": {"patch_embeddings": True}, "num_labels": 200_000,
    }  # fmt: skip
    directory = _changed(models["gpt2"], tmp_path / "loud", **loud)
    ids = torch.tensor([[7, 8, 9]])
    assert torch.equal(load_any(directory).hidden(ids), load_any(models["gpt2"]).hidden(ids))
    save_policy(load_any(directory), tmp_path / "published", "float32")
    assert not json.loads((tmp_path / "published" / "config.json").read_text()).keys() & loud.keys()


def test_floats_that_json_lacks_are_read_and_published_as_transformers_writes_them(tmp_path: Path) -> None:
    import transformers

    config = transformers.FalconH1Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8,
        mamba_d_state=16, mamba_chunk_size=16, eos_token_id=5, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    infinite = {"__float__": "Infinity"}
    directory = _changed(write_config(config, tmp_path / "saved"), tmp_path / "here", initializer_range=infinite)
    model = load_any(directory)
    assert model.whole.config.time_step_limit[1] == model.whole.config.initializer_range == float("inf")
    save_policy(model, tmp_path / "published", "float32")
    for place in (directory, tmp_path / "published"):
        told = json.loads((place / "config.json").read_text())
        assert told["time_step_limit"] == [0.0, infinite] and told["initializer_range"] == infinite
    load_any(tmp_path / "published")


def test_no_kernel_is_fetched_from_a_hub_even_if_the_package_for_that_is_installed(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import hub_kernels

    asked: list[str] = []
    monkeypatch.setattr(hub_kernels, "_kernels_enabled", True)
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda name, **options: asked.append(name))
    load_any(models["gpt2"])
    for name in hub_kernels._HUB_KERNEL_MAPPING:
        hub_kernels.lazy_load_kernel(name, {})
    assert asked == [] != list(hub_kernels._HUB_KERNEL_MAPPING)


def test_models_whose_tokens_see_later_ones_are_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, eos_token_id=5
    )
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(StateError, match="sees later ones"):
        load_any(tmp_path / "bert")


@pytest.mark.parametrize(
    ("name", "part", "factor"), [("gpt2", "c_proj", 1e30), ("gemma2", "proj", 1e30), ("llama", "lm_head", 1e38)]
)
def test_a_model_whose_logits_overflow_is_refused_by_its_directory(
    name: str, part: str, factor: float, models: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    directory = _changed(models[name], tmp_path / "large")
    weights = load_file(directory / "model.safetensors")
    large = {key: factor * one if part in key else one for key, one in weights.items()}
    assert all(one.isfinite().all() for one in large.values())
    save_file(large, directory / "model.safetensors", {"format": "pt"})
    for dtype in ("float32", "bfloat16"):
        engine = open_engine(EngineSpec(kind_for(directory), dtype, threads=1))
        with pytest.raises(
            StateError, match=f"large: its weights are finite numbers, but its logits in {dtype}"
        ) as said:
            engine.load(directory, 0)
        assert ('sampling.dtype = "float32"' in str(said.value)) == (dtype != "float32")


def test_weights_that_cannot_be_read_are_refused_with_the_remedy(models: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    def with_tensors(name: str, **more: Any) -> Path:
        directory = _changed(models["gpt2"], tmp_path / name)
        tensors = load_file(directory / "model.safetensors") | more
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    mask = torch.ones(1, 1, 8, 8)
    for dtype in (torch.uint8, torch.bool):
        masked = with_tensors(str(dtype), **{"transformer.h.0.attn.bias": mask.to(dtype)})
        assert torch.equal(load_any(masked).hidden(IDS), load_any(models["gpt2"]).hidden(IDS))
        assert weights_root(masked) == weights_root(models["gpt2"])
        other = with_tensors(f"other {dtype}", **{"transformer.h.0.attn.other": mask.to(dtype)})
        with pytest.raises(StateError, match=r"attn\.other .*If it is a mask.*save the model again"):
            load_any(other)
    assert load_any(with_tensors("float", **{"transformer.h.0.attn.bias": mask})).head_weight() is not None
    untied = _changed(models["smollm"], tmp_path / "untied", tie_word_embeddings=False)
    for load in (load_any, open_policy, lambda one: demand_weights(one, spec_of(one))):
        with pytest.raises(
            StateError, match=r"lm_head\.weight.*if the head is the embedding, set tie_word_embeddings to true"
        ):
            load(untied)
    partial = with_tensors("partial")
    tensors = load_file(partial / "model.safetensors")
    del tensors["transformer.h.0.mlp.c_fc.bias"]
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StateError, match=r"h\.0\.mlp\.c_fc\.bias is not there, .* download the model again"):
        load_any(partial)
    negative = _changed(models["gpt2"], tmp_path / "negative", n_embd=-4)
    with pytest.raises(StateError, match=r"config\.json: n_embd = -4: not in 1"):
        load_any(negative)
    pickled = _changed(models["smollm"], tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(StateError, match=r"in pickles \(\.bin\) are never read: .*save_pretrained"):
        open_policy(pickled)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_half_rotated_heads_are_named_where_transformers_cannot_run_them(
    kind: str, models: dict[str, Path], tmp_path: Path
) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
    with pytest.raises(StateError, match=r"RuntimeError.*have a partial_rotary_factor"):
        load_any(_changed(models["llama"], tmp_path / kind, rope_parameters=rope))


def test_architectures_whose_config_has_other_keys_are_said_not_to_be_supported(tmp_path: Path) -> None:
    from transformers import BloomConfig, GPTNeoConfig, MambaConfig

    for make in (BloomConfig, GPTNeoConfig, MambaConfig):
        make().save_pretrained(tmp_path)
        with pytest.raises(StateError, match="such as bloom, gpt_neo and mamba, are not supported"):
            spec_of(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("rms_norm_eps", None, "rms_norm_eps is null, and must be a number: "),
        ("tie_word_embeddings", None, "tie_word_embeddings is null, and must be true or false: "),
        (
            "rope_parameters",
            {"rope_theta": "10000.0", "rope_type": "default"},
            'rope_theta is "10000.0", and must be a number: ',
        ),
        ("rope_scaling", "yarn", 'rope_scaling is "yarn", and must be a table or null: '),
        ("head_dim", "8", 'head_dim is "8", and must be a whole number or null: '),
        ("hidden_size", "32", 'hidden_size is "32", and must be a whole number: '),
        ("pad_token_id", "0", 'pad_token_id is "0", and must be a whole number or null: '),
        ("model_type", ["olmo2"], r'model_type is \["olmo2"\], and must be a text: '),
        ("num_key_value_heads", None, r"is wrong \(.*num_key_value_heads = null.*\)\. Correct it, or take"),
        ("vocab_size", 10, r"is wrong \(vocab_size = 10, hidden_size = 32\)\. Correct it, or take"),
    ],
)
def test_a_value_of_a_config_that_transformers_refuses_is_named_with_the_remedy(
    key: str, value: Any, says: str, models: dict[str, Path], tmp_path: Path
) -> None:
    changed = _changed(models["olmo2"], tmp_path / "changed")
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(StateError, match=rf"/changed\b.*config\.json.*{says}") as refused:
        open_policy(changed, None, AUTO)
    assert "\n" not in str(refused.value) and "Strict" not in str(refused.value)


def test_only_runs_that_say_auto_compute_other_architectures(models: dict[str, Path]) -> None:
    with pytest.raises(StateError, match=r'model_type is .gpt2.*policy\.implementation = "auto"'):
        open_policy(models["gpt2"])
    assert isinstance(open_policy(models["gpt2"], None, AUTO), HFModel)
    assert not isinstance(open_policy(models["llama"], None, AUTO), HFModel)
    assert isinstance(open_policy(models["mistral, sliding"], None, AUTO), HFModel)
    assert (kind_for(models["gpt2"]), kind_for(models["llama"])) == ("transformers", "local")


_WITHOUT = """
import sys
sys.modules["transformers"] = None
from shoal.engine.open import EngineSpec, open_engine
from shoal.errors import StateError
try:
    open_engine(EngineSpec(kind="transformers"))
except StateError as error:
    print(error)
"""


def test_without_transformers_one_line_says_what_to_install() -> None:
    result = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True, check=True, timeout=60)
    assert "needs transformers" in result.stdout and "pip install" in result.stdout and result.stdout.count("\n") == 1


def test_what_is_wrong_with_another_architecture_is_said_and_not_that_it_is_another(
    models: dict[str, Path], tmp_path: Path
) -> None:
    quantised = _changed(models["olmo2"], tmp_path / "quantised", quantization_config={"quant_method": "gptq"})
    with pytest.raises(StateError, match="the weights are quantised"):
        spec_of(quantised)
    with pytest.raises(StateError, match=r'config\.json: vocab_size is "many", and must be a whole number'):
        spec_of(_changed(models["llama"], tmp_path / "gelu", hidden_act="gelu", vocab_size="many"))
