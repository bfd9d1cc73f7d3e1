"""A stage to try components in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from rlhf_core import plugins
from rlhf_core.mesh import make_mesh
from rlhf_core.stage import Stage


def a_stage(
    directory: Path,
    *,
    host: plugins.Host | None = None,
    mesh: Any = None,
    inputs: Mapping[str, Any] | None = None,
) -> Stage:
    """A stage called `kit` that writes to `directory`, by default with all installed plugins and on one device."""
    host = plugins.load() if host is None else host
    return Stage(
        name="kit",
        dir=directory,
        seed=0,
        mesh=make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh,
        is_main=True,
        registry=host.registry,
        hook=host.hook,
        inputs=dict(inputs or {}),
    )
