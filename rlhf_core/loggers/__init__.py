"""Log a stage's progress: to the terminal, to metrics.jsonl, to Weights & Biases.

Each logger is an object with hooks as methods, exactly like a plugin's logger.
"""

from __future__ import annotations

from rlhf_core.loggers.console import Console as Console
from rlhf_core.loggers.jsonl import JsonLines as JsonLines
from rlhf_core.loggers.wandb import Wandb as Wandb
