"""Tables of the fields that other libraries' configs have and ours do not.

A config written for EasyDeL is accepted as it is: each of its fields is one of ours, another name of one, or listed
here, and then accepted with a warning that says what happens instead. TRL's names are errors that name our field, or
say what happens here without one.
`docs/reference/coming_from.md` is checked against these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class SeedField(NamedTuple):
    """A field without effect."""

    same: tuple[Any, ...]
    """Values that ask for what happens anyway, and give no warning."""
    instead: str
    """What happens instead, whatever the value."""


_GENERATION = (
    "GRPO writes completions to samples/, of rollouts and fixed prompts; a reward stage writes scored pairs"
)
_ESURGE = "the component that `sampler` names samples completions"
_WORKERS = "batches are made between updates, while the device computes; no worker processes are needed"
_HOST = "token ids stay in host memory, batches go to the device one at a time"
_SHARDS = "the mesh determines the share of a batch that each process reads"
_SPARSE = "parameters are dense arrays"
_HISTOGRAM = "histograms of weights are not logged; grad_norm is, at every logged step"
_BEGIN = "a run resumes from its newest checkpoint; without one it starts at update 0"
_COLLATOR = "examples are packed into rows without padding; there is no other way of batching"

SEED_FIELDS: Mapping[str, SeedField] = {
    "auto_shard_states": SeedField((True,), "states are always sharded over `mesh`"),
    "aux_loss_enabled": SeedField((False,), "no auxiliary loss of experts is added"),
    "backend": SeedField(
        (None,), "JAX chooses the device; the environment variable JAX_PLATFORMS overrides it"
    ),
    "custom_scheduler": SeedField(
        (None,), "`scheduler` is followed; a registered optimizer can bring its own schedule"
    ),
    "dataloader_num_workers": SeedField((0, None), _WORKERS),
    "dataloader_pin_memory": SeedField((False, None), _WORKERS),
    "do_eval": SeedField((True,), "evaluations run where `eval_data` is given, and only there"),
    "do_last_save": SeedField((True,), "the trained model is always saved at the end"),
    "do_train": SeedField((True,), "a stage always trains; `rlhf score` applies a model without training it"),
    "esurge_hbm_utilization": SeedField((0.45, None), _ESURGE),
    "esurge_max_num_seqs": SeedField((None,), _ESURGE),
    "esurge_min_input_pad": SeedField((None,), _ESURGE),
    "esurge_page_size": SeedField((32, None), _ESURGE),
    "esurge_silent_mode": SeedField((True,), _ESURGE),
    "esurge_use_tqdm": SeedField((True,), _ESURGE),
    "force_step_start_point": SeedField((False,), _BEGIN),
    "generation_config_overrides": SeedField((None, {}), _GENERATION),
    "generation_dataset_prompt_field": SeedField((None, "prompt"), _GENERATION),
    "generation_do_sample": SeedField((None,), _GENERATION),
    "generation_extra_kwargs": SeedField((None, {}), _GENERATION),
    "generation_interval": SeedField((None,), _GENERATION),
    "generation_log_to_wandb": SeedField((True, False), _GENERATION),
    "generation_max_new_tokens": SeedField((None,), _GENERATION),
    "generation_num_prompts": SeedField((1, None), _GENERATION),
    "generation_num_return_sequences": SeedField((None,), _GENERATION),
    "generation_preview_print": SeedField((False,), _GENERATION),
    "generation_prompts": SeedField(([], None), _GENERATION),
    "generation_seed": SeedField((None,), _GENERATION),
    "generation_shard_inputs": SeedField((True,), _GENERATION),
    "generation_temperature": SeedField((None,), _GENERATION),
    "generation_top_k": SeedField((None,), _GENERATION),
    "generation_top_p": SeedField((None,), _GENERATION),
    "generation_use_train_prompts": SeedField((False,), _GENERATION),
    "grain_shard_count": SeedField((None,), _SHARDS),
    "grain_shard_index": SeedField((None,), _SHARDS),
    "ids_to_pop_from_dataset": SeedField(
        ([], None), "columns that a trainer does not use are not read; GRPO's rewards are given all of them"
    ),
    "init_tx": SeedField((True,), "a stage starts with a fresh optimizer state, and resumes with its own"),
    "is_fine_tuning": SeedField((True,), "a stage trains any model, whatever it was trained on before"),
    "jax_distributed_config": SeedField(
        (None,), "JAX's own start-up joins the processes of SLURM, Open MPI, Kubernetes and TPU jobs"
    ),
    "log_all_workers": SeedField((False,), "the first process logs, for all: their metrics are the same"),
    "log_grad_norms": SeedField((True,), "the global norm of the gradient is always logged, as grad_norm"),
    "loss_config": SeedField((None,), "the loss and its options are `loss = { name = …, … }`"),
    "low_mem_usage": SeedField(
        (True,), "weights are read shard by shard, and the state is donated to every update"
    ),
    "model_name": SeedField((None,), "outputs are named after the stage and its directory"),
    "model_parameters": SeedField(
        (None, {}), "a fresh model's sizes are a table: `model = { model_type = …, … }`"
    ),
    "offload_dataset": SeedField((False,), _HOST),
    "offload_device_index": SeedField((0,), _HOST),
    "offload_device_type": SeedField(("cpu",), _HOST),
    "per_epoch_evaluation_steps": SeedField(
        (None,), "max_evaluation_steps limits the batches of an evaluation"
    ),
    "per_epoch_training_steps": SeedField(
        (None,), "max_training_steps limits the updates of the whole stage"
    ),
    "performance_mode": SeedField(
        (False,), "metrics stay on the device until they are logged; leaving them out would gain nothing"
    ),
    "process_zero_is_admin": SeedField((True,), "the first process writes files and prints"),
    "pruning_module": SeedField((None,), _SPARSE),
    "remove_ckpt_after_load": SeedField((False,), "save_total_limit decides which checkpoints stay"),
    "remove_unused_columns": SeedField(
        (False,), "columns that a trainer does not use are not read; GRPO's rewards are given all of them"
    ),
    "report_metrics": SeedField(
        (True,), "metrics are always written to metrics.jsonl; `logger` lists further loggers"
    ),
    "report_steps": SeedField(
        (), "log_steps sets how often metrics are logged, to the console and to every logger"
    ),
    "resume_if_possible": SeedField((True,), _BEGIN),
    "save_optimizer_state": SeedField(
        (True,),
        "a checkpoint always holds the optimizer's state, which resuming needs; a trained model never does",
    ),
    "sparse_module_type": SeedField(("bcoo",), _SPARSE),
    "sparsify_module": SeedField((False,), _SPARSE),
    "state_apply_fn_kwarguments_to_model": SeedField((None, {}), "models take no further arguments"),
    "step_partition_spec": SeedField((), "a batch's rows are split over the mesh's axes data and fsdp"),
    "step_start_point": SeedField((None,), _BEGIN),
    "train_on_inputs": SeedField(
        (), "reward models train on whole completions, SFT on completions and whole `text` rows"
    ),
    "trainer_prefix": SeedField((None,), "outputs are named after the stage and its directory"),
    "tx_mu_dtype": SeedField((None,), "the optimizer's moments are float32, as the parameters are"),
    "use_data_collactor": SeedField((True,), _COLLATOR),
    "use_data_collator": SeedField((True,), _COLLATOR),
    "use_esurge_generation": SeedField((True, False), _ESURGE),
    "use_grain": SeedField((True,), "grain makes the order of the examples"),
    "verbose": SeedField((True,), "progress_bar_type sets what the console shows"),
    "weight_distribution_log_steps": SeedField((0,), _HISTOGRAM),
    "weight_distribution_pattern": SeedField((), _HISTOGRAM),
}
"""{EasyDeL's field: its values and warning}, for every trainer."""

TRL_NAMES: Mapping[str, str] = {
    "adam_beta1": "optimizer.b1",
    "adam_beta2": "optimizer.b2",
    "adam_epsilon": "optimizer.eps",
    "bf16": "dtype",
    "chat_template_path": "chat_template",
    "data_seed": "shuffle_seed_train",
    "dataset_text_field": "columns",
    "environment_factory": "environment",
    "eval_steps": "evaluation_steps",
    "eval_strategy": "evaluation_steps",
    "generation_batch_size": "steps_per_generation",
    "gradient_checkpointing": "remat",
    "label_smoothing_factor": "loss.label_smoothing",
    "logging_steps": "log_steps",
    "lr_scheduler_type": "scheduler",
    "max_steps": "max_training_steps",
    "max_tool_calling_iterations": "environment.max_turns",
    "model_name_or_path": "model",
    "multi_objective_aggregation": "advantage",
    "num_generations_eval": "evaluation.num_generations",
    "optim": "optimizer",
    "optim_args": "optimizer",
    "output_dir": "save_directory",
    "per_device_eval_batch_size": "eval_batch_size",
    "per_device_train_batch_size": "total_batch_size",
    "report_to": "logger",
    "reward_funcs": "rewards",
    "run_name": "logger",
    "save_strategy": "save_steps",
    "shuffle_dataset": "shuffle_train_dataset",
    "use_vllm": "sampler",
    "vllm_importance_sampling_clip_max": "sampler_correction.max",
    "vllm_importance_sampling_clip_min": "sampler_correction.min",
    "vllm_importance_sampling_correction": "sampler_correction",
    "vllm_importance_sampling_mode": "sampler_correction.mode",
    "warmup_ratio": "warmup_steps",
}
"""{TRL's field: ours}, for the error message: values and defaults differ, so the field is not accepted as ours."""

OTHER_NAMES: Mapping[str, str] = {
    "batch_size": "total_batch_size",
    "epochs": "num_train_epochs",
    "eval_dataset": "eval_data",
    "lr": "learning_rate",
    "max_new_tokens": "sampling.max_completion_length",
    "num_epochs": "num_train_epochs",
    "reward_functions": "rewards",
    "train_batch_size": "total_batch_size",
    "train_dataset": "train_data",
}
"""{what people type for it: our field}, for the error message."""

_UPLOAD = "nothing is uploaded; the trained model is a directory in Hugging Face's layout"
_MESH = "`mesh` of the pipeline says how states are sharded"
_SPECIAL = "the tokenizer's files say what it is"
_LEARNED = "a row's layout decides: replies of `messages` are learned, a `completion` without its prompt, all of `text`"
_PACKED = "examples are packed into rows without padding, and do not see each other"

TRL_ABSENT: Mapping[str, str] = {
    "activation_offloading": "activations that would take much memory are recomputed in the backward pass: `remat`",
    "assistant_only_loss": _LEARNED,
    "completion_only_loss": _LEARNED,
    "deepspeed": _MESH,
    "eos_token": _SPECIAL,
    "eval_packing": _PACKED,
    "fp16": "computation is in bfloat16 or float32: `dtype`",
    "fsdp": _MESH,
    "hub_model_id": _UPLOAD,
    "model_init_kwargs": "config.json says how a model is built, a table `model = { model_type = …, … }` a fresh one",
    "packing": _PACKED,
    "packing_strategy": _PACKED,
    "pad_to_multiple_of": "examples are packed into rows of a few fixed lengths",
    "pad_token": _SPECIAL,
    "padding_free": _PACKED,
    "push_to_hub": _UPLOAD,
    "resume_from_checkpoint": _BEGIN,
    "torch_compile": "every update is a compiled program",
    "trust_remote_code": "no code that comes with a model is run; a plugin adds a model family",
}
"""{TRL's field: what happens here}, for the error message."""
