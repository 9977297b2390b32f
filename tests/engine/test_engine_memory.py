"""What an engine is said to need is an upper bound of what it takes, and not far above it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.models.memory import engine_memory, engine_memory_in
from shoal.models.transformer_config import TransformerConfig

MEASURE = """
import ctypes, json, re, sys
from pathlib import Path
import torch
from shoal.engine.interface import EngineRequest, ScoreRequest
from shoal.engine.native import LocalEngine
from shoal.models.lora import begin_adapter
from shoal.models.lora_config import AdapterSpec
from shoal.models.checkpoint import save_policy, write_nf4
from shoal.models.transformer import Transformer
from shoal.models.transformer_config import TransformerConfig

spec = TransformerConfig(**json.loads(sys.argv[2]))
rows, opening, tokens, rank = map(int, sys.argv[3:7])
model = Transformer(spec)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.normal_(0, 0.02)
save_policy(model, Path(sys.argv[1]), "float32")
if sys.argv[7]:
    write_nf4(Path(sys.argv[1]), Path(sys.argv[1]))
if rank:
    begin_adapter(model, AdapterSpec(rank, 8.0), 1)
    save_policy(model, Path(sys.argv[1] + "-adapter"), "float32")
    for file in Path(sys.argv[1] + "-adapter").glob("adapter*"):
        file.rename(Path(sys.argv[1]) / file.name)
del model

def taken(act):
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    anonymous, of_files = kb("RssAnon"), kb("RssFile")
    act()
    return (kb("VmHWM") - anonymous - max(of_files, kb("RssFile"))) * 1024  # the kernel drops pages of files as it likes

