"""TensorBoard, Trackio and MLflow, and what they share.

The main process logs metrics under their own names, without values that are not finite, which are null in
metrics.jsonl. A killed run repeats the updates since its newest checkpoint: their steps are not logged twice.
Completions and pairs are tables, with the metrics of the next logged step.
An error in a tracker is a warning, and the stage continues without it.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_core import InputError, Stage, TrainerConfig, hookimpl
from rlhf_core.artifacts import write_atomic
from rlhf_core.config.secrets import public_table
from rlhf_core.errors import warn
from rlhf_core.runs import open_run

Table = tuple[list[str], list[list[Any]]]
"""The names of columns, and rows."""
COLUMNS = (
    *("row", "prompt", "completion", "reward", "advantage", "length", "finished"),
    *("chosen", "rejected", "chosen_score", "rejected_score", "margin"),
)
"""What a table shows of completions, and of pairs."""
MARKS = re.compile(r"([\\`*_{}\[\]<>#|])")
"""Characters that Markdown would read."""


@dataclass(eq=False)
class Tracker:
    """What the three share. A tracker opens a run, and says up to which step it has one."""

    _log: Callable[[int, dict[str, float]], Any] | None = field(default=None, init=False, repr=False)
    _show: Callable[[int, str, Table], Any] | None = field(default=None, init=False, repr=False)
    _tables: dict[str, Table] = field(default_factory=dict, init=False, repr=False)
    _close: Callable[[str], Any] = field(default=lambda status: None, init=False, repr=False)
    _logged: int = field(default=-1, init=False, repr=False)

    @hookimpl
    def rlhf_stage_start(self, stage: Stage, config: TrainerConfig) -> None:
        if stage.is_main:
            self._guarded("did not start", lambda: self._open(stage, config))

    @hookimpl
    def rlhf_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        log = self._log
        if log is None or step <= self._logged:
            self._tables = {}
            return
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._guarded("failed", lambda: log(step, finite))
        self._logged = step
        self._show_tables()

    @hookimpl
    def rlhf_samples(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._log is not None and rows:
            self._tables[f"samples/{name}"] = table_of(step, rows)

    def _show_tables(self) -> None:
        """Log the tables since the last step; where they cannot be, metrics still are."""
        tables, self._tables = self._tables, {}
        if self._log is None or self._show is None:
            return
        try:
            with redirect_stdout(sys.stderr):
                for name, table in tables.items():
                    self._show(max(self._logged, 0), name, table)
        except Exception as error:
            self._show = None
            warn(f"{type(self).__name__} took no table, continuing without tables: {error}")

    @hookimpl
    def rlhf_stage_end(self, error: BaseException | None) -> None:
        self._show_tables()
        if self._log is not None:
            self._guarded("failed", lambda: self._close("FINISHED" if error is None else "FAILED"))
            self._log = None

    def _open(self, stage: Stage, config: TrainerConfig) -> None:
        raise NotImplementedError

    def _guarded(self, what: str, call: Callable[[], Any]) -> None:
        try:
            with redirect_stdout(sys.stderr):  # standard output is for the results of commands
                call()
        except Exception as error:
            self._log = None
            warn(f"{type(self).__name__} {what}, continuing without it: {error}")


@dataclass(eq=False)
class TensorBoard(Tracker):
    """Writes to STAGE_DIR/`folder`: `tensorboard --logdir RUN` shows a curve per metric for every stage.

    A stage that continues adds a file, which replaces what came after its first step (`purge_step`).
    """

    folder: str = "tensorboard"

    def __post_init__(self) -> None:
        require("tensorboard", "tensorboardX")

    def _open(self, stage: Stage, config: TrainerConfig) -> None:
        from tensorboardX import SummaryWriter

        writers: list[Any] = []

        def writer(step: int) -> Any:
            if not writers:
                # Files of one second must differ.
                suffix = f".{step:08d}"
                folder = str(stage.dir / self.folder)
                writers.append(SummaryWriter(folder, purge_step=step, filename_suffix=suffix))
            return writers[0]

        def log(step: int, metrics: dict[str, float]) -> None:
            for name, value in metrics.items():
                writer(step).add_scalar(name, value, step)
            writer(step).flush()

        self._log = log
        self._show = lambda step, name, table: writer(step).add_text(name, markdown(table), step)
        self._close = lambda status: [writer.close() for writer in writers]


@dataclass(eq=False)
class Trackio(Tracker):
    """One run per stage, grouped by run directory; a resumed stage continues its run.

    project, space_id, server_url: as in trackio; without the last two, metrics stay here, for `trackio show`.
    name: default the config's `run_name`, else "RUN_DIRECTORY/STAGE".
    """

    project: str = "rlhf"
    name: str | None = None
    space_id: str | None = None
    server_url: str | None = None

    def __post_init__(self) -> None:
        require("trackio", "trackio")

    def _open(self, stage: Stage, config: TrainerConfig) -> None:
        import trackio

        file = stage.dir / "trackio_run.txt"
        begun = file.exists()
        name = file.read_text().strip() if begun else run_name(self.name, stage, config)
        run = trackio.init(
            project=self.project,
            name=name,
            group=stage.dir.parent.name,
            space_id=self.space_id,
            server_url=self.server_url,
            config=described(stage, config),
            # A thread may not have written the run yet when it was killed.
            resume="allow" if begun else "never",
            embed=False,
        )
        write_atomic(file, f"{run.name}\n")
        self._logged = run._next_step - 1  # no public name has it, also of a run on a server
        # What a thread had not written yet when the process was killed.
        if begun:
            for row in rows_before(stage):
                step = row["step"]
                if step > self._logged:
                    run.log(logged_values(row), step=step)
                    self._logged = step
        self._log = lambda step, metrics: run.log(metrics, step=step)
        self._show = lambda step, name, table: run.log({name: trackio.Table(*table)}, step=step)
        self._close = lambda status: run.finish()


@dataclass(eq=False)
class MLflow(Tracker):
    """One run per stage in an experiment, with the config as parameters; a resumed stage continues its run.

    name: default the config's `run_name`, else "RUN_DIRECTORY/STAGE". tracking_uri: default MLFLOW_TRACKING_URI, else
    MLflow's own. The extra installs mlflow-skinny, which logs to a server; a database here
    needs `pip install mlflow`.
    """

    experiment: str = "rlhf"
    name: str | None = None
    tracking_uri: str | None = None

    def __post_init__(self) -> None:
        require("mlflow", "mlflow")

    def _open(self, stage: Stage, config: TrainerConfig) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        client = MlflowClient(self.tracking_uri)
        file = stage.dir / "mlflow_run_id.txt"
        if file.exists():
            run = client.get_run(file.read_text().strip())
            client.update_run(run.info.run_id, "RUNNING")
            histories = (client.get_metric_history(run.info.run_id, name) for name in run.data.metrics)
            self._logged = max((metric.step for history in histories for metric in history), default=-1)
        else:
            found = client.get_experiment_by_name(self.experiment)
            experiment = found.experiment_id if found else client.create_experiment(self.experiment)
            tags = {"run": stage.dir.parent.name, "stage": stage.name}
            run = client.create_run(experiment, run_name=run_name(self.name, stage, config), tags=tags)
            params = [Param(key, str(value)[:6000]) for key, value in flat(described(stage, config)).items()]
            # The most that one request may hold.
            for first in range(0, len(params), 100):
                client.log_batch(run.info.run_id, params=params[first : first + 100])
            write_atomic(file, f"{run.info.run_id}\n")

        def log(step: int, metrics: dict[str, float]) -> None:
            now = time.time_ns() // 10**6
            values = [Metric(name, value, now, step) for name, value in metrics.items()]
            client.log_batch(run.info.run_id, metrics=values)

        def show(step: int, name: str, table: Table) -> None:
            """Write the file that `log_table` would, which needs pandas."""
            content = dict(zip(("columns", "data"), table, strict=True))
            client.log_dict(run.info.run_id, content, f"{name}-{step:06d}.json")

        self._log = log
        self._show = show
        self._close = lambda status: client.set_terminated(run.info.run_id, status)


def table_of(step: int, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Make a table of completions or pairs, with the update in the first column; messages are written as text."""
    names = [name for name in COLUMNS if name in rows[0]]
    return ["step", *names], [[step, *(_cell(row.get(name)) for name in names)] for row in rows]


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value


