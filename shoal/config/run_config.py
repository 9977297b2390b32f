"""The run file and the SFT recipe: their sections and keys, with units, ranges and defaults.

A new key needs its field here with a sentence and a type of `protocol/field_types`, and the file that reads it, with its
test; sections are passed on whole, so nothing between the two changes. If it contradicts other keys, add a rule in
`config/validate.py` and a test in `tests/test_config.py`; if it may differ on resume, add it to `SAFE_TO_CHANGE` there.
`python -m tests.test_docs --write` makes its row in docs/reference/run-file.md. What nodes must agree on is a field of
`Rules` or `EnvSpec` in `protocol/messages/run.py`, filled in `roles/coordinator/main.py`.
"""

import contextlib
import ipaddress
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shoal.config.alarm_limits import MonitorsConfig
from shoal.config.env_settings import EnvConfig, JudgeConfig
from shoal.protocol.algorithm_config import Algorithm, Grpo
from shoal.protocol.constants import (
    CHAIN_LENGTH,
    MAX_ADAPTER_RANK,
    MAX_BLOCK_ROLLOUTS,
    MAX_GROUP_ROLLOUTS,
    MAX_PATCH_CHAIN,
    MAX_ROLLOUT_TOKENS,
)
from shoal.protocol.field_types import FINITE, Count, Fraction, NonNegative, Positive, PositiveShare, Seed, Share, Whole
from shoal.protocol.messages import Bounds, Sampling
from shoal.protocol.messages.run import Proofs, SamplingLimits
from shoal.protocol.noise import PHILOX, FamilyName
from shoal.protocol.task_draws import Difficulty, DifficultyRule
from shoal.protocol.tolerances import Dtype
from shoal.typed_toml import Section

Device = Literal["cpu", "cuda", "mps", "auto"]

Name = Annotated[
    str, Meta(pattern=r"\A[\w.-]*\w\Z", description="use only letters, digits, - _ and . and do not end with - or .")
]

Project = Annotated[
    str,
    Meta(
        pattern=r"\A[A-Za-z0-9][A-Za-z0-9_-]{0,99}\Z",
        description="use 1 to 100 letters, digits, - and _, with a letter or digit first",
    ),
]

Lr = Annotated[float, Meta(ge=-1, le=FINITE, description="-1 is the preset of the policy's size")]

GradNorm = Annotated[float, Meta(gt=0, le=FINITE)]  # guard: gradients-keep-their-sign

PRESET_LR = -1.0
"""As `train.lr`: the preset of the policy's size, see `preset_lr`."""


# --- the policy ---


class TinyPolicy(Section, frozen=True):
    """A model made from scratch, when `policy.path` is empty."""

    family: Literal["llama", "qwen2", "qwen3"] = "qwen3"
    """Architecture, as Hugging Face's transformers names it."""
    width: Count = 128
    """Hidden size."""
    layers: Count = 4
    """Transformer blocks."""
    heads: Count = 4
    """Query heads; they divide the width."""
    kv_heads: Count = 2
    """Key and value heads; they divide the query heads."""
    mlp_width: Count = 384
    """Intermediate size."""
    max_positions: Count = 512
    """Longest sequence, tokens."""
    tied: bool = False
    """Output head shares the embedding."""


class AdapterConfig(Section, frozen=True):
    """A low-rank adapter (LoRA, arXiv:2106.09685), which is learned and published instead of the whole model."""

    rank: Annotated[int, Meta(ge=0, le=MAX_ADAPTER_RANK)] = 0
    """Rows of A and columns of B; 0: no adapter, the whole model is learned. 8 to 32 is usual."""
    alpha: Positive = 16.0
    """The adapter's product counts alpha / rank times."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Matrices of each layer that it changes."""
    base: Literal["", "nf4"] = ""
    """How the model below the adapter is published and kept in memory. Empty: as it is. nf4: the host rounds the matrices
    of its layers once, to 4.13 bits a weight (QLoRA, arXiv:2305.14314), and every node keeps them so. Each use decodes
    them again, which takes time. Their inputs must be multiples of 64."""


