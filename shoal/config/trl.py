"""What TRL's `GRPOConfig` calls the keys of a run file and their values, for the message about one that is unknown here.

docs/how-to/coming-from.md compares their meanings and defaults.
"""

_BATCH = "a batch is rollouts.batch_groups groups of rollouts.group_size rollouts"
_NOISE = "the lease fixes the noise over the whole vocabulary"
_LOGS = "metrics are written after each step, and logging.to sends them on"
_FINAL = "checkpoints/final of the run's folder is in Hugging Face format"
_OUTPUT = "a run is written into runs/NAME, or into the folder of --out"
_REFERENCE = "the reference is the first policy throughout"
_VLLM = "each worker chooses what it samples with, by `shoal join --engine vllm`"
_SHARDS = "train.processes divides the weights of a trainer"
_BATCH_STD = '"mean" with train.algorithm.batch_std = true'
_SCALES = 'group is "mean_std", none is "mean", batch is nearly ' + _BATCH_STD
_WEIGHTED = '"weighted_loss", which is the default of TRL'
_MEAN_STD = '"composition" with advantage = "mean_std"'
_CLIP = "train.algorithm.loss.eps_low = 0.2 and train.algorithm.loss.eps_high = 0.2"
_GSPO = '"gspo" with average = "tokens", and ' + _CLIP
_LUSPO = '"gspo" with average = "constant" and divisor_tokens = 1, and ' + _CLIP
_TO_OLD = 'most = 3, and train.algorithm.ratio_to = "old"'
_CISPO = "that of TRL's cispo is train.algorithm.loss.most"
_VLLM_MOST = 'each of the list has "most", and "icepop" has "least", too'
_VLLM_MASK = 'TRL with vLLM has "sequence_mask" with most = 3, none is the default here'
_COMPLETIONS = "completions alone are learned from"
_LONGEST = "of the whole rollout with its prompt"
_WHOLE = "all weights are learned, so leave it out"
_SHARE = "in TRL a value below 1 is a share of the steps, here it is their number"
_NONE = "shoal has no counterpart of this setting of TRL, so leave it out"
_NO_VALUE = "it has no counterpart here"

_WITHOUT_COUNTERPART = """
    optim_args optim_target_modules average_tokens_across_devices label_smoothing_factor bf16_full_eval
    fp16_full_eval tf32 activation_checkpointing_kwargs gradient_checkpointing_kwargs torch_compile
    torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache neftune_noise_alpha
    torch_empty_cache_steps logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter
    include_num_input_tokens_seen log_level log_level_replica disable_tqdm project trackio_space_id
    trackio_bucket_id trackio_static_space_id eval_delay prediction_loss_only eval_do_concat_batches
    eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model
    save_on_each_node enable_jit_checkpoint hub_token hub_private_repo hub_strategy hub_always_push hub_revision
    load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
    restore_callback_states_from_checkpoint full_determinism accelerator_config parallelism_config
    dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns
    label_names train_sampling_strategy length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb
    ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp_config debug skip_memory_metrics do_train
    do_eval do_predict local_rank trust_remote_code router_aux_loss_coef cast_lm_head_to_fp32
    ds3_gather_for_generation pad_to_multiple_of cache_implementation vllm_model_impl vllm_enable_sleep_mode
    vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
    vllm_group_port sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg
    vespo_lambda_neg use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta log_multimodal
    log_unique_prompts log_completions_hub_repo use_transformers_continuous_batching
    transformers_continuous_batching_config use_transformers_paged chat_template_path dataset_text_field
    dataset_kwargs dataset_num_proc eos_token truncation_mode packing packing_strategy padding_free eval_packing
    activation_offloading pad_token
"""
"""The other settings of TRL 1.16, for RL and for fine-tuning. Those that are keys here, too, are missing."""

_SCHEDULES = (
    "cosine_with_restarts", "polynomial", "inverse_sqrt", "reduce_lr_on_plateau", "warmup_stable_decay", "greedy",
)  # fmt: skip

