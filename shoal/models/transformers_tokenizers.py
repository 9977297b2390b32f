"""Which class of transformers opens a checkpoint's tokenizer, and what it builds in the place of what the file says.

Most classes take `tokenizer.json` as it is. Some take only its vocabulary and merges, and bring their own normalizer,
pre-tokenizer and decoder. A test compares the tables with the pinned transformers. Light: it knows neither transformers nor
torch.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from shoal.errors import StateError

FILE = "TokenizersBackend"
"""The class that takes `tokenizer.json` as it is."""

_FILE_NAMES = (FILE, "PreTrainedTokenizer")

BY_TYPE = {
    "Qwen2Tokenizer": (
        "audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano hunyuan_vl internvl lighton_ocr "
        "moss_transcribe_diarize ovis2 qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 "
        "qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice"
    ),
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
    "GemmaTokenizer": (
        "diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2 t5gemma zaya"
    ),
    "GPT2Tokenizer": (
        "blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip instructblipvideo jais2 opt phi "
        "starcoder2"
    ),
    "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "CohereTokenizer": "aya_vision cohere cohere2",
    "LlamaTokenizer": "idefics idefics2",
    "CodeLlamaTokenizer": "code_llama",
    "another class": (
        "bart bert big_bird biogpt blenderbot blenderbot-small camembert cpmant ctrl data2vec-text electra "
        "ernie git gpt_neox_japanese mbart megatron-bert musicgen musicgen_melody mvp openai-gpt pegasus plbart "
        "prophetnet reformer rembert roberta roberta-prelayernorm roc_bert roformer trocr whisper xglm xlm xlm-roberta "
        "xlnet xmod"
    ),
    FILE: (
        "EvollaModel arctic aria beam bigbird_pegasus camembertv2-base canary chatlm cohere_asr ernie4_5 ernie4_5_moe "
        "flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm_image glmasr got_ocr2 gpt_bigcode "
        "gradium_phonon_tts granite granitemoe granitemoehybrid granitemoeshared h2ovl_chat hyperclovax hyperclovax_vlm "
        "internlm2 internlm3 iquestcoder jamba kimi_k25 kimi_linear kosmos-2 llava llava_next mimo_v2_flash minicpm3 "
        "minicpm_ocr minicpmv minicpmv4_6 minicpmv4_7 minimax_m2 ministral ministral3 mistral mistral3 mistral_large4 "
        "mixtral modernbert modernbert-decoder molmo molmo2 nemo_speechlm nemotron nvfp4 nystromformer olmo2 olmo3 "
        "olmo_hybrid opencua openvla paddleocr_vl pegasus_x persimmon phi3 phi3_v phimoe pix2struct pixtral pocket_tts "
        "smolvlm stablelm step3_vl umt5 vipllava voxtral voxtral_realtime xlm-roberta-xl"
    ),
}
"""Model types by the class that transformers names for them. Llama, SmolLM3, DeepSeek, gpt-oss and others have none."""

_BY_TYPE = {name: kind for kind, names in BY_TYPE.items() for name in names.split()}

WRONG_ON_HUBS = frozenset({"qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "hyperclovax_vision_v2"})
"""Model types whose `tokenizer_class` transformers ignores for its own."""

_OTHERS = (
    "Albert Barthez Bart Bartpho Bert BertGeneration BertJapanese Bertweet BigBird BioGpt Blenderbot BlenderbotSmall "
    "ByT5 CLIP CTRL Camembert Canine Character Clvp CpmAnt Cpm DPRContextEncoder DPRQuestionEncoder "
    "DPRReader Deberta DebertaV2 Dia DistilBert Esm Esmc FSMT FastSpeech2Conformer Flaubert Funnel GPTNeoXJapanese "
    "GPTSw3 Herbert Lasr LayoutLMv2 LayoutLMv3 LayoutXLM Luke M2M100 MBart50 MBart MLuke MPNet Marian MarkupLM Mgpstr "
    "MobileBert MyT5 Nllb Nougat OpenAIGPT PLBart Pegasus Perceiver Phobert Pop2Piano ProphetNet Rag Reformer RemBert "
    "RoCBert RoFormer Roberta SeamlessM4T Siglip2 Siglip Speech2Text SpeechT5 Splinter SqueezeBert T5 Tapas Tipsv2 "
    "Udop VideoPrism Vits Wav2Vec2CTC Wav2Vec2PhonemeCTC Whisper XGLM XLMRoberta XLM XLNet"
)

OTHERS = frozenset(_OTHERS.split())
"""Classes that build tokenizers in other ways, without the "Tokenizer" at the end of their names."""


class Built(NamedTuple):
    """What a class builds around a file's vocabulary and merges."""

    model: Mapping[str, Any]
    """Settings of its BPE."""
    normalizer: Any
    pre_tokenizer: Any
    decoder: Any
    tokens: Mapping[str, str]
    """Named tokens, where `tokenizer_config.json` gives none."""


