"""Mutants: components with one defect; a kit must find that defect and no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def failures() -> Callable[..., dict[str, str]]:
    """Call a kit: {broken property: message}, empty if all hold."""

    def of(check: Callable[..., None], *given: Any, **options: Any) -> dict[str, str]:
        try:
            check(*given, **options)
        except AssertionError as error:
            first, *lines = str(error).splitlines()
        else:
            return {}
        assert re.search(r"breaks \d+ of the \d+ properties checked", first)
        return dict(line.strip().split(": ", 1) for line in lines)

    return of
