"""The `[policy]` section of a run file and of an SFT recipe: the language model, and what is learned of it.

Part of `run_file`. Light, as they are.
"""

from typing import Literal

from shoal.protocol.tolerances import Dtype
from shoal.tree import Section


class TinyPolicy(Section, frozen=True):
    """A model made from scratch, when `policy.path` is empty."""

    family: Literal["llama", "qwen2", "qwen3"] = "qwen3"
    """Architecture, as Hugging Face's transformers names it."""
    width: int = 128
    """Hidden size."""
    layers: int = 4
    """Transformer blocks."""
    heads: int = 4
    """Query heads; they divide the width."""
    kv_heads: int = 2
    """Key and value heads; they divide the query heads."""
    mlp_width: int = 384
    """Intermediate size."""
    max_positions: int = 512
    """Longest sequence, tokens."""
    tied: bool = False
    """Output head shares the embedding."""


class AdapterConfig(Section, frozen=True):
    """A low-rank adapter (LoRA, arXiv:2106.09685), which is learned and published instead of the whole model."""

    rank: int = 0
    """Rows of A and columns of B; 0: no adapter, the whole model is learned. 8 to 32 is usual."""
    alpha: float = 16.0
    """The adapter's product counts alpha / rank times."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Matrices of each layer that it changes."""
    base: Literal["", "nf4"] = ""
    """How the model below the adapter is published and kept in memory. Empty: as it is. nf4: the host rounds the matrices
    of its layers once, to 4.13 bits a weight (QLoRA, arXiv:2305.14314), and every node keeps them so. Each use decodes
    them again, which takes time. Their inputs must be multiples of 64."""


class PolicyConfig(Section, frozen=True):
    """The language model."""

    path: str = ""
    """Model to start from: a directory in Hugging Face format, relative to the run file, or hf:OWNER/NAME@REVISION, which
    is fetched from a hub. Empty makes `tiny` from the run's seed."""
    dtype: Dtype = "float32"
    """Precision in which versions are published, and sampled unless `sampling.dtype` says otherwise. int8 publishes every
    matrix as a byte a value with a scale for each output, and workers sample exactly that; kept checkpoints are float32."""
    implementation: Literal["", "auto"] = ""
    """What computes the model. Empty: shoal's own code, for Llama, Mistral, Qwen2 and Qwen3. auto: this code where it can,
    and transformers for every other language model; then all nodes must have it installed."""
    tiny: TinyPolicy = TinyPolicy()
    adapter: AdapterConfig = AdapterConfig()

    @property
    def kept_dtype(self) -> str:
        """Precision of what the trainer starts from and keeps: int8 would lose what it learned."""
        return "float32" if self.dtype == "int8" else self.dtype


class StartPolicy(Section, frozen=True):
    """The language model of an SFT recipe, all of whose weights are learned in float32. Its keys are among those of
    `PolicyConfig`."""

    path: str = ""
    """Model to start from, as in a run file."""
    implementation: Literal["", "auto"] = ""
    """What computes the model."""
    tiny: TinyPolicy = TinyPolicy()
