"""Configs written for EasyDeL and TRL: accepted fields, warnings and refusals."""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp
import pytest

from rlhf_core.config import Ignored, Refused, TrainerConfig, parse_value
from rlhf_core.errors import InputError

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
ASKS_FOR_MORE: dict[str, Any] = {
    "esurge_hbm_utilization": 0.9,
    "loss_config": {"label_smoothing": 0.1},
    "offload_device_type": "gpu",
    "step_partition_spec": [["dp", "fsdp"], "sp"],
    "train_on_inputs": True,
}
"""Values that ask for another behaviour."""
TAKES_EFFECT: dict[str, tuple[Any, dict[str, Any]]] = {
    "aux_loss_enabled": (True, {"router_aux_loss_coef": "model"}),
    "attn_mechanism": ("flash_attn2", {"attention.name": "pallas"}),
    "backend": ("cuda", {"platform": "gpu"}),
    "model_parameters": ({"model_type": "llama"}, {"model.model_type": "llama"}),
    "process_zero_is_admin": (False, {"log_all_workers": True}),
    "custom_scheduler": ("schedules.py:warm", {"scheduler": "schedules.py:warm"}),
    "do_eval": (False, {"max_evaluation_steps": 0}),
    "do_train": (False, {"max_training_steps": 0}),
    "do_last_save": (False, {"checkpoints.last": False}),
    "force_step_start_point": (True, {"checkpoints.resume": False}),
    "ids_to_pop_from_dataset": (["id"], {"drop_columns": ["id"]}),
    "max_length": (None, {"max_sequence_length": None}),
    "model_name": ("m", {"run_name": "m"}),
    "per_epoch_evaluation_steps": (3, {"max_evaluation_steps": 3}),
    "per_epoch_training_steps": (7, {"max_training_steps": 70}),
    "performance_mode": (True, {"log_steps": 10**9}),
    "remove_ckpt_after_load": (True, {"checkpoints.remove_loaded": True}),
    "report_steps": (5, {"report_steps": 5}),
    "resume_if_possible": (False, {"checkpoints.resume": False}),
    "save_optimizer_state": (False, {"checkpoints.optimizer_state": False}),
    "step_start_point": (4, {"checkpoints.start": 4}),
    "trainer_prefix": ("reward", {"trainer_prefix": "reward"}),
    "tx_mu_dtype": (jnp.bfloat16, {"optimizer.mu_dtype": "bfloat16"}),
    "weight_distribution_log_steps": (50, {"log_weights.pattern": ".*", "log_weights.every": 50}),
    "weight_distribution_pattern": (".*", {}),
    "verbose": (False, {"progress_bar_type": "none"}),
}
"""{field: (a value of theirs, what it becomes)}."""


IGNORED = {
    name: each
    for name, each in TrainerConfig.other_names().items()
    if isinstance(each, Ignored) and name not in TrainerConfig.model_fields
}
REFUSED = {
    name: each.write for name, each in TrainerConfig.other_names().items() if isinstance(each, Refused)
}


def flat(table: dict[str, Any], head: str = "") -> dict[str, Any]:
    """Return {"table.field": value}."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= flat(value, f"{head}{name}.") if isinstance(value, dict) and value else {head + name: value}
    return found


def said(config: type[TrainerConfig] = TrainerConfig, **data: Any) -> list[str]:
    """Collect the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config(**data)
    return [str(each.message) for each in caught]


def test_what_happens_anyway_is_taken_without_a_word() -> None:
    assert said(**EASYDEL) == []


def test_every_other_value_is_one_warning_that_says_what_happens_instead() -> None:
    found = said(**(EASYDEL | ASKS_FOR_MORE))
    assert sorted(found) == sorted(
        f"TrainerConfig.{name}: has no effect here: {IGNORED[name].instead}" for name in ASKS_FOR_MORE
    )


@pytest.mark.parametrize("name", TAKES_EFFECT)
def test_a_field_of_theirs_takes_effect_under_our_name(name: str) -> None:
    value, ours = TAKES_EFFECT[name]
    given = {k: v for k, v in EASYDEL.items() if name != "max_length" or k != "max_sequence_length"}
    found = flat(TrainerConfig(**{**given, name: value}).to_dict())
    plain = flat(TrainerConfig(**given).to_dict())
    changed = {key: x for key, x in found.items() if plain.get(key) != x}
    assert changed == (flat(ours) if ours else {})


def test_a_name_and_a_prefix_are_one_name_and_a_shorter_run_wins() -> None:
    config = TrainerConfig(trainer_prefix="reward", model_name="first")
    assert (config.full_name, config.model_name, config.trainer_prefix) == ("reward-first", "first", "reward")
    assert config.replace(trainer_prefix="b").replace(trainer_prefix="c").full_name == "c-first"
    assert TrainerConfig(trainer_prefix="", model_name="").full_name is None
    assert TrainerConfig(trainer_prefix="", model_name="m").full_name == "m"
    assert TrainerConfig(run_name="r", model_name="").full_name == "r"
    assert TrainerConfig(report_metrics=False, use_wandb=True).logger == []
    assert TrainerConfig(do_train=False, do_eval=True, max_training_steps=9).max_training_steps == 0
    assert TrainerConfig(per_epoch_training_steps=7, max_training_steps=20).max_training_steps == 20


