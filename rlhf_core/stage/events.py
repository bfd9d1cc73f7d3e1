"""Log a run's events to events.jsonl: stages that begin and end, and every warning in between."""

from __future__ import annotations

import json
import platform
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import RunError, Stopped
from rlhf_core.hidden import scrub_all
from rlhf_core.runtime.compiled import compiled_so_far
from rlhf_core.runtime.files import append_line, disk_reason

if TYPE_CHECKING:
    from jax.sharding import Mesh

FILE = "events.jsonl"


def log_event(directory: Path, stage: str, event: str, **about: Any) -> str | None:
    """Append one event to DIRECTORY/events.jsonl: `time` (seconds since 1970), `stage`, `event`, and `about`.

    Returns a warning if it could not be written, and never raises: that must not end the run.
    """
    # Scrub before JSON escapes the text: a secret may contain a quotation mark.
    about = scrub_all(about)
    row = {"time": round(time.time(), 3), "stage": stage, "event": event, **about}
    try:
        append_line(directory / FILE, json.dumps(row, ensure_ascii=False), durable=True)
    except RunError as error:
        return f"{directory / FILE} could not be written: {disk_reason(error)}; it lacks events of this run"
    return None


@contextmanager
def log_stage(
    directory: Path, stage: str, mesh: Mesh, *, continues: bool, shown: Sequence[str] = ()
) -> Iterator[None]:
    """Log that a stage begins, the warnings inside the block, and how the stage ends.

    shown: warnings of the stage's forecast, without its name; where the stage raises them again, they are only logged.
    Events: "begun" or "continued" (with `machine`), "warning", "done" (with `compiled`, the programs that this process
    compiled for the stage), "stopped", "failed" (with `message`).
    """
    before = compiled_so_far()
    show = warnings.showwarning
    known = {*shown, *(f"stage '{stage}'.{line}" for line in shown)}
    incomplete: list[str] = []

    def log(event: str, **about: Any) -> None:
        problem = log_event(directory, stage, event, **about)
        if problem is not None and not incomplete:
            incomplete.append(problem)
            show(UserWarning(problem), UserWarning, __file__, 0)

    def show_and_log(message: Warning | str, *rest: Any, **named: Any) -> None:
        log("warning", message=str(message))
        if str(message) not in known:
            show(message, *rest, **named)

    log("continued" if continues else "begun", machine=machine(mesh))
    warnings.showwarning = show_and_log
    try:
        yield
    except (Stopped, KeyboardInterrupt) as error:
        log("stopped", message=str(error) or "interrupted")
        raise
    except BaseException as error:
        log("failed", message=str(error) or type(error).__name__)
        raise
    else:
        log("done", compiled=compiled_so_far().since(before)._asdict())
    finally:
        if warnings.showwarning is show_and_log:
            warnings.showwarning = show


def machine(mesh: Mesh) -> dict[str, Any]:
    """Describe the machine of a stage: versions, processes, and the mesh's devices."""
    import jax

    devices = list(mesh.devices.flat)
    return {
        "python": platform.python_version(),
        "jax": version("jax"),
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
        "processes": jax.process_count(),
        "mesh": {name: int(size) for name, size in mesh.shape.items()},
    }
