"""Open what a stage's config and inputs name: the model, data, rewards and the sampler."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core import data
from rlhf_core.artifacts import MANIFEST
from rlhf_core.config import Component, TrainerConfig
from rlhf_core.contracts import SAMPLER, SamplerInputs
from rlhf_core.data.columns import require_conversations
from rlhf_core.errors import InputError, read_json_object
from rlhf_core.models import (
    Head,
    Model,
    check_model,
    fresh_model,
    load_model,
    local_directory,
    stored_head,
)
from rlhf_core.models.lora import Lora, linear_modules, resolve
from rlhf_core.models.model import warn_of_constraints, with_padding_apart
from rlhf_core.runtime.signals import stop_if_asked
from rlhf_core.stage import Stage
from rlhf_core.stage.text_settings import read_at_of, text_options
from rlhf_core.tokenizer import load_tokenizer, special_ids, with_template_and_stop_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlhf_core.config.trainer import LoraOptions
    from rlhf_core.data import EpisodeRows, Pairs, Prompts, Records, Texts
    from rlhf_core.data.report import Report
    from rlhf_core.sampling import SamplingOptions
    from rlhf_core.tokenizer.options import ReadAt

NO_STOP_TOKEN = "neither the tokenizer nor generation_config.json names an end-of-sequence token"
UNHEARD_OF = "\U0010fffd"
"""A text that no vocabulary has as a token."""


def open_model(config: TrainerConfig, stage: Stage, *, head: Head) -> Model:
    """Open the model that a stage starts from: an object, a directory or hub name, or a table for a fresh one.

    head: "lm" or "score". Parameters of an object are copied, since training donates them.
    """
    stop_if_asked(f"before the model of stage '{stage.name}' was loaded")
    source = _model_source(config, stage)
    warn(stage, default_warnings(config, stage))
    mesh, tokenizer = stage.devices(), stage.inputs.get("tokenizer")
    if isinstance(source, Model):
        shardings = source.definition.shardings(mesh)
        params = jax.tree.map(lambda x, s: jax.device_put(jnp.copy(x), s), source.params, shardings)
        model = replace(source, params=params, mesh=mesh).with_head(head, seed=stage.seed)
    elif isinstance(source, Mapping):
        table = dict(source)
        named = table.pop("tokenizer", None)
        with error_context(stage, "model.tokenizer"):
            tokenizer = tokenizer if tokenizer is not None else load_tokenizer(named)
        model = fresh_model(
            table, head, tokenizer=tokenizer, mesh=mesh, seed=stage.seed, registry=stage.registry
        )
    else:
        stage.say(f"loading {source}")
        with warnings.catch_warnings():
            # Training gives it one, as is said below.
            warnings.filterwarnings("ignore", message=".*its reward head is new")
            model = load_model(
                str(source),
                head,
                mesh=mesh,
                seed=stage.seed,
                registry=stage.registry,
                verify=config.verify,
                revision=config.model_revision,
            )
        if head == "score" and stored_head(local_directory(str(source), config.model_revision)) != "score":
            stage.say(f"{source} is a language model: its reward head is new")
    if config.stored_dtype is not None:
        model = model.storing(config.stored_dtype)
    with error_context(stage, "model"):
        model = model.computing(dtype=config.dtype, remat=config.remat)
    model = _with_adapters(config, stage, model, source)
    if tokenizer is not None:
        model = replace(model, tokenizer=tokenizer)
    if model.tokenizer is None:
        raise InputError(
            f"stage '{stage.name}'.model: {source!r} has no tokenizer files; put tokenizer.json and "
            "tokenizer_config.json beside its config.json"
        )
    with error_context(stage, "chat_template"):
        tokenizer = with_template_and_stop_ids(model.tokenizer, config.chat_template, model.source)
        model = with_padding_apart(replace(model, tokenizer=tokenizer))
    if getattr(config, "sampling", None) is not None:
        model = replace(model, definition=model.definition.as_policy(model.tokenizer))
    return model


def _with_adapters(config: TrainerConfig, stage: Stage, model: Model, source: Any) -> Model:
    """Add the adapters that `lora` asks for; without `lora`, merge the adapters that the model came with."""
    present, asked, where = model.definition.lora, config.lora, f"stage '{stage.name}'.lora"
    if asked is None:
        if present is not None:
            _warn(
                stage,
                "model",
                "its adapter is merged and all parameters are trained; lora = {…} trains adapters",
            )
        return model.merged()
    if model.source is None:
        raise InputError(
            f"{where}: an adapter needs a base model in a directory or on the hub; save this one first"
        )
    hub = isinstance(source, str) and not Path(source).exists()
    if present is None:
        return model.with_lora(**asked.to_dict(), seed=stage.seed, base=source if hub else None)
    modules = linear_modules(model.definition.abstract_params())
    if present != asked_lora(asked, modules):
        raise InputError(
            f"{where}: the model comes with adapters of rank {present.rank}, alpha {present.alpha:g} on "
            f"{', '.join(present.targets)}. Ask for the same to train these on; or leave lora out, and they are merged"
        )
    return model


def asked_lora(options: LoraOptions, modules: Sequence[str]) -> Lora:
    """Return the adapters that the options describe for a model with these linear layers."""
    targets = resolve(options.targets, modules)
    return Lora(options.rank, options.alpha, options.dropout, options.use_rslora, targets)


def _model_source(config: TrainerConfig, stage: Stage) -> Any:
    """Return the stage's input or config field `model`. Raises InputError where it or its tokenizer is missing."""
    source = stage.inputs.get("model")
    source = config.model if source is None else source
    if source is None:
        raise InputError(
            f"stage '{stage.name}'.model: missing; give a directory, a hub name, an earlier STAGE.OUTPUT or a table"
        )
    if isinstance(source, Mapping) and "tokenizer" not in source and stage.inputs.get("tokenizer") is None:
        raise InputError(
            f"stage '{stage.name}'.model.tokenizer: missing; a fresh model needs a tokenizer directory"
        )
    return source


