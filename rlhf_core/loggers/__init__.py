"""Listeners that tell people how a stage is doing: the terminal, metrics.jsonl, Weights & Biases.

Each is an object with hooks as methods, so that a logger from a plugin is no different.
"""

from __future__ import annotations

from rlhf_core.loggers.console import Console as Console
from rlhf_core.loggers.jsonl import JsonLines as JsonLines
from rlhf_core.loggers.wandb import Wandb as Wandb
