"""Fix the date that chat templates write, so that it is the same on every day of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime

DATED = "strftime_now"
"""The function that templates call to write the date."""
_DATE: ContextVar[datetime | None] = ContextVar("template date", default=None)


@contextmanager
def on_date(day: str | None, template: str) -> Iterator[None]:
    """Make this template's `strftime_now` return midnight of `day`, such as "2026-01-31"; None: now.

    Templates take no functions as arguments, so this replaces, permanently, the one that transformers compiles in;
    without a day the replacement returns the same as transformers' own.
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
    """Parse a day such as "2026-01-31" as its midnight. Raises ValueError for anything else."""
    return datetime.strptime(day, "%Y-%m-%d")
