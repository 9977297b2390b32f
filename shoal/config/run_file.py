"""The run file: its sections and keys, with units, ranges and defaults."""

import contextlib
import ipaddress
from typing import Literal

import msgspec

from shoal.config.alarm_limits import MonitorsConfig
from shoal.config.curriculum import DifficultyConfig, wire_difficulty
from shoal.config.env_settings import EnvConfig, JudgeConfig
from shoal.config.policy import PolicyConfig, StartPolicy
from shoal.protocol.algorithm_config import Algorithm, Grpo
from shoal.protocol.curriculum_config import Difficulty
from shoal.protocol.messages import Bounds, Sampling
from shoal.protocol.noise import PHILOX, FamilyName
from shoal.protocol.tolerances import MEAN_OF_LOGPROB, Dtype
from shoal.tree import Section

# --- The settings of a model that learns beside the policy ---
#
# Part of this file. What a critic goes together with is checked in `validate_algorithm`.


class CriticConfig(Section, frozen=True):
    """The critic of runs with `train.algorithm.advantage = "gae"`: the layers of the first policy below a head that says
    what a rollout will earn. It learns in the same updates as the policy. AdamW's other settings are those of `[train]`."""

    lr: float = 1e-4
    """Its learning rate at its highest; it warms up and falls as `train.schedule` says."""
    gamma: float = 1.0
    """Discount of each further token. 1 is usual, because a rollout ends."""
    lam: float = 0.95
    """Lambda of GAE (arXiv:1506.02438). 0: a token's credit is how much the value rises with it. 1: it is the reward
    minus the value before it, whatever the critic says of later tokens."""
    clip: float = 0.2
    """How far a step may move a value and still gain by it, in units of the reward; 0: as far as it likes."""
    warmup_steps: int = 0
    """Steps at the beginning in which only the critic learns. Their versions have the first policy's weights."""


# --- The section of a run file about where its figures and its logs go ---


LOGGERS = {"wandb": "wandb", "trackio": "trackio", "tensorboard": "tensorboard"}
"""The package that each logger needs, which is also the name of its extra. `jsonl` needs none."""


class LoggingConfig(Section, frozen=True):
    """Where the run's figures go, and how its processes write their logs."""

    to: tuple[Literal["jsonl", "wandb", "trackio", "tensorboard"], ...] = ("jsonl",)
    """Any number of loggers. jsonl is the file metrics.jsonl, which is always written; the others need their packages, and
    W&B writes files alone unless WANDB_API_KEY or WANDB_MODE say otherwise."""
    project: str = "shoal"
    """The project to which the run belongs in W&B and in trackio."""
    format: Literal["text", "json"] = "text"
    """How lines of logs are written: for people, or as one JSON object each."""


# --- The section of a run file that is about the host's machine alone ---


class HostConfig(Section, frozen=True):
    """Where the coordinator listens, and how the processes of the host share a device."""

    bind: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 takes requests from other machines."""
    port: int = 0
    """0 takes a free port and keeps it for resuming."""
    public_url: str = ""
    """URL that others type, if a proxy with TLS is in front of the coordinator."""
    origin_port: int = 0
    """Port of the origin, which serves chunks of weights; 0 takes a free one and keeps it for resuming."""
    origin_url: str = ""
    """URL below which others fetch chunks by their hashes: of a proxy before the origin, a CDN or a bucket. Empty: at the
    origin's port; behind a proxy, from the coordinator."""
    dashboard: bool = True
    """Whether `shoal host` also serves the page of the run, in a process of its own."""
    dashboard_port: int = 0
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


# --- The sections of a run file and of an SFT recipe ---
#
# Every knob with its default, its unit and a sentence.
#
# Every role reads its own; `load` makes them from a TOML file, and `check` finds values that contradict each other. They
# are together here because the run file is one document, which the coordinator must read without importing torch.


Device = Literal["cpu", "cuda", "mps", "auto"]
"""As `models.device` takes it."""


PRESET_LR = -1.0
"""As `train.lr`: the preset of the policy's size, see `preset_lr`."""


