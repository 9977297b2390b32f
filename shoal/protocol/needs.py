"""What a node's software must support to take part in a run, as words that both sides know.

The coordinator lists them in `RunInfo.needs`, and a node that lacks one refuses before it joins. For each new kind of lease
item, dtype or proof add a word here, and to `SUPPORTED`. A new field of an answer does not suffice,
because older nodes ignore it.
"""

from collections.abc import Iterable, Sequence

from shoal.protocol.algorithms import step_credit_of, vine_of
from shoal.protocol.bounds import DTYPES, TRANSFORMERS
from shoal.protocol.compositions import Composition
from shoal.protocol.constants import COMPLETIONS, CONTINUATIONS, CONTROL_STOPS, EPISODES
from shoal.protocol.noise import NOISES, PHILOX
from shoal.protocol.types import EnvSpec, Rules, Sampling

SETTINGS = "env-settings"
"""The word for environments with a system prompt, examples, template arguments or token limits of their own."""

SHAPING = "shaping"
"""The word for environments whose rewards the run shapes."""

ROWS = "rows"
"""The word for rollouts that may have several rows."""

STOPS = "model-stops"
"""The word for turns that end where the model was trained to end them, and not at every control token."""

INT8 = "int8-versions"
"""The word for versions whose matrices are published as int8 codes with scales."""

PATCHES = "patches"
"""The word for versions whose manifests may offer patches, or nothing but patches."""

ADAPTERS = "adapters"
"""The word for versions that are low-rank adapters of a model that stays the same."""

CODED_BASE = "nf4-base"
"""The word for adapters of a model whose layers are published as NF4 codes."""


REPEATS = "repeated-groups"
"""The word for batches that may take groups again, which changes what validators must audit."""

COMPOSITIONS = "compositions"
"""The word for algorithms that are composed of a loss, advantages and corrections."""

STEP_REWARDS = "step-rewards"
"""The word for verdicts that say what each turn or step of a rollout earns."""


def needs_of(
    rules: Rules,
    envs: Sequence[EnvSpec] = (),
    sampling: Sampling | None = None,
    published_dtype: str = "float32",
    transformers: bool = False,
    adapters: bool = False,
    coded_base: bool = False,
) -> tuple[str, ...]:
    """The words of a run with these rules, environments, sampling and dtype of the published versions. `transformers`:
    whether its policy is of another architecture than shoal's own; `adapters`: whether its versions are adapters;
    `coded_base`: whether their base is in NF4."""
    proofs = () if rules.proofs == "none" else (proofs_need(rules.proofs),)
    settings = (SETTINGS,) if any(env.has_settings for env in envs) else ()
    shaping = (SHAPING,) if any(env.shaping for env in envs) else ()
    several = (sampling is not None and sampling.max_rollout_tokens > 0) or any(env.history for env in envs)
    rows = (ROWS,) if several else ()
    stops = (STOPS,) if sampling is not None and sampling.stops != CONTROL_STOPS else ()
    noise = (noise_need(sampling.noise),) if sampling is not None and sampling.noise != PHILOX else ()
    patches = (PATCHES,) if may_be_patched(published_dtype) else ()
    codes = (INT8,) if published_dtype == "int8" else ()
    low_rank = (ADAPTERS,) if adapters else ()
    coded = (CODED_BASE,) if coded_base else ()
    others = (TRANSFORMERS,) if transformers else ()  # the kind of engine is the word
    composed = (COMPOSITIONS,) if isinstance(rules.algorithm, Composition) else ()
    repeats = (REPEATS,) if rules.uses else ()
    continued = (CONTINUATIONS,) if vine_of(rules.algorithm) else ()  # the kind of lease item is the word
    by_step = (STEP_REWARDS,) if step_credit_of(rules.algorithm) else ()
    named = (
        *proofs, *settings, *shaping, *rows, *patches, *codes, *stops, *noise, *others, *low_rank, *coded, *composed,
        *repeats, *continued, *by_step,
    )  # fmt: skip
    return (kind_of(envs), dtype_need(rules.dtype), *named)


def may_be_patched(published_dtype: str) -> bool:
    """Whether a version may be published as a patch: if rounding leaves most weights as they are in a step. In float32, a
    step changes them all."""
    return published_dtype in ("bfloat16", "int8")


def kind_of(envs: Iterable[EnvSpec]) -> str:
    """The kind of a run's blocks. If the host plays one environment, it plays all."""
    return COMPLETIONS if any(env.kind == COMPLETIONS for env in envs) else EPISODES


def dtype_need(dtype: str) -> str:
    """The word for an engine that samples and scores in this dtype."""
    return f"dtype:{dtype}"


def noise_need(family: str) -> str:
    """The word for an engine that samples and scores with this family of noise. A run of `philox` needs no word."""
    return f"noise:{family}"


def proofs_need(proofs: str) -> str:
    """The word for making and checking proofs of activations in this format."""
    return f"proofs:{proofs}"


SUPPORTED = frozenset({
    ADAPTERS, CODED_BASE, EPISODES, COMPLETIONS, COMPOSITIONS, CONTINUATIONS, REPEATS, SETTINGS, SHAPING, ROWS, PATCHES,
    INT8, STOPS, TRANSFORMERS, STEP_REWARDS,
    proofs_need("toploc"), *map(dtype_need, DTYPES), *map(noise_need, NOISES),
})  # fmt: skip
"""What this version of shoal supports: it cannot join a run that needs anything else."""