def require_model(config: TrainerConfig, stage: Stage, *, head: Head) -> None:
    """Raise InputError where the stage's model is missing or its files show that it could not be loaded.

    A model of the hub, or one that an earlier stage has yet to make, is not checked.
    """
    source = _model_source(config, stage)
    if isinstance(source, str) and Path(source).exists():
        with error_context(stage, "model"):
            # Devices that need not exist are chosen before weights are fetched.
            check_model(source, head, registry=stage.registry, needs_weights=stage.planned_mesh is None)


@contextmanager
def error_context(stage: Stage, field: str) -> Iterator[None]:
    """Prefix the problems of an InputError with the stage and the field, unless they name the stage."""
    try:
        yield
    except InputError as error:
        name = f"stage '{stage.name}'"
        raise InputError(
            *(p if p.startswith(name) else f"{name}.{field}: {p}" for p in error.problems)
        ) from error


def open_records(
    config: TrainerConfig, stage: Stage, field: str, *, needed: bool = True, episodes: bool = False
) -> Records | None:
    """Open the rows of `train_data` or `eval_data`; None where they are not given and not needed.

    episodes: whether an environment makes the conversations. Raises InputError for plain texts with a `system_prompt`.
    """
    dataset = stage.inputs.get(field.replace("_data", "_dataset"))
    spec = dataset if dataset is not None else getattr(config, field)
    if spec is None:
        if needed:
            raise InputError(
                f"stage '{stage.name}'.{field}: missing; give a file, a dataset name, or a table"
            )
        if config.compares is not None:
            raise InputError(
                f"stage '{stage.name}'.{field}: missing; {config.compares} compares evaluations on it"
            )
        if config.evaluation_steps is not None:
            _warn(stage, "evaluation_steps", f"nothing is evaluated without {field}")
        return None
    stop_if_asked(f"before the data of stage '{stage.name}' were read")
    with error_context(stage, field):
        records = data.load(spec, registry=stage.registry, columns=config.columns)
    if config.system_prompt is not None and not episodes:
        with error_context(stage, field):
            require_conversations(records.sources)
    return records


def warn_dropped_rows(report: Report, stage: Stage, field: str) -> None:
    """Warn, on one process, where rows of `train_data` or `eval_data` were dropped, cut, or teach nothing; list columns
    that are not read.

    A stage that is only checked has the report in its forecast.
    """
    if not report.all_as_given:
        _warn(stage, field, str(report))
    elif report.not_read and stage.mesh is not None:
        stage.say(f"{field}: {', '.join(report.not_read)}")


def _warn_of_opened(report: Report, config: TrainerConfig, stage: Stage, tokenizer: Any, field: str) -> None:
    warn_dropped_rows(report, stage, field)
    for line in stop_warnings(config, tokenizer) if field == "train_data" else ():
        _warn(stage, "model", line)


