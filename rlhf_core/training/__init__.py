"""What trainers share: open models and data, forecast a stage, evaluate, run from Python.

Names that not every trainer uses are resolved on first use: none imports what a check needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlhf_core.fit import Build as Build
from rlhf_core.stage.alone import python_trainer as python_trainer
from rlhf_core.training.context import Context as Context
from rlhf_core.training.context import Evaluate as Evaluate
from rlhf_core.training.context import OnDevices as OnDevices
from rlhf_core.training.define import define_trainer as define_trainer

if TYPE_CHECKING:
    from rlhf_core.training.held_out import HeldOut as HeldOut
    from rlhf_core.training.memory import device_bytes as device_bytes
    from rlhf_core.training.memory import saved_bytes as saved_bytes
    from rlhf_core.training.on_shapes import OnShapes as OnShapes
    from rlhf_core.training.on_shapes import forecast as forecast
    from rlhf_core.training.padded import PaddedObjective as PaddedObjective
    from rlhf_core.training.padded import named_loss as named_loss
    from rlhf_core.training.padded import padded_rows as padded_rows
    from rlhf_core.training.reference import Reference as Reference
    from rlhf_core.training.rows import Description as Description
    from rlhf_core.training.starting_model import definition_of as definition_of

_HOMES = {
    "Description": "training.rows",
    "HeldOut": "training.held_out",
    "Reference": "training.reference",
    **dict.fromkeys(("device_bytes", "saved_bytes"), "training.memory"),
    **dict.fromkeys(("OnShapes", "forecast"), "training.on_shapes"),
    **dict.fromkeys(("PaddedObjective", "named_loss", "padded_rows"), "training.padded"),
    "definition_of": "training.starting_model",
}
__all__ = [
    "Build",
    "Context",
    "Evaluate",
    "HeldOut",
    "PaddedObjective",
    "Reference",
    "define_trainer",
    "named_loss",
    "padded_rows",
    "python_trainer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlhf_core.training' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"rlhf_core.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
