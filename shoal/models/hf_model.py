"""A policy of any architecture that `transformers` knows: loaded, examined, and shown through
`models.interface.PolicyModel`.

Code of a model's author never runs: `transformers` gets a config that says nothing about loading, and tensors that we have
read ourselves. Each model is examined when it is loaded, by running 8 tokens through it, because an architecture that we
have not read may compute its logits in a way of its own.

Axes: B rows, T tokens of a row, D width, V vocabulary; x any axes.
"""

import contextlib
import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import StateError, cause_of, how_to_install, one_line
from shoal.models import lora_config
from shoal.models.checkpoint import find_tensors, read_tensors
from shoal.models.config import HEAD
from shoal.models.hf_config import HFConfig, read_config, text_config, untied, with_floats, without_own_keys
from shoal.models.interface import Published
from shoal.models.load_tensors import cause_of_missing, cause_of_size, demand_finite_logits, demand_shape
from shoal.models.packed_attention import SharedPrefixGroup
from shoal.models.rope import ORIGINAL, longrope_of, short_rotation
from shoal.models.safetensors_header import bad_value, decode_strictly, read_capped
from shoal.protocol.constants import MAX_JSON_BYTES

EXAMINED = 8
"""Tokens that are run through a model to examine it."""

LARGEST_LOGIT = 100.0
"""The hidden states are also compared when they are so much larger that logits reach this size, where a soft cap shows."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Largest difference between two ways to compute the same, in parts of the largest value."""

CHOSEN = "index_topk"
"""Key of a config that says how many tokens of a longer text each layer chooses to see."""

WINDOWS = ("sliding_window", "attention_chunk_size", CHOSEN)
"""Keys of a config that say how many tokens a layer sees, in its forward pass or in its cache."""

BUFFER_BYTES = 64 << 20
"""Of tables that a model makes from its config, beyond the size of its weights: more is a hostile config."""


