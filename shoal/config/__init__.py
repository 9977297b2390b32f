"""The run file: every knob of a run with its unit, and how a TOML file becomes one. Names only."""

from shoal.config.alarm_limits import MonitorsConfig
from shoal.config.env_settings import EnvConfig, JudgeConfig
from shoal.config.load import load_run, load_sft
from shoal.config.process_environment import (
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
from shoal.config.run_config import (
    ACTIVATION_ERROR,
    BOUNDS,
    LOGGERS,
    PRESET_LR,
    AdapterConfig,
    CriticConfig,
    EvalConfig,
    HostConfig,
    LoggingConfig,
    PolicyConfig,
    RolloutsConfig,
    RunConfig,
    SamplingConfig,
    SftConfig,
    StorageConfig,
    TinyPolicy,
    TrainConfig,
    ValidatorsConfig,
    VerifyConfig,
    WorkersConfig,
    difficulty_of,
    is_loopback,
    sampling_of,
)
from shoal.config.validate import SAFE_TO_CHANGE, changed_keys, check_run, keys_that_keep_less, unsafe_changes
from shoal.config.validate_algorithm import notes_of, preset_imitation_lr, preset_lr
