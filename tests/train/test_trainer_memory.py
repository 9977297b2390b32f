"""What a trainer is said to need is an upper bound of what it takes, and not far above it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.launch.memory_plan import KEPT
from shoal.models.memory import Layout, MemoryPart, critic_parameters, judge_parts, trainer_parts, trainer_state_bytes
from shoal.models.transformer_config import TransformerConfig

MEASURE = """
import ctypes, json, re, sys
from pathlib import Path
import numpy as np
import torch
from shoal.config import SamplingConfig, TrainConfig
from shoal.models.lora import begin_adapter
from shoal.models.lora_config import AdapterSpec
from shoal.models.transformer import Transformer
from shoal.models.transformer_config import TransformerConfig
from shoal.models.value_head import TransformerWithValueHead
from shoal.protocol.algorithm_config import Ppo
from shoal.train.critic import critic_of
from shoal.train.rows import TrainingRow
from shoal.train.learner import Learner

torch.set_num_threads(1)
spec, recompute, kind = TransformerConfig(**json.loads(sys.argv[1])), *sys.argv[3:5]
base = kind if kind == "nf4" else ""
rows, prompt, length, budget = json.loads(sys.argv[2])

def kb(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def learner_of(spec):
    model = Transformer(spec, coded=torch.float32 if base else None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
        for buffer in model.buffers():
            buffer.fill_(0 if buffer.is_floating_point() else 1)
    if base:
        begin_adapter(model, AdapterSpec(8, 8.0), 1)
    config = TrainConfig(microbatch_tokens=budget, recompute=recompute)
    if kind == "critic":
        config = TrainConfig(microbatch_tokens=budget, recompute=recompute, algorithm=Ppo(advantage="gae"))
    return Learner(model, config, SamplingConfig(), steps=10, critic=critic_of(config, lambda: valued(spec)))

def valued(spec):
    model = TransformerWithValueHead(spec)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    return model

def rows_for(spec, rows, prompt, length):
    one = np.ones(length - prompt, np.float32)
    rng = np.random.default_rng(0)
    return [
        TrainingRow(
            rng.integers(0, spec.vocab_size, length), np.arange(prompt, length), -one, one, one, 1.0, 0, "", (0, i, 0)
        )
        for i in range(rows)
    ]

small = TransformerConfig("qwen3", 64, 2, 2, 1, 32, 64, 64, 64, 1e4, 1e-5, True, (0,))
learner_of(small).step(rows_for(small, 2, 8, 16), 0)  # torch reads its code at the first use
ctypes.CDLL(None).malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")
anonymous, of_files = kb("RssAnon"), kb("RssFile")
learner_of(spec).step(rows_for(spec, rows, prompt, length), 0)
print((kb("VmHWM") - anonymous - max(of_files, kb("RssFile"))) * 1024)  # the kernel drops pages of files as it likes
"""

SHAPES = {
    "long micro-batch": (
        dict(width=384, layers=6, heads=6, kv_heads=6, mlp_width=768, vocab_size=64),
        (4, 16, 512, 2048),
    ),
    "many weights": (dict(width=768, layers=6, heads=8, kv_heads=2, mlp_width=2048, vocab_size=64), (2, 64, 256, 256)),
    "many weights of a critic": (
        dict(width=768, layers=6, heads=8, kv_heads=2, mlp_width=2048, vocab_size=64),
        (2, 64, 256, 256),
    ),
    "many codes": (
        dict(width=1024, layers=16, heads=8, kv_heads=2, mlp_width=4096, vocab_size=64),
        (2, 64, 256, 256),
    ),
    "many words": (dict(width=128, layers=2, heads=4, kv_heads=2, mlp_width=384, vocab_size=32000), (2, 64, 512, 1024)),
}
"""Sizes of the policy; rows, tokens of a prompt and of a row, and of a micro-batch."""
QUICK = {
    ("long micro-batch", "layers"), ("many weights", "none"),
}  # fmt: skip
"""The others are measured by the slow tests."""

SPARE_BYTES = 40_000_000
"""Code of torch that the small policy did not use."""


def spec_of(sizes: dict[str, int], **more: object) -> dict[str, object]:
    rest = dict(family="qwen3", max_positions=1 << 14, rope_theta=1e4, norm_eps=1e-5, tied=True, eos_ids=(0,))
    return {"head_dim": sizes["width"] // sizes["heads"], **rest, **sizes, **more}


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="no other system tells how much was taken at most"
)
@pytest.mark.parametrize(
    ("shape", "recompute"),
    [
        pytest.param(shape, recompute, marks=() if (shape, recompute) in QUICK else pytest.mark.slow)
        for shape in SHAPES
        for recompute in ("none", "layers")
    ],
)
def test_a_step_takes_at_most_what_it_is_said_to_need_and_not_much_less(shape: str, recompute: str) -> None:
    (sizes, work), kind = SHAPES[shape], {"many codes": "nf4", "many weights of a critic": "critic"}.get(shape, "")
    spec = spec_of(sizes)
    command = [sys.executable, "-c", MEASURE, json.dumps(spec), json.dumps(work), recompute, kind]
    took = int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    layout = Layout(
        recompute=recompute, microbatch_tokens=work[3], row_tokens=work[2], rank=8 if kind == "nf4" else 0,
        base=kind if kind == "nf4" else "", critic=kind == "critic",
    )  # fmt: skip
    need = sum(part.size for part in trainer_parts(TransformerConfig(**spec), layout))  # type: ignore[arg-type]
    assert took <= need + SPARE_BYTES and need <= 1.3 * took + SPARE_BYTES, (shape, took, need)


QWEN = {
    "0.6b": dict(width=1024, layers=28, heads=16, kv_heads=8, head_dim=128, mlp_width=3072, vocab_size=151936),
    "1.7b": dict(width=2048, layers=28, heads=16, kv_heads=8, head_dim=128, mlp_width=6144, vocab_size=151936),
    "8b": dict(width=4096, layers=36, heads=32, kv_heads=8, head_dim=128, mlp_width=12288, vocab_size=151936),
}


def qwen(name: str) -> TransformerConfig:
    return TransformerConfig(**spec_of(QWEN[name], tied=name != "8b"))  # type: ignore[arg-type]


def test_the_counts_are_those_of_the_published_models() -> None:
    assert [qwen(name).num_parameters() for name in QWEN] == [596_049_920, 1_720_574_976, 8_190_735_360]
    assert qwen("0.6b").adapter_parameters(8) == 5_046_272


def parts(spec: TransformerConfig, layout: Layout) -> dict[str, MemoryPart]:
    return {part.name: part for part in trainer_parts(spec, layout)}


def test_each_layout_says_where_its_bytes_are() -> None:
    spec = qwen("1.7b")
    plain, coarse = (parts(spec, layout) for layout in (Layout(), Layout("bfloat16", "offloaded")))
    weights = spec.num_parameters()
    assert plain["weights"].size == plain["gradients"].size == 4 * weights and plain["moments"].size == 8 * weights
    assert coarse["weights"].size == 2 * weights and "float32 weights" not in plain
    assert {name for name, part in coarse.items() if part.on_cpu} == {"float32 weights", "moments"}
    adapter = {part.name: part.size for part in trainer_parts(spec, Layout("bfloat16", rank=16))}
    assert adapter["gradients"] == adapter["adapter"] == 4 * spec.adapter_parameters(16)


def test_a_reference_is_another_policy_unless_an_adapter_is_learned() -> None:
    spec = qwen("0.6b")
    whole = {part.name: part.size for part in trainer_parts(spec, Layout("bfloat16", reference=True))}
    assert whole["reference"] == whole["weights"] == 2 * spec.num_parameters()
    assert "reference" not in parts(spec, Layout("bfloat16"))
    assert "reference" not in {part.name for part in trainer_parts(spec, Layout("bfloat16", rank=16, reference=True))}


def test_a_critic_is_the_layers_once_more_with_moments_of_their_own() -> None:
    spec = qwen("8b")
    layers = spec.num_parameters() - spec.vocab_size * spec.width + spec.width
    assert critic_parameters(spec) == layers
    assert critic_parameters(qwen("0.6b")) == qwen("0.6b").num_parameters() + 1024
    without, plain, coarse = (
        parts(spec, layout) for layout in (Layout(), Layout(critic=True), Layout("bfloat16", "offloaded", critic=True))
    )
    more = plain.keys() - without.keys()
    assert {name: plain[name].size for name in more} == {"critic": 4 * layers, "critic's moments": 8 * layers}
    assert coarse["critic"].size == 2 * layers and not coarse["critic"].on_cpu
    assert coarse["critic's float32 weights"].on_cpu and coarse["critic's moments"].on_cpu
    assert trainer_state_bytes(spec, Layout(critic=True)) - trainer_state_bytes(spec, Layout()) == 12 * layers
    assert {*KEPT} >= {*coarse, "adapter", "reference"} - {"gradients", "activations", "holes between them"}


def test_a_judge_is_weights_of_its_own_size_and_one_layer_at_work() -> None:
    large, layout = qwen("8b"), Layout("bfloat16", microbatch_tokens=4096)
    weights, work = judge_parts("teacher", large, layout)
    assert weights.size == 2 * large.num_parameters() and 0 < work.size < weights.size / 10
    assert weights.name in KEPT and work.name not in KEPT


def test_a_card_of_24_gb_trains_what_it_is_said_to_train() -> None:
    """0.6B and 1.7B whole, and an adapter of 8B."""

    def on_card(name: str, layout: Layout) -> float:
        return sum(part.size for part in trainer_parts(qwen(name), layout) if not part.on_cpu) / 1e9

    assert on_card("0.6b", Layout(recompute="layers", microbatch_tokens=4096)) < 24
    assert on_card("1.7b", Layout(recompute="layers", microbatch_tokens=4096)) > 24
    assert on_card("1.7b", Layout("bfloat16", "8bit", "layers", microbatch_tokens=4096)) < 24
    assert on_card("1.7b", Layout("bfloat16", "offloaded", "layers", microbatch_tokens=4096)) < 24
    plain, coded = (on_card("8b", Layout("bfloat16", "float32", "layers", 32, 4096, base=base)) for base in ("", "nf4"))
    assert plain < 24 and coded < plain - 10