class HFModel:
    """A model of `transformers` as a `models.interface.PolicyModel`. Always in evaluation mode: nothing is random."""

    def __init__(self, whole: Any, spec: HFConfig, files: dict[str, Any], directory: Path | None = None) -> None:
        """`whole` is the model with its head; `files` are the JSON files that are published with it; `directory` is where
        it comes from, for errors."""
        self.whole, self.spec, self.where = whole, spec, str(directory or spec.family)
        self.body: Any = whole.base_model
        """The model without its head."""
        self.short_rotation = short_rotation(whole.config, spec.family, spec.max_positions)
        """Tokens of the longest text that has the short rotation of `longrope`; 0 if all texts are rotated alike."""
        self._files = files
        self._recompute = False
        self._head: Any = None
        """The output head, if its logits are those of the model; else the whole model gives logits."""
        self.after_head: Callable[[Tensor], Tensor] | None = None
        self._examine_head()
        self._examine_order()

    def hidden(self, tokens_BT: Tensor, families: Sequence[SharedPrefixGroup] | None = None) -> Tensor:
        """Hidden states after the final norm, [B, T, D], of right-padded rows; logits if the head is not known.

        Each is that of the text up to its token, whatever follows or is beside it: `transformers` rotates a whole batch by
        its longest row, so rows that pass `short_rotation` are read twice.
        """
        assert families is None, 'a model of transformers reads padded rows: train.packing = "padded"'
        short = self.short_rotation
        if 0 < short < tokens_BT.shape[1]:
            return torch.cat([self._hidden(tokens_BT[:, :short]), self._hidden(tokens_BT)[:, short:]], 1)
        return self._hidden(tokens_BT)

    def _hidden(self, tokens_BT: Tensor) -> Tensor:
        if self._head is None:
            return self.whole(input_ids=tokens_BT, use_cache=False).logits
        return self.body(input_ids=tokens_BT, use_cache=False).last_hidden_state

    def head_weight(self) -> Tensor | None:
        return None if self._head is None else self._head.weight

    def logits(self, hidden_xD: Tensor) -> Tensor:
        if self._head is None:
            return hidden_xD
        logits_xV = F.linear(hidden_xD, self._head.weight)
        return logits_xV if self.after_head is None else self.after_head(logits_xV)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters, by the names of transformers. Those of the files may be others."""
        return iter(self.whole.named_parameters())

    def trainable(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())

    def published(self) -> Published:
        """The policy as its files have it: with the names, and one tensor for each expert, as before it was loaded."""
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        tensors = dict(self.whole.state_dict())
        for name in self.whole._keys_to_ignore_on_save or ():
            tensors.pop(name, None)
        tensors = revert_weight_conversion(self.whole, remove_tied_weights_from_state_dict(tensors, self.whole))
        return Published(tensors, self._files)

    def float(self) -> Self:
        self.whole.float()
        return self

    def to(self, device: str) -> Self:
        self.whole.to(device)
        return self

    def train(self, mode: bool = True) -> Self:
        """Nothing: in training mode, dropout and the routers of some models are random."""
        return self

    @property
    def recompute(self) -> bool:
        return self._recompute

    @recompute.setter
    def recompute(self, wanted: bool) -> None:
        if wanted == self._recompute:
            return
        if not self.whole.supports_gradient_checkpointing:
            raise StateError(f'{self.spec.family} cannot compute layers again: leave train.recompute = "none"')
        from transformers.modeling_layers import GradientCheckpointingLayer

        before_TD = self._read(probe_tokens(self.spec.vocab_size))
        if wanted:
            self.whole.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.whole.gradient_checkpointing_disable()
        for layer in self.whole.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.training = wanted  # only its own flag: what is inside stays in evaluation mode
        self._recompute = wanted
        if not torch.equal(before_TD, self._read(probe_tokens(self.spec.vocab_size))):
            raise StateError(f'{self.spec.family} is random in training: leave train.recompute = "none"')

    @contextlib.contextmanager
    def rotating_short_to(self, tokens: int) -> Iterator[None]:
        """Within, the rotation changes after so many tokens, so that few show both."""
        text, before = self.whole.config.get_text_config(), self.short_rotation
        told = [*longrope_of(text), *([vars(text)] if hasattr(text, ORIGINAL) else [])]
        kept = [one[ORIGINAL] for one in told]
        try:
            for one in told:
                one[ORIGINAL] = tokens
            self.short_rotation = tokens
            yield
        finally:
            for one, original in zip(told, kept, strict=True):
                one[ORIGINAL] = original
            self.short_rotation = before

    def window_keys(self) -> list[str]:
        """The keys of its config that let a cache forget."""
        text = self.whole.config.get_text_config()
        kinds = [kind for kind in getattr(text, "layer_types", None) or () if "sliding" in kind or "chunked" in kind]
        found = [key for key in WINDOWS if getattr(text, key, None) is not None]
        if CHOSEN in found and getattr(text, CHOSEN) >= self.spec.max_positions:
            found.remove(CHOSEN)  # no text is longer
        return [*(["layer_types"] if kinds else []), *found]

    @contextlib.contextmanager
    def windows_of(self, choose: Callable[[int], int]) -> Iterator[None]:
        """Within, layers see as many tokens as is chosen for their own windows, so that few pass them, or none."""
        holders = [self.whole.config, self.whole.config.get_text_config(), *self.whole.modules()]
        holders += [module.config for module in self.whole.modules() if hasattr(module, "config")]
        windows = [
            (one, key, value)
            for one in {id(one): one for one in holders}.values()
            for key in WINDOWS
            if type(value := getattr(one, key, None)) is int and value > 0
        ]
        try:
            for one, key, value in windows:
                setattr(one, key, choose(value))
            yield
        finally:
            for one, key, value in windows:
                setattr(one, key, value)

    @torch.no_grad()
    def _read(self, tokens_T: Tensor) -> Tensor:
        return self.hidden(tokens_T[None].to(self.whole.device))[0]

    @torch.no_grad()
    def _examine_head(self) -> None:
        """Find how this model makes logits of hidden states, such that both ways give the same; else use whole logits."""
        head = self.whole.get_output_embeddings()
        if self.body is self.whole or not isinstance(head, nn.Linear):
            return
        tokens_1T = probe_tokens(self.spec.vocab_size)[None].to(self.whole.device)
        if (small := _logits_of(self.whole, tokens_1T, 1.0)) is None:
            return
        factor = LARGEST_LOGIT / max(float(small[1].abs().max()), 1e-6)
        large = _logits_of(self.whole, tokens_1T, factor)
        assert large is not None, "the same model reads the same tokens"
        for after in _after_heads(self.whole.config, head):
            self._head, self.after_head = head, after
            # guard: head-is-proven
            if all(_alike(self.logits(hidden_TD), logits_TV) for hidden_TD, logits_TV in (small, large)):
                return
        self._head = self.after_head = None

    def _examine_order(self) -> None:
        """Refuse models whose logits are not finite; and those in which a token sees later ones: then padding on the right,
        and a replay, would change them."""
        tokens_T = probe_tokens(self.spec.vocab_size)
        changed_T = tokens_T.clone()
        changed_T[-1] = (changed_T[-1] + 1) % self.spec.vocab_size
        read_TD = self._read(tokens_T)
        with torch.no_grad():
            demand_finite_logits(self.logits(read_TD), self.where, str(self.whole.dtype).removeprefix("torch."))
        if not _alike(self._read(changed_T)[:-1], read_TD[:-1]):  # guard: tokens-see-no-later-ones
            raise StateError(
                f"{self.where}: a token sees later ones, so no choice could be replayed. Choose another model"
            )


def load_any(directory: Path, dtype: torch.dtype = torch.float32) -> HFModel:
    """Load a checkpoint directory with transformers as a model of `dtype`, and examine it.

    Raises `StateError` if transformers is missing or cannot run the model, or if files are missing, damaged or hostile.
    """
    spec = HFConfig.from_directory(directory)
    if (Path(directory) / lora_config.WEIGHTS).exists():  # guard: no-adapter-beside-any-model
        raise StateError(f"{directory}: {lora_config.WEIGHTS} beside a whole model: remove one of them")
    stored = find_tensors(directory)
    if spec.layers > len(stored):  # before a hostile config makes us build too much
        raise StateError(f"{directory}: config.json says {spec.layers} layers, its files hold {len(stored)} tensors")
    with refused_by_name(directory, spec):
        files = _files_of(directory)
        auto_model, config = config_of(directory, spec)
        with torch.device("meta"):
            empty = auto_model.from_config(copy.deepcopy(config), trust_remote_code=False)
        named = dict(empty.named_parameters()).keys()
        lacking = sorted(named - stored.keys())
        lacking = lacking if 2 * len(lacking) < len(named) else []  # else its files have other names, such as old ones
        _demand_size(empty, sum(math.prod(tensor.shape) for tensor in stored.values()), directory, lacking)
        head = empty.get_output_embeddings()  # a tied one has no name of its own
        if HEAD in stored and head is not None:
            demand_shape(stored[HEAD], HEAD, tuple(head.weight.shape), directory)
        whole, info = type(empty).from_pretrained(
            None, config=empty.config, state_dict=read_tensors(directory, dtype), dtype=dtype, output_loading_info=True,
            ignore_mismatched_sizes=True, local_files_only=True, use_safetensors=True, trust_remote_code=False,
        )  # fmt: skip
        _demand_all_loaded(info, directory)
        whole.eval()
        _own_memory(whole)
        if whole.config.tie_word_embeddings and _has_own_head(whole):
            files["config.json"] = untied(files["config.json"])
        return HFModel(whole, spec, files, directory)


@contextlib.contextmanager
def refused_by_name(directory: Path, spec: HFConfig) -> Iterator[None]:
    """Around the first work with a model: what transformers raises becomes a `StateError`, unless memory ran out."""
    try:
        yield
    except (StateError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers may raise anything for a model that it cannot run
        if "can't allocate memory" in str(error):
            raise
        partial = any("partial_rotary_factor" in one for one in _rotations(directory))
        hint = (
            ". Its rope_parameters have a partial_rotary_factor, which not every architecture takes" if partial else ""
        )
        raise _value_in(directory, spec, error) or StateError(
            f"{directory}: transformers cannot run this {spec.family}: {_raised(error)}{hint}. Correct its config.json "
            "or choose another model"
        ) from None


def _value_in(directory: Path, spec: HFConfig, error: Exception) -> StateError | None:
    """The error about the value in a `config.json` for which transformers refused a model; None if it is not known."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if isinstance(error, RecursionError):
        return None
    path, config = directory / "config.json", with_floats(read_config(directory))
    text = text_config(config)
    for key, kind in {"rope_scaling": dict, "rope_parameters": dict, "layer_types": list, "head_dim": int}.items():
        if not isinstance(text.get(key), kind | None):
            return bad_value(path, key, text[key], [kind.__name__, "NoneType"])
    named, types = re.search(r"[Ff]ield '(\w+)'", str(error)), re.findall(r"expected (\w+), got", str(error))
    if named and types and named[1] in text | config:
        return bad_value(path, named[1], (config | text)[named[1]], types)
    if isinstance(error, TypeError) and text.get("head_dim", 0) is None:
        return bad_value(path, "head_dim", None, ["int"])
    for one in _rotations(directory):
        if not isinstance(one.get("rope_theta", 0), int | float):
            return bad_value(path, "rope_theta", one["rope_theta"], ["float"])
    if not isinstance(error, TypeError):  # a number was not asked for
        return None
    with contextlib.suppress(Exception):
        usual = CONFIG_MAPPING[spec.family]()
        for key, value in text.items():
            default = getattr(usual, key, None)
            is_number = isinstance(value, int | float) or (value is None and key.endswith("_token_id"))
            if isinstance(default, int | float) and not is_number:
                return bad_value(path, key, value, [type(default).__name__])
    return None


