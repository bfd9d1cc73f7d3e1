"""events.jsonl: what happened to a run, in words: stages begun and ended, and every warning on the way."""

from __future__ import annotations

import json
import platform
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config.secrets import scrub
from rlhf_core.errors import RunError, Stopped
from rlhf_core.runtime.files import append_line

if TYPE_CHECKING:
    from jax.sharding import Mesh

FILE = "events.jsonl"


def note(directory: Path, stage: str, event: str, **about: Any) -> None:
    """Append one event to DIRECTORY/events.jsonl: `time` (seconds since 1970), `stage`, `event`, and `about`.

    A diary must not end what it describes: where it cannot be written, nothing is.
    """
    # Before JSON escapes it: a secret may hold a quotation mark.
    about = {name: scrub(value) if isinstance(value, str) else value for name, value in about.items()}
    row = {"time": round(time.time(), 3), "stage": stage, "event": event, **about}
    with suppress(RunError):
        append_line(directory / FILE, json.dumps(row, ensure_ascii=False), durable=True)


@contextmanager
def noted(
    directory: Path, stage: str, mesh: Mesh, *, continues: bool, shown: Sequence[str] = ()
) -> Iterator[None]:
    """Note a stage's beginning, with the machine; the warnings inside; and how it ended.

    shown: warnings of the stage's forecast, without its name; where the stage raises them again, they are only noted.
    Events: "begun" or "continued" (with `machine`), "warning", "done", "stopped", "failed" (with `message`).
    """
    note(directory, stage, "continued" if continues else "begun", machine=machine(mesh))
    show, known = warnings.showwarning, {*shown, *(f"stage '{stage}'.{line}" for line in shown)}

    def show_and_note(message: Warning | str, *rest: Any, **named: Any) -> None:
        note(directory, stage, "warning", message=str(message))
        if str(message) not in known:
            show(message, *rest, **named)

    warnings.showwarning = show_and_note
    try:
        yield
    except (Stopped, KeyboardInterrupt) as error:
        note(directory, stage, "stopped", message=str(error) or "interrupted")
        raise
    except BaseException as error:
        note(directory, stage, "failed", message=str(error) or type(error).__name__)
        raise
    else:
        note(directory, stage, "done")
    finally:
        if warnings.showwarning is show_and_note:
            warnings.showwarning = show


def machine(mesh: Mesh) -> dict[str, Any]:
    """What a stage runs on: versions, and devices of the mesh by kind."""
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
