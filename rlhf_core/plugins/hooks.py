"""All hooks of the host `rlhf`.

    register (once per plugin, when it loads), translate (for keys that no configuration class knows)
    audit (for the checks of `rlhf audit`)
    stage_start → (step_end | samples | weights) × n → artifact_saved × outputs → stage_end

Hooks run on the host, on every process, never under jit. An implementation may take fewer arguments than the
hook has. The order in which implementations of a hook are called is not defined, except that metrics.jsonl and the
console come before the loggers that a stage names. An exception ends the run with an error that names the plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from rlhf_core.config import Alias, NoEffect, Options, Refused, TrainerConfig
    from rlhf_core.contracts import Artifact
    from rlhf_core.plugins.registry import Registry
    from rlhf_core.runs import RunDirectory, StageDirectory
    from rlhf_core.stage import Stage

hookspec = pluggy.HookspecMarker("rlhf")
hookimpl = pluggy.HookimplMarker("rlhf")
"""Decorator of a plugin's hook implementation; without it pluggy does not see the function."""


@hookspec(historic=True)
def rlhf_register(registry: Registry) -> None:
    """Add named components with `registry.add(KIND, "name", thing)`. The order of plugins never matters.

    For files, objects, and names that are known only at run time: a package names its components in its metadata, as
    entry points of the group `rlhf.KIND`, and needs no hook for them. A text in place of the thing,
    "package.module:thing", is imported when the component is first asked for.

    Called once for every plugin, even for one that is loaded late (a file, a notebook, a test).
    """


@hookspec
def rlhf_translate(
    config_class: type[Options],
    unknown: Mapping[str, Any],
    given: Mapping[str, Any],
    base: Options | None,
) -> Mapping[str, Alias | Sequence[Alias] | NoEffect | Refused] | None:
    """Return what keys mean that a configuration class does not know, such as fields of another library's configs.

    Asked for these keys alone, so that no plugin changes what a field means; an answer may leave out any of them.
    config_class: a trainer's, or that of a table in it, where only `Refused` counts. unknown: {key: the value that was
    typed}. given: the fields that were typed along with them. base: the config that the fields will be merged into, of
    `replace`; None: the defaults. Two plugins that answer for one key are an error that names both.
    """


@hookspec(firstresult=True)
def rlhf_check_on(on: str) -> tuple[int, Callable[..., None]] | None:
    """Return the number of devices that `rlhf check --on` names, and the function that compiles a pipeline for them.

    on: such as "h100:8". The function is called as (pipeline, on, sets=…, plugins=…, dir=…, json_output=…), and prints.
    Raises InputError for an unknown name.
    """


@hookspec
def rlhf_audit(run: RunDirectory, stage: StageDirectory) -> Sequence[Any] | None:
    """Return what `rlhf audit` shows of a stage besides its own checks: a list of `rlhf_audit.Check`.

    run, stage: as `open_run` reads them; a file that cannot be read counts as far as it can be.
    None: it has nothing to say of this stage.
    """


@hookspec
def rlhf_stage_start(stage: Stage, config: TrainerConfig) -> None:
    """Called before a trainer runs in `stage` with `config`."""


@hookspec
def rlhf_step_end(stage: Stage, step: int, metrics: Mapping[str, float]) -> None:
    """Called after an update or evaluation whose metrics are logged: host floats under the names in metrics.jsonl.

    step: updates done so far; 0 for an evaluation before the first. Metrics of an evaluation are prefixed `eval_`, and
    share one call with those of an update that is logged too. A run that was killed repeats the updates since its
    newest checkpoint, and calls this again for them.
    """


@hookspec
def rlhf_samples(stage: Stage, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Called after completions of fixed prompts, or scored pairs, were written, with the state after `step` updates.

    name: "preview", of `previews`; "evaluation", of the prompts of `eval_data`, or of those that GRPO and distillation
    show. rows: as in samples/NAME-STEP.jsonl, one per completion: `prompt`, `completion`, texts or messages, `length`
    in tokens, `finished`, and where there are rewards `reward`, and `rewards` by label. A reward model's evaluation has
    one per pair: `prompt`, `chosen`, `rejected`, texts, `chosen_score`, `rejected_score`, `margin`, and `row`.
    """


@hookspec
def rlhf_weights(stage: Stage, step: int, weights: Mapping[str, Mapping[str, Any]]) -> None:
    """Called after an update whose parameters `log_weights` asks for.

    weights: {dotted path: `norm`, `zeros` (their share), `update_ratio` (norm of the update / norm before it), `least`,
    `largest`, and `counts`, of values in bins of equal width between these}.
    """


@hookspec
def rlhf_artifact_saved(stage: Stage, artifact: Artifact) -> None:
    """Called once the artifact is complete on disk, its manifest included."""


@hookspec
def rlhf_stage_end(stage: Stage, error: BaseException | None) -> None:
    """Called last, and always, when a stage has ended; the record of a successful stage is written before.

    error: the exception that ended it, raised again afterwards; None after success. If there is an error, what this
    hook raises becomes a warning.
    """
