"""What the fields of other libraries' configs mean here, for every trainer: one table, `TRAINER_NAMES`.

A config written for EasyDeL is accepted unchanged: each of its fields is a field here, another name for one or
for an entry of a table, or ignored with a warning that says what happens instead. TRL's names are errors that
say what to write: their values and defaults differ, so they are not treated as synonyms.
`docs/reference/coming_from.md` is checked against this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


def as_given(value: Any) -> Any:
    """Take a value unchanged, where None means something here, too."""
    return value


class Taken(NamedTuple):
    """A name whose value is converted, and taken for a field or an entry of a table."""

    path: str
    """The dotted path of our field."""
    convert: Callable[[Any], Any] = as_given
    """Makes our value of theirs, or raises ValueError; None: as if the name were not given."""
    same: tuple[Any, ...] = ()
    """Values that a file of theirs holds by default: they give way to our field, and ask for no table."""
    wins: bool = False
    """Whether other values go before our field, where both are given."""
    smaller: bool = False
    """Whether the smaller of two numbers is taken, where both are given."""


class Ignored(NamedTuple):
    """A name that is accepted and has no effect, with a warning."""

    instead: str
    """What happens instead, for any value."""
    same: tuple[Any, ...] = ()
    """Values that ask for what happens anyway, and give no warning."""
    done: bool = False
    """Whether what the name is for is done anyway; else it is not done."""


class Refused(NamedTuple):
    """A name that is an error."""

    write: str
    """The dotted path of our field, or a sentence on what happens here."""


Meaning = str | tuple[str, Any] | Taken | Ignored | Refused
"""What another name stands for. A str is a dotted path that the value is taken for: "max_grad_norm" is a field,
"loss.epsilon" an entry of a table. A tuple is such a path and the value where a component does not set it."""


def _dtype(value: Any) -> Any:
    """Name a dtype that is given as an object, such as `jnp.bfloat16`."""
    return value if value is None or isinstance(value, str) else np.dtype(value).name


def _sampling(value: Any) -> Any:
    """Rename the entries of a table of generation options to names used here; none and an empty table: no change."""
    if not isinstance(value, Mapping):
        return value
    return {
        "max_completion_length" if key == "max_new_tokens" else key: x for key, x in value.items()
    } or None


def _attention(value: Any) -> Any:
    """Return the attention function here that EasyDeL's mechanism corresponds to; other names are left unchanged."""
    name = str(getattr(value, "value", value)).lower()
    return next((ours for ours, theirs in _MECHANISMS.items() if name in theirs), value)


_MECHANISMS = {
    "auto": ("auto",),
    "xla": ("vanilla", "sdpa"),
    "blocks": ("blockwise",),
    "pallas": ("flash_attn2", "splash", "blocksparse"),
    "cudnn": ("cudnn", "cuda_flash_attn2"),
}
"""{attention function here: EasyDeL's names}."""


def _platform(value: Any) -> Any:
    """Name a platform as jax does: `cuda` and `rocm` are its `gpu`."""
    name = value.lower() if isinstance(value, str) else value
    return "gpu" if name in ("cuda", "rocm") else name


def _true_if_false(value: Any) -> bool | None:
    """Negate false; true and none ask for nothing. Raises ValueError for anything else."""
    return None if _zero_if_false(value) is None else True


def _zero_if_false(value: Any) -> int | None:
    """Make 0 of false; true and none ask for nothing. Raises ValueError for anything else."""
    if not isinstance(value, bool | None):
        raise ValueError(f"expected true or false, got {value!r}")
    return 0 if value is False else None


def _balance(value: Any) -> Any:
    """Read whether a model's experts are balanced by its own weight. Raises ValueError for anything else."""
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {value!r}")
    return "model" if value else 0.0


def _steps(value: Any) -> int | None:
    """Return a number of steps, as it is. Raises ValueError for anything else but none."""
    if isinstance(value, bool) or not isinstance(value, int | None) or (value is not None and value < 0):
        raise ValueError(f"expected a whole number of at least 0, got {value!r}")
    return value


_ESURGE = "the component that `sampler` names samples completions"
_PINNED = "batches are made between updates, while the device computes"
_HOST = "token ids stay in host memory, batches go to the device one at a time"
_SHARDS = "the mesh determines the share of a batch that each process reads"
_SPARSE = "parameters are dense arrays"
_BEGIN = "a run resumes from its newest checkpoint, if there is one: `checkpoints`"
_COLLATOR = "examples are packed into rows without padding; there is no other way of batching"
_UPLOAD = "training uploads nothing; afterwards `rlhf export MODEL --push OWNER/NAME` does, with a model card"
_MESH = "`mesh` of the pipeline says how states are sharded"
_SPECIAL = "the tokenizer's files say what it is"
_LEARNED = "a row's layout decides: replies of `messages` are learned, a `completion` without its prompt, all of `text`"
_PACKED = "examples are packed into rows without padding, and do not see each other"

