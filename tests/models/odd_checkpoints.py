"""Small odd checkpoints, without weights: each property changes the files of a plain one as real models' files differ.

The plain one is byte-level BPE with a few merges and the template of ChatML.
"""

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from shoal.config import TinyPolicy
from shoal.models.random_model import tiny_spec

START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COUNT = (
    "{% set ns = namespace(n=0, last=-1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
"""Counts the messages, and finds the user's last one."""
THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
LATE_THOUGHT = "{% if loop.index0 > ns.last %}" + THOUGHT + "{% endif %}"
AT_LAST = "{% if loop.index0 == ns.last %}REMINDER {{ tools | length if tools else '' }}\n{% endif %}"


def talk_template(before: str = "", after: str = "") -> str:
    """A template with more before and after each text."""
    return CHATML.replace("{{ m.content }}", before + "{{ m.content }}" + CALLS + after)


HISTORIES = {
    "all kept": talk_template(THOUGHT),
    "a reminder at the user's last message, thoughts kept": COUNT + talk_template(AT_LAST + THOUGHT),
    "a reminder after it": COUNT + talk_template(THOUGHT, AT_LAST),
    "a reminder, thoughts dropped": COUNT + talk_template(AT_LAST + LATE_THOUGHT),
    "at the last message": talk_template(THOUGHT, "{% if loop.last %} (be brief){% endif %}"),
    "a prompt that opens a thought": COUNT
    + talk_template(AT_LAST + THOUGHT).replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"),
}
"""Templates that show earlier messages in another way than when they were the last."""

TEXTS = [
    "Hello there.",
    "What is 12 + 30 ?",
    " spaced  out ",
    "naïve 漢字 🙂",
    "it 's a dog, isn 't it",
    "the thing of the king",
]


@dataclass
class Files:
    """The files of a checkpoint, by name; each is a JSON value or a text."""

    tokenizer: dict[str, Any]
    config: dict[str, Any]
    model: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        files = {"tokenizer.json": self.tokenizer, "tokenizer_config.json": self.config, "config.json": self.model}
        for name, content in {**files, **self.more}.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))

    @property
    def template(self) -> str:
        return str(self.config["chat_template"])

    @template.setter
    def template(self, template: str) -> None:
        self.config["chat_template"] = template


Change = Callable[[Files], None]


@functools.cache
def _tokenizer(kind: str) -> str:
    alphabet = sorted({*"".join(TEXTS), *pre_tokenizers.ByteLevel.alphabet(), "▁", "\n"})
    control = [TEXT_END, START, END]
    model: Any = models.BPE()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=control, show_progress=False
    )
    if kind == "wordpiece":
        model = models.WordPiece(unk_token="[UNK]")
        trainer = trainers.WordPieceTrainer(
            vocab_size=400, initial_alphabet=alphabet, special_tokens=[*control, "[UNK]"], show_progress=False
        )
    if kind == "unigram":
        model = models.Unigram()
        trainer = trainers.UnigramTrainer(
            vocab_size=300,
            initial_alphabet=alphabet,
            special_tokens=[*control, "<unk>"],
            unk_token="<unk>",
            show_progress=False,
        )
    if kind == "sentencepiece":
        model = models.BPE(byte_fallback=True, fuse_unk=True)
        trainer = trainers.BpeTrainer(
            vocab_size=700, initial_alphabet=alphabet, show_progress=False,
            special_tokens=[*control, "<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        )  # fmt: skip
    tokenizer = Tokenizer(model)
    if kind == "bytes":
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
    elif kind == "wordpiece":
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.BertPreTokenizer(),
            decoders.WordPiece(cleanup=False),
        )
    elif kind == "unigram":
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.train_from_iterator(
        [text.replace(" ", "▁") if kind == "sentencepiece" else text for text in TEXTS * 3], trainer
    )
    found = json.loads(tokenizer.to_str())
    keep = {TEXT_END, START, END, "<unk>", "[UNK]", "<s>", "</s>"}
    found["added_tokens"] = [token for token in found["added_tokens"] if token["content"] in keep]
    return json.dumps(found)


def plain(kind: str = "bytes") -> Files:
    """The files of a plain checkpoint."""
    tokenizer = json.loads(_tokenizer(kind))
    files = Files(
        tokenizer,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": TEXT_END,
            "chat_template": CHATML,
        },
        tiny_spec(TinyPolicy()).to_hf()
        | {"vocab_size": 1000, "eos_token_id": _id(tokenizer, END), "pad_token_id": None},
    )
    return files


def _id(tokenizer: dict[str, Any], text: str) -> int:
    return next(token["id"] for token in tokenizer["added_tokens"] if token["content"] == text)


def _token(content: str, **fields: Any) -> dict[str, Any]:
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": content, **usual, **fields}


