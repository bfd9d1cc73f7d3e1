"""What the devices of a mesh send each other in a compiled program."""

from __future__ import annotations

from typing import Any

from rlhf_topologies.hlo import count


def sent(compiled: Any) -> dict[str, float]:
    """Count bytes by kind of collective, what is in a loop as often as it runs."""
    return {kind: size for kind, (_, size) in count(compiled.as_text()).collectives.items()}
