"""What is the same in every page is made once: its templates and its library take a third of a page's time."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from rlhf_report import pages

environments: list[jinja2.Environment] = []


def environment(**settings: Any) -> jinja2.Environment:
    """The first one that was made: all have the same settings."""
    if not environments:
        environments.append(jinja2.Environment(**settings))
    return environments[0]


packed = functools.lru_cache(8)(pages.packed)


@pytest.fixture(autouse=True, scope="module")
def _made_once() -> Iterator[None]:
    names = {name: getattr(jinja2, name) for name in ("FileSystemLoader", "StrictUndefined")}
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(pages, "jinja2", SimpleNamespace(Environment=environment, **names))
        patches.setattr(pages, "packed", packed)
        yield