TRL_KEYS = {
    "learning_rate": ("train.lr", "1e-6 in TRL, by the size of the policy here"),
    "lr_scheduler_type": ("train.schedule", "linear in TRL, constant here"),
    "lr_scheduler_kwargs": ("", "train.schedule is one word"),
    "warmup_ratio": ("train.warmup_steps", "in steps"),
    "adam_beta1": ("train.beta1", ""),
    "adam_beta2": ("train.beta2", "0.999 in TRL, 0.95 here"),
    "adam_epsilon": ("", "it is 1e-8"),
    "optim": ("", "it is AdamW, and train.moments says how its moments are kept"),
    "max_steps": ("steps", "of batches"),
    "num_train_epochs": ("", "tasks are drawn with replacement, and a run ends after steps"),
    "shuffle_dataset": ("", "tasks are drawn with replacement"),
    "per_device_train_batch_size": ("", _BATCH),
    "gradient_accumulation_steps": ("", f"{_BATCH}; train.microbatch_tokens bounds the memory"),
    "auto_find_batch_size": ("train.microbatch_tokens", "0 finds it"),
    "batch_size": ("", _BATCH),
    "generation_batch_size": ("rollouts.batch_groups", "in groups: divide by num_generations"),
    "steps_per_generation": ("train.minibatches", "divide by gradient_accumulation_steps"),
    "num_iterations": ("train.updates_per_batch", ""),
    "num_generations": ("rollouts.group_size", "8 in TRL, 16 here"),
    "num_generations_eval": ("eval.episodes", "episodes of each environment"),
    "completion_only_loss": ("", _COMPLETIONS),
    "assistant_only_loss": ("", _COMPLETIONS),
    "max_completion_length": (
        "sampling.max_turn_tokens",
        "of one turn: 512 in TRL, 64 here; sampling.max_tokens is with the prompt",
    ),
    "max_new_tokens": ("sampling.max_turn_tokens", "of one turn"),
    "max_prompt_length": ("", "sampling.max_tokens is for the prompt and what is written together"),
    "max_model_length": ("sampling.max_tokens", _LONGEST),
    "max_length": ("sampling.max_tokens", _LONGEST),
    "vllm_max_model_length": ("sampling.max_tokens", _LONGEST),
    "max_tool_calling_iterations": ("", "the environment's step says when an episode ends"),
    "temperature": ("sampling.temperature", ""),
    "top_p": ("", _NOISE),
    "top_k": ("", _NOISE),
    "min_p": ("", _NOISE),
    "repetition_penalty": ("", f"{_NOISE}; envs.shaping.repetition lowers the reward"),
    "generation_kwargs": ("", "[sampling] has all settings of sampling"),
    "chat_template_kwargs": ("envs.template", ""),
    "reward_weights": ("envs.weights", ""),
    "reward_funcs": ("envs.name", "of an environment, whose score is the reward"),
    "train_dataset": ("envs.name", "of an environment, which has the tasks"),
    "beta": ("train.algorithm.kl.beta", f"with train.algorithm.kl.place = {_WEIGHTED}"),
    "kl_coef": ("train.algorithm.kl.beta", ""),
    "use_bias_correction_kl": ("train.algorithm.kl.place", f"true is {_WEIGHTED}; the default here is false"),
    "sync_ref_model": ("", _REFERENCE),
    "ref_model_sync_steps": ("", _REFERENCE),
    "ref_model_mixup_alpha": ("", _REFERENCE),
    "epsilon": ("train.algorithm.loss.eps_low", "and train.algorithm.loss.eps_high; TRL has one for both"),
    "epsilon_low": ("train.algorithm.loss.eps_low", ""),
    "epsilon_high": ("train.algorithm.loss.eps_high", _CISPO),
    "eps_high": ("train.algorithm.loss.eps_high", _CISPO),
    "cliprange": ("train.algorithm.loss.eps_low", "and train.algorithm.loss.eps_high"),
    "delta": ("train.algorithm.loss.delta", ""),
    "loss_type": (
        "train.algorithm.name",
        f"{_MEAN_STD} is TRL's dapo, the default, and bnpo; its dr_grpo has that advantage",
    ),
    "importance_sampling_level": ("train.algorithm.name", f'"sequence" is {_GSPO}'),
    "scale_rewards": ("train.algorithm.advantage", _SCALES),
    "mask_truncated_completions": ("train.algorithm.mask_overlong", ""),
    "entropy_coef": ("train.algorithm.entropy_bonus", "of entropies averaged as train.algorithm.average says"),
    "entropy_target": ("train.algorithm.entropy_target", "0 keeps the whole bonus, as TRL does by default"),
    "multi_objective_aggregation": ("", "the parts of a score are added by envs.weights"),
    "off_policy_mask_threshold": (
        "train.algorithm.corrections",
        '"geometric_mask" drops rows by their mean ratio, whatever their advantage',
    ),
    "top_entropy_quantile": ("", "all tokens are learned from"),
    "vllm_importance_sampling_correction": ("train.algorithm.corrections", _VLLM_MASK),
    "vllm_importance_sampling_mode": ("train.algorithm.corrections", _VLLM_MASK),
    "vllm_importance_sampling_cap": ("train.algorithm.corrections", _VLLM_MOST),
    "vllm_importance_sampling_clip_max": ("train.algorithm.corrections", _VLLM_MOST),
    "vllm_importance_sampling_clip_min": ("train.algorithm.corrections", _VLLM_MOST),
    "use_vllm": ("", _VLLM),
    "vllm_mode": ("", _VLLM),
    "vllm_gpu_memory_utilization": ("", _VLLM),
    "vllm_tensor_parallel_size": ("", _VLLM),
    "model": ("policy.path", ""),
    "model_name_or_path": ("policy.path", ""),
    "model_init_kwargs": ("", "[policy] has all settings of the model"),
    "torch_dtype": ("policy.dtype", ""),
    "bf16": ("policy.dtype", '"bfloat16", for train.dtype, too'),
    "fp16": ("policy.dtype", "float32, bfloat16 or int8"),
    "peft_config": ("policy.adapter", ""),
    "r": ("policy.adapter.rank", ""),
    "lora_r": ("policy.adapter.rank", ""),
    "lora_alpha": ("policy.adapter.alpha", "8 in PEFT, 16 here"),
    "lora_dropout": ("", "models learn without dropout"),
    "lora_target_modules": ("policy.adapter.targets", ""),
    "disable_dropout": ("", "models learn without dropout"),
    "gradient_checkpointing": ("train.recompute", '"layers"'),
    "activation_checkpointing": ("train.recompute", '"layers"'),
    "deepspeed": ("", _SHARDS),
    "fsdp": ("", _SHARDS),
    "use_cpu": ("train.device", '"cpu"; workers have `shoal join --device`'),
    "data_seed": ("seed", ""),
    "report_to": ("logging.to", ""),
    "run_name": ("name", ""),
    "logging_steps": ("", _LOGS),
    "num_completions_to_print": ("eval.samples", "transcripts of episodes"),
    "log_completions": ("", "transcripts of eval.samples episodes are kept"),
    "output_dir": ("", _OUTPUT),
    "per_device_eval_batch_size": ("", "eval.episodes is how many are played"),
    "eval_strategy": ("", "eval.episodes are played before and after the run, and of each kept checkpoint"),
    "eval_on_start": ("", "a run evaluates before its first step, unless eval.episodes is 0"),
    "eval_steps": ("storage.checkpoint_every", "kept checkpoints are evaluated"),
    "save_steps": ("storage.checkpoint_every", ""),
    "save_strategy": ("storage.checkpoint_every", "in steps"),
    "save_total_limit": ("", "all kept checkpoints stay; storage.checkpoint_every makes them fewer"),
    "resume_from_checkpoint": ("", "`shoal run` with the same run file goes on"),
    "push_to_hub": ("", _FINAL),
    "hub_model_id": ("", _FINAL),
}
"""For each name the key here, or "", and what else to say. Also for a value, of a key here or of a name, as KEY = "VALUE",
or for its type, as KEY = float. A test demands that every dotted key in it exists."""


