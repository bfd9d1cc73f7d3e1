"""What the files of a model hold, by safetensors' own reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
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


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Join the experts of each layer, which are stored one by one: gate and up [experts, 2 · size, hidden], down
    [experts, hidden, size].
    """
    out = {name: x for name, x in tensors.items() if ".experts." not in name}
    layers = {name.split(".experts.")[0] for name in tensors if ".experts.0." in name}
    if not layers:  # gpt-oss, whose files hold them so
        return tensors
    for layer in layers:
        count = 1 + max(int(name.split(".")[-3]) for name in tensors if name.startswith(f"{layer}.experts."))
        gate, up, down = (
            np.stack([tensors[f"{layer}.experts.{e}.{part}_proj.weight"] for e in range(count)])
            for part in ("gate", "up", "down")
        )
        out[f"{layer}.experts.gate_up_proj"] = np.concatenate([gate, up], 1)
        out[f"{layer}.experts.down_proj"] = down
    return out
