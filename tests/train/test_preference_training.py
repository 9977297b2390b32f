"""Learning from pairs: DPO raises what is preferred, pairs stay together, and files of pairs are read strictly."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.chat.renderer import Renderer
from shoal.config import TinyPolicy
from shoal.errors import StateError
from shoal.jobs import preferences as prefer
from shoal.models.checkpoint import load_policy
from shoal.models.config import write_json
from shoal.models.open_model import spec_of
from shoal.models.random_model import make_tiny
from shoal.models.value_head import begin_valued, load_valued
from shoal.train import preference_training
from shoal.train.dataset_files import Examples, tokenizer_digest
from shoal.train.frozen_models import row_scores, scores_of
from shoal.train.microbatches import MicroBatch, collate
from shoal.train.preference_training import (
    PairFigures,
    PairSettings,
    answer_logps,
    held_out,
    in_microbatches,
    measure_scores,
    pair_sums,
    prefer_scores,
)
from shoal.train.rows import TrainingRow, example_row

SETTINGS = PairSettings(steps=20, batch=8, lr=3e-3, warmup_steps=2, max_grad_norm=1.0, seed=1)


@pytest.fixture
def start(tmp_path: Path) -> Path:
    tiny = TinyPolicy(width=16, layers=1, heads=2, kv_heads=1, mlp_width=32, max_positions=64)
    make_tiny(tiny, tmp_path / "start", 1, "float32")
    write_json(tmp_path / "start" / "generation_config.json", {"eos_token_id": [5, 0], "temperature": 0.6, "top_k": 20})
    return tmp_path / "start"


def lines(path: Path, count: int = 40) -> Path:
    """Pairs in which the vowel is preferred."""
    pairs = [{"prompt": f"say {n}", "chosen": "aei"[n % 3] * 3, "rejected": "xyz"[n % 3] * 3} for n in range(count)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


def test_dpo_learns_which_answers_are_preferred_and_the_same_pairs_give_the_same_bytes(
    tmp_path: Path, start: Path
) -> None:
    pairs = prefer.read_pairs(lines(tmp_path / "pairs.jsonl"), start, 64)
    made = [prefer.train_dpo(start, pairs, 0.1, SETTINGS, tmp_path / name, "float32", 1) for name in ("one", "two")]
    said = made[0].figures
    assert (said["learned_pairs"], said["pairs"]) == (35, 5) and made[0] == made[1]
    assert said["accuracy"] == 1.0 and said["margin"] > 0.05
    one, two = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes() != (start / "model.safetensors").read_bytes()
    name = "generation_config.json"
    assert (tmp_path / "one" / name).read_bytes() == (start / name).read_bytes()
    before, after = load_policy(start), load_policy(tmp_path / "one")
    raised = [[new - old for old, new in zip(pair_sums(before, p), pair_sums(after, p), strict=True)] for p in pairs]
    assert all(chosen > rejected for chosen, rejected in raised)


def test_the_first_loss_of_dpo_is_ln_2(tmp_path: Path, start: Path) -> None:
    pairs = prefer.read_pairs(lines(tmp_path / "pairs.jsonl", 4), start, 64)
    told, model = list[float](), load_policy(start)
    preference_training.prefer_policy(
        model, pairs, pairs, 0.5, PairSettings(1, 4, 0.0, 0, 1.0, 0), lambda step, loss: told.append(loss)
    )
    assert told == [pytest.approx(math.log(2), abs=1e-6)]


def test_scores_learn_which_answers_are_preferred(tmp_path: Path, start: Path) -> None:
    pairs = prefer.read_pairs(lines(tmp_path / "pairs.jsonl"), start, 64)
    table = torch.nn.Embedding(64, 1)
    torch.nn.init.zeros_(table.weight)

    def score(batch: MicroBatch, rows: Sequence[TrainingRow]) -> torch.Tensor:
        return torch.zeros(len(rows)).index_add(0, batch.row_N, table(batch.target_N).squeeze(-1))

    learned, measured = held_out(pairs)
    assert measure_scores(score, measured).accuracy == 0.5
    found, tokens = prefer_scores(dict(table.named_parameters()), score, learned, measured, SETTINGS)
    assert found.accuracy == 1.0 and found == measure_scores(score, measured) and tokens > 0


def test_a_reward_model_learns_what_is_preferred_and_the_same_pairs_give_the_same_bytes(
    tmp_path: Path, start: Path
) -> None:
    pairs = prefer.read_pairs(lines(tmp_path / "pairs.jsonl"), start, 64)
    made = [prefer.train_reward_model(start, pairs, SETTINGS, tmp_path / name, "float32", 1) for name in ("one", "two")]
    said = made[0].figures
    assert (said["learned_pairs"], said["pairs"], said["accuracy_before"]) == (35, 5, 0.5) and made[0] == made[1]
    assert said["accuracy"] == 1.0 and said["margin"] > 0.05
    one, two = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    chosen, rejected = (
        scores_of(load_valued(tmp_path / "one"), [pair[side].tokens_T for pair in pairs], 2048) for side in (0, 1)
    )
    assert (chosen > rejected).all(), "and the trainer, which reads the files, ranks alike"


def test_a_reward_model_is_trained_on_the_scores_that_the_trainer_reads(tmp_path: Path, start: Path) -> None:
    (pair,) = prefer.read_pairs(lines(tmp_path / "pairs.jsonl", 1), start, 64)
    model = begin_valued(start)
    torch.nn.init.normal_(model.score.weight)
    longer = example_row([*pair.rejected.tokens_T, 5], [0] * (len(pair.rejected.tokens_T) - 1) + [1, 1])
    rows = [pair.chosen, longer]
    trained = row_scores(model)(collate(rows), rows)
    assert trained.requires_grad
    assert trained.tolist() == pytest.approx(scores_of(model, [row.tokens_T for row in rows], 1).tolist(), abs=1e-5)


def test_micro_batches_keep_pairs_together_and_add_up(
    tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = prefer.read_pairs(lines(tmp_path / "pairs.jsonl", 12), start, 64)
    whole = list(in_microbatches(pairs))
    monkeypatch.setattr(preference_training, "MICROBATCH_TOKENS", 100)
    parts = list(in_microbatches(pairs))
    assert len(whole) == 1 < len(parts) and [pair for part in parts for pair in part] == pairs
    model = load_policy(start)
    rows = [row for pair in pairs for row in pair]
    together = answer_logps(model)(collate(rows), rows)
    alone = [value for pair in pairs for value in pair_sums(model, pair)]
    assert torch.allclose(together, torch.tensor(alone), atol=1e-5)


def test_a_pair_in_eight_is_measured_and_ties_count_half() -> None:
    pairs = list(range(17))
    learned, measured = held_out(pairs)  # type: ignore[arg-type]
    assert measured == [0, 8, 16] and sorted(learned + measured) == pairs
    assert held_out(pairs[:9]) == (pairs[:9], pairs[:9])  # type: ignore[arg-type]
    assert PairFigures.of([1.0, 0.0, -1.0, 2.0]).accuracy == 0.625


def test_prompts_and_answers_may_be_messages_and_have_the_chats_tokens(tmp_path: Path, start: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    told = {
        "prompt": [{"role": "user", "content": "hi"}],
        "chosen": [{"role": "assistant", "content": "a"}],
        "rejected": "b",
    }
    path.write_text(json.dumps(told) + "\n\n")
    ((chosen, rejected),) = prefer.read_pairs(path, start, 64)
    renderer = Renderer.from_directory(start)
    prompt = renderer.start([{"role": "user", "content": "hi"}])
    assert chosen.tokens_T.tolist() == [*prompt, *renderer.encode("a"), renderer.eos_id]
    assert rejected.positions_P.tolist() == [len(prompt), len(prompt) + 1]


def test_a_thought_in_an_answer_is_learned_as_the_template_writes_it(tmp_path: Path, start: Path) -> None:
    said = {"role": "assistant", "content": "a", "reasoning_content": "b", "tool_calls": None}
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "hi", "chosen": [said], "rejected": "a"}))
    ((chosen, rejected),) = prefer.read_pairs(path, start, 64)
    texts = [Renderer.from_directory(start).decode(row.tokens_T.tolist()) for row in (chosen, rejected)]
    assert texts[0] == texts[1].removesuffix("a") + "<think>\nb\n</think>\n\na"


def test_tools_and_arguments_of_the_chat_template_reach_it(tmp_path: Path, start: Path) -> None:
    path, place = tmp_path / "pairs.jsonl", start / "tokenizer_config.json"
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    line = {"prompt": "a", "chosen": "b", "rejected": "c", "tools": tools, "chat_template_kwargs": {"mood": "merry "}}
    path.write_text(json.dumps(line))
    with pytest.raises(StateError, match="line 1: tools: the chat template does not show them"):
        prefer.read_pairs(path, start, 500)
    told = json.loads(place.read_text())
    template = "{{ mood or '' }}{% if tools %}{{ tools[0].function.name }} {% endif %}" + told["chat_template"]
    place.write_text(json.dumps(told | {"chat_template": template}))
    ((chosen, _),) = prefer.read_pairs(path, start, 500)
    path.write_text(json.dumps(line | {"tools": None, "chat_template_kwargs": None}))
    ((plain, _),) = prefer.read_pairs(path, start, 500)
    shown, bare = (Renderer.from_directory(start).decode(row.tokens_T.tolist()) for row in (chosen, plain))
    assert shown == "merry add " + bare


@pytest.mark.parametrize(
    "line", ['{"prompt": "a", "chosen": "b"}', '{"prompt": 1, "chosen": "b", "rejected": "c"}', "nonsense",
             '{"prompt": "a", "chosen": [], "rejected": "c"}', '{"prompt": "a", "chosen": "b", "rejected": "c", "x": 1}',
             '{"prompt": "a", "chosen": "b", "rejected": "B"}', '{"prompt": "a", "chosen": "b<|end|>c", "rejected": "c"}',
             '{"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "reasoning_content": "c<|end|>"}]}'],
)  # fmt: skip
def test_a_line_that_is_no_pair_is_named(tmp_path: Path, start: Path, line: str) -> None:
    path = lines(tmp_path / "pairs.jsonl", 1)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(StateError, match=r"pairs\.jsonl, line 2: .*Correct it, or take it out") as refused:
        prefer.read_pairs(path, start, 64)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("line", "key"), [
        ('{"prompt": "a", "chosen": "b", "chosen": "d", "rejected": "c"}', "chosen"),
        ('{"prompt": "a", "chosen": [{"role": "assistant", "content": "b", "content": "d"}], "rejected": "c"}', "content"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "chat_template_kwargs": {"": 1, "": 2}}', ""),
    ],
)  # fmt: skip
def test_a_key_that_a_line_has_twice_is_named(tmp_path: Path, start: Path, line: str, key: str) -> None:
    path = lines(tmp_path / "pairs.jsonl", 1)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(StateError, match=rf"pairs\.jsonl, line 2: the key '{key}' occurs twice. Correct it"):
        prefer.read_pairs(path, start, 64)


def test_a_pipe_of_pairs_is_refused_instead_of_waited_for(tmp_path: Path, start: Path) -> None:
    os.mkfifo(tmp_path / "pairs.jsonl")
    with pytest.raises(StateError, match=r"/pairs\.jsonl is a pipe or a device in the place of a file"):
        prefer.read_pairs(tmp_path / "pairs.jsonl", start, 64)


def test_a_template_that_makes_one_prompt_of_all_pairs_is_refused(tmp_path: Path, start: Path) -> None:
    path = lines(tmp_path / "pairs.jsonl", 3)
    assert len(prefer.read_pairs(path, start, 64)) == 3
    shown = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}<|end|>{% endfor %}"
    (start / "chat_template.jinja").write_text(f"always the same{shown}")
    with pytest.raises(StateError, match="makes one prompt of all 3 pairs"):
        prefer.read_pairs(path, start, 64)


@pytest.mark.parametrize(
    "answer", ["b<|end|>", "b<|end|>\n", [{"role": "assistant", "content": "b<|end|>"}],
               [{"role": "assistant", "content": [{"type": "text", "text": "b<|end|>"}]}]],
)  # fmt: skip
def test_an_end_token_at_the_end_of_an_answer_is_that_of_its_turn(tmp_path: Path, start: Path, answer: object) -> None:
    path = tmp_path / "pairs.jsonl"
    bare, ended = (json.dumps({"prompt": "a", "chosen": said, "rejected": "c"}) for said in ("b", answer))
    path.write_text(f"{bare}\n{ended}\n")
    first, second = prefer.read_pairs(path, start, 64)
    for row, other in zip(first, second, strict=True):
        assert (
            row.tokens_T.tolist() == other.tokens_T.tolist() and row.positions_P.tolist() == other.positions_P.tolist()
        )


def test_a_prompt_that_ends_with_a_turn_of_the_assistant_is_refused(tmp_path: Path, start: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    prompt = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "par"}]
    path.write_text(json.dumps({"prompt": prompt, "chosen": "b", "rejected": "c"}))
    with pytest.raises(StateError, match="line 1: the prompt ends with a message of the assistant"):
        prefer.read_pairs(path, start, 64)


def test_pairs_of_another_tokenizer_and_only_long_pairs_are_refused(tmp_path: Path, start: Path) -> None:
    row = (b"\x03\0\0\0\x06\0\0\0\x07\0\0\0", b"\0\x01\x01")
    taken = Examples(tokenizer_digest(start), (row, row))
    assert len(prefer.pairs_of_examples(taken, start, 64)) == 1
    with pytest.raises(StateError, match="have another tokenizer"):
        prefer.pairs_of_examples(Examples("00" * 32, (row, row)), start, 64)
    with pytest.raises(StateError, match="longer than max_tokens = 2: raise max_tokens"):
        prefer.pairs_of_examples(taken, start, 2)


def test_pairs_that_are_too_long_for_the_settings_or_the_policy_are_left_out_and_counted(
    start: Path, caplog: pytest.LogCaptureFixture
) -> None:
    positions = spec_of(start).max_positions
    short, exact, long = (
        (np.full(length, 3, "<u4").tobytes(), bytes([0, *[1] * (length - 1)]))
        for length in (3, positions, positions + 1)
    )
    taken = Examples(tokenizer_digest(start), (short, exact, short, long, short, short))
    for most, num_left, limit in ((9999, 2, f"the model's {positions} positions"), (3, 1, "max_tokens = 3")):
        caplog.clear()
        assert len(prefer.pairs_of_examples(taken, start, most)) == num_left
        assert f"{3 - num_left} of 3 pairs have a row longer than {limit}" in caplog.text
    with pytest.raises(StateError, match=f"longer than the model's {positions} positions: take a model with more"):
        prefer.pairs_of_examples(Examples(taken.tokenizer, (short, long)), start, 9999)


def test_a_reward_model_of_another_architecture_is_refused_without_a_key_that_no_stage_has(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    settings = PairSettings(1, 1, 1e-3, 0, 1.0, 0)
    with pytest.raises(StateError, match=r"model_type is 'gpt2'.* choose another model$"):
        prefer.train_reward_model(tmp_path, [], settings, tmp_path / "out", "float32", 1)
