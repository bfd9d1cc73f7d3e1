"""The date that chat templates write: the same on every day of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime

DATED = "strftime_now"
"""The function by which templates write the date."""
_DATE: ContextVar[datetime | None] = ContextVar("template date", default=None)


@contextmanager
def on_date(day: str | None, template: str) -> Iterator[None]:
    """Let `strftime_now` of this template tell midnight of `day`, "2026-01-31"; None: now.

    Templates get no functions from outside, so the one that transformers compiles in is replaced, for good: without a
    day it gives what transformers' own would.
    """
    if day is None or DATED not in template:
        yield
        return
    from transformers.utils.chat_template_utils import _compile_jinja_template

    token = _DATE.set(parse_date(day))
    try:
        _compile_jinja_template(template).globals[DATED] = _strftime_now
        yield
    finally:
        _DATE.reset(token)


def _strftime_now(format: str) -> str:
    return (_DATE.get() or datetime.now()).strftime(format)


def parse_date(day: str) -> datetime:
    """Midnight of a day such as "2026-01-31". Raises ValueError for anything else."""
    return datetime.strptime(day, "%Y-%m-%d")
