"""Record how long each stage ran: a plugin in one file, `rlhf run --plugin stopwatch.py`.

Writes `wall_time.json` into the stage's directory: the seconds of all its attempts, should there be several.
"""

from __future__ import annotations

import json
import time

from rlhf_core import Stage, hookimpl

_seconds: dict[str, float] = {}
_read_at: dict[str, float] = {}


@hookimpl
def rlhf_stage_start(stage: Stage) -> None:
    file = stage.dir / "wall_time.json"
    _seconds[stage.name] = json.loads(file.read_text())["seconds"] if file.exists() else 0.0
    _read_at[stage.name] = time.monotonic()


@hookimpl
def rlhf_step_end(stage: Stage) -> None:
    _write(stage)


@hookimpl
def rlhf_stage_end(stage: Stage) -> None:
    _write(stage)


def _write(stage: Stage) -> None:
    from rlhf_core.artifacts import write_atomic

    now = time.monotonic()
    _seconds[stage.name] += now - _read_at[stage.name]
    _read_at[stage.name] = now
    if stage.is_main:
        write_atomic(stage.dir / "wall_time.json", json.dumps({"seconds": round(_seconds[stage.name], 2)}))
