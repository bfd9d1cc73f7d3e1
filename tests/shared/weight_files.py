"""What the files of a model hold, by safetensors' own reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import deserialize


def contents(directory: Path) -> dict[str, tuple[Any, ...]]:
    """Read {tensor: (dtype, shape, bytes)} from all files of a model's weights."""
    return {
        name: (each["dtype"], each["shape"], bytes(each["data"]))
        for file in directory.glob("model*.safetensors")
        for name, each in deserialize(file.read_bytes())
    }


def config_of(directory: Path) -> Any:
    return json.loads((directory / "config.json").read_text())
