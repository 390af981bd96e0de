"""The keys of the configs that ``fastloop import`` reads, as data. Axolotl's names become those of transformers."""

from __future__ import annotations

from typing import Any

FORMATS = ("axolotl", "trl", "transformers")
"""Formats, in the order in which ``MARKS`` are tried."""

MARKS: dict[str, tuple[str, ...]] = {
    "axolotl": ("base_model", "micro_batch_size", "sequence_len", "num_epochs", "pretraining_dataset"),
    "trl": (
        "model_name_or_path",
        "dataset_name",
        "dataset_text_field",
        "assistant_only_loss",
        "packing_strategy",
        "beta",
        "loss_type",
        "desirable_weight",
        "undesirable_weight",
        "center_rewards_coefficient",
        "precompute_ref_log_probs",
    ),
    "transformers": ("output_dir", "per_device_train_batch_size", "num_train_epochs", "learning_rate", "optim"),
}
"""Format -> keys that only a config of this format has, or of a later one."""

SCRIPT_MARKS = (
    "train_file",
    "validation_file",
    "test_file",
    "task_name",
    "text_column_names",
    "label_column_name",
    "max_train_samples",
    "pad_to_max_length",
)
"""Keys of the example scripts of transformers, such as run_classification.py, whose others are those of TRL, too."""

SCRIPT_FILES = {"train_file": "train", "validation_file": "validation", "test_file": "test"}
"""Key of these scripts -> split of ``data.files``."""

AXOLOTL = {
    "base_model": "model_name_or_path",
    "revision_of_model": "model_revision",
    "tokenizer_config": "tokenizer",
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "sequence_len": "max_length",
    "sample_packing": "packing",
    "bfloat16": "bf16",
    "float16": "fp16",
    "evaluation_strategy": "eval_strategy",
    "chat_template_jinja": "chat_template_path",
    "attention": "attn_implementation",
}
"""Axolotl's key -> that of transformers or TRL. Other keys have the same name in both."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "axolotl": {
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1,
        "lr_scheduler_type": "cosine",
        "bf16": "auto",
        "max_length": 512,
        "val_set_size": 0.0,
        "output_dir": "./model-out",
        "logging_steps": 10,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
    },
    "trl": {
        "learning_rate": 2e-5,
        "logging_steps": 10,
        "activation_checkpointing": True,
        "bf16": True,
        "max_length": 1024,
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
    },
    "transformers": {},
}
"""Format -> values of keys that a config leaves out, where they differ from ``BASE``."""

BASE: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "optim": "adamw_torch_fused",
    "max_grad_norm": 1.0,
    "logging_steps": 500,
    "eval_strategy": "no",
    "save_strategy": "steps",
    "save_steps": 500,
    "seed": 42,
    "output_dir": "trainer_output",
}
"""Defaults of ``TrainingArguments`` that differ from a recipe's."""

DIRECT = {
    "model_name_or_path": "model.name",
    "model_revision": "model.revision",
    "tokenizer": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
    "tokens": "model.tokens",
    "dataset_text_field": "data.text",
    "max_length": "data.max_length",
    "max_seq_length": "data.max_length",
    "text_column_name": "data.text",
    "label_column_name": "data.label",
    "tokenizer_name": "model.tokenizer",
    "per_device_eval_batch_size": "train.eval_batch_size",
    "learning_rate": "train.lr",
    "weight_decay": "train.weight_decay",
    "seed": "train.seed",
    "save_total_limit": "train.keep_checkpoints",
}
"""Key -> the recipe's key with the same value."""
NUMBERS = (
    "learning_rate",
    "weight_decay",
    "max_length",
    "max_seq_length",
    "seed",
    "save_total_limit",
    "per_device_eval_batch_size",
)
"""Keys of ``DIRECT`` whose values are numbers."""

