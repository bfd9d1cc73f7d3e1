"""Loggers for Weights & Biases, TensorBoard, Trackio and MLflow: `logger = "trackio"` in any stage."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_trackers.trackers import MLflow as MLflow
    from rlhf_trackers.trackers import TensorBoard as TensorBoard
    from rlhf_trackers.trackers import Trackio as Trackio
    from rlhf_trackers.wandb import Wandb as Wandb

_HOMES = {"MLflow": "trackers", "TensorBoard": "trackers", "Trackio": "trackers", "Wandb": "wandb"}
__all__ = ["MLflow", "TensorBoard", "Trackio", "Wandb"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlhf_trackers' has no attribute '{name}'")
    return getattr(importlib.import_module(f"rlhf_trackers.{_HOMES[name]}"), name)
