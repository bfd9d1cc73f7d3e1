"""Log a stage's progress: to the terminal, and to metrics.jsonl.

Each logger is an object with hooks as methods, exactly like a plugin's logger.
"""

from __future__ import annotations

from rlhf_core.loggers.console import Console as Console
from rlhf_core.loggers.jsonl import JsonLines as JsonLines
