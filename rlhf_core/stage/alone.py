"""Trainers from Python: their arguments, and their run as a stage of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import jax

from rlhf_core import plugins, runtime
from rlhf_core.artifacts import copy_artifact
from rlhf_core.config import Refused
from rlhf_core.config.build import component_problems, components
from rlhf_core.config.options import format_value, problem_lines
from rlhf_core.config.trainer import directory_name
from rlhf_core.contracts import TRAINER, Artifact
from rlhf_core.data.records import require_rows, wrong_set_names
from rlhf_core.errors import InputError, suggest
from rlhf_core.loggers.callbacks import listen
from rlhf_core.mesh import axis_sizes, make_mesh
from rlhf_core.models import Model
from rlhf_core.runtime.agreement import broadcast_text
from rlhf_core.runtime.directory_lock import lock
from rlhf_core.stage.execute import run_stage
from rlhf_core.stage.identity import as_field, identified
from rlhf_core.stage.record import decide_together, recorded_pins
from rlhf_core.stage.spec import StageSpec
from rlhf_core.stage.text_settings import day_begun

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.config import TrainerConfig
    from rlhf_core.hub import Pins
    from rlhf_core.plugins.registry import Registry

C = TypeVar("C", bound="TrainerConfig")
SPELLINGS = {
    "arguments": "config",
    "args": "config",
    "processing_class": "tokenizer",
    "reward_funcs": "rewards",
}
INPUTS = (
    "model",
    "model_init",
    "train_dataset",
    "eval_dataset",
    "tokenizer",
    "rewards",
    "callbacks",
    "compute_metrics",
    "optimizers",
    "accept",
    "mesh",
)
"""Arguments of a trainer class besides its config."""
REFUSED_INPUTS = {
    "compute_loss_func": "a loss is a component: `loss` in the config, or a trainer's `build`",
    "data_collator": "examples are packed into rows without padding: give rows with the token ids to train on, or "
    "map the dataset beforehand",
    "formatting_func": "map the dataset beforehand: rows have `text`, `prompt` and `completion`, or `messages`",
    "optimizer_cls_and_kwargs": "write `optimizer` in the config, or give optimizers=(transformation, schedule)",
    "preprocess_logits_for_metrics": "logits are not kept: compute_metrics gets the scores of pairs",
}
"""Arguments of other libraries that have no counterpart: what to do instead."""


def trainer_arguments(cls: type[C], config: C | None, inputs: dict[str, Any]) -> tuple[C, dict[str, Any]]:
    """Check a trainer class's arguments and translate the names that other libraries use.

    Raises InputError for an unknown or repeated name, TypeError for a config of another class.
    """
    config, inputs = _in_own_names(config, inputs)
    config = cls() if config is None else config
    if not isinstance(config, cls):
        raise TypeError(f"config: expected a {cls.__name__}, got {type(config).__name__}")
    registry = plugins.installed_registry()
    # Functions of files are read once, when the run begins.
    named = [found for found in components(cls, dict(config)) if ":" not in found[3]["name"]]
    unfit = component_problems(named, registry)
    if unfit:
        raise InputError(*problem_lines(unfit, cls.__name__))
    _check_inputs(inputs)
    unknown = sorted(set(inputs) - set(INPUTS))
    if unknown:
        hints = {name: _hint(name, inputs[name], cls, registry) for name in unknown}
        raise InputError(*(f"{name}: unknown argument of a trainer{hint}" for name, hint in hints.items()))
    return config, inputs


def _in_own_names(config: C | None, inputs: Mapping[str, Any]) -> tuple[C | None, dict[str, Any]]:
    """Rename arguments that have the names of other libraries. Raises InputError for one that is given twice."""
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
    return config, inputs


def _check_inputs(inputs: dict[str, Any]) -> None:
    """Raise InputError for inputs that no trainer could use. `mesh` gets its axes' own names, `rewards` is a list."""
    if inputs.get("model_init") is not None and inputs.get("model") is not None:
        raise InputError("model_init: model is given, too; remove one")
    if inputs.get("mesh") is not None:
        problems: list[str] = []
        inputs["mesh"] = axis_sizes(inputs["mesh"], problems)
        if problems:
            raise InputError(*problems)
    pair = inputs.get("optimizers") or (None, None)
    if not isinstance(pair, tuple) or len(pair) != 2 or not (pair[0] is None or hasattr(pair[0], "update")):
        raise InputError("optimizers: expected (an optax transformation or None, a schedule or None)")
    compute = inputs.get("compute_metrics")
    if compute is not None and not callable(compute):
        raise InputError(f"compute_metrics: expected a function, got {format_value(compute)}")
    _check_datasets(inputs.get("train_dataset"), inputs.get("eval_dataset"))
    if inputs.get("rewards") is not None:
        inputs["rewards"] = _listed_rewards(inputs["rewards"])