def stop_warnings(config: TrainerConfig, tokenizer: Any) -> list[str]:
    """Describe why a model trained on given texts would not learn where they end, one line per reason."""
    ends = special_ids(tokenizer, config.chat_template).eos
    if not ends:
        return [
            f"{NO_STOP_TOKEN}: texts are trained on without an end, so a policy never learns to stop, and a reward "
            "model reads a text's last token; set eos_token in tokenizer_config.json"
        ]
    unknown = getattr(tokenizer, "unk_token_id", None)
    written = tokenizer(UNHEARD_OF, add_special_tokens=False, verbose=False)["input_ids"]
    if unknown in ends and unknown in written:
        return [
            f"the token '{tokenizer.unk_token}' both ends sequences and stands for text that the vocabulary lacks, so "
            "such text ends a reply; set another unk_token or eos_token in tokenizer_config.json"
        ]
    return []


def require_stop_token(stop_ids: Sequence[int], options: SamplingOptions, stage: Stage) -> None:
    """Raise InputError where no token could end a completion."""
    if not stop_ids and not options.stop_token_ids:
        raise InputError(
            f"stage '{stage.name}'.model: {NO_STOP_TOKEN}, so no completion could ever stop; set eos_token in "
            "tokenizer_config.json"
        )


def _warn(stage: Stage, field: str, line: str) -> None:
    warn(stage, [f"{field}: {line}"])


def warn(stage: Stage, lines: Iterable[str]) -> None:
    """Warn of lines that begin with a field, on one process, and only while the stage runs, not while it is checked."""
    if stage.is_main and stage.mesh is not None:
        for line in lines:
            warnings.warn(f"stage '{stage.name}'.{line}", stacklevel=4)


FOR_PRETRAINED = {"learning_rate": "1e-5", "num_train_epochs": "2"}
"""What to write for all weights of a pretrained model, see docs/tutorial/chat_model.md, in place of shared defaults."""


def default_warnings(config: TrainerConfig, stage: Stage) -> list[str]:
    """Describe, in at most one line, shared defaults with which all weights of a pretrained model would be trained."""
    shared = TrainerConfig.model_fields
    left = [
        name
        for name in FOR_PRETRAINED
        if name not in config.model_fields_set
        and type(config).model_fields[name].default == shared[name].default
        and (name != "num_train_epochs" or config.max_training_steps is None)
    ]
    source = stage.inputs.get("model")
    source = config.model if source is None else source
    if not left or config.lora or config.frozen_parameters or not _pretrained(source):
        return []
    defaults = " and ".join(f"{name} = {shared[name].default:g}" for name in left)
    lines = " and ".join(f"{name} = {FOR_PRETRAINED[name]}" for name in left)
    are = "the defaults are" if len(left) > 1 else "the default is"
    return [
        f"{left[0]}: {are} {defaults}, too much for all weights of a pretrained model; write {lines}, or other values"
    ]


def _pretrained(source: Any) -> bool:
    """Whether a model came from elsewhere: of one that a stage trained, the model that the stage started from."""
    if isinstance(source, Model):
        source = source.source
    while isinstance(source, str | Path):
        record = Path(source).parent.parent / "stage.json"
        if not (Path(source) / MANIFEST).is_file() or not record.is_file():
            return True
        source = (read_json_object(record).get("config") or {}).get("model")
    return False


def open_texts(
    config: TrainerConfig,
    stage: Stage,
    tokenizer: Any,
    field: str,
    *,
    needed: bool = True,
    values: Sequence[str] = (),
) -> Texts | None:
    """Tokenise the demonstrations of `train_data` or `eval_data`; None where the field is not given and not needed.

    values: columns of numbers, which an objective reads as `batch.sequence_values[column]`. Raises InputError for rows
    that are not demonstrations, and for those without these numbers.
    """
    records = open_records(config, stage, field, needed=needed)
    if records is None:
        return None
    encoded = data.encode_texts(
        records,
        tokenizer,
        max_length=config.max_sequence_length,
        values=values,
        **_encoding(config, stage),
    )
    _warn_of_opened(encoded.report, config, stage, tokenizer, field)
    return encoded


