"""What is refused, and why: directories and run files that no run starts from, with the line that each gets.

Called by `benchmarks/real_models.py`. Each is a small model that works, with one thing changed.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shoal.chat.renderer import Renderer
from shoal.config import load_run
from shoal.errors import ShoalError
from shoal.launch.preflight import demand_computable
from shoal.models.hf_model import load_any
from tests.engine.architectures import write_any

RUN_FILE = """
name = "refused"
steps = 1
[policy]
path = "model"
implementation = "auto"
[[envs]]
name = "arithmetic"
[sampling]
max_tokens = 64
max_turn_tokens = 8
"""


def refusals(scratch: Path) -> Iterator[dict[str, str]]:
    """The case and the line, for each; a case that is not refused has an empty line."""
    (scratch / "run.toml").write_text(RUN_FILE)
    for number, (case, (name, changes, sets)) in enumerate(CASES.items()):
        model = write_any(name, scratch / f"model-{number}")
        changes(model)
        said = ""
        try:
            config = load_run(scratch / "run.toml", [f"policy.path={model}", *sets])
            Renderer.from_directory(model)
            demand_computable(model, config)
            load_any(model)
        except ShoalError as error:
            said = str(error).replace(str(scratch), "")
        print(f"refused: {case}: {said or 'NOT REFUSED'}", flush=True)
        yield {"case": case, "line": said}


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _without(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def _no_template(model: Path) -> None:
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template")
    path.write_text(json.dumps(config))


def _as_it_is(model: Path) -> None:
    """Nothing: the run file is what is refused."""


CASES: dict[str, tuple[str, Callable[[Path], None], list[str]]] = {
    "code of the model's author": ("llama", _config(model_type="mine", auto_map={"AutoConfig": "mine.C"}), []),
    "an encoder beside the decoder": ("gpt2", _config(is_encoder_decoder=True), []),
    "quantised weights": ("olmo2", _config(quantization_config={"quant_method": "gptq"}), []),
    "an architecture of transformers, without auto": ("gpt2", _as_it_is, ['policy.implementation=""']),
    "a mixture of experts in bfloat16 without measured bounds": ("olmoe", _as_it_is, ['policy.dtype="bfloat16"']),
    "int8 with an architecture of transformers": ("gpt2", _as_it_is, ['sampling.dtype="int8"']),
    "flat packing with an architecture of transformers": ("gpt2", _as_it_is, ['train.packing="flat"']),
    "no chat template": ("llama", _no_template, []),
    "no weights": ("olmo2", _without("model.safetensors"), []),
    "more layers than the files hold": ("olmo2", _config(num_hidden_layers=9), []),
    "a smaller vocabulary than the weights": ("phi3", _config(vocab_size=32), []),
}
"""What is changed in a model of which architecture, and what in its run file."""
