"""How a trainer gets what its config and its caller name, and how it is run from Python."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

from rlhf_core import data, optimizers, plugins, runtime
from rlhf_core.contracts import TRAINER, Artifact
from rlhf_core.errors import InputError
from rlhf_core.execution import execute
from rlhf_core.feeds import MICRO_BATCH_TOKENS
from rlhf_core.memory import definition_of, memory_line, training_bytes
from rlhf_core.mesh import make_mesh
from rlhf_core.models import Definition, Head, Model, fresh_model, load_model
from rlhf_core.stage import Stage
from rlhf_core.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from rlhf_core.data import Records
    from rlhf_core.data.report import Report
    from rlhf_core.options import TrainerConfig

C = TypeVar("C", bound="TrainerConfig")
DROPOUT = ("dropout", "dropout_prob", "pdrop")
"""How the dropout rates of a config.json end: attention_dropout, hidden_dropout_prob, resid_pdrop."""
SPELLINGS = {"arguments": "config", "args": "config", "processing_class": "tokenizer"}


def open_model(config: TrainerConfig, stage: Stage, *, head: Head) -> Model:
    """The model a stage starts from: given as an object, a directory or hub name, or a table for a fresh one.

    head: "lm" or "score". An object's parameters are copied, since training donates them.
    """
    given = stage.inputs.get("model")
    if given is None:
        given = config.model
    if given is None:
        raise InputError(
            f"stage '{stage.name}'.model: missing; give a directory, a hub name, an earlier STAGE.OUTPUT or a table"
        )
    mesh, tokenizer = stage.devices(), stage.inputs.get("tokenizer")
    if isinstance(given, Model):
        shardings = given.definition.shardings(mesh)
        params = jax.tree.map(lambda x, s: jax.device_put(jnp.copy(x), s), given.params, shardings)
        model = replace(given, params=params, mesh=mesh).with_head(head, seed=stage.seed)
    elif isinstance(given, Mapping):
        table = dict(given)
        named = table.pop("tokenizer", None)
        if tokenizer is None and named is None:
            raise InputError(
                f"stage '{stage.name}'.model.tokenizer: missing; a fresh model needs a tokenizer directory"
            )
        tokenizer = tokenizer if tokenizer is not None else load_tokenizer(named)
        model = fresh_model(
            table, head, tokenizer=tokenizer, mesh=mesh, seed=stage.seed, registry=stage.registry
        )
    else:
        model = load_model(str(given), head, mesh=mesh, seed=stage.seed, registry=stage.registry)
    if tokenizer is not None:
        model = replace(model, tokenizer=tokenizer)
    if model.tokenizer is None:
        raise InputError(
            f"stage '{stage.name}'.model: {given!r} has no tokenizer files; put tokenizer.json and "
            "tokenizer_config.json beside its config.json"
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
    return data.load(spec, registry=stage.registry)


def tell(report: Report, stage: Stage, field: str) -> None:
    """Warn where rows of `train_data` or `eval_data` were dropped, cut, or teach nothing; once, not a process.

    A stage that is only checked has it in its plan.
    """
    if not report.all_as_given:
        _warn(stage, field, str(report))


def _warn(stage: Stage, field: str, line: str) -> None:
    """On one process, and where the stage runs: it has been checked just before."""
    if stage.is_main and stage.mesh is not None:
        warnings.warn(f"stage '{stage.name}'.{field}: {line}", stacklevel=3)


@dataclass(frozen=True)
class Result:
    """What a trainer run from Python leaves: its main artifact, all of them by output name, and the last metrics."""

    artifact: Artifact
    artifacts: Mapping[str, Artifact]
    metrics: Mapping[str, float]


class _Last:
    """A logger that keeps the newest value of every metric."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    @plugins.hookimpl
    def rlhf_step_end(self, metrics: Mapping[str, float]) -> None:
        self.metrics.update(metrics)


