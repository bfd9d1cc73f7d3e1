"""Find the distribution that asks models behind a URL: its functions are entry points of the group `rlhf.urls`.

    [project.entry-points."rlhf.urls"]
    open_scorer = "my_package:open_scorer"

`open_scorer(url, normalize=…, base=…)` returns what `rlhf score` uses of a `Scorer`.
"""

from __future__ import annotations

from typing import Any

from rlhf_core.errors import InputError, error_line
from rlhf_core.runtime.distributions import URLS, find_points, owner


def is_url(model: str) -> bool:
    """Check whether a model is named by a URL."""
    return model.lower().startswith(("http://", "https://"))


def load_for_url(name: str) -> Any:
    """Load a function of the group. Raises InputError, with what to type, if no distribution has it."""
    points = [point for point in find_points(URLS) if point.name == name]
    if not points:
        raise InputError("MODEL is a URL, which needs a distribution: type: pip install rlhf-remote")
    if len(points) > 1:
        raise InputError(
            f"MODEL is a URL, which {' and '.join(sorted(map(owner, points)))} take; uninstall one"
        )
    try:
        return points[0].load()
    except Exception as error:
        raise InputError(
            f"{owner(points[0])} failed to load: {error_line(error)}; uninstall or update it"
        ) from error