def _kind(kind: str, name: str, **config: Any) -> Change:
    def change(files: Files) -> None:
        other = plain(kind)
        files.tokenizer, files.model["eos_token_id"] = other.tokenizer, other.model["eos_token_id"]
        files.config |= {"tokenizer_class": name, **config}

    return change


def _part(name: str, part: Any) -> Change:
    """Change a part of `tokenizer.json`."""

    def change(files: Files) -> None:
        files.tokenizer[name] = copy.deepcopy(part)

    return change


def _object(part: Any) -> Any:
    return json.loads(part.__getstate__())


def _config(**config: Any) -> Change:
    return lambda files: files.config.update(copy.deepcopy(config))


def _file(name: str, content: Any) -> Change:
    return lambda files: files.more.update({name: copy.deepcopy(content)})


def _flags(token: str, **flags: Any) -> Change:
    def change(files: Files) -> None:
        for one in files.tokenizer["added_tokens"]:
            if one["content"] == token:
                one.update(flags)

    return change


def _added(*tokens: str, **flags: Any) -> Change:
    """Add tokens to `tokenizer.json`."""

    def change(files: Files) -> None:
        top = max(
            [token["id"] for token in files.tokenizer["added_tokens"]] + [len(files.tokenizer["model"]["vocab"]) - 1]
        )
        for number, token in enumerate(tokens, top + 1):
            files.tokenizer["added_tokens"].append({"id": number, **_token(token, **flags)})

    return change


def _decoder(**flags: Any) -> Change:
    """Tokens that only `added_tokens_decoder` names, with all that the tokenizer has, as transformers 4 saves them."""

    def change(files: Files) -> None:
        known = {
            str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in files.tokenizer["added_tokens"]
        }
        files.config["added_tokens_decoder"] = known | {
            str(900 + i): _token(token, **flags) for i, token in enumerate(("<|tool|>", "<|think|>"))
        }

    return change


def _template(template: str) -> Change:
    def change(files: Files) -> None:
        files.template = template

    return change


def _both(*changes: Change) -> Change:
    def change(files: Files) -> None:
        for one in changes:
            one(files)

    return change


def _type(name: str) -> Change:
    return lambda files: files.model.update(model_type=name)


def _eos(text: str, name: str = "eos_token") -> Change:
    """The model's end token is an ordinary token of its vocabulary."""

    def change(files: Files) -> None:
        vocabulary = files.tokenizer["model"]["vocab"]
        entries = vocabulary if isinstance(vocabulary, dict) else {entry[0]: i for i, entry in enumerate(vocabulary)}
        files.config[name] = text
        if text in entries:
            files.model["eos_token_id"] = entries[text]

    return change


TRUNCATION = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 64},
    "direction": "Left",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": TEXT_END,
}
BATCH_PADDING = PADDING | {"strategy": "BatchLongest", "pad_to_multiple_of": 8, "direction": "Right"}
_BOS = _object(
    processors.TemplateProcessing(single=f"{TEXT_END} $A {END}", pair=None, special_tokens=[(TEXT_END, 0), (END, 2)])
)

KINDS: dict[str, Change] = {
    "wordpiece": _kind("wordpiece", "PreTrainedTokenizerFast", unk_token="[UNK]"),
    "unigram": _kind("unigram", "PreTrainedTokenizerFast", unk_token="<unk>"),
    "sentencepiece": _kind("sentencepiece", "PreTrainedTokenizerFast", unk_token="<unk>", bos_token="<s>"),
    "llama class": _kind("sentencepiece", "LlamaTokenizerFast", unk_token="<unk>", bos_token="<s>"),
    "llama class, legacy": _kind("sentencepiece", "LlamaTokenizer", legacy=True, add_prefix_space=None),
    "llama class, no prefix": _kind("sentencepiece", "LlamaTokenizer", add_prefix_space=False, legacy=False),
    "llama class of bytes": _config(tokenizer_class="LlamaTokenizer"),
    "gemma class": _both(
        _kind("sentencepiece", "GemmaTokenizer"), _type("gemma3_text")
    ),
    "qwen class": _config(tokenizer_class="Qwen2Tokenizer"),
    "qwen type": _both(_config(tokenizer_class=None), lambda files: files.config.pop("tokenizer_class")),
    "gpt2 class": _config(tokenizer_class="GPT2Tokenizer", add_prefix_space=True),
    "codegen class": _both(_config(tokenizer_class="CodeGenTokenizerFast"), _type("phi")),
    "code llama": _both(
        _kind("sentencepiece", "CodeLlamaTokenizerFast", unk_token="<unk>", bos_token="<s>", prefix_token="▁<PRE>"),
        _type("llama"), _added("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>", special=False), _config(fill_token="<FILL_ME>"),
    ),
    "code llama without infilling": _kind(
        "sentencepiece", "CodeLlamaTokenizer", add_prefix_space=False, legacy=True,
        **dict.fromkeys(["prefix_token", "middle_token", "suffix_token", "eot_token", "fill_token"]),
    ),
    "code llama that names nothing": _kind("sentencepiece", "CodeLlamaTokenizer", unk_token="<unk>"),
    "neox class": _config(tokenizer_class="GPTNeoXTokenizerFast"),
    "cohere class": _config(tokenizer_class="CohereTokenizerFast"),
    "phi 3": _both(
        _kind("sentencepiece", "LlamaTokenizer", bos_token="<s>", unk_token="<unk>", legacy=False),
        _type("phi3"), _flags(END, rstrip=True), _flags(START, rstrip=True),
    ),
    "mistral": _both(_kind("sentencepiece", "LlamaTokenizerFast", bos_token="<s>", legacy=True), _type("mistral")),
    "smollm": _both(
        _config(tokenizer_class="GPT2Tokenizer", bos_token=START), _type("llama"),
        _part("pre_tokenizer", _object(pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        ]))),
    ),
    "llama 3": _both(_config(bos_token=TEXT_END, clean_up_tokenization_spaces=True), _type("llama")),
    "qwen 2 of another class": _both(_config(tokenizer_class="TokenizersBackend"), _type("qwen2")),
    "deepseek": _both(_config(tokenizer_class="LlamaTokenizerFast", legacy=True), _type("deepseek_v3")),
    "no config": lambda files: (files.more.update({"chat_template.jinja": CHATML}), files.config.clear()),
    "unheard class": _config(tokenizer_class="MyOwnTokenizerFast"),
}  # fmt: skip
"""Models and classes of tokenizers. A combination has at most one."""

