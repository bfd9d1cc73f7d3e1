"""Names of EasyDeL, TRL and PEFT: one table of what is typed, and what it becomes.

What is said of values that do not fit: tests/mistakes/settings.py.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from rlhf_compat import HERE, NOTHING

from rlhf_core import InputError, TrainerConfig

EASYDEL: dict[str, Any] = {
    "auto_shard_states": True,
    "aux_loss_enabled": False,
    "backend": None,
    "clip_grad": None,
    "custom_scheduler": None,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": False,
    "dataset_num_proc": None,
    "disable_dropout": True,
    "do_eval": True,
    "do_last_save": True,
    "do_train": True,
    "esurge_hbm_utilization": 0.45,
    "esurge_max_num_seqs": None,
    "esurge_min_input_pad": None,
    "esurge_page_size": 32,
    "esurge_silent_mode": True,
    "esurge_use_tqdm": True,
    "eval_batch_size": None,
    "evaluation_steps": None,
    "extra_optimizer_kwargs": {},
    "force_step_start_point": False,
    "frozen_parameters": None,
    "generation_config_overrides": None,
    "generation_dataset_prompt_field": "prompt",
    "generation_do_sample": None,
    "generation_extra_kwargs": None,
    "generation_interval": None,
    "generation_log_to_wandb": True,
    "generation_max_new_tokens": None,
    "generation_num_prompts": 1,
    "generation_num_return_sequences": None,
    "generation_preview_print": False,
    "generation_prompts": [],
    "generation_seed": None,
    "generation_shard_inputs": True,
    "generation_temperature": None,
    "generation_top_k": None,
    "generation_top_p": None,
    "generation_use_train_prompts": False,
    "grain_shard_count": None,
    "grain_shard_index": None,
    "gradient_accumulation_steps": 1,
    "ids_to_pop_from_dataset": None,
    "init_tx": True,
    "is_fine_tuning": True,
    "jax_distributed_config": None,
    "learning_rate": 5e-5,
    "learning_rate_end": None,
    "log_all_workers": False,
    "log_grad_norms": False,
    "log_steps": 10,
    "loss_config": None,
    "low_mem_usage": True,
    "max_evaluation_steps": None,
    "max_sequence_length": 1024,
    "max_training_steps": None,
    "metrics_to_show_in_rich_pbar": None,
    "model_name": None,
    "model_parameters": None,
    "num_train_epochs": 10,
    "offload_dataset": False,
    "offload_device_index": 0,
    "offload_device_type": "cpu",
    "optimizer": "adamw",
    "per_epoch_evaluation_steps": None,
    "per_epoch_training_steps": None,
    "performance_mode": False,
    "process_zero_is_admin": True,
    "progress_bar_type": "tqdm",
    "pruning_module": None,
    "remove_ckpt_after_load": False,
    "remove_unused_columns": False,
    "report_metrics": True,
    "resume_if_possible": True,
    "save_directory": "EasyDeL-Checkpoints",
    "save_interval_minutes": None,
    "save_optimizer_state": True,
    "save_steps": None,
    "save_total_limit": None,
    "scheduler": "none",
    "shuffle_seed_train": 64871,
    "shuffle_train_dataset": True,
    "sparse_module_type": "bcoo",
    "sparsify_module": False,
    "state_apply_fn_kwarguments_to_model": None,
    "step_start_point": None,
    "total_batch_size": 32,
    "track_memory": False,
    "training_time_limit": None,
    "trainer_prefix": None,
    "truncation_mode": "keep_end",
    "tx_mu_dtype": None,
    "use_data_collactor": True,
    "use_data_collator": True,
    "use_esurge_generation": True,
    "use_grain": True,
    "use_wandb": True,
    "verbose": True,
    "wandb_entity": None,
    "wandb_name": None,
    "warmup_steps": 0,
    "weight_decay": 0.01,
    "weight_distribution_log_steps": 0,
}
"""EasyDeL's training arguments, each with a value that asks for the behaviour we have anyway."""
SAVED = {name: value for name, value in EASYDEL.items() if name != "max_sequence_length"}
NO_EFFECT = "has no effect here: "
WARNS: dict[str, tuple[Any, str]] = {
    "esurge_hbm_utilization": (0.9, NOTHING["esurge_hbm_utilization"].instead),
    "loss_config": ({"label_smoothing": 0.1}, NOTHING["loss_config"].instead),
    "offload_device_type": ("gpu", NOTHING["offload_device_type"].instead),
    "step_partition_spec": ([["dp"], "sp"], NOTHING["step_partition_spec"].instead),
    "train_on_inputs": (False, NOTHING["train_on_inputs"].instead),
    "generation_temperature": (0.5, "previews.every is not given"),
    "weight_distribution_pattern": ("norm", "log_weights.every is not given"),
    "trainer_config_class": ("DPOConfig", "the file is of a DPOConfig, and is read as a TrainerConfig here"),
}
"""{field of EasyDeL: a value that asks for something that does not happen, what is said of it}."""
BECOMES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"_can_log_metrics": None, "_im_a_hidden_checkpoint_manager": None}, {}),
    ({"_can_log_metrics": False, "use_wandb": True}, {"logger": []}),
    ({"attn_mechanism": "flash_attn2"}, {"attention": {"name": "pallas"}}),
    ({"aux_loss_enabled": True}, {"router_aux_loss_coef": "model"}),
    ({"backend": "cuda"}, {"platform": "gpu"}),
    ({"custom_scheduler": "schedules.py:warm"}, {"scheduler": "schedules.py:warm"}),
    ({"custom_scheduler": "schedules.py:warm", "scheduler": "linear"}, {"scheduler": "schedules.py:warm"}),
    ({"do_eval": False}, {"max_evaluation_steps": 0}),
    ({"do_eval": False, "max_evaluation_steps": 9}, {"max_evaluation_steps": 0}),
    ({"do_eval": None, "max_evaluation_steps": 9}, {"max_evaluation_steps": 9}),
    ({"do_last_save": False}, {"checkpoints.last": False}),
    ({"do_train": False}, {"max_training_steps": 0}),
    ({"do_train": False, "do_eval": True, "max_training_steps": 9}, {"max_training_steps": 0}),
    ({"do_train": False, "per_epoch_training_steps": 7}, {"max_training_steps": 0}),
    ({"do_train": True, "max_training_steps": 9}, {"max_training_steps": 9}),
    ({"extra_optimizer_kwargs": {"b1": 0.8}}, {"optimizer.b1": 0.8}),
    ({"extra_optimizer_kwargs": {}}, {}),
    (
        {"optimizer": "lion", "extra_optimizer_kwargs": {"b2": 0.9}},
        {"optimizer.name": "lion", "optimizer.b2": 0.9},
    ),
    ({"force_step_start_point": True}, {"checkpoints.resume": False}),
    ({"force_step_start_point": True, "resume_if_possible": True}, {"checkpoints.resume": False}),
    ({"generation_interval": 0, "generation_prompts": ["a"], "generation_top_p": 0.9}, {}),
    ({"generation_interval": 5}, {"previews.every": 5, "previews.from_data": None}),
    (
        {"generation_interval": 5, "generation_use_train_prompts": False, "generation_prompts": ["a"]},
        {"previews.every": 5, "previews.prompts": ["a"]},
    ),
    ({"generation_interval": 5, "generation_do_sample": False}, {"previews.temperature": 0.0}),
    (
        {"generation_interval": 5, "generation_extra_kwargs": {"top_k": 3}},
        {"previews.sampling": {"top_k": 3}},
    ),
    ({"previews": {"every": 5}, "generation_use_train_prompts": False}, {"previews.from_data": False}),
    ({"ids_to_pop_from_dataset": ["id"]}, {"drop_columns": ["id"]}),
    ({"max_length": 300}, {"max_sequence_length": 300}),
    ({"max_length": None}, {"max_sequence_length": None}),
    ({"max_length": None, "max_sequence_length": 300}, {"max_sequence_length": 300}),
    ({"max_length": 300, "max_sequence_length": None}, {"max_sequence_length": 300}),
    ({"max_length": 700, "max_sequence_length": 700}, {"max_sequence_length": 700}),
    ({"metrics_to_show_in_rich_pbar": ["loss"]}, {"progress_metrics": ["loss"]}),
    ({"model_name": "m"}, {"run_name": "m"}),
    ({"model_name": "", "run_name": "r", "trainer_prefix": "a"}, {"run_name": "r", "trainer_prefix": "a"}),
    ({"model_parameters": {"model_type": "llama"}}, {"model": {"model_type": "llama"}}),
    ({"per_epoch_evaluation_steps": 3}, {"max_evaluation_steps": 3}),
    ({"per_epoch_evaluation_steps": 3, "max_evaluation_steps": 2}, {"max_evaluation_steps": 2}),
    ({"per_epoch_evaluation_steps": 3, "max_evaluation_steps": 5}, {"max_evaluation_steps": 3}),
    ({"per_epoch_evaluation_steps": 3, "do_eval": False}, {"max_evaluation_steps": 0}),
    ({"per_epoch_evaluation_steps": None, "max_evaluation_steps": 5}, {"max_evaluation_steps": 5}),
    ({"per_epoch_training_steps": 7}, {"max_training_steps": 70}),
    (
        {"per_epoch_training_steps": 7, "num_train_epochs": 2},
        {"max_training_steps": 14, "num_train_epochs": 2},
    ),
    ({"per_epoch_training_steps": 7, "max_training_steps": 20}, {"max_training_steps": 20}),
    (
        {"performance_mode": True, "log_steps": 5, "report_steps": 5, "log_grad_norms": True},
        {"log_steps": 10**9, "report_steps": None, "log_grad_norms": False},
    ),
    ({"process_zero_is_admin": False}, {"log_all_workers": True}),
    ({"remove_ckpt_after_load": True}, {"checkpoints.remove_loaded": True}),
    ({"report_metrics": False, "use_wandb": True}, {"logger": []}),
    ({"resume_if_possible": False}, {"checkpoints.resume": False}),
    ({"save_optimizer_state": False}, {"checkpoints.optimizer_state": False}),
    ({"step_partition_spec": PartitionSpec(("dp", "fsdp"), "sp")}, {}),
    ({"step_partition_spec": [["dp", "fsdp"], "sp"], "train_on_inputs": True}, {}),
    ({"step_start_point": 4}, {"checkpoints.start": 4}),
    ({"trainer_config_class": "TrainerConfig"}, {}),
    ({"tx_mu_dtype": jnp.bfloat16}, {"optimizer.mu_dtype": "bfloat16"}),
    ({"verbose": False}, {"progress_bar_type": "none"}),
    (
        {"use_wandb": True, "wandb_entity": "us", "wandb_name": "first"},
        {"logger": [{"name": "wandb", "entity": "us", "run_name": "first"}]},
    ),
    (
        {"logger": [{"name": "wandb", "project": "p"}], "wandb_name": "first"},
        {"logger": [{"name": "wandb", "project": "p", "run_name": "first"}]},
    ),
    ({"logger": "wandb", "wandb_name": "first"}, {"logger": [{"name": "wandb", "run_name": "first"}]}),
    ({"weight_distribution_log_steps": 50}, {"log_weights.pattern": ".*", "log_weights.every": 50}),
    ({"weight_distribution_pattern": ".*"}, {}),
]
"""[(what is typed for EasyDeL, the fields that it becomes)]; other fields are as by default."""