def class_of(config: Mapping[str, Any], model: Mapping[str, Any], byte_level: bool) -> str:
    """The name of the class, without "Fast". `config` is the content of `tokenizer_config.json`, `model` that of
    `config.json`; with `byte_level`, `tokenizer.json` has a byte-level part. Raises `StateError` if a checkpoint brings its
    own code instead, or for a class that builds a tokenizer in a way that is not known here."""
    kind, own = model.get("model_type"), str(config.get("tokenizer_class") or "").removesuffix("Fast")
    registered = _BY_TYPE.get(kind, "") if isinstance(kind, str) else ""
    declared = own or str(model.get("tokenizer_class") or "").removesuffix("Fast")
    remote = config.get("auto_map")
    if remote := remote.get("AutoTokenizer") if isinstance(remote, dict) else remote:
        name = _known(own) if own else registered
        if not registered and (not own or (name == FILE and own not in _FILE_NAMES)):
            raise StateError(
                f"its tokenizer is code of its own ({str(remote)[:60]}), and none is executed: save it as a fast "
                "tokenizer of class PreTrainedTokenizerFast, without auto_map"
            )
    elif not declared:
        name = registered or FILE
    elif declared == "LlamaTokenizer" and byte_level and kind not in WRONG_ON_HUBS:
        name = FILE
    elif registered and registered != declared and (registered == FILE or kind in WRONG_ON_HUBS):
        name = registered
    else:
        name = _known(declared)
    if name != FILE and name not in BUILD:  # guard: tokenizer-as-transformers-builds-it
        raise StateError(
            f"transformers builds its tokenizer by {name[:60]}, in a way that is not known here: if tokenizer.json is "
            "right as it is, write tokenizer_class = PreTrainedTokenizerFast into tokenizer_config.json"
        )
    return name


def as_the_file_is(model: Mapping[str, Any]) -> str:
    """What makes transformers take `tokenizer.json` as it is, beside a `config.json` of this content."""
    if (kind := model.get("model_type")) in WRONG_ON_HUBS:
        return (
            f"take a model of another model_type, such as llama, with tokenizer_class = PreTrainedTokenizerFast (beside "
            f"{kind}, transformers ignores that)"
        )
    return "write tokenizer_class = PreTrainedTokenizerFast into tokenizer_config.json"


def _known(declared: str) -> str:
    known = declared in BUILD or declared.removesuffix("Tokenizer") in OTHERS
    return declared if known else FILE  # as transformers does with names that it does not know


def _bpe(**settings: Any) -> dict[str, Any]:
    return {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False, **settings}


