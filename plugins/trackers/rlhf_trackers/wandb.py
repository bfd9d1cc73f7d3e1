"""Weights & Biases, which never asks for a login and never stops a run."""

from __future__ import annotations

import json
import netrc
import os
import secrets
import shlex
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import jax
import numpy as np

from rlhf_core import Artifact, Stage, TrainerConfig, hookimpl
from rlhf_core.artifacts import write_atomic
from rlhf_core.errors import warn
from rlhf_trackers.trackers import described, logged_values, require, rows_before, run_name, table_of

Mode = Literal["online", "offline", "disabled"]
BEST = "best.json"
"""The file in a stage's directory that names the best evaluation."""
NO_LOGIN = "wandb has no login (`wandb login`, or WANDB_API_KEY)"


@dataclass(eq=False)
class Wandb:
    """Log config and metrics under their own names, in one wandb run per stage, grouped by run directory.

    project, entity, tags, notes: as in wandb.
    run_name: default the config's `run_name`, else "RUN_DIRECTORY/STAGE". With `log_all_workers` each process has its
    own run, whose name ends with its number.
    mode: "online", "offline" or "disabled"; by default `WANDB_MODE`, else online with a key and offline
    without a key or where wandb cannot go online, which is said. A resumed stage keeps its wandb id; a step that was
    logged before it was killed is not logged again, and one that wandb had not written yet is taken from metrics.jsonl.
    log_model: also upload what the stage trained, as the artifact STAGE-OUTPUT of the type "model".
    Completions, and the pairs of a reward model's evaluations, are tables. Where evaluations are compared, the summary
    has the best one: `best/METRIC`, and `best/step`. Errors in wandb become warnings.
    """

    project: str = "rlhf"
    entity: str | None = None
    run_name: str | None = None
    mode: Mode | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None
    log_model: bool = False
    _run: Any = field(default=None, init=False, repr=False)
    _logged: int = field(default=-1, init=False, repr=False)

    def __post_init__(self) -> None:
        require("wandb", "wandb")

    @hookimpl
    def rlhf_stage_start(self, stage: Stage, config: TrainerConfig) -> None:
        if not (stage.is_main or config.log_all_workers):
            return
        mode = self._mode()
        reason = "" if mode != "offline" or self._asked() == "offline" else NO_LOGIN
        try:
            import wandb

            try:
                self._run = self._begin(wandb, stage, config, mode)
            except Exception as error:
                # Such as a key that is refused, or no network.
                if mode != "online":
                    raise
                mode = "offline"
                reason = f"wandb could not go online ({' '.join(str(error).split())})"
                self._run = self._begin(wandb, stage, config, mode)
        except Exception as error:
            warn(f"wandb did not start, continuing without it: {error}")
            return
        if mode == "offline":
            files = shlex.quote(str(Path(self._run.dir).parent))
            if reason:
                warn(f"{reason}: logging offline. To upload the run: wandb sync {files}")
            else:
                stage.say(f"wandb is offline, as asked. To upload the run: wandb sync {files}")

    def _begin(self, wandb: Any, stage: Stage, config: TrainerConfig, mode: Any) -> Any:
        worker = "" if stage.is_main else f"-{jax.process_index()}"
        name = run_name(self.run_name, stage, config)
        begun = _id_file(stage, worker).exists()
        run_id = _run_id(stage, worker)
        written = _last_written(stage.dir, run_id)
        run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=name + worker,
            group=stage.dir.parent.name,
            job_type=stage.name,
            tags=list(self.tags) or None,
            notes=self.notes,
            id=run_id,
            # `wandb sync` joins offline runs of one id.
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=str(stage.dir),
            config=described(stage, config),
            settings=wandb.Settings(silent=True, console="off"),
        )
        if begun and stage.is_main:
            written = run.step - 1 if run.resumed else written
            for row in rows_before(stage):
                step = row["step"]
                self._logged = step
                if step > written:
                    run.log(logged_values(row), step=step)
        return run

    @hookimpl
    def rlhf_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is not None and step > self._logged:
            self._guarded(lambda: self._run.log(dict(metrics), step=step))

    @hookimpl
    def rlhf_samples(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._run is not None and step > self._logged:
            self._guarded(lambda: self._run.log({f"samples/{name}": _table(step, rows)}, step=step))

    @hookimpl
    def rlhf_weights(self, step: int, weights: Mapping[str, Mapping[str, Any]]) -> None:
        if self._run is not None and step > self._logged:
            self._guarded(lambda: self._run.log(_histograms(weights), step=step))

    @hookimpl
    def rlhf_artifact_saved(self, stage: Stage, artifact: Artifact) -> None:
        if self._run is not None and self.log_model and stage.is_main:
            self._guarded(lambda: self._run.log_artifact(_model(stage, artifact)))

    @hookimpl
    def rlhf_stage_end(self, stage: Stage, error: BaseException | None) -> None:
        if self._run is not None and error is None:
            self._guarded(lambda: self._run.summary.update(_best(stage)))
        if self._run is not None:
            self._guarded(lambda: self._run.finish(exit_code=0 if error is None else 1))
            self._run = None

    def _mode(self) -> Any:
        asked = self._asked()
        return "offline" if asked == "online" and not _has_key() else asked

    def _asked(self) -> str:
        return self.mode or os.environ.get("WANDB_MODE") or "online"

    def _guarded(self, call: Any) -> None:
        try:
            call()
        except Exception as error:
            warn(f"wandb failed, continuing without it: {error}")
            self._run = None


def _table(step: int, rows: Sequence[Mapping[str, Any]]) -> Any:
    import wandb

    columns, data = table_of(step, rows)
    return wandb.Table(columns=columns, data=data)


def _model(stage: Stage, artifact: Artifact) -> Any:
    """Make wandb's artifact of one that a stage saved."""
    import wandb

    model = wandb.Artifact(f"{stage.name}-{artifact.name}", "model", metadata={"kind": artifact.kind})
    for file in sorted(path for path in artifact.path.rglob("*") if path.is_file()):
        # Uploaded from where it is; another copy of the weights may not fit.
        model.add_file(str(file), name=file.relative_to(artifact.path).as_posix(), policy="immutable")
    return model


def _best(stage: Stage) -> dict[str, Any]:
    """Return the best evaluation of a stage for its summary; empty where evaluations were not compared."""
    file = stage.dir / BEST
    best = json.loads(file.read_text()) if file.is_file() else {}
    if best.get("metric") is None:
        return {}
    return {f"best/{best['metric']}": best["value"], "best/step": best["step"]}


def _histograms(weights: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Make a histogram and three numbers of each parameter."""
    import wandb

    found: dict[str, Any] = {}
    for name, each in weights.items():
        largest = each["largest"] if each["largest"] > each["least"] else each["least"] + 1.0
        edges = np.linspace(each["least"], largest, len(each["counts"]) + 1)
        found[f"weights/{name}"] = wandb.Histogram(np_histogram=(each["counts"], edges))
        found |= {f"weights/{name}/{key}": each[key] for key in ("norm", "zeros", "update_ratio")}
    return found


def _run_id(stage: Stage, worker: str) -> str:
    """Return the stage's wandb run id, created once and stored in its directory so that a resumed run keeps it.

    In a sweep it is the one that `wandb agent` gives.
    """
    path = _id_file(stage, worker)
    if not path.exists():
        given = os.environ.get("WANDB_RUN_ID") if "WANDB_SWEEP_ID" in os.environ else None
        write_atomic(path, (given or secrets.token_hex(8)) + "\n")
    return path.read_text().strip()


def _id_file(stage: Stage, worker: str) -> Path:
    return stage.dir / f"wandb_run_id{worker}.txt"


def _last_written(directory: Path, run_id: str) -> int:
    """Return the last step in the files of offline runs of one id, in a stage's directory; −1 without one.

    A file is a LevelDB log behind 7 bytes of wandb's: blocks of 2**15 bytes, of parts of records. A part is 4 bytes of
    check sum, its length in 2, its kind in 1 (1 whole, 2 first, 3 middle, 4 last), and itself.
    """
    last = -1
    for file in directory.glob(f"wandb/offline-run-*/run-{run_id}.wandb"):
        from wandb.proto.wandb_internal_pb2 import Record

        content = file.read_bytes()
        at = 7
        record = b""
        while at + 7 <= len(content):
            size, kind = struct.unpack_from("<HB", content, at + 4)
            part = content[at + 7 : at + 7 + size]
            # Of a process that was killed while it wrote.
            if not kind or len(part) < size:
                break
            record += part
            at += 7 + size
            # The rest of a block is empty.
            at += -at % 2**15 if -at % 2**15 < 7 else 0
            if kind in (1, 4):
                history = Record.FromString(record).history
                last = max(
                    [last, *(int(i.value_json) for i in history.item if "_step" in (i.key, *i.nested_key))]
                )
                record = b""
    return last


def _has_key() -> bool:
    """Return whether wandb would find a key, without asking wandb, which could prompt."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