def _rotations(directory: Path) -> list[dict[str, Any]]:
    text = text_config(read_config(directory))
    return [text, *(one for key in ("rope_scaling", "rope_parameters") if isinstance(one := text.get(key), dict))]


def config_of(directory: Path, spec: HFConfig) -> tuple[Any, Any]:
    """The class that opens causal language models, and this model's config without what the files may not decide.

    Raises `StateError` if transformers is missing or does not know the model.
    """
    try:
        import transformers
        from transformers.integrations import hub_kernels
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError as error:
        raise StateError(
            f"{directory} holds a {spec.family}, which needs transformers, and that is not installed "
            f"({cause_of(error)}): {how_to_install('torch', 'hf')}"
        ) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # With Hugging Face's package of kernels, some architectures would download compiled code and run it.
    hub_kernels._kernels_enabled = False  # guard: no-code-of-a-hub
    config = read_config(directory)
    if spec.family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:  # guard: no-code-of-a-model
        own = ", and its files ask to run code of their own (auto_map), which is never done"
        raise StateError(
            f"{directory}: transformers {transformers.__version__} has no language model {spec.family!r}"
            f"{own if 'auto_map' in config else ''}. Choose another model"
        )
    try:
        made = CONFIG_MAPPING[spec.family].from_dict(with_floats(without_own_keys(config)))
    except Exception as error:  # noqa: BLE001 - a config that transformers refuses raises many things
        raise _value_in(directory, spec, error) or StateError(
            f"{directory / 'config.json'}: transformers refuses it: {_raised(error)}. Correct it, or choose another model"
        ) from None
    return transformers.AutoModelForCausalLM, made


