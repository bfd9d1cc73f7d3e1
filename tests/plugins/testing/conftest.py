"""Mutants: components with one defect; a kit must find that defect and no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def failures() -> Callable[..., dict[str, str]]:
    """Call a kit: {broken property: message and what it was given}, empty if all hold."""

    def of(check: Callable[..., None], *given: Any, **options: Any) -> dict[str, str]:
        try:
            check(*given, **options)
        except AssertionError as error:
            first, *lines = str(error).splitlines()
        else:
            return {}
        assert re.search(r"breaks \d+ of the \d+ properties checked", first)
        found = re.split(r"^  (?=[a-z])", "\n".join(lines), flags=re.MULTILINE)
        return dict(each.strip().split(": ", 1) for each in found if each)

    return of
