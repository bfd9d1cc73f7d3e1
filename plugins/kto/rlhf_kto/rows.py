"""Rows with labels, from the layouts they are published in, and the balance of the labels."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_core import InputError

if TYPE_CHECKING:
    from rlhf_core.training import Context
    from rlhf_kto.config import KTOConfig

LABELS = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}
"""{a label as text, which csv files have: 1 for a desirable completion, 0 for an undesirable one}."""


def open_rows(context: Context, field: str) -> Any:
    """Tokenise the completions of a field, with the sequence value `label`: a `Source`, or None where none are given.

    Raises InputError naming the first rows whose label is neither true nor false.
    """
    records = context.records(field)
    if records is None:
        return None
    labelled = label_rows(records, f"stage '{context.name}'.{field}")
    # The columns are renamed and dropped by now.
    opened = context.by(context.config.replace(columns=None, drop_columns=[]))
    top, _, name = field.partition(".")
    given = {top.replace("_data", "_dataset"): {name: labelled} if name else labelled}
    opened.stage = replace(context.stage, inputs={**context.stage.inputs, **given})
    return opened.texts(field, whole=True, values=("label",))


def label_rows(records: Any, where: str) -> Any:
    """Make labels numbers, and two rows of every preference, of `Records`. where: what messages begin with."""
    tables = []
    for table in records.tables:
        columns, rows, numbers = set(table.columns), list(table.rows), list(table.numbers)
        if {"chosen", "rejected"} <= columns and "completion" not in columns:
            rows = [half for row in rows for half in _halves(row)]
            numbers = [number for number in numbers for _ in range(2)]
        labels = [LABELS.get(str(row.get("label")).strip().lower()) for row in rows]
        problems = [
            f"{where}: {table.name} row {number}: 'label' is {json.dumps(row.get('label'), default=str)}; give true or "
            "false, 1 or 0"
            for number, row, label in zip(numbers, rows, labels, strict=True)
            if label is None
        ]
        if problems:
            raise InputError(*problems[:5])
        rows = [{**row, "label": label} for row, label in zip(rows, labels, strict=True)]
        tables.append(table.derived(rows, "labelled", None, numbers))
    return type(records)(tables)


def _halves(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Make rows of a preference's completions; what is learned from is always the column `chosen`."""
    yield {**row, "label": True}
    yield {**row, "chosen": row.get("rejected"), "rejected": row.get("chosen"), "label": False}


def balance_warnings(config: KTOConfig, desirable: int, undesirable: int) -> Iterator[str]:
    """Say where the labels weigh otherwise than the paper advises, from the numbers of rows that have them."""
    good, bad = config.desirable_weight * desirable, config.undesirable_weight * undesirable
    if not good or not bad:
        yield (
            f"train_data: all {desirable + undesirable} completions have the label {'true' if good else 'false'}: "
            "nothing says what sets them apart from others"
        )
    elif not 1 <= good / bad <= 4 / 3:
        factor = 7 / 6 * bad / good  # to the middle
        yield (
            f"desirable_weight: {desirable} desirable completions weigh {good / bad:.2g} times as much as "
            f"{undesirable} undesirable ones; 1 to 1.33 times is advised: set desirable_weight = "
            f"{config.desirable_weight * factor:.2g}, or undesirable_weight = {config.undesirable_weight / factor:.2g}"
        )
