"""Open the model that a stage starts from, with its parameters or, for a check, with their shapes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rlhf_core import hub
from rlhf_core.artifacts import MANIFEST
from rlhf_core.config import TrainerConfig
from rlhf_core.config.trainer import SCHEDULES
from rlhf_core.errors import InputError, read_json_object, warn
from rlhf_core.mesh import with_shardings
from rlhf_core.models import (
    Decoder,
    Definition,
    Head,
    Model,
    find_family,
    fresh_model,
    load_model,
    local_directory,
    peft,
    stored_head,
    weights,
)
from rlhf_core.models.loading import complete_table, define, describe, held_as
from rlhf_core.models.lora import Lora, module_paths, resolve
from rlhf_core.models.model import with_padding_apart
from rlhf_core.models.quantized import plain
from rlhf_core.runtime.machine import planned
from rlhf_core.runtime.signals import stop_if_asked
from rlhf_core.tokenizer import load_tokenizer, special_ids, with_template_and_stop_ids

if TYPE_CHECKING:
    from rlhf_core.config.trainer import LoraOptions
    from rlhf_core.models.config import Remat
    from rlhf_core.plugins.registry import Registry
    from rlhf_core.sampling import SamplingOptions
    from rlhf_core.stage import Stage
    from rlhf_core.training.context import Context

NO_STOP_TOKEN = "neither the tokenizer nor generation_config.json names an end-of-sequence token"
UNHEARD_OF = "\U0010fffd"
"""A text that no vocabulary has as a token."""
COMPUTE = "float32"
"""The dtype in which activations and caches are counted; an accelerator's bfloat16 takes half."""
FOR_PRETRAINED = {"learning_rate": "1e-5", "num_train_epochs": "2"}
"""What to write for all weights of a pretrained model, see docs/tutorial/chat_model.md, in place of shared defaults."""


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


def open_model(config: TrainerConfig, stage: Stage, *, head: Head) -> Model:
    """Open the model that a stage starts from: an object, a directory or hub name, or a table for a fresh one.

    head: "lm" or "score". Parameters of an object are copied, since training donates them.
    """
    stop_if_asked(f"before the model of stage '{stage.name}' was loaded")
    source = model_source(config, stage)
    mesh = stage.devices()
    tokenizer = stage.inputs.get("tokenizer")
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
                quantized=config.lora.base if config.lora is not None else None,
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
            "tokenizer_config.json next to its config.json"
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
        if present is not None and stage.is_main:
            warn(
                f"stage '{stage.name}'.model: merging its adapter and training all parameters; lora = {{…}} "
                "trains adapters"
            )
        return model.merged()
    if model.source is None:
        raise InputError(
            f"{where}: an adapter needs a base model in a directory or on the hub; save this one first"
        )
    if plain(model.quantized) != plain(asked.base):
        held = "float32" if model.quantized is None else f"'{model.quantized}'"
        raise InputError(
            f"{where}.base: its adapters were trained on a base in {held}: give the same, or merge them, rlhf export "
            "MODEL DIR --merge"
            if present is not None
            else f"{where}.base: the base of the model in memory is in {held}: give the model's directory"
        )
    if present is None:
        options = {name: value for name, value in asked.to_dict().items() if name != "base"}
        return model.with_lora(**options, seed=stage.seed, base=_hub_name(config, source))
    _require_same_adapters(model, present, asked, where)
    return model


def _require_same_adapters(model: Model, present: Lora, asked: LoraOptions, where: str) -> None:
    """Raise InputError where a model has other adapters than those that `lora` asks for."""
    names = module_paths(model.definition)
    if present != asked_lora(asked, names):
        adapted = [
            *(target for target in present.targets if target not in dict(present.layers)),
            *(names[target][i][0] for target, layers in present.layers for i in layers),
        ]
        raise InputError(
            f"{where}: the model already has adapters of rank {present.rank}, alpha {present.alpha:g} on "
            f"{', '.join(adapted)}. Give the same options to continue training them; without lora "
            f"they are merged"
        )


def _hub_name(config: TrainerConfig, source: Any) -> str | None:
    """Return the name of the hub that adapters give their base; None for a base on this machine."""
    if not isinstance(source, str) or Path(source).exists():
        return None
    if hub.is_hub_name(source):
        return source
    return str(hub.HubName(source, "model", config.model_revision, None))


def asked_lora(options: LoraOptions, names: Mapping[str, Sequence[tuple[str, str]]]) -> Lora:
    """Return the adapters that the options describe for a model with these linear layers, see `module_paths`."""
    chosen = resolve(options.targets, names)
    return Lora(
        options.rank, options.alpha, options.dropout, options.use_rslora, chosen.modules, chosen.layers
    )


def model_source(config: TrainerConfig, stage: Stage) -> Any:
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


