"""What a stage would do, told from its data and the shapes of its model: nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core import data, optimizers
from rlhf_core.config.warnings import advise
from rlhf_core.models.lora import linear_modules
from rlhf_core.packing.layout import MICRO_BATCH_TOKENS
from rlhf_core.packing.trees import lengths_of, sizes_of
from rlhf_core.training.memory import definition_of, memory_lines, training_bytes
from rlhf_core.training.open import asked_lora, open_records, require_model, told_of

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.models import Definition, Head
    from rlhf_core.packing.trees import Tree
    from rlhf_core.stage import Stage


def plan_lines(
    config: TrainerConfig, stage: Stage, *, unit: str, head: Head, encode: Callable[[str], Any] | None
) -> Sequence[str]:
    """The lines of a plan that every trainer over a fixed dataset shares: examples, updates, epochs, tokens, memory.

    encode: tokenises `train_data` or `eval_data` and returns `data.Texts`, `data.Pairs`, or an object of one's own with
    their `__len__`, `report`, `trees()` and `where(i)`, None for a field that is not given; raises InputError for
    every row that does not fit. encode=None where the model's tokenizer is not at hand: rows are only counted.
    """
    require_model(config, stage, head=head)
    if encode is None:
        records = open_records(config, stage, "train_data")
        assert records is not None
        count, said = len(records), f"{len(records):,} {unit} before length limits"
    else:
        with told_of(stage, "train_data"):
            encoded = encode("train_data")
        with told_of(stage, "eval_data"):
            encode("eval_data")
        count, said = len(encoded), str(encoded.report)
    total = data.updates(count, config.total_batch_size, config.num_train_epochs, config.max_training_steps)
    epochs = total * config.total_batch_size / count
    tokens = f"at most {total * config.total_batch_size * config.max_sequence_length:,} tokens"
    update_tokens, longest = config.total_batch_size * config.max_sequence_length, config.max_sequence_length
    if encode is not None:
        trees = encoded.trees()
        sizes = sizes_of(trees)
        tokens = f"about {round(epochs * int(sizes.sum())):,} tokens, shared prompts once"
        update_tokens, longest = round(int(sizes.sum()) / count * config.total_batch_size), int(sizes.max())
    memory = training_memory(config, stage, head, total, update_tokens, longest)
    if memory is not None and encode is not None:
        with told_of(stage, "model"):
            data.require_vocabulary(trees, encoded.where, memory[0].vocab_size)
        said += _beyond(memory[1].get("max_position_embeddings"), trees)
    return [
        said,
        f"{total:,} updates of {config.total_batch_size} {unit}, {epochs:.2f} epochs",
        tokens,
        *([] if memory is None else memory_lines(memory[2], config.dtype, stage.planned_mesh)),
        *(f"warning: {line}" for line in advise(config, total)),
    ]


def _beyond(positions: Any, trees: Sequence[Tree]) -> str:
    """What is to be said of examples longer than those that the model was made for."""
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
    """The stage's model by definition and config.json, and the bytes that training it takes, in all or on each device
    of `stage.planned_mesh`; None where nothing local describes it.

    total: updates. update_tokens: of one update. longest: tokens of the longest row. Raises InputError for a model
    that could not be built.
    """
    found = definition_of(
        config.model,
        head,
        stage.inputs.get("tokenizer"),
        stage.registry,
        dtype=config.dtype,
        remat=config.remat,
    )
    if found is None:
        return None
    definition, hf_config = found
    if config.lora is not None:
        modules = linear_modules(definition.abstract_params())
        definition = definition.with_lora(asked_lora(config.lora, modules))
    slots = min(MICRO_BATCH_TOKENS, -(-update_tokens // config.gradient_accumulation_steps))
    tx = optimizers.make_optimizer(config, stage.registry, total)[0]
    return (
        definition,
        hf_config,
        training_bytes(
            definition, tx, (-(-slots // longest), longest), config.frozen_parameters, stage.planned_mesh
        ),
    )
