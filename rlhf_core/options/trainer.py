"""The configuration that all trainers share, and the flat names that expand into its nested tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticUndefined

from rlhf_core.contracts import LOGGER, OPTIMIZER
from rlhf_core.options.base import Component, Options
from rlhf_core.options.problems import Problem, shown

Flat: TypeAlias = tuple[str, str] | tuple[str, str, Any]
_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}


def _seconds(given: Any) -> Any:
    """A duration such as "2h30m", "1d" or "45s"; a plain number is in seconds."""
    if not isinstance(given, str):
        return given
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([dhms])", given.lower())
    if not parts or re.sub(r"(\d+(?:\.\d+)?)\s*([dhms])", "", given.lower()).strip():
        raise ValueError(f"expected seconds or a duration such as '2h30m', '1d' or '45s', got {shown(given)}")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def _text(given: Any) -> Any:
    return str(given) if isinstance(given, Path) else given


def _patterns(given: str | list[str]) -> str | list[str]:
    for pattern in [given] if isinstance(given, str) else given:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{shown(pattern)} is not a regular expression: {error}") from None
    return given


def _not_yet(given: Any) -> Any:
    if given is not None:
        raise ValueError("adapters are not available yet; leave it out to train all parameters")
    return given


PathText = Annotated[str, BeforeValidator(_text)]


class TrainerConfig(Options):
    """What every trainer can be told. A trainer extends it with fields of its own.

    `FLAT` maps a short name to the nested field and key it stands for, and optionally to what reading it
    gives where a component leaves it out: {"epsilon": ("loss", "epsilon", 0.2)}. `ALIASES` maps other
    spellings to names. Both add to those of the parent class.
    """

    FLAT: ClassVar[Mapping[str, Flat]] = {}
    ALIASES: ClassVar[Mapping[str, str]] = {
        "clip_grad": "max_grad_norm",
        "peft_config": "lora",
        "repo_id": "model",
        "dataset_name": "train_data",
    }

    model: Annotated[str | dict[str, Any] | None, BeforeValidator(_text)] = Field(
        None,
        description="a directory, a hub name, an earlier stage's STAGE.OUTPUT, or a table for a fresh model",
    )
    train_data: Annotated[str | dict[str, Any] | list[Any] | None, BeforeValidator(_text)] = Field(
        None, description="a file, a dataset name, a table { name, path, weight, split }, or a list of these"
    )
    eval_data: Annotated[str | dict[str, Any] | list[Any] | None, BeforeValidator(_text)] = Field(
        None, description="as train_data, held out"
    )
    learning_rate: float = Field(5e-5, ge=0, description="peak, per update")
    learning_rate_end: float | None = Field(
        None, ge=0, description="at the last update, for schedules that fall; none: 0"
    )
    scheduler: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "constant", description="shape of the learning rate; wsd: constant, then linear over the last tenth"
    )
    warmup_steps: int = Field(0, ge=0, description="updates over which the learning rate rises")
    weight_decay: float = Field(0.01, ge=0, description="per unit of learning rate; not on norms and biases")
    max_grad_norm: Annotated[float | None, AfterValidator(lambda x: x or None)] = Field(
        1.0, ge=0, description="global norm that gradients are clipped to; 0 or none: no clipping"
    )
    optimizer: Annotated[Component, OPTIMIZER] = Field(
        Component(name="adamw"), description="by name, with options"
    )
    num_train_epochs: int | float = Field(10, gt=0, description="passes over the training data")
    max_training_steps: int | None = Field(None, ge=1, description="updates, instead of epochs")
    total_batch_size: int = Field(32, ge=1, description="examples of one update; for grpo, completions")
    gradient_accumulation_steps: int = Field(
        1, ge=1, description="parts an update is computed in; changes memory, not the result"
    )
    max_sequence_length: int = Field(1024, ge=2, description="tokens of an example")
    overlong: Literal["filter", "truncate"] = Field("filter", description="what happens to longer examples")
    truncation_mode: Literal["keep_end", "keep_start"] = Field(
        "keep_end", description="which end of a longer example is kept, where it is truncated"
    )
    shuffle_train_dataset: bool = Field(True, description="a new order every epoch")
    shuffle_seed_train: int | None = Field(None, ge=0, description="of that order; none: the stage's seed")
    eval_batch_size: int | None = Field(None, ge=1, description="examples; none: total_batch_size")
    evaluation_steps: int | None = Field(
        None, ge=1, description="updates between evaluations; none: only at the end"
    )
    eval_on_start: bool = Field(False, description="evaluate before the first update too")
    max_evaluation_steps: int | None = Field(None, ge=1, description="batches of an evaluation; none: all")
    save_steps: int | None = Field(None, ge=1, description="updates between checkpoints")
    save_interval_minutes: float | None = Field(None, gt=0, description="minutes between checkpoints")
    save_total_limit: int | None = Field(None, ge=1, description="checkpoints kept; none: all")
    save_directory: PathText | None = Field(
        None, description="where a trainer that is run from Python writes; none: a fresh temporary directory"
    )
    training_time_limit: Annotated[float | None, BeforeValidator(_seconds)] = Field(
        None,
        gt=0,
        description="seconds, or text such as '2h30m'; training then ends with what it has learned",
    )
    log_steps: int = Field(10, ge=1, description="updates between logged metrics")
    progress_bar_type: Literal["rich", "tqdm", "json"] = Field("rich", description="what the console shows")
    logger: list[Annotated[Component, LOGGER]] = Field([], description="loggers besides metrics.jsonl")
    frozen_parameters: Annotated[str | list[str], AfterValidator(_patterns)] | None = Field(
        None, description="regular expressions; parameters whose dotted path matches one are not trained"
    )
    disable_dropout: bool = Field(True, description="models are trained without dropout")
    dataset_num_proc: int | None = Field(None, ge=1, description="processes that tokenise; none: one")
    seed: int | None = Field(None, ge=0, description="none: the pipeline's")
    lora: Annotated[None, BeforeValidator(_not_yet)] = Field(
        None, description="adapter options; none: all parameters are trained"
    )
    chat_template: PathText | None = Field(
        None, description="none: the tokenizer's own; 'plain': role-labelled text; or a Jinja file"
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        for name, target in cls._flat().items():
            if name in cls.model_fields or target[0] not in cls.model_fields:
                raise TypeError(
                    f"{cls.__name__}.FLAT: '{name}' must be no field, and '{target[0]}' must be one"
                )

    @property
    def use_wandb(self) -> bool:
        """Whether wandb is among the loggers; `use_wandb=True` puts it there."""
        return any(logger.name == "wandb" for logger in self.logger)

    @classmethod
    def _flat(cls) -> dict[str, Flat]:
        return _inherited(cls, "FLAT")

    @classmethod
    def _aliases(cls) -> dict[str, str]:
        return _inherited(cls, "ALIASES")

    @classmethod
    def names(cls) -> list[str]:
        return [*super().names(), *cls._flat(), *cls._aliases(), "use_wandb", "dataset_split"]

    if not TYPE_CHECKING:  # a type checker should keep telling a misspelt field

        def __getattr__(self, name: str) -> Any:
            cls = type(self)
            if name in cls._aliases():
                return getattr(self, cls._aliases()[name])
            if name in cls._flat():
                field, key, *default = cls._flat()[name]
                return getattr(getattr(self, field), key, *default)
            return super().__getattr__(name)

    @classmethod
    def _expand(
        cls, data: Mapping[str, Any], base: Self | None = None
    ) -> tuple[dict[str, Any], list[Problem]]:
        given, problems = super()._expand(data)
        problems += _expand_aliases(given, cls._aliases())
        problems += _expand_flat(given, cls, base)
        problems += _expand_wandb(given, _default(cls, base, "logger"))
        problems += _expand_split(given, _default(cls, base, "train_data"))
        return given, problems


def _expand_aliases(given: dict[str, Any], aliases: Mapping[str, str]) -> list[Problem]:
    """Other spellings into names."""
    problems = []
    for alias in [alias for alias in aliases if alias in given]:
        value, name = given.pop(alias), aliases[alias]
        if name in given:
            problems.append(Problem(alias, f"another name of {name}, which is given too; remove one"))
        given.setdefault(name, value)
    return problems


def _expand_flat(
    given: dict[str, Any], cls: type[TrainerConfig], base: TrainerConfig | None
) -> list[Problem]:
    """Flat names into the tables they stand for, which start from the default where they are not given."""
    flat = [(name, target[0], target[1]) for name, target in cls._flat().items() if name in given]
    # Names first: the options of a default that is not chosen do not apply to what is.
    flat.sort(key=lambda item: item[2] != "name")
    said = {field: _table(given[field]) for _, field, _ in flat if field in given}
    tables: dict[str, dict[str, Any]] = {}
    problems = []
    for name, field, key in flat:
        value, default = given.pop(name), _default(cls, base, field)
        if field not in tables:
            start = said[field] if field in said else _table(default) or {}
            if start is None:
                continue  # neither a table nor a name, as validation says
            other = key == "name" and field not in said and value != start.get("name")
            tables[field] = {} if other else dict(start)
        if key in (said.get(field) or {}):
            problems.append(Problem(name, f"the same as {field}.{key}, which is given too; remove one"))
        elif value is None and isinstance(default, Component):
            tables[field].pop(key, None)  # an option that is none is one that is not given
        else:
            tables[field][key] = value
    given |= tables
    return problems


def _expand_wandb(given: dict[str, Any], default: Any) -> list[Problem]:
    """`use_wandb` into the list of loggers."""
    if "use_wandb" not in given:
        return []
    use = given.pop("use_wandb")
    loggers = given.get("logger", default)
    if not isinstance(use, bool):
        return [Problem("use_wandb", f"expected true or false, got {shown(use)}")]
    if not use or not isinstance(loggers, list | tuple):
        return []
    if any((_table(logger) or {}).get("name") == "wandb" for logger in loggers):
        return [Problem("use_wandb", "logger names wandb too; remove one")] if "logger" in given else []
    given["logger"] = [*loggers, {"name": "wandb"}]
    return []


def _expand_split(given: dict[str, Any], default: Any) -> list[Problem]:
    """`dataset_split` into the table of `train_data`."""
    if "dataset_split" not in given:
        return []
    split, data = given.pop("dataset_split"), given.get("train_data", default)
    if split is None:
        return []
    if isinstance(data, Path | str):
        data = {"name": str(data)}
    if not isinstance(data, Mapping):
        return [Problem("dataset_split", "needs train_data, one dataset by name or in a table")]
    if "split" in data:
        return [Problem("dataset_split", "the same as train_data.split, which is given too; remove one")]
    given["train_data"] = {**data, "split": split}
    return []


def _inherited(cls: type, attribute: str) -> dict[str, Any]:
    """A class attribute's entries and those of the parents', the nearest first."""
    tables = [vars(base)[attribute] for base in reversed(cls.__mro__) if attribute in vars(base)]
    return {name: entry for table in tables for name, entry in table.items()}


def _default(cls: type[TrainerConfig], base: TrainerConfig | None, field: str) -> Any:
    if base is not None:
        return getattr(base, field)
    default = cls.model_fields[field].get_default(call_default_factory=True)
    return None if default is PydanticUndefined else default


def _table(value: Any) -> dict[str, Any] | None:
    """A nested value as a table of what was said, or None where it is neither a table nor a name."""
    if isinstance(value, Options):
        return value._table(only_set=True)
    if isinstance(value, str):
        return {"name": value}
    return dict(value) if isinstance(value, Mapping) else None
