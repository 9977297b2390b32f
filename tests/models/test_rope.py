"""Scaled rotations: our logits are those of `transformers`, at every length and after a round trip through the config."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shoal.config import TinyPolicy
from shoal.engine.interface import EngineRequest, ScoreRequest
from shoal.engine.native import LocalEngine
from shoal.models.checkpoint import load_policy, save_policy
from shoal.models.layers import rope_table
from shoal.models.random_model import initialise, tiny_spec
from shoal.models.rope import RopeScaling, frequencies
from shoal.models.transformer import Transformer
from shoal.models.transformer_config import TransformerConfig

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear, old name": {"type": "linear", "factor": 2.5},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 64},
    "llama3, all wavelengths within": {**LLAMA3, "original_max_position_embeddings": 8192},
    "llama3, original length left out": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, old name": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
    "yarn, attention given": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
    "yarn, with mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn, betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8, "beta_slow": 2, "truncate": False},
    "yarn, a ramp without width": {
        "rope_type": "yarn", "factor": 2.0, "beta_fast": 1.01, "beta_slow": 1.0, "original_max_position_embeddings": 6,
    },
}  # fmt: skip
TOKENS_BT = torch.randint(0, 64, (2, 500), generator=torch.Generator().manual_seed(1))


def _checkpoint(directory: Path, change: dict[str, Any], family: str = "llama", tied: bool = False) -> Path:
    """A small policy whose attention looks far back, with these keys in its config."""
    tiny = TinyPolicy(family=family, width=64, layers=2, heads=4, kv_heads=2, mlp_width=48, tied=tied)  # type: ignore[arg-type]
    model = Transformer(tiny_spec(tiny))
    initialise(model, seed=7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter *= 2
    save_policy(model, directory, "float32")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | change))
    return directory


def _difference(directory: Path, again: Path | None = None) -> float:
    peer, model = AutoModelForCausalLM.from_pretrained(directory), load_policy(again or directory)
    with torch.no_grad():
        return float((peer(TOKENS_BT).logits - model.logits(model(TOKENS_BT))).abs().max())


@pytest.mark.parametrize(
    ("kind", "key"),
    [*((kind, "rope_parameters") for kind in KINDS), ("linear", "rope_scaling"), ("yarn", "rope_scaling")],
)
def test_a_scaled_rotation_gives_the_logits_of_transformers(kind: str, key: str, tmp_path: Path) -> None:
    other = "rope_parameters" if key == "rope_scaling" else "rope_scaling"
    directory = _checkpoint(tmp_path / "one", {key: KINDS[kind] | {"rope_theta": 1e4}, other: None})
    assert _difference(directory) < 1e-4
    plain = _checkpoint(tmp_path / "plain", {})
    assert _difference(plain, again=directory) > 1e-2  # the scaling shows in these logits
    save_policy(load_policy(directory), tmp_path / "two", "float32")
    assert TransformerConfig.from_directory(tmp_path / "two") == TransformerConfig.from_directory(directory)
    assert _difference(tmp_path / "two") < 1e-4
    assert _difference(tmp_path / "two", again=directory) < 1e-4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_all_families_scale_tied_and_untied(family: str, tied: bool, tmp_path: Path) -> None:
    assert _difference(_checkpoint(tmp_path, {"rope_scaling": KINDS["yarn"]}, family, tied)) < 1e-4


def test_the_original_length_beside_the_parameters_goes_first(tmp_path: Path) -> None:
    change = {"rope_scaling": KINDS["yarn"], "original_max_position_embeddings": 32}
    assert _difference(_checkpoint(tmp_path, change)) < 1e-4
    scaling = TransformerConfig.from_directory(tmp_path).rope_scaling
    assert scaling is not None and scaling.original == 32


@pytest.mark.parametrize("kind", KINDS)
def test_angles_far_from_the_beginning_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    directory = _checkpoint(tmp_path, {"rope_scaling": KINDS[kind] | {"rope_theta": 5e5}, "rope_parameters": None})
    spec, peer = TransformerConfig.from_directory(directory), AutoModelForCausalLM.from_pretrained(directory)
    positions = torch.tensor([0, 7, 1000, 100_000, 131_071])
    cos, sin = peer.model.rotary_emb(torch.zeros(1), positions[None])
    keys_Te = rope_table(spec, positions)[:, 0, -1]
    half = spec.head_dim // 2
    assert (keys_Te.real - cos[0, :, :half]).abs().max() < 1e-6 > (keys_Te.imag - sin[0, :, :half]).abs().max()


def test_llama_3_1_has_the_frequencies_of_its_authors() -> None:
    """Worked by hand for head_dim 128, theta 500,000: pair 0 stays, pair 63 is divided by 8, and pair 33 lies between."""
    scaling = RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)
    found_e = frequencies(scaling, 500000.0, 128, torch.device("cpu"))
    plain_e = 1.0 / 500000.0 ** (torch.arange(0, 128, 2).float() / 128)
    assert found_e[0] == plain_e[0] and found_e[63] == plain_e[63] / 8
    kept = (8192 * float(plain_e[33]) / 6.283185307 - 1) / 3
    assert 0 < kept < 1
    assert found_e[33] == pytest.approx(float(plain_e[33]) * (kept + (1 - kept) / 8), rel=1e-6)


def test_the_engine_writes_and_scores_with_the_scaled_rotation(tmp_path: Path) -> None:
    directory = _checkpoint(tmp_path, {"rope_scaling": KINDS["yarn"]})
    engine = LocalEngine(threads=1)
    engine.load(directory, 0)
    prompt = TOKENS_BT[0, :100].tolist()
    (turn,) = engine.extend([EngineRequest("r", prompt, bytes(32), 60, frozenset())], 1.0)
    places = list(range(100, 160))
    (score,) = engine.score([ScoreRequest([*prompt, *turn.token_ids], places, bytes(32))], 1.0)
    assert score.gaps_P.max() == 0
    assert abs(score.logprobs_P - torch.tensor(turn.logprobs).numpy()).max() < 1e-4


def test_a_spec_with_scaling_reads_back_from_its_own_config(tmp_path: Path) -> None:
    for kind in KINDS.values():
        scaled = TransformerConfig.from_directory(_checkpoint(tmp_path, {"rope_scaling": kind})).rope_scaling
        spec = dataclasses.replace(tiny_spec(TinyPolicy()), rope_scaling=scaled)
        (tmp_path / "config.json").write_text(json.dumps(spec.to_hf()))
        assert TransformerConfig.from_directory(tmp_path) == spec
