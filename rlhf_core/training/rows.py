"""Rows of a stage: what opens them, and what they say of themselves before it begins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_core import data
from rlhf_core.data.columns import require_conversations
from rlhf_core.data.preferences import usable_pairs
from rlhf_core.data.records import is_stream, named_sets
from rlhf_core.data.report import first_columns
from rlhf_core.data.source import WHOLE, Source, open_files
from rlhf_core.data.streams import first_rows, open_source, open_streams
from rlhf_core.data.texts import usable_texts
from rlhf_core.errors import InputError, counted, suggest
from rlhf_core.runtime.signals import stop_if_asked
from rlhf_core.stage.text_settings import read_at_of, text_options
from rlhf_core.training.starting_model import error_context, stop_warnings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rlhf_core.config import TrainerConfig
    from rlhf_core.data.report import Report
    from rlhf_core.models import Definition, Model
    from rlhf_core.stage import Stage
    from rlhf_core.tokenizer.options import ReadAt, TextOptions
    from rlhf_core.training.on_shapes import OnShapes


class OpensRows(ABC):
    """The part of a `Context` that opens rows; what a check does otherwise than a run is in the abstract methods."""

    def __init__(self, config: TrainerConfig, stage: Stage) -> None:
        self.config, self.stage = config, stage
        self.name, self.seed, self.registry = stage.name, stage.seed, stage.registry
        self.tokenizer: Any = stage.inputs.get("tokenizer")

    @abstractmethod
    def warn(self, *lines: str, first: bool = False) -> None:
        """Warn of lines that begin with a field, on one process. first: a check prints them before its other ones."""

    @abstractmethod
    def say(self, line: str) -> None:
        """Print a line on stderr, unless the stage is only checked."""

    @abstractmethod
    def trains_on(self, source: Describes) -> None:
        """Have a check print what a source of updates says of itself.

        It ends there where the model or its tokenizer is not on this machine yet.
        """

    @abstractmethod
    def not_as_given(self, field: str, report: Report | str) -> None:
        """Say which rows were dropped, cut, or teach nothing."""

    def records(self, field: str, *, episodes: bool = False, first: int | None = None) -> Any:
        """Open the rows of `train_data`, `Records`, or of `eval_data`, which may not be given: None.

        Of a stream, `eval_data` has the rows of `max_evaluation_steps` batches. episodes: whether an environment makes
        the conversations. first: how many rows of a stream to read, where these are enough. Raises InputError for plain
        texts with a `system_prompt`, and for a stream as `train_data` without `first`.
        """
        config = self.config
        spec = self._spec(field)
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
                size = config.eval_batch_size or config.total_batch_size
                count = first or size * (config.max_evaluation_steps or 1)
                streams = open_streams(spec, registry=self.registry, columns=config.columns)
                records = first_rows(streams, count)
            if config.drop_columns:
                warn_of_absent(self, field, records.columns)
                records = data.drop_columns(records, config.drop_columns)
            if config.system_prompt is not None and not episodes:
                require_conversations(records.tables)
        return records

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

    def _spec(self, field: str) -> Any:
        """Return what `train_data` or `eval_data` is; None for `eval_data` that are not given."""
        config, where = self.config, f"stage '{self.name}'.{field}"
        top, _, name = field.partition(".")
        spec = self._given(top)
        if top == "train_data" and self._only_evaluates:
            # Nothing is trained: the rows that it is evaluated on stand in.
            held_out = self._given("eval_data")
            spec = next(iter(named_sets(held_out).values()), held_out)
            if spec is None:
                raise InputError(f"{where}: missing, and so is eval_data: without training, give one of them")
        if top == "eval_data" and config.max_evaluation_steps == 0:
            spec = None
        if name:
            return named_sets(spec)[name]
        sets = named_sets(spec) if spec is not None and top == "eval_data" else None
        if sets:
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
        """Tokenise the demonstrations of `train_data`, or of `eval_data`, where it is given: a `Source`, or None.

        Training data of many rows, and streams, are tokenised while updates use them: `sample` and `trees` are then
        those of the first rows. whole: tokenise all now, for a trainer that reads the texts itself. values: columns of
        numbers, which an objective reads as `batch.sequence_values[column]`. Raises InputError for rows that are not
        demonstrations, and for those without these numbers.
        """
        length = self.config.max_sequence_length
        encode = partial(data.encode_texts, max_length=length, values=values, **encoding(self))
        return self._source(
            field, "demonstrations", encode, None if whole else partial(usable_texts, values=values)
        )

    def pairs(
        self,
        field: str,
        *,
        whole: bool = False,
        read_at: ReadAt | None = "eos",
        completions: bool = False,
        margins: bool = True,
    ) -> Any:
        """Tokenise the preference pairs of `train_data`, or of `eval_data`, where it is given: a `Source`, or None.

        whole: tokenise all now, which is otherwise done as for `texts`, for a trainer that reads the pairs itself.
        read_at: where conversations end: "eos", after the stop token that follows the last reply; "template", where the
        chat template ends; None: as the stage's reward model was trained. completions: find where they start, for
        losses over tokens. margins: whether the loss reads them; the report counts those it does not.
        Raises InputError for rows that are not pairs, and for training data without a pair that differs.
        """
        options = {**encoding(self, read_at), "completions": completions, "margins": margins}
        options["max_length"] = self.config.max_sequence_length
        return self._source(
            field, "pairs", partial(data.encode_pairs, **options), None if whole else usable_pairs
        )

    def _source(
        self, field: str, unit: str, encode: partial[Any], usable: Callable[..., Any] | None
    ) -> Source | None:
        """Open examples. usable: as of `open_files`, for training data that may be encoded later; None: all are now."""
        needed = field == "train_data"
        config = self.config
        if needed and usable is not None and is_stream(self._spec(field)):
            source = open_stream(self, encode, unit)
            return self._trained(source, unit)
        records = self.records(field)
        if records is None:
            return None
        if self.tokenizer is None:
            self.trains_on(TrainedRows(unit, len(records)))
        order: dict[str, Any] = {"seed": order_seed(self), "shuffle": config.shuffle_train_dataset}
        with error_context(self.stage, field):
            if needed and usable is not None and len(records) > WHOLE:
                usable = partial(usable, options=encode.keywords["chat_template"])
                source = open_files(records, usable, encode, self.tokenizer, workers=config.workers, **order)
                return self._trained(source, unit)
            rows = encode(records, self.tokenizer)
        say_report(self, rows.report, field)
        warn_of_idle_workers(self, field)
        source = Source.of(rows, **order)
        source.unit, source.field = unit, field
        return self._trained(source, unit) if needed else source

    def _trained(self, source: Source, unit: str) -> Source:
        """Say what is known of training data."""
        source.unit = unit
        if not source.complete and not source.sample.report.all_as_given:
            self.not_as_given("train_data", source.report)
        self.warn(*(f"model: {line}" for line in stop_warnings(self.config, self.tokenizer)))
        self.trains_on(TrainedRows(unit, len(source), source))
        return source

    def text_options(self, read_at: ReadAt | None = "eos") -> TextOptions:
        """Collect how the stage's texts are read. read_at: as for `pairs`."""
        config, stage = self.config, self.stage
        return text_options(config, stage, read_at=read_at_of(config, stage, read_at))


