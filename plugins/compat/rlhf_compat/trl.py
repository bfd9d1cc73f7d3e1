"""The fields of TRL's configs, and of the transformers' TrainingArguments that they extend: what to write here.

They are errors, since values and defaults differ. A field of the same name is no entry: it is known to the trainer, and
nobody asks. `docs/reference/coming_from.md` is checked against the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core import Refused, TrainerConfig

_ATTENTION = "programs are compiled and fused by XLA, and `attention` chooses the kernels"
_AVERAGES = "a loss is averaged over all examples or tokens of an update, however it is split"
_BEGIN = "a run resumes from its newest checkpoint, if there is one: `checkpoints`"
_CACHED = "completions are sampled with a cache always"
_COMPILED = "every update is a compiled program"
_CONSOLE = 'the console shows what `progress_bar_type` says; "none": nothing but warnings'
_CPU = 'JAX chooses the devices: set JAX_PLATFORMS=cpu; `platform = "cpu"` refuses others'
_DISCARDED = "metrics of an evaluation are summed on the devices; no logits are kept or gathered"
_DTYPE = "computation is in bfloat16 or float32: `dtype`"
_ENGINE = 'an engine is started by itself; `sampler = { name = "vllm", urls = […] }` says where'
_ENTROPY = "the weight of the entropy is fixed: `entropy_coef`"
_FORM = "completions are sampled from the whole distribution; `rewards` may judge their form"
_LABELS = "single completions with labels, which these weigh, are what the trainer `kto` learns from"
_LEARNED = "a row's layout decides: replies of `messages` are learned, a `completion` without its prompt, all of `text`"
_MEMORY = "activations that would take much memory are recomputed in the backward pass: `remat`"
_JUDGED = "a judge gives each completion a number, and is an entry of `rewards`: the reward `judge`"
_MESH = "`mesh` of the pipeline says how states are sharded"
_NF4 = 'matrices in 4 bits are `lora = { base = "nf4" }`, without options'
_ONE_LOSS = "a stage has one loss, `loss = { name = …, … }`; a plugin adds others"
_OVERLAP = "batches are made while the device computes; `dataloader_num_workers` says by how many processes"
_PACKED = "examples are packed into rows without padding, and do not see each other"
_PAD = "examples are packed into rows of a few fixed lengths"
_PROCESSES = "JAX's own start-up joins the processes of SLURM, Open MPI, Kubernetes and TPU jobs"
_PROFILE = "JAX's own flags look for such errors: JAX_DEBUG_NANS=true, JAX_LOG_COMPILES=true"
_REFERENCE = "the reference is the model that training starts from"
_SAMPLER = "the component that `sampler` names samples completions"
_SCORES = "`compute_metrics` gets the scores of pairs"
_SPECIAL = "the tokenizer's files say what it is"
_STREAMED = "files that do not fit into memory are streamed; `shuffle_buffer` says how they are shuffled"
_TOGETHER = "all processes write one checkpoint together, into a directory that all of them see"
_UPLOAD = "training uploads nothing; afterwards `rlhf export MODEL --push OWNER/NAME` does, with a model card"
_WEIGHTED = "the log-probabilities of the reference are computed once, before the first update"

HERE: Mapping[str, str] = {
    # The model, and what is trained of it.
    "model_name_or_path": "model",
    "attn_implementation": "attention",
    "torch_dtype": "dtype",
    "use_peft": "lora",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.targets",
    "lora_target_parameters": "lora.targets",
    "use_rslora": "lora.use_rslora",
    "load_in_4bit": "lora.base",
    "load_in_8bit": "lora.base",
    "bnb_4bit_quant_type": "lora.base",
    "use_bnb_nested_quant": _NF4,
    "bnb_4bit_quant_storage": _NF4,
    "lora_modules_to_save": "adapters are trained alone; without `lora`, all that `frozen_parameters` leaves",
    "lora_task_type": "the trainer decides what a model is for",
    "use_dora": "adapters are plain LoRA, or rank-stabilised: `lora.use_rslora`",
    "model_init_kwargs": (
        "config.json says how a model is built, a table `model = { model_type = …, … }` a fresh one"
    ),
    "trust_remote_code": "no code that comes with a model is run; a plugin adds a model family",
    "cast_lm_head_to_fp32": "logits and losses are float32 always",
    "use_cache": _CACHED,
    "cache_implementation": _CACHED,
    "neftune_noise_alpha": "no noise is added to embeddings; adapters have `lora.dropout`",
    # The tokenizer and the data.
    "chat_template_path": "chat_template",
    "eos_token": _SPECIAL,
    "pad_token": _SPECIAL,
    "dataset_text_field": "columns",
    "dataset_config": "train_data",
    "dataset_train_split": "train_data",
    "dataset_test_split": "eval_data",
    "test_split_size": "eval_data",
    "datasets": "train_data",
    "dataset_kwargs": "rows are read as they are; a table `train_data = { name = …, … }` has options of the data",
    "dataset_batch_size": _OVERLAP,
    "dataset_streaming": _STREAMED,
    "streaming": _STREAMED,
    "shuffle_dataset": "shuffle_train_dataset",
    "data_seed": "shuffle_seed_train",
    "train_sampling_strategy": "rows are shuffled every epoch, or keep their order: `shuffle_train_dataset`",
    "group_by_length": _PACKED,
    "length_column_name": _PACKED,
    "packing": _PACKED,
    "packing_strategy": _PACKED,
    "padding_free": _PACKED,
    "eval_packing": _PACKED,
    "pad_to_multiple_of": _PAD,
    "label_names": "a trainer knows the columns that it reads: `columns` maps others to them",
    "assistant_only_loss": _LEARNED,
    "completion_only_loss": _LEARNED,
    "max_prompt_length": "a pair or a row is limited as a whole: `max_sequence_length`",
    "dataloader_drop_last": "updates run across the ends of epochs: all but the last are whole, and no row is left out",
    "dataloader_persistent_workers": _OVERLAP,
    "dataloader_prefetch_factor": _OVERLAP,
    "dataloader_multiprocessing_context": _OVERLAP,
    "dataloader_in_order": "rows come in the same order, whatever the number of processes",
    "ignore_data_skip": "a resumed run goes on with the row after its checkpoint",
    # Batches and epochs.
    "per_device_train_batch_size": "total_batch_size",
    "per_gpu_train_batch_size": "total_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "per_gpu_eval_batch_size": "eval_batch_size",
    "auto_find_batch_size": "`rlhf check` says what a batch takes; `gradient_accumulation_steps` makes it fit",
    "split_batches": "`total_batch_size` counts over all devices",
    "average_tokens_across_devices": _AVERAGES,
    "max_steps": "max_training_steps",
    # The optimizer and the schedule.
    "optim": "optimizer",
    "optim_args": "optimizer",
    "optim_target_modules": "an optimizer works on all trained parameters; `frozen_parameters` leaves some out",
    "adafactor": 'write `optimizer = "adafactor"`',
    "adam_beta1": "optimizer.b1",
    "adam_beta2": "optimizer.b2",
    "adam_epsilon": "optimizer.eps",
    "lr_scheduler_type": "scheduler",
    "lr_scheduler_kwargs": 'write `learning_rate_end` and `warmup_steps`, or `scheduler = "module:function"`',
    "warmup_ratio": "warmup_steps",
    "label_smoothing_factor": "loss.label_smoothing",
    # Numbers, memory and speed.
    "bf16": "dtype",
    "fp16": _DTYPE,
    "bf16_full_eval": _DTYPE,
    "fp16_full_eval": _DTYPE,
    "fp16_backend": _DTYPE,
    "fp16_opt_level": _DTYPE,
    "half_precision_backend": _DTYPE,
    "tf32": "the environment variable JAX_DEFAULT_MATMUL_PRECISION says how float32 is multiplied",
    "gradient_checkpointing": "remat",
    "gradient_checkpointing_kwargs": "remat",
    "activation_checkpointing": "remat",
    "activation_checkpointing_kwargs": "remat",
    "activation_offloading": _MEMORY,
    "use_liger_kernel": _ATTENTION,
    "use_liger_loss": _ATTENTION,
    "liger_kernel_config": _ATTENTION,
    "jit_mode_eval": _COMPILED,
    "torch_compile": _COMPILED,
    "torch_compile_backend": _COMPILED,
    "torch_compile_mode": _COMPILED,
    "torchdynamo": _COMPILED,
    "use_ipex": _COMPILED,
    "torch_empty_cache_steps": "XLA plans the memory of a program when it compiles it",
    "skip_memory_metrics": "track_memory",
    # Devices and processes.
    "use_cpu": _CPU,
    "no_cuda": _CPU,
    "use_mps_device": "JAX chooses the devices: the environment variable JAX_PLATFORMS names others",
    "tpu_num_cores": "JAX takes all devices that it finds",
    "accelerator_config": _MESH,
    "parallelism_config": _MESH,
    "deepspeed": _MESH,
    "ds3_gather_for_generation": _MESH,
    "fsdp": _MESH,
    "fsdp_config": _MESH,
    "fsdp_min_num_params": _MESH,
    "fsdp_transformer_layer_cls_to_wrap": _MESH,
    "mp_parameters": _MESH,
    "ddp_backend": _PROCESSES,
    "ddp_broadcast_buffers": _PROCESSES,
    "ddp_bucket_cap_mb": _PROCESSES,
    "ddp_find_unused_parameters": _PROCESSES,
    "ddp_static_graph": _PROCESSES,
    "ddp_timeout": _PROCESSES,
    "ignore_bias_buffers": _PROCESSES,
    "local_rank": _PROCESSES,
    "ray_scope": "one stage is trained at a time; runs of several configs are runs of their own",
    "full_determinism": (
        "`seed` decides all that is random; XLA_FLAGS=--xla_gpu_deterministic_ops=true fixes the order of sums on GPUs"
    ),
    "debug": _PROFILE,
    "tpu_metrics_debug": _PROFILE,
    # Evaluation.
    "eval_strategy": "evaluation_steps",
    "evaluation_strategy": "evaluation_steps",
    "eval_steps": "evaluation_steps",
    "eval_delay": "evaluations come every `evaluation_steps` updates from the beginning, and at the end",
    "eval_accumulation_steps": _DISCARDED,
    "eval_do_concat_batches": _DISCARDED,
    "eval_use_gather_object": _DISCARDED,
    "batch_eval_metrics": _DISCARDED,
    "prediction_loss_only": _DISCARDED,
    "include_for_metrics": _SCORES,
    "include_inputs_for_metrics": _SCORES,
    "do_predict": "afterwards `rlhf score MODEL FILE` and `rlhf generate MODEL FILE` do",
    "past_index": "no outputs are carried from one batch to the next",
    # Logs.
    "logging_steps": "log_steps",
    "logging_strategy": "log_steps",
    "logging_dir": "files are written to `dir` of the pipeline, or `save_directory`; `logger` names what else is",
    "logging_first_step": "metrics are written every `log_steps` updates; `log_steps = 1` has the first",
    "logging_nan_inf_filter": "values that are not finite are null in metrics.jsonl, and such an update is not applied",
    "log_on_each_node": "log_all_workers",
    "log_level": _CONSOLE,
    "log_level_replica": _CONSOLE,
    "disable_tqdm": "progress_bar_type",
    "include_num_input_tokens_seen": "`num_tokens` is logged always",
    "include_tokens_per_second": "`tokens_per_second` is logged always",
    "report_to": "logger",
    "project": "logger",
    "trackio_space_id": "logger",
    "trackio_bucket_id": "logger",
    "trackio_static_space_id": "logger",
    # Checkpoints and files.
    "output_dir": "save_directory",
    "overwrite_output_dir": "a run resumes what it finds; `checkpoints = { resume = false }` starts over",
    "resume_from_checkpoint": _BEGIN,
    "restore_callback_states_from_checkpoint": "a resumed run goes on with its trainer's state; callbacks begin anew",
    "enable_jit_checkpoint": "a run that gets SIGTERM saves its state, and the same command goes on",
    "save_strategy": "save_steps",
    "save_only_model": "checkpoints.optimizer_state",
    "save_safetensors": "models are written as safetensors always",
    "save_on_each_node": _TOGETHER,
    "push_to_hub": _UPLOAD,
    "push_to_hub_model_id": _UPLOAD,
    "push_to_hub_organization": _UPLOAD,
    "push_to_hub_token": _UPLOAD,
    "hub_always_push": _UPLOAD,
    "hub_model_id": _UPLOAD,
    "hub_private_repo": _UPLOAD,
    "hub_revision": _UPLOAD,
    "hub_strategy": _UPLOAD,
    "hub_token": _UPLOAD,
    # SFTConfig, DPOConfig, KTOConfig.
    "precompute_ref_log_probs": _WEIGHTED,
    "precompute_ref_batch_size": _WEIGHTED,
    "reference_free": _REFERENCE,
    "force_use_ref_model": _REFERENCE,
    "model_adapter_name": _REFERENCE,
    "ref_adapter_name": _REFERENCE,
    "f_divergence_type": _ONE_LOSS,
    "f_alpha_divergence_coef": _ONE_LOSS,
    "discopop_tau": _ONE_LOSS,
    "ld_alpha": _ONE_LOSS,
    "loss_weights": _ONE_LOSS,
    "rpo_alpha": _ONE_LOSS,
    "use_weighting": _ONE_LOSS,
    "desirable_weight": _LABELS,
    "undesirable_weight": _LABELS,
    # CPOConfig, ORPOConfig.
    "cpo_alpha": "loss.alpha",
    "simpo_gamma": "loss.gamma",
    "generate_during_eval": "previews",
    "max_completion_length": "max_sequence_length",
    "alpha": "AlphaPO is not here; `loss.alpha` is the weight of CPO's likelihood, `lora.alpha` the scale of adapters",
    "is_encoder_decoder": "models are decoders",
    "padding_value": _PAD,
    # GRPOConfig.
    "reward_funcs": "rewards",
    "environment_factory": "environment",
    "max_tool_calling_iterations": "environment.max_turns",
    "generation_batch_size": "steps_per_generation",
    "generation_kwargs": "sampling",
    "num_generations_eval": "evaluation.num_generations",
    "multi_objective_aggregation": "advantage",
    "off_policy_mask_threshold": "sampler_correction",
    "vespo_k_pos": _ONE_LOSS,
    "vespo_k_neg": _ONE_LOSS,
    "vespo_lambda_pos": _ONE_LOSS,
    "vespo_lambda_neg": _ONE_LOSS,
    "use_adaptive_entropy": _ENTROPY,
    "entropy_coef_delta": _ENTROPY,
    "entropy_coef_max": _ENTROPY,
    "entropy_coef_min": _ENTROPY,
    "entropy_target": _ENTROPY,
    "log_completions_hub_repo": _UPLOAD,
    "log_multimodal": "models read and write text alone",
    "log_unique_prompts": "`log_completions` shows completions of different prompts",
    "use_transformers_paged": _SAMPLER,
    "use_transformers_continuous_batching": _SAMPLER,
    "transformers_continuous_batching_config": _SAMPLER,
    "use_vllm": "sampler",
    "vllm_server_base_url": "sampler.urls",
    "vllm_server_host": "sampler.urls",
    "vllm_server_port": "sampler.urls",
    "vllm_server_timeout": "sampler.timeout",
    "vllm_group_port": "sampler.weights",
    "vllm_enable_sleep_mode": _ENGINE,
    "vllm_gpu_memory_utilization": _ENGINE,
    "vllm_max_model_length": _ENGINE,
    "vllm_mode": _ENGINE,
    "vllm_model_impl": _ENGINE,
    "vllm_tensor_parallel_size": _ENGINE,
    "vllm_guided_decoding_regex": _FORM,
    "vllm_structured_outputs_regex": _FORM,
    "vllm_importance_sampling_cap": "sampler_correction.max",
    "vllm_importance_sampling_clip_max": "sampler_correction.max",
    "vllm_importance_sampling_clip_min": "sampler_correction.min",
    "vllm_importance_sampling_correction": "sampler_correction",
    "vllm_importance_sampling_mode": "sampler_correction.mode",
    # OnlineDPOConfig.
    "judge": _JUDGED,
    "missing_eos_penalty": "a reward function gets `completion_ids`, which end with a stop token or were cut",
    "reward_model_path": "rewards",
    # What people type that is no name of another library's config.
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
"""{field of theirs: the dotted path of ours, or a sentence on what happens here}."""

LORA: Mapping[str, str] = {
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "layers_to_transform": "targets",
}
"""{field of PEFT's LoraConfig: ours, in the table `lora`}."""


def translate(config_class: type[TrainerConfig], unknown: Mapping[str, Any]) -> dict[str, Refused]:
    """Say what to write for each name."""
    answers = {}
    for name in unknown:
        here = HERE.get(name)
        if here is None:
            continue
        if " " in here:
            answers[name] = Refused(f"unknown field. Here {here}")
        elif here.partition(".")[0] in config_class.model_fields:
            answers[name] = Refused(here)
        else:
            elsewhere = f"unknown field. Elsewhere it is {here}, which {config_class.__name__} does not have"
            answers[name] = Refused(elsewhere)
    return answers
