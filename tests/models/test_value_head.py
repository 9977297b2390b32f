"""Models with a head of one number: the files are those that `transformers` reads and writes; others are refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from shoal.config import TinyPolicy
from shoal.errors import StateError
from shoal.models.checkpoint import load_policy
from shoal.models.random_model import make_tiny
from shoal.models.value_head import HEAD, begin_valued, load_valued, save_valued
from shoal.weights.manifest import weights_root

SMALL = TinyPolicy(width=16, layers=2, heads=2, kv_heads=1, mlp_width=24, max_positions=64)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    make_tiny(SMALL, tmp_path / "policy", seed=3, dtype="float32")
    return tmp_path / "policy"


@pytest.fixture
def rewarding(policy: Path, tmp_path: Path) -> Path:
    """A reward model with a head that was drawn."""
    model = begin_valued(policy)
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(1))
    save_valued(model, tmp_path / "reward", "float32", tokenizer_from=policy)
    return tmp_path / "reward"


def test_it_begins_with_the_layers_of_a_policy_and_gives_0(policy: Path) -> None:
    model, of_policy = begin_valued(policy), load_policy(policy)
    tokens = torch.arange(6, 18).view(2, 6)
    assert model.hidden(tokens).equal(of_policy.hidden(tokens))
    assert model.values(model.hidden(tokens)).tolist() == [[0.0] * 6] * 2
    assert {*dict(model.named_parameters())} == {*dict(of_policy.named_parameters())} - {"lm_head.weight"} | {HEAD}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_gives_each_text_the_same_number(family: str, tied: bool, tmp_path: Path) -> None:
    tiny = TinyPolicy(family=family, width=16, layers=2, heads=2, kv_heads=1, mlp_width=24, tied=tied)  # type: ignore[arg-type]
    make_tiny(tiny, tmp_path / "policy", 4, "float32")
    model = begin_valued(tmp_path / "policy")
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(1))
    save_valued(model, tmp_path / "reward", "float32", tokenizer_from=tmp_path / "policy")
    peer = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward", dtype=torch.float32)
    tokens, last = torch.tensor([[6, 9, 7, 8], [11, 12, 0, 0]]), torch.tensor([3, 1])
    with torch.no_grad():
        expected = peer(tokens, attention_mask=torch.tensor([[1] * 4, [1, 1, 0, 0]])).logits[:, 0]
        assert model.scores(tokens, last) == pytest.approx(expected, abs=1e-5)
    peer.save_pretrained(tmp_path / "again")  # as a reward model from elsewhere
    assert load_valued(tmp_path / "again").scores(tokens, last).equal(model.scores(tokens, last))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saving_and_loading_gives_the_same_bytes(rewarding: Path, tmp_path: Path, dtype: str) -> None:
    save_valued(load_valued(rewarding), tmp_path / "a", dtype, tokenizer_from=rewarding)
    save_valued(load_valued(tmp_path / "a"), tmp_path / "b", dtype, tokenizer_from=tmp_path / "a")
    assert weights_root(tmp_path / "a") == weights_root(tmp_path / "b")
    assert (weights_root(tmp_path / "a") == weights_root(rewarding)) is (dtype == "float32")
    assert {path.name for path in rewarding.iterdir()} >= {"tokenizer.json", "generation_config.json"}


def test_layers_in_bfloat16_have_a_head_in_float32(rewarding: Path) -> None:
    model = load_valued(rewarding, torch.bfloat16)
    values = model.values(model.hidden(torch.arange(6, 12)[None]))
    assert values.dtype == model.score.weight.dtype == torch.float32
    assert model.model.norm.weight.dtype == torch.bfloat16


def test_padding_changes_no_score_and_gradients_reach_all_weights(rewarding: Path) -> None:
    model = load_valued(rewarding)
    short, long = torch.tensor([[6, 9, 7]]), torch.tensor([[6, 9, 7, 0, 0]])
    scores = model.scores(short, torch.tensor([2]))
    assert model.scores(long, torch.tensor([2])).tolist() == pytest.approx(scores.tolist(), abs=1e-6)
    scores.sum().backward()
    assert all(one.grad is not None for one in model.parameters())


def test_a_model_of_the_run_that_writes_is_not_taken_for_one_that_scores(policy: Path, rewarding: Path) -> None:
    with pytest.raises(
        StateError, match=r"architecture is 'Qwen3ForCausalLM', and .* is 'Qwen3ForSequenceClassification'"
    ):
        load_valued(policy)
    with pytest.raises(StateError, match=r"lm_head\.weight|score\.weight"):
        load_policy(rewarding)
    with pytest.raises(StateError, match=r"lm_head\.weight"):
        begin_valued(rewarding)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id2label": {"0": "bad", "1": "good"}}, "id2label names 2 labels"),
        ({"id2label": None}, "id2label names 2 labels"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "choose a reward model of that architecture"),
        ({"architectures": 7}, r"config\.json: architectures is 7, and must be a list or null"),
        ({"num_hidden_layers": 3}, "config.json and weights are from different models"),
    ],
)
def test_a_config_of_another_head_is_refused(rewarding: Path, change: dict[str, object], message: str) -> None:
    config = json.loads((rewarding / "config.json").read_text())
    (rewarding / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(StateError, match=message):
        load_valued(rewarding)


def test_tensors_that_are_no_head_of_one_number_are_refused(rewarding: Path, tmp_path: Path) -> None:
    tensors = load_file(rewarding / "model.safetensors")
    odd = {
        "two numbers": (tensors | {HEAD: torch.zeros(2, 16)}, r"score\.weight is \[2, 16\]"),
        "a bias": (tensors | {"score.bias": torch.zeros(1)}, r"does not explain, score\.bias"),
        "not finite": (tensors | {HEAD: torch.full((1, 16), torch.nan)}, r"score\.weight holds values that are not"),
        "int8": (tensors | {HEAD: torch.zeros(1, 16, dtype=torch.int8)}, r"score\.weight is int8"),
    }
    for name, (changed, message) in odd.items():
        shutil.copytree(rewarding, tmp_path / name)
        save_file(changed, tmp_path / name / "model.safetensors")
        with pytest.raises(StateError, match=message):
            load_valued(tmp_path / name)