PLUGINS: dict[str, tuple[str, dict[str, Any]]] = {
    "activation_checkpointing": ("activation-checkpointing", {}),
    "gradient_checkpointing": ("activation-checkpointing", {}),
    "packing": ("packing", {}),
    "group_by_length": ("length-bucketing", {}),
    "use_liger_kernel": ("liger", {}),
    "cut_cross_entropy": ("fused-loss", {}),
    "use_tensorboard": ("tensorboard", {}),
    "auto_find_batch_size": ("auto-micro-batch", {}),
    "flash_attention": ("attention", {"implementation": "flash_attention_2"}),
    "sdp_attention": ("attention", {"implementation": "sdpa"}),
    "flex_attention": ("attention", {"implementation": "flex_attention"}),
    "eager_attention": ("attention", {"implementation": "eager"}),
}
"""Key that is true -> a plugin with options."""
ATTENTION = {
    "flash": "flash_attention_2",
    "flash_attention_2": "flash_attention_2",
    "sdpa": "sdpa",
    "flex": "flex_attention",
    "flex_attention": "flex_attention",
    "eager": "eager",
}
"""``attn_implementation`` -> ``plugins.attention.implementation``."""
FUSED = {"implementation": "fused"}
EIGHT_BITS = {"implementation": "8bit"}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "adamw_torch": ("AdamW", None),
    "adamw_torch_fused": ("AdamW", FUSED),
    "adamw_bnb_8bit": ("AdamW", EIGHT_BITS),
    "adamw_8bit": ("AdamW", EIGHT_BITS),
    "adamw_torch_8bit": ("AdamW", EIGHT_BITS),
    "paged_adamw_8bit": ("AdamW", EIGHT_BITS),
    "paged_adamw_32bit": ("AdamW", FUSED),
    "sgd": ("SGD", None),
    "adagrad": ("Adagrad", None),
    "rmsprop": ("RMSprop", None),
    "adafactor": ("Adafactor", None),
    "muon": ("Muon", None),
}
"""``optim`` -> ``train.optimizer``, and options of the plugin ``fused-optimizer``."""
SCHEDULES = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine", "one_cycle": "OneCycleLR"}
"""``lr_scheduler_type`` -> ``plugins.lr-scheduler.schedule``, where the names differ."""
NO_SCHEDULES = ("reduce_lr_on_plateau", "greedy", "rex")
"""Schedules that fastloop has no counterpart of."""
TRACKERS = ("wandb", "mlflow", "comet_ml", "clearml", "dvclive", "swanlab", "trackio")
"""Values of ``report_to`` that the plugin ``trackers`` takes."""
INTEGRATIONS = {
    "axolotl.integrations.liger.LigerPlugin": "liger",
    "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin": "fused-loss",
}
"""Axolotl's plugin -> ours."""

