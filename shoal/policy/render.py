"""Convert messages to token ids and back: render the opening, encode each new message, decode the policy's text.

Called by `envs/play` and by every verifier. Therefore it is light: tokenizers and sandboxed jinja, no torch, no
transformers. A conversation is an append-only list of token ids: the policy's text is never rendered or tokenised again.
It knows no clock: templates that ask for the date use their own default.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec
from tokenizers import Tokenizer

from shoal.errors import Overreach, StateError
from shoal.policy.spec import PolicySpec, read_capped

MAX_TOKENIZER_BYTES = 64 << 20
MAX_TEMPLATE_BYTES = 1 << 20

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""The files of a checkpoint that decide its tokens."""

REMEMBERED = 256
"""Number of openings, and of replies, whose token ids are cached."""

_MARK = "\N{OBJECT REPLACEMENT CHARACTER}written\N{OBJECT REPLACEMENT CHARACTER}"
"""Takes the place of the policy's turn. The text that a template puts after it is the text that follows the turn."""

_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


_TEMPLATE_ERRORS = (
    jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError,
)  # fmt: skip
"""Exceptions that a stranger's template may raise, because its expressions are Python's."""


class Renderer:
    """A tokenizer with its chat template."""

    def __init__(self, tokenizer: Tokenizer, template: str, tokens: Mapping[str, str], spec: PolicySpec) -> None:
        """`tokens` maps names of special tokens, as the template uses them, to their texts: eos_token and so on."""
        self._tokenizer = tokenizer
        self._tokens = dict(tokens)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        self._template = _compile(environment, template)
        eos = tokenizer.token_to_id(self._tokens["eos_token"]) if "eos_token" in self._tokens else None
        if eos is None and not spec.eos_ids:
            raise StateError("the tokenizer has no eos_token and config.json no eos_token_id: nothing could end a turn")
        self.eos_id: int = spec.eos_ids[0] if eos is None else eos
        """The token that ends the policy's turn."""
        special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.stop_ids: frozenset[int] = frozenset(special | {self.eos_id, *spec.eos_ids})
        """All control tokens. When the policy writes one, its turn ends."""
        self.vocabulary: int = spec.vocab_size
        """Token ids are below this. It may exceed the tokenizer's vocabulary."""
        # A group's rollouts have the same opening and often the same replies: render and encode each text once.
        self._opening = functools.lru_cache(REMEMBERED)(self._render_opening)
        self._reply = functools.lru_cache(REMEMBERED)(self._render_reply)

    @staticmethod
    def from_directory(directory: Path) -> "Renderer":
        """Open the tokenizer and chat template of a checkpoint. Raises `StateError` if one is missing or damaged."""
        directory = Path(directory)
        spec = PolicySpec.from_directory(directory)
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
            tokenizer, _find_template(directory, config), {k: v for k, v in tokens.items() if v is not None}, spec
        )

    def start(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation's opening, up to where the policy begins to write."""
        return list(self._opening(tuple(tuple(sorted(message.items())) for message in messages)))

    def reply(self, content: str, role: str = "user") -> list[int]:
        """Token ids between the policy's stop token, which is already written, and its next turn.

        The conversation then reads as the template would render it: we render a turn with a marker as its text, and
        take what comes after the marker, without the end token that the policy wrote itself.
        """
        return list(self._reply(content, role))

    def encode(self, text: str) -> list[int]:
        """Token ids of a scripted player's text, without the end token."""
        return self._encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The policy's text, without control tokens. Bytes that are not text become U+FFFD."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def decode_all(self, turns: Sequence[Sequence[int]]) -> list[str]:
        """The texts of several turns, as of `decode`."""
        return [self.decode(turn) for turn in turns]

    def _render_opening(self, messages: tuple[tuple[tuple[str, str], ...], ...]) -> list[int]:
        return self._encode(self._render([dict(message) for message in messages]))

    def _render_reply(self, content: str, role: str) -> list[int]:
        messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": _MARK}]
        _, mark, rest = self._render([*messages, {"role": role, "content": content}]).partition(_MARK)
        if not mark:
            raise StateError("the chat template does not show the assistant's turns: multi-turn play is impossible")
        ids = self._encode(rest)
        return ids[1:] if ids and ids[0] in self.stop_ids else ids

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._tokens)
        except (MemoryError, RecursionError) as error:
            raise Overreach(
                f"the chat template takes more memory or depth than there is ({type(error).__name__}): use another model"
            ) from None
        except _TEMPLATE_ERRORS as error:
            raise StateError(
                f"the chat template refuses these messages: {error}. Use a model that takes them"
            ) from None

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


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


def _compile(environment: jinja2.Environment, template: str) -> jinja2.Template:
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise StateError(f"the chat template is malformed: {error}. Download the model again") from None


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    """Like the one of `transformers`; jinja's own would escape for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
