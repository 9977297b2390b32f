"""Checkpoints whose config ties the head to the embedding, and that store a head: read as `transformers` reads them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shoal.config import TinyPolicy
from shoal.engine.hf import TransformersEngine
from shoal.engine.interface import ScoreRequest
from shoal.engine.native import LocalEngine
from shoal.engine.vllm.checkpoint import config_for_vllm
from shoal.errors import StateError
from shoal.models.checkpoint import load_policy, policy_tensors, save_policy, write_nf4
from shoal.models.config import EMBEDDING, HEAD
from shoal.models.hf_model import load_any
from shoal.models.lora_config import AdapterSpec
from shoal.models.open_model import kind_of, spec_of
from shoal.models.random_model import make_tiny
from shoal.models.transformer_config import TransformerConfig
from tests.engine.architectures import write_any

TOKENS = [7, 12, 33, 5, 60, 21, 40, 2]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def stored_head(directory: Path, head: torch.Tensor | None, family: str = "llama", **config: Any) -> Path:
    """A tied policy whose files also hold this head; by default a head of its own."""
    tiny = TinyPolicy(family=family, width=64, layers=2, heads=2, kv_heads=1, mlp_width=64, tied=True)  # type: ignore[arg-type]
    make_tiny(tiny, directory, seed=3, dtype="float32")
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(9)
    own = torch.randn(tensors[EMBEDDING].shape, generator=generator)
    save_file(tensors | {HEAD: own if head is None else head}, directory / "model.safetensors", {"format": "pt"})
    written = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": True} | config
    (directory / "config.json").write_text(json.dumps(written))
    return directory


def embedding_of(directory: Path) -> torch.Tensor:
    return load_file(directory / "model.safetensors")[EMBEDDING]


@torch.no_grad()
def peer_logprobs(directory: Path) -> np.ndarray[Any, Any]:
    logits_TV = AutoModelForCausalLM.from_pretrained(directory)(torch.tensor([TOKENS])).logits[0]
    logp_TV = torch.log_softmax(logits_TV, -1)
    return np.array([float(logp_TV[i - 1, TOKENS[i]]) for i in range(4, 8)])


def scored(engine: Any, directory: Path) -> Any:
    engine.load(directory, 0)
    request = ScoreRequest(TOKENS, (4, 5, 6, 7), bytes(32))
    return engine.score([request], 1.0)[0].logprobs_P


@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_to_open_a_stored_head_gives_the_log_probs_of_transformers(family: str, tmp_path: Path) -> None:
    directory = stored_head(tmp_path / "start", None, family)
    expected = peer_logprobs(directory)
    tied = stored_head(tmp_path / "tied", embedding_of(directory), family)
    assert np.abs(expected - peer_logprobs(tied)).max() > 0.5  # the head shows
    for opened in (LocalEngine(threads=1), TransformersEngine(threads=1)):
        assert scored(opened, directory) == pytest.approx(expected, abs=1e-4)
        assert scored(opened, tied) == pytest.approx(peer_logprobs(tied), abs=1e-4)
    for number, dtype in enumerate(("float32", "bfloat16", "int8")):
        published = tmp_path / f"published-{number}"
        save_policy(load_policy(directory), published, dtype)
        assert not json.loads((published / "config.json").read_text())["tie_word_embeddings"]
        if dtype != "int8":
            assert peer_logprobs(published) == pytest.approx(expected, abs=1e-4 if dtype == "float32" else 0.2)
        assert scored(LocalEngine(threads=1), published) == pytest.approx(expected, abs=0.2)
    assert policy_tensors(tmp_path / "published-0")[1][HEAD].dtype == "F32"
    spec = spec_of(directory)
    assert isinstance(spec, TransformerConfig) and not config_for_vllm(directory, spec)["tie_word_embeddings"]


def test_a_stored_head_of_equal_values_stays_tied(tmp_path: Path) -> None:
    directory = stored_head(tmp_path, None)
    narrow = embedding_of(directory).bfloat16()
    for embedding, head, is_tied in (
        (narrow, narrow.float(), True), (narrow.float(), narrow, True), (narrow.float() + 1e-3, narrow, False),
        (narrow.half(), narrow.half().float(), True),
    ):  # fmt: skip
        tensors = load_file(tmp_path / "model.safetensors") | {EMBEDDING: embedding, HEAD: head}
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        assert TransformerConfig.from_directory(directory).tied is is_tied
        assert (HEAD in dict(load_policy(directory).named_parameters())) is not is_tied
        peer = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        assert (peer.lm_head.weight is peer.model.embed_tokens.weight) is is_tied


def test_a_head_that_a_config_asks_for_must_be_stored_and_fit(tmp_path: Path) -> None:
    untied = stored_head(tmp_path / "untied", None, tie_word_embeddings=False)
    tensors = load_file(untied / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if name != HEAD}, untied / "model.safetensors")
    for load in (load_policy, load_any):
        with pytest.raises(StateError, match=r"lacks tensor lm_head\.weight|asks for \d+ parameters, its files hold"):
            load(untied)
    padded = stored_head(tmp_path / "padded", torch.zeros(72, 64))
    for load in (load_policy, load_any):
        with pytest.raises(StateError, match=r"lm_head\.weight is \[72, 64\], config.json asks for"):
            load(padded)
    no_embedding = stored_head(tmp_path / "head", None)
    tensors = load_file(no_embedding / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if name != EMBEDDING}, no_embedding / "model.safetensors")
    with pytest.raises(StateError, match=r"lacks tensor model\.embed_tokens\.weight"):
        load_policy(no_embedding)


def test_shards_adapters_and_a_base_in_nf4_have_the_stored_head(tmp_path: Path) -> None:
    directory = stored_head(tmp_path / "start", None)
    peer = AutoModelForCausalLM.from_pretrained(directory)
    peer.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert not TransformerConfig.from_directory(tmp_path / "shards").tied
    expected = peer_logprobs(directory)
    assert scored(LocalEngine(threads=1), tmp_path / "shards") == pytest.approx(expected, abs=1e-4)
    assert not policy_tensors(tmp_path / "shards")[0].tied
    write_nf4(directory, tmp_path / "coded")
    assert HEAD in dict(load_policy(tmp_path / "coded").named_parameters())
    model = load_policy(directory)
    model.adapt(AdapterSpec(rank=2, alpha=4.0, targets=("q_proj",)))
    assert not model.spec.tied and "lm_head.weight" not in model.trainable()


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "cohere", "phi3"])
def test_other_architectures_keep_their_stored_head_when_they_are_published(name: str, tmp_path: Path) -> None:
    """The first three tie by default: their configs need not say so."""
    directory = write_any(name, tmp_path / "start")
    whole = load_any(directory).whole
    embedding = whole.get_input_embeddings().weight
    own = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(4))
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {HEAD: own}, directory / "model.safetensors", {"format": "pt"})
    assert kind_of(directory) == "any"
    expected = peer_logprobs(directory)
    assert scored(TransformersEngine(threads=1), directory) == pytest.approx(expected, abs=1e-4)
    save_policy(load_any(directory), tmp_path / "published", "float32")
    assert not json.loads((tmp_path / "published" / "config.json").read_text())["tie_word_embeddings"]
    assert torch.equal(load_any(tmp_path / "published").whole.get_output_embeddings().weight, own)
    assert peer_logprobs(tmp_path / "published") == pytest.approx(expected, abs=1e-4)
    assert not config_for_vllm(directory, spec_of(directory))["tie_word_embeddings"]