class SamplingConfig(Section, frozen=True):
    """How tokens are drawn."""

    temperature: float = 1.0
    """Divides the logits; below 1 is greedier, above 1 bolder."""
    max_turn_tokens: int = 64
    """Tokens that the policy may write in one turn, the stop token included."""
    max_tokens: int = 512
    """Tokens of a row: of a whole rollout, unless it has several."""
    max_rollout_tokens: int = 0
    """Tokens of all rows of a rollout, for environments with several seats or `history = "template"`; 0 is max_tokens."""

    @property
    def all_tokens(self) -> int:
        """Most tokens of a rollout, all its rows together."""
        return self.max_rollout_tokens or self.max_tokens

    dtype: Literal["", Dtype] = ""
    """Precision in which workers sample; empty is that of the published policy. int8 rounds only the layers' matrices."""
    noise: FamilyName = PHILOX
    """The noise that the seeds make, named for its arithmetic. philox is the fastest of shoal's own engine. The others are
    what vLLM makes on GPUs, so that a worker with vLLM samples without a processor of ours."""


class RolloutsConfig(Section, frozen=True):
    """Groups, blocks and batches."""

    group_size: int = 16
    """Rollouts of one task."""
    block_rollouts: int = 64
    """Rollouts generated as one batch; a multiple of group_size."""
    batch_groups: int = 16
    """Groups with signal that make one training step."""
    max_staleness: int = 1
    """Policy versions between the one that sampled a rollout and the one that learns from it; 0 is synchronous."""
    lease_s: float = 120.0
    """Seconds that a worker has for one block before its lease lapses."""
    paid_tokens: int = -1
    """Most policy tokens paid for each rollout, on average over its group; -1 is half of sampling.max_tokens, or of
    sampling.max_rollout_tokens if it is set; 0 pays all."""
    max_flat_groups: int = 500
    """After this many groups in a row without signal, the run pauses and waits for its host; 0 never pauses. Tasks that
    cannot begin count, too. If one group in a hundred has signal, 500 in a row without it have a chance of 1 in 150."""


class TrainConfig(Section, frozen=True):
    """The trainer."""

    algorithm: Algorithm = Grpo()
    """Which groups teach anything, what each rollout is worth, and the loss. Its arguments are in a table of their own."""
    lr: float = PRESET_LR
    """Learning rate at its highest. -1: 500 divided by the number of parameters that learn, but at least 1e-6 and at most
    5e-4. The launcher says it, and stores it with the run."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up; linear and cosine fall to a tenth."""
    warmup_steps: int = 5
    """Steps in which the learning rate climbs from 0."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient, per step."""
    beta2: float = 0.95
    """AdamW's decay of the mean squared gradient, per step."""
    weight_decay: float = 0.0
    """AdamW's pull of the weights towards 0, per unit of learning rate."""
    max_grad_norm: float = 1.0
    """A longer gradient is scaled down to this norm."""
    updates_per_batch: int = 1
    """How often a step learns from its batch, each time with the step's learning rate."""
    minibatches: int = 1
    """Number of parts that a batch is divided into, between groups. Each part has an optimiser step, each time."""
    dtype: Literal["", "bfloat16"] = ""
    """Precision in which the policy computes while it learns; empty is float32. bfloat16 needs policy.dtype = "bfloat16":
    the policy is then exactly what is published, beside float32 weights that the optimiser changes."""
    moments: Literal["float32", "8bit", "offloaded"] = "float32"
    """How AdamW keeps its two moments. 8bit: those of matrices rounded to 1 byte a value instead of 4. offloaded: on the
    CPU, with the float32 weights; if the trainer computes on the CPU, this is the same as float32."""
    microbatch_tokens: int = 2048
    """Tokens of one forward pass, padding included. 0: as many as fit the memory of the trainer's device, at most 16384,
    found when the run begins. The last bits of the weights depend on it, so a number repeats elsewhere and 0 may not."""
    packing: Literal["padded", "flat"] = "padded"
    """How rows share a forward pass. padded: rows of one group or of similar lengths, padded to the longest. flat: rows of
    any lengths, without padding; faster if lengths differ much."""
    recompute: Literal["none", "layers"] = "none"
    """What the backward pass computes again instead of keeping it. layers: every layer, which takes a third more time and
    far less memory. The weights get the same bits."""
    threads: int = 1
    """CPU threads of the trainer, or of each of its processes."""
    processes: int = 1
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


