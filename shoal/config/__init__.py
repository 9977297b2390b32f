"""The run file: every knob of a run with its unit, and how a TOML file becomes one. Names only."""

from shoal.config.algorithms import notes_of
from shoal.config.check import SAFE_TO_CHANGE, check_run, keys_that_keep_less, unsafe_changes
from shoal.config.critic import CriticConfig
from shoal.config.difficulty import DifficultyConfig
from shoal.config.environ import (
    child_environment,
    node_home,
    rank_here,
    repeatable_cuda,
    set_node_home,
    settle_loggers,
    settle_vllm,
    settle_vllm_runner,
    stay_on_this_machine,
    wait_without_spinning,
    without_hub,
)
from shoal.config.envs import EnvConfig, JudgeConfig
from shoal.config.host import HostConfig, is_loopback
from shoal.config.load import load_run, load_sft
from shoal.config.logs import LOGGERS, LoggingConfig
from shoal.config.monitors import MonitorsConfig
from shoal.config.optimiser import preset_imitation_lr, preset_lr
from shoal.config.policies import AdapterConfig, PolicyConfig, TinyPolicy
from shoal.config.sections import (
    ACTIVATION_ERROR,
    BOUNDS,
    PRESET_LR,
    BoundsConfig,
    EvalConfig,
    RolloutsConfig,
    RunConfig,
    SamplingConfig,
    SftConfig,
    StorageConfig,
    TrainConfig,
    ValidatorsConfig,
    VerifyConfig,
    WorkersConfig,
    difficulty_of,
    sampling_of,
    wire_bounds,
)

__all__ = [
    "ACTIVATION_ERROR", "BOUNDS", "LOGGERS", "PRESET_LR", "SAFE_TO_CHANGE", "AdapterConfig",
    "BoundsConfig", "CriticConfig", "DifficultyConfig", "EnvConfig", "EvalConfig", "HostConfig", "JudgeConfig",
    "LoggingConfig", "MonitorsConfig", "PolicyConfig", "RolloutsConfig", "RunConfig", "SamplingConfig", "SftConfig",
    "StorageConfig", "TinyPolicy", "TrainConfig", "ValidatorsConfig", "VerifyConfig", "WorkersConfig", "check_run",
    "child_environment", "difficulty_of", "is_loopback", "keys_that_keep_less", "load_run", "load_sft", "node_home",
    "notes_of", "preset_imitation_lr", "preset_lr", "rank_here", "repeatable_cuda", "sampling_of", "set_node_home",
    "settle_loggers", "settle_vllm", "settle_vllm_runner", "stay_on_this_machine",
    "unsafe_changes", "wait_without_spinning", "wire_bounds", "without_hub",
]  # fmt: skip
