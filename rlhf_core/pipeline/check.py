"""Check a pipeline: every problem with it, or what it would do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table

from rlhf_core import plugins as plugin_loading
from rlhf_core.data.report import short_path
from rlhf_core.errors import InputError, collected, counted
from rlhf_core.mesh import planned_mesh
from rlhf_core.pipeline import chosen_stages, identified_stages, require_inputs, warn_of_readers
from rlhf_core.pipeline.file import read
from rlhf_core.pipeline.forecast import stage_forecasts
from rlhf_core.pipeline.plan import plan
from rlhf_core.pipeline.settings import settings_lines
from rlhf_core.runtime.terminal import echo, show
from rlhf_core.stage.decide import begins_again
from rlhf_core.stage.record import read_records
from rlhf_core.stage.reuse import find_reusable

if TYPE_CHECKING:
    from rlhf_core.contracts import Forecast
    from rlhf_core.pipeline.plan import Plan
    from rlhf_core.plugins import Host
    from rlhf_core.stage.record import StageRun
    from rlhf_core.stage.reuse import Reused
    from rlhf_core.stage.spec import StageSpec

WORDS = {"begin": "runs", "continue": "continues", "extend": "continues", "skip": "done, skipped"}
"""What happens to a stage, by the action of its decision."""


class Target(NamedTuple):
    """The devices that a check is for, which need not exist.

    devices: their number, to forecast memory for, per device; None: memory in total. on: devices to compile every
    program for, such as "h100:8". as_json: print what was found about these devices, and nothing else, as JSON.
    """

    devices: int | None = None
    on: str | None = None
    as_json: bool = False

    def resolve(self, host: Host) -> tuple[int | None, Callable[..., None] | None]:
        """Return the number of devices, and the function that compiles for them.

        Raises InputError for flags that do not go together, and without a distribution that compiles.
        """
        if self.on is None:
            if self.as_json:
                raise InputError("rlhf check: --json goes with --on, such as --on h100:8")
            return self.devices, None
        answer = host.hook.rlhf_check_on(on=self.on)
        if answer is None:
            raise InputError(
                "rlhf check: --on needs the distribution rlhf-topologies: pip install rlhf-topologies"
            )
        count, check_on = answer
        if self.devices is not None and self.devices != count:
            raise InputError(
                f"rlhf check: --on {self.on} has {counted(count, 'devices')}; leave out --devices {self.devices}"
            )
        return count, check_on


def check(
    pipeline: Path,
    *,
    sets: Sequence[str] = (),
    plugins: Sequence[Path] = (),
    dir: Path | None = None,
    reuse: Path | None = None,
    only: Sequence[str] = (),
    accept: Sequence[str] = (),
    target: Target = Target(),  # noqa: B008  (immutable)
) -> None:
    """Print what a pipeline would do, stage by stage. Raises InputError with every problem.

    reuse, only, accept: see `rlhf_core.run_pipeline`.
    """
    if target.on is not None and only:
        raise InputError("rlhf check: --on compiles every stage; leave out --only")
    host = plugin_loading.load(files=list(plugins))
    devices, check_on = target.resolve(host)
    planned = chosen_stages(plan(read(pipeline, sets=sets, dir=dir), host), only)
    problems: list[str] = []
    mesh = None
    if devices is not None:
        with collected(problems):
            mesh = planned_mesh(devices, **planned.mesh)
    with collected(problems):
        forecasts = stage_forecasts(planned, host, mesh=mesh)
    reused: Mapping[str, Reused] = {}
    notes: list[str] = []
    with collected(problems):
        runs = read_records(identified_stages(planned, host), accept)
        for each in runs.values():
            problems += each.decision.reasons
        if reuse is not None:
            reused, notes = find_reusable(reuse, [each.spec for each in runs.values()])
        if not problems:
            done = {name for name, each in runs.items() if each.decision.action == "skip"}
            require_inputs(planned, only, {*done, *reused})
    if problems:
        raise InputError(*problems)
    warn_of_readers(planned, runs)
    if not target.as_json:
        states = {name: WORDS[each.decision.action] for name, each in runs.items()}
        states |= {name: f"taken over from {short_path(str(each.source))}" for name, each in reused.items()}
        echo(f"{pipeline} → {short_path(str(planned.dir))}\n")
        show(_table(planned, host, states, forecasts))
        for line in (*notes, *_lines_of_runs(runs, reused)):
            echo(line)
    if check_on is not None:
        check_on(pipeline, target.on, sets=sets, plugins=plugins, dir=dir, json_output=target.as_json)


def _table(planned: Plan, host: Host, states: Mapping[str, str], forecasts: Mapping[str, Forecast]) -> Table:
    """Lay out what each stage of a plan would do, one row each. states: whether it runs, in words."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(1, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for stage in planned.stages:
        lines = [
            _inputs_line(stage),
            f"{states[stage.name]}, seed {stage.seed}",
            *settings_lines(stage.written, host.registry),
        ]
        table.add_row(stage.name, "\n".join([*lines, *forecasts[stage.name].printed()]))
    return table


def _lines_of_runs(runs: Mapping[str, StageRun], reused: Collection[str]) -> Iterator[str]:
    """Yield what is not as it was in stages that continue, or begin again."""
    for name, (spec, record, decision) in runs.items():
        if decision.action in ("continue", "extend"):
            yield from decision.warnings
        if decision.action == "begin" and name not in reused:
            yield from begins_again(spec, record.attempt)


def _inputs_line(stage: StageSpec) -> str:
    """Return one line with a stage's trainer, model and data."""
    data = _data(stage.written.train_data)
    return f"{stage.trainer_name} from {_model(stage)}{f' on {data}' if data else ''}"


def _model(stage: StageSpec) -> str:
    model = stage.written.model
    if isinstance(model, Mapping):
        shape = ", ".join(f"{k} {v}" for k, v in model.items() if k in ("hidden_size", "num_hidden_layers"))
        return f"a fresh {model.get('model_type', 'model')} ({shape})"
    return "" if model is None else short_path(str(model))


def _data(data: Any) -> str:
    if isinstance(data, list):
        return ", ".join(_data(part) for part in data)
    if isinstance(data, Mapping):
        return short_path(str(data.get("path", data.get("name", ""))))
    return "" if data is None else short_path(str(data))