def encoding(context: OpensRows, read_at: ReadAt | None = "eos") -> dict[str, Any]:
    """Collect the options of `encode_texts` and its like that a stage's config gives."""
    return {
        "overlong": context.config.overlong,
        "truncation_mode": context.config.truncation_mode,
        "chat_template": context.text_options(read_at),
    }


def open_stream(context: OpensRows, encode: partial[Any], unit: str, *, episodes: bool = False) -> Source:
    """Open the streams of `train_data`. episodes: whether an environment makes the conversations."""
    config = context.config
    if config.max_training_steps is None:
        raise InputError(
            f"stage '{context.name}'.max_training_steps: missing; train_data is a stream, whose length is not known"
        )
    if context.tokenizer is None:
        context.trains_on(TrainedRows(unit, 0))
    with error_context(context.stage, "train_data"):
        streams = open_streams(
            context._spec("train_data"),
            registry=context.registry,
            columns=config.columns,
            drop=config.drop_columns,
        )
        warn_of_absent(context, "train_data", [name for stream in streams for name in stream.columns_read])
        source = open_source(
            streams,
            encode,
            context.tokenizer,
            seed=order_seed(context),
            window=config.shuffle_buffer if config.shuffle_train_dataset else 1,
            workers=config.workers,
        )
        if config.system_prompt is not None and not episodes:
            require_conversations(source.sample.records.tables)
    return source


def warn_of_absent(context: OpensRows, field: str, columns: Sequence[str]) -> None:
    """Warn of columns to drop that the training data do not have."""
    for name in context.config.drop_columns if field == "train_data" else ():
        if name not in columns:
            context.warn(f"drop_columns: {field} has no column '{name}'.{suggest(name, columns)}")