class StartPolicy(Section, frozen=True):
    """The language model of an SFT recipe, all of whose weights are learned in float32."""

    path: str = ""
    """Model to start from: a directory in Hugging Face format, relative to the run file, or hf:OWNER/NAME@REVISION, which
    is fetched from a hub. Empty makes `tiny` from the seed."""
    implementation: Literal["", "auto"] = ""
    """What computes the model. Empty: shoal's own code, for Llama, Mistral, Qwen2 and Qwen3. auto: this code where it can,
    and transformers for every other language model; then all nodes must have it installed."""
    tiny: TinyPolicy = TinyPolicy()


class PolicyConfig(StartPolicy, frozen=True):
    """The language model of a run."""

    dtype: Dtype = "float32"
    """Precision in which versions are published, and sampled unless `sampling.dtype` says otherwise. int8 publishes every
    matrix as a byte a value with a scale for each output, and workers sample exactly that; kept checkpoints are float32."""
    adapter: AdapterConfig = AdapterConfig()

    @property
    def kept_dtype(self) -> str:
        """Precision of what the trainer starts from and keeps: int8 would lose what it learned."""
        return "float32" if self.dtype == "int8" else self.dtype


# --- how it plays and learns ---


class SamplingConfig(SamplingLimits, frozen=True):
    """How tokens are drawn."""

    temperature: Positive = 1.0
    max_turn_tokens: Count = 64
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_ROLLOUT_TOKENS)] = 512
    dtype: Literal["", Dtype] = ""
    """Precision in which workers sample; empty is that of the published policy. int8 rounds only the layers' matrices."""
    noise: FamilyName = PHILOX
    """The noise that the seeds make, named for its arithmetic. philox is the fastest of shoal's own engine. The others are
    what vLLM makes on GPUs, so that a worker with vLLM samples without a processor of ours."""


class CriticConfig(Section, frozen=True):
    """The critic of runs with `train.algorithm.advantage = "gae"`: the layers of the first policy below a head that says
    what a rollout will earn. It learns in the same updates as the policy. AdamW's other settings are those of `[train]`."""

    lr: NonNegative = 1e-4
    """Its learning rate at its highest; it warms up and falls as `train.schedule` says."""
    gamma: PositiveShare = 1.0
    """Discount of each further token. 1 is usual, because a rollout ends."""
    lam: Share = 0.95
    """Lambda of GAE (arXiv:1506.02438). 0: a token's credit is how much the value rises with it. 1: it is the reward
    minus the value before it, whatever the critic says of later tokens."""
    clip: NonNegative = 0.2
    """How far a step may move a value and still gain by it, in units of the reward; 0: as far as it likes."""
    warmup_steps: Whole = 0
    """Steps at the beginning in which only the critic learns. Their versions have the first policy's weights."""


class RolloutsConfig(Section, frozen=True):
    """Groups, blocks and batches."""

    group_size: Annotated[int, Meta(ge=2, le=MAX_GROUP_ROLLOUTS, description="a group of one has no signal")] = 16
    """Rollouts of one task."""
    block_rollouts: Annotated[int, Meta(ge=1, le=MAX_BLOCK_ROLLOUTS)] = 64
    """Rollouts generated as one batch; a multiple of group_size."""
    batch_groups: Count = 16
    """Groups with signal that make one training step."""
    max_staleness: Whole = 1
    """Policy versions between the one that sampled a rollout and the one that learns from it; 0 is synchronous."""
    lease_s: Positive = 120.0
    """Seconds that a worker has for one block before its lease lapses."""
    paid_tokens: Annotated[int, Meta(ge=-1)] = -1
    """Most policy tokens paid for each rollout, on average over its group; -1 is half of sampling.max_tokens, or of
    sampling.max_rollout_tokens if it is set; 0 pays all."""
    max_flat_groups: Whole = 500
    """After this many groups in a row without signal, the run pauses and waits for its host; 0 never pauses. Tasks that
    cannot begin count, too. If one group in a hundred has signal, 500 in a row without it have a chance of 1 in 150."""


