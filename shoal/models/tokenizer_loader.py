"""A checkpoint's tokenizer, as `AutoTokenizer` of the pinned transformers opens it, without transformers or torch.

Besides `tokenizer.json`, three files may add tokens to it or change them, and the class that transformers picks may replace
parts of it. What would cut, fill up or vary a text is turned off, or refused by name.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import AddedToken, Tokenizer

from shoal.errors import StateError
from shoal.models.safetensors_header import bad_value, decode_strictly, read_capped
from shoal.models.transformer_config import TransformerConfig
from shoal.models.transformers_tokenizers import BUILD, FILE, Built, as_the_file_is, class_of, fix_mistral, with_parts
from shoal.protocol.constants import MAX_JSON_BYTES

MAX_TOKENIZER_BYTES = 64 << 20
MAX_CONFIG_BYTES = 4 << 20

TOKENIZER, CONFIG, SPECIAL_MAP, ADDED = FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
"""The files that decide how texts become tokens."""

_SPACES = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"),
    (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

ANY_TEXT = "Hi, 12 + 30?\n\t naïf 漢字 🙂 \x00"
"""A text that has something for which no vocabulary has a word."""

Token = str | AddedToken

_EXTRA, _OLD_EXTRA, _FIELDS = "extra_special_tokens", "additional_special_tokens", AddedToken("").__getstate__().keys()

_TRIED = ("123", " it's", "naïve THE", "a  b", "x=1;\n\n\ty")


class OpenTokenizer(NamedTuple):
    """A tokenizer with what its config says of it."""

    tokenizer: Tokenizer
    tokens: Mapping[str, str]
    """Texts of the named tokens, such as eos_token, which templates may use."""
    cleans_up: bool = False
    """Whether decoding removes spaces before punctuation."""


class AddedTokens(NamedTuple):
    """Tokens that a checkpoint's files add to its tokenizer, in the order in which transformers adds them.

    `tokenizer_config.json` may name tokens in five ways. Without its `added_tokens_decoder`, `special_tokens_map.json` and
    `added_tokens.json` count as well, which older checkpoints have. The order decides the ids of tokens that
    `tokenizer.json` lacks.
    """

    names: dict[str, Token]
    """The tokens that have a name, such as eos_token or image_token."""
    extra: list[Token]
    """Control tokens without one."""
    added: list[AddedToken]
    """Any tokens, in the order of the ids that they had."""


class _TokenizerJson(msgspec.Struct):
    model: dict[str, msgspec.Raw]
    """As it is written: its vocabulary and merges are long."""
    added_tokens: list[dict[str, Any]] = []

    def setting(self, name: str) -> Any:
        """A setting of the model; None if it has none of this name."""
        return msgspec.json.decode(self.model[name]) if name in self.model else None


def open_tokenizer(directory: Path) -> OpenTokenizer:
    """Open the tokenizer of a checkpoint. Raises `StateError` if a file is missing or damaged, or if it cannot be opened as
    transformers does."""
    path = Path(directory) / TOKENIZER
    config, model = read_object(path.parent / CONFIG), read_object(path.parent / "config.json", MAX_JSON_BYTES)
    data = read_capped(path, MAX_TOKENIZER_BYTES)
    special_map, older = read_object(path.parent / SPECIAL_MAP), read_object(path.parent / ADDED)
    _demand_tokens(path.parent / CONFIG, config)
    if "added_tokens_decoder" not in config:  # else transformers reads neither
        _demand_tokens(path.parent / SPECIAL_MAP, special_map)
        _demand_ids(path.parent / ADDED, older)
    try:
        parts = msgspec.json.decode(data, type=_TokenizerJson)
        kind = _class_of(path, config, model, b'"ByteLevel"' in data)
        _demand_readable(path, config, model, parts, kind)
        built = BUILD[kind](config) if kind != FILE else None
        tokenizer = _built(built, parts.model) if built else Tokenizer.from_str(data.decode())
        tokens = declared(config, special_map, older, parts.added_tokens, built.tokens if built else {})
        add_declared(tokenizer, tokens)
        _add_again(tokenizer, tokens, kind)
        fix_mistral(tokenizer, config, model)
    except StateError:
        raise
    except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception for a file that it cannot parse
        raise StateError(f"{path} is damaged: {error}. Download the model again") from None
    _demand_distinct(path, tokenizer)
    tokenizer.no_truncation()  # a file may say to cut texts or to fill them up: transformers does so only if a call asks
    tokenizer.no_padding()
    anyway = config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
    cleans_up = bool(config.get("clean_up_tokenization_spaces")) and (parts.setting("type") != "BPE" or bool(anyway))
    try:
        tokenizer.encode(ANY_TEXT, add_special_tokens=False)
    except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception, and so would the prompts of a run
        named = f"the tokenizer {kind if kind != FILE else parts.setting('type')} of {path.parent}"
        raise StateError(
            f"{named} cannot read every text: {str(error)[:200]}. Give it the model's own unknown token, or choose another "
            "model"
        ) from None
    names = {name: texts_of([token])[0] for name, token in tokens.names.items()}
    return OpenTokenizer(tokenizer, names, cleans_up)


def declared(
    config: Mapping[str, Any],
    special_map: Mapping[str, Any],
    older: Mapping[str, int],
    in_file: Sequence[Mapping[str, Any]],
    usual: Mapping[str, str],
) -> AddedTokens:
    """The tokens of `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json` and `tokenizer.json`. `usual`
    are the names that a class gives by itself."""
    found = dict(config)
    if _OLD_EXTRA in found and not found.get(_EXTRA):
        found[_EXTRA] = found.pop(_OLD_EXTRA)
    named_here = {key: found.pop(key) for key in list(found) if _is_name(key) and isinstance(found[key], str)}
    named_here |= _named_extra(found)
    named_here = named_here or found.get("model_specific_special_tokens") or {}
    by_id: dict[int, AddedToken] = {}
    if "added_tokens_decoder" in found:
        by_id = {int(index): _added(token) for index, token in found["added_tokens_decoder"].items()}
    else:
        for key, value in special_map.items():
            if key == _EXTRA and isinstance(value, list):
                here = [*(found.get(_EXTRA) or [])]
                value = [*here, *(token for token in value if token not in here)]
            found[key] = _added({**value, "special": True}) if isinstance(value, dict) and key != _EXTRA else value
        named_here |= _named_extra(found)
        known = [*(found[name] for name in NAMED if found.get(name)), *(found.get(_EXTRA) or ())]
        special = {
            _text(token) for token in known if not isinstance(token, dict)
        }  # as transformers, which reads objects later
        for text, index in older.items():
            by_id[index] = AddedToken(text, normalized=text not in special, special=text in special)
        by_id |= {token["id"]: _added(token) for token in in_file}
    by_text = {token.content: token for token in by_id.values()}
    names = {**usual, **{name: found[name] for name in NAMED if name in found}}
    tokens = {name: _token(names[name]) for name in NAMED if names.get(name) is not None}
    tokens = {name: by_text.get(_text(token), token) for name, token in tokens.items()}
    others = {
        key: value for key, value in found.items() if _is_name(key) and isinstance(value, str | dict | AddedToken)
    }
    own = {key: token for key, token in usual.items() if key not in NAMED and key not in config}
    extra = found.get(_EXTRA, found.get(_OLD_EXTRA)) or []
    return AddedTokens(
        tokens | {name: _token(token) for name, token in {**own, **others, **named_here}.items()},
        [_token(token) for token in extra],
        [by_id[index] for index in sorted(by_id)],
    )


def add_declared(tokenizer: Tokenizer, tokens: AddedTokens) -> None:
    """Add them to a tokenizer. Those that it knows keep their ids, and named ones become special."""
    new: list[AddedToken] = []
    named = set(map(_text, tokens.names.values()))
    known = {token.content for token in [*tokenizer.get_added_tokens_decoder().values(), *tokens.added]}
    for token in [*tokens.added, *(t for t in (*tokens.names.values(), *tokens.extra) if _text(t) not in known)]:
        added = AddedToken(token, special=True) if isinstance(token, str) else token
        if added.content in named:
            added.special = True
        new.append(added)
    tokenizer.add_tokens(new)


def texts_of(tokens: Iterable[Token]) -> list[str]:
    """The texts of tokens, each once."""
    return list(dict.fromkeys(map(_text, tokens)))


def difference_from_file(directory: Path) -> str:
    """One line for the host if texts become other tokens than `tokenizer.json` alone says, because transformers picks a
    class that replaces parts of it; else empty. Raises `StateError`."""
    path = Path(directory) / TOKENIZER
    opened, alone = (
        open_tokenizer(directory).tokenizer,
        Tokenizer.from_str(read_capped(path, MAX_TOKENIZER_BYTES).decode()),
    )
    alone.no_truncation()
    alone.no_padding()
    for text in _TRIED:
        ours, in_file = (one.encode(text, add_special_tokens=False).tokens for one in (opened, alone))
        if ours != in_file:
            name = read_object(path.parent / CONFIG).get("tokenizer_class")
            model = read_object(path.parent / "config.json", MAX_JSON_BYTES)
            return (
                f"tokenizer: {text!r} is {ours} with tokenizer_class {name}, as transformers opens it, and {in_file} by "
                f"tokenizer.json alone: to have that, {as_the_file_is(model)}"
            )
    return ""


def demand_same_vocabulary(directory: Path, policy: Path, what: str) -> None:
    """Raise `StateError` if the model in a directory gives token ids another text than the policy does, or lacks some that
    the policy may write. `what` is the key of the run file that names it."""
    theirs, ours = vocabulary_of(directory), vocabulary_of(policy)
    if theirs != ours:  # guard: same-vocabulary
        odd = sorted(text for text in theirs.keys() | ours.keys() if theirs.get(text) != ours.get(text))[0]
        raise StateError(
            f"{what} = {directory}: its tokenizer is not the policy's, for {odd!r} is {_token_name(theirs, odd)} there and "
            f"{_token_name(ours, odd)} in the policy: choose a model of the same family"
        )
    there, here = (TransformerConfig.from_directory(one).vocab_size for one in (directory, policy))
    if there < here:  # guard: no-id-beyond-its-embedding
        raise StateError(
            f"{what} = {directory}: it has {there} token ids, and the policy may write {here}: choose a model with as many"
        )


def vocabulary_of(directory: Path) -> dict[str, int]:
    """The id of each token, by its text. Raises `StateError`."""
    return open_tokenizer(directory).tokenizer.get_vocab(with_added_tokens=True)


def _token_name(vocabulary: dict[str, int], text: str) -> str:
    return f"token {vocabulary[text]}" if text in vocabulary else "no token"


def read_object(path: Path, limit_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object; empty if there is no such file. Raises `StateError`."""
    if not path.exists():
        return {}
    return decode_strictly(read_capped(path, limit_bytes), dict[str, Any], path)


