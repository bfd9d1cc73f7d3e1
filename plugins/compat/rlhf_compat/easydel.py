"""The fields of EasyDeL's configs: each is another name of a field, or has no effect.

`docs/reference/coming_from.md` is checked against these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from rlhf_core import Alias, NoEffect, Refused, TrainerConfig

Answer = Alias | Sequence[Alias] | NoEffect | Refused
NEVER = 10**9
"""Updates between two rows of a run that logs its last update alone."""


class Field(NamedTuple):
    """A name whose value is taken for a field, or for an entry of its table.

    path: dotted. convert: makes our value of theirs, or raises ValueError; None: as if the name were not given.
    unset: values that a file of theirs holds by default: they give way to our field, and ask for no table.
    wins: whether other values go before our field, where both are given.
    """

    path: str
    convert: Callable[[Any], Any] | None = None
    unset: tuple[Any, ...] = ()
    wins: bool = False


class Nothing(NamedTuple):
    """A name without effect.

    instead: what happens, for any value. unset: values that ask for that, and give no warning.
    done: whether what the name is for is done anyway; else it is not done.
    """

    instead: str
    unset: tuple[Any, ...] = ()
    done: bool = False


def _dtype(value: Any) -> Any:
    """Name a dtype that is given as an object, such as `jnp.bfloat16`."""
    if value is None or isinstance(value, str):
        return value
    import numpy as np

    return np.dtype(value).name


def _sampling(value: Any) -> Any:
    """Rename the entries of a table of generation options to names used here; none and an empty table: no change."""
    if not isinstance(value, Mapping):
        return value
    renamed = {"max_new_tokens": "max_completion_length"}
    return {renamed.get(key, key): entry for key, entry in value.items()} or None


MECHANISMS = {
    "auto": ("auto",),
    "xla": ("vanilla", "sdpa"),
    "blocks": ("blockwise",),
    "pallas": ("flash_attn2", "splash", "blocksparse"),
    "cudnn": ("cudnn", "cuda_flash_attn2"),
}
"""{attention function here: EasyDeL's names}."""


def _attention(value: Any) -> Any:
    """Return the attention function here that EasyDeL's mechanism corresponds to; other names are left unchanged."""
    name = str(getattr(value, "value", value)).lower()
    return next((ours for ours, theirs in MECHANISMS.items() if name in theirs), value)


def _platform(value: Any) -> Any:
    """Name a platform as jax does: `cuda` and `rocm` are its `gpu`."""
    name = value.lower() if isinstance(value, str) else value
    return "gpu" if name in ("cuda", "rocm") else name


def _is_false(value: Any) -> bool:
    """Tell false from true and none. Raises ValueError for anything else."""
    if not isinstance(value, bool | None):
        raise ValueError(f"expected true or false, got {_shown(value)}")
    return value is False


def _zero_if_false(value: Any) -> int | None:
    return 0 if _is_false(value) else None


def _true_if_false(value: Any) -> bool | None:
    return True if _is_false(value) else None


def _balance(value: Any) -> Any:
    """Read whether a model's experts are balanced by its own weight. Raises ValueError for anything else."""
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {_shown(value)}")
    return "model" if value else 0.0


def _filled(value: Any) -> Any:
    """Read what is empty, or 0, as not given."""
    return value or None


def _greedy_if_false(value: Any) -> float | None:
    return 0.0 if value is False else None


def _shown(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else repr(value)


FIELDS: Mapping[str, Field] = {
    "attn_mechanism": Field("attention", _attention, unset=(None,)),
    "aux_loss_enabled": Field("router_aux_loss_coef", _balance, unset=(False,)),
    "backend": Field("platform", _platform, unset=(None,)),
    "custom_scheduler": Field("scheduler", unset=(None,), wins=True),
    "do_eval": Field("max_evaluation_steps", _zero_if_false, wins=True),
    "do_last_save": Field("checkpoints.last"),
    "do_train": Field("max_training_steps", _zero_if_false, wins=True),
    "generation_config_overrides": Field("previews.sampling", _sampling, unset=(None, {})),
    "generation_dataset_prompt_field": Field("previews.prompt_column", unset=(None, "prompt")),
    "generation_extra_kwargs": Field("previews.sampling", _sampling, unset=(None, {})),
    "generation_interval": Field("previews.every"),
    "generation_log_to_wandb": Field("previews.log", unset=(None, True, False)),
    "generation_max_new_tokens": Field("previews.max_new_tokens", unset=(None,)),
    "generation_num_prompts": Field("previews.count", unset=(None, 1)),
    "generation_num_return_sequences": Field("previews.num_return", unset=(None,)),
    "generation_preview_print": Field("previews.print", unset=(None, False)),
    "generation_prompts": Field("previews.prompts", _filled, unset=([], None)),
    "generation_seed": Field("previews.seed", unset=(None,)),
    "generation_temperature": Field("previews.temperature", unset=(None,)),
    "generation_do_sample": Field("previews.temperature", _greedy_if_false, unset=(None, True)),
    "generation_top_k": Field("previews.top_k", _filled, unset=(None, 0)),
    "generation_top_p": Field("previews.top_p", unset=(None,)),
    "generation_use_train_prompts": Field("previews.from_data", unset=(None, False)),
    "ids_to_pop_from_dataset": Field("drop_columns", unset=(None,)),
    "max_length": Field("max_sequence_length", unset=(None,)),
    "metrics_to_show_in_rich_pbar": Field("progress_metrics", unset=(None,)),
    "model_name": Field("run_name", unset=(None, "")),
    "model_parameters": Field("model", _filled, unset=(None, {})),
    "process_zero_is_admin": Field("log_all_workers", _true_if_false, wins=True),
    "remove_ckpt_after_load": Field("checkpoints.remove_loaded"),
    "resume_if_possible": Field("checkpoints.resume"),
    "save_optimizer_state": Field("checkpoints.optimizer_state"),
    "step_start_point": Field("checkpoints.start"),
    "tx_mu_dtype": Field("optimizer.mu_dtype", _dtype),
    "weight_distribution_log_steps": Field("log_weights.every", _filled),
    "weight_distribution_pattern": Field("log_weights.pattern", unset=(None, ".*")),
}

ASKED_BY = {"previews": ("every", "prompts", "from_data"), "log_weights": ("every",)}
"""{table: its entries that ask for it}: a file of theirs has the others of a table that nobody asked for, too."""

_COLLATOR = "examples are packed into rows without padding; there is no other way of batching"
_ESURGE = "the component that `sampler` names samples completions"
_HOST = "token ids stay in host memory, batches go to the device one at a time"
_SHARDS = "the mesh determines the share of a batch that each process reads"
_SPARSE = "parameters are dense arrays"

NOTHING: Mapping[str, Nothing] = {
    "_im_a_hidden_checkpoint_manager": Nothing("a run keeps its checkpoints itself", (None,), done=True),
    "auto_shard_states": Nothing("the `mesh` of a pipeline or of `rlhf train` says how", (True,), done=True),
    "dataloader_pin_memory": Nothing(
        "batches are made between updates, while the device computes", (False, None)
    ),
    "esurge_hbm_utilization": Nothing(_ESURGE, (0.45, None)),
    "esurge_max_num_seqs": Nothing(_ESURGE, (None,)),
    "esurge_min_input_pad": Nothing(_ESURGE, (None,)),
    "esurge_page_size": Nothing(_ESURGE, (32, None)),
    "esurge_silent_mode": Nothing(_ESURGE, (True,)),
    "esurge_use_tqdm": Nothing(_ESURGE, (True,)),
    "generation_shard_inputs": Nothing("prompts of previews are spread over the devices", (True,), done=True),
    "grain_shard_count": Nothing(_SHARDS, (None,), done=True),
    "grain_shard_index": Nothing(_SHARDS, (None,), done=True),
    "init_tx": Nothing(
        "a stage starts with a fresh optimizer state, and resumes with its own", (True,), done=True
    ),
    "is_fine_tuning": Nothing("a stage trains any model, however it was trained before", (True,), done=True),
    "jax_distributed_config": Nothing(
        "JAX's own start-up joins the processes of SLURM, Open MPI, Kubernetes and TPU jobs", (None,)
    ),
    "loss_config": Nothing("the loss and its options are `loss = { name = …, … }`", (None,)),
    "low_mem_usage": Nothing(
        "weights are read shard by shard, and the state is donated to every update", (True,), done=True
    ),
    "offload_dataset": Nothing(_HOST, (True, False), done=True),
    "offload_device_index": Nothing(_HOST, (0,), done=True),
    "offload_device_type": Nothing(_HOST, ("cpu",), done=True),
    "pruning_module": Nothing(_SPARSE, (None,)),
    "remove_unused_columns": Nothing(
        "columns that a trainer does not use are not read; GRPO's rewards are given all of them",
        (True, False),
        done=True,
    ),
    "sparse_module_type": Nothing(_SPARSE, ("bcoo",)),
    "sparsify_module": Nothing(_SPARSE, (False,)),
    "state_apply_fn_kwarguments_to_model": Nothing("models take no further arguments", (None, {})),
    "step_partition_spec": Nothing(
        "rows are split over `mesh`, each of them over its axis context (sp)",
        (None, (("dp", "fsdp"), "sp"), "PartitionSpec(('dp', 'fsdp'), 'sp')"),
    ),
    "train_on_inputs": Nothing(
        "reward models train on whole completions, SFT on completions and whole `text` rows", (True,)
    ),
    "use_data_collactor": Nothing(_COLLATOR, (True,), done=True),
    "use_data_collator": Nothing(_COLLATOR, (True,), done=True),
    "use_esurge_generation": Nothing(_ESURGE, (True, False)),
    "use_grain": Nothing("grain makes the order of the examples", (True,), done=True),
}


@dataclass(frozen=True)
class Config:
    """What was typed, and what it changes.

    unknown: fields of theirs. given: ours. base: the config that they are merged into; None: the defaults.
    """

    config_class: type[TrainerConfig]
    unknown: Mapping[str, Any]
    given: Mapping[str, Any]
    base: TrainerConfig | None

    def field(self, name: str) -> Any:
        """Return one of our fields, as given, or as it was."""
        if name in self.given:
            return self.given[name]
        if self.base is not None:
            return getattr(self.base, name)
        return self.config_class.model_fields[name].get_default(call_default_factory=True)


def translate(
    config_class: type[TrainerConfig],
    unknown: Mapping[str, Any],
    given: Mapping[str, Any],
    base: TrainerConfig | None,
) -> dict[str, Answer]:
    """Say what fields of EasyDeL's configs mean, in the order of the tables."""
    if unknown.keys().isdisjoint((*FIELDS, *NOTHING, *RULES)):
        return {}
    config = Config(config_class, unknown, given, base)
    answers: dict[str, Answer] = {}
    for name, field in FIELDS.items():
        if name in unknown:
            answers[name] = _value(name, field, config)
    for name, nothing in NOTHING.items():
        if name in unknown:
            asks = _comparable(unknown[name]) not in nothing.unset
            answers[name] = NoEffect(nothing.instead if asks else "")
    for name, rule in RULES.items():
        if name in unknown:
            answers[name] = rule(unknown[name], config)
    answers |= _previews(config)
    for table in ASKED_BY:
        answers |= _without_table(table, answers, config)
    return answers


def _value(name: str, field: Field, config: Config) -> Answer:
    """Convert a value, where it asks for something."""
    value = config.unknown[name]
    is_whole = "." not in field.path
    if is_whole and field.path in config.given and value in field.unset:
        return NoEffect()
    try:
        converted = value if field.convert is None else field.convert(value)
    except (TypeError, ValueError) as error:
        return Refused(str(error))
    if converted is None:
        # Where theirs may be none, none means something here, too.
        means_none = is_whole and field.convert is None and _may_be_none(config.config_class, field.path)
        if not means_none:
            return NoEffect()
    return Alias(field.path, converted, field.wins)


def _may_be_none(config_class: type[TrainerConfig], field: str) -> bool:
    return type(None) in get_args(config_class.model_fields[field].annotation)


def _comparable(value: Any) -> Any:
    """Make tuples of lists and of JAX's PartitionSpec."""
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        return value
    return tuple(_comparable(part) for part in value)


def _previews(config: Config) -> dict[str, Answer]:
    """Turn previews off where they have no interval, or nothing to complete, as EasyDeL does."""
    unknown = config.unknown
    every = unknown.get("generation_interval")
    silent: dict[str, Answer] = {
        name: NoEffect()
        for name, field in FIELDS.items()
        if field.path.startswith("previews.") and name in unknown
    }
    if every == 0 and not isinstance(every, bool):
        if config.given.get("previews") is not None:
            twice = Refused("0 is no previews, but previews is also given; remove one")
            return {**silent, "generation_interval": twice}
        return {**silent, "generation_interval": Alias("previews", None, wins=True)}
    if unknown.get("generation_use_train_prompts") is not False:
        return {}
    previews = config.field("previews")
    if previews is not None:
        table = config.given.get("previews")
        says = isinstance(table, Mapping) and "from_data" in table
        return {"generation_use_train_prompts": NoEffect()} if says else {}
    if unknown.get("generation_prompts"):
        return {"generation_use_train_prompts": NoEffect()}
    if every is not None:
        silent["generation_interval"] = NoEffect(
            "generation_use_train_prompts is false, and there are no generation_prompts"
        )
    return silent


def _without_table(table: str, answers: Mapping[str, Answer], config: Config) -> dict[str, Answer]:
    """Leave out the entries of a table that nobody asked for; warn of values that are not theirs by default."""
    if table in config.given or config.field(table) is not None:
        return {}
    entries = {
        name: answer.path
        for name, answer in answers.items()
        if isinstance(answer, Alias) and answer.path.startswith(f"{table}.") and answer.value is not None
    }
    if any(f"{table}.{key}" in entries.values() for key in ASKED_BY[table]):
        return {}
    missing = f"{table}.{ASKED_BY[table][0]} is not given"
    return {name: NoEffect("" if config.unknown[name] in FIELDS[name].unset else missing) for name in entries}


def _saved_class(value: Any, config: Config) -> Answer:
    """Compare the class that a saved file names with the one that reads it."""
    ours = config.config_class.__name__
    if value == ours:
        return NoEffect()
    return NoEffect(f"the file is of a {value}, and is read as a {ours} here")


def _on(value: Any, aliases: Sequence[Alias], *, when: bool) -> Answer:
    """Answer a flag that stands for several values, where it is `when`."""
    if value is not None and not isinstance(value, bool):
        return Refused(f"expected true or false, got {_shown(value)}")
    return aliases if value is when else NoEffect()


def _force_start(value: Any, config: Config) -> Answer:
    return _on(value, [Alias("checkpoints.resume", False)], when=True)


def _resume(value: Any, config: Config) -> Answer:
    if config.unknown.get("force_step_start_point") is True:
        return NoEffect()
    return _value("resume_if_possible", FIELDS["resume_if_possible"], config)


def _performance(value: Any, config: Config) -> Answer:
    rows = [Alias("log_steps", NEVER, True), Alias("report_steps", None, True)]
    return _on(value, [*rows, Alias("log_grad_norms", False, True)], when=True)


def _report(value: Any, config: Config) -> Answer:
    return _on(value, [Alias("logger", [], True)], when=False)


def _verbose(value: Any, config: Config) -> Answer:
    return _on(value, [Alias("progress_bar_type", "none", True)], when=False)


def _training_steps(value: Any, config: Config) -> Answer:
    """Multiply the updates of an epoch by the epochs; a smaller max_training_steps holds."""
    if value is None:
        return NoEffect()
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return Refused(f"expected a number of at least 1, got {_shown(value)}")
    epochs = config.field("num_train_epochs")
    if not isinstance(epochs, int | float):
        return NoEffect()  # as validation says
    total = max(1, round(value * epochs))
    limits = [total]
    if isinstance(config.given.get("max_training_steps"), int):
        limits.append(config.given["max_training_steps"])
    if config.unknown.get("do_train") is False:
        limits.append(0)
    return Alias("max_training_steps", min(limits), wins=True)


def _evaluation_steps(value: Any, config: Config) -> Answer:
    """Take batches of an evaluation; of both numbers, the smaller."""
    if value is None:
        return NoEffect()
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return Refused(f"expected a whole number of at least 0, got {_shown(value)}")
    limits = [value]
    given = config.given.get("max_evaluation_steps")
    if isinstance(given, int) and not isinstance(given, bool):
        limits.append(given)
    if config.unknown.get("do_eval") is False:
        limits.append(0)
    return Alias("max_evaluation_steps", min(limits), wins=True)


def _optimizer(value: Any, config: Config) -> Answer:
    if not value:
        return NoEffect()
    if not isinstance(value, Mapping):
        return Refused(f"expected a table, got {_shown(value)}")
    return [Alias(f"optimizer.{key}", option) for key, option in value.items()]


def _wandb(option: str, value: Any, config: Config) -> Answer:
    """Set an option of the logger wandb, where there is one."""
    if value is None:
        return NoEffect()
    loggers = config.field("logger")
    listed = loggers if isinstance(loggers, list | tuple) else [loggers]
    named = "wandb" in [_component_name(logger) for logger in listed]
    logs = config.unknown.get("report_metrics") is not False
    if logs and (config.given.get("use_wandb") is True or named):
        return Alias(f"logger.wandb.{option}", value)
    return NoEffect("use_wandb = true is not given")


def _component_name(component: Any) -> Any:
    if isinstance(component, Mapping):
        return component.get("name")
    return getattr(component, "name", component)


def _wandb_entity(value: Any, config: Config) -> Answer:
    return _wandb("entity", value, config)


def _wandb_name(value: Any, config: Config) -> Answer:
    return _wandb("run_name", value, config)


RULES: Mapping[str, Callable[[Any, Config], Answer]] = {
    "_can_log_metrics": _report,
    "extra_optimizer_kwargs": _optimizer,
    "force_step_start_point": _force_start,
    "per_epoch_evaluation_steps": _evaluation_steps,
    "per_epoch_training_steps": _training_steps,
    "performance_mode": _performance,
    "report_metrics": _report,
    "resume_if_possible": _resume,
    "trainer_config_class": _saved_class,
    "verbose": _verbose,
    "wandb_entity": _wandb_entity,
    "wandb_name": _wandb_name,
}
"""Names that depend on others, or stand for several fields."""
