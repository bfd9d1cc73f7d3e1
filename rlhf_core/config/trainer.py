"""The configuration that all trainers share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from rlhf_core.config.aliases import expand
from rlhf_core.config.durations import Minutes, Seconds
from rlhf_core.config.options import Component, Expanded, Options, format_value
from rlhf_core.config.translation import Names
from rlhf_core.contracts import ATTENTION, LOGGER, OPTIMIZER
from rlhf_core.errors import suggest

SCHEDULES = ("constant", "linear", "cosine", "wsd")


def check_scheduler(value: Any) -> Any:
    """Read none as constant, which is what EasyDeL calls it; let functions pass, and their names with a colon."""
    value = "constant" if value is None or value == "none" else value
    if callable(value) or (isinstance(value, str) and (value in SCHEDULES or ":" in value)):
        return value
    hint = suggest(value, SCHEDULES) if isinstance(value, str) else ""
    raise ValueError(
        f"expected 'constant', 'linear', 'cosine' or 'wsd', or module:function, got {format_value(value)}"
        + (f".{hint}" if hint else "")
    )


def check_function(name: str) -> str:
    """Take the name of a function, with a colon."""
    home, _, function = name.rpartition(":")
    if not home or not function:
        raise ValueError(f"expected file.py:function or module:function, got {format_value(name)}")
    return name


def function_name(value: Any) -> str:
    """Name a function as a file would, `module:function`, a partial by its function, an object by its class.

    A name is left unchanged.
    """
    while isinstance(value, partial):
        value = value.func
    if isinstance(value, str):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def directory_name(*names: str | None) -> str:
    """Join the names of a run, without those that are none, into the name of a directory; empty without any."""
    return re.sub(r"[^\w.-]+", "-", "-".join(filter(None, names))).strip(".-")


def filled(value: Any) -> Any:
    """Read an empty text as none."""
    return None if value == "" else value


def check_kwargs(value: dict[str, Any]) -> dict[str, Any]:
    # Imported here, as below: this takes as long as everything else that a list of plugins needs.
    from rlhf_core.tokenizer.options import kwargs_problem

    problem = kwargs_problem(value)
    if problem:
        raise ValueError(problem)
    return value


def check_day(value: str) -> str:
    from rlhf_core.tokenizer.options import parse_date

    try:
        parse_date(value)
    except ValueError:
        raise ValueError(f"{format_value(value)} is not a day such as '2026-01-31'") from None
    return value


def none_text(value: Any) -> Any:
    """Read none as the word, where that is a value of the field: `--remat none`."""
    return "none" if value is None else value


def path_text(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def check_regex(value: str | list[str]) -> str | list[str]:
    for pattern in [value] if isinstance(value, str) else value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{format_value(pattern)} is not a regular expression: {error}") from None
    return value


class LoraOptions(Options):
    """Adapters next to linear layers, trained instead of the model's own parameters (Hu et al. 2021)."""

    rank: int = Field(8, ge=1, description="rank of the product that is added to a kernel")
    alpha: float = Field(16.0, gt=0, description="the product is multiplied by alpha / rank")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="dropout rate of the adapters' inputs during training"
    )
    use_rslora: bool = Field(False, description="alpha / sqrt(rank) instead (Kalajdzievski 2023)")
    targets: str | list[str] = Field(
        "all-linear",
        description="all linear layers, or their names or regular expressions of their dotted paths, in all layers, or "
        "with a layer's number, layers.0.self_attn.q_proj",
    )
    base: Literal["nf4", "int8"] | None = Field(
        None,
        description="hold the matrices of the base model's layers in 4 bits (QLoRA, Dettmers et al. 2023) or 8, "
        "quantized while it is loaded; null: float32",
    )


class CheckpointOptions(Options):
    """What checkpoints hold, and what a run makes of those it finds."""

    resume: bool = Field(
        True,
        description="continue an interrupted run from its newest checkpoint; false: delete its checkpoints and start "
        "over. A finished stage is kept in any case",
    )
    start: int = Field(
        0,
        ge=0,
        description="updates that a run without a checkpoint skips; it begins with the examples and the "
        "learning rate of the next one",
    )
    last: bool = Field(
        True,
        description="write one after the last update; false: only the trained model is saved, and an error in "
        "the last evaluation loses the updates since the previous checkpoint",
    )
    optimizer_state: bool = Field(
        True,
        description="include the optimizer's state; false: a third of the size, and a resumed run starts with "
        "a fresh optimizer, at its place in the schedule",
    )
    remove_loaded: bool = Field(
        False, description="delete a checkpoint once a run has resumed from it, unless it is the best"
    )


