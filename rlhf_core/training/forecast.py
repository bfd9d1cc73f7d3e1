"""Forecast a stage from its data and the shapes of its model, without computing anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core import data, optimizers
from rlhf_core.config.warnings import batch_warnings, config_warnings
from rlhf_core.contracts import Forecast
from rlhf_core.models.lora import linear_modules
from rlhf_core.packing.layout import MICRO_BATCH_TOKENS
from rlhf_core.packing.trees import lengths_of, sizes_of
from rlhf_core.training.memory import definition_of, frozen_bytes, memory_forecast, training_bytes
from rlhf_core.training.open import (
    asked_lora,
    default_warnings,
    error_context,
    open_records,
    require_model,
    stop_warnings,
)

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.models import Definition, Head
    from rlhf_core.packing.trees import Tree
    from rlhf_core.stage import Stage


def forecast_lines(
    config: TrainerConfig,
    stage: Stage,
    *,
    unit: str,
    head: Head,
    open_data: Callable[..., Any],
    frozen_models: Mapping[str, Any] = {},
) -> Forecast:
    """Forecast training on a fixed dataset: examples, updates, epochs, tokens, memory, and the config's warnings.

    unit: what an example is called, such as "pairs". open_data: called as `open_texts` is; returns an object with
    `__len__`, `report`, `trees()` and `where(i)`. frozen_models: {name: directory, hub name or table} of models that
    are read beside the one that is trained, such as a teacher. Without the model's tokenizer rows are counted, not
    tokenised.
    """
    require_model(config, stage, head=head)
    tokenizer = stage.inputs.get("tokenizer")
    if tokenizer is None:
        records = open_records(config, stage, "train_data")
        assert records is not None
        count, examples = len(records), f"{len(records):,} {unit} before length limits"
    else:
        with error_context(stage, "train_data"):
            encoded = open_data(config, stage, tokenizer, "train_data")
        with error_context(stage, "eval_data"):
            held_out = open_data(config, stage, tokenizer, "eval_data", needed=False)
        count, examples = len(encoded), str(encoded.report)
        if held_out is not None and not held_out.report.all_as_given:
            examples += f"; eval_data: {held_out.report}"
    total = data.count_updates(
        count, config.total_batch_size, config.num_train_epochs, config.max_training_steps
    )
    drawn = data.count_examples(
        count, config.total_batch_size, config.num_train_epochs, config.max_training_steps
    )
    tokens = f"at most {drawn * config.max_sequence_length:,} tokens"
    update_tokens, longest = config.total_batch_size * config.max_sequence_length, config.max_sequence_length
    if tokenizer is not None:
        trees = encoded.trees()
        sizes = sizes_of(trees)
        tokens = f"about {round(drawn / count * int(sizes.sum())):,} tokens, shared prompts once"
        update_tokens, longest = round(int(sizes.sum()) / count * config.total_batch_size), int(sizes.max())
    endless = [] if tokenizer is None else [f"model: {line}" for line in stop_warnings(config, tokenizer)]
    memory = Forecast()
    if (found := training_memory(config, stage, head, total, update_tokens, longest)) is not None:
        definition, hf_config, parts = found
        parts |= frozen_bytes(frozen_models, config, stage, parts["parameters"])
        memory = memory_forecast(parts, config.dtype, stage.planned_mesh)
        if tokenizer is not None:
            with error_context(stage, "model"):
                data.require_vocabulary(trees, encoded.where, definition.vocab_size)
            examples += _beyond_positions(hf_config.get("max_position_embeddings"), trees)
    each = min(config.total_batch_size, drawn)  # an update holds no more than the data of all epochs
    updates = f"{total:,} update{'s'[: total > 1]} of {each} {unit}, {drawn / count:.2f} epochs"
    return Forecast(
        (examples, updates, tokens, *memory.lines),
        (
            *endless,
            *memory.warnings,
            *default_warnings(config, stage),
            *batch_warnings(config, count),
            *config_warnings(config, total),
        ),
    )


def _beyond_positions(positions: Any, trees: Sequence[Tree]) -> str:
    """Describe the examples longer than the model's positions; "" without any."""
    lengths = lengths_of(trees)
    if not isinstance(positions, int) or (longest := int(lengths.max())) <= positions:
        return ""
    count = int((lengths > positions).sum())
    return (
        f"; {count:,} of up to {longest:,} tokens, more than the {positions:,} positions the model was made for: set "
        f"max_sequence_length = {positions}"
    )


def training_memory(
    config: TrainerConfig, stage: Stage, head: Head, total: int, update_tokens: int, longest: int
) -> tuple[Definition, Mapping[str, Any], dict[str, int]] | None:
    """Return the stage's model definition, its config.json, and the bytes that training takes, by part.

    total: updates. update_tokens: per update. longest: tokens of the longest row. Bytes are the sum over devices, or
    per device of `stage.planned_mesh`. Returns None where nothing local describes the model. Raises InputError for a
    model that could not be built.
    """
    described = definition_of(
        config.model,
        head,
        stage.inputs.get("tokenizer"),
        stage.registry,
        dtype=config.dtype,
        remat=config.remat,
    )
    if described is None:
        return None
    definition, hf_config = described
    if config.lora is not None:
        modules = linear_modules(definition.abstract_params())
        definition = definition.with_lora(asked_lora(config.lora, modules))
    slots = min(MICRO_BATCH_TOKENS, -(-update_tokens // config.gradient_accumulation_steps))
    tx = optimizers.make_optimizer(config, stage.registry, total)[0]
    shape = (-(-slots // longest), longest)
    return (
        definition,
        hf_config,
        training_bytes(definition, tx, shape, config.frozen_parameters, stage.planned_mesh),
    )
