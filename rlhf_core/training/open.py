"""How a trainer gets what its config and its caller name, and how it is run from Python."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core import data
from rlhf_core.config import Component
from rlhf_core.contracts import SAMPLER, SamplerInputs
from rlhf_core.errors import InputError
from rlhf_core.models import Head, Model, check_model, fresh_model, load_model
from rlhf_core.models.lora import Lora, linear_modules, resolve
from rlhf_core.rewards.reward import Reward, WeightedReward, make_rewards
from rlhf_core.runtime.signals import stop_if_asked
from rlhf_core.stage import Stage
from rlhf_core.stage.text_settings import text_options
from rlhf_core.tokenizer import load_tokenizer, with_template_and_stop_ids

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.config.trainer import LoraOptions
    from rlhf_core.data import Pairs, Prompts, Records, Texts
    from rlhf_core.data.report import Report
    from rlhf_core.sampling import SamplingOptions
    from rlhf_core.tokenizer.text_options import ReadAt

DROPOUT = ("dropout", "dropout_prob", "pdrop")
"""How the dropout rates of a config.json end: attention_dropout, hidden_dropout_prob, resid_pdrop."""


def open_model(config: TrainerConfig, stage: Stage, *, head: Head) -> Model:
    """The model a stage starts from: given as an object, a directory or hub name, or a table for a fresh one.

    head: "lm" or "score". An object's parameters are copied, since training donates them.
    """
    stop_if_asked(f"before the model of stage '{stage.name}' was loaded")
    given = _given_model(config, stage)
    mesh, tokenizer = stage.devices(), stage.inputs.get("tokenizer")
    if isinstance(given, Model):
        shardings = given.definition.shardings(mesh)
        params = jax.tree.map(lambda x, s: jax.device_put(jnp.copy(x), s), given.params, shardings)
        model = replace(given, params=params, mesh=mesh).with_head(head, seed=stage.seed)
    elif isinstance(given, Mapping):
        table = dict(given)
        named = table.pop("tokenizer", None)
        tokenizer = tokenizer if tokenizer is not None else load_tokenizer(named)
        model = fresh_model(
            table, head, tokenizer=tokenizer, mesh=mesh, seed=stage.seed, registry=stage.registry
        )
    else:
        stage.say(f"loading {given}")
        with warnings.catch_warnings():
            # It is trained to get one.
            warnings.filterwarnings("ignore", message=".*its reward head is new")
            model = load_model(
                str(given),
                head,
                mesh=mesh,
                seed=stage.seed,
                registry=stage.registry,
                verify=config.verify,
                revision=config.model_revision,
            )
    if config.stored_dtype is not None:
        model = replace(model, stored_dtype=config.stored_dtype)
    with error_context(stage, "model"):
        model = model.computing(dtype=config.dtype, remat=config.remat)
    model = _adapted(config, stage, model, given)
    if tokenizer is not None:
        model = replace(model, tokenizer=tokenizer)
    if model.tokenizer is None:
        raise InputError(
            f"stage '{stage.name}'.model: {given!r} has no tokenizer files; put tokenizer.json and "
            "tokenizer_config.json beside its config.json"
        )
    with error_context(stage, "chat_template"):
        model = replace(
            model, tokenizer=with_template_and_stop_ids(model.tokenizer, config.chat_template, model.source)
        )
    rates = {
        n: r for n, r in model.hf_config.items() if n.endswith(DROPOUT) and isinstance(r, int | float) and r
    }
    if rates and not config.disable_dropout:
        listed = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
        _warn(
            stage, "disable_dropout", f"there is no dropout here; the model is trained without its {listed}"
        )
    return model


def _adapted(config: TrainerConfig, stage: Stage, model: Model, given: Any) -> Model:
    """The model with the adapters that `lora` asks for; without, adapters that it came with are merged."""
    own, asked, where = model.definition.lora, config.lora, f"stage '{stage.name}'.lora"
    if asked is None:
        if own is not None:
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
    hub = isinstance(given, str) and not Path(given).exists()
    if own is None:
        return model.with_lora(**asked.to_dict(), seed=stage.seed, base=given if hub else None)
    modules = linear_modules(model.definition.abstract_params())
    if own != asked_lora(asked, modules):
        raise InputError(
            f"{where}: the model comes with adapters of rank {own.rank}, alpha {own.alpha:g} on "
            f"{', '.join(own.targets)}. Ask for the same to train these on; or leave lora out, and they are merged"
        )
    return model


def asked_lora(options: LoraOptions, modules: Sequence[str]) -> Lora:
    """The adapters that the options ask for, on a model with these linear layers."""
    targets = resolve(options.targets, modules)
    return Lora(options.rank, options.alpha, options.dropout, options.use_rslora, targets)


def _given_model(config: TrainerConfig, stage: Stage) -> Any:
    """What the stage starts from, as it was given; raises InputError where it is missing or lacks a tokenizer."""
    given = stage.inputs.get("model")
    given = config.model if given is None else given
    if given is None:
        raise InputError(
            f"stage '{stage.name}'.model: missing; give a directory, a hub name, an earlier STAGE.OUTPUT or a table"
        )
    if isinstance(given, Mapping) and "tokenizer" not in given and stage.inputs.get("tokenizer") is None:
        raise InputError(
            f"stage '{stage.name}'.model.tokenizer: missing; a fresh model needs a tokenizer directory"
        )
    return given


def require_model(config: TrainerConfig, stage: Stage, *, head: Head) -> None:
    """Raise InputError where the stage's model is missing or, as far as its files tell, could not be loaded.

    A model of the hub, or one that an earlier stage still has to make, is not looked at.
    """
    given = _given_model(config, stage)
    if isinstance(given, str) and Path(given).exists():
        with error_context(stage, "model"):
            check_model(given, head, registry=stage.registry)


def try_loss(stage: Stage, measure: Callable[..., Any], *inputs: Any) -> None:
    """Raise InputError where a loss fails for inputs of these shapes: told before anything is loaded or trained."""
    with error_context(stage, "loss"):
        jax.eval_shape(measure, *inputs)


@contextmanager
def error_context(stage: Stage, field: str) -> Iterator[None]:
    """Put the stage and the field in front of what is wrong, unless it is there."""
    try:
        yield
    except InputError as error:
        at = f"stage '{stage.name}'"
        raise InputError(
            *(p if p.startswith(at) else f"{at}.{field}: {p}" for p in error.problems)
        ) from error


def open_records(config: TrainerConfig, stage: Stage, field: str, *, needed: bool = True) -> Records | None:
    """The rows of `train_data` or `eval_data`; None where they are not given and not needed."""
    given = stage.inputs.get(field.replace("_data", "_dataset"))
    spec = given if given is not None else getattr(config, field)
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
    if needed and config.dataset_num_proc not in (None, 1):
        _warn(
            stage,
            "dataset_num_proc",
            "one process tokenises, with a thread on every core; more would not be faster",
        )
    stop_if_asked(f"before the data of stage '{stage.name}' were read")
    with error_context(stage, field):
        return data.load(spec, registry=stage.registry, columns=config.columns)


def warn_dropped_rows(report: Report, stage: Stage, field: str) -> None:
    """Warn where rows of `train_data` or `eval_data` were dropped, cut, or teach nothing; once, not a process.

    A stage that is only checked has it in its plan.
    """
    if not report.all_as_given:
        _warn(stage, field, str(report))


def _warn(stage: Stage, field: str, line: str) -> None:
    """On one process, and where the stage runs: it has been checked just before."""
    if stage.is_main and stage.mesh is not None:
        warnings.warn(f"stage '{stage.name}'.{field}: {line}", stacklevel=3)


def open_texts(
    config: TrainerConfig, stage: Stage, tokenizer: Any, field: str, *, needed: bool = True
) -> Texts | None:
    """Tokenise the demonstrations of `train_data` or `eval_data`; None where the field is not given and not needed.

    Raises InputError for rows that are not demonstrations.
    """
    records = open_records(config, stage, field, needed=needed)
    if records is None:
        return None
    encoded = data.encode_texts(
        records, tokenizer, max_length=config.max_sequence_length, **_encoding(config, stage)
    )
    warn_dropped_rows(encoded.report, stage, field)
    return encoded


def open_pairs(
    config: TrainerConfig,
    stage: Stage,
    tokenizer: Any,
    field: str,
    *,
    needed: bool = True,
    records: Records | None = None,
    read_at: ReadAt = "eos",
    completions: bool = False,
    margins: bool = True,
) -> Pairs | None:
    """Tokenise the preference pairs of `train_data` or `eval_data`; None where they are not given and not needed.

    records: the field's rows where they are open already. read_at: see `read_at_of`. completions: find where they
    start, for losses over tokens. margins: whether the loss reads them; the report counts those it does not.
    Raises InputError for rows that are not pairs, and for training data without a pair that differs.
    """
    records = open_records(config, stage, field, needed=needed) if records is None else records
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
        if field == "train_data":
            encoded.report.require_differences(records.name)
    if not margins:
        encoded.report.unread += [encoded.where(i) for i in np.flatnonzero(encoded.margins).tolist()]
    warn_dropped_rows(encoded.report, stage, field)
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


def _encoding(config: TrainerConfig, stage: Stage, read_at: ReadAt = "eos") -> dict[str, Any]:
    return {
        "overlong": config.overlong,
        "truncation_mode": config.truncation_mode,
        "chat_template": text_options(config, stage, read_at=read_at),
    }


def require_vocabulary(prompts: Prompts, vocab_size: int) -> None:
    """Raise InputError naming the rows with tokens that the model has no embedding for."""
    data.require_vocabulary(prompts.ids, prompts.where, vocab_size)


def open_rewards(
    components: Sequence[WeightedReward], stage: Stage, *, weights: Sequence[float] | None = None
) -> list[Reward]:
    """The reward functions of a config's field `rewards`, and those handed over from Python after them.

    weights: of all of them, in this order, in place of their own. Raises InputError where there is no function, for
    unknown names and options, equal labels, and weights that do not match.
    """
    return make_rewards(
        components, stage.inputs.get("rewards"), weights, stage.registry, f"stage '{stage.name}'"
    )


def open_sampler(
    stage: Stage,
    model: Model,
    prompts: Prompts,
    options: SamplingOptions,
    *,
    num_generations: int,
    prompts_per_call: int,
    sampler: Component | None = None,
) -> Any:
    """A function (parameters, prompts, key) → `rlhf_core.sampling.Rollouts`, see `rlhf_core.sampling.Sampler`.

    sampler: the component that makes it; None: the core's. Raises InputError for a model without a stop token.
    """
    if not model.stop_ids and not options.stop_token_ids:
        raise InputError(
            f"stage '{stage.name}'.model: neither the tokenizer nor generation_config.json names an end-of-sequence "
            "token, so no completion could ever stop; set eos_token in tokenizer_config.json"
        )
    component = Component(name="jax") if sampler is None else sampler
    make = stage.registry.get(SAMPLER, component.name, **component.options)
    return make(
        SamplerInputs(
            definition=model.definition,
            tokenizer=model.tokenizer,
            options=options,
            mesh=stage.devices(),
            stop_ids=model.stop_ids,
            num_generations=num_generations,
            prompts_per_call=prompts_per_call,
            max_prompt_length=int(prompts.ids.lengths.max()),
        )
    )


def warm_up(sampler: Any, model: Model, prompts: Sequence[Any]) -> None:
    """Let the sampler do ahead what prompts of these lengths need once, where it can: compile."""
    if hasattr(sampler, "warm_up"):
        sampler.warm_up(model.params, [len(ids) for ids in prompts])