class PreviewOptions(Options):
    """Completions of a few fixed prompts while a policy trains, always with the same random numbers."""

    every: int = Field(
        100,
        ge=1,
        description="updates between previews; one also comes before the first update and after the last",
    )
    prompts: list[str | list[dict[str, Any]]] = Field([], description="texts, or lists of messages")
    from_data: bool | None = Field(
        None,
        description="take `count` prompts from eval_data, else from train_data, evenly spread; none: if there "
        "are no `prompts`",
    )
    prompt_column: str = Field("prompt", description="the column of prompts, if the data has it")
    count: int = Field(4, ge=1, description="prompts of the data")
    num_return: int = Field(1, ge=1, description="completions per prompt")
    max_new_tokens: int = Field(128, ge=1, description="tokens of a completion, the stop token included")
    temperature: float = Field(1.0, ge=0, description="0: always the most likely token")
    top_p: float = Field(
        1.0, gt=0, le=1, description="sample from the smallest set of tokens with this total probability"
    )
    top_k: int | None = Field(None, ge=1, description="number of most likely tokens to sample from")
    sampling: dict[str, Any] = Field({}, description="further options, as in `sampling` of GRPO")
    seed: int | None = Field(None, ge=0, le=2**32 - 1, description="none: the stage's")
    print: bool = Field(True, description="in the terminal")
    log: bool = Field(True, description="as tables in loggers such as wandb")


class LogWeights(Options):
    """What is logged of the trained parameters themselves."""

    pattern: Annotated[str, AfterValidator(check_regex)] = Field(
        ".*",
        description="regular expression, searched in a parameter's dotted path, as frozen_parameters",
    )
    every: int = Field(100, ge=1, description="updates between two logs")


class _NoArgumentGroup:
    """What transformers' HfArgumentParser asks a dataclass for first: a config is none, and says how it is parsed."""

    def __get__(self, instance: object, owner: type[TrainerConfig]) -> str:
        name = owner.__name__
        raise TypeError(
            f"{name} is no dataclass, which HfArgumentParser needs. `rlhf train` takes every field as a flag; a script "
            f"makes flags of its own with argparse, and a config of them: {name}(**vars(parser.parse_args())); and "
            f"{name}.from_dict reads a table"
        )


COMPARING = ("early_stopping_patience", "load_best_model_at_end", "metric_for_best_model")
"""The fields that need evaluations to be compared with one another."""

PathText = Annotated[str, BeforeValidator(path_text)]