TOKENS: dict[str, Change] = {
    "truncation": _part("truncation", TRUNCATION),
    "truncation on the left": _part("truncation", TRUNCATION | {"direction": "Left", "max_length": 3}),
    "padding": _part("padding", PADDING),
    "batch padding": _part("padding", BATCH_PADDING),
    "truncation and padding": _both(_part("truncation", TRUNCATION), _part("padding", PADDING)),
    "model_max_length": _config(model_max_length=8, padding_side="left", truncation_side="left"),
    "added_tokens_decoder": _decoder(),
    "plain added_tokens_decoder": _decoder(special=False, normalized=True),
    "additional_special_tokens": _config(additional_special_tokens=["<|tool|>", "<|think|>"]),
    "additional objects": _config(additional_special_tokens=[{"__type": "AddedToken", **_token("<|tool|>", lstrip=True)}]),
    "extra_special_tokens": _config(extra_special_tokens=["<|think|>", "<|tool|>"]),
    "named extra tokens": _config(extra_special_tokens={"tool_token": "<|tool|>", "think_token": "<|think|>"}),
    "model's named token": _config(image_token="<|tool|>", boi_token={"__type": "AddedToken", **_token("<|think|>")}),
    "model-specific tokens": _config(model_specific_special_tokens={"tool_token": "<|tool|>"}),
    "special_tokens_map": _file(
        "special_tokens_map.json",
        {"bos_token": _token("<|think|>"), "additional_special_tokens": ["<|tool|>"], "eos_token": END},
    ),
    "added_tokens.json": _file("added_tokens.json", {"<|tool|>": 901, "<|think|>": 900}),
    "map and added": _both(
        _file("special_tokens_map.json", {"extra_special_tokens": ["<|tool|>"]}),
        _file("added_tokens.json", {"<|tool|>": 901, "<|think|>": 900}),
    ),
    "bos as object": _config(bos_token={"__type": "AddedToken", **_token("<|think|>", normalized=True)}),
    "sep, cls and mask": _config(sep_token="<|think|>", cls_token="<|tool|>", mask_token="<|think|>"),
    "plain end": _flags(END, special=False),
    "plain end, named elsewhere": _both(
        _flags(END, special=False), _config(eos_token=TEXT_END), lambda files: files.model.update(eos_token_id=0)
    ),
    "pad is eos": _config(pad_token=END),
    "ordinary eos": _eos("."),
    "null names": _config(bos_token=None, unk_token=None, sep_token=None),
    "left-stripping": _flags(START, lstrip=True),
    "right-stripping": _flags(START, rstrip=True),
    "both stripping": _flags(END, lstrip=True, rstrip=True),
    "single word": _added("<|tool|>", "king", single_word=True),
    "normalized": _added("<|tool|>", "THE", normalized=True, special=False),
    "normalized control": _added("<|tool|>", "<|think|>", normalized=True),
    "normalized control of the decoder": _decoder(normalized=True),
    "stripping control of the decoder": _decoder(lstrip=True, rstrip=True, single_word=True),
    "add_prefix_space": _config(add_prefix_space=True),
    "not legacy": _config(legacy=False, spaces_between_special_tokens=False, split_special_tokens=False),
    "short and padded on the left": _config(padding_side="left", model_max_length=4),
    "added words": _added("Hello", "  ", "<|think|>", special=False),
    "prefix space": _part("pre_tokenizer", _object(pre_tokenizers.ByteLevel(add_prefix_space=True))),
    "whole texts": _part("pre_tokenizer", _object(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))),
    "lower case": _part("normalizer", _object(normalizers.Lowercase())),
    "NFKC": _part("normalizer", _object(normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()]))),
    "clean up": _config(clean_up_tokenization_spaces=True),
    "clean up in any case": _config(
        clean_up_tokenization_spaces=True, clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True
    ),
    "bos and eos by post-processor": _part("post_processor", _BOS),
    "add_bos_token": _config(add_bos_token=True, add_eos_token=True, bos_token=TEXT_END),
}  # fmt: skip