class TrainConfig(Section, frozen=True):
    """The trainer."""

    algorithm: Algorithm = Grpo()
    """Which groups teach anything, what each rollout is worth, and the loss. Its arguments are in a table of their own."""
    lr: Lr = PRESET_LR
    """Learning rate at its highest. -1: 500 divided by the number of parameters that learn, but at least 1e-6 and at most
    5e-4. The launcher says it, and stores it with the run."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up; linear and cosine fall to a tenth."""
    warmup_steps: Whole = 5
    """Steps in which the learning rate climbs from 0."""
    beta1: Fraction = 0.9
    """AdamW's decay of the mean gradient, per step."""
    beta2: Fraction = 0.95
    """AdamW's decay of the mean squared gradient, per step."""
    weight_decay: NonNegative = 0.0
    """AdamW's pull of the weights towards 0, per unit of learning rate."""
    max_grad_norm: GradNorm = 1.0
    """A longer gradient is scaled down to this norm."""
    updates_per_batch: Count = 1
    """How often a step learns from its batch, each time with the step's learning rate."""
    minibatches: Count = 1
    """Number of parts that a batch is divided into, between groups. Each part has an optimiser step, each time."""
    dtype: Literal["", "bfloat16"] = ""
    """Precision in which the policy computes while it learns; empty is float32. bfloat16 needs policy.dtype = "bfloat16":
    the policy is then exactly what is published, beside float32 weights that the optimiser changes."""
    moments: Literal["float32", "8bit", "offloaded"] = "float32"
    """How AdamW keeps its two moments. 8bit: those of matrices rounded to 1 byte a value instead of 4. offloaded: on the
    CPU, with the float32 weights; if the trainer computes on the CPU, this is the same as float32."""
    microbatch_tokens: Whole = 2048
    """Tokens of one forward pass, padding included. 0: as many as fit the memory of the trainer's device, at most 16384,
    found when the run begins. The last bits of the weights depend on it, so a number repeats elsewhere and 0 may not."""
    packing: Literal["padded", "flat"] = "padded"
    """How rows share a forward pass. padded: rows of one group or of similar lengths, padded to the longest. flat: rows of
    any lengths, without padding; faster if lengths differ much."""
    recompute: Literal["none", "layers"] = "none"
    """What the backward pass computes again instead of keeping it. layers: every layer, which takes a third more time and
    far less memory. The weights get the same bits."""
    threads: Count = 1
    """CPU threads of the trainer, or of each of its processes."""
    processes: Count = 1
    """Processes of the trainer on this machine. With several, each has a part of the weights, gradients and moments (FSDP2)
    and computes some of a step's micro-batches. On CUDA, each needs a GPU of its own."""
    device: Device = "cpu"
    """What the trainer computes on: the CPU, a GPU with CUDA, or the GPU of a Mac; auto takes CUDA if it is there."""
    critic: CriticConfig = CriticConfig()
    teacher: str = ""
    """Of runs with `train.algorithm.advantage = "teacher"`: the model that judges each token, a directory in Hugging Face
    format with the policy's tokenizer, relative to the run file. The trainer alone needs it."""
    reward_model: str = ""
    """Of runs with `train.algorithm.advantage = "reward_model"`: the model that scores each rollout, a directory with a
    model for sequence classification with one label, and the policy's tokenizer. The trainer alone needs it."""


_FINE = Bounds(gap=1e-3, flipped=1e-5, mean_gap=1e-7, logprob=0.01)
_COARSE = Bounds(gap=0.4, flipped=1e-3, mean_gap=5e-4, logprob=1.0, logprob_mean=0.01, largest_logit=8.0)

