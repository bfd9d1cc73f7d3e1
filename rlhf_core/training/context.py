"""Open what a stage's config and inputs name, for a trainer's `build`: on the stage's devices, or as shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from rlhf_core import data
from rlhf_core.config.warnings import batch_warnings
from rlhf_core.data import Pairs, Texts
from rlhf_core.fit.batches import DatasetUpdates, choose_row_layout
from rlhf_core.mesh import planned_mesh
from rlhf_core.models import Definition, Model, load_model
from rlhf_core.packing.trees import lengths_of, sizes_of
from rlhf_core.training.attention import choose_attention
from rlhf_core.training.held_out import HeldOut
from rlhf_core.training.memory import model_of_shapes
from rlhf_core.training.open import (
    default_warnings,
    error_context,
    open_model,
    open_pairs,
    open_records,
    open_texts,
    require_model,
    stop_warnings,
    warn,
)

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.models import Head
    from rlhf_core.packing.trees import Trees
    from rlhf_core.stage import Stage

UNITS: Mapping[type, str] = {Texts: "demonstrations", Pairs: "pairs"}
"""What an example is called in a forecast."""


class ModelNotHereError(Exception):
    """Raised during a check where a build cannot go on, since this machine has no model or tokenizer yet.

    Everything that the data and the config alone show has been counted by then.
    """


@dataclass
class Expected:
    """What a source of updates will do, as far as its data and the config show.

    lines: of a forecast: what there is to train on, updates, tokens. later: lines that follow the memory.
    updates: of the whole run. tokens: of an update. longest: tokens of the longest row.
    examples: of an update.
    held: {part: bytes per device} of what is in memory beside the state, from the model and the bytes of its
        parameters. source: what a compiler needs to know of a source that samples.
    """

    lines: list[str]
    updates: int
    tokens: int
    longest: int
    later: Sequence[str] = ()
    held: Callable[[Definition, int], Mapping[str, int]] = lambda *_: {}
    source: Any = None
    examples: int = 0


class Context:
    """What a trainer's `build` opens models and data with.

    name, seed, registry: of the stage. mesh: the stage's devices, or, where `shapes`, a description of devices.
    shapes: the stage is only checked or compiled for: models have shapes in place of parameters, warnings are collected
        in `warnings`, and what will happen in `expected`.
    """

    def __init__(self, config: TrainerConfig, stage: Stage, *, shapes: bool = False) -> None:
        self.config, self.stage, self.shapes = config, stage, shapes
        self.name, self.seed, self.registry = stage.name, stage.seed, stage.registry
        self.mesh: Any = stage.mesh or stage.planned_mesh or planned_mesh(1)
        self.tokenizer: Any = stage.inputs.get("tokenizer")
        self.warnings: list[str] = []
        self.expected: list[Expected] = []
        self.missing = False
        """Whether this machine lacks a model or its tokenizer, so that a build ends once its data are counted."""
        self.notes: list[str] = []
        """What a forecast's line about examples ends with."""

    @property
    def has_devices(self) -> bool:
        """Whether rows can be laid out for the devices: those of a check without `--on` are not known."""
        return isinstance(self.mesh, Mesh)

    def by(self, config: TrainerConfig) -> Context:
        """Return this context for another config of the same stage, such as one of a part of its examples."""
        changed = copy.copy(self)
        changed.config = config
        return changed

    def warn(self, *lines: str) -> None:
        """Warn of lines that begin with a field."""
        if self.shapes:
            self.warnings += lines
        else:
            warn(self.stage, lines)

    def say(self, line: str) -> None:
        """Print a line on stderr, unless the stage is only checked."""
        if not self.shapes:
            self.stage.say(line)

    def ahead(self, start: Callable[..., object], *args: Any) -> None:
        """Call what starts to compile in the background, unless the stage is only checked."""
        if not self.shapes:
            start(*args)

    def try_loss(self, measure: Callable[..., Any], *inputs: Any) -> None:
        """Raise InputError where a loss fails for inputs of these shapes, before anything is loaded or trained."""
        if self.shapes:
            with error_context(self.stage, "loss"):
                jax.eval_shape(measure, *inputs)

    def model(self, head: Head) -> Model:
        """Open the model that the stage starts from: an object, a directory or hub name, or a table for a fresh one.

        head: "lm" or "score". Parameters of an object are copied, since training donates them.
        """
        if not self.shapes:
            model = open_model(self.config, self.stage, head=head)
            self.tokenizer = model.tokenizer
            return model
        if not self.has_devices:  # devices to compile for are chosen before weights are fetched
            require_model(self.config, self.stage, head=head)
        self.warn(*default_warnings(self.config, self.stage))
        return self._of_shapes(self.config.model, head)

    def other_model(self, source: Any, **options: Any) -> Model:
        """Load a language model that is read beside the one that is trained, such as a teacher, adapters merged.

        source: a directory or hub name. options: of `load_model`.
        """
        if not self.shapes:
            mesh, registry = self.stage.devices(), self.registry
            return load_model(source, "lm", mesh=mesh, registry=registry, **options).merged()
        made_from = self.stage.inputs.get("sources", {}).get(source, source)
        return self._of_shapes(made_from, "lm", adapters=False)

    def _of_shapes(self, source: Any, head: Head, **options: Any) -> Model:
        model = model_of_shapes(source, head, self.config, self.stage, self.mesh, **options)
        self.missing = self.missing or model.definition is None or self.tokenizer is None
        return model

    @overload
    def texts(self, field: Literal["train_data"], **options: Any) -> Texts: ...
    @overload
    def texts(self, field: str, **options: Any) -> Texts | None: ...
    def texts(self, field: str, **options: Any) -> Texts | None:
        """Tokenise the demonstrations of `train_data` or of `eval_data`, which may not be given: None.

        options: `values`, columns of numbers, which an objective reads as `batch.sequence_values[column]`.
        Raises InputError for rows that are not demonstrations, and for those without these numbers.
        """
        texts: Texts | None = self._rows(open_texts, Texts, field, options)
        return texts

    @overload
    def pairs(self, field: Literal["train_data"], **options: Any) -> Pairs: ...
    @overload
    def pairs(self, field: str, **options: Any) -> Pairs | None: ...
    def pairs(self, field: str, **options: Any) -> Pairs | None:
        """Tokenise the preference pairs of `train_data` or of `eval_data`, which may not be given: None.

        options: of `rlhf_core.training.open.open_pairs`. Raises InputError for rows that are not pairs, and for
        training data without a pair that differs.
        """
        pairs: Pairs | None = self._rows(open_pairs, Pairs, field, options)
        return pairs

    def _rows(self, open_rows: Any, kind: type, field: str, options: Mapping[str, Any]) -> Any:
        needed = field == "train_data"
        if self.tokenizer is None:
            records = open_records(self.config, self.stage, field, needed=needed)
            assert records is not None
            report = f"{len(records):,} {UNITS[kind]} before length limits"
            self._expect(UNITS[kind], len(records), report)
        with error_context(self.stage, field):
            rows = open_rows(self.config, self.stage, self.tokenizer, field, needed=needed, **options)
        if self.shapes and rows is not None:
            if needed:
                self.warn(*(f"model: {line}" for line in stop_warnings(self.config, self.tokenizer)))
                self._expect(UNITS[kind], len(rows), str(rows.report), sizes_of(rows.trees()))
            elif not rows.report.all_as_given:
                self.notes.append(f"; {field}: {rows.report}")
        return rows

    def _expect(self, unit: str, count: int, report: str, sizes: NDArray[np.int64] | None = None) -> None:
        """Count the examples, updates and tokens of training rows; end the build where the model is not here.

        sizes: int64 [rows], tokens; None: not known.
        """
        config, longest = self.config, self.config.max_sequence_length
        limits = (config.total_batch_size, config.num_train_epochs, config.max_training_steps)
        total, drawn = data.count_updates(count, *limits), data.count_examples(count, *limits)
        each = min(config.total_batch_size, drawn)  # an update holds no more than the data of all epochs
        per_update, tokens = config.total_batch_size * longest, f"at most {drawn * longest:,} tokens"
        if sizes is not None:
            longest, every = int(sizes.max()), int(sizes.sum())
            per_update = round(every / count * config.total_batch_size)
            tokens = f"about {round(drawn / count * every):,} tokens, shared prompts once"
        updates = f"{total:,} update{'s'[: total > 1]} of {each} {unit}, {drawn / count:.2f} epochs"
        self.expect(Expected([report, updates, tokens], total, per_update, longest, examples=each))

    def expect(self, expected: Expected) -> None:
        """Add what a source of updates will do. Raises ModelNotHereError where the build cannot go on."""
        self.expected.append(expected)
        if self.missing:
            raise ModelNotHereError

    def updates(
        self,
        model: Model,
        rows: Texts | Pairs,
        trees: Trees | None = None,
        *,
        reads_tokens: bool,
        sequence_names: Sequence[str] = (),
        group: int = 1,
    ) -> tuple[Model, DatasetUpdates]:
        """Draw updates from rows; return the model with the attention that suits them, and the source of updates.

        trees: of the rows, one each; None: `rows.trees()`. reads_tokens: whether the objective reads values of trained
        tokens. sequence_names: values of the trees that micro-batches carry. group: branches that stay in one row.
        Raises InputError naming the rows with tokens that the model has no embedding for.
        """
        trees = rows.trees() if trees is None else trees
        with error_context(self.stage, "model"):
            data.require_vocabulary(trees, rows.where, model.definition.vocab_size)
        self._note_positions(model, trees)
        self.warn(*batch_warnings(self.config, len(trees)))
        layout: Any = None
        if self.has_devices:
            width = model.definition.hidden_size
            layout = choose_row_layout(trees, self.config, self.mesh, width, reads_tokens=reads_tokens)
            model = choose_attention(model, self.config, self.stage, trees, layout, group=group)
        return model, DatasetUpdates(
            trees,
            self.config,
            layout,
            seed=self.seed,
            data=rows,
            sequence_names=sequence_names,
            group=group,
        )

    def _note_positions(self, model: Model, trees: Trees) -> None:
        """Note the examples longer than the model's positions."""
        positions, lengths = model.hf_config.get("max_position_embeddings"), lengths_of(trees)
        if self.shapes and isinstance(positions, int) and (longest := int(lengths.max())) > positions:
            count = int((lengths > positions).sum())
            self.notes.append(
                f"; {count:,} of up to {longest:,} tokens, more than the {positions:,} positions the model was made "
                f"for: set max_sequence_length = {positions}"
            )

    def held_out(
        self, model: Model, rows: Texts | Pairs, trees: Trees | None = None, **options: Any
    ) -> HeldOut:
        """Hold the rows of `eval_data` for evaluations, packed once. options: of `HeldOut`."""
        return HeldOut(self, model, rows, rows.trees() if trees is None else trees, **options)
