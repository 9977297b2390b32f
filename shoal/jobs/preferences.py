"""Pairs of answers, and what is made of them: a policy, by direct preference optimisation, or a reward model.

It opens models, and writes them in Hugging Face format. Pairs come from a run's groups (`launch/pipeline/rollout_selection`
takes them) or from a file of lines. The same pairs, settings and number of threads give the same bytes.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch

from shoal.chat.messages import normal, text_of
from shoal.chat.renderer import Renderer
from shoal.env import Message
from shoal.envs.prompt_preview import learned_row
from shoal.errors import StateError
from shoal.models.checkpoint import save_policy
from shoal.models.open_model import AUTO, open_policy, spec_of
from shoal.models.transformer_config import UnsupportedModel
from shoal.models.value_head import begin_valued, save_valued
from shoal.protocol.messages import ENVIRONMENT, POLICY
from shoal.train.dataset_files import Examples, PreferencePair, pair_error, preference_pairs, tokenizer_digest
from shoal.train.frozen_models import row_scores
from shoal.train.preference_training import (
    PairSettings,
    TokenPair,
    held_out,
    measure_scores,
    prefer_policy,
    prefer_scores,
)
from shoal.train.rows import example_row

log = logging.getLogger("prefer")


@dataclass(frozen=True)
class Preferred:
    """What came of it."""

    tokens: int
    """Learned from, prompts and repetitions included."""
    figures: dict[str, Any]


def train_dpo(
    start: Path, pairs: Sequence[TokenPair], beta: float, settings: PairSettings, out: Path, dtype: str, threads: int
) -> Preferred:
    """Train the policy in `start` on pairs by DPO, and write it to `out`."""
    torch.set_num_threads(threads)
    model = open_policy(start, torch.float32, AUTO)
    learned, measured = _begin(pairs, start, settings)
    found, tokens = prefer_policy(model, learned, measured, beta, settings, _told(settings.steps))
    save_policy(model, out, dtype, tokenizer_from=start)
    return Preferred(tokens, {"learned_pairs": len(learned)} | asdict(found))


def train_reward_model(
    start: Path, pairs: Sequence[TokenPair], settings: PairSettings, out: Path, dtype: str, threads: int
) -> Preferred:
    """Train a reward model on pairs, beginning with the layers of the policy in `start`, and write it to `out`."""
    torch.set_num_threads(threads)
    try:
        model = begin_valued(start)
    except UnsupportedModel as refused:
        raise UnsupportedModel(refused.cause, "A reward model is made of these alone: choose another model") from None
    learned, measured = _begin(pairs, start, settings)
    score = row_scores(model)
    before = measure_scores(score, measured)
    found, tokens = prefer_scores(model.train().trainable(), score, learned, measured, settings, _told(settings.steps))
    save_valued(model, out, dtype, tokenizer_from=start)
    return Preferred(tokens, {"learned_pairs": len(learned), "accuracy_before": before.accuracy} | asdict(found))


def _told(steps: int) -> Any:
    def progress(step: int, loss: float) -> None:
        if step % 20 == 0 or step + 1 == steps:
            log.info("step=%d/%d loss=%.4f", step + 1, steps, loss)

    return progress


def pairs_of_examples(given: Examples, start: Path, max_tokens: int) -> list[TokenPair]:
    """Pairs that were taken from a run's groups: rows by twos, the preferred one first. Pairs with a longer row are left
    out. Raises `StateError` if none is left, or if another tokenizer wrote them."""
    if given.tokenizer != tokenizer_digest(start):  # guard: pairs-with-one-tokenizer
        raise StateError(
            "the pairs have another tokenizer than the policy that is to learn from them: start from the run's own policy"
        )
    rows = given.read()
    return _within_limit(list(zip(rows[::2], rows[1::2], strict=True)), start, max_tokens)


def _begin(pairs: Sequence[TokenPair], start: Path, settings: PairSettings) -> tuple[list[TokenPair], list[TokenPair]]:
    """Pairs to learn from, and held-out ones. The first one is shown."""
    learned, measured = held_out(pairs)
    renderer = Renderer.from_directory(start)
    for name, row in zip(("chosen", "rejected"), learned[0], strict=True):
        log.info("%s: %s", name, learned_row(row.tokens_T.tolist(), row.positions_P.tolist(), renderer))
    held = len(measured) if len(measured) < len(learned) else "0, too few, so all are measured"
    log.info("pairs=%d held out=%s; learning for %d steps", len(learned), held, settings.steps)
    return learned, measured


_Row: TypeAlias = tuple[list[int], list[int]]
"""Token ids and authors."""


def read_pairs(path: Path, start: Path, max_tokens: int) -> list[TokenPair]:
    """Pairs from a file with a JSON object in each line: `prompt`, `chosen` and `rejected`, each a text or chat messages.
    `tools` and `chat_template_kwargs` reach the chat template. Pairs with a longer row are left out. Raises `StateError`
    that names the line."""
    renderer, pairs = Renderer.from_directory(start), list[tuple[_Row, _Row]]()
    told, prompts = set[str](), set[tuple[int, ...]]()
    for number, line in preference_pairs(path):
        try:
            messages = line.messages()
            arguments = _arguments(line, messages, renderer)
            prompt = renderer.start(messages, arguments)
            chosen, rejected = (_row(messages, prompt, answer, renderer, arguments) for answer in line.answers())
            if chosen == rejected:
                raise ValueError("chosen and rejected have the same tokens, so neither is preferred")
        except ValueError as error:  # ShoalError is
            raise pair_error(path, number, error) from None
        pairs.append((chosen, rejected))
        if len(prompts) < 2:
            told.add(str([(message["role"], text_of(message).strip()) for message in normal(messages)]))
            prompts.add(tuple(prompt))
    if len(told) > 1 == len(prompts):  # guard: prompts-of-pairs-are-shown
        raise StateError(
            f"{path}: the chat template makes one prompt of all {len(pairs)} pairs, though their messages differ: take the "
            "model's own chat template, or use another model"
        )
    return _within_limit(pairs, start, max_tokens)


def _within_limit(pairs: Sequence[tuple[_Row, _Row]], start: Path, max_tokens: int) -> list[TokenPair]:
    """Pairs whose rows are not too long for the settings or the policy; the others are counted. Raises `StateError` if none
    is left."""
    positions = spec_of(start).max_positions
    most = min(max_tokens, positions)
    found = [pair for pair in pairs if max(len(tokens) for tokens, _ in pair) <= most]
    limit = f"max_tokens = {max_tokens}" if max_tokens <= positions else f"the model's {positions} positions"
    remedy = "raise max_tokens" if max_tokens <= positions else "take a model with more"
    if pairs and not found:
        raise StateError(f"in every pair, a row is longer than {limit}: {remedy}")
    if not found:
        raise StateError("there are no pairs to learn from: give some")
    if left := len(pairs) - len(found):
        log.warning("%d of %d pairs have a row longer than %s, and are left out: %s", left, len(pairs), limit, remedy)
    return [TokenPair(*(example_row(*row) for row in pair)) for pair in found]


def _arguments(line: PreferencePair, messages: list[Message], renderer: Renderer) -> dict[str, Any]:
    """What the chat template gets beside the messages. Raises ValueError if it does not show the tools."""
    arguments = {**(line.chat_template_kwargs or {}), **({} if line.tools is None else {"tools": line.tools})}
    if line.tools and not renderer.shows_tools(messages, arguments):
        raise ValueError("tools: the chat template does not show them")
    return arguments


def _row(
    messages: list[Message], prompt: list[int], answer: Message, renderer: Renderer, arguments: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Tokens and authors of a row: the prompt, which shows the messages, and the answer with the token that ends it, which
    its text may have, too. Raises ValueError if the answer has such a token within, where it would be cut."""
    (whole,) = normal([answer])
    said = whole if whole.get("tool_calls") else _without_end(whole, renderer)
    calls = msgspec.json.encode(said.get("tool_calls")).decode()
    for text in (text_of(said), said.get("reasoning_content", ""), calls):
        if end := renderer.split_at_stop(text)[1]:
            raise ValueError(f"in an answer the tokenizer reads {end!r:.40}, which ends a turn")
    written = renderer.written(said, arguments, messages)
    return prompt + written, [ENVIRONMENT] * len(prompt) + [POLICY] * len(written)


def _without_end(said: dict[str, Any], renderer: Renderer) -> dict[str, Any]:
    """A normal answer without the token at the end of its text that ends a turn."""
    content = said.get("content") or ""
    last = content if isinstance(content, str) else content[-1]["text"]
    words, end, rest = renderer.split_at_stop(last)
    if not end or rest.strip():
        return said
    return {**said, "content": words if isinstance(content, str) else [*content[:-1], {**content[-1], "text": words}]}