def test_values_of_other_libraries_are_not_reinterpreted() -> None:
    with pytest.warns(UserWarning, match="has no effect here"):
        config = TrainerConfig(**(EASYDEL | ASKS_FOR_MORE))
    assert set(config.to_dict()) == set(TrainerConfig.model_fields)
    assert (config.max_grad_norm, config.scheduler) == (None, "constant")
    assert config.use_wandb
    assert config.shuffle_seed_train == 64871


@pytest.mark.parametrize("name", IGNORED)
def test_every_field_of_the_table_can_be_given(name: str) -> None:
    instead, same, _ = IGNORED[name]
    assert said(**{name: "something of their own"}) == [
        f"TrainerConfig.{name}: has no effect here: {instead}"
    ]
    for value in same:
        assert said(**{name: value}) == []
    assert name not in TrainerConfig.names()


def test_a_trainer_s_own_field_is_not_taken_from_it() -> None:
    class Config(TrainerConfig):
        generation_num_prompts: int = 3

    assert said(Config, generation_num_prompts=4) == []
    assert Config(generation_num_prompts=4).generation_num_prompts == 4


def test_replace_says_it_too() -> None:
    for make in (TrainerConfig().replace, lambda **given: TrainerConfig.from_dict(given)):
        with pytest.warns(UserWarning, match=r"^TrainerConfig\.pruning_module: has no effect here") as caught:
            make(pruning_module="x")
        assert caught[0].filename == __file__  # the line that gave it


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


def test_a_file_that_easydel_saved_is_taken() -> None:
    saved = EASYDEL | {"trainer_config_class": "TrainerConfig", "max_sequence_length": 700, "max_length": 700}
    assert said(**saved) == []
    assert TrainerConfig(**saved).max_sequence_length == 700
    without = {k: v for k, v in EASYDEL.items() if k != "max_sequence_length"}
    assert TrainerConfig(**without).max_sequence_length == 1024
    assert TrainerConfig(max_sequence_length=None, max_length=None).max_sequence_length is None
    assert TrainerConfig(max_length=300, max_sequence_length=None).max_sequence_length == 300
    assert TrainerConfig(max_length=None, max_sequence_length=300).max_sequence_length == 300


@pytest.mark.parametrize("name", ["do_train", "do_eval"])
def test_whether_to_train_and_to_evaluate_is_true_or_false(name: str) -> None:
    field = {"do_train": "max_training_steps", "do_eval": "max_evaluation_steps"}[name]
    for value, found in ((None, 9), (True, 9), (False, 0)):
        assert getattr(TrainerConfig(**{field: 9, name: value}), field) == found
    assert getattr(TrainerConfig(**{field: 9}).replace(**{name: None}), field) == 9


def test_the_smaller_number_of_batches_is_evaluated() -> None:
    for given, found in (({}, 3), ({"max_evaluation_steps": 2}, 2), ({"max_evaluation_steps": 5}, 3)):
        assert TrainerConfig(per_epoch_evaluation_steps=3, **given).max_evaluation_steps == found
        assert TrainerConfig(per_epoch_evaluation_steps=3, do_eval=False, **given).max_evaluation_steps == 0
    assert TrainerConfig(per_epoch_evaluation_steps=None, max_evaluation_steps=5).max_evaluation_steps == 5


def test_previews_are_off_without_an_interval_and_without_prompts() -> None:
    shown = {"generation_prompts": ["a"], "generation_top_p": 0.9}
    assert TrainerConfig(generation_interval=0, **shown).previews is None
    assert TrainerConfig(previews={"every": 5}).replace(generation_interval=0).previews is None
    none: dict[str, Any] = {"generation_use_train_prompts": False, "generation_interval": 5}
    with pytest.warns(UserWarning, match="has no effect"):
        assert TrainerConfig(**none).previews is None
    assert TrainerConfig(**none, **shown).previews.prompts == ["a"]
    table = TrainerConfig(previews={"every": 5}, generation_use_train_prompts=False).previews
    assert table.from_data is False
    assert TrainerConfig(generation_interval=5).previews.from_data is None


def test_none_is_a_word_where_it_is_a_value() -> None:
    config = TrainerConfig(remat=parse_value("none"), progress_bar_type=parse_value("none"))
    assert (config.remat, config.progress_bar_type) == ("none", "none")


@pytest.mark.parametrize("name", REFUSED)
def test_names_of_others_are_errors_that_say_what_to_write(name: str) -> None:
    with pytest.raises(InputError) as caught:
        EveryTarget(**{name: 1})
    here = REFUSED[name] if " " in REFUSED[name] else f"it is {REFUSED[name]}"
    assert caught.value.problems == (f"EveryTarget.{name}: unknown field. Here {here}",)