WRITE_A_PLUGIN = "fastloop has none; write a plugin (docs/write-a-plugin.md)"
REASONS = {
    "load_in_8bit": "fastloop quantizes to 4 bits: plugins.lora.quantize: nf4",
    "lora_fan_in_fan_out": "peft finds it by the type of the layer",
    "processor_type": "fastloop has no vision-language task; texts alone train with causal-lm",
    "skip_prepare_dataset": "fastloop has no vision-language task; texts alone train with causal-lm",
    "batch_size": "micro_batch_size and gradient_accumulation_steps give train.batch_size",
    "dp_shard_size": "plugins.fsdp.shard_within",
    "fsdp_version": "not needed: the plugin fsdp is FSDP2",
    "special_tokens": "set them in the tokenizer, save it, and set model.tokenizer to its folder",
    "eot_tokens": "the chat template's own end token has a loss",
    "dataset_prepared_path": "list the plugin token-cache to keep token ids between runs",
    "pad_to_sequence_len": "packed rows need no padding; without packing: data.padding: max_length",
    "eval_sample_packing": "packing also packs evaluation batches, with the same metrics",
    "eval_packing": "packing also packs evaluation batches, with the same metrics",
    "xformers_attention": "list the plugin attention, which has the kernels of torch and flash-attn",
    "unfrozen_parameters": "list the plugin freeze with the other parameters",
    "lr_groups": "use train.parameter_groups",
    "embedding_lr": "use train.parameter_groups: [{match: '*embed*', lr: ...}]",
    "neftune_noise_alpha": "list the plugin neftune, with alpha; its noise does not count padding",
    "label_smoothing_factor": "causal-lm has no label smoothing",
    "text_column_names": "set data.text to a column, or a list of them",
    "max_train_samples": "set data.limit.train",
    "max_eval_samples": "set data.limit.validation",
    "pad_to_max_length": "set data.padding: max_length",
    "loss_watchdog_threshold": "plugins.nan-guard.max_loss",
    "loss_watchdog_patience": "plugins.nan-guard.max_loss_patience",
    "sequence_parallel_degree": "list the plugin context-parallel",
    "context_parallel_size": "list the plugin context-parallel, with size",
    "tensor_parallel_size": "list the plugin tensor-parallel, or set plugins.fsdp.tensor",
    "hub_model_id": "upload the model after the run: `fastloop export RUN --push` (docs/export.md)",
    "push_to_hub": "upload the model after the run: `fastloop export RUN --push` (docs/export.md)",
    "resume_from_checkpoint": "a checkpoint of fastloop resumes with --resume; for weights: model.weights",
    "ddp_find_unused_parameters": "list the plugin ddp with find_unused_parameters: true",
    "dataset_streaming": "fastloop streams files: data.streaming with data.files",
    "streaming": "fastloop streams files: data.streaming with data.files",
    "activation_offloading": "activation-checkpointing recomputes activations and does not offload them",
    "average_tokens_across_devices": "not needed: fastloop always averages over the tokens of all processes",
    "gradient_checkpointing_kwargs": "not needed: fastloop recomputes without reentrant autograd",
    "activation_checkpointing_kwargs": "not needed: fastloop recomputes without reentrant autograd",
    "model_type": "not needed: the model's config.json names its architecture",
    "tokenizer_type": "not needed: the tokenizer's files name its class",
    "is_llama_derived_model": "not needed: the model's config.json names its architecture",
    "dataloader_drop_last": "set train.drop_last, which drops the last step of an epoch that is not full",
    "dataloader_pin_memory": "not needed: always on CUDA",
    "dataloader_prefetch_factor": "see plugins.dataloader-workers.prefetch_factor",
    "remove_unused_columns": "not needed: a recipe names the columns to read",
    "shuffle_dataset": "not needed: training always shuffles by seed and epoch",
    "logging_first_step": "the log has every train.log_every steps",
    "data_seed": "train.seed also seeds the order of samples",
    "dtype": "weights are fp32, or bf16 in the forward pass with the plugin amp",
}
"""Key without a counterpart -> why, or what to do. Others get ``UNKNOWN``."""
PREFIXES = {
    "wandb_": "set W&B's environment variable, such as WANDB_ENTITY or WANDB_NAME",
    "mlflow_": "set MLflow's environment variable, such as MLFLOW_TRACKING_URI",
    "comet_": "set Comet's environment variable",
    "flash_attn_": "list the plugins liger and fused-loss for fused operations",
    "liger_": "the plugin liger chooses the kernels that the model supports",
    "lora_mlp": "the plugin compile fuses such operations",
    "lora_qkv": "the plugin compile fuses such operations",
    "lora_o_k": "the plugin compile fuses such operations",
    "hub_": "upload the model after the run: `fastloop export RUN --push` (docs/export.md)",
    "bnb_": "plugins.lora.quantize: nf4 has its own settings",
    "dataset_": "the task reads its columns by the section data (docs/training-keys.md)",
    "ddp_": "see the options of the plugin ddp",
}
"""Start of a key -> as in ``REASONS``."""
UNKNOWN = "fastloop has no such key"
IRRELEVANT = {
    "strict", "debug", "local_rank", "do_train", "do_eval", "do_predict", "disable_tqdm", "log_level", "run_name",
    "logging_dir", "log_level_replica", "log_on_each_node", "save_safetensors", "skip_memory_metrics", "_n_gpu",
    "save_only_model", "overwrite_output_dir", "logging_strategy", "dataset_processes", "dataset_num_proc", "project",
    "logging_nan_inf_filter", "accelerator_config", "load_best_model_at_end", "greater_is_better", "torch_dtype",
    "metric_for_best_model", "adapter", "hub_token", "use_peft", "use_wandb", "use_mlflow", "eval_table_size",
}  # fmt: skip
"""Keys that change no result, or that other keys' conversions have read."""
