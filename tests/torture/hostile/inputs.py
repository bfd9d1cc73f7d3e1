"""Put a text into the files of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = re.compile(r"max_training_steps = \d+")
Commands = list[tuple[str, ...]]
Environment = dict[str, str | None]


def toml_string(text: str) -> str:
    """Quote for TOML."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def file_name(text: str) -> str:
    return text.replace("/", "|")[:80]


def write_pipeline(work: Path, *stages: str) -> None:
    (work / "p.toml").write_text('dir = "other"\n' + "".join(stages))


def change_rows(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    rows = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def plant_text(run: Path, text: str) -> None:
    """Write a text into every string of a run's files that a page shows, and add a conversation."""
    from rlhf_core.runtime.files import seal, unseal

    def planted(value: Any) -> Any:
        if isinstance(value, str):
            return f"{value}{text}"
        if isinstance(value, list):
            return [planted(each) for each in value]
        if isinstance(value, dict):
            return {key: planted(each) for key, each in value.items()}
        return value

    call = {"function": {"name": text, "arguments": {text: text}}}
    for file in run.rglob("samples/*.jsonl"):
        change_rows(
            file,
            lambda row: {
                **planted(row),
                "rewards": {f"{k}{text}": v for k, v in row.get("rewards", {}).items()},
            },
        )
        said = [
            {"role": f"assistant{text}", "content": text, "tool_calls": [call], "call_errors": [text]},
            {"role": "assistant", "content": text, "tool_calls": [call]},
            {"role": "tool", "name": text, "content": text},
        ]
        episode = {
            "prompt": [{"role": "user", "content": text}],
            "completion": said,
            "turns": [{"tokens": 3, "reward": 1.0}],
            "reward": 1.0,
            "failure": text,
        }
        if file.parent.parent.name == "policy":
            file.write_text(file.read_text() + json.dumps(episode) + "\n")
    for file in run.rglob("metrics.jsonl"):
        change_rows(
            file, lambda row: {**row, f"reward{text}": float(row["step"]), f"x/{text}": 1.0 * row["step"]}
        )
    for file in run.rglob("events.jsonl"):
        change_rows(
            file, lambda row: {k: planted(v) if k in ("message", "machine") else v for k, v in row.items()}
        )
        event = {"time": 1.0, "stage": f"policy{text}", "event": "warning", "message": text}
        file.write_text(file.read_text() + json.dumps(event) + "\n")
    for file in run.rglob("stage.json"):
        record = unseal(file.read_bytes())
        record["config"] = {**planted(record["config"]), text: text, "model": text}
        record["versions"] = planted(record.get("versions", {}))
        file.write_text(seal(record))
    with (run / "pipeline.resolved.toml").open("a") as file:
        file.write(f"# {text}".replace("\n", " ").replace("\r", " ") + "\n")