BOUNDS = {"float32/float32": _FINE, "bfloat16/bfloat16": _COARSE, "bfloat16/float32": _COARSE, "int8/int8": _FINE}
"""Bounds of a run that gives none of its own. They are generous, because nobody measured its hardware. In bfloat16, honest
work in `benchmarks/detection.py` stays below two thirds of them, also with logits a dozen times as large."""


ACTIVATION_ERROR = {"float32": 0.001, "bfloat16": 0.010, "int8": 0.001}
"""Bound of a run that gives none, by the dtype that samples. Honest work in `benchmarks/toploc.py` stays below
it, and in `docs/design/results-real-models.md`, where bfloat16 rounds policies that are kept in float32."""


class VerifyConfig(Section, frozen=True):
    """What validators demand."""

    audit_rate: Share = 1.0
    """Smallest share of groups whose sampling and log-probs are recomputed. Must be 1 if max_staleness is 0."""
    quarantine_s: NonNegative = 30.0
    """Length of a quarantine, seconds; each earlier refused submission of the worker doubles it, up to an hour. A worker
    gets no leases in quarantine. The cause is a hard failure, every third refused submission, or too much noise."""
    bounds: dict[str, Bounds] = msgspec.field(default_factory=lambda: dict(BOUNDS))
    """By "sampled/recomputed": the run's dtype, and that of the engine that recomputes; shoal's own validators use the
    same. See `protocol/tolerances` for other kinds of engines."""
    proofs: Proofs = "none"
    """What workers prove of their activations: nothing, or one proof in TOPLOC's format for each group."""
    activation_error: Fraction = 0.0
    """Largest mean relative error of a group's proof; 0 means 0.01 if workers sample in bfloat16, else 0.001.
    `shoal calibrate` measures it."""
    worker_share: PositiveShare = 1.0
    """Largest share of a batch's groups that one worker may fill. Must be 1 if max_staleness is 0."""


class WorkersConfig(Section, frozen=True):
    """Workers that `shoal run` starts on this machine."""

    count: Whole = 2
    """Honest workers."""
    cheating: Whole = 0
    """Further workers that cheat, to show that they are caught."""
    threads: Count = 1
    """CPU threads of each."""
    device: Device = "cpu"
    """What each computes on, and the evaluations of the run; as `train.device`."""
    engine: Literal["", "vllm"] = ""
    """What the honest ones sample with, as `shoal join --engine`; empty: what the policy needs."""


class ValidatorsConfig(Section, frozen=True):
    """Validators that the host starts."""

    count: Whole = 1
    """0 (you admit others), 1, or 3 and more. With one, its verdict decides and nobody is slashed. With more, a refusal and
    a slash each need two that agree. So of exactly two, one that lies makes forging free. Fewer on resume: at least two
    must be left, others that you admitted included, or remove yours first (`shoal admin kick`)."""
    threads: Count = 1
    """CPU threads of each."""
    device: Device = "cpu"
    """What each computes on; as `train.device`."""


class EvalConfig(Section, frozen=True):
    """Evaluation on held-out tasks, before, during and after training."""

    episodes: Whole = 512
    """Sampled episodes on held-out tasks of each environment; 0 turns it off."""
    samples: Whole = 2
    """Transcripts shown, of each environment."""
    rows: Whole = 0
    """Episodes played at a time. The last bits of the figures depend on it. 0: 128, or a half, a quarter and so on of that
    where memory needs it, found when the run begins."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which the policy plays: bfloat16 takes half of the memory."""
    judge: JudgeConfig = JudgeConfig()


Retain = Literal["window", "batches", "all"]
"""Each keeps what those before it keep."""