def _has_own_head(whole: Any) -> bool:
    """Whether the files held a head of other values than the embedding, which transformers then does not tie to it."""
    head, embedding = whole.get_output_embeddings(), whole.get_input_embeddings()
    return head is not None and embedding is not None and head.weight is not embedding.weight


def _files_of(directory: Path) -> dict[str, Any]:
    """The JSON files that are published with the weights: as they are, but for the keys that say how to load."""
    files = {"config.json": without_own_keys(read_config(directory))}
    generation = Path(directory) / "generation_config.json"
    if generation.exists():
        found = decode_strictly(read_capped(generation, MAX_JSON_BYTES), dict[str, Any], generation)
        files["generation_config.json"] = found
    return files


def _demand_size(empty: nn.Module, stored_values: int, directory: Path, lacking: Sequence[str]) -> None:
    """Refuse a config that asks for more memory than its weights explain."""
    wanted = sum(parameter.numel() for parameter in empty.parameters())
    if wanted > stored_values:  # guard: any-config-fits-its-weights
        head: nn.Module | None = empty.get_output_embeddings()  # type: ignore[operator]
        cause = cause_of_size("", directory)
        if lacking:
            cause = f"{lacking[0]} is not there, and {cause_of_missing(lacking[0])}"
        elif head is not None and wanted - stored_values == sum(weight.numel() for weight in head.parameters()):
            cause = "so many has the head, which AutoModel does not save: save the model with AutoModelForCausalLM"
        raise StateError(
            f"{directory}: config.json asks for {wanted} parameters, its files hold {stored_values}: {cause}"
        )
    tables = sum(buffer.nbytes for buffer in empty.buffers())
    if tables > 4 * stored_values + BUFFER_BYTES:
        raise StateError(
            f"{directory}: config.json asks for tables of {tables >> 20} MB, more than its weights explain"
        )