def clean_up(text: str) -> str:
    """A text without spaces before punctuation, as transformers cleans what some tokenizers decode."""
    for spaced, clean in _SPACES:
        text = text.replace(spaced, clean)
    return text


def _built(built: Built, model: Mapping[str, msgspec.Raw]) -> Tokenizer:
    """The tokenizer of a class that takes only the file's vocabulary and merges."""
    settings = {**built.model, "vocab": model["vocab"], "merges": model.get("merges", [])}
    bare = msgspec.json.encode({"version": "1.0", "added_tokens": [], "model": settings})
    return with_parts(Tokenizer.from_str(bare.decode()), built)


def _add_again(tokenizer: Tokenizer, tokens: AddedTokens, kind: str) -> None:
    """Two classes add their control tokens once more, in another way."""
    texts = texts_of([*tokens.names.values(), *tokens.extra])
    if kind == "Qwen2Tokenizer":
        tokenizer.add_tokens([AddedToken(text, special=True) for text in texts])
    if kind == "CohereTokenizer":
        again = [*tokens.names.values(), *tokens.extra]
        tokenizer.add_special_tokens([AddedToken(one, special=True) if isinstance(one, str) else one for one in again])


def _class_of(path: Path, config: Mapping[str, Any], model: Mapping[str, Any], byte_level: bool) -> str:
    try:
        return class_of(config, model, byte_level)
    except StateError as error:
        raise StateError(f"{path.parent}: {error}") from None