def default_warnings(config: TrainerConfig, stage: Stage) -> list[str]:
    """Describe, in at most one line, shared defaults with which all weights of a pretrained model would be trained."""
    if config.max_training_steps == 0 or config.lora or config.frozen_parameters:
        return []
    left = [name for name in FOR_PRETRAINED if _is_left(config, name)]
    source = stage.inputs.get("model")
    if not left or not _pretrained(config.model if source is None else source):
        return []
    shared = TrainerConfig.model_fields
    defaults = " and ".join(f"{name} = {shared[name].default:g}" for name in left)
    lines = " and ".join(f"{name} = {FOR_PRETRAINED[name]}" for name in left)
    are = "the defaults are" if len(left) > 1 else "the default is"
    return [
        f"{left[0]}: {are} {defaults}, too much for full training of a pretrained model; write {lines}, or other values"
    ]


def _is_left(config: TrainerConfig, name: str) -> bool:
    """Tell whether a field has the default that all trainers share, and takes part."""
    default = type(config).model_fields[name].default
    if name in config.model_fields_set or default != TrainerConfig.model_fields[name].default:
        return False
    if name == "num_train_epochs":
        return config.max_training_steps is None
    return config.scheduler in SCHEDULES


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


def definition_of(
    model: Any,
    head: Head,
    tokenizer: Any | None,
    registry: Registry | None = None,
    *,
    dtype: str | None = None,
    remat: Remat = "auto",
) -> tuple[Definition, Mapping[str, Any]] | None:
    """Return the definition and config.json of `model`, a table of sizes or a local directory; None for others.

    dtype, remat: of the computation, see `Decoder`; without dtype, COMPUTE where the family has a choice.
    Raises InputError, as loading would, for what cannot be built.
    """
    if isinstance(model, Mapping):
        table = {name: value for name, value in model.items() if name != "tokenizer"}
        if tokenizer is None and "vocab_size" not in table:
            return None
        hf_config: Mapping[str, Any] = complete_table(table, tokenizer, registry)
        family = find_family(hf_config.get("model_type"), registry, where="model")
        definition = describe(family, hf_config, head, "model", dtype=dtype, remat=remat)
    elif isinstance(model, str) and (directory := _config_directory(Path(model))) is not None:
        hf_config = read_json_object(directory / "config.json")
        definition, hf_config = define(hf_config, head, directory, registry, dtype=dtype, remat=remat)
    else:
        return None
    # Planned devices have the family's default for their platform.
    if dtype is None and planned() is None and hasattr(definition, "dtype"):
        definition = definition.computing(dtype=COMPUTE)
    return definition, hf_config


def model_of_shapes(source: Any, head: Head, context: Context, *, adapters: bool = True) -> Model:
    """Make a model with shapes in place of its parameters, sharded over the mesh; nothing is read but its config.json.

    adapters: whether it gets those of `config.lora`. Its definition is None where nothing local describes the model.
    """
    config, tokenizer = context.config, context.tokenizer
    described = definition_of(
        source, head, tokenizer, context.registry, dtype=config.dtype, remat=config.remat
    )
    if described is None:
        absent: Any = None
        return Model(absent, {}, tokenizer, {}, None, absent)
    definition, hf_config = described
    if adapters and config.lora is not None:
        names = module_paths(definition)
        definition = definition.with_lora(asked_lora(config.lora, names))
        definition = definition.quantized_as(held_as(config.lora.base, hf_config))
    params = with_shardings(definition.abstract_params(), definition.shardings(context.mesh))
    directory = _config_directory(Path(source)) if isinstance(source, str) else None
    kept = None
    if isinstance(definition, Decoder) and directory is not None and any(directory.glob("*.safetensors")):
        kept = weights.kept(definition, directory)
    return Model(definition, params, tokenizer, hf_config, None, context.mesh, kept=kept)


def _config_directory(directory: Path) -> Path | None:
    """Find the directory with the config.json of a local model, or of its base model if it is an adapter."""
    if (directory / peft.CONFIG).is_file() and not (directory / "config.json").is_file():
        directory = Path(peft.base_of(directory).named)
    return directory if (directory / "config.json").is_file() else None


def stop_warnings(config: TrainerConfig, tokenizer: Any) -> list[str]:
    """Describe why a model trained on given texts would not learn where they end, one line per reason."""
    ends = special_ids(tokenizer, config.chat_template).eos
    if not ends:
        return [
            f"{NO_STOP_TOKEN}: texts are trained on without an end, so a policy never learns to stop, and a "
            "reward model scores at a text's last token; set eos_token in tokenizer_config.json"
        ]
    unknown = getattr(tokenizer, "unk_token_id", None)
    written = tokenizer(UNHEARD_OF, add_special_tokens=False, verbose=False)["input_ids"]
    if unknown in ends and unknown in written:
        return [
            f"the token '{tokenizer.unk_token}' both ends sequences and stands for unknown text, so unknown "
            "text ends a reply; set another unk_token or eos_token in tokenizer_config.json"
        ]
    return []


def require_stop_token(stop_ids: Sequence[int], options: SamplingOptions, stage: str) -> None:
    """Raise InputError where no token could end a completion."""
    if not stop_ids and not options.stop_token_ids:
        raise InputError(
            f"stage '{stage}'.model: {NO_STOP_TOKEN}, so no completion could ever stop; set eos_token in "
            "tokenizer_config.json"
        )