def _demand_all_loaded(info: dict[str, Any], directory: Path) -> None:
    """Refuse weights of another model: transformers would give random values to what is missing."""
    faults = (
        ("lacks tensor", sorted(info["missing_keys"])),
        ("has a tensor that its config does not explain,", sorted(info["unexpected_keys"])),
        ("has another shape than its config asks for,", sorted(str(key) for key in info["mismatched_keys"])),
    )
    for fault, names in faults:
        if names:  # guard: any-weights-are-complete
            cause = cause_of_size(names[0], directory) if "shape" in fault else cause_of_missing(names[0])
            raise StateError(f"{directory} {fault} {names[0]}: {cause}")
    if info.get("error_msgs"):
        raise StateError(f"{directory}: transformers cannot load it: {one_line(info['error_msgs'][0])}")


@torch.no_grad()
def _own_memory(whole: nn.Module) -> None:
    """Refuse what a checkpoint could not hold, and give each parameter memory of its own: sums depend on alignment."""
    for name, tensor in whole.state_dict().items():
        if not tensor.is_floating_point():
            raise StateError(f"its {name} is {tensor.dtype}; a policy's tensors are floating-point numbers")
    for parameter in whole.parameters():
        if parameter.untyped_storage().nbytes() != parameter.nbytes or parameter.data_ptr() % 64:
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def _logits_of(whole: Any, tokens_1T: Tensor, factor: float) -> tuple[Tensor, Tensor] | None:
    """Hidden states times a factor, and the whole model's logits from them. None: its head does not read what the model
    without its head gives, but a part of that."""
    seen: list[Tensor] = []

    def multiply(module: nn.Module, inputs: object, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * factor
        seen.append(output.last_hidden_state[0])
        return output

    hook = whole.base_model.register_forward_hook(multiply)
    try:
        logits_TV = whole(input_ids=tokens_1T, use_cache=False).logits[0]
    finally:
        hook.remove()
    return (seen[-1], logits_TV) if seen else None


def _after_heads(config: Any, head: nn.Linear) -> Iterator[Callable[[Tensor], Tensor] | None]:
    """What architectures may do with hidden @ head: nothing; or a bias, a factor and a soft cap, as the config says."""
    text = config.get_text_config()
    cap = getattr(text, "final_logit_softcapping", None)
    factors = [float(f) for name in ("logit_scale", "lm_head_multiplier") if (f := getattr(text, name, None))]
    factors += [1 / float(f) for f in [getattr(text, "logits_scaling", None)] if f]
    if head.bias is None:
        yield None
    for factor in (1.0, *factors):
        if cap:
            yield lambda x, factor=factor: float(cap) * torch.tanh(_biased(x, head) * factor / float(cap))  # type: ignore[misc]
        yield lambda x, factor=factor: _biased(x, head) * factor  # type: ignore[misc]


def _biased(logits_xV: Tensor, head: nn.Linear) -> Tensor:
    return logits_xV if head.bias is None else logits_xV + head.bias


def _alike(found: Tensor, expected: Tensor) -> bool:
    """Whether two results differ by rounding alone."""
    most = TOLERANCE.get(expected.dtype, 1e-4) * max(float(expected.abs().max()), 1e-6)
    return bool((found - expected).abs().max() <= most)


def probe_tokens(vocab_size: int) -> Tensor:
    """Tokens to examine a model with: spread over the vocabulary, without its ends, where special ones often are."""
    return torch.arange(1, EXAMINED + 1) * max(1, vocab_size // (EXAMINED + 2)) % vocab_size


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error, 300)}"
