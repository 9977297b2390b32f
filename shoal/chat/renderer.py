"""Convert messages to token ids and back: render the opening, encode each new message, decode the policy's text.

A conversation is an append-only list of token ids: the policy's text is never rendered or tokenised again. There is no
clock: templates that ask for the date get the one in their arguments.
"""

import functools
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from shoal.chat.history_rendering import Part, TurnSpan, demand_once, demand_results, places
from shoal.chat.messages import Written, as_messages, normal, template_arguments
from shoal.chat.stop_tokens import StopTokens, num_shared
from shoal.chat.template import Template
from shoal.chat.template_capabilities import ASK, MARK, RESULT, TemplateCapabilities, calling, said, unique_mark
from shoal.chat.tool_call_formats import leaves_reasoning_open, notation_of
from shoal.chat.turn_encoder import TurnEncoder
from shoal.env import Message
from shoal.errors import Overreach, StateError
from shoal.models import chat_template_files, tokenizer_loader
from shoal.models.chat_template_files import ChatTemplates
from shoal.models.config import ModelConfig
from shoal.models.open_model import spec_of
from shoal.models.tokenizer_loader import OpenTokenizer
from shoal.protocol.constants import CONTROL_STOPS, MODEL_STOPS

_TEXTS = (*tokenizer_loader.FILES, chat_template_files.FILE)

FILES = {
    CONTROL_STOPS: ("config.json", *_TEXTS),
    MODEL_STOPS: ("config.json", "generation_config.json", *_TEXTS),
}
"""The files of a checkpoint that decide its tokens, by the rule that says which of them end a turn."""

REMEMBERED = 256
"""Number of openings, and of replies, whose token ids are cached."""


TAIL_TOKENS, TAIL_CHARS = 32, 1024
"""The end of a prompt that decides whether a thought is open, and how the text after it is split into tokens."""

_NO_OPENING = json.dumps([ASK])

UNKNOWN, LONGEST = "\ufffd", 8
"""What bytes that are not a whole character become, and the most tokens of one character: so bytes that never become one
are told, and the work for a token is bounded."""


class Prompt(NamedTuple):
    """What the policy reads before it writes."""

    token_ids: tuple[int, ...]
    thinking: bool
    """Whether the template has begun the policy's reasoning for it."""


class TextSpan(NamedTuple):
    """A piece of a history: token ids of the environment, or the place of tokens that the policy wrote."""

    token_ids: tuple[int, ...] = ()
    turn: int = -1
    """Number of the policy's turn; -1 for the environment's tokens."""
    part: Part = "visible"


