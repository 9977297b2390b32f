"""Convert messages to token ids and back: render the opening, encode each new message, decode the policy's text.

Called by `envs/play` and by every verifier, so it is light: tokenizers and sandboxed jinja, no torch, no transformers.
A conversation is an append-only list of token ids: the policy's text is never rendered or tokenised again. There is no
clock: templates that ask for the date get the one in their arguments.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from tokenizers import Tokenizer

from shoal.errors import StateError
from shoal.policy.anyspec import AnySpec
from shoal.policy.dialect import MARK, Dialect, calling, said
from shoal.policy.ends import Ends, num_shared
from shoal.policy.history import Part, Place, places
from shoal.policy.kinds import spec_of
from shoal.policy.messages import Message, Written, as_messages, normal, template_arguments
from shoal.policy.notations import leaves_reasoning_open, notation_of
from shoal.policy.pieces import pieces_of
from shoal.policy.spec import PolicySpec, read_capped
from shoal.policy.template import Template
from shoal.protocol.constants import CONTROL_STOPS, MODEL_STOPS

MAX_TOKENIZER_BYTES = 64 << 20
MAX_TEMPLATE_BYTES = 1 << 20

FILES = {
    CONTROL_STOPS: ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    MODEL_STOPS: (
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    ),
}  # fmt: skip
"""The files of a checkpoint that decide its tokens, by the rule that says which of them end a turn."""

REMEMBERED = 256
"""Number of openings, and of replies, whose token ids are cached."""

_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")

_ASK = {"role": "user", "content": "."}


class Prompt(NamedTuple):
    """What the policy reads before it writes."""

    token_ids: tuple[int, ...]
    thinking: bool
    """Whether the template has begun the policy's reasoning for it."""


class Segment(NamedTuple):
    """A piece of a history: token ids of the environment, or the place of tokens that the policy wrote."""

    token_ids: tuple[int, ...] = ()
    turn: int = -1
    """Number of the policy's turn; -1 for the environment's tokens."""
    part: Part = "visible"