class BoundsConfig(Section, frozen=True):
    """How much honest work may differ between the dtypes that sample and recompute; `shoal calibrate` measures it. A side
    may also name another kind of engine than the embedded one, as KIND:DTYPE, such as "remote:bfloat16/float32". A node
    that claims this kind then has the smaller of both values. `shoal` has one, transformers."""

    gap: float
    """A recomputed token further than this from the best choice counts as flipped, nats."""
    flipped: float
    """Largest share of flipped tokens of an honest node."""
    mean_gap: float
    """Largest mean gap of an honest node's tokens, each counted at most `gap`; nats."""
    logprob: float
    """Largest |claimed - recomputed| log-probability of one token, nats. If it is above a tenth of ln(1 + epsilon), or if
    `largest_logit` lets it grow, the trainer computes the denominators of the importance ratio itself."""
    logprob_mean: float = 0.0
    """Largest mean of claimed - recomputed log-probabilities of an honest node's tokens, nats: a KL divergence. Sums that
    lean one way by clearly more than twice that a token are refused. 0 means a fiftieth of `logprob`."""
    largest_logit: float = 0.0
    """Up to this largest |logit / temperature| at a token, `gap` and `logprob` hold as they are. Above it they grow in
    proportion, as rounding errors do. 0: they never grow."""


_FINE = BoundsConfig(gap=1e-3, flipped=1e-5, mean_gap=1e-7, logprob=0.01)
_COARSE = BoundsConfig(gap=0.4, flipped=1e-3, mean_gap=5e-4, logprob=1.0, logprob_mean=0.01, largest_logit=8.0)

BOUNDS = {"float32/float32": _FINE, "bfloat16/bfloat16": _COARSE, "bfloat16/float32": _COARSE, "int8/int8": _FINE}
"""Bounds of a run that gives none of its own. They are generous, because nobody measured its hardware. In bfloat16, honest
work in `benchmarks/detection.py` stays below two thirds of them, also with logits a dozen times as large."""


ACTIVATION_ERROR = {"float32": 0.001, "bfloat16": 0.010, "int8": 0.001}
"""Bound of a run that gives none, by the dtype that samples. Honest work in `benchmarks/toploc.py` stays below
it, and in `docs/design/results-real-models.md`, where bfloat16 rounds policies that are kept in float32."""


class VerifyConfig(Section, frozen=True):
    """What validators demand."""

    audit_rate: float = 1.0
    """Smallest share of groups whose sampling and log-probs are recomputed. Must be 1 if max_staleness is 0."""
    quarantine_s: float = 30.0
    """Length of a quarantine, seconds; each earlier refused submission of the worker doubles it, up to an hour. A worker
    gets no leases in quarantine. The cause is a hard failure, every third refused submission, or too much noise."""
    bounds: dict[str, BoundsConfig] = msgspec.field(default_factory=lambda: dict(BOUNDS))
    """By "sampled/recomputed": the run's dtype, and that of the engine that recomputes; shoal's own validators use the
    same. See `protocol/tolerances` for other kinds of engines."""
    proofs: Literal["none", "toploc"] = "none"
    """What workers prove of their activations: nothing, or one proof in TOPLOC's format for each group."""
    activation_error: float = 0.0
    """Largest mean relative error of a group's proof; 0 means 0.01 if workers sample in bfloat16, else 0.001.
    `shoal calibrate` measures it."""
    worker_share: float = 1.0
    """Largest share of a batch's groups that one worker may fill. Must be 1 if max_staleness is 0."""


class WorkersConfig(Section, frozen=True):
    """Workers that `shoal run` starts on this machine."""

    count: int = 2
    """Honest workers."""
    cheating: int = 0
    """Further workers that cheat, to show that they are caught."""
    threads: int = 1
    """CPU threads of each."""
    device: Device = "cpu"
    """What each computes on, and the evaluations of the run; as `train.device`."""
    engine: Literal["", "vllm"] = ""
    """What the honest ones sample with, as `shoal join --engine`; empty: what the policy needs."""


class ValidatorsConfig(Section, frozen=True):
    """Validators that the host starts."""

    count: int = 1
    """0 (you admit others), 1, or 3 and more. With one, its verdict decides and nobody is slashed. With more, a refusal and
    a slash each need two that agree. So of exactly two, one that lies makes forging free. Fewer on resume: at least two
    must be left, others that you admitted included, or remove yours first (`shoal admin kick`)."""
    threads: int = 1
    """CPU threads of each."""
    device: Device = "cpu"
    """What each computes on; as `train.device`."""


class EvalConfig(Section, frozen=True):
    """Evaluation on held-out tasks, before, during and after training."""

    episodes: int = 512
    """Sampled episodes on held-out tasks of each environment; 0 turns it off."""
    samples: int = 2
    """Transcripts shown, of each environment."""
    rows: int = 0
    """Episodes played at a time. The last bits of the figures depend on it. 0: 128, or a half, a quarter and so on of that
    where memory needs it, found when the run begins."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which the policy plays: bfloat16 takes half of the memory."""
    judge: JudgeConfig = JudgeConfig()