class TrainerConfig(Options):
    """The options of every trainer. A trainer extends it with its own fields.

    `ALIASES` has other names of fields: {"group_size": "num_generations", "epsilon": ("loss.epsilon", 0.2)}.
    `UNUSED_FIELDS` has the shared fields that the trainer does not use: {"overlong": "rows are never too long"}.
    """

    ALIASES: ClassVar[Mapping[str, str | tuple[str, Any]]] = {
        "clip_grad": "max_grad_norm",
        "peft_config": "lora",
        "repo_id": "model",
        "dataset_name": "train_data",
        "dataset_split": "train_data.split",
        "use_wandb": "logger.wandb",
    }
    UNUSED_FIELDS: ClassVar[Mapping[str, str]] = {
        "disable_dropout": "models are trained without dropout, adapters with lora.dropout",
    }

    _argument_group_name: ClassVar = _NoArgumentGroup()

    LEARNING_FIELDS: ClassVar[tuple[str, ...]] = (
        "learning_rate",
        "scheduler",
        "num_train_epochs",
        "max_training_steps",
        "weight_decay",
        "max_grad_norm",
    )
    """Fields that decide what is learned: a plan prints them also where they are left at their defaults, after the
    trainer's components."""

    model: Annotated[str | dict[str, Any] | None, BeforeValidator(path_text)] = Field(
        None,
        description="a directory, a hub name (hf://OWNER/NAME@REVISION or OWNER/NAME), an earlier STAGE.OUTPUT, "
        "or a table for a fresh model",
    )
    model_revision: str | None = Field(
        None, description="branch, tag or commit of a model named OWNER/NAME; none: its main branch"
    )
    train_data: Annotated[str | dict[str, Any] | list[Any] | None, BeforeValidator(path_text)] = Field(
        None,
        description="a file, a name of the hub (hf://datasets/OWNER/NAME@REVISION/FILE or OWNER/NAME), a table "
        "{ name, path, weight, split, field, columns }, or a list of these",
    )
    eval_data: Annotated[str | dict[str, Any] | list[Any] | None, BeforeValidator(path_text)] = Field(
        None,
        description="held-out data, as train_data, or several sets by name, { easy = …, hard = … }, whose metrics are "
        "eval_easy_loss, …; none: no evaluation",
    )
    columns: dict[str, str | list[str]] | None = Field(
        None,
        description='columns that the data has under other names, { prompt = "question" }, or a list of names whose '
        "texts are joined; a table's own `columns` take precedence",
    )
    drop_columns: list[str] = Field(
        [], description="columns of the data that nothing reads, not even rewards"
    )
    learning_rate: float = Field(5e-5, ge=0, description="peak learning rate")
    learning_rate_end: float | None = Field(
        None,
        ge=0,
        description="final learning rate of a decaying schedule; none: 0",
    )
    scheduler: Annotated[
        str | Callable[..., Any],
        BeforeValidator(check_scheduler),
        PlainSerializer(function_name, return_type=str, when_used="json"),
    ] = Field(
        "constant",
        description="learning rate schedule: constant, linear, cosine, or wsd (constant, then linear decay "
        "over the last tenth); or a function, in files module:function or file.py:function, from the "
        "number of updates to an "
        "optax schedule",
    )
    warmup_steps: int = Field(0, ge=0, description="updates of linear warm-up")
    weight_decay: float = Field(
        0.01, ge=0, description="multiplied by the learning rate; not applied to norms and biases"
    )
    max_grad_norm: Annotated[float | None, AfterValidator(lambda x: x or None)] = Field(
        1.0, ge=0, description="global norm that gradients are clipped to; 0 or none: no clipping"
    )
    optimizer: Annotated[Component, OPTIMIZER] = Field(
        Component(name="adamw"), description="by name, with options"
    )
    num_train_epochs: int | float = Field(
        10, gt=0, description="passes over the training data, counted in rows; an update may span two or more"
    )
    max_training_steps: int | None = Field(
        None,
        ge=0,
        description="updates, instead of epochs; 0: no training, the model is only evaluated and saved",
    )
    total_batch_size: int = Field(
        32,
        ge=1,
        description="examples per update; of sampled completions, prompts × num_generations",
    )
    gradient_accumulation_steps: int = Field(
        1,
        ge=1,
        description="micro-batches per update; changes memory use, not the result (except for which values "
        "lora.dropout drops)",
    )
    max_sequence_length: int | None = Field(
        1024, ge=2, description="tokens per example, prompt included; none: no limit"
    )
    overlong: Literal["filter", "truncate"] = Field("filter", description="what happens to longer examples")
    truncation_mode: Literal["keep_end", "keep_start"] = Field(
        "keep_end", description="which end of a longer example is kept if it is truncated"
    )
    shuffle_train_dataset: bool = Field(True, description="shuffle again every epoch")
    shuffle_seed_train: int | None = Field(None, ge=0, description="seed of the shuffling; none: the stage's")
    eval_batch_size: int | None = Field(None, ge=1, description="examples; none: total_batch_size")
    evaluation_steps: int | None = Field(
        None, ge=1, description="updates between evaluations; none: only at the end"
    )
    eval_on_start: bool = Field(False, description="also evaluate before the first update")
    max_evaluation_steps: int | None = Field(
        None, ge=0, description="batches per evaluation; none: all; 0: no evaluation"
    )
    early_stopping_patience: int | None = Field(
        None,
        ge=1,
        description="end training after this many evaluations without improvement; none: never",
    )
    load_best_model_at_end: bool = Field(
        False, description="save the model of the best evaluation instead of the last"
    )
    metric_for_best_model: str | None = Field(
        None,
        description="metric that decides the best; none: the first of eval_accuracy, eval_reward and "
        "eval_loss that is reported",
    )
    greater_is_better: bool | None = Field(
        None, description="none: true, unless the metric is a loss, error, perplexity or kl"
    )
    save_steps: int | None = Field(None, ge=1, description="updates between checkpoints; none: by time")
    save_interval_minutes: Minutes | None = Field(
        None,
        gt=0,
        description="minutes between checkpoints, or text such as '1h'; none: 10, or with save_steps by updates alone",
    )
    save_total_limit: int | None = Field(
        None, ge=1, description="newest checkpoints to keep, plus the best; none: all"
    )
    checkpoints: CheckpointOptions = Field(
        CheckpointOptions(), description="what checkpoints contain, and how a run uses existing ones"
    )
    save_directory: PathText | None = Field(
        None, description="where a trainer run from Python writes; none: a new temporary directory"
    )
    run_name: Annotated[str | None, BeforeValidator(filled)] = Field(
        None,
        description="name of the run in trackers, and of its directory below save_directory; none: as its directory",
    )
    training_time_limit: Seconds | None = Field(
        None,
        gt=0,
        description="seconds, or text such as '2h30m' or '90 min', after which training ends and saves the model",
    )
    log_steps: int = Field(10, ge=1, description="updates between logged metrics")
    report_steps: int | None = Field(
        None,
        ge=1,
        description="updates between metrics for the loggers of `logger`; none: as log_steps. A row averages "
        "the updates since the previous row of either",
    )
    log_grad_norms: bool = Field(
        False, description="also log the norm of each layer's gradient, as grad_norm/LAYER"
    )
    log_weights: LogWeights | None = Field(
        None,
        description="log histogram, norm, share of zeros and relative update size of trained parameters to "
        "weights.jsonl, the report and loggers; none: off",
    )
    log_all_workers: bool = Field(
        False,
        description="the loggers of `logger` run in every process of a job, and each process writes its own metrics, "
        "metrics-1.jsonl of the second; false: the first logs for all",
    )
    progress_bar_type: Annotated[Literal["rich", "tqdm", "json", "none"], BeforeValidator(none_text)] = Field(
        "rich", description="what the console shows"
    )
    metrics: list[Annotated[str, AfterValidator(check_function)]] = Field(
        [],
        description="metrics of your own, of held-out pairs: functions, file.py:function or module:function, of the "
        "scores to numbers by name",
    )
    progress_metrics: list[str] | None = Field(
        None,
        description="metrics shown next to the progress bar, and first of an evaluation; none: loss, reward and "
        "accuracy",
    )
    track_memory: bool | float = Field(
        False,
        ge=0,
        description="log peak memory as memory/...; a number, EasyDeL's interval, means true",
    )
    logger: list[Annotated[Component, LOGGER]] = Field([], description="loggers besides metrics.jsonl")
    previews: PreviewOptions | None = Field(
        None,
        description="completions while training, in the terminal, samples/, the report and loggers; none: no previews",
    )
    frozen_parameters: Annotated[str | list[str], AfterValidator(check_regex)] | None = Field(
        None,
        description="regular expressions; parameters whose dotted path matches are not trained: in all layers, "
        "layers.mlp.up_proj.kernel, or with a layer's number, layers.0.mlp.up_proj.kernel",
    )
    disable_dropout: bool = Field(
        True,
        description="models are trained without dropout, adapters with lora.dropout; false is a warning",
    )
    dataset_num_proc: int | None = Field(
        None,
        ge=1,
        description="processes that tokenise, as dataloader_num_workers, the larger number of which holds; 1 or none: "
        "a thread does",
    )
    dataloader_num_workers: int | None = Field(
        0, ge=0, description="processes that tokenise large files and streams; 0 or none: a thread does"
    )
    shuffle_buffer: int = Field(
        4096, ge=1, description="rows of a stream that are shuffled together; 1: they keep their order"
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None,
        description="dtype of computation; none: float32 on CPUs, bfloat16 on accelerators. Parameters, logits and "
        "losses are float32",
    )
    attention: Annotated[Component, ATTENTION] = Field(
        Component(name="auto"),
        description="attention function: xla, blocks (skips blocks that no token sees), pallas (skips them in "
        "kernels for GPUs and TPUs), cudnn; auto: blocks on CPUs if it is faster, pallas on accelerators where xla "
        "would take too much memory, else xla",
    )
    stored_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None,
        description="dtype of the saved weights, which evaluations use too; none: as in the model's files, float32 "
        "for a fresh one. Adapters are float32",
    )
    verify: bool = Field(
        True, description="check the files of the loaded artifact against the hashes in its manifest"
    )
    remat: Annotated[Literal["auto", "none", "dots", "full"], BeforeValidator(none_text)] = Field(
        "auto",
        description="what the backward pass recomputes to save memory: 'dots' all but products with weights, 'full' "
        "whole layers, 'auto' dots where activations are large",
    )
    seed: int | None = Field(
        None,
        ge=0,
        le=2**32 - 1,
        description="seed of fresh weights, the order of rows, dropout and samples; none: the pipeline's",
    )
    lora: LoraOptions | None = Field(
        None, description="train adapters with these options; none: all parameters are trained"
    )
    offload: list[Literal["optimizer", "reference"]] = Field(
        [],
        description="keep the optimizer's state, or the copy of the model that a KL penalty or DPO compares with, in "
        "the host's memory, from which it is brought when it is used",
    )
    chat_template: PathText | None = Field(
        None,
        description="how conversations become text; none: the tokenizer's; 'plain': each turn under its role's "
        "name; or a Jinja file",
    )
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(check_kwargs)] = Field(
        {},
        description="variables for the chat template, such as { enable_thinking = false }; a row's column of "
        "this name is merged in",
    )
    template_date: Annotated[str, AfterValidator(check_day)] | None = Field(
        None,
        description="the day that a chat template with strftime_now writes, such as '2026-01-31'; none: the one that "
        "the model was trained with, else the day on which the run began",
    )
    prompt_repeated: bool | None = Field(
        None,
        description="whether completions in the data begin with the text of their prompt, which is then "
        "removed; none: they do not, and a file in which most do is refused",
    )
    system_prompt: str | None = Field(
        None,
        description="system message for conversations without one; none: none is added",
    )

    trainer_prefix: Annotated[str | None, BeforeValidator(filled)] = Field(
        None, description="put before run_name, with a hyphen between"
    )
    platform: Literal["cpu", "gpu", "tpu"] | None = Field(
        None,
        description="the devices that the stage needs; a run on others is an error. none: those that jax finds",
    )
    router_aux_loss_coef: Annotated[float, Field(ge=0)] | Literal["model"] | None = Field(
        None,
        description="weight of the loss that balances the load of experts, over the tokens of an update, which "
        "takes another forward pass; 'model': the weight of config.json; none: the same where config.json has "
        "output_router_logits = true, as transformers trains, else 0",
    )
    router_bias_rate: float = Field(
        0.0,
        ge=0,
        description="of models whose routers have a correction, such as glm4_moe: what each update adds to the "
        "correction of experts with less load than their layer's mean, and takes from that of others (Wang et al. "
        "2024); 0: it stays as loaded",
    )

    @model_validator(mode="after")
    def _has_evaluations_to_compare(self) -> Self:
        if self.compares is None and self.greater_is_better is not None:
            raise ValueError(
                f"greater_is_better has no effect without {', '.join(COMPARING[:-1])} or {COMPARING[-1]}"
            )
        if self.compares is not None and self.evaluation_steps is None:
            raise ValueError(f"{self.compares} needs evaluation_steps, the updates between evaluations")
        return self

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        for name, path in cls.aliases().items():
            field, dot, _ = path.partition(".")
            if field not in cls.model_fields or (dot and name in cls.model_fields):
                raise TypeError(
                    f"{cls.__name__}.ALIASES: '{name}' must be no field, and '{field}' must be one"
                )

    @property
    def compares(self) -> str | None:
        """The first field of `COMPARING` that is set; None if none is."""
        return next((name for name in COMPARING if getattr(self, name)), None)

    @property
    def full_name(self) -> str | None:
        """`trainer_prefix` and `run_name`, `sft-first`; None if neither is given."""
        return "-".join(filter(None, (self.trainer_prefix, self.run_name))) or None

    @property
    def workers(self) -> int:
        """The processes that tokenise large files and streams; 0: a thread of this one does."""
        processes = self.dataset_num_proc or 0
        return max(self.dataloader_num_workers or 0, processes if processes > 1 else 0)

    @property
    def use_wandb(self) -> bool:
        """Whether wandb is among the loggers; `use_wandb=True` puts it there."""
        return any(logger.name == "wandb" for logger in self.logger)

    if not TYPE_CHECKING:  # so that a type checker still reports a misspelt field

        def __getattr__(self, name: str) -> Any:
            path = type(self).aliases().get(name)
            if path is None:
                return super().__getattr__(name)
            field, dot, key = path.partition(".")
            value = getattr(self, field)
            if not dot:
                return value
            declared = type(self)._merged("ALIASES")[name]
            return getattr(value, key, *declared[1:]) if isinstance(declared, tuple) else getattr(value, key)

    @classmethod
    def _expand(
        cls, data: Mapping[str, Any], base: Self | None = None, registry: Names | None = None
    ) -> Expanded:
        return expand(cls, data, base, registry)