def _listed_rewards(rewards: Any) -> Any:
    """Return rewards as a list. Raises InputError for a model in memory, which a stage could not read again."""
    if callable(rewards) or isinstance(rewards, str):
        return [rewards]
    for number, reward in enumerate(rewards):
        if isinstance(reward, Model):
            raise InputError(
                f"rewards[{number}]: a model in memory; save it, model.save(DIR), and give its directory"
            )
    return rewards


def _check_datasets(trained: Any, held_out: Any) -> None:
    """Raise InputError for data that are no rows, and for sets whose names could not begin a metric's."""
    wrong = wrong_set_names(held_out)
    if wrong:
        raise InputError(
            f"eval_dataset: {', '.join(map(repr, wrong))} cannot begin the name of a metric, eval_NAME_loss: "
            "name sets by texts without spaces at the ends and line breaks"
        )
    require_rows(trained, "train_dataset: ", streams=True)
    evaluated = list(held_out.values()) if isinstance(held_out, Mapping) else held_out
    require_rows(evaluated, "eval_dataset: ")


def _hint(name: str, value: Any, cls: type[TrainerConfig], registry: Registry) -> str:
    """Say what to write instead of an argument that trainers do not take."""
    if name in REFUSED_INPUTS:
        return f". Here {REFUSED_INPUTS[name]}"
    if name in cls.names():
        return f"; it is a field of the config: {cls.__name__}({name}=…)"
    answer = (registry.translate(cls, {name: value}, {}, None) or {}).get(name)
    if answer is None:
        return f".{suggest(name, INPUTS)} Arguments: config, {', '.join(INPUTS)}"
    if not isinstance(answer, Refused):
        return f"; it is a field of the config: {cls.__name__}({name}=…)"
    field = answer.write.partition(".")[0]
    if field in INPUTS:
        return f"; write {field}"
    if field in cls.names():
        return f"; it is a field of the config: {cls.__name__}({field}=…)"
    return f". {answer.write.removeprefix('unknown field. ')}"


@dataclass(frozen=True)
class Result:
    """The result of a trainer run from Python: its main artifact, all artifacts by output name, the newest metrics at
    the update whose model is saved."""

    artifact: Artifact
    artifacts: Mapping[str, Artifact]
    metrics: Mapping[str, float]


@runtime.session()
def run_alone(trainer: str, config: TrainerConfig, **inputs: Any) -> Result:
    """Load the plugins and run one trainer outside a pipeline.

    inputs: objects that a file cannot hold: `model`, or `model_init`, which makes it; `train_dataset`, `eval_dataset`,
        `tokenizer`, `rewards`, `compute_metrics`, `optimizers`; and `callbacks`, objects with the methods of
        `rlhf_core.plugins.hooks`, which are called like loggers; `accept`, names of changed rewards and environments to
        continue with, such as "rewards.judge"; and `mesh`, {axis: devices} as in a pipeline file.
    Writes the files of a pipeline's stage and events.jsonl to `config.save_directory`, or to a new temporary directory,
    and below it to `config.full_name`, where there is one.
    Continues an interrupted run there, and returns the result of a finished one. Raises InputError where the directory
    is in use, or holds a run with another model, data, rewards or settings.
    """
    host = plugins.load()
    component = host.registry.get(TRAINER, trainer)
    is_main = jax.process_index() == 0
    callbacks, accept = inputs.pop("callbacks", None) or (), inputs.pop("accept", None) or ()
    sizes = inputs.pop("mesh", None)
    if is_main:
        listen(host, callbacks)
    model_init = inputs.pop("model_init", None)
    if model_init is not None:
        inputs["model"] = model_init()
    mesh = _mesh(sizes, inputs.get("model"))
    made = tempfile.mkdtemp(prefix=f"rlhf-{trainer}-") if is_main and not config.save_directory else ""
    directory = Path(broadcast_text(str(config.save_directory or made)), directory_name(config.full_name))
    pins = recorded_pins([directory])
    config, inputs = _pinned(trainer, config, inputs, pins)
    day = day_begun(directory)  # before a record of this start is written
    spec = StageSpec(
        name=trainer,
        dir=directory,
        run=directory,
        trainer_name=trainer,
        trainer=component,
        seed=config.seed if config.seed is not None else 0,
        written=config,
        config=config,
        preview=config,
        objects={name: value for name, value in inputs.items() if value is not None},
        pins=pins.used,
    )
    with lock(directory, "save_directory"):
        runs = decide_together(lambda: [identified(spec, host.registry)], accept, mesh={**mesh.shape})
        ended = run_stage(runs[trainer], host, mesh, accept=accept, day=day)
    return Result(next(iter(ended.artifacts.values())), ended.artifacts, ended.metrics)


