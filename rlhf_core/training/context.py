"""Open what a stage's config and inputs name, for a trainer's `build`: on the stage's devices, or as shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from rlhf_core import data
from rlhf_core.config.warnings import batch_warnings
from rlhf_core.data import EpisodeRows, Pairs, Prompts, PromptStream, Texts
from rlhf_core.data.columns import require_conversations
from rlhf_core.data.lazy import WHOLE, LazyRecords, LazyRows
from rlhf_core.data.preferences import usable_pairs
from rlhf_core.data.prompts import episode_rows
from rlhf_core.data.records import is_stream, named_sets
from rlhf_core.data.report import first_columns
from rlhf_core.data.texts import usable_texts
from rlhf_core.errors import InputError, counted, suggest, warn
from rlhf_core.fit.batches import DatasetUpdates, LazyUpdates, choose_row_layout
from rlhf_core.fit.evaluation import EvaluationMetrics, evaluation
from rlhf_core.mesh import planned_mesh
from rlhf_core.models import Head, Model, check_model, load_model
from rlhf_core.packing.trees import lengths_of, sizes_of
from rlhf_core.plugins.component import load_function
from rlhf_core.runtime.signals import stop_if_asked
from rlhf_core.scoring import ScoringContract, base_identity
from rlhf_core.stage.text_settings import read_at_of, text_options
from rlhf_core.training.choose_attention import choose_attention
from rlhf_core.training.compute_metrics import OwnMetrics
from rlhf_core.training.expected import Expected, ModelNotHereError, count_training
from rlhf_core.training.held_out import HeldOut
from rlhf_core.training.starting_model import (
    default_warnings,
    error_context,
    model_of_shapes,
    model_source,
    open_model,
    stop_warnings,
)

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh

    from rlhf_core.config import TrainerConfig
    from rlhf_core.data.report import Report
    from rlhf_core.data.streams import LazyStreams
    from rlhf_core.fit.actions import Action
    from rlhf_core.packing.trees import Trees
    from rlhf_core.stage import Stage
    from rlhf_core.state import TrainState
    from rlhf_core.tokenizer.options import ReadAt, TextOptions

Evaluate: TypeAlias = Callable[["TrainState"], dict[str, float]]
"""From a state to the metrics of an evaluation."""


class Context:
    """What a trainer's `build` opens models and data with.

    name, seed, registry: of the stage. mesh: the stage's devices, or, where `shapes`, a description of devices.
    shapes: the stage is only checked or compiled for: models have shapes in place of parameters, warnings are collected
        in `warnings`, and what will happen in `expected`.
    planned: devices to check for, which need not exist; None: the stage's.
    """

    def __init__(
        self,
        config: TrainerConfig,
        stage: Stage,
        *,
        shapes: bool = False,
        planned: AbstractMesh | None = None,
    ) -> None:
        self.config, self.stage, self.shapes, self.planned = config, stage, shapes, planned
        self.name, self.seed, self.registry = stage.name, stage.seed, stage.registry
        self.mesh: Any = stage.mesh or planned or planned_mesh(1)
        self.tokenizer: Any = stage.inputs.get("tokenizer")
        self.warnings: list[str] = []
        self.expected: list[Expected] = []
        self.reads_metrics = False
        """Whether the build calls `own_metrics`."""
        self.missing = False
        """Whether this machine lacks a model or its tokenizer, so that a build ends once its data are counted."""
        self.notes: list[str] = []
        """What a forecast's line about examples ends with."""
        self.held_out_lines: list[str] = []
        """Lines of a forecast about evaluation data that are not used as given."""
        self.told: list[str] = []
        """Warnings of data that a forecast's line about examples has instead."""

    @property
    def has_devices(self) -> bool:
        """Whether rows can be laid out for the devices: those of a check without `--on` are not known."""
        return isinstance(self.mesh, Mesh)

    def by(self, config: TrainerConfig) -> Context:
        """Return this context for another config of the same stage, such as one of a part of its examples."""
        changed = copy.copy(self)
        changed.config = config
        return changed

    def warn(self, *lines: str, first: bool = False) -> None:
        """Warn of lines that begin with a field, on one process. first: a check prints them before its other ones."""
        if self.shapes:
            self.warnings = [*lines, *self.warnings] if first else [*self.warnings, *lines]
            return
        for line in lines if self.stage.is_main else ():
            warn(f"stage '{self.name}'.{line}")

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
        config, stage = self.config, self.stage
        self.warn(*default_warnings(config, stage))
        if not self.shapes:
            model = open_model(config, stage, head=head)
            self.tokenizer = model.tokenizer
            return model
        if not self.has_devices:
            source = model_source(config, stage)
            if isinstance(source, str) and Path(source).exists():
                with error_context(stage, "model"):
                    # Devices that need not exist are chosen before weights are fetched.
                    check_model(source, head, registry=self.registry, needs_weights=self.planned is None)
        return self._of_shapes(config.model, head)

    def other_model(self, source: Any, **options: Any) -> Model:
        """Load a language model that is read but not trained, such as a teacher, adapters merged.

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

    def records(self, field: str, *, episodes: bool = False, first: int | None = None) -> Any:
        """Open the rows of `train_data`, `Records`, or of `eval_data`, which may not be given: None.

        Of a stream, `eval_data` has the rows of `max_evaluation_steps` batches. episodes: whether an environment makes
        the conversations. first: how many rows of a stream to read, where these are enough. Raises InputError for plain
        texts with a `system_prompt`, and for a stream as `train_data` without `first`.
        """
        config, spec = self.config, self._spec(field)
        if spec is None:
            return None
        with error_context(self.stage, field):
            if not is_stream(spec):
                records = data.load(spec, registry=self.registry, columns=config.columns)
            elif field == "train_data" and first is None and not self._only_evaluates:
                raise InputError(
                    "a stream, and all rows are read before the first update here: write them to a file, or leave out "
                    "streaming"
                )
            elif config.max_evaluation_steps is None and first is None:
                raise InputError("a stream, whose length is not known: set max_evaluation_steps")
            else:
                from rlhf_core.data.streams import first_rows, open_streams

                size = config.eval_batch_size or config.total_batch_size
                count = first or size * (config.max_evaluation_steps or 1)
                streams = open_streams(spec, registry=self.registry, columns=config.columns)
                records = first_rows(streams, count)
            if config.drop_columns:
                self._note_absent(field, records.columns)
                records = data.drop_columns(records, config.drop_columns)
            if config.system_prompt is not None and not episodes:
                require_conversations(records.sources)
        return records

    def _note_absent(self, field: str, columns: Sequence[str]) -> None:
        """Warn of columns to drop that the training data do not have."""
        for name in self.config.drop_columns if field == "train_data" else ():
            if name not in columns:
                self.warn(f"drop_columns: {field} has no column '{name}'.{suggest(name, columns)}")

    def evaluations(self, make: Callable[[str], Evaluate | None]) -> list[Action]:
        """Make the evaluation on `eval_data`, or on each of its sets, whose metrics begin with the set's name.

        Returns an action for a build, which is due every `evaluation_steps` updates and at the end; none without rows.

        make: from a field, "eval_data" or that of one set, "eval_data.easy", to its evaluation; None without rows.
        """
        made = {field: make(field) for field in self.eval_fields}
        if list(made) == ["eval_data"]:
            only = made["eval_data"]
            return [] if only is None else [evaluation(only, self.config, self.stage)]

        def evaluate(state: TrainState) -> EvaluationMetrics:
            sets = {field.partition(".")[2]: each for field, each in made.items()}
            return EvaluationMetrics.joined(
                {name: {} if each is None else each(state) for name, each in sets.items()}
            )

        return [evaluation(evaluate, self.config, self.stage)]

    @property
    def _only_evaluates(self) -> bool:
        """Whether nothing is trained and no `train_data` are given."""
        return self.config.max_training_steps == 0 and self._given("train_data") is None

    @property
    def eval_fields(self) -> list[str]:
        """The fields that `texts`, `pairs`, `prompts` and `records` take for held-out rows: one, or one per set."""
        sets = named_sets(self._given("eval_data")) if self.config.max_evaluation_steps != 0 else {}
        return [f"eval_data.{name}" for name in sets] or ["eval_data"]

    def _given(self, field: str) -> Any:
        dataset = self.stage.inputs.get(field.replace("_data", "_dataset"))
        return dataset if dataset is not None else getattr(self.config, field)

    def own_metrics(self, pairs: int = 0) -> OwnMetrics:
        """Open the functions of `compute_metrics` and `metrics`.

        pairs: try them on random scores of so many before training. Raises InputError for one that is not there.
        """
        self.reads_metrics = True
        functions = dict[str, Callable[..., Any]]()
        compute = self.stage.inputs.get("compute_metrics")
        if compute is not None:
            functions[f"stage '{self.name}'.compute_metrics"] = compute
        for i, name in enumerate(self.config.metrics):
            with error_context(self.stage, f"metrics[{i}]"):
                functions[f"stage '{self.name}'.metrics[{i}]"] = load_function(name)
        metrics = OwnMetrics(functions, self.warn)
        if pairs and not self.shapes:
            metrics.try_on(pairs)
        return metrics

    def _spec(self, field: str) -> Any:
        """Return what `train_data` or `eval_data` is; None for `eval_data` that are not given."""
        config, where = self.config, f"stage '{self.name}'.{field}"
        top, _, name = field.partition(".")
        spec = self._given(top)
        if top == "train_data" and self._only_evaluates:
            held_out = self._given(
                "eval_data"
            )  # nothing is trained: the rows that it is evaluated on stand in
            spec = next(iter(named_sets(held_out).values()), held_out)
            if spec is None:
                raise InputError(f"{where}: missing, and so is eval_data: without training, give one of them")
        if top == "eval_data" and config.max_evaluation_steps == 0:
            spec = None
        if name:
            return named_sets(spec)[name]
        if spec is not None and top == "eval_data" and (sets := named_sets(spec)):
            raise InputError(
                f"{where}: several sets, {', '.join(sets)}, and this trainer evaluates one: give one of them"
            )
        if spec is None:
            if field == "train_data":
                raise InputError(f"{where}: missing; give a file, a dataset name, or a table")
            if config.compares is not None:
                raise InputError(f"{where}: missing; {config.compares} compares evaluations on it")
            if config.evaluation_steps is not None:
                self.warn(f"evaluation_steps: nothing is evaluated without {field}")
            return None
        stop_if_asked(f"before the data of stage '{self.name}' were read")
        return spec

    def is_stream(self, field: str) -> bool:
        """Whether `train_data` or `eval_data` are read in order, and their length is not known."""
        return is_stream(self._spec(field))

    def texts(self, field: str, *, whole: bool = False, values: Sequence[str] = ()) -> Any:
        """Tokenise the demonstrations of `train_data`, `Texts`, or of `eval_data`, which may not be given: None.

        Training data of many rows, and streams, are tokenised while updates use them: `updates` takes them as well, and
        `trees` are those of the first rows. whole: tokenise all now, for a trainer that reads the texts itself. values:
        columns of numbers, which an objective reads as `batch.sequence_values[column]`. Raises InputError for rows that
        are not demonstrations, and for those without these numbers.
        """
        length = self.config.max_sequence_length
        encode = partial(data.encode_texts, max_length=length, values=values, **self._encoding())
        usable = None if whole else partial(usable_texts, values=values)
        return self._rows(field, "demonstrations", encode, usable)

    def pairs(
        self,
        field: str,
        *,
        whole: bool = False,
        read_at: ReadAt | None = "eos",
        completions: bool = False,
        margins: bool = True,
    ) -> Any:
        """Tokenise the preference pairs of `train_data`, `Pairs`, or of `eval_data`, which may not be given: None.

        whole: tokenise all now, which is otherwise done as for `texts`, for a trainer that reads the pairs itself.
        read_at: where conversations end: "eos", after the stop token that follows the last reply; "template", where the
        chat template ends; None: as the stage's reward model was trained. completions: find where they start, for
        losses over tokens. margins: whether the loss reads them; the report counts those it does not.
        Raises InputError for rows that are not pairs, and for training data without a pair that differs.
        """
        options = {**self._encoding(read_at), "completions": completions, "margins": margins}
        options["max_length"] = self.config.max_sequence_length
        usable = None if whole else usable_pairs
        return self._rows(field, "pairs", partial(data.encode_pairs, **options), usable)

    def prompts(self, field: str, max_prompt_length: int) -> Prompts | PromptStream | None:
        """Tokenise the prompts of `train_data` or of `eval_data`, which may not be given: None.

        Raises InputError for rows that are not prompts.
        """
        if field == "train_data" and self.is_stream(field):
            encode = partial(data.encode_prompts, max_prompt_length=max_prompt_length, **self._encoding())
            rows = self._open_stream(encode, "prompts")
            if not rows.sample.report.all_as_given:
                self._tell(f"{field}: {rows.report}")
            return PromptStream(rows, max_prompt_length, self.config.workers)
        records = self.records(field)
        if records is None:
            return None
        with error_context(self.stage, field):
            prompts = data.encode_prompts(
                records, self.tokenizer, max_prompt_length=max_prompt_length, **self._encoding()
            )
        self._report(prompts.report, field)
        self._warn_of_idle_workers(field)
        return prompts

    def episode_rows(self, field: str, max_prompt_length: int) -> EpisodeRows | PromptStream | None:
        """Open the rows of `train_data` or of `eval_data` that an environment's episodes begin with."""
        if field == "train_data" and self.is_stream(field):
            template = self.text_options()
            encode = partial(episode_rows, max_prompt_length=max_prompt_length, chat_template=template)
            rows = self._open_stream(encode, "rows", episodes=True)
            return PromptStream(rows, max_prompt_length, self.config.workers)
        records = self.records(field, episodes=True)
        return None if records is None else EpisodeRows(records, max_prompt_length)

    def _rows(self, field: str, unit: str, encode: partial[Any], usable: Callable[..., Any] | None) -> Any:
        """Encode rows. usable: as of `LazyRecords`, for training data that may be encoded later; None: all are now."""
        needed = field == "train_data"
        if needed and usable is not None and is_stream(self._spec(field)):
            return self._opened(self._open_stream(encode, unit), unit)
        records = self.records(field)
        if records is None:
            return None
        if self.tokenizer is None:
            self.missing = True
            self._expect(unit, len(records), f"{counted(len(records), unit)} before length limits")
        with error_context(self.stage, field):
            if needed and usable is not None and len(records) > WHOLE:
                usable = partial(usable, options=encode.keywords["chat_template"])
                seed, shuffle = self._order_seed, self.config.shuffle_train_dataset
                lazy = LazyRecords(records, usable, encode, self.tokenizer, seed=seed, shuffle=shuffle)
                return self._opened(lazy, unit)
            rows = encode(records, self.tokenizer)
        self._report(rows.report, field)
        self._warn_of_idle_workers(field)
        if needed:
            self.warn(*(f"model: {line}" for line in stop_warnings(self.config, self.tokenizer)))
        if needed and self.shapes:
            self._expect(unit, len(rows), str(rows.report), sizes_of(rows.trees()))
        return rows

    def _warn_of_idle_workers(self, field: str) -> None:
        """Say that processes to tokenise with are not started for data that were tokenised at once."""
        if field != "train_data" or not self.config.workers:
            return
        names = ("dataset_num_proc", "dataloader_num_workers")
        name = max(names, key=lambda each: getattr(self.config, each) or 0)
        self.warn(
            f"{name}={self.config.workers}: has no effect: these data are tokenised before the first update; processes "
            "tokenise large files and streams, while updates use them"
        )

    @property
    def _order_seed(self) -> int:
        seed = self.config.shuffle_seed_train
        return self.seed if seed is None else seed

    def _open_stream(self, encode: partial[Any], unit: str, *, episodes: bool = False) -> LazyStreams:
        """Open the streams of `train_data`. episodes: whether an environment makes the conversations."""
        from rlhf_core.data.streams import LazyStreams, open_streams

        config = self.config
        if config.max_training_steps is None:
            raise InputError(
                f"stage '{self.name}'.max_training_steps: missing; train_data is a stream, whose length is not known"
            )
        if self.tokenizer is None:
            self.missing = True
            self._expect(unit, 0, f"a stream of {unit}")
        with error_context(self.stage, "train_data"):
            streams = open_streams(
                self._spec("train_data"),
                registry=self.registry,
                columns=config.columns,
                drop=config.drop_columns,
            )
            self._note_absent("train_data", [name for stream in streams for name in stream.columns_read])
            window = config.shuffle_buffer if config.shuffle_train_dataset else 1
            rows = LazyStreams(streams, encode, self.tokenizer, seed=self._order_seed, window=window)
            if config.system_prompt is not None and not episodes:
                require_conversations(rows.sample.places.records.sources)
        return rows

    def _opened(self, rows: LazyRows, unit: str) -> LazyRows:
        """Say what is known of training data that are encoded while updates use them."""
        if not rows.sample.report.all_as_given:
            self._tell(f"train_data: {rows.report}")
        self.warn(*(f"model: {line}" for line in stop_warnings(self.config, self.tokenizer)))
        if self.shapes:
            self._expect(unit, len(rows), rows.report, sizes_of(rows.trees()))
        return rows

    def _report(self, report: Report, field: str) -> None:
        """Say which rows were dropped, cut, or teach nothing, and which columns are not read."""
        if not report.all_as_given:
            self._tell(f"{field}: {report}")
            # A forecast has the report of training data in a line of its own.
            if self.shapes and field != "train_data":
                self.held_out_lines.append(f"{field}: {report}")
        elif report.not_read:
            self.say(f"{field}: {', '.join(map(first_columns, report.not_read))}")

    def _tell(self, line: str) -> None:
        """Warn of a line about data, or note that a forecast has it."""
        if self.shapes:
            self.told.append(line)
        else:
            self.warn(line)

    def text_options(self, read_at: ReadAt | None = "eos") -> TextOptions:
        """Collect how the stage's texts are read. read_at: as for `pairs`."""
        config, stage = self.config, self.stage
        return text_options(config, stage, read_at=read_at_of(config, stage, read_at))

    def _encoding(self, read_at: ReadAt | None = "eos") -> dict[str, Any]:
        return {
            "overlong": self.config.overlong,
            "truncation_mode": self.config.truncation_mode,
            "chat_template": self.text_options(read_at),
        }

    def scoring_contract(
        self,
        model: Model,
        *,
        read_at: ReadAt | None = "eos",
        scores: NDArray[Any] | None = None,
        evaluation: Mapping[str, float] | None = None,
    ) -> dict[str, Any]:
        """Return what a reward model's scores depend on, for `save_model(…, contract=…)`; a `Scorer` reads it.

        read_at: as for `pairs`. scores: of its evaluation data, else of some training data, reward units; their mean
        and standard deviation are stored, without which they cannot be normalized. evaluation: the metrics on its
        evaluation data.
        """
        contract = ScoringContract.of(
            model.tokenizer,
            max_length=self.config.max_sequence_length,
            truncation_mode=self.config.truncation_mode,
            chat_template=self.text_options(read_at),
            mean=None if scores is None else float(scores.mean()),
            std=None if scores is None else float(scores.std()),
        )
        return replace(
            contract, evaluation=evaluation, compute_dtype=model.computes_in, base=base_identity(model)
        ).to_dict()

    def _expect(self, unit: str, count: int, report: str, sizes: NDArray[np.int64] | None = None) -> None:
        self.expect(count_training(self.config, unit, count, report, sizes))

    def expect(self, expected: Expected) -> None:
        """Add what a source of updates will do. Raises ModelNotHereError where the build cannot continue."""
        self.expected.append(expected)
        if self.missing:
            raise ModelNotHereError

    def updates(
        self,
        model: Model,
        rows: Texts | Pairs | LazyRows,
        trees: Trees | None = None,
        *,
        reads_tokens: bool,
        sequence_names: Sequence[str] = (),
        group: int = 1,
    ) -> tuple[Model, Any]:
        """Draw updates from rows; return the model with the attention that suits them, and the source of updates.

        trees: of the rows, one each; None: `rows.trees()`. reads_tokens: whether the objective reads values of trained
        tokens. sequence_names: values of the trees that micro-batches carry. group: branches that stay in one row.
        Raises InputError naming the rows with tokens that the model has no embedding for.
        """
        trees = rows.trees() if trees is None else trees
        with error_context(self.stage, "model"):
            data.require_vocabulary(trees, rows.where, model.definition.vocab_size)
        self._note_positions(model, trees)
        if len(rows):
            self.warn(*batch_warnings(self.config, len(rows)))
        layout: Any = None
        if self.has_devices:
            width = model.definition.hidden_size
            layout = choose_row_layout(trees, self.config, self.mesh, width, reads_tokens=reads_tokens)
            model = choose_attention(model, self.config, self.stage, trees, layout, group=group)
        if isinstance(rows, LazyRows):
            return model, LazyUpdates(
                rows,
                self.config,
                layout,
                vocabulary=model.definition.vocab_size,
                say=lambda line: self.say(f"train_data: {line}"),
                sequence_names=sequence_names,
                group=group,
            )
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
        positions, lengths = model.max_positions, lengths_of(trees)
        if self.shapes and isinstance(positions, int) and (longest := int(lengths.max())) > positions:
            count = int((lengths > positions).sum())
            self.notes.append(
                f"; {count:,} of up to {longest:,} tokens, more than the model's {positions:,} positions: "
                f"set max_sequence_length = {positions}"
            )

    def held_out(
        self, model: Model, rows: Texts | Pairs, trees: Trees | None = None, **options: Any
    ) -> HeldOut:
        """Hold the rows of `eval_data` for evaluations, packed once. options: of `HeldOut`."""
        return HeldOut(self, model, rows, rows.trees() if trees is None else trees, **options)
