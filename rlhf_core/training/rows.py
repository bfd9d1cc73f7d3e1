"""What opens the rows of a stage: files, streams and objects as texts, pairs and prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf_core import data
from rlhf_core.data import EpisodeRows, Prompts, PromptStream, UntokenizedPrompts
from rlhf_core.data.columns import require_conversations
from rlhf_core.data.lazy import WHOLE, LazyRecords, LazyRows
from rlhf_core.data.preferences import usable_pairs
from rlhf_core.data.prompts import episode_rows
from rlhf_core.data.records import is_stream, named_sets
from rlhf_core.data.report import first_columns
from rlhf_core.data.streams import LazyStreams, first_rows, open_streams
from rlhf_core.data.texts import usable_texts
from rlhf_core.errors import InputError, suggest
from rlhf_core.runtime.signals import stop_if_asked
from rlhf_core.stage.text_settings import read_at_of, text_options
from rlhf_core.training.description import TrainedRows, UntokenizedRows
from rlhf_core.training.starting_model import error_context, stop_warnings

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.data.report import Report
    from rlhf_core.stage import Stage
    from rlhf_core.tokenizer.options import ReadAt, TextOptions
    from rlhf_core.training.description import Describes


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
    def _not_as_given(self, field: str, report: Report | str) -> None:
        """Say which rows were dropped, cut, or teach nothing."""

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

    def prompts(
        self, field: str, max_prompt_length: int
    ) -> Prompts | PromptStream | UntokenizedPrompts | None:
        """Tokenise the prompts of `train_data` or of `eval_data`, which may not be given: None.

        In a check that has no tokenizer yet, they are `UntokenizedPrompts`. Raises InputError for rows that are not
        prompts.
        """
        stream = field == "train_data" and self.is_stream(field)
        if self.tokenizer is None:
            records = None if stream else self.records(field)
            return UntokenizedPrompts(records) if stream or records is not None else None
        encode: partial[Any] = partial(
            data.encode_prompts, max_prompt_length=max_prompt_length, **self._encoding()
        )
        if stream:
            rows = self._open_stream(encode, "prompts")
            if not rows.sample.report.all_as_given:
                self._not_as_given(field, rows.report)
            return PromptStream(rows, max_prompt_length, self.config.workers)
        records = self.records(field)
        if records is None:
            return None
        with error_context(self.stage, field):
            prompts = encode(records, self.tokenizer)
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
            return self._lazy(self._open_stream(encode, unit), unit)
        records = self.records(field)
        if records is None:
            return None
        if self.tokenizer is None:
            self.trains_on(UntokenizedRows(unit, len(records)))
        with error_context(self.stage, field):
            if needed and usable is not None and len(records) > WHOLE:
                usable = partial(usable, options=encode.keywords["chat_template"])
                seed, shuffle = self._order_seed, self.config.shuffle_train_dataset
                lazy = LazyRecords(records, usable, encode, self.tokenizer, seed=seed, shuffle=shuffle)
                return self._lazy(lazy, unit)
            rows = encode(records, self.tokenizer)
        self._report(rows.report, field)
        self._warn_of_idle_workers(field)
        if needed:
            self.warn(*(f"model: {line}" for line in stop_warnings(self.config, self.tokenizer)))
            self.trains_on(TrainedRows(unit, rows))
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
        config = self.config
        if config.max_training_steps is None:
            raise InputError(
                f"stage '{self.name}'.max_training_steps: missing; train_data is a stream, whose length is not known"
            )
        if self.tokenizer is None:
            self.trains_on(UntokenizedRows(unit, None))
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

    def _lazy(self, rows: LazyRows, unit: str) -> LazyRows:
        """Say what is known of training data that are encoded while updates use them."""
        if not rows.sample.report.all_as_given:
            self._not_as_given("train_data", rows.report)
        self.warn(*(f"model: {line}" for line in stop_warnings(self.config, self.tokenizer)))
        self.trains_on(TrainedRows(unit, rows))
        return rows

    def _report(self, report: Report, field: str) -> None:
        """Say which rows were dropped, cut, or teach nothing, and which columns are not read."""
        if not report.all_as_given:
            self._not_as_given(field, report)
        elif report.not_read:
            self.say(f"{field}: {', '.join(map(first_columns, report.not_read))}")

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