class StorageConfig(Section, frozen=True):
    """The run's folder."""

    retain: Retain = "window"
    """Bodies of submissions kept. window: those of the last `window_steps` steps; batches: also those that were trained on,
    and their continuations; all. Over the quota, refused ones are deleted first in any case."""
    window_steps: Whole = 16
    """Training steps whose submissions and weights are kept."""
    quota_mb: Count = 2048
    """Disk space for blobs, MB; above it, what the run can do without is deleted, and then leases pause."""
    state_every: Count = 1
    """Steps between the trainer's saved states. Above 1, a state is copied and written beside the next steps, and a trainer
    that was killed repeats the steps since the last one, at most twice as many."""
    checkpoint_every: Count = 25
    """Steps between checkpoints kept as directories in Hugging Face format."""
    anchor_every: Annotated[int, Meta(ge=1, le=MAX_PATCH_CHAIN)] = 1
    """Versions between those that are published whole; the others are published as patches, if patches are small. A node
    that joins fetches a whole version and all patches after it. Only in runs that publish bfloat16 or int8; limit 32."""


# --- what the host writes and serves ---


LOGGERS = {"wandb": "wandb", "trackio": "trackio", "tensorboard": "tensorboard"}
"""The package that each logger needs, which is also the name of its extra. `jsonl` needs none."""


class LoggingConfig(Section, frozen=True):
    """Where the run's figures go, and how its processes write their logs."""

    to: tuple[Literal["jsonl", "wandb", "trackio", "tensorboard"], ...] = ("jsonl",)
    """Any number of loggers. jsonl is the file metrics.jsonl, which is always written; the others need their packages, and
    W&B writes files alone unless WANDB_API_KEY or WANDB_MODE say otherwise."""
    project: Project = "shoal"
    """The project to which the run belongs in W&B and in trackio."""
    format: Literal["text", "json"] = "text"
    """How lines of logs are written: for people, or as one JSON object each."""


Port = Annotated[int, Meta(ge=0, le=65535, description="0 takes a free one")]


class HostConfig(Section, frozen=True):
    """Where the coordinator listens, and how the processes of the host share a device."""

    bind: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 takes requests from other machines."""
    port: Port = 0
    """0 takes a free port and keeps it for resuming."""
    public_url: str = ""
    """URL that others type, if a proxy with TLS is in front of the coordinator."""
    origin_port: Port = 0
    """Port of the origin, which serves chunks of weights; 0 takes a free one and keeps it for resuming."""
    origin_url: str = ""
    """URL below which others fetch chunks by their hashes: of a proxy before the origin, a CDN or a bucket. Empty: at the
    origin's port; behind a proxy, from the coordinator."""
    dashboard: bool = True
    """Whether `shoal host` also serves the page of the run, in a process of its own."""
    dashboard_port: Port = 0
    """Port of the page; 0 takes a free one and keeps it for resuming."""
    dashboard_url: str = ""
    """URL at which others reach the page, if a proxy is in front of it."""
    trusted_proxies: tuple[str, ...] = ("127.0.0.1", "::1")
    """Addresses or networks of proxies: their X-Forwarded-For is believed, and they have no limit by address."""

    shifts: Literal["auto", "on", "off"] = "auto"
    """Whether the run's processes that compute on one device of this machine have its memory one after another. auto: if a
    GPU cannot hold them all at once, but each alone. on: also on a CPU, where it gains nothing."""

    @property
    def is_reached_by_others(self) -> bool:
        """Whether other machines can send requests: directly, or through a proxy with a public URL."""
        return bool(self.public_url) or not is_loopback(self.bind)  # guard: public-url-is-a-way-in


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach an address. A name other than localhost may be any machine's."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


# --- whole files ---


