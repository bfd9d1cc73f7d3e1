"""Loggers for Weights & Biases, TensorBoard, Trackio and MLflow: `logger = "trackio"` in any stage."""

from __future__ import annotations

from rlhf_core import LOGGER, Registry, hookimpl
from rlhf_trackers.trackers import MLflow, TensorBoard, Trackio
from rlhf_trackers.wandb import Wandb

__all__ = ["MLflow", "TensorBoard", "Trackio", "Wandb"]


@hookimpl
def rlhf_register(registry: Registry) -> None:
    registry.add(LOGGER, "tensorboard", TensorBoard)
    registry.add(LOGGER, "trackio", Trackio)
    registry.add(LOGGER, "mlflow", MLflow)
    registry.add(LOGGER, "wandb", Wandb)
