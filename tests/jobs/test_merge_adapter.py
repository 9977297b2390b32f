"""`shoal policy merge`: the whole model, what merging changed, and adapters of another base."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoal.cli.main import main
from shoal.config import TinyPolicy
from shoal.errors import ConfigError, StateError
from shoal.jobs import merge_adapter as role
from shoal.models.checkpoint import load_policy, save_policy
from shoal.models.config import write_json
from shoal.models.lora import begin_adapter
from shoal.models.lora_config import AdapterSpec
from shoal.models.random_model import make_tiny
from shoal.models.transformer_config import TransformerConfig
from shoal.weights.base_model import base_of, link_from

TINY = TinyPolicy(width=32, layers=2, heads=4, kv_heads=2, mlp_width=48, max_positions=64)
GENERATION = {"eos_token_id": [5, 0], "pad_token_id": 3, "top_k": 20}


def model_with(tmp_path: Path, size: float, dtype: str = "float32") -> Path:
    """The directory of an adapter alone, whose base is in `base` beside it."""
    make_tiny(TINY, tmp_path / "base", 3, dtype)
    write_json(tmp_path / "base" / "generation_config.json", GENERATION)
    model = load_policy(tmp_path / "base")
    begin_adapter(model, AdapterSpec(4, 8.0), 1, base_of(tmp_path / "base"))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.trainable().items():
            if name.endswith("lora_B"):
                parameter.normal_(0.0, size, generator=generator)
    save_policy(model, tmp_path / "adapter", dtype, tokenizer_from=tmp_path / "base")
    return tmp_path / "adapter"


def logits(directory: Path) -> torch.Tensor:
    return role._logits(load_policy(directory))


@pytest.mark.parametrize("beside", [True, False])
def test_the_merged_model_computes_what_the_adapter_over_its_base_does(tmp_path, beside):
    adapter = model_with(tmp_path, 0.2)
    if beside:
        link_from(tmp_path / "base", adapter)
    said = role.main(adapter, None if beside else tmp_path / "base", tmp_path / "merged", "", 1)
    assert "a whole model in float32" in said and "0.00 % of them" in said
    assert {path.name for path in (tmp_path / "merged").iterdir()} >= {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
    }
    assert json.loads((tmp_path / "merged" / "generation_config.json").read_text()) == GENERATION
    assert not list((tmp_path / "merged").glob("adapter*"))
    link_from(tmp_path / "base", adapter)
    assert torch.allclose(logits(tmp_path / "merged"), logits(adapter), atol=1e-4)
    assert not torch.allclose(logits(tmp_path / "merged"), logits(tmp_path / "base"), atol=1e-2)


def test_a_merge_for_which_memory_does_not_suffice_is_refused_before_it_loads(tmp_path, capsys, monkeypatch):
    adapter = model_with(tmp_path, 0.2)
    monkeypatch.setattr(role, "free_bytes", lambda: 100_000)
    monkeypatch.setattr(role, "load_policy", None)
    code = main(["policy", "merge", str(adapter), "--base", str(tmp_path / "base"), "--out", str(tmp_path / "merged")])
    said = capsys.readouterr().err.strip()
    assert code == 2 and "\n" not in said
    assert "merging needs about" in said and "of weights in float32, and 100 kB are free: close other programs" in said


MEASURE = """
import ctypes, json, re, sys
from pathlib import Path
from shoal.models.lora import begin_adapter
from shoal.models.lora_config import AdapterSpec
from shoal.models.checkpoint import load_policy, save_policy
from shoal.models.transformer import Transformer
from shoal.models.transformer_config import TransformerConfig
from shoal.models.random_model import initialise
from shoal.jobs import merge_adapter as merge

folder, spec = Path(sys.argv[1]), TransformerConfig(**json.loads(sys.argv[2]))
model = Transformer(spec)
initialise(model, 1)
save_policy(model, folder / "base", "float32")
begin_adapter(model, AdapterSpec(8, 8.0), 1)
save_policy(model, folder / "adapter", "float32")
del model

