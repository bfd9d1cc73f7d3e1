"""What a trainer's `build` opens models and data with; on the stage's devices it is an `OnDevices`."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import jax

from rlhf_core import data
from rlhf_core.config.warnings import batch_warnings
from rlhf_core.data import Source
from rlhf_core.errors import InputError, warn
from rlhf_core.fit.batches import ExampleUpdates, choose_row_layout
from rlhf_core.fit.evaluation import EvaluationMetrics, evaluation
from rlhf_core.fit.row_losses import forecast_row_losses, row_losses
from rlhf_core.models import Head, Model, load_model
from rlhf_core.plugins.component import load_function
from rlhf_core.training.choose_attention import choose_attention
from rlhf_core.training.compute_metrics import OwnMetrics
from rlhf_core.training.held_out import HeldOut
from rlhf_core.training.model_values import FrozenValues, ModelValues
from rlhf_core.training.rows import OpensRows
from rlhf_core.training.starting_model import default_warnings, error_context, open_model

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.data.report import Report
    from rlhf_core.fit.actions import Action
    from rlhf_core.stage import Stage
    from rlhf_core.state import TrainState
    from rlhf_core.training.rows import Describes

Evaluate: TypeAlias = Callable[["TrainState"], dict[str, float]]
"""From a state to the metrics of an evaluation."""


class Unmade(NamedTuple):
    """An artifact that an earlier stage has yet to make."""

    model: Any
    """What that stage starts from."""
    system_prompt: str | None
    """That it trains with."""


class Context(OpensRows):
    """What a trainer's `build` opens models and data with.

    A run gives it one on its devices, `OnDevices`; a check, one that opens models as shapes, `OnShapes`. A build cannot
    tell which it has: what only one of them does goes through `compute`, `check` and `on_mesh`.

    name, seed, registry: of the stage. mesh: the stage's devices, or a description of devices.
    unmade: {path: what is known of an artifact that is not made yet}, empty in a run.
    """

    def __init__(
        self, config: TrainerConfig, stage: Stage, mesh: Any, unmade: Mapping[str, Unmade] | None = None
    ) -> None:
        super().__init__(config, stage)
        self.mesh, self.unmade = mesh, dict(unmade or {})
        self.reads_metrics = False
        """Whether the build calls `own_metrics`."""
        self.frozen = FrozenValues(self)
        """Values of examples under the model that training starts from."""

    @abstractmethod
    def model(self, head: Head) -> Model:
        """Open the model that the stage starts from: an object, a directory or hub name, or a table for a fresh one.

        head: "lm" or "score". Parameters of an object are copied, since training donates them.
        """

    @abstractmethod
    def other_model(self, source: Any, **options: Any) -> Model:
        """Load a language model that is read but not trained, such as a teacher, adapters merged.

        source: a directory or hub name. options: of `load_model`.
        """

    @abstractmethod
    def compute(self, function: Callable[..., Any], *args: Any, otherwise: Any = None) -> Any:
        """Return what a function computes with arrays; a check, which has none, does not call it."""

    @abstractmethod
    def check(self, function: Callable[..., Any], *args: Any) -> None:
        """Call what finds out about a stage before it begins, in a check alone, which prints its `Forecast`, if any."""

    @abstractmethod
    def on_mesh(self, function: Callable[[], Any], *, otherwise: Any = None) -> Any:
        """Return what a function chooses for the devices; a check calls it where devices are described to it."""

    def by(self, config: TrainerConfig) -> Context:
        """Return this context for another config of the same stage, such as one of a part of its examples."""
        changed = copy.copy(self)
        changed.config = config
        return changed

    def ahead(self, start: Callable[..., object], *args: Any) -> None:
        """Call what starts to compile in the background, unless the stage is only checked."""
        self.compute(start, *args)

    def try_loss(self, measure: Callable[..., Any], *inputs: Any) -> None:
        """Raise InputError where a loss fails for inputs of these shapes, before anything is loaded or trained."""
        with error_context(self.stage, "loss"):
            self.check(jax.eval_shape, measure, *inputs)

    def described_by(self, source: str) -> Any:
        """Return what describes a model: its path, or what the stage starts from that has yet to make it."""
        return self.unmade[source].model if source in self.unmade else source

    def updates(
        self,
        model: Model,
        source: Source,
        *,
        reads_tokens: bool,
        sequence_names: Sequence[str] = (),
        group: int = 1,
    ) -> tuple[Model, ExampleUpdates]:
        """Draw updates from a source; return the model with the attention that suits it, and the source of updates.

        reads_tokens: whether the objective reads values of trained tokens. sequence_names: values of the trees that
        micro-batches carry, besides those of `with_values`. group: branches that stay in one row.
        Raises InputError naming the rows with tokens that the model has no embedding for.
        """
        trees = source.trees
        vocabulary = model.definition.vocab_size
        with error_context(self.stage, "model"):
            data.require_vocabulary(trees, source.sample.where, vocabulary)
        if len(source):
            self.warn(*batch_warnings(self.config, len(source)))

        def choose() -> tuple[Model, Any]:
            width = model.definition.hidden_size
            layout = choose_row_layout(trees, self.config, self.mesh, width, reads_tokens=reads_tokens)
            chosen = choose_attention(model, self.config, self.stage, trees, layout, group=group)
            return chosen, layout

        model, layout = self.on_mesh(choose, otherwise=(model, None))
        values = None
        if source.values:
            reached = source.rows_reached(self._examples(source)) if source.complete else None
            values = ModelValues(self, source, model, layout, group=group, which=reached)
        updates = ExampleUpdates(
            source,
            self.config,
            layout,
            vocabulary=vocabulary,
            say=lambda line: self.say(f"train_data: {line}"),
            values=values,
            sequence_names=sequence_names,
            group=group,
        )
        return model, updates

    def _examples(self, source: Source) -> int:
        """Count the examples that updates draw from a source."""
        config = self.config
        return data.count_examples(
            len(source), config.total_batch_size, config.num_train_epochs, config.max_training_steps
        )

    def held_out(self, model: Model, source: Source, **options: Any) -> HeldOut:
        """Hold the rows of `eval_data` for evaluations, packed once. options: of `HeldOut`."""
        return HeldOut(self, model, source, **options)

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

    def row_losses(self, updates: ExampleUpdates, per: Literal["token", "sequence"]) -> Action:
        """Make the action that keeps the losses of an update's rows, `loss` of the objective's values, in rows/.

        It is due at logged updates, and at all of the last epoch. per: what the objective returns `loss` for.
        """
        self.check(forecast_row_losses, self.config, updates)
        return row_losses(self.stage, self.config, updates, per)

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
        if pairs:
            self.compute(metrics.try_on, pairs)
        return metrics


def require_readers(context: Context) -> None:
    """Raise InputError for metrics of the user's own that the stage has no held-out pairs for."""
    given = [name for name in ("compute_metrics",) if name in context.stage.inputs]
    given += ["metrics"] if context.config.metrics else []
    if given and not context.reads_metrics:
        raise InputError(
            f"stage '{context.name}'.{given[0]}: nothing calls it: it takes the scores of held-out pairs, which "
            f"need {'eval_data' if given[0] == 'metrics' else 'eval_dataset'}, and a trainer of pairs"
        )