RETAINED = ("window", "batches", "all")
"""Values of `storage.retain`; each keeps what those before it keep."""


class StorageConfig(Section, frozen=True):
    """The run's folder."""

    retain: Literal["all", "batches", "window"] = "window"
    """Bodies of submissions kept. window: those of the last `window_steps` steps; batches: also those that were trained on,
    and their continuations; all. Over the quota, refused ones are deleted first in any case."""
    window_steps: int = 16
    """Training steps whose submissions and weights are kept."""
    quota_mb: int = 2048
    """Disk space for blobs, MB; above it, what the run can do without is deleted, and then leases pause."""
    state_every: int = 1
    """Steps between the trainer's saved states. Above 1, a state is copied and written beside the next steps, and a trainer
    that was killed repeats the steps since the last one, at most twice as many."""
    checkpoint_every: int = 25
    """Steps between checkpoints kept as directories in Hugging Face format."""
    anchor_every: int = 1
    """Versions between those that are published whole; the others are published as patches, if patches are small. A node
    that joins fetches a whole version and all patches after it. Only in runs that publish bfloat16 or int8; limit 32."""


class RunConfig(Section, frozen=True, kw_only=True):
    """A run file."""

    name: str
    """Names the run and its folder, runs/NAME."""
    steps: int
    """Training steps. On resume they must be above the version that the run has reached; a run that has ended takes no
    more."""
    seed: int = -1
    """Fixes the first weights; -1 takes random ones. In a run of this machine alone it also fixes the secret, and with it
    every random choice. A run that others can join always has a random secret."""
    policy: PolicyConfig = PolicyConfig()
    envs: tuple[EnvConfig, ...]
    sampling: SamplingConfig = SamplingConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    difficulty: DifficultyConfig = DifficultyConfig()
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
    seed: int = 0
    """Fixes the first weights, the games and their order."""
    policy: StartPolicy = StartPolicy()
    env: EnvConfig
    """Whose scripted right player is imitated."""
    player: str = "right"
    """Which of the environment's scripted players is learned from."""
    tasks: Literal["training", "all"] = "training"
    """Which tasks the player plays; "all" adds the held-out ones, which are then held out of RL alone."""
    episodes: int = 4096
    """Scripted games to learn from."""
    steps: int = 300
    """Training steps."""
    batch: int = 128
    """Episodes a step."""
    lr: float = PRESET_LR
    """Learning rate at its highest; it falls to a tenth along a cosine. -1: 5000 divided by the number of parameters that
    learn, but at least 1e-5 and at most 3e-3."""
    warmup_steps: int = 20
    """Steps in which the learning rate climbs from 0."""
    max_grad_norm: float = 1.0
    """A longer gradient is scaled down to this norm."""
    max_tokens: int = 512
    """Games with a longer row, which is usually the whole game, are left out, tokens."""
    eval_every: int = 0
    """Steps between evaluations on held-out tasks, each of a checkpoint that is kept beside the result; 0 is never, or with
    `stop_at` a twentieth of the steps. They change no weights."""
    eval_episodes: int = 256
    """Sampled episodes of one evaluation."""
    stop_at: float = 0.0
    """Stop at the first evaluation with at least this share of wins, or of the range of rewards if the environment does not
    say what wins; 0 takes all steps. 0.3 to 0.5 leaves RL something to find."""
    publish_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the files that are written."""
    threads: int = 2
    """CPU threads."""

    @property
    def evaluates_every(self) -> int:
        """Steps between evaluations; 0: there are none."""
        return self.eval_every or (max(1, self.steps // 20) if self.stop_at else 0)


def sampling_of(config: RunConfig) -> Sampling:
    """The run file's sampling, as the wire's type."""
    drawn = config.sampling
    return Sampling(
        drawn.temperature, drawn.max_turn_tokens, drawn.max_tokens, drawn.max_rollout_tokens, noise=drawn.noise
    )


def difficulty_of(config: RunConfig) -> Difficulty | None:
    """How the run file lets draws follow solve rates, as the log has it; None if they do not."""
    return wire_difficulty(config.difficulty, {env.label: env.solved for env in config.envs})


def wire_bounds(bounds: BoundsConfig) -> Bounds:
    """The bounds of one pair, as the wire's type."""
    mean = bounds.logprob_mean or MEAN_OF_LOGPROB * bounds.logprob
    return Bounds(bounds.gap, bounds.flipped, bounds.mean_gap, bounds.logprob, mean, bounds.largest_logit)