def _pinned(
    trainer: str, config: TrainerConfig, inputs: Mapping[str, Any], pins: Pins
) -> tuple[TrainerConfig, dict[str, Any]]:
    """Replace hf:// names in a config and in what is given from Python by those of commits; objects stay."""
    problems: list[str] = []
    table = config.to_dict()
    pinned = pins.pin(table, trainer, problems)
    changes = {name: value for name, value in pinned.items() if value != table[name]}
    if changes:
        config = config.replace(**changes)
    plain = {name: as_field(value) for name, value in inputs.items()}
    pinned = {name: pins.pin(value, name, problems) for name, value in plain.items()}
    if problems:
        raise InputError(*problems)
    return config, {
        name: value if pinned[name] == plain[name] else pinned[name] for name, value in inputs.items()
    }


def _mesh(sizes: Mapping[str, int] | None, model: Any) -> Mesh:
    """Make the mesh of a trainer: as given, else the one that a model was loaded onto, else all devices along data.

    Raises InputError for another one than the model's.
    """
    asked = sizes or {}
    mesh = make_mesh(**dict[str, Any](asked))
    if not isinstance(model, Model):
        return mesh
    spread = {axis: size for axis, size in model.mesh.shape.items() if axis != "data" and size > 1}
    if not spread:
        return mesh
    if sizes is None:
        return model.mesh
    if any(mesh.shape[axis] != size for axis, size in model.mesh.shape.items() if axis != "data"):
        given = ", ".join(f"{axis} = {size}" for axis, size in asked.items())
        loaded = ", ".join(f"{axis} = {size}" for axis, size in spread.items())
        raise InputError(
            f"mesh: {given or 'all devices along data'}, and the model was loaded onto a mesh with {loaded}; leave out "
            "the trainer's mesh, or load the model without one"
        )
    return mesh


ELSEWHERE = {
    "predict": "load_model(path) has logits and scores of a batch; rlhf score and rlhf generate take files",
    "push_to_hub": "rlhf export MODEL --push OWNER/NAME, with train().artifact.path as MODEL",
}
"""Methods of other libraries' trainers: what to call here."""


class PythonTrainer:
    """Train from Python: `Trainer(config, model=path_or_model, train_dataset=rows).train()`."""

    trainer: ClassVar[str]
    """The name that the trainer is registered under."""
    config_class: ClassVar[type[TrainerConfig]]

    def __init__(self, config: Any = None, **inputs: Any) -> None:
        """inputs: `model`, or `model_init`, which makes it; `train_dataset`, `eval_dataset`, also {name: set};
        `tokenizer`, `rewards` (callables, registered names, reward model directories), `callbacks`, `accept`;
        `compute_metrics`, of held-out pairs; `optimizers`, (optax transformation or None, schedule or None);
        `mesh`, {axis: devices} as in a pipeline file; `args`, `arguments`, `processing_class` and `reward_funcs` too.

        Raises InputError for an unknown argument, TypeError for a config of another class.
        """
        self.config, self.inputs = trainer_arguments(self.config_class, config, inputs)
        self._result: Result | None = None

    def train(self) -> Result:
        """Train; return the artifact and the metrics of the model that was saved."""
        self._result = run_alone(self.trainer, self.config, **self.inputs)
        return self._result

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of `eval_dataset` for the model that `train()` saved, `eval_loss` and others.

        Raises InputError before `train()`, and where nothing was evaluated.
        """
        metrics = self._trained("evaluate").metrics
        evaluation = {name: value for name, value in metrics.items() if name.startswith("eval_")}
        if not evaluation:
            raise InputError(
                f"{type(self).__name__}.evaluate: train() evaluated nothing: give the trainer an eval_dataset"
            )
        return evaluation

    def save_model(self, path: str | Path) -> None:
        """Copy the model that `train()` saved to `path`, a new or empty directory.

        Raises InputError before `train()`, and where `path` holds something else.
        """
        artifact = self._trained("save_model").artifact
        if jax.process_index() == 0:
            copy_artifact(artifact, Path(path))

    def _trained(self, method: str) -> Result:
        """Return the result of `train()`; raise InputError before it."""
        if self._result is None:
            raise InputError(f"{type(self).__name__}.{method}: nothing is trained yet: call train() first")
        return self._result

    def __getattr__(self, name: str) -> Any:
        if name in ELSEWHERE:
            raise AttributeError(f"{type(self).__name__}.{name}: {ELSEWHERE[name]}")
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")


def python_trainer(trainer: str, config: type[TrainerConfig], module: str) -> type[PythonTrainer]:
    """Make the class that runs a registered trainer from Python, called FOOTrainer for FOOConfig.

    module: `__name__` of the caller, which must hold the class under this name for it to be pickled.
    """
    name = config.__name__.removesuffix("Config") + "Trainer"
    doc = f"Train from Python: `{name}(config, model=path_or_model, train_dataset=rows).train()`."
    body = {"__module__": module, "__doc__": doc, "trainer": trainer, "config_class": config}
    return type(name, (PythonTrainer,), body)