class OnDevices(Context):
    """Opens models and data on a stage's devices."""

    def __init__(self, config: TrainerConfig, stage: Stage) -> None:
        super().__init__(config, stage, stage.mesh)

    def model(self, head: Head) -> Model:
        self.warn(*default_warnings(self.config, self.stage))
        model = open_model(self.config, self.stage, head=head)
        self.tokenizer = model.tokenizer
        return model

    def other_model(self, source: Any, **options: Any) -> Model:
        return load_model(source, "lm", mesh=self.mesh, registry=self.registry, **options).merged()

    def compute(self, function: Callable[..., Any], *args: Any, otherwise: Any = None) -> Any:
        return function(*args)

    def check(self, function: Callable[..., Any], *args: Any) -> None:
        """Do nothing: it was called before the stage began."""

    def on_mesh(self, function: Callable[[], Any], *, otherwise: Any = None) -> Any:
        return function()

    def warn(self, *lines: str, first: bool = False) -> None:
        for line in lines if self.stage.is_main else ():
            warn(f"stage '{self.name}'.{line}")

    def say(self, line: str) -> None:
        self.stage.say(line)

    def trains_on(self, source: Describes) -> None:
        """Do nothing: a run shows its updates as it makes them."""

    def not_as_given(self, field: str, report: Report | str) -> None:
        self.warn(f"{field}: {report}")