TRL_KEYS |= {
    "train.warmup_steps = float": ("", _SHARE),
    'policy.dtype = "bf16"': ("", 'here it is "bfloat16"'),
    'train.schedule = "constant_with_warmup"': ("", 'here it is "constant" with train.warmup_steps'),
    'train.schedule = "linear_with_warmup"': ("", 'here it is "linear" with train.warmup_steps'),
    'train.schedule = "cosine_with_min_lr"': ("", 'here it is "cosine", which falls to a tenth'),
    'train.schedule = "cosine_warmup_with_min_lr"': ("", 'here it is "cosine", which falls to a tenth'),
    'train.algorithm.name = "bnpo"': ("", f"here it is {_MEAN_STD}"),
    'train.algorithm.name = "luspo"': ("", f"here it is {_LUSPO}"),
    'train.algorithm.name = "token"': ("", f"here it is {_MEAN_STD}"),
    'train.algorithm.name = "sequence"': ("", f"here it is {_GSPO}"),
    'train.algorithm.advantage = "group"': ("", 'here it is "mean_std"'),
    'train.algorithm.advantage = "none"': ("", 'here it is "mean"'),
    'train.algorithm.advantage = "batch"': ("", f"here it is nearly {_BATCH_STD}"),
    'train.algorithm.corrections.name = "token_truncate"': ("", f'here it is "truncate" with {_TO_OLD}'),
    'train.algorithm.corrections.name = "sequence_truncate"': (
        "",
        f'here it is "truncate" with level = "row", {_TO_OLD}',
    ),
    'train.algorithm.corrections.name = "token_mask"': ("", f'here it is "icepop" with least = 0, {_TO_OLD}'),
}
_LOSS_TYPES = {
    "dapo": _MEAN_STD,
    "bnpo": _MEAN_STD,
    "grpo": f'{_MEAN_STD} and average = "rollouts"',
    "dr_grpo": '"dr_grpo" with advantage = "mean_std" and divisor_tokens = your max_completion_length',
    "cispo": '"cispo" with train.algorithm.loss.most = your epsilon_high',
    "luspo": _LUSPO,
    "sapo": '"sapo" has no counterpart here',
    "vespo": '"vespo" has no counterpart here',
}
TRL_KEYS |= {f'loss_type = "{name}"': ("train.algorithm.name", here) for name, here in _LOSS_TYPES.items()}
TRL_KEYS |= dict.fromkeys((f'train.algorithm.name = "{name}"' for name in ("sapo", "vespo")), ("", _NO_VALUE))
TRL_KEYS |= dict.fromkeys((f'train.schedule = "{name}"' for name in _SCHEDULES), ("", _NO_VALUE))
TRL_KEYS |= {name: ("", _VLLM if name.startswith("vllm_") else _NONE) for name in _WITHOUT_COUNTERPART.split()}