TEMPLATES: dict[str, Change] = {
    "bos": _template("{{ bos_token }}{{ pad_token }}" + CHATML),
    "default system": _template(
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}" + CHATML
    ),
    "tools": _template("{% if tools %}<|im_start|>system\n{{ tools | tojson(indent=2) }}<|im_end|>\n{% endif %}" + CHATML),
    "tools that are none": _template(
        "{% if tools is not none and documents is none %}TOOLS {{ tools | length }}\n{% endif %}" + CHATML
    ),
    "tool_use": lambda files: files.config.update(
        chat_template=[
            {"name": "default", "template": CHATML},
            {"name": "tool_use", "template": "{% for t in tools %}<|im_start|>{{ t | tojson }}{% endfor %}\n" + CHATML},
        ]
    ),
    "tool_use in a table": lambda files: files.config.update(
        chat_template={"default": CHATML, "rag": "no", "tool_use": "TOOLS " + CHATML}
    ),
    "file before config": _both(_template("wrong"), _file("chat_template.jinja", "{{ bos_token }}" + CHATML + "\n")),
    "file before list": _both(
        lambda files: files.config.update(chat_template=[{"name": "tool_use", "template": "wrong"}]),
        _file("chat_template.jinja", "{%- set x = 1 -%}\r\n" + CHATML),
    ),
    "date": _template("Today: {{ strftime_now('%d %b %Y') }}\n" + CHATML),
    "generation block": _template(
        CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content | trim }}{% endgeneration %}")
    ),
    "namespace": _template(COUNT + "{{ ns.n }}\n" + CHATML),
    "thoughts of the last turn": _template(
        COUNT + CHATML.replace("{{ m.content }}", "{% if loop.index0 > ns.last %}" + THOUGHT + "{% endif %}{{ m.content }}")
    ),
    "strict": _template(
        "{% if messages[0].role == 'system' and messages | length < 2 %}{{ raise_exception('short') }}{% endif %}" + CHATML
    ),
    "no newline": _template(
        "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
}  # fmt: skip


def _twins(files: Files) -> None:
    """Added tokens of which a normaliser makes one."""
    added, vocabulary = files.tokenizer["added_tokens"], files.tokenizer["model"]["vocab"]
    files.tokenizer["normalizer"] = {"type": "Lowercase"}
    rules = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False) | {"normalized": True}
    first = max(len(vocabulary), *(token["id"] + 1 for token in added))
    added += [{"id": first + i, "content": content, **rules} for i, content in enumerate(("<|TWIN|>", "<|twin|>"))]


REFUSED: dict[str, Change] = {
    "two added tokens for one text": _twins,
    "dropout": lambda files: files.tokenizer["model"].update(dropout=0.1),
    "split special tokens": _config(split_special_tokens=True),
    "a folder of templates": _file("additional_chat_templates/tool_use.jinja", "TOOLS " + CHATML),
    "a class that builds otherwise": _config(tokenizer_class="BertTokenizer"),
    "its own code": _both(
        _config(tokenizer_class="MyOwnTokenizer", auto_map={"AutoTokenizer": ["code.Slow", "code.Fast"]}),
        lambda files: files.model.update(model_type="llama"),
    ),
    "templates without a default": lambda files: files.config.update(chat_template={"rag": CHATML}),
}
"""Properties of checkpoints that cannot be read as transformers reads them."""

SAYS = {
    "two added tokens for one text": r"<\|TWIN\|>' and '<\|twin\|>' as one text",
    "dropout": "dropout = 0.1",
    "split special tokens": "split_special_tokens = true",
    "a folder of templates": "additional_chat_templates/tool_use.jinja",
    "a class that builds otherwise": "by BertTokenizer, in a way that is not known here",
    "its own code": "code of its own",
    "templates without a default": "chat templates of other names \\(rag\\)",
}
"""What the refusal names."""

PROPERTIES = {**KINDS, **TOKENS, **TEMPLATES, **REFUSED}
