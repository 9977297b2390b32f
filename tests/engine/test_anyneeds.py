"""What the engine for other architectures is said to need is an upper bound of what it takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.engine.memory_estimate import AnyNeeds
from shoal.models.hf_config import HFConfig
from tests.engine.test_needs import MEASURE

MODELS = {
    "gpt2": """GPT2Config(vocab_size=VOCAB, n_embd=256, n_layer=4, n_head=4, n_positions=4096, eos_token_id=0)""",
    "olmoe": """OlmoeConfig(vocab_size=VOCAB, hidden_size=256, intermediate_size=128, num_hidden_layers=4, eos_token_id=0,
        num_attention_heads=4, num_key_value_heads=4, num_experts=16, num_experts_per_tok=4, pad_token_id=0,
        max_position_embeddings=4096)""",
}
SHAPES = {"many words": (20000, (64, 20, 64)), "long prompts": (64, (4, 2000, 2040))}

HEAD, TAIL = MEASURE.split("spec = PolicySpec", 1)[0], MEASURE.split("\ndef taken", 1)[1]
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


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="no other system tells how much was taken at most"
)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "shape"), [("gpt2", "long prompts"), ("olmoe", "many words")])
def test_an_engine_takes_at_most_what_it_is_said_to_need(model: str, shape: str, tmp_path: Path) -> None:
    vocabulary, (rows, opening, tokens) = SHAPES[shape]
    program = HEAD + LOADED.format(config=MODELS[model]) + "\ndef taken" + TAIL
    numbers = map(str, (rows, opening, tokens, vocabulary))
    command = [sys.executable, "-c", program, str(tmp_path / "policy"), "", *numbers]
    load, play, score = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    needs = AnyNeeds.of(HFConfig.from_directory(tmp_path / "policy"), tmp_path / "policy", "float32")
    spare = 30_000_000  # code of torch that is read at its first use
    for took, need in (
        (load, needs.load()),
        (play, needs.play(rows, tokens)),
        (score, needs.score(rows * tokens, tokens, hidden=True)),
    ):
        assert took <= need + spare, (model, shape, took, need)
        assert need <= 8 * took + 12 * spare, (model, shape, took, need)