class RunConfig(Section, frozen=True, kw_only=True):
    """A run file."""

    name: Name
    """Names the run and its folder, runs/NAME."""
    steps: Annotated[int, Meta(ge=1, lt=CHAIN_LENGTH)]
    """Training steps. On resume they must be above the version that the run has reached; a run that has ended takes no
    more."""
    seed: Seed = -1
    """Fixes the first weights; -1 takes random ones. In a run of this machine alone it also fixes the secret, and with it
    every random choice. A run that others can join always has a random secret."""
    policy: PolicyConfig = PolicyConfig()
    envs: tuple[EnvConfig, ...]
    sampling: SamplingConfig = SamplingConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    difficulty: Difficulty = Difficulty()
    train: TrainConfig = TrainConfig()
    verify: VerifyConfig = VerifyConfig()
    workers: WorkersConfig = WorkersConfig()
    validators: ValidatorsConfig = ValidatorsConfig()
    host: HostConfig = HostConfig()
    eval: EvalConfig = EvalConfig()
    storage: StorageConfig = StorageConfig()
    logging: LoggingConfig = LoggingConfig()
    monitors: MonitorsConfig = MonitorsConfig()

    @property
    def sampled_dtype(self) -> str:
        """Precision in which workers sample, and validators replay."""
        return self.sampling.dtype or self.policy.dtype

    @property
    def most_paid_tokens(self) -> int:
        """Policy tokens paid for each rollout, at most; 0 pays all."""
        cap = self.rollouts.paid_tokens
        return max(1, self.sampling.all_tokens // 2) if cap < 0 else cap

    def eval_episodes(self, env: EnvConfig) -> int:
        """Episodes of an environment in an evaluation."""
        return self.eval.episodes if env.eval_episodes < 0 else env.eval_episodes


class SftConfig(Section, frozen=True, kw_only=True):
    """Supervised fine-tuning from an environment's scripted player: the recipe of `shoal sft`."""

    name: str
    """Names the recipe in its output."""
    seed: Whole = 0
    """Fixes the first weights, the games and their order."""
    policy: StartPolicy = StartPolicy()
    env: EnvConfig
    """Whose scripted right player is imitated."""
    player: str = "right"
    """Which of the environment's scripted players is learned from."""
    tasks: Literal["training", "all"] = "training"
    """Which tasks the player plays; "all" adds the held-out ones, which are then held out of RL alone."""
    episodes: Count = 4096
    """Scripted games to learn from."""
    steps: Count = 300
    """Training steps."""
    batch: Count = 128
    """Episodes a step."""
    lr: Lr = PRESET_LR
    """Learning rate at its highest; it falls to a tenth along a cosine. -1: 5000 divided by the number of parameters that
    learn, but at least 1e-5 and at most 3e-3."""
    warmup_steps: Whole = 20
    """Steps in which the learning rate climbs from 0."""
    max_grad_norm: GradNorm = 1.0
    """A longer gradient is scaled down to this norm."""
    max_tokens: Count = 512
    """Games with a longer row, which is usually the whole game, are left out, tokens."""
    eval_every: Whole = 0
    """Steps between evaluations on held-out tasks, each of a checkpoint that is kept beside the result; 0 is never, or with
    `stop_at` a twentieth of the steps. They change no weights."""
    eval_episodes: Count = 256
    """Sampled episodes of one evaluation."""
    stop_at: Share = 0.0
    """Stop at the first evaluation with at least this share of wins, or of the range of rewards if the environment does not
    say what wins; 0 takes all steps. 0.3 to 0.5 leaves RL something to find."""
    publish_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the files that are written."""
    threads: Count = 2
    """CPU threads."""

    @property
    def evaluates_every(self) -> int:
        """Steps between evaluations; 0: there are none."""
        return self.eval_every or (max(1, self.steps // 20) if self.stop_at else 0)


def sampling_of(config: RunConfig) -> Sampling:
    """The run file's sampling, as messages have it."""
    drawn = config.sampling
    return Sampling(
        drawn.temperature, drawn.max_turn_tokens, drawn.max_tokens, drawn.max_rollout_tokens, noise=drawn.noise
    )


def difficulty_of(config: RunConfig) -> DifficultyRule | None:
    """How draws follow solve rates, as the log has it; None if they do not."""
    if not (config.difficulty.curriculum or config.difficulty.pools):
        return None
    solved = {env.label: env.solved for env in config.envs}
    return DifficultyRule(**msgspec.structs.asdict(config.difficulty), solved=solved)