class Renderer:
    """A tokenizer with its chat template."""

    added_ids: frozenset[int] = frozenset()
    """Tokens that are matched whole before a text is split: control tokens, and others that were added."""

    def __init__(
        self, opened: OpenTokenizer, templates: ChatTemplates, spec: ModelConfig, stops: str = MODEL_STOPS
    ) -> None:
        """`stops` is the rule that says which tokens end a turn."""
        self._tokenizer, tokens, self._cleans_up = opened
        self.template_in = templates.where
        tokenizer, sources = self._tokenizer, [source for source in templates[:2] if source] or [""]
        dialects = [
            TemplateCapabilities(Template(source, tokens, templates.where), notation_of(source)) for source in sources
        ]
        self._dialect, self._tool_dialect, self._template = dialects[0], dialects[-1], dialects[0].template
        self._only_tools = bool(templates.tools and not templates.plain)
        self.notation: str = _one_notation(dialects)
        """How the policy writes tool calls and reasoning; empty if its templates do not say."""
        self.vocabulary: int = spec.vocab_size
        """Token ids are below this. It may exceed the tokenizer's vocabulary."""
        eos = tokenizer.token_to_id(tokens["eos_token"]) if "eos_token" in tokens else None
        eos = None if eos is not None and eos >= spec.vocab_size and spec.eos_ids else eos
        if eos is None and not spec.eos_ids:
            raise StateError("the tokenizer has no eos_token and config.json no eos_token_id: nothing could end a turn")
        self.eos_id: int = spec.eos_ids[0] if eos is None else eos
        """The token that ends the policy's turn."""
        added = {i: token for i, token in tokenizer.get_added_tokens_decoder().items() if i < spec.vocab_size}
        self.added_ids = frozenset(added)
        self._end_text = added[self.eos_id].content if self.eos_id in added else ""
        self._special = {i: token.content for i, token in added.items() if token.special or self._is_skipped(i)}
        self._by_model = stops == MODEL_STOPS
        named = {self.eos_id, *spec.eos_ids}, {self.eos_id, *(spec.turn_ends or spec.eos_ids)}
        texts = self._special | {index: added[index].content for index in (added.keys() & (named[0] | named[1]))}
        plain = {index: token.content for index, token in added.items() if index not in texts}
        ends = [StopTokens(one.text, one.template.source, texts, one.notation, plain) for one in dialects]
        control = frozenset[int]().union(*(one.control(named[0]) for one in ends))
        model = frozenset[int]().union(*(one.model(named[1]) for one in ends))
        self.has_own_stops = model != control
        """Whether the model ends its turns with other tokens than all control tokens."""
        self.stop_ids: frozenset[int] = model if self._by_model else control
        """Tokens that end the policy's turn."""
        within = set[int]().union(*(one.within(whole=self._by_model) for one in ends))
        self._inner = within - self.stop_ids
        """Control tokens that the template writes within turns, such as the marks of a tool call."""
        skipped = {index for index in self._special if self._is_skipped(index)}
        self._hidden = self.stop_ids | (skipped - self._inner)
        """Tokens that have no text."""
        self._ends_no_turn = self._by_model and all(one.ends_no_turn for one in ends)
        end = ends[0].at_last(self.eos_id)
        end_ids = (end, end)
        if self._ends_no_turn:
            of_text = ends[0].end_before(said(MARK), ASK, self.stop_ids, end)
            end_ids = of_text, ends[-1].end_before(calling("", 1), RESULT, self.stop_ids, end)
        self._turns = TurnEncoder(
            self._dialect_for, self._encode, self._encode_after, self.notation, self.stop_ids, end_ids,
            ends[-1].call_closing() if len(set(end_ids)) > 1 else "",
        )  # fmt: skip
        self._remember()

    def _remember(self) -> None:
        # A group's rollouts have the same opening and often the same replies: render and encode each text once.
        self._opening = functools.lru_cache(REMEMBERED)(self._render_opening)
        self._reply = functools.lru_cache(REMEMBERED)(
            lambda key, opening, after, end: self._render_reply(f"{key[:-1]}, {opening}, {json.dumps(after)}, {end}]")
        )
        self._answer = functools.lru_cache(REMEMBERED)(
            lambda text, opening, end: self._reply(_key(as_messages(text), None), opening, "", end)
        )
        self._keeps = functools.lru_cache(REMEMBERED)(self._keeps_thinking)

    @staticmethod
    def from_directory(directory: Path, stops: str = MODEL_STOPS) -> "Renderer":
        """Open the tokenizer and chat template of a checkpoint. Raises `StateError` if one is missing or damaged."""
        directory = Path(directory)
        spec, opened = spec_of(directory), tokenizer_loader.open_tokenizer(directory)
        templates = chat_template_files.chat_templates(
            directory, tokenizer_loader.read_object(directory / tokenizer_loader.CONFIG)
        )
        return Renderer(opened, templates, spec, stops)

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

    def go_on(
        self, messages: object, arguments: Mapping[str, Any] | None = None, opening: str = _NO_OPENING,
        after: Literal["", "text", "calls"] = "", end: int = -1,
    ) -> Prompt:  # fmt: skip
        """As `reply`, and whether the template has begun the policy's reasoning. `opening` is of the same conversation, as
        `opening_key` gives it: a template may look for a word in it. `after` says whether the turn called tools, if that is
        known, and `end` by which token it ended. A verifier replays a reply's tokens as a function of these five alone, so
        no other turn or reply, no limit and no state of a node may decide them."""
        if isinstance(messages, str) and not arguments:  # the usual case, once for each turn of each rollout
            return self._answer(messages, opening, end)
        return self._reply(_key(normal(as_messages(messages)), arguments), opening, after, end)

    def keeps_thinking(self, arguments: Mapping[str, Any] | None = None) -> bool:
        """Whether the template still shows the reasoning of earlier turns. If not, an append-only conversation shows the
        policy more than the template would."""
        return self._keeps(_key([], arguments))

    def opens_thought(self, token_ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside the policy's reasoning."""
        return leaves_reasoning_open("".join(self.pieces([token_ids[-TAIL_TOKENS:]])[0]), self.notation)

    def missing_generation_prompt(self, messages: Sequence[Message], arguments: Mapping[str, Any] | None = None) -> str:
        """What the template writes before a turn of the policy, if it leaves that out of a prompt; else empty."""
        return self._dialect_for(arguments or {}).missing_generation_prompt(normal(messages), arguments or {})

    def shows_tools(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> bool:
        """Whether an opening with the tools of these arguments differs from one without, which the template may refuse."""
        shown = self.start(messages, arguments)
        try:
            return shown != self.start(messages, {**arguments, "tools": []})
        except Overreach:
            raise
        except StateError:
            return True

    def cut_marks(self, arguments: Mapping[str, Any] | None = None) -> str:
        """A text at which the template cuts earlier turns, but for the marks of thoughts that are known; empty if none."""
        return self._dialect_for(arguments or {}).cut_marks(arguments or {})

    def moves_system(self, arguments: Mapping[str, Any] | None = None) -> bool:
        """Whether a system message is written before the user's text, because the template refuses it or leaves it out."""
        return not self._dialect_for(arguments or {}).system

    def history(self, items: Sequence[Message | Written], arguments: Mapping[str, Any] | None = None) -> list[TextSpan]:
        """A whole conversation as the template shows it now, with a place for the tokens of each turn of the policy."""
        told = [list(item) if isinstance(item, Written) else normal([item])[0] for item in items]
        return self._history(_key(told, arguments))

    def written(
        self, turn: str | Message, arguments: Mapping[str, Any] | None = None, before: Sequence[Message] = (ASK,)
    ) -> list[int]:
        """Token ids with which the policy would write a turn after these messages, including the token with which the
        template ends it: a message of the assistant as the template shows it, or a text as it is, with the white space that
        the template puts around turns. A thought that the prompt has begun is closed before a text."""
        messages = [*normal(before), turn] if isinstance(turn, str) else normal([*before, turn])
        return self._written(_key(messages, arguments))

    def beyond_model(self) -> str:
        """A line about the tokenizer's tokens for which the model has no embedding; empty if it has all."""
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        lacks = sorted(index for index in ids if index >= self.vocabulary)
        if not lacks:
            return ""
        return (
            f"tokenizer: it knows {len(ids):,} tokens, with ids up to {lacks[-1]:,}, and the model has {self.vocabulary:,} "
            f"(vocab_size): a task or reply with one of the other {len(lacks):,} cannot be played, such as "
            f"{self._tokenizer.id_to_token(lacks[0])!r:.40}. Use the model's own tokenizer, unless no text has them"
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text by itself: some tokenizers begin a text in another way than they go on."""
        return self._encode(text)

    def split_at_stop(self, text: str) -> tuple[str, str, str]:
        """A text up to the first token that ends a turn, that token, and what follows it. The last two are empty if there
        is none; all follows if the tokenizer reads it from other signs."""
        end = next((token for token in self._encode(text) if token in self.stop_ids), None)
        if end is None:
            return text, "", ""
        (piece,) = self.pieces([[end]])[0]
        return text.partition(piece) if piece and piece in text else ("", piece, text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The policy's text, without tokens that end a turn. Bytes that are not text become U+FFFD."""
        shown = token_ids[:-1] if token_ids and token_ids[-1] in self._hidden else token_ids
        if not self._hidden.isdisjoint(shown):  # the marks of tool calls are not hidden: parsers need them
            shown = [token for token in shown if token not in self._hidden]
        text: str = self._tokenizer.decode(shown, skip_special_tokens=False)
        return tokenizer_loader.clean_up(text) if self._cleans_up else text

    def decode_all(self, turns: Sequence[Sequence[int]]) -> list[str]:
        """The texts of several turns, as `decode` gives them."""
        return [self.decode(turn) for turn in turns]

    def pieces(self, turns: Sequence[Sequence[int]]) -> list[list[str]]:
        """The text of each token of several turns, control tokens included; those of a turn joined are its text, before it
        is cleaned up."""
        return [pieces_of(self._decode_whole, turn) for turn in turns]

    def _is_skipped(self, token: int) -> bool:
        """Whether decoding without special tokens leaves it out: files may declare one token twice, in two ways."""
        return self._tokenizer.decode([token], skip_special_tokens=True) != self._decode_whole([token])

    def _decode_whole(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _render_opening(self, key: str) -> Prompt:
        messages, arguments = json.loads(key)
        return self._prompt(self._text(messages, arguments))

    def _render_reply(self, key: str) -> Prompt:
        messages, arguments, opening, after, end = json.loads(key)
        results = [message for message in messages if message["role"] == "tool"]
        named = [(message.get("tool_call_id", "call00000"), message.get("name", "tool")) for message in results]
        mark, dialect = unique_mark(key), self._dialect_for(arguments)
        turns = [said(mark)]
        if results and after == "text":
            demand_results(dialect)
        elif after == "calls" and not results:
            turns = [calling("", 1, mark=mark), said(mark)]
        elif results:  # some templates show only one call of a turn, others none: there a call is text
            turns = [calling("", 0, named, mark), calling("", 0, named[:1], mark)]
            turns += [said(mark)] if dialect.results else []
        error = None
        for before, turn in itertools.product((opening, [ASK]), turns):
            try:
                text = self._text([*before, turn, *messages], arguments)
            except Overreach:
                raise  # guard: limits-choose-no-tokens
            except StateError as refusal:
                error = error or refusal
                continue
            _, found, rest = text.rpartition(mark)
            if found:
                demand_once(text, mark, len(turn.get("tool_calls", ".")), "the assistant")
                closing = self._text([*before, turn], arguments, prompt=False).rpartition(mark)[2]
                ids = self._after(rest, closing, "calls" if "tool_calls" in turn else "text", end)
                return Prompt(tuple(ids), leaves_reasoning_open(rest, self.notation))
        raise error or StateError(
            "the chat template does not show the assistant's turns: multi-turn play is impossible"
        )

    def _keeps_thinking(self, key: str) -> bool:
        arguments = json.loads(key)[1]
        return self._dialect_for(arguments).keeps_thinking(arguments)

    def _history(self, key: str) -> list[TextSpan]:
        told, arguments = json.loads(key)
        items = [item if isinstance(item, dict) else msgspec.convert(item, Written) for item in told]
        written, mark = {item.turn: item for item in items if isinstance(item, Written)}, unique_mark(key)

        def closing_of(turn: int, kind: str) -> str:
            alone = said(mark) if kind == "text" else calling("", 1, written[turn].calls, mark)
            return self._text([ASK, alone], arguments, prompt=False).rpartition(mark)[2]

        segments, turn = list[TextSpan](), -1
        for piece in places(self._dialect_for(arguments), items, arguments, mark):
            if isinstance(piece, TurnSpan):
                turn = piece.turn
                segments.append(TextSpan((), turn, piece.part))
                continue
            closing = closing_of(turn, piece.after) if piece.after else ""
            ids, prompted = (
                self._after(text, closing, piece.after, written[turn].end) if piece.after else self._encode(text)
                for text in (piece.text, piece.text if piece.prompted is None else piece.prompted)
            )
            begins = piece.prompted is not None and piece.text.startswith(piece.prompted)
            segments.append(TextSpan(tuple(prompted if begins else ids[: num_shared(ids, prompted)])))
        return segments

    def _written(self, key: str) -> list[int]:
        messages, arguments = json.loads(key)
        return self._turns.tokens(messages, arguments)

    def _after(self, rest: str, closing: str, kind: Literal["text", "calls"], end: int) -> list[int]:
        """Token ids of the text after a turn, without `end`, with which the policy ended it. `closing` is the text that
        ends the last turn of a conversation."""
        ids = self._encode_after_end(rest)
        common = rest[: num_shared(rest, closing)]
        closed = self._ends(common)
        if self._ends_no_turn and not closed:  # white space may stand before what begins the next message
            begun = self._encode_after_end(rest[len(common) if kind == "calls" else 0 :].lstrip())
            if begun and begun[0] == end:
                return begun[1:]
        if kind == "text" and self._stands_for_end(ids, closing, end) and not (closed and self._by_model):
            return ids[1:]
        ends = [i for i, token in enumerate(ids) if token in self.stop_ids]
        if closed and ends:  # an end token may be one only between spaces
            return ids[ends[0] + 1 :]
        if kind == "calls":
            ids = self._encode_after_end(rest[len(common) :])
            if self._stands_for_end(ids, closing, end):
                return ids[1:]
            ends = [i for i, token in enumerate(ids) if token in self.stop_ids]
        added = self._decode_whole(ids[: ends[0]]).strip() if ends and self._ends(closing) else ""
        if added and self._special.keys().isdisjoint(ids[: ends[0]]):  # guard: turns-end-where-they-were-written
            raise StateError(f"the chat template adds {added!r:.40} to earlier turns: multi-turn play is impossible")
        return ids

    def _stands_for_end(self, ids: list[int], closing: str, end: int) -> bool:
        """Whether a text begins with a control token in the place of the end token that the policy wrote. The template may
        have another, if it ends turns at all."""
        if not ids:
            return False
        if ids[0] in self.stop_ids:
            return ids[0] == end or not self._ends_no_turn  # guard: next-message-keeps-its-beginning
        return (not self._by_model or self._ends(closing)) and ids[0] in self._special

    def _ends(self, text: str) -> bool:
        """Whether a token that ends a turn is in a text."""
        return not self.stop_ids.isdisjoint(self._encode(text))

    def _prompt(self, text: str) -> Prompt:
        return Prompt(tuple(self._encode(text)), leaves_reasoning_open(text, self.notation))

    def _text(self, messages: Sequence[Message], arguments: Mapping[str, Any], prompt: bool = True) -> str:
        return self._dialect_for(arguments).text(messages, arguments, prompt)

    def _dialect_for(self, arguments: Mapping[str, Any]) -> TemplateCapabilities:
        """That of the template which transformers picks for a conversation with these arguments."""
        if arguments.get("tools") is not None:
            return _unchanging(self._tool_dialect)
        if self._only_tools:
            raise StateError(
                "the model has a chat template for conversations with tools, named tool_use, and no default one: give the "
                "environment tools, or name a template default"
            )
        return _unchanging(self._dialect)

    def _encode_after_end(self, text: str) -> list[int]:
        """Token ids of a text that follows a turn's end token: some tokenizers begin a text in another way."""
        ids = self._encode(self._end_text + text) if self._end_text else []
        return ids[1:] if ids and ids[0] == self.eos_id else self._encode(text)

    def _encode_after(self, prompt: str, rest: str) -> list[int]:
        """Token ids of the text after a prompt; if a token would span both, those after a new line: some tokenizers put a
        space before a text of its own."""
        for before in (prompt[-TAIL_CHARS:], "\n"):
            begun, ids = self._encode(before), self._encode(before + rest)
            if num_shared(ids, begun) == len(begun):
                spans = self._tokenizer.encode(before + rest, add_special_tokens=False).offsets[len(begun) :]
                skipped = before + rest if not spans else rest[: max(0, spans[0][0] - len(before))]
                if not skipped.strip():  # no word of the rest is in a token of the prompt
                    return ids[len(begun) :]
        return self._encode(rest)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if ids and (largest := max(ids)) >= self.vocabulary:  # guard: no-token-beyond-the-model
            raise StateError(
                f"the tokenizer makes token {largest} of {self._tokenizer.id_to_token(largest)!r:.40}, and the model has "
                f"{self.vocabulary} tokens: use the model's own tokenizer"
            )
        return ids


def opening_key(messages: Sequence[Message]) -> str:
    """The opening of a conversation as one text, of which caches keep one copy. Raises as `normal`."""
    return sys.intern(json.dumps(normal(messages), ensure_ascii=False))


def _key(messages: Sequence[Any], arguments: Mapping[str, Any] | None) -> str:
    """Messages and arguments as one text: the key of the cache. Raises ValueError for texts that cannot be encoded."""
    key = json.dumps([messages, template_arguments(arguments or {})], ensure_ascii=False)
    key.encode()
    return key


def _unchanging(dialect: TemplateCapabilities) -> TemplateCapabilities:
    if dialect.changes:
        raise StateError(
            "the chat template changes the words of the assistant's turns, as a filter like upper or tojson does: let it "
            "show them as they are"
        )
    return dialect


def _one_notation(dialects: Sequence[TemplateCapabilities]) -> str:
    """The notation of a model's templates. Raises `StateError` if they have two: a policy writes in one."""
    found = list(dict.fromkeys(dialect.notation for dialect in dialects if dialect.notation))
    if len(found) > 1:
        raise StateError(
            f"the chat templates default and tool_use write tool calls in two ways ({', '.join(found)}): keep "
            "the one that the model was trained with"
        )
    return found[0] if found else ""


def pieces_of(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> list[str]:
    """One text for each token. A character of several tokens is the last one's; the others have an empty text.

    A token is decoded after the ones before it, back to the last that ended with a whole character, because some tokenizers
    write the first token of a sequence in another way.
    """
    pieces, first, told = list[str](), 0, 0
    for end in range(1, len(token_ids) + 1):
        before, whole = decode(token_ids[first:told]), decode(token_ids[first:end])
        is_whole = not whole.endswith(UNKNOWN) or end == len(token_ids) or end - told > LONGEST
        if is_whole:
            pieces.append(whole[len(before) :])
            first, told = told, end
        else:
            pieces.append("")
    return pieces