class EveryTarget(TrainerConfig):
    """A config with the fields of the reward and GRPO trainers that TRL's names map to."""

    loss: str = ""
    rewards: str = ""
    advantage: str = ""
    environment: str = ""
    evaluation: str = ""
    sampler: str = ""
    sampler_correction: str = ""
    sampling: str = ""
    steps_per_generation: int = 1


def read(config: type[TrainerConfig] = TrainerConfig, **data: Any) -> tuple[TrainerConfig, list[str]]:
    """Build a config; return it and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = config(**data)
    return made, [str(each.message) for each in caught]


def inner(config: TrainerConfig, path: str) -> Any:
    """Return the value at a dotted path, as a file would have it."""
    value: Any = config.to_dict()
    for key in path.split("."):
        value = value[key]
    return value


def test_a_file_of_easydel_is_taken_without_a_word() -> None:
    config, said = read(**EASYDEL, trainer_config_class="TrainerConfig", max_length=1024)
    assert said == []
    assert set(config.to_dict()) == set(TrainerConfig.model_fields)
    assert (config.max_grad_norm, config.scheduler, config.previews) == (None, "constant", None)
    assert config.use_wandb
    assert config.shuffle_seed_train == 64871


@pytest.mark.parametrize("name", WARNS)
def test_a_value_without_effect_is_one_warning(name: str) -> None:
    value, why = WARNS[name]
    said = [f"TrainerConfig.{name}: {NO_EFFECT}{why}"]
    assert read(**{name: value})[1] == said
    # In a file of theirs, previews without prompts are off without a word.
    assert read(**{**SAVED, name: value})[1] == ([] if name.startswith("generation") else said)


@pytest.mark.parametrize(("typed", "fields"), BECOMES)
def test_a_name_of_easydel_takes_effect_under_ours(typed: dict[str, Any], fields: dict[str, Any]) -> None:
    config, said = read(**typed)
    assert said == []
    assert {path: inner(config, path) for path in fields} == fields
    default = TrainerConfig().to_dict()
    changed = {name for name, value in config.to_dict().items() if value != default[name]}
    assert changed <= {path.partition(".")[0] for path in fields}


@pytest.mark.parametrize("name", NOTHING)
def test_every_name_without_effect_is_taken(name: str) -> None:
    nothing = NOTHING[name]
    assert read(**{name: "something of their own"})[1] == [
        f"TrainerConfig.{name}: {NO_EFFECT}{nothing.instead}"
    ]
    for value in nothing.unset:
        assert read(**{name: value})[1] == []


@pytest.mark.parametrize("name", HERE)
def test_a_name_of_trl_is_an_error_that_says_what_to_write(name: str) -> None:
    with pytest.raises(InputError) as caught:
        EveryTarget(**{name: 1})
    here = HERE[name] if " " in HERE[name] else f"it is {HERE[name]}"
    assert caught.value.problems == (f"EveryTarget.{name}: unknown field. Here {here}",)


def test_names_change_a_config_too() -> None:
    config = (
        TrainerConfig(max_training_steps=9).replace(do_train=None, model_name="a").replace(model_name="b")
    )
    assert (config.max_training_steps, config.full_name) == (9, "b")
    assert TrainerConfig(previews={"every": 5}).replace(generation_interval=0).previews is None
    config = TrainerConfig(use_wandb=True, wandb_name="first").replace(wandb_name="second")
    assert [logger.to_dict() for logger in config.logger] == [{"name": "wandb", "run_name": "second"}]
    assert TrainerConfig(extra_optimizer_kwargs={"b1": 0.8}).replace(
        extra_optimizer_kwargs={"b1": 0.7}
    ).optimizer.options == {"b1": 0.7}
    for make in (TrainerConfig().replace, lambda **given: TrainerConfig.from_dict(given)):
        with pytest.warns(UserWarning, match=r"^TrainerConfig\.pruning_module: has no effect here") as caught:
            make(pruning_module="x")
        assert caught[0].filename == __file__  # the line that gave it


def test_a_trainer_s_own_field_is_not_taken_from_it() -> None:
    class Config(TrainerConfig):
        generation_num_prompts: int = 3
        max_steps: int = 3

    config, said = read(Config, generation_num_prompts=4, max_steps=4)
    assert said == []
    assert (config.to_dict()["generation_num_prompts"], config.to_dict()["max_steps"]) == (4, 4)
