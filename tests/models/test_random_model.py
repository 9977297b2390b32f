"""Policies with random weights of a model's shape: what is written is a policy that everything else can open."""

import json
from pathlib import Path

import pytest
import torch

from shoal.chat.renderer import Renderer
from shoal.engine.interface import EngineRequest
from shoal.engine.open import EngineSpec, kind_for, open_engine
from shoal.errors import StateError
from shoal.models.open_model import AUTO, open_policy, spec_of
from shoal.models.random_model import LEAST_VOCABULARY, SPECIALS, make_shaped
from shoal.models.transformer_config import TransformerConfig
from shoal.weights.manifest import weights_root
from tests.engine.architectures import ARCHITECTURES

QWEN = {
    "model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "vocab_size": 1000, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "eos_token_id": 999, "bos_token_id": 998,
}  # fmt: skip
MIXTURE = {
    "model_type": "olmoe", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1000, "eos_token_id": 999,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


def shape_in(folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("config", [QWEN, MIXTURE], ids=["ours", "any"])
def test_a_random_policy_has_the_shape_writes_text_and_is_opened_by_transformers(
    config: dict[str, object], tmp_path: Path
) -> None:
    import transformers

    made = tmp_path / "made"
    make_shaped(shape_in(tmp_path / "shape", config), made, seed=3, dtype="bfloat16")
    renderer, peer = Renderer.from_directory(made), transformers.AutoModelForCausalLM.from_pretrained(made)
    assert peer.config.vocab_size == 1000 and peer.config.hidden_size == 32 and peer.dtype == torch.bfloat16
    assert renderer.stop_ids == {SPECIALS.index("<|end|>")}, "the model's own end tokens mean nothing to this tokenizer"

    prompt = renderer.start([{"role": "user", "content": "Größe?\n"}])
    engine = open_engine(EngineSpec(kind_for(made)))
    engine.load(made, 0)
    (turn,) = engine.extend([EngineRequest("r", prompt, bytes(32), 40, renderer.stop_ids)], 1.0)
    assert len(renderer.decode(turn.token_ids)) > 40, "words of two letters and more"
    ids = torch.tensor([prompt])
    model = open_policy(made, implementation=AUTO)
    with torch.no_grad():
        torch.testing.assert_close(peer.float()(ids).logits, model.logits(model.hidden(ids)), atol=1e-4, rtol=1e-4)


def test_the_tokenizer_reads_bytes_and_has_another_text_for_every_token(tmp_path: Path) -> None:
    make_shaped(shape_in(tmp_path / "shape", QWEN), tmp_path / "made", seed=3, dtype="float32")
    renderer = Renderer.from_directory(tmp_path / "made")
    text = "Größe 12, ЖÆ\n"
    assert renderer.decode(renderer.encode(text)) == text and len(renderer.encode(text)) == len(text.encode())
    words = [renderer.decode([token]) for token in range(LEAST_VOCABULARY, 1000)]
    assert len(set(words)) == len(words) and all(word.isalpha() for word in words)


def test_the_seed_decides_every_weight(tmp_path: Path) -> None:
    shape = shape_in(tmp_path / "shape", QWEN)
    for name, seed in (("one", 1), ("again", 1), ("two", 2)):
        make_shaped(shape, tmp_path / name, seed, "bfloat16")
    roots = [weights_root(tmp_path / name) for name in ("one", "again", "two")]
    assert roots[0] == roots[1] != roots[2]


def test_a_shape_without_room_for_bytes_is_refused(tmp_path: Path) -> None:
    shape = shape_in(tmp_path / "shape", QWEN | {"vocab_size": 200, "eos_token_id": 1, "bos_token_id": None})
    with pytest.raises(StateError, match="vocab_size = 200: a random policy reads bytes, so it needs at least 262"):
        make_shaped(shape, tmp_path / "made", 0, "float32")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_weights_of_a_shape_are_reckoned_without_files(name: str, tmp_path: Path) -> None:
    import transformers

    config = ARCHITECTURES[name]()
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    exact, spec = sum(p.numel() for p in model.parameters()), spec_of(tmp_path)
    if isinstance(spec, TransformerConfig):
        assert spec.num_parameters() == exact
    else:
        assert exact <= spec.num_parameters() <= 1.4 * exact
