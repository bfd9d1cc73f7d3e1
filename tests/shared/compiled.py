"""What is compiled while a test runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

COMPILED = ("backend_compile_duration",)
LOWERED = (*COMPILED, "jaxpr_to_mlir_module_duration")


@contextmanager
def compilations(events: tuple[str, ...] = COMPILED) -> Iterator[list[str]]:
    """Note the names of the programs that are compiled in between, with LOWERED those that are lowered, too."""
    compiled: list[str] = []

    def note(event: str, seconds: float, **about: Any) -> None:
        if event.endswith(events):
            compiled.append(str(about.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