def say_report(context: OpensRows, report: Report, field: str) -> None:
    """Say which rows were dropped, cut, or teach nothing, and which columns are not read."""
    if not report.all_as_given:
        context.not_as_given(field, report)
    elif report.not_read:
        context.say(f"{field}: {', '.join(map(first_columns, report.not_read))}")


def warn_of_idle_workers(context: OpensRows, field: str) -> None:
    """Say that processes to tokenise with are not started for data that were tokenised at once."""
    if field != "train_data" or not context.config.workers:
        return
    names = ("dataset_num_proc", "dataloader_num_workers")
    name = max(names, key=lambda each: getattr(context.config, each) or 0)
    context.warn(
        f"{name}={context.config.workers}: has no effect: these data are tokenised before the first update; processes "
        "tokenise large files and streams, while updates use them"
    )


def order_seed(context: OpensRows) -> int:
    """Return the seed of the order of training rows."""
    seed = context.config.shuffle_seed_train
    return context.seed if seed is None else seed


@dataclass(frozen=True)
class Description:
    """What updates a stage will make, as far as its data and its config show.

    lines: what there is to train on, updates, tokens. later: lines that follow the memory.
    updates: of the whole run. tokens: of an update. longest: tokens of the longest row. examples: of an update.
    """

    lines: list[str]
    updates: int
    tokens: int
    longest: int
    examples: int = 0
    later: Sequence[str] = ()


class Describes(Protocol):
    """A source of updates, as a check sees it."""

    def describe(self, context: OnShapes, models: Sequence[Model]) -> Description:
        """Describe the updates. models: the stage's; empty where one is not on this machine yet."""
        ...

    def held(self, context: OnShapes, definition: Definition, parameters: int) -> Mapping[str, int]:
        """Count the bytes per device, by part, that are in memory besides models and optimizers.

        definition: of the first model that is trained. parameters: bytes of all that are.
        """
        ...


@dataclass(frozen=True)
class TrainedRows:
    """Rows that are trained on.

    unit: what they are, "pairs". count: of an epoch; 0: of a stream. source: None where this machine has no tokenizer
    for them yet.
    """

    unit: str
    count: int
    source: Source | None = None

    def describe(self, context: OnShapes, models: Sequence[Model]) -> Description:
        size = context.config.total_batch_size
        updates, total, drawn = _updates(context.config, self.unit, self.count)
        columns: list[str] = []
        if self.source is None:
            longest = context.config.max_sequence_length or 0
            report = f"a stream of {self.unit}"
            if self.count:
                report = f"{counted(self.count, self.unit)} before length limits"
            tokens = "tokens unknown: there is no limit"
            if longest:
                tokens = f"at most {drawn * longest:,} tokens"
            per_update = size * longest
        else:
            known = self.source.describe()
            longest = int(known.sizes.max())
            mean = int(known.sizes.sum()) / len(known.sizes)
            read = self.source.sample.report.columns
            columns = [f"columns: {read}" if self.count else f"columns of the first rows: {read}"]
            report = "".join([known.report, *_positions(known.lengths, models)])
            tokens = f"about {round(drawn * mean):,} tokens, shared prompts once"
            per_update = round(mean * size)
        lines = [report, *columns, updates, tokens]
        return Description(lines, total, per_update, longest, examples=min(size, drawn))

    def held(self, context: OnShapes, definition: Definition, parameters: int) -> Mapping[str, int]:
        return {}


def _updates(config: TrainerConfig, unit: str, count: int) -> tuple[str, int, int]:
    """Describe the updates of `count` rows, 0 where it is not known; return their number and that of examples, too."""
    limits = (config.total_batch_size, config.num_train_epochs, config.max_training_steps)
    total, drawn = data.count_updates(count, *limits), data.count_examples(count, *limits)
    # An update holds no more than the data of all epochs.
    each = min(config.total_batch_size, drawn)
    epochs = f", {drawn / count:.2f} epochs" if count else ""
    return f"{total:,} update{'s'[: total > 1]} of {each} {unit}{epochs}", total, drawn


def _positions(lengths: NDArray[np.int64], models: Sequence[Model]) -> list[str]:
    """Say which examples are longer than the models' positions. lengths: of their longest sequences."""
    longest = int(lengths.max())
    limits = dict.fromkeys(model.max_positions for model in models)
    return [
        f"; {int((lengths > limit).sum()):,} of up to {longest:,} tokens, more than the model's {limit:,} positions: "
        f"set max_sequence_length = {limit}"
        for limit in limits
        if isinstance(limit, int) and longest > limit
    ]
