"""The peer of the size part of `adapters.py`: what PEFT and transformers compute with an adapter that shoal published.

    .venv-trl/bin/python benchmarks/peers/peft_logits.py BASE ADAPTER TOKENS.npy OUT.npz

Started by `adapted/size.py` in a virtual environment of its own; it imports nothing of shoal's. The base is loaded in
float32. Writes logits, [T, V], of one row of tokens with the adapter and without it.
"""

import os
import sys
import warnings

if {"-h", "--help"} & {*sys.argv[1:]}:  # before the imports, which a reader may not have
    print(__doc__)
    sys.exit()

warnings.filterwarnings("ignore")
os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"})

import numpy as np  # noqa: E402 - after the environment that the others read
import torch  # noqa: E402
from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402


@torch.no_grad()
def main() -> None:
    base, adapter, tokens, out = sys.argv[1:]
    torch.set_num_threads(1)
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, low_cpu_mem_usage=True)
    adapted = PeftModel.from_pretrained(model, adapter).eval()
    tokens_BT = torch.from_numpy(np.load(tokens))[None]
    found = adapted(input_ids=tokens_BT).logits[0]
    with adapted.disable_adapter():
        plain = adapted(input_ids=tokens_BT).logits[0]
    np.savez(out, adapted=found.numpy(), plain=plain.numpy())


if __name__ == "__main__":
    main()