def open_pairs(
    config: TrainerConfig,
    stage: Stage,
    tokenizer: Any,
    field: str,
    *,
    needed: bool = True,
    read_at: ReadAt | None = "eos",
    completions: bool = False,
    margins: bool = True,
) -> Pairs | None:
    """Tokenise the preference pairs of `train_data` or `eval_data`; None where they are not given and not needed.

    read_at: where conversations end: "eos", after the stop token that follows the last reply; "template", where the
    chat template ends; None: as the stage's reward model was trained. completions: find where they start, for losses
    over tokens. margins: whether the loss reads them; the report counts those it does not.
    Raises InputError for rows that are not pairs, and for training data without a pair that differs.
    """
    records = open_records(config, stage, field, needed=needed)
    if records is None:
        return None
    with error_context(stage, field):
        encoded = data.encode_pairs(
            records,
            tokenizer,
            max_length=config.max_sequence_length,
            completions=completions,
            **_encoding(config, stage, read_at),
        )
    if not margins:
        encoded.report.unread += [encoded.where(i) for i in np.flatnonzero(encoded.margins).tolist()]
    _warn_of_opened(encoded.report, config, stage, tokenizer, field)
    return encoded


@overload
def open_prompts(
    config: TrainerConfig,
    stage: Stage,
    tokenizer: Any,
    field: str,
    *,
    max_prompt_length: int,
    needed: Literal[True] = True,
) -> Prompts: ...
@overload
def open_prompts(
    config: TrainerConfig, stage: Stage, tokenizer: Any, field: str, *, max_prompt_length: int, needed: bool
) -> Prompts | None: ...
def open_prompts(
    config: TrainerConfig,
    stage: Stage,
    tokenizer: Any,
    field: str,
    *,
    max_prompt_length: int,
    needed: bool = True,
) -> Prompts | None:
    """Tokenise the prompts of `train_data` or `eval_data`; None where the field is not given and not needed.

    Raises InputError for rows that are not prompts.
    """
    records = open_records(config, stage, field, needed=needed)
    if records is None:
        return None
    encoded = data.encode_prompts(
        records, tokenizer, max_prompt_length=max_prompt_length, **_encoding(config, stage)
    )
    warn_dropped_rows(encoded.report, stage, field)
    return encoded


def _encoding(config: TrainerConfig, stage: Stage, read_at: ReadAt | None = "eos") -> dict[str, Any]:
    return {
        "overlong": config.overlong,
        "truncation_mode": config.truncation_mode,
        "chat_template": text_options(config, stage, read_at=read_at_of(config, stage, read_at)),
    }


def open_episode_rows(
    config: TrainerConfig, stage: Stage, field: str, *, max_prompt_length: int, needed: bool = True
) -> EpisodeRows | None:
    """Open the rows of `train_data` or `eval_data` that an environment's episodes begin with; None where the field is
    not given and not needed.
    """
    records = open_records(config, stage, field, needed=needed, episodes=True)
    return None if records is None else data.EpisodeRows(records, max_prompt_length)


def open_sampler(
    stage: Stage,
    model: Model,
    prompts: Prompts | EpisodeRows,
    options: SamplingOptions,
    *,
    num_generations: int,
    prompts_per_call: int,
    sampler: Component | None = None,
    memory: int | None = None,
    conversation_length: int | None = None,
) -> Any:
    """Make a function (parameters, prompts, key) → `rlhf_core.sampling.Rollouts`; see `rlhf_core.sampling.Sampler`.

    sampler: the component that makes it; None: the core's sampler. conversation_length: as in `SamplerInputs`; a
    sampler without `converse` is then made to take whole conversations as prompts.
    Raises InputError for a model without a stop token.
    """
    require_stop_token(model.stop_ids, options, stage)
    warn_of_constraints(model.source)
    component = Component(name="jax") if sampler is None else sampler
    make = stage.registry.get(SAMPLER, component.name, **component.options)
    inputs = SamplerInputs(
        definition=model.definition,
        tokenizer=model.tokenizer,
        options=options,
        mesh=stage.devices(),
        stop_ids=model.stop_ids,
        num_generations=num_generations,
        prompts_per_call=prompts_per_call,
        max_prompt_length=int(prompts.sizes.max()),
        memory=memory,
        conversation_length=conversation_length,
    )
    made = make(inputs)
    if conversation_length is None or hasattr(made, "converse"):
        return made
    return make(
        replace(
            inputs,
            num_generations=1,
            prompts_per_call=prompts_per_call * num_generations,
            max_prompt_length=inputs.max_prompt_length + conversation_length,
            conversation_length=None,
        )
    )


def warm_up(sampler: Any, model: Model, sizes: NDArray[np.int64]) -> None:
    """Compile the sampler's programs for prompts of these lengths, if the sampler can compile early."""
    if hasattr(sampler, "warm_up"):
        sampler.warm_up(model.params, sizes)