def _demand_readable(
    path: Path, config: Mapping[str, Any], model: Mapping[str, Any], parts: _TokenizerJson, kind: str
) -> None:
    files = config.get("fast_tokenizer_files")
    if isinstance(files, list) and files != [TOKENIZER]:
        raise StateError(
            f"{path.parent / CONFIG} names a tokenizer for each version ({', '.join(map(str, files))[:80]}): keep one, as "
            "tokenizer.json, and leave fast_tokenizer_files out"
        )
    if config.get("split_special_tokens"):
        raise StateError(
            f"{path.parent / CONFIG} has split_special_tokens = true: the control tokens of a chat template would be split "
            "into pieces. Set it to false"
        )
    if dropout := parts.setting("dropout"):  # guard: tokens-not-random
        raise StateError(
            f"{path} has dropout = {dropout!r:.20}: the same text has other tokens each time. Set it to null"
        )
    if kind != FILE and parts.setting("type") != "BPE":
        raise StateError(
            f"{path.parent}: transformers opens its tokenizer by {kind}, which makes BPE of it, and tokenizer.json has "
            f"{parts.setting('type')!r:.40}: {as_the_file_is(model)}, or give it a tokenizer of BPE"
        )


def _demand_distinct(path: Path, tokenizer: Tokenizer) -> None:
    """Refuse added tokens of which the normaliser makes one text: a text has the id of another of them each time."""
    normaliser, read = tokenizer.normalizer, dict[str, str]()
    for token in tokenizer.get_added_tokens_decoder().values():
        if normaliser is None or not token.normalized:
            continue
        other = read.setdefault(normaliser.normalize_str(token.content), token.content)
        if other != token.content:  # guard: tokens-are-distinct
            raise StateError(
                f"{path.parent}: the tokenizer reads its added tokens {other!r:.40} and {token.content!r:.40} as one text, "
                "with the id of either. Leave one out"
            )