_BYTES = _bpe(continuing_subword_prefix="", end_of_word_suffix="")
_END_OF_TEXT = {"unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}


def _qwen(letters: str) -> Callable[[Mapping[str, Any]], Built]:
    pattern = (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}+|\p{{N}}"
        rf"| ?[^\s{letters.strip('[]')}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )

    def build(config: Mapping[str, Any]) -> Built:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")), use_regex=False)
        sequence = pre_tokenizers.Sequence([split, to_bytes])
        tokens = {**_END_OF_TEXT, "pad_token": "<|endoftext|>"}
        return Built(_BYTES, normalizers.NFC(), sequence, decoders.ByteLevel(), tokens)

    return build


def _llama(config: Mapping[str, Any]) -> Built:
    prefix = config.get("add_prefix_space") is not False
    scheme = ("always" if config.get("legacy") else "first") if prefix else "never"
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    sequence = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    tokens = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    space = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    return Built(_bpe(fuse_unk=True, byte_fallback=True), None, space, sequence, tokens)


def _code_llama(config: Mapping[str, Any]) -> Built:
    usual, llama = _llama({}), _llama({**config, "legacy": False})
    settings = {**llama.model, "unk_token": str(config.get("unk_token", "<unk>"))}
    infill = {f"{name}_token": f"▁<{name[:3].upper()}>" for name in ("prefix", "middle", "suffix", "eot")}
    tokens = {**llama.tokens, **infill, "fill_token": "<FILL_ME>"}
    return usual._replace(model=settings, pre_tokenizer=llama.pre_tokenizer, tokens=tokens)


def _gemma(config: Mapping[str, Any]) -> Built:
    tokens = {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")}
    unknown = config.get("unk_token", "<unk>")
    settings = _bpe(fuse_unk=True, byte_fallback=True, unk_token=str(unknown))
    sequence = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    split = pre_tokenizers.Split(" ", "merged_with_previous")
    return Built(settings, normalizers.Replace(" ", "▁"), split, sequence, tokens)


def _gpt2(config: Mapping[str, Any]) -> Built:
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")))
    return Built(_BYTES, None, to_bytes, decoders.ByteLevel(), {**_END_OF_TEXT, "bos_token": "<|endoftext|>"})


def _neox(config: Mapping[str, Any]) -> Built:
    as_gpt2 = _gpt2(config)
    return as_gpt2._replace(normalizer=normalizers.NFC(), tokens={**as_gpt2.tokens, "pad_token": "<|padding|>"})


def _cohere(config: Mapping[str, Any]) -> Built:
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")))
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), to_bytes])
    tokens = {
        "unk_token": "<UNK>", "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "pad_token": "<PAD>",
        "cls_token": "<CLS>", "sep_token": "<SEP>", "mask_token": "<MASK_TOKEN>",
    }  # fmt: skip
    return Built(_BYTES, normalizers.NFC(), digits, decoders.ByteLevel(), tokens)


BUILD: dict[str, Callable[[Mapping[str, Any]], Built]] = {
    "Qwen2Tokenizer": _qwen(r"\p{L}"),
    "Qwen3_5Tokenizer": _qwen(r"[\p{L}\p{M}]"),
    "GemmaTokenizer": _gemma,
    "GPT2Tokenizer": _gpt2,
    "CodeGenTokenizer": _gpt2,
    "GPTNeoXTokenizer": _neox,
    "CohereTokenizer": _cohere,
    "LlamaTokenizer": _llama,
    "CodeLlamaTokenizer": _code_llama,
}
"""What each class builds, given the content of `tokenizer_config.json`."""


def with_parts(tokenizer: Tokenizer, built: Built) -> Tokenizer:
    """A tokenizer with the normalizer, pre-tokenizer and decoder that a class builds."""
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = (
        built.normalizer, built.pre_tokenizer, built.decoder,
    )  # fmt: skip
    return tokenizer


MISTRAL_TYPES = frozenset({"mistral", "mistral3", "voxtral", "ministral", "pixtral"})
"""Model types whose tokenizer `fix_mistral_regex` changes; so does a config.json that names none."""

MISTRAL_ABOVE = 100_000
"""It changes tokenizers of more tokens."""

_MISTRAL = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def fix_mistral(tokenizer: Tokenizer, config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Split texts as `fix_mistral_regex` of `tokenizer_config.json` says, where transformers obeys it: for a large
    vocabulary of a Mistral that a transformers before 5 saved. `config` and `model` are as for `class_of`."""
    current = tokenizer.pre_tokenizer if config.get("fix_mistral_regex") and model else None
    if current is None or tokenizer.get_vocab_size() <= MISTRAL_ABOVE or not _before_5(model):
        return
    if model.get("model_type") is not None and model["model_type"] not in MISTRAL_TYPES:
        return
    split = pre_tokenizers.Split(Regex(_MISTRAL), "isolated")
    if isinstance(current, pre_tokenizers.Sequence):
        current[0] = split
        tokenizer.pre_tokenizer = current
        return
    if isinstance(current, pre_tokenizers.Metaspace):
        current = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, current])


def _before_5(model: Mapping[str, Any]) -> bool:
    """Whether the transformers that saved a model is older than 5.0.0, as 5.0.0rc1 is; an unnamed one counts as old."""
    version = str(model.get("transformers_version") or "0").strip()
    found = re.match(r"v?(\d+)(?:\.0+)*[._-]?(a|b|c|rc|pre|dev)?", version, re.IGNORECASE)
    return found is not None and (int(found[1]) < 5 or (int(found[1]) == 5 and bool(found[2])))
