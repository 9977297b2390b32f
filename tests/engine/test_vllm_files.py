"""What vLLM is given of a policy: its weights and a config of ours, whatever the host wrote. It needs no vLLM."""

import json
from pathlib import Path

import pytest

from shoal.config import TinyPolicy
from shoal.engine.vllm.checkpoint import files_for_vllm
from shoal.errors import StateError
from shoal.models.hf_config import HFConfig
from shoal.models.random_model import make_tiny
from shoal.models.transformer_config import TransformerConfig
from tests.engine.architectures import write_any

LOUD = {
    "architectures": ["NoSuchModel"], "speculators_config": {"algorithm": "eagle"}, "compression_config": {"a": 1},
    "auto_map": {"AutoConfig": "a.B"}, "torch_dtype": "float64", "mine": {"architectures": ["NoSuchModel"]},
}  # fmt: skip


def _tell(directory: Path, **changes: object) -> None:
    """Write keys into a config."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_vllm_reads_a_config_of_ours_and_the_weights_that_count(tmp_path: Path) -> None:
    make_tiny(TinyPolicy(), tmp_path, 0, "float32")
    plain = TransformerConfig.from_directory(tmp_path)
    _tell(tmp_path, **LOUD)
    for other in ("hf_quant_config.json", "params.json", "other.safetensors"):
        (tmp_path / other).write_bytes((tmp_path / "model.safetensors").read_bytes())
    with files_for_vllm(tmp_path, TransformerConfig.from_directory(tmp_path)) as files:
        assert sorted(path.name for path in files.iterdir()) == ["config.json", "model.safetensors"]
        assert json.loads((files / "config.json").read_text()) == plain.to_hf()
        assert (files / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    assert not files.exists()


def test_of_another_architecture_vllm_reads_the_keys_that_transformers_knows(tmp_path: Path) -> None:
    directory = write_any("gpt2", tmp_path / "gpt2")
    told = []
    for changes in ({}, LOUD):
        _tell(directory, **changes)
        with files_for_vllm(directory, HFConfig.from_directory(directory)) as files:
            told.append(json.loads((files / "config.json").read_text()))
    assert told[0] == told[1] and told[0]["architectures"] == ["GPT2LMHeadModel"]
    assert told[0]["n_embd"] == json.loads((directory / "config.json").read_text())["n_embd"]
    assert not told[0].keys() & (LOUD.keys() - {"architectures"})


def test_a_model_with_an_inner_config_is_refused(tmp_path: Path) -> None:
    directory = write_any("gpt2", tmp_path / "gpt2")
    inner = json.loads((directory / "config.json").read_text())
    _tell(directory, text_config=inner | {"architectures": ["NoSuchModel"]})
    with (
        pytest.raises(StateError, match="also reads images"),
        files_for_vllm(directory, HFConfig.from_directory(directory)),
    ):
        pass


def test_weights_that_are_not_those_of_the_config_are_refused_before_vllm_sees_them(tmp_path: Path) -> None:
    make_tiny(TinyPolicy(), tmp_path, 0, "float32")
    _tell(tmp_path, intermediate_size=1 << 20)
    with pytest.raises(StateError), files_for_vllm(tmp_path, TransformerConfig.from_directory(tmp_path)):
        pass
