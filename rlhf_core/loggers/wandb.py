"""Log to Weights & Biases without ever prompting for a login or stopping a run."""

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
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlparse

import jax
import numpy as np

from rlhf_core.config.secrets import public_table
from rlhf_core.errors import warn
from rlhf_core.loggers.jsonl import FILE, read_rows
from rlhf_core.plugins.hooks import hookimpl
from rlhf_core.runtime.files import write_atomic

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.stage import Stage

Mode = Literal["online", "offline", "disabled"]
NO_LOGIN = "wandb has no login (`wandb login`, or WANDB_API_KEY)"


@dataclass(eq=False)
class Wandb:
    """Log config and metrics under their own names, in one wandb run per stage, grouped by run directory.

    project, entity, name: as in wandb; name's default is the config's `run_name`, else "RUN_DIRECTORY/STAGE". With
    `log_all_workers` each process has its own run, whose name ends with its number.
    mode: "online", "offline" or "disabled"; by default `WANDB_MODE`, else online with a key and offline
    without a key or where wandb cannot go online, which is said. A resumed stage keeps its wandb id; a step that was
    logged before it was killed is not logged again, and one that wandb had not written yet is taken from metrics.jsonl.
    Errors in wandb become warnings.
    """

    project: str = "rlhf"
    entity: str | None = None
    name: str | None = None
    mode: Mode | None = None
    _run: Any = field(default=None, init=False, repr=False)
    _logged: int = field(default=-1, init=False, repr=False)

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
            except Exception as error:  # such as a key that is refused, or no network
                if mode != "online":
                    raise
                mode, reason = "offline", f"wandb could not go online ({' '.join(str(error).split())})"
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
        name = self.name or config.full_name or f"{stage.dir.parent.name}/{stage.name}"
        begun, run_id = _id_file(stage, worker).exists(), _run_id(stage, worker)
        written = _last_written(stage.dir, run_id)
        run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=name + worker,
            group=stage.dir.parent.name,
            job_type=stage.name,
            id=run_id,
            resume="allow" if mode == "online" else None,  # wandb sync joins offline runs of one id
            mode=mode,
            dir=str(stage.dir),
            config={**public_table(config, stage.registry), "stage": stage.name, "seed": stage.seed},
            settings=wandb.Settings(silent=True, console="off"),
        )
        if begun and stage.is_main and (stage.dir / FILE).exists():
            written = run.step - 1 if run.resumed else written
            for row in read_rows(stage.dir / FILE):
                self._logged = step = row.pop("step")
                if step > written:
                    run.log({k: v for k, v in row.items() if k != "time" and v is not None}, step=step)
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
    def rlhf_stage_end(self, error: BaseException | None) -> None:
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
    """Make a table of completions, with the update in the first column; messages are written as text."""
    import wandb

    names = [name for name in ("prompt", "completion", "reward", "length", "finished") if name in rows[0]]
    cells = [[row[name] for name in names] for row in rows]
    texts = [
        [x if not isinstance(x, list) else json.dumps(x, ensure_ascii=False) for x in row] for row in cells
    ]
    return wandb.Table(columns=["step", *names], data=[[step, *row] for row in texts])


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
    """Return the stage's wandb run id, created once and stored in its directory so that a resumed run keeps it."""
    path = _id_file(stage, worker)
    if not path.exists():
        write_atomic(path, secrets.token_hex(8) + "\n")
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

        content, at, record = file.read_bytes(), 7, b""
        while at + 7 <= len(content):
            size, kind = struct.unpack_from("<HB", content, at + 4)
            part = content[at + 7 : at + 7 + size]
            if not kind or len(part) < size:  # of a process that was killed while it wrote
                break
            record += part
            at += 7 + size
            at += -at % 2**15 if -at % 2**15 < 7 else 0  # the rest of a block is empty
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