def kb(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def play():
    requests = [EngineRequest(str(i), said[i], bytes([i % 256]) * 32, tokens - opening, frozenset()) for i in range(rows)]
    for one, turn in zip(said, engine.extend(requests, 1.0)):
        one += turn.token_ids
    engine.forget(map(str, range(rows)))

engine = LocalEngine(1)
said = [torch.randint(1, spec.vocab_size, (opening,)).tolist() for _ in range(rows)]
load, played = taken(lambda: engine.load(Path(sys.argv[1]), 0)), taken(play)
asked = [ScoreRequest(one, range(opening, len(one)), b"1" * 32) for one in said]
print(json.dumps([load, played, taken(lambda: engine.score(asked, 1.0, hidden=True))]))
"""

only_linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="no other system tells how much was taken at most"
)

SHAPES = {
    "many words": (dict(width=256, layers=4, heads=4, kv_heads=2, mlp_width=512, vocab_size=32000), (128, 20, 64)),
    "many weights": (dict(width=512, layers=12, heads=8, kv_heads=8, mlp_width=2048, vocab_size=1000), (16, 20, 64)),
    "long prompts": (dict(width=128, layers=2, heads=4, kv_heads=4, mlp_width=256, vocab_size=64), (4, 8000, 8050)),
    "large adapter": (
        dict(width=512, layers=6, heads=8, kv_heads=2, mlp_width=2048, vocab_size=1000),
        (16, 20, 64, 256),
    ),
    "many codes": (
        dict(width=1024, layers=12, heads=8, kv_heads=4, mlp_width=4096, vocab_size=1000),
        (16, 20, 64, 8),
    ),
    "many rollouts": (dict(width=128, layers=2, heads=4, kv_heads=4, mlp_width=256, vocab_size=64), (256, 20, 200)),
}
LONG = ("many codes", "long prompts", "many words", "large adapter")
"""These take most of the time. The slow tests have them."""


@only_linux
@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=pytest.mark.slow if shape in LONG else ()) for shape in SHAPES]
)
def test_an_engine_takes_at_most_what_it_is_said_to_need_and_not_much_less(shape: str, tmp_path: Path) -> None:
    sizes, (rows, opening, tokens, *ranks) = SHAPES[shape]
    rank, base = ranks[0] if ranks else 0, "nf4" if shape == "many codes" else ""
    more = dict(
        head_dim=sizes["width"] // sizes["heads"], max_positions=1 << 14, rope_theta=1e4, norm_eps=1e-5, tied=True
    )
    spec = sizes | more | {"family": "qwen3", "eos_ids": [0]}
    numbers = map(str, (rows, opening, tokens, rank))
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "policy"), json.dumps(spec), *numbers, base]
    policy = TransformerConfig(**{**spec, "eos_ids": (0,)})  # type: ignore[arg-type]
    needs = engine_memory(policy, "float32", rank, base=base)
    need = [needs.load(), needs.play(rows, tokens), needs.score(rows * tokens, tokens, hidden=True)]
    spare = 30_000_000  # code of torch that is read at its first use, and what its allocator keeps
    taken = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    for took, most in zip(taken, need, strict=True):
        assert took <= most + spare and most <= 4 * took + 8 * spare, (shape, took, most)


MODELS = {
    "gpt2": """GPT2Config(vocab_size=VOCAB, n_embd=256, n_layer=4, n_head=4, n_positions=4096, eos_token_id=0)""",
    "olmoe": """OlmoeConfig(vocab_size=VOCAB, hidden_size=256, intermediate_size=128, num_hidden_layers=4, eos_token_id=0,
        num_attention_heads=4, num_key_value_heads=4, num_experts=16, num_experts_per_tok=4, pad_token_id=0,
        max_position_embeddings=4096)""",
}
HF_SHAPES = {"many words": (20000, (64, 20, 64)), "long prompts": (64, (4, 2000, 2040))}

HEAD, TAIL = MEASURE.split("spec = TransformerConfig", 1)[0], MEASURE.split("\ndef taken", 1)[1]
LOADED = """
import transformers
from transformers import GPT2Config, OlmoeConfig
from types import SimpleNamespace
VOCAB = int(sys.argv[6])
spec = SimpleNamespace(vocab_size=VOCAB)
rows, opening, tokens = map(int, sys.argv[3:6])
transformers.AutoModelForCausalLM.from_config({config}).save_pretrained(sys.argv[1])
from shoal.engine.hf import TransformersEngine as LocalEngine
"""


@only_linux
@pytest.mark.slow
@pytest.mark.parametrize(("model", "shape"), [("gpt2", "long prompts"), ("olmoe", "many words")])
def test_an_engine_of_transformers_takes_at_most_what_it_is_said_to_need(
    model: str, shape: str, tmp_path: Path
) -> None:
    vocabulary, (rows, opening, tokens) = HF_SHAPES[shape]
    program = HEAD + LOADED.format(config=MODELS[model]) + "\ndef taken" + TAIL
    numbers = map(str, (rows, opening, tokens, vocabulary))
    command = [sys.executable, "-c", program, str(tmp_path / "policy"), "", *numbers]
    load, play, score = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    needs = engine_memory_in(tmp_path / "policy", "float32")
    spare = 30_000_000  # code of torch that is read at its first use
    for took, need in (
        (load, needs.load()),
        (play, needs.play(rows, tokens)),
        (score, needs.score(rows * tokens, tokens, hidden=True)),
    ):
        assert took <= need + spare, (model, shape, took, need)
        assert need <= 8 * took + 12 * spare, (model, shape, took, need)


def test_what_no_machine_has_is_a_number_too() -> None:
    sizes = dict(width=1 << 24, layers=800, heads=1 << 12, kv_heads=1 << 12, head_dim=1 << 12, mlp_width=1 << 24)
    spec = TransformerConfig("llama", **sizes, vocab_size=1 << 24, max_positions=1 << 24, rope_theta=1e4, norm_eps=1e-5,
                      tied=False, eos_ids=(0,))  # fmt: skip
    needs = engine_memory(spec, "float32")
    assert needs.play(1 << 60, 1 << 60) > 1 << 60 and needs.load() > needs.loaded > 1 << 50
    assert needs.play(0, -5) > 0