def run_alone(trainer: str, config: TrainerConfig, **inputs: Any) -> Result:
    """Load the plugins and run one trainer outside a pipeline.

    inputs: objects that a file cannot hold: `model`, `train_dataset`, `eval_dataset`, `tokenizer`, `rewards`.
    Writes to `config.save_directory`, or to a fresh temporary directory. Continues a run that was interrupted there.
    """
    runtime.prepare()
    last = _Last()
    host = plugins.load(objects=[last])
    component = host.registry.get(TRAINER, trainer)
    directory = Path(config.save_directory or tempfile.mkdtemp(prefix=f"rlhf-{trainer}-"))
    directory.mkdir(parents=True, exist_ok=True)
    stage = Stage(
        name=trainer,
        dir=directory,
        seed=config.seed if config.seed is not None else 0,
        mesh=make_mesh(),
        is_main=jax.process_index() == 0,
        registry=host.registry,
        hook=host.hook,
        inputs={name: value for name, value in inputs.items() if value is not None},
    )
    artifacts = execute(component, config, stage, host)
    return Result(next(iter(artifacts.values())), artifacts, last.metrics)


def door_inputs(cls: type[C], config: C | None, inputs: dict[str, Any]) -> tuple[C, dict[str, Any]]:
    """A trainer class's arguments, with the other spellings that users of other libraries type.

    Raises InputError for a name nobody knows or given twice, TypeError for a config of another class.
    """
    inputs = dict(inputs)
    for spelling, name in SPELLINGS.items():
        if spelling not in inputs:
            continue
        value = inputs.pop(spelling)
        if name == "config":
            if config is not None and value is not None:
                raise InputError(f"{spelling}: the config is given twice")
            config = value if config is None else config
        elif inputs.get(name) is not None:
            raise InputError(f"{spelling}: {name} is given twice")
        else:
            inputs[name] = value
    config = cls() if config is None else config
    if not isinstance(config, cls):
        raise TypeError(f"config: expected a {cls.__name__}, got {type(config).__name__}")
    unknown = set(inputs) - {"model", "train_dataset", "eval_dataset", "tokenizer", "rewards"}
    if unknown:
        raise InputError(f"{', '.join(sorted(unknown))}: unknown argument of the trainer of {cls.__name__}")
    return config, inputs


def plan_lines(
    config: TrainerConfig, stage: Stage, *, unit: str, head: Head, encode: Callable[[str], Any] | None
) -> Sequence[str]:
    """The lines of a plan that every trainer over a fixed dataset shares: examples, updates, epochs, tokens, memory.

    encode: tokenises `train_data` or `eval_data`, None for a field that is not given, raising InputError for every row
    that does not fit; None where the model's tokenizer is not at hand, and rows are only counted.
    """
    if encode is None:
        records = open_records(config, stage, "train_data")
        assert records is not None
        count, said = len(records), f"{len(records):,} {unit} before length limits"
    else:
        encoded = encode("train_data")
        encode("eval_data")
        count, said = len(encoded), str(encoded.report)
    total = data.updates(count, config.total_batch_size, config.num_train_epochs, config.max_training_steps)
    epochs = total * config.total_batch_size / count
    tokens = f"at most {total * config.total_batch_size * config.max_sequence_length:,} tokens"
    update_tokens, longest = config.total_batch_size * config.max_sequence_length, config.max_sequence_length
    if encode is not None:
        sizes = [tree.size for tree in encoded.trees()]
        tokens = f"about {round(epochs * sum(sizes)):,} tokens, shared prompts once"
        update_tokens, longest = round(sum(sizes) / count * config.total_batch_size), max(sizes)
    memory = training_memory(config, stage, head, total, update_tokens, longest)
    return [
        said,
        f"{total:,} updates of {config.total_batch_size} {unit}, {epochs:.2f} epochs",
        tokens,
        *([] if memory is None else [memory_line(memory[2])]),
    ]


def training_memory(
    config: TrainerConfig, stage: Stage, head: Head, total: int, update_tokens: int, longest: int
) -> tuple[Definition, Mapping[str, Any], dict[str, int]] | None:
    """The stage's model by definition and config.json, and the bytes that training it takes; None where nothing local
    describes it.

    total: updates. update_tokens: of one update. longest: tokens of the longest row. Raises InputError for a model
    that could not be built.
    """
    found = definition_of(config.model, head, stage.inputs.get("tokenizer"), stage.registry)
    if found is None:
        return None
    slots = min(MICRO_BATCH_TOKENS, -(-update_tokens // config.gradient_accumulation_steps))
    tx = optimizers.make(config, stage.registry, total)[0]
    return *found, training_bytes(found[0], tx, (-(-slots // longest), longest))