class Renderer:
    """A tokenizer with its chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        tokens: Mapping[str, str],
        spec: PolicySpec | AnySpec,
        stops: str = MODEL_STOPS,
    ) -> None:
        """`tokens` maps the template's names of special tokens, such as eos_token, to their texts. `stops` is the rule
        that says which tokens end a turn."""
        self._tokenizer = tokenizer
        self._template = Template(template, tokens)
        self.notation: str = notation_of(template)
        """How the policy writes tool calls and reasoning; empty if its template does not say."""
        self._dialect = Dialect(self._template, self.notation)
        eos = tokenizer.token_to_id(tokens["eos_token"]) if "eos_token" in tokens else None
        if eos is None and not spec.eos_ids:
            raise StateError("the tokenizer has no eos_token and config.json no eos_token_id: nothing could end a turn")
        self.eos_id: int = spec.eos_ids[0] if eos is None else eos
        """The token that ends the policy's turn."""
        self._special = {
            index: token.content for index, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        ends = Ends(self._text, template, self._special, self.notation)
        control, model = (
            ends.control({self.eos_id, *spec.eos_ids}),
            ends.model({self.eos_id, *(spec.turn_ends or spec.eos_ids)}),
        )
        self.has_own_stops = model != control
        """Whether the model ends its turns with other tokens than all control tokens."""
        self._by_model = stops == MODEL_STOPS
        self.stop_ids: frozenset[int] = model if self._by_model else control
        """Tokens that end the policy's turn."""
        self._inner = ends.within(whole=self._by_model) - self.stop_ids
        """Control tokens that the template writes within turns, such as the marks of a tool call."""
        self._hidden = self.stop_ids | (self._special.keys() - self._inner)
        """Tokens that have no text."""
        self.vocabulary: int = spec.vocab_size
        """Token ids are below this. It may exceed the tokenizer's vocabulary."""
        self._remember()

    def _remember(self) -> None:
        # A group's rollouts have the same opening and often the same replies: render and encode each text once.
        self._opening = functools.lru_cache(REMEMBERED)(self._render_opening)
        self._reply = functools.lru_cache(REMEMBERED)(self._render_reply)
        self._answer = functools.lru_cache(REMEMBERED)(lambda text: self._reply(_key(as_messages(text), None)))
        self._keeps = functools.lru_cache(REMEMBERED)(self._keeps_thinking)

    @staticmethod
    def from_directory(directory: Path, stops: str = MODEL_STOPS) -> "Renderer":
        """Open the tokenizer and chat template of a checkpoint. Raises `StateError` if one is missing or damaged."""
        directory = Path(directory)
        spec = spec_of(directory)
        try:
            tokenizer = Tokenizer.from_str(read_capped(directory / "tokenizer.json", MAX_TOKENIZER_BYTES).decode())
        except StateError:
            raise
        except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception for a file that it cannot parse
            raise StateError(f"{directory / 'tokenizer.json'} is damaged: {error}. Download the model again") from None
        config_path = directory / "tokenizer_config.json"
        try:
            config = msgspec.json.decode(read_capped(config_path, MAX_TEMPLATE_BYTES * 4), type=_TokenizerConfig)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise StateError(f"{config_path} is damaged: {error}. Download the model again") from None
        tokens = {name: _token_text(getattr(config, name)) for name in _TOKEN_NAMES}
        return Renderer(
            tokenizer,
            _find_template(directory, config),
            {k: v for k, v in tokens.items() if v is not None},
            spec,
            stops,
        )

    def start(self, messages: Sequence[Message], arguments: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a conversation's opening, up to where the policy begins to write."""
        return list(self.open(messages, arguments).token_ids)

    def reply(self, messages: str | Sequence[Message], arguments: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids between the policy's stop token, which is already written, and its next turn.

        We render a turn whose text is a mark, and take what follows the mark, without the end token that the policy
        wrote itself. So the conversation reads as the template would render it. Messages of role tool follow a turn
        that called tools.
        """
        return list(self.go_on(messages, arguments).token_ids)

    def open(self, messages: Sequence[Message], arguments: Mapping[str, Any] | None = None) -> Prompt:
        """As `start`, and whether the template has begun the policy's reasoning."""
        return self._opening(_key(normal(messages), arguments))

    def go_on(self, messages: object, arguments: Mapping[str, Any] | None = None) -> Prompt:
        """As `reply`, and whether the template has begun the policy's reasoning."""
        if isinstance(messages, str) and not arguments:  # the usual case, once for each turn of each rollout
            return self._answer(messages)
        return self._reply(_key(normal(as_messages(messages)), arguments))

    def keeps_thinking(self, arguments: Mapping[str, Any] | None = None) -> bool:
        """Whether the template still shows the reasoning of earlier turns. If not, an append-only conversation shows the
        policy more than the template would."""
        return self._keeps(_key([], arguments))

    def history(self, items: Sequence[Message | Written], arguments: Mapping[str, Any] | None = None) -> list[Segment]:
        """A whole conversation as the template shows it now, with a place for the tokens of each turn of the policy."""
        told = [list(item) if isinstance(item, Written) else dict(item) for item in items]
        return self._history(_key(told, arguments))

    def written(self, message: Message, arguments: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids with which the policy would write a message of the assistant, including the end token."""
        return self._written(_key(normal([_ASK, message]), arguments))

    def encode(self, text: str) -> list[int]:
        """Token ids of a scripted player's text, without the end token."""
        return self._encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The policy's text, without tokens that end a turn. Bytes that are not text become U+FFFD."""
        if self._inner:  # the parsers need the marks of tool calls
            kept = [token for token in token_ids if token not in self._hidden]
            return str(self._tokenizer.decode(kept, skip_special_tokens=False))
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def decode_all(self, turns: Sequence[Sequence[int]]) -> list[str]:
        """The texts of several turns, as `decode` gives them."""
        return [self.decode(turn) for turn in turns]

    def pieces(self, turns: Sequence[Sequence[int]]) -> list[list[str]]:
        """The text of each token of several turns, control tokens included; those of a turn joined are its text."""
        return [pieces_of(self._decode_whole, turn) for turn in turns]

    def _decode_whole(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _render_opening(self, key: str) -> Prompt:
        messages, arguments = json.loads(key)
        return self._prompt(self._text(messages, arguments))

    def _render_reply(self, key: str) -> Prompt:
        messages, arguments = json.loads(key)
        results = [message for message in messages if message["role"] == "tool"]
        named = [(message.get("tool_call_id", "call00000"), message.get("name", "tool")) for message in results]
        # guard: reply-mark-not-forged
        mark = next(mark for i in range(len(key)) if (mark := MARK + "." * i) not in key)
        turns = [said(mark)]
        if results:  # some templates show only one call of a turn, others none: there a call is text
            turns = [calling("", 0, named, mark), calling("", 0, named[:1], mark)]
            turns += [said(mark)] if self._dialect.results else []
        error = None
        for turn in turns:
            try:
                text = self._text([_ASK, turn, *messages], arguments)
            except StateError as refusal:
                error = error or refusal
                continue
            _, found, rest = text.rpartition(mark)
            if found:
                closing = self._text([_ASK, turn], arguments, prompt=False).rpartition(mark)[2]
                ids = self._after(rest, closing, "calls" if "tool_calls" in turn else "text")
                return Prompt(tuple(ids), leaves_reasoning_open(rest, self.notation))
        raise error or StateError(
            "the chat template does not show the assistant's turns: multi-turn play is impossible"
        )

    def _keeps_thinking(self, key: str) -> bool:
        return self._dialect.keeps_thinking(json.loads(key)[1])

    def _history(self, key: str) -> list[Segment]:
        told, arguments = json.loads(key)
        items = [item if isinstance(item, dict) else msgspec.convert(item, Written) for item in told]
        closings = {
            "text": lambda: self._text([_ASK, said(MARK)], arguments, prompt=False),
            "calls": lambda: self._text([_ASK, calling("", 1)], arguments, prompt=False),
        }
        segments = []
        for piece in places(self._template, self._dialect, items, arguments):
            if isinstance(piece, Place):
                segments.append(Segment((), piece.turn, piece.part))
                continue
            closing = closings[piece.after]().rpartition(MARK)[2] if piece.after else ""
            ids, prompted = (
                self._after(text, closing, piece.after) if piece.after else self._encode(text)
                for text in (piece.text, piece.text if piece.prompted is None else piece.prompted)
            )
            segments.append(Segment(tuple(ids[: num_shared(ids, prompted)])))
        return segments

    def _written(self, key: str) -> list[int]:
        messages, arguments = json.loads(key)
        text = self._text(messages, arguments, prompt=False)
        ids, prompt = self._encode(text), self._encode(self._text(messages[:1], arguments))
        ids = ids[num_shared(ids, prompt) :]
        ends = [i for i, token in enumerate(ids) if token in self.stop_ids]
        return ids[: ends[0] + 1] if ends else [*ids, self.eos_id]

    def _after(self, rest: str, closing: str, kind: Literal["text", "calls"]) -> list[int]:
        """Token ids of the text after a turn, without the end token that the policy wrote. `closing` is the text that
        ends the last turn of a conversation."""
        ids = self._encode(rest)
        common = rest[: num_shared(rest, closing)]
        closed = bool(self.stop_ids.intersection(self._encode(common)))
        if kind == "text" and self._stands_for_end(ids, closing) and not (closed and self._by_model):
            return ids[1:]
        if closed:
            return ids[next(i for i, token in enumerate(ids) if token in self.stop_ids) + 1 :]
        if kind == "calls":
            ids = self._encode(rest[len(common) :])
            return ids[1:] if self._stands_for_end(ids, closing) else ids
        return ids

    def _stands_for_end(self, ids: list[int], closing: str) -> bool:
        """Whether a text begins with a control token in the place of the end token that the policy wrote. The template may
        have another, if it ends turns at all."""
        if not ids or ids[0] in self.stop_ids:
            return bool(ids)
        ends = not self._by_model or bool(self.stop_ids.intersection(self._encode(closing)))
        return ends and ids[0] in self._special

    def _prompt(self, text: str) -> Prompt:
        return Prompt(tuple(self._encode(text)), leaves_reasoning_open(text, self.notation))

    def _text(self, messages: Sequence[Message], arguments: Mapping[str, Any], prompt: bool = True) -> str:
        return self._template.text(self._dialect.present(messages), arguments, prompt)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _key(messages: Sequence[Any], arguments: Mapping[str, Any] | None) -> str:
    """Messages and arguments as one text: the key of the cache. Raises ValueError for texts that cannot be encoded."""
    key = json.dumps([messages, template_arguments(arguments or {})], ensure_ascii=False)
    key.encode()
    return key


class _TokenizerConfig(msgspec.Struct):
    chat_template: str | list[dict[str, str]] | None = None
    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None
    pad_token: str | dict[str, Any] | None = None
    unk_token: str | dict[str, Any] | None = None


def _token_text(token: str | dict[str, Any] | None) -> str | None:
    """A special token's text. The file holds the text itself or an object that contains it."""
    return str(token.get("content", "")) if isinstance(token, dict) else token


def _find_template(directory: Path, config: _TokenizerConfig) -> str:
    """`chat_template.jinja`, or else the default template in the tokenizer's config."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return read_capped(path, MAX_TEMPLATE_BYTES).decode("utf-8", "replace")
    found = config.chat_template
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
    if found is None:
        raise StateError(f"{directory} has no chat template: use the -Instruct variant, or add chat_template.jinja")
    return found