def _demand_tokens(path: Path, found: Mapping[str, Any]) -> None:
    """Refuse a file whose keys for tokens hold anything but tokens. Raises `StateError` with the key."""
    token = ["str", 'a table with "content"']
    for key, value in found.items():
        if key in NAMED and not (value is None or _is_token(value)):
            raise bad_value(path, key, value, [*token, "null"])
        if _is_name(key) and isinstance(value, dict) and not _is_token(value):
            raise bad_value(path, key, value, token)
        tables = (_EXTRA, "model_specific_special_tokens")
        if key in (_OLD_EXTRA, *tables) and value is not None:
            fits = isinstance(value, list) or (key in tables and isinstance(value, dict))
            inner = value.values() if isinstance(value, dict) else value
            if not fits or not all(map(_is_token, inner)):
                raise bad_value(
                    path, key, value, ["a list of tokens", *(["a table of tokens"] if key in tables else [])]
                )
    if "added_tokens_decoder" in found:
        by_id = found["added_tokens_decoder"]
        if not isinstance(by_id, dict):
            raise bad_value(path, "added_tokens_decoder", by_id, ["a table of tokens by their ids"])
        for index, value in by_id.items():
            if not (index.isascii() and index.isdecimal() and isinstance(value, dict) and _is_token(value)):
                place = f"[{index[:20]!r}]"
                raise bad_value(
                    path, "added_tokens_decoder", {index: value}, ['an id with a table with "content"'], place
                )


def _demand_ids(path: Path, found: Mapping[str, Any]) -> None:
    """Refuse an `added_tokens.json` that gives a text anything but an id. Raises `StateError`."""
    for key, value in found.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise bad_value(path, key, value, ["int"])


def _is_token(value: Any) -> bool:
    """Whether a value of a JSON file describes a token: a text, or a table with that and its flags."""
    flags = _FIELDS - {"content"}
    return isinstance(value, str) or (
        isinstance(value, dict)
        and isinstance(value.get("content"), str)
        and all(isinstance(value[name], bool) for name in flags & value.keys())
    )


def _is_name(key: str) -> bool:
    return key.endswith("_token") and key not in NAMED


def _named_extra(found: dict[str, Any]) -> dict[str, Any]:
    """Remove from `found`, and return, the control tokens that have names of their own."""
    return found.pop(_EXTRA) if isinstance(found.get(_EXTRA), dict) else {}


def _token(value: Any) -> Token:
    return value if isinstance(value, str | AddedToken) else _added(value)


def _added(value: Mapping[str, Any]) -> AddedToken:
    """A token as a file describes it. Raises an error if it has no text."""
    return AddedToken(**{key: value[key] for key in value if key in _FIELDS})


def _text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token if isinstance(token, str) else token.content