TRAINER_NAMES: Mapping[str, Meaning] = {
    "clip_grad": "max_grad_norm",
    "max_length": Taken("max_sequence_length", same=(None,)),
    "metrics_to_show_in_rich_pbar": "progress_metrics",
    "peft_config": "lora",
    "repo_id": "model",
    "dataset_name": "train_data",
    "dataset_split": "train_data.split",
    "auto_shard_states": Ignored("the `mesh` of a pipeline or of `rlhf train` says how", (True,), done=True),
    "aux_loss_enabled": Taken("router_aux_loss_coef", _balance, same=(False,)),
    "attn_mechanism": Taken("attention", _attention, same=(None,)),
    "backend": Taken("platform", _platform, same=(None,)),
    "custom_scheduler": Taken("scheduler", same=(None,), wins=True),
    "dataloader_pin_memory": Ignored(_PINNED, (False, None)),
    "do_eval": Taken("max_evaluation_steps", _zero_if_false, wins=True),
    "do_last_save": Taken("checkpoints.last"),
    "do_train": Taken("max_training_steps", _zero_if_false, wins=True),
    "esurge_hbm_utilization": Ignored(_ESURGE, (0.45, None)),
    "esurge_max_num_seqs": Ignored(_ESURGE, (None,)),
    "esurge_min_input_pad": Ignored(_ESURGE, (None,)),
    "esurge_page_size": Ignored(_ESURGE, (32, None)),
    "esurge_silent_mode": Ignored(_ESURGE, (True,)),
    "esurge_use_tqdm": Ignored(_ESURGE, (True,)),
    "generation_interval": Taken("previews.every"),
    "generation_prompts": Taken("previews.prompts", lambda value: value or None, same=([], None)),
    "generation_use_train_prompts": Taken("previews.from_data", same=(None, False)),
    "generation_dataset_prompt_field": Taken("previews.prompt_column", same=(None, "prompt")),
    "generation_num_prompts": Taken("previews.count", same=(None, 1)),
    "generation_num_return_sequences": Taken("previews.num_return", same=(None,)),
    "generation_max_new_tokens": Taken("previews.max_new_tokens", same=(None,)),
    "generation_temperature": Taken("previews.temperature", same=(None,)),
    "generation_do_sample": Taken(
        "previews.temperature", lambda value: 0.0 if value is False else None, same=(None, True)
    ),
    "generation_top_k": Taken("previews.top_k", lambda value: value or None, same=(None, 0)),
    "generation_top_p": Taken("previews.top_p", same=(None,)),
    "generation_seed": Taken("previews.seed", same=(None,)),
    "generation_extra_kwargs": Taken("previews.sampling", _sampling, same=(None, {})),
    "generation_config_overrides": Taken("previews.sampling", _sampling, same=(None, {})),
    "generation_preview_print": Taken("previews.print", same=(None, False)),
    "generation_log_to_wandb": Taken("previews.log", same=(None, True, False)),
    "generation_shard_inputs": Ignored("prompts of previews are spread over the devices", (True,), done=True),
    "grain_shard_count": Ignored(_SHARDS, (None,), done=True),
    "grain_shard_index": Ignored(_SHARDS, (None,), done=True),
    "ids_to_pop_from_dataset": Taken("drop_columns", same=(None,)),
    "init_tx": Ignored(
        "a stage starts with a fresh optimizer state, and resumes with its own", (True,), done=True
    ),
    "is_fine_tuning": Ignored("a stage trains any model, however it was trained before", (True,), done=True),
    "jax_distributed_config": Ignored(
        "JAX's own start-up joins the processes of SLURM, Open MPI, Kubernetes and TPU jobs", (None,)
    ),
    "loss_config": Ignored("the loss and its options are `loss = { name = …, … }`", (None,)),
    "low_mem_usage": Ignored(
        "weights are read shard by shard, and the state is donated to every update", (True,), done=True
    ),
    "model_name": Taken("run_name", same=(None, "")),
    "model_parameters": Taken("model", lambda value: value or None, same=(None, {})),
    "offload_dataset": Ignored(_HOST, (True, False), done=True),
    "offload_device_index": Ignored(_HOST, (0,), done=True),
    "offload_device_type": Ignored(_HOST, ("cpu",), done=True),
    "per_epoch_evaluation_steps": Taken("max_evaluation_steps", _steps, smaller=True),
    "process_zero_is_admin": Taken("log_all_workers", _true_if_false, wins=True),
    "pruning_module": Ignored(_SPARSE, (None,)),
    "remove_ckpt_after_load": Taken("checkpoints.remove_loaded"),
    "remove_unused_columns": Ignored(
        "columns that a trainer does not use are not read; GRPO's rewards are given all of them",
        (True, False),
        done=True,
    ),
    "resume_if_possible": Taken("checkpoints.resume"),
    "save_optimizer_state": Taken("checkpoints.optimizer_state"),
    "sparse_module_type": Ignored(_SPARSE, ("bcoo",)),
    "sparsify_module": Ignored(_SPARSE, (False,)),
    "state_apply_fn_kwarguments_to_model": Ignored("models take no further arguments", (None, {})),
    "step_partition_spec": Ignored(
        "rows are split over `mesh`, each of them over its axis context (sp)", (None,)
    ),
    "step_start_point": Taken("checkpoints.start"),
    "train_on_inputs": Ignored(
        "reward models train on whole completions, SFT on completions and whole `text` rows"
    ),
    "tx_mu_dtype": Taken("optimizer.mu_dtype", _dtype),
    "use_data_collactor": Ignored(_COLLATOR, (True,), done=True),
    "use_data_collator": Ignored(_COLLATOR, (True,), done=True),
    "use_esurge_generation": Ignored(_ESURGE, (True, False)),
    "use_grain": Ignored("grain makes the order of the examples", (True,), done=True),
    "weight_distribution_log_steps": Taken("log_weights.every", lambda value: value or None),
    "weight_distribution_pattern": Taken("log_weights.pattern", same=(None, ".*")),
    "adam_beta1": Refused("optimizer.b1"),
    "adam_beta2": Refused("optimizer.b2"),
    "adam_epsilon": Refused("optimizer.eps"),
    "bf16": Refused("dtype"),
    "chat_template_path": Refused("chat_template"),
    "data_seed": Refused("shuffle_seed_train"),
    "dataset_text_field": Refused("columns"),
    "environment_factory": Refused("environment"),
    "eval_steps": Refused("evaluation_steps"),
    "eval_strategy": Refused("evaluation_steps"),
    "generation_batch_size": Refused("steps_per_generation"),
    "gradient_checkpointing": Refused("remat"),
    "label_smoothing_factor": Refused("loss.label_smoothing"),
    "logging_steps": Refused("log_steps"),
    "lr_scheduler_type": Refused("scheduler"),
    "max_steps": Refused("max_training_steps"),
    "max_tool_calling_iterations": Refused("environment.max_turns"),
    "model_name_or_path": Refused("model"),
    "multi_objective_aggregation": Refused("advantage"),
    "num_generations_eval": Refused("evaluation.num_generations"),
    "optim": Refused("optimizer"),
    "optim_args": Refused("optimizer"),
    "output_dir": Refused("save_directory"),
    "per_device_eval_batch_size": Refused("eval_batch_size"),
    "per_device_train_batch_size": Refused("total_batch_size"),
    "report_to": Refused("logger"),
    "reward_funcs": Refused("rewards"),
    "save_strategy": Refused("save_steps"),
    "shuffle_dataset": Refused("shuffle_train_dataset"),
    "use_vllm": Refused("sampler"),
    "vllm_importance_sampling_clip_max": Refused("sampler_correction.max"),
    "vllm_importance_sampling_clip_min": Refused("sampler_correction.min"),
    "vllm_importance_sampling_correction": Refused("sampler_correction"),
    "vllm_importance_sampling_mode": Refused("sampler_correction.mode"),
    "warmup_ratio": Refused("warmup_steps"),
    "batch_size": Refused("total_batch_size"),
    "epochs": Refused("num_train_epochs"),
    "eval_dataset": Refused("eval_data"),
    "lr": Refused("learning_rate"),
    "max_new_tokens": Refused("sampling.max_completion_length"),
    "num_epochs": Refused("num_train_epochs"),
    "reward_functions": Refused("rewards"),
    "train_batch_size": Refused("total_batch_size"),
    "train_dataset": Refused("train_data"),
    "activation_offloading": Refused(
        "activations that would take much memory are recomputed in the backward pass: `remat`"
    ),
    "assistant_only_loss": Refused(_LEARNED),
    "completion_only_loss": Refused(_LEARNED),
    "deepspeed": Refused(_MESH),
    "eos_token": Refused(_SPECIAL),
    "eval_packing": Refused(_PACKED),
    "fp16": Refused("computation is in bfloat16 or float32: `dtype`"),
    "fsdp": Refused(_MESH),
    "hub_model_id": Refused(_UPLOAD),
    "model_init_kwargs": Refused(
        "config.json says how a model is built, a table `model = { model_type = …, … }` a fresh one"
    ),
    "packing": Refused(_PACKED),
    "packing_strategy": Refused(_PACKED),
    "pad_to_multiple_of": Refused("examples are packed into rows of a few fixed lengths"),
    "pad_token": Refused(_SPECIAL),
    "padding_free": Refused(_PACKED),
    "push_to_hub": Refused(_UPLOAD),
    "resume_from_checkpoint": Refused(_BEGIN),
    "torch_compile": Refused("every update is a compiled program"),
    "trust_remote_code": Refused("no code that comes with a model is run; a plugin adds a model family"),
}