TRL_SFT_KEYS = (
    dict.fromkeys(TRL_KEYS, ("", _NONE))
    | {name: meant for name, meant in TRL_KEYS.items() if meant[0] == "policy.path"}
    | {name: ("", _WHOLE) for name, meant in TRL_KEYS.items() if "policy.adapter" in meant[0]}
    | {
        "adapter": ("", _WHOLE),
        "dtype": ("publish_dtype", "of the files; it computes in float32"),
        "torch_dtype": ("publish_dtype", "of the files; it computes in float32"),
        "fp16": ("publish_dtype", "float32 or bfloat16, of the files"),
        'publish_dtype = "bf16"': ("", 'here it is "bfloat16"'),
        "learning_rate": ("lr", "2e-5 in TRL, by the size of the policy here"),
        "lr_scheduler_type": ("", "the rate falls to a tenth along a cosine, not linearly to 0 as in TRL"),
        "warmup_steps = float": ("", _SHARE),
        "warmup_ratio": ("warmup_steps", "in steps"),
        "max_steps": ("steps", ""),
        "num_train_epochs": ("steps", "each of `batch` episodes"),
        "per_device_train_batch_size": ("batch", "8 for each device in TRL, 128 here"),
        "gradient_accumulation_steps": ("batch", "episodes of a step, however they are cut"),
        "per_device_eval_batch_size": ("eval_episodes", "how many are played"),
        "eval_steps": ("eval_every", ""),
        "eval_strategy": ("eval_every", "in steps"),
        "save_steps": ("eval_every", "each evaluation keeps the policy"),
        "save_strategy": ("eval_every", "in steps: each evaluation keeps the policy"),
        "max_length": ("max_tokens", "1024 in TRL, 512 here; longer episodes are left out, not cut"),
        "train_dataset": ("env.name", "of an environment, whose scripted player is imitated"),
        "bf16": ("publish_dtype", '"bfloat16", of the files'),
        "completion_only_loss": ("", _COMPLETIONS),
        "assistant_only_loss": ("", _COMPLETIONS),
        "adam_beta2": ("", "it is 0.95, and 0.999 in TRL"),
        "adam_beta1": ("", "it is 0.9"),
        "weight_decay": ("", "there is none"),
        "run_name": ("name", ""),
        "data_seed": ("seed", ""),
        "output_dir": ("", "`shoal sft` has --out"),
    }
)
"""The same of SFTConfig of TRL, for recipes of `shoal sft`."""