def markdown(table: Table) -> str:
    """Write a table as Markdown, in which texts stay as they are."""
    columns, rows = table
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_plain, line))} |" for line in lines)


def _plain(value: Any) -> str:
    text = "" if value is None else str(value)
    return MARKS.sub(r"\\\1", text).replace("\n", " ⏎ ")


def require(logger: str, package: str) -> None:
    """Raise InputError if the package that a logger writes with is not installed."""
    if find_spec(package) is None:
        raise InputError(
            f"logger '{logger}' needs the package {package}, which is not installed: "
            f"pip install 'rlhf-trackers[{logger}]'"
        )


def run_name(given: str | None, stage: Stage, config: TrainerConfig) -> str:
    return given or config.full_name or f"{Path(stage.dir).parent.name}/{stage.name}"


def described(stage: Stage, config: TrainerConfig) -> dict[str, Any]:
    """Return the config without secrets, with the stage's name and seed."""
    return {**public_table(config, stage.registry), "stage": stage.name, "seed": stage.seed}


def rows_before(stage: Stage) -> list[dict[str, Any]]:
    """Return the rows that earlier sessions of a stage logged, as far as they can be read."""
    if not (stage.dir / "metrics.jsonl").is_file():
        return []
    (found,) = open_run(stage.dir, damaged=lambda error: None).stages
    return [row for row in found.metrics if type(row.get("step")) is int]


def logged_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a row of metrics.jsonl, without step and time and without values that were not finite."""
    return {name: value for name, value in row.items() if name not in ("step", "time") and value is not None}


def flat(table: Mapping[str, Any], front: str = "") -> dict[str, Any]:
    """Return {dotted path: value} of nested tables."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{front}{key}.") if isinstance(value, Mapping) else {front + key: value}
    return found