def kb(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

ctypes.CDLL(None).malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")
before = kb("VmRSS")
merge.main(folder / "adapter", folder / "base", folder / "merged", "", 1)
print((kb("VmHWM") - before) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no other system tells what was taken at most")
@pytest.mark.parametrize("shape", [(256, 2, 32_000), (512, 12, 1000)])
def test_a_merge_takes_at_most_what_it_is_said_to_need_and_not_much_less(tmp_path, shape):
    width, layers, vocabulary = shape
    spec = dict(
        family="qwen3", width=width, layers=layers, heads=4, kv_heads=4, mlp_width=4 * width, vocab_size=vocabulary,
        head_dim=width // 4, max_positions=1 << 14, rope_theta=1e4, norm_eps=1e-5, tied=True, eos_ids=[0],
    )  # fmt: skip
    command = [sys.executable, "-c", MEASURE, str(tmp_path), json.dumps(spec)]
    took = int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    need = role.needs_of_merge(TransformerConfig(**{**spec, "eos_ids": (0,)}), AdapterSpec(8, 8.0))
    spare = 30_000_000  # code of torch that is read at its first use
    assert took < need + spare and need < 2 * took + spare, f"{took / 1e6:.0f} MB, said {need / 1e6:.0f}"


def test_transformers_opens_the_merged_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    role.main(model_with(tmp_path, 0.2), tmp_path / "base", tmp_path / "merged", "", 1)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokens_BT = torch.arange(20).view(1, 20)
    ours = load_policy(tmp_path / "merged")
    with torch.no_grad():
        assert torch.allclose(whole(tokens_BT).logits, ours.logits(ours.hidden(tokens_BT)), atol=1e-4)


def test_small_changes_that_bfloat16_rounds_away_are_reported(tmp_path):
    adapter = model_with(tmp_path, 2e-5, "bfloat16")

    def lost(dtype: str) -> float:
        said = role.main(adapter, tmp_path / "base", tmp_path / dtype, dtype, 1)
        return float(said.rsplit("rounding changed ", 1)[1].split(" %")[0])

    assert lost("float32") < 1 < 50 < lost("bfloat16")
    assert "a whole model in bfloat16" in role.main(adapter, tmp_path / "base", tmp_path / "as the base", "", 1)


def test_an_adapter_of_another_base_is_refused_by_its_own_message(tmp_path, capsys):
    adapter = model_with(tmp_path, 0.2)
    make_tiny(TINY, tmp_path / "other", 4, "float32")
    with pytest.raises(StateError, match=r"belongs to base [0-9a-f]{12}, and .*other holds base [0-9a-f]{12}"):
        role.main(adapter, tmp_path / "other", tmp_path / "merged", "", 1)
    code = main(["policy", "merge", str(adapter), "--base", str(tmp_path / "other"), "--out", str(tmp_path / "merged")])
    said = capsys.readouterr().err.strip()
    assert code == 2 and "\n" not in said and not (tmp_path / "merged").exists()


def test_what_cannot_be_merged_is_said(tmp_path):
    adapter = model_with(tmp_path, 0.2)
    with pytest.raises(ConfigError, match="holds no adapter"):
        role.main(tmp_path / "base", None, tmp_path / "merged", "", 1)
    with pytest.raises(ConfigError, match="without its base: name the base's directory with --base"):
        role.main(adapter, None, tmp_path / "merged", "", 1)
    with pytest.raises(ConfigError, match="exists already"):
        role.main(adapter, tmp_path / "base", tmp_path / "base", "", 1)
    other = tmp_path / "with adapter"
    save_policy(load_policy(tmp_path / "base"), other, "float32")
    (other / "adapter_config.json").write_text("{}")
    with pytest.raises(StateError, match="holds an adapter itself"):
        role.main(adapter, other, tmp_path / "merged", "", 1)
